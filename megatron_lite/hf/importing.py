"""Imports a Hugging Face directory, or the reference's model-parallel shards, as a run, and compares outputs.

An import has no optimizer state: its Adam moments are zero and its step is 0. Tensors are streamed; only the comparison
of outputs holds a whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from data_utils.common.settings import check, merge
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.imported_run import write_imported_run
from megatron_lite.hf.common.model_format import HuggingFaceFormat
from megatron_lite.hf.common.verify import TOLERANCE, Comparison, compare_outputs, joined
from megatron_lite.hf.common.weights import new_directory
from megatron_lite.hf.formats import format_of_directory
from megatron_lite.hf.glm.released_format import MegatronFormat, ReleasedFormat
from megatron_lite.hf.sentence_transformers import (
    compare_imported,
    is_sentence_transformers,
    read_settings,
    require_same_tokens,
)
from megatron_lite.inference.open_run import OpenRun


def import_directory(
    source: Path,
    output: Path,
    tree: Mapping[str, Any],
    *,
    is_megatron: bool = False,
    copy_eop_to_gmask: bool = False,
    verify: bool = True,
    tolerance: float = TOLERANCE,
) -> Comparison | None:
    """Make the run directory `output`, with one checkpoint at step 0, from a Hugging Face directory.

    Args:
        source: of any format (formats.py).
        is_megatron: the source holds the reference's `mp_rank_XX_model_states.pt`. These do not record the number of
            attention heads: `tree` must set it, and no comparison can notice a wrong number.
        tree: configuration of the new run, which overrides what the directory records.
        copy_eop_to_gmask: give [gMASK] the embedding of eop, for GLM-10B-Chinese, trained with one id for both.
        verify: compare the outputs of both models.
        tolerance: largest difference of logits that passes.
    Returns: the comparison, None without `verify`.
    Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
    """
    modules = None  # the directory of sentence-transformers that the source belongs to
    if is_megatron:
        model_format: HuggingFaceFormat = MegatronFormat(copy_eop_to_gmask)
    else:
        if is_sentence_transformers(source):
            modules = source
            source, settings = read_settings(modules)
            tree = merge({"embedding": settings}, tree)
        model_format = format_of_directory(source)
        if copy_eop_to_gmask:
            check(
                isinstance(model_format, ReleasedFormat),
                "--copy-eop-to-gmask is for weights in the released layout only.",
            )
            model_format = ReleasedFormat(copy_eop_to_gmask=True)
    if verify:
        model_format.require_verifiable(source)
    # The directory gets its name only when everything in it is written and verified.
    with new_directory(output) as directory:
        imported = model_format.read(source, directory, tree, verify=verify)
        path = write_imported_run(directory, output, imported.weights, imported.config)
        run = _opened(imported.config, path)
        if modules is not None:
            require_same_tokens(run, source)
        if not verify:
            return None
        assert imported.checks is not None  # `require_verifiable`
        comparisons = compare_outputs(
            imported.checks,
            lambda: model_format.load(run, torch.float32),
            tolerance,
            f"the import of {source}",
            run.checkpoint.shapes,
        )
        if modules is not None:
            comparisons |= compare_imported(run, modules, tolerance)
        return joined(comparisons)


def _opened(config: Config, path: Path) -> OpenRun:
    """The run of a checkpoint that was just written, whose checksums need no check."""
    assert config.tokenizer is not None
    of_decoder = config.decoder_tokenizer
    return OpenRun(
        config,
        load_tokenizer(config.tokenizer),
        read_checkpoint(path),
        None if of_decoder is None else load_tokenizer(of_decoder),
    )
