"""ELECTRA and DeBERTa-v3 as two directories of transformers, and back to a run.

    DIRECTORY/generator/       ElectraForMaskedLM or DebertaV2ForMaskedLM, with the tokenizer
    DIRECTORY/discriminator/   ElectraForPreTraining or DebertaV2Model, with the tokenizer

Each directory has the tables that both stacks share. With detached embeddings (DeBERTa-v3) the discriminator's word
table is the sum that it reads: the generator's table plus its own difference. DeBERTa has no class with a head that
finds replaced tokens: our head is in a file of its directory, OTHER_HEADS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import merge
from megatron_lite.checkpoint.full_word_embedding import with_full_word_embedding
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.config_json import CONFIG_JSON
from megatron_lite.hf.common.model_card import sizes, write_card
from megatron_lite.hf.common.model_format import HuggingFaceFormat, Imported
from megatron_lite.hf.common.provenance import provenance
from megatron_lite.hf.common.verify import Check, Checks
from megatron_lite.hf.common.verify_tokenizer import TokenizerComparison, compare_exported
from megatron_lite.hf.common.weights import IMPORTED_FILES, WORDS, Weights, check_shapes
from megatron_lite.hf.published.heads import transformers_class_name
from megatron_lite.hf.published.import_config import (
    copy_imported_files,
    import_config,
    require_same_model,
    with_new_heads,
)
from megatron_lite.hf.published.source import PublishedSource, load_class, open_published
from megatron_lite.hf.published.stack import Stack, write_stack
from megatron_lite.hf.published.systems import published_system
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.hf.published.verify import class_checks
from megatron_lite.hf.published.verify_inputs import in_batch_order, is_token, text_batch, their_output
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.models.electra.config import generator_of, is_detached
from megatron_lite.models.electra.model import Electra
from megatron_lite.models.electra.model_spec import GENERATOR, REPLACED_HEAD, TABLES, discriminator_shapes
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.micro_batch import prepare
from megatron_lite.transformer.tensor_parallel import VocabParallelEmbedding
from megatron_lite.transformer.trained_model import ENCODER

GENERATOR_DIRECTORY, DISCRIMINATOR_DIRECTORY = "generator", "discriminator"
_CARD = """A generator and a discriminator that were trained together (ELECTRA, arXiv:2003.10555). {origin}"""
_EXAMPLE = """from transformers import {generator}, {discriminator}

