"""Requests to a server of NeMo-Gym, from any thread: each is made, and ended at its deadline, in the calling thread.

Every request has an event loop and a connection of its own, so that threads share nothing, and a forked process
inherits nothing.
"""

import asyncio
import contextlib
import json
from typing import Any, NamedTuple

import httpx2

from scripts.errors import UserError

MOST_BYTES = 32 << 20
HEADERS = {"Accept-Encoding": "identity", "Connection": "close", "Content-Type": "application/json"}


class Silent(Exception):
    """A server gave no answer, `is_late`: in time; the message says why."""

    def __init__(self, why: str, is_late: bool = False) -> None:
        super().__init__(why)
        self.is_late = is_late


class Answer(NamedTuple):
    """A server's answer, not decompressed."""

    status: int
    cookies: list[str]
    body: bytes


class Client:
    """A client for any number of threads, which waits `seconds` for an answer.

    `socket` is the path of a server's Unix socket, instead of the address's host. UserError for an address that is
    none.
    """

    def __init__(self, base_url: str, seconds: float, socket: str | None = None) -> None:
        self.base_url, self._seconds, self._socket = base_url, seconds, socket
        try:
            address = httpx2.URL(base_url)
        except httpx2.InvalidURL as error:
            raise UserError(f"{base_url}: no address of a server: {error}") from None
        # Reading the certificates takes a tenth of a second, and the context may be shared by threads.
        self._certificates = httpx2.create_ssl_context() if address.scheme == "https" else False

    def post(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        """Return the answer to a body of JSON; Silent where none comes whole in time.

        ValueError or TypeError for a body that JSON cannot hold. Whatever else fails on the way is Silent too: it says
        nothing of the body.
        """
        content = json.dumps(body, allow_nan=False).encode()
        try:
            # closed without waiting for threads that look up a host's name
            with contextlib.closing(asyncio.new_event_loop()) as loop:
                return loop.run_until_complete(self._post(path, content, headers))
        except Silent:
            raise
        except TimeoutError:
            raise Silent(f"no answer to a response within {self._seconds:g} s", is_late=True) from None
        except Exception as error:
            cause = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            raise Silent(f"{type(cause).__name__} {cause}".strip()) from error

    async def _post(self, path: str, content: bytes, headers: dict[str, str]) -> Answer:
        transport = httpx2.AsyncHTTPTransport(verify=self._certificates, uds=self._socket)
        async with (
            asyncio.timeout(self._seconds),
            httpx2.AsyncClient(base_url=self.base_url, transport=transport, timeout=None, headers=HEADERS) as client,
            client.stream("POST", path, content=content, headers=headers) as response,
        ):
            received = bytearray()
            async for part in response.aiter_raw():
                received += part
                if len(received) > MOST_BYTES:
                    raise Silent(f"an answer of more than {MOST_BYTES >> 20} MiB")
            return Answer(response.status_code, response.headers.get_list("set-cookie"), bytes(received))
