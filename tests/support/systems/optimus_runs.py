"""Runs of OPTIMUS that nothing trained: a BERT and a GPT-2 with tokenizers of their own, and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from support.data.tokenizer_files import BYTE_SYMBOLS, bert_vocab, write_gpt2
from support.systems.latent import SIZES

from data_utils.common.settings import build, merge, to_tree
from data_utils.objectives import LOSS_NAMES
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.checkpoint.manifest import checkpoint_name
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.imported_run import write_training_checkpoint
from megatron_lite.hf.common.weights import Weights
from megatron_lite.transformer.build import build_model, model_spec

GPT2_NAMES = [*BYTE_SYMBOLS, *(f"a{i}" for i in range(40)), "<|endoftext|>"]


def write_tokenizers(directory: Path) -> dict[str, Any]:
    """The sections of a BERT's tokenizer, and of a GPT-2's with OPTIMUS's three tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.txt").write_text("\n".join(bert_vocab()) + "\n", encoding="utf-8")
    of_decoder = directory / "gpt2"
    of_decoder.mkdir(exist_ok=True)
    write_gpt2(of_decoder, {name: i for i, name in enumerate(GPT2_NAMES)}, [])
    return {
        "tokenizer": {
            "kind": "bert_wordpiece",
            "path": str(directory / "vocab.txt"),
            "added_tokens": "none",
        },
        "decoder_tokenizer": {"kind": "gpt2_bpe", "path": str(of_decoder), "added_tokens": "optimus"},
    }


def optimus_tree(directory: Path, **changes: Any) -> dict[str, Any]:
    tree = {
        "model": {**SIZES, "system": "bert", "sentence_classes": 2},
        "decoder": {**SIZES, "system": "gpt2", "num_layers": 3},
        "data": {"sequence_length": 24},
        "objectives": {"optimus": 1},
        "optimus": {"latent_size": 8},
        "training": {"steps": 20, "precision": "fp32", "seed": 7},
        "run": {"directory": str(directory / "run")},
        **write_tokenizers(directory / "tokenizers"),
    }
    return merge(tree, changes)


def write_run(directory: Path, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run directory below `directory`, and its weights. Args: changes: sections, merged over the tree's."""
    config = build(Config, optimus_tree(directory, **changes))
    return save_run(config)


def save_run(config: Config) -> tuple[Path, dict[str, torch.Tensor]]:
    """The run of a configuration with a checkpoint of random weights at step 0."""
    assert config.tokenizer is not None
    of_decoder = config.decoder_tokenizer
    size = None if of_decoder is None else load_tokenizer(of_decoder).vocab_size
    config = config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size, size)
    model, generator = build_model(config, len(LOSS_NAMES)), torch.Generator().manual_seed(3)
    shapes, weights = model_spec(config).shapes(config), {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        weights[name] = (parameter.detach() + noise)[: shapes[name][0]].contiguous()
    run = Path(config.run.directory)
    path = run / "checkpoints" / checkpoint_name(0)
    write_training_checkpoint(path, Weights(shapes, weights.__getitem__), config)
    (run / "config.yaml").write_text(yaml.safe_dump(to_tree(config), sort_keys=False))
    return run, weights
