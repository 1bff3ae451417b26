"""A micro-batch as the model reads it: prepared on the host, sent to the device in one copy.

A `Batch` holds sequences as the loader made them: each has its padding, and nothing depends on the model or its
parallel configuration. `prepare` makes a `MicroBatch` of it for one model on one device: it plans attention, puts the
tokens in the plan's order, finds the positions with a loss, derives the keys of dropout, and packs all arrays in one
buffer. It needs no device, so it can run ahead of the step in another thread. `MicroBatch.to` sends the buffer: one
asynchronous copy from pinned memory. On CPU the tensors are views of the buffer.

Shapes: T tokens; K, P and M positions with a loss, see loss_positions.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from data_utils.common.batch_fields import ID_FIELDS, OBJECTIVE, SEGMENT_IDS, TARGETS, TOKENS
from data_utils.common.seeds import derive_seed
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.cross_attention import constant_length, plan_encoder_decoder
from megatron_lite.transformer.attention_backends.interface import EncoderDecoderPlan, HostPlan
from megatron_lite.transformer.attention_backends.plan import kernel_of, plan_stack
from megatron_lite.transformer.batch import Batch, MakeInputs
from megatron_lite.transformer.kernels.dropout import Dropout, salts, token_keys
from megatron_lite.transformer.loss_positions import LossPositions, find_loss_positions
from megatron_lite.transformer.named_buffer import NamedBuffer
from megatron_lite.transformer.routed_tokens import RoutedTokens


@dataclass
class MicroBatch:
    """A micro-batch on the host or on a device: T tokens, padding included, in the order of the attention plan."""

    tokens: torch.Tensor  # int32 [T]
    ids: torch.Tensor  # int32 [len(ID_FIELDS), T]: for the other embeddings and for relative positions
    plan: Any  # of attention: on the host HostPlan or EncoderDecoderPlan, on a device what `on_device` made of it
    loss_positions: LossPositions[torch.Tensor]
    targets: torch.Tensor  # int32 [K + P + M]
    weights: torch.Tensor  # fp32 [K + P + M]: of the loss at each position
    extra_weights: torch.Tensor  # fp32: of losses of the model other than those of the tokens' own targets
    extra_inputs: Any  # what a task or a model reads besides the tokens, see `ExtraInputs`; None = nothing
    dropout: Dropout | None
    buffer: NamedBuffer  # all tensors above, and those of the plan
    make_extra_inputs: MakeInputs  # as in `ExtraInputs`
    # The loss by whose divisor each weight is scaled, int64. SpanBERT's boundaries are scaled with the masked token
    # that they predict once more, though `LossPositions.objectives` reports them apart.
    weight_objectives: np.ndarray
    extra_weight_objectives: np.ndarray
    sequence: torch.Tensor | None  # int32 [T], of each token, -1 for padding; None: no router counts them
    sequences: int
    loss_factor: float = 1.0  # multiplies its loss sum into its share of the step's loss
    step_share: float = 1.0  # 1 over the number of micro-batches of the step on all ranks
    loss_scale: float = (
        1.0  # of the step in fp16, which losses that the engine does not see multiply themselves
    )

    @staticmethod
    def from_batch(batch: Batch, device: torch.device, config: ModelConfig, **options: Any) -> MicroBatch:
        """`prepare` with its options and `to` in one."""
        return prepare(batch, device, config, **options).to(device)

    @property
    def routed(self) -> RoutedTokens | None:
        """What the routers of experts read of it."""
        if self.sequence is None:
            return None
        share = self.step_share / self.sequences
        return RoutedTokens.of(self.sequence, self.sequences, share, self.loss_scale)

    def scale_weights(self, scales: np.ndarray) -> None:
        """Multiply each loss's weights, on the host. Args: scales: fp32 [losses]."""
        # The weights are views of the buffer, so that scaling them before `to` costs no copy.
        self.weights *= torch.from_numpy(scales[self.weight_objectives])
        self.extra_weights *= torch.from_numpy(scales[self.extra_weight_objectives])

    def to(self, device: torch.device, into: torch.Tensor | None = None) -> MicroBatch:
        """The micro-batch on a device. On a GPU the copy is asynchronous: nothing waits for it.

        Args: into: int32, memory on the device to which the buffer is copied; None = new memory.
        """
        buffer = self.buffer.to(device, into)
        tensors = buffer.tensors()
        plan = self.plan.on_device(list(_section(tensors, "attention").values()), device)
        fields = _tensor_fields(tensors, self.dropout, self.make_extra_inputs)
        return replace(self, buffer=buffer, plan=plan, **fields)