generator = {generator}.from_pretrained("PATH/generator")
discriminator = {discriminator}.from_pretrained("PATH/discriminator")"""


class ElectraFormat(HuggingFaceFormat):
    """The pair of directories."""

    def is_format_of(self, directory: Path) -> bool:
        names = GENERATOR_DIRECTORY, DISCRIMINATOR_DIRECTORY
        return all((directory / name / CONFIG_JSON).exists() for name in names)

    def write(
        self, directory: Path, run: OpenRun, weights: Weights, dtype: str, max_shard_bytes: int
    ) -> Checks:
        path, config = run.checkpoint.path, run.config
        whole = Weights(weights.shapes, weight_reader(with_full_word_embedding(run.checkpoint)))
        kept_files, generator = path.parent.parent / IMPORTED_FILES, generator_of(config)
        for name, model, shapes, kept in (
            (GENERATOR_DIRECTORY, generator, parameter_shapes(generator), kept_files / GENERATOR_DIRECTORY),
            (DISCRIMINATOR_DIRECTORY, config.model, discriminator_shapes(config.model), kept_files),
        ):
            ours = {parameter: _run_name(name, parameter, is_detached(config)) for parameter in shapes}
            stack = Stack(model, whole.renamed(ours), run.tokenizer, kept, f"the {name} of {path}")
            (directory / name).mkdir()
            write_stack(directory / name, stack, dtype, max_shard_bytes)
        (directory / "README.md").write_text(_card(run), encoding="utf-8")
        return partial(pair_checks, directory, config)

    def read(self, source: Path, directory: Path, tree: Mapping[str, Any], *, verify: bool) -> Imported:
        discriminator = open_published(source / DISCRIMINATOR_DIRECTORY, discriminator_shapes)
        generator = open_published(source / GENERATOR_DIRECTORY)
        copy_imported_files(discriminator, directory / IMPORTED_FILES)
        copy_imported_files(generator, directory / IMPORTED_FILES / GENERATOR_DIRECTORY)
        sizes_of_generator = {
            "generator_size": generator.settings["hidden_size"] / discriminator.settings["hidden_size"],
            "generator_heads": generator.settings["num_attention_heads"],
            "generator_layers": generator.settings["num_layers"],
            "embeddings": "detached" if discriminator.settings["system"] == "deberta_v3" else "shared",
        }
        defaults = {
            "objectives": {"electra": 1},
            # 50 is the paper's weight of the discriminator's loss.
            "training": {"loss_normalization": "per_objective", "loss_weights": {"replaced": 50.0}},
            "electra": sizes_of_generator,
        }
        config = import_config(discriminator, directory, merge(defaults, tree), verify)
        require_same_model("the generator", generator_of(config), generator)
        weights = _join_stacks(generator, discriminator, source, config)
        check_shapes(weights, model_spec(config).shapes(config), source)
        return Imported(config, weights, partial(pair_checks, source, config))

    @torch.no_grad()
    def load(self, run: OpenRun, dtype: torch.dtype) -> Electra:
        """The model as its directories have it: a discriminator whose word table is whole, not a difference."""
        model = Electra(*model_spec(run.config).made_of(run.config)[1:])
        if is_detached(run.config):
            words = VocabParallelEmbedding(run.config.model, model.encoder.parallel)
            model.encoder.embedding.word_embeddings = words
        read = weight_reader(with_full_word_embedding(run.checkpoint))
        for name, parameter in model.named_parameters():
            weight = read(name).to(dtype).float()
            parameter.zero_()  # the rows that pad the vocabulary too
            parameter[: len(weight)] = weight
        return model.eval()

    def compare_tokenizers(self, run: OpenRun, directory: Path) -> dict[str, TokenizerComparison]:
        names = GENERATOR_DIRECTORY, DISCRIMINATOR_DIRECTORY
        return {name: compare_exported(run.tokenizer, directory / name) for name in names}


HUGGINGFACE_FORMAT = ElectraFormat()


def _run_name(stack: str, name: str, has_detached_tables: bool) -> str:
    """The name in a run of a stack's parameter.

    Args:
        stack: GENERATOR_DIRECTORY or DISCRIMINATOR_DIRECTORY.
        name: of the parameter in a model of the stack alone.
        has_detached_tables: whether the discriminator's tables are not the generator's.
    """
    if name.startswith(REPLACED_HEAD):
        return name
    # Shared tables are stored once, with the discriminator's parameters.
    is_generators = stack == GENERATOR_DIRECTORY and (has_detached_tables or not name.startswith(TABLES))
    return f"{GENERATOR if is_generators else ENCODER}{name}"


def _card(run: OpenRun) -> str:
    """The card of an export, in Markdown."""
    origin = provenance(run)
    generator, discriminator = generator_of(run.config), run.config.model
    words = {
        "tags": "- electra",
        "title": "ELECTRA",
        "introduction": _CARD.format(origin=origin),
        "sizes": f"a generator of {sizes(generator)}, and a discriminator of {sizes(discriminator)}",
        "example": _EXAMPLE.format(
            generator=transformers_class_name(published_system(generator), generator),
            discriminator=transformers_class_name(published_system(discriminator), discriminator),
        ),
    }
    return write_card(run, words, origin.is_imported)


def _join_stacks(
    generator: PublishedSource, discriminator: PublishedSource, source: Path, config: Config
) -> Weights:
    """The tensors of both stacks under the names of a run.

    Raises: CheckpointError for shared tables that are not the same.
    """
    of_generator = to_ours(generator.theirs, generator.mappings)
    of_discriminator = with_new_heads(discriminator, config, discriminator_shapes(config.model))
    has_detached_tables = is_detached(config)
    if not has_detached_tables:
        for name in of_generator.shapes:
            if name.startswith(TABLES) and not torch.equal(
                of_generator.read(name), of_discriminator.read(name)
            ):
                raise CheckpointError(
                    f"{source}: {name} of the generator is not that of the discriminator, which share it; fetch a pair "
                    "that was trained together."
                )
    origins = {
        _run_name(stack, name, has_detached_tables): (weights, name)
        for stack, weights in (
            (GENERATOR_DIRECTORY, of_generator),
            (DISCRIMINATOR_DIRECTORY, of_discriminator),
        )
        for name in weights.shapes
    }
    shapes = {run_name: weights.shapes[name] for run_name, (weights, name) in origins.items()}

    def read(run_name: str) -> torch.Tensor:
        weights, name = origins[run_name]
        weight = weights.read(name).float()
        # The file holds the sum that the discriminator reads, the run its difference to the generator's table.
        is_difference = has_detached_tables and run_name == f"{ENCODER}{WORDS}"
        return weight - of_generator.read(WORDS).float() if is_difference else weight

    return Weights(shapes, read)


@torch.no_grad()
def pair_checks(directory: Path, config: Config, dtype: torch.dtype) -> list[Check]:
    """What the classes of both directories compute, in `dtype`."""

    def of_stack(name: str, stack: ModelConfig, attribute: str) -> list[Check]:
        class_name = transformers_class_name(published_system(stack), stack)
        checks = class_checks(directory / name, class_name, stack, dtype)
        return [replace(each, compute=partial(_compute_by, attribute, each)) for each in checks]

    checks, model = of_stack(GENERATOR_DIRECTORY, generator_of(config), "generator"), config.model
    # transformers has no class with DeBERTa-v3's head for replaced tokens: the body's hidden states are compared.
    if model.system == "deberta_v3":
        return checks + of_stack(DISCRIMINATOR_DIRECTORY, model, "encoder")
    class_name = transformers_class_name(published_system(model), model)
    theirs = load_class(directory / DISCRIMINATOR_DIRECTORY, class_name, dtype)
    batch = text_batch(model)
    expected = their_output(theirs, model, batch)["logits"][is_token(batch)]

    def token_scores(ours: Electra) -> torch.Tensor:
        """The discriminator's scores of the batch's tokens, fp32 [tokens, 1]."""
        cpu = torch.device("cpu")
        prepared = prepare(Batch(batch), cpu, model, kernel="dense")
        scores = in_batch_order(ours.scores(prepared.to(cpu))[:, None], prepared.plan.order, batch)
        return scores[is_token(batch)]

    return [*checks, Check("replaced", expected[:, None], token_scores)]


def _compute_by(attribute: str, check: Check, model: Electra) -> torch.Tensor:
    """A check of one stack, with the whole model."""
    return check.compute(getattr(model, attribute))
