"""The recipe of a cleaning run: a YAML file of rules with their thresholds. See docs/cleaning.md.

The thresholds of a filter have the defaults of datatrove's class, taken from the paper. null leaves a rule out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.cleaning.keep import Keep
from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml, setting_lines, shown, yaml_path
from data_utils.common.settings import (
    SettingsError,
    build,
    checked,
    fraction,
    inline_sections,
    section,
    setting,
)

FOLDER = "cleaning"  # of the project's own recipes, below configs/


@dataclass(frozen=True, kw_only=True)
@checked("filters.gopher_quality")
class GopherQuality:
    """Rules on the quality of a document: Gopher, arXiv:2112.11446, appendix A1.1."""

    min_doc_words: int | None = setting(50, "fewest words, those of punctuation alone left out", at_least=1)
    max_doc_words: int | None = setting(100_000, "most words", at_least=1)
    min_avg_word_length: float | None = setting(3, "smallest mean length of a word, characters", above=0)
    max_avg_word_length: float | None = setting(10, "largest mean length of a word, characters", above=0)
    max_symbol_word_ratio: float | None = setting(0.1, "most # and most ellipses, per word", above=0)
    max_bullet_lines_ratio: float | None = setting(
        0.9, "largest share of lines that begin with a bullet", above=0
    )
    max_ellipsis_lines_ratio: float | None = setting(
        0.3, "largest share of lines that end in an ellipsis", above=0
    )
    max_non_alpha_words_ratio: float | None = setting(
        0.8, "smallest share of words with a letter (datatrove's name says the opposite)", above=0, at_most=1
    )
    min_stop_words: int | None = setting(2, "fewest different stop words", at_least=1)
    stop_words: tuple[str, ...] = setting(
        ("the", "be", "to", "of", "and", "that", "have", "with"), "the stop words"
    )


@dataclass(frozen=True, kw_only=True)
@checked("filters.gopher_repetition")
class GopherRepetition:
    """Rules on repetition within a document: Gopher, arXiv:2112.11446, table A1. All are largest shares."""

    # datatrove reads 0 as no limit for these four.
    dup_line_frac: float | None = setting(0.3, "lines that repeat an earlier one", above=0, at_most=1)
    dup_para_frac: float | None = setting(0.3, "paragraphs that repeat an earlier one", above=0, at_most=1)
    dup_line_char_frac: float | None = setting(0.2, "characters in such lines", above=0, at_most=1)
    dup_para_char_frac: float | None = setting(0.2, "characters in such paragraphs", above=0, at_most=1)
    top_2_gram: float | None = fraction(0.2, "characters of the most frequent 2-gram of words")
    top_3_gram: float | None = fraction(0.18, "characters of the most frequent 3-gram")
    top_4_gram: float | None = fraction(0.16, "characters of the most frequent 4-gram")
    duplicated_5_n_grams: float | None = fraction(0.15, "characters in repeated 5-grams")
    duplicated_6_n_grams: float | None = fraction(0.14, "characters in repeated 6-grams")
    duplicated_7_n_grams: float | None = fraction(0.13, "characters in repeated 7-grams")
    duplicated_8_n_grams: float | None = fraction(0.12, "characters in repeated 8-grams")
    duplicated_9_n_grams: float | None = fraction(0.11, "characters in repeated 9-grams")
    duplicated_10_n_grams: float | None = fraction(0.10, "characters in repeated 10-grams")


@dataclass(frozen=True, kw_only=True)
@checked("filters.c4")
class C4:
    """Rules on lines of web pages, which are cut out, and on documents: C4, arXiv:1910.10683, section 2.2."""

    split_paragraph: bool = setting(True, "the rules are on lines; false: on sentences")
    remove_citations: bool = setting(True, "cut out [1], [edit] and [citation needed]")
    filter_no_terminal_punct: bool = setting(
        True, "cut out lines that do not end in . ? ! or a quotation mark"
    )
    min_num_sentences: int | None = setting(5, "fewest sentences of a document", at_least=1)
    min_words_per_line: int | None = setting(3, "fewest words of a line", at_least=1)
    max_word_length: int | None = setting(1000, "longest word of a line, characters", at_least=1)
    filter_lorem_ipsum: bool = setting(True, "remove documents with the phrase lorem ipsum")
    filter_javascript: bool = setting(True, "cut out lines that mention javascript")
    filter_curly_bracket: bool = setting(True, "remove documents with a curly bracket")
    filter_policy: bool = setting(True, "cut out lines on cookies and terms of use")


@dataclass(frozen=True, kw_only=True)
@checked("filters.c4_paragraphs")
class C4Paragraphs:
    """Three lines of at least 200 characters: mC4, arXiv:2010.11934. It has no thresholds to set."""


@dataclass(frozen=True, kw_only=True)
@checked("filters.fineweb")
class FineWeb:
    """Rules on the lines of a document: FineWeb, arXiv:2406.17557, section 3.6."""

    line_punct_thr: float = fraction(0.12, "smallest share of lines that end in punctuation")
    line_punct_exclude_zero: bool = setting(False, "keep documents without any such line")
    short_line_thr: float = fraction(0.67, "largest share of short lines")
    short_line_length: int = setting(30, "most characters of a short line", at_least=1)
    char_duplicates_ratio: float = fraction(0.01, "largest share of characters in repeated lines")
    new_line_ratio: float = setting(0.3, "most line breaks per word", at_least=0)


FILTERS: Mapping[str, type] = {
    "gopher_quality": GopherQuality,
    "gopher_repetition": GopherRepetition,
    "c4": C4,
    "c4_paragraphs": C4Paragraphs,
    "fineweb": FineWeb,
}


@dataclass(frozen=True, kw_only=True)
class Filters:
    """The filters of a recipe by name, in the order of the file, in which they run: c4 changes what later ones read."""

    chosen: dict[str, Any] = inline_sections(tuple(FILTERS), FILTERS.__getitem__)


@dataclass(frozen=True, kw_only=True)
@checked("near_duplicates")
class NearDuplicates:
    """MinHash: the defaults are FineWeb's. A pair of Jaccard similarity s is found with 1 - (1 - s^rows)^bands."""

    n_grams: int = setting(5, "words of an n-gram", at_least=1, at_most=100)
    # Each hash of a text takes 8 bytes for every n-gram of the text.
    num_buckets: int = setting(14, "bands", at_least=1, at_most=100)
    hashes_per_bucket: int = setting(8, "rows: hashes of a band", at_least=1, at_most=100)


