"""Proof of a directory of GLM's own classes: see published/proof.py for those of published systems.

    logits           with both position ids handed over
    default inputs   tokens and a mask alone, padded on the left: positions are the class's own
    generation       the logits of each step of `generate`, with its cache, on what the tokenizer builds
    pipeline         the spans that the pipeline writes into texts: by how much our best token is likelier, each step
    head             the head of a task

Generation is asked of models that fill blanks, beside `BlankFiller`. The pipeline obeys generation_config.json,
which is ours in an export only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import DOC, FIELDS, PADDING_DOC, POSITION_IDS, TOKENS, WEIGHTS
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.files.config_json import by_transformers
from megatron_lite.hf.files.weights import Weights
from megatron_lite.hf.glm import proof
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling
from megatron_lite.hf.glm.pipeline_glm import BlankInfillingPipeline
from megatron_lite.hf.glm.proof import Question
from megatron_lite.hf.glm.tokenizer_files import exported_tokenizer
from megatron_lite.inference.filling import BlankFiller, blank_context
from megatron_lite.model.transformer import GLM

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
    batch = proof.proof_batch(config)
    with by_transformers(directory):
        theirs: Any = GLMForBlankInfilling.from_pretrained(directory, dtype=dtype).eval()
        logits = theirs(**proof.inputs_of(batch), use_cache=False).logits
        found = [Question("logits", logits, lambda model: proof.training_logits(model, batch))]
        found.append(_of_default_inputs(theirs, config))
        if tokenizer is not None:
            fast: Any = exported_tokenizer(tokenizer, directory)
            found.append(_of_generation(theirs, fast, tokenizer, config))
            if is_export:
                found.append(_of_pipeline(theirs, fast, tokenizer, config))
    del theirs
    if config.task_head != "none":
        classes = proof.exported_classes(directory, batch, dtype)
        found.append(Question("head", classes, lambda model: proof.training_classes(model, batch)))
    return found


def ask_released(shards: Sequence[Weights], config: ModelConfig, dtype: torch.dtype) -> list[Question]:
    """Logits of the reference's arithmetic with weights in the released layout."""
    batch = proof.proof_batch(config)
    logits = proof.released_logits(shards, config, batch, dtype)
    return [Question("logits", logits, lambda model: proof.training_logits(model, batch))]


def _of_default_inputs(theirs: Any, config: ModelConfig) -> Question:
    assert config.vocab_size is not None
    rng, longest = np.random.default_rng(1), min(_LONGEST, config.max_position + 1)
    lengths = (longest, max(1, longest // 2))
    batch = np.zeros((len(lengths), len(FIELDS), longest), np.int32)
    batch[:, DOC] = PADDING_DOC
    batch[:, WEIGHTS].view(np.float32)[:] = 1.0
    ids, mask = torch.zeros(2, len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens = rng.integers(0, config.vocab_size, length)
        batch[row, TOKENS, :length], batch[row, DOC, :length] = tokens, 0
        batch[row, POSITION_IDS, :length] = np.arange(length)
        ids[row, longest - length :], mask[row, longest - length :] = torch.from_numpy(tokens), 1
    real = torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    expected = theirs(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    return Question("default inputs", expected, lambda model: proof.training_logits(model, batch)[real])


def _contexts(tokenizer: Tokenizer, config: ModelConfig) -> list[tuple[str, list[int]]]:
    """Two texts with blanks, and our tokens of them."""
    rng, room = np.random.default_rng(2), min(_LONGEST, config.max_position + 1) - 5
    text_ids = [i for i in range(tokenizer.num_tokens) if i not in tokenizer.special_names]
    found = []
    for form, count in (("{} [MASK] {}", room // 4), ("{} [gMASK]", room // 8)):
        drawn = iter(rng.choice(text_ids, 2 * max(1, count)).reshape(2, -1).tolist())
        text = form.format(
            *(tokenizer.decode(next(drawn)).replace("[", " ") for _ in range(form.count("{}")))
        )
        context = blank_context(tokenizer.encode_with_specials(text), tokenizer.special)
        if len(context) <= config.max_position:
            found.append((text, context))
    return found


def _masks(context: Sequence[int], special: SpecialTokens) -> list[int]:
    return [i for i, token in enumerate(context) if token in (special.mask, special.smask, special.gmask)]


def _written(
    model: GLM, special: SpecialTokens, context: Sequence[int], spans: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Logits [steps, V] of each token of the last span, by the machinery of `BlankFiller`."""
    filler = BlankFiller(model, special, GenerationConfig(max_length=_STEPS))
    plan, places = filler.encoded([context]), _masks(context, special)
    for span, place in zip(spans, places, strict=False):
        logits = filler.write(plan, [[special.sop, *span]], [place])
    return logits[0]


def _of_generation(theirs: Any, fast: Any, tokenizer: Tokenizer, config: ModelConfig) -> Question:
    contexts, special = [context for _, context in _contexts(tokenizer, config)], tokenizer.special
    inputs = fast.build_inputs_for_generation({"input_ids": contexts})
    out = theirs.generate(
        **inputs, max_new_tokens=_STEPS, do_sample=False, num_beams=1, num_return_sequences=1, use_cache=True,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    written, ends = out.sequences[:, -len(out.logits) :].tolist(), (special.eop, special.eos)
    counts = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in written]
    logits = torch.stack(out.logits, dim=1)
    expected = torch.cat([row[:count] for row, count in zip(logits, counts, strict=True)])

    def answer(model: GLM) -> torch.Tensor:
        rows = zip(contexts, written, counts, strict=True)
        return torch.cat([_written(model, special, context, [row[: n - 1]]) for context, row, n in rows])

    return Question("generation", expected, answer)


def _of_pipeline(theirs: Any, fast: Any, tokenizer: Tokenizer, config: ModelConfig) -> Question:
    """0 at each step, but for ties: our best token is the one that the pipeline wrote."""
    special, contexts = tokenizer.special, _contexts(tokenizer, config)
    fill = BlankInfillingPipeline(model=theirs, tokenizer=fast, max_new_tokens=_STEPS)
    spans = [fill(text)["span_ids"] for text, _ in contexts]
    held_back = sorted(set(asdict(special).values()) - {special.eop, special.eos})

    def answer(model: GLM) -> torch.Tensor:
        behind = []
        for (_, context), (span,) in zip(contexts, spans, strict=True):
            logits = _written(model, special, context, [span])
            logits[:, held_back] = -torch.inf
            steps = torch.arange(len(span))
            chosen = [logits[steps, span]] if span else []
            if len(span) < _STEPS:  # it ended by one of two tokens
                chosen.append(logits[len(span) :, [special.eop, special.eos]].amax(-1))
            best = logits.amax(-1)[: len(span) + (len(span) < _STEPS)]
            behind.append((best - torch.cat(chosen)) / best.abs().clamp(min=1.0))
        return torch.cat(behind)[:, None]

    count = sum(len(span) + (len(span) < _STEPS) for (span,) in spans)
    return Question("pipeline", torch.zeros(count, 1), answer)
