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
from megatron_lite.transformer.attention_backends.cpu_kernels import attend_all
from megatron_lite.transformer.attention_backends.interface import EncoderDecoderPlan, Packed, ScoreBias
from megatron_lite.transformer.encoder_decoder import DecoderContext
from megatron_lite.transformer.forward_context import Condition, ForwardContext, make_context
from megatron_lite.transformer.kernels.dropout import AttentionDropout
from megatron_lite.transformer.transformer import Transformer


class CachedPlan:
    """Attention of new tokens to all tokens so far. `expect` announces the new tokens before each forward pass."""

    def __init__(self, model: ModelConfig, probe: AttentionProbe | None = None):
        self._model, self._probe = model, probe
        self.cached: dict[int, torch.Tensor] = {}  # layer -> keys and values [R, K, 2, H, D]
        self.length = 0  # number of cached tokens
        self._is_token: torch.Tensor | None = None  # bool [R, K]; None: no padding
        self._positions: torch.Tensor | None = None  # int64 [R, K]
        self._visible: torch.Tensor | None = None  # of this pass, bool [R or 1, 1, N, K]
        self._all_positions = torch.empty(0)  # of this pass, int64 [R, K]
        self._num_new = 0  # N of this pass

    def expect(
        self,
        positions: torch.Tensor,
        *,
        is_token: torch.Tensor | None = None,
        is_causal: bool = False,
        num_cached: int | None = None,
    ) -> None:
        """
        Args:
            positions: int64 [R, N].
            is_token: bool [R, N], False for padding; None: no padding.
            is_causal: new tokens see only earlier new tokens; otherwise all new tokens.
            num_cached: number of leading new tokens to cache for later passes; None: all.
        """
        (sequences, new), past = positions.shape, self.length
        self._num_new = new
        all_tokens = None
        if is_token is not None or self._is_token is not None:
            true = torch.ones(sequences, past + new, dtype=torch.bool, device=positions.device)
            old = true[:, :past] if self._is_token is None else self._is_token
            all_tokens = torch.cat([old, true[:, past:] if is_token is None else is_token], dim=1)
        self._visible = None if all_tokens is None else all_tokens[:, None, None, :]
        if is_causal and new > 1:
            # [N, K]: new token i sees all earlier tokens and new ones up to itself.
            order = torch.ones(new, past + new, dtype=torch.bool, device=positions.device).tril(past)
            self._visible = order[None, None] if self._visible is None else self._visible & order
        self._all_positions = (
            positions if self._positions is None else torch.cat([self._positions, positions], dim=1)
        )
        self.length = past + (new if num_cached is None else num_cached)
        self._positions = self._all_positions[:, : self.length]
        self._is_token = None if all_tokens is None else all_tokens[:, : self.length]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [R K]: of all tokens of this pass."""
        return self._all_positions.flatten()

    def query_key_pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries [R, N] and keys [R, K] of this pass, int64 indices into `positions`."""
        sequences, keys = self._all_positions.shape
        indices = torch.arange(sequences * keys, device=device).view(sequences, keys)
        return [(indices[:, keys - self._num_new :], indices)]

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        """[R, N, 3, H, D] -> [R, N, H, D]; there is no dropout."""
        q, key_value = inputs[0].select(2, 0), inputs[0][:, :, 1:]
        if layer in self.cached:
            key_value = torch.cat([self.cached[layer], key_value], dim=1)
        # Tokens beyond `num_cached` are seen in this pass only: UniLM's appended [MASK] must not stay.
        self.cached[layer] = key_value[:, : self.length]
        mask = self._visible
        if self._model.is_local(layer):
            positions = self._all_positions
            distance = (
                positions[:, None, positions.shape[1] - self._num_new :, None] - positions[:, None, None]
            )
            # By position ids, not by indices in the cache: all tokens of a blank have the position of their mask.
            near = distance.abs() <= self._model.attention_window
            mask = near if mask is None else mask & near
        if bias is not None:
            scores = bias(0, *self.query_key_pairs(q.device)[0]).float()
            mask = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        k, v = key_value.unbind(2)
        if self._probe is not None:
            self._probe.record(layer, q, k, mask)
        return attend_all(q, k, v, mask)

    def select(self, indices: Sequence[int]) -> None:
        """Keep these sequences of the batch; an index may be repeated."""
        if self.cached:
            chosen = torch.tensor(indices, device=self._all_positions.device)
            self.cached = {layer: x[chosen] for layer, x in self.cached.items()}
            self._is_token = None if self._is_token is None else self._is_token[chosen]
            self._positions = None if self._positions is None else self._positions[chosen]

    def copy(self) -> CachedPlan:
        """A copy that continues independently. Tensors are shared, since none is changed in place."""
        other = copy.copy(self)
        other.cached = dict(self.cached)
        return other


