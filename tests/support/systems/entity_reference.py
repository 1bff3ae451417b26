"""A model with entities in dense matrices, written from the specification: losses and scores of one Example."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data_utils.common.batch_fields import (
    BLOCK_POSITION_IDS,
    DOC,
    OBJECTIVE,
    POSITION_IDS,
    SEGMENT_IDS,
    TARGETS,
    TOKENS,
)
from data_utils.common.losses import ENTITIES, MASKED, NEXT_SENTENCE_LOSS
from megatron_lite.config.tree import Config

EPSILON = 1e-12


class Reference(nn.Module):
    """One Example, all its tokens: x [T, D], z [T, E], m [T]. Weights by our names, whole."""

    def __init__(self, config: Config, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.w = weights
        self.heads, self.entity_heads = (
            config.model.num_attention_heads,
            config.objective_choices[0].section.heads,
        )
        self.kinds = config.objective_choices[0].section.layer_types_for(config.model.num_layers)

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, x, name):
        x = x - x.mean(-1, keepdim=True)
        return (
            x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * self.w[f"{name}.weight"]
            + self.w[f"{name}.bias"]
        )

    @staticmethod
    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def attend(self, x, name, heads, bias):
        q, k, v = (
            y.view(len(x), heads, -1).transpose(0, 1)
            for y in self.linear(x, f"{name}.query_key_value").chunk(3, -1)
        )
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1), f"{name}.dense")

    def block(self, layer, x, z, m):
        at, kind = f"layers.{layer}", self.kinds[layer]
        a = self.norm(
            x + self.attend(x, f"{at}.attention", self.heads, 0.0), f"{at}.post_attention_layernorm"
        )
        inner = self.linear(a, f"{at}.mlp.dense_h_to_4h")
        if kind != "sim":
            e = z
            if kind == "norm":
                e = self.attend(z, f"{at}.entity_attention", self.entity_heads, -10000.0 * (1 - m))
                e = self.norm(z + e, f"{at}.attended_entity_layernorm")
            e = e * m[:, None]
            inner = inner + e @ self.w[f"{at}.entity_h_to_4h.weight"].T + self.w[f"{at}.entity_bias"]
        h = self.gelu(inner)
        x = self.norm(a + self.linear(h, f"{at}.mlp.dense_4h_to_h"), f"{at}.output_layernorm")
        if kind != "sim":
            z = self.norm(e + self.linear(h, f"{at}.entity_4h_to_h"), f"{at}.entity_layernorm")
        return x, z

    def forward(self, tokens, positions, segments, z, m):
        tables = (("word", tokens), ("position", positions), ("segment", segments))
        x = sum(self.w[f"embedding.{name}_embeddings.weight"][ids] for name, ids in tables)
        x = self.norm(x, "embedding.layernorm")
        for layer in range(len(self.kinds)):
            x, z = self.block(layer, x, z, m)
        return x

    def words(self, x):
        t = self.norm(self.gelu(self.linear(x, "heads.projection.dense")), "heads.projection.layernorm")
        return t @ self.w["embedding.word_embeddings.weight"].T + self.w["heads.bias"]

    def entities(self, x, candidates):
        return (
            self.norm(self.gelu(self.linear(x, "entity_head.dense")), "entity_head.layernorm") @ candidates.T
        )

    def sentence(self, cls):
        return self.linear(torch.tanh(self.linear(cls, "heads.sentence.dense")), "heads.sentence.classifier")


def reference_losses(reference, batch, vectors):
    """Losses of all Examples by name, and scores of the entities, all in the order of rows and documents."""
    found = {MASKED: [], NEXT_SENTENCE_LOSS: [], ENTITIES: []}
    scores = []
    given, (of_all, _, begins), mentioned = batch.read_candidates, batch.candidates, batch.mentioned.tolist()
    example = -1
    for row, fields in enumerate(batch.fields):
        for doc in range(fields[DOC].max() + 1):
            example += 1
            at = np.flatnonzero(fields[DOC] == doc)
            own = fields[:, at]
            true = own[BLOCK_POSITION_IDS]
            candidates = sorted(set(true[true > 0].tolist()))
            assert candidates == of_all[begins[example] : begins[example + 1]].tolist()
            read = np.zeros(len(at), int)
            for place, token in enumerate(at.tolist()):
                if true[place]:
                    which = given[mentioned.index(row * fields.shape[1] + token)]
                    read[place] = of_all[which] if which >= 0 else 0
            m = torch.tensor(read > 0).float()
            m[0] = 1.0
            ids = (
                torch.from_numpy(own[field].astype(np.int64)) for field in (TOKENS, POSITION_IDS, SEGMENT_IDS)
            )
            x = reference(*ids, torch.from_numpy(vectors.of(read)), m)
            table = torch.from_numpy(vectors.of(np.array([0, *candidates])))
            for place in np.flatnonzero(batch.weights[row, at]):
                target = torch.tensor(int(own[TARGETS, place]))
                if own[OBJECTIVE, place] == NEXT_SENTENCE_LOSS.number:
                    found[NEXT_SENTENCE_LOSS].append(F.cross_entropy(reference.sentence(x[place]), target))
                else:
                    found[MASKED].append(F.cross_entropy(reference.words(x[place]), target))
            for place in np.flatnonzero(true):
                scores.append(reference.entities(x[place], table))
                target = torch.tensor(1 + candidates.index(true[place]))
                found[ENTITIES].append(F.cross_entropy(scores[-1], target))
    return found, scores
