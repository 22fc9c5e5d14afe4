"""Shapes of what travels between Python and the Rust core. Imports no torch."""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch_strata._native import SharedBytes

__all__ = ["DataColumn", "EntryColumns", "RunInfo", "StockParts", "TensorEntry"]

TensorEntry = tuple[
    bytes,  # fqn
    bool,  # whether it is a tensor; for a pickled value only the fqn matters
    str,  # dtype, "float32"
    tuple[int, ...],  # size
    tuple[int, ...] | None,  # strides, if known
    bool,  # requires_grad
    bool,  # pin_memory
    int,  # number of torch's _MEM_FORMAT_ENCODING
    str,  # layout, "strided"
    list[tuple[int, ...]],  # offsets of each chunk
    list[tuple[int, ...]],  # size of each chunk
]
"""One entry of state_dict_metadata."""

EntryColumns = tuple[
    list[bytes],  # fqns, in the order of the state_dict
    list[
        tuple[
            str,  # dtype, "float32"
            bool,  # requires_grad
            bool,  # pin_memory
            int,  # number of torch's _MEM_FORMAT_ENCODING
            str,  # layout, "strided"
            bool,  # whether strides are known
        ]
    ],  # templates: what many tensors have in common
    # Integers of 64 bits, or of 32 where they suffice. To Rust as buffers of them, from there as type code, "q" or "i",
    # and little-endian bytes: the template of each name, -1 for a pickled value; its dims; sizes and strides, dims of
    # all names one after the other; where each name's chunks begin, and the end of the last; where each chunk's dims
    # begin, likewise; first element of each chunk, dims of all chunks one after the other; and from Rust their lengths,
    # likewise.
    list[Any],
]
"""What state_dict_metadata says of every name."""

StockParts = tuple[
    bytes,  # planner_data as opcodes, without head and stop
    bytes,  # storage_meta likewise
    int,  # where the memo goes on
    str,  # DCP's version of the format
    bool,  # whether this torch's TensorProperties have strides
]
"""What of a `.metadata` only its writer knows."""

RunInfo = tuple[
    int,  # step
    int,  # epoch
    str,  # type, "full"
    dict[str, str],  # the user's metadata
    dict[str, float],  # the user's metrics
]
"""What a manager says of a checkpoint of its run."""

DataValue = tuple[
    str,  # what it is: "array", or a name such as "json"; empty where the field's name says it
    str,  # dtype of an array, "float32"
    list[int],  # its shape
    "SharedBytes",  # its content
]
"""A value of a field."""

DataColumn = (
    tuple[
        Literal["array"],
        str,  # dtype
        list[int],  # shape of each value
        bytearray,  # all of them, one after the other, little-endian
    ]
    | tuple[Literal["each"], list[DataValue | None]]  # None for a sample that lacks the field
)
"""The values of a field in a batch."""
