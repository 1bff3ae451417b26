"""ERNIE of Tsinghua in plain torch, from its published source: thunlp/ERNIE, knowledge_bert.modeling.

Modules have the source's names, so that a state dict is one of its BertForPreTraining. The width of the entities and
their heads, 100 and 4 there, are arguments. It has the methods of `entity_reference.Reference`, for one Example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) / torch.sqrt(variance + 1e-12)) + self.bias


def activation(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def group(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(modules)


class SelfAttention(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(len(x), self.heads, -1).permute(1, 0, 2)

        query, key, value = (split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + mask
        return (scores.softmax(-1) @ value).permute(1, 0, 2).reshape(x.shape)


class Layer(nn.Module):
    """A block of one kind: "sim", "mix" or "norm"."""

    def __init__(self, kind: str, size: int, heads: int, inner: int, width: int, entity_heads: int):
        super().__init__()
        self.kind = kind
        self.attention = nn.ModuleDict()
        self.attention["self"] = SelfAttention(size, heads)
        self.attention["output"] = group(dense=nn.Linear(size, size), LayerNorm=Norm(size))
        self.intermediate = group(dense=nn.Linear(size, inner))
        self.output = group(dense=nn.Linear(inner, size), LayerNorm=Norm(size))
        if kind == "norm":
            self.attention["self_ent"] = SelfAttention(width, entity_heads)
            self.attention["output_ent"] = group(dense=nn.Linear(width, width), LayerNorm=Norm(width))
        if kind != "sim":
            self.intermediate["dense_ent"] = nn.Linear(width, inner)
            self.output["dense_ent"], self.output["LayerNorm_ent"] = nn.Linear(inner, width), Norm(width)

    def forward(self, x: torch.Tensor, z: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        after = self.attention["output"]
        a = after["LayerNorm"](after["dense"](self.attention["self"](x, torch.zeros(()))) + x)
        inner = self.intermediate["dense"](a)
        e = z
        if self.kind == "norm":
            after = self.attention["output_ent"]
            e = after["LayerNorm"](after["dense"](self.attention["self_ent"](z, (1.0 - m) * -10000.0)) + z)
        if self.kind != "sim":
            e = e * m[:, None]
            inner = inner + self.intermediate["dense_ent"](e)
        h = activation(inner)
        x = self.output["LayerNorm"](self.output["dense"](h) + a)
        return x, z if self.kind == "sim" else self.output["LayerNorm_ent"](self.output["dense_ent"](h) + e)


class Transform(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(size, width), Norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(activation(self.dense(x)))


class ErnieThu(nn.Module):
    """Args: described: fields of ernie_config.json. width, entity_heads: of the entities."""

    def __init__(self, described: dict[str, Any], width: int, entity_heads: int):
        super().__init__()
        size, inner = described["hidden_size"], described["intermediate_size"]
        words = nn.Embedding(described["vocab_size"], size)
        kinds: Sequence[str] = described["layer_types"]
        kinds = [*kinds, *["sim"] * (described["num_hidden_layers"] - len(kinds))]
        layers = (
            Layer(kind, size, described["num_attention_heads"], inner, width, entity_heads) for kind in kinds
        )
        self.bert = group(
            embeddings=group(
                word_embeddings=words,
                position_embeddings=nn.Embedding(described["max_position_embeddings"], size),
                token_type_embeddings=nn.Embedding(described["type_vocab_size"], size),
                LayerNorm=Norm(size),
            ),
            encoder=group(layer=nn.ModuleList(layers)),
            pooler=group(dense=nn.Linear(size, size)),
        )
        predictions = group(
            transform=Transform(size, size), decoder=nn.Linear(size, described["vocab_size"], bias=False)
        )
        predictions["decoder"].weight = words.weight
        predictions.bias = nn.Parameter(torch.zeros(described["vocab_size"]))
        self.cls = group(
            predictions=predictions,
            predictions_ent=group(transform=Transform(size, width)),
            seq_relationship=nn.Linear(size, 2),
        )

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor,
        z: torch.Tensor,
        m: torch.Tensor,
    ) -> torch.Tensor:
        assert positions.tolist() == list(range(len(positions))), "the source counts positions itself"
        tables = self.bert["embeddings"]
        x = tables["word_embeddings"](tokens) + tables["position_embeddings"](positions)
        x = tables["LayerNorm"](x + tables["token_type_embeddings"](segments))
        for layer in self.bert["encoder"]["layer"]:
            x, z = layer(x, z, m)
        return x

    def words(self, x: torch.Tensor) -> torch.Tensor:
        head = self.cls["predictions"]
        return head["decoder"](head["transform"](x)) + head.bias

    def entities(self, x: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        return self.cls["predictions_ent"]["transform"](x) @ candidates.T

    def sentence(self, cls: torch.Tensor) -> torch.Tensor:
        return self.cls["seq_relationship"](torch.tanh(self.bert["pooler"]["dense"](cls)))