class CachedCross:
    """Cross-attention to an encoder's output, whose keys and values are computed once."""

    def __init__(self, is_token: torch.Tensor | None, probe: AttentionProbe | None = None):
        self.is_token, self._probe = is_token, probe  # is_token: bool [R, K]; None: all
        self._cached: dict[int, torch.Tensor] = {}  # layer -> [R, K, 2, H, D]
        self.num_sequences = 0

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        """[R N, 1, H, D] -> [R N, H, D]; keys and values [R K, 2, H, D] are read at a layer's first call only."""
        q, key_value = inputs
        if layer not in self._cached:
            self._cached[layer] = key_value.view(self.num_sequences, -1, *key_value.shape[1:])
        k, v = self._cached[layer].unbind(2)
        mask = None if self.is_token is None else self.is_token[:, None, None, :]
        q = q.view(self.num_sequences, -1, *q.shape[2:])
        if self._probe is not None:
            self._probe.record(layer, q, k, mask)
        return attend_all(q, k, v, mask).flatten(0, 1)

    @property
    def is_filled(self) -> bool:
        return bool(self._cached)

    def select(self, indices: Sequence[int]) -> None:
        """As `CachedPlan.select`."""
        self.num_sequences = len(indices)
        if self._cached:
            chosen = torch.tensor(indices, device=next(iter(self._cached.values())).device)
            self._cached = {layer: x[chosen] for layer, x in self._cached.items()}
            self.is_token = None if self.is_token is None else self.is_token[chosen]


def pad_batch(
    lists: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token lists as int64 [R, N], padded with 0, and bool [R, N], False for padding; None without padding."""
    longest = max(map(len, lists))
    tokens = torch.tensor([[*each, *[0] * (longest - len(each))] for each in lists], device=device)
    lengths = torch.tensor([len(each) for each in lists], device=device)
    is_token = torch.arange(longest, device=device) < lengths[:, None]
    return tokens, None if min(map(len, lists)) == longest else is_token


def id_fields(
    positions: torch.Tensor, block_positions: torch.Tensor | int = 0, segment: int = 0
) -> torch.Tensor:
    """The ids of new tokens, int64 [len(ID_FIELDS), R, N]. Args: positions: int64 [R, N]."""
    ids = positions.new_zeros(len(ID_FIELDS), *positions.shape)
    ids[0], ids[1], ids[2] = positions, block_positions, segment
    return ids


def run_cached_stack(
    model: Transformer,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    plan: CachedPlan,
    condition: Condition | None = None,
) -> torch.Tensor:
    """Hidden states [R, N, D] of new tokens in the single stack, or the encoder, before its last norm.

    Args: tokens: int64 [R, N]. ids: from `id_fields`. plan: that expects them. condition: on the R x N tokens.
    """
    context = make_context(model.config, tokens.shape, ids.flatten(1), plan, None, model.parallel, condition)
    hidden = model.embedding(tokens.flatten(), ids.flatten(1), context)
    return model.run_blocks(hidden, context, plan.positions).view(*tokens.shape, -1)


def run_cached_encoder(
    model: Transformer, tokens: torch.Tensor, ids: torch.Tensor, plan: CachedPlan
) -> torch.Tensor:
    """The encoder's output for the decoder, after its last norm: [R, N, D]. Args: as for `run_cached_stack`."""
    hidden = run_cached_stack(model, tokens, ids, plan)
    return hidden if model.encoder_layernorm is None else model.encoder_layernorm(hidden)


def run_cached_decoder(
    model: Transformer,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    plan: CachedPlan,
    encoded: torch.Tensor,
    cross: CachedCross,
) -> torch.Tensor:
    """Hidden states [R, N, D] of new tokens in the decoder, before its last norm; encoded: encoder output."""
    cross.num_sequences = len(tokens)
    encoder_output = encoded.flatten(0, 1)
    if cross.is_filled:
        encoder_output = encoder_output[:1]  # its keys and values are cached; no layer reads it again
    parts = EncoderDecoderPlan(None, plan, cross, (0, tokens.numel()), ids[0].flatten().cpu().numpy())
    context = DecoderContext(tokens.shape, plan, None, None, cross=cross, both=None)
    whole = ForwardContext((tokens.numel(),), parts, None, None)
    hidden = model.embedding(tokens.flatten(), ids.flatten(1), whole, model.decoder_embedding)
    return model.run_decoder(hidden, encoder_output, context, plan.positions).view(*tokens.shape, -1)
