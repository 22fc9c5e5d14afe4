"""`strata prune`: what goes, what stays, and that a run beside it is not fenced off."""

import pytest

from tests.checkpoint.states import load, save
from tests.cli.commands import make_run, state_at, strata, strata_json
from torch_strata import StorageConfig, _native
from torch_strata._store import open_store
from torch_strata.checkpoint._generation import newest_generation
from torch_strata.checkpoint.run import open_run


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    make_run(str(root), tmp_path, steps=6)
    return root


def folders(root):
    return [one["folder"] for one in strata_json("ls", root)["checkpoints"] if one["state"] == "committed"]


def test_a_dry_run_says_what_would_go_and_removes_nothing(run):
    before = sorted(path for path in run.rglob("*") if path.is_file())
    done = strata("prune", run, "--keep-last", 2, "--keep-best", "loss:max:1", "--dry-run")
    assert done.exit_code == 0 and "3 of 6 checkpoints would go" in done.stdout
    assert "it is one of the best 1 by loss" in done.stdout
    assert sorted(path for path in run.rglob("*") if path.is_file()) == before
    report = strata_json("prune", run, "--keep-last", 2, "--dry-run")
    assert [one["folder"] for one in report["decisions"] if one["keeps"]] == ["step-5", "step-6"]


def test_what_stays_loads_though_what_it_refers_to_has_gone(run):
    done = strata("prune", run, "--keep-last", 1, "--yes")
    assert done.exit_code == 0 and done.stdout.splitlines()[-1].startswith("removed 5 checkpoints")
    assert folders(run) == ["step-6"]
    assert strata("verify", run).exit_code == 0
    found = state_at(0)
    load(found, run / "step-6")
    assert found["step"] == 6 and found["model"]["frozen"][299, 199] == 59_999


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (["--keep-every-steps", "3"], ["step-3", "step-6"]),
        (["--keep-every-steps", "4", "--keep-best", "loss:max:2"], ["step-1", "step-2", "step-4", "step-6"]),
        (["--younger", "1h"], [f"step-{n}" for n in range(1, 7)]),
        (["--keep-every", "1h"], ["step-1", "step-6"]),
        ([], [f"step-{n}" for n in range(1, 7)]),
    ],
)
def test_each_policy_keeps_what_it_says(run, policy, kept):
    assert strata("prune", run, *policy, "--yes").exit_code == 0
    assert folders(run) == kept


def test_nothing_goes_without_a_yes(run):
    done = strata("prune", run, "--keep-last", 1, input="n\n")
    assert done.exit_code == 2 and len(folders(run)) == 6
    assert strata("prune", run, "--keep-last", 1, input="").exit_code == 2 and len(folders(run)) == 6
    assert strata("prune", run, "--keep-last", 1, input="y\n").exit_code == 0 and len(folders(run)) == 1


def test_what_is_held_or_verified_stays(run):
    native = open_run(str(run), StorageConfig())
    native.pin("step-2", "evaluation")
    assert strata("verify", run / "step-3").exit_code == 0
    native.note_verified("step-3", strata_json("inspect", run / "step-3")["save_id"])
    assert strata("prune", run, "--keep-last", 1, "--yes").exit_code == 0
    assert folders(run) == ["step-2", "step-3", "step-6"]


def test_a_running_job_saves_on_after_a_prune(tmp_path):
    root = tmp_path / "run"
    for step in (1, 2):
        save(state_at(step), root / f"step-{step}", run_root=root)
    before = newest_generation(open_store(root, StorageConfig()))
    assert before == 1 and strata("prune", root, "--keep-last", 1, "--yes").exit_code == 0
    save(state_at(3), root / "step-3", run_root=root)  # of the same process and generation
    assert newest_generation(open_store(root, StorageConfig())) == before


def test_a_run_that_begins_meanwhile_ends_the_prune(run, monkeypatch):
    class Run:
        def __init__(self, native):
            self.native = native

        def plan(self):
            found = self.native.plan()
            _native.claim_generation(open_store(run, StorageConfig()), owner="a new run")
            return found

        def __getattr__(self, name):
            return getattr(self.native, name)

    monkeypatch.setattr("torch_strata.cli.prune.open_run", lambda *args, **kwargs: Run(open_run(*args, **kwargs)))
    done = strata("prune", run, "--keep-last", 1, "--yes")
    assert done.exit_code == 2 and "StaleGenerationError" in done.stderr and len(folders(run)) == 6


@pytest.mark.parametrize(
    "wrong",
    [
        ["--keep-last", "0"],
        ["--keep-last", "-1"],
        ["--keep-last", "x"],
        ["--keep-every-steps", "0"],
        ["--keep-best", "loss"],
        ["--keep-best", "loss:most:1"],
        ["--keep-best", "loss:min:0"],
        ["--younger", "7"],
        ["--younger", "0s"],
        ["--keep-every", "9" * 40 + "d"],
        ["--json"],
    ],
)
def test_a_wrong_policy_is_refused(run, wrong):
    done = strata("prune", run, *wrong)
    assert done.exit_code == 2 and "Error" in done.stderr and len(folders(run)) == 6


def test_what_no_manager_saved_is_not_touched(tmp_path):
    for step in (1, 2):
        save(state_at(step), tmp_path / f"step-{step}")
    assert strata("prune", tmp_path, "--keep-last", 1, "--yes").exit_code == 0
    assert folders(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("flags", [["--dry-run"], ["--yes"], ["--dry-run", "--json"]])
def test_what_is_no_run_is_no_run_to_prune(tmp_path, run, flags):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("nothing of ours")
    for place in ("nosuch", "else"):
        done = strata("prune", tmp_path / place, "--keep-last", 1, *flags)
        assert done.exit_code == 2 and done.stdout == "" and "CheckpointNotFoundError" in done.stderr
    done = strata("prune", run / "step-3", *flags)
    assert done.exit_code == 2 and "name the root of its run" in done.stderr
    assert not (tmp_path / "nosuch").exists()


def test_a_run_that_has_saved_nothing_yet_is_pruned_of_nothing(tmp_path):
    _native.claim_generation(open_store(tmp_path / "run", StorageConfig()), owner="a run that begins")
    done = strata("prune", tmp_path / "run", "--keep-last", 1, "--yes")
    assert done.exit_code == 0 and "removed 0 checkpoints" in done.stdout


@pytest.mark.parametrize("flag", ["--dry-run", "--yes"])
def test_a_metric_that_no_checkpoint_has_is_told(run, flag):
    done = strata("prune", run, "--keep-best", "acc:max:2", "--keep-best", "loss:max:1", flag)
    assert done.exit_code == 0 and done.stderr.count("no checkpoint has") == 1
    assert "no checkpoint has the metric 'acc', which keeps none: those that there are: loss" in done.stderr
    assert strata("prune", run, "--keep-best", "loss:max:2", flag).stderr == ""
