"""The planner's data as a manifest holds it. Imports no torch."""

import json
import pickle
from typing import Any

from torch_strata.checkpoint._unpickle import load_plain
from torch_strata.errors import CheckpointError, CorruptionError

__all__ = ["decode_planner_data", "encode_planner_data"]


def encode_planner_data(value: Any) -> bytes:
    """The planner's data for the manifest: JSON for DCP's own mapping of keys to paths, else a pickle.

    The first byte names the encoding: ``J`` or ``P``; empty for None.

    Raises:
        CheckpointError: If it cannot be pickled.
    """
    if value is None:
        return b""
    if _is_mapping_of_paths(value):
        # A list of pairs keeps the order and lone surrogates; the path's ints stay ints.
        return b"J" + json.dumps([[key, list(path)] for key, path in value.items()]).encode("ascii")
    try:
        return b"P" + pickle.dumps(value)
    except Exception as error:
        raise CheckpointError(f"cannot pickle planner_data, a {type(value).__name__}: {error}") from error


def _is_mapping_of_paths(value: Any) -> bool:
    return type(value) is dict and all(
        type(key) is str and type(path) is tuple and all(type(part) in (str, int) for part in path)
        for key, path in value.items()
    )


def decode_planner_data(data: bytes, where: str) -> Any:
    """What `encode_planner_data` was given. Pickles are read with the allow-list of `.metadata`.

    Raises:
        CorruptionError: If the encoding is unknown or the pickle is refused.
    """
    if not data:
        return None
    kind, body = data[:1], data[1:]
    if kind == b"P":
        return load_plain(body, f"{where} (planner_data)")
    if kind != b"J":
        raise CorruptionError(f"{where}: unknown encoding {kind!r} of planner_data")
    try:
        return {key: tuple(path) for key, path in json.loads(body)}
    except (TypeError, ValueError) as error:
        raise CorruptionError(f"{where}: planner_data is damaged: {error}") from error
