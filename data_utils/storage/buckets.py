"""Objects in buckets: s3://, gs:// and az:// (abfs://), through pyarrow's file systems.

Credentials come from the environment, a profile or the machine's role, as these libraries find them, and so do the
endpoints of other stores than the clouds'. An object's identity is its ETag, for which it is asked when it is listed,
since listings have none; on gs:// its time of change, which is exact there. It is compared after each range, since a
range has no condition.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.urls import split_url, without_secrets
from data_utils.storage import azure, globs, objects
from data_utils.storage.objects import RefusedError, RetryPolicy, StoredObject, TemporaryError, with_retries

if TYPE_CHECKING:
    import pyarrow.fs

_TIMEOUT_SECONDS = 60.0
_SDK_ATTEMPTS = 3  # of the library, within one of ours
_GCS_SECONDS = 15.0  # of its attempts within one of ours
_OPENED = 16  # objects that a process keeps open
_LISTED_AT_ONCE = 32  # objects that are asked for their ETags
_NOTED_AT_ONCE = 4096  # of them, objects that wait for it
_Result = TypeVar("_Result")

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN too for temporary keys) or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a key that may read it",
    "az": (
        "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or AZURE_TENANT_ID, AZURE_CLIENT_ID and "
        "AZURE_CLIENT_SECRET"
    ),
}
# How to reach another store than the clouds', by the variables of their SDKs.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": (azure.CONNECTION_STRING,),
}
SCHEMES = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}

_STATUS = re.compile(r"(?:HTTP status(?: code)?:?|Azure Error: \[\w*\]) (\d{3})")
_NAME = re.compile(r"(?:AWS|Azure) Error:? \[?(\w+)|Status\((\w+):")
_REGION = re.compile(r"bucket is located in '([a-z0-9-]+)'")
_NO_BUCKET = re.compile(r"NO_SUCH_BUCKET|NoSuchBucket|Bucket '[^']*' not found|ContainerNotFound")
_BAD_NAME = re.compile(r"InvalidBucketName|InvalidResourceName|InvalidUri|OutOfRangeInput|INVALID_ARGUMENT")
_NO_HOST = re.compile(r"resolve host", re.IGNORECASE)
_BUSY = re.compile(
    r"SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|THROTTLING|REQUEST_TIMEOUT|NETWORK_CONNECTION|UNAVAILABLE"
)
_NO_RIGHT = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|SKEWED|CLIENT_TOKEN|ExpiredToken|InvalidToken|TokenRefresh|credential"
    r"|PERMISSION_DENIED|UNAUTHENTICATED|AuthenticationFailed|AuthorizationFailure|AuthorizationPermission"
    r"|not authorized|OAuth2 access token",
    re.IGNORECASE,
)
_OTHER_REGION = re.compile(r"PermanentRedirect|AuthorizationHeaderMalformed")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket or container: what is before the names of its objects."""

    kind: str  # "s3", "gs" or "az"
    name: str
    url: str  # with / at its end
    account: azure.Account | None = None

    def file_system(self) -> pyarrow.fs.FileSystem:
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS[self.kind])), None)
        return _file_system(self, endpoint, os.getpid())

    def attempt(self, label: str, work: Callable[[], _Result]) -> _Result:
        """The result of a request. Raises TemporaryError; DataError for what the store refuses."""
        import pyarrow

        try:
            return work()
        except FileNotFoundError:
            raise DataError(f"{label}: the store has no such object; check its name.") from None
        except (OSError, pyarrow.ArrowException) as error:  # Azure's raise the second
            raise self._error(label, str(error)) from None
        except ValueError:
            # Of a file whose first request failed, pyarrow's client of gs:// says that it is closed.
            raise TemporaryError("the store's answer ended early") from None

    def _error(self, label: str, words: str) -> Exception:
        """What the library's words mean. They are not repeated: they hold words of the server."""
        match, region, name = _STATUS.search(words), _REGION.search(words), _NAME.search(words)
        status = int(match[1]) if match else 0
        if _NO_BUCKET.search(words):
            return self.missing(label)
        if status >= 500 or status in (408, 429) or (_BUSY.search(words) and not _NO_RIGHT.search(words)):
            said = f"status {status}" if status else name[1] or name[2] if name else "an error"
            return TemporaryError(
                "its host is not found" if _NO_HOST.search(words) else f"the store answered with {said}"
            )
        if _BAD_NAME.search(words) and not _NO_RIGHT.search(words):
            return DataError(
                f"{label}: the store takes this for no name of an object; check the bucket and the name."
            )
        if _OTHER_REGION.search(words) or status in (301, 307) or (status == 400 and region):
            there = region[1] if region else "the bucket's region"
            return DataError(f"{label}: the bucket is in another region; set AWS_REGION to {there}.")
        if status in (400, 401, 403) or _NO_RIGHT.search(words):
            return RefusedError(
                f"{label}: the store refuses access; {_CREDENTIALS[self.kind]}{self._endpoint_hint()}."
            )
        return TemporaryError(f"the store answered with {name[1] or name[2] if name else 'an error'}")

    def missing(self, label: str) -> DataError:
        """The error for a bucket that does not exist."""
        return DataError(f"{label}: there is no bucket {self.name}; check its name{self._endpoint_hint()}.")

    def _endpoint_hint(self) -> str:
        """What else to set for a store of another host than the cloud's."""
        cloud = {"s3": "Amazon", "gs": "Google", "az": "Azure"}[self.kind]
        return f", and {_ENDPOINTS[self.kind][-1]} for another store than {cloud}'s"


