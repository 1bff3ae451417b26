"""Both positions of a token of GLM: in tables, or rotary (arXiv:2104.09864). Copied beside exported weights.

Shapes: B batch, S new tokens, H heads, D hidden size, W features of a head that are turned.
"""

import torch
from torch import nn

from .configuration_glm import GLMConfig

Turns = tuple[torch.Tensor, torch.Tensor]  # cosine and sine of angles, fp32 [B, 1, S, W / 2]


class GLMEmbedding(nn.Module):
    """Embeddings of words, and of positions and block positions where they have a table, then dropout."""

    def __init__(self, config: GLMConfig):
        super().__init__()

        def table(is_there: bool) -> nn.Embedding | None:
            return nn.Embedding(config.max_position + 1, config.hidden_size) if is_there else None

        has_tables = config.positions == "learned_blocks"
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = table(has_tables)
        self.block_position_embeddings = table(has_tables or config.block_positions == "table")
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(
        self, words: torch.Tensor, position_ids: torch.Tensor, block_position_ids: torch.Tensor
    ) -> torch.Tensor:
        """words: embedded tokens [B, S, D]."""
        if self.position_embeddings is not None:
            words = words + self.position_embeddings(position_ids)
        if self.block_position_embeddings is not None:
            words = words + self.block_position_embeddings(block_position_ids)
        return self.dropout(words)


def near_keys(
    config: GLMConfig, visible: torch.Tensor | None, positions: torch.Tensor, of_keys: torch.Tensor | None
) -> torch.Tensor | None:
    """The `visible` keys that local layers see: bool [B, 1, S, K].

    Args: visible: bool [B, 1, S, K]; None = all. positions, of_keys: position ids, int [B, S] and [B, K].
    """
    if not config.attention_window:
        return visible
    if of_keys is None:
        raise ValueError("local layers need key_position_ids: the position ids of cached and new tokens.")
    near = (positions[:, None, :, None] - of_keys[:, None, None]).abs() <= config.attention_window
    return near if visible is None else near & visible


def turns_of(config: GLMConfig, text: torch.Tensor, span: torch.Tensor, base: float) -> Turns | None:
    """How rotary positions turn queries and keys; None where positions have tables.

    By the sum of both positions (block_positions: added), by the position alone (table, none), or half of the
    features by each (halves). Args: text, span: both position ids, int [B, S]. base: of the wavelengths.
    """
    if config.positions != "rotary":
        return None
    turning = {"added": [text + span], "halves": [text, span]}.get(config.block_positions, [text])
    width = int(config.rotary_share * (config.hidden_size // config.num_attention_heads)) // len(turning)
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=text.device) / width
    waves = 1.0 / base**exponents
    angles = torch.cat([positions[:, None, :, None].float() * waves for positions in turning], dim=-1)
    return angles.cos(), angles.sin()


def turned(heads: torch.Tensor, turns: Turns | None) -> torch.Tensor:
    """[B, H, S, size of a head] -> the same with the pairs (0, 1), (2, 3), ... of the first W features turned."""
    if turns is None:
        return heads
    cos, sin = turns
    width = 2 * cos.shape[-1]
    even, odd = heads[..., :width].unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([pairs.flatten(-2).to(heads.dtype), heads[..., width:]], dim=-1)
