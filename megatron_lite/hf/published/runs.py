"""Import a published system's directory as a run, and export a run to the class of transformers that its users load.

Both are proved on the logits of that class. An import stores what the model does not hold in the run's directory: the
rest of config.json, the tokenizer's files, and rows that no token uses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, merge
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.by_name import task_labels
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.lora import LoraConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.systems import reads_both_ways, with_objective
from megatron_lite.config.task_rows import with_task_rows
from megatron_lite.config.tree import Config
from megatron_lite.hf.files import proof
from megatron_lite.hf.files.config_json import by_transformers, write_config
from megatron_lite.hf.files.first_checkpoint import write_imported_run
from megatron_lite.hf.files.lora import merged, split_updates
from megatron_lite.hf.files.model_card import published_card
from megatron_lite.hf.files.proof_report import Report
from megatron_lite.hf.files.system_table import PublishedSystem
from megatron_lite.hf.files.tokenizer_proof import prove_exported
from megatron_lite.hf.files.weights import (
    DTYPES,
    IMPORTED_FILES,
    METADATA,
    Weights,
    new_directory,
    open_safetensors,
    read_json,
    write_json,
    write_sharded,
)
from megatron_lite.hf.published.heads import (
    OTHER_HEADS,
    SEVERAL_LABELS,
    task_section,
    transformers_class_name,
)
from megatron_lite.hf.published.ids import generation_ids, special_ids, write_generation_config
from megatron_lite.hf.published.proof import ask
from megatron_lite.hf.published.recognition import body_class, is_body
from megatron_lite.hf.published.source import PublishedSource, is_headless, open_published
from megatron_lite.hf.published.systems import published_system
from megatron_lite.hf.published.tensor_map import (
    TensorMapping,
    class_modules,
    skipped_rows,
    tensor_mappings,
    to_ours,
    to_theirs,
    with_tied_copies,
)
from megatron_lite.hf.published.tokenizers import (
    copy_tokenizer_files,
    import_tokenizer,
    puts_before_texts,
    require_same_ids,
    write_tokenizer,
)
from megatron_lite.hf.published.usual import with_sizes
from megatron_lite.hf.published.versions import oldest_version
from megatron_lite.hf.published.write_config import different_options, former_fields, hf_config
from megatron_lite.inference.decoders import template_of
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.inference.states import PromptTemplate
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.init import initialize_parameters

log = logging.getLogger(__name__)

SKIPPED_ROWS = "rows.safetensors"  # file in that directory
# Parameters that no class of transformers has: of SpanBERT's head, of class_heads, and of DeBERTa's discriminator.
_NOT_IN_CLASSES = ("heads.span_boundary.", "heads.boundary_bias", "heads.sentence.classifiers.", "replaced.")


def import_published(
    path: Path,
    output: Path,
    tree: Mapping[str, Any],
    *,
    verify: bool = True,
    tolerance: float = proof.TOLERANCE,
) -> proof.Proof | None:
    """Write a run directory with one checkpoint at step 0, its config.yaml, and what an export needs.

    Args: tree: configuration of the new run. It must not contradict the model; `model.system` may name a system whose
        model has more heads (SpanBERT on a BERT).
    Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
    """
    with new_directory(output) as directory:
        # Configuration and shapes first: a directory that cannot be imported is refused before a weight is read.
        source = open_published(path)
        copy_imported_files(source, directory / IMPORTED_FILES)
        config = build_import_config(source, directory, tree, verify)
        weights = with_new_heads(source, config, parameter_shapes(config.model))
        checkpoint = write_imported_run(directory, output, weights, config)
        if not verify:
            return None
        class_name = source.class_name or transformers_class_name(source.system, config.model)

        def ask_class(dtype: torch.dtype) -> list[proof.Question]:
            return ask(path, class_name, config.model, dtype=dtype, source=source)

        return proof.prove_import(ask_class, checkpoint, config.model, path, tolerance)


def build_import_config(
    source: PublishedSource, directory: Path, tree: Mapping[str, Any], verify: bool
) -> Config:
    """The configuration of the new run, with the directory's tokenizer if the tree names none."""
    model = tree.get("model")
    overrides = {k: v for k, v in model.items() if v is not None} if isinstance(model, Mapping) else {}
    tokenizer = {"added_tokens": "none", **(tree.get("tokenizer") or {})}
    is_imported = "path" not in tokenizer
    if is_imported:
        with by_transformers(source.path):
            tokenizer = import_tokenizer(source.path, directory / IMPORTED_FILES, tokenizer)
    require_rows(load_tokenizer(build(TokenizerConfig, tokenizer, "tokenizer.")), source)
    # Tables may be longer than the tokenizer (Qwen): the model's size counts.
    tokenizer = {"vocab_size": source.settings["vocab_size"], **tokenizer}
    tree = {**tree, "model": merge(source.settings, overrides), "tokenizer": tokenizer}
    if head := source.settings.get("task_head", {}).get("type"):
        tree["task"] = {
            **task_section(head, source.config_json),
            **_task_length(build(ModelConfig, source.settings, "model.")),
            **(tree.get("task") or {}),
        }
    loaded = load_tokenizer(build(TokenizerConfig, tokenizer, "tokenizer."))
    check_vocabulary(loaded, source)
    begin = source.system.begin
    if begin in loaded.lacking:
        # SmolLM2 is a Llama whose tokenizer has no token that begins a text, and was trained without one.
        begin = "none"
    elif begin == "none" and is_imported:
        # DeepSeek's Qwen2 was trained with one.
        begins = puts_before_texts("cls", loaded, source.path, directory / IMPORTED_FILES)
        begin = "cls" if begins else "none"
    defaults = {key: {"begin": begin} for key in ("causal", "fill_in_middle")}
    tree = with_sizes(source.path, source.settings, with_objective(merge(defaults, tree)))
    config = build(Config, tree)
    require_same_model("model", config.model, source)
    if verify and not is_imported:
        require_same_ids("tokenizer", loaded, source.path, directory / IMPORTED_FILES)
    return with_task_rows(config)


