"""Names of the Hugging Face hub where a file or directory is expected: `org/name`, or `org/name@revision`.

What exists here goes first. A name is fetched into the hub's own cache, where a later start finds it without a network;
several processes of a machine fetch one after another, so that the first one does it for all. Nothing that a server or
its library says is printed: it could hold a token.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from data_utils.common.errors import ConfigError, DataError, UserError

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?:(?P<owner>{_PART})/)?(?P<model>{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,99}}))?"
)
# Who has today the models that once had no owner's name.
_OWNERS = {
    "bert": "google-bert", "gpt2": "openai-community", "openai-gpt": "openai-community", "roberta": "FacebookAI",
    "xlm-roberta": "FacebookAI", "xlm": "FacebookAI", "t5": "google-t5", "albert": "albert", "xlnet": "xlnet",
    "camembert": "almanach", "distilbert": "distilbert", "distilroberta": "distilbert", "distilgpt2": "distilbert",
    "transfo-xl": "transfo-xl", "ctrl": "Salesforce",
}  # fmt: skip
_FORMER = re.compile(rf"({'|'.join(sorted(_OWNERS, key=len, reverse=True))})(-[a-z0-9.-]+)?")
# Folders that the documentation names, and ends of files: what is missing of these is no owner's model.
_PROJECT_FOLDERS = ("data", "runs", "configs")
_FILES = (".json", ".jsonl", ".model", ".txt", ".yaml")
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class HubName:
    """A repository. `revision`: a branch, tag or commit; None = the newest commit."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository + ("" if self.revision is None else f"@{self.revision}")

    @property
    def download(self) -> str:
        """The command that fetches it."""
        return f"hf download {self.repository}" + (
            "" if self.revision is None else f" --revision {self.revision}"
        )


@dataclass(frozen=True)
class Snapshot:
    """A repository's files as they are at one commit."""

    directory: Path
    repository: str
    commit: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit}"


def hub_name(text: str) -> HubName | None:
    """The hub's name that a user means who gives `text` for a path; None for a path.

    None as well for what exists, and for something missing below a directory that exists, unless it has a revision.
    """
    match = _NAME.fullmatch(text)
    # Files of the user come first: a path is never sent to a server because of a spelling mistake.
    if match is None or os.path.lexists(text) or ".." in text or "--" in text.partition("@")[0]:
        return None
    owner, model, revision = match["owner"], match["model"], match["revision"]
    if owner is None:
        former = _FORMER.fullmatch(model)
        return None if former is None else HubName(f"{_OWNERS[former[1]]}/{model}", revision)
    is_path = os.path.isdir(owner) or owner in _PROJECT_FOLDERS or model.endswith(_FILES)
    if revision is None and is_path:
        return None
    return HubName(f"{owner}/{model}", revision)


def could_be_hub_name(text: str) -> bool:
    """Whether a path has the form of a name."""
    match = _NAME.fullmatch(text)
    return match is not None and (match["owner"] is not None or _FORMER.fullmatch(match["model"]) is not None)


def require_hub_name(text: str, option: str) -> HubName:
    """The name of a repository to write. Raises: ConfigError."""
    match = _NAME.fullmatch(text)
    if match is None or match["owner"] is None or match["revision"] or ".." in text or "--" in text:
        raise ConfigError(
            f"{option} is {text!r}; it must be OWNER/NAME of letters, digits, '-', '_' and '.', at most 96 each."
        )
    return HubName(text)


