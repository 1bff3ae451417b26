"""The manifest of a dataset, PREFIX.json, without which the other files do not open.

It describes the files, and has a SHA-256 of its own content. A build writes it last, so the files of a stopped build
have none. `scripts/dataset.py adopt` makes a manifest for files of another program, such as Megatron-LM.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.checksums import check_entry
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shorten, shown
from data_utils.common.untrusted import conform, parse_json, read_bounded
from data_utils.common.urls import is_url, without_secrets
from data_utils.dataset.sources import Source, SourceGroup
from data_utils.storage.listing import stored_content

SUFFIXES = (".bin", ".idx", ".json")
ENTITIES, TEXT_HASHES, SCORES = ".ent", ".hash", ".score"
# Files that only some datasets have: what they have an element of, and its dtype.
FURTHER = {ENTITIES: ("token", "<i4"), TEXT_HASHES: ("document", "<u8"), SCORES: ("record", "<f4")}
# PREFIX.ent has entities if `entities.ids` is a checksum; if it begins with one of these, it has these instead.
CAPITALS, LABELS, SPANS = "capitals", "labels", "spans"
POSSIBLE_SUFFIXES = (".bin", ".idx", *FURTHER, ".json")  # the manifest last

_FORMAT = "megatron_lite indexed dataset"
_VERSION = 3
_HEADER = ("format", "format_version", "checksum")
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _File(TypedDict):
    bytes: _Count
    block_bytes: Annotated[int, Field(ge=1, le=1 << 40)]
    crc32: Annotated[str, Field(pattern=r"^[0-9a-f]*$")]


class _Tokenizer(TypedDict):
    fingerprint: NotRequired[str | None]
    config: NotRequired[dict[str, Any] | None]


class _Entities(TypedDict):
    ids: str
    count: _Count


class _Prompt(TypedDict):
    text: str
    tokens: _Count


class _TextPairs(TypedDict):
    """A dataset of text pairs: a record is 2 + negatives documents (data_utils/build/text_pairs.py)."""

    negatives: Annotated[int, Field(ge=0, lt=1 << 16)]
    prompts: TypedDict("_Prompts", {"query": _Prompt, "document": _Prompt})  # type: ignore[valid-type]


_FILES = {".bin": _File, ".idx": _File, **dict.fromkeys(FURTHER, NotRequired[_File])}


class _Facts(TypedDict):
    """The fields of a manifest that readers use. The others are for people."""

    files: TypedDict("_Files", _FILES)  # type: ignore[misc,valid-type]
    num_documents: _Count
    num_tokens: _Count
    dtype: str
    vocab_size: NotRequired[_Count | None]
    eos: NotRequired[int | None]
    documents_end_with_eos: NotRequired[bool | None]
    tokenizer: NotRequired[_Tokenizer | None]
    bad_records: NotRequired[dict[str, int]]
    sources: NotRequired[list[Source]]
    source_groups: NotRequired[list[SourceGroup]]
    entities: NotRequired[_Entities]
    text_pairs: NotRequired[_TextPairs]
    num_sequences: NotRequired[_Count]  # of an adopted dataset whose sequences are joined to documents
    largest_id: NotRequired[_Count]  # of an adopted dataset


_MAX_BYTES = 256 << 20


def dataset_path(prefix: str | Path, suffix: str) -> Path:
    """PREFIX.bin and the like; `with_suffix` would replace what follows a dot in the prefix."""
    return Path(f"{prefix}{suffix}")


def existing_files(prefix: str | Path) -> list[Path]:
    """The files of a dataset that exist under `prefix`."""
    return [path for path in (dataset_path(prefix, suffix) for suffix in POSSIBLE_SUFFIXES) if path.exists()]


def is_left_by_a_stopped_writer(prefix: str | Path) -> bool:
    """Whether a writer was stopped while it replaced a dataset, whose remaining files then do not open.

    The writer completes PREFIX.json.partial, removes the old files, the manifest first, and renames the new files, the
    manifest last.
    """
    return dataset_path(prefix, ".json.partial").exists() and not dataset_path(prefix, ".json").exists()


def damaged(prefix: str | Path, suffix: str, problem: str) -> DataError:
    return DataError(f"dataset {prefix}: {prefix}{suffix} {problem}; rebuild the dataset or copy it again.")


def manifest_bytes(facts: Mapping[str, Any]) -> bytes:
    """The content of PREFIX.json for the facts about a dataset. Equal facts give equal bytes."""
    facts = {key: value for key, value in facts.items() if key not in _HEADER}
    tree = {"format": _FORMAT, "format_version": _VERSION, "checksum": "", **facts}
    # Blocks of files have CRC-32, which is fast; the manifest, which is small and holds these, has SHA-256.
    tree["checksum"] = checksum(tree)
    # Indented, a million names of sources would take twice the size.
    return json.dumps(tree, indent=None if "source_groups" in tree else 2).encode() + b"\n"


def checksum(tree: Mapping[str, Any]) -> str:
    """64 hexadecimal digits that change with any fact of a manifest, but not with its formatting."""
    facts = {key: value for key, value in tree.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_manifest(prefix: str | Path) -> dict[str, Any]:
    """The manifest. Raises DataError unless it exists, has this version, and is unchanged."""
    tree = _parse(prefix)
    if tree.get("format_version") != _VERSION:
        raise damaged(prefix, ".json", f"has version {shown(tree.get('format_version'))}, not {_VERSION}")
    if tree.get("checksum") != checksum(tree):
        raise damaged(prefix, ".json", "does not match its own checksum")
    require_facts(prefix, tree)
    return tree


def require_facts(prefix: str | Path, tree: Mapping[str, Any]) -> None:
    """Raise DataError unless the manifest has the entries that readers need."""
    try:
        facts = conform(tree, _Facts)
    except ValueError as error:
        raise damaged(prefix, ".json", str(error)) from None
    try:
        for entry in facts["files"].values():
            check_entry(entry)  # type: ignore[arg-type]
    except ValueError:
        raise damaged(prefix, ".json", "does not have the checksums of all blocks of its files") from None
    # Only a wrong writer makes these: the checksum finds damage.
    contradictions = (
        any(len(group["names"]) != len(group["bytes"]) for group in facts.get("source_groups", [])),
        ("entities" in facts) != (ENTITIES in facts["files"]),
        ("text_pairs" in facts) != (TEXT_HASHES in facts["files"]),
        "text_pairs" in facts and facts["num_documents"] % documents_per_record(tree),
        SCORES in facts["files"] and "text_pairs" not in facts,
        facts.get("documents_end_with_eos") and facts.get("eos") is None,
    )
    if any(contradictions):
        raise damaged(prefix, ".json", "has entries that contradict each other")


def documents_per_record(tree: Mapping[str, Any]) -> int:
    """Consecutive documents that make a record: those of a text pair with its negatives; 1 in other datasets."""
    return 2 + tree["text_pairs"]["negatives"] if "text_pairs" in tree else 1


def require_finished(prefix: str | Path) -> None:
    """Raise DataError for files of a stopped or running build."""
    if any(dataset_path(prefix, f"{suffix}.partial").exists() for suffix in SUFFIXES):
        raise DataError(
            f"dataset {prefix} is not complete, because its build was stopped or is still running; wait for it or "
            "repeat the same command."
        )


def tokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    """Type, path and fingerprint of a manifest's tokenizer, for messages."""
    config = tokenizer.get("config")
    config = config if isinstance(config, dict) else {}
    words = (config.get("kind"), config.get("path"), str(tokenizer.get("fingerprint"))[:12])
    return ", ".join(shorten(str(word), 80) for word in words if word)


