"""The files that an input names, and their formats by their suffixes.

An input is a path, a glob, a directory that another program wrote: one of Hugging Face `save_to_disk`, or one of
part files, as Spark and Dask write (`c.jsonl/part-00000.json`); or a URL, with a folder or a glob in its place
(data_utils/storage). Nothing that an input names is silently skipped: files that cannot be read are refused before any
work, all in one message, and files without data (`_SUCCESS`) are logged.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from data_utils.common.errors import DataError, UserError, printable
from data_utils.common.setting_files import shorten
from data_utils.common.urls import is_url, without_secrets
from data_utils.corpus.column_files import is_saved_dataset, saved_dataset_files
from data_utils.corpus.stored_files import COMPRESSIONS, InputFile, compression_suffix, why_not_regular
from data_utils.storage.listing import Listing, list_url
from data_utils.storage.objects import StoredObject

log = logging.getLogger(__name__)

TABLES = (".parquet", ".arrow")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
_TEXT = ".txt"
_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((*DELIMITERS, *TABLES), "rows"),
    _TEXT: "text",
}
_SUPPORTED = (
    ".jsonl, .ndjson, .json (one object per line), .csv, .tsv and .txt, each also with "
    f"{', '.join(COMPRESSIONS)}; .parquet and .arrow"
)
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
_BOOKKEEPING = ("_", ".")  # prefixes of files without data in directories that Spark, Hive or Arrow wrote
_MOST_PROBLEMS = 30  # in a message
_LISTED_AT_ONCE = 16  # URLs; each costs a request or more


def file_ending(path: InputFile) -> str:
    """The suffix of a file in lower case, without that of its compression; "" = none."""
    name = path.name[: len(path.name) - len(compression_suffix(path))]
    return Path(name).suffix.lower()


def file_format(path: InputFile, text_split: str) -> str:
    """The record format of a file: "jsonl", "rows" of a table, or `text_split` for .txt. Raises: DataError."""
    ending = file_ending(path)
    record_format = _FORMATS.get(ending)
    if record_format is None or (ending in TABLES and compression_suffix(path)):
        raise DataError(f"input {path} {_unknown(path, ending)}.")
    return text_split if record_format == "text" else record_format


def _unknown(path: InputFile, ending: str) -> str:
    if ending in TABLES:
        return f"is a {ending} file in {compression_suffix(path)}, which does not allow random access; decompress it"
    if any(suffix.lower() in _ARCHIVES for suffix in path.suffixes[-2:]):  # .tar.gz too
        return "is an archive; unpack it and give its files"
    return f"has an unknown suffix; supported are {_SUPPORTED}"


def expand_inputs(patterns: Iterable[str | Path]) -> list[InputFile]:
    """The files that paths, globs (`**` too) and URLs name: in the given order, sorted within a glob, each once.

    A path that exists as written is not a glob, even with glob characters; the same holds for the first folders of a
    glob. Logs a warning for files that are empty, are named twice, or have the name of a file without data.

    Raises: DataError that lists every missing, unreadable or special file, every unknown suffix, and every pattern
        without a match.
    """
    names = [*map(str, patterns)]
    inputs = _Inputs()
    pool = ThreadPoolExecutor(_LISTED_AT_ONCE)
    try:
        listings = {name: pool.submit(list_url, name) for name in names if is_url(name)}
        for name in names:
            if name in listings:
                inputs.add_url(name, listings[name])
            else:
                inputs.add_named(name)
    finally:
        pool.shutdown(cancel_futures=True)
    return inputs.finish()


class _Inputs:
    """Collects the files, the problems, and the files to warn of."""

    def __init__(self) -> None:
        # By device and inode, since two names may be one file; an object by its label.
        self._files: dict[tuple[int, int] | str, InputFile] = {}
        self._problems: dict[str, None] = {}
        self._warned: dict[str, dict[str, None]] = {"empty": {}, "again": {}, "bookkeeping": {}}

    def finish(self) -> list[InputFile]:
        self._raise_problems()
        if not self._files and not self._warned["bookkeeping"]:
            raise DataError("no input is given; give at least one file or pattern.")
        for reason, words in (
            ("empty", "are empty"),
            ("again", "are given twice and read once"),
            ("bookkeeping", "are skipped, because names that begin with _ or . are not data files"),
        ):
            if names := list(self._warned[reason]):
                log.warning(f"{len(names)} inputs {words}: {printable(shorten(', '.join(names), 600))}")
        if not self._files:
            raise DataError("the inputs contain no data file; give at least one.")
        return list(self._files.values())

    def _raise_problems(self) -> None:
        problems = list(self._problems)
        if len(problems) == 1:
            raise DataError(f"input {problems[0]}.")
        if problems:
            listed = "; ".join(f"({i}) {text}" for i, text in enumerate(problems[:_MOST_PROBLEMS], 1))
            more = len(problems) - _MOST_PROBLEMS
            raise DataError(
                f"{len(problems)} inputs cannot be read: {listed}{f'; and {more} more' if more > 0 else ''}."
            )

    def add_named(self, pattern: str) -> None:
        """Add an input as a user wrote it: a path, or else a glob."""
        try:
            os.lstat(pattern)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            self._add_glob(pattern) if glob.has_magic(pattern) else self._refuse(
                f"{pattern} does not exist; {_other_input(pattern)}"
            )
        except OSError as error:
            self._refuse(f"{pattern} is not accessible ({error.strerror}); check its permissions")
        else:
            self._add(Path(pattern))

    def _add_glob(self, pattern: str) -> None:
        escaped, folders = _escape_existing(pattern)
        locked = [folder for folder in folders if not os.access(folder, os.R_OK | os.X_OK)]
        for folder in locked:
            self._refuse(f"the directory {folder} cannot be read; check its permissions")
        found = filter(os.path.lexists, glob.glob(escaped, recursive=True))  # of absent/** glob finds absent/
        matches = sorted(dict.fromkeys(str(Path(match)) for match in found))
        if not matches and not locked:
            hint = ""
            if "[" in pattern:
                hint = "; [...] matches one of the characters in it, and [[] a literal bracket"
            self._refuse(
                f"pattern {pattern} matches no file; check the pattern (and quote it in the shell){hint}"
            )
        # `**` matches a folder and the files in it: the folder itself is then no input.
        with_matches = (
            {str(parent) for match in matches for parent in Path(match).parents} if "**" in pattern else ()
        )
        for match in map(Path, matches):
            if match.name.startswith("_") and not file_ending(match) and match.is_file():
                self._warned["bookkeeping"][str(match)] = None
            elif str(match) not in with_matches:
                self._add(match, is_match=True)

    def _add(self, path: Path, is_match: bool = False) -> None:
        """A file, or the files of a directory. Args: is_match: a glob found it."""
        try:
            state = os.stat(path)
        except OSError as error:
            where = f"is a link to {os.readlink(path)}, which" if path.is_symlink() else "is a path that"
            remedy = "download its target or remove the link"
            self._refuse(f"{path} {where} is not accessible ({error.strerror}); {remedy}")
            return
        if stat.S_ISDIR(state.st_mode):
            self._add_directory(path, is_match)
        elif problem := why_not_regular(state.st_mode):
            self._refuse(f"{path} {problem}; write its content to a file")
        elif not os.access(path, os.R_OK):
            self._refuse(f"{path} cannot be read (Permission denied); check its permissions")
        else:
            self._add_file(path, state)

    def _add_file(self, path: Path, state: os.stat_result) -> None:
        if not self._has_known_format(path, state.st_size):
            return
        first = self._files.setdefault((state.st_dev, state.st_ino), path)
        if first is not path:
            self._warned["again"][str(path) if path == first else f"{path} (is {first})"] = None

    def _has_known_format(self, path: InputFile, size: int) -> bool:
        """Whether a file can be read by its name and size; says or refuses what is to be said of them."""
        try:
            file_format(path, "")
        except DataError as error:
            self._refuse_for(error)
            return False
        if not size:
            table = {".parquet": "parquet", ".arrow": "Arrow"}.get(file_ending(path))
            if table or compression_suffix(path):
                problem = f"not a readable {table} file" if table else "the compressed data is truncated"
                self._refuse(f"{path}: {problem} (it is empty); download it again")
                return False
            self._warned["empty"][str(path)] = None
        return True

    def add_url(self, url: str, listed: Future[Listing]) -> None:
        """The objects of a URL."""
        try:
            listing = listed.result()
        except UserError as error:
            self._refuse_for(error)
            return
        for folder in listing.folders:
            self._refuse(
                f"{folder} is a folder, which the glob does not enter; end the glob with ** or give {folder}/"
            )
        # By its last part: a label of the hub has the commit too.
        last = without_secrets(url).rpartition("/")[2]
        is_named = len(listing.objects) == 1 and listing.objects[0].name == last
        for stored in listing.objects:
            if stored.name in ("state.json", "dataset_dict.json") and not is_named:
                self._refuse(
                    f"{stored.label.rpartition('/')[0]} is a directory that Hugging Face `save_to_disk` wrote; give "
                    "its Arrow files: data-*.arrow"
                )
            elif not is_named and stored.name.startswith(_BOOKKEEPING):
                self._warned["bookkeeping"][stored.label] = None
            else:
                self._add_object(stored)

    def _add_object(self, stored: StoredObject) -> None:
        if not self._has_known_format(stored, stored.size):
            return
        first = self._files.setdefault(stored.label, stored)
        if first is stored:
            return
        assert isinstance(first, StoredObject)
        if (first.size, first.identity) == (stored.size, stored.identity):
            self._warned["again"][stored.label] = None
        else:
            self._refuse(
                f"{stored.label} is the name of two files, which differ by what follows the ? of their URLs; that is "
                "written nowhere, so build a dataset of each and list both in data.train, or download them"
            )

    def _add_directory(self, path: Path, is_match: bool) -> None:
        try:
            if is_saved_dataset(path):
                for file in saved_dataset_files(path):
                    self._add(file)
            elif file_ending(path) in _FORMATS:
                if not self._add_parts(path, set()):
                    self._refuse(f"{path} is a directory without part files; download it again")
            elif not is_match or any(not name.startswith(".") for name in os.listdir(path)):
                self._refuse(
                    f"{path} is a directory, but not one that Hugging Face `save_to_disk` wrote (no state.json); "
                    f"give files, a glob such as {path}/*.jsonl, or rename a directory of part files to NAME.jsonl/"
                )
        except DataError as error:
            self._refuse_for(error)
        except OSError as error:
            self._refuse(f"the directory {path} cannot be read ({error.strerror}); check its permissions")

    def _add_parts(self, directory: Path, entered: set[tuple[int, int]]) -> int:
        """Add the part files of a directory and of its folders (`lang=en/`). Returns: their number."""
        state = directory.stat()
        if (state.st_dev, state.st_ino) in entered:  # a link to a folder above
            return 0
        entered.add((state.st_dev, state.st_ino))
        count = 0
        for path in sorted(directory.iterdir()):
            if path.name.startswith(_BOOKKEEPING):
                self._warned["bookkeeping"][str(path)] = None
            elif path.is_dir():
                count += self._add_parts(path, entered)
            else:
                self._add(path)
                count += 1
        return count

    def _refuse(self, problem: str) -> None:
        self._problems[problem] = None

    def _refuse_for(self, error: UserError) -> None:
        self._refuse(str(error).removeprefix("input ").removesuffix("."))


def _escape_existing(pattern: str) -> tuple[str, list[str]]:
    """The glob with its first folders escaped as far as they exist as written, and the folders that it searches."""
    names = pattern.split("/")
    existing = 0
    while existing < len(names) - 1 and os.path.isdir("/".join(names[: existing + 1]) or "/"):
        existing += 1
    start = "/".join(names[:existing]) + "/" * (existing > 0)
    folders = [start or "."]
    escaped = glob.escape(start)
    for name in names[existing:-1]:
        escaped += f"{name}/"
        folders += filter(os.path.isdir, glob.glob(escaped.rstrip("/"), recursive=True))
    return escaped + names[-1], list(dict.fromkeys(str(Path(folder)) for folder in folders))


def _other_input(pattern: str) -> str:
    """The remedy for an input that does not exist."""
    if re.search(r"\{[^}]*,[^}]*\}", pattern):
        return "only the shell expands {a,b}; remove the quotes around it"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", pattern) and not Path(pattern).suffix:  # as names of the hub are
        return (
            f"check the path (relative to {Path.cwd()}); save a dataset of the Hugging Face hub to a directory "
            f"first: datasets.load_dataset('{pattern}', split='train').save_to_disk('DIRECTORY')"
        )
    return "check the path" if Path(pattern).is_absolute() else f"check the path (relative to {Path.cwd()})"
