"""What goes wrong between us and an S3 server: a named error in time, nothing left open, the old checkpoint loads."""

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.checkpoint import DefaultSavePlanner

from tests.checkpoint.s3_states import RUN, SMALL_PARTS, Forward, leftovers, loaded_step, state
from tests.checkpoint.states import failure_of, save
from tests.support.s3 import SECRET, Answer, Bucket, Request, environment, gateway, options, refusal
from torch_strata import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    ObjectNotFoundError,
    PreconditionError,
    StaleGenerationError,
    StorageConfig,
    StorageError,
    StoragePermissionError,
    verify,
)

HASTY = StorageConfig(part_bytes=5 << 20, deadline=timedelta(seconds=1.5))


def test_a_bucket_that_does_not_exist_is_named(bucket):
    place = f"s3://{bucket.name}-missing/{RUN}"
    error = failure_of(lambda: save(state(), place))
    assert isinstance(error, ObjectNotFoundError) and isinstance(error, FileNotFoundError)
    assert place in str(error) and "bucket does not exist" in str(error)
    error = failure_of(lambda: loaded_step(place))
    assert isinstance(error, ObjectNotFoundError) and "bucket does not exist" in str(error)
    with pytest.raises(ObjectNotFoundError, match=place):
        verify(place)


def test_a_place_where_nothing_is_saved_is_no_checkpoint(bucket):
    error = failure_of(lambda: loaded_step(bucket.url(RUN)))
    assert isinstance(error, CheckpointNotFoundError) and bucket.url(RUN) in str(error)


def denied(_request: Request, _forward: Forward) -> Answer:
    return refusal(403, "AccessDenied")


def test_refused_access_is_said_without_the_secret(bucket):
    with gateway(bucket.endpoint, denied) as endpoint:
        for call in (
            lambda: save(state(), bucket.url(RUN), storage_options=options(endpoint)),
            lambda: loaded_step(bucket.url(RUN), storage_options=options(endpoint)),
        ):
            error = failure_of(call)
            assert isinstance(error, StoragePermissionError) and isinstance(error, PermissionError), repr(error)
            assert bucket.url(RUN) in str(error) and "AccessDenied" in str(error) and SECRET not in str(error)


def test_a_right_to_read_alone_is_not_enough_to_save(bucket):
    save(state(1), bucket.url(RUN))

    def read_only(request: Request, forward: Forward) -> Answer:
        return forward() if request.method in ("GET", "HEAD") else refusal(403, "AccessDenied")

    before = bucket.sizes()
    with gateway(bucket.endpoint, read_only) as endpoint:
        given = options(endpoint)
        assert loaded_step(bucket.url(RUN), storage_options=given) == 1
        for config in (SMALL_PARTS, None):
            error = failure_of(lambda c=config: save(state(2), bucket.url(RUN), config=c, storage_options=given))
            assert isinstance(error, StoragePermissionError)
    assert bucket.sizes() == before and leftovers(bucket) == []


def test_a_bucket_in_another_region_is_named(bucket):
    def elsewhere(_request: Request, _forward: Forward) -> Answer:
        return refusal(301, "PermanentRedirect", x_amz_bucket_region="eu-west-3")

    with gateway(bucket.endpoint, elsewhere) as endpoint:
        error = failure_of(lambda: save(state(), bucket.url(RUN), storage_options=options(endpoint)))
    assert isinstance(error, ConfigError) and "eu-west-3" in str(error)


@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "never answers"])
def test_an_endpoint_out_of_reach_is_given_up_at_the_deadline(bucket, listens):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if listens:
            held.listen()
        given = options(f"http://127.0.0.1:{held.getsockname()[1]}")
        for call in (
            lambda: save(state(), bucket.url(RUN), config=HASTY, storage_options=given),
            lambda: loaded_step(bucket.url(RUN), config=HASTY, storage_options=given),
        ):
            began = time.monotonic()
            error = failure_of(call)
            assert type(error) is StorageError and bucket.url(RUN) in str(error) and " tries in " in str(error)
            # One operation asks one after another; each has the deadline for itself.
            assert time.monotonic() - began < 8


