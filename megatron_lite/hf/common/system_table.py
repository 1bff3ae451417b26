"""Types of the tables that map a published system to our model: hf/published/systems.py lists the tables.

PublishedSystem   one table: its rules, its fields and the properties of its classes
TensorRule        one line for tensors: our module -> theirs, joined (Q|K|V) and transformed
WeightTransform   what is done to a tensor in each direction, such as TRANSPOSED or ROTATE_HALF
ConfigField       one line for config.json: their field -> our option
FormerField       the same field under the name that other versions of transformers read
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_lite.config.model import ModelConfig


@dataclass(frozen=True)
class WeightTransform:
    """Converts a tensor in both directions. Both functions take the tensor and our model's configuration."""

    to_ours: Callable[[torch.Tensor, ModelConfig], torch.Tensor]
    to_theirs: Callable[[torch.Tensor, ModelConfig], torch.Tensor]
    applies_to_bias: bool = False  # True where it permutes output features


def _split_heads(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return x.unflatten(1, (config.num_attention_heads, -1))


def _reorder_rotary(x: torch.Tensor, config: ModelConfig, shape: tuple[int, int]) -> torch.Tensor:
    """Reorder the rotary features of each head.

    Args: x: [heads * head size, ...]. shape: (2, -1) for features in two halves, (-1, 2) for features in pairs.
    """
    rotary, rest = x.unflatten(0, (-1, config.head_size)).tensor_split([config.rotary_size], dim=1)
    rotary = rotary.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
    return torch.cat([rotary, rest], dim=1).flatten(0, 1)


# Shapes of their tensors: D hidden size, H heads, d head size. Ours are [out, in].
SAME = WeightTransform(lambda x, _: x, lambda x, _: x)
# [in, out]
TRANSPOSED = WeightTransform(lambda x, _: x.T, lambda x, _: x.T)
# [D in, H, d]
INTO_HEADS = WeightTransform(lambda x, _: x.flatten(1).T, lambda x, config: _split_heads(x.T, config))
# [D out, H, d]
OUT_OF_HEADS = WeightTransform(lambda x, _: x.flatten(1), _split_heads)
# [n, H, d]
HEADS_SECOND = WeightTransform(lambda x, _: x.transpose(0, 1), lambda x, _: x.transpose(0, 1))
# [1, 1, D]
FLATTENED = WeightTransform(lambda x, _: x.flatten(), lambda x, _: x.view(1, 1, -1))
# Their rotary embedding pairs feature j with j + d/2 ("rotate_half"), ours pairs 2j with 2j + 1.
ROTATE_HALF = WeightTransform(
    lambda x, config: _reorder_rotary(x, config, (2, -1)),
    lambda x, config: _reorder_rotary(x, config, (-1, 2)),
    applies_to_bias=True,
)


def _reorder_rotary_qkv(
    x: torch.Tensor, config: ModelConfig, rotate: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Reorder the rotary features of Q|K|V in one tensor, [3 D, ...]. Values are not rotated."""
    queries, keys, values = x.chunk(3)
    return torch.cat([rotate(queries, config), rotate(keys, config), values])


ROTATE_HALF_QKV = WeightTransform(
    lambda x, config: _reorder_rotary_qkv(x, config, ROTATE_HALF.to_ours),
    lambda x, config: _reorder_rotary_qkv(x, config, ROTATE_HALF.to_theirs),
)


@dataclass(frozen=True)
class TensorRule:
    """One line of the table: one of our modules, and their modules that hold the same parameters.

    "{i}" in a name is the number of a layer. Decoder layers have "{d}" in our name: encoder layers are counted first.
    "{e}" is the number of an expert.

    Args:
        theirs: several modules are joined along the output features, as Q|K|V.
        transform: of all of `theirs`, or one for each.
        ffn: the rule is for models with this `model.ffn`; None: for all.
        is_tensor: the names are of tensors, not of modules with a weight and a bias.
        shares: returns the relative sizes of `theirs` in ours; None: equal sizes.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: WeightTransform | tuple[WeightTransform, ...] = SAME
    ffn: str | None = None
    is_tensor: bool = False
    shares: Callable[[ModelConfig], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class ConfigField:
    """A field of config.json that is an option of our model. Several options may have one field.

    Args:
        theirs: "rope_parameters.rope_theta" is a field within another.
        names: their value -> ours, where they differ.
        numbers: their fields with the numbers of our option, a tuple, where `names` maps their value to None.
        null_as: a field with the same name on both sides; where theirs has its value, ours is null.
        counts_positions: theirs is the number of rows of the table, ours is the largest position id.
        reads: their value and configuration -> ours; None for a value that our model cannot have.
        writes: our value and options -> theirs.
    """

    theirs: str
    ours: str
    names: Mapping[Any, Any] | None = None
    numbers: tuple[str, ...] = ()
    null_as: str | None = None
    counts_positions: bool = False
    reads: Callable[[Any, Any], Any] | None = None
    writes: Callable[[Any, ModelConfig], Any] | None = None


VERSION_4 = "to 4.57"


@dataclass(frozen=True)
class FormerField:
    """A field of config.json that other versions of transformers than the installed one read for an option of ours.

    An export writes it in addition to the current fields. An import refuses a file in which the two contradict.

    Args:
        versions: of transformers, that read it.
        writes: our value -> theirs.
        is_another_name: whether a current field means the same; if not, an import does not compare the two.
    """

    theirs: str
    ours: str
    versions: str
    writes: Callable[[Any], Any] = lambda value: value
    is_another_name: bool = True


@dataclass(frozen=True)
class PublishedSystem:
    """The table of one published system: how its tensors and its config.json map to ours."""

    model_type: str  # as in config.json
    prefix: str  # of the base model's parameters; files of the base model alone may lack it
    rules: tuple[TensorRule, ...]
    fields: tuple[ConfigField, ...]
    pretraining_class: Callable[[ModelConfig], str]  # the class of transformers that has all heads of a model
    classes: Mapping[str, str]  # architecture in config.json -> `model.system`
    required: Mapping[str, Any]  # fields of config.json, each with the only value that our model can express

    # Tensors
    ties: Mapping[str, str] = field(default_factory=dict)  # their second name of a tensor -> the first
    may_untie: bool = False  # whether `ties` only hold where config.json has tie_word_embeddings
    # Second names in `ties` that an export also writes: versions of transformers up to 4.49 do not tie them.
    written_twice: tuple[str, ...] = ()
    # Tensors of the layer of further tokens that are copies: name within the layer -> the tensor. {} = no such layer.
    further_copies: Mapping[str, str] = field(default_factory=dict)
    # Tensors [n, vocabulary] that are always zero: name -> n.
    zeros: Mapping[str, int] = field(default_factory=dict)
    # Options of heads that a file may lack -> the parameter whose shape decides the option (`option_from_shape`).
    optional: Mapping[str, str] = field(default_factory=dict)
    # The table of files whose head has the names that `legacy: true` means.
    legacy: PublishedSystem | None = None
    is_legacy: bool = False

    # Positions
    skipped_positions: int = 0  # first rows of their position tables, which no token uses
    skips_pad: bool = False  # whether these are the rows up to the id of padding, see `padded_with`
    counts_skipped: bool = True  # whether config.json counts those rows
    padding_side: str = "right"  # where texts are padded for the class; a prompt is always padded on the left
    counts_real_tokens: bool = True  # whether `generate` counts positions without the padding before a prompt

    # Generation and special tokens
    is_causal: bool = False
    is_encoder_decoder: bool = False
    # Field of config.json that names a token -> its role in a tokenizer.
    roles: Mapping[str, str] = field(
        default_factory=lambda: {"pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "cls"}
    )
    unused_ids: tuple[str, ...] = ()  # fields that name a token and that the class does not use
    forces_ends: bool = False  # whether config.json names the forced first and last token of a completion
    begin: str = "eos"  # causal.begin of an import

    # config.json
    former: tuple[FormerField, ...] = ()
    untrained: tuple[str, ...] = ()  # fields that only change training, and are not supported here

    def padded_with(self, pad_token_id: int | None) -> PublishedSystem:
        """The table of a model whose config.json has this pad_token_id."""
        if not self.skips_pad or pad_token_id is None:
            return self
        return replace(self, skipped_positions=pad_token_id + 1)


ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def prefixed(rules: list[TensorRule], ours: str, theirs: str) -> tuple[TensorRule, ...]:
    """The rules with prefixes. Args: ours, theirs: prefix of the names on each side, such as "layers.{i}."."""
    return tuple(
        replace(rule, ours=f"{ours}{rule.ours}", theirs=tuple(f"{theirs}{name}" for name in rule.theirs))
        for rule in rules
    )
