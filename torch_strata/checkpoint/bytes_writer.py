"""AsyncCheckpointWriter: checkpoints of bytes, written in the background in the order of the calls."""

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from torch_strata.checkpoint.async_save import OnFailure
from torch_strata.checkpoint.checkpoint_handle import CheckpointHandle
from torch_strata.checkpoint.manager import CheckpointManager
from torch_strata.checkpoint.retention import Retention
from torch_strata.config import StorageConfig
from torch_strata.errors import ConfigError

__all__ = ["AsyncCheckpointWriter"]


class AsyncCheckpointWriter:
    """Writes what one process has serialised itself, of whatever framework. For state dicts use `CheckpointManager`.

    Args:
        storage_path: Root of the run: local path or URL.
        retention: Which checkpoints are kept; all if not given.
        config: Limits of the store.
        storage_options: The store's own settings; win over those of `config`.
        on_failure: As `async_save`.

    Raises:
        ConfigError: If an argument cannot be used.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        config: StorageConfig | None = None,
        storage_options: Mapping[str, str] | None = None,
        on_failure: OnFailure = "raise",
    ) -> None:
        self.manager = CheckpointManager(
            storage_path,
            retention=retention,
            config=config,
            storage_options=storage_options,
            on_failure=on_failure,
            no_dist=True,
        )

    def write(
        self,
        data: bytes | bytearray | memoryview,
        *,
        step: int,
        epoch: int = 0,
        metadata: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
    ) -> CheckpointHandle:
        """Hand `data` over; returns at once. What can change is copied first; ``bytes`` are not.

        ``manager.load(step)`` gives them back, verified.

        Raises:
            ConfigError: If an argument cannot be used.
            StrataError: Why the write before failed, if nobody has asked for its result.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ConfigError(f"data: expected bytes, a bytearray or a memoryview, found a {type(data).__name__}")
        return self.manager.save(data, step=step, epoch=epoch, metadata=metadata, metrics=metrics, overwrite=overwrite)

    def wait(self) -> None:
        """Wait for everything that was handed over.

        Raises:
            StrataError: Why one write failed, the first that did and of which nobody has asked.
        """
        self.manager.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.manager.__exit__(kind, error, trace)
