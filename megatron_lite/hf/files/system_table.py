"""Types of the tables that map a published system to our model: hf/published/systems.py holds the tables.

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
    applies_to_bias: bool = False  # whether it permutes output features, which biases follow


def _split_heads(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return x.unflatten(1, (config.num_attention_heads, -1))


def _reorder_rotary(x: torch.Tensor, config: ModelConfig, shape: tuple[int, int]) -> torch.Tensor:
    """Reorder the rotary features of each head.

    Args: x: [n d, ...]. shape: in which the features of `x` are read before they are transposed, (2, -1) or (-1, 2).
    """
    rotary, rest = x.unflatten(0, (-1, config.head_size)).tensor_split([config.rotary_size], dim=1)
    rotary = rotary.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
    return torch.cat([rotary, rest], dim=1).flatten(0, 1)


SAME = WeightTransform(lambda x, _: x, lambda x, _: x)
TRANSPOSED = WeightTransform(lambda x, _: x.T, lambda x, _: x.T)  # [in, out]
INTO_HEADS = WeightTransform(
    lambda x, _: x.flatten(1).T, lambda x, config: _split_heads(x.T, config)
)  # [D, H, d]
OUT_OF_HEADS = WeightTransform(lambda x, _: x.flatten(1), _split_heads)  # [D, H, d]
HEADS_SECOND = WeightTransform(lambda x, _: x.transpose(0, 1), lambda x, _: x.transpose(0, 1))  # [n, H, d]
FLATTENED = WeightTransform(lambda x, _: x.flatten(), lambda x, _: x.view(1, 1, -1))  # [1, 1, D]
# Their rotary positions rotate feature j with j + d / 2 ("rotate_half"), ours 2j with 2j + 1.
ROTATE_HALF = WeightTransform(
    lambda x, config: _reorder_rotary(x, config, (2, -1)),
    lambda x, config: _reorder_rotary(x, config, (-1, 2)),
    applies_to_bias=True,
)


def _reorder_rotary_qkv(
    x: torch.Tensor, config: ModelConfig, rotate: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Q|K|V in one tensor, [3 D, ...]: the order of rotary features changes in Q and K alone."""
    queries, keys, values = x.chunk(3)
    return torch.cat([rotate(queries, config), rotate(keys, config), values])


ROTATE_HALF_QKV = WeightTransform(
    lambda x, config: _reorder_rotary_qkv(x, config, ROTATE_HALF.to_ours),
    lambda x, config: _reorder_rotary_qkv(x, config, ROTATE_HALF.to_theirs),
)


@dataclass(frozen=True)
class TensorRule:
    """One line of the table: their modules that are one of our modules.

    "{i}" in a name stands for the number of a layer. Decoders have "{d}" in our name: the number among all layers.
    """

    ours: str
    theirs: tuple[str, ...]  # several: joined along the output features, as Q|K|V
    transform: WeightTransform | tuple[WeightTransform, ...] = SAME  # of all of `theirs`, or of each
    ffn: str | None = None  # `model.ffn` of the models that have it; None: all
    is_tensor: bool = False  # the names are of tensors, not of modules with a weight and a bias
    # Relative sizes of `theirs` in ours; None: equal.
    shares: Callable[[ModelConfig], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class ConfigField:
    """A field of config.json that is an option of our model. Several options may have one field."""

    theirs: str  # "rope_parameters.rope_theta": a field within another
    ours: str
    names: Mapping[Any, Any] | None = None  # their value -> ours, where they differ
    # Further fields of theirs with the numbers of our option, a tuple, where `names` maps their value to None.
    numbers: tuple[str, ...] = ()
    null_as: str | None = None  # a field of one name on both sides: with its value ours is null
    counts_positions: bool = False  # theirs counts the rows of the table, ours is the largest position
    # Their value and configuration -> ours, None for one that ours cannot be; ours and our options -> theirs.
    reads: Callable[[Any, Any], Any] | None = None
    writes: Callable[[Any, ModelConfig], Any] | None = None


VERSION_4 = "to 4.57"


@dataclass(frozen=True)
class FormerField:
    """A field of config.json that other versions of transformers than the installed one read for an option of ours.

    An export writes it in addition to the current fields. An import refuses a file in which the two contradict.
    """

    theirs: str
    ours: str
    versions: str  # of transformers, that read it
    writes: Callable[[Any], Any] = lambda value: value  # of our option
    is_another_name: bool = True  # whether a current field says the same; if not, an import compares nothing


@dataclass(frozen=True)
class PublishedSystem:
    """The table of one published system: how its tensors and its config.json map to ours."""

    model_type: str  # as in config.json
    prefix: str  # of the base model's parameters; files of the base model alone may lack it
    rules: tuple[TensorRule, ...]
    fields: tuple[ConfigField, ...]
    pretraining_class: Callable[[ModelConfig], str]  # the class of transformers that has all heads of a model
    classes: Mapping[str, str]  # architecture in config.json -> `model.system`
    required: Mapping[str, Any]  # fields of config.json with the only value that we can express
    ties: Mapping[str, str] = field(default_factory=dict)  # their second name of a tensor -> the first
    skipped_positions: int = 0  # rows of their position tables that no token uses, before the others
    skips_pad: bool = False  # whether these are the rows up to the id of padding, see `padded_with`
    counts_skipped: bool = True  # whether config.json counts those rows
    # Tensors [n, vocabulary] that are always zero: name -> n.
    zeros: Mapping[str, int] = field(default_factory=dict)
    is_causal: bool = False
    may_untie: bool = False  # whether `ties` only hold where config.json has tie_word_embeddings
    padding_side: str = "right"  # where texts are padded for the class; before a prompt it is always the left
    counts_real_tokens: bool = True  # whether `generate` gives padding before a prompt no position
    # Field of config.json that names a token -> its role in a tokenizer; and fields that the class has without need.
    roles: Mapping[str, str] = field(
        default_factory=lambda: {"pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "cls"}
    )
    unused_ids: tuple[str, ...] = ()
    forces_ends: bool = False  # whether config.json names the forced first and last token of a completion
    is_encoder_decoder: bool = False
    begin: str = "eos"  # of the section causal of an import
    former: tuple[FormerField, ...] = ()
    # Second names in `ties` that an export has as well: without them versions of transformers to 4.49 lose the value.
    written_twice: tuple[str, ...] = ()
    # Options of heads that a file may lack, and the parameter that tells: its rows, or for a tie that it is missing.
    optional: Mapping[str, str] = field(default_factory=dict)
    legacy: PublishedSystem | None = None  # of files with the names of the head that the field `legacy` means
    is_legacy: bool = False
    untrained: tuple[str, ...] = ()  # fields of config.json that change training alone, and not here

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


def numbered(rules: list[TensorRule], ours: str, theirs: str) -> tuple[TensorRule, ...]:
    return tuple(
        replace(rule, ours=f"{ours}{rule.ours}", theirs=tuple(f"{theirs}{name}" for name in rule.theirs))
        for rule in rules
    )
