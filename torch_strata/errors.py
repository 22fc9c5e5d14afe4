"""Every error that torch_strata raises, in one tree.

Each class can be built from one message and pickled, because a DataLoader worker re-raises by message and a DCP rank
sends its failure to the others. Where a builtin names the same fault, the class is that builtin too, so that
``except FileNotFoundError`` works. Credentials never appear in a message.
"""

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "ConfigError",
    "CoordinationError",
    "CoordinatorTimeoutError",
    "CorruptionError",
    "ForkedProcessError",
    "LayoutMismatchError",
    "ManifestError",
    "NotEnoughMembersError",
    "ObjectNotFoundError",
    "PreconditionError",
    "StaleGenerationError",
    "StorageError",
    "StoragePermissionError",
    "StrataError",
]


class StrataError(Exception):
    """Base of every error raised here."""


class ConfigError(StrataError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class StorageError(StrataError, OSError):
    """A store could not do what was asked, after all tries."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """An object, a directory or a bucket is not there."""


class StoragePermissionError(StorageError, PermissionError):
    """The store refused access."""


class PreconditionError(StorageError):
    """Somebody else wrote the name that this process meant to create."""


class CorruptionError(StrataError):
    """Stored bytes are not those that were written."""


class ChecksumError(CorruptionError):
    """A block's digest is not the one in the manifest."""


class ManifestError(CorruptionError):
    """An index is damaged, contradicts itself, or needs a newer reader."""


class CheckpointError(StrataError):
    """A checkpoint cannot be saved or loaded as asked."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the place."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is a checkpoint already and overwriting was not allowed."""


class LayoutMismatchError(CheckpointError, ValueError):
    """The state to load into has another dtype, shape or kind than what is stored."""


class CoordinationError(StrataError):
    """The members of a run could not agree."""


class StaleGenerationError(CoordinationError):
    """A newer run has taken over; this one must stop."""


class NotEnoughMembersError(CoordinationError):
    """Fewer members are alive than the run needs."""


class CoordinatorTimeoutError(CoordinationError, TimeoutError):
    """The coordinator did not answer in time."""


class ForkedProcessError(StrataError, RuntimeError):
    """A handle opened before ``fork`` was used in the child."""
