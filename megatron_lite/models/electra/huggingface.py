"""ELECTRA and DeBERTa-v3 as two directories of transformers, and back to a run.

    DIRECTORY/generator/       ElectraForMaskedLM or DebertaV2ForMaskedLM, with the tokenizer
    DIRECTORY/discriminator/   ElectraForPreTraining or DebertaV2Model, with the tokenizer

Each has the tables that both share. Words whose gradients are apart are whole in the discriminator's. Both ways are
proved: the generator as any published system, the discriminator by its answer for every token. DeBERTa has no class
with a head for that answer: it is proved on hidden states, and our head is beside it, in OTHER_HEADS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from data_utils.common.batch_fields import DOC
from data_utils.common.errors import CheckpointError
from data_utils.common.settings import merge, to_tree
from megatron_lite.checkpoint.full_word_embedding import with_full_word_embedding
from megatron_lite.checkpoint.manifest import checkpoint_name
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.checkpoint.verify import Checkpoint, read_checkpoint
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.hf.files.config_json import CONFIG_JSON
from megatron_lite.hf.files.first_checkpoint import write_training_checkpoint
from megatron_lite.hf.files.model_card import ORIGINS, sizes, write_card
from megatron_lite.hf.files.weights import DTYPES, WORDS, Weights, check_shapes, new_directory
from megatron_lite.hf.glm import proof
from megatron_lite.hf.published.heads import transformers_class_name
from megatron_lite.hf.published.proof import ask as ask_published
from megatron_lite.hf.published.proof import proof_batch, their_output
from megatron_lite.hf.published.runs import (
    KEPT_FILES,
    Stack,
    build_import_config,
    keep_files,
    require_same_model,
    with_new_heads,
    write_stack,
)
from megatron_lite.hf.published.source import PublishedSource, load_class, open_published
from megatron_lite.hf.published.systems import published_system
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.model.batch import Batch
from megatron_lite.model.build import model_spec
from megatron_lite.model.flops import parameter_shapes
from megatron_lite.model.micro_batch import prepare
from megatron_lite.model.tensor_parallel import VocabParallelEmbedding
from megatron_lite.model.trained_model import ENCODER
from megatron_lite.models.electra.config import generator_of, is_detached
from megatron_lite.models.electra.model import Electra
from megatron_lite.models.electra.model_spec import GENERATOR, REPLACED_HEAD, TABLES, discriminator_shapes

DISCRIMINATOR_OF, GENERATOR_OF = "discriminator", "generator"  # names of directories
_CARD = """A generator and a discriminator that were trained together (ELECTRA, arXiv:2003.10555). {origin}"""
_EXAMPLE = """from transformers import {generator}, {discriminator}

generator = {generator}.from_pretrained("PATH/generator")
discriminator = {discriminator}.from_pretrained("PATH/discriminator")"""


def is_pair(path: Path) -> bool:
    """Whether a directory holds both."""
    return all((path / name / CONFIG_JSON).exists() for name in (GENERATOR_OF, DISCRIMINATOR_OF))


# Export


def write_electra(directory: Path, run: OpenRun, dtype: str, max_shard_bytes: int) -> None:
    """Write both stacks. Raises: CheckpointError for options that the classes have not."""
    # With detached embeddings the class has one table, the sum of the generator's and the discriminator's own.
    checkpoint, config = with_full_word_embedding(run.checkpoint), run.config
    weights, kept = (
        Weights(checkpoint.shapes, weight_reader(checkpoint)),
        checkpoint.path.parent.parent / KEPT_FILES,
    )
    check_shapes(weights, model_spec(config).shapes(config), checkpoint.path)
    generator = generator_of(config)
    shapes = {GENERATOR_OF: parameter_shapes(generator), DISCRIMINATOR_OF: discriminator_shapes(config.model)}
    for name, stack in ((GENERATOR_OF, generator), (DISCRIMINATOR_OF, config.model)):
        own = weights.renamed({part: _held(name, part, is_detached(config)) for part in shapes[name]})
        (directory / name).mkdir()
        files = kept / GENERATOR_OF if name == GENERATOR_OF else kept
        origin = f"the {name} of {checkpoint.path}"
        write_stack(directory / name, Stack(stack, own, run.tokenizer, files, origin), dtype, max_shard_bytes)


def _held(stack: str, name: str, has_own_tables: bool) -> str:
    """The name in a run of a stack's parameter. Args: has_own_tables: whether the generator has tables of its own."""
    if name.startswith(REPLACED_HEAD):
        return name
    is_own = stack == GENERATOR_OF and (has_own_tables or not name.startswith(TABLES))
    return f"{GENERATOR if is_own else ENCODER}{name}"


