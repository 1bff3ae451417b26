"""Runs of every published system as training makes them, on small vocabularies, and what their models compute.

A run is random weights in a checkpoint of a configuration, as if it had just begun. Its model reads rows of the run's
objective, with the positions, segments and first tokens of training. UniLM goes to BERT's class, which fills
masks and cannot write; UniLMv2, whose biases of distances no class has, cannot be exported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.data.tokenizer_files import BERT_SPECIALS, bert_vocab, byte_bpe_json, roberta_vocab, write_gpt2

from data_utils.common.batch_fields import DOC, OBJECTIVE, ORD, SEGMENT_IDS, TARGETS, TOKENS, WEIGHTS
from data_utils.common.settings import build
from data_utils.loader.loader import collate
from data_utils.objectives import OBJECTIVES, make_objective
from data_utils.tokenizers.special_tokens import SPECIAL_NAMES
from data_utils.tokenizers.tokenizer import load_tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import BLOCK_POSITIONS
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.imported_run import write_training_checkpoint
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.published.verify_inputs import our_output, texts_to_batch
from megatron_lite.inference.decoders import make_decoder
from megatron_lite.inference.filling import BlankFiller, blank_context
from megatron_lite.inference.open_run import Run, load_run
from megatron_lite.train.start import keep_task_rows
from megatron_lite.transformer.flops import parameter_shapes

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position": 63}
ENCODER_DECODER = {"decoder_layers": 2}
TEXTS = ["the quick brown fox jumps over the lazy dog", "dog", "the fox . the dog jumps over"]
MASKED = "the quick brown {} jumps over"
ANSWER_LENGTH = 6
WRITER = "AutoModelForSeq2SeqLM"
ONE_TEXT = {"two_texts": False}


def wordpiece(directory: Path, pad: int = 0) -> dict[str, Any]:
    """Args: pad: the line of [PAD]."""
    lines = [line for line in bert_vocab() if line != BERT_SPECIALS[0]]
    lines.insert(pad, BERT_SPECIALS[0])
    (directory / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt")}


def byte_bpe(directory: Path) -> dict[str, Any]:
    """As train_tokenizer.py writes it, with its special tokens in another order than any published system has."""
    names = sorted(SPECIAL_NAMES.values())
    (directory / "tokenizer.json").write_text(json.dumps(byte_bpe_json(names)))
    return {"kind": "hf_json", "path": str(directory / "tokenizer.json")}


def published_roberta(directory: Path) -> dict[str, Any]:
    write_gpt2(directory, roberta_vocab(300), [])
    return {"kind": "gpt2_bpe", "path": str(directory)}


def gpt2(directory: Path) -> dict[str, Any]:
    model = byte_bpe_json([])["model"]
    write_gpt2(directory, model["vocab"] | {"<|endoftext|>": len(model["vocab"])}, model["merges"])
    return {"kind": "gpt2_bpe", "path": str(directory)}


def gpt(directory: Path) -> dict[str, Any]:
    letters = "abcdefghijklmnopqrstuvwxyz."
    names = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters)]
    write_gpt2(directory, {name: i for i, name in enumerate(names)}, [])
    return {"kind": "gpt_bpe", "path": str(directory)}


@dataclass(frozen=True)
class Case:
    """A system, the vocabulary that it is trained on, and its objectives.

    Args: auto: the class of transformers that a user loads it with. rows: whether rows of training are what that class
        is given; else only what it writes can be compared.
    """

    system: str
    tokenizer: Callable[[Path], dict[str, Any]]
    objective: str
    auto: str = "AutoModelForMaskedLM"
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the tokenizer
    section: dict[str, Any] = field(default_factory=dict)  # of the objective
    rows: bool = True


def _writer(*arguments: Any, **options: Any) -> Case:
    return Case(*arguments, auto=WRITER, model=ENCODER_DECODER, **options)


CASES = {
    "bert": Case("bert", byte_bpe, "masked_lm", section={"next_sentence": False}),
    "roberta, pad 0": Case("roberta", wordpiece, "masked_lm"),
    "roberta, pad 1": Case("roberta", published_roberta, "masked_lm"),
    "roberta, pad 3": Case("roberta", lambda path: wordpiece(path, pad=3), "masked_lm"),
    "roberta, bytes": Case("roberta", byte_bpe, "masked_lm"),
    "spanbert": Case("spanbert", wordpiece, "spanbert"),
    "albert": Case("albert", byte_bpe, "masked_lm", model={"embedding_size": 20}),
    "ernie": Case("ernie", wordpiece, "ernie", section={"segmenter": "words", "next_sentence": False}),
    "ernie2": Case("ernie2", wordpiece, "masked_lm"),
    "ernie2, three rows": Case(
        "ernie2",
        wordpiece,
        "ernie",
        model={"task_types": 3},
        section={"segmenter": "words", "next_sentence": False},
    ),
    "unilm": Case("unilm", wordpiece, "unilm", rows=False),
    "unilm, bytes": Case("unilm", byte_bpe, "unilm", rows=False),
    "xlnet": Case("xlnet", wordpiece, "xlnet", "AutoModelForCausalLM", section=ONE_TEXT, rows=False),
    "xlnet, bytes": Case("xlnet", byte_bpe, "xlnet", "AutoModelForCausalLM", rows=False),
    "gpt": Case("gpt", gpt, "causal", "AutoModelForCausalLM"),
    "gpt2": Case("gpt2", gpt2, "causal", "AutoModelForCausalLM"),
    "gpt2, bytes": Case("gpt2", byte_bpe, "causal", "AutoModelForCausalLM"),
    "llama": Case(
        "llama",
        byte_bpe,
        "causal",
        "AutoModelForCausalLM",
        {"num_key_value_heads": 2},
        section={"begin": "cls"},
    ),
    "llama, scaled": Case(
        "llama", byte_bpe, "causal", "AutoModelForCausalLM", {"rotary_scaling": [8.0, 1.0, 4.0, 32.0]}
    ),
    "mistral": Case(
        "mistral",
        byte_bpe,
        "causal",
        "AutoModelForCausalLM",
        {"num_key_value_heads": 4},
        section={"begin": "cls"},
    ),
    "qwen2": Case("qwen2", byte_bpe, "causal", "AutoModelForCausalLM", section={"begin": "none"}),
    "qwen3": Case(
        "qwen3", byte_bpe, "causal", "AutoModelForCausalLM", {"head_dim": 16}, section={"begin": "none"}
    ),
    "eurobert": Case("eurobert", byte_bpe, "masked_lm"),
    "xlm_roberta": Case("xlm_roberta", byte_bpe, "masked_lm"),
    "camembert": Case("camembert", published_roberta, "masked_lm"),
    "glm4": Case("glm4", byte_bpe, "causal", "AutoModelForCausalLM"),
    "glm4_0414": Case("glm4_0414", byte_bpe, "causal", "AutoModelForCausalLM"),
    "bart": _writer(
        "bart", wordpiece, "bart", options={"added_tokens": "glm"}, section={"predict_cls": True}
    ),
    "bart, published": _writer("bart", published_roberta, "bart"),
    "mass": _writer("mass", wordpiece, "mass", rows=False),
    "t5": _writer("t5", wordpiece, "t5", options={"added_tokens": "t5"}),
    "t5_1_1": _writer("t5_1_1", wordpiece, "t5", options={"added_tokens": "t5"}),
    "mt5": _writer("mt5", byte_bpe, "t5", options={"added_tokens": "t5"}),
    "t5, glm": _writer(
        "t5", byte_bpe, "t5", options={"added_tokens": "glm"}, section={"sentinel_first": 399}
    ),
    "glm": Case("glm", wordpiece, "blank_infilling", WRITER, options={"added_tokens": "glm"}, rows=False),
    "glm, bytes": Case("glm", byte_bpe, "blank_infilling", WRITER, rows=False),
    **{
        f"glm, rotary {kind}": Case(
            "glm",
            byte_bpe,
            "blank_infilling",
            WRITER,
            model={"positions": "rotary", "block_positions": kind},
            rows=False,
        )
        for kind in BLOCK_POSITIONS
    },
}


def write_run(case: Case, directory: Path) -> Run:
    """The run of a case, with random weights in its newest checkpoint."""
    directory.mkdir(parents=True)
    tokenizer = {"added_tokens": "none", **case.tokenizer(directory), **case.options}
    config = build(
        Config,
        {
            "model": {"system": case.system, **SIZES, **case.model},
            "training": {"steps": 6, "precision": "fp32", "seed": 7},
            "tokenizer": tokenizer,
            "data": {"sequence_length": 40},
            "objectives": {case.objective: 1},
            case.objective: case.section,
            "run": {"directory": str(directory / "run")},
        },
    )
    config = keep_task_rows(config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size))
    shapes = parameter_shapes(config.model)
    write_training_checkpoint(
        directory / "run/checkpoints/step_00000000",
        Weights(shapes, lambda name: _drawn(name, shapes)),
        config,
    )
    return load_run(directory / "run")


def _drawn(name: str, shapes: dict[str, tuple[int, ...]]) -> torch.Tensor:
    """Weights that make logits of order 1, to which positions and the texts that a decoder reads matter."""
    seed = sorted(shapes).index(name)
    drawn = torch.randn(shapes[name], generator=torch.Generator().manual_seed(seed))
    if "layernorm" in name and name.endswith("weight"):
        return 1 + 0.1 * drawn
    if name.endswith("bias"):
        return 0.1 * drawn
    if "relative_bias.weight" in shapes and "attention" in name:  # T5's scores are not scaled
        return drawn * 0.15
    return drawn * (0.5 if "cross_attention" in name else 0.25)


def rows_of(case: Case, run: Run) -> np.ndarray:
    """Rows of the run's objective, one text in each: int32 [B, fields, S]."""
    made = make_objective(run.config.objective_choices, vocabulary_of(run.tokenizer), 7, 40)
    texts = [np.array(run.tokenizer.encode(text)[:36], np.int32) for text in TEXTS]
    lengths = np.array([len(text) for text in texts])
    return collate(made, np.concatenate(texts), lengths, np.ones(len(texts), np.int64), np.arange(len(texts)))


