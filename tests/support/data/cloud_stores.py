"""Stand-ins of Google's and of Azure's object stores on the loopback, written from their REST references.

Each runs in a process of its own: pyarrow's client of Google's store holds Python's lock during some of its requests.
"""

import base64
import hashlib
import hmac
import json
import multiprocessing
import random
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

ACCOUNT, KEY = "devstore", base64.b64encode(b"CANARY-KEY").decode()
_LEASE = "00000000-0000-0000-0000-000000000001"


@dataclass
class Stored:
    data: bytes
    number: int  # of all that were written
    changed: float = field(default_factory=time.time)


class _Server(ThreadingHTTPServer):
    """`buckets`: name -> key -> Stored. cuts: share of the answers with content that end early; busy: share of statuses
    503; refusal: (status, code) of all answers; changed: the time of what is written from now on.
    """

    daemon_threads = True

    def __init__(self, handler, files):
        super().__init__(("127.0.0.1", 0), handler)
        self.buckets = {"corpora": {}}
        self.uploads, self.seen, self.written = {}, [], 0
        self.cuts, self.busy, self.refusal, self.changed, self.draw = 0.0, 0.0, None, None, random.Random(0)
        self.lock = threading.Lock()
        for key, data in files.items():
            self.put("corpora", key, data)

    def put(self, bucket, key, data):
        self.written += 1
        changed = {} if self.changed is None else {"changed": self.changed}
        self.buckets[bucket][key] = Stored(data, self.written, **changed)
        return self.buckets[bucket][key]

    def handle_error(self, request, client_address):
        pass  # a client that closes an answer early


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _handle(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        with server.lock:
            server.seen.append((self.command, self.path, dict(self.headers)))
            is_busy, self._is_cut = server.draw.random() < server.busy, server.draw.random() < server.cuts
            self._share = server.draw.random()
            refusal = (503, self.busy_code) if is_busy else server.refusal
            if refusal is None:
                query = dict(parse_qsl(url.query, keep_blank_values=True))
                return self.respond(url.path, query, body)
        self.refuse(*refusal)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def send(self, status, data=b"", headers=None, length=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, str(value))
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def content(self, stored, headers):
        """The object or the range that is asked for, cut as it was drawn."""
        data = stored.data
        asked = re.fullmatch(
            r"bytes=(\d+)-(\d*)", self.headers.get("x-ms-range") or self.headers.get("Range") or ""
        )
        if asked is None:
            return self._content(200, data, headers)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return self.refuse(416, "InvalidRange")
        headers = {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return self._content(206, data[first : last + 1], headers)

    def _content(self, status, data, headers):
        if not self._is_cut:
            return self.send(status, data, headers)
        self.send(status, data[: max(int(len(data) * self._share), 1)], headers, len(data))
        self.close_connection = True


class GoogleHandler(_Handler):
    """https://cloud.google.com/storage/docs/json_api/v1: objects, and uploads in chunks."""

    busy_code = "backendError"

    def refuse(self, status, code):
        self._json({"error": {"code": status, "message": "WORDS", "errors": [{"reason": code}]}}, status)

    def _json(self, tree, status=200):
        self.send(status, json.dumps(tree).encode(), {"Content-Type": "application/json; charset=UTF-8"})

    def respond(self, path, query, body):
        match = re.fullmatch(r"(/upload)?/storage/v1/b/([^/]+)(?:/(o)(?:/([^/]+))?)?", path)
        bucket, name = match[2], unquote(match[4] or "")
        objects = self.server.buckets.get(bucket)
        if objects is None:
            return self.refuse(404, "notFound")
        if match[1]:
            return self._upload(bucket, query, body)
        if not match[3]:
            return self._json({"kind": "storage#bucket", "name": bucket})
        if not name:
            return self._list(bucket, objects, query)
        stored = objects.get(name)
        if stored is None or query.get("generation", str(stored.number)) != str(stored.number):
            return self.refuse(404, "notFound")
        if self.command == "DELETE":
            del objects[name]
            return self.send(204)
        if query.get("alt") == "media":
            return self.content(stored, {"x-goog-generation": stored.number})
        self._json(self._describe(bucket, name, stored))

    def _describe(self, bucket, name, stored):
        changed = datetime.fromtimestamp(stored.changed, UTC).isoformat(timespec="milliseconds")
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(stored.data)),
            "generation": str(stored.number),
            "metageneration": "1",
            "updated": changed.replace("+00:00", "Z"),
            "timeCreated": changed.replace("+00:00", "Z"),
            "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
        }

    def _list(self, bucket, objects, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, folders = [], set()
        for name in sorted(name for name in objects if name.startswith(prefix)):
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(prefix + head + delimiter)
            else:
                items.append(self._describe(bucket, name, objects[name]))
        # One object a page, so that pages are read.
        page = int(query.get("pageToken") or 0)
        more = {"nextPageToken": str(page + 1)} if page + 1 < len(items) else {}
        self._json(
            {"kind": "storage#objects", "items": items[page : page + 1], "prefixes": sorted(folders), **more}
        )

    def _upload(self, bucket, query, body):
        uploads = self.server.uploads
        if self.command == "POST":
            number = str(len(uploads))
            uploads[number] = (query["name"], bytearray())
            address = f"http://{self.headers['Host']}/upload/storage/v1/b/{bucket}/o"
            return self.send(200, b"", {"Location": f"{address}?uploadType=resumable&upload_id={number}"})
        name, data = uploads[query["upload_id"]]
        first, total = re.fullmatch(
            r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", self.headers["Content-Range"]
        ).groups()
        if first is not None:
            data[int(first) :] = body
        if total == str(len(data)):
            return self._json(self._describe(bucket, name, self.server.put(bucket, name, bytes(data))))
        self.send(308, b"", {"Range": f"bytes=0-{len(data) - 1}"} if data else {})


class AzureHandler(_Handler):
    """https://learn.microsoft.com/rest/api/storageservices: blobs of an account without hierarchical namespace."""

    busy_code = "ServerBusy"

    def refuse(self, status, code):
        words = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>WORDS</Message></Error>'
        headers = {"x-ms-error-code": code, "Content-Type": "application/xml"}
        if self.command == "HEAD":
            del headers["Content-Type"]  # the SDK would read what is not there, and end the process
            return self.send(status, b"", headers)
        self.send(status, words.encode(), headers)

    def respond(self, path, query, body):
        if not self._is_signed(path, query):
            return self.refuse(403, "AuthenticationFailed")
        container, _, name = unquote(path).removeprefix(f"/{ACCOUNT}/").partition("/")
        blobs = self.server.buckets.get(container)
        if blobs is None:
            return self.refuse(404, "ContainerNotFound")
        if query.get("action") == "getAccessControl":
            return self.refuse(400, "HierarchicalNamespaceNotEnabled")
        if query.get("comp") == "list":
            return self._list(container, blobs, query)
        if query.get("restype") == "container":
            headers = self._properties(Stored(b"", 0, 0))
            flags = {"x-ms-has-immutability-policy": "false", "x-ms-has-legal-hold": "false"}
            return self.send(200, b"", {**headers, **flags})
        if self.command == "PUT" and query.get("comp") != "lease":
            return self._put(container, name, query, body)
        stored = blobs.get(name)
        if stored is None:
            return self.refuse(404, "BlobNotFound")
        headers = self._properties(stored)
        if query.get("comp") == "lease":
            is_new = self.headers["x-ms-lease-action"] == "acquire"
            return self.send(201 if is_new else 200, b"", {**headers, "x-ms-lease-id": _LEASE})
        if query.get("comp") == "blocklist":
            blocks = b'<?xml version="1.0"?><BlockList><CommittedBlocks/><UncommittedBlocks/></BlockList>'
            return self.send(200, blocks, {**headers, "Content-Type": "application/xml"})
        if self.command == "DELETE":
            del blobs[name]
            return self.send(202, b"", {"x-ms-delete-type-permanent": "true"})
        if self.command == "HEAD":
            return self.send(200, b"", headers, len(stored.data))
        self.content(stored, headers)

    def _is_signed(self, path, query):
        """Shared Key: the signature of what is asked, with the account's key. Or a shared access signature."""
        if "sig" in query:
            return query["sig"] == "CANARY-SIGNATURE"
        headers = {name.lower(): value for name, value in self.headers.items()}
        length = headers.get("content-length", "")
        names = ("content-md5", "content-type", "date", "if-modified-since", "if-match", "if-none-match")
        signed = [self.command, headers.get("content-encoding", ""), headers.get("content-language", "")]
        signed += ["" if length == "0" else length, *(headers.get(name, "") for name in names)]
        signed += [headers.get("if-unmodified-since", ""), headers.get("range", "")]
        signed += [f"{name}:{headers[name]}" for name in sorted(headers) if name.startswith("x-ms-")]
        signed += [f"/{ACCOUNT}{path}", *(f"{name}:{query[name]}" for name in sorted(query))]
        digest = hmac.digest(base64.b64decode(KEY), "\n".join(signed).encode(), "sha256")
        return headers.get("authorization") == f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"

    def _properties(self, stored):
        changed = formatdate(stored.changed, usegmt=True)
        return {
            "ETag": f'"0x{stored.number:016X}"',
            "Last-Modified": changed,
            "x-ms-creation-time": changed,
            "x-ms-blob-type": "BlockBlob",
            "x-ms-lease-state": "available",
            "x-ms-lease-status": "unlocked",
            "x-ms-server-encrypted": "true",
            "x-ms-request-server-encrypted": "true",
            "x-ms-version": "2020-02-10",
            "x-ms-request-id": "0",
        }

    def _list(self, container, blobs, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        names = sorted(name for name in blobs if name.startswith(prefix))
        entries = {}
        for name in names:
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                folder = escape(prefix + head + delimiter)
                entries[folder] = f"<BlobPrefix><Name>{folder}</Name></BlobPrefix>"
                continue
            changed = formatdate(blobs[name].changed, usegmt=True)
            properties = (
                f"<Creation-Time>{changed}</Creation-Time><Last-Modified>{changed}</Last-Modified>"
                f"<Etag>0x{blobs[name].number:016X}</Etag><Content-Length>{len(blobs[name].data)}</Content-Length>"
                "<BlobType>BlockBlob</BlobType><LeaseStatus>unlocked</LeaseStatus><LeaseState>available</LeaseState>"
                "<ServerEncrypted>true</ServerEncrypted>"
            )
            entries[name] = f"<Blob><Name>{escape(name)}</Name><Properties>{properties}</Properties></Blob>"
        # One entry a page, so that pages are read.
        page = int(query.get("marker") or 0)
        marker = str(page + 1) if page + 1 < len(entries) else ""
        words = (
            '<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="http://127.0.0.1/" '
            f'ContainerName="{container}"><Prefix>{escape(prefix)}</Prefix><Blobs>'
            f"{''.join(list(entries.values())[page : page + 1])}</Blobs><NextMarker>{marker}</NextMarker>"
            "</EnumerationResults>"
        )
        self.send(200, words.encode(), {"Content-Type": "application/xml"})

    def _put(self, container, name, query, body):
        uploads = self.server.uploads
        stored = Stored(b"", 0, 0)
        if query.get("comp") == "block":
            uploads[name, query["blockid"]] = body
        elif query.get("comp") == "blocklist":
            blocks = re.findall(r"<(?:Latest|Uncommitted)>([^<]+)<", body.decode())
            stored = self.server.put(container, name, b"".join(uploads[name, block] for block in blocks))
        else:
            stored = self.server.put(container, name, body)
        self.send(201, b"", self._properties(stored))


class Cloud:
    """A store, as a test sees it. `kind`: "gs" or "az"."""

    def __init__(self, kind, port, pipe):
        self.kind, self.port, self._pipe = kind, port, pipe
        self.variable = {"gs": "STORAGE_EMULATOR_HOST", "az": "AZURE_STORAGE_CONNECTION_STRING"}[kind]
        address = f"http://127.0.0.1:{port}"
        connection = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={address}/{ACCOUNT}"
        self.endpoint = address if kind == "gs" else connection

    def url(self, name):
        return f"{self.kind}://corpora/{quote(name, safe='/*[]')}"

    def set(self, **attributes):
        self._ask(("set", attributes))

    def put(self, files, folder=""):
        """Write objects. Returns: their URLs."""
        self._ask(("put", {folder + name: data for name, data in files.items()}))
        return [self.url(folder + name) for name in files]

    def objects(self):
        """key -> content."""
        return self._ask(("objects", None))

    def seen(self):
        """(method, path, headers) of the requests."""
        return self._ask(("seen", None))

    def _ask(self, request):
        self._pipe.send(request)
        return self._pipe.recv()


@contextmanager
def serving_cloud(kind):
    """A store with the bucket `corpora`, which is empty."""
    context = multiprocessing.get_context("fork")
    server = _Server({"gs": GoogleHandler, "az": AzureHandler}[kind], {})
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(server, theirs), daemon=True)
    process.start()
    server.socket.close()
    try:
        yield Cloud(kind, server.server_port, ours)
    finally:
        process.kill()
        process.join()


def _serve(server, pipe):
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        request, value = pipe.recv()
        with server.lock:
            if request == "set":
                for name, setting in value.items():
                    setattr(server, name, setting)
            elif request == "put":
                for key, data in value.items():
                    server.put("corpora", key, data)
            answers = {"objects": server.buckets["corpora"], "seen": server.seen}
            answer = answers.get(request)
        pipe.send({key: stored.data for key, stored in answer.items()} if request == "objects" else answer)
