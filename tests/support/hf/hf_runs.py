"""Run directories of small models, made without training, for tests of the conversion."""

from __future__ import annotations

from pathlib import Path

import torch

from data_utils.common.settings import build, merge
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.imported_run import write_training_checkpoint
from megatron_lite.hf.common.weights import Weights
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.transformer import Transformer

WORDPIECE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *(f"word{i}" for i in range(60))]

END_OF_PIECE = len(WORDPIECE) + 1  # sop and eop follow the file's tokens


def write_vocabulary(directory: Path) -> Path:
    path = directory / "vocab.txt"
    path.write_text("\n".join(WORDPIECE) + "\n")
    return path


def tree(vocabulary: Path, **model) -> dict:
    """Configuration tree of a two-layer model with dropout; logits of order 1 (init_std 0.15)."""
    base = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position": 64,
        "init_std": 0.15,
    }
    return {
        "model": {**base, **model},
        "training": {"steps": 6, "precision": "fp32", "seed": 7},
        "tokenizer": {"kind": "bert_wordpiece", "path": str(vocabulary)},
        "data": {"sequence_length": 60},
    }


def settings_of(vocabulary: Path, parallel: dict) -> dict:
    """The tree of a layout; four pipeline stages need four layers."""
    model = {"num_layers": 4} if parallel["pipeline_parallel_size"] == 4 else {}
    return merge(tree(vocabulary, **model), {"parallel": parallel, "batch": {"micro_batch_size": 1}})


def make_config(settings: dict) -> Config:
    config = build(Config, settings)
    return config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size)


def make_model(config: Config, seed: int = 3) -> Transformer:
    """In eval mode. Biases and LayerNorms are drawn too: zeros and ones would hide a mistake in them."""
    model = Transformer(config.model).eval()
    initialize_parameters(model.named_parameters(), config.model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "layernorm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        if model.embedding.block_position_embeddings is not None:
            model.embedding.block_position_embeddings.weight.mul_(4)  # so that generated spans vary, and end
        model.embedding.word_embeddings.weight[END_OF_PIECE].mul_(1.5)
    return model


def without_padding(model: Transformer) -> dict[str, torch.Tensor]:
    """The weights as a checkpoint holds them."""
    shapes = parameter_shapes(model.config)
    return {name: p.detach()[: shapes[name][0]] for name, p in model.named_parameters()}


def write_run(directory: Path, settings: dict) -> Transformer:
    """A run directory whose newest checkpoint holds the returned model."""
    config = make_config(settings)
    model = make_model(config)
    weights = without_padding(model)
    path = directory / "checkpoints" / "step_00000000"
    write_training_checkpoint(path, Weights(parameter_shapes(config.model), weights.__getitem__), config)
    return model