@dataclass(frozen=True, kw_only=True)
@checked("")
class Recipe:
    """A recipe that has been checked."""

    words: str = setting("spaces", "how words are cut", one_of=("spaces", "spacy"))
    language: str = setting("en", "with words: spacy, the language, as datatrove names it")
    keep: str | None = setting(None, 'which records stay, by their fields: language == "en" and score >= 3')
    fields: tuple[str, ...] = setting((), "fields of the records that the output has besides the text")
    filters: Filters = section(Filters)
    exact_duplicates: bool = setting(False, "keep the first of exactly equal texts")
    near_duplicates: NearDuplicates | None = setting(None, "keep one of each group of near-duplicates")
    contaminated: str = setting(
        "remove", "documents that share 13 words with evaluation texts", one_of=("remove", "report")
    )

    def __post_init__(self) -> None:
        problems = {}
        if self.keep is not None:
            try:
                Keep(self.keep)
            except ValueError as error:
                problems["keep"] = f"keep is {shown(self.keep)}, but {error}."
        if self.words == "spaces" and self.language != "en":
            problems["language"] = (
                f"language is {shown(self.language)}, but words are cut at spaces in every language; set words: spacy, "
                "or remove language."
            )
        if "text" in self.fields or len(set(self.fields)) < len(self.fields):
            problems["fields"] = (
                f"fields is {shown(list(self.fields))}; name each once, without text, which is always written."
            )
        if problems:
            raise SettingsError(problems, "")

    @property
    def field_names(self) -> tuple[str, ...]:
        """The fields of the records that are read, besides the text."""
        named = Keep(self.keep).fields if self.keep is not None else ()
        return tuple(dict.fromkeys((*named, *self.fields)))

    @property
    def is_empty(self) -> bool:
        """Whether it removes nothing by itself."""
        return not (self.keep or self.filters.chosen or self.exact_duplicates or self.near_duplicates)


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe and the file that it was read from."""

    recipe: Recipe
    path: Path
    sha256: str  # of the file's bytes


def read_recipe(path: str | Path) -> RecipeFile:
    """Read a recipe.

    Args: path: a file, or the name of one of the project's own, such as gopher.
    Raises: ConfigError with all mistakes, each with its line.
    """
    found = yaml_path(path, FOLDER)
    if found.is_fifo():
        raise ConfigError(
            f"the recipe {found} is a pipe, which can be read only once, so its SHA-256 would be wrong; save it to a "
            "file."
        )
    try:
        recipe = build(Recipe, _with_defaults(load_yaml(found)))
    except SettingsError as error:
        lines = setting_lines(found)
        sentences = (
            f"{found}:{lines[key]}: {sentence}" if key in lines else f"{found}: {sentence}"
            for key, sentence in error.problems.items()
        )
        raise ConfigError(
            " ".join(filter(None, [error.rest and f"{found}: {error.rest}", *sentences]))
        ) from None
    return RecipeFile(recipe, found, hashlib.sha256(found.read_bytes()).hexdigest())


def _with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """A section that is named without a value has its defaults: `fineweb:` does not switch it off in silence."""
    tree = {
        key: {} if key in ("filters", "near_duplicates") and value is None else value
        for key, value in tree.items()
    }
    if isinstance(tree.get("filters"), Mapping):
        tree["filters"] = {
            key: {} if value is None and key in FILTERS else value for key, value in tree["filters"].items()
        }
    return tree