def _tensor_fields(
    tensors: dict[str, torch.Tensor], dropout: Dropout | None, make_extra_inputs: MakeInputs
) -> dict[str, Any]:
    """The fields of a MicroBatch that are tensors of its buffer, by the names that `prepare` gives them there."""
    if dropout is not None:
        dropout = replace(dropout, keys=tensors["dropout.keys"], salts=tensors["dropout.salts"])
    return {
        **{name: tensors[name] for name in ("tokens", "ids", "weights", "extra_weights", "targets")},
        "loss_positions": LossPositions(**_section(tensors, "loss_positions")),
        "dropout": dropout,
        "sequence": tensors.get("sequence"),
        "extra_inputs": make_extra_inputs(_section(tensors, "extra_inputs")),
    }


def _section(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The tensors named `NAME.key`, by key, in their order."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def prepare(
    batch: Batch,
    device: torch.device,
    config: ModelConfig,
    *,
    decoder_config: ModelConfig | None = None,
    dropout_seed: int | None = None,
    kernel: str = "auto",
    multiple: int = 1,
    few_counts: bool = False,
    has_one_length: bool = False,
    has_graphs: bool = False,
    tensor_parallel_rank: int = 0,
    tensor_parallel_size: int = 1,
) -> MicroBatch:
    """The micro-batch of a batch, on the host.

    Args:
        device: where it will be sent; decides the kernel.
        decoder_config: of the second stack of a model of two, which reads the tokens with ord > 0.
        dropout_seed: of the step; None = no dropout.
        multiple: of the number of tokens T, see `plan_attention`; of encoder and decoder each.
        few_counts: of positions with a loss, see `find_loss_positions`.
        has_one_length: T is the same for all batches of a shape. has_graphs: the plan has fixed shapes, if it can.
    """
    plan, decoder_start = _plan_attention(
        batch, device, config, decoder_config, kernel, multiple, has_one_length, has_graphs
    )
    fields = _in_plan_order(batch, plan.order, config)
    # Positions with a loss are counted from the decoder's first token; configuration checks that no loss is the
    # encoder's.
    loss_positions, predicted = find_loss_positions(
        fields.weights[decoder_start:],
        fields.objectives[decoder_start:],
        decoder_config or config,
        few_counts=few_counts,
    )
    extra = batch.extra_inputs(plan.order, decoder_start, predicted, few_counts, config)
    targets, weights, objectives = _predictions(fields, predicted, decoder_start)
    if extra.predictions is not None:
        loss_positions, targets = extra.predictions
    dropout, dropout_arrays = None, {}
    if dropout_seed is not None:
        first_head = config.num_attention_heads // tensor_parallel_size * tensor_parallel_rank
        layers = _dropout_layers(config, decoder_config)
        dropout = _make_dropout(batch, plan.order, dropout_seed, layers, tensor_parallel_rank, first_head)
        dropout_arrays = {"dropout.keys": dropout.keys.numpy(), "dropout.salts": dropout.salts.numpy()}
    arrays = {
        # The plan first, then what has T elements: CUDA graphs repeat addresses, and so these are equal for all batches
        # whose plans have one shape.
        **{f"attention.{i}": array for i, array in enumerate(plan.arrays())},
        "tokens": fields.tokens,
        "ids": fields.ids,
        **dropout_arrays,
        **({} if config.experts is None else {"sequence": _sequences(plan.order, batch)}),
        "weights": weights,
        "extra_weights": extra.weights,
        "targets": targets,
        **{f"loss_positions.{name}": array for name, array in vars(loss_positions).items()},
        **{f"extra_inputs.{name}": array for name, array in extra.arrays.items()},
    }
    buffer = NamedBuffer.pack(arrays, pin=device.type == "cuda")
    return MicroBatch(
        plan=plan,
        buffer=buffer,
        make_extra_inputs=extra.make,
        weight_objectives=objectives,
        extra_weight_objectives=extra.weight_objectives,
        sequences=len(batch.fields),
        **_tensor_fields(buffer.tensors(), dropout, extra.make),
    )


