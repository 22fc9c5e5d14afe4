"""A long save or load shows how it goes: a bar at a terminal, lines in the log, and in its stats what the store did."""

import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tests.checkpoint.s3_states import RUN, Forward, loaded_step, state
from tests.checkpoint.states import failure_of, load, save
from tests.support.s3 import Answer, Request, gateway, options, refusal
from torch_strata import ConfigError, StorageConfig, StorageError, StoreStats, StrataWriter, async_save
from torch_strata.checkpoint import _progress as progress

LONG = timedelta(seconds=60)
PARTS = 5 << 20


class Terminal:
    """A pseudo-terminal, whose text is kept."""

    def __init__(self) -> None:
        self._ours, theirs = os.openpty()
        self.stderr = os.fdopen(theirs, "w")
        self.text = ""

    def shows(self, words: str) -> bool:
        """Whether the terminal has shown `words` by now."""
        while select.select([self._ours], [], [], 0)[0]:
            self.text += os.read(self._ours, 65536).decode()
        return words in self.text

    def become_stderr(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From inside a test: before each of its phases pytest sets stderr anew."""
        monkeypatch.setattr(sys, "stderr", self.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stderr.close()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


class Held:
    """Holds one request back until a condition is met."""

    def __init__(self, method: str, until: Callable[[], bool]) -> None:
        self._method = method
        self._until = until
        self.held = 0

    def __call__(self, request: Request, forward: Forward) -> Answer:
        is_data = request.is_part(2) or (request.method == "GET" and ".distcp" in request.target)
        if request.method == self._method and is_data and not self.held:
            self.held += 1
            end = time.monotonic() + 30
            while not self._until() and time.monotonic() < end:
                time.sleep(0.01)
        return forward()


def config(endpoint: str, asked: bool | None = None) -> StorageConfig:
    # One at a time, so that something is done and something is left while a request is held.
    return StorageConfig(part_bytes=PARTS, max_concurrency=1, progress=asked, storage_options=options(endpoint))


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_at_a_terminal_a_bar_says_bytes_rate_and_time_left(bucket, terminal, method, monkeypatch):
    terminal.become_stderr(monkeypatch)
    url = bucket.url(RUN)
    save(state(), url, config=StorageConfig(part_bytes=PARTS))
    held = Held(method, lambda: terminal.shows("B/s]"))
    with gateway(bucket.endpoint, held) as endpoint:
        if method == "PUT":
            save(state(), url, config=config(endpoint))
        else:
            assert loaded_step(url, config=config(endpoint)) == 1
    assert held.held and terminal.shows(f"{'saving' if method == 'PUT' else 'loading'} …")
    assert terminal.shows(f"{url[-20:]}: ")
    assert terminal.shows("14.0M/14.0M [00:") and terminal.shows("%|")


def test_what_is_over_soon_has_no_bar(tmp_path, terminal, monkeypatch):
    terminal.become_stderr(monkeypatch)
    save(state(), tmp_path / "c")
    load(state(0), tmp_path / "c")
    assert not terminal.shows("B/s")


@pytest.mark.parametrize("asked", [None, False])
def test_without_a_terminal_nobody_watches(bucket, monkeypatch, asked):
    stderr, threads = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", stderr)

    def looking() -> bool:
        threads.extend(thread.name for thread in threading.enumerate())
        return True

    with gateway(bucket.endpoint, Held("PUT", looking)) as endpoint:
        save(state(), bucket.url(RUN), config=config(endpoint, asked))
    assert threads and "strata-progress" not in threads and "B/s" not in stderr.getvalue()


def test_a_bar_that_was_asked_for_needs_no_terminal(bucket, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with gateway(bucket.endpoint, Held("PUT", lambda: "MB/s]" in stderr.getvalue())) as endpoint:
        save(state(), bucket.url(RUN), config=config(endpoint, asked=True))
    assert "14.0M/14.0M [00:" in stderr.getvalue()


def test_a_bar_does_not_disturb_what_goes_on_beside_the_save(terminal, monkeypatch):
    terminal.become_stderr(monkeypatch)
    assert progress.wants_bar(None) and progress.wants_bar(True)
    assert not progress.wants_bar(False)
    assert not progress.wants_bar(None, in_background=True) and progress.wants_bar(True, in_background=True)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(progress.wants_bar, None).result()
        assert pool.submit(progress.wants_bar, True).result()


def test_an_asynchronous_save_draws_a_bar_only_if_asked(bucket, terminal, monkeypatch):
    terminal.become_stderr(monkeypatch)
    threads: list[str] = []

    def looking() -> bool:
        threads.extend(thread.name for thread in threading.enumerate())
        return True

    for asked, until in ((None, looking), (True, lambda: terminal.shows("MB/s]"))):
        threads.clear()
        with gateway(bucket.endpoint, Held("PUT", until)) as endpoint:
            writer = StrataWriter(bucket.url(RUN), config=config(endpoint, asked))
            handle = async_save(state(), storage_writer=writer, no_dist=True)
            stats = handle.result(LONG)
        assert terminal.shows("MB/s]") is (asked is True) and "strata-progress" not in threads
        assert handle.stats is stats and stats is not None and stats.store.requests > 4


def test_a_terminal_that_goes_away_fails_nothing(bucket, terminal, monkeypatch):
    terminal.become_stderr(monkeypatch)
    monkeypatch.setattr(progress, "_BAR_AFTER_SECONDS", 0.0)

    def is_gone() -> bool:
        if not terminal.shows("B/s]"):
            return False
        terminal.stderr.close()
        return True

    with gateway(bucket.endpoint, Held("PUT", is_gone)) as endpoint:
        save(state(), bucket.url(RUN), config=config(endpoint))
    assert loaded_step(bucket.url(RUN)) == 1


def test_the_log_says_how_a_long_transfer_goes(bucket, caplog, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_SECONDS", 0.0)
    url = bucket.url(RUN)
    with caplog.at_level(logging.INFO, logger="torch_strata"):
        for method in ("PUT", "GET"):
            caplog.clear()
            with gateway(bucket.endpoint, Held(method, lambda: " of 14 MB, " in caplog.text)) as endpoint:
                if method == "PUT":
                    save(state(), url, config=config(endpoint))
                else:
                    assert loaded_step(url, config=config(endpoint)) == 1
            lines = [record.message for record in caplog.records if record.message.startswith(f"{url}: ")]
            head = f"{url}: {'saving' if method == 'PUT' else 'loading'} on rank 0: "
            assert lines[0] == head + "14 MB"
            assert lines[1].startswith(head) and " of 14 MB, " in lines[1] and " MB/s" in lines[1]
            # The load is one request, of which nothing is there yet.
            assert (" s left" in lines[1]) is (method == "PUT")
            assert any(line.startswith(head + "moved: 14 MB in ") for line in lines)
    assert any("loading" in line for line in lines)


def test_the_log_says_that_a_transfer_has_failed_and_how_far_it_came(bucket, caplog):
    def refusing(request: Request, forward: Forward) -> Answer:
        return refusal(503, "SlowDown") if request.is_part(2) else forward()

    with caplog.at_level(logging.INFO, logger="torch_strata"), gateway(bucket.endpoint, refusing) as endpoint:
        hasty = StorageConfig(part_bytes=PARTS, max_tries=2, storage_options=options(endpoint))
        assert type(failure_of(lambda: save(state(), bucket.url(RUN), config=hasty))) is StorageError
    assert f"{bucket.url(RUN)}: saving on rank 0: ended early: " in caplog.text and " throttled" in caplog.text


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_stats_count_what_a_store_made_of_the_requests(bucket, method):
    url, given = bucket.url(RUN), []
    save(state(), url, config=StorageConfig(part_bytes=PARTS))
    troubles = [refusal(503, "SlowDown"), refusal(500, "InternalError"), refusal(503, "SlowDown")]

    def troubled(request: Request, forward: Forward) -> Answer:
        given.append(request)
        is_data = request.is_part(2) or (request.method == "GET" and ".distcp" in request.target)
        return troubles.pop() if request.method == method and is_data and troubles else forward()

    found = state(0)
    with gateway(bucket.endpoint, troubled) as endpoint:
        transfer = save if method == "PUT" else load
        done = transfer(state(2) if method == "PUT" else found, url, config=config(endpoint))
        stats = done.stats
        assert stats is not None
        assert stats.store == StoreStats(requests=len(given), retries=3, throttled=2)
        if method == "PUT":
            assert stats.written_bytes > 14_000_000 and stats.write_seconds > 0 and stats.committed
        else:
            assert stats.bytes_read == 14_000_000 and stats.seconds > 0
        # Those of another save or load are not counted with them.
        again = transfer(state(2) if method == "PUT" else found, url, config=config(endpoint)).stats
    assert again is not None and again.store.retries == 0 < again.store.requests


def test_stats_of_a_local_save_and_load_say_bytes_and_seconds(tmp_path):
    saved = save(state(), tmp_path / "c").stats
    read = load(state(0), tmp_path / "c").stats
    assert saved is not None and saved.written_bytes > 14_000_000 and saved.write_seconds > 0
    assert read is not None and read.bytes_read == 14_000_000 and read.seconds > 0
    assert saved.store == read.store == StoreStats()


def test_the_switch_is_a_bool_or_nothing():
    assert StorageConfig.from_env({"STRATA_PROGRESS": "0"}).progress is False
    assert StorageConfig.from_env({}).progress is None
    with pytest.raises(ConfigError, match=r"progress: expected a bool or None, found 'yes'"):
        StorageConfig(progress="yes")  # type: ignore[arg-type]
