"""Weights and config.json of a published system, from the form of transformers to ours and back: see systems.py.

Tensors are read one at a time. What our model does not hold, but the files do (rows of a position table that no token
uses), is kept beside the run, so that an export is bit-equal.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build
from megatron_lite.config.model import OF_TRAINING, ModelConfig
from megatron_lite.hf.files.config_json import (
    CONFIG_JSON,
    by_transformers,
    check_fields,
    check_sizes,
    quiet,
    read_described,
)
from megatron_lite.hf.files.left_out import lines as left_out_lines
from megatron_lite.hf.files.left_out import listed, reason
from megatron_lite.hf.files.system_table import (
    SAME,
    TRANSPOSED,
    ConfigField,
    PublishedSystem,
    WeightTransform,
)
from megatron_lite.hf.files.tensor_sizes import KEY_WIDTH, QUERY_WIDTH, REMEDY, tensor_sizes, wrong_size
from megatron_lite.hf.files.weights import WORDS, Weights, open_directory, open_safetensors, shape_problems
from megatron_lite.hf.published.heads import (
    OTHER_HEADS,
    TASK_CLASSES,
    architectures,
    head_fields,
    head_problems,
    head_settings,
    tensor_rules,
    transformers_class_name,
)
from megatron_lite.hf.published.recognition import (
    architecture,
    body_class,
    complete_config,
    has_head,
    head_modules,
    is_body,
    stem,
    system_in,
    with_head_names,
)
from megatron_lite.hf.published.systems import GLM4, PUBLISHED, SYSTEMS_BY_NAME
from megatron_lite.model.flops import parameter_shapes

log = logging.getLogger(__name__)

_HEAD_PARAMETERS = {  # options of `PublishedSystem.optional` and a parameter of ours that tells
    "sentence_classes": "heads.sentence.classifier.weight", "head_transform": "heads.projection.dense.weight",
    "head_bias": "heads.bias",
}  # fmt: skip
POSITIONS = ("embedding.position_embeddings.weight", "decoder_embedding.position_embeddings.weight")
# Options that are of the training, or that a file of weights does not tell.
NOT_IN_FILES = OF_TRAINING | {"span_boundary_places", "class_heads", "task_rows"}
# Options that may be null, and what they then stand for.
_DERIVED = {"ffn_size": "inner_size", "head_dim": "head_size", "num_key_value_heads": "key_value_heads"}
_FORMER_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


@dataclass(frozen=True)
class TensorMapping:
    """Where a tensor of theirs is in one of ours."""

    ours: str
    index: int  # among mappings of ours
    shares: tuple[int, ...]  # their relative sizes
    transform: WeightTransform
    config: ModelConfig
    skipped: int  # first rows of theirs that ours has not

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
                skipped = system.skipped_positions if ours in POSITIONS else 0
                transforms = (
                    rule.transform
                    if isinstance(rule.transform, tuple)
                    else (rule.transform,) * len(rule.theirs)
                )
                for index, (theirs, transform) in enumerate(zip(rule.theirs, transforms, strict=True)):
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
        empty = [torch.empty(theirs.shapes[name], device="meta") for name in sources[ours]]
        return tuple(torch.cat([converted(*pair) for pair in zip(sources[ours], empty, strict=True)]).shape)

    return Weights({ours: shape(ours) for ours in sources}, read)


def to_theirs(
    ours: Weights, mappings: Mapping[str, TensorMapping], kept: Weights | None, system: PublishedSystem
) -> Weights:
    """The inverse of `to_ours`. Args: kept: rows that ours has not, by their name; None: zeros."""
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
    if not any(name.startswith(system.prefix) for name in names):
        names = {
            name if name.split(".")[0] in heads else f"{system.prefix}{name}": old
            for name, old in names.items()
        }
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


def is_published(path: Path) -> bool:
    """Whether a directory is of a system in the tables. Released GLMs have the type of GLM-4, with other tensors."""
    described = read_described(path)
    if described.get("model_type") is not None and described["model_type"] != GLM4.model_type:
        return described["model_type"] in PUBLISHED
    weights = open_directory(path)
    if system_in(path, described, weights) is None:
        return False
    return described.get("model_type") is None or any(
        name.endswith("embed_tokens.weight") for name in weights.shapes
    )


def unsupported(path: Path, described: Mapping[str, Any]) -> CheckpointError:
    """The error for a directory of no layout that is read here."""
    types = f"{', '.join(PUBLISHED)}, and GLM as exported here or released"
    if described.get("model_type") is None:
        named = (
            f"architectures {shown(described['architectures'])}"
            if described.get("architectures")
            else "no class"
        )
        return CheckpointError(
            f"{path / CONFIG_JSON} has no model_type and names {named}, and the tensors are of no model that can be "
            f'imported; if it is one, add "model_type" to it: {types}.'
        )
    return CheckpointError(
        f"{path / CONFIG_JSON}: model_type is {shown(described['model_type'])}, which cannot be imported; the "
        f"types that can are {types}."
    )


def without_left_out(
    theirs: Weights, mappings: Mapping[str, TensorMapping], system: PublishedSystem
) -> tuple[Weights, dict[str, tuple[str, str]]]:
    """Their tensors but for those that the class ignores, and what `reason` says of these, by their names."""
    others = [*theirs.buffers, *(name for name in theirs.shapes if name not in mappings)]
    found = {name: why for name in others if (why := reason(name, system.model_type, system.prefix))}
    return theirs.renamed({name: name for name in theirs.shapes if name not in found}), found


def model_settings(
    system: PublishedSystem, described: Mapping[str, Any], theirs: Weights, path: Path
) -> dict[str, Any]:
    """The section `model` of a config.json. Raises: CheckpointError for what the model cannot express."""
    settings, problems = _settings_and_problems(system, described, theirs, path)
    _require_none(path, problems)
    return settings


def _require_none(path: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError for all that stands against an import at once. Args: problems: sentences."""
    if problems:
        raise CheckpointError(f"{path / CONFIG_JSON}: {' '.join(dict.fromkeys(problems))}")


