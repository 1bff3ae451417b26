"""The directories of published systems (systems.py), as the class of transformers that their users load has them.

An import stores in the run's directory what the model does not hold: the rest of config.json, the tokenizer's files,
and rows that no token uses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lite.config.systems import reads_both_ways
from megatron_lite.hf.common.lora import split_updates
from megatron_lite.hf.common.model_card import published_card
from megatron_lite.hf.common.model_format import HuggingFaceFormat, Imported
from megatron_lite.hf.common.verify import Checks
from megatron_lite.hf.common.weights import IMPORTED_FILES, Weights, read_json
from megatron_lite.hf.published.heads import transformers_class_name
from megatron_lite.hf.published.import_config import copy_imported_files, import_config, with_new_heads
from megatron_lite.hf.published.source import is_published, open_published
from megatron_lite.hf.published.stack import Stack, write_stack
from megatron_lite.hf.published.verify import class_checks
from megatron_lite.hf.published.versions import oldest_version
from megatron_lite.inference.decoders import template_of
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.inference.states import PromptTemplate
from megatron_lite.transformer.flops import parameter_shapes

log = logging.getLogger(__name__)


class PublishedFormat(HuggingFaceFormat):
    """One Transformer as a class of transformers."""

    def is_format_of(self, directory: Path) -> bool:
        return is_published(directory)

    def write(
        self, directory: Path, run: OpenRun, weights: Weights, dtype: str, max_shard_bytes: int
    ) -> Checks:
        model, template = run.config.model, trained_template(run)
        class_name, extra_file = write_stack(directory, stack_of(run, weights), dtype, max_shard_bytes)
        both_ways = [choice.name for choice in run.objectives if reads_both_ways(model.system, choice.name)]
        if both_ways:
            log.warning(
                "%s reads texts from left to right, but the run was trained on %s, which reads them in both directions",
                class_name,
                ", ".join(both_ways),
            )
        oldest = oldest_version(class_name, model, read_json(directory / "config.json"))
        if oldest.startswith("5"):
            log.warning("transformers before %s does not compute what this %s does", oldest, class_name)
        card = published_card(run, class_name, oldest, extra_file=extra_file)
        (directory / "README.md").write_text(card, encoding="utf-8")
        start = None if template is None else next(iter(template.start), None)
        return partial(class_checks, directory, class_name, model, start=start)

    def read(self, source: Path, directory: Path, tree: Mapping[str, Any], *, verify: bool) -> Imported:
        # Configuration and shapes first: a directory that cannot be imported is refused before a weight is read.
        opened = open_published(source)
        copy_imported_files(opened, directory / IMPORTED_FILES)
        config = import_config(opened, directory, tree, verify)
        weights = with_new_heads(opened, config, parameter_shapes(config.model))
        class_name = opened.class_name or transformers_class_name(opened.system, config.model)
        checks = partial(class_checks, source, class_name, config.model, source=opened)
        return Imported(config, weights, checks)


def stack_of(run: OpenRun, weights: Weights) -> Stack:
    """The model of a run as `write_stack` takes it."""
    base, updates = split_updates(weights)
    return Stack(
        replace(run.config.model, lora=None),
        base,
        run.tokenizer,
        run.checkpoint.path.parent.parent / IMPORTED_FILES,
        f"checkpoint {run.checkpoint.path}",
        task=run.config.task,
        template=trained_template(run),
        lora=run.config.model.lora,
        updates=updates,
    )


def trained_template(run: OpenRun) -> PromptTemplate | None:
    """How the run's training begins and ends a completion; None: it was not trained here, or not to generate."""
    imported = run.checkpoint.path.parent.parent / IMPORTED_FILES
    # An import without training generates as its source does.
    if imported.exists() and run.checkpoint.step == 0:
        return None
    return template_of(run.objectives, run.tokenizer)
