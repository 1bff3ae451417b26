"""OPTIMUS as two directories of transformers and a file of what lies between them, and back to a run.

    DIRECTORY/encoder/             as its class has it (BertForPreTraining, ...), with its tokenizer
    DIRECTORY/decoder/             GPT2LMHeadModel, with its tokenizer
    DIRECTORY/latent.json          format, version, latent_size, feature, memory, embedding
    DIRECTORY/latent.safetensors   posterior.weight [2P, H], memory.weight [L * D, P], embedding.weight [D, P]

Shapes: P latent size, H and D hidden sizes of encoder and decoder, L blocks of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, check, merge
from data_utils.objectives.optimus import OptimusConfig
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.task_rows import with_task_rows
from megatron_lite.config.tree import Config
from megatron_lite.hf.common import weights as files
from megatron_lite.hf.common.config_json import by_transformers
from megatron_lite.hf.common.model_format import HuggingFaceFormat, Imported
from megatron_lite.hf.common.recipe import read_recipe, write_recipe
from megatron_lite.hf.common.verify import Checks
from megatron_lite.hf.common.verify_tokenizer import TokenizerComparison, compare_exported
from megatron_lite.hf.common.weights import DTYPES, IMPORTED_FILES, Weights
from megatron_lite.hf.published import import_config as published
from megatron_lite.hf.published.source import PublishedSource, is_published, open_published
from megatron_lite.hf.published.stack import Stack, write_stack
from megatron_lite.hf.published.systems import published_system
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.hf.published.tokenizers import import_tokenizer, require_same_ids
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.models.optimus.config import decoder_of, latent_of
from megatron_lite.models.optimus.huggingface_verify import optimus_checks
from megatron_lite.models.optimus.model import LATENT
from megatron_lite.models.optimus.model_card import optimus_card
from megatron_lite.models.optimus.open_run import LatentRun, latent_run
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.trained_model import DECODER, ENCODER

FORMAT, VERSION = "megatron-lite-optimus", 1
DESCRIPTION, MATRICES = "latent.json", "latent.safetensors"
DESCRIBED = ("latent_size", "feature", "memory", "embedding")


@dataclass(frozen=True)
class _Part:
    """One of the two Transformers.

    Args:
        name: of its directory.
        prefix: of its parameters in a run.
        model, tokenizer: its sections of a configuration.
        added_tokens: `added_tokens` of an imported tokenizer.
        roles: token that config.json names -> role of the tokenizer; None: those of the system.
    """

    name: str
    prefix: str
    model: str
    tokenizer: str
    added_tokens: str
    roles: Mapping[str, str] | None = None


_GPT2_ROLES = {"pad_token_id": "pad", "eos_token_id": "eop", "bos_token_id": "sop"}
_PARTS = (
    _Part("encoder", ENCODER, "model", "tokenizer", "none"),
    _Part("decoder", DECODER, "decoder", "decoder_tokenizer", "optimus", _GPT2_ROLES),
)


class OptimusFormat(HuggingFaceFormat):
    """Two directories, and the files of the latent space between them."""

    def is_format_of(self, directory: Path) -> bool:
        return (directory / DESCRIPTION).exists()

    def require_model(self, run: OpenRun) -> None:
        _require_classes(run.config.model, decoder_of(run.config), str(run.checkpoint.path))

    def write(
        self, directory: Path, run: OpenRun, weights: Weights, dtype: str, max_shard_bytes: int
    ) -> Checks:
        path, config = run.checkpoint.path, run.config
        for part, tokenizer in zip(_PARTS, _tokenizers(run), strict=True):
            stack = Stack(
                getattr(config, part.model),
                weights.without_prefix(part.prefix),
                tokenizer,
                path.parent.parent / IMPORTED_FILES / part.name,
                f"the {part.name} of {path}",
                part.roles,
            )
            (directory / part.name).mkdir()
            write_stack(directory / part.name, stack, dtype, max_shard_bytes)
        latent = weights.without_prefix(LATENT)
        tensors = map(latent.read, latent.shapes)
        write_tensors(directory / MATRICES, latent.shapes, tensors, DTYPES[dtype], files.METADATA)
        section = {name: getattr(latent_of(config), name) for name in DESCRIBED}
        files.write_json(directory / DESCRIPTION, {"format": FORMAT, "version": VERSION, **section})
        write_recipe(directory, run)
        (directory / "README.md").write_text(optimus_card(run), encoding="utf-8")
        return _checks(directory, config, _tokenizers(run))

    def read(self, source: Path, directory: Path, tree: Mapping[str, Any], *, verify: bool) -> Imported:
        recorded = read_recipe(source)
        latent, stacks = _read_description(source / DESCRIPTION), _open_stacks(source)
        matrices = files.open_safetensors(source / MATRICES)
        whole = merge({"objectives": {"optimus": 1}, **recorded.config, **recorded.tokenizers}, tree)
        given = tree.get("optimus") or {}
        for name, value in latent.items():
            check(
                given.get(name, value) == value,
                f"optimus.{name} is {shown(given.get(name))}, but {source} has {shown(value)}; leave it out.",
            )
        whole["optimus"] = {**(whole.get("optimus") or {}), **latent}
        tokenizers = []
        for part, stack in zip(_PARTS, stacks, strict=True):
            kept = directory / IMPORTED_FILES / part.name
            published.copy_imported_files(stack, kept)
            model = {
                name: value for name, value in (whole.get(part.model) or {}).items() if value is not None
            }
            whole[part.model] = {**stack.settings, **model}
            whole[part.tokenizer], tokenizer = _import_tokenizer(part, stack, kept, whole, verify)
            tokenizers.append(tokenizer)
        encoder, decoder = tokenizers
        # Whether the stacks share a tokenizer is not recorded; equal ones are one section.
        if encoder.fingerprint == decoder.fingerprint:
            whole["decoder_tokenizer"] = None
        config = with_task_rows(build(Config, whole))
        for part, stack in zip(_PARTS, stacks, strict=True):
            published.require_same_model(part.model, getattr(config, part.model), stack)
        weights = _joined(stacks, matrices)
        files.check_shapes(weights, model_spec(config).shapes(config), source)
        if verify:
            _compare_tokenizers(source, (encoder, decoder))
        return Imported(config, weights, _checks(source, config, (encoder, decoder)))

    def load(self, run: OpenRun, dtype: torch.dtype) -> LatentRun:
        return latent_run(run, torch.device("cpu"), lambda weight: weight.to(dtype).float())

    def compare_tokenizers(self, run: OpenRun, directory: Path) -> dict[str, TokenizerComparison]:
        return _compare_tokenizers(directory, _tokenizers(run))


HUGGINGFACE_FORMAT = OptimusFormat()


def _tokenizers(run: OpenRun) -> tuple[Tokenizer, Tokenizer]:
    """Of encoder and decoder."""
    return run.tokenizer, run.decoder_tokenizer or run.tokenizer


def _compare_tokenizers(
    directory: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> dict[str, TokenizerComparison]:
    parts = zip(_PARTS, tokenizers, strict=True)
    return {part.name: compare_exported(tokenizer, directory / part.name) for part, tokenizer in parts}


def _checks(directory: Path, config: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> Checks:
    matrices = files.open_safetensors(directory / MATRICES)
    encoder, decoder = (directory / part.name for part in _PARTS)
    return partial(optimus_checks, encoder, decoder, matrices, config, tokenizers)


def _require_classes(encoder: ModelConfig, decoder: ModelConfig, origin: str) -> None:
    """Raise CheckpointError unless the encoder reads as a BERT does, and the decoder is a GPT-2."""
    try:
        is_bidirectional = not published_system(encoder).is_causal
    except CheckpointError:
        is_bidirectional = False
    for key, stack, is_right, rule in (
        ("model", encoder, is_bidirectional, "the encoder must be of a system like bert"),
        ("decoder", decoder, decoder.system == "gpt2", "the decoder must be of the system gpt2"),
    ):
        if not is_right:
            raise CheckpointError(
                f"{origin} has {key}.system {shown(stack.system)}, for which transformers has no class; {rule}."
            )


# Import


def _read_description(path: Path) -> dict[str, Any]:
    """DESCRIBED of latent.json. Raises: CheckpointError."""
    described = files.read_json(path)
    found = described.get("format"), described.get("version")
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} is of format {shown(found[0])}, version {shown(found[1])}; this program reads {FORMAT}, version "
            f"{VERSION}."
        )
    try:
        section = build(OptimusConfig, {name: described[name] for name in DESCRIBED}, "")
    except KeyError as error:
        raise CheckpointError(f"{path} has no {error}; fetch it again.") from None
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return {name: getattr(section, name) for name in DESCRIBED}


def _open_stacks(path: Path) -> list[PublishedSource]:
    """Encoder and decoder. Raises: CheckpointError."""
    stacks = []
    for directory in (path / part.name for part in _PARTS):
        if not is_published(directory):
            raise CheckpointError(f"{directory} is of no system that can be imported; fetch it again.")
        stacks.append(open_published(directory))
    encoder, decoder = (build(ModelConfig, stack.settings) for stack in stacks)
    _require_classes(encoder, decoder, str(path))
    return stacks


def _joined(stacks: list[PublishedSource], matrices: Weights) -> Weights:
    """All tensors under the names of a run."""
    parts = {
        part.prefix: to_ours(stack.theirs, stack.mappings) for part, stack in zip(_PARTS, stacks, strict=True)
    }
    parts[LATENT] = matrices
    shapes = {
        f"{prefix}{name}": shape for prefix, part in parts.items() for name, shape in part.shapes.items()
    }

    def read(name: str) -> torch.Tensor:
        prefix = name[: name.index(".") + 1]
        return parts[prefix].read(name.removeprefix(prefix)).float()

    return Weights(shapes, read)


def _import_tokenizer(
    part: _Part, stack: PublishedSource, kept: Path, tree: Mapping[str, Any], verify: bool
) -> tuple[dict[str, Any], Tokenizer]:
    """The tokenizer's section and the tokenizer. Args: kept: the directory's files, in the run."""
    options = {name: value for name, value in (tree.get(part.tokenizer) or {}).items() if value is not None}
    is_own = "path" in options
    if not is_own:
        with by_transformers(stack.path):
            options = import_tokenizer(stack.path, kept, {"added_tokens": part.added_tokens, **options})
    tokenizer = load_tokenizer(build(TokenizerConfig, options, f"{part.tokenizer}."))
    published.check_vocabulary(tokenizer, stack)
    if verify and is_own:
        require_same_ids(part.tokenizer, tokenizer, stack.path, kept)
    return options, tokenizer
