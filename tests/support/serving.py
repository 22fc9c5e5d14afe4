"""A small HTTP server on loopback, in a thread, for as long as a block lasts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Listener(ThreadingHTTPServer):
    """Its threads keep no process from ending."""

    daemon_threads = True


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], listener: type[Listener] = Listener) -> Iterator[str]:
    """Serve requests with `handler`; yields the URL."""
    with listener(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
