"""Opens the directory of a published system: checks config.json against the weights before anything is imported.

open_published   config.json, names and shapes of the weights; raises one error with all problems
load_class       the same directory as transformers loads it, for the proof

It writes nothing: import_config.py and stack.py do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.config_json import (
    CONFIG_JSON,
    by_transformers,
    check_fields,
    check_sizes,
    code_of,
    quiet,
    read_config_json,
)
from megatron_lite.hf.common.ignored_tensors import ignored_lines, listed
from megatron_lite.hf.common.system_table import PublishedSystem
from megatron_lite.hf.common.weights import (
    SAME_MODEL,
    Weights,
    open_directory,
    open_safetensors,
    shape_problems,
)
from megatron_lite.hf.published.heads import OTHER_HEADS, transformers_class_name
from megatron_lite.hf.published.read_config import (
    option_from_shape,
    require_none,
    settings_and_problems,
    transformers_config,
)
from megatron_lite.hf.published.recognition import (
    architecture,
    body_class,
    complete_config,
    has_head,
    head_modules,
    is_body,
    system_in,
    with_head_names,
)
from megatron_lite.hf.published.systems import GLM4, PUBLISHED
from megatron_lite.hf.published.tensor_map import (
    FURTHER_LAYER,
    TensorMapping,
    drop_ignored,
    normalize_names,
    tensor_mappings,
    to_theirs,
    without_further_copies,
)
from megatron_lite.transformer.flops import parameter_shapes

log = logging.getLogger(__name__)

_HEAD_PARAMETERS = {  # options of `PublishedSystem.optional` and the parameter of ours that decides each
    "sentence_classes": "heads.sentence.classifier.weight", "head_transform": "heads.projection.dense.weight",
    "head_bias": "heads.bias",
}  # fmt: skip

# Published with code of their own, which the tables here follow.
_WITH_CODE = ("neobert", "eurobert")
# Of a base model, whose files may lack it: hidden states do not depend on it.
_POOLER = re.compile(r"(^|\.)pooler\.")


@dataclass(frozen=True)
class PublishedSource:
    """A directory of a published system."""

    path: Path
    system: PublishedSystem
    settings: dict[str, Any]  # of the section `model`
    theirs: Weights  # under the names of today's class
    mappings: Mapping[str, TensorMapping]
    others: Weights  # our parameters that the class does not have
    config_json: Mapping[str, Any] = field(default_factory=dict)  # after `complete_config`
    # Tensors that the class ignores -> what they are.
    ignored: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_body: bool = False  # whether the files have no head that predicts

    @property
    def class_name(self) -> str | None:
        """The class of a base model; None: the class of the whole model."""
        return body_class(self.system) if self.is_body else None


def is_published(path: Path) -> bool:
    """Whether a directory is of a system in the tables. Released GLMs have the type of GLM-4, with other tensors."""
    config_json = read_config_json(path)
    if config_json.get("model_type") is not None and config_json["model_type"] != GLM4.model_type:
        return config_json["model_type"] in PUBLISHED
    weights = open_directory(path)
    if system_in(path, config_json, weights) is None:
        return False
    return config_json.get("model_type") is None or any(
        name.endswith("embed_tokens.weight") for name in weights.shapes
    )


def unsupported(path: Path, config_json: Mapping[str, Any]) -> CheckpointError:
    """The error for a directory of no layout that is read here."""
    types = f"{', '.join(PUBLISHED)}, and GLM as exported here or released"
    if config_json.get("model_type") is None:
        named = (
            f"architectures {shown(config_json['architectures'])}"
            if config_json.get("architectures")
            else "no class"
        )
        return CheckpointError(
            f"{path / CONFIG_JSON} has no model_type and names {named}, and the tensors are of no model that can be "
            f'imported; if it is one, add "model_type" to it: {types}.'
        )
    code = code_of(config_json)
    return CheckpointError(
        f"{path / CONFIG_JSON}: model_type is {shown(config_json['model_type'])}, which cannot be imported"
        f"{f' ({code})' if code else ''}; the types that can are {types}."
    )


def open_published(
    path: Path, shapes_of: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = parameter_shapes
) -> PublishedSource:
    """Read config.json and the names and shapes of the weights. Warns of what an import changes or ignores.

    Args: shapes_of: returns name -> shape of a model's parameters, under the names of the tables.
    Raises: CheckpointError with all that prevents the import.
    """
    config_json, weights = read_config_json(path), open_directory(path)
    # By tensors where config.json does not tell: released GLMs have the model_type of GLM-4.
    system = system_in(path, config_json, weights)
    if system is None:
        raise unsupported(path, config_json)
    if (code := code_of(config_json)) and system.model_type not in _WITH_CODE:
        raise CheckpointError(
            f"{path / CONFIG_JSON}: {code}; a {system.model_type} here computes what the class of transformers does. "
            "If that is this model too, remove auto_map from the file."
        )
    check_fields(path, config_json, system)
    system = with_head_names(system, config_json, weights.shapes)
    their_config = transformers_config(system, config_json, path)
    # The class's own default counts where the file says nothing.
    is_tied = not system.may_untie or their_config.tie_word_embeddings
    theirs, problems = normalize_names(weights, system, is_tied)
    config_json, lines = complete_config(system, config_json, theirs, path)
    padding_id = transformers_config(system, config_json, path).pad_token_id
    if isinstance(padding_id, int):  # if not, it is among the problems
        system = system.padded_with(padding_id)
    settings, field_problems = settings_and_problems(system, config_json, theirs, path)
    if settings.get("mtp_layers"):
        layer = FURTHER_LAYER.format(settings["num_layers"])
        if any(name.startswith(layer) for name in theirs.shapes):
            theirs, copy_problems = without_further_copies(theirs, system, settings["num_layers"])
            problems += copy_problems
        else:
            # transformers leaves the layer out when it saves a model, and the field as it was.
            settings["mtp_layers"] = 0
            if config_json.get("num_nextn_predict_layers"):
                lines.append(f"the layer of further tokens (MTP) is not there: no tensor begins with {layer}")
    # All that prevents the import is in one message: a user corrects config.json once.
    problems = [*field_problems, *problems]
    try:
        check_sizes(path, settings, theirs)
    except CheckpointError:
        require_none(path, problems)
        raise
    others = Weights({}, theirs.read)
    if (path / OTHER_HEADS).exists():
        others = open_safetensors(path / OTHER_HEADS)
        present = {option: name for option, name in _HEAD_PARAMETERS.items() if option in system.optional}
        if "task_head" in settings:
            settings |= {option: option_from_shape(option, others, name) for option, name in present.items()}
    try:
        model = build(ModelConfig, settings, "model.")
    except ConfigError as error:
        require_none(path, [*problems, str(error)])
        raise
    shapes = shapes_of(model)
    if lacks_head(system, config_json, theirs, model):
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if not name.startswith("heads.") or name.startswith("heads.sentence.dense.")
        }
    mappings = tensor_mappings(system, shapes, model)
    # A class whose head is tied holds all that a base model does, and is asked for more.
    is_base = is_headless(model) or shapes.keys() != shapes_of(model).keys()
    theirs, ignored = drop_ignored(theirs, mappings, system)
    expected = to_theirs(Weights(shapes, theirs.read), mappings, None, system).shapes
    expected = {name: shape for name, shape in expected.items() if name not in system.zeros}
    problems += _tensor_problems(system, theirs, expected, is_alone=not field_problems)
    require_none(path, problems)
    source = PublishedSource(path, system, settings, theirs, mappings, others, config_json, ignored, is_base)
    for line in (*lines, *_warnings(source, model)):
        log.warning("%s: %s", path, line)
    return source


def lacks_head(
    system: PublishedSystem, config_json: Mapping[str, Any], theirs: Weights, model: ModelConfig
) -> bool:
    """Whether a directory is of a base model: its class is, or it names none, and no tensor is of a head."""
    if is_headless(model):
        return True
    name = architecture(config_json)
    is_named = name is None or is_body(name)
    return is_named and model.task_head.type == "none" and not has_head(system, theirs.shapes)


def is_headless(config: ModelConfig) -> bool:
    """Whether the class of a model predicts neither tokens nor a task: ELECTRA's discriminator, DeBERTa's body."""
    is_body = config.system in ("electra", "deberta_v3") and not (config.head_transform or config.head_bias)
    return is_body and config.task_head.type == "none"


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
    remedy = f"{SAME_MODEL}."
    modules = tuple(f"{module}." for module in head_modules(system))
    if not has_head(system, theirs.shapes) and any(name.startswith(modules) for name in expected):
        remedy += f' A base model comes in where "architectures" is ["{body_class(system)}"].'
    if theirs.shapes.keys() - expected.keys():
        remedy += " What the model computes without can be left out of the file."
    return [f"this describes no model of the weights: {whole}; {remedy}"]


def _warnings(source: PublishedSource, model: ModelConfig) -> Iterator[str]:
    """A line for each tensor and field that an import ignores."""
    system = source.system
    class_name = source.class_name or transformers_class_name(system, model)
    yield from ignored_lines(source.ignored, f"the class {class_name}", source.theirs.doubles)
    for name in system.untrained:
        if value := source.config_json.get(name):
            yield f"{name} is {shown(value)}; it is not trained here: no layer is dropped"


def load_class(
    directory: Path,
    class_name: str,
    dtype: torch.dtype = torch.float32,
    source: PublishedSource | None = None,
) -> torch.nn.Module:
    """A model as its users load it.

    Args: source: of an import; it gives the fields of config.json and the tensors to ignore.
    Raises: CheckpointError for missing or unexpected tensors, or without a class.
    """
    if not hasattr(transformers, class_name):
        raise CheckpointError(
            f"{directory}: transformers has no class {class_name}, with which a proof could compare; add --no-verify."
        )
    cls = getattr(transformers, class_name)
    config = (
        {}
        if source is None
        else {"config": transformers_config(source.system, source.config_json, directory)}
    )
    with by_transformers(directory), quiet():
        # The class only warns of missing tensors and initializes them: here such a report is an error.
        model, loading = cls.from_pretrained(
            directory, dtype=dtype, output_loading_info=True, local_files_only=True, **config
        )
    ignored = () if source is None else tuple(source.ignored)
    # The class ignores the layer of further tokens by its number in GLM-4.5 and -Air, and in no other model.
    further = FURTHER_LAYER.format(getattr(model.config, "num_hidden_layers", None))
    has_further = getattr(model.config, "num_nextn_predict_layers", 0)
    unexpected = [
        name
        for name in loading["unexpected_keys"]
        if not (_is_among(name, ignored) or (has_further and name.startswith(further)))
    ]
    missing = [name for name in loading["missing_keys"] if not (is_body(class_name) and _POOLER.search(name))]
    mismatched = [str(each) for each in loading["mismatched_keys"]]
    reports = {"unexpected keys": unexpected, "missing keys": missing, "mismatched keys": mismatched}
    if problems := [f"{what}: {listed(names)}" for what, names in reports.items() if names]:
        raise CheckpointError(f"{directory}: {class_name} reports {'; '.join(problems)}.")
    return model.eval()


def _is_among(name: str, names: Sequence[str]) -> bool:
    """Whether a name is in a list, with the prefix of the base model or without it on either side."""
    return any(name == each or each.endswith(f".{name}") or name.endswith(f".{each}") for each in names)
