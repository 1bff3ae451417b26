"""Lists the files of a repository that an import needs: configurations, tokenizers, and the weights in one format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

# Directories of what this project exports: pairs, two stacks, and the tokenizer of the training.
_DIRECTORIES = ("", "generator/", "discriminator/", "encoder/", "decoder/")
_ADAPTER = "adapter_config.json"
_TRAINING_TOKENIZER = "training_tokenizer/"
_SMALL = frozenset((
    "config.json", "generation_config.json", "training.json", "latent.json", "ernie_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model",
    "cog-pretrain.model", "other_heads.safetensors", "latent.safetensors", _ADAPTER,
))  # fmt: skip
_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
)  # the first of them that a directory has, whole or sharded


def wanted(names: Collection[str], read: Callable[[str], Any]) -> Iterator[str]:
    """The files to fetch. Args: names: of all; read: a JSON file of them."""
    for name in sorted(names):
        directory, _, file = name.rpartition("/")
        is_small = file in _SMALL and f"{directory}/".lstrip("/") in _DIRECTORIES
        if is_small or f"{directory}/" == _TRAINING_TOKENIZER:
            yield name
    weights = [name for directory in _DIRECTORIES for name in _weights(directory, names, read)]
    if (
        weights or _ADAPTER in names
    ):  # what an import says of an adapter is more than that weights are missing
        yield from weights
    else:
        yield _WEIGHTS[0]


def _weights(directory: str, names: Collection[str], read: Callable[[str], Any]) -> Iterator[str]:
    for single in _WEIGHTS:
        index = f"{directory}{single}.index.json"
        if index in names:
            yield index
            table = read(index)
            shards = table.get("weight_map") if isinstance(table, dict) else None
            yield from sorted(
                {f"{directory}{shard}" for shard in shards.values()} if isinstance(shards, dict) else ()
            )
            return
        if f"{directory}{single}" in names:
            yield f"{directory}{single}"
            return