def electra_card(run: OpenRun) -> str:
    """The card of an export, in Markdown."""
    is_imported = (run.checkpoint.path.parent.parent / KEPT_FILES).exists()
    origin = ORIGINS[is_imported, run.checkpoint.step > 0].format(names="electra")
    generator = generator_of(run.config)
    classes = {
        name: transformers_class_name(published_system(stack), stack)
        for name, stack in ((GENERATOR_OF, generator), (DISCRIMINATOR_OF, run.config.model))
    }
    words = {
        "tags": "- electra",
        "title": "ELECTRA",
        "introduction": _CARD.format(origin=origin),
        "sizes": f"a generator of {sizes(generator)}, and a discriminator of {sizes(run.config.model)}",
        "example": _EXAMPLE.format(**classes),
    }
    return write_card(run, words, "and of the imported weights " if is_imported else "")


# Import


def import_electra(
    path: Path,
    output: Path,
    tree: Mapping[str, Any],
    *,
    verify: bool = True,
    tolerance: float = proof.TOLERANCE,
) -> proof.Proof | None:
    """Write a run directory with one checkpoint at step 0, its config.yaml, and what an export needs.

    Args: tree: configuration of the new run. It must not contradict the models.
    Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
    """
    with new_directory(output) as directory:
        found, generator = (
            open_published(path / DISCRIMINATOR_OF, discriminator_shapes),
            open_published(path / GENERATOR_OF),
        )
        keep_files(found, directory / KEPT_FILES)
        keep_files(generator, directory / KEPT_FILES / GENERATOR_OF)
        section = {
            "generator_size": generator.settings["hidden_size"] / found.settings["hidden_size"],
            "generator_heads": generator.settings["num_attention_heads"],
            "generator_layers": generator.settings["num_layers"],
            "embeddings": "detached" if found.settings["system"] == "deberta_v3" else "shared",
        }
        usual = {
            "objectives": {"electra": 1},
            # 50 is the paper's weight of the discriminator's loss.
            "training": {"loss_normalization": "per_objective", "loss_weights": {"replaced": 50.0}},
            "electra": section,
        }
        config = build_import_config(found, output, directory, merge(usual, tree), verify)
        require_same_model("the generator", generator_of(config), generator)
        weights = _joined(found, generator, path, config)
        check_shapes(weights, model_spec(config).shapes(config), path)
        checkpoint = directory / "checkpoints" / checkpoint_name(0)
        write_training_checkpoint(checkpoint, weights, config)
        text = yaml.safe_dump(to_tree(config), sort_keys=False)
        (directory / "config.yaml").write_text(text, encoding="utf-8")
        if not verify:
            return None
        saved = read_checkpoint(checkpoint)
        return proof.joined(prove(saved, config, path, "fp32", tolerance, f"the import of {path}"))


