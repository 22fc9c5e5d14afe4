"""An S3 server on loopback, a bucket for each test, and a gateway before the server that lets chosen requests fail."""

import contextlib
import http.client
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.serving import Listener, serving

KEY, SECRET, REGION = "AKIATESTTESTTEST", "secret-that-no-message-may-show", "us-east-1"

# It ends by itself when our end of its input closes, however this process ends.
_MOTO = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger('werkzeug').setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
server.start()
print('http://%s:%d' % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
# Set by tests/conftest.py, so that nothing outside this machine is asked.
_KEPT = ("AWS_EC2_METADATA_DISABLED", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Endpoint of a moto server for all tests of this process."""
    server = subprocess.Popen([sys.executable, "-c", _MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        assert endpoint.startswith("http://"), "moto did not start; is moto[server] installed?"
        yield endpoint
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def _s3_client(s3_server: str) -> Any:
    return boto3.client(
        "s3", endpoint_url=s3_server, region_name=REGION, aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )


@pytest.fixture
def bucket(s3_server: str, _s3_client: Any, monkeypatch: pytest.MonkeyPatch) -> "Bucket":
    """An empty bucket, to which the environment of this test leads."""
    for name in [name for name in os.environ if name.startswith("AWS_") and name not in _KEPT]:
        monkeypatch.delenv(name)
    for name, value in environment(s3_server).items():
        monkeypatch.setenv(name, value)
    made = Bucket(name=f"bucket-{uuid.uuid4().hex}", endpoint=s3_server, client=_s3_client)
    made.client.create_bucket(Bucket=made.name)
    return made


def environment(endpoint: str) -> dict[str, str]:
    """What a user sets to reach `endpoint`."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def options(endpoint: str) -> dict[str, str]:
    """The same as `storage_options`."""
    return {"endpoint": endpoint, "region": REGION, "access_key_id": KEY, "secret_access_key": SECRET}


@dataclass(frozen=True)
class Bucket:
    """A bucket, seen past the code under test."""

    name: str
    endpoint: str
    client: Any

    def url(self, path: str) -> str:
        return f"s3://{self.name}/{path}"

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of each object by its key; fewer than 1,000 objects."""
        listed = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for entry in listed.get("Contents", [])}

    def open_uploads(self) -> list[str]:
        """Keys of the uploads that are neither completed nor aborted."""
        return [upload["Key"] for upload in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def download(self, prefix: str, folder: Path) -> Path:
        """Copy every object below `prefix` to `folder`."""
        for key in self.sizes(prefix + "/"):
            path = folder / key.removeprefix(prefix + "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.client.download_file(self.name, key, str(path))
        return folder


@dataclass(frozen=True)
class Request:
    """The head of a request."""

    method: str
    target: str

    def is_part(self, number: int) -> bool:
        """Whether it brings part `number`, from 1, of an upload."""
        return self.method == "PUT" and f"partNumber={number}&" in self.target + "&"


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def refusal(status: int, code: str, **headers: str) -> Answer:
    """An error as S3 writes it; an underscore in a header's name stands for a hyphen."""
    body = f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


Behaviour = Callable[[Request, Callable[[], Answer]], Answer]


@contextlib.contextmanager
def gateway(server: str, behave: Behaviour) -> Iterator[str]:
    """Stand before `server`: ``behave(request, forward)`` answers each request; `forward` asks the server.

    `behave` runs in a thread for each connection, and may wait.

    Yields:
        The gateway's endpoint.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = behave(Request(self.command, self.path), lambda: self.forward(body))
            self.send_response_only(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if "content-length" not in answer.headers:
                self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

        def forward(self, body: bytes) -> Answer:
            upstream = http.client.HTTPConnection(server.removeprefix("http://"), timeout=60)
            with contextlib.closing(upstream):
                upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    upstream.putheader(name, value)
                upstream.endheaders(body)
                answer = upstream.getresponse()
                headers = {name.lower(): value for name, value in answer.getheaders()}
                for name in ("connection", "transfer-encoding"):
                    headers.pop(name, None)
                return Answer(answer.status, headers, answer.read())

    class Quiet(Listener):
        def handle_error(self, *args: Any) -> None:
            """A client that was killed is what some tests are about."""

    with serving(Handler, Quiet) as url:
        yield url
