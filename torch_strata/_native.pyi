"""The Rust core. Every call lets go of the GIL while it works and answers Ctrl-C within 50 ms.

Names: an *object* is one stored file or key, relative to the store's root. An *item* is one tensor chunk or one
pickled value inside an object. A *row* is an item's position in the open checkpoint. `fqn` travels as bytes
(UTF-8 with ``surrogatepass``). Shapes, strides and offsets are in elements; everything named bytes is in bytes.
"""

from collections.abc import Sequence
from typing import Any, final

from torch_strata._native_data import Batches, DataIndex, DataOrder, SharedBytes
from torch_strata._native_memory import Copy, PageLock, memory_file, populate, release_ended, start_copy
from torch_strata._native_run import Parent, Run, run_folder
from torch_strata._types import EntryColumns, RunInfo, StockParts

__all__ = [
    "BYTES",
    "SCHEMES",
    "TENSOR",
    "TORCH_SAVE",
    "Base",
    "Batches",
    "Checkpoint",
    "CommitStats",
    "Copy",
    "DataIndex",
    "DataOrder",
    "PageLock",
    "Parent",
    "ReadStats",
    "Round",
    "Run",
    "SharedBytes",
    "Store",
    "Together",
    "Transfer",
    "Upload",
    "__version__",
    "claim_generation",
    "commit",
    "is_inside",
    "is_our_data_object",
    "is_sealed",
    "memory_file",
    "open_base",
    "populate",
    "record_encoded",
    "record_objects",
    "release_ended",
    "rewrite_safetensors",
    "run_folder",
    "start_copy",
    "write_items",
    "write_safetensors",
]

__version__: str

# Schemes of the URLs that `Store` takes.
SCHEMES: tuple[str, ...]

# Kinds of an item: a raw tensor that Rust frames; verbatim bytes of a BYTE_IO item; a tensor framed by torch.save.
TENSOR: int
BYTES: int
TORCH_SAVE: int

@final
class Store:
    """A place named by a URL. Opens nothing before its first use in a process, also after a fork.

    Raises:
        ConfigError: If the URL's scheme, an option or a limit is unknown or out of range.
    """

    def __new__(
        cls,
        url: str,
        options: dict[str, str],
        *,
        max_in_flight_bytes: int,
        max_concurrency: int,
        part_bytes: int,
        fsync: bool,
        direct_io: bool,
        max_tries: int,
        deadline_s: float,
    ) -> Store: ...
    @property
    def url(self) -> str: ...
    def read(self, name: str) -> bytes: ...
    def read_range(self, name: str, start: int, end: int) -> bytes: ...
    def size(self, name: str) -> int: ...
    def put(self, name: str, data: bytes) -> None: ...
    def list_folders(self, prefix: str) -> list[str]:
        """Names of the folders in the folder `prefix`, from the store's root, without a slash at the end."""
    def list(self, prefix: str) -> list[tuple[str, int]]:
        """Name and size of the objects in the folder `prefix` (``""``, or ending in ``/``); not in its sub-folders."""
    def create(self, name: str, size: int) -> Upload:
        """Begin an object of exactly `size` bytes, to be sent in parts. On local stores the name must be new."""
    def delete(self, name: str) -> None: ...
    def tidy(self) -> None:
        """Remove empty folders that a failed save leaves: those made here, and the root if there was none before."""
    def counters(self) -> dict[str, int]:
        """Events since the store was opened in this process, that of its siblings included; all 0 for local stores.

        ``requests``: requests sent, every try counted. ``retries``: tries after the first of each operation.
        ``throttled``: answers by which the store asked for fewer requests. ``restarted``: transfers ended because too
        few bytes moved, and begun again. ``hedged``: second requests for what a first one was slow to bring.
        """

@final
class Upload:
    """An object in the making. What is neither finished nor aborted may stay at the store, unseen."""

    @property
    def part_bytes(self) -> int:
        """Size of each part but the last, in bytes."""
    def write_part(self, index: int, data: bytes | bytearray) -> None: ...
    def finish(self) -> None:
        """Make it durable and visible; all parts have been written."""
    def abort(self) -> None:
        """Remove what was written, best effort."""

