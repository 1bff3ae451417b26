"""The words of texts in a run's input format, and their vectors in each layer.

Shapes: L + 1 layers, the embeddings and the outputs of all blocks; D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data_utils.common.errors import ConfigError
from data_utils.tasks.base import TargetGroup, TaskSample
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.templates.collate import collate
from data_utils.tasks.templates.heads_input import FORMS, head_document, overhead
from data_utils.tasks.templates.input_formats import choose_input_format
from data_utils.tasks.templates.inputs import Inputs
from megatron_lite.inference.open_run import OpenRun, Run
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.task_batch import TaskBatch


@dataclass(frozen=True)
class Text:
    """A text's words, and its document in the input format of the run's objective.

    Args:
        token_counts: number of tokens of each word.
        sample: its one target group has the positions of all these tokens.
        cut: number of words that did not fit and are left out.
    """

    words: list[str]
    token_counts: list[int]
    sample: TaskSample
    cut: int


def make_inputs(run: OpenRun) -> Inputs:
    """The input format for single texts. Raises: ConfigError for a run with a decoder, or without such a format."""
    if run.config.model.decoder_layers:
        raise ConfigError(
            f"{run.checkpoint.path} has model.decoder_layers {run.config.model.decoder_layers}, but words are "
            "looked at in one stack; give a run without a decoder."
        )
    length = min(run.config.data.sequence_length, run.config.model.max_position)
    settings = TaskConfig(name="texts", kind="tagging", reader="jsonl", sequence_length=max(length, 8))
    inputs = Inputs(settings, run.tokenizer, choose_input_format("auto", run.objectives), seed=0)
    inputs.require_format(FORMS)
    return inputs


def read(texts: Sequence[str], inputs: Inputs) -> list[Text]:
    """The texts, split at spaces. Words that do not fit the run's sequence length are left out."""
    return [_read(text.split(), inputs) for text in texts]


def _read(words: Sequence[str], inputs: Inputs) -> Text:
    max_tokens = inputs.config.sequence_length - overhead(inputs, 1)
    kept: list[list[int]] = []
    used = 0
    for number, word in enumerate(words):
        ids = inputs.tokenizer.encode(" " + word if number else word) or [inputs.special.unk]
        used += len(ids)
        if used > max_tokens:
            break
        kept.append(ids)
    document = head_document(inputs, [[token for ids in kept for token in ids]])
    positions = document.starts[0] + np.arange(sum(map(len, kept)))
    sample = TaskSample([document.example], [TargetGroup(0, positions.astype(np.int32))])
    return Text(list(words[: len(kept)]), [len(ids) for ids in kept], sample, len(words) - len(kept))


def batches(texts: Sequence[Text], size: int) -> Iterator[Sequence[Text]]:
    """The texts in groups of `size`, the last one smaller."""
    return (texts[start : start + size] for start in range(0, len(texts), size))


@torch.no_grad()
def word_vectors(run: Run, texts: Sequence[Text]) -> list[torch.Tensor]:
    """The vectors of each text's words, fp32 [words, L + 1, D] on the CPU: the mean over the tokens of the word."""
    fields, targets = collate([text.sample for text in texts])
    batch = TaskBatch(fields, np.arange(len(texts)), targets, "tags")
    model = run.model
    micro_batch = MicroBatch.from_batch(batch, next(model.parameters()).device, run.config.model)
    layers: list[torch.Tensor] = []

    def keep(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        layers.append(hidden)
        return hidden

    # `keep` gets the input of each block; the output of the last one is the result of the run.
    layers.append(model.run(micro_batch.tokens, micro_batch.ids, micro_batch.plan, None, keep))
    positions = micro_batch.extra_inputs.positions
    tokens = torch.stack([layer[positions] for layer in layers], dim=1).float().cpu()
    counts = torch.tensor([count for text in texts for count in text.token_counts])
    word_of_token = torch.repeat_interleave(torch.arange(len(counts)), counts)
    sums = tokens.new_zeros(len(counts), *tokens.shape[1:]).index_add_(0, word_of_token, tokens)
    return list((sums / counts[:, None, None]).split([len(text.words) for text in texts]))


def require_words(texts: Sequence[Text], least: int, source: Path | str) -> None:
    """Raise ConfigError if fewer than `least` texts have a word that fits the run's sequence length."""
    count = sum(bool(text.words) for text in texts)
    if count < least:
        raise ConfigError(
            f"{source} has {count} texts whose first word fits the run's sequence length; at least {least} are needed."
        )