def _parse(prefix: str | Path) -> dict[str, Any]:
    try:
        tree = parse_json(_content(prefix))
    except FileNotFoundError:
        require_finished(prefix)
        raise DataError(
            f"dataset {prefix} has no manifest ({prefix}.json), which is required; copy the manifest or rebuild the "
            f"dataset. To write one for files of another program: python scripts/dataset.py adopt {prefix}"
        ) from None
    except ValueError as error:
        raise damaged(prefix, ".json", str(error)) from None
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise damaged(prefix, ".json", "is not a dataset manifest")
    return tree


def _content(prefix: str | Path) -> bytes:
    """The bytes of PREFIX.json, which may be in a store. Raises: FileNotFoundError, ValueError, DataError."""
    if not is_url(prefix):
        return read_bounded(dataset_path(prefix, ".json"), _MAX_BYTES)
    require_public(prefix)
    content = stored_content(f"{prefix}.json", _MAX_BYTES)
    if content is None:
        raise DataError(
            f"dataset {prefix}: the store has no {prefix}.json, which is required; check the prefix, or push the "
            f"dataset: python scripts/dataset.py push PREFIX {prefix}"
        )
    return content


def require_public(prefix: object) -> None:
    """Raise ConfigError for the URL of a dataset with a secret in it: prefixes stand in files and messages."""
    if without_secrets(str(prefix)) != str(prefix):
        raise ConfigError(
            f"dataset {without_secrets(str(prefix))} is given with a password or a query, which would be written into "
            "files of the run; give credentials by variables of the environment."
        )


def require_local(prefix: object) -> None:
    """Raise DataError for a dataset in a store where its files are mapped."""
    if is_url(prefix):
        raise DataError(
            f"dataset {prefix} is in a store, but is read here as files; for training set data.local_directory, and "
            "else download its .bin, .idx and .json."
        )
