"""Recipes: the expression `keep`, defaults as in datatrove, every mistake at once with its line."""

from __future__ import annotations

import ast
import inspect
import operator
import os

import pytest
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.gopher_quality_filter import STOP_WORDS
from hypothesis import given
from hypothesis import strategies as st
from support import code_structure
from support.project import ROOT

from data_utils.cleaning.counts import CountFile
from data_utils.cleaning.filters import SpaceWords, make_filter
from data_utils.cleaning.keep import Keep
from data_utils.cleaning.recipe import C4, FILTERS, FineWeb, GopherQuality, GopherRepetition, read_recipe
from data_utils.cleaning.writers import RemovedDocuments
from data_utils.common.errors import ConfigError

RECORDS = (
    {"language": "en", "score": 3, "a": {"b": 1}},
    {"language": "en", "score": "3.5", "draft": True},
    {"language": "de", "score": 2.5, "draft": False, "tags": ["x"]},
    {"language": None, "score": "high"},
    {},
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('language == "en" and score >= 3', [0, 1]),
        ("language == 'en' or score < 3", [0, 1, 2]),
        ("not (language == 'en')", [2, 3, 4]),
        ("language != null", [0, 1, 2]),
        ("language == None", [3, 4]),
        ("draft == true", [1]),
        ("draft == 1", []),
        ("draft != true", [0, 2, 3, 4]),
        ('language in ["en", "fr"] and draft not in [True]', [0]),
        ("2.5 < score <= 3", [0]),
        ("score > -1", [0, 1, 2]),
        ("score == 3", [0]),
        ('score > "a"', [3]),
        ("tags == 1 or tags < 2", []),
    ],
)
def test_which_records_stay(text, kept):
    keep = Keep(text)
    values = [{name: record[name] for name in keep.fields if name in record} for record in RECORDS]
    assert [i for i, record in enumerate(values) if keep(record)] == kept


def test_whole_numbers_in_text_are_not_rounded():
    keep = Keep("id == 9007199254740993")
    assert [keep({"id": value}) for value in ("9007199254740993", 9007199254740993, "9007199254740992")] == [
        True, True, False
    ]  # fmt: skip


@given(
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
)
def test_numbers_compare_as_numbers(left, right, sign):
    compare = dict(
        zip(["<", "<=", ">", ">=", "==", "!="], ["lt", "le", "gt", "ge", "eq", "ne"], strict=True)
    )[sign]
    expected = getattr(operator, compare)(left, right)
    keep = Keep(f"x {sign} y")
    assert keep.fields == ("x", "y")
    assert keep({"x": left, "y": right}) is keep({"x": str(left), "y": right}) is expected


