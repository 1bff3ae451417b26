"""Proof of a published system's directory: our model and the class of transformers on the same inputs.

    logits           with positions, segments and tasks handed over: every row of every table counts
    default inputs   with tokens and a mask alone, padded on the side of the system: positions, segments, tasks and
                     the first token of a decoder are the class's own
    labels           the loss that the class computes where it is given labels (of classes that write)
    generation       the logits of each step of the class's own `generate`, with its cache, after prompts that are
                     padded on the left where there is no encoder (of classes that write)
    head             the head on CLS, or that of a task
    hidden states    the last layer's, of a base model, and of an ELECTRA discriminator without its generator
    memory           XLNet's: a text in two segments

`ask` puts the questions to the class, and proof.py to our model, so that only one of them is in memory.

Shapes: B rows, S tokens of a row, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from data_utils.common.batch_fields import (
    DOC,
    FIELDS,
    OBJECTIVE,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    SEGMENT_IDS,
    TOKENS,
    WEIGHTS,
)
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.files.config_json import by_transformers, quiet
from megatron_lite.hf.files.proof import Question
from megatron_lite.hf.published.recognition import is_body
from megatron_lite.hf.published.segment_memory import read_segment
from megatron_lite.hf.published.source import PublishedSource, load_class
from megatron_lite.hf.published.systems import published_system
from megatron_lite.model.batch import Batch
from megatron_lite.model.model_input import prepare
from megatron_lite.model.predictions import task_rows
from megatron_lite.model.transformer import GLM

log = logging.getLogger(__name__)

_XLNET_INPUTS = {"input_ids": TOKENS, "token_type_ids": SEGMENT_IDS}
_SENTENCE_LOGITS = ("seq_relationship_logits", "sop_logits")
_IGNORED = -100  # the label of what has no loss, in transformers
_STEPS = 6  # tokens that `generate` writes in a proof
_LONGEST_PROMPT = 24


@torch.no_grad()
def ask(
    directory: Path,
    class_name: str,
    config: ModelConfig,
    start: int | None = None,
    dtype: torch.dtype = torch.float32,
    source: PublishedSource | None = None,
) -> list[Question]:
    """Outputs of the class of transformers for a directory's model, computed in `dtype`.

    Raises: CheckpointError, also for what the class raises over untrusted files.

    Args:
        config: of our model.
        start: id of the decoder's first token in training; None: the class's default.
        source: of an import.
    """
    theirs: Any = load_class(directory, class_name, dtype, source)
    with by_transformers(directory):
        if is_body(class_name):
            # A body has no logits to compare.
            return [_hidden_state_question(theirs, config, proof_batch(config))]
        return _questions(theirs, config, start)


def _questions(theirs: Any, config: ModelConfig, start: int | None) -> list[Question]:
    if config.task_head != "none":
        return [_task_question(theirs, config, proof_batch(config))]
    found = _logits_questions(theirs, config, proof_batch(config))
    if config.decoder_layers:
        start = getattr(theirs.config, "decoder_start_token_id", None) if start is None else start
        if start is None:
            return found  # a directory whose class can neither be given labels nor write
        found += _decoder_questions(theirs, config, start)
    else:
        # With the class's own defaults too: given our positions and segments, a RoBERTa whose positions are off
        # by its padding token would pass.
        found += _default_input_questions(theirs, config)
    if config.decoder_layers and theirs.config.num_hidden_layers < config.decoder_layers:
        log.warning(
            "the proof leaves out generation, which fails in %s where a decoder has more layers than its encoder",
            type(theirs).__name__,
        )  # its cache has a place for each layer of the encoder
    elif config.decoder_layers or published_system(config).is_causal:
        found.append(_generation_question(theirs, config, start))
    if config.relative == "xlnet":
        found.append(_memory_question(theirs, proof_batch(config)[:1]))
    return found


# The questions


def _rows(
    name: str, expected: torch.Tensor, batch: np.ndarray, real: torch.Tensor, has_task_rows: bool = False
) -> Question:
    """The logits of the rows in `real`, bool [B, S]. Args: has_task_rows: as for `our_output`."""
    return Question(name, expected, lambda model: our_output(model, batch, has_task_rows)[1][real])


def _loss(expected: torch.Tensor, batch: np.ndarray, real: torch.Tensor, targets: torch.Tensor) -> Question:
    """The mean loss of the rows in `real`."""

    def answer(model: GLM) -> torch.Tensor:
        return F.cross_entropy(our_output(model, batch)[1][real], targets).view(1, 1)

    return Question("labels", expected.view(1, 1), answer)


def _on_first(name: str, expected: torch.Tensor, batch: np.ndarray, has_task_rows: bool = False) -> Question:
    """The head on CLS. Args: as for `_rows`."""

    def answer(model: GLM) -> torch.Tensor:
        assert model.heads.sentence is not None
        return model.heads.sentence(model.final_layernorm(our_output(model, batch, has_task_rows)[0][:, 0]))

    return Question(name, expected, answer)


def _logits_questions(theirs: torch.nn.Module, config: ModelConfig, batch: np.ndarray) -> list[Question]:
    real = torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    if config.decoder_layers:
        real &= torch.from_numpy(batch[:, ORD] > 0)
    out = their_output(theirs, config, batch)
    expected = _token_logits(out)
    if config.decoder_layers:
        expected = in_rows(expected, batch)
    found = [_rows("logits", expected[real], batch, real, has_task_rows=True)]
    return found + [_on_first("head", out[name], batch, True) for name in _SENTENCE_LOGITS if name in out]


def _token_logits(out: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return out["logits"] if "logits" in out else out["prediction_logits"]


def _default_input_questions(theirs: Any, config: ModelConfig) -> list[Question]:
    """Tokens and a mask, as a tokenizer gives them."""
    batch = _without_choices(proof_batch(config, seed=1), theirs)
    if config.task_rows:
        batch[:, OBJECTIVE] = config.task_rows.index(0)  # a loss of the first objective
    real, system = torch.from_numpy(batch[:, DOC] != PADDING_DOC), published_system(config)
    ids, mask = padded(
        [row[TOKENS, : (row[DOC] >= 0).sum()] for row in batch], _pad(theirs), system.padding_side
    )
    labels = ids.masked_fill(mask == 0, _IGNORED)
    is_writer = system.is_causal
    out = theirs(input_ids=ids, attention_mask=mask, **({"labels": labels} if is_writer else {}))
    found = [_rows("default inputs", _token_logits(out)[mask.bool()], batch, real)]
    found += [_on_first("default inputs", out[name], batch) for name in _SENTENCE_LOGITS if name in out]
    if is_writer:
        predicts = real.clone()
        # The last token of a text predicts nothing.
        predicts[range(len(real)), real.sum(1) - 1] = False
        tokens = torch.from_numpy(batch[:, TOKENS].astype(np.int64))
        targets = tokens.roll(-1, dims=1)[predicts]
        found.append(_loss(out.loss, batch, predicts, targets))
    return found


def _decoder_questions(theirs: Any, config: ModelConfig, start: int) -> list[Question]:
    """A decoder's default input are the labels, after its first token."""
    batch = _without_choices(proof_batch(config, seed=1), theirs)
    inputs = encoder_decoder_inputs(batch, _pad(theirs))
    is_target = torch.from_numpy(batch[:, ORD] > 0)
    tokens, real = inputs.pop("decoder_input_ids"), in_target(batch)
    targets = tokens[real]
    out = theirs(**inputs, labels=tokens.masked_fill(~real, _IGNORED))
    for row in batch:
        places = np.flatnonzero(row[ORD] > 0)
        # The class shifts labels to the right and puts its first token before them; our row is made the same.
        row[TOKENS, places[1:]] = row[TOKENS, places[:-1]]
        row[TOKENS, places[:1]] = start
    return [
        _rows("default inputs", out.logits[real], batch, is_target),
        _loss(out.loss, batch, is_target, targets),
    ]


