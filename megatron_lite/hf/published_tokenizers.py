"""The tokenizer files of a published system's directory: taken into a run, and written again with an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.base.errors import ConfigError
from data_utils.text.tokenizers import Tokenizer, read_files
from megatron_lite.hf.weights import read_json

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt",
    "spiece.model", "tokenizer.model", "added_tokens.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# The file that decides the kind of a directory's tokenizer, in the order in which they are looked for.
_KINDS = (("vocab.txt", "bert_wordpiece"), ("spiece.model", "sentencepiece"), ("vocab.json", "gpt2_bpe"),
          ("tokenizer.json", "hf_json"))  # fmt: skip


def copy_tokenizer_files(source: Path, directory: Path) -> None:
    for name in _FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def brought_tokenizer(source: Path, directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer section of the files that came with the weights, and were copied to the directory."""
    for name, kind in _KINDS:
        if (directory / name).exists():
            described = directory / "tokenizer_config.json"
            more: dict[str, Any] = {}
            if kind == "bert_wordpiece" and described.exists():
                more["lowercase"] = bool(read_json(described).get("do_lower_case", True))
            if kind == "gpt2_bpe" and read_json(directory / "config.json").get("model_type") == "openai-gpt":
                kind = "gpt_bpe"
            path = directory if kind.endswith("_bpe") else directory / name
            return {"kind": kind, "path": str(path), **more, **options}
    raise ConfigError(
        f"{source} has no tokenizer of a known kind ({', '.join(name for name, _ in _KINDS)}); set "
        "tokenizer.kind and tokenizer.path."
    )


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
        (directory / "tokenizer_config.json").write_text(
            json.dumps(options, indent=2) + "\n", encoding="utf-8"
        )