def _task_length(model: ModelConfig) -> dict[str, int]:
    """task.sequence_length of a model whose table of positions is shorter than the default."""
    default: Any = TaskConfig.__dataclass_fields__["sequence_length"].default
    is_short = model.has_position_tables and model.max_position < default
    return {"sequence_length": model.max_position} if is_short else {}


def require_same_model(key: str, model: ModelConfig, source: PublishedSource) -> None:
    """Raise ConfigError unless a section computes what the imported weights do. Args: key: of the section."""
    imported = build(ModelConfig, source.settings, "model.")
    for name, (ours, theirs) in sorted(different_options(model, imported).items()):
        raise ConfigError(
            f"{key}.{name} is {shown(ours)}, but {source.path} has {shown(theirs)}; leave it out, or set it to that."
        )


def require_rows(tokenizer: Tokenizer, source: PublishedSource) -> None:
    """Raise CheckpointError for a tokenizer with tokens for which the word embedding has no row."""
    rows = source.settings["vocab_size"]
    without_row = [tokenizer.token_to_text(i) for i in range(rows, tokenizer.num_tokens)]
    if not without_row:
        return
    added = tokenizer.config.added_tokens
    remedy = (
        "remove what has none from its tokenizer files, or lengthen the table with transformers "
        f"(resize_token_embeddings({tokenizer.num_tokens})) and save the model"
        if added == "none"
        else f"set tokenizer.added_tokens=none, which {added} adds to"
    )
    raise CheckpointError(
        f"{source.path} has {rows} rows of word embeddings, but its tokenizer {tokenizer.num_tokens} tokens; without "
        f"a row are {', '.join(map(shown, without_row[:5]))}{', ...' if len(without_row) > 5 else ''}: {remedy}."
    )


def check_vocabulary(tokenizer: Tokenizer, source: PublishedSource) -> None:
    """Raise CheckpointError for a tokenizer of another size, or padding by which the class would count otherwise."""
    rows, system = source.settings["vocab_size"], source.system
    if tokenizer.vocab_size != rows:
        raise CheckpointError(
            f"{source.path} has {rows} rows of word embeddings, but the tokenizer has {tokenizer.vocab_size} tokens; "
            "use the tokenizer of this model, with tokenizer.added_tokens=none."
        )
    pad = system.skipped_positions - 1
    if system.skips_pad and tokenizer.special.pad != pad:
        raise CheckpointError(
            f"{source.path / 'config.json'}: pad_token_id is {pad}, from which a {system.model_type} counts positions, "
            f"but the tokenizer pads with {tokenizer.special.pad}; fetch config.json and the tokenizer from one model."
        )


