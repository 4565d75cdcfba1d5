"""A real HTTP server that takes Apprise's json:// notifications."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread


class Server(ThreadingHTTPServer):
    """Keeps title and text of the notifications; with `hang` it answers none."""

    def __init__(self, hang: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hang, self.taken, self.over = hang, [], Event()
        self.url = f"json://127.0.0.1:{self.server_port}/alert"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.taken.append((said["title"], said["message"]))
        if self.server.hang:
            self.server.over.wait(120)
        else:
            self.send_response(200)
            self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(hang: bool = False) -> Iterator[Server]:
    """A server for the time of a block."""
    with Server(hang) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
