"""`strata diff`: what changed, worked out here by torch."""

import pytest
import torch

from tests.checkpoint.states import save
from tests.cli.commands import damage_frozen, make_run, stock_save, strata, strata_json
from torch_strata.checkpoint._dtypes import as_floats

FLOATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_value_of_a_dtype_is_what_torch_says(dtype):
    if dtype.itemsize == 1:
        raw = torch.arange(256).to(torch.uint8)
    else:
        raw = torch.randint(0, 256, (4096 * dtype.itemsize,), dtype=torch.uint8)
    expected = raw.view(dtype).to(torch.float64)
    found = torch.from_numpy(as_floats(raw.numpy(), str(dtype).removeprefix("torch.")).copy())
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_equal_checkpoints_are_equal_whoever_wrote_them(tmp_path):
    state = {"w": torch.randn(100, 10), "b": torch.ones(3, dtype=torch.bfloat16), "n": {"lr": 0.1}, "z": torch.empty(0)}
    save(state, tmp_path / "ours")
    stock_save(state, tmp_path / "stock")
    torch.save(state, tmp_path / "state.pt")
    for other in ("stock", "state.pt"):
        done = strata("diff", tmp_path / "ours", tmp_path / other)
        assert done.exit_code == 0 and done.stdout.startswith("equal: 4 keys"), done.output


def test_a_change_is_counted_and_measured(tmp_path):
    before = {
        "w": torch.randn(300, 70),
        "h": torch.randn(1000).to(torch.bfloat16),
        "i": torch.arange(50),
        "c": torch.randn(8, dtype=torch.complex64),
        "same": torch.ones(9),
        "value": {"lr": 1.0},
    }
    after = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in before.items()}
    after["w"][::3] += 0.5
    after["h"][7] = 3.0
    after["i"][:5] = -4
    after["c"][2] += 1j
    after["value"] = {"lr": 2.0}
    save(before, tmp_path / "a")
    save(after, tmp_path / "b")
    found = strata_json("diff", tmp_path / "a", tmp_path / "b")
    assert strata("diff", tmp_path / "a", tmp_path / "b").exit_code == 1
    assert not found["is_equal"] and found["changed_values"] == ["value.lr"] and found["num_equal"] == 1
    changes = {change["fqn"]: change for change in found["changed"]}
    assert set(changes) == {"w", "h", "i", "c"}
    for key, change in changes.items():
        kind = torch.complex128 if before[key].is_complex() else torch.float64
        x, y = before[key].to(kind), after[key].to(kind)
        expected = [
            (before[key] != after[key]).double().mean(),
            *(x.norm(), y.norm(), (y - x).norm(), (y - x).abs().max()),
        ]
        names = ("changed_fraction", "norm_a", "norm_b", "norm_of_difference", "largest_difference")
        assert [change[name] for name in names] == pytest.approx([float(value.real) for value in expected]), key


def test_keys_and_shapes_that_differ_are_named(tmp_path):
    save({"a": torch.ones(2), "both": torch.ones(2), "kind": 1, "odd\nname": 1}, tmp_path / "a")
    save({"b": torch.ones(2), "both": torch.ones(2, 1), "kind": torch.ones(1)}, tmp_path / "b")
    found = strata_json("diff", tmp_path / "a", tmp_path / "b")
    assert (found["only_a"], found["only_b"]) == (["a", "odd\nname"], ["b"])
    assert found["unlike"]["both"] == "float32 [2] became float32 [2, 1]"
    assert found["unlike"]["kind"] == "a pickled value became a tensor"
    text = strata("diff", tmp_path / "a", tmp_path / "b").stdout
    assert "only in A: 'odd\\nname'" in text and "unlike: 'both'" in text


def test_what_digests_say_is_not_read(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=2)
    damage_frozen(tmp_path / "run" / "step-1")  # a read would find it
    found = strata_json("diff", tmp_path / "run" / "step-1", tmp_path / "run" / "step-2")
    assert found["num_by_digest"] == 1 and [change["fqn"] for change in found["changed"]] == ["model.head"]


def test_a_difference_in_nan_is_a_difference(tmp_path):
    save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "a")
    save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "b")
    done = strata("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert done.exit_code == 1 and '"largest_difference": null' in done.stdout
    assert strata("diff", tmp_path / "b", tmp_path / "b").exit_code == 0


def test_damage_and_absence_are_no_difference(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=1)
    stock_save({"model": {"frozen": torch.ones(300, 200)}}, tmp_path / "other")
    damage_frozen(tmp_path / "run" / "step-1")
    done = strata("diff", tmp_path / "other", tmp_path / "run" / "step-1")
    assert done.exit_code == 2 and "ChecksumError" in done.stderr
    assert strata("diff", tmp_path / "other", tmp_path / "nowhere").exit_code == 2


def test_a_change_in_one_part_is_measured_against_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_strata.checkpoint.compare._BATCH_BYTES", 1000)
    monkeypatch.setattr("torch_strata.checkpoint.compare._AT_ONCE", 100)
    before = torch.randn(40, 50)
    after = before.clone()
    after[37, 3] += 1
    save({"w": before, "same": torch.ones(3000)}, tmp_path / "a")
    save({"w": after, "same": torch.ones(3000)}, tmp_path / "b")
    (change,) = strata_json("diff", tmp_path / "a", tmp_path / "b")["changed"]
    assert change["changed_fraction"] == 1 / 2000
    assert [change["norm_a"], change["norm_b"]] == pytest.approx([float(t.double().norm()) for t in (before, after)])
    assert change["norm_of_difference"] == pytest.approx(float((after.double() - before.double()).norm()))
