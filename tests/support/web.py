"""A web server over a folder, as read-only stores over HTTP need it: ranges of files, and listings by WebDAV."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

import pytest

from tests.support.serving import serving


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """URL under which `tmp_path` is served."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def path_asked(self) -> Path:
            return tmp_path / unquote(self.path).strip("/")

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content_Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path_asked()
            if not path.is_file():
                self.answer(404)
                return
            data, asked = path.read_bytes(), self.headers.get("Range")
            if asked is None:
                self.answer(200, data, Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")
                return
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(data)) + 1, len(data))
            place = f"bytes {begin}-{end - 1}/{len(data)}"
            self.answer(206, data[begin:end], Content_Range=place, Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")

        do_HEAD = do_GET

        def do_PROPFIND(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path_asked()
            if not path.exists():
                self.answer(404)
                return
            below = sorted(path.rglob("*")) if self.headers.get("Depth") == "infinity" else sorted(path.iterdir())
            entries = "".join(map(entry, [path, *below]))
            text = f'<?xml version="1.0"?><D:multistatus xmlns:D="DAV:">{entries}</D:multistatus>'
            self.answer(207, text.encode(), Content_Type="application/xml")

    def entry(path: Path) -> str:
        place = "/" + quote(str(path.relative_to(tmp_path))).removeprefix(".") + ("/" if path.is_dir() else "")
        kind = "<D:resourcetype><D:collection/></D:resourcetype>" if path.is_dir() else "<D:resourcetype/>"
        size = "" if path.is_dir() else f"<D:getcontentlength>{path.stat().st_size}</D:getcontentlength>"
        properties = f"<D:getlastmodified>Thu, 01 Jan 2026 00:00:00 GMT</D:getlastmodified>{size}{kind}"
        status = "<D:status>HTTP/1.1 200 OK</D:status>"
        found = f"<D:propstat><D:prop>{properties}</D:prop>{status}</D:propstat>"
        return f"<D:response><D:href>{escape(place)}</D:href>{found}</D:response>"

    with serving(Handler) as url:
        yield url
