"""install(): routes what torch.distributed.checkpoint would store by itself to StrataWriter and StrataReader.

For trainers that take no `storage_writer`. Every name of torch's that is replaced stands in `PATCHES`; uninstall() puts
the very same objects back. Code that took a name before install() keeps torch's own.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import TracebackType
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

from torch_strata import _native
from torch_strata._store import check_flag, resolve_config
from torch_strata.checkpoint._payload import Trusted
from torch_strata.checkpoint.reader import StrataReader
from torch_strata.checkpoint.writer import StrataWriter
from torch_strata.config import StorageConfig
from torch_strata.errors import ConfigError

__all__ = ["PATCHES", "Installation", "Patch", "install", "uninstall"]

Place = str | os.PathLike[str]


def install(
    *,
    local: bool = True,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    allow_dtype_cast: bool = False,
    trusted_classes: Sequence[Trusted] = (),
) -> "Installation":
    """Save and load through Strata wherever DCP picks the storage: for trainers that pass only a path or a URL.

    Routed are ``dcp.save``, ``load`` and ``async_save`` with a ``checkpoint_id`` and no storage; ``dcp_to_torch_save``
    and ``torch_save_to_dcp``; ``torch.distributed.checkpoint.FileSystemWriter`` and ``FileSystemReader``, which accept
    all their arguments; and fsspec's ``s3``, ``gs``, ``az`` and ``abfs``. Storage that is passed stays what it is.

    Args:
        local: Whether local paths are routed as well as URLs.
        config: Limits of the stores.
        storage_options: The stores' own settings, for URLs; win over those of `config`.
        allow_dtype_cast: As StrataReader has it.
        trusted_classes: As StrataReader has it.

    Returns:
        A context manager that at its end puts back what was before. Called again, install() replaces the settings.

    Call it in every process that saves or loads, after ``import torch`` and before the trainer.

    Raises:
        ConfigError: If a setting cannot be used.
    """
    global _route
    route = _Route(
        local=check_flag("local", local),
        config=resolve_config(config, storage_options),
        allow_dtype_cast=allow_dtype_cast,
        trusted_classes=trusted_classes,
    )
    route.reader("memory://settings")  # checks them; opens nothing
    with _lock:
        if _route is None:
            _replace_names()
        before, _route = _route, route
        _fsspec().set_default_config(route.config)
    return Installation(before)


def uninstall() -> None:
    """Put back every name that install() replaced. Without install() it does nothing."""
    global _route
    with _lock:
        if _route is None:
            return
        _route = None
        _put_names_back()
        _fsspec().set_default_config(None)


class Installation:
    """What install() returns: ``with torch_strata.install(): ...`` ends with what was before."""

    def __init__(self, before: "_Route | None") -> None:
        self._before = before

    def __enter__(self) -> "Installation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _route
        with _lock:
            if self._before is None or _route is None:  # the latter if uninstall() was called inside
                uninstall()
                return
            _route = self._before
            _fsspec().set_default_config(_route.config)


@dataclass(frozen=True, kw_only=True)
class _Route:
    """The settings of an install()."""

    local: bool
    config: StorageConfig
    allow_dtype_cast: bool
    trusted_classes: Sequence[Trusted]

    def takes(self, place: object) -> bool:
        """Whether `place` is ours: a URL that we know, or a path if local paths are routed."""
        try:
            text = os.fspath(place)  # type: ignore[call-overload]
        except TypeError:
            return False
        if not isinstance(text, str) or not text:
            return False
        # A URL that went through pathlib has one slash left. torch would save to a local folder named "s3:".
        scheme, colon, rest = text.partition(":")
        if colon and rest.startswith("/") and scheme in _native.SCHEMES:
            return True
        return self.local and "://" not in text

    def writer(self, place: Place, *, overwrite: bool = True) -> StrataWriter:
        return StrataWriter(place, config=self._config(place), overwrite=overwrite)

    def reader(self, place: Place) -> StrataReader:
        return StrataReader(
            place,
            config=self._config(place),
            allow_dtype_cast=self.allow_dtype_cast,
            trusted_classes=self.trusted_classes,
        )

    def _config(self, place: Place) -> StorageConfig:
        # A local store has no options, and refuses those that were meant for the URLs.
        return self.config if "://" in os.fspath(place) else replace(self.config, storage_options={})


_lock = threading.RLock()
_route: _Route | None = None
# Owner, name, what torch had there, what is there now.
_replaced: list[tuple[Any, str, Any, Any]] = []
_replaced_schemes: dict[str, Any] = {}


def _target(place: object) -> _Route | None:
    """The settings for `place`; None if it is torch's."""
    route = _route
    return route if route is not None and route.takes(place) else None


