"""Objects in buckets: s3://, gs:// and az:// (abfs://), through pyarrow's file systems.

Credentials come from the environment, a profile or the machine's role, as these libraries find them; endpoint and
region of S3 are those of AWS_ENDPOINT_URL and AWS_REGION. A listing has sizes and times of change but no ETags, so the
time (to the second) is an object's identity; it is compared after each range, since a range has no condition.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.urls import without_secrets
from data_utils.storage import globs, objects
from data_utils.storage.objects import Patience, RefusedError, StoredObject, TemporaryError, patiently

if TYPE_CHECKING:
    import pyarrow.fs

_TIMEOUT_SECONDS = 60.0
_SDK_ATTEMPTS = 3  # of the library, within one of ours
_GCS_SECONDS = 15.0  # of its attempts within one of ours
_OPENED = 16  # objects that a process keeps open
_Result = TypeVar("_Result")

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN too for temporary keys) or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a key that may read it",
    "az": (
        "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or AZURE_TENANT_ID, AZURE_CLIENT_ID and "
        "AZURE_CLIENT_SECRET"
    ),
}
SCHEMES = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}

_STATUS = re.compile(r"HTTP status(?: code)?:? (\d{3})")
_NAME = re.compile(r"(?:AWS|Azure) Error:? \[?(\w+)|Status\((\w+):")
_REGION = re.compile(r"bucket is located in '([a-z0-9-]+)'")
_NO_BUCKET = re.compile(r"NO_SUCH_BUCKET|NoSuchBucket|Bucket '[^']*' not found|ContainerNotFound")
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
    account: str | None = None  # of Azure

    def file_system(self) -> pyarrow.fs.FileSystem:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
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

    def _error(self, label: str, words: str) -> Exception:
        """What the library's words mean. They are not repeated: they hold words of the server."""
        match, region, name = _STATUS.search(words), _REGION.search(words), _NAME.search(words)
        status = int(match[1]) if match else 0
        if _NO_BUCKET.search(words):
            return DataError(
                f"{label}: there is no bucket {self.name}; check its name{self._endpoint_hint()}."
            )
        if status >= 500 or status in (408, 429) or (_BUSY.search(words) and not _NO_RIGHT.search(words)):
            said = f"status {status}" if status else name[1] or name[2] if name else "an error"
            return TemporaryError(f"the store answered with {said}")
        if _OTHER_REGION.search(words) or status in (301, 307) or (status == 400 and region):
            there = region[1] if region else "the bucket's region"
            return DataError(f"{label}: the bucket is in another region; set AWS_REGION to {there}.")
        if status in (400, 401, 403) or _NO_RIGHT.search(words):
            return RefusedError(
                f"{label}: the store refuses access; {_CREDENTIALS[self.kind]}{self._endpoint_hint()}."
            )
        return TemporaryError(f"the store answered with {name[1] or name[2] if name else 'an error'}")

    def _endpoint_hint(self) -> str:
        """What else to set for a store of another host than the cloud's."""
        return ", and AWS_ENDPOINT_URL for another store than Amazon's" if self.kind == "s3" else ""


