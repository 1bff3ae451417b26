"""Files of datasets of the Hugging Face hub: hf://datasets/ORG/NAME[@REVISION]/PATH, at one commit.

The hub's library lists the files at the newest commit of the revision, and finds the token (HF_TOKEN, or that of
`hf auth login`) and the server (HF_ENDPOINT). The bytes come by ranges from the addresses that the library gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from data_utils.common import hub
from data_utils.common.errors import ConfigError
from data_utils.common.urls import without_secrets
from data_utils.storage import globs, objects, web
from data_utils.storage.objects import RetryPolicy, StoredObject, TemporaryError, with_retries

_URL = re.compile(
    r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class HubStore:
    """A dataset at a commit, which never changes. An object's key is its path."""

    repository: str
    commit: str
    retry_policy: RetryPolicy

    def stream(self, stored: StoredObject, start: int, stop: int) -> Iterator[bytes]:
        url, headers = hub.dataset_address(self.repository, self.commit, stored.key)
        with web.request(stored.label, url, start, stop, headers=headers) as response:
            yield from web.content(stored, response, start)


def list_hub(url: str, is_name: bool = False) -> tuple[list[StoredObject], list[str]]:
    """As `buckets.list_bucket`, of a dataset of the hub.

    Args: is_name: the path is the name of one file, and no folder or glob.
    Raises: ConfigError, DataError.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(
            f"{without_secrets(url)} is no dataset of the hub; write hf://datasets/ORG/NAME[@REVISION]/PATH, such as "
            "hf://datasets/ORG/NAME/**.parquet"
        )
    repository, path = match["repository"], match["path"] or ""
    revision = unquote(match["revision"]) if match["revision"] else None
    folder = globs.fixed_folder(path) if globs.has_magic(path) else path.rpartition("/")[0]
    label = f"input {without_secrets(url)}"

    def listing() -> tuple[str, list[tuple[str, int, str]]]:
        try:
            return hub.dataset_files(hub.HubName(repository, revision), folder, label)
        except hub.BusyError:
            raise TemporaryError("the hub does not list its files now") from None

    commit, listed = with_retries(label, objects.RETRY_POLICY, listing)
    store = HubStore(repository, commit, objects.RETRY_POLICY)
    names = {name for name, _, _ in listed}
    if is_name or path in names:
        is_wanted = re.compile(re.escape(path)).fullmatch
    elif globs.has_magic(path):
        is_wanted = globs.compiled(path).fullmatch
    else:  # a folder
        above = path.rstrip("/") + "/" if path else ""
        is_wanted = re.compile(re.escape(above) + ".*", re.DOTALL).fullmatch
    return [
        StoredObject(f"hf://datasets/{repository}@{commit}/{name}", size, identity, name, store)
        for name, size, identity in sorted(listed)
        if is_wanted(name)
    ], []
