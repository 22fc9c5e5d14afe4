"""The part of `torch_strata._native` that is about runs. For type checkers alone: there is no such module to import."""

from typing import Any, final

from torch_strata._native import Store, Transfer
from torch_strata._types import RunInfo

__all__ = ["Parent", "Run", "run_folder"]

@final
class Parent:
    """A committed checkpoint of the run, to whose objects an incremental save may refer."""

    @staticmethod
    def open(store: Store, checkpoint_id: str, *, encode: bool = False) -> Parent:
        """`store`: the checkpoint's own. `checkpoint_id`: its folder's name below the run's root.

        `encode`: whether changed tensors are stored encoded where that pays.

        Raises:
            CheckpointNotFoundError: If nothing is committed there.
            CheckpointError: If stock saved it: what it holds has no digests.
        """
    @staticmethod
    def none() -> Parent:
        """One that holds nothing, for a save that later ones will be encoded against."""
    @property
    def save_id(self) -> str: ...
    @property
    def encoded_in_a_row(self) -> int:
        """How many checkpoints in a row, this one the last, have stored tensors encoded."""

# id, step, epoch, path, size_bytes, type, model_hash, metadata, metrics, created_at in seconds since 1970.
_Metadata = tuple[str, int, int, str, int, str, str | None, dict[str, str], dict[str, float], int]
# folder, state, detail, what is committed, is_quarantined, is_abandoned, is_verified, pins, folders referred to.
_Listed = tuple[str, str, str, _Metadata | None, bool, bool, bool, list[str], list[str]]

@final
class Run:
    """The checkpoints of one training below a root. Opens nothing before its first use in a process."""

    def __new__(cls, root: Store, *, owner: str, policy: tuple[Any, ...], orphan_age_s: float) -> Run:
        """`owner`: a nonce of this process. `policy`: as `Retention.as_native` gives it.

        Raises:
            ValueError: If the policy is unknown or a count in it is 0.
        """
    def generation(self) -> int:
        """This process's right to commit and to remove; claimed, or what `hold` was given, when first asked for."""
    def hold(self, generation: int) -> None:
        """Take a generation that is claimed already; of several calls the first counts."""
    def catalog(self) -> list[_Listed]:
        """Every folder of the run. A root that is not there is empty; a listing that fails is an error.

        Raises:
            StorageError: If the place cannot be read.
        """
    def all(self) -> list[_Metadata]:
        """The committed checkpoints, ascending by step, without those that were found damaged or abandoned."""
    def found(self, folder: str) -> _Metadata:
        """What is committed in `folder`.

        Raises:
            CheckpointNotFoundError: If nothing is.
            CorruptionError: If its manifest is lost, or cannot be read.
        """
    def check_new(self, step: int, checkpoint_type: str, *, overwrite: bool) -> tuple[str | None, str | None]:
        """Whether one of `step` may be saved now; the folder to which it may refer, if any, and what it replaces.

        The first is the newest whole checkpoint, unless it has something in common with one that was found damaged. The
        second says what is wrong with the checkpoint of that step, if one is there that is known to be damaged.

        Raises:
            CheckpointExistsError: If there is one, ours or somebody else's, that may not be replaced.
            CheckpointError: If somebody holds what would be replaced; if the run has gone further.
        """
    def save_bytes(
        self, data: bytes, run_info: RunInfo, *, save_id: str, overwrite: bool, transfer: Transfer
    ) -> _Metadata:
        """Save bytes as the checkpoint of a step; durable and committed when it returns.

        Raises:
            CheckpointExistsError, CheckpointError: As `check_new`.
            StaleGenerationError: If a newer run has claimed the root.
            StorageError: If the store failed.
        """
    def load_bytes(self, step: int, checkpoint_type: str) -> bytes:
        """What `save_bytes` saved, every block verified.

        Raises:
            CheckpointNotFoundError: If no bytes are saved there.
            CorruptionError: If they are damaged.
        """
    def plan(self) -> tuple[list[tuple[str, bool, str]], list[str]]:
        """What `retain` would do: `(folder, keeps, because)` ascending by step, and notes."""
    def retain(self) -> tuple[list[str], int, int, int, list[str]]:
        """Remove what the policy does not keep, and what saves that ended long ago have left.

        Returns the folders that are gone, the number of checkpoints that stay, that of objects removed, their bytes,
        and notes.

        Raises:
            StaleGenerationError: As soon as a newer run has claimed the root; the next call makes up for the rest.
        """
    def pin(self, folder: str, who: str) -> None:
        """Let `who` hold a checkpoint: no retention removes it, no save replaces it.

        What stands behind a dot in 16 hex digits keeps apart holders of one name; listings leave it out.

        Raises:
            CheckpointNotFoundError: If nothing is committed there.
        """
    def unpin(self, folder: str, who: str) -> None: ...
    def note_verified(self, folder: str, save_id: str) -> None: ...
    def quarantine(self, folder: str, save_id: str, why: str) -> None:
        """Say that a checkpoint is damaged: it is passed over, and nothing of it is removed."""
    def rollback(self, step: int) -> list[str]:
        """Take the run back to `step`; returns the folders that are passed over from now on."""

def run_folder(step: int, checkpoint_type: str) -> str:
    """Name of a checkpoint's folder below the run's root."""
