"""Proof of a directory of GLM's own classes: published/proof.py has those of published systems, and what both share.

    logits           with both position ids handed over
    default inputs   tokens and a mask alone, padded on the left: positions are the class's own
    generation       the logits of each step of `generate`, with its cache, on what the tokenizer builds
    pipeline         the spans that the pipeline writes into texts: by how much our best token is likelier, each step
    head             the head of a task

For models that fill blanks, generation is compared with `BlankFiller`. The pipeline obeys generation_config.json, which
is ours in an export only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import (
    BLOCK_POSITION_IDS,
    DOC,
    FIELDS,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    TOKENS,
    WEIGHTS,
)
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.files.config_json import by_transformers
from megatron_lite.hf.files.proof import Question
from megatron_lite.hf.files.weights import Weights
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling, GLMForSequenceClassification
from megatron_lite.hf.glm.pipeline_glm import BlankInfillingPipeline
from megatron_lite.hf.glm.released import reference_logits
from megatron_lite.hf.glm.tokenizer_files import exported_tokenizer
from megatron_lite.hf.published.proof import generated, pad_texts, texts_to_batch
from megatron_lite.inference.filling import BlankFiller, blank_context
from megatron_lite.transformer.attention_backends.layout import allowed
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.predictions import task_outputs
from megatron_lite.transformer.transformer import MicroBatch, Transformer

_STEPS = 4  # tokens that are written for a blank
_LONGEST = 24  # tokens of a text


@torch.no_grad()
def ask(
    directory: Path,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    is_export: bool,
    dtype: torch.dtype = torch.float32,
) -> list[Question]:
    """Outputs of GLM's classes of transformers for a directory's model.

    Args:
        config: of our model.
        tokenizer: of a run that fills blanks, whose files the directory has; None: generation is not asked.
    """
    batch = proof_batch(config)
    with by_transformers(directory):
        theirs: Any = GLMForBlankInfilling.from_pretrained(directory, dtype=dtype).eval()
        logits = theirs(**class_inputs(batch), use_cache=False).logits
        questions = [Question("logits", logits, lambda model: training_logits(model, batch))]
        questions.append(_default_input_question(theirs, config))
        if tokenizer is not None:
            fast: Any = exported_tokenizer(tokenizer, directory)
            questions.append(_generation_question(theirs, fast, tokenizer, config))
            if is_export:
                questions.append(_pipeline_question(theirs, fast, tokenizer, config))
    del theirs
    if config.task_head.type != "none":
        questions.append(_head_question(directory, batch, dtype))
    return questions


def ask_released(shards: Sequence[Weights], config: ModelConfig, dtype: torch.dtype) -> list[Question]:
    """Logits of weights in the released layout, by the reference's arithmetic."""
    batch = proof_batch(config)
    logits = released_logits(shards, config, batch, dtype)
    return [Question("logits", logits, lambda model: training_logits(model, batch))]


