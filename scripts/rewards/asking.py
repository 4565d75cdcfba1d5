"""Requests to a server of rewards: an answer has a total time and a size, whatever the server sends."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from threading import Condition, Thread
from typing import Any, NamedTuple

import httpx2

MOST_BYTES = 32 << 20
PLAIN = {"Accept-Encoding": "identity"}


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
    """A client for several threads. An event loop makes the requests, since it can end each at a deadline.

    `socket` is the path of a server's Unix socket, instead of the address's host.
    """

    def __init__(self, base_url: str, seconds: float, socket: str | None = None) -> None:
        self.base_url, self._seconds = base_url, seconds
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            timeout=None,
            transport=httpx2.AsyncHTTPTransport(uds=socket, limits=httpx2.Limits(max_connections=None)),
            headers=PLAIN,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # responses share no session
        )

    def post(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        """Return the answer to a body of JSON; Silent where none comes whole in time."""
        return asyncio.run_coroutine_threadsafe(self._post(path, body, headers), _loop()).result()

    def close(self) -> None:
        """Close the connections."""
        asyncio.run_coroutine_threadsafe(self._client.aclose(), _loop()).result()

    async def _post(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream("POST", path, json=body, headers=headers) as response,
            ):
                received = bytearray()
                async for part in response.aiter_raw():
                    received += part
                    if len(received) > MOST_BYTES:
                        raise Silent(f"an answer of more than {MOST_BYTES >> 20} MiB")
                return Answer(response.status_code, response.headers.get_list("set-cookie"), bytes(received))
        except TimeoutError:
            raise Silent(f"no answer to a response within {self._seconds:g} s", is_late=True) from None
        except httpx2.TransportError as error:
            raise Silent(f"{type(error).__name__} {error}".strip()) from None


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True, name="requests").start()
    return loop


class Turns:
    """Turns of threads at a server: `most` at once, or one alone."""

    def __init__(self, most: int) -> None:
        self._most, self._taken, self._is_alone, self._changed = most, 0, False, Condition()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Take a turn beside others."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken < self._most and not self._is_alone)
            self._taken += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let nobody begin, wait until the turns of others have ended, and take a turn alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            self._is_alone = True
            self._changed.wait_for(lambda: not self._taken)
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
