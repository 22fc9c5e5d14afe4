"""The zip archive that torch.save writes, in one pass and in bounded memory. Imports no torch.

As the Rust core frames one tensor (native/strata-checkpoint/src/container/frame.rs): everything is stored, sizes and
checksums follow the data, and what is larger than 32 bits can say has its 64-bit field.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["TorchZip", "archive_bytes"]

_ALIGN = 64
_WIDE = 0xFFFF_FFFF
_UTF8, _DESCRIPTOR = 0x0800, 0x0008
_FIXED = (
    (".format_version", b"1"),
    (".storage_alignment", b"64"),
    ("byteorder", b"little"),
    ("version", b"3\n"),
)


class TorchZip:
    """Writes records one after another to `sink`: data.pkl first, then each storage."""

    def __init__(self, sink: Callable[[Any], None]) -> None:
        self._sink, self._at = sink, 0
        self._central: list[bytes] = []

    def begin(self, data_pkl: bytes) -> None:
        """Write the pickle and what torch.load wants to know of the archive."""
        for name, data in (("data.pkl", data_pkl), *_FIXED):
            self.add(name, len(data), [data])

    def add(self, name: str, num_bytes: int, chunks: Iterable[Any]) -> None:
        """Write a record; `chunks` are contiguous buffers, together `num_bytes` long."""
        full, header = f"archive/{name}".encode(), self._at
        self._put(_local_header(full, num_bytes, self._at))
        crc = 0
        for chunk in chunks:
            crc = zlib.crc32(chunk, crc)
            self._put(chunk)
        if num_bytes:
            self._put(
                struct.pack("<4sI" + ("QQ" if num_bytes >= _WIDE else "II"), b"PK\x07\x08", crc, *[num_bytes] * 2)
            )
        self._central.append(_central_entry(full, num_bytes, crc, header))

    def finish(self) -> None:
        """Write the directory of the archive."""
        start, directory, count = self._at, b"".join(self._central), len(self._central)
        self._put(directory)
        self._put(_end(start, len(directory), count))

    def _put(self, data: Any) -> None:
        self._sink(data)
        self._at += memoryview(data).nbytes


def archive_bytes(data_pkl: bytes, storages: Sequence[tuple[str, int]]) -> int:
    """Length of the archive of a pickle and storages, given as record's name and length in bytes."""
    at = directory = 0
    for name, size in [("data.pkl", len(data_pkl)), *((n, len(d)) for n, d in _FIXED), *storages]:
        full, header = f"archive/{name}".encode(), at
        at += len(_local_header(full, size, at)) + size + (0 if not size else 24 if size >= _WIDE else 16)
        directory += len(_central_entry(full, size, 0, header))
    return at + directory + len(_end(at, directory, 0))


def _local_header(name: bytes, num_bytes: int, at: int) -> bytes:
    wide = struct.pack("<HHQQ", 1, 16, num_bytes, num_bytes) if num_bytes >= _WIDE else b""
    padding = -(at + 30 + len(name) + len(wide) + 4) % _ALIGN
    extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return (
        struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, _flags(num_bytes), *[0] * 6, len(name), len(extra))
        + name
        + extra
    )


def _central_entry(name: bytes, num_bytes: int, crc: int, header: int) -> bytes:
    fields = [num_bytes, num_bytes] if num_bytes >= _WIDE else []
    if header >= _WIDE:
        fields.append(header)
    wide = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
    short, place = min(num_bytes, _WIDE), min(header, _WIDE)
    head = (b"PK\x01\x02", 0, 0, _flags(num_bytes), 0, 0, 0, crc, short, short, len(name), len(wide), 0, 0, 0, 0, place)
    return struct.pack("<4sHHHHHHIIIHHHHHII", *head) + name + wide


def _end(start: int, directory: int, count: int) -> bytes:
    # Stock writes the 64-bit records whatever the size.
    made_by_unix = 0x031E
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, made_by_unix, 45, 0, 0, count, count, directory, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + directory, 1)
    few = min(count, 0xFFFF)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, min(directory, _WIDE), min(start, _WIDE), 0)
    return end64 + locator + end


def _flags(num_bytes: int) -> int:
    return _UTF8 | _DESCRIPTOR if num_bytes else _UTF8
