"""Lists the files of a repository that an import needs: configurations, tokenizers, and the weights in one format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from data_utils.objectives import sections_with_models

_ADAPTER = "adapter_config.json"
_MODULES = "modules.json"  # of sentence-transformers, which has a directory for each module
_OF_MODULES = ("config.json", "config_sentence_transformers.json", "sentence_bert_config.json")
_TRAINING_TOKENIZER = "training_tokenizer/"
_SMALL = frozenset((
    "config.json", "generation_config.json", "training.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model",
    "cog-pretrain.model", "other_heads.safetensors", _MODULES, _ADAPTER,
    "adapter_model.safetensors", "adapter_model.bin",
))  # fmt: skip
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that a directory has, whole or sharded


def wanted(names: Collection[str], read: Callable[[str], Any]) -> Iterator[str]:
    """The files to fetch.

    Args: names: of all files of the repository. read: returns the content of one of its JSON files.
    """
    model_files = [name for section in sections_with_models() for name in section.model_files]
    directories = ("", *(name for name in model_files if name.endswith("/")))
    small = _SMALL.union(model_files)
    for name in sorted(names):
        directory, _, file = name.rpartition("/")
        is_small = file in small and f"{directory}/".lstrip("/") in directories
        is_module = _MODULES in names and file in _OF_MODULES
        if is_small or is_module or f"{directory}/" == _TRAINING_TOKENIZER:
            yield name
    weights = [name for directory in directories for name in _weights(directory, names, read)]
    # Without weights, ask for a file that is missing, so that the message names it. An adapter has none either, and
    # the import says more of it than that.
    if weights or _ADAPTER in names:
        yield from weights
    else:
        yield _WEIGHTS[0]


def _weights(directory: str, names: Collection[str], read: Callable[[str], Any]) -> Iterator[str]:
    """The weight files of a directory, with the index of shards. Args: directory: "" or a name that ends in /."""
    for file in _WEIGHTS:
        index = f"{directory}{file}.index.json"
        if index in names:
            yield index
            table = read(index)
            shards = table.get("weight_map") if isinstance(table, dict) else None
            yield from sorted(
                {f"{directory}{shard}" for shard in shards.values()} if isinstance(shards, dict) else ()
            )
            return
        if f"{directory}{file}" in names:
            yield f"{directory}{file}"
            return