@torch.no_grad()
def answers(case: Case, run: Run) -> tuple[dict[str, Any], torch.Tensor | None]:
    """What users of the export should get: a JSON object, and the logits of all rows of training, fp32 [rows, V]."""
    reference: dict[str, Any] = {"auto": case.auto}
    logits = None
    if case.rows:
        batch = rows_of(case, run)
        real = batch[:, DOC] >= 0
        is_target = real & (batch[:, ORD] > 0) if run.config.model.decoder_layers else real
        reads = real & ~is_target if run.config.model.decoder_layers else real
        of_model = our_output(run.model, batch)[1]
        logits = of_model[torch.from_numpy(is_target)]
        reference["inputs"] = _lists(batch, TOKENS, reads)
        has_loss = torch.from_numpy(batch[:, WEIGHTS] != 0)
        if (
            case.auto == "AutoModelForCausalLM"
        ):  # whose labels are its inputs: the last token's target is not among them
            has_loss[range(len(batch)), real.sum(1) - 1] = False
        if case.auto != "AutoModelForMaskedLM":
            targets = torch.from_numpy(batch[:, TARGETS].astype(np.int64))
            reference["loss"] = F.cross_entropy(of_model[has_loss], targets[has_loss]).item()
            reference["labels"] = _lists(batch, TARGETS, has_loss.numpy())
    if case.auto == "AutoModelForMaskedLM":
        special = run.tokenizer.special
        ids = [special.cls, *run.tokenizer.encode_with_specials(MASKED.format("[MASK]")), special.sep]
        batch = texts_to_batch(run.config.model, [np.array(ids)])
        batch[:, OBJECTIVE] = OBJECTIVES[case.objective].losses[0].number
        of_mask = our_output(run.model, batch)[1][0, ids.index(special.mask)]
        reference |= {
            "text": MASKED.format(run.tokenizer.token_to_text(special.mask)),
            "best": of_mask.argmax().item(),
        }
    if case.system == "glm":
        special = run.tokenizer.special
        filler = BlankFiller(run.model, special, GenerationConfig(max_length=ANSWER_LENGTH))
        texts = [MASKED.format("[MASK]"), MASKED.format("[sMASK]"), f"{MASKED.format('fox')} [gMASK]"]
        contexts = [blank_context(run.tokenizer.encode_with_specials(text), special) for text in texts]
        reference |= {"blanks": texts, "answers": filler.fill_all(contexts), "steps": ANSWER_LENGTH}
    elif case.system == "xlnet":
        contexts = [run.tokenizer.encode(text) for text in TEXTS]
        reference |= {
            "prompts": contexts, "answers": [[_best_after(run, text)] for text in contexts],
            "banned": [], "unseen": 0, "steps": 1,
        }  # fmt: skip
    elif case.auto != "AutoModelForMaskedLM":
        decoder: Any = make_decoder(run, GenerationConfig(max_length=ANSWER_LENGTH))
        contexts = [decoder.context(run.tokenizer.encode(text)) for text in TEXTS]
        reference |= {
            "prompts": contexts, "answers": decoder.generate(contexts), "banned": decoder.search.banned,
            "unseen": len(decoder.template.forced), "steps": ANSWER_LENGTH,
        }  # fmt: skip
    return reference, logits


def _best_after(run: Run, text: list[int]) -> int:
    """The likeliest token after a text, by a query that sees all of it."""
    batch = texts_to_batch(run.config.model, [np.array([*text, run.tokenizer.special.mask])])
    batch[:, ORD, -1] = -1
    return int(our_output(run.model, batch)[1][0, -1].argmax())


@torch.no_grad()
def logits_of_inputs(run: Run, ids: list[int], segments: list[int] | None, start: int | None) -> torch.Tensor:
    """What a run's model says of a text, fp32 [rows, V].

    Args: segments: of its tokens. start: what a decoder reads; its one row is what is asked for.
    """
    targets = None if start is None else [np.array([start])]
    batch = texts_to_batch(run.config.model, [np.array(ids)], targets)
    if segments is not None:
        batch[0, SEGMENT_IDS, : len(ids)] = segments
    batch[:, OBJECTIVE] = OBJECTIVES[run.config.objective_choices[0].name].losses[0].number
    logits = our_output(run.model, batch)[1][0]
    return logits if start is None else logits[-1:]


def _lists(batch: np.ndarray, field: int, chosen: np.ndarray) -> list[list[int]]:
    return [row[field][places].tolist() for row, places in zip(batch, chosen, strict=True)]
