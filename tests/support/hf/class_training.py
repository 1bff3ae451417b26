"""Small random models of published systems in directories, and batches on which they learn, for tests of training."""

from __future__ import annotations

import json

import numpy as np
from support.data import recipes
from support.data.tokenizer_files import BYTE_SYMBOLS, byte_bpe_json, write_bert, write_gpt2
from support.hf.published import random_model
from support.hf.published_tokenizers import write_files

from data_utils.objectives import make_one
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.inference.open_run import open_run

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
    **{name: {"objectives": {"causal": 1}} for name in ("glm4_moe", "qwen3_moe", "olmoe")},
    "llama": {"objectives": {"causal": 1}},
    "qwen3": {"objectives": {"causal": 1}},
    "eurobert": {"objectives": {"masked_lm": 1}},
    "modernbert": {"objectives": {"masked_lm": 1}},
    "deberta_v3": {"objectives": {"masked_lm": 1}},
    "modernbert_decoder": {"objectives": {"causal": 1}},
    "albert": {"objectives": {"masked_lm": 1}},
    **{name: {"objectives": {"masked_lm": 1}} for name in ("xlm_roberta", "camembert", "neobert")},
    **{name: {"objectives": {"causal": 1}} for name in ("mistral", "qwen2")},
    **{name: {"objectives": {"t5": 1}, "t5": {"sentinel_first": 399}} for name in ("t5_1_1", "mt5")},
    "xlnet": {"objectives": {"xlnet": 1}},
}
OF_BYTES = {  # their tokenizers, of bytes: transformers reads no other files for these types -> special tokens
    **{name: ["<|endoftext|>"] for name in ("glm4", "glm4_moe", "qwen2", "qwen3_moe", "olmoe")},
    "mistral": ["<|begin_of_text|>", "<|end_of_text|>"],
    **{
        key: ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
        for key in ("modernbert", "modernbert_decoder", "deberta_v3")
    },
}


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


def model_of(case, size, **options):
    """Args: options: of the class's configuration."""
    # Their embedding of padding has no gradient; GLM-4's is its end of text. Let it be a row without a token.
    changes = {**dict.fromkeys(OF_BYTES, size - 1), "xlm_roberta": 0, "camembert": 0}
    changes = options | ({"pad_token_id": changes[case]} if case in changes else {})
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
