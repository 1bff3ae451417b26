"""Inputs of both models where outputs are compared, and what both compute of them.

A batch is an int32 array [B, fields, S], as `Batch`; B sequences, S tokens of a sequence, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

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
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME, published_system
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import prepare
from megatron_lite.transformer.transformer import Transformer


def without_segments_and_tasks(batch: np.ndarray, theirs: Any) -> np.ndarray:
    """The batch with segment 0 and task 0, as a class has it that gets tokens and a mask alone. Changes `batch`.

    The tokens to which the class gives a meaning, padding and ends of texts, are replaced by another token.
    """
    batch[:, [SEGMENT_IDS, OBJECTIVE]] = 0
    config = theirs.config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {token for token in (config.pad_token_id, *ends) if token is not None}
    other = next(token for token in range(config.vocab_size) if token not in special)
    batch[:, TOKENS][np.isin(batch[:, TOKENS], list(special))] = other
    return batch


def padding_id(theirs: Any) -> int:
    """The id of padding; 0 where the class names none, since the mask hides it."""
    padding_id = theirs.config.pad_token_id
    return 0 if padding_id is None else padding_id


def is_token(batch: np.ndarray) -> torch.Tensor:
    """Where a batch has no padding: bool [B, S]."""
    return torch.from_numpy(batch[:, DOC] != PADDING_DOC)


def in_batch(
    output: torch.Tensor, config: ModelConfig, batch: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a class computes of the tokens that it predicts, [tokens, ...], and which they are: bool [B, S]."""
    is_compared = is_token(batch)
    if config.decoder_layers:
        is_compared &= torch.from_numpy(batch[:, ORD] > 0)
        output = scatter_targets(output, batch)
    return output[is_compared], is_compared