@dataclass(frozen=True, slots=True)
class BucketStore:
    """The objects of a bucket. An object's key is its name in the bucket."""

    bucket: Bucket
    retry_policy: RetryPolicy

    def ask(self, label: str, work: Callable[[pyarrow.fs.FileSystem], _Result]) -> _Result:
        """The result of a request that brings all or nothing. Raises DataError."""
        return with_retries(
            label,
            self.retry_policy,
            lambda: self.bucket.attempt(label, lambda: work(self.bucket.file_system())),
        )

    def find(self, key: str) -> StoredObject | None:
        """The object of this name, if there is one. Raises DataError."""
        label, path = f"input {self.bucket.url}{key}", self.path(key)
        info = self.ask(label, lambda system: system.get_file_info(path))
        return self.pinned([info])[0] if info.is_file else None

    def pinned(self, infos: Sequence[Any]) -> list[StoredObject]:
        """The objects of a listing, in its order, with their identities. Raises DataError."""

        def pin(info: Any) -> StoredObject:
            key = info.path[len(self.bucket.name) + 1 :]
            label = self.bucket.url + key
            size, identity = self.ask(f"input {label}", lambda system: self._present(system, key, info))
            return StoredObject(label, size, f"changed {info.mtime_ns // 10**9}, {identity}", key, self)

        stored: list[StoredObject] = []
        with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
            # Some at a time: the pool's notes of a million would take more memory than the objects.
            for start in range(0, len(infos), _NOTED_AT_ONCE):
                stored += pool.map(pin, infos[start : start + _NOTED_AT_ONCE])
        return stored

    def path(self, key: str) -> str:
        """The path of a name for pyarrow. Raises DataError for one that it does not take."""
        if "" in key.split("/"):
            raise DataError(
                f"{self.bucket.url}{key}: the name has an empty part (// or a / at an end), which is not read here; "
                "rename the object."
            )
        return f"{self.bucket.name}/{key}"

    def _present(self, system: pyarrow.fs.FileSystem, key: str, info: Any = None) -> tuple[int, str]:
        """Size and identity of an object. Args: info: of a listing just now. Raises FileNotFoundError."""
        path = self.path(key)
        # Times of gs:// are exact, and pyarrow opens an object there by a request of all its bytes.
        if self.bucket.kind == "gs":
            info = info or system.get_file_info(path)
            if not info.is_file:
                raise FileNotFoundError
            return info.size, f"{info.mtime_ns} ns"
        with system.open_input_file(path) as file:
            metadata = {name.lower(): value.decode() for name, value in file.metadata().items()}
            return file.size(), metadata.get("etag") or metadata.get("last-modified", "")

    def write(self, key: str, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Write an object. Args: chunks: begins to give its content, once for each attempt. Raises DataError."""
        label = f"{self.bucket.url}{key}"

        def work(system: pyarrow.fs.FileSystem) -> None:
            try:
                # Without compression: the library would compress what is named .gz.
                with system.open_output_stream(self.path(key), compression=None) as file:
                    for chunk in chunks():
                        file.write(chunk)
            except FileNotFoundError:
                raise self.bucket.missing(label) from None

        self.ask(label, work)

    def delete(self, key: str) -> None:
        """Delete an object. Raises DataError."""
        path = self.path(key)
        self.ask(f"{self.bucket.url}{key}", lambda system: system.delete_file(path))

    def stream(self, stored: StoredObject, start: int, stop: int) -> Iterator[bytes]:
        def compare() -> None:
            size, identity = self._present(self.bucket.file_system(), stored.key)
            if (size, identity) != (stored.size, stored.identity.partition(", ")[2]):
                raise stored.changed()

        def read() -> bytes:
            try:
                data = _opened(stored, os.getpid()).read_at(stop - start, start)
            except (OSError, ValueError):
                _opened.cache_clear()  # a file whose first request failed stays useless on gs://
                compare()  # the library says of an object that is gone what it says of a cut answer
                raise
            compare()
            return bytes(data)

        yield self.bucket.attempt(f"input {stored.label}", read)


@lru_cache(_OPENED)
def _opened(stored: StoredObject, process: int) -> pyarrow.NativeFile:
    """An open object: opening costs a request."""
    assert isinstance(stored.store, BucketStore)
    bucket = stored.store.bucket
    return bucket.file_system().open_input_file(f"{bucket.name}/{stored.key}")


@cache
def _file_system(bucket: Bucket, endpoint: str | None, process: int) -> pyarrow.fs.FileSystem:
    """The file system of a bucket, for this process: a fork would share the connections of the one that began it."""
    import pyarrow.fs

    environ = os.environ
    if bucket.kind == "gs":
        # By itself the library would try for a quarter of an hour.
        return _library_class("GcsFileSystem")(
            retry_time_limit=timedelta(seconds=_GCS_SECONDS), **_emulator(endpoint)
        )
    if bucket.kind == "az":
        assert bucket.account is not None
        return _library_class("AzureFileSystem")(**azure.file_system_options(bucket.account))
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if not region:
        region = "us-east-1" if endpoint else pyarrow.fs.resolve_s3_region(bucket.name)
    return _library_class("S3FileSystem")(
        endpoint_override=endpoint,
        region=region,
        connect_timeout=_TIMEOUT_SECONDS,
        request_timeout=_TIMEOUT_SECONDS,
        retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=_SDK_ATTEMPTS),
    )


def _emulator(endpoint: str | None) -> dict[str, Any]:
    """The options of another store than Google's, without credentials, as its SDKs read the variable."""
    if endpoint is None:
        return {}
    address = endpoint if "://" in endpoint else f"http://{endpoint}"
    parts = split_url(address)
    if (
        parts.scheme not in ("http", "https")
        or not parts.netloc
        or "@" in parts.netloc
        or parts.path not in ("", "/")
    ):
        raise ConfigError(
            f"STORAGE_EMULATOR_HOST is {without_secrets(address)}; give http://HOST:PORT, or unset it for Google's "
            "store."
        )
    return {"anonymous": True, "scheme": parts.scheme, "endpoint_override": parts.netloc}


def _library_class(name: str) -> Any:
    """A class of pyarrow.fs. Raises DataError where this pyarrow is built without it, or is older."""
    import pyarrow.fs

    try:
        return getattr(pyarrow.fs, name)
    except (ImportError, AttributeError):
        raise DataError(
            f"this pyarrow ({pyarrow.__version__}) has no {name}; install the version of requirements.txt."
        ) from None


def parse_bucket(url: str) -> tuple[Bucket, str]:
    """A bucket, and the name within it. Raises ConfigError."""
    scheme, _, rest = url.partition("://")
    kind, label = SCHEMES[scheme.lower()], without_secrets(url)
    netloc, _, path = rest.partition("/")
    if ":" in netloc or label != url:
        raise ConfigError(
            f"{label} is given with a password, a port or a query, which {scheme}:// does not have; "
            f"{_CREDENTIALS[kind]}, and {_ENDPOINTS[kind][-1]} for another store."
        )
    name, _, host = netloc.partition("@")
    account = azure.account_in_url(url, host) if kind == "az" else None
    if not name or (host and kind != "az") or globs.has_magic(name):
        raise ConfigError(f"{url} names no bucket; write {scheme}://BUCKET/NAME.")
    return Bucket(kind, name, f"{scheme}://{netloc}/", account), path


def bucket_object(url: str) -> StoredObject | None:
    """The object of exactly this name, if there is one. Raises: ConfigError, DataError."""
    bucket, key = parse_bucket(url)
    return BucketStore(bucket, objects.RETRY_POLICY).find(key)


def list_bucket(url: str) -> tuple[list[StoredObject], list[str]]:
    """The objects that a name, a folder or a glob names, in their order; and folders that a glob without ** matches.

    Raises: ConfigError, DataError.
    """
    bucket, path = parse_bucket(url)
    store = BucketStore(bucket, objects.RETRY_POLICY)

    import pyarrow.fs

    def infos(folder: str, recursive: bool) -> list[Any]:
        where = store.path(folder) if folder else bucket.name
        # An unknown bucket has no files either: it is looked for where none is found.
        selector = pyarrow.fs.FileSelector(where, recursive=recursive, allow_not_found=True)
        return store.ask(f"input {url}", lambda system: system.get_file_info(selector))

    if path and not path.endswith("/") and (stored := store.find(path)) is not None:
        return [stored], []
    is_file = pyarrow.fs.FileType.File
    if not globs.has_magic(path):
        found, matched = infos(path.removesuffix("/"), True), re.compile(".*", re.DOTALL)
    else:
        found = infos(globs.fixed_folder(path), globs.is_deep(path))
        matched = globs.compiled(path)
    found = [info for info in found if matched.fullmatch(info.path[len(bucket.name) + 1 :])]
    files = store.pinned([info for info in found if info.type == is_file])
    folders = []
    if globs.has_magic(path) and not globs.is_deep(path):
        folders = sorted(
            f"{bucket.url}{info.path[len(bucket.name) + 1 :]}" for info in found if info.type != is_file
        )
    if not found:
        info = store.ask(f"input {url}", lambda system: system.get_file_info(bucket.name))
        if info.type == pyarrow.fs.FileType.NotFound:
            raise bucket.missing(f"input {url}")
    return sorted(files, key=lambda stored: stored.key), folders
