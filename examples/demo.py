"""The whole story of a checkpoint in one command: train, kill in the middle of a save, resume, verify, read elsewhere.

    python examples/demo.py                        # in a temporary directory
    python examples/demo.py --storage s3://demo    # against a moto server, started and ended here

`examples/train_fsdp.py` does the training. This script runs it four times, checks what torch_strata promises, and
prints a table; it exits with 1 and one line that begins "demo failed:" if a promise does not hold. A run has a
directory or prefix of its own under `--storage`, so it never touches what lies there. Nothing it starts outlives it.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from torch_strata import CheckpointManager, StrataReader, verify
from torch_strata.errors import StrataError

TRAIN = Path(__file__).with_name("train_fsdp.py")
RUN_LIMIT = 240.0  # seconds for one training run: about twenty times what it takes on two idle cores
# Another world size adds the same gradients in another order, and in fp32 the last bits depend on that: measured,
# the losses then differ by 1e-7. Two steps after a resume without the random state they differ by 2e-3, and with
# AdamW's step count off by one by 5e-5.
LOSS_RTOL = 1e-5


class BrokenPromiseError(Exception):
    """Something that torch_strata promises did not hold; the message says what."""


def require(holds: bool, otherwise: str) -> None:
    """Raise BrokenPromiseError with the sentence `otherwise` unless `holds`."""
    if not holds:
        raise BrokenPromiseError(otherwise)


# Storage -----------------------------------------------------------------------------------------------------------


def s3_objects(url: str) -> Iterator[tuple[str, str, str]]:
    """(bucket, key, name relative to the URL) of each object under an s3:// URL."""
    import boto3

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix + "/")
    for page in pages:
        for entry in page.get("Contents", []):
            yield bucket, entry["Key"], entry["Key"].removeprefix(prefix + "/")


def object_names(url: str) -> list[str]:
    """Names of the objects of a checkpoint, relative to its URL; none where there is nothing."""
    if url.startswith("s3://"):
        return [name for _, _, name in s3_objects(url)]
    root = Path(url)
    return [path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()]


def is_data(name: str) -> bool:
    """Whether an object holds tensors."""
    return name.endswith(".distcp")


def is_manifest(name: str) -> bool:
    """Whether an object is a manifest: its presence is what commits a checkpoint."""
    return re.fullmatch(r"\.strata/\d{20}", name) is not None


def local_copy(url: str, directory: Path) -> Path:
    """A directory with the objects of a checkpoint: its own if it is local, otherwise downloaded to `directory`."""
    if not url.startswith("s3://"):
        return Path(url)
    import boto3

    client = boto3.client("s3")
    for bucket, key, name in s3_objects(url):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(target))
    return directory


@contextlib.contextmanager
def moto_server(bucket: str) -> Iterator[str]:
    """An S3 server on loopback with one empty bucket, named to us and our children by the environment.

    Yields:
        The server's endpoint. The server, and all that it stored in memory, is gone when the block ends.
    """
    # It picks a free port itself and says which: no port is chosen here that another could take in between.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        endpoint = moto_endpoint(server)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            os.environ.pop(name, None)  # real credentials have no business on this server
        os.environ.update(
            AWS_ENDPOINT_URL=endpoint,
            AWS_ACCESS_KEY_ID="demo",
            AWS_SECRET_ACCESS_KEY="demo-secret",
            AWS_REGION="us-east-1",
            AWS_DEFAULT_REGION="us-east-1",
        )
        import boto3

        boto3.client("s3").create_bucket(Bucket=bucket)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def moto_endpoint(server: subprocess.Popen[str]) -> str:
    """Read the server's log until it names its address, and leave a thread that keeps the pipe empty."""
    found: list[str] = []
    ready = threading.Event()
    stderr = server.stderr
    assert stderr is not None

    def drain() -> None:
        for line in stderr:
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
            if address and not found:
                found.append(address.group())
                ready.set()
        ready.set()  # the server ended

    threading.Thread(target=drain, daemon=True).start()
    ready.wait(timeout=60)
    if not found:
        raise BrokenPromiseError("the moto server did not say within 60 s where it listens")
    return found[0]


# Training runs -----------------------------------------------------------------------------------------------------


