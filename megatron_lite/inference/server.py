"""A demo page on 127.0.0.1 to try a run in a browser: page.html, and its requests to a `Demo` as JSON.

Only browsers on this machine reach it. Requests of pages of another origin are refused by the Host and Origin headers
(DNS rebinding) and the content type; the content security policy lets our page connect to this server only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from data_utils.common.errors import ConfigError, UserError

if TYPE_CHECKING:  # imports torch, and the port is checked before torch is loaded
    from megatron_lite.inference.demo import Demo

HOST = "127.0.0.1"
MOST_BYTES = 64 << 10  # of a request body
# Bytes of a larger body that are read and dropped: a browser displays the error only after it has sent its request.
MOST_DROPPED = 16 << 20
READ_SECONDS = 60.0
REQUEST_FIELDS: dict[str, dict[str, Any]] = {
    "/complete": {"text": str, "settings": dict},
    "/attention": {"completion": int, "stack": str, "layer": int, "head": int | None},
}


class RequestError(Exception):
    """A request that gets a status other than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """Serves requests once `demo` is set. Args: port: 0: any free port. Raises: ConfigError if it is in use."""

    daemon_threads = True
    demo: Demo

    def __init__(self, port: int):
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"--port is {port}; it must be in [0, 65535].")
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be opened ({error.strerror}); give another with --port, or 0 for any."
            ) from None
        self.busy = threading.Lock()  # one completion at a time
        self.page = Path(__file__).with_name("page.html").read_bytes()
        self.policy = policy_of(self.page.decode())

    @property
    def hosts(self) -> set[str]:
        """Values of the Host header in requests from our page."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def serve(self) -> NoReturn:
        """Serve until Ctrl-C, which waits for a running completion; a second Ctrl-C does not."""
        with self:
            try:
                self.serve_forever()
            finally:
                self.busy.acquire()
        raise AssertionError("serve_forever ends by an exception")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: only closed connections get here, since the handler reports every other error."""


def policy_of(page: str) -> str:
    """The Content-Security-Policy that allows the page's own script and style, and requests to this server."""
    hashes = {}
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        hashes[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "page", ""
    timeout = READ_SECONDS

    def do_GET(self) -> None:
        self._reply(self._get)

    def do_POST(self) -> None:
        self._reply(self._post)

    def _get(self) -> bytes | dict[str, Any]:
        if self.path == "/about":
            return self.server.demo.about()
        if self.path != "/":
            raise RequestError(404, "page not found; open the address that scripts/try.py printed.")
        return self.server.page

    def _post(self) -> dict[str, Any]:
        request = self._request_fields()
        with self.server.busy:
            demo = self.server.demo
            return demo.complete(**request) if self.path == "/complete" else demo.attention(**request)

    def _reply(self, handle: Callable[[], bytes | dict[str, Any]]) -> None:
        """Send what `handle` returns, or an error as JSON."""
        status = 200
        content: bytes | dict[str, Any]
        try:
            # Other pages of the browser can send requests to this port too; they are refused.
            self._check_origin()
            content = handle()
        except RequestError as error:
            status, content = error.status, {"error": str(error)}
        except UserError as error:
            status, content = 400, {"error": str(error)}
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            return
        except Exception as error:
            traceback.print_exc()
            status, content = 500, {"error": f"{type(error).__name__}; see the terminal."}
        self._send(status, content)

    def _check_origin(self) -> None:
        """Raise RequestError unless Host, and Origin where the browser sends it, are the address of our page."""
        origin = self.headers.get("Origin", "http://" + self.headers.get("Host", ""))
        names = [*self.headers.get_all("Host", []), origin.removeprefix("http://")]
        if len(names) != 2 or not set(names) <= self.server.hosts:
            self.close_connection = True
            raise RequestError(
                403,
                f"requests are accepted from http://{HOST}:{self.server.server_port} only; open this address.",
            )

    def _request_fields(self) -> Mapping[str, Any]:
        """The fields of a POST, with their types checked. Raises: RequestError."""
        length = self.headers.get("Content-Length", "")
        # An error before the body is read leaves the body in the connection, which is then of no use.
        closes, self.close_connection = self.close_connection, True
        if not re.fullmatch(r"[0-9]{1,18}", length) or "Transfer-Encoding" in self.headers:
            raise RequestError(411, "Content-Length is missing; send it.")
        if int(length) > MOST_BYTES:
            unread = min(int(length), MOST_DROPPED)
            while unread and (dropped := self.rfile.read(min(unread, 1 << 16))):
                unread -= len(dropped)
            raise RequestError(
                413, f"the request has {int(length):,} bytes, more than {MOST_BYTES:,}; shorten the text."
            )
        body = self.rfile.read(int(length))
        self.close_connection = closes
        types = REQUEST_FIELDS.get(self.path)
        if types is None:
            raise RequestError(404, f"there is no {self.path[:60]!r}; request {' or '.join(REQUEST_FIELDS)}.")
        if self.headers.get_content_type() != "application/json":
            raise RequestError(415, "the request is not JSON; send Content-Type: application/json.")
        try:
            tree = json.loads(body)
        except (ValueError, RecursionError):
            raise RequestError(400, "the request cannot be parsed; send JSON in UTF-8.") from None
        has_fields = isinstance(tree, dict) and tree.keys() == types.keys()
        if not has_fields or any(
            isinstance(tree[key], bool) or not isinstance(tree[key], types[key]) for key in types
        ):
            names = ", ".join(f"{key} ({getattr(each, '__name__', each)})" for key, each in types.items())
            raise RequestError(400, f"a request to {self.path} has the fields {names}; send these.")
        return tree

    def _send(self, status: int, content: bytes | dict[str, Any]) -> None:
        """Send the page (bytes), or an object as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "text/html; charset=utf-8" if body is content else "application/json"
        )
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that are not HTTP or have another method, with the headers of `_send`."""
        self.close_connection = True
        self._send(int(code), {"error": message or "the request cannot be handled."})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: texts are private."""
