"""Adapters of peft: adapter_config.json and adapter_model.safetensors, written from a run and imported with one.

    write_adapter     the updates of LoRA of a run, as save_pretrained of peft writes them
    import_adapter    such a directory, and the run of the model that it was trained on -> a run with both

A task's head that was trained too is among the files, as peft's `modules_to_save`. peft is not needed; tests compare
with it. Source: peft 0.21.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.files import copy_files
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, merge, to_tree
from megatron_lite.checkpoint.manifest import (
    TASK_HEAD,
    Checkpoint,
    checkpoint_name,
    checkpoints_in,
    is_checkpoint,
    list_checkpoints,
)
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.checkpoint.resolve_path import ADAPTER_CONFIG, resolve_model
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.lora import LORA, WHOLE, LoraConfig, class_layers
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.ignored_tensors import listed
from megatron_lite.hf.common.imported_run import write_imported_run
from megatron_lite.hf.common.lora import (
    GLM_PREFIX,
    ClassModule,
    Modules,
    exported_name,
    own_modules,
    split_updates,
)
from megatron_lite.hf.common.weights import (
    ADAPTER_SOURCE,
    DTYPES,
    IMPORTED_FILES,
    METADATA,
    PADDING_ROWS,
    SOURCE,
    Weights,
    check_shapes,
    new_directory,
    open_pickle,
    open_safetensors,
    read_json,
    write_json,
)
from megatron_lite.hf.published.format import stack_of
from megatron_lite.hf.published.stack import class_layout
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME
from megatron_lite.hf.published.tensor_map import class_modules
from megatron_lite.inference.open_run import OpenRun, open_run
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.flops import parameter_shapes

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of all names in peft's files
_TASK_TYPES = {"classes": "SEQ_CLS", "values": "SEQ_CLS", "tags": "TOKEN_CLS", "spans": "QUESTION_ANS"}
# They learn inputs, or mix adapters by the input, which no weights can hold.
_NEVER_MERGED = ("PROMPT", "PREFIX", "P_TUNING", "CPT", "XLORA")
_ENDS = {".lora_A.weight": "a", ".lora_B.weight": "b"}
_MERGE = "merge the adapter with peft (merge_and_unload), and import what save_pretrained then writes"
# Fields of adapter_config.json that an import reads, or that change nothing of what was trained. Of all others it takes
# the empty values alone, since each means another function.
_READ = frozenset(
    (
        "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "modules_to_save",
        "fan_in_fan_out", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "megatron_core", "qalora_group_size", "ensure_weight_tying",
    )
)  # fmt: skip
_ONE_OF = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # Others begin with a changed base model, whose weights are in no file of the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}


@dataclass(frozen=True)
class ClassNames:
    """The names that a run's model has in its class of transformers."""

    modules: Modules  # that may have an update
    head: Mapping[str, str]  # tensors of a task's head -> our names
    prefix: str  # of the body, which adapters of a class without a head lack


def class_names(run: OpenRun, weights: Weights) -> ClassNames:
    """The names of a run's class. Raises: CheckpointError for a model that no class has."""
    model = replace(run.config.model, lora=None)
    if model.system not in SYSTEMS_BY_NAME:
        of_head = [name for name in weights.shapes if name.startswith(TASK_HEAD)]
        head = {exported_name(name): name for name in of_head}
        return ClassNames(own_modules(model, exported_name), head, GLM_PREFIX)
    layout = class_layout(stack_of(run, weights), "fp32")
    return ClassNames(
        {layout.name(name): each for name, each in class_modules(layout.mappings, model).items()},
        {name: each.ours for name, each in layout.mappings.items() if each.ours.startswith(TASK_HEAD)},
        layout.system.prefix,
    )


# Writing


