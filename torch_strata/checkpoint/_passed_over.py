"""Checkpoints of a run that are known to be damaged: a load that passes them over says so. Imports no torch."""

import logging
from collections.abc import Sequence

from torch_strata import _native
from torch_strata.checkpoint.run import CheckpointMetadata, CheckpointType, ListedCheckpoint
from torch_strata.errors import ManifestError

__all__ = ["PassedOver", "whole_in"]

_logger = logging.getLogger(__name__)


def whole_in(listed: Sequence[ListedCheckpoint]) -> list[CheckpointMetadata]:
    """Those of `listed`, in its order, from which training can resume."""
    usable = [one.metadata for one in listed if one.metadata and not one.is_quarantined and not one.is_abandoned]
    return [found for found in usable if found.checkpoint_type.is_whole]


class PassedOver:
    """What one manager has told of damaged checkpoints: of each once."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._told: set[str] = set()

    def note(self, path: str) -> None:
        """Of the checkpoint at `path` somebody else has told."""
        self._told.add(path.rpartition("/")[2])

    def tell(self, listed: Sequence[ListedCheckpoint]) -> None:
        """Say which damaged checkpoints are newer than the newest to resume from."""
        newest = max((found.step for found in whole_in(listed)), default=-1)
        for one in listed:
            step = _whole_step(one.folder)
            if step is None or step <= newest or one.folder in self._told:
                continue
            where = f"{self._root}/{one.folder}"
            if one.state == "unreadable":
                _logger.error("%s is passed over, for its manifest cannot be read: %s", where, one.detail)
            elif one.is_quarantined and not one.is_abandoned:
                _logger.warning("%s was found damaged before and is passed over", where)
            else:
                continue
            self._told.add(one.folder)

    def error(self, which: int | str, listed: Sequence[ListedCheckpoint]) -> ManifestError | None:
        """If what was asked for is there and damaged: whoever finds nothing would begin the training anew."""
        if isinstance(which, int):
            wanted = {_native.run_folder(which, kind.value) for kind in CheckpointType}
        else:
            wanted = {one.folder for one in listed if _whole_step(one.folder) is not None}
        faults = [one.detail for one in listed if one.state == "unreadable" and one.folder in wanted]
        return ManifestError("; ".join(faults)) if faults else None


def _whole_step(folder: str) -> int | None:
    """The step of which `folder` is to hold a whole checkpoint."""
    digits = folder.removeprefix("step-")
    if not (digits.isascii() and digits.isdigit()) or int(digits) >= 1 << 64:
        return None
    return int(digits) if folder == _native.run_folder(int(digits), CheckpointType.FULL.value) else None