def _generation_question(theirs: Any, config: ModelConfig, start: int | None) -> Question:
    """Greedy, on prompts of several lengths. What it writes is then read by our model."""
    room = min(_LONGEST_PROMPT, config.max_position + 1)
    steps = min(_STEPS, room // 2)
    lengths = [room - steps, max(1, (room - steps) // 2)]
    if not published_system(config).counts_real_tokens and not config.decoder_layers:
        lengths = lengths[:1]  # the class counts padding before a prompt as positions
    drawn = _without_choices(proof_batch(config, seed=2), theirs)[: len(lengths), TOKENS]
    prompts = [row[:length] for row, length in zip(drawn, lengths, strict=True)]
    ids, mask = padded(prompts, _pad(theirs), "right" if config.decoder_layers else "left")
    options = {"max_new_tokens": steps, "do_sample": False, "num_beams": 1, "use_cache": True}
    with quiet():
        out = theirs.generate(
            input_ids=ids, attention_mask=mask, **options, output_logits=True, return_dict_in_generate=True
        )
    written = out.sequences[:, -len(out.logits) :].numpy()
    counts = [_until_end(row, theirs.generation_config.eos_token_id) for row in written]
    answers = [row[: count - 1] for row, count in zip(written, counts, strict=True)]
    # [prompts, steps, V]. What the class wrote with its cache is read by our model in one pass.
    logits = torch.stack(out.logits, dim=1)
    expected = torch.cat([row[:count] for row, count in zip(logits, counts, strict=True)]).float()
    if config.decoder_layers:
        assert start is not None
        batch = text_rows(config, prompts, [np.array([start, *answer]) for answer in answers])
        real = torch.from_numpy(batch[:, ORD] > 0)
    else:
        batch = text_rows(config, [np.array([*p, *a]) for p, a in zip(prompts, answers, strict=True)])
        first = torch.tensor([[len(prompt) - 1] for prompt in prompts])
        real = torch.from_numpy(batch[:, DOC] >= 0) & (torch.arange(batch.shape[2])[None] >= first)
    return _rows("generation", expected, batch, real)


def _until_end(tokens: np.ndarray, ends: int | Sequence[int] | None) -> int:
    """How many tokens an answer has, its end counted."""
    is_end = np.isin(tokens, [] if ends is None else ends)
    return int(is_end.argmax()) + 1 if is_end.any() else len(tokens)


def _task_question(theirs: torch.nn.Module, config: ModelConfig, batch: np.ndarray) -> Question:
    """The head of a task: on all rows, or on that of each text. XLNet's class takes the last one, padding or not."""
    if config.relative == "xlnet":
        batch = batch[:1]  # the row without padding
    out, real = their_output(theirs, config, batch), torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    if config.task_head in ("classes", "values"):
        real = torch.zeros_like(real)
        real[:, -1 if config.relative == "xlnet" else 0] = True
        expected = out["logits"]
    elif config.task_head == "spans":
        expected = torch.stack([out["start_logits"], out["end_logits"]], dim=-1)[real]
    else:
        expected = out["logits"][real]
    rows = real.flatten().nonzero()[:, 0]

    def answer(model: GLM) -> torch.Tensor:
        hidden, _ = our_output(model, batch, has_task_rows=True)
        return task_rows(model.heads, [hidden.flatten(0, 1)], rows, model.final_layernorm, None).float()

    return Question("head", expected, answer)


def _hidden_state_question(theirs: Any, config: ModelConfig, batch: np.ndarray) -> Question:
    """The last hidden states of a class without a head, after its last norm; of a decoder where there is one."""
    real = torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    expected = their_output(theirs, config, batch)["last_hidden_state"]
    if config.decoder_layers:
        real &= torch.from_numpy(batch[:, ORD] > 0)
        expected = in_rows(expected, batch)

    def answer(model: GLM) -> torch.Tensor:
        return model.final_layernorm(our_output(model, batch, has_task_rows=True)[0][real])

    return Question("hidden states", expected[real], answer)


def _memory_question(theirs: Any, row: np.ndarray) -> Question:
    """The row's text in two segments, the second with the memory of the first. Args: row: int32 [1, fields, S]."""
    longest, reused = theirs.config.mem_len or None, theirs.config.reuse_len or None
    first, second = (part.copy() for part in np.array_split(row, 2, axis=2))
    second[:, POSITION_IDS] = np.arange(second.shape[2])
    mems = None
    for part in (first, second):
        inputs = {
            name: torch.from_numpy(part[:, field].astype(np.int64)) for name, field in _XLNET_INPUTS.items()
        }
        out = theirs(**inputs, mems=mems, use_mems=True)
        mems = out.mems

    def answer(model: GLM) -> torch.Tensor:
        _, memory = read_segment(model, first, longest=longest, reused=reused)
        hidden, _ = read_segment(model, second, memory)
        return model.logits(hidden.flatten(0, -2))

    return Question("memory", out.logits.flatten(0, 1), answer)


# Rows for both models


def _without_choices(batch: np.ndarray, theirs: Any) -> np.ndarray:
    """The same texts without what a class that is given tokens and a mask alone does not know: segments and tasks.

    Tokens to which the class gives a meaning of its own, padding and ends of texts, do not occur.
    """
    batch[:, [SEGMENT_IDS, OBJECTIVE]] = 0
    config = theirs.config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    meant = {token for token in (config.pad_token_id, *ends) if token is not None}
    other = next(token for token in range(config.vocab_size) if token not in meant)
    batch[:, TOKENS][np.isin(batch[:, TOKENS], list(meant))] = other
    return batch


def _pad(theirs: Any) -> int:
    """An id for padding; any will do where the class names none, since the mask hides it."""
    found = theirs.config.pad_token_id
    return 0 if found is None else found


def padded(texts: Sequence[np.ndarray], pad: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, int64 [B, S] each."""
    longest = max(map(len, texts))
    ids, mask = np.full((len(texts), longest), pad, np.int64), np.zeros((len(texts), longest), np.int64)
    for row, text in enumerate(texts):
        places = slice(len(text)) if side == "right" else slice(longest - len(text), None)
        ids[row, places], mask[row, places] = text, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def our_output(
    model: GLM, batch: np.ndarray, has_task_rows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last block's output and the logits, [B, S, D] and [B, S, V]; zeros where a decoder has no row.

    Args: has_task_rows: whether the field of losses holds rows of the task embedding instead.
    """
    config = replace(model.config, task_rows=()) if has_task_rows else model.config
    # The dense plan applies the attention rule as one mask: the proof does not depend on our faster plans.
    kernel = "auto" if config.decoder_layers else "dense"
    prepared = prepare(Batch(batch), torch.device("cpu"), config, kernel=kernel)
    inputs = prepared.to(torch.device("cpu"))
    hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    order = torch.from_numpy(prepared.plan.order)[-len(hidden) :]
    outputs = []
    for rows in (hidden, model.logits(hidden).float()):
        whole = rows.new_zeros(batch.shape[0] * batch.shape[2], rows.shape[1])
        outputs.append(
            whole.index_put((order[order >= 0],), rows[order >= 0]).view(len(batch), batch.shape[2], -1)
        )
    return outputs[0], outputs[1]


def _segments(config: ModelConfig) -> int:
    """How many segments a model tells apart."""
    return 2 if config.relative == "xlnet" else config.segments


def in_rows(logits: torch.Tensor, batch: np.ndarray) -> torch.Tensor:
    """Logits [B, targets, V] of a decoder in the places of its tokens: [B, S, V]."""
    # The class pads targets on the right, ours are in the places of their rows.
    whole = logits.new_zeros(*batch[:, 0].shape, logits.shape[-1])
    for row, order in enumerate(batch[:, ORD]):
        places = np.flatnonzero(order > 0)
        whole[row, places] = logits[row, : len(places)]
    return whole


def their_output(
    theirs: torch.nn.Module, config: ModelConfig, batch: np.ndarray
) -> Mapping[str, torch.Tensor]:
    """Output of a class of transformers for a batch, int32 [B, fields, S], with every input that it takes."""
    if config.decoder_layers:
        return theirs(**encoder_decoder_inputs(batch))
    system = published_system(config).padded_with(theirs.config.pad_token_id)  # type: ignore[union-attr, arg-type]

    def field(number: int) -> torch.Tensor:
        return torch.from_numpy(batch[:, number].astype(np.int64))

    inputs = {
        "input_ids": field(TOKENS),
        "attention_mask": (field(DOC) != PADDING_DOC).long(),
        "position_ids": field(POSITION_IDS) + system.skipped_positions,
    }
    if _segments(config):
        inputs["token_type_ids"] = field(SEGMENT_IDS)
    if config.relative == "xlnet":
        del inputs["position_ids"]  # it counts the tokens itself
    if config.task_types:
        inputs["task_type_ids"] = field(OBJECTIVE)
    return theirs(**inputs)


def encoder_decoder_inputs(batch: np.ndarray, pad: int = 1) -> dict[str, torch.Tensor]:
    """Context and target of each row, each padded at its end."""
    is_real = batch[:, DOC] != PADDING_DOC
    context, mask = _gathered(batch, is_real & (batch[:, ORD] == 0), pad)
    target, _ = _gathered(batch, is_real & (batch[:, ORD] > 0), pad)
    return {"input_ids": context, "attention_mask": mask, "decoder_input_ids": target}


def in_target(batch: np.ndarray) -> torch.Tensor:
    """Where targets of `encoder_decoder_inputs` are no padding: bool [B, targets]."""
    lengths = torch.from_numpy((batch[:, ORD] > 0).sum(1))
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]


def _gathered(batch: np.ndarray, chosen: np.ndarray, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    return padded([row[TOKENS][places] for row, places in zip(batch, chosen, strict=True)], pad, "right")


def text_rows(
    config: ModelConfig, texts: Sequence[np.ndarray], targets: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """int32 [B, fields, S], as Batch: texts, each in a row, with padding after them.

    Args: targets: what a decoder reads, for each text.
    """
    targets = [np.zeros(0, np.int32)] * len(texts) if targets is None else targets
    length = max(len(text) + len(target) for text, target in zip(texts, targets, strict=True))
    batch = np.zeros((len(texts), len(FIELDS), length), np.int32)
    batch[:, DOC], batch[:, POSITION_IDS] = PADDING_DOC, np.arange(length)
    for row, text, target in zip(batch, texts, targets, strict=True):
        context, used = len(text), len(text) + len(target)
        row[TOKENS, :used] = [*text, *target]
        row[DOC, :used] = 0
        if config.decoder_layers:
            row[ORD, context:used] = np.arange(1, len(target) + 1)
            row[POSITION_IDS, context:used] = np.arange(len(target))
        elif published_system(config).is_causal:
            row[ORD, :used] = np.arange(used)
    batch[:, WEIGHTS].view(np.float32)[:] = 1.0
    return batch


def proof_batch(config: ModelConfig, seed: int = 0) -> np.ndarray:
    """int32 [3, fields, S], as Batch: a whole row, and two with padding after them.

    Where there is a decoder, the last part of a row is its target. Distances reach beyond what buckets tell apart.
    """
    assert config.vocab_size is not None
    rng = np.random.default_rng(seed)
    length = min(200, config.max_position + 1)
    used = (length, max(1, length // 2), max(1, length - 3))
    drawn = [rng.integers(0, config.vocab_size, count).astype(np.int32) for count in used]
    texts: Sequence[np.ndarray] = drawn
    targets: Sequence[np.ndarray] | None = None
    if config.decoder_layers:
        texts, targets = zip(*(np.split(row, [len(row) - len(row) // 3]) for row in drawn), strict=True)
    batch = text_rows(config, texts, targets)
    for row, count in zip(batch, used, strict=True):
        if segments := _segments(config):
            row[SEGMENT_IDS, :count] = np.sort(rng.integers(0, segments, count))
        if config.task_types:
            row[OBJECTIVE, :count] = rng.integers(0, config.task_types)
    return batch
