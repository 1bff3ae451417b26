"""Rotary positions (arXiv:2104.09864), and keys and values that groups of queries share (arXiv:2305.13245).

A token has two positions: in the text, where part B of GLM has the position of its mask, and in the span, 0 in part A.
`model.block_positions` chooses the angles: of their sum (added), by which spans continue from their mask, as in
GLM-130B from [gMASK]; of the first alone, with a learned table of the second (table) or without it (none); or of each
for a half of the features (halves; ChatGLM-6B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, ID_FIELDS, POSITION_IDS
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.kernels.fused import has_kernels
from megatron_lite.transformer.kernels.qkv_heads import ExpandHeads, HeadTransform
from megatron_lite.transformer.norms import HeadNorms


@dataclass(frozen=True)
class Rotary:
    """Cosine and sine of the angles of all tokens, fp32 [T, 1, W / 2]: W features of each head are rotated."""

    cos: torch.Tensor
    sin: torch.Tensor

    @staticmethod
    def of(config: ModelConfig, ids: torch.Tensor, base: float | None = None) -> Rotary:
        """The angles of tokens by their position and their position in a span.

        Args: ids: int [len(ID_FIELDS), T]. base: None = the configuration's.
        """
        text, span = ids[ID_FIELDS.index(POSITION_IDS)], ids[ID_FIELDS.index(BLOCK_POSITION_IDS)]
        chosen = {"added": [text + span], "halves": [text, span]}.get(config.block_positions, [text])
        width = config.rotary_size // len(chosen)
        # Angles in fp32 whatever the model's type: bf16 cannot tell neighbouring positions beyond 256.
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=ids.device) / width
        frequencies = _scaled(1.0 / (base or config.rotary_base) ** exponents, config.rotary_scaling)
        angles = torch.cat([positions[:, None, None].float() * frequencies for positions in chosen], dim=-1)
        return Rotary(angles.cos(), angles.sin())

    def rotate(self, heads: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """[T, H, D] -> the same with the pairs (0, 1), (2, 3), ... of the first W features rotated, in fp32 or fp64.

        Args: count: of heads to rotate, the first ones; None = all.
        """
        return _Rotate.apply(heads, heads.shape[1] if count is None else count, self.cos, self.sin)


def _scaled(frequencies: torch.Tensor, scaling: tuple[float, ...]) -> torch.Tensor:
    """Frequencies as in Llama 3.1, fp32 [W / 2]: those with few turns in the original length, over `factor`."""
    if not scaling:
        return frequencies
    factor, low, high, length = scaling
    # Between the two limits the frequencies change smoothly from divided to undivided.
    undivided = ((length * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - undivided) * frequencies / factor + undivided * frequencies


class _Rotate(torch.autograd.Function):
    """Its gradient is rotated back: nothing but the angles is saved."""

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.count = count
        return _rotated(heads, count, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, ctx.count, cos, -sin), None, None, None


def _rotated(heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # Other heads, and features beyond W (partial rotary), are copied by this and stay as they are.
    out = heads.clone(memory_format=torch.contiguous_format)
    turned = out[:, :count, : 2 * cos.shape[-1]]
    wide = torch.promote_types(heads.dtype, torch.float32)  # fp64 stays: proofs of conversions compare in it
    # A pair as a complex number: on CPU a quarter of the time that its two halves take, with equal digits.
    pairs = torch.view_as_complex(turned.to(wide).contiguous().unflatten(-1, (-1, 2)))
    turned.copy_(torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2))
    return out


def prepare_qkv(
    heads: torch.Tensor,
    key_value_heads: int,
    rotary: Rotary | None,
    norms: HeadNorms | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Queries, keys and values as attention takes them: [T, H + 2 K, D] -> [T, 3 H, D].

    Queries and keys are normed and rotated, then queries multiplied by `factor`. Each of the K keys and values is
    repeated for the H / K queries of its group.
    """
    if norms is not None and norms.is_over_all:  # no kernel sees a whole token
        heads, norms = norms(heads, key_value_heads), None
    groups, rest = divmod(heads.shape[1] - 2 * key_value_heads, key_value_heads)
    assert rest == 0, "configuration checks that heads divide"
    if rotary is None and norms is None and groups == 1 and factor == 1.0:
        return heads
    if has_kernels(heads):
        transform = head_transform(rotary, norms, key_value_heads, factor)
        scales = transform.query_scale, transform.key_scale
        return ExpandHeads.apply(heads.contiguous(), *scales, transform).flatten(1, 2)
    if norms is not None:
        heads = norms(heads, key_value_heads)
    sizes = [groups * key_value_heads, key_value_heads]
    if rotary is not None:
        heads = rotary.rotate(heads, sum(sizes))
    if groups == 1 and factor == 1.0:
        return heads
    queries, keys, values = heads.split([*sizes, key_value_heads], dim=1)
    queries = queries if factor == 1.0 else queries * factor
    return torch.cat([queries, _repeated(keys, groups), _repeated(values, groups)], dim=1)


def head_transform(
    rotary: Rotary | None, norms: HeadNorms | None, key_value_heads: int, factor: float
) -> HeadTransform:
    """`prepare_qkv` as one kernel takes it."""
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    query, key = (None, None) if norms is None else norms.scales()
    return HeadTransform(
        cos, sin, query, key, 0.0 if norms is None else norms.epsilon, key_value_heads, factor
    )


def _repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    """[T, K, D] -> [T, K times, D]; a backward pass that sums in a fixed order."""
    # `expand`, whose gradient is a sum over an axis; a gather's would be atomic additions on a GPU.
    return heads if times == 1 else heads[:, :, None].expand(-1, -1, times, -1).flatten(1, 2)
