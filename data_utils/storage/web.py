"""Objects of web servers: https:// (and http://), read by ranges of the standard library's client.

A server must give ranges and an ETag or a time of change, by which an object that was replaced is noticed. A user and
password, or the signature in a query, may stand in the URL; they are sent and written nowhere.
"""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from data_utils.common.errors import DataError
from data_utils.common.urls import split_url, without_secrets
from data_utils.storage import objects
from data_utils.storage.objects import RefusedError, RetryPolicy, StoredObject, TemporaryError, with_retries

TIMEOUT_SECONDS = 60.0  # without a byte
_CHUNK_BYTES = 256 << 10
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")
_BUSY = (408, 425, 429)  # statuses below 500 that another attempt may not get


@dataclass(frozen=True, slots=True)
class WebStore:
    """Web servers. An object's key is its URL as the user wrote it."""

    retry_policy: RetryPolicy

    def stream(self, stored: StoredObject, start: int, stop: int) -> Iterator[bytes]:
        with request(stored.label, stored.key, start, stop, stored.identity) as response:
            if _identity(response.headers) != stored.identity:
                raise stored.changed()
            yield from content(stored, response, start)


def list_web(url: str) -> list[StoredObject]:
    """The object of a URL. Raises DataError."""
    if re.search(r"[\s'\"]", url):  # what follows could not be told from the rest of a message
        start = without_secrets(re.split(r"[\s'\"]", re.sub(r"//[^/?#]*@", "//", url))[0])
        raise DataError(
            f"input {start}: the URL has white space or a quote in it; write %20, %27 or %22 instead."
        )
    label = without_secrets(url)
    if not split_url(url).hostname:
        raise DataError(f"input {label} names no host; write https://HOST/NAME.")
    if "*" in label:
        raise DataError(
            f"input {label}: a web server lists no files, so * has no meaning there; give each URL."
        )
    store = WebStore(objects.RETRY_POLICY)
    size, identity = with_retries(label, store.retry_policy, lambda: _look(label, url))
    return [StoredObject(label, size, identity, url, store)]


def _look(label: str, url: str) -> tuple[int, str]:
    """Size and identity of an object."""
    # By a range and not by HEAD: a signature holds for one method.
    with request(label, url, 0, 1) as response:
        if response.status == 200 and response.headers.get("Content-Length") == "0":
            return 0, _identity(response.headers)
        bounds = _content_range(response.headers)
        if response.status not in (206, 416) or bounds is None:
            raise DataError(
                f"input {label}: the server gives no ranges of files; download it first (curl -LO)."
            )
        if not (identity := _identity(response.headers)) and bounds[1]:
            raise DataError(
                f"input {label}: the server gives neither an ETag nor a time of change, by which a replaced file is "
                "noticed; download it first (curl -LO)."
            )
        return bounds[1], identity


def is_signed(stored: StoredObject) -> bool:
    """Whether an object's URL holds what may be secret, such as a signature of this object alone."""
    return isinstance(stored.store, WebStore) and stored.key != stored.label


def content(stored: StoredObject, response: Any, start: int) -> Iterator[bytes]:
    """The bytes of an answer to a request of the range from `start`."""
    bounds = _content_range(response.headers)
    if response.status != 206 or bounds is None or bounds != (start, stored.size):
        raise stored.changed()
    while chunk := response.read(_CHUNK_BYTES):
        yield chunk


@contextmanager
def request(
    label: str, url: str, start: int, stop: int, identity: str = "", headers: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """The answer to a request of a range. Args: headers: for this server alone, not where it sends us on.

    Raises: TemporaryError; DataError, also for an object that has another identity than this one.
    """
    prepared = _prepared(url, start, stop, identity, headers or {})
    try:
        with _opener().open(prepared, timeout=TIMEOUT_SECONDS) as response:
            yield response
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and not identity:  # an empty file has no first byte
                yield error
                return
        raise _refused(label, error.code) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(label, error) from None


def _prepared(
    url: str, start: int, stop: int, identity: str, headers: Mapping[str, str]
) -> urllib.request.Request:
    parts = urlsplit(url)
    netloc = parts.netloc.rpartition("@")[2]
    # Spaces and letters of other alphabets, as browsers write them.
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~-._[]")
    prepared = urllib.request.Request(urlunsplit((parts.scheme, netloc, path, parts.query, "")))
    prepared.add_header("Range", f"bytes={start}-{stop - 1}")
    prepared.add_header("Accept-Encoding", "identity")
    prepared.add_header("User-Agent", "megatron-lite-glm")
    if identity.startswith('"'):  # a weak one (W/"...") is for no condition
        prepared.add_header("If-Match", identity)
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = {**headers, "Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
    for name, value in headers.items():
        prepared.add_unredirected_header(name, value)
    return prepared


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https:// to http://; what is for one server alone stays with it."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> Any:
        here, there = urlsplit(req.full_url), urlsplit(newurl)
        if here.scheme == "https" and there.scheme != "https":
            raise urllib.error.URLError("it sends us to an address without encryption")
        if there.scheme not in ("http", "https"):
            raise urllib.error.URLError("it redirects to an address that is neither http nor https")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and here[:2] == there[:2]:
            for name, value in req.unredirected_hdrs.items():
                if name != "Host":
                    new.add_unredirected_header(name, value)
        return new


@cache
def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()  # not of files and FTP, to which a server could send us
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _identity(headers: Any) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def _content_range(headers: Any) -> tuple[int, int] | None:
    """First byte (0 without one) and the size of the whole object."""
    match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
    return None if match is None else (int(match[1] or 0), int(match[2]))


def _refused(label: str, status: int) -> Exception:
    """The error of a status that is no answer."""
    if status >= 500 or status in _BUSY:
        return TemporaryError(f"the server answered with status {status}")
    problem, remedy = f"the server refuses it with status {status}", "check the URL"
    if status in (401, 403):
        problem = f"the server refuses access (status {status})"
        remedy = (
            "give a URL with a valid signature or user:password@, or for a dataset of the hub set HF_TOKEN"
        )
    elif status < 400:
        problem = f"the server's redirects lead to no file (status {status})"
    elif status in (404, 410):
        problem = f"the server has no such file (status {status})"
    elif status in (412, 416):
        problem, remedy = (
            f"it was replaced since it was listed (status {status})",
            "repeat the command with --restart",
        )
    is_refused = status in (401, 403, 404, 410)
    return (RefusedError if is_refused else DataError)(f"input {label}: {problem}; {remedy}.")


def _failure(label: str, error: Exception) -> Exception:
    """The error for what kept an answer from coming."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DataError(
            f"input {label}: the server's certificate is not trusted; set SSL_CERT_FILE to its issuer's."
        )
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        return DataError(f"input {label}: there is no such host; check the URL.")
    if isinstance(reason, (str, ValueError, http.client.InvalidURL)):
        words = reason if isinstance(reason, str) else "this is no valid URL"
        return DataError(f"input {label}: {without_secrets(words)}; check the URL.")
    return TemporaryError(f"no answer ({type(reason).__name__})")