def _joined(found: PublishedSource, generator: PublishedSource, path: Path, config: Config) -> Weights:
    """All tensors under our names. Raises: CheckpointError for tables that are not the same."""
    parts = {
        GENERATOR_OF: to_ours(generator.theirs, generator.mappings),
        DISCRIMINATOR_OF: with_new_heads(found, config, discriminator_shapes(config.model)),
    }
    is_sum = is_detached(config)
    held = {
        _held(stack, name, is_sum): (stack, name) for stack, part in parts.items() for name in part.shapes
    }
    for name in () if is_sum else parts[GENERATOR_OF].shapes:
        if name.startswith(TABLES) and not torch.equal(*(part.read(name) for part in parts.values())):
            raise CheckpointError(
                f"{path}: {name} of the generator is not that of the discriminator, which share it; fetch a pair that "
                "was trained together."
            )
    shapes = {ours: parts[stack].shapes[name] for ours, (stack, name) in held.items()}

    def read(ours: str) -> torch.Tensor:
        stack, name = held[ours]
        weight = parts[stack].read(name).float()
        # The discriminator's own table is what its file has beyond the generator's.
        is_own = is_sum and ours == f"{ENCODER}{WORDS}"  # beside the generator's
        return weight - parts[GENERATOR_OF].read(WORDS).float() if is_own else weight

    return Weights(shapes, read)


# Proof


def prove(
    checkpoint: Checkpoint, config: Config, directory: Path, dtype: str, tolerance: float, what: str
) -> dict[str, proof.Proof]:
    """Compare a checkpoint's model with the classes of a directory. Args: dtype: in which its weights are written."""
    return proof.prove(
        lambda computed: _ask(directory, config, computed),
        lambda: _loaded(checkpoint, config, lambda weight: weight.to(DTYPES[dtype]).float()),
        tolerance,
        what,
        checkpoint.shapes,
    )


@torch.no_grad()
def _loaded(
    checkpoint: Checkpoint, config: Config, change: Callable[[torch.Tensor], torch.Tensor]
) -> Electra:
    """The model as its directories have it: with whole words."""
    model, read = (
        Electra(*model_spec(config).made_of(config)[1:]),
        weight_reader(with_full_word_embedding(checkpoint)),
    )
    if is_detached(config):
        words = VocabParallelEmbedding(config.model, model.encoder.parallel)
        model.encoder.embedding.word_embeddings = words
    for name, parameter in model.named_parameters():
        weight = change(read(name))
        parameter.zero_()  # rows that pad the vocabulary
        parameter[: len(weight)] = weight
    return model.eval()


@torch.no_grad()
def _ask(directory: Path, config: Config, dtype: torch.dtype) -> list[proof.Question]:
    generator, model = generator_of(config), config.model
    of_generator, of_discriminator = (
        transformers_class_name(published_system(stack), stack) for stack in (generator, model)
    )
    found = ask_published(directory / GENERATOR_OF, of_generator, generator, dtype=dtype)
    found = [replace(question, answer=functools.partial(_of, "generator", question)) for question in found]
    path = directory / DISCRIMINATOR_OF
    # transformers has no class with DeBERTa-v3's head for replaced tokens: the body's hidden states are
    # compared.
    if model.system == "deberta_v3":
        states = ask_published(path, of_discriminator, model, dtype=dtype)
        return found + [replace(each, answer=functools.partial(_of, "encoder", each)) for each in states]
    theirs, batch = load_class(path, of_discriminator, dtype), proof_batch(model)
    real = torch.from_numpy(batch[:, DOC] >= 0)
    expected = their_output(theirs, model, batch)["logits"][real]
    return [
        *found,
        proof.Question(
            "replaced", expected[:, None], lambda ours: _scores(ours, model, batch)[real][:, None]
        ),
    ]


def _of(stack: str, question: proof.Question, model: Electra) -> torch.Tensor:
    return question.answer(getattr(model, stack))


def _scores(model: Electra, config: ModelConfig, batch: Any) -> torch.Tensor:
    """The discriminator's answers in the places of a batch's tokens, fp32 [B, S]."""
    prepared = prepare(Batch(batch), torch.device("cpu"), config, kernel="dense")
    order, scores = torch.from_numpy(prepared.plan.order), model.scores(prepared.to(torch.device("cpu")))
    whole = scores.new_zeros(batch.shape[0] * batch.shape[2])
    return whole.index_put((order[order >= 0],), scores[order >= 0]).view(len(batch), -1)
