"""From what a user passes as data to stores, patterns and a format. Opens nothing."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch_strata.errors import ConfigError

__all__ = ["FORMATS", "Format", "Places", "check_int", "format_of", "places_of"]

_GLOB = "*?[{"
_BY_SUFFIX = {".tar": "tar", ".tgz": "tar", ".tzst": "tar", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_COMPRESSED = (".gz", ".zst", ".zstd")
# What is looked for in a folder.
_IN_FOLDER = {
    "tar": "*.{tar,tar.gz,tgz,tar.zst}",
    "jsonl": "*.{jsonl,jsonl.gz,jsonl.zst}",
    "tokens": "*.bin",
    "megatron": "*.bin",
    "mds": "index.json",
    "files": "**",
}
FORMATS = tuple(sorted(_IN_FOLDER))
_OF_TOKENS = ("tokens", "megatron")
_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


@dataclass(frozen=True, kw_only=True)
class Format:
    """How samples lie in shards.

    Attributes:
        kind: One of `FORMATS`.
        dtype: Of tokens, as NumPy calls it; Megatron's index says its own.
        header_bytes: Before the tokens.
        window: Tokens in a sample.
        stride: Tokens from the beginning of one sample to that of the next.
    """

    kind: str
    dtype: str = ""
    header_bytes: int = 0
    window: int = 0
    stride: int = 0

    @property
    def raw(self) -> tuple[str, str, int, int, int]:
        """As the core takes it."""
        return self.kind, self.dtype, self.header_bytes, self.window, self.stride


@dataclass(frozen=True)
class Places:
    """Where shards are.

    Attributes:
        roots: Paths or URLs.
        patterns: Number of a root, and a name or a glob below it.
    """

    roots: tuple[str, ...]
    patterns: tuple[tuple[int, str], ...]


def places_of(urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], kind: str) -> Places:
    """The places that `urls` name, each with its glob; folders have that of the format.

    Raises:
        ConfigError: If there is none, or one is no path or URL.
    """
    listed = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    if not listed:
        raise ConfigError("url: expected at least one, found none")
    roots: dict[str, int] = {}
    patterns = []
    for url in listed:
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise ConfigError(f"url: expected a path or a URL, found {url!r}")
        root, pattern = _split(os.fspath(url), kind)
        patterns.append((roots.setdefault(root, len(roots)), pattern))
    return Places(tuple(roots), tuple(patterns))


def format_of(urls: object, kind: str | None, **tokens: int | str | None) -> Format:
    """The format that was asked for, or that the first name says; `tokens`: dtype, header_bytes, window, stride.

    Raises:
        ConfigError: If no format is known by that, or what it needs is not given, or out of range.
    """
    first = next(iter(urls), "") if isinstance(urls, list | tuple) else urls
    name = os.fspath(first) if isinstance(first, str | os.PathLike) else ""
    if kind is None:
        kind = _guessed(name, has_window=tokens["window"] is not None)
    if kind not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(f"format: expected one of {known}, or a name that ends in one, found {kind!r} for {name!r}")
    given = {name: value for name, value in tokens.items() if value is not None}
    if kind not in _OF_TOKENS:
        if given:
            raise ConfigError(f"{', '.join(given)}: for formats of tokens, found with {kind!r}")
        return Format(kind=kind)
    if "window" not in given:
        raise ConfigError("window: expected the number of tokens in a sample, found None")
    window = check_int("window", given["window"], 1)
    stride = check_int("stride", given.get("stride", window), 1)
    dtype = given.get("dtype", "uint16")
    if kind == "tokens" and dtype not in _DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(_DTYPES)}, found {dtype!r}")
    header_bytes = check_int("header_bytes", given.get("header_bytes", 0), 0)
    return Format(kind=kind, dtype=str(dtype), header_bytes=header_bytes, window=window, stride=stride)


def check_int(name: str, value: object, low: int, below: int | None = None) -> int:
    """`value`, if it is an int from `low` on, and below `below`.

    Raises:
        ConfigError: If it is not.
    """
    if type(value) is not int or value < low or (below is not None and value >= below):
        limit = f"from {low} on" if below is None else f"from {low} to {below - 1}"
        raise ConfigError(f"{name}: expected an int {limit}, found {value!r}")
    return value


def _guessed(name: str, has_window: bool) -> str | None:
    if name.endswith("index.json"):
        return "mds"
    return _BY_SUFFIX.get(_suffix(name)) or ("tokens" if has_window else None)


def _suffix(name: str) -> str:
    """The end of the name that says the format, compression left off."""
    stem, suffix = os.path.splitext(name)
    return os.path.splitext(stem)[1] if suffix in _COMPRESSED else suffix


def _split(url: str, kind: str) -> tuple[str, str]:
    """The root, and the name or glob below it."""
    first = min((url.index(sign) for sign in _GLOB if sign in url), default=len(url))
    is_file = first < len(url) or _suffix(url) in {*_BY_SUFFIX, ".bin", ".json"}
    if not is_file or url.endswith("/"):
        return url.rstrip("/") or "/", _IN_FOLDER[kind]
    root, slash, _ = url[:first].rpartition("/")
    return (root or "/", url[len(root) + 1 :]) if slash else (".", url)
