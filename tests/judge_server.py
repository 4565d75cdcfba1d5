"""A judge on 127.0.0.1 that speaks OpenAI's chat completions and says, or fails to say, what a test tells it to."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Fault:
    """An answer that is none: a status, after a delay, or a connection closed without a word (status 0)."""

    status: int
    text: str = "{}"
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


@dataclass
class ServedJudge:
    """Where the judge answers, and what it was asked: each request's body and Authorization, in order of arrival."""

    base_url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    most_at_a_time: int = 0

    @property
    def questions(self) -> list[str]:
        """The last message of each request."""
        return [body["messages"][-1]["content"] for body in self.asked]


@contextmanager
def serve(answer: Callable[[Messages], str | Fault], delay: float = 0.0, together: int = 1) -> Iterator[ServedJudge]:
    """Answer each question with what `answer` makes of its messages, after a delay in seconds.

    None is answered before as many as `together` have been asked at one time, or half a minute has passed.
    """
    judge, lock, busy, enough = ServedJudge(), threading.Lock(), [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                judge.asked.append(body | {"path": self.path})
                judge.authorizations.append(self.headers["Authorization"])
                busy.append(1)
                judge.most_at_a_time = max(judge.most_at_a_time, len(busy))
                if judge.most_at_a_time >= together:
                    enough.set()
                said = answer(body["messages"])
            enough.wait(30)
            try:
                self._reply(said)
            except OSError:
                self.close_connection = True  # whoever asked no longer waits
            finally:
                with lock:
                    busy.pop()

        def _reply(self, said: str | Fault) -> None:
            if isinstance(said, str):
                message = {"role": "assistant", "content": said}
                said = Fault(200, json.dumps({"choices": [{"index": 0, "message": message}]}))
            time.sleep(said.delay or delay)
            if said.status == 0:
                self.close_connection = True
                return
            content = said.text.encode()
            self.send_response(said.status)
            for name, value in {"Content-Length": str(len(content)), **said.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # of connections that wait, where a probe asks for many verdicts at once

    server = Server(("127.0.0.1", 0), Handler)
    judge.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def in_turn(*answers: str | Fault) -> Callable[[Messages], str | Fault]:
    """What to answer to the first, the second, ... question; the last answer stands for all that follow."""
    left = list(answers)
    return lambda messages: left.pop(0) if len(left) > 1 else left[0]
