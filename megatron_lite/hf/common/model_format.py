"""The interface to the Hugging Face directories of a model; formats.py in megatron_lite/hf lists those that have it.

A format writes and reads directories. export.py and importing.py, which know models through this interface alone, do
the rest: they open and write runs, and compare outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.verify import Checks, load_transformer
from megatron_lite.hf.common.verify_tokenizer import TokenizerComparison, compare_exported
from megatron_lite.hf.common.weights import Weights
from megatron_lite.inference.open_run import OpenRun


@dataclass(frozen=True)
class Imported:
    """What a directory is as a run.

    Args:
        config: of the run; its tokenizers are files that exist.
        weights: all parameters of the run.
        checks: what the class of the directory computes; None: `unverifiable`.
    """

    config: Config
    weights: Weights
    checks: Checks | None


class HuggingFaceFormat(ABC):
    """The directory format of one model."""

    # Why outputs cannot be compared, as a clause; None: they can.
    unverifiable: str | None = None

    @abstractmethod
    def is_format_of(self, directory: Path) -> bool:
        """Whether a directory has this format. Raises: CheckpointError for files that can be of no model."""

    def require_model(self, run: OpenRun) -> None:
        """Raise CheckpointError for a run whose model or vocabulary the format does not have."""
        return  # it has every model whose configuration chooses it

    @abstractmethod
    def write(
        self, directory: Path, run: OpenRun, weights: Weights, dtype: str, max_shard_bytes: int
    ) -> Checks | None:
        """Write the weights of a run, its tokenizers and its card.

        Args: dtype: a key of DTYPES. max_shard_bytes: of a weight file.
        Returns: what the class of the directory computes; None: `unverifiable`.
        Raises: CheckpointError for what the format does not have.
        """

    @abstractmethod
    def read(self, source: Path, directory: Path, tree: Mapping[str, Any], *, verify: bool) -> Imported:
        """A directory of this format as a run.

        Args:
            directory: of the run, for what an export of it will need: its tokenizer's files, ...
            tree: configuration of the new run. It must not contradict the model.
            verify: compare the run's own tokenizers with those of `source`.
        Raises: CheckpointError, DataError or ConfigError.
        """

    def require_verifiable(self, path: Path) -> None:
        """Raise CheckpointError if no outputs can be compared. Args: path: of the model, for the message."""
        if self.unverifiable is not None:
            raise CheckpointError(f"{path}: {self.unverifiable}; add --no-verify.")

    def load(self, run: OpenRun, dtype: torch.dtype) -> Any:
        """Our model in fp32, with weights as a directory of this type has them, for `Checks`."""
        return load_transformer(run, dtype)

    def compare_tokenizers(self, run: OpenRun, directory: Path) -> dict[str, TokenizerComparison]:
        """Compare the tokenizers of a run with those that `write` wrote. Raises: CheckpointError if they differ.

        Returns: name of the directory, or of a part of it -> the result.
        """
        return {"tokenizer": compare_exported(run.tokenizer, directory)}
