"""Chooses the format of a run or of a directory: a HuggingFaceFormat (common/model_format.py).

models with a spec         OPTIMUS, ELECTRA, ERNIE (Tsinghua): HUGGINGFACE_FORMAT of the module that the ModelSpec names
published systems          published/format.py: the class of transformers of a system in published/systems.py
GLM                        glm/own_format.py: GLM's own class
released GLM checkpoints   glm/released_format.py
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from data_utils.objectives import sections_with_models
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.config_json import read_config_json
from megatron_lite.hf.common.model_format import HuggingFaceFormat
from megatron_lite.hf.glm.own_format import GLMFormat
from megatron_lite.hf.glm.released_format import ReleasedFormat
from megatron_lite.hf.published.format import PublishedFormat
from megatron_lite.hf.published.source import unsupported
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME
from megatron_lite.transformer.build import model_spec


def format_of_run(config: Config, layout: str = "huggingface") -> HuggingFaceFormat:
    """The format of the model that a configuration trains. Args: layout: as in ExportOptions."""
    if layout == "released":
        return ReleasedFormat()
    if (module := model_spec(config).huggingface) is not None:
        return _load(module)
    return PublishedFormat() if config.model.system in SYSTEMS_BY_NAME else GLMFormat()


def format_of_directory(directory: Path) -> HuggingFaceFormat:
    """The format of a directory. Raises: CheckpointError if it has none, or for files that can be of no model."""
    # From the most special directory to the most general one: each looks at files that the ones after it lack.
    for each in (*_of_specs(), PublishedFormat(), GLMFormat(), ReleasedFormat()):
        if each.is_format_of(directory):
            return each
    raise unsupported(directory, read_config_json(directory))


def _of_specs() -> Iterator[HuggingFaceFormat]:
    for section in sections_with_models():
        assert section.model_module is not None
        if (module := importlib.import_module(section.model_module).MODEL_SPEC.huggingface) is not None:
            yield _load(module)


def _load(module: str) -> HuggingFaceFormat:
    # Imported by name: the packages of models import hf, not the other way round.
    return importlib.import_module(module).HUGGINGFACE_FORMAT