def _default_input_question(theirs: Any, config: ModelConfig) -> Question:
    """Tokens and a mask alone, padded on the left, where a wrong default of positions shows."""
    assert config.vocab_size is not None
    rng, longest = np.random.default_rng(1), min(_LONGEST, config.max_position + 1)
    lengths = (longest, max(1, longest // 2))
    texts = [rng.integers(0, config.vocab_size, length).astype(np.int32) for length in lengths]
    batch, (ids, mask) = texts_to_batch(config, texts), pad_texts(texts, 0, "left")
    is_token = torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    expected = theirs(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    return Question("default inputs", expected, lambda model: training_logits(model, batch)[is_token])


def _contexts(tokenizer: Tokenizer, config: ModelConfig) -> list[tuple[str, list[int]]]:
    """Texts with a blank, and our tokens of them, part A; none that the model has too few positions for."""
    rng, longest = np.random.default_rng(2), min(_LONGEST, config.max_position + 1) - 5
    text_ids = [i for i in range(tokenizer.num_tokens) if i not in tokenizer.special_names]
    contexts = []
    for template, count in (("{} [MASK] {}", longest // 4), ("{} [gMASK]", longest // 8)):
        random_ids = rng.choice(text_ids, 2 * max(1, count)).reshape(2, -1).tolist()
        # A decoded text must not look like a blank.
        texts = [tokenizer.decode(ids).replace("[", " ") for ids in random_ids[: template.count("{}")]]
        text = template.format(*texts)
        context = blank_context(tokenizer.encode_with_specials(text), tokenizer.special)
        if len(context) <= config.max_position:
            contexts.append((text, context))
    return contexts


def _span_logits(
    model: Transformer, special: SpecialTokens, context: Sequence[int], span: Sequence[int]
) -> torch.Tensor:
    """Logits [tokens + 1, V] of each token of a span and of its end, by `BlankFiller`.

    Args: context: part A, with one blank.
    """
    filler = BlankFiller(model, special, GenerationConfig(max_length=_STEPS))
    masks = (special.mask, special.smask, special.gmask)
    (blank,) = [position for position, token in enumerate(context) if token in masks]
    return filler.write(filler.encoded([context]), [[special.sop, *span]], [blank])[0]


def _generation_question(theirs: Any, fast: Any, tokenizer: Tokenizer, config: ModelConfig) -> Question:
    """Greedy, with the class's cache. Our model then reads what the class generated, in one pass."""
    contexts, special = [context for _, context in _contexts(tokenizer, config)], tokenizer.special
    inputs = fast.build_inputs_for_generation({"input_ids": contexts})
    written, expected = generated(theirs, inputs, _STEPS)

    def compute(model: Transformer) -> torch.Tensor:
        # The last token of a span is predicted and not read.
        pairs = zip(contexts, written, strict=True)
        return torch.cat([_span_logits(model, special, context, span[:-1]) for context, span in pairs])

    return Question("generation", expected, compute)


def _pipeline_question(theirs: Any, fast: Any, tokenizer: Tokenizer, config: ModelConfig) -> Question:
    """0 at each step: by how much our best token is likelier than the token that the pipeline chose, ties apart."""
    special, contexts = tokenizer.special, _contexts(tokenizer, config)
    fill = BlankInfillingPipeline(model=theirs, tokenizer=fast, max_new_tokens=_STEPS)
    spans = [fill(text)["span_ids"] for text, _ in contexts]
    suppressed = sorted(set(asdict(special).values()) - {special.eop, special.eos})

    def compute(model: Transformer) -> torch.Tensor:
        behind = []
        for (_, context), (span,) in zip(contexts, spans, strict=True):
            logits = _span_logits(model, special, context, span)
            logits[:, suppressed] = -torch.inf
            steps = torch.arange(len(span))
            chosen = [logits[steps, span]] if span else []
            if len(span) < _STEPS:  # it ended by one of two tokens
                chosen.append(logits[len(span) :, [special.eop, special.eos]].amax(-1))
            best = logits.amax(-1)[: len(span) + (len(span) < _STEPS)]
            behind.append((best - torch.cat(chosen)) / best.abs().clamp(min=1.0))
        return torch.cat(behind)[:, None]

    count = sum(len(span) + (len(span) < _STEPS) for (span,) in spans)
    return Question("pipeline", torch.zeros(count, 1), compute)


def _head_question(directory: Path, batch: np.ndarray, dtype: torch.dtype) -> Question:
    """A task's head, on the first token of each sequence."""
    with by_transformers(directory):
        theirs = GLMForSequenceClassification.from_pretrained(directory, dtype=dtype).eval()
        expected = theirs(**class_inputs(batch)).logits

    def compute(model: Transformer) -> torch.Tensor:
        states, first = training_states(model, batch)[0][:, 0], torch.arange(len(batch))
        return task_outputs(model.heads, [states], first, model.final_layernorm, None).float()

    return Question("head", expected, compute)


# Inputs, and what both models compute of them


def proof_batch(config: ModelConfig, seed: int = 0) -> np.ndarray:
    """int32 [3, fields, S], as Batch.

    The sequences: part A and two spans, padded; part A and one span, without padding; part A alone, padded.
    """
    assert config.vocab_size is not None
    rng = np.random.default_rng(seed)
    # Three windows more, so that a class whose local layers see everything is noticed.
    length = min(96 + 3 * config.attention_window, config.max_position)
    batch = np.zeros((3, len(FIELDS), length), np.int32)
    batch[:, DOC] = PADDING_DOC
    third = max(1, length // 3)
    lengths: list[tuple[int, list[int]]] = [  # of part A, and of each span
        (third, [max(1, third // 2), max(1, third // 3)]),
        (length - third, [third]),
        (max(1, length // 2), []),
    ]
    for sequence, (context, spans) in zip(batch, lengths, strict=True):
        total = context + sum(spans)
        sequence[TOKENS, :total] = rng.integers(0, config.vocab_size, total)
        sequence[DOC, :total] = 0
        sequence[POSITION_IDS, :context] = np.arange(context)
        sequence[ORD, context:total] = np.arange(1, total - context + 1)
        start = context
        for span in spans:
            # All tokens of a span have the position of its mask.
            sequence[POSITION_IDS, start : start + span] = rng.integers(0, context)
            sequence[BLOCK_POSITION_IDS, start : start + span] = np.arange(1, span + 1)
            start += span
    batch[:, WEIGHTS].view(np.float32)[:] = 1.0
    return batch


def training_logits(model: Transformer, batch: np.ndarray) -> torch.Tensor:
    """Logits of our model, fp32 [B, S, vocab_size], of padding too."""
    return training_states(model, batch)[1]


@torch.no_grad()
def training_states(model: Transformer, batch: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The last block's output [B, S, D], and the logits [B, S, vocab_size]."""
    inputs = MicroBatch.from_batch(Batch(batch), torch.device("cpu"), model.config, kernel="dense")
    hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    logits = model.logits(hidden).float()
    return hidden.unflatten(0, (len(batch), -1)), logits.unflatten(0, (len(batch), -1))


@torch.no_grad()
def released_logits(
    shards: Sequence[Weights], config: ModelConfig, batch: np.ndarray, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits of weights in the released layout, by the reference's arithmetic."""
    doc = batch[:, DOC]
    visible = torch.from_numpy(allowed(doc, batch[:, ORD], np.zeros_like(doc)))
    tokens, positions = _int64_field(batch, TOKENS), _int64_field(batch, POSITION_IDS)
    return reference_logits(
        shards, config, tokens, positions, _int64_field(batch, BLOCK_POSITION_IDS), visible, dtype
    )


def class_inputs(batch: np.ndarray) -> dict[str, torch.Tensor]:
    """A batch as GLM's classes take it."""
    return {
        "input_ids": _int64_field(batch, TOKENS),
        "attention_mask": (_int64_field(batch, DOC) != PADDING_DOC).long(),
        "position_ids": _int64_field(batch, POSITION_IDS),
        "block_position_ids": _int64_field(batch, BLOCK_POSITION_IDS),
    }


def _int64_field(batch: np.ndarray, field: int) -> torch.Tensor:
    return torch.from_numpy(batch[:, field].astype(np.int64))
