"""Outputs of GLM's own class for a directory, and of the reference's arithmetic, to compare ours with.

    logits           with both position ids handed over
    default inputs   tokens and a mask alone, padded on the left: positions are the class's own
    generation       the logits of each step of `generate`, with its cache, on what the tokenizer builds
    pipeline         the spans that the pipeline writes into texts: by how much our best token is likelier, each step
    head             the head of a task

For models that fill blanks, generation is compared with `BlankFiller`. The pipeline obeys generation_config.json, which
is ours in an export only. Inputs and checks that classes of other systems have too are in published/verify.py.
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
from megatron_lite.hf.common.config_json import by_transformers
from megatron_lite.hf.common.verify import Check
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling, GLMForSequenceClassification
from megatron_lite.hf.glm.pipeline_glm import BlankInfillingPipeline
from megatron_lite.hf.glm.released import reference_logits
from megatron_lite.hf.glm.tokenizer_files import exported_tokenizer
from megatron_lite.hf.published.verify import generated, logits_check, task_check
from megatron_lite.hf.published.verify_inputs import default_inputs, is_token, text_batch
from megatron_lite.inference.filling import BlankFiller, blank_context
from megatron_lite.transformer.attention_backends.layout import allowed
from megatron_lite.transformer.transformer import Transformer

_STEPS = 4  # tokens that are written for a blank
_LONGEST = 24  # tokens of a text


@torch.no_grad()
def glm_checks(
    directory: Path, config: ModelConfig, dtype: torch.dtype, *, tokenizer: Tokenizer | None, is_export: bool
) -> list[Check]:
    """Outputs of GLM's classes of transformers for a directory's model, computed in `dtype`.

    Args:
        config: of our model.
        tokenizer: of a run that fills blanks, whose files the directory has; None: generation is not compared.
    """
    batch, texts = span_batch(config), text_batch(config, seed=1)
    with by_transformers(directory):
        theirs: Any = GLMForBlankInfilling.from_pretrained(directory, dtype=dtype).eval()
        logits = theirs(**class_inputs(batch), use_cache=False).logits
        ids, mask = default_inputs(theirs, texts, "left")  # where a wrong default of positions shows
        defaults = theirs(input_ids=ids, attention_mask=mask).logits
        checks = [
            logits_check("logits", logits[is_token(batch)], batch, is_token(batch)),
            logits_check("default inputs", defaults[mask.bool()], texts, is_token(texts)),
        ]
        if tokenizer is not None:
            fast: Any = exported_tokenizer(tokenizer, directory)
            checks.append(_generation_check(theirs, fast, tokenizer, config))
            if is_export:
                checks.append(_pipeline_check(theirs, fast, tokenizer, config))
        del theirs
        if config.task_head.type != "none":
            tuned = GLMForSequenceClassification.from_pretrained(directory, dtype=dtype).eval()
            checks.append(task_check(tuned(**class_inputs(batch)), config, batch))
    return checks


@torch.no_grad()
def released_checks(shards: Sequence[Weights], config: ModelConfig, dtype: torch.dtype) -> list[Check]:
    """Logits of weights in the released layout, by the reference's arithmetic."""
    batch = span_batch(config)
    doc = batch[:, DOC]
    visible = torch.from_numpy(allowed(doc, batch[:, ORD], np.zeros_like(doc)))
    tokens, positions, blocks = (
        _int64_field(batch, field) for field in (TOKENS, POSITION_IDS, BLOCK_POSITION_IDS)
    )
    logits = reference_logits(shards, config, tokens, positions, blocks, visible, dtype)
    return [logits_check("logits", logits[is_token(batch)], batch, is_token(batch))]


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


def _generation_check(theirs: Any, fast: Any, tokenizer: Tokenizer, config: ModelConfig) -> Check:
    """Greedy, with the class's cache. Our model then reads what the class generated, in one pass."""
    contexts, special = [context for _, context in _contexts(tokenizer, config)], tokenizer.special
    inputs = fast.build_inputs_for_generation({"input_ids": contexts})
    written, expected = generated(theirs, inputs, _STEPS)

    def compute(model: Transformer) -> torch.Tensor:
        # The last token of a span is predicted and not read.
        pairs = zip(contexts, written, strict=True)
        return torch.cat([_span_logits(model, special, context, span[:-1]) for context, span in pairs])

    return Check("generation", expected, compute)


def _pipeline_check(theirs: Any, fast: Any, tokenizer: Tokenizer, config: ModelConfig) -> Check:
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
    return Check("pipeline", torch.zeros(count, 1), compute)


def span_batch(config: ModelConfig, seed: int = 0) -> np.ndarray:
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
