"""Manifest files changed by hand, without the code under test: the format is docs/concepts/checkpoint-format.md."""

import struct
import zlib
from pathlib import Path

PREAMBLE_BYTES = 16

# Fields of strata.v1.ManifestHeader and of the messages in it.
MIN_READER_VERSION, REQUIRED_FEATURES, SAVE_ID, OBJECTS, REFERENCES = 1, 2, 4, 11, 12
OBJECT_NAME, OBJECT_SIZE, OBJECT_REFERENCE = 1, 2, 3
REFERENCE_CHECKPOINT_ID, REFERENCE_SAVE_ID = 1, 2


def manifest_of(place: Path) -> Path:
    """The only manifest, or the newest."""
    return max(path for path in (place / ".strata").iterdir() if path.is_file())


def number(field: int, value: int) -> bytes:
    """A field of a protobuf message, as a varint."""
    return _varint(field << 3) + _varint(value)


def text(field: int, value: str | bytes) -> bytes:
    """A field of a protobuf message, a string or a message."""
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def with_fields(manifest: bytes, fields: bytes) -> bytes:
    """The manifest with more at its header's end: of a single field the last value counts, a repeated one grows."""
    magic, length = manifest[:8], struct.unpack_from("<I", manifest, 8)[0]
    header = manifest[PREAMBLE_BYTES : PREAMBLE_BYTES + length] + fields
    body = manifest[PREAMBLE_BYTES + length :]
    return magic + struct.pack("<II", len(header), zlib.crc32(header)) + header + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
