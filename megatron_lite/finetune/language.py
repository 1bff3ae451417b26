"""The texts of a task's samples as documents of the run's objective, for an auxiliary language-model loss (SiATL).

A head's documents cannot have that loss themselves: in most systems each token sees all others. So each sample gets a
second document with the same text, of which the objective hides and predicts tokens.

Source: SiATL, arXiv:1902.10547: L = L_task + weight(epoch) L_LM.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data_utils.common.batch_fields import DOC, PADDING_DOC, Example
from data_utils.loader.loader import collate
from data_utils.objectives import LOSSES, make_objective
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from data_utils.tasks.base import TaskSample
from data_utils.tokenizers.special_tokens import NO_TOKEN
from data_utils.tokenizers.tokenizer import Tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.config.tree import Config
from megatron_lite.finetune.data import MOST_DOCUMENTS

_OF_SENTENCES = [loss.number for loss in LOSSES if loss.sentence_level]


class LanguageDocuments:
    """Adds to a sample a document of the objective for each of its own: a pure function of the sample's number."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        task, special = config.task, tokenizer.special
        assert task is not None
        self._eos, self._length = special.eos, task.sequence_length
        vocabulary = vocabulary_of(tokenizer)
        seed = config.training.seed
        self._objective = make_objective(config.objective_choices, vocabulary, seed, self._length)
        self._marks = [
            getattr(special, role) for role in ("cls", "sep", "eos") if role not in tokenizer.lacking
        ]

    def added(self, sample: TaskSample, number: int) -> TaskSample:
        """Args: number: of the sample in the run, so that each epoch hides other tokens."""
        made = [
            self._document(example, number * MOST_DOCUMENTS + place)
            for place, example in enumerate(sample.documents)
        ]
        return replace(sample, documents=[*sample.documents, *(one for one in made if one is not None)])

    def _document(self, example: Example, number: int) -> Example | None:
        end = [] if self._eos == NO_TOKEN else [self._eos]  # as documents end in pretraining
        room = self._length - DOCUMENT_OVERHEAD - len(end)
        text = example.tokens[~np.isin(example.tokens, self._marks)][:room]
        if not len(text):
            return None
        tokens = np.append(text, end)
        counts = np.array([len(tokens)]), np.array([1])
        fields = collate(self._objective, tokens, *counts, np.array([number]))[0]
        made = Example.from_fields(fields[:, fields[DOC] != PADDING_DOC])
        # A single text has no neighbouring sentences: the weight of sentence losses is 0.
        return replace(made, weights=np.where(np.isin(made.objective, _OF_SENTENCES), 0.0, made.weights))
