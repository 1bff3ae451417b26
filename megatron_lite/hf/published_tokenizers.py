"""The tokenizer files of a published system's directory: taken into a run, and written again with an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import TokenizersBackend

from data_utils.base.errors import CheckpointError, ConfigError, DataError, UserError
from data_utils.base.setting_files import shown
from data_utils.base.settings import build
from data_utils.text.tokenizers import Tokenizer, TokenizerConfig, load_tokenizer, read_files
from megatron_lite.hf.tokenizer_proof import compare, load_theirs, tokenizer_proof
from megatron_lite.hf.weights import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "tokenizer.json")
_FILES = (
    "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt",
    "spiece.model", "tokenizer.model", "added_tokens.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
CONVERTED = (
    "tokenizer"  # directory in the kept files: a tokenizer.json of what transformers makes of the others
)


def copy_tokenizer_files(source: Path, directory: Path) -> None:
    for name in _FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _VOCABULARIES)


def brought_tokenizer(source: Path, directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer section that gives the ids of `source`'s AutoTokenizer, from its files copied to `directory`.

    Files are used as they came if they do, so that corpora of the published files fit. Else what transformers makes of
    them (a class's lower case, options of tokenizer_config.json) is written as a tokenizer.json of its own.

    Args: options: of the section, which go over what is found; a kind among them must give the same ids.
    Raises: CheckpointError or ConfigError.
    """
    if not has_tokenizer(source):
        raise ConfigError(
            f"{source} has no tokenizer of a known kind ({', '.join(_VOCABULARIES)}); set tokenizer.kind and "
            "tokenizer.path."
        )
    theirs, kind = load_theirs(source), options.get("kind")
    remedy = "leave tokenizer.kind and its options out."
    if kind is None:
        remedy = f"its class does not read these files: give its own, or set tokenizer_class in {TOKENIZER_CONFIG}."
    refusal: UserError | None = None
    for candidate in _candidates(directory, theirs):
        if kind in (None, candidate["kind"]):
            section = {**candidate, **options}
            try:
                tokenizer = load_tokenizer(build(TokenizerConfig, section, "tokenizer."))
                compare(tokenizer, theirs).require(
                    f"{source} by tokenizer.kind {tokenizer.config.kind}", remedy
                )
                return section
            except (DataError, CheckpointError) as error:
                refusal = refusal or error
    if refusal is None:
        raise ConfigError(f"{source} has no files for tokenizer.kind {shown(kind)}; leave it out.")
    raise refusal


def require_same_ids(key: str, tokenizer: Tokenizer, source: Path) -> None:
    """Raise CheckpointError if a user's own tokenizer gives other ids than the source's. Args: key: of its section."""
    if has_tokenizer(source):
        tokenizer_proof(tokenizer, source).require(
            f"{key}.path {tokenizer.config.path}",
            f"leave {key}.path out, or use another tokenizer with --no-verify.",
        )


def _candidates(directory: Path, theirs: TokenizersBackend) -> Iterator[dict[str, str | bool]]:
    """Sections for the files, those first that the corpora of these systems are usually built with."""
    if (directory / "vocab.txt").exists():
        lowercase = bool(getattr(theirs, "do_lower_case", True))
        yield {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt"), "lowercase": lowercase}
    if (directory / "vocab.json").exists():
        described = read_json(directory / "config.json")
        kind = "gpt_bpe" if described.get("model_type") == "openai-gpt" else "gpt2_bpe"
        yield {"kind": kind, "path": str(directory)}
    if (directory / "tokenizer.json").exists():
        yield {"kind": "hf_json", "path": str(directory / "tokenizer.json")}
    converted = directory / CONVERTED / "tokenizer.json"
    converted.parent.mkdir()
    converted.write_text(theirs.backend_tokenizer.to_str(), encoding="utf-8")
    yield {"kind": "hf_json", "path": str(converted)}
    shutil.rmtree(converted.parent)  # the caller asks for another one: this one is not used
    if (directory / "spiece.model").exists():
        yield {"kind": "sentencepiece", "path": str(directory / "spiece.model")}


def write_tokenizer(directory: Path, tokenizer: Tokenizer, ids: Mapping[str, int], kept: Path) -> None:
    """The files that were imported, or those of the run's tokenizer, with what it adds to them.

    Args: ids: of the special tokens by their names in config.json. kept: files of the import, if there was one.
    """
    if kept.exists():
        copy_tokenizer_files(kept, directory)
        return
    for name, content in read_files(tokenizer.config).items():
        (directory / ("spiece.model" if name == "model" else name)).write_bytes(content)
    options: dict[str, Any] = {}
    if tokenizer.config.kind == "bert_wordpiece":
        options = {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.config.lowercase}
    if tokenizer.added_names and tokenizer.config.added_tokens != "t5":  # T5's class adds its own
        options["added_tokens_decoder"] = {
            str(i): {"content": name, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for i, name in tokenizer.added_names.items()
        }
        options |= {name.removesuffix("_id"): tokenizer.special_names[i] for name, i in ids.items()}
    if options:
        (directory / TOKENIZER_CONFIG).write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