def fetch(
    name: HubName,
    key: str,
    again: str,
    wanted: Callable[[Collection[str], Callable[[str], Any]], Iterable[str]],
) -> Snapshot:
    """The wanted files of a repository at the commit of its revision; as fetched last where nobody answers.

    Args:
        key: where the user gave the name, for messages: "--input".
        again: what to give after a download by hand, with DIR for the directory.
        wanted: names of all files, and a function that reads a JSON file of them -> names of those to fetch.
    Raises: DataError with the command that fetches it elsewhere.
    """
    with _fetching(name, key, again):
        try:
            info = (
                _hub().HfApi().model_info(name.repository, revision=name.revision, timeout=_TIMEOUT_SECONDS)
            )
            listed = [file.rfilename for file in info.siblings or ()]
            is_local = False
            directory = _snapshot(name, (), is_local)  # notes the commit, for a start without a network
        except Exception as error:
            if not _is_unreachable(error):
                raise
            try:
                directory = _snapshot(name, (), is_local := True)
            except Exception:
                raise error from None
            listed = [
                path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
            ]
        # All files from one commit: the branch may move between two requests.
        fixed = HubName(name.repository, directory.name)

        def read(file: str) -> Any:
            return orjson.loads((_snapshot(fixed, [file], is_local) / file).read_bytes())

        needed = [*wanted(listed, read)]
        _snapshot(fixed, needed, is_local)
        for file in needed:
            if not (directory / file).is_file():
                raise _MissingFileError(f"{file} is not among its files" + " in the cache" * is_local)
        return Snapshot(directory, name.repository, directory.name)


def fetch_small(name: HubName, key: str, again: str, patterns: Collection[str]) -> Snapshot:
    """Small files of a repository, as fetched before if they were: so ranks and later starts need no network.

    Args: as for `fetch`; patterns: of names, with a file each.
    Raises: DataError with the command that fetches it elsewhere.
    """

    def files(is_local: bool) -> Path:
        directory = _snapshot(name, patterns, is_local)
        for pattern in patterns:
            if not any(directory.glob(pattern)):
                raise _MissingFileError(f"it has no file {pattern}")
        return directory

    with _fetching(name, key, again):
        try:
            # The cache first, so that all ranks and later starts agree.
            directory = files(is_local=True)
        except Exception:  # whatever the cache lacks, the hub may have
            directory = files(is_local=False)
        return Snapshot(directory, name.repository, directory.name)


class BusyError(DataError):
    """The hub has too much to do, or its answer was cut."""


class _MissingFileError(Exception):
    """A repository lacks a file."""


def _hub() -> Any:
    """The hub's library. Imported where a name is given: others need not wait for it."""
    import huggingface_hub
    import huggingface_hub.constants  # the package gives no submodule that nobody has imported
    import huggingface_hub.errors
    import huggingface_hub.hf_api
    import huggingface_hub.utils

    return huggingface_hub


def _snapshot(name: HubName, patterns: Collection[str], is_local: bool) -> Path:
    """Fetch the files of these names. Returns: the directory of the commit, in the cache."""
    directory = _hub().snapshot_download(
        name.repository, revision=name.revision, allow_patterns=[*patterns], local_files_only=is_local
    )
    return Path(directory)


