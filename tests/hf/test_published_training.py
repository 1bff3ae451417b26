"""Continued training of an imported model is that of its class of transformers under plain torch AdamW."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import recipes
from support.class_losses import trained_losses
from support.distributed import run_ranks
from support.published import random_model
from support.published_tokenizers import write_files
from support.tokenizer_files import BYTE_SYMBOLS, byte_bpe_json, write_bert, write_gpt2

from data_utils.common.batch_fields import OBJECTIVE, WEIGHTS
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build
from data_utils.objectives import LOSSES, OBJECTIVES, make_one
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.checkpoint.manifest import checkpoint_name
from megatron_lite.checkpoint.read import load_checkpoint
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import open_run
from megatron_lite.model.batch import Batch

STEPS, ROWS, LR = 50, 4, 2e-3
TREE = {
    "training": {"steps": STEPS, "precision": "fp32", "seed": 7},
    "data": {"sequence_length": 40},
    "batch": {"micro_batch_size": ROWS, "global_batch_size": ROWS},
    "optimizer": {"weight_decay": 0.05, "clip_grad_norm": 1.0, "eps": 1e-6, "beta2": 0.98},
    "model": {"embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0},
}
CASES = {
    "bert": {"objectives": {"masked_lm": 1}, "masked_lm": {"next_sentence": True}},
    "gpt2": {"objectives": {"causal": 1}},
    "t5": {"objectives": {"t5": 1}, "t5": {"sentinel_first": 399}},
    "bart": {"objectives": {"bart": 1}},
    "glm4": {"objectives": {"causal": 1}},
    "llama": {"objectives": {"causal": 1}},
    "qwen3": {"objectives": {"causal": 1}},
    "eurobert": {"objectives": {"masked_lm": 1}},
    "modernbert": {"objectives": {"masked_lm": 1}},
    "deberta_v3": {"objectives": {"masked_lm": 1}},
    "modernbert_decoder": {"objectives": {"causal": 1}},
    **{name: {"objectives": {"masked_lm": 1}} for name in ("xlm_roberta", "camembert", "neobert")},
    **{name: {"objectives": {"causal": 1}} for name in ("mistral", "qwen2")},
    **{name: {"objectives": {"t5": 1}, "t5": {"sentinel_first": 399}} for name in ("t5_1_1", "mt5")},
    "xlnet": {"objectives": {"xlnet": 1}},
}
OF_BYTES = {  # their tokenizers, of bytes: transformers reads no other files for these types -> special tokens
    **{name: ["<|endoftext|>"] for name in ("glm4", "qwen2")},
    "mistral": ["<|begin_of_text|>", "<|end_of_text|>"],
    **{
        key: ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
        for key in ("modernbert", "modernbert_decoder", "deberta_v3")
    },
}
# fp32: 50 steps add up the rounding of sums in another order.
TOLERANCE = 1e-4


def write_directory(case, directory):
    directory.mkdir()
    if case == "gpt2":
        names = [*BYTE_SYMBOLS, *(f"a{i}" for i in range(143)), "<|endoftext|>"]
        write_gpt2(directory, {name: i for i, name in enumerate(names)}, [])
    elif case == "deberta_v3":
        write_files(case, directory)
        names = range(430)
    elif case in OF_BYTES:
        described = byte_bpe_json(OF_BYTES[case])
        (directory / "tokenizer.json").write_text(json.dumps(described))
        names = range(430)  # more rows than tokens, as in the released models
    else:
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *(f"word{i}" for i in range(394))]
        write_bert(directory, names)
    model_of(case, len(names)).save_pretrained(directory)


def model_of(case, size):
    # Their embedding of padding has no gradient; GLM-4's is its end of text. Let it be a row without a token.
    changes = {**dict.fromkeys(OF_BYTES, size - 1), "xlm_roberta": 0, "camembert": 0}
    changes = {"pad_token_id": changes[case]} if case in changes else {}
    return random_model(case, std=0.05, vocab_size=size, **changes)


def batches_of(run):
    """The rows of each step: packed documents of tokens that follow a pattern, so that there is something to learn."""
    opened = open_run(run)
    (name,) = opened.config.objectives
    vocabulary = vocabulary_of(opened.tokenizer)
    made = make_one(name, opened.config.objective_sections[name], vocabulary, 5, 40, None)
    rng = np.random.default_rng(0)
    batches = []
    for step in range(STEPS):
        samples = []
        for _ in range(ROWS):
            # The classes with a decoder take one text in a row.
            lengths = rng.integers(8, 14, 1 if opened.config.model.decoder_layers else 2).tolist()
            first = rng.integers(10, 300, len(lengths))
            samples.append(
                [
                    (start + 7 * np.arange(n)).astype(np.int32) % 300 + 10
                    for start, n in zip(first, lengths, strict=True)
                ]
            )
        batches.append(recipes.collate(made, samples, step * ROWS))
    return batches


def ours(context, run, batches):
    config = build(
        Config, load_yaml(run / "config.yaml") | {"parallel": {"tensor_parallel_size": context.tp.size}}
    )
    engine = make_engine(config, context, len(LOSSES))
    load_checkpoint(read_checkpoint(run / "checkpoints" / checkpoint_name(0)), engine, context)
    losses = []
    for step, fields in enumerate(batches):
        factor = 1.0 / np.count_nonzero(fields[:, WEIGHTS])
        result = engine.train_step([engine.prepared(Batch(fields), step, factor)], LR)
        losses.append(float(result.objective_sums[:, 0].sum()) * factor)
    return losses


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *(("bert", 1), ("t5", 1), ("xlnet", 1), ("modernbert", 2)),
        *(
            pytest.param(case, ranks, marks=pytest.mark.slow)
            for case, ranks in (
                *(("bert", 2), ("gpt2", 1), ("bart", 1), ("glm4", 1), ("qwen3", 2), ("neobert", 1)),
                *(("deberta_v3", 2), ("llama", 1), ("mistral", 1), ("qwen2", 1), ("eurobert", 1)),
                *(("xlm_roberta", 1), ("camembert", 1), ("t5_1_1", 1), ("mt5", 1), ("modernbert", 1)),
                *(("modernbert_decoder", 1), ("deberta_v3", 1)),
            )
        ),
    ],
)
def test_losses_match_the_class(case, ranks, tmp_path):
    write_directory(case, tmp_path / "original")
    import_directory(tmp_path / "original", tmp_path / "run", TREE | CASES[case], verify=False)
    batches = batches_of(tmp_path / "run")
    layout = ParallelConfig(tensor_parallel_size=ranks)
    actual = run_ranks(ours, ranks, tmp_path / "run", batches, parallel=layout)[0]
    described = json.loads((tmp_path / "original/config.json").read_text())
    expected = trained_losses(model_of(case, described["vocab_size"]), batches, LR, **TREE["optimizer"])
    assert np.mean(expected[-10:]) < np.mean(expected[:10]) - 0.1  # it learns
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE)
    if case == "bert":
        assert any((fields[:, OBJECTIVE] == 9).any() for fields in batches) and "masked_lm" in OBJECTIVES