@pytest.mark.parametrize(
    "text",
    [
        '__import__("os").system("true")', "language", "1 == 1", "x is 3", "x == f()", "x == y[0]", "lambda: 0",
        'x == f"{y}"', "x if y == 1 else z", "[x for x in y]", "x + 1 == 2", "x == b'1'", "x = 1", "", "x in y", "x ==",
        f"{'(' * 3000}x == 1{')' * 3000}", f"{'not ' * 990}x == 1", "x == 'a\0'", "(x := 1) == 1",
        "x == ...", "x in [y]", "x == 1j",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text):
    """By an error that is one line; nothing is evaluated."""
    with pytest.raises(ValueError) as error:
        Keep(text)
    assert "\n" not in str(error.value)


@given(st.text(alphabet="xy01 =<>()[]'\"andornit.,-", max_size=40))
def test_no_expression_ends_in_another_error(text):
    try:
        keep = Keep(text)
    except ValueError:
        return
    for value in (None, 1, "1", True, [1], {"a": 1}):
        assert keep(dict.fromkeys(keep.fields, value)) in (True, False)


def defaults(cls):
    """The arguments of a class of datatrove, as a recipe writes their defaults."""
    values = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
    for name in ("exclusion_writer", "language", "stop_chars"):
        values.pop(name, None)
    for prefix, name in (("top", "top_n_grams"), ("duplicated", "dup_n_grams")):
        for n, most in values.pop(name, ()):
            values[f"top_{n}_gram" if prefix == "top" else f"duplicated_{n}_n_grams"] = most
    if "stop_words" in values:
        values["stop_words"] = tuple(STOP_WORDS)
    return values


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (GopherQuality, GopherQualityFilter), (GopherRepetition, GopherRepetitionFilter), (C4, C4QualityFilter),
        (FineWeb, FineWebQualityFilter),
    ],
)  # fmt: skip
def test_defaults_are_datatroves(ours, theirs, tmp_path):
    section = ours()
    assert {name: getattr(section, name) for name in defaults(theirs)} == defaults(theirs)
    name = next(name for name, cls in FILTERS.items() if cls is ours)
    made = make_filter(name, section, SpaceWords(), RemovedDocuments(name, CountFile(tmp_path)))
    of_datatrove = theirs()
    for name, value in vars(of_datatrove).items():
        if name not in (
            "exclusion_writer",
            "language",
            "stats",
            "paragraph_exp",
            "_line_splitter",
            "stop_chars",
        ):
            assert getattr(made, name) == value, name


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs/cleaning").glob("*.yaml")))
def test_shipped_recipes_are_read_by_name(name):
    recipe = read_recipe(name).recipe
    assert recipe.filters.chosen and recipe.words == "spaces"
    chosen = recipe.filters.chosen
    if name == "gopher":
        assert chosen == {"gopher_quality": GopherQuality(), "gopher_repetition": GopherRepetition()}
    if name == "c4":
        assert chosen == {"c4": C4()}
    if name == "fineweb":
        assert list(chosen.items()) == [
            ("gopher_repetition", GopherRepetition()), ("gopher_quality", GopherQuality()),
            ("c4", C4(filter_no_terminal_punct=False)), ("fineweb", FineWeb()),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("filters:\n  c4: {min_num_sentences: 0}\n  gopher: {}\n",
         [":2: filters.c4.min_num_sentences is 0", ":3: unknown setting filters.gopher"]),
        ("language: de\nfields: [text]\nkeep: 'a =='\n", [":1: language", ":2: fields", ":3: keep"]),
        ("near_duplicates: true\n", [":1: near_duplicates"]),
        ("words: letters\ncontaminated: maybe\n", [":1: words", ":2: contaminated"]),
        ("filters: [c4]\n", [":1: filters"]),
        ("filters:\n  c4_paragraphs:\n    lines: 3\n",
         [":3: unknown setting filters.c4_paragraphs.lines; valid keys here are none"]),
        ("near_duplicates: {num_buckets: 0, rows: 3}\n", [":1: near_duplicates.num_buckets", "near_duplicates.rows"]),
        ("near_duplicates:\n  num_buckets: 101\n", [":2: near_duplicates.num_buckets is 101"]),
        ("a: [\n", [":2 is not valid YAML"]),
        ("- c4\n", ["must hold a mapping"]),
        ("keep: !!python/object/apply:os.system [true]\n", [":1 is not valid YAML"]),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_lines(text, named, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_recipe(path)
    assert "\n" not in str(error.value)
    for part in named:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "name", ["dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac"]
)
def test_a_share_of_0_that_datatrove_reads_as_no_limit_is_refused(name, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"filters:\n  gopher_repetition:\n    {name}: 0\n")
    with pytest.raises(
        ConfigError, match=rf":3: filters.gopher_repetition.{name} is 0; it must be above 0 and at most 1"
    ):
        read_recipe(path)


def test_a_pipe_is_no_recipe(tmp_path):
    """It would be empty when its checksum is made."""
    reading, writing = os.pipe()
    os.write(writing, b"exact_duplicates: true\n")
    os.close(writing)
    with pytest.raises(ConfigError, match="is a pipe"):
        read_recipe(f"/dev/fd/{reading}")
    os.close(reading)


def test_a_key_without_a_value_has_the_defaults(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("filters:\n  fineweb:\n  c4_paragraphs:\nnear_duplicates:\n")
    recipe = read_recipe(path).recipe
    assert recipe.filters.chosen["fineweb"] == FineWeb() and recipe.near_duplicates.num_buckets == 14
    assert list(recipe.filters.chosen) == ["fineweb", "c4_paragraphs"]


def test_datatrove_is_imported_by_cleaning_alone():
    """It is optional, so no other command may need it."""
    importing = {
        code_structure.module_name(path)
        for path in code_structure.product_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(name.split(".")[0] == "datatrove" for name in imported(node))
    }
    assert importing and all(name.startswith("data_utils.cleaning.") for name in importing)


def imported(node):
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