def dataset_files(name: HubName, folder: str, what: str) -> tuple[str, list[tuple[str, int, str]]]:
    """The files of a repository of data in a folder and below it, at the commit of its revision.

    Args: what: where the user gave it, for messages.
    Returns: the commit; of each file its path, bytes, and a checksum of the hub.
    Raises: DataError; BusyError where another attempt may succeed.
    """
    remedy = f"check the name, or fetch it by `{name.download} --repo-type dataset --local-dir DIR` elsewhere"
    with _hub_errors(name, what, remedy):
        api = _hub().HfApi()
        info = api.dataset_info(name.repository, revision=name.revision, timeout=_TIMEOUT_SECONDS)
        tree = api.list_repo_tree(
            name.repository, folder or None, recursive=True, revision=info.sha, repo_type="dataset"
        )
        files = [entry for entry in tree if isinstance(entry, _hub().hf_api.RepoFile)]
        return info.sha, [
            (file.path, file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in files
        ]


def dataset_address(repository: str, commit: str, path: str) -> tuple[str, dict[str, str]]:
    """Where a file of a repository of data is, and the headers to ask for it, which hold the token."""
    headers = _hub().utils.build_hf_headers()
    url = _hub().hf_hub_url(repository, path, repo_type="dataset", revision=commit)
    return url, {name: value for name, value in headers.items() if name.lower() == "authorization"}


def push(directory: Path, name: HubName, *, private: bool) -> str:
    """Upload a directory to a repository, which is made if there is none. Returns: where it is, owner/name@commit.

    Raises: DataError with the command that uploads it elsewhere.
    """
    remedy = f"{directory} is complete: upload it by `hf upload {name} {shlex.quote(str(directory))}`"
    with _hub_errors(name, f"--push-to-hub {name}", remedy):
        api = _hub().HfApi()
        api.create_repo(name.repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=name.repository, folder_path=directory, commit_message="Export of megatron-lite-glm"
        )
        return f"{name}@{done.oid}"


def require_token(option: str) -> None:
    """Raise ConfigError unless a token is there to write with. Asks no server."""
    if _hub().constants.is_offline_mode():
        raise ConfigError(f"{option} is given with HF_HUB_OFFLINE; leave one of them out.")
    if _hub().get_token() is None:
        raise ConfigError(
            f"{option} needs a token that may write; log in with `hf auth login`, or set HF_TOKEN."
        )


@contextlib.contextmanager
def _fetching(name: HubName, key: str, again: str) -> Iterator[None]:
    """One process at a time, with errors that name the command to fetch by hand. Args: as for `fetch`."""
    absent = f"there is no {name.repository} here, and " * (not os.path.lexists(name.repository))
    by_hand = f"fetch it by `{name.download} --local-dir DIR`, where that can be done, and then give {again}"
    with _hub_errors(name, f"{key} {name}", by_hand, absent), _one_after_another(name):
        yield


@contextlib.contextmanager
def _one_after_another(name: HubName) -> Iterator[None]:
    """Hold the lock of a repository, for all processes with this cache."""
    folder = Path(_hub().constants.HF_HUB_CACHE) / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"megatron-lite--{name.repository.replace('/', '--')}", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _hub_errors(name: HubName, what: str, remedy: str, absent: str = "") -> Iterator[None]:
    """Turn what the hub's library raises into a DataError of one line, without the words of library and server.

    Args: absent: what a user should know who meant a path.
    """
    utils = _hub().utils
    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    # Lines of the client have addresses with signatures, which are passwords for a while.
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)
    try:
        yield
    except (UserError, TypeError, AttributeError, NameError):
        raise
    except Exception as error:
        kind = BusyError if _is_busy(error) else DataError
        raise kind(f"{what}: {_reason(error, name, absent)}; {remedy}.") from None


def _is_unreachable(error: Exception) -> bool:
    """Whether nobody has answered, so that what was fetched before may be used."""
    errors = _hub().errors
    if isinstance(error, errors.HfHubHTTPError):
        # A refusal (a wrong name, a missing right) is an answer: an old copy in its place would hide it.
        return error.response.status_code >= 500
    return isinstance(error, (errors.HTTPError, errors.OfflineModeIsEnabled))


def _is_busy(error: Exception) -> bool:
    errors = _hub().errors
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in (408, 429)
    # Not where there is no connection at all, as on nodes without a network.
    return isinstance(error, errors.HTTPError) and "Connect" not in type(error).__name__


def _reason(error: Exception, name: HubName, absent: str) -> str:
    errors = _hub().errors
    if isinstance(error, _MissingFileError):
        return str(error)
    if isinstance(error, errors.HFValidationError):
        return f"{absent}{name} is no name that the hub takes"
    if isinstance(error, errors.GatedRepoError):
        return f"{absent}the hub gives it to those who have accepted its terms on its page and log in (`hf auth login`)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub's {name.repository} has no revision {name.revision or 'main'}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{absent}the hub has none of this name, or shows it only after a login (`hf auth login`)"
    if isinstance(error, errors.HfHubHTTPError):
        refused = " (the token may not do this; log in with `hf auth login`)"
        status = error.response.status_code
        return f"{absent}the hub answered with status {status}{refused * (status in (401, 403))}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return f"the cache cannot be written ({error.strerror})"
    if _hub().constants.is_offline_mode():
        return f"{absent}HF_HUB_OFFLINE is set, and it is not in the cache"
    return f"{absent}the hub cannot be reached"
