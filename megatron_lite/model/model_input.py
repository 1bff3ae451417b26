"""A micro-batch as the model takes it: prepared on the host, sent to the device in one copy.

`prepare` chooses the attention plan, puts the tokens in its order, finds the rows with loss, and lays all of it side by
side in one buffer. It needs no device, so it can run ahead of the step in another thread. `ModelInput.to` sends the
buffer: one asynchronous copy from pinned memory. On CPU the tensors are views of the buffer.

Shapes: T tokens; K loss rows that predict their token, P of them once more from the borders of their span, M loss rows
of CLS that predict a class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import ID_FIELDS, OBJECTIVE, SEGMENT_IDS, TARGETS, TOKENS
from data_utils.common.losses import CLASS_LEVEL, MASKED_SPANS, SPAN_BOUNDARY
from data_utils.common.random_streams import derive_seed
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention_backends.cross_attention import constant_length, plan_encoder_decoder
from megatron_lite.model.attention_backends.interface import BatchPlan, EncoderDecoderPlan, HostPlan
from megatron_lite.model.attention_backends.layout import Layout
from megatron_lite.model.attention_backends.plan import plan_attention
from megatron_lite.model.attention_backends.varlen import VarlenPlan
from megatron_lite.model.attention_backends.window import plan_layers
from megatron_lite.model.batch import Batch
from megatron_lite.model.kernels.dropout import Dropout, salts, token_keys
from megatron_lite.model.kernels.fused import kernels_are_wanted

_FIXED = 10  # arrays of a ModelInput, after those of its plan, whose place CUDA graphs know; those of its parts follow


@dataclass(frozen=True)
class LossRows:
    """Loss rows by the head that predicts them, and what they predict: indices into [T].

    On the host int64 arrays, on the device int32 tensors.
    """

    tokens: Any  # [K]
    borders: Any  # [P, 3]: the token before a span, the token after it, place in it from 0
    sentences: Any  # [M]
    objectives: Any  # [K + P + M]: which loss each belongs to


@dataclass
class ModelInput:
    """A micro-batch, ready for the model, on the host or on a device: T tokens, padding included, in the plan's order.

    Everything is in one buffer of int32, so that it reaches a device in one copy.
    """

    tokens: torch.Tensor  # int32 [T]
    ids: torch.Tensor  # int32 [len(ID_FIELDS), T]: for the other embeddings and for relative positions
    plan: Any  # on the host HostPlan or EncoderDecoderPlan, on a device what `on_device` made of it
    loss_rows: LossRows  # where the model has a decoder, of its rows
    targets: torch.Tensor  # int32 [K + P + M], see LossRows
    weights: torch.Tensor  # fp32 [K + P + M], and then those of `Batch.more_weights`
    dropout: Dropout | None
    buffer: torch.Tensor  # int32, on the host: the arrays of all above, of the parts and of the plan
    shapes: Sequence[tuple[int, ...]]  # of the arrays in the buffer
    weight_losses: np.ndarray  # the loss to whose total each weight belongs
    # Inputs of the model beside the tokens, such as the `Parts` of a task; on the host HostParts.
    parts: Any = None
    loss_factor: float = 1.0  # multiplies its loss sum into its share of the step's loss

    @staticmethod
    def from_batch(batch: Batch, device: torch.device, config: ModelConfig, **options: Any) -> ModelInput:
        """`prepare` with its options and `to` in one."""
        return prepare(batch, device, config, **options).to(device)

    def scale_weights(self, scales: np.ndarray) -> None:
        """Multiply each loss's weights, on the host. Args: scales: fp32 [losses]."""
        # The weights are a view of the buffer, so that scaling them before `to` costs no copy.
        self.weights *= torch.from_numpy(scales[self.weight_losses])

    def to(self, device: torch.device, into: torch.Tensor | None = None) -> ModelInput:
        """The same on a device, `into` a buffer there. On a GPU the copy is asynchronous: nothing waits for it."""
        if into is None:
            sent = self.buffer.to(device, non_blocking=True)
        else:
            sent = into[: len(self.buffer)].copy_(self.buffer, non_blocking=True)
        arrays = _split(sent, self.shapes)
        first = len(arrays) - _FIXED - (0 if self.parts is None else self.parts.ARRAYS)  # after the plan's
        plan = self.plan.on_device(arrays[:first], device)
        parts = None if self.parts is None else self.parts.on_device(arrays[first + _FIXED :])
        return replace(self, plan=plan, parts=parts, **_fields(arrays[first:], self.dropout))


