"""What the small hub of tests/hub.py takes: new model repositories, files by git LFS, and commits."""

import base64
import hashlib
import json
import re
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LFS_BYTES = 1000
NAME = r"([^/]+/[^/]+)"


class Uploads:
    """The requests that write, for an HTTP handler with `hub`, `role` and `_answer`.

    As at the hub, only a token that may write is let in, LFS files go to another host that must not see it, and a
    commit refuses a file that was never stored, or whose size or hash is not what the client said.
    """

    def do_POST(self) -> None:
        body = self._body()
        self.hub.requests.append((self.command, self.path, self.headers))
        fault = self.hub.fault(f"{self.command} {self.role} {self.path}")
        if fault.status != 200:
            return self._answer(fault.status, {"X-Error-Message": "fault", **dict(fault.headers)})
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.hub.tokens:
            return self._answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if token not in self.hub.writers:
            return self._answer(403, {"X-Error-Message": "your token may only read"})
        path = urlsplit(self.path).path
        for pattern, serve in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", self._validate),
            (rf"/api/models/{NAME}/branch/(.+)", self._branch),
            (rf"/api/models/{NAME}/preupload/(.+)", self._preupload),
            (rf"/{NAME}\.git/info/lfs/objects/batch", self._batch),
            (r"/verify", self._verify),
            (rf"/api/models/{NAME}/commit/(.+)", self._commit),
        ):
            if match := re.fullmatch(pattern, path):
                return serve(body, *map(unquote, match.groups()))
        return self._answer(404, {})

    def do_PUT(self) -> None:
        body = self._body()
        self.hub.requests.append((self.command, self.path, self.headers))
        if "Authorization" in self.headers:
            return self._answer(400, {"X-Error-Message": "only one way to authorize is allowed"})
        self.hub.stored[urlsplit(self.path).path.strip("/")] = body
        return self._answer(200, {})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _tell(self, value: Any, status: int = 200) -> None:
        self._answer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            return self._tell({"url": f"{self.hub.url}/{name}", "error": "exists"}, 409)
        repository = self.hub.repositories[name]
        repository.private = asked.get("visibility") == "private"
        repository.commit({})
        return self._tell({"url": f"{self.hub.url}/{name}", "id": "1", "name": name})

    def _validate(self, body: bytes) -> None:
        metadata = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        errors = [{"message": f"no {key}"} for key in ("tags", "library_name") if key not in metadata]
        self._tell({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _branch(self, _: bytes, name: str, branch: str) -> None:
        branches = self.hub.repositories[name].branches
        if branch in branches:
            return self._tell({"error": "exists"}, 409)
        branches[branch] = branches["main"]
        return self._tell({})

    def _preupload(self, body: bytes, name: str, branch: str) -> None:
        if branch not in self.hub.repositories[name].branches:
            return self._answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        modes = [
            {"path": it["path"], "uploadMode": "lfs" if it["size"] >= LFS_BYTES else "regular", "shouldIgnore": False}
            for it in json.loads(body)["files"]
        ]
        return self._tell({"files": modes})

    def _batch(self, body: bytes, _: str) -> None:
        objects = []
        for it in json.loads(body)["objects"]:
            actions = {
                "upload": {"href": f"{self.hub.storage_url}/{it['oid']}?signed=1"},
                "verify": {"href": f"{self.hub.url}/verify"},
            }
            objects.append(it if it["oid"] in self.hub.stored else it | {"actions": actions})
        self._tell({"transfer": "basic", "objects": objects})

    def _verify(self, body: bytes) -> None:
        asked = json.loads(body)
        self._tell({}, 200 if self._is_stored(asked) else 400)

    def _is_stored(self, told: dict[str, Any]) -> bool:
        content = self.hub.stored.get(told["oid"], b"")
        return hashlib.sha256(content).hexdigest() == told["oid"] and len(content) == told["size"]

    def _commit(self, body: bytes, name: str, branch: str) -> None:
        repository = self.hub.repositories[name]
        files = dict(repository.commits[repository.branches[branch]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if not self._is_stored(value):
                    return self._answer(400, {"X-Error-Message": f"{value['path']} was not uploaded"})
                files[value["path"]] = self.hub.stored[value["oid"]]
        oid = repository.commit(files, branch)
        return self._tell({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})