def test_a_save_goes_on_through_what_passes(bucket):
    troubles = {
        1: [refusal(503, "SlowDown", retry_after="0"), refusal(500, "InternalError")],
        2: [refusal(400, "RequestTimeout")],
    }
    completions: list[Answer] = []

    def troubled(request: Request, forward: Forward) -> Answer:
        for number, answers in troubles.items():
            if request.is_part(number) and answers:
                return answers.pop()
        if request.method == "POST" and "uploadId=" in request.target and not completions:
            completions.append(forward())
            return refusal(500, "InternalError")  # it landed, but nobody learns of it
        return forward()

    with gateway(bucket.endpoint, troubled) as endpoint:
        save(state(), bucket.url(RUN), config=SMALL_PARTS, storage_options=options(endpoint))
    assert not any(troubles.values()) and completions[0].status == 200
    assert loaded_step(bucket.url(RUN)) == 1 and leftovers(bucket) == []


def test_a_commit_whose_answer_was_lost_is_known_to_be_ours(bucket):
    lost: list[Answer] = []

    def forgetful(request: Request, forward: Forward) -> Answer:
        answer = forward()
        if request.method == "PUT" and request.target.endswith("/.strata/" + "1".zfill(20)) and not lost:
            lost.append(answer)
            return refusal(500, "InternalError")
        return answer

    with gateway(bucket.endpoint, forgetful) as endpoint:
        writer = save(state(), bucket.url(RUN), config=SMALL_PARTS, storage_options=options(endpoint))
    assert lost[0].status == 200 and writer.stats.committed
    assert loaded_step(bucket.url(RUN)) == 1


