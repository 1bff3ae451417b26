"""Import a published system's directory as a run, and export a run to the class of transformers that its users load.

Both are proved on the logits of that class. What the model does not hold is kept in the run's directory: the rest of
config.json, the tokenizer's files, and rows that no token uses.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from data_utils.base.errors import CheckpointError, ConfigError
from data_utils.base.setting_files import shown
from data_utils.base.settings import build, merge, to_tree
from data_utils.objectives.planes import (
    DOC,
    FIELDS,
    OBJECTIVE,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    SEGMENT_IDS,
    TOKENS,
    WEIGHTS,
)
from data_utils.tasks.readers import labels_of
from data_utils.text.tokenizers import Tokenizer, load_tokenizer
from megatron_lite.checkpoint.manifest import checkpoint_name, read_checkpoint
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.generate.open_run import OpenRun, load_model
from megatron_lite.hf import proof
from megatron_lite.hf.conversion import (
    PublishedSource,
    hf_config,
    kept_rows,
    load_class,
    open_published,
    parts_of,
    system_of,
    to_ours,
    to_theirs,
)
from megatron_lite.hf.first_checkpoint import write_training_checkpoint
from megatron_lite.hf.model_card import published_card
from megatron_lite.hf.published_heads import OTHER_HEADS, class_of_model, task_section
from megatron_lite.hf.published_tokenizers import (
    brought_tokenizer,
    copy_tokenizer_files,
    require_same_ids,
    write_tokenizer,
)
from megatron_lite.hf.weights import (
    DTYPES,
    METADATA,
    Weights,
    new_directory,
    open_safetensors,
    read_json,
    write_sharded,
)
from megatron_lite.model.batch import Batch
from megatron_lite.model.counts import parameter_shapes
from megatron_lite.model.glm import GLM, initialize_parameters
from megatron_lite.model.memory import read_segment
from megatron_lite.model.model_input import prepare

log = logging.getLogger(__name__)

KEPT_FILES = "published"  # directory in a run's: files of the import that an export brings back
KEPT_ROWS = "rows.safetensors"  # in it
# Options that a user may change: they do not alter what the imported weights compute.
_FREE = frozenset(
    ("embedding_dropout", "attention_dropout", "activation_dropout", "output_dropout", "final_dropout",
     "sentence_dropout", "task_dropout", "task_pooler", "init", "init_std", "embedding_gradient_shrink",
     "span_boundary_places", "system")
)  # fmt: skip
EXTRA_WEIGHTS = (
    "span_boundary.safetensors"  # beside an export: SpanBERT's head, which no class of transformers has
)
_XLNET_INPUTS = {"input_ids": TOKENS, "token_type_ids": SEGMENT_IDS}
_SPAN_BOUNDARY = ("heads.span_boundary.", "heads.boundary_bias")


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
        source = open_published(path)
        keep_files(source, directory / KEPT_FILES)
        config = _config(source, output, directory, tree, verify)
        checkpoint = directory / "checkpoints" / checkpoint_name(0)
        weights = _with_new_heads(source, config)
        write_training_checkpoint(checkpoint, weights, config)
        (directory / "config.yaml").write_text(
            yaml.safe_dump(to_tree(config), sort_keys=False), encoding="utf-8"
        )
        if not verify:
            return None
        model = load_model(read_checkpoint(checkpoint), config.model)
        result = compare_logits(model, path, class_of_model(source.system, config.model), tolerance)
        result.require(tolerance, f"the import of {path}")
        return result


def _config(
    source: PublishedSource, output: Path, directory: Path, tree: Mapping[str, Any], verify: bool
) -> Config:
    model = tree.get("model")
    given = {k: v for k, v in model.items() if v is not None} if isinstance(model, Mapping) else {}
    rows = source.settings["vocab_size"]
    tokenizer = dict(tree.get("tokenizer") or {})
    brought = "path" not in tokenizer
    if brought:
        tokenizer = brought_tokenizer(source.path, directory / KEPT_FILES, tokenizer)
    tokenizer = {"added_tokens": "none", "vocab_size": rows, **tokenizer}
    tree = {**tree, "model": {**source.settings, **given}, "tokenizer": tokenizer}
    if head := source.settings.get("task_head"):
        tree["task"] = {
            **task_section(head, read_json(source.path / "config.json")),
            **(tree.get("task") or {}),
        }
    config = build(Config, merge(tree, {"run": {"directory": str(output)}}))
    require_same_model("model", config.model, source)
    assert config.tokenizer is not None
    loaded = load_tokenizer(config.tokenizer)
    check_vocabulary(loaded, rows, source.path)
    if verify and not brought:
        require_same_ids("tokenizer", loaded, source.path)
    if brought:
        path = str(output / Path(config.tokenizer.path).relative_to(directory))
        config = replace(config, tokenizer=replace(config.tokenizer, path=path))
    return replace(config, tokenizer=config.tokenizer.absolute())  # type: ignore[union-attr]


def require_same_model(key: str, model: ModelConfig, source: PublishedSource) -> None:
    """Raise ConfigError unless a section computes what the imported weights do. Args: key: of the section."""
    imported = build(ModelConfig, source.settings, "model.")
    for name in sorted(ModelConfig.__dataclass_fields__.keys() - _FREE):
        ours, theirs = getattr(model, name), getattr(imported, name)
        if ours != theirs:
            raise ConfigError(
                f"{key}.{name} is {shown(ours)}, but {source.path} has {shown(theirs)}; leave it out, or set it to "
                "that."
            )


def check_vocabulary(tokenizer: Tokenizer, rows: int, path: Path) -> None:
    if tokenizer.vocab_size != rows:
        raise CheckpointError(
            f"{path} has {rows} rows of word embeddings, but the tokenizer has {tokenizer.vocab_size} tokens; use the "
            "tokenizer of this model, with tokenizer.added_tokens=none."
        )


def keep_files(source: PublishedSource, directory: Path) -> None:
    directory.mkdir(parents=True)
    shutil.copyfile(source.path / "config.json", directory / "config.json")
    copy_tokenizer_files(source.path, directory)
    rows = dict(kept_rows(source.theirs, source.parts))
    if rows:
        shapes = {name: tuple(tensor.shape) for name, tensor in rows.items()}
        write_tensors(directory / KEPT_ROWS, shapes, rows.values(), metadata=METADATA)


def _with_new_heads(source: PublishedSource, config: Config) -> Weights:
    """The imported tensors, and initial values of heads that the files do not have: SpanBERT's, and all that a class
    with the head of a task leaves out.
    """
    shapes, weights, others = (
        parameter_shapes(config.model),
        to_ours(source.theirs, source.parts),
        source.others,
    )
    missing = shapes.keys() - weights.shapes.keys() - others.shapes.keys()
    if "task_head" in source.settings and missing:
        log.warning("%s does not have %s; they begin anew", source.path, ", ".join(sorted(missing)))
    new = {name: torch.nn.Parameter(torch.empty(shapes[name])) for name in missing}
    initialize_parameters(new.items(), config.model, config.training.seed)

    def read(name: str) -> torch.Tensor:
        if name in new:
            return new[name].detach()
        return weights.read(name) if name in weights.shapes else others.read(name)

    return Weights(shapes, read)


def write_published(directory: Path, weights: Weights, run: OpenRun, dtype: str, max_shard_bytes: int) -> str:
    """Write a run's model as a directory of its class, with its card. Returns: the name of the class."""
    kept = run.checkpoint.path.parent.parent / KEPT_FILES
    roles = {"pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "cls"}
    labels = () if run.config.task is None else labels_of(run.config.task)
    name = f"checkpoint {run.checkpoint.path}"
    stack = Stack(run.config.model, weights, run.tokenizer, roles, kept, name, labels)
    class_name, extra_file = write_stack(directory, stack, dtype, max_shard_bytes)
    card = published_card(run, class_name, is_imported=kept.exists(), extra_file=extra_file)
    (directory / "README.md").write_text(card, encoding="utf-8")
    return class_name


@dataclass(frozen=True)
class Stack:
    """A Transformer to write as a directory of its class."""

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    roles: Mapping[str, str]  # token that config.json names -> role of the tokenizer
    kept: Path  # files of its import, if it was imported
    name: str  # in messages
    labels: Sequence[str] = ()  # of a task's head


def write_stack(directory: Path, stack: Stack, dtype: str, max_shard_bytes: int) -> tuple[str, str | None]:
    """Write config.json, weights and tokenizer files.

    Returns: the name of the class, and the file of what it has not, if there is such. Raises: CheckpointError.
    """
    config, weights, kept = stack.config, stack.weights, stack.kept
    system = system_of(config)
    base = read_json(kept / "config.json") if kept.exists() else _special_ids(stack)
    described = hf_config(config, {**base, "dtype": str(DTYPES[dtype]).removeprefix("torch.")}, stack.labels)
    parts, class_name = parts_of(system, weights.shapes, config), class_of_model(system, config)
    is_headed = config.task_head != "none"
    of_heads, extra_file = ("heads.", OTHER_HEADS) if is_headed else (_SPAN_BOUNDARY, EXTRA_WEIGHTS)
    held = {part.ours for part in parts.values()}
    extra = {
        ours: shape
        for ours, shape in weights.shapes.items()
        if ours.startswith(of_heads) and ours not in held
    }
    rows = open_safetensors(kept / KEPT_ROWS) if (kept / KEPT_ROWS).exists() else None
    left = weights.shapes.keys() - held - extra.keys()
    if left:
        raise CheckpointError(
            f"{stack.name} has {', '.join(sorted(left)[:3])}, which the class {class_name} has not; only "
            "models of the published architecture can be exported."
        )
    write_sharded(directory, to_theirs(weights, parts, rows, system), DTYPES[dtype], max_shard_bytes)
    if extra:
        write_tensors(directory / extra_file, extra, map(weights.read, extra), DTYPES[dtype], METADATA)
    described.save_pretrained(directory)
    write_tokenizer(directory, stack.tokenizer, _special_ids(stack), kept)
    return class_name, extra_file if extra else None


def _special_ids(stack: Stack) -> dict[str, Any]:
    special, lacking = stack.tokenizer.special, stack.tokenizer.lacking
    return {name: getattr(special, role) for name, role in stack.roles.items() if role not in lacking}


@torch.no_grad()
def compare_logits(model: GLM, directory: Path, class_name: str, tolerance: float) -> proof.Proof:
    """Our model and the class of transformers on the same rows, padding left out, with the head on CLS."""
    batch = proof_batch(model.config)
    if model.config.task_head != "none":
        return _compare_heads(model, batch, load_class(directory, class_name), tolerance)
    real = torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    hidden, ours = our_output(model, batch)
    if model.config.decoder_layers:
        real &= torch.from_numpy(batch[:, ORD] > 0)
    theirs = load_class(directory, class_name)
    out = their_output(theirs, model.config, batch)
    expected = out["logits"] if "logits" in out else out["prediction_logits"]
    if model.config.decoder_layers:
        expected = in_rows(expected, batch)
    result = proof.compare(ours[real], expected[real], tolerance)
    for name in ("seq_relationship_logits", "sop_logits"):
        if name in out:
            assert model.heads.sentence is not None
            classes = model.heads.sentence(model.final_layernorm(hidden[:, 0]))
            result = result.joined(proof.compare(classes, out[name], tolerance))
    if model.config.relative == "xlnet":
        result = result.joined(_compare_memory(model, theirs, batch[:1], tolerance))
    return result


def _compare_heads(model: GLM, batch: np.ndarray, theirs: torch.nn.Module, tolerance: float) -> proof.Proof:
    """The head of a task: on all rows, or on that of each text. XLNet's class takes the last one, padding or not."""
    if model.config.relative == "xlnet":
        batch = batch[:1]  # the row without padding
    hidden, _ = our_output(model, batch)
    out, real = their_output(theirs, model.config, batch), torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    if model.config.task_head in ("classes", "values"):
        real = torch.zeros_like(real)
        real[:, -1 if model.config.relative == "xlnet" else 0] = True
        expected = out["logits"]
    elif model.config.task_head == "spans":
        expected = torch.stack([out["start_logits"], out["end_logits"]], dim=-1)[real]
    else:
        expected = out["logits"][real]
    rows = real.flatten().nonzero()[:, 0]
    ours = model.heads.task_rows([hidden.flatten(0, 1)], rows, model.final_layernorm, None).float()
    return proof.compare(ours, expected, tolerance)


def _compare_memory(model: GLM, theirs: torch.nn.Module, row: np.ndarray, tolerance: float) -> proof.Proof:
    """The row's text in two segments, the second with the memory of the first. Args: row: int32 [1, fields, S]."""
    config: Any = theirs.config
    first, second = (part.copy() for part in np.array_split(row, 2, axis=2))
    second[:, POSITION_IDS] = np.arange(second.shape[2])
    _, memory = read_segment(model, first, longest=config.mem_len or None, reused=config.reuse_len or None)
    hidden, _ = read_segment(model, second, memory)
    mems = None
    for part in (first, second):
        inputs = {
            name: torch.from_numpy(part[:, plane].astype(np.int64)) for name, plane in _XLNET_INPUTS.items()
        }
        out = theirs(**inputs, mems=mems, use_mems=True)
        mems = out.mems
    return proof.compare(model.logits(hidden), out.logits, tolerance)


def our_output(model: GLM, batch: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The last block's output and the logits, [B, S, D] and [B, S, V]; zeros where a decoder has no row."""
    kernel = "auto" if model.config.decoder_layers else "dense"
    prepared = prepare(Batch(batch), torch.device("cpu"), model.config, kernel=kernel)
    inputs = prepared.to(torch.device("cpu"))
    hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    order = torch.from_numpy(prepared.plan.order)[-len(hidden) :]
    outputs = []
    for rows in (hidden, model.logits(hidden).float()):
        whole = rows.new_zeros(batch.shape[0] * batch.shape[2], rows.shape[1])
        outputs.append(
            whole.index_put((order[order >= 0],), rows[order >= 0]).view(len(batch), batch.shape[2], -1)
        )
    return outputs[0], outputs[1]


def _segments(config: ModelConfig) -> int:
    """How many segments a model tells apart."""
    return 2 if config.relative == "xlnet" else config.segments


def in_rows(logits: torch.Tensor, batch: np.ndarray) -> torch.Tensor:
    """Logits [B, targets, V] of a decoder in the places of its tokens: [B, S, V]."""
    whole = logits.new_zeros(*batch[:, 0].shape, logits.shape[-1])
    for row, order in enumerate(batch[:, ORD]):
        places = np.flatnonzero(order > 0)
        whole[row, places] = logits[row, : len(places)]
    return whole


def their_output(
    theirs: torch.nn.Module, config: ModelConfig, batch: np.ndarray
) -> Mapping[str, torch.Tensor]:
    system = system_of(config)

    def plane(number: int) -> torch.Tensor:
        return torch.from_numpy(batch[:, number].astype(np.int64))

    if config.decoder_layers:
        return theirs(**encoder_decoder_inputs(batch))
    inputs = {
        "input_ids": plane(TOKENS),
        "attention_mask": (plane(DOC) != PADDING_DOC).long(),
        "position_ids": plane(POSITION_IDS) + system.skipped_positions,
    }
    if _segments(config):
        inputs["token_type_ids"] = plane(SEGMENT_IDS)
    if config.relative == "xlnet":
        del inputs["position_ids"]  # it counts the tokens itself
    if config.task_types:
        inputs["task_type_ids"] = plane(OBJECTIVE)
    return theirs(**inputs)


def encoder_decoder_inputs(batch: np.ndarray) -> dict[str, torch.Tensor]:
    """Context and target of each row, each padded at its end."""

    def gathered(chosen: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = chosen.sum(1)
        tokens = np.ones((len(chosen), lengths.max()), np.int64)
        for row, length in enumerate(lengths):
            tokens[row, :length] = batch[row, TOKENS][chosen[row]]
        return torch.from_numpy(tokens), torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])

    is_real = batch[:, DOC] != PADDING_DOC
    context, real = gathered(is_real & (batch[:, ORD] == 0))
    target, _ = gathered(is_real & (batch[:, ORD] > 0))
    return {"input_ids": context, "attention_mask": real.long(), "decoder_input_ids": target}


def proof_batch(config: ModelConfig, seed: int = 0) -> np.ndarray:
    """int32 [3, fields, S], as Batch: a whole row, and two with padding after them.

    Where there is a decoder, the last part of a row is its target. Distances reach beyond what buckets tell apart.
    """
    assert config.vocab_size is not None
    rng = np.random.default_rng(seed)
    length = min(200, config.max_position + 1)
    batch = np.zeros((3, len(FIELDS), length), np.int32)
    batch[:, DOC] = PADDING_DOC
    for row, used in enumerate((length, max(1, length // 2), max(1, length - 3))):
        batch[row, TOKENS, :used] = rng.integers(0, config.vocab_size, used)
        batch[row, DOC, :used] = 0
        batch[row, POSITION_IDS] = np.arange(length)
        if segments := _segments(config):
            batch[row, SEGMENT_IDS, :used] = np.sort(rng.integers(0, segments, used))
        if config.task_types:
            batch[row, OBJECTIVE, :used] = rng.integers(0, config.task_types)
        if system_of(config).is_causal:
            batch[row, ORD, :used] = np.arange(used)
        if config.decoder_layers:
            context = used - used // 3
            batch[row, ORD, context:used] = np.arange(1, used - context + 1)
            batch[row, POSITION_IDS, context:used] = np.arange(used - context)
    batch[:, WEIGHTS].view(np.float32)[:] = 1.0
    return batch
