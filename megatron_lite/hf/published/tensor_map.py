"""Maps the tensors of a published system to ours and back, by the rules of its table (systems.py).

    tensor_mappings   expands the rules (layers.{i}) into one TensorMapping for each tensor of the files
    to_ours           reads their tensors under our names: Q, K and V are joined, rotary features reordered, ...
    to_theirs         the inverse, for an export
    normalized        first brings tensors of older files under today's names

Tensors are read one at a time. What the files hold but our model does not (rows of a position table that no token uses)
is kept in the run's directory, so that an export is bit-equal to the files that were imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.files.left_out import reason
from megatron_lite.hf.files.system_table import SAME, TRANSPOSED, PublishedSystem, WeightTransform
from megatron_lite.hf.files.weights import WORDS, Weights
from megatron_lite.hf.published.heads import TASK_CLASSES, tensor_rules

POSITIONS = ("embedding.position_embeddings.weight", "decoder_embedding.position_embeddings.weight")

_FORMER_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


@dataclass(frozen=True)
class TensorMapping:
    """A rule applied to one tensor of the files: which rows of which tensor of ours hold it, and how transformed.

    For the rule query_key_value -> (query, key, value), the tensor of `key` has index 1: the second third of our rows.
    """

    ours: str
    index: int  # of theirs among those that are joined in ours
    shares: tuple[int, ...]  # their relative sizes
    transform: WeightTransform
    config: ModelConfig
    skipped: int  # first rows of theirs that ours lacks

    def row_range(self, rows: int) -> tuple[int, int]:
        """The first row of this mapping, and the number of its rows, in a tensor of ours."""
        unit = rows // sum(self.shares)
        return sum(self.shares[: self.index]) * unit, self.shares[self.index] * unit


def tensor_mappings(
    system: PublishedSystem, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> dict[str, TensorMapping]:
    """Their tensor -> its mapping, for our parameters of these shapes."""
    mappings: dict[str, TensorMapping] = {}
    for rule in tensor_rules(system, config):
        if rule.ffn not in (None, config.ffn):
            continue
        shares = (1,) * len(rule.theirs) if rule.shares is None else rule.shares(config)
        count = (
            config.num_layers if "{i}" in rule.ours else config.decoder_layers if "{d}" in rule.ours else 1
        )
        for i in range(count):
            name = rule.ours.replace("{i}", str(i)).replace("{d}", str(config.num_layers + i))
            for kind in ("",) if rule.is_tensor else (".weight", ".bias"):
                ours = f"{name}{kind}"
                if ours not in shapes:
                    continue
                # BART's and RoBERTa's tables begin with rows that no token uses; our positions begin at 0.
                skipped = system.skipped_positions if ours in POSITIONS else 0
                transforms = (
                    rule.transform
                    if isinstance(rule.transform, tuple)
                    else (rule.transform,) * len(rule.theirs)
                )
                for index, (theirs, transform) in enumerate(zip(rule.theirs, transforms, strict=True)):
                    # A transposition of the weight leaves its bias alone; a permutation of output features
                    # moves both.
                    transform = transform if transform.applies_to_bias or kind != ".bias" else SAME
                    mapping = TensorMapping(ours, index, shares, transform, config, skipped)
                    mappings[f"{theirs}{kind}".replace("{i}", str(i))] = mapping
    return mappings


def to_ours(theirs: Weights, mappings: Mapping[str, TensorMapping]) -> Weights:
    """Their tensors under our names. All of `mappings` must be there."""
    sources: dict[str, list[str]] = {}
    for name, mapping in mappings.items():
        sources.setdefault(mapping.ours, []).append(name)  # in the order of the mappings

    def converted(name: str, tensor: torch.Tensor) -> torch.Tensor:
        mapping = mappings[name]
        return mapping.transform.to_ours(tensor[mapping.skipped :], mapping.config)

    def read(ours: str) -> torch.Tensor:
        tensors = [converted(name, theirs.read(name)) for name in sources[ours]]
        return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)

    def shape(ours: str) -> tuple[int, ...]:
        # The conversion itself on the device "meta" tells the shape: a second rule for shapes could disagree
        # with it.
        empty = [torch.empty(theirs.shapes[name], device="meta") for name in sources[ours]]
        return tuple(torch.cat([converted(*pair) for pair in zip(sources[ours], empty, strict=True)]).shape)

    return Weights({ours: shape(ours) for ours in sources}, read)


def to_theirs(
    ours: Weights, mappings: Mapping[str, TensorMapping], kept: Weights | None, system: PublishedSystem
) -> Weights:
    """The inverse of `to_ours`. Args: kept: rows that ours lacks, by their name; None: zeros."""
    zeros = {name: (rows, ours.shapes[WORDS][0]) for name, rows in system.zeros.items()}

    def read(name: str) -> torch.Tensor:
        if name in zeros:
            return torch.zeros(zeros[name])
        mapping = mappings[name]
        whole = ours.read(mapping.ours)
        tensor = mapping.transform.to_theirs(whole.narrow(0, *mapping.row_range(len(whole))), mapping.config)
        if mapping.skipped:
            first = tensor.new_zeros(mapping.skipped, *tensor.shape[1:])
            if kept is not None:
                first = kept.read(name).to(tensor.dtype)
            tensor = torch.cat([first, tensor])
        return tensor.contiguous()

    def shape(mapping: TensorMapping) -> tuple[int, ...]:
        rows, *rest = ours.shapes[mapping.ours]
        empty = torch.empty(mapping.row_range(rows)[1], *rest, device="meta")
        first, *others = mapping.transform.to_theirs(empty, mapping.config).shape
        return (first + mapping.skipped, *others)

    return Weights({name: shape(mapping) for name, mapping in mappings.items()} | zeros, read)


def with_second_names(theirs: Weights, system: PublishedSystem, config: ModelConfig) -> Weights:
    """Also the second names of tied tensors that older versions of transformers need.

    They are `PublishedSystem.written_twice`, and a head that is tied and not scaled, where those take
    `tie_word_embeddings` for both (T5, mT5).
    """
    names = {name: name for name in theirs.shapes}
    head = system.optional.get("tie_word_embeddings")
    is_apart = head is not None and config.tie_word_embeddings and not config.scale_head
    for second in (*system.written_twice, *((head,) if is_apart else ())):
        if system.ties[second] in theirs.shapes:
            names[second] = system.ties[second]
    return theirs.renamed(names)


def normalized(weights: Weights, system: PublishedSystem, is_tied: bool = True) -> tuple[Weights, list[str]]:
    """Tensors of files of all ages under today's names: former names, missing prefixes, duplicates of tied weights.

    Args: is_tied: whether `system.ties` hold.

    Returns: them, and a sentence on each value that the model here cannot have, such as a tie whose ends differ.
    """
    problems = []
    names = {_todays_name(name): name for name in weights.shapes}
    heads = {rule.theirs[0].split(".")[0] for rule in system.rules} - {system.prefix.rstrip(".")}
    heads |= {found.classifier.split(".")[0] for found in TASK_CLASSES.get(system.model_type, {}).values()}
    heads |= {name.split(".")[0] for name in system.ties}
    # Files saved from the base class have no prefix before the body; heads never have one.
    if not any(name.startswith(system.prefix) for name in names):
        names = {
            name if name.split(".")[0] in heads else f"{system.prefix}{name}": old
            for name, old in names.items()
        }
    # A tied weight may be in a file twice. Equal copies are dropped; a T5 head that differs is one that is not
    # tied.
    for second, first in system.ties.items() if is_tied else ():
        if second not in names:
            continue
        old = names.pop(second)
        if names.setdefault(first, old) != old and not torch.equal(
            weights.read(old), weights.read(names[first])
        ):
            if second == system.optional.get("tie_word_embeddings"):
                names[second] = old
                continue
            problems.append(
                f"{second} differs from {first}, to which it is tied in a {system.model_type}; an untied head cannot "
                "be imported."
            )
    for name in system.zeros:
        if name in names and weights.read(names.pop(name)).any():
            problems.append(f"{name} is not zero, which the model here cannot express.")
    return weights.renamed(names), problems


def _todays_name(name: str) -> str:
    for former, today in _FORMER_NAMES.items():
        if name.endswith(former):
            return name.removesuffix(former) + today
    return name


def without_left_out(
    theirs: Weights, mappings: Mapping[str, TensorMapping], system: PublishedSystem
) -> tuple[Weights, dict[str, tuple[str, str]]]:
    """Their tensors but for those that the class ignores, and what `reason` says of these, by their names."""
    # Classes of transformers ignore names that they do not know, so a renamed layer would be drawn anew. Here
    # every tensor is mapped, or listed with the reason why it is left out, or refused.
    others = [*theirs.buffers, *(name for name in theirs.shapes if name not in mappings)]
    found = {name: why for name in others if (why := reason(name, system.model_type, system.prefix))}
    return theirs.renamed({name: name for name in theirs.shapes if name not in found}), found


def kept_rows(theirs: Weights, mappings: Mapping[str, TensorMapping]) -> Iterator[tuple[str, torch.Tensor]]:
    """Their rows that our model does not hold."""
    for name, mapping in mappings.items():
        if mapping.skipped:
            yield name, theirs.read(name)[: mapping.skipped]


def shapes_under_our_names(system: PublishedSystem, theirs: Weights) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors under our names, without a configuration, which may be wrong. Keys stand apart."""
    found: dict[str, tuple[int, ...]] = {}
    for rule in system.rules:
        source, ours = rule.theirs[0], rule.ours
        # The keys stand for the joined Q, K and V: their rows tell the number of key heads.
        if len(rule.theirs) == 3:
            source, ours = rule.theirs[1], ours.replace("query_key_value", "key")
        elif len(rule.theirs) > 1:
            continue
        kind = "" if rule.is_tensor else ".weight"
        pattern = re.compile(re.escape(f"{source}{kind}").replace(r"\{i\}", r"(\d+)"))
        ours = f"{ours}{kind}".replace("layers.{d}", "decoder_layers.{i}")
        for name, shape in theirs.shapes.items():
            if match := pattern.fullmatch(name):
                flat = shape if len(shape) < 2 else (shape[0], math.prod(shape[1:]))  # [D, H, d]
                of_block = ours.replace("{i}", match[1] if match.groups() else "")
                found[of_block] = flat[::-1] if rule.transform == TRANSPOSED else flat
    return found
