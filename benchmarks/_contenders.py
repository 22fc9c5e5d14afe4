"""Ways to save and to load one state through torch.distributed.checkpoint, by name, and how the best is found.

Which one runs when, and what is timed, is decided elsewhere. Optional packages are imported when first asked for.
"""

import importlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _state
import torch
import torch.distributed.checkpoint as dcp
from _measure import Sample, alternate, median_seconds
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

RAW, STOCK, STRATA, CONNECTOR = "raw", "stock", "torch_strata", "s3torchconnector"
REGION = "us-east-1"
STOCK_THREADS = (1, 2, 4)

# dcp says on every call that no process group is there; that is meant here.
warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint.*")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A storage writer and a storage reader for one state; a place is a directory or a URL."""

    kind: str
    label: str
    state: dict[str, Any]
    writer: Callable[[Any], dcp.StorageWriter]
    reader: Callable[[Any], dcp.StorageReader]

    def save(self, place: object) -> None:
        """dcp.save of one process."""
        dcp.save(self.state, storage_writer=self.writer(place), no_dist=True)

    def load(self, place: object) -> None:
        """dcp.load of one process, into the tensors of the state."""
        dcp.load(self.state, storage_reader=self.reader(place), no_dist=True)


def stock(state: dict[str, Any], *, num_threads: int) -> Contender:
    """FileSystemWriter (fsync on, as by default) and FileSystemReader."""
    return Contender(
        kind=STOCK,
        label=f"stock, thread_count={num_threads}",
        state=state,
        writer=lambda place: dcp.FileSystemWriter(place, thread_count=num_threads),
        reader=dcp.FileSystemReader,
    )


def strata(state: dict[str, Any], *, max_concurrency: int | None = None) -> Contender:
    """StrataWriter and StrataReader as a user gets them: defaults but for `max_concurrency` where given."""
    module = importlib.import_module("torch_strata")
    config = None if max_concurrency is None else module.StorageConfig(max_concurrency=max_concurrency)
    return Contender(
        kind=STRATA,
        label=STRATA if max_concurrency is None else f"{STRATA}, max_concurrency={max_concurrency}",
        state=state,
        writer=lambda place: module.StrataWriter(str(place), config=config),
        reader=lambda place: module.StrataReader(str(place), config=config),
    )


def has_connector() -> bool:
    """Whether s3torchconnector, which this project does not ask for, is installed."""
    return importlib.util.find_spec("s3torchconnector") is not None


def connector(state: dict[str, Any], *, endpoint: str, num_threads: int) -> Contender:
    """S3StorageWriter and S3StorageReader of s3torchconnector with their defaults, sent to `endpoint`."""
    connector_dcp = importlib.import_module("s3torchconnector.dcp")
    client_module = importlib.import_module("s3torchconnector._s3client")
    config = importlib.import_module("s3torchconnector").S3ClientConfig(force_path_style=True)

    def aimed(storage: Any) -> Any:
        # Neither class takes an endpoint; the client that they would build does.
        storage.fs._client = client_module.S3Client(REGION, endpoint=endpoint, s3client_config=config)
        return storage

    return Contender(
        kind=CONNECTOR,
        label=f"{CONNECTOR}, thread_count={num_threads}",
        state=state,
        writer=lambda url: aimed(connector_dcp.S3StorageWriter(REGION, url, config, thread_count=num_threads)),
        reader=lambda url: aimed(connector_dcp.S3StorageReader(REGION, url, config)),
    )


def use_s3_environment(endpoint: str) -> None:
    """Name the S3 server in this process's environment, where every client looks."""
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class RowSlice(DefaultLoadPlanner):
    """Loads rows [first, first + n) of one two-dimensional tensor into an n-row tensor under the same name."""

    def __init__(self, fqn: str, *, first_row: int) -> None:
        super().__init__()
        self._fqn = fqn
        self._first_row = first_row

    def create_local_plan(self) -> LoadPlan:
        target = self.state_dict[self._fqn]
        if self.metadata is None:
            raise RuntimeError("create_local_plan was called before set_up_planner")
        stored = self.metadata.state_dict_metadata[self._fqn]
        if not isinstance(stored, TensorStorageMetadata):
            raise TypeError(f"{self._fqn}: expected a tensor, found {type(stored).__name__}")
        chunk = ChunkStorageMetadata(offsets=torch.Size((self._first_row, 0)), sizes=target.size())
        return LoadPlan(create_read_items_for_chunk_list(self._fqn, stored, [chunk]))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]


def trial(
    candidates: Mapping[str, Callable[[], object]],
    *,
    keep: int,
    num_rounds: int,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str], object] = lambda name: None,
) -> list[str]:
    """Labels of the `keep` candidates with the least median time, fastest first."""
    samples = alternate(candidates, num_rounds=num_rounds, before=before, after=after)
    return fastest(samples)[:keep]


def fastest(samples: dict[str, list[Sample]], *, prefix: str = "") -> list[str]:
    """Labels that start with `prefix`, least median time first."""
    return sorted((n for n in samples if n.startswith(prefix)), key=lambda name: median_seconds(samples[name]))


def check_load(
    label: str, load: Callable[[], object], state: dict[str, Any], views: list[memoryview], expected: int
) -> None:
    """Zero the state, load it and compare the CRC of all its bytes.

    Raises:
        RuntimeError: If the bytes are not those that were saved.
    """
    _state.clear(state)
    load()
    found = _state.digest(views)
    if found != expected:
        raise RuntimeError(f"{label}: loaded bytes differ: expected CRC {expected:#010x}, found {found:#010x}")


def remove(directory: Path) -> None:
    """Delete a directory if it is there."""
    shutil.rmtree(directory, ignore_errors=True)
