"""Views, aliases and strides: what is written is the view, what is read lands in the view and nowhere else."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.states import failure_of, load, same_bits, save
from torch_strata import LayoutMismatchError


def bytes_on_disk(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def source_views() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "transposed": base.permute(2, 0, 1),
        "column": base[:, :, 1],
        "every_second": torch.arange(20.0)[::2],
        "reversed_dims": base.t() if base.dim() == 2 else base.transpose(0, 2),
        "channels_last": torch.arange(48.0).reshape(1, 2, 4, 6).contiguous(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 5),
        "overlapping": torch.arange(6.0).as_strided((4, 3), (1, 1)),
        "offset": torch.arange(100.0)[37:41],
        "scalar_of_many": torch.arange(10.0)[3],
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch._neg_view(torch.arange(4.0)),
        "imaginary": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "one_wide": torch.arange(6.0).reshape(1, 6)[:, 2:3],
        "parameter": torch.nn.Parameter(torch.arange(5.0)),
    }


def test_views_are_stored_as_what_they_show(tmp_path):
    state = source_views()
    save(state, tmp_path / "c")
    out = {key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in state.items()}
    load(out, tmp_path / "c")
    assert [key for key in state if not torch.equal(out[key].detach(), state[key].detach())] == []


def test_stock_reads_our_views(tmp_path):
    state = source_views()
    save(state, tmp_path / "c")
    out = {key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in state.items()}
    dcp.load(out, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert [key for key in state if not torch.equal(out[key].detach(), state[key].detach())] == []


def test_a_small_view_does_not_drag_its_storage_along(tmp_path):
    big = torch.arange(4 << 20, dtype=torch.float32)
    save({"slice": big[1000:1256], "column": big.view(2048, 2048)[:, 7]}, tmp_path / "c")
    assert bytes_on_disk(tmp_path / "c") < 200_000


def test_tied_weights_are_written_once_and_load_tied_or_apart(tmp_path):
    weight = torch.nn.Parameter(torch.randn(256, 256))
    save({f"w{i}": weight for i in range(8)}, tmp_path / "c")
    assert bytes_on_disk(tmp_path / "c") < 2 * weight.nbytes
    tied = torch.zeros(256, 256)
    load({f"w{i}": tied for i in range(8)}, tmp_path / "c")
    apart = {f"w{i}": torch.zeros(256, 256) for i in range(8)}
    load(apart, tmp_path / "c")
    assert same_bits(tied, weight)
    assert all(same_bits(value, weight) for value in apart.values())


def test_destinations_of_any_stride_are_filled_in_place_and_neighbours_stay(tmp_path):
    values = {"t": torch.arange(12.0).view(3, 4), "col": torch.arange(5.0), "cl": torch.arange(120.0).view(1, 3, 4, 10)}
    save(values, tmp_path / "c")
    board = torch.full((5, 7), -1.0)
    out = {
        "t": torch.zeros(4, 3).t(),
        "col": board[:, 3],
        "cl": torch.zeros(1, 3, 4, 10).contiguous(memory_format=torch.channels_last),
    }
    places = {key: value.data_ptr() for key, value in out.items()}
    kept = dict(out)
    load(out, tmp_path / "c")
    assert all(torch.equal(kept[key], values[key]) and kept[key].data_ptr() == places[key] for key in values)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[:, 3] = False
    assert (board[mask] == -1).all()


def test_special_destinations_are_filled_in_place(tmp_path):
    save(
        {"p": torch.arange(4.0), "inf": torch.arange(3.0), "neg": torch.arange(4.0), "conj": torch.ones(2) * 2j},
        tmp_path / "c",
    )
    with torch.inference_mode():
        inference = torch.zeros(3)
    parameter, below, conjugated = (
        torch.nn.Parameter(torch.zeros(4)),
        torch.zeros(4),
        torch.zeros(2, dtype=torch.complex64),
    )
    load({"p": parameter, "inf": inference, "neg": torch._neg_view(below), "conj": conjugated.conj()}, tmp_path / "c")
    assert parameter.tolist() == [0, 1, 2, 3] and parameter.requires_grad and parameter.is_leaf
    assert inference.tolist() == [0, 1, 2]
    assert below.tolist() == [0, -1, -2, -3]
    assert conjugated.tolist() == [-2j, -2j]


def test_autograd_notices_that_a_load_changed_a_tensor(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "c")
    weight = torch.zeros(3)
    loss = (torch.ones(3, requires_grad=True) * weight).sum()
    load({"w": weight}, tmp_path / "c")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "destination",
    [
        torch.zeros(1).expand(4),
        torch.zeros(2, 1).expand(2, 2).t().reshape(-1)[:1].expand(4),
        torch.zeros(9).as_strided((2, 2), (1, 1)),
    ],
    ids=["expanded", "expanded_again", "overlapping"],
)
def test_a_destination_whose_elements_share_memory_is_refused(tmp_path, destination):
    save({"w": torch.arange(4.0).reshape(destination.shape), "other": torch.ones(2)}, tmp_path / "c")
    other = torch.zeros(2)
    error = failure_of(lambda: load({"w": destination, "other": other}, tmp_path / "c"))
    assert isinstance(error, LayoutMismatchError) and "'w'" in str(error)
    assert other.tolist() == [0, 0]