def copy_imported_files(source: PublishedSource, directory: Path) -> None:
    """Write what an export writes again: config.json, the tokenizer's files, and rows that the model does not have."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", source.config_json)
    copy_tokenizer_files(source.path, directory)
    rows = dict(skipped_rows(source.theirs, source.mappings))
    if rows:
        shapes = {name: tuple(tensor.shape) for name, tensor in rows.items()}
        write_tensors(directory / SKIPPED_ROWS, shapes, rows.values(), metadata=METADATA)


def with_new_heads(source: PublishedSource, config: Config, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """The imported tensors, and initial values of heads that the files do not have, or not in this size.

    Args: shapes: name -> shape of the run's parameters that come from the source.
    """
    weights, others = to_ours(source.theirs, source.mappings), source.others
    missing = [
        name for name in shapes if name not in weights.shapes and others.shapes.get(name) != shapes[name]
    ]
    if missing:
        log.warning("%s does not have %s; they are initialized", source.path, ", ".join(sorted(missing)))
    # Drawn by the run's own rules and seed, as a new run draws them.
    new = {name: torch.nn.Parameter(torch.empty(shapes[name])) for name in missing}
    initialize_parameters(new.items(), config.model, config.training.seed)

    def read(name: str) -> torch.Tensor:
        if name in new:
            return new[name].detach()
        return weights.read(name) if name in weights.shapes else others.read(name)

    return Weights(shapes, read)


def trained_template(run: OpenRun) -> PromptTemplate | None:
    """How the run's training begins and ends a completion; None: it was not trained here, or not to generate."""
    imported = run.checkpoint.path.parent.parent / IMPORTED_FILES
    # An import without training generates as its source does.
    if imported.exists() and run.checkpoint.step == 0:
        return None
    return template_of(run.objectives, run.tokenizer)


def write_published(directory: Path, weights: Weights, run: OpenRun, dtype: str, max_shard_bytes: int) -> str:
    """Write a run's model as a directory of its class, with its card. Returns: the name of the class."""
    stack = stack_of(run, weights)
    class_name, extra_file = write_stack(directory, stack, dtype, max_shard_bytes)
    both_ways = [
        choice.name for choice in run.objectives if reads_both_ways(run.config.model.system, choice.name)
    ]
    if both_ways:
        log.warning(
            "%s reads texts from left to right, but the run was trained on %s, which reads them in both directions",
            class_name,
            ", ".join(both_ways),
        )
    oldest = oldest_version(class_name, run.config.model, read_json(directory / "config.json"))
    if oldest.startswith("5"):
        log.warning("transformers before %s does not compute what this %s does", oldest, class_name)
    card = published_card(run, class_name, oldest, extra_file=extra_file)
    (directory / "README.md").write_text(card, encoding="utf-8")
    return class_name


def stack_of(run: OpenRun, weights: Weights) -> Stack:
    """The model of a run as `write_stack` takes it."""
    task = run.config.task
    base, updates = split_updates(weights)
    return Stack(
        replace(run.config.model, lora=None),
        base,
        run.tokenizer,
        run.checkpoint.path.parent.parent / IMPORTED_FILES,
        f"checkpoint {run.checkpoint.path}",
        labels=() if task is None else task_labels(task),
        problem_type=SEVERAL_LABELS if task is not None and task.kind == "typing" else None,
        template=trained_template(run),
        lora=run.config.model.lora,
        updates=updates,
    )


def prove_published(run: OpenRun, directory: Path, class_name: str, dtype: str, tolerance: float) -> Report:
    """Compare a run with what write_published wrote. Raises: CheckpointError unless both compute the same.

    Args: dtype: of the written weights; the run's weights are rounded to it.
    """
    template = trained_template(run)
    start = None if template is None else next(iter(template.start), None)
    tokenizers = {"tokenizer": prove_exported(run.tokenizer, directory).as_record()}

    def ask_class(computed: torch.dtype) -> list[proof.Question]:
        return ask(directory, class_name, run.config.model, start, computed)

    return Report(proof.prove_export(ask_class, run, dtype, tolerance), tolerance, tokenizers)


@dataclass(frozen=True)
class Stack:
    """A Transformer to write as a directory of its class."""

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    imported: Path  # directory of the files of its import, if it was imported
    name: str  # in messages
    roles: Mapping[str, str] | None = None  # field of config.json for a token -> its role; None: the system's
    labels: Sequence[str] = ()  # of a task's head
    problem_type: str | None = None  # of transformers, where a text has several labels
    template: PromptTemplate | None = None  # in which it was trained here to generate, if it was
    lora: LoraConfig | None = None  # of the updates that are merged into the weights
    updates: Weights | None = None


