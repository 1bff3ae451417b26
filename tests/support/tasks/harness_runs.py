"""Runs of every objective with initial weights and a tokenizer of whole words, for tests of the harness."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.data.tokenizer_files import bert_vocab
from support.transformer.decoder_rows import MODELS

from data_utils.common.settings import build
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.inference.open_run import Run
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.transformer import Transformer

OTHERS = {"xlnet": {"relative": "xlnet", "segments": 3}, "masked_lm": {}, "albert": {"segments": 2}}


def harness_run(directory: Path, objective: str, model: dict[str, Any] | None = None, **section: Any) -> Run:
    """A run of two layers and 32 positions. Args: model: options over those of the objective."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(bert_vocab()) + "\n", encoding="utf-8")
    options = {**MODELS, **OTHERS}[objective]
    if objective == "unilm":  # whose sentence pairs need a head
        options = {**options, "sentence_classes": 2}
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position": 31,
        "init_std": 0.3,
    }
    tree = {
        "model": {"positions": "learned", **sizes, **options, **(model or {})},
        "tokenizer": {"kind": "bert_wordpiece", "path": str(vocabulary)},
        "data": {"sequence_length": 24},
        "training": {"steps": 10},
        "schedule": {"warmup_steps": 1},
        "objectives": {objective: 1.0},
        objective: section,
    }
    config = build(Config, tree)
    tokenizer = load_tokenizer(config.tokenizer)
    config = config.with_vocab_size(tokenizer.vocab_size)
    made = Transformer(config.model).eval()
    initialize_parameters(made.named_parameters(), config.model, 5)
    checkpoint = SimpleNamespace(path="runs/some", state={"consumed_samples": 1}, step=10)
    return Run(config, tokenizer, checkpoint, model=made)
