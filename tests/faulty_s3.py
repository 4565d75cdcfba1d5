"""S3 servers with a fault each, on real sockets of loopback: in the whole answer, or before a sound S3 server.

A fault is a function of a connection and of the request that was read from it. `FAULTS` has those that need no S3
server; `FAULTS_BEFORE` has those that pass requests on to a sound one and spoil its answers.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

LONGEST_HEAD = 1 << 16
HTML = b"<html><head><title>Sign in</title></head><body><p>Please sign in to the network.</p></body></html>"
MEGABYTE = b"x" * (1 << 20)


@dataclass
class Request:
    """A request as it came, with the rest of its body still to be read from the connection."""

    method: str
    target: str
    head: bytes
    body: bytes

    @property
    def is_listing(self) -> bool:
        """Whether it asks for the names in a bucket."""
        return "list-type" in parse_qs(urlsplit(self.target).query)


Fault = Callable[[socket.socket, Request], None]


def request_of(connection: socket.socket) -> Request | None:
    """Read a request with its whole body; None where the client has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1 << 16)
        if not part or len(data) > LONGEST_HEAD:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
    length = int(headers.get("content-length", 0))
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    while len(body) < length:
        part = connection.recv(1 << 16)
        if not part:
            return None
        body += part
    method, target, _ = line.split(" ")
    return Request(method, target, head, body)


def answer(connection: socket.socket, status: str, body: bytes, request: Request, *headers: str) -> None:
    """Answer a request and end the connection."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    sent = b"" if request.method == "HEAD" else body
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + sent)


def error_of(code: str) -> bytes:
    """Return S3's XML of an error."""
    return f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def page(names: list[str], more: bool) -> bytes:
    """Return a page of a listing; `more`: another page follows."""
    keys = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in names)
    token = "<NextContinuationToken>next</NextContinuationToken>" if more else ""
    truncated = "true" if more else "false"
    return (
        f"<?xml version='1.0'?><ListBucketResult><Name>bucket</Name><KeyCount>{len(names)}</KeyCount>"
        f"<IsTruncated>{truncated}</IsTruncated>{token}{keys}</ListBucketResult>"
    ).encode()


def is_silent(connection: socket.socket, _: Request) -> None:
    """Take the request, and answer nothing until the client goes."""
    while connection.recv(1 << 16):
        pass


def sends_a_byte_a_second(connection: socket.socket, request: Request) -> None:
    """Answer at a byte a second."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nContent-Type: application/xml\r\n\r\n")
    while request.method != "HEAD":
        connection.sendall(b" ")
        time.sleep(1)


def sends_html(connection: socket.socket, request: Request) -> None:
    """Answer with a web page, as a captive portal does."""
    answer(connection, "200 OK", HTML, request, "Content-Type: text/html")


def sends_nothing(connection: socket.socket, request: Request) -> None:
    """Answer 200 with an empty body."""
    answer(connection, "200 OK", b"", request)


def refuses_rights(connection: socket.socket, request: Request) -> None:
    """Answer 403."""
    answer(connection, "403 Forbidden", error_of("AccessDenied"), request, "Content-Type: application/xml")


def has_no_bucket(connection: socket.socket, request: Request) -> None:
    """Answer 404: the bucket is misspelt."""
    answer(connection, "404 Not Found", error_of("NoSuchBucket"), request, "Content-Type: application/xml")


def fails(connection: socket.socket, request: Request) -> None:
    """Answer 500."""
    answer(connection, "500 Internal Server Error", error_of("InternalError"), request)


def asks_to_wait(connection: socket.socket, request: Request) -> None:
    """Answer 503 and ask for a day of patience."""
    answer(connection, "503 Slow Down", error_of("SlowDown"), request, "Retry-After: 86400")


def lists_without_end(connection: socket.socket, request: Request) -> None:
    """Answer a listing with a full page, after which another follows, always."""
    prefix = parse_qs(urlsplit(request.target).query).get("prefix", [""])[0]
    names = [f"{prefix}{number:040x}" for number in range(1000)]
    answer(connection, "200 OK", page(names, more=True), request, "Content-Type: application/xml")


def sends_without_end(connection: socket.socket, request: Request) -> None:
    """Answer with a body that does not end, as fast as the client reads."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nConnection: close\r\n\r\n")
    while request.method != "HEAD":
        connection.sendall(MEGABYTE)


def redirects_to_itself(connection: socket.socket, request: Request) -> None:
    """Answer with a redirection to the same address."""
    location = f"http://127.0.0.1:{connection.getsockname()[1]}{request.target}"
    answer(connection, "307 Temporary Redirect", error_of("TemporaryRedirect"), request, f"Location: {location}")


def has_another_time(connection: socket.socket, request: Request) -> None:
    """Answer that the request's time is a day off."""
    answer(
        connection,
        "403 Forbidden",
        error_of("RequestTimeTooSkewed"),
        request,
        "Date: Thu, 01 Jan 2015 00:00:00 GMT",
        "Content-Type: application/xml",
    )


FAULTS: dict[str, Fault] = {
    "accepts and is silent": is_silent,
    "a byte a second": sends_a_byte_a_second,
    "200 with HTML": sends_html,
    "200 with an empty body": sends_nothing,
    "403": refuses_rights,
    "404, no such bucket": has_no_bucket,
    "500 for ever": fails,
    "503, retry after a day": asks_to_wait,
    "endless pages": lists_without_end,
    "endless body": sends_without_end,
    "redirect loop": redirects_to_itself,
    "clock skew": has_another_time,
}


def before(address: str, spoil: Callable[[bytes, bytes, Request], bytes]) -> Fault:
    """Return a fault that passes requests on to a sound server, and spoils an answer (head, body) before it goes on."""
    host, _, port = address.rpartition("//")[2].partition(":")

    def passes_on(connection: socket.socket, request: Request) -> None:
        lines = [line for line in request.head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        with socket.create_connection((host, int(port))) as server:
            server.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + request.body)
            data = b""
            while part := server.recv(1 << 16):
                data += part
        head, _, body = data.partition(b"\r\n\r\n")
        connection.sendall(spoil(head, body, request))

    return passes_on


def sound(head: bytes, body: bytes, _: Request) -> bytes:
    """Leave an answer as it is: the control."""
    return head + b"\r\n\r\n" + body


def cut_short(head: bytes, body: bytes, request: Request) -> bytes:
    """Send half of a file's content, under the head of the whole."""
    is_file = request.method == "GET" and not request.is_listing
    return head + b"\r\n\r\n" + (body[: len(body) // 2] if is_file else body)


FAULTS_BEFORE = {"none": sound, "truncated body": cut_short}


@contextmanager
def _listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve each connection to a port of loopback in a thread of its own; the port."""

    def accept(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(fault: Fault) -> Iterator[str]:
    """Serve with a fault on a port of loopback; its address."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            request = request_of(connection)
            if request is not None:
                fault(connection, request)

    with _listening(serve) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def speaking_no_tls() -> Iterator[str]:
    """Answer the start of TLS with random bytes; the address, of https."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(os.urandom(4096))

    with _listening(serve) as port:
        yield f"https://127.0.0.1:{port}"


@contextmanager
def refusing() -> Iterator[str]:
    """Hold a port that nothing listens on; its address."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"