@final
class Base:
    """What was at the place before a save: taken by the planning rank at its start, needed for the commit."""

    @property
    def exists(self) -> bool:
        """Whether a committed checkpoint, ours or stock's, is there."""
    @property
    def number(self) -> int:
        """Number of the newest manifest, 0 if there is none."""
    @property
    def save_id(self) -> str:
        """Of the newest manifest, "" if there is none."""
    @property
    def foreign_metadata(self) -> bytes | None:
        """A `.metadata` that our manifest does not know (stock saved here), to be unpickled by the caller."""
    @property
    def stale_metadata(self) -> bool:
        """Whether `.metadata` is still that of the manifest's predecessor: a save ended between the two writes."""
    @property
    def ranks(self) -> int | None:
        """How many ranks saved here on their own, if that is the newest state and `open_base` was given a rank."""

def open_base(store: Store, *, rank: int | None, transfer: Transfer | None = None) -> Base:
    """Look at a place before saving to it. `rank`: for a save without collectives, else None. `transfer` can end it."""

def claim_generation(run_root: Store, *, owner: str) -> int:
    """Take the next generation of a run root (create-only numbered record). `owner`: this process's nonce."""

@final
class Transfer:
    """A `write_items`, seen from another thread."""

    def __new__(cls) -> Transfer: ...
    def cancel(self) -> None:
        """End it, also before it begins."""
    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that the store has taken, and bytes to write, 0 until that is known."""

def write_items(
    store: Store,
    items: Sequence[
        tuple[
            bytes,  # fqn
            int,  # index hint, -1 if none
            int,  # number of the template
            int,  # address of the first element (TENSOR), else 0
            Any,  # what keeps the memory alive (TENSOR), else a contiguous buffer with the bytes
        ]
    ],
    templates: Sequence[
        tuple[
            tuple[int, ...] | None,  # offsets of the chunk; None for BYTES
            int,  # kind
            int,  # number of the CUDA device that holds it, -1 for the host
            int,  # payload bytes (TENSOR), else 0
            str,  # dtype ("float32"), "" for BYTES
            tuple[int, ...],  # shape of what is stored
            tuple[int, ...],  # strides of what is stored; dense in some order
        ]
    ],
    *,
    rank: int,
    save_id: str,
    parent: Parent | None,
    transfer: Transfer,
) -> bytes:
    """Write one rank's items into new objects `__{rank}_{k}.{save_id}.distcp`, durable when this returns.

    Items with the same memory, dtype and geometry are written once. Memory of a device is copied part by part through
    page-locked buffers; nobody may be writing to it any more. A tensor that `parent` holds is referred to, not written:
    known by its digests, whatever it is called. Returns the rank's record (opaque), which the planning rank hands to
    `commit`. On any failure nothing of this save stays; of one that was cancelled, objects that were complete.

    Raises:
        CheckpointError: If it was cancelled, or a device failed.
        StorageError: If the store failed.
    """

def write_safetensors(
    store: Store,
    items: Sequence[tuple[bytes, int, int, int, Any]],
    templates: Sequence[tuple[tuple[int, ...] | None, int, int, int, str, tuple[int, ...], tuple[int, ...]]],
    *,
    rank: int,
    save_id: str,
    transfer: Transfer,
) -> bytes:
    """As `write_items`, but tensors go to files of safetensors `model-{rank}-{k}.{save_id}.safetensors`.

    Tensors are whole and row-major; in the files their names lack the ``model.`` in front. Two names of one memory are
    written twice. What is no tensor goes to an object as `write_items` makes them.

    Raises:
        CheckpointError: If the format cannot hold a tensor, before anything is written; as `write_items`.
        StorageError: If the store failed.
    """

def rewrite_safetensors(source: Checkpoint, store: Store, *, save_id: str, transfer: Transfer) -> bytes:
    """Write everything that a checkpoint of ours holds as `write_safetensors` does, each tensor whole.

    Of each tensor 64 MiB are in memory. The source has been found to hold each element once. Returns the record of
    rank 0.

    Raises:
        CheckpointError: If the format cannot hold a tensor, before anything is written.
        CorruptionError: If what is read is damaged.
        StorageError: If a store failed.
    """

def record_objects(record: bytes) -> list[tuple[str, int]]:
    """`(name, bytes)` of every object that a rank wrote."""

def record_encoded(record: bytes) -> tuple[int, int]:
    """Bytes of the tensors that a rank wrote encoded, and what they take so."""

@final
class CommitStats:
    number: int
    fenced: bool
    num_objects: int
    num_items: int
    payload_bytes: int
    referred_bytes: int
    own_bytes: int
    model_hash: str | None
    collected: int
    warnings: list[str]

def commit(
    store: Store,
    base: Base,
    records: list[bytes],
    entries: EntryColumns,
    *,
    planner_data: bytes,
    stock: StockParts | None,
    save_id: str,
    previous_save_id: str,
    rank: int | None,
    world_size: int,
    generation: int,
    run_root: Store | None,
    run: RunInfo | None,
) -> CommitStats:
    """Check every object from here, publish the manifest, then what others read by, then collect what is superseded.

    Others read by `.metadata`, and by the index of safetensors where there are such files. A failure after the manifest
    is a warning, except over a foreign `.metadata` without a save_id.

    `records`: emptied once they have been read. `planner_data`: opaque to Rust (first byte says the encoding).
    `stock`: None if stock cannot read what is saved. `previous_save_id`: of the `.metadata` that is there now, "" if
    none. `generation`: 0 without a run root. `run`: where in a run the checkpoint stands, if a manager saves it.

    Raises:
        CheckpointError: If an item that `entries` promises is in no record, or twice.
        ObjectNotFoundError, CorruptionError: If an object is not visible here, or has another size.
        PreconditionError: If somebody else committed here meanwhile.
        StaleGenerationError: If a newer run has claimed the run root.
    """

def is_our_data_object(name: str) -> bool:
    """Whether a name is one that saves give to data; nothing tells by it whether the save was committed."""

def is_inside(path: str) -> bool:
    """Whether a path leads to an object inside the checkpoint: relative, no ``..``, no drive, no scheme."""

def is_sealed(index: bytes) -> bool | None:
    """Whether the digest behind a `.metadata` of ours is that of its content; None if there is none."""

@final
class ReadStats:
    requests: int
    bytes_read: int
    blocks_verified: int
    unverified_bytes: int

@final
class Checkpoint:
    """A checkpoint that is open for reading."""

    @staticmethod
    def open(store: Store, *, rank: int | None) -> Checkpoint:
        """The newest committed state at the place. `rank`: that rank's own, of a save without collectives.

        Raises:
            CheckpointNotFoundError: If there is neither a manifest nor a `.metadata`.
            ManifestError: If the manifest is damaged, hostile, or needs a newer reader.
        """
    @staticmethod
    def plain(
        store: Store,
        tensors: Sequence[tuple[bytes, str, int, int, str, tuple[int, ...]]],
    ) -> Checkpoint:
        """Contiguous tensors in files that the caller has indexed: `(fqn, object, offset, bytes, dtype, shape)`.

        Raises:
            ManifestError: If a dtype is unknown, or shape and length contradict each other.
        """
    @property
    def is_stock(self) -> bool:
        """Whether `.metadata` is the truth here: there is no manifest, or stock saved over it."""
    @property
    def stock_metadata(self) -> bytes | None:
        """`.metadata` of a stock checkpoint, to be unpickled by the caller; then call `set_stock_entries`."""
    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that all reads so far have brought, and bytes that they were to bring."""
    @property
    def save_id(self) -> str: ...
    @property
    def has_safetensors(self) -> bool:
        """Whether any of it is in files of safetensors that a save of ours wrote."""
    @property
    def safetensors_index(self) -> bytes | None:
        """What the index of those files must be, byte for byte; None if there are none."""
    @property
    def previous_save_id(self) -> str:
        """Of the `.metadata` that the manifest's own replaces; "" if there was none."""
    @property
    def number(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def created_at(self) -> int:
        """When it was committed, in seconds since 1970 by the planning rank's clock; 0 if that is not known."""
    @property
    def run(self) -> RunInfo | None:
        """Where in a run it stands, if a manager saved it."""
    @property
    def warnings(self) -> list[str]: ...
    @property
    def planner_data(self) -> bytes: ...
    def entries(self) -> EntryColumns: ...
    def stock_pickle(self, parts: StockParts) -> bytes:
        """The `.metadata` of what the manifest holds."""
    def items(self) -> list[tuple[bytes, tuple[int, ...] | None, int, str, int, int]]: ...
    @property
    def is_encoded(self) -> bool:
        """Whether tensors in it are stored encoded: stock torch cannot read them."""
    def encodings(self) -> list[tuple[bytes, str, int, int, str | None]]:
        """Of each encoded chunk: fqn, encoding, bytes that it takes, bytes of the tensor, path of its base's object."""
    def objects(self) -> list[tuple[str, int]]: ...
    def set_stock_entries(self, items: Sequence[tuple[bytes, tuple[int, ...] | None, int, str, int, int]]) -> bool:
        """Take what `.metadata` lists, or our manifest where that is all in it; false then."""
    def without_metadata(self, reason: str) -> None:
        """Take our manifest instead of a `.metadata` that cannot be read, if nobody can have saved after it.

        Raises:
            ManifestError: With `reason`, if there is no manifest, or stock may have saved after it.
        """
    def digests(self, rows: Sequence[int]) -> list[bytes]:
        """XXH3-128 of each block of 4 MiB of each payload, 16 bytes each; empty where none is known."""
    def locate(
        self,
        fqns: Sequence[bytes],
        places: Sequence[int],
        offsets: Sequence[tuple[int, ...] | None],
    ) -> tuple[list[int], list[int], list[tuple[int, str, list[int], list[int]]]]:
        """Where each name is stored, and what is: rows, numbers, and what these stand for.

        Row of each fqn's chunk at `offsets[place]`, one for all names of a payload; -1 where nothing is stored under
        that key. A number stands for `(kind, dtype, shape, strides)` as really stored.

        Heads and tails of stock items are read first; one that is not a plain tensor is reported as TORCH_SAVE, or as
        BYTES where `.metadata` says so.
        """
    def read(
        self,
        tensors: Sequence[
            tuple[
                int,  # row
                tuple[int, ...],  # first element, in the stored chunk's coordinates
                tuple[int, ...],  # lengths
                int,  # number of the CUDA device that holds the destination, -1 for the host
                int,  # address of the destination's first element
                tuple[int, ...],  # strides of the destination
                Any,  # what keeps the destination alive
            ]
        ],
        blobs: Sequence[int],
        whole: Sequence[tuple[int, int, Any]],  # row; address on the host and keeper of a contiguous destination
        *,
        verify: str,  # "inplace" or "before"
    ) -> tuple[list[bytes], ReadStats]:
        """Read regions of TENSOR rows into memory, BYTES or TORCH_SAVE rows whole, and TENSOR rows whole.

        Every block that is touched is verified. After a CorruptionError the destinations are undefined,
        unless `verify="before"`.
        """
    def blob_bytes(self, rows: Sequence[int]) -> list[int]:
        """Length of each payload, once its object is known to be that long.

        Raises:
            ManifestError: If an object is shorter.
        """
    def verify(self) -> tuple[ReadStats, list[str], list[str]]:
        """Read and check everything but `.metadata`: each damage, then each object that could not be looked at."""

@final
class Together:
    """What the ranks of a group read together: each block leaves the store once and is handed on, in rounds.

    A region is `(row, first element, lengths)`; of rows that are no tensor it is all, and the others are empty.
    """

    def __new__(
        cls, checkpoint: Checkpoint, needs: Sequence[bytes], *, rank: int, round_bytes: int, verify: str
    ) -> Together:
        """`needs`: what `needs` returned on each rank of the group; `rank`: this one's place among them.

        Raises:
            CheckpointError: If the ranks have opened different states.
        """
    @staticmethod
    def needs(checkpoint: Checkpoint, regions: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> bytes:
        """The blocks of which this rank wants something, for the other ranks."""
    @property
    def rounds(self) -> int:
        """Number of rounds, the same on every rank."""
    @property
    def buffer_bytes(self) -> int:
        """Memory that a round needs on this rank."""
    def spans(self, regions: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> list[tuple[int, int] | None]:
        """Rounds in which each region arrives, half-open; None if this rank reads it on its own, with `read`."""
    def begin(
        self,
        round: int,
        tensors: Sequence[tuple[int, tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...], Any]],
        address: int,
        bytes: int,
        owner: Any,
    ) -> Round:
        """Begin to read what this rank owns in a round. Does not block.

        `tensors`: as `Checkpoint.read`, all whose span holds the round. `address`, `bytes`, `owner`: the buffer of the
        round, not to be touched before `Round.wait` has returned.
        """
    def settle(self) -> ReadStats:
        """After the last round: what all of them have verified.

        Raises:
            ChecksumError: If a stock item, which has one checksum for all of it, is damaged.
        """

@final
class Round:
    """One round of a `Together`."""

    def wait(self) -> tuple[list[tuple[int, list[int], int, int]], ReadStats]:
        """Wait until this rank's own blocks are in the buffer, verified.

        Returns `(owner, receivers, start, end)` of what is to be handed on: a run of the buffer that `owner` has now
        and `receivers` need, in the order in which any two ranks exchange it.
        """
    def deliver(self) -> None:
        """Verify all of the buffer, and copy it to its destinations."""
    def end(self) -> None:
        """Wait until nothing of the round touches memory any more, whatever came of it."""
