"""S3 on loopback: the server, the physical limit in plain HTTP requests, s3torchconnector and torch_strata.

The limit is what a client can do that does nothing else: multipart PUTs and ranged GETs on threads of http.client,
from and into memory that is warm, neither signed nor hashed.
"""

import argparse
import http.client
import json
import subprocess
import threading
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _contenders as c
import _measure as m
import _memory
import _raw
import _state

MIB = 1 << 20
GB = 1_000_000_000
# moto refuses anonymous deletes but checks no signature, so a name without one is enough.
AUTHORIZATION = (
    f"AWS4-HMAC-SHA256 Credential=bench/20260101/{c.REGION}/s3/aws4_request, SignedHeaders=host, Signature=0"
)
COUNTERS_PATH = "/-/counters"


@dataclass(frozen=True, kw_only=True)
class HttpWay:
    """Size of a part or range, and how many are in flight."""

    part_mib: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.part_mib} MiB x {self.num_threads}"


WAYS = tuple(HttpWay(part_mib=p, num_threads=n) for p, n in ((8, 2), (8, 4), (16, 4), (64, 2), (64, 4)))


class Bucket:
    """One bucket of a server that asks for no signature."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._address = urllib.parse.urlsplit(endpoint).netloc
        self._name = name
        self._local = threading.local()

    def request(self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send one request on this thread's connection and return the response, its body not yet read."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(self._address, timeout=60)
        connection.request(method, target, body=body, headers={"Authorization": AUTHORIZATION, **(headers or {})})
        response = connection.getresponse()
        if response.status >= 300:
            text = response.read(500).decode(errors="replace")
            raise OSError(f"{method} {target}: expected success, found {response.status}: {text}")
        return response

    def create(self) -> None:
        """Make the bucket."""
        self.request("PUT", f"/{self._name}").read()

    def upload(self, key: str, views: list[memoryview], way: HttpWay) -> None:
        """Write all bytes of `views` as one object, in parts."""
        target = f"/{self._name}/{key}"
        upload_id = _text(self.request("POST", f"{target}?uploads").read(), "UploadId")
        parts = list(_cut(views, way.part_mib * MIB))
        tags = [""] * len(parts)

        def put(number: int) -> None:
            query = urllib.parse.urlencode({"partNumber": number + 1, "uploadId": upload_id})
            headers = {"Content-Length": str(sum(map(len, parts[number])))}
            response = self.request("PUT", f"{target}?{query}", iter(parts[number]), headers)
            response.read()
            tags[number] = response.headers["ETag"]

        _raw.run_threads([partial(put, n) for n in range(len(parts))], num_threads=way.num_threads)
        listed = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{tag}</ETag></Part>" for n, tag in enumerate(tags, start=1)
        )
        query = urllib.parse.urlencode({"uploadId": upload_id})
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        self.request("POST", f"{target}?{query}", body).read()

    def download(self, objects: list[tuple[str, int]], views: list[memoryview], way: HttpWay) -> None:
        """Fill `views` with the bytes of `objects` (key and size) in order, as far as they go."""
        ranges = [
            (key, start, min(size, start + way.part_mib * MIB))
            for key, size in objects
            for start in range(0, size, way.part_mib * MIB)
        ]
        targets = _cut_to(views, [end - start for _, start, end in ranges])
        tasks = [partial(self._get, key, start, into) for (key, start, _), into in zip(ranges, targets, strict=False)]
        _raw.run_threads(tasks, num_threads=way.num_threads)

    def objects(self, prefix: str) -> list[tuple[str, int]]:
        """Key and size of everything under `prefix`, large objects first."""
        query = urllib.parse.urlencode({"list-type": "2", "prefix": prefix})
        root = ElementTree.fromstring(self.request("GET", f"/{self._name}?{query}").read())
        found = [
            (_child(node, "Key"), int(_child(node, "Size"))) for node in root.iter() if node.tag.endswith("Contents")
        ]
        return sorted(found, key=lambda entry: -entry[1])

    def empty(self, prefix: str) -> None:
        """Delete everything under `prefix`.

        Raises:
            RuntimeError: If the server still lists a key that it has deleted.
        """
        deleted: set[str] = set()
        while found := self.objects(prefix):
            for key, _ in found:
                if key in deleted:
                    raise RuntimeError(f"{key} in bucket {self._name} is still listed after it was deleted")
                deleted.add(key)
                self.request("DELETE", f"/{self._name}/{urllib.parse.quote(key)}").read()

    def _get(self, key: str, start: int, into: list[memoryview]) -> None:
        wanted = sum(map(len, into))
        headers = {"Range": f"bytes={start}-{start + wanted - 1}"}
        response = self.request("GET", f"/{self._name}/{urllib.parse.quote(key)}", headers=headers)
        for view in into:
            # The buffered reader below hands large reads to recv_into, straight into `view`.
            at = 0
            while at < len(view):
                num_read = response.readinto(view[at:])
                if num_read == 0:
                    raise OSError(f"GET {key}: the body ended early, {wanted} bytes expected from {start}")
                at += num_read
        response.read()


@contextmanager
def server(args: argparse.Namespace, *flags: str) -> Iterator[str]:
    """The endpoint of a running server: the one named by the user, or our own for the time of the block, with flags."""
    if args.endpoint:
        yield args.endpoint
        return
    # It ends when its input is closed, so that it never outlives us.
    command = [str(args.server), "--keep", *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{args.server} ended before it printed its port (exit code {process.wait()})")
        yield f"http://127.0.0.1:{line.rpartition(':')[2]}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def run(args: argparse.Namespace, directory: Path, report: dict[str, Any]) -> None:
    """Measure and add the two tables to `report`."""
    if c.CONNECTOR not in args.without and not c.has_connector():
        args.without = [*args.without, c.CONNECTOR]
        missing = f"{c.CONNECTOR} is not beside ours: it is not installed (pip install 's3torchconnector[dcp]').\n"
        report.setdefault("text", []).append(missing)
    with server(args) as endpoint:
        c.use_s3_environment(endpoint)
        bucket = Bucket(endpoint, args.bucket)
        bucket.create()
        bench = _Run(args, bucket, endpoint)
        saved, save_requests = bench.save()
        loaded, load_requests = bench.load()
        labels, size_gb = bench.labels, bench.size_gb
        bucket.empty("")
        # The state is let go of first: the processes that measure memory build one of their own.
        del bench
        peaks = _memory.peaks(args, directory, labels=labels, endpoint=endpoint) if args.memory else {}
    for kind, samples, requests in (("save", saved, save_requests), ("load", loaded, load_requests)):
        table = m.rows(
            samples,
            amount=size_gb,
            size_gb=size_gb,
            raw=c.fastest(samples, prefix=c.RAW)[0],
            stock=labels.get(c.CONNECTOR),
            peaks_mb={label: peak[kind] for label, peak in peaks.items()},
            notes=requests,
        )
        m.add(report, f"S3 {kind} ({size_gb:.2f} GB)", table, unit="GB/s", beside=c.CONNECTOR)


class _Run:
    """One state in memory and one bucket; a prefix for each kind of contender."""

    def __init__(self, args: argparse.Namespace, bucket: Bucket, endpoint: str) -> None:
        self._args, self._bucket = args, bucket
        self._state = _state.mixed_state(int(args.size_gb * GB))
        self._views = _state.buffers(self._state)
        self._connectors: dict[str, c.Contender] = {}
        if c.CONNECTOR not in args.without:
            found = [c.connector(self._state, endpoint=endpoint, num_threads=n) for n in args.stock_threads]
            self._connectors = {k.label: k for k in found}
        # As shipped, for stores that are far away, and with as few requests at a time as the best raw way.
        limits = [] if c.STRATA in args.without else [None, WAYS[-1].num_threads]
        self._chosen = [c.strata(self._state, max_concurrency=limit) for limit in limits]
        self._requests: dict[str, str] = {}
        self._counted: dict[str, int] = {}
        self.size_gb = sum(map(len, self._views)) / GB

    @property
    def labels(self) -> dict[str, str]:
        """Label of each chosen kind; of its defaults where there are several."""
        return {k.kind: k.label for k in reversed(self._chosen)}

    def save(self) -> tuple[dict[str, list[m.Sample]], dict[str, str]]:
        """Samples, and requests by kind of each label's last save. Every save meets an empty bucket."""
        raw = {f"raw {way}": self._upload(way) for way in WAYS}
        hooks: dict[str, Any] = {"before": self._start_empty, "after": self._note}
        kept = c.trial(raw, keep=self._args.keep, num_rounds=self._args.trials, **hooks)
        if self._connectors:
            tried = {label: self._saving(k) for label, k in self._connectors.items()}
            best = c.trial(tried, keep=1, num_rounds=self._args.trials, **hooks)[0]
            self._chosen.append(self._connectors[best])
        contenders = {label: raw[label] for label in kept} | {k.label: self._saving(k) for k in self._chosen}
        return m.alternate(contenders, num_rounds=self._args.rounds, **hooks), dict(self._requests)

    def load(self) -> tuple[dict[str, list[m.Sample]], dict[str, str]]:
        """As `save`. Raw reads another contender's objects, so that the server holds one copy fewer."""
        source = self._leave_one_save_of_each()
        raw = {f"raw {way}": self._download(way, source) for way in WAYS}
        hooks: dict[str, Any] = {"before": self._count, "after": self._note}
        kept = c.trial(raw, keep=self._args.keep, num_rounds=self._args.trials, **hooks)
        contenders = {label: raw[label] for label in kept} | {k.label: self._loading(k) for k in self._chosen}
        return m.alternate(contenders, num_rounds=self._args.rounds, **hooks), dict(self._requests)

    def _leave_one_save_of_each(self) -> list[tuple[str, int]]:
        """Check that each kind loads bit for bit; returns the objects that raw is to read."""
        self._bucket.empty("")
        expected = _state.digest(self._views)
        self._upload(WAYS[0])()
        objects = self._bucket.objects("raw/")
        c.check_load(c.RAW, self._download(WAYS[0], objects), self._state, self._views, expected)
        for k in self._chosen:
            self._bucket.empty("raw/")
            self._saving(k)()
            c.check_load(k.label, self._loading(k), self._state, self._views, expected)
            objects = self._bucket.objects(f"{k.kind}/")
        return objects

    def _upload(self, way: HttpWay) -> Callable[[], object]:
        return lambda: self._bucket.upload("raw/all", self._views, way)

    def _download(self, way: HttpWay, objects: list[tuple[str, int]]) -> Callable[[], object]:
        return lambda: self._bucket.download(objects, self._views, way)

    def _saving(self, contender: c.Contender) -> Callable[[], object]:
        return lambda: contender.save(self._url(contender.kind))

    def _loading(self, contender: c.Contender) -> Callable[[], object]:
        return lambda: contender.load(self._url(contender.kind))

    def _start_empty(self, label: str) -> None:
        self._bucket.empty("")
        self._count(label)

    def _url(self, kind: str) -> str:
        return f"s3://{self._args.bucket}/{kind}/step-1"

    def _count(self, label: str) -> None:
        self._counted = self._counters()

    def _note(self, label: str) -> None:
        """Requests by kind since `_count`, as the server counted them."""
        grown = {kind: count - self._counted.get(kind, 0) for kind, count in self._counters().items()}
        self._requests[label] = ", ".join(f"{count} {kind}" for kind, count in sorted(grown.items()) if count)

    def _counters(self) -> dict[str, int]:
        if self._args.endpoint:
            return {}
        answer = self._bucket.request("GET", COUNTERS_PATH)
        return {str(kind): int(count) for kind, count in json.loads(answer.read()).items()}


def _cut(views: list[memoryview], part_bytes: int) -> Iterator[list[memoryview]]:
    """Parts of exactly `part_bytes`, the last one shorter, as lists of slices."""
    total = sum(map(len, views))
    sizes = [part_bytes] * (total // part_bytes) + ([total % part_bytes] if total % part_bytes else [])
    return _cut_to(views, sizes)


def _cut_to(views: list[memoryview], sizes: list[int]) -> Iterator[list[memoryview]]:
    """Consecutive pieces of the given sizes, as lists of slices; ends where the views end."""
    index = at = 0
    for size in sizes:
        piece: list[memoryview] = []
        while size and index < len(views):
            step = views[index][at : at + size]
            piece.append(step)
            size -= len(step)
            at += len(step)
            if at == len(views[index]):
                index, at = index + 1, 0
        if not piece:
            return
        yield piece


def _text(document: bytes, name: str) -> str:
    return _child(ElementTree.fromstring(document), name)


def _child(node: ElementTree.Element, name: str) -> str:
    for child in node.iter():
        if child.tag.rpartition("}")[2] == name and child.text is not None:
            return child.text
    raise ValueError(f"no <{name}> in the answer")
