"""Maps the tensors of a published system to ours and back, by the rules of its table (system_table.py).

    tensor_mappings   expands the rules (layers.{i}) into one TensorMapping for each tensor of the files
    to_ours           reads their tensors under our names: Q, K and V are joined, rotary features reordered, ...
    to_theirs         the inverse, for an export
    class_modules     names the modules that may have an update of LoRA
    normalize_names   first renames the tensors of older files as today's classes do

Tensors are read one at a time. Rows of a position table that no token uses are in the files and not in our model. An
import stores them in the run's directory, so that an export is bit-equal to the files that were imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_lite.config.lora import LORA, PARTS, WHOLE, class_layers
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.ignored_tensors import reason
from megatron_lite.hf.common.lora import ClassModule, Modules
from megatron_lite.hf.common.system_table import SAME, PublishedSystem, WeightTransform
from megatron_lite.hf.common.weights import WORDS, Weights
from megatron_lite.hf.published.heads import TASK_CLASSES, tensor_rules

FURTHER_LAYER = "model.layers.{}."  # of further tokens (MTP): the layer after the last
POSITIONS = ("embedding.position_embeddings.weight", "decoder_embedding.position_embeddings.weight")
SKIPPED_ROWS = "rows.safetensors"  # file of an import's first rows, see `skipped_rows`

_FORMER_SUFFIXES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


@dataclass(frozen=True)
class TensorMapping:
    """A rule applied to one tensor of the files: which rows of our tensor hold it, and its transform.

    For the rule query_key_value -> (query, key, value), the tensor of `key` has index 1: the second third of our rows.
    """

    ours: str
    index: int  # of this tensor among the tensors that are joined in ours
    shares: tuple[int, ...]  # relative sizes of the joined tensors
    transform: WeightTransform
    config: ModelConfig
    skipped: int  # number of their first rows, which ours does not have

    def row_range(self, rows: int) -> tuple[int, int]:
        """First row and number of rows of this mapping in our tensor. Args: rows: of our tensor."""
        share_rows = rows // sum(self.shares)
        return sum(self.shares[: self.index]) * share_rows, self.shares[self.index] * share_rows


def tensor_mappings(
    system: PublishedSystem, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> dict[str, TensorMapping]:
    """The name of each of their tensors -> its mapping. Args: shapes: of our parameters."""
    mappings: dict[str, TensorMapping] = {}
    for rule in tensor_rules(system, config):
        if rule.ffn not in (None, config.ffn):
            continue
        shares = (1,) * len(rule.theirs) if rule.shares is None else rule.shares(config)
        count = (
            config.num_layers + config.mtp_layers
            if "{i}" in rule.ours
            else config.decoder_layers
            if "{d}" in rule.ours
            else 1
        )
        experts = config.experts.count if config.experts is not None and "{e}" in rule.ours else 1
        for i, e in itertools.product(range(count), range(experts)):
            name = rule.ours.replace("{i}", str(i)).replace("{d}", str(config.num_layers + i))
            name = name.replace("{e}", str(e))
            for suffix in ("",) if rule.is_tensor else (".weight", ".bias"):
                ours = f"{name}{suffix}"
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
                    # A transposition leaves the bias alone; a permutation of output features moves it too.
                    transform = transform if transform.applies_to_bias or suffix != ".bias" else SAME
                    mapping = TensorMapping(ours, index, shares, transform, config, skipped)
                    mappings[f"{theirs}{suffix}".replace("{i}", str(i)).replace("{e}", str(e))] = mapping
    return mappings


def class_modules(mappings: Mapping[str, TensorMapping], config: ModelConfig) -> Modules:
    """The modules of a class that may have an update of LoRA. Args: mappings: of its tensors."""
    layers, modules = class_layers(config), {}
    for name, mapping in mappings.items():
        path = mapping.ours.removesuffix(".weight").split(".", 2)[-1]  # without layers.N.
        if (
            not mapping.ours.startswith("layers.")
            or not mapping.ours.endswith(".weight")
            or path not in layers
        ):
            continue
        part = WHOLE if len(layers[path]) == 1 else PARTS[path][mapping.index]
        ours = f"{mapping.ours.removesuffix('.weight')}{LORA}{part}"
        modules[name.removesuffix(".weight")] = ClassModule(ours, config, mapping.transform)
    return modules


def to_ours(theirs: Weights, mappings: Mapping[str, TensorMapping]) -> Weights:
    """Their tensors under our names. All of `mappings` must be there."""
    sources: dict[str, list[str]] = {}
    for name, mapping in mappings.items():
        sources.setdefault(mapping.ours, []).append(name)  # in the order of the mappings

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        mapping = mappings[name]
        return mapping.transform.to_ours(tensor[mapping.skipped :], mapping.config)

    def read(ours: str) -> torch.Tensor:
        tensors = [convert(name, theirs.read(name)) for name in sources[ours]]
        return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)

    def shape(ours: str) -> tuple[int, ...]:
        # The conversion itself gives the shape, on the device "meta": a second rule could disagree with it.
        empty = [torch.empty(theirs.shapes[name], device="meta") for name in sources[ours]]
        return tuple(torch.cat([convert(*pair) for pair in zip(sources[ours], empty, strict=True)]).shape)

    return Weights({ours: shape(ours) for ours in sources}, read)


def to_theirs(
    ours: Weights, mappings: Mapping[str, TensorMapping], first_rows: Weights | None, system: PublishedSystem
) -> Weights:
    """The inverse of `to_ours`. Args: first_rows: the skipped rows, under their names; None: zeros."""
    zeros = {name: (rows, ours.shapes[WORDS][0]) for name, rows in system.zeros.items()}

    def read(name: str) -> torch.Tensor:
        if name in zeros:
            return torch.zeros(zeros[name])
        mapping = mappings[name]
        joined = ours.read(mapping.ours)
        rows = joined.narrow(0, *mapping.row_range(len(joined)))
        tensor = mapping.transform.to_theirs(rows, mapping.config)
        if mapping.skipped:
            first = tensor.new_zeros(mapping.skipped, *tensor.shape[1:])
            if first_rows is not None:
                first = first_rows.read(name).to(tensor.dtype)
            tensor = torch.cat([first, tensor])
        return tensor.contiguous()

    def shape(mapping: TensorMapping) -> tuple[int, ...]:
        rows, *columns = ours.shapes[mapping.ours]
        empty = torch.empty(mapping.row_range(rows)[1], *columns, device="meta")
        first, *others = mapping.transform.to_theirs(empty, mapping.config).shape
        return (first + mapping.skipped, *others)

    return Weights({name: shape(mapping) for name, mapping in mappings.items()} | zeros, read)


def with_tied_copies(theirs: Weights, system: PublishedSystem, config: ModelConfig) -> Weights:
    """The tensors, with copies under the second names that other readers need: older versions of transformers, and all
    that draft by the layer of further tokens.

    The second names are `PublishedSystem.written_twice`, and the head of T5 and mT5 where it is tied and not scaled:
    for older versions `tie_word_embeddings` says both at once.
    """
    names = {name: name for name in theirs.shapes}
    head = system.optional.get("tie_word_embeddings")
    has_second_head = head is not None and config.tie_word_embeddings and not config.scale_head
    for second in (*system.written_twice, *((head,) if has_second_head else ())):
        if system.ties[second] in theirs.shapes:
            names[second] = system.ties[second]
    if config.mtp_layers:
        names |= further_copies(system, config.num_layers, names)
    return theirs.renamed(names)


def further_copies(system: PublishedSystem, num_layers: int, names: Collection[str]) -> dict[str, str]:
    """Name of a copy in the layer of further tokens -> the tensor. Args: names: of a model's other tensors."""
    return {
        f"{FURTHER_LAYER.format(num_layers)}{copy}": first if first in names else system.ties[first]
        for copy, first in system.further_copies.items()
    }