class Training:
    """One run of train_fsdp.py under torchrun, with its journal. Leaving the `with` block ends all its processes."""

    def __init__(self, *, world_size: int, storage: str, journal: Path, options: list[str]) -> None:
        self.journal = journal
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        script = [str(TRAIN), f"--storage={storage}", f"--journal={journal}", *options]
        self.process = subprocess.Popen(
            launcher + script,
            # Beside the journal, because torchrun leaves its temporary files when it is killed.
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(journal.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        # All processes of the run hold this pipe, so its end tells that the last of them is gone.
        self.output = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.output = self.process.stdout.read()

    def __enter__(self) -> "Training":
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left of the run."""
        if self.reader.is_alive():
            # torchrun ends its workers on SIGTERM, those too that have not told us their ids yet.
            self.process.terminate()
            self.reader.join(timeout=10)
        self.kill()

    def events(self) -> list[dict[str, Any]]:
        """What rank 0 has written so far."""
        if not self.journal.exists():
            return []
        # A last line without its end is still being written.
        return [json.loads(line) for line in self.journal.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait(self) -> list[dict[str, Any]]:
        """Block until the run has ended well, and return its events."""
        try:
            status = self.process.wait(timeout=RUN_LIMIT)
        except subprocess.TimeoutExpired:
            raise BrokenPromiseError(f"a training run took longer than {RUN_LIMIT:.0f} s") from None
        self.reader.join(timeout=10)
        if status != 0:
            print(self.output, file=sys.stderr)
            raise BrokenPromiseError(f"a training run ended with status {status}; its output stands above")
        return self.events()

    def wait_for(self, what: str, has_happened: Callable[[], bool]) -> None:
        """Block until `has_happened()`; the run must still be alive then."""
        give_up_at = time.monotonic() + RUN_LIMIT
        while not has_happened():
            if self.process.poll() is not None:
                self.reader.join(timeout=10)
                print(self.output, file=sys.stderr)
                raise BrokenPromiseError(f"the run ended before {what}; its output stands above")
            require(time.monotonic() < give_up_at, f"{what} did not happen within {RUN_LIMIT:.0f} s")
            time.sleep(0.001)

    def kill(self) -> None:
        """SIGKILL every process of the run and wait until all are gone."""
        workers = [pid for event in self.events() if event["event"] == "started" for pid in event["pids"]]
        if self.reader.is_alive():
            # torchrun puts each worker in a session of its own: a signal to torchrun's group would miss them.
            for pid in [*workers, self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reader.join(timeout=30)
        self.process.wait(timeout=30)


# What is compared --------------------------------------------------------------------------------------------------


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    """The loss after each step of a run, to the last bit."""
    return {event["step"]: float.fromhex(event["exact"]) for event in events if event["event"] == "loss"}


def resumed_step(events: list[dict[str, Any]]) -> int:
    """The step a run went on from."""
    (step,) = [int(event["step"]) for event in events if event["event"] == "resumed"]
    return step


def seconds_of(events: list[dict[str, Any]], kind: str) -> list[float]:
    """How long each event of a kind took, in seconds, in their order."""
    return [float(event["seconds"]) for event in events if event["event"] == kind]


def flatten(state: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts and lists, by their path."""
    if isinstance(state, dict):
        children = list(state.items())
    elif isinstance(state, (list, tuple)):
        children = list(enumerate(state))
    else:
        return {path: state}
    return {key: leaf for name, child in children for key, leaf in flatten(child, f"{path}/{name}").items()}


def load_whole(reader: StorageReader) -> dict[str, Any]:
    """Every value of a checkpoint, in one process, by its path."""
    with warnings.catch_warnings():
        # It guesses that one process is meant, and says so. One process is meant.
        warnings.filterwarnings("ignore", "torch.distributed is unavailable or uninitialized")
        return flatten(_load_state_dict_from_keys(storage_reader=reader))


def same_bits(left: Any, right: Any) -> bool:
    """Whether two values are equal: tensors in dtype, shape and every bit."""
    if not isinstance(left, torch.Tensor):
        return type(left) is type(right) and left == right
    if not isinstance(right, torch.Tensor) or left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def require_same_state(left: dict[str, Any], right: dict[str, Any], what: str) -> None:
    """Raise BrokenPromiseError unless two flat states hold the same values under the same paths."""
    require(left.keys() == right.keys(), f"{what}: keys differ: {sorted(left.keys() ^ right.keys())[:5]}")
    different = [path for path in left if not same_bits(left[path], right[path])]
    require(not different, f"{what}: {len(different)} values differ, for instance {different[:1]}")


# The story ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Where a demo works and how much it trains."""

    storage: str
    scratch: Path
    steps: int
    save_every: int
    train_options: list[str]

    @property
    def killed_step(self) -> int:
        """The save that is not allowed to finish: one with others before and after it."""
        return (self.steps // self.save_every // 2 + 1) * self.save_every

    def training(self, name: str, *options: str, world_size: int, run: str) -> Training:
        """Start a training run that saves under `run`."""
        sizes = [f"--steps={self.steps}", f"--save-every={self.save_every}", *self.train_options]
        journal = self.scratch / f"{name}.jsonl"
        print(f"{name} ...", flush=True)
        return Training(
            world_size=world_size, storage=f"{self.storage}/{run}", journal=journal, options=[*sizes, *options]
        )

    def tell(self) -> list[tuple[str, str]]:
        """Run everything and return the rows of the table.

        Raises:
            BrokenPromiseError: If a promise does not hold.
        """
        with self.training("train without interruption", world_size=2, run="reference") as training:
            reference_events = training.wait()
        reference = losses(reference_events)
        killed = self.kill_in_a_save()
        first, one_rank = self.resume_on_one_rank(reference)
        two_ranks = self.resume_on_two_ranks(reference, first)
        return [
            ("uninterrupted", f"{len(reference)} steps on 2 ranks, last loss {reference[self.steps]:.4f}"),
            ("killed", killed),
            ("resumed step", str(first)),
            ("losses, 1 rank", one_rank),
            ("losses, 2 ranks", two_ranks),
            ("kept", self.require_kept()),
            *self.examine(f"{self.storage}/killed/step-{self.steps}", reference_events),
        ]

    def kill_in_a_save(self) -> str:
        """Train again, and SIGKILL all processes once the save of `killed_step` has begun to write."""
        checkpoint = f"{self.storage}/killed/step-{self.killed_step}"
        with self.training("train, kill in a save", world_size=2, run="killed") as training:
            saving = {"event": "saving", "step": self.killed_step}
            training.wait_for(f"the save of step {self.killed_step}", lambda: saving in training.events())
            training.wait_for("its first data object", lambda: any(is_data(name) for name in object_names(checkpoint)))
            training.kill()
        names = object_names(checkpoint)
        # The signal can come too late, for instance on a loaded machine. Then the checkpoint is whole, which is
        # the other state that may be found after a crash.
        found = "a manifest" if any(map(is_manifest, names)) else "no manifest"
        return f"SIGKILL in the save of step {self.killed_step}: {sum(map(is_data, names))} data objects, {found}"

    def resume_on_one_rank(self, reference: dict[int, float]) -> tuple[int, str]:
        """Finish on another world size, from what the kill left, which stays as it is.

        Returns:
            The step of the checkpoint that was found, and how the losses compare.
        """
        name = "resume on 1 rank"
        with self.training(name, "--resume", "--no-save", world_size=1, run="killed") as training:
            events = training.wait()
        first = resumed_step(events)
        possible = (self.killed_step - self.save_every, self.killed_step)
        require(first in possible, f"resumed at step {first}, where only {possible} can have been committed")
        found = losses(events)
        require(sorted(found) == list(range(first + 1, self.steps + 1)), f"{name}: did other steps: {sorted(found)}")
        worst = max(abs(loss / reference[step] - 1) for step, loss in found.items())
        require(worst <= LOSS_RTOL, f"{name}: a loss is off by {worst:.1e}, where {LOSS_RTOL:.0e} is allowed")
        return first, f"{len(found)} of {len(found)} equal but for the order of summation (worst {worst:.0e})"

    def resume_on_two_ranks(self, reference: dict[int, float], first: int) -> str:
        """Finish on the same world size, and compare losses and the last checkpoint with the uninterrupted run."""
        name = "resume on 2 ranks"
        with self.training(name, "--resume", world_size=2, run="killed") as training:
            events = training.wait()
        require(resumed_step(events) == first, f"{name}: began at step {resumed_step(events)}, not at {first}")
        expected = {step: loss for step, loss in reference.items() if step > first}
        found = losses(events)
        different = sorted(step for step in expected.keys() | found.keys() if expected.get(step) != found.get(step))
        require(not different, f"{name}: the loss differs from the uninterrupted run's at steps {different}")
        return f"{len(found)} of {len(found)} equal bit for bit"

    def require_kept(self) -> str:
        """What the manager's policy has left of the run that was killed: the newest two, and no trace of the others."""
        kept = [found.step for found in CheckpointManager(f"{self.storage}/killed").all()]
        require(kept == [self.steps - self.save_every, self.steps], f"the newest two were to be kept, found {kept}")
        gone = f"{self.storage}/killed/step-{self.save_every}"
        require(not object_names(gone), f"{gone} was to go, found {object_names(gone)[:3]}")
        return f"the newest 2, of steps {kept[0]} and {kept[1]}"

    def examine(self, checkpoint: str, reference_events: list[dict[str, Any]]) -> list[tuple[str, str]]:
        """Verify the last checkpoint, compare it with the uninterrupted run's, and read it with stock torch."""
        print("verify, and read with stock torch ...", flush=True)
        report = verify(checkpoint)
        require(not report.problems, f"verify of {checkpoint}: {'; '.join(report.problems)}")
        require(report.blocks > 0, f"verify of {checkpoint} found no block to verify")
        require(report.unverified_bytes == 0, f"{checkpoint} has {report.unverified_bytes} bytes without a digest")

        ours = load_whole(StrataReader(checkpoint))
        require(ours["/step"] == self.steps, f"{checkpoint} says it is of step {ours['/step']}")
        uninterrupted = load_whole(StrataReader(f"{self.storage}/reference/step-{self.steps}"))
        require_same_state(ours, uninterrupted, "the last checkpoints of the resumed and the uninterrupted run")

        directory = local_copy(checkpoint, self.scratch / "downloaded")
        require_same_state(ours, load_whole(FileSystemReader(directory)), "stock FileSystemReader against StrataReader")
        single_file = self.scratch / "single.pt"
        dcp_to_torch_save(directory, single_file)
        by_torch = flatten(torch.load(single_file, weights_only=True))
        require_same_state(ours, by_torch, "dcp_to_torch_save against StrataReader")

        seconds = statistics.median(seconds_of(reference_events, "saved"))
        # The first copy goes to memory that no save has used before.
        stall = statistics.median(seconds_of(reference_events, "copied")[1:])
        (memcpy,) = seconds_of(reference_events, "memcpy")
        return [
            ("checkpoint", f"{report.read_bytes / 1e6:.1f} MB in {report.objects} objects"),
            ("save", f"{report.read_bytes / 1e9 / seconds:.2f} GB/s, {seconds:.2f} s to the commit, beside training"),
            ("training stood", f"{stall * 1e3:.1f} ms a save; memcpy of its tensors takes {memcpy * 1e3:.1f} ms"),
            ("verified", f"{report.blocks} blocks, no problem"),
            ("stock torch", f"{len(ours)} values equal bit for bit"),
        ]


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The demo's options, and those that go on to train_fsdp.py."""
    parser = argparse.ArgumentParser(
        description="Train, kill, resume, verify. Options not listed here go on to train_fsdp.py.", allow_abbrev=False
    )
    parser.add_argument(
        "--storage",
        help="a directory or s3://bucket[/prefix]; without AWS_ENDPOINT_URL in the environment, s3:// means a moto "
        "server started for this demo (default: a temporary directory)",
    )
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=3, help="steps from one checkpoint to the next")
    args, train_options = parser.parse_known_args()
    if args.save_every < 1 or args.steps % args.save_every or args.steps < 3 * args.save_every:
        parser.error("--steps must be a multiple of --save-every, at least three times as large")
    on_s3 = args.storage is not None and args.storage.startswith("s3://")
    if args.storage is not None and "://" in args.storage and not on_s3:
        parser.error(f"--storage {args.storage}: the demo looks into it, and can do so in a directory or s3://")
    if on_s3 and not all(map(importlib.util.find_spec, ("boto3", "moto"))):
        parser.error("s3:// needs the packages boto3 and moto[server]")
    return args, train_options


def main() -> int:
    """Run the demo; 0 if all promises hold."""
    args, train_options = parse_arguments()
    try:
        run(args, train_options)
    except CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        print(f"demo failed: {'; '.join(causes)}", file=sys.stderr)
        return 1
    except (BrokenPromiseError, StrataError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace, train_options: list[str]) -> None:
    """Prepare the storage, tell the story, print the table, and remove what was prepared."""
    started_at = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the blocks below clean up
    with contextlib.ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="strata-demo-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        parent = args.storage.rstrip("/") if args.storage else str(scratch)
        if parent.startswith("s3://") and "AWS_ENDPOINT_URL" not in os.environ:
            stack.enter_context(moto_server(parent.removeprefix("s3://").partition("/")[0]))
        demo = Demo(
            storage=f"{parent}/demo-{secrets.token_hex(4)}",
            scratch=scratch,
            steps=args.steps,
            save_every=args.save_every,
            train_options=train_options,
        )
        print(f"storage: {demo.storage}", flush=True)
        table = demo.tell()
        table.append(("time", f"{time.monotonic() - started_at:.0f} s"))
        width = max(len(name) for name, _ in table)
        print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in table))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
