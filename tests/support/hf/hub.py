"""A hub on the loopback: as much of the Hugging Face hub's protocol as its library asks of it, and what was asked.

Repositories have commits, a branch `main`, files in git and files behind a redirect (LFS); some are gated.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
from huggingface_hub import constants

LARGE = (".safetensors", ".bin", ".model")  # files behind a redirect


@dataclass
class Hub:
    """A server's repositories: name -> commit -> path -> content. The last commit is `main`."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    stored: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    asked: list[str] = field(default_factory=list)  # "GET /path"
    token: str | None = None  # that may write and read what is gated
    url: str = ""

    def add(self, name: str, directory: Path) -> str:
        """A commit of all files of a directory. Returns: its hash."""
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        return self.commit(name, files)

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        commits = self.repositories.setdefault(name, {})
        oid = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[oid] = files
        self.stored |= {digest(content): content for content in files.values()}
        return oid

    def downloads(self, ending: str = "") -> list[str]:
        """Names of the files whose content was sent."""
        sent = (
            line.removeprefix("GET ")
            for line in self.asked
            if line.startswith("GET ") and "/resolve/" in line
        )
        return [path.rpartition("/")[2] for path in sent if path.endswith(ending)]

    @contextmanager
    def running(self, monkeypatch, cache: Path):
        """The library of this process, and of forks of it, asks this server and keeps files in `cache`."""

        class Handler(_Handler):
            hub = self

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        resolve = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        changes = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": resolve,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in {**changes, "HF_TOKEN_PATH": str(cache / "token")}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        huggingface_hub.close_session()  # a connection of an earlier server
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            huggingface_hub.close_session()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.route("GET")

    def do_HEAD(self):
        self.route("HEAD")

    def do_POST(self):
        self.route("POST")

    def do_PUT(self):
        self.route("PUT")

    def route(self, method):
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{method} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = path.strip("/").split("/")
        if parts[0] == "lfs":
            assert self.headers.get("Authorization") is None
            return self.answer(200, self.hub.stored[parts[1]])
        if method == "PUT":
            self.hub.stored[parts[1]] = body
            return self.answer(200, b"")
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.as_json({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        if parts[:2] == ["api", "models"]:
            return self.of_api("/".join(parts[2:4]), parts[4:], body)
        if len(parts) < 5 or parts[2] != "resolve":
            return self.refuse(404, "NotFound")
        return self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    @property
    def elsewhere(self):
        """The store of large files, on another host: no token may reach it."""
        return self.hub.url.replace("127.0.0.1", "localhost")

    def may_write(self):
        return self.hub.token is not None and self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def files(self, name, revision):
        """The commit and its files; None after an answer that there is none."""
        commits = self.hub.repositories.get(name)
        if commits is None or (name in self.hub.private and not self.may_write()):
            return self.refuse(401, "RepoNotFound")
        commit = list(commits)[-1] if revision in (None, "main") else revision
        if commit not in commits:
            return self.refuse(404, "RevisionNotFound")
        return commit, commits[commit]

    def of_api(self, name, rest, body):
        if rest[:1] == ["preupload"]:
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            return self.as_json({"files": files})
        if rest[:1] == ["commit"]:
            return self.take(name, body)
        found = self.files(name, rest[1] if len(rest) > 1 else None)
        if found is None:
            return None
        commit, files = found
        if rest[:1] == ["tree"]:
            return self.as_json([self.entry(path, content) for path, content in files.items()])
        siblings = [{"rfilename": path} for path in files]
        return self.as_json(
            {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
        )

    def entry(self, path, content):
        entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": digest(content), "size": len(content), "pointerSize": 130}
        return entry

    def resolve(self, name, revision, path):
        found = self.files(name, revision)
        if found is None:
            return None
        commit, files = found
        if name in self.hub.gated and not self.may_write():
            return self.refuse(403, "GatedRepo")
        if path not in files:
            return self.refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        content = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if not path.endswith(LARGE):
            return self.answer(200, content, headers)
        large = {"X-Linked-Etag": f'"{digest(content)}"', "X-Linked-Size": str(len(content))}
        return self.answer(
            302, b"", {**headers, **large, "Location": f"{self.elsewhere}/lfs/{digest(content)}"}
        )

    def create(self, asked):
        if not self.may_write():
            return self.refuse(401, "Unauthorized")
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if name in self.hub.repositories:
            return self.refuse(409, "Conflict")
        self.hub.repositories[name] = {}
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(name)
        return self.as_json({"url": f"{self.hub.url}/{name}", "name": name})

    def batch(self, asked):
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.elsewhere}/upload/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        return self.as_json({"transfer": "basic", "objects": objects})

    def take(self, name, body):
        if not self.may_write():
            return self.refuse(403, "Forbidden")
        files = {}
        for line in body.decode().splitlines():
            described = json.loads(line)
            value = described["value"]
            if described["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif described["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        oid = self.hub.commit(name, files)
        return self.as_json(
            {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}
        )

    def refuse(self, status, code, headers=()):
        message = f"{code}: the server repeats {self.headers.get('Authorization')}"
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message, **dict(headers)})

    def as_json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status, content, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
