"""An S3 store that throttles, stalls, or refuses keys and clock: the save or load goes on, or says in time why not."""

import json
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.s3_states import RUN, SMALL_PARTS, Forward, leftovers, loaded_step, state
from tests.checkpoint.states import failure_of, save
from tests.support.s3 import SECRET, Answer, Request, gateway, options, refusal
from torch_strata import StorageConfig, StorageError, StoragePermissionError, StrataReader, StrataWriter
from torch_strata._store import open_store

HASTY = StorageConfig(part_bytes=5 << 20, deadline=timedelta(seconds=2))


class Busy:
    """Answers 503 to what comes while so many requests are being served."""

    def __init__(self, bears: int) -> None:
        self._bears = bears
        self._lock = threading.Lock()
        self._serving = 0
        self.served = self.refused = 0

    def __call__(self, _request: Request, forward: Forward) -> Answer:
        with self._lock:
            if self._serving >= self._bears:
                self.refused += 1
                return refusal(503, "SlowDown")
            self._serving += 1
        try:
            time.sleep(0.02)
            return forward()
        finally:
            with self._lock:
                self._serving -= 1
                self.served += 1


def test_a_throttling_store_gets_as_many_requests_as_it_bears(bucket):
    many = {f"w{k}": torch.full((1 << 20,), float(k)) for k in range(24)}  # 96 MiB
    busy = Busy(bears=2)
    with gateway(bucket.endpoint, busy) as endpoint:
        writer = StrataWriter(bucket.url(RUN), config=SMALL_PARTS, storage_options=options(endpoint))
        dcp.save(many, storage_writer=writer, no_dist=True)
        reader = StrataReader(bucket.url(RUN), config=SMALL_PARTS, storage_options=options(endpoint))
        found = {name: torch.zeros(1 << 20) for name in many}
        dcp.load(found, storage_reader=reader, no_dist=True)
    assert all(torch.equal(found[name], many[name]) for name in many)
    assert 0 < busy.refused < busy.served, (busy.refused, busy.served)
    assert leftovers(bucket) == []


def test_throttling_that_does_not_stop_is_an_error_in_time(bucket):
    save(state(1), bucket.url(RUN), config=SMALL_PARTS)
    before, requests = bucket.sizes(), []

    def throttling(request: Request, forward: Forward) -> Answer:
        if request.is_part(2) or (request.method == "GET" and ".distcp" in request.target):
            requests.append(request)
            return refusal(503, "SlowDown")
        return forward()

    with gateway(bucket.endpoint, throttling) as endpoint:
        given = options(endpoint)
        for call in (
            lambda: save(state(2), bucket.url(RUN), config=HASTY, storage_options=given),
            lambda: loaded_step(bucket.url(RUN), config=HASTY, storage_options=given),
        ):
            began = time.monotonic()
            error = failure_of(call)
            assert type(error) is StorageError and "SlowDown" in str(error) and " tries in " in str(error)
            assert time.monotonic() - began < 8
    assert len(requests) < 60
    assert bucket.sizes() == before and leftovers(bucket) == []
    assert loaded_step(bucket.url(RUN)) == 1


def test_a_part_that_is_never_answered_ends_the_save_and_nothing_stays(bucket):
    go_on, aborts = threading.Event(), []

    def silent(request: Request, forward: Forward) -> Answer:
        if request.is_part(2):
            go_on.wait(30)
        if request.method == "DELETE" and "uploadId=" in request.target:
            aborts.append(request)
            if len(aborts) == 1:
                return refusal(503, "SlowDown")
        return forward()

    with gateway(bucket.endpoint, silent) as endpoint:
        began = time.monotonic()
        error = failure_of(lambda: save(state(), bucket.url(RUN), config=HASTY, storage_options=options(endpoint)))
        assert type(error) is StorageError and "deadline" in str(error) and bucket.url(RUN) in str(error)
        assert time.monotonic() - began < 10
        end = time.monotonic() + 10
        while leftovers(bucket) and time.monotonic() < end:
            time.sleep(0.05)
        assert leftovers(bucket) == [] and len(aborts) == 2
        go_on.set()


def test_a_stalled_part_is_sent_again(bucket):
    go_on, stalled = threading.Event(), []

    def stalling(request: Request, forward: Forward) -> Answer:
        if request.is_part(2) and not stalled:
            stalled.append(request)
            go_on.wait(30)
            return refusal(503, "SlowDown")
        return forward()

    with gateway(bucket.endpoint, stalling) as endpoint:
        given = {**options(endpoint), "read_timeout": "500ms"}
        save(state(), bucket.url(RUN), config=SMALL_PARTS, storage_options=given)
        go_on.set()
    assert loaded_step(bucket.url(RUN)) == 1 and leftovers(bucket) == []


