"""A small Hugging Face hub on 127.0.0.1: what huggingface_hub asks of one, and faults on demand.

It answers ``/api/datasets/<id>/revision/<revision>`` and ``/datasets/<id>/resolve/<commit>/<file>`` as the hub does: small
files itself, files of git LFS by a redirect to another host, whose links it signs and which must not see the token. What
it takes when models are pushed is in tests/hub_uploads.py.
"""

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.hub_uploads import LFS_BYTES, Uploads

FULL = 200


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request: an answer of `status`, or a body that is not as it should be.

    `keep` bytes of a body come before the connection ends, `lies` that the body is then whole; `damage` changes a byte;
    `ignores_range` sends all where a part was asked; `seconds` pass before such an answer, and before each 64 KiB of a body.
    """

    status: int = FULL
    headers: tuple[tuple[str, str], ...] = ()
    keep: int | None = None
    lies: bool = False
    damage: bool = False
    ignores_range: bool = False
    drop: bool = False
    seconds: float = 0


@dataclass
class Repository:
    """A data set: files by name at each commit, and the commit of each branch."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Publish files; the new commit's hash."""
        text = repr((sorted(files.items()), len(self.commits)))
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha


class Hub:
    """The hub, its data sets and its faults; a context that serves while it is entered."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = defaultdict(Repository)
        self.renamed: dict[str, str] = {}
        self.tokens: dict[str, bool] = {}
        """Valid tokens, and whether gated data sets let them in."""
        self.writers: set[str] = set()
        """The tokens among them that may write."""
        self.stored: dict[str, bytes] = {}
        """What was uploaded by git LFS, by SHA-256."""
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        """By a piece of the path: what goes wrong with its next requests, one after the other."""
        self.requests: list[tuple[str, str, Message]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Hub":
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(role)) for role in ("hub", "storage")]
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _handler(self, role: str) -> type[BaseHTTPRequestHandler]:
        return type("Handler", (_Handler,), {"hub": self, "role": role, "protocol_version": "HTTP/1.1"})

    def asked(self, piece: str = "", method: str = "GET") -> list[tuple[str, Message]]:
        """Paths and headers of the requests whose path has this piece."""
        return [(path, headers) for verb, path, headers in self.requests if verb == method and piece in path]

    def fault(self, path: str) -> Fault:
        """The next fault of a request."""
        with self._lock:
            for piece, faults in self.faults.items():
                if piece in path and faults:
                    return faults.pop(0)
        return Fault()


def turn_client(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """Turn this process's client to a hub, with a cache of its own and no token."""
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "AGENT_HARNESSES_PATH": str(home / "agents.json"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Handler(Uploads, BaseHTTPRequestHandler):
    hub: Hub
    role: str

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.hub.requests.append((self.command, self.path, self.headers))
        fault = self.hub.fault(f"{self.command} {self.role} {self.path}")
        if fault.drop:
            self.close_connection = True
        elif fault.status != FULL:
            time.sleep(fault.seconds)
            self._answer(fault.status, {"X-Error-Message": "fault", **dict(fault.headers)})
        elif self.role == "storage":
            self._serve_storage(fault)
        elif match := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)/revision/(.+)", urlsplit(self.path).path):
            self._serve_revision(match[1], unquote(match[2]))
        elif match := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", urlsplit(self.path).path):
            self._serve_file(match[1], unquote(match[2]), unquote(match[3]), fault)
        else:
            self._answer(404, {})

    def _open(self, name: str, revision: str, opens_gates: bool) -> tuple[str, dict[str, bytes]] | None:
        """The commit and its files, for those who may see them; None when an error was answered instead."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            return self._answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if name in self.hub.renamed:
            location = self.path.replace(name, self.hub.renamed[name], 1)
            return self._answer(307, {"Location": location})
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not token):
            unknown = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return self._answer(404, unknown) if token else self._answer(401, unknown)
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        if repository.gated and opens_gates and not self.hub.tokens.get(token):
            return self._answer(403 if token else 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"})
        return commit, repository.commits[commit]

    def _serve_revision(self, name: str, revision: str) -> None:
        if opened := self._open(name, revision, opens_gates=False):
            commit, files = opened
            siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
            info = {"_id": "1", "id": name, "sha": commit, "siblings": siblings}
            self._answer(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def _serve_file(self, name: str, revision: str, file: str, fault: Fault) -> None:
        if (opened := self._open(name, revision, opens_gates=True)) is None:
            return
        commit, files = opened
        if file not in files:
            return self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = files[file]
        if len(content) >= LFS_BYTES:
            sha256 = hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{sha256}"', "X-Repo-Commit": commit}
            return self._answer(302, {"Location": f"{self.hub.storage_url}/{sha256}?signed=1", **linked})
        etag = hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
        self._send(content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, fault)

    def _serve_storage(self, fault: Fault) -> None:
        if "Authorization" in self.headers:
            return self._answer(400, {"X-Error-Message": "only one way to authorize is allowed"})
        sha256 = urlsplit(self.path).path.strip("/")
        commits = [files for repository in self.hub.repositories.values() for files in repository.commits.values()]
        contents = [content for files in commits for content in files.values()]
        content = next(content for content in contents if hashlib.sha256(content).hexdigest() == sha256)
        self._send(content, {"ETag": '"storage"'}, fault)

    def _send(self, content: bytes, headers: dict[str, str], fault: Fault) -> None:
        if fault.damage:
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked, status = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")), 200
        if asked and not fault.ignores_range:
            start, status, whole = int(asked[1]), 206, len(content)
            if start >= whole:
                return self._answer(416, {"Content-Range": f"bytes */{whole}"})
            headers = headers | {"Content-Range": f"bytes {start}-{whole - 1}/{whole}"}
            content = content[start:]
        told = len(content) if not fault.lies else fault.keep
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(told)}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        try:
            for start in range(0, len(content[: fault.keep]), 1 << 16):
                time.sleep(fault.seconds)
                self.wfile.write(content[: fault.keep][start : start + (1 << 16)])
        except OSError:
            self.close_connection = True  # the client left
        if fault.keep is not None:
            self.close_connection = True

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