@dataclass(frozen=True, slots=True)
class BucketStore:
    """The objects of a bucket. An object's key is its name in the bucket."""

    bucket: Bucket
    patience: Patience

    def ask(self, label: str, work: Callable[[pyarrow.fs.FileSystem], _Result]) -> _Result:
        """The result of a request that brings all or nothing. Raises DataError."""
        return patiently(
            label, self.patience, lambda: self.bucket.attempt(label, lambda: work(self.bucket.file_system()))
        )

    def find(self, key: str) -> StoredObject | None:
        """The object of this name, if there is one. Raises DataError."""
        label, path = f"input {self.bucket.url}{key}", f"{self.bucket.name}/{key}"
        info = self.ask(label, lambda system: system.get_file_info(path))
        return self.pinned(info) if info.is_file else None

    def pinned(self, info: Any) -> StoredObject:
        key = info.path[len(self.bucket.name) + 1 :]
        return StoredObject(self.bucket.url + key, info.size, _identity(info), key, self)

    def write(self, key: str, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Write an object. Args: chunks: begins to give its content, once for each attempt. Raises DataError."""

        def work(system: pyarrow.fs.FileSystem) -> None:
            # Without compression: the library would compress what is named .gz.
            with system.open_output_stream(f"{self.bucket.name}/{key}", compression=None) as file:
                for chunk in chunks():
                    file.write(chunk)

        self.ask(f"{self.bucket.url}{key}", work)

    def delete(self, key: str) -> None:
        """Delete an object. Raises DataError."""
        path = f"{self.bucket.name}/{key}"
        self.ask(f"{self.bucket.url}{key}", lambda system: system.delete_file(path))

    def stream(self, stored: StoredObject, start: int, stop: int) -> Iterator[bytes]:
        def compare() -> None:
            info = self.bucket.file_system().get_file_info(f"{self.bucket.name}/{stored.key}")
            if (info.size, _identity(info)) != (stored.size, stored.identity):
                raise stored.changed()

        def read() -> bytes:
            try:
                data = _opened(stored, os.getpid()).read_at(stop - start, start)
            except OSError:
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
        return _library_class("GcsFileSystem")(retry_time_limit=timedelta(seconds=_GCS_SECONDS))
    if bucket.kind == "az":
        return _library_class("AzureFileSystem")(
            bucket.account,
            account_key=environ.get("AZURE_STORAGE_ACCOUNT_KEY") or environ.get("AZURE_STORAGE_KEY"),
            sas_token=environ.get("AZURE_STORAGE_SAS_TOKEN"),
        )
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if region is None:
        region = "us-east-1" if endpoint else pyarrow.fs.resolve_s3_region(bucket.name)
    return _library_class("S3FileSystem")(
        endpoint_override=endpoint,
        region=region,
        connect_timeout=_TIMEOUT_SECONDS,
        request_timeout=_TIMEOUT_SECONDS,
        retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=_SDK_ATTEMPTS),
    )


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
            f"{_CREDENTIALS[kind]}{', and AWS_ENDPOINT_URL for another store' if kind == 's3' else ''}."
        )
    name, _, host = netloc.partition("@")
    account = None
    if kind == "az":
        account = host.partition(".")[0] if host else os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        account = account or os.environ.get("AZURE_STORAGE_ACCOUNT")
        if not account:
            raise ConfigError(
                f"{url} names no storage account; set AZURE_STORAGE_ACCOUNT_NAME, or write "
                f"abfs://{name}@ACCOUNT.dfs.core.windows.net/{path}"
            )
    if not name or (host and kind != "az") or globs.has_magic(name):
        raise ConfigError(f"{url} names no bucket; write {scheme}://BUCKET/NAME.")
    return Bucket(kind, name, f"{scheme}://{netloc}/", account), path


def bucket_object(url: str) -> StoredObject | None:
    """The object of exactly this name, if there is one. Raises: ConfigError, DataError."""
    bucket, key = parse_bucket(url)
    return BucketStore(bucket, objects.PATIENCE).find(key)


def list_bucket(url: str) -> tuple[list[StoredObject], list[str]]:
    """The objects that a name, a folder or a glob names, in their order; and folders that a glob without ** matches.

    Raises: ConfigError, DataError.
    """
    bucket, path = parse_bucket(url)
    store = BucketStore(bucket, objects.PATIENCE)

    import pyarrow.fs

    def infos(folder: str, recursive: bool) -> list[Any]:
        where = f"{bucket.name}/{folder}".rstrip("/")
        selector = pyarrow.fs.FileSelector(where, recursive=recursive)

        def look(system: pyarrow.fs.FileSystem) -> list[Any]:
            # Not by the selector's `allow_not_found`, which takes an unknown bucket for an empty one.
            with suppress(FileNotFoundError):
                return system.get_file_info(selector)
            return []

        return store.ask(f"input {url}", look)

    if path and not path.endswith("/") and (stored := store.find(path)) is not None:
        return [stored], []
    is_file = pyarrow.fs.FileType.File
    if not globs.has_magic(path):
        found, matched = infos(path, True), re.compile(".*", re.DOTALL)
    else:
        found = infos(globs.fixed_folder(path), globs.is_deep(path))
        matched = globs.compiled(path)
    found = [info for info in found if matched.fullmatch(info.path[len(bucket.name) + 1 :])]
    files = sorted(
        (store.pinned(info) for info in found if info.type == is_file), key=lambda stored: stored.key
    )
    folders = []
    if globs.has_magic(path) and not globs.is_deep(path):
        folders = sorted(
            f"{bucket.url}{info.path[len(bucket.name) + 1 :]}" for info in found if info.type != is_file
        )
    return files, folders


def _identity(info: Any) -> str:
    """Seconds: a listing and a request of one object give other fractions of them."""
    return f"changed {(info.mtime_ns or 0) // 10**9}"