def _storage_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where DCP makes storage from a checkpoint_id."""

    @functools.wraps(original)
    def storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        route = None if storage else _target(checkpoint_id)
        if route is None:
            return original(storage, checkpoint_id, reader=reader)
        return route.reader(checkpoint_id) if reader else route.writer(checkpoint_id)

    return storage_setup


def _async_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """With our writer from the start, its stage() takes the copy, and a spawned process gets it."""

    @functools.wraps(original)
    def async_save(*args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any) -> Any:
        route = None if storage_writer else _target(checkpoint_id)
        if route is not None:
            checkpoint_id, storage_writer = None, route.writer(checkpoint_id)
        return original(*args, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **kwargs)

    return async_save


def _writer_class(stock: Any) -> Any:
    """`stock`, a FileSystemWriter, for names that code calls with a path."""
    signature = inspect.signature(stock)

    class RoutedFileSystemWriter(stock):  # type: ignore[misc]
        """torch's FileSystemWriter; called with a place that install() routes, it makes a StrataWriter.

        How many threads and files, and how much to copy ahead, is for `config` to say; files are always synced unless
        it says otherwise.

        Raises:
            ConfigError: If ``_extensions`` or a ``serialization_format`` other than TORCH_SAVE is asked for.
        """

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not RoutedFileSystemWriter:
                return super().__new__(cls)  # a subclass is built on torch's own
            asked = signature.bind(*args, **kwargs).arguments
            route = _target(asked["path"])
            if route is None:
                return stock(*args, **kwargs)
            return _writer_as_asked(route, asked)

        @classmethod
        def __subclasshook__(cls, other: type) -> Any:
            return stock in other.__mro__ if cls is RoutedFileSystemWriter else NotImplemented

    return RoutedFileSystemWriter


def _writer_as_asked(route: _Route, asked: Mapping[str, Any]) -> StrataWriter:
    if asked.get("_extensions"):
        raise ConfigError(
            "FileSystemWriter(_extensions=...): Strata's files hold tensors as they are, for anyone to read; pass a "
            "storage_writer of torch's for this save, or do without extensions"
        )
    form = asked.get("serialization_format", SerializationFormat.TORCH_SAVE)
    if form is not SerializationFormat.TORCH_SAVE:
        raise ConfigError(f"FileSystemWriter(serialization_format={form}): expected SerializationFormat.TORCH_SAVE")
    return route.writer(asked["path"], overwrite=asked.get("overwrite", True))


def _reader_class(stock: Any) -> Any:
    """`stock`, a FileSystemReader, for names that code calls with a path."""
    signature = inspect.signature(stock)

    class RoutedFileSystemReader(stock):  # type: ignore[misc]
        """torch's FileSystemReader; called with a place that install() routes, it makes a StrataReader.

        Raises:
            ConfigError: If an ``_extension_registry`` is given.
        """

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not RoutedFileSystemReader:
                return super().__new__(cls)
            asked = signature.bind(*args, **kwargs).arguments
            route = _target(asked["path"])
            if route is None:
                return stock(*args, **kwargs)
            if asked.get("_extension_registry") is not None:
                raise ConfigError("FileSystemReader(_extension_registry=...): Strata knows no extensions")
            return route.reader(asked["path"])

        @classmethod
        def __subclasshook__(cls, other: type) -> Any:
            return stock in other.__mro__ if cls is RoutedFileSystemReader else NotImplemented

    return RoutedFileSystemReader


@dataclass(frozen=True)
class Patch:
    """A name of torch's that install() replaces.

    Attributes:
        module: Where it stands.
        name: The name, dotted if it stands in a class.
        make: What stands for it, given what was there.
    """

    module: str
    name: str
    make: Callable[[Any], Any]

    def owner(self) -> tuple[Any, str]:
        """The object that has the attribute, and the attribute's name."""
        owner: Any = import_module(self.module)
        *classes, attribute = self.name.split(".")
        for name in classes:
            owner = getattr(owner, name)
        return owner, attribute


_DCP = dcp.__name__

PATCHES = (
    # `from torch.distributed.checkpoint import ...` as accelerate and others write it. Not those of .filesystem: by
    # these pickle finds the class of torch's own writers.
    Patch(_DCP, "FileSystemWriter", _writer_class),
    Patch(_DCP, "FileSystemReader", _reader_class),
    Patch(f"{_DCP}.format_utils", "FileSystemWriter", _writer_class),
    Patch(f"{_DCP}.format_utils", "FileSystemReader", _reader_class),
    # save and load look it up under their own modules' names for it.
    Patch(f"{_DCP}._storage_utils", "_storage_setup", _storage_setup),
    Patch(f"{_DCP}.state_dict_saver", "_storage_setup", _storage_setup),
    Patch(f"{_DCP}.state_dict_loader", "_storage_setup", _storage_setup),
    Patch(_DCP, "async_save", _async_save),
    Patch(f"{_DCP}.state_dict_saver", "async_save", _async_save),
    # For whoever took async_save before: the process that saves has not called install().
    Patch(f"{_DCP}._async_process_executor", "_ProcessBasedAsyncCheckpointExecutor.execute_save", _async_save),
)


def _replace_names() -> None:
    # All modules are imported first: one that comes later would take what stands for its neighbour's names for torch's.
    owners = [patch.owner() for patch in PATCHES]
    originals = [getattr(owner, name) for owner, name in owners]  # a torch that lacks one changes nothing
    made: dict[int, Any] = {}  # one replacement for one object, however many names it has
    for patch, (owner, name), original in zip(PATCHES, owners, originals, strict=True):
        replacement = made.setdefault(id(original), patch.make(original))
        setattr(owner, name, replacement)
        _replaced.append((owner, name, original, replacement))
    registry = import_module("fsspec.registry")
    for scheme, kind in _fsspec().PLAIN.items():
        _replaced_schemes[scheme] = registry.registry.get(scheme)
        registry.register_implementation(scheme, kind, clobber=True)


def _put_names_back() -> None:
    while _replaced:
        owner, name, original, replacement = _replaced.pop()
        # What somebody else has put there since goes on calling ours, which passes everything on.
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)
    registered = import_module("fsspec.registry")._registry  # fsspec has no way to take an entry out
    for scheme, kind in _fsspec().PLAIN.items():
        before = _replaced_schemes.pop(scheme)
        if registered.get(scheme) is not kind:
            continue
        if before is None:
            del registered[scheme]
        else:
            registered[scheme] = before


def _fsspec() -> Any:
    # Only now: fsspec is nobody's business who does not install().
    return import_module("torch_strata.checkpoint._fsspec")
