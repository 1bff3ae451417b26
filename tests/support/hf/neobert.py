"""NeoBERT in plain torch, from its published source (chandar-lab/NeoBERT, src/neobert/model/model.py and rotary.py).

Transformers has no class of it. Rotary positions are products of complex numbers here, as there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput


class NeoBERTConfig(PretrainedConfig):
    model_type = "neobert"

    def __init__(self, **sizes: Any):
        self.rows = sizes.pop("max_length", 1024)  # a class of transformers may not have it as an attribute
        super().__init__(**sizes)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        return values | {"max_length": values.pop("rows")}


class _Block(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.heads, size = config.num_attention_heads, config.hidden_size
        inner = int(2 * config.intermediate_size / 3)
        inner = 8 * ((inner + 7) // 8)
        self.qkv, self.wo = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.ffn = nn.ModuleDict(
            {"w12": nn.Linear(size, 2 * inner, bias=False), "w3": nn.Linear(inner, size, bias=False)}
        )
        self.attention_norm, self.ffn_norm = (
            nn.RMSNorm(size, config.norm_eps),
            nn.RMSNorm(size, config.norm_eps),
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, turns: torch.Tensor) -> torch.Tensor:
        rows, length, size = x.shape
        parts = self.qkv(self.attention_norm(x)).view(rows, length, self.heads, -1).chunk(3, dim=-1)
        queries, keys = (self._turned(part, turns) for part in parts[:2])
        heads = (part.transpose(1, 2) for part in (queries, keys, parts[2]))
        attended = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.wo(attended.transpose(1, 2).reshape(rows, length, size))
        gate, inner = self.ffn["w12"](self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.ffn["w3"](F.silu(gate) * inner)

    @staticmethod
    def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns[..., None, :]).flatten(-2)


class _Body(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer_encoder = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.layer_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.width = config.hidden_size // config.num_attention_heads

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        waves = 1.0 / 10000.0 ** (torch.arange(0, self.width, 2).float() / self.width)
        angles = positions[..., None].float() * waves
        turns = torch.polar(torch.ones_like(angles), angles)
        x = self.encoder(ids)
        for block in self.transformer_encoder:
            x = block(x, mask, turns)
        return self.layer_norm(x)


class NeoBERTLMHead(PreTrainedModel):
    """Args of forward: attention_mask: [B, S] of keys, or bool [B, 1, S, S] of pairs, as packed rows need."""

    config_class = NeoBERTConfig

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.model, self.decoder = _Body(config), nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> MaskedLMOutput:
        mask = attention_mask
        if mask is not None:
            mask = (mask[:, None, None] if mask.dim() == 2 else mask).bool()
        return MaskedLMOutput(logits=self.decoder(self.model(input_ids, mask, position_ids)))
