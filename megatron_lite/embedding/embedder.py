"""Texts -> vectors by a run: its input format, its section `embedding`, packed documents without padding.

A text is one document as the run's objective writes it: [CLS] text [SEP] for BERT, part A of GLM with nothing blank,
the encoder's text for T5, begin and text for a decoder. A prompt is joined to the text before the tokenizer, and the
end of both together is cut at the maximal length.

A vector depends in its last digits on the texts that are computed with it, so `batches` depends on the texts alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import FIELDS, Example
from data_utils.common.errors import DataError
from data_utils.common.settings import build, check, merge, to_tree
from data_utils.objectives.interface import role_token
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.templates.examples import document
from data_utils.tasks.templates.heads_input import FORMS, head_document
from data_utils.tasks.templates.input_formats import choose_input_format
from data_utils.tasks.templates.inputs import Inputs
from data_utils.tokenizers.special_tokens import NO_TOKEN
from megatron_lite.config.embedding import EmbeddingConfig
from megatron_lite.inference.open_run import OpenRun, Run
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.pooling import TextBatch, finished

BATCH_TOKENS = 16384  # of a forward pass
_LEAST_TASK_LENGTH = 8


@dataclass(frozen=True)
class TextDocument:
    """A text as the encoder reads it, and how many of its first tokens the mean leaves out."""

    example: Example
    skipped: int


class TextFormat:
    """How a run reads texts of which it makes vectors. Needs no weights.

    Args:
        run: which may be without its model.
        config: None = the run's own section `embedding`.
        prompt: a name of `embedding.prompts`; "" = none; None = the default prompt.
    Raises: ConfigError for settings that the run cannot take.
    """

    def __init__(self, run: OpenRun, config: EmbeddingConfig | None = None, prompt: str | None = None):
        run.require_one_transformer()
        config = config or run.config.embedding
        model, objectives = run.config.model, run.config.objective_choices
        input_format = choose_input_format("auto", objectives, model.decoder_layers > 0)
        self.is_causal = input_format.name == "causal"
        config = replace(config, pooling=config.pooling_of(self.is_causal))
        check(
            config.pooling != "cls" or not self.is_causal,
            f"embedding.pooling is cls, but {run.checkpoint.path} reads from left to right, so that the first token "
            "has seen no other; set it to last or mean.",
        )
        self.config = config
        self.length = _longest(run, config)
        settings = TaskConfig(
            name="texts", kind="tagging", reader="jsonl", sequence_length=max(self.length, _LEAST_TASK_LENGTH)
        )
        self._inputs = Inputs(settings, run.tokenizer, input_format, seed=0)
        self._is_encoders = input_format.name == "encoder_decoder"
        if not self._is_encoders:
            self._inputs.require_format(FORMS)
        self._prompt = config.prompt_text(config.default_prompt if prompt is None else prompt)
        self._overhead = len(self._example([]).tokens)
        # Tokens of the prompt by itself and what stands before them; its last may become one token with the text.
        self._skipped = 0
        if self._prompt and not config.include_prompt:
            self._skipped = self._before + len(run.tokenizer.encode(self._prompt))
            check(
                self._skipped < self.length - 1,
                f"the prompt {self._prompt!r} has {self._skipped} tokens, but embedding.max_length is {self.length}; "
                "raise it, or shorten the prompt.",
            )

    @property
    def reads_empty_texts(self) -> bool:
        """Whether a text without a token has special tokens, and so a vector."""
        return self._overhead > 0

    def described(self) -> dict[str, Any]:
        """What its documents and vectors depend on besides texts and tokenizer, as JSON."""
        input_format = self._inputs.input_format
        return {
            "settings": to_tree(self.config),
            "form": [input_format.name, input_format.objective, *self._example([]).tokens.tolist()],
            "prompt": self._prompt,
            "length": self.length,
        }

    @property
    def _before(self) -> int:
        """Special tokens before a text."""
        with_text = self._example([-1]).tokens.tolist()
        return with_text.index(-1)

    def documents(self, texts: Sequence[str]) -> list[TextDocument]:
        """Raises: DataError for a text without a token."""
        ids, lengths = self._inputs.tokenizer.encode_batch([self._prompt + text for text in texts])
        most = self.length - self._overhead
        found = []
        for text, end, length in zip(texts, np.cumsum(lengths), lengths, strict=True):
            tokens = ids[end - length : end][:most].tolist()
            if not tokens and not self.reads_empty_texts:
                raise DataError(f"the text {text[:40]!r} has no token; remove it.")
            found.append(TextDocument(self._example(tokens), self._skipped))
        return found

    def _example(self, ids: Sequence[int]) -> Example:
        if not self._is_encoders:
            return head_document(self._inputs, [ids]).example
        writing, special = self._inputs.input_format.writing, self._inputs.special
        before, after = (
            [token for role in roles if (token := role_token(role, special)) != NO_TOKEN]
            for roles in (writing.before, writing.after)
        )
        return document(tokens=[*before, *ids, *after], objective=self._inputs.input_format.loss())

    def batch(self, documents: Sequence[TextDocument]) -> TextBatch:
        """The documents one after another in one sequence, without padding."""
        fields = np.concatenate(
            [np.stack([getattr(each.example, name).view(np.int32) for name in FIELDS]) for each in documents],
            axis=1,
        )[None]
        lengths = [len(each.example.tokens) for each in documents]
        fields[0, FIELDS.index("doc")] = np.repeat(np.arange(len(documents)), lengths)
        skipped = np.array([each.skipped for each in documents])
        return TextBatch(fields, pooling=self.config.pooling, skipped=skipped)


class Embedder:
    """The vectors of texts.

    Args:
        run: with its model.
        text_format: how it reads them.
        dimensions: the first numbers of each vector alone, normalized after the cut; None = all.
        batch_tokens: of a forward pass, about.
    """

    def __init__(
        self,
        run: Run,
        text_format: TextFormat,
        dimensions: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ):
        self.run, self.text_format = run, text_format
        self.dimensions, self.batch_tokens = dimensions, batch_tokens
        self._device = next(run.model.parameters()).device

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """fp32 [texts, D], in the order of the texts."""
        documents = self.text_format.documents(texts)
        size = width(self.run, self.dimensions)
        vectors = np.empty((len(texts), size), np.float32)
        for numbers in batches([len(each.example.tokens) for each in documents], self.batch_tokens):
            batch = self.text_format.batch([documents[number] for number in numbers])
            micro_batch = MicroBatch.from_batch(batch, self._device, self.run.config.model)
            pooled = self.run.model.text_vectors(micro_batch)
            is_normal = self.text_format.config.normalize
            vectors[numbers] = finished(pooled, is_normal, self.dimensions).cpu().numpy()
        return vectors


def width(run: OpenRun, dimensions: int | None) -> int:
    """The numbers of a vector. Raises: ConfigError for more `dimensions` than the model has."""
    size = run.config.model.hidden_size
    check(
        dimensions is None or dimensions <= size,
        f"--dimensions is {dimensions}, but the vectors of {run.checkpoint.path} have {size} numbers; lower it.",
    )
    return dimensions or size


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """The numbers of texts in groups of at most `batch_tokens` tokens, or of one text; the longest first."""
    group: list[int] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if group and tokens + lengths[number] > batch_tokens:
            yield group
            group, tokens = [], 0
        group.append(number)
        tokens += lengths[number]
    if group:
        yield group


def embedding_config(run: OpenRun, settings: Mapping[str, Any]) -> EmbeddingConfig:
    """The run's section `embedding` with some of its settings replaced."""
    return build(EmbeddingConfig, merge(to_tree(run.config.embedding), settings), "embedding.")


def _longest(run: OpenRun, config: EmbeddingConfig) -> int:
    """Most tokens of a text. Raises: ConfigError for more than the model has positions."""
    model = run.config.model
    positions = model.max_position + 1 if model.has_position_tables else None
    check(
        positions is None or (config.max_length or 0) <= positions,
        f"embedding.max_length is {config.max_length}, but {run.checkpoint.path} has {positions} positions "
        f"(model.max_position {model.max_position}); lower it.",
    )
    return config.max_length or positions or run.config.data.sequence_length
