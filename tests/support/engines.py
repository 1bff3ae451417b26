"""What several tests use around engine."""

from __future__ import annotations

from data_utils.base.settings import merge

SAMPLES = 8


def tree(**sections):
    base = {
        "model": {
            "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 500, "max_position": 512,
            "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
        },
        "training": {"steps": 10, "precision": "fp32"},
        "batch": {"micro_batch_size": 2, "global_batch_size": SAMPLES},
        "optimizer": {"clip_grad_norm": 0.5},
    }  # fmt: skip
    return merge(base, sections)
