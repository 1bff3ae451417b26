"""Stand-ins of stores on the loopback: a web server of files whose answers can be cut, and the hub's routes on it."""

import hashlib
import http.client
import json
import random
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from support.waiting import wait_until

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FileServer(ThreadingHTTPServer):
    """Serves `files`, path -> content, with ranges and ETags.

    cuts: share of the answers that end early, after a drawn number of bytes, 1 at least; busy: share that is a status
    503; `refuse`: path -> a status; `needed`: an Authorization header or a query that a request must have; `seen`:
    the requests; `redirects`: path -> URL; `most_bytes`: after as many no answer comes until it is None.
    """

    daemon_threads = True

    def __init__(self, files, cuts=0.0, busy=0.0, seed=0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.cuts, self.busy = dict(files), cuts, busy
        self.refuse, self.needed, self.seen, self.has_ranges, self.has_etags = {}, None, [], True, True
        self.checks_conditions, self.redirects = True, {}
        self.most_bytes, self.sent = None, 0
        self.hub = {}  # org/name -> commit
        self.draw = random.Random(seed)
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # a client that closes an answer early, as ours do


class RefusedLater(dict):
    """A server's `refuse` of paths after a number of requests."""

    def get(self, path):
        if path not in self:
            return None
        self[path] -= 1
        return 403 if self[path] < 0 else None


def serving(files, **options):
    return running(FileServer(files, **options))


def relaying(port, **options):
    return running(Relay(port, **options))


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def etag(content):
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server, unquote(urlsplit(self.path).path)
        with server.lock:
            server.seen.append((path, self.headers.get("Range"), dict(self.headers)))
            is_busy, is_cut, share = (
                server.draw.random() < server.busy,
                server.draw.random() < server.cuts,
                server.draw.random(),
            )
        if is_busy:
            return self._answer(503)
        if path.startswith("/api/datasets/"):
            return self._hub_api(path.removeprefix("/api/datasets/"))
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            if server.hub.get(match[1]) != match[2]:
                return self._answer(404)
            path = f"/{match[1]}/{match[3]}"
        if path in server.redirects:
            return self._answer(302, headers={"Location": server.redirects[path]})
        status = server.refuse.get(path)
        if server.needed and server.needed not in (
            self.headers.get("Authorization"),
            urlsplit(self.path).query,
        ):
            status = 403
        if status:
            return self._answer(status)
        content = server.files.get(path)
        if content is None:
            return self._answer(404)
        wanted = self.headers.get("If-Match")
        if wanted and wanted != etag(content) and server.checks_conditions:
            return self._answer(412)
        headers = {"ETag": etag(content)} if server.has_etags else {}
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if bounds is None or not server.has_ranges:
            return self._answer(200, content, headers)
        first, last = int(bounds[1]), min(int(bounds[2]), len(content) - 1)
        if first >= len(content):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        data = content[first : last + 1]
        with server.lock:
            server.sent += len(data)
            is_stalled = server.most_bytes is not None and server.sent > server.most_bytes
        if is_stalled:
            wait_until(lambda: server.most_bytes is None)
        return self._answer(206, data, headers, max(int(len(data) * share), 1) if is_cut else None)

    def _answer(self, status, data=b"", headers=None, sent=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        if sent is not None:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data[:sent])
        if sent is not None:
            self.close_connection = True

    def _hub_api(self, rest):
        """`ORG/NAME`, `ORG/NAME/revision/REVISION` and `ORG/NAME/tree/COMMIT/FOLDER?recursive=true`."""
        repository, route, *more = re.fullmatch(r"([^/]+/[^/]+)(?:/(\w+)/([^/]+)/?(.*))?", rest).groups()
        server = self.server
        if repository not in server.hub or (route == "revision" and more[0] != COMMIT):
            missing = "RepoNotFound" if repository not in server.hub else "RevisionNotFound"
            return self._answer(404, b"{}", {"X-Error-Code": missing, "Content-Type": "application/json"})
        if route != "tree":
            tree = {"id": repository, "sha": server.hub[repository], "siblings": []}
        else:
            above = f"/{repository}/"
            names = [path[len(above) :] for path in server.files if path.startswith(above)]
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(server.files[above + name]),
                    "oid": hashlib.sha1(server.files[above + name]).hexdigest(),
                }
                for name in names
                if name.startswith(f"{more[1]}/" if more[1] else "")
            ]
        return self._answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})


class Relay(ThreadingHTTPServer):
    """Passes requests on to another server of this machine, and cuts a share of the answers with content.

    `answer`: (status, code) of S3 that is given to all instead.
    """

    daemon_threads = True

    def __init__(self, port, cuts=0.0, seed=0, answer=None):
        super().__init__(("127.0.0.1", 0), _RelayHandler)
        self.port, self.cuts, self.answer, self.seen = port, cuts, answer, []
        self.draw, self.lock = random.Random(seed), threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass


class _RelayHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _pass_on(self):
        server = self.server
        with server.lock:
            server.seen.append((self.command, self.path, self.headers.get("Range")))
            is_cut, share = server.draw.random() < server.cuts, server.draw.random()
        if server.answer:
            status, code = server.answer
            words = f"<Error><Code>{code}</Code><Message>WORDS OF THE SERVER</Message></Error>"
            status, headers, data = status, {"x-amz-bucket-region": "eu-west-1"}, words.encode()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            onward = http.client.HTTPConnection("127.0.0.1", server.port)
            onward.request(self.command, self.path, body, dict(self.headers))
            response = onward.getresponse()
            status, headers, data = response.status, dict(response.headers), response.read()
        data = b"" if self.command == "HEAD" else data
        is_cut = is_cut and self.command == "GET" and "Range" in self.headers
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data[: int(len(data) * share)] if is_cut else data)
        self.close_connection = is_cut

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on
