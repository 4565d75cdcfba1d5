"""A stand-in for the load balancer of a pool: one address for the replicas of a registry, in turn; 502 where one is away."""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import httpx2

PORT, REGISTRY = int(sys.argv[1]), Path(sys.argv[2])
TURN = count()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.pass_on(None)

    def do_POST(self) -> None:
        self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def pass_on(self, body: bytes | None) -> None:
        """Ask the next replica, and give its answer."""
        replicas = REGISTRY.read_text().split()
        how = {"content": body, "timeout": 10, "trust_env": False}
        try:
            answer = httpx2.request(self.command, replicas[next(TURN) % len(replicas)] + self.path, **how)
            status, said = answer.status_code, answer.content
        except (httpx2.HTTPError, ZeroDivisionError) as error:
            status, said = 502, str(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


ThreadingHTTPServer(("", PORT), Handler).serve_forever()
