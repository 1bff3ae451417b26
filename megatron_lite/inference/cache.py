"""Key-value cache for sequences that grow token by token; padding is masked.

Shapes: R sequences, N new tokens of each, K tokens with the earlier ones, H heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from data_utils.common.batch_fields import ID_FIELDS
from megatron_lite.config.model import ModelConfig
from megatron_lite.inference.attention_probe import AttentionProbe
from megatron_lite.model.attention_backends.cpu_kernels import attend_all
from megatron_lite.model.attention_backends.interface import EncoderDecoderPlan, Packed, ScoreBias
from megatron_lite.model.encoder_decoder import DecoderContext
from megatron_lite.model.forward_context import Condition, ForwardContext, make_context
from megatron_lite.model.kernels.dropout import AttentionDropout
from megatron_lite.model.transformer import GLM


class CachedPlan:
    """Attention of new tokens to all tokens so far. Call `expect` with the new tokens before each forward pass."""

    def __init__(self, model: ModelConfig, probe: AttentionProbe | None = None):
        self._model, self._watch = model, probe
        self.kept: dict[int, torch.Tensor] = {}  # layer -> keys and values [R, K, 2, H, D]
        self.length = 0  # cached tokens
        self._real: torch.Tensor | None = None  # bool [R, K]; None: no padding
        self._positions: torch.Tensor | None = None  # int64 [R, K]
        self._seen: torch.Tensor | None = None  # of this pass, bool [R or 1, 1, N, K]
        self._all_positions = torch.empty(0)  # of this pass, int64 [R, K]
        self._new = 0  # N of this pass

    def expect(
        self,
        positions: torch.Tensor,
        *,
        real: torch.Tensor | None = None,
        is_causal: bool = False,
        kept: int | None = None,
    ) -> None:
        """
        Args:
            positions: int64 [R, N].
            real: bool [R, N], False for padding; None: no padding.
            is_causal: new tokens see only earlier new tokens; otherwise all new tokens.
            kept: number of leading new tokens to cache for later passes; None: all.
        """
        (rows, new), past = positions.shape, self.length
        self._new = new
        whole = None
        if real is not None or self._real is not None:
            every = torch.ones(rows, past + new, dtype=torch.bool, device=positions.device)
            old = every[:, :past] if self._real is None else self._real
            whole = torch.cat([old, every[:, past:] if real is None else real], dim=1)
        self._seen = None if whole is None else whole[:, None, None, :]
        if is_causal and new > 1:
            # [N, K]: new token i sees all earlier tokens and new ones up to itself.
            order = torch.ones(new, past + new, dtype=torch.bool, device=positions.device).tril(past)
            self._seen = order[None, None] if self._seen is None else self._seen & order
        self._all_positions = (
            positions if self._positions is None else torch.cat([self._positions, positions], dim=1)
        )
        self.length = past + (new if kept is None else kept)
        self._positions = self._all_positions[:, : self.length]
        self._real = None if whole is None else whole[:, : self.length]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [R K]: of all tokens of this pass."""
        return self._all_positions.flatten()

    def query_key_pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries [R, N] and keys [R, K] of this pass, int64 indices into `positions`."""
        rows, keys = self._all_positions.shape
        places = torch.arange(rows * keys, device=device).view(rows, keys)
        return [(places[:, keys - self._new :], places)]

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        """[R, N, 3, H, D] -> [R, N, H, D]; there is no dropout."""
        q, key_value = inputs[0].select(2, 0), inputs[0][:, :, 1:]
        if layer in self.kept:
            key_value = torch.cat([self.kept[layer], key_value], dim=1)
        # Tokens beyond `kept` are seen in this pass only: UniLM's appended [MASK] must not stay.
        self.kept[layer] = key_value[:, : self.length]
        mask = self._seen
        if self._model.is_local(layer):
            places = self._all_positions
            distance = places[:, None, places.shape[1] - self._new :, None] - places[:, None, None]
            # By position ids, not places in the cache: tokens of a blank all have the position of their mask.
            near = distance.abs() <= self._model.attention_window
            mask = near if mask is None else mask & near
        if bias is not None:
            added = bias(0, *self.query_key_pairs(q.device)[0]).float()
            mask = added if mask is None else added.masked_fill(~mask, float("-inf"))
        k, v = key_value.unbind(2)
        if self._watch is not None:
            self._watch.look(layer, q, k, mask)
        return attend_all(q, k, v, mask)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences of the batch; an index may be repeated."""
        if self.kept:
            chosen = torch.tensor(rows, device=self._all_positions.device)
            self.kept = {layer: x[chosen] for layer, x in self.kept.items()}
            self._real = None if self._real is None else self._real[chosen]
            self._positions = None if self._positions is None else self._positions[chosen]

    def copy(self) -> CachedPlan:
        """A copy that continues independently. Tensors are shared, since none is changed in place."""
        other = copy.copy(self)
        other.kept = dict(self.kept)
        return other


