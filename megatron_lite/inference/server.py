"""One page on 127.0.0.1 to try a run in a browser: page.html, and its questions to a `Trial` as JSON.

Only this machine's browsers reach it. A page of another origin is refused by the Host and Origin headers (DNS
rebinding) and the type of the body, and the policy of our own page lets it ask nobody else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import traceback
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from data_utils.common.errors import ConfigError, UserError

if TYPE_CHECKING:  # it imports torch
    from megatron_lite.inference.trial import Trial

HOST = "127.0.0.1"
MOST_BYTES = 64 << 10  # of a question
MOST_UNREAD = 16 << 20  # of a larger one, which is read to its end so that the browser reads the refusal
READ_SECONDS = 60.0
QUESTIONS: dict[str, dict[str, Any]] = {
    "/answer": {"text": str, "settings": dict},
    "/attention": {"answer": int, "part": str, "layer": int, "head": int | None},
}


class Refused(Exception):
    """A request that is answered with a status other than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """Waits for requests once `trial` is set. Args: port: 0 = any that is free. Raises: ConfigError if it is taken."""

    daemon_threads = True
    trial: Trial

    def __init__(self, port: int):
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"--port is {port}; it must be in [0, 65535].")
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be had ({error.strerror}); give another with --port, or 0 for any."
            ) from None
        self.busy = threading.Lock()  # one answer at a time
        self.page = Path(__file__).with_name("page.html").read_bytes()
        self.policy = policy_of(self.page.decode())

    @property
    def hosts(self) -> set[str]:
        """The names by which our page asks: what is asked by another name is not our page's question."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def serve(self) -> NoReturn:
        """Until Ctrl-C, which waits for an answer that is being made; a second one does not."""
        with self:
            try:
                self.serve_forever()
            finally:
                self.busy.acquire()
        raise AssertionError("serve_forever ends by an exception")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has left is no error; all else is told by the handler."""


def policy_of(page: str) -> str:
    """The Content-Security-Policy that allows the page's own script and style, and questions to this server."""
    hashes = {}
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.S)
        hashes[kind] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
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
            return self.server.trial.about()
        if self.path != "/":
            raise Refused(404, "there is no such page; open the address that scripts/try.py printed.")
        return self.server.page

    def _post(self) -> dict[str, Any]:
        question = self._question()
        with self.server.busy:
            trial = self.server.trial
            return trial.answer(**question) if self.path == "/answer" else trial.attention(**question)

    def _reply(self, make: Any) -> None:
        status = 200
        try:
            self._check_origin()
            found = make()
        except Refused as error:
            status, found = error.status, {"error": str(error)}
        except UserError as error:
            status, found = 400, {"error": str(error)}
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            return
        except Exception as error:
            traceback.print_exc()
            status, found = 500, {"error": f"no answer, because of {type(error).__name__}: see the terminal."}
        self._send(status, found)

    def _check_origin(self) -> None:
        origin = self.headers.get("Origin", "http://" + self.headers.get("Host", ""))
        names = [*self.headers.get_all("Host", []), origin.removeprefix("http://")]
        if len(names) != 2 or not set(names) <= self.server.hosts:
            self.close_connection = True
            raise Refused(
                403, f"only http://{HOST}:{self.server.server_port} is answered; open this address."
            )

    def _question(self) -> Mapping[str, Any]:
        """The fields of a POST, of their kinds."""
        length = self.headers.get("Content-Length", "")
        closes, self.close_connection = self.close_connection, True  # unless the body was read
        if not re.fullmatch(r"[0-9]{1,18}", length) or "Transfer-Encoding" in self.headers:
            raise Refused(411, "the length of the question is missing; send Content-Length.")
        if int(length) > MOST_BYTES:
            unread = min(int(length), MOST_UNREAD)
            while unread and (part := self.rfile.read(min(unread, 1 << 16))):
                unread -= len(part)
            raise Refused(
                413, f"the question has {int(length):,} bytes, more than {MOST_BYTES:,}; shorten the text."
            )
        body = self.rfile.read(int(length))
        self.close_connection = closes
        kinds = QUESTIONS.get(self.path)
        if kinds is None:
            raise Refused(404, f"nothing answers {self.path[:60]!r}; ask {' or '.join(QUESTIONS)}.")
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "the question is no JSON; send Content-Type: application/json.")
        try:
            tree = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused(400, "the question cannot be read; send JSON in UTF-8.") from None
        is_good = isinstance(tree, dict) and tree.keys() == kinds.keys()
        if not is_good or any(
            isinstance(tree[key], bool) or not isinstance(tree[key], kinds[key]) for key in kinds
        ):
            raise Refused(
                400, f"a question to {self.path} has {', '.join(kinds)}, each of its kind; send these."
            )
        return tree

    def _send(self, status: int, found: bytes | dict[str, Any]) -> None:
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8" if body is found else "application/json")
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
        """The answer to requests that are no HTTP, or ask by another method."""
        self.close_connection = True
        self._send(int(code), {"error": message or "this cannot be answered."})

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: texts are the person's own."""