def write_adapter(directory: Path, run: OpenRun, weights: Weights, dtype: str) -> None:
    """Write peft's files. Args: weights: of the run. Raises: CheckpointError."""
    settings = run.config.model.lora
    if settings is None:
        raise CheckpointError(
            f"checkpoint {run.checkpoint.path} has no updates of LoRA (model.lora is null); export the model itself, "
            "without --adapter."
        )
    names, (base, updates) = class_names(run, weights), split_updates(weights)
    chosen = {name: each for name, each in names.modules.items() if f"{each.ours}.a" in updates.shapes}
    reads: dict[str, Callable[[], torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in chosen.items():
        for end, factor in _ENDS.items():
            key, ours = f"{_PREFIX}{name}{end}", f"{module.ours}.{factor}"
            shapes[key], reads[key] = updates.shapes[ours], partial(_read_factor, updates, ours, module)
    for name, ours in names.head.items():
        shapes[f"{_PREFIX}{name}"], reads[f"{_PREFIX}{name}"] = base.shapes[ours], partial(base.read, ours)
    tensors = (reads[key]() for key in shapes)
    write_tensors(directory / ADAPTER_WEIGHTS, shapes, tensors, DTYPES[dtype], METADATA)
    write_json(
        directory / ADAPTER_CONFIG,
        {
            "peft_type": "LORA",
            **_origin(run),
            "r": settings.rank,
            "lora_alpha": int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,
            "lora_dropout": settings.dropout,
            "use_rslora": settings.rank_stabilized,
            "target_modules": _target_modules(run.config.model, names.modules, chosen),
            "task_type": _task_type(run),
            "modules_to_save": sorted({*map(_saved_module, names.head)}) or None,
            "fan_in_fan_out": any(module.is_transposed for module in chosen.values()),
            "bias": "none",
            "init_lora_weights": True,
            "inference_mode": True,
        },
    )


def _read_factor(updates: Weights, ours: str, module: ClassModule) -> torch.Tensor:
    factor = updates.read(ours)
    return factor if ours.endswith(".a") else module.b_to_theirs(factor)


def _origin(run: OpenRun) -> dict[str, Any]:
    """The repository of the hub that has the weights under the updates, if one has them."""
    begin = run.config.checkpoint.initialize_from
    # An imported adapter's run has the note itself; otherwise it is in the run that training began with.
    directory, is_untrained = run.checkpoint.path.parent.parent, True
    if begin is not None:
        checkpoints = (
            [Path(begin)] if is_checkpoint(Path(begin)) else list_checkpoints(checkpoints_in(Path(begin)))
        )
        is_untrained = [path.name for path in checkpoints] == [checkpoint_name(0)]
        directory = checkpoints[0].parent.parent if checkpoints else directory
    path = directory / SOURCE
    source = read_json(path) if is_untrained and path.exists() else {}
    return {"base_model_name_or_path": source.get("repository"), "revision": source.get("commit")}


def _task_type(run: OpenRun) -> str | None:
    """The class of peft that opens the adapter; None for masked language models, for which it has no class."""
    model = run.config.model
    if model.task_head.type != "none":
        return _TASK_TYPES.get(model.task_head.type)
    if model.decoder_layers:
        return "SEQ_2_SEQ_LM"
    is_causal = model.system in SYSTEMS_BY_NAME and SYSTEMS_BY_NAME[model.system].is_causal
    return "CAUSAL_LM" if is_causal else None


def _saved_module(name: str) -> str:
    """The module of a tensor of a task's head; one of several layers is one module, as peft's own classes save it."""
    first = name.partition(".")[0]
    return first if first in ("classifier", "score") else name.rpartition(".")[0]


def _target_modules(config: ModelConfig, modules: Modules, chosen: Modules) -> list[str]:
    """Ends of names by which peft finds exactly the modules with an update; whole names where an end finds more."""
    found = set()
    for end in {name for names in class_layers(config).values() for name in names}:
        with_end = [name for name in modules if name == end or name.endswith(f".{end}")]
        is_exact = all(name in chosen for name in with_end)
        found |= {end} if with_end and is_exact else {name for name in with_end if name in chosen}
    return sorted(found)


# Reading


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).exists()


def import_adapter(source: Path, base: Path, output: Path, tree: Mapping[str, Any]) -> None:
    """Write a run with the weights of the run `base` and the updates of an adapter.

    Args: base: a run or checkpoint of the model that the adapter was trained on. tree: settings of the new run.
    Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
    """
    with new_directory(output) as directory:
        settings = _read_settings(source / ADAPTER_CONFIG)
        adapter = _open_weights(source)
        run = open_run(resolve_model(base, "--base"))
        _require_base(run, base)
        weights = Weights(run.checkpoint.shapes, weight_reader(run.checkpoint))
        names = class_names(run, weights)
        given = _our_tensors(source, adapter, names)
        config = _config(run, settings, given, tree)
        expected = parameter_shapes(config.model)
        new = {name: shape for name, shape in expected.items() if LORA in name or name in given.shapes}
        _require_all_layers(given, new, source)
        check_shapes(given, new, source, "LoRA adapter")
        write_imported_run(
            directory,
            output,
            Weights(expected, lambda name: (given if name in new else weights).read(name)),
            config,
        )
        _copy_files(run.checkpoint, directory)
        write_json(directory / ADAPTER_SOURCE, {"repository": None, "commit": None})


def _require_all_layers(given: Weights, new: Mapping[str, Any], source: Path) -> None:
    """Raise CheckpointError for an adapter of some layers only."""
    missing = {name.rpartition(".")[0] for name in new.keys() - given.shapes.keys() if LORA in name}
    whole = {name.rpartition(LORA)[0] for name in missing}
    if whole:
        raise CheckpointError(
            f"{source} has updates of some layers only, none of {listed(whole)}; only LoRA of all blocks alike can be "
            f"imported: {_MERGE}."
        )


def _open_weights(source: Path) -> Weights:
    pickled = source / "adapter_model.bin"  # of older versions of peft
    is_pickled = pickled.exists() and not (source / ADAPTER_WEIGHTS).exists()
    return open_pickle(pickled) if is_pickled else open_safetensors(source / ADAPTER_WEIGHTS)


def _require_base(run: OpenRun, base: Path) -> None:
    if run.config.model.lora is not None:
        raise CheckpointError(
            f"--base {base} has updates of LoRA itself; export it, which merges them, import that, and give the result."
        )
    run.require_one_transformer()
    if model_spec(run.config).huggingface is not None:
        raise CheckpointError(f"--base {base} is not of one Transformer; LoRA updates one.")


def _read_settings(path: Path) -> LoraConfig:
    """The settings of adapter_config.json, without targets: the tensors tell them.

    Raises: CheckpointError for an adapter that computes something else than updates here do.
    """
    fields = read_json(path)
    problems = []
    kind = fields.get("peft_type")
    if any(each in str(kind) for each in _NEVER_MERGED):
        raise CheckpointError(
            f"{path}: peft_type is {shown(kind)}, which is no change of weights, so that it can be neither imported "
            "nor merged; train an adapter with peft_type LORA instead."
        )
    for name, value in fields.items():
        allowed: tuple[Any, ...] = _ONE_OF.get(name, (None, False, {}, [], ""))
        if name not in _READ and value not in allowed:
            only = ", ".join(json.dumps(each) for each in allowed)
            problems.append(f"{name} is {shown(value)}" + f" (only {only})" * (name in _ONE_OF))
    problems += [f"{name} is missing" for name in ("peft_type", "r", "lora_alpha") if name not in fields]
    if problems:
        raise CheckpointError(
            f"{path}: {'; '.join(problems)}; only plain LoRA of all blocks alike can be imported: {_MERGE}."
        )
    tree = {
        "rank": fields["r"],
        "alpha": fields["lora_alpha"],
        "dropout": fields.get("lora_dropout") or 0.0,
        "rank_stabilized": fields.get("use_rslora") or False,
    }
    try:
        return cast(LoraConfig, build(LoraConfig, tree, "model.lora."))
    except ConfigError as error:  # it names settings alone, of which the user has set none
        raise CheckpointError(f"{path}: {error}") from None


def _our_tensors(source: Path, adapter: Weights, names: ClassNames) -> Weights:
    """The tensors of an adapter under our names. Raises: CheckpointError for one of another model."""
    # Our name -> the file's, and the module of an update.
    keys: dict[str, tuple[str, ClassModule | None]] = {}
    unknown, repeated = [], []
    for key in adapter.shapes:
        name = key.removeprefix(_PREFIX)
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None and name in names.head:
            repeated += [name] * (names.head[name] in keys)
            keys[names.head[name]] = key, None
            continue
        module_name = name.removesuffix(end or "")
        # The class of a body and a class with a head name the same module with and without the prefix.
        spelled = (module_name, names.prefix + module_name, module_name.removeprefix(names.prefix))
        module = next((names.modules[each] for each in spelled if each in names.modules), None)
        if end is None or module is None:
            unknown.append(name)
        else:
            ours = f"{module.ours}.{_ENDS[end]}"
            repeated += [name] * (ours in keys)
            keys[ours] = key, module
    if unknown:
        raise CheckpointError(
            f"{source} has {listed(unknown)}, but --base has no linear layer of a block and no head of that name; give "
            "the run of the model that the adapter was trained on, with its head. An adapter that also has embeddings, "
            f"norms, or updates of a head's layers (peft's all-linear has these) cannot be imported: {_MERGE}."
        )
    if repeated:
        raise CheckpointError(
            f"{source} has {listed(repeated)} under two names, with and without the prefix {names.prefix}; save the "
            "adapter again with peft."
        )

    def read(ours: str) -> torch.Tensor:
        key, module = keys[ours]
        tensor = adapter.read(key)
        return tensor if module is None or ours.endswith(".a") else module.b_to_ours(tensor)

    return Weights({ours: adapter.shapes[key] for ours, (key, _) in keys.items()}, read)


def _config(run: OpenRun, settings: LoraConfig, given: Weights, tree: Mapping[str, Any]) -> Config:
    """The configuration of the new run. Args: settings: without targets. Raises: ConfigError."""
    targets = set()
    for name in given.shapes:
        if LORA in name:
            layer, _, rest = name.partition(LORA)
            path, part = layer.split(".", 2)[2], rest.split(".")[0]
            targets.add(path if part == WHOLE else f"{path.rpartition('.')[0]}.{part}")
    lora = to_tree(replace(settings, targets=tuple(sorted(targets))))
    changes: dict[str, Any] = {
        "model": {"lora": lora},
        "ema": {"decay": None, "use": False},
        "phases": [],  # of the base, whose model is that of its last one
        # Of the base, which was trained since: `_origin` would name its first weights as those under the updates.
        "checkpoint": {"initialize_from": None, "initialize": "weights"},
    }
    if run.config.task is not None:
        changes["finetune"] = {"trained": "lora"}
    return cast(Config, build(Config, merge(merge(to_tree(run.config), changes), tree)))


def _copy_files(base: Checkpoint, directory: Path) -> None:
    """What an export of the run needs of the import that it is of."""
    origin = base.path.parent.parent
    if (origin / IMPORTED_FILES).is_dir():
        copy_files(origin / IMPORTED_FILES, directory / IMPORTED_FILES)
    # A trained base is no longer what the hub has.
    for name in (PADDING_ROWS, *[SOURCE] * (base.step == 0)):
        if (origin / name).exists():
            shutil.copyfile(origin / name, directory / name)