@dataclass(frozen=True)
class ClassLayout:
    """The class of transformers of a stack, and how its tensors map to ours."""

    class_name: str
    class_config: PretrainedConfig
    system: PublishedSystem
    mappings: Mapping[str, TensorMapping]  # by the names in a class with a head

    def name(self, full: str) -> str:
        """The name in the class of a body, which lacks the prefix that a class with a head has."""
        return full.removeprefix(self.system.prefix) if is_body(self.class_name) else full


def class_layout(stack: Stack, dtype: str) -> ClassLayout:
    """Raises: CheckpointError for a stack that no class has."""
    config, weights, imported = stack.config, stack.weights, stack.imported
    system = published_system(config)
    ids = special_ids(stack.tokenizer, system, stack.roles, stack.name)
    # An export of an import begins with the fields of its source, so that what is not trained here stays as it was.
    base = read_json(imported / "config.json") if imported.exists() else ids
    base |= generation_ids(system, stack.template)
    base |= {} if stack.problem_type is None else {"problem_type": stack.problem_type}
    class_config = hf_config(
        config, {**base, "dtype": str(DTYPES[dtype]).removeprefix("torch.")}, stack.labels
    )
    system = system.padded_with(class_config.pad_token_id)
    if system.legacy is not None and class_config.legacy:
        system = system.legacy
    mappings = tensor_mappings(system, weights.shapes, config)
    class_name = transformers_class_name(system, config)
    if is_headless(config) and not any(name.startswith("replaced.") for name in weights.shapes):
        class_name = body_class(system)  # of a discriminator without its generator
        class_config.architectures = [class_name]
        mappings = {name: each for name, each in mappings.items() if not each.ours.startswith("heads.")}
    return ClassLayout(class_name, class_config, system, mappings)


def write_stack(directory: Path, stack: Stack, dtype: str, max_shard_bytes: int) -> tuple[str, str | None]:
    """Write config.json, weights and tokenizer files. Raises: CheckpointError.

    Returns: the name of the class, and the file of the heads that it does not have, if the stack has such heads.
    """
    config, weights, imported = stack.config, stack.weights, stack.imported
    layout = class_layout(stack, dtype)
    class_name, class_config = layout.class_name, layout.class_config
    system, mappings = layout.system, layout.mappings
    has_head = config.task_head.type == "none" and not is_headless(config)
    extra_prefixes = _NOT_IN_CLASSES if has_head else ("heads.", *_NOT_IN_CLASSES)
    mapped = {each.ours for each in mappings.values()}
    extra = {
        ours: shape
        for ours, shape in weights.shapes.items()
        if ours.startswith(extra_prefixes) and ours not in mapped
    }
    # A parameter that no tensor holds would be lost without a message.
    if left := weights.shapes.keys() - mapped - extra.keys():
        raise CheckpointError(
            f"{stack.name} has {', '.join(sorted(left)[:3])}, which the class {class_name} has not; only "
            "models of the published architecture can be exported."
        )
    first_rows = imported / SKIPPED_ROWS
    theirs = to_theirs(
        weights, mappings, open_safetensors(first_rows) if first_rows.exists() else None, system
    )
    if stack.lora is not None and stack.updates is not None:
        theirs = merged(theirs, stack.updates, class_modules(mappings, config), stack.lora)
    theirs = theirs.renamed({layout.name(name): name for name in theirs.shapes})
    write_sharded(directory, with_tied_copies(theirs, system, config), DTYPES[dtype], max_shard_bytes)
    if extra:
        write_tensors(directory / OTHER_HEADS, extra, map(weights.read, extra), DTYPES[dtype], METADATA)
    write_config(directory, class_config, former_fields(config))
    ids = special_ids(stack.tokenizer, published_system(config), stack.roles, stack.name)
    present = {name: i for name, i in ids.items() if i is not None}
    has_segments = config.segments > 1 or config.relative == "xlnet"
    write_tokenizer(directory, stack.tokenizer, present, imported, config.system, has_segments=has_segments)
    write_generation_config(directory, class_config, system, stack.template, is_imported=imported.exists())
    return class_name, OTHER_HEADS if extra else None
