"""Imports a Hugging Face directory, or the reference's model-parallel shards, as a run, and compares logits.

    import_directory   a Hugging Face directory: a GLM as exported here or as released (glm/importing.py), a published
                       system (published/runs.py), or a model with a spec (model_format.py)
    import_megatron    the reference's mp_rank_XX_model_states.pt (glm/importing.py)

An import has no optimizer state: its Adam moments are zero and its step is 0. Tensors are streamed; only the proof
holds a whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.common.settings import check
from megatron_lite.hf.files import proof
from megatron_lite.hf.glm.importing import import_glm, open_glm, open_megatron
from megatron_lite.hf.model_format import format_of_directory
from megatron_lite.hf.published.runs import import_published
from megatron_lite.hf.published.source import is_published
from megatron_lite.hf.sentence_transformers import import_modules, is_sentence_transformers


def import_directory(
    source: Path,
    output: Path,
    tree: Mapping[str, Any],
    *,
    copy_eop_to_gmask: bool = False,
    verify: bool = True,
    tolerance: float = proof.TOLERANCE,
) -> proof.Proof | None:
    """Make the run directory `output`, with one checkpoint at step 0, from a Hugging Face directory.

    Args:
        tree: configuration of the new run, which overrides what the directory records.
        copy_eop_to_gmask: give [gMASK] the embedding of eop, for GLM-10B-Chinese, trained with one id for both.
        verify: compare the logits of both models.
        tolerance: largest difference of logits that passes.
    Returns: the proof, None without `verify`.
    Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
    """
    if is_sentence_transformers(source):

        def import_transformer(directory: Path, run: Path, tree: Mapping[str, Any]) -> proof.Proof | None:
            return _import_one(directory, run, tree, copy_eop_to_gmask, verify, tolerance)

        return import_modules(source, output, tree, import_transformer, verify=verify, tolerance=tolerance)
    return _import_one(source, output, tree, copy_eop_to_gmask, verify, tolerance)


def _import_one(
    source: Path,
    output: Path,
    tree: Mapping[str, Any],
    copy_eop_to_gmask: bool,
    verify: bool,
    tolerance: float,
) -> proof.Proof | None:
    # From the most special directory to the most general one: each test looks at files that the directories after it
    # lack.
    model_format = format_of_directory(source)
    if model_format is None and not is_published(source):
        return import_glm(open_glm(source), output, tree, copy_eop_to_gmask, verify, tolerance)
    check(not copy_eop_to_gmask, "--copy-eop-to-gmask is for GLM only.")
    if model_format is None:
        return import_published(source, output, tree, verify=verify, tolerance=tolerance)
    if verify:
        model_format.require_provable(source)
    return model_format.read(source, output, tree, verify=verify, tolerance=tolerance)


def import_megatron(
    source: Path,
    output: Path,
    tree: Mapping[str, Any],
    *,
    copy_eop_to_gmask: bool = False,
    verify: bool = True,
    tolerance: float = proof.TOLERANCE,
) -> proof.Proof | None:
    """As import_directory, from the reference's `mp_rank_XX_model_states.pt`.

    These do not record the number of attention heads: `tree` must set it, and no proof can notice a wrong number.
    """
    return import_glm(open_megatron(source), output, tree, copy_eop_to_gmask, verify, tolerance)
