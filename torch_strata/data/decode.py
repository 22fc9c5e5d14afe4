"""From the bytes of a field to a value, by the name of what they are. Imports PIL only for a picture."""

import io
import json
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

__all__ = ["DECODERS", "Decoder"]

Decoder = Callable[[memoryview], Any]


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _image(data: memoryview) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def _raw_image(data: memoryview) -> Any:
    """MosaicML's ``pil``: width, height, length of the mode, the mode, the pixels (streaming/base/format/mds)."""
    from PIL import Image

    width, height, length = struct.unpack_from("<III", data)
    mode, pixels = str(data[12 : 12 + length], "utf-8"), data[12 + length :]
    return Image.frombytes(mode, (width, height), bytes(pixels))


# Pickles are never opened: they stay bytes.
DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "json": lambda data: json.loads(_text(data)),
        **dict.fromkeys(("txt", "text", "str"), _text),
        **dict.fromkeys(("cls", "cls2", "id", "index", "count", "str_int"), lambda data: int(_text(data))),
        "str_float": lambda data: float(_text(data)),
        "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
        **dict.fromkeys(("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "webp"), _image),
        "pil": _raw_image,
    }
)