def without_further_copies(
    theirs: Weights, system: PublishedSystem, num_layers: int
) -> tuple[Weights, list[str]]:
    """Their tensors without the copies, and a sentence on each that is none, which the model here cannot have."""
    copies = further_copies(system, num_layers, theirs.shapes)
    problems = [
        f"{name} differs from {first}, whose copy it is in a {system.model_type}; set num_nextn_predict_layers to 0 to "
        "import the model without its layer of further tokens."
        for name, first in copies.items()
        if name in theirs.shapes and not torch.equal(theirs.read(name), theirs.read(first))
    ]
    return theirs.renamed({name: name for name in theirs.shapes if name not in copies}), problems


def normalize_names(
    weights: Weights, system: PublishedSystem, is_tied: bool = True
) -> tuple[Weights, list[str]]:
    """Tensors of older files under the names of today's classes.

    Former names and missing prefixes are replaced, equal copies of tied weights are dropped.

    Args: is_tied: whether `system.ties` hold.
    Returns: the tensors, and a sentence on each value that our model cannot have, such as two tied weights that differ.
    """
    problems = []
    names = {_current_name(name): name for name in weights.shapes}
    heads = {rule.theirs[0].split(".")[0] for rule in system.rules} - {system.prefix.rstrip(".")}
    heads |= {head.classifier.split(".")[0] for head in TASK_CLASSES.get(system.model_type, {}).values()}
    heads |= {name.split(".")[0] for name in system.ties}
    # Files saved from the base class have no prefix before the body; heads never have one.
    if not any(name.startswith(system.prefix) for name in names):
        names = {
            name if name.split(".")[0] in heads else f"{system.prefix}{name}": old
            for name, old in names.items()
        }
    # A tied weight may be in a file twice. A T5 head that differs from the word embedding is not tied.
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


def _current_name(name: str) -> str:
    for former, current in _FORMER_SUFFIXES.items():
        if name.endswith(former):
            return name.removesuffix(former) + current
    return name


def drop_ignored(
    theirs: Weights, mappings: Mapping[str, TensorMapping], system: PublishedSystem
) -> tuple[Weights, dict[str, tuple[str, str]]]:
    """Their tensors without the tensors that the class ignores, and name -> `reason` of each of those."""
    # Classes of transformers ignore names that they do not know, so a renamed layer would keep initial values. Here
    # every tensor is mapped, or listed with the reason why it is left out, or refused.
    unmapped = [*theirs.buffers, *(name for name in theirs.shapes if name not in mappings)]
    ignored = {name: why for name in unmapped if (why := reason(name, system.model_type, system.prefix))}
    return theirs.renamed({name: name for name in theirs.shapes if name not in ignored}), ignored


def skipped_rows(
    theirs: Weights, mappings: Mapping[str, TensorMapping]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and first rows of each of their tensors with rows that our model does not have."""
    for name, mapping in mappings.items():
        if mapping.skipped:
            yield name, theirs.read(name)[: mapping.skipped]