def _plan_attention(
    batch: Batch,
    device: torch.device,
    config: ModelConfig,
    decoder_config: ModelConfig | None,
    kernel: str,
    multiple: int,
    has_one_length: bool,
    has_graphs: bool,
) -> tuple[HostPlan | EncoderDecoderPlan, int]:
    """The attention plan, and the number of encoder tokens, which precede the decoder's; 0 without a decoder."""
    slots = batch.fields[:, TOKENS].size  # tokens of the batch, padding included
    if config.decoder_layers or decoder_config is not None:
        length = constant_length(slots, multiple) if has_one_length else None
        kernel = kernel_of(config, device) if kernel == "auto" else kernel
        plan = plan_encoder_decoder(
            batch.layout, device, kernel, multiple, length, has_cross=decoder_config is None
        )
        return plan, plan.lengths[0]
    multiple = slots if has_one_length else multiple
    return plan_stack(batch.layout, device, config, kernel, multiple, has_graphs), 0


def _sequences(order: np.ndarray, batch: Batch) -> np.ndarray:
    """The sequence of each token, int32 [T]; -1 for padding."""
    return np.where(order < 0, -1, order // batch.fields.shape[2]).astype(np.int32)


class _Fields(NamedTuple):
    """The fields of a batch in the order of the attention plan; padding has zeros, and so no loss."""

    tokens: np.ndarray  # int32 [T]
    ids: np.ndarray  # int32 [len(ID_FIELDS), T]
    targets: np.ndarray  # int32 [T]
    weights: np.ndarray  # fp32 [T]
    objectives: np.ndarray  # int32 [T]: the loss of each token


def _in_plan_order(batch: Batch, order: np.ndarray, config: ModelConfig) -> _Fields:
    fields = batch.fields.swapaxes(0, 1)[[TOKENS, *ID_FIELDS, TARGETS]]
    fields = fields.reshape(len(fields), -1)[:, order]
    weights = batch.weights.reshape(-1)[order]
    # Index -1 has read the last token there; zeros make padding independent of it, and give it no loss.
    is_padding = order < 0
    fields[:, is_padding] = 0
    weights[is_padding] = 0.0
    ids = fields[1:-1]
    objectives = ids[ID_FIELDS.index(OBJECTIVE)].copy()
    if config.task_rows:
        # The model reads the loss's row of its task embedding there. A loss without a row has -1 and takes row 0: this
        # run has no tokens of it.
        ids[ID_FIELDS.index(OBJECTIVE)] = np.maximum(config.task_rows, 0)[objectives]
    if config.segments == 1:
        ids[ID_FIELDS.index(SEGMENT_IDS)] = 0
    return _Fields(fields[0], ids, fields[-1], weights, objectives)


def _predictions(
    fields: _Fields, predicted: np.ndarray, decoder_start: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Targets, weights and losses of the predicted positions. Args: predicted: from the decoder's first token on."""
    predicts = predicted >= 0  # False for padding up to one of few counts
    predicted = np.where(predicts, predicted + decoder_start, -1)
    targets = np.where(predicts, fields.targets[predicted], 0)
    weights = np.where(predicts, fields.weights[predicted], np.float32(0.0))
    return targets, weights, fields.objectives[predicted]


def _dropout_layers(config: ModelConfig, decoder_config: ModelConfig | None) -> int:
    """Number of layers that drop out differently; cross-attention has its own."""
    layers = config.total_layers + config.decoder_layers + config.mtp_layers
    return layers if decoder_config is None else max(layers, decoder_config.num_layers)


def _make_dropout(
    batch: Batch, order: np.ndarray, seed: int, layers: int, tensor_parallel_rank: int, first_head: int
) -> Dropout:
    """Args: seed: of the step. first_head: of this rank."""
    # Keyed by sample and position in it, not by the index in the batch: equal in every parallel configuration.
    keys = token_keys(seed, batch.samples, batch.fields.shape[2]).reshape(-1)[order]
    # CUDA's fused attention draws by the position in its own grid, so its seed must tell ranks and micro-batches apart.
    kernel_seed = derive_seed(seed, "attention", int(batch.samples[0]), tensor_parallel_rank) >> 1
    step = derive_seed(seed, "distances") >> 33
    return Dropout(torch.from_numpy(keys), torch.from_numpy(salts(layers)), kernel_seed, first_head, step)
