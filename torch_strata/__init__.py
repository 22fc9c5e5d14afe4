"""Checkpoints and data for PyTorch through a Rust core.

Importing this package starts nothing and imports no torch; names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_strata.checkpoint.async_save import async_save
    from torch_strata.checkpoint.bytes_writer import AsyncCheckpointWriter
    from torch_strata.checkpoint.checkpoint_handle import CheckpointHandle
    from torch_strata.checkpoint.compare import Comparison, compare
    from torch_strata.checkpoint.copy_run import CopiedRun, copy_run
    from torch_strata.checkpoint.copying import CopyReport, copy_checkpoint, import_checkpoint
    from torch_strata.checkpoint.export import ExportReport, export_safetensors, export_torch
    from torch_strata.checkpoint.handle import SaveHandle, SaveProgress
    from torch_strata.checkpoint.install import install, uninstall
    from torch_strata.checkpoint.manager import CheckpointManager
    from torch_strata.checkpoint.planner import StrataLoadPlanner
    from torch_strata.checkpoint.quick import configure, load_checkpoint, save_checkpoint, wait_for_checkpoints
    from torch_strata.checkpoint.reader import ReadStats, StrataReader
    from torch_strata.checkpoint.retention import (
        KeepAll,
        KeepAny,
        KeepBest,
        KeepEvery,
        KeepEverySteps,
        KeepLast,
        KeepYounger,
        Retention,
    )
    from torch_strata.checkpoint.run import CheckpointMetadata, CheckpointType, ListedCheckpoint
    from torch_strata.checkpoint.save_planner import StrataSavePlanner
    from torch_strata.checkpoint.save_stats import SaveStats
    from torch_strata.checkpoint.store_stats import StoreStats
    from torch_strata.checkpoint.verify import VerifyReport, verify
    from torch_strata.checkpoint.writer import StrataWriter
    from torch_strata.config import StorageConfig
    from torch_strata.data.batch import Batch, Position
    from torch_strata.data.dataset import ShardDataset
    from torch_strata.data.pipe import StrataShardPipe
    from torch_strata.data.shuffle import Shuffle
    from torch_strata.errors import (
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        ChecksumError,
        ConfigError,
        CoordinationError,
        CoordinatorTimeoutError,
        CorruptionError,
        ForkedProcessError,
        LayoutMismatchError,
        ManifestError,
        NotEnoughMembersError,
        ObjectNotFoundError,
        PreconditionError,
        StaleGenerationError,
        StorageError,
        StoragePermissionError,
        StrataError,
    )

__all__ = [
    "AsyncCheckpointWriter",
    "Batch",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointHandle",
    "CheckpointManager",
    "CheckpointMetadata",
    "CheckpointNotFoundError",
    "CheckpointType",
    "ChecksumError",
    "Comparison",
    "ConfigError",
    "CoordinationError",
    "CoordinatorTimeoutError",
    "CopiedRun",
    "CopyReport",
    "CorruptionError",
    "ExportReport",
    "ForkedProcessError",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepEverySteps",
    "KeepLast",
    "KeepYounger",
    "LayoutMismatchError",
    "ListedCheckpoint",
    "ManifestError",
    "NotEnoughMembersError",
    "ObjectNotFoundError",
    "Position",
    "PreconditionError",
    "ReadStats",
    "Retention",
    "SaveHandle",
    "SaveProgress",
    "SaveStats",
    "ShardDataset",
    "Shuffle",
    "StaleGenerationError",
    "StorageConfig",
    "StorageError",
    "StoragePermissionError",
    "StoreStats",
    "StrataError",
    "StrataLoadPlanner",
    "StrataReader",
    "StrataSavePlanner",
    "StrataShardPipe",
    "StrataWriter",
    "VerifyReport",
    "async_save",
    "compare",
    "configure",
    "copy_checkpoint",
    "copy_run",
    "export_safetensors",
    "export_torch",
    "import_checkpoint",
    "install",
    "load_checkpoint",
    "save_checkpoint",
    "uninstall",
    "verify",
    "wait_for_checkpoints",
]

_HOMES = {
    "AsyncCheckpointWriter": "checkpoint.bytes_writer",
    "Batch": "data.batch",
    "CheckpointHandle": "checkpoint.checkpoint_handle",
    "CheckpointManager": "checkpoint.manager",
    "CheckpointMetadata": "checkpoint.run",
    "CheckpointType": "checkpoint.run",
    "Comparison": "checkpoint.compare",
    "CopiedRun": "checkpoint.copy_run",
    "CopyReport": "checkpoint.copying",
    "ExportReport": "checkpoint.export",
    "KeepAll": "checkpoint.retention",
    "KeepAny": "checkpoint.retention",
    "KeepBest": "checkpoint.retention",
    "KeepEvery": "checkpoint.retention",
    "KeepEverySteps": "checkpoint.retention",
    "KeepLast": "checkpoint.retention",
    "KeepYounger": "checkpoint.retention",
    "ListedCheckpoint": "checkpoint.run",
    "Position": "data.batch",
    "ReadStats": "checkpoint.reader",
    "Retention": "checkpoint.retention",
    "SaveHandle": "checkpoint.handle",
    "SaveProgress": "checkpoint.handle",
    "SaveStats": "checkpoint.save_stats",
    "ShardDataset": "data.dataset",
    "Shuffle": "data.shuffle",
    "StorageConfig": "config",
    "StoreStats": "checkpoint.store_stats",
    "StrataLoadPlanner": "checkpoint.planner",
    "StrataReader": "checkpoint.reader",
    "StrataSavePlanner": "checkpoint.save_planner",
    "StrataShardPipe": "data.pipe",
    "StrataWriter": "checkpoint.writer",
    "VerifyReport": "checkpoint.verify",
    "async_save": "checkpoint.async_save",
    "compare": "checkpoint.compare",
    "configure": "checkpoint.quick",
    "copy_checkpoint": "checkpoint.copying",
    "copy_run": "checkpoint.copy_run",
    "export_safetensors": "checkpoint.export",
    "export_torch": "checkpoint.export",
    "import_checkpoint": "checkpoint.copying",
    "install": "checkpoint.install",
    "load_checkpoint": "checkpoint.quick",
    "save_checkpoint": "checkpoint.quick",
    "uninstall": "checkpoint.install",
    "verify": "checkpoint.verify",
    "wait_for_checkpoints": "checkpoint.quick",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
