"""Directories of published systems with their tokenizers, as users fetch them, and how a run continues with each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.data.tokenizer_files import (
    BYTE_SYMBOLS,
    bert_vocab,
    byte_bpe_json,
    roberta_vocab,
    write_bert,
    write_gpt2,
)
from support.hf.published import CASES, random_model
from support.hf.published_tokenizers import write_files

TREE: dict[str, Any] = {
    "training": {"steps": 6, "precision": "fp32", "seed": 7},
    "data": {"sequence_length": 60},
}
OBJECTIVE: dict[str, dict[str, Any]] = {
    "bert": {"objectives": {"masked_lm": 1}, "masked_lm": {"next_sentence": True}},
    "unilm": {"objectives": {"unilm": 1}, "unilm": {"next_sentence": False}},
    "roberta": {"objectives": {"masked_lm": 1}},
    "albert": {"objectives": {"albert": 1}},
    "ernie2": {"objectives": {"ernie": 1}},
    "gpt2": {"objectives": {"causal": 1}},
    "glm4": {"objectives": {"blank_infilling": 1}, "tokenizer": {"added_tokens": "glm"}},
    "glm4_0414": {"objectives": {"causal": 1}},
    **{name: {"objectives": {"causal": 1}} for name in ("llama", "mistral", "qwen2", "qwen3")},
    **{name: {"objectives": {"causal": 1}} for name in ("glm4_moe", "qwen3_moe", "olmoe")},
    **{name: {"objectives": {"masked_lm": 1}} for name in ("xlm_roberta", "camembert")},
    "eurobert": {"objectives": {"masked_lm": 1}},
    "modernbert": {"objectives": {"masked_lm": 1}},
    "modernbert_decoder": {"objectives": {"causal": 1}},
    "deberta_v3": {"objectives": {"masked_lm": 1}},
    "t5_1_1": {"objectives": {"t5": 1}},
    "mt5": {"objectives": {"t5": 1}},
    "bart": {"objectives": {"bart": 1}},
    "t5": {"objectives": {"t5": 1}},
    "xlnet": {"objectives": {"xlnet": 1}},
}
TOKENIZER_FILES = (
    "vocab.txt", "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "chat_template.jinja", "spm.model",
)  # fmt: skip
_NAMES = {
    "glm4": ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"],
    **{name: ["<|begin_of_text|>", "<|end_of_text|>"] for name in ("llama", "mistral")},
    **{name: ["<|endoftext|>"] for name in ("qwen2", "qwen3", "glm4_moe", "qwen3_moe", "olmoe")},
    "eurobert": ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"],
    **{key: ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"] for key in ("modernbert", "modernbert_decoder")},
}
# What an export has for other versions of transformers than the one that wrote an original.
FOR_OTHER_VERSIONS = {
    "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor", "global_attn_every_n_layers",
    "global_rope_theta", "local_rope_theta",
}  # fmt: skip
SECOND_NAMES = {"lm_head.decoder.bias": "lm_head.bias", "predictions.decoder.bias": "predictions.bias"}
SPARE_ROWS = 9  # of GLM-4's word embedding, which has more rows than the tokenizer has tokens


def write_tokenizer(case: str, directory: Path) -> int:
    """Files of a tokenizer of the kind that the system's users have. Returns: its size."""
    if case == "gpt2":
        names = [*BYTE_SYMBOLS, *(f"a{i}" for i in range(40)), "<|endoftext|>"]
        write_gpt2(directory, {name: i for i, name in enumerate(names)}, [])
        return len(names)
    if case in ("roberta", "xlm_roberta", "camembert"):
        write_gpt2(directory, roberta_vocab(300), [])
        return 300
    if case.startswith("deberta_v3"):
        return write_files("deberta_v3", directory) + SPARE_ROWS
    if case.startswith(tuple(_NAMES)):
        described = byte_bpe_json(_NAMES[case.removesuffix("_0414")])
        (directory / "tokenizer.json").write_text(json.dumps(described))
        (directory / "chat_template.jinja").write_text(
            "{% for message in messages %}{{ message.content }}{% endfor %}"
        )
        return len(described["model"]["vocab"]) + SPARE_ROWS
    lines = bert_vocab()
    write_bert(directory, lines)
    return len(lines)


def write_directory(case: str, directory: Path) -> torch.nn.Module:
    """A model of the case with its tokenizer, as users fetch them."""
    directory.mkdir(exist_ok=True)
    size = write_tokenizer(case, directory)
    model = random_model(case, vocab_size=size)
    model.save_pretrained(directory)
    return model


def tensors_once(export: Path) -> dict[str, torch.Tensor]:
    """The tensors of an export by their first names; those that have two names have both."""
    found = load_file(export / "model.safetensors")
    for second, first in SECOND_NAMES.items():
        if first in found:
            assert torch.equal(found.pop(second), found[first])
    return found


def assert_same_tensors(directory: Path, original: Path) -> None:
    """Every tensor of an original came back bit-equal."""
    before, after = load_file(original / "model.safetensors"), tensors_once(directory)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


# Kind of the tokenizer files that the released directories of a case have; the others as in `write_tokenizer`.
_RELEASED_FILES = {
    **{
        name: name
        for name in ("albert", "bart", "t5", "mt5", "xlnet", "xlm_roberta", "camembert", "roberta", "gpt2")
    },
    **{"ernie": "ernie", "ernie2": "ernie", "gpt": "gpt", "t5_1_1": "t5", "deberta_v3": "deberta_v3"},
    **{"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen2"},
}
_RELEASED_POSITIONS = {
    **dict.fromkeys(("roberta", "xlm_roberta", "camembert"), 514), "gpt2": 1024, "bart": 1024, "modernbert": 8192,
    "modernbert_decoder": 8192, "llama": 4096, "mistral": 32768, "qwen2": 32768, "qwen3": 40960, "ernie2": 513,
    "glm4": 131072, "glm4_0414": 32768, "eurobert": 8192,
}  # fmt: skip


def write_released(case: str, directory: Path) -> None:
    """A narrow model with the number of positions and the kind of tokenizer of the released one."""
    directory.mkdir(parents=True, exist_ok=True)
    kind = _RELEASED_FILES.get(case)
    size = write_tokenizer(case, directory) if kind is None else write_files(kind, directory)
    fields = {"max_position_embeddings", "n_positions"} & CASES[case][1].keys()
    changes = dict.fromkeys(fields, _RELEASED_POSITIONS.get(case, 512))
    random_model(case, std=0.02, vocab_size=size, **changes).save_pretrained(directory)


def edit(directory: Path, **changes: Any) -> None:
    """Change fields of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