FAILURES = {
    "a part": lambda request: request.is_part(2),
    "the completion": lambda request: request.method == "POST" and "uploadId=" in request.target,
    "the upload's record": lambda request: request.method == "PUT" and "/uploads/" in request.target,
    "the manifest": lambda request: request.method == "PUT" and request.target.endswith("/.strata/" + "2".zfill(20)),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_save_that_fails_leaves_nothing_behind(bucket, what):
    save(state(1), bucket.url(RUN), config=SMALL_PARTS)
    before = bucket.sizes()

    def failing(request: Request, forward: Forward) -> Answer:
        return refusal(403, "AccessDenied") if FAILURES[what](request) else forward()

    with gateway(bucket.endpoint, failing) as endpoint:
        given = options(endpoint)
        error = failure_of(lambda: save(state(2), bucket.url(RUN), config=SMALL_PARTS, storage_options=given))
    assert isinstance(error, StoragePermissionError), repr(error)
    assert bucket.sizes() == before and leftovers(bucket) == []
    assert loaded_step(bucket.url(RUN)) == 1


def test_an_object_that_is_cut_short_on_its_way_down_is_read_on(bucket):
    save(state(), bucket.url(RUN), config=SMALL_PARTS)
    cut: list[str] = []

    def cutting(request: Request, forward: Forward) -> Answer:
        answer = forward()
        if request.method == "GET" and ".distcp" in request.target and len(answer.body) > 1 << 20 and not cut:
            cut.append(request.target)
            # More is announced than comes.
            return Answer(answer.status, answer.headers, answer.body[: len(answer.body) // 2])
        return answer

    with gateway(bucket.endpoint, cutting) as endpoint:
        config = StorageConfig(deadline=timedelta(seconds=20))
        given = {**options(endpoint), "read_timeout": "1s"}
        assert loaded_step(bucket.url(RUN), config=config, storage_options=given) == 1
    assert cut


def test_a_wrong_answer_is_corruption_and_not_data(bucket):
    save(state(), bucket.url(RUN), config=SMALL_PARTS)

    def lying(request: Request, forward: Forward) -> Answer:
        answer = forward()
        if request.method == "GET" and ".distcp" in request.target:
            return Answer(answer.status, answer.headers, answer.body[::-1])
        return answer

    with gateway(bucket.endpoint, lying) as endpoint:
        error = failure_of(lambda: loaded_step(bucket.url(RUN), storage_options=options(endpoint)))
    assert isinstance(error, CorruptionError) and bucket.url(RUN) in str(error)


class SavesMeanwhile(DefaultSavePlanner):
    """Lets another writer commit between this save's look at the place and its first byte."""

    def __init__(self, other: Callable[[], Any]) -> None:
        super().__init__()
        self._other = other

    def finish_plan(self, new_plan: Any) -> Any:
        self._other()
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("existing", [False, True], ids=["empty", "overwriting"])
def test_the_second_of_two_writers_is_refused(bucket, existing):
    if existing:
        save(state(1), bucket.url(RUN), config=SMALL_PARTS)
    planner = SavesMeanwhile(lambda: save(state(2), bucket.url(RUN), config=SMALL_PARTS))
    error = failure_of(lambda: save(state(3), bucket.url(RUN), config=SMALL_PARTS, planner=planner))
    assert type(error) is PreconditionError and bucket.url(RUN) in str(error)
    assert loaded_step(bucket.url(RUN)) == 2 and leftovers(bucket) == []
    assert len([key for key in bucket.sizes() if key.endswith(".distcp")]) == 1


def test_a_writer_overtaken_in_mid_upload_is_told_so_and_leaves_nothing(bucket):
    save(state(1), bucket.url(RUN), config=SMALL_PARTS)
    overtaken = threading.Event()

    def overtaking(request: Request, forward: Forward) -> Answer:
        if request.is_part(2) and not overtaken.is_set():
            overtaken.set()
            save(state(2), bucket.url(RUN), config=SMALL_PARTS)
            return refusal(404, "NoSuchUpload")  # as S3 says it; moto answers 500
        return forward()

    with gateway(bucket.endpoint, overtaking) as endpoint:
        given = options(endpoint)
        error = failure_of(lambda: save(state(3), bucket.url(RUN), config=SMALL_PARTS, storage_options=given))
    assert isinstance(error, PreconditionError) and bucket.url(RUN) in str(error)
    assert loaded_step(bucket.url(RUN)) == 2
    assert leftovers(bucket) == [] and len(bucket.sizes()) == 3


def claim_and_save(endpoint: str, run: str, step: int) -> None:
    os.environ.update(environment(endpoint))
    save(state(step), f"{run}/step-{step}", run_root=run)


def test_a_run_that_was_replaced_cannot_commit(bucket):
    run = bucket.url("run")
    save(state(1), f"{run}/step-1", run_root=run)
    successor = multiprocessing.get_context("forkserver").Process(
        target=claim_and_save, args=(bucket.endpoint, run, 2), daemon=True
    )
    successor.start()
    successor.join(60)
    assert successor.exitcode == 0
    error = failure_of(lambda: save(state(3), f"{run}/step-3", run_root=run))
    assert isinstance(error, StaleGenerationError) and run in str(error)
    assert loaded_step(f"{run}/step-2") == 2
    assert not [key for key in bucket.sizes() if "step-3" in key]


def save_slowly(endpoint: str, url: str) -> None:
    os.environ.update(environment(endpoint))
    save(state(2), url, config=SMALL_PARTS)


def begins_upload(request: Request) -> bool:
    return request.method == "POST" and "uploads" in request.target


@pytest.mark.parametrize(
    ("stalls", "num_records"),
    [(begins_upload, 0), (lambda request: request.is_part(2), 1)],
    ids=["before it knows its upload", "in mid upload"],
)
def test_a_save_that_is_killed_is_cleaned_up_by_the_next(
    bucket: Bucket, stalls: Callable[[Request], bool], num_records: int
) -> None:
    save(state(1), bucket.url(RUN), config=SMALL_PARTS)
    arrived, go_on = threading.Event(), threading.Event()

    def holding(request: Request, forward: Forward) -> Answer:
        answer = forward()
        if stalls(request):
            arrived.set()
            go_on.wait(60)
        return answer

    with gateway(bucket.endpoint, holding) as endpoint:
        process = multiprocessing.get_context("forkserver").Process(
            target=save_slowly, args=(endpoint, bucket.url(RUN)), daemon=True
        )
        process.start()
        try:
            assert arrived.wait(60)
            assert loaded_step(bucket.url(RUN)) == 1  # while the other is saving
        finally:
            process.kill()
            process.join()
            go_on.set()
    assert loaded_step(bucket.url(RUN)) == 1 and verify(bucket.url(RUN)).is_sound
    assert len(bucket.open_uploads()) == 1 and len(leftovers(bucket)) == 1 + num_records
    save(state(3), bucket.url(RUN), config=SMALL_PARTS)
    assert loaded_step(bucket.url(RUN)) == 3
    assert leftovers(bucket) == [] and len(bucket.sizes()) == 3