@pytest.mark.parametrize("status", [400, 403])
def test_keys_that_expire_in_mid_upload_are_renewed(bucket, tmp_path, monkeypatch, status):
    calls = _key_process(tmp_path, monkeypatch)
    refused: list[Request] = []

    def expired(request: Request, forward: Forward) -> Answer:
        if request.is_part(2) and not refused:
            refused.append(request)
            return refusal(status, "ExpiredToken")
        return forward()

    with gateway(bucket.endpoint, expired) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        save(state(), bucket.url(RUN), config=SMALL_PARTS)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    # Once at the start, once when they were refused; a second handle of the store has keys of its own.
    assert refused and len(calls.read_text().splitlines()) in (2, 3)
    assert loaded_step(bucket.url(RUN)) == 1 and leftovers(bucket) == []


def test_keys_that_stay_expired_are_named(bucket, tmp_path, monkeypatch):
    calls = _key_process(tmp_path, monkeypatch)

    def expired(request: Request, forward: Forward) -> Answer:
        return refusal(400, "ExpiredToken") if request.is_part(2) else forward()

    with gateway(bucket.endpoint, expired) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        error = failure_of(lambda: save(state(), bucket.url(RUN), config=SMALL_PARTS))
    assert isinstance(error, StoragePermissionError) and "ExpiredToken" in str(error) and SECRET not in str(error)
    assert len(calls.read_text().splitlines()) in (2, 3)


def _key_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A credential process with new keys at each call; the file has a line for each."""
    calls, script, config = folder / "calls", folder / "keys.sh", folder / "config"
    keys = {"Version": 1, "AccessKeyId": "KEY", "SecretAccessKey": SECRET, "SessionToken": "T$n"}
    keys["Expiration"] = "2099-01-01T00:00:00Z"
    script.write_text(f"echo x >> {calls}\nn=$(wc -l < {calls})\ncat <<END\n{json.dumps(keys)}\nEND\n")
    config.write_text(f"[default]\ncredential_process = sh {script}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    return calls


def test_a_clock_that_is_wrong_is_named_with_both_times(bucket):
    def skewed(_request: Request, _forward: Forward) -> Answer:
        return refusal(403, "RequestTimeTooSkewed", date="Thu, 01 Jan 2026 00:00:00 GMT")

    with gateway(bucket.endpoint, skewed) as endpoint:
        error = failure_of(lambda: save(state(), bucket.url(RUN), storage_options=options(endpoint)))
    assert isinstance(error, StoragePermissionError)
    assert "RequestTimeTooSkewed" in str(error) and "the clock of this machine says" in str(error)
    assert "the store's Thu, 01 Jan 2026 00:00:00 GMT" in str(error)


def test_a_wrong_clock_is_corrected(bucket):
    refused: list[Request] = []

    def skewed_once(request: Request, forward: Forward) -> Answer:
        if request.method == "PUT" and not refused:
            refused.append(request)
            return refusal(403, "RequestTimeTooSkewed", date="Thu, 01 Jan 2026 00:00:00 GMT")
        return forward()

    with gateway(bucket.endpoint, skewed_once) as endpoint:
        save(state(), bucket.url(RUN), config=SMALL_PARTS, storage_options=options(endpoint))
    assert refused and loaded_step(bucket.url(RUN)) == 1


def test_a_success_with_an_error_in_it_for_ever_is_no_save(bucket):
    def lying(request: Request, forward: Forward) -> Answer:
        if request.method == "POST" and "uploadId=" in request.target:
            return refusal(200, "InternalError")
        return forward()

    with gateway(bucket.endpoint, lying) as endpoint:
        error = failure_of(lambda: save(state(), bucket.url(RUN), config=HASTY, storage_options=options(endpoint)))
    assert type(error) is StorageError and "InternalError" in str(error) and " tries in " in str(error)
    assert leftovers(bucket) == [] and bucket.sizes() == {}


def test_a_store_counts_what_was_tried_again(bucket):
    troubles = [refusal(503, "SlowDown"), refusal(500, "InternalError"), refusal(503, "SlowDown")]

    def troubled(request: Request, forward: Forward) -> Answer:
        return troubles.pop() if request.method == "PUT" and troubles else forward()

    with gateway(bucket.endpoint, troubled) as endpoint:
        store = open_store(bucket.url(RUN), StorageConfig(storage_options=options(endpoint)))
        assert set(store.counters().values()) == {0}
        store.put("name", b"content")
        assert store.counters() == {"requests": 4, "retries": 3, "throttled": 2, "restarted": 0, "hedged": 0}
    assert open_store("/tmp", StorageConfig()).counters()["retries"] == 0