class CachedCross:
    """Cross-attention to an encoder's output, whose keys and values are computed once."""

    def __init__(self, real: torch.Tensor | None, probe: AttentionProbe | None = None):
        self.real, self._watch = real, probe  # real: bool [R, K]; None: all
        self._kept: dict[int, torch.Tensor] = {}  # layer -> [R, K, 2, H, D]
        self.rows = 0

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        """[R N, 1, H, D] -> [R N, H, D]; keys and values [R K, 2, H, D] are read at a layer's first call only."""
        q, key_value = inputs
        if layer not in self._kept:
            self._kept[layer] = key_value.view(self.rows, -1, *key_value.shape[1:])
        k, v = self._kept[layer].unbind(2)
        mask = None if self.real is None else self.real[:, None, None, :]
        q = q.view(self.rows, -1, *q.shape[2:])
        if self._watch is not None:
            self._watch.look(layer, q, k, mask)
        return attend_all(q, k, v, mask).flatten(0, 1)

    @property
    def is_filled(self) -> bool:
        return bool(self._kept)

    def select(self, rows: Sequence[int]) -> None:
        """As `CachedPlan.select`."""
        self.rows = len(rows)
        if self._kept:
            chosen = torch.tensor(rows, device=next(iter(self._kept.values())).device)
            self._kept = {layer: x[chosen] for layer, x in self._kept.items()}
            self.real = None if self.real is None else self.real[chosen]


def pad_batch(
    lists: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token lists as int64 [R, N], padded with 0, and bool [R, N], False for padding; None if there is none."""
    longest = max(map(len, lists))
    filled = torch.tensor([[*each, *[0] * (longest - len(each))] for each in lists], device=device)
    lengths = torch.tensor([len(each) for each in lists], device=device)
    real = torch.arange(longest, device=device) < lengths[:, None]
    return filled, None if min(map(len, lists)) == longest else real


def id_fields(
    positions: torch.Tensor, block_positions: torch.Tensor | int = 0, segment: int = 0
) -> torch.Tensor:
    """int64 [len(ID_FIELDS), R, N]"""
    ids = positions.new_zeros(len(ID_FIELDS), *positions.shape)
    ids[0], ids[1], ids[2] = positions, block_positions, segment
    return ids


def run_cached_stack(
    model: GLM, tokens: torch.Tensor, ids: torch.Tensor, plan: CachedPlan, condition: Condition | None = None
) -> torch.Tensor:
    """Hidden states [R, N, D] of new tokens in the single stack, or the encoder, before its last norm.

    Args: tokens: int64 [R, N]. ids: from `id_fields`. plan: that expects them. condition: on the R x N tokens.
    """
    context = make_context(model.config, tokens.shape, ids.flatten(1), plan, None, model.parallel, condition)
    hidden = model.embedding(tokens.flatten(), ids.flatten(1), context)
    return model.run_blocks(hidden, context, plan.positions).view(*tokens.shape, -1)


def run_cached_encoder(model: GLM, tokens: torch.Tensor, ids: torch.Tensor, plan: CachedPlan) -> torch.Tensor:
    """The encoder's output for the decoder, after its last norm: [R, N, D]. Args: as for `run_cached_stack`."""
    hidden = run_cached_stack(model, tokens, ids, plan)
    return hidden if model.encoder_layernorm is None else model.encoder_layernorm(hidden)


def run_cached_decoder(
    model: GLM,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    plan: CachedPlan,
    encoded: torch.Tensor,
    cross: CachedCross,
) -> torch.Tensor:
    """Hidden states [R, N, D] of new tokens in the decoder, before its last norm; encoded: encoder output."""
    cross.rows = len(tokens)
    rows = encoded.flatten(0, 1)
    if cross.is_filled:
        rows = rows[:1]  # its keys and values are cached; no layer reads it again
    parts = EncoderDecoderPlan(None, plan, cross, (0, tokens.numel()), ids[0].flatten().cpu().numpy())
    context = DecoderContext(tokens.shape, plan, None, None, cross=cross, both=None)
    whole = ForwardContext((tokens.numel(),), parts, None, None)
    hidden = model.embedding(tokens.flatten(), ids.flatten(1), whole, model.decoder_embedding)
    return model.run_decoder(hidden, rows, context, plan.positions).view(*tokens.shape, -1)
