"""URLs of stored files, and what of them nobody may read in a file or a message."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

# A scheme has two letters or more, so that no drive letter is one; and a bound, without which the search takes the
# square of the length of a text.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{1,30}://"
_URL = re.compile(_SCHEME)
_IN_TEXT = re.compile(rf"({_SCHEME})([^\s'\"]*)")
# A password with a / that is not written as %2F, as keys of s3:// have them.
_OPEN_PASSWORD = re.compile(r"[^/?#@:\[]*:[^/?#@]*[/?#].*@")
_PORT = re.compile(r"[^:]*:\d*[/?#]")
_OBJECT_STORES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "hf")


def is_url(text: object) -> bool:
    """Whether a file's name is a URL: no path of this machine is taken for one."""
    return _URL.match(str(text)) is not None


def split_url(text: str) -> SplitResult:
    """The parts of a URL; empty ones of a text that is none."""
    try:
        return urlsplit(text)
    except ValueError:  # such as an IPv6 address without its end
        return urlsplit("")


def without_secrets(text: str) -> str:
    """A text whose URLs have neither `user:password@` nor a query nor a fragment, which may be signatures."""
    return _IN_TEXT.sub(_public, text)


def _public(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    is_web = scheme[:-3].lower() not in _OBJECT_STORES
    if _OPEN_PASSWORD.match(rest) and not (is_web and _PORT.match(rest)):
        return f"{scheme}..."  # nobody can tell where the password ends
    # Object stores have ? in globs and # in names; what looks like a query is none of theirs.
    end = r"[?#]" if is_web else r"\?[^/]*="
    if cut := re.search(end, rest):
        # The punctuation of a sentence that follows is no secret, but nobody can tell it from one.
        rest = rest[: cut.start()]
    host, slash, path = rest.partition("/")
    # A user without a password is part of a name: abfs://container@account, hf://datasets/org/name@revision.
    if ":" in host.rpartition("@")[0] or (is_web and "@" in host):
        host = host.rpartition("@")[2]
    return scheme + host + slash + path
