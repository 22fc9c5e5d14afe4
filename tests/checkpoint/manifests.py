"""Manifest files changed by hand, without the code under test: the format is docs/concepts/checkpoint-format.md."""

import struct
import zlib
from collections.abc import Iterator
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


def refer(manifest: bytes, checkpoint_id: str, save_id: str, names: set[str]) -> bytes:
    """The manifest with the objects `names` held by another checkpoint of its run."""
    fields = bytearray()
    header = manifest[PREAMBLE_BYTES : PREAMBLE_BYTES + struct.unpack_from("<I", manifest, 8)[0]]
    for number_of_field, value in _fields(header):
        if number_of_field == OBJECTS and isinstance(value, bytes):
            is_named = dict(_fields(value))[OBJECT_NAME] in {name.encode() for name in names}
            fields += text(OBJECTS, value + (number(OBJECT_REFERENCE, 1) if is_named else b""))
        elif isinstance(value, bytes):
            fields += text(number_of_field, value)
        else:
            fields += number(number_of_field, value)
    fields += text(REFERENCES, text(REFERENCE_CHECKPOINT_ID, checkpoint_id) + text(REFERENCE_SAVE_ID, save_id))
    preamble = manifest[:8] + struct.pack("<II", len(fields), zlib.crc32(fields))
    return preamble + bytes(fields) + manifest[PREAMBLE_BYTES + len(header) :]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field; of the kinds of field that a manifest has."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if key & 7 == 0:
            yield key >> 3, value
        else:
            yield key >> 3, message[at : at + value]
            at += value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at
