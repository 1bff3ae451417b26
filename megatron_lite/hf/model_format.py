"""The interface to the Hugging Face directories of a model with a spec: OPTIMUS, ELECTRA, ERNIE (Tsinghua).

Such a model is more than one Transformer, so no single class of transformers holds it. Its ModelSpec names the module
whose HUGGINGFACE_FORMAT writes, reads and proves its directory; export.py and importing.py know these models through
this interface alone.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_utils.common.errors import CheckpointError
from data_utils.objectives import sections_with_models
from megatron_lite.config.tree import Config
from megatron_lite.hf.files.proof import Proof
from megatron_lite.hf.files.proof_report import Report
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.transformer.build import ModelSpec, model_spec


class HuggingFaceFormat(ABC):
    """The directory format of one model."""

    # What the model has and a GLM does not, as the object of "has": a GLM's released layout is refused for it.
    beyond_glm: str
    # Why there is no proof, as a clause; None: there is one.
    unprovable: str | None = None

    @abstractmethod
    def is_format_of(self, directory: Path) -> bool:
        """Whether a directory has this format, by the names of its files."""

    @abstractmethod
    def write(self, directory: Path, run: OpenRun, dtype: str, max_shard_bytes: int) -> None:
        """Write the weights of a run, its tokenizers and its card.

        Args: dtype: a key of DTYPES. max_shard_bytes: of a weight file.
        Raises: CheckpointError for what the format does not have.
        """

    @abstractmethod
    def read(
        self, source: Path, output: Path, tree: Mapping[str, Any], *, verify: bool, tolerance: float
    ) -> Proof | None:
        """Write the run directory `output`, with one checkpoint at step 0, from a directory of this format.

        Args: tree: configuration of the new run. It must not contradict the model.
        Returns: the proof, None without `verify`.
        Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
        """

    def require_provable(self, path: Path) -> None:
        """Raise CheckpointError if there is no proof. Args: path: of the model, for the message."""
        if self.unprovable is not None:
            raise CheckpointError(f"{path}: {self.unprovable}; add --no-verify.")

    def prove(self, run: OpenRun, directory: Path, dtype: str, tolerance: float) -> Report:
        """Compare a run with the directory that `write` made of it.

        Args: dtype: of the directory's weights, to which the weights of the run are rounded.
        Raises: CheckpointError unless both compute the same.
        """
        raise NotImplementedError(self.unprovable)


def format_of_run(config: Config) -> HuggingFaceFormat | None:
    """The format of the model that a configuration trains; None: one Transformer, which hf writes itself."""
    return _load(model_spec(config))


def format_of_directory(directory: Path) -> HuggingFaceFormat | None:
    """The format of a directory; None: one Transformer, or no model."""
    return next((each for each in _formats() if each.is_format_of(directory)), None)


def _formats() -> Iterator[HuggingFaceFormat]:
    for section in sections_with_models():
        assert section.model_module is not None
        if (model_format := _load(importlib.import_module(section.model_module).MODEL_SPEC)) is not None:
            yield model_format


def _load(spec: ModelSpec) -> HuggingFaceFormat | None:
    # Imported by name: the packages of models import hf, not the other way round.
    return None if spec.huggingface is None else importlib.import_module(spec.huggingface).HUGGINGFACE_FORMAT