def default_inputs(theirs: Any, batch: np.ndarray, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of a batch's texts, as `pad_texts`."""
    texts = [
        tokens[is_text] for tokens, is_text in zip(batch[:, TOKENS], is_token(batch).numpy(), strict=True)
    ]
    return pad_texts(texts, padding_id(theirs), side)


def pad_texts(texts: Sequence[np.ndarray], padding_id: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, int64 [B, S] each."""
    longest = max(map(len, texts))
    ids, mask = (
        np.full((len(texts), longest), padding_id, np.int64),
        np.zeros((len(texts), longest), np.int64),
    )
    for number, text in enumerate(texts):
        positions = slice(len(text)) if side == "right" else slice(longest - len(text), None)
        ids[number, positions], mask[number, positions] = text, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def our_output(
    model: Transformer, batch: np.ndarray, has_task_rows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last block's output [B, S, D] and the logits [B, S, V]; zeros at positions that a decoder does not have.

    Args: has_task_rows: whether the field OBJECTIVE holds rows of the task embedding, not numbers of losses.
    """
    config = replace(model.config, task_rows=()) if has_task_rows else model.config
    # The dense plan applies the attention rule as one mask: the comparison does not depend on our faster plans.
    kernel = "auto" if config.decoder_layers else "dense"
    prepared = prepare(Batch(batch), torch.device("cpu"), config, kernel=kernel)
    inputs = prepared.to(torch.device("cpu"))
    hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    order = prepared.plan.order
    return in_batch_order(hidden, order, batch), in_batch_order(model.logits(hidden).float(), order, batch)


def in_batch_order(values: torch.Tensor, plan_order: np.ndarray, batch: np.ndarray) -> torch.Tensor:
    """What a model computes in the order of its plan, [tokens, n], in that of the batch: [B, S, n], else zeros.

    Args: values: of the plan's last tokens, which are the decoder's if there is one.
    """
    order = torch.from_numpy(plan_order)[-len(values) :]  # -1 is padding
    flat = values.new_zeros(batch.shape[0] * batch.shape[2], values.shape[1])
    flat[order[order >= 0]] = values[order >= 0]
    return flat.view(len(batch), batch.shape[2], -1)


def _num_segments(config: ModelConfig) -> int:
    """The number of segments that a model tells apart."""
    return 2 if config.relative == "xlnet" else config.segments


def scatter_targets(logits: torch.Tensor, batch: np.ndarray) -> torch.Tensor:
    """A decoder's logits [B, targets, V] at the positions of its tokens in the batch: [B, S, V]."""
    # The class pads targets on the right; in our sequences they stand after the context.
    in_batch = logits.new_zeros(*batch[:, 0].shape, logits.shape[-1])
    for number, order in enumerate(batch[:, ORD]):
        positions = np.flatnonzero(order > 0)
        in_batch[number, positions] = logits[number, : len(positions)]
    return in_batch


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
    if _num_segments(config):
        inputs["token_type_ids"] = field(SEGMENT_IDS)
    if config.relative == "xlnet":
        del inputs["position_ids"]  # it counts the tokens itself
    if config.task_types:
        inputs["task_type_ids"] = field(OBJECTIVE)
    return theirs(**inputs)


def encoder_decoder_inputs(batch: np.ndarray, padding_id: int = 1) -> dict[str, torch.Tensor]:
    """Context and target of each sequence, both with padding on the right."""

    def padded_tokens(is_chosen: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        texts = [sequence[TOKENS][chosen] for sequence, chosen in zip(batch, is_chosen, strict=True)]
        return pad_texts(texts, padding_id, "right")

    is_real = batch[:, DOC] != PADDING_DOC
    context, mask = padded_tokens(is_real & (batch[:, ORD] == 0))
    target, _ = padded_tokens(is_real & (batch[:, ORD] > 0))
    return {"input_ids": context, "attention_mask": mask, "decoder_input_ids": target}


def in_target(batch: np.ndarray) -> torch.Tensor:
    """Where targets of `encoder_decoder_inputs` are no padding: bool [B, targets]."""
    lengths = torch.from_numpy((batch[:, ORD] > 0).sum(1))
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]


def texts_to_batch(
    config: ModelConfig, texts: Sequence[np.ndarray], targets: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """int32 [B, fields, S], as Batch: one sequence for each text, with padding on the right.

    Args: targets: for each text the tokens that the decoder reads; None without a decoder.
    """
    targets = [np.zeros(0, np.int32)] * len(texts) if targets is None else targets
    length = max(len(text) + len(target) for text, target in zip(texts, targets, strict=True))
    batch = np.zeros((len(texts), len(FIELDS), length), np.int32)
    batch[:, DOC], batch[:, POSITION_IDS] = PADDING_DOC, np.arange(length)
    for sequence, text, target in zip(batch, texts, targets, strict=True):
        context, used = len(text), len(text) + len(target)
        sequence[TOKENS, :used] = [*text, *target]
        sequence[DOC, :used] = 0
        if config.decoder_layers:
            sequence[ORD, context:used] = np.arange(1, len(target) + 1)
            sequence[POSITION_IDS, context:used] = np.arange(len(target))
        elif config.system in SYSTEMS_BY_NAME and SYSTEMS_BY_NAME[config.system].is_causal:
            sequence[ORD, :used] = np.arange(used)
    batch[:, WEIGHTS].view(np.float32)[:] = 1.0
    return batch


def text_batch(config: ModelConfig, seed: int = 0) -> np.ndarray:
    """int32 [3, fields, S], as Batch: random tokens, a sequence without padding and two with padding on the right.

    With a decoder the last third of a sequence is its target. Sequences are longer than the distances that buckets of
    relative positions tell apart.
    """
    assert config.vocab_size is not None
    rng = np.random.default_rng(seed)
    length = min(200, config.max_position + 1)
    lengths = (length, max(1, length // 2), max(1, length - 3))
    texts: Sequence[np.ndarray] = [
        rng.integers(0, config.vocab_size, count).astype(np.int32) for count in lengths
    ]
    targets: Sequence[np.ndarray] | None = None
    if config.decoder_layers:
        texts, targets = zip(*(np.split(text, [len(text) - len(text) // 3]) for text in texts), strict=True)
    batch = texts_to_batch(config, texts, targets)
    for sequence, count in zip(batch, lengths, strict=True):
        if segments := _num_segments(config):
            sequence[SEGMENT_IDS, :count] = np.sort(rng.integers(0, segments, count))
        if config.task_types:
            sequence[OBJECTIVE, :count] = rng.integers(0, config.task_types)
    return batch
