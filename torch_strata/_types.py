"""Shapes of what travels between Python and the Rust core. Imports no torch."""

__all__ = ["RunInfo", "TensorEntry"]

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

RunInfo = tuple[
    int,  # step
    int,  # epoch
    str,  # type, "full"
    dict[str, str],  # the user's metadata
    dict[str, float],  # the user's metrics
]
"""What a manager says of a checkpoint of its run."""
