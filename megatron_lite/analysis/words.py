"""Words of texts as a run reads them, and what each of its layers makes of them."""

# L + 1 layers: the embeddings and the outputs of all blocks. D hidden size

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
from megatron_lite.model.micro_batch import MicroBatch
from megatron_lite.model.task_batch import TaskBatch


@dataclass(frozen=True)
class Text:
    """A text's words and its one document, in the layout of the run's objective.

    Args: pieces: number of tokens of each word. sample: its part has the rows of all of them. cut: words left out.
    """

    words: list[str]
    pieces: list[int]
    sample: TaskSample
    cut: int


def inputs_of(run: OpenRun) -> Inputs:
    """The layout in which a run reads texts alone. Raises: ConfigError where its objectives have none."""
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
    """Words are what stands between spaces. Those that do not fit the run's length are left out."""
    return [_read(text.split(), inputs) for text in texts]


def _read(words: Sequence[str], inputs: Inputs) -> Text:
    room = inputs.config.sequence_length - overhead(inputs, 1)
    kept: list[list[int]] = []
    used = 0
    for number, word in enumerate(words):
        ids = inputs.tokenizer.encode(" " + word if number else word) or [inputs.special.unk]
        used += len(ids)
        if used > room:
            break
        kept.append(ids)
    document = head_document(inputs, [[token for ids in kept for token in ids]])
    rows = document.starts[0] + np.arange(sum(map(len, kept)), dtype=np.int32)
    sample = TaskSample([document.example], [TargetGroup(0, rows.astype(np.int32))])
    return Text(list(words[: len(kept)]), [len(ids) for ids in kept], sample, len(words) - len(kept))


def batches(texts: Sequence[Text], size: int) -> Iterator[Sequence[Text]]:
    return (texts[start : start + size] for start in range(0, len(texts), size))


@torch.no_grad()
def layers_of(run: Run, texts: Sequence[Text]) -> list[torch.Tensor]:
    """The vectors of each text's words, fp32 [words, L + 1, D] on the CPU: the mean over the word's tokens."""
    fields, parts = collate([text.sample for text in texts])
    batch = TaskBatch(fields, np.arange(len(texts)), parts, "tags")
    model = run.model
    given = MicroBatch.from_batch(batch, next(model.parameters()).device, run.config.model)
    layers: list[torch.Tensor] = []

    def keep(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        layers.append(hidden)
        return hidden

    layers.append(model.run(given.tokens, given.ids, given.plan, None, keep))
    rows = torch.stack([layer[given.extra_inputs.positions] for layer in layers], dim=1).float().cpu()
    pieces = torch.tensor([count for text in texts for count in text.pieces])
    owner = torch.repeat_interleave(torch.arange(len(pieces)), pieces)
    sums = rows.new_zeros(len(pieces), *rows.shape[1:]).index_add_(0, owner, rows)
    return list((sums / pieces[:, None, None]).split([len(text.words) for text in texts]))


def require_words(texts: Sequence[Text], least: int, source: Path | str) -> None:
    """Raises: ConfigError where too few texts have a word that fits the run's length."""
    count = sum(bool(text.words) for text in texts)
    if count < least:
        raise ConfigError(
            f"{source} has {count} texts whose first word fits the run's length; this needs {least} or more."
        )