def _settings_and_problems(
    system: PublishedSystem, described: Mapping[str, Any], theirs: Weights, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """The section `model`, without what cannot be expressed, and a sentence on each of that."""
    config = _their_config(system, described, path)
    problems = []
    for name, value in system.required.items():
        actual = field_of(config, name, value)
        if actual != value:
            problems.append(f"{name} is {shown(actual)}; only {shown(value)} can be imported.")
    if system.skips_pad and not (isinstance(config.pad_token_id, int) and config.pad_token_id >= 0):
        problems.append(
            f"pad_token_id is {shown(config.pad_token_id)}, but a {system.model_type} counts positions from it; set it "
            "to the tokenizer's."
        )
    name, class_problem = _system_name(system, config)
    problems += class_problem
    settings: dict[str, Any] = {"system": name}
    for entry in system.fields:
        value = field_of(config, entry.theirs)
        if entry.names is not None and value not in entry.names:
            problems.append(
                f"{entry.theirs} is {shown(value)}; it must be one of {', '.join(map(str, entry.names))}."
            )
            continue
        ours = _our_value(system, entry, value, config)
        if ours is None and entry.reads is not None:
            problems.append(f"{entry.theirs} is {shown(value)}, which the model here cannot be.")
        elif settings.setdefault(entry.ours, ours) != ours:
            problems.append(
                f"{entry.theirs} gives model.{entry.ours} {shown(ours)}, another field gives "
                f"{shown(settings[entry.ours])}; only equal ones can be imported."
            )
    for option, name in system.optional.items():
        settings[option] = _option_from_shape(option, theirs, name)
    if "sentence_classes" in system.optional:
        settings["sentence_classes"] = _sentence_classes(system, settings["sentence_classes"], theirs)
    problems += _contradictions(system, described, config, settings)
    if kind := architectures(system).get(_architecture(system, config)):
        settings |= head_settings(system, kind, config)
        problems += head_problems(system, kind, config)
    return settings, problems


def _sentence_classes(system: PublishedSystem, classes: int, theirs: Weights) -> int:
    """Rows of the head on CLS. Without the layer below it there is none; a layer alone, of a base model, has two."""
    (pooler,) = (rule.theirs[0] for rule in system.rules if rule.ours == "heads.sentence.dense")
    has_pooler = f"{pooler}.weight" in theirs.shapes
    if has_pooler and not classes and not has_head(system, theirs.shapes):
        return 2
    return classes if has_pooler else 0


def _contradictions(
    system: PublishedSystem,
    described: Mapping[str, Any],
    config: PretrainedConfig,
    settings: Mapping[str, Any],
) -> list[str]:
    """A sentence on each field of one version of transformers that contradicts the same in another's spelling.

    Args: config: what the installed version makes of `described`. settings: of the section `model`, from it.
    """
    said = {}  # name -> what it says, and what was read
    for entry in system.fields:
        outer, *inner = entry.theirs.split(".")
        within = described.get(outer)
        for name in inner:
            within = within.get(name) if isinstance(within, Mapping) else None
        if inner and within is not None:  # another field goes over it
            said[entry.theirs] = within, field_of(config, entry.theirs)
    for former in system.former:
        given = described.get(former.theirs)
        if given is None or not former.is_another_name or former.ours not in settings:
            continue
        read = former.writes(settings[former.ours])
        if isinstance(given, Mapping):  # "type" is the oldest name of its kind
            read = {"rope_type": "default"} if read is None else read
            given = {"rope_type": given.get("type"), **given}
            given = {name: given.get(name) for name in read}
        said[former.theirs] = given, read
    return [
        f"{name} is {shown(given)}, but another field gives {shown(read)}; remove the wrong one, or make them equal."
        for name, (given, read) in said.items()
        if given != read
    ]


def _option_from_shape(option: str, weights: Weights, name: str) -> int | bool:
    """The value of an option by the first dimension of a parameter, 0 if there is none."""
    rows = weights.shapes.get(name, (0,))[0]
    return {"tie_word_embeddings": not rows, "sentence_classes": rows, "task_types": rows}.get(
        option, rows > 0
    )


def _architecture(system: PublishedSystem, config: PretrainedConfig) -> str:
    return architecture({"architectures": config.architectures}) or next(iter(system.classes))


def _their_config(system: PublishedSystem, described: Mapping[str, Any], path: Path) -> PretrainedConfig:
    with by_transformers(path), quiet():
        return CONFIG_MAPPING[system.model_type].from_dict(dict(described))


def field_of(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    """The value of a field, `default` if it is missing. Args: name: as in `ConfigField`."""
    outer, *inner = name.split(".")
    value = getattr(config, outer, default)
    for mapping in inner:
        value = (value or {}).get(mapping, default)
    return value


def _set_field(values: dict[str, Any], name: str, value: Any) -> None:
    outer, _, inner = name.partition(".")
    if inner:
        within = dict(values.get(outer) or {})
        _set_field(within, inner, value)
        value = within
    values[outer] = value


def _our_value(system: PublishedSystem, entry: ConfigField, value: Any, config: PretrainedConfig) -> Any:
    if entry.counts_positions:
        return value - 1 - system.skipped_positions * system.counts_skipped
    if entry.null_as is not None and value == field_of(config, entry.null_as):
        return None
    if entry.reads is not None:
        return entry.reads(value, config)
    ours = value if entry.names is None else entry.names[value]
    return tuple(field_of(config, name) for name in entry.numbers) if entry.numbers and ours is None else ours


def _system_name(system: PublishedSystem, config: PretrainedConfig) -> tuple[str, list[str]]:
    """`model.system`, and what stands against the class."""
    name, known = _architecture(system, config), (*system.classes, *architectures(system), body_class(system))
    problems = []
    if name == f"{stem(name)}EncoderModel":
        problems = [
            f"architectures names {name}, an encoder alone; a {system.model_type} here has a decoder."
        ]
    elif name not in known:
        problems = [
            f"architectures names {shown(name)}, which has a head of its own; only {', '.join(known)} can be imported."
        ]
    ours = system.classes.get(name, next(iter(system.classes.values())))
    return "ernie2" if getattr(config, "use_task_id", False) else ours, problems


def hf_config(config: ModelConfig, base: Mapping[str, Any], labels: Sequence[str] = ()) -> PretrainedConfig:
    """The transformers configuration of a model.

    Args: base: fields of the config.json that was imported. labels: names of the classes of a task's head.

    Raises: CheckpointError for an option that the class cannot express.
    """
    system = published_system(config)
    values, default = dict(base), CONFIG_MAPPING[system.model_type]()
    system = system.padded_with(values.get("pad_token_id", default.pad_token_id))
    for entry in reversed(system.fields):  # the first of several options decides a field
        value = getattr(config, entry.ours)
        if value is None and entry.null_as is not None:
            value = getattr(config, entry.null_as)
        if entry.ours in _DERIVED and field_of(default, entry.theirs) is not None:  # GPT-2's is None, as ours
            value = getattr(config, _DERIVED[entry.ours])
        if entry.ours in system.optional and not value:
            continue  # the class's default, which it does not use
        for name, number in zip(entry.numbers, value if entry.numbers else (), strict=False):
            _set_field(values, name, int(number) if name.endswith("position_embeddings") else number)
        if entry.names is not None:
            value = None if entry.numbers and value else value
            value = _their_value(entry.names, value, base.get(entry.theirs), entry.ours)
        if entry.writes is not None:
            value = entry.writes(value, config)
        if entry.counts_positions:
            value += 1 + system.skipped_positions * system.counts_skipped
        _set_field(values, entry.theirs, value)
    for name, value in system.required.items():
        if hasattr(default, name.partition(".")[0]):
            _set_field(values, name, value)
    if config.task_types:
        values["use_task_id"] = True
    if system.legacy is not None:
        # A new run takes the names that all versions of transformers load; that of the others is broken to 5.19.
        values.setdefault("legacy", "model_type" not in base)
    name, head = transformers_class_name(system, config), head_fields(system, config, labels)
    values |= {**head, "architectures": [name]}
    described = CONFIG_MAPPING[system.model_type].from_dict(values)
    _require_expressed(system, config, described, name)
    return described


def former_fields(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json by which other versions of transformers read a model. See `FormerField`."""
    return {
        entry.theirs: entry.writes(getattr(config, entry.ours)) for entry in published_system(config).former
    }


def _their_value(names: Mapping[Any, Any], ours: Any, former: Any, option: str) -> Any:
    if former in names and names[former] == ours:
        return former
    for theirs, value in names.items():
        if value == ours:
            return theirs
    raise CheckpointError(f"model.{option} is {ours}, which the class of transformers does not have.")


def _require_expressed(
    system: PublishedSystem, config: ModelConfig, described: PretrainedConfig, class_name: str
) -> None:
    """Raise CheckpointError unless reading the class's configuration back gives the model's options."""
    settings: dict[str, Any] = {"system": config.system}
    settings |= {"task_head": config.task_head, "task_classes": config.task_classes}
    for entry in system.fields:
        settings[entry.ours] = _our_value(system, entry, field_of(described, entry.theirs), described)
    for option in system.optional:
        settings[option] = getattr(config, option)
    again = build(ModelConfig, settings)
    # Without a table of positions max_position is a limit of training alone.
    has_positions = any(entry.counts_positions for entry in system.fields)
    different = [
        f.name
        for f in fields(ModelConfig)
        if f.name not in NOT_IN_FILES
        and (has_positions or f.name != "max_position")
        and getattr(again, _DERIVED.get(f.name, f.name)) != getattr(config, _DERIVED.get(f.name, f.name))
    ]
    if different:
        name = different[0]
        raise CheckpointError(
            f"model.{name} is {shown(getattr(config, name))}, which {class_name} does not have; only models of the "
            "published architecture can be exported."
        )


def published_system(config: ModelConfig) -> PublishedSystem:
    """The table of a model. Raises: CheckpointError if it has none."""
    if config.system not in SYSTEMS_BY_NAME:
        raise CheckpointError(
            f"model.system is {shown(config.system)}; set it to one of {', '.join(SYSTEMS_BY_NAME)} to export the "
            "model of a published system."
        )
    return SYSTEMS_BY_NAME[config.system]


def is_headless(config: ModelConfig) -> bool:
    """Whether the class of a model predicts neither tokens nor a task: ELECTRA's discriminator, DeBERTa's body."""
    is_body = config.system in ("electra", "deberta_v3") and not (config.head_transform or config.head_bias)
    return is_body and config.task_head == "none"


def load_class(
    directory: Path,
    class_name: str,
    dtype: torch.dtype = torch.float32,
    source: PublishedSource | None = None,
) -> torch.nn.Module:
    """A model as its users load it.

    Args: source: of an import, which says how config.json is read and which tensors are left out.

    Raises: CheckpointError for missing or unexpected tensors, or without a class.
    """
    if not hasattr(transformers, class_name):
        raise CheckpointError(
            f"{directory}: transformers has no class {class_name}, with which a proof could compare; add --no-verify."
        )
    cls = getattr(transformers, class_name)
    config = {} if source is None else {"config": _their_config(source.system, source.described, directory)}
    with by_transformers(directory), quiet():
        model, loading = cls.from_pretrained(
            directory, dtype=dtype, output_loading_info=True, local_files_only=True, **config
        )
    left_out = () if source is None else tuple(source.left_out)
    unexpected = [name for name in loading["unexpected_keys"] if not _is_among(name, left_out)]
    missing = [name for name in loading["missing_keys"] if not (is_body(class_name) and _POOLER.search(name))]
    mismatched = [str(each) for each in loading["mismatched_keys"]]
    found = {"unexpected keys": unexpected, "missing keys": missing, "mismatched keys": mismatched}
    if problems := [f"{what}: {listed(names)}" for what, names in found.items() if names]:
        raise CheckpointError(f"{directory}: {class_name} reports {'; '.join(problems)}.")
    return model.eval()


_POOLER = re.compile(
    r"(^|\.)pooler\."
)  # of a base model, which need not have it: hidden states do not read it


def _is_among(name: str, names: Sequence[str]) -> bool:
    """Whether a name is in a list, with the prefix of the base model or without it on either side."""
    return any(name == each or each.endswith(f".{name}") or name.endswith(f".{each}") for each in names)


def kept_rows(theirs: Weights, mappings: Mapping[str, TensorMapping]) -> Iterator[tuple[str, torch.Tensor]]:
    """Their rows that our model does not hold."""
    for name, mapping in mappings.items():
        if mapping.skipped:
            yield name, theirs.read(name)[: mapping.skipped]


@dataclass(frozen=True)
class PublishedSource:
    """A directory of a published system."""

    path: Path
    system: PublishedSystem
    settings: dict[str, Any]  # of the section `model`
    theirs: Weights  # under their names of today
    mappings: Mapping[str, TensorMapping]
    others: Weights  # of ours, that the class does not have
    described: Mapping[str, Any] = field(default_factory=dict)  # config.json as it is read here
    left_out: Mapping[str, tuple[str, str]] = field(
        default_factory=dict
    )  # tensors that the class ignores -> what they are
    is_body: bool = False  # whether the files have no head that predicts

    @property
    def class_name(self) -> str | None:
        """The class to compare with where it is a base model, None for that of the whole model."""
        return body_class(self.system) if self.is_body else None


def open_published(
    path: Path, shapes_of: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = parameter_shapes
) -> PublishedSource:
    """Read config.json and the names and shapes of the weights, and log what is not as it seems there.

    Args: shapes_of: a model's parameters under the names of the tables.

    Raises: CheckpointError, with all that stands against the import.
    """
    described, weights = read_described(path), open_directory(path)
    system = system_in(path, described, weights)
    if system is None:
        raise unsupported(path, described)
    check_fields(path, described, system)
    system = with_head_names(system, described, weights.shapes)
    try:
        their_config = _their_config(system, described, path)
    except CheckpointError:  # a size may be what its class refuses
        _require_none(path, _size_problems(system, described, described, normalized(weights, system)[0])[1])
        raise
    is_tied = not system.may_untie or their_config.tie_word_embeddings
    theirs, problems = normalized(weights, system, is_tied)
    described, lines = complete_config(system, described, theirs, path)
    sizes, of_sizes = _size_problems(system, described, their_config.to_dict(), theirs)
    pad = _their_config(system, described, path).pad_token_id
    if isinstance(pad, int):  # if not, it is among the problems
        system = system.padded_with(pad)
    settings, of_fields = _settings_and_problems(system, described, theirs, path)
    problems = [*of_sizes, *of_fields, *problems]
    if of_sizes:  # what follows from a wrong size is not said again
        settings |= {option: size for option, size in sizes.items() if option in settings}
    try:
        check_sizes(path, settings, theirs)
    except CheckpointError:
        _require_none(path, problems)
        raise
    others = Weights({}, theirs.read)
    if (path / OTHER_HEADS).exists():
        others = open_safetensors(path / OTHER_HEADS)
        present = {option: name for option, name in _HEAD_PARAMETERS.items() if option in system.optional}
        if "task_head" in settings:
            settings |= {option: _option_from_shape(option, others, name) for option, name in present.items()}
    try:
        model = build(ModelConfig, settings, "model.")
    except ConfigError as error:
        _require_none(path, [*problems, str(error)])
        raise
    shapes = shapes_of(model)
    if lacks_head(system, described, theirs, model):
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if not name.startswith("heads.") or name.startswith("heads.sentence.dense.")
        }
    mappings = tensor_mappings(system, shapes, model)
    # A class whose head is tied holds all that a base model does, and is asked for more.
    is_base = is_headless(model) or shapes.keys() != shapes_of(model).keys()
    theirs, left_out = without_left_out(theirs, mappings, system)
    expected = to_theirs(Weights(shapes, theirs.read), mappings, None, system).shapes
    expected = {name: shape for name, shape in expected.items() if name not in system.zeros}
    problems += _tensor_problems(system, theirs, expected, is_alone=not (of_sizes or of_fields))
    _require_none(path, problems)
    source = PublishedSource(path, system, settings, theirs, mappings, others, described, left_out, is_base)
    for line in (*lines, *_notes(source, model)):
        log.warning("%s: %s", path, line)
    return source


def lacks_head(
    system: PublishedSystem, described: Mapping[str, Any], theirs: Weights, model: ModelConfig
) -> bool:
    """Whether a directory is of a base model: its class is, or it names none, and no tensor is of a head."""
    if is_headless(model):
        return True
    name = architecture(described)
    is_named = name is None or is_body(name)
    return is_named and model.task_head == "none" and not has_head(system, theirs.shapes)


def _size_problems(
    system: PublishedSystem, described: Mapping[str, Any], config: Mapping[str, Any], theirs: Weights
) -> tuple[dict[str, int], list[str]]:
    """Sizes of the section `model` by the tensors, and a sentence on the fields of config.json that contradict them.

    Args: config: what its class makes of `described`, which has no fields that are not given.
    """
    measured = tensor_sizes(_under_our_names(system, theirs))
    sizes, wrong = dict(measured), []
    for entry in system.fields:
        said = config.get(entry.theirs)
        if entry.ours not in measured or entry.reads is not None or not isinstance(said, int):
            continue
        actual = measured[entry.ours]
        if entry.counts_positions:
            sizes[entry.ours] = actual - system.skipped_positions
            actual += 1 - system.skipped_positions * (not system.counts_skipped)
        if said != actual:
            wrong.append(wrong_size(entry.theirs, said, actual, entry.theirs in described))
    names = {entry.ours: entry.theirs for entry in system.fields if entry.reads is None}
    width = config.get(names.get("head_dim", ""))
    for option, heads in ((QUERY_WIDTH, "num_attention_heads"), (KEY_WIDTH, "num_key_value_heads")):
        count = config.get(names.get(heads, ""))
        if (
            isinstance(width, int)
            and isinstance(count, int)
            and option in measured
            and count * width != measured[option]
        ):
            said = f"{names[heads]} ({count}) times {names['head_dim']} ({width})"
            wrong.append(wrong_size(said, count * width, measured[option]))
    if not wrong:
        return sizes, []
    return sizes, [f"{'; '.join(wrong)}; {REMEDY}."]


def _under_our_names(system: PublishedSystem, theirs: Weights) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors under our names, without a configuration, which may be wrong. Keys stand apart."""
    found: dict[str, tuple[int, ...]] = {}
    for rule in system.rules:
        source, ours = rule.theirs[0], rule.ours
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


def _tensor_problems(
    system: PublishedSystem, theirs: Weights, expected: Mapping[str, tuple[int, ...]], *, is_alone: bool
) -> list[str]:
    """Sentences on tensors. Args: is_alone: False where fields are wrong too, which other tensors can follow from."""
    if not is_alone:
        known = tuple({rule.theirs[0].split("{i}")[0] for rule in system.rules})
        unknown = {name for name in theirs.shapes.keys() - expected.keys() if not name.startswith(known)}
        return (
            [f"The weights also have {listed(unknown)}, which no {system.model_type} here has."]
            if unknown
            else []
        )
    if not (problems := shape_problems(theirs, expected)):
        return []
    whole = "; ".join(problems)
    remedy = f"{REMEDY}."
    modules = tuple(f"{module}." for module in head_modules(system))
    if not has_head(system, theirs.shapes) and any(name.startswith(modules) for name in expected):
        remedy += f' A base model comes in where "architectures" is ["{body_class(system)}"].'
    if theirs.shapes.keys() - expected.keys():
        remedy += " What the model computes without can be left out of the file."
    return [f"this describes no model of the weights: {whole}; {remedy}"]


def _notes(source: PublishedSource, model: ModelConfig) -> Iterator[str]:
    """What an import does not take as it is."""
    system = source.system
    class_name = source.class_name or transformers_class_name(system, model)
    yield from left_out_lines(source.left_out, f"the class {class_name}", source.theirs.doubles)
    for name in system.untrained:
        if value := source.described.get(name):
            yield f"{name} is {shown(value)}; it is not trained here: no layer is dropped"
