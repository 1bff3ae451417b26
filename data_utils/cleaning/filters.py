"""The filters of a recipe as steps of datatrove: its own classes with the recipe's thresholds, and three of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import (
    C4ParagraphFilter,
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.filters.c4_filters import CITATION_REGEX
from datatrove.utils.text import split_into_sentences
from datatrove.utils.word_tokenizers import WhitespaceTokenizer, WordTokenizer, load_word_tokenizer

from data_utils.build.contamination import EvaluationTexts
from data_utils.cleaning.keep import Keep
from data_utils.cleaning.recipe import C4, C4Paragraphs, FineWeb, GopherQuality, GopherRepetition, Recipe
from data_utils.cleaning.writers import RemovedDocuments
from data_utils.common.errors import ConfigError
from data_utils.common.words import words
from data_utils.corpus.documents import text_bytes

_HAN = "\u3400-\u9fff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_HAN}]|[^\s{_HAN}]+")
_GRAM = re.compile(r"\d+")


class SpaceWords(WhitespaceTokenizer):
    """Words as Gopher's paper counts them: cut at spaces, and each Chinese character is one.

    datatrove takes a `WordTokenizer` in place of a language. The class above it gives sentences, by the punctuation of
    every script; its own words would be spaCy's, which count punctuation as words and take 83 % of the time of MinHash.
    """

    def word_tokenize(self, text: str) -> list[str]:
        return text.split() if text.isascii() else _WORD.findall(text)


class ComparedWords(WhitespaceTokenizer):
    """Words of near-duplicates: those by which evaluation texts are found, in any script.

    Of text in ASCII these are the words at spaces, since MinHash makes punctuation spaces before.
    """

    def word_tokenize(self, text: str) -> list[str]:
        return words(text)


def word_tokenizer(recipe: Recipe) -> WordTokenizer:
    """One object for all steps of a pipeline, since datatrove keeps the words of the last texts for each.

    Raises: ConfigError where the packages of spaCy's words are missing.
    """
    if recipe.words == "spaces":
        return SpaceWords()
    try:
        tokenizer = load_word_tokenizer(recipe.language)
        tokenizer.word_tokenize("a")
    except ValueError:
        raise ConfigError(
            f"language is {recipe.language!r}, for which datatrove has no words; use its code, such as en, or set "
            "words: spaces."
        ) from None
    except ImportError as error:
        package = getattr(error, "name", None) or str(error).partition("`")[2].partition("`")[0] or "spacy"
        raise ConfigError(
            f"words is spacy, but the package {package} is not installed; run pip install {package}, or set words: "
            "spaces."
        ) from None
    return tokenizer


def _gopher_quality(rules: GopherQuality, **options: Any) -> BaseFilter:
    return GopherQualityFilter(**{**asdict(rules), "stop_words": list(rules.stop_words)}, **options)


def _gopher_repetition(rules: GopherRepetition, **options: Any) -> BaseFilter:
    limits = asdict(rules)

    def grams(prefix: str) -> tuple[tuple[int, float], ...]:
        named = {name: limits.pop(name) for name in list(limits) if name.startswith(prefix)}
        return tuple((int(_GRAM.search(name)[0]), most) for name, most in named.items() if most is not None)  # type: ignore[index]

    return GopherRepetitionFilter(
        top_n_grams=grams("top_"), dup_n_grams=grams("duplicated_"), **limits, **options
    )


class CountedC4(C4QualityFilter):
    """datatrove's filter, which counts what it cuts out of the documents that stay."""

    _fates: list[str]  # of the parts of a document: kept, or the rule that cuts it out

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        text, self._fates = doc.text, []
        result = super().filter(doc)
        if result is True:
            self._count(doc, text)
        return result

    def stat_update(self, *labels: str, value: int = 1, unit: str | None = None) -> None:
        super().stat_update(*labels, value=value, unit=unit)
        # datatrove counts each line as one of the total, and then as kept or by the rule that cuts it out.
        if labels[0].startswith("line-") and labels[0] != "line-total":
            self._fates.append(labels[0])

    def _count(self, document: Document, text: str) -> None:
        parts = text.splitlines(True) if self.split_paragraph else split_into_sentences(text, self.language)
        removed, rest = self.exclusion_writer, text_bytes(text) - text_bytes(document.text)
        for part, fate in zip(parts, self._fates, strict=True):
            reason, shown = fate, part
            if fate == "line-kept":
                if not self.remove_citations or not (found := CITATION_REGEX.findall(part)):
                    continue
                reason, shown = "citations", "".join(found)
            removed.cut(document, reason, shown, size := text_bytes(shown))
            rest -= size
        if rest:
            removed.cut(document, "white space", "", rest)


def _c4(rules: C4, **options: Any) -> BaseFilter:
    # datatrove writes -1 where a recipe has null.
    return CountedC4(**{k: -1 if v is None else v for k, v in asdict(rules).items()}, **options)


def _c4_paragraphs(rules: C4Paragraphs, exclusion_writer: RemovedDocuments, language: Any) -> BaseFilter:
    return C4ParagraphFilter(exclusion_writer)


def _fineweb(rules: FineWeb, **options: Any) -> BaseFilter:
    return FineWebQualityFilter(**asdict(rules), **options)


_MAKERS: Mapping[str, Callable[..., BaseFilter]] = {
    "gopher_quality": _gopher_quality,
    "gopher_repetition": _gopher_repetition,
    "c4": _c4,
    "c4_paragraphs": _c4_paragraphs,
    "fineweb": _fineweb,
}


def make_filter(name: str, rules: Any, words: WordTokenizer, removed: RemovedDocuments) -> BaseFilter:
    """datatrove's filter of a recipe's section `filters.NAME`."""
    return _MAKERS[name](rules, exclusion_writer=removed, language=words)


class KeepFilter(BaseFilter):
    """The recipe's `keep`."""

    name = "keep"

    def __init__(self, keep: Keep, removed: RemovedDocuments) -> None:
        super().__init__(removed)
        self.keep = keep

    def filter(self, document: Document) -> bool:
        return self.keep(document.metadata["fields"])


class NotEmpty(BaseFilter):
    """Removes what c4 has left without text: other filters divide by the number of words."""

    name = "not empty"

    def filter(self, document: Document) -> bool | tuple[bool, str]:
        return True if document.text and not document.text.isspace() else (False, "no line is left")


class Contamination(PipelineStep):
    """Removes, or only counts, documents that share 13 words with evaluation texts: as a corpus build reports them."""

    type = "🦠 - DECONT"
    name = "contamination"

    def __init__(self, evaluation: EvaluationTexts, remove: bool, found: RemovedDocuments) -> None:
        super().__init__()
        self.evaluation, self.remove, self.found = evaluation, remove, found

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        with self.found as found:
            for document in data:
                if len(self.evaluation.shared(document.text)):
                    found.write(document, rank)
                    if self.remove:
                        continue
                yield document
