"""ELECTRA without text: configurations, batches, and the pair of transformers' classes with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from support.data.recipes import collate, make, windows
from support.hf.own_models import OwnModelCase

from data_utils.common.batch_fields import DOC, TARGETS, TOKENS
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSSES
from megatron_lite.config.tree import Config
from megatron_lite.models.electra.batch import ElectraBatch
from megatron_lite.models.electra.config import generator_of
from megatron_lite.transformer.build import build_model

VOCAB, SEED = 131, 11
SIZES = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "embedding_size": 20,
    "max_position": 63,
}
TREE: dict[str, Any] = {
    "model": {**SIZES, "system": "electra", "vocab_size": VOCAB},
    "data": {"sequence_length": 60},
    "objectives": {"electra": 1},
    "electra": {"generator_size": 0.5, "generator_heads": 2},
    "training": {
        "steps": 6, "precision": "fp32", "seed": 7, "loss_normalization": "per_objective",
        "loss_weights": {"replaced": 50.0},
    },
}  # fmt: skip
# DeBERTa-v3's: disentangled attention in both stacks, and words whose gradients are apart.
DETACHED: dict[str, dict[str, Any]] = {
    "model": {
        "system": "deberta_v3", "embedding_size": None, "position_buckets": 8, "head_transform": False,
        "head_bias": False,
    },
    "electra": {"embeddings": "detached", "generator_layers": 1},
}  # fmt: skip


def electra_config(**changes: Any) -> Config:
    return build(Config, merge(TREE, changes))


def rows_of(count: int, first: int = 0) -> np.ndarray:
    """int32 [count, fields, 64]: rows of the objective, several documents in each."""
    made = make("electra", 60, row_length=64)
    rows = collate(made, windows(count, 60, seed=3 + first), first)
    rows[:, [TOKENS, TARGETS]] %= VOCAB
    return rows


def batch_of(count: int, first: int = 0) -> ElectraBatch:
    return make_task_batch(rows_of(count, first), np.arange(first, first + count))


def make_task_batch(fields: np.ndarray, samples: np.ndarray) -> ElectraBatch:
    return ElectraBatch(fields, samples, SEED)


@dataclass(frozen=True)
class ElectraCase(OwnModelCase):
    # Gradients of the tokens nearly cancel where the discriminator answers a half, so they follow the weights closely:
    # in fp64, weights moved by 5e-7 of their largest element move gradients by 1e-5. After two steps of Adam weights
    # have moved by more: a third step would compare that. With equal weights gradients differ by 1.2e-6.
    steps: ClassVar[int] = 2

    def config(self) -> Config:
        more = DETACHED if self.variant == "detached" else {}
        return electra_config(**merge(merge(self.changes, {"electra": {"generator_heads": 4}}), more))

    batch = staticmethod(make_task_batch)


CASES = [  # the first in the default run
    ElectraCase(2, 1, 2, 2, accumulation=4, dropout=0.1, variant="detached"),
    ElectraCase(2, 1, 1, 2, accumulation=4, dropout=0.1, attention_dropout=0.1),
    ElectraCase(1, 1, 2, 3, recompute="full", dropout=0.1),
    ElectraCase(1, 1, 2, 2, accumulation=4, dropout=0.1, attention_dropout=0.1),
    ElectraCase(2, 1, 2, 1, True, recompute="selective", dropout=0.1),
    ElectraCase(4, 1, 1, 3, attention_dropout=0.1),
    ElectraCase(1, 1, 2, 3, recompute="full", dropout=0.1, variant="detached"),
    ElectraCase(2, 1, 1, 1, True, "selective", dropout=0.1, attention_dropout=0.1, variant="detached"),
]


def their_pair(config: Config, std: float = 0.15) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The classes of generator and discriminator with random weights and common embeddings, without dropout."""
    import transformers  # which parity.py need not load

    torch.manual_seed(0)
    made = []
    stacks = {"ForMaskedLM": generator_of(config), "ForPreTraining": config.model}
    for name, stack in stacks.items():
        described = transformers.ElectraConfig(
            vocab_size=stack.vocab_size, hidden_size=stack.hidden_size, num_hidden_layers=stack.num_layers,
            embedding_size=stack.embedding_size or stack.hidden_size, num_attention_heads=stack.num_attention_heads,
            intermediate_size=stack.inner_size, max_position_embeddings=stack.max_position + 1,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = getattr(transformers, f"Electra{name}")(described).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * std)
        made.append(model)
    generator, discriminator = made
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"):
        setattr(generator.electra.embeddings, name, getattr(discriminator.electra.embeddings, name))
    generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
    return generator, discriminator


def their_names(config: Config) -> dict[str, list[tuple[int, str]]]:
    """Our parameter -> its parts: 0 for the generator's class or 1 for the other, and the name there."""
    from megatron_lite.hf.published.systems import ELECTRA
    from megatron_lite.hf.published.tensor_map import tensor_mappings
    from megatron_lite.transformer.build import model_spec

    found: dict[str, list[tuple[int, str]]] = {}
    stacks = (("generator.", generator_of(config)), ("encoder.", config.model))
    for number, (prefix, stack) in enumerate(stacks):
        shapes = {
            name.removeprefix(prefix): shape
            for name, shape in model_spec(config).shapes(config).items()
            if name.startswith((prefix, "replaced."))
        }
        for theirs, part in tensor_mappings(ELECTRA, shapes, stack).items():
            ours = part.ours if part.ours.startswith("replaced.") else f"{prefix}{part.ours}"
            if number or not ours.startswith("replaced."):
                found.setdefault(ours, []).append((number, theirs))
    return found


def ours_like(config: Config, pair: tuple[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """Our model with the weights of their classes."""
    model = build_model(config, len(LOSSES))
    states = [dict(each.named_parameters(remove_duplicate=False)) for each in pair]
    names = their_names(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.cat([states[number][theirs] for number, theirs in names[name]])
            parameter.zero_()
            parameter[: len(whole)] = whole
    return model


def real_tokens(fields: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(fields[:, DOC] >= 0)