def _fields(arrays: list[torch.Tensor], dropout: Dropout | None) -> dict[str, Any]:
    """Fields of a ModelInput that are arrays of its buffer."""
    tokens, ids, keys, place_salts, weights, targets = arrays[:6]
    return {
        "tokens": tokens,
        "ids": ids,
        "loss_rows": LossRows(*arrays[6:_FIXED]),
        "targets": targets,
        "weights": weights.view(torch.float32),
        "dropout": None if dropout is None else replace(dropout, keys=keys, salts=place_salts),
    }


def _split(buffer: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The arrays that lie side by side in a buffer, as views of it."""
    flat = buffer.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


def dense_reason(config: ModelConfig, device: torch.device) -> str | None:
    """Why a model's attention is one call over all pairs of tokens of a row; None where it is not."""
    if config.relative == "none" or kernels_are_wanted() or device.type != "cuda":
        return None
    return (
        f"model.relative is {config.relative}: on GPUs attention computes all pairs of tokens of a row, and keeps a "
        "number for each, since training.kernels is torch; those of fused keep none."
    )


def kernel_of(config: ModelConfig, device: torch.device) -> str:
    """The kind of plan that a model needs; "auto" = that of each batch."""
    if dense_reason(config, device) is not None:
        return "dense"
    kinds = {"none": "auto", "buckets": "blocks", "disentangled": "tables"}
    return kinds.get(config.relative, "query tables") if device.type == "cuda" else "auto"


def plan_stack(
    layout: Layout,
    device: torch.device,
    config: ModelConfig,
    kernel: str = "auto",
    multiple: int = 1,
    has_graphs: bool = False,
) -> BatchPlan:
    """`plan_attention` for the layers of a model. Args: has_graphs: see `prepare`."""
    if not config.attention_window:
        plan = plan_attention(layout, device, kernel, multiple)
        if has_graphs and isinstance(plan, VarlenPlan):
            return plan.with_fixed_shapes(layout.shape[1])
        return plan
    return plan_layers(layout, device, kernel, multiple, config.attention_window, config.global_every)


def _with_task_rows(field: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The number of each token's loss. The field then holds the loss's row of the task embedding."""
    if not config.task_rows:
        return field
    losses = field.copy()
    # A loss without a row has -1 and takes row 0: this run has no tokens of it.
    field[:] = np.maximum(config.task_rows, 0)[losses]
    return losses


def find_loss_rows(
    weights: np.ndarray, objectives: np.ndarray, config: ModelConfig, *, few_counts: bool = False
) -> tuple[LossRows, np.ndarray]:
    """The loss rows of a batch, and where their targets and weights are: int64 [K + P + M], indices into [T].

    Args:
        weights: fp32 [T].
        objectives: int [T].
        few_counts: K, P and M are filled up to one of few counts, see `few_count`. Rows that fill have the index -1:
            their weight is 0. They compute on the first token.
    """
    rows = np.flatnonzero(weights)
    empty = rows[:0]
    sentences, borders, spans = empty, np.stack([empty] * 3, axis=1), empty
    if config.sentence_classes:
        is_sentence = np.isin(objectives[rows], CLASS_LEVEL)
        sentences, rows = rows[is_sentence], rows[~is_sentence]
    if config.span_boundary_places:
        predicted = (weights != 0) & (objectives == MASKED_SPANS.number)
        borders, spans = _span_borders(predicted, config.span_boundary_places)
    if few_counts:
        rows, spans, sentences = (
            np.pad(x, (0, few_count(len(x)) - len(x)), constant_values=-1) for x in (rows, spans, sentences)
        )
        borders = np.pad(borders, ((0, len(spans) - len(borders)), (0, 0)))
    losses = (objectives[rows], np.full_like(spans, SPAN_BOUNDARY.number), objectives[sentences])
    found = LossRows(rows.clip(0), borders, sentences.clip(0), np.concatenate(losses))
    return found, np.concatenate([rows, spans, sentences])


def few_count(count: int) -> int:
    """The next of the few counts: up to 256 the multiples of 16, above that 16 for each power of two."""
    # 16 counts in each power of two: at most 1/16 of the rows fill, and oneDNN builds few kernels (docs/log.md).
    step = max(16, 1 << count.bit_length() >> 5)
    return -(-count // step) * step


def _span_borders(predicted: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """For each True in [T]: its borders, int64 [P, 3] as in LossRows, and its own index [P].

    On both sides of every span is a token that is not predicted (data_utils/objectives/spanbert.py). Tokens at places
    beyond the table are left out.
    """
    index = np.arange(len(predicted))
    before = np.maximum.accumulate(np.where(predicted, -1, index))
    after = np.minimum.accumulate(np.where(predicted, len(predicted), index)[::-1])[::-1]
    rows = np.flatnonzero(predicted)
    place = rows - before[rows] - 1
    rows, place = rows[place < places], place[place < places]
    return np.stack([before[rows], after[rows], place], axis=1), rows


def prepare(
    batch: Batch,
    device: torch.device,
    config: ModelConfig,
    *,
    of_decoder: ModelConfig | None = None,
    dropout_seed: int | None = None,
    kernel: str = "auto",
    multiple: int = 1,
    few_counts: bool = False,
    has_one_length: bool = False,
    has_graphs: bool = False,
    tensor_parallel_rank: int = 0,
    tensor_parallel_size: int = 1,
) -> ModelInput:
    """The model's input for a batch, on the host.

    Args:
        device: where it will be sent; decides the kernel.
        of_decoder: configuration of the second stack, which reads the tokens with ord > 0.
        dropout_seed: of the step; None = no dropout.
        multiple: of the number of tokens T, see `plan_attention`; of both parts where there is a decoder.
        few_counts: of rows with loss, see `find_loss_rows`.
        has_one_length: T is the same for all batches of a shape. has_graphs: the plan has fixed shapes, if it can.
    """
    places, first = batch.fields[:, TOKENS].size, 0
    if kernel == "auto":
        kernel = kernel_of(config, device)
    plan: HostPlan | EncoderDecoderPlan
    if config.decoder_layers or of_decoder is not None:
        length = constant_length(places, multiple) if has_one_length else None
        plan = plan_encoder_decoder(
            batch.layout, device, kernel, multiple, length, has_cross=of_decoder is None
        )
        first = plan.lengths[0]  # configuration checks that no loss is the encoder's
    else:
        multiple = places if has_one_length else multiple
        plan = plan_stack(batch.layout, device, config, kernel, multiple, has_graphs)
    is_padding = plan.order < 0
    fields = batch.fields.swapaxes(0, 1)[[TOKENS, *ID_FIELDS, TARGETS]]
    fields = fields.reshape(len(fields), -1)[:, plan.order]
    # Index -1 has read the last token there; zeros make padding independent of it.
    fields[:, is_padding] = 0
    if config.segments == 1:
        fields[1 + ID_FIELDS.index(SEGMENT_IDS)] = 0
    weights = batch.weights.reshape(-1)[plan.order]
    # Else padding would have the last token's loss.
    weights[is_padding] = 0.0
    objectives = _with_task_rows(fields[1 + ID_FIELDS.index(OBJECTIVE)], config)
    loss_rows, labelled = find_loss_rows(
        weights[first:], objectives[first:], of_decoder or config, few_counts=few_counts
    )
    parts = batch.host_parts(plan.order, first, labelled, few_counts, config)
    labelled = np.where(labelled < 0, -1, labelled + first)
    targets = np.where(labelled < 0, 0, fields[-1][labelled])
    more, of_more = batch.more_weights(plan.order)
    if parts is not None:
        loss_rows, targets = parts.loss_rows() or (loss_rows, targets)
    keys, place_salts, dropout = fields[0, :0], fields[0, :0], None
    if dropout_seed is not None:
        # Dropout is keyed by sample and place in it, not by the index in the batch: equal in every parallel
        # configuration.
        keys = token_keys(dropout_seed, batch.samples, batch.fields.shape[2]).reshape(-1)[plan.order]
        layers = config.total_layers + config.decoder_layers  # cross-attention has its own
        if of_decoder is not None:
            layers = max(layers, of_decoder.num_layers)
        place_salts = salts(layers)
        # CUDA's fused attention draws by the place in its own grid, so its seed must tell ranks and micro-batches
        # apart.
        kernel_seed = derive_seed(dropout_seed, "attention", int(batch.samples[0]), tensor_parallel_rank) >> 1
        first_head = config.num_attention_heads // tensor_parallel_size * tensor_parallel_rank
        step = derive_seed(dropout_seed, "distances") >> 33
        dropout = Dropout(torch.empty(0), torch.empty(0), kernel_seed, first_head, step)
    arrays = [
        *(*plan.arrays(), fields[0], fields[1:-1], keys, place_salts),
        np.r_[np.where(labelled < 0, np.float32(0.0), weights[labelled]), more].view(np.int32),
        *(targets, *(getattr(loss_rows, field.name) for field in dataclasses.fields(loss_rows))),
        *([] if parts is None else parts.arrays()),
    ]
    # All int32, floats by their bits: one type, one buffer, one copy to the device.
    joined = np.concatenate([array.reshape(-1).astype(np.int32, copy=False) for array in arrays])
    buffer = torch.from_numpy(joined)
    if device.type == "cuda":
        buffer = buffer.pin_memory()
    shapes, losses = [array.shape for array in arrays], np.r_[objectives[labelled], of_more]
    laid_out = _fields(_split(buffer, shapes)[len(plan.arrays()) :], dropout)
    return ModelInput(plan=plan, parts=parts, buffer=buffer, shapes=shapes, weight_losses=losses, **laid_out)
