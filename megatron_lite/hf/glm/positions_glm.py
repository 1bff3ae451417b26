"""Positions and block positions of GLM: embedding tables, or rotary (arXiv:2104.09864). Part of an export's code.

Shapes: B batch, S new tokens, K all tokens (cached and new), H heads, D hidden size, R rotated features of a head.
"""

import torch
from torch import nn

from .configuration_glm import GLMConfig

CosSin = tuple[torch.Tensor, torch.Tensor]  # of the rotation angles, fp32 [B, 1, S, R / 2]


class GLMEmbedding(nn.Module):
    """Word embeddings, plus those of positions and block positions where these have a table, then dropout."""

    def __init__(self, config: GLMConfig):
        super().__init__()

        def table(is_used: bool) -> nn.Embedding | None:
            return nn.Embedding(config.max_position + 1, config.hidden_size) if is_used else None

        has_tables = config.positions == "learned_blocks"
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = table(has_tables)
        self.block_position_embeddings = table(has_tables or config.block_positions == "table")
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(
        self, embeds: torch.Tensor, position_ids: torch.Tensor, block_position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Args: embeds: word embeddings [B, S, D]; position_ids, block_position_ids: int [B, S]."""
        if self.position_embeddings is not None:
            embeds = embeds + self.position_embeddings(position_ids)
        if self.block_position_embeddings is not None:
            embeds = embeds + self.block_position_embeddings(block_position_ids)
        return self.dropout(embeds)


def window_mask(
    config: GLMConfig,
    visible: torch.Tensor | None,
    positions: torch.Tensor,
    key_positions: torch.Tensor | None,
) -> torch.Tensor | None:
    """The `visible` keys that local layers attend to: bool [B, 1, S, K]; None = all.

    Args: visible: bool [B, 1, S, K]; None = all. positions, key_positions: position ids, int [B, S] and [B, K].
    """
    if not config.attention_window:
        return visible
    if key_positions is None:
        raise ValueError("local layers need key_position_ids: the position ids of cached and new tokens.")
    distances = (positions[:, None, :, None] - key_positions[:, None, None]).abs()
    near = distances <= config.attention_window
    return near if visible is None else near & visible


def rotary_cos_sin(
    config: GLMConfig, position_ids: torch.Tensor, block_position_ids: torch.Tensor, base: float
) -> CosSin | None:
    """Cosine and sine of the angles by which queries and keys are rotated; None where positions have tables.

    The angles follow from the sum of both position ids (block_positions: added), from position_ids alone (table, none),
    or each rotates half of the features (halves). Args: position_ids, block_position_ids: int [B, S]. base: theta.
    """
    if config.positions != "rotary":
        return None
    rotating = {
        "added": [position_ids + block_position_ids],
        "halves": [position_ids, block_position_ids],
    }.get(config.block_positions, [position_ids])
    head_size = config.hidden_size // config.num_attention_heads
    width = int(config.rotary_share * head_size) // len(rotating)
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=position_ids.device) / width
    frequencies = 1.0 / base**exponents
    # fp32: half precision cannot hold the angles of long texts.
    angles = torch.cat([ids[:, None, :, None].float() * frequencies for ids in rotating], dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(heads: torch.Tensor, cos_sin: CosSin | None) -> torch.Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the first R features. Args: heads: [B, H, S, head size]."""
    if cos_sin is None:
        return heads
    cos, sin = cos_sin
    rotated_size = 2 * cos.shape[-1]
    even, odd = heads[..., :rotated_size].unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([pairs.flatten(-2).to(heads.dtype), heads[..., rotated_size:]], dim=-1)
