"""Filters equal datatrove's own classes on the same texts, near-duplicates its example and the formula."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4ParagraphFilter,
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.utils.hashing import HashConfig, create_hash_func
from datatrove.utils.text import ngrams, simplify_text
from support.data import cleaning
from support.project import ROOT
from support.selection import slow_but

from data_utils.cleaning.filters import SpaceWords

RECIPES = ROOT / "configs/cleaning"
SPACES = cleaning.Spaces()
CLASSES = {
    "gopher_quality": GopherQualityFilter(language=SPACES, min_doc_words=20),
    "gopher_repetition": GopherRepetitionFilter(language=SPACES),
    "c4": C4QualityFilter(language=SPACES, min_num_sentences=2, filter_no_terminal_punct=False),
    "c4_paragraphs": C4ParagraphFilter(),
    "fineweb": FineWebQualityFilter(language=SPACES),
}
FILTERS = {
    "gopher_quality": {"min_doc_words": 20},
    "gopher_repetition": {},
    "c4": {"min_num_sentences": 2, "filter_no_terminal_punct": False},
    "c4_paragraphs": {},
    "fineweb": {},
}


def filtered(name, texts):
    """What datatrove's class makes of texts, and how many it removes for which reason."""
    kept, reasons = [], {}
    for text in texts:
        document = Document(text, "")
        result = CLASSES[name].filter(document)
        if result is True:
            kept.append(document.text)
        else:
            reasons[f"{name}: {result[1]}"] = reasons.get(f"{name}: {result[1]}", 0) + 1
    return kept, reasons


@pytest.mark.parametrize(
    "names",
    slow_but(
        [["gopher_quality"], ["gopher_repetition"], ["c4_paragraphs"], ["c4", "fineweb"]],
        [[name] for name in FILTERS] + [["c4", "fineweb"], ["fineweb", "c4"]],
    ),
    ids="-".join,
)
def test_filters_equal_datatroves_classes(tmp_path, names):
    """Texts, removals by reason, bytes, and examples; several run in the order of the recipe."""
    texts = cleaning.prose()
    cleaning.write_lines(tmp_path / "raw.jsonl", texts)
    filters = {name: FILTERS[name] for name in names}
    found = cleaning.cleaned(tmp_path, "out", "--input", "raw.jsonl", "--tasks", 2, filters=filters)
    expected, reasons = texts, {}
    for name in names:
        expected, removed = filtered(name, expected)
        reasons |= removed
    assert cleaning.texts(found) == expected and 0 < len(expected) < len(texts)
    report = json.loads((tmp_path / "out/report.json").read_text())
    rules = report["rules"]
    documents = {name: rule["documents"] for name, rule in rules.items()}
    assert {name: count for name, count in documents.items() if count} == reasons
    assert report["in"] == {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
    assert report["out"] == {
        "documents": len(expected),
        "bytes": sum(len(text.encode()) for text in expected),
    }
    assert report["in"]["bytes"] - report["out"]["bytes"] == sum(rule["bytes"] for rule in rules.values())
    first = next(text for text in texts if CLASSES[names[0]].filter(Document(text, "")) is not True)
    places = {example["at"]: example["text"] for rule in rules.values() for example in rule["examples"]}
    assert places[f"raw.jsonl:{texts.index(first) + 1}"] == first[:300]
    shown = {name: len(rule["examples"]) for name, rule in rules.items() if rule["documents"]}
    assert shown == {name: min(count, 10) for name, count in reasons.items()}


def test_chinese_characters_are_words_and_other_words_are_cut_at_spaces():
    words = SpaceWords()
    assert words.word_tokenize("It's a  test,\nisn't it?") == ["It's", "a", "test,", "isn't", "it?"]
    assert words.word_tokenize("GLM是自回归 é\u00a0ü") == ["GLM", "是", "自", "回", "归", "é", "ü"]


def test_a_text_of_which_c4_leaves_nothing_is_removed(tmp_path):
    cleaning.write_lines(tmp_path / "raw.jsonl", ["no end", "One whole line stays."])
    filters = {
        "c4": {"min_num_sentences": None},
        "gopher_quality": {"min_doc_words": None, "min_stop_words": None},
    }
    found = cleaning.cleaned(tmp_path, "out", "--input", "raw.jsonl", filters=filters)
    assert cleaning.texts(found) == ["One whole line stays."]
    rules = json.loads((tmp_path / "out/report.json").read_text())["rules"]
    assert rules["c4: no line is left"]["documents"] == 1
    assert rules["c4: line-filter-no_terminal_punc"]["parts"] == 1


LENGTH, PAIRS = 64, 250
SHARED = [44, 50, 54, 58, 62]  # words that a pair shares: a Jaccard similarity of 0.5 to 0.94


def test_near_duplicates_are_found_as_the_formula_says(tmp_path):
    """Within four standard deviations; texts of other pairs never fall together."""
    generator = random.Random(7)
    pairs = {shared: [cleaning.pair(generator, LENGTH, shared) for _ in range(PAIRS)] for shared in SHARED}
    texts = [text for group in pairs.values() for one in group for text in one]
    generator.shuffle(texts)
    cleaning.write_lines(tmp_path / "raw.jsonl", texts)
    kept = set(cleaning.texts(cleaning.cleaned(tmp_path, "out", "--input", "raw.jsonl", near_duplicates={})))
    for shared, group in pairs.items():
        expected = 1 - (1 - cleaning.similarity(LENGTH, shared) ** 8) ** 14
        found = sum(first not in kept or second not in kept for first, second in group)
        assert all(first in kept or second in kept for first, second in group)
        deviation = math.sqrt(PAIRS * expected * (1 - expected))
        assert abs(found - PAIRS * expected) <= 4 * deviation + 1, (shared, found, expected)


@pytest.fixture(scope="module")
def families():
    """Texts with families of near-duplicates, chains of them, exact copies, and texts that are too short."""
    generator = random.Random(11)
    texts = [
        text for shared in SHARED for _ in range(30) for text in cleaning.pair(generator, LENGTH, shared)
    ]
    for text in texts[:40]:
        for position in (5, 30):  # a chain: each differs from the one before
            words = texts[-1].split() if position == 30 else text.split()
            words[position] = "changed"
            texts.append(" ".join(words))
    texts += [*texts[:10], "too short", "too short"]
    generator.shuffle(texts)
    return texts


@pytest.mark.parametrize("tasks", slow_but([2], [1, 2, 4]))
def test_survivors_equal_datatroves_example_for_any_number_of_tasks(tmp_path, families, tasks):
    cleaning.write_lines(tmp_path / "raw.jsonl", families)
    options = ["--input", "raw.jsonl", "--tasks", tasks, "--workers", tasks]
    found = cleaning.texts(cleaning.cleaned(tmp_path, "out", *options, near_duplicates={}))
    assert found == cleaning.without_near_duplicates(tmp_path / "reference", families)
    again = cleaning.without_near_duplicates(tmp_path / "again", found)
    assert again == found and found.count("too short") == 2  # nothing similar is left


def test_exact_duplicates_keep_the_first_of_the_input(tmp_path, families):
    numbers = np.arange(len(families)).tolist()
    cleaning.write_lines(tmp_path / "raw.jsonl", families, number=numbers)
    for tasks in (1, 3):
        settings = {"exact_duplicates": True, "fields": ["number"]}
        found = cleaning.cleaned(
            tmp_path, f"out{tasks}", "--input", "raw.jsonl", "--tasks", tasks, **settings
        )
        first = {text: number for text, number in reversed(list(zip(families, numbers, strict=True)))}
        assert {record["text"]: record["number"] for record in found} == first
        assert [record["number"] for record in found] == sorted(first.values())


def test_held_out_texts_and_their_near_copies_are_not_in_the_output(tmp_path, families):
    """A family with a held-out member is gone; all else is what it is without them."""
    held, rest = families[:100], families[100:]
    cleaning.write_lines(tmp_path / "held.jsonl", held)
    cleaning.write_lines(tmp_path / "raw.jsonl", rest)
    options = ["--input", "raw.jsonl", "--held-out", "held.jsonl"]
    found = cleaning.texts(cleaning.cleaned(tmp_path, "out", *options, "--tasks", 3, near_duplicates={}))
    assert 0 < len(found) < len(rest)
    # By datatrove alone: no text that is kept is similar to a held-out one.
    joint = cleaning.without_near_duplicates(tmp_path / "reference", held)
    assert cleaning.without_near_duplicates(tmp_path / "both", joint + found) == joint + found
    plain = set(
        cleaning.texts(cleaning.cleaned(tmp_path, "plain", "--input", "raw.jsonl", near_duplicates={}))
    )
    assert set(found) <= plain
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["held_out"]["documents"] == len(held)


def thirteen_words(text):
    """Hashes of the 13-grams of a text, as datatrove's decontamination makes them."""
    hashed = create_hash_func(HashConfig(precision=64, hash_fc="sha1"))
    return {hashed(" ".join(gram)) for gram in ngrams(simplify_text(text).split(), 13)}


@pytest.mark.parametrize("contaminated", ["remove", "report"])
def test_texts_that_share_13_words_with_evaluation_texts(tmp_path, contaminated):
    generator = random.Random(5)
    questions = [" ".join(cleaning.words(generator, 40)) for _ in range(20)]
    texts = [" ".join(cleaning.words(generator, 60)) for _ in range(60)]
    for i, question in enumerate(questions):
        words = texts[i].split()
        count = 12 + i % 3  # of 12 words, one fewer than is looked for, to 14
        words[20 : 20 + count] = [f"({word.upper()})," for word in question.split()[5 : 5 + count]]
        texts[i] = " ".join(words)
    generator.shuffle(texts)
    cleaning.write_lines(tmp_path / "eval.jsonl", [*questions, "short", 3, None])
    cleaning.write_lines(tmp_path / "raw.jsonl", texts)
    options = ["--input", "raw.jsonl", "--decontaminate", "eval.jsonl", "--on-bad-record", "skip"]
    found = cleaning.texts(cleaning.cleaned(tmp_path, "out", *options, contaminated=contaminated))
    known = set.union(*map(thirteen_words, questions))
    clean = [text for text in texts if not thirteen_words(text) & known]
    assert len(clean) == len(texts) - 13
    assert found == (clean if contaminated == "remove" else texts)
    report = json.loads((tmp_path / "out/report.json").read_text())
    rule = report["rules"]["contamination"]
    assert (rule["documents"], rule["removed"]) == (13, contaminated == "remove")
    assert (report["evaluation"]["texts"], report["evaluation"]["texts_too_short"]) == (21, 1)
    assert report["evaluation"]["bad"] == {"field_not_text": 2}


LINES = {  # of a page: each with what c4 makes of it
    "One sentence of this page ends here. [12] Another one follows it.": "citations",
    "  Four words are here, \u00e9 too.\t": "line-kept",
    "no mark at the end": "line-filter-no_terminal_punc",
    "Two words.": "line-filter-too_few_words",
    f"{'x' * 1001} is a long word.": "line-filter-too_long_word",
    "Please enable Javascript in your browser.": "line-filter-javascript",
    "This site uses cookies \u2013 as others do.": "line-filter-policy",
    "Here the fourth sentence is. The fifth is here too. And there is a sixth one.": "line-kept",
}


def pages():
    """Texts that every rule meets: prose, whole pages with other line ends, copies and near copies, other scripts."""
    generator = random.Random(6)
    texts = cleaning.prose()
    long = [text for text in texts if len(text.split()) > 150][:30]
    texts += [end.join(LINES) + end for end in ("\n", "\r\n", "\u2028")] + long[:5]
    texts += [" ".join(text.split()[:-2]) for text in long] + ["\n".join([text] * 3) for text in long[5:8]]
    texts += ["日本語の文章です。" * 9, "ภาษาไทย " * 30, "  \u2003x\u2003 "]
    generator.shuffle(texts)
    return texts


SENTENCES = {"filters": {"c4": {"split_paragraph": False, "min_num_sentences": 2}, "gopher_repetition": {}}}


@pytest.mark.parametrize(
    "recipe",
    slow_but([SENTENCES], [*sorted(path.stem for path in RECIPES.glob("*.yaml")), SENTENCES]),
    ids=str,
)
def test_every_byte_that_came_in_is_kept_or_counted_by_a_rule(tmp_path, recipe):
    """Also after each step. The bytes of input and output are counted here, from their files."""
    texts = pages()
    cleaning.write_lines(tmp_path / "raw.jsonl", texts)
    long = [text.split() for text in texts if len(text.split()) > 200]
    questions = [*(" ".join(words[20:40]) for words in long[:2]), list(LINES)[-1]]
    cleaning.write_lines(tmp_path / "eval.jsonl", questions)
    options = ["--input", "raw.jsonl", "--decontaminate", "eval.jsonl", "--tasks", 2]
    settings = recipe if isinstance(recipe, dict) else {}
    options += [] if settings else ["--recipe", recipe]
    found = cleaning.texts(cleaning.cleaned(tmp_path, "out", *options, **settings))
    report = json.loads((tmp_path / "out/report.json").read_text())
    rules = {name: rule for name, rule in report["rules"].items() if rule["removed"]}
    left = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
    assert report["in"] == left
    for step, after in report["after"].items():
        own = [rule for name, rule in rules.items() if name.partition(":")[0] == step]
        left = {key: count - sum(rule[key] for rule in own) for key, count in left.items()}
        assert after == left
    assert (
        left == {"documents": len(found), "bytes": sum(len(text.encode()) for text in found)} == report["out"]
    )
    assert rules["contamination"]["documents"] > 0
    page = (tmp_path / "out/report.html").read_text()
    for rule in rules.values():
        assert f"<td>{rule['bytes']:,}</td>" in page and f"<td>{rule['parts']:,}</td>" in page


def test_what_c4_cuts_out_is_counted_by_rule(tmp_path):
    """With every line of a page known; a document that is removed counts as a whole."""
    page = "\r\n".join(LINES)
    cleaning.write_lines(tmp_path / "raw.jsonl", [page, "One. " + page.replace("Four", "{")])
    (found,) = cleaning.texts(cleaning.cleaned(tmp_path, "out", "--input", "raw.jsonl", filters={"c4": {}}))
    report = json.loads((tmp_path / "out/report.json").read_text())
    expected = {
        f"c4: {fate}": (0, 1, len(f"{line}\r\n".encode()), [line])
        for line, fate in LINES.items()
        if fate.startswith("line-filter")
    }
    expected["c4: citations"] = (0, 1, 4, ["[12]"])
    expected["c4: white space"] = (0, 1, 3 + 2, [])  # around the second line; \r of two kept lines
    expected["c4: curly_bracket"] = (1, 0, report["in"]["bytes"] - len(page.encode()), None)
    rules = {
        name: (
            rule["documents"],
            rule["parts"],
            rule["bytes"],
            [example["text"].rstrip()[:300] for example in rule["examples"]] if rule["parts"] else None,
        )
        for name, rule in report["rules"].items()
    }
    shown = {
        name: (*rest, texts and [text[:300] for text in texts]) for name, (*rest, texts) in expected.items()
    }
    assert rules == shown
    assert report["out"]["bytes"] == len(found.encode())


def test_the_report_shows_groups_of_near_duplicates_and_the_text_that_stayed(tmp_path, families):
    """Groups by datatrove's survivors: each example names a text of the output that is similar to it."""
    held = families[:20]
    cleaning.write_lines(tmp_path / "raw.jsonl", families[20:])
    cleaning.write_lines(tmp_path / "held.jsonl", held)
    for name, options in (("plain", []), ("held", ["--held-out", "held.jsonl"])):
        options += ["--input", "raw.jsonl", "--tasks", 3]
        found = cleaning.texts(cleaning.cleaned(tmp_path, name, *options, near_duplicates={}))
        report = json.loads((tmp_path / name / "report.json").read_text())
        page = (tmp_path / name / "report.html").read_text()
        examples = report["rules"]["near_duplicates"]["examples"]
        sizes = [group["documents"] for group in report["largest_groups"]]
        assert len(examples) == len(sizes) == 10 and sizes == sorted(sizes, reverse=True)
        assert max(sizes) >= 3 and f'row">{sizes[0]}</th>' in page
        stayed = [example["stayed"] for example in examples]
        assert all(stayed) or (name == "held" and not report["largest_groups"][0]["stayed"])
        for example, twin in zip(examples, stayed, strict=True):
            if twin is None:
                continue
            number = int(twin["at"].partition(":")[2])
            text = families[20:][number - 1]
            assert text in found and twin["text"] == text[:300] and twin["at"] in page
            removed = families[20:][int(example["at"].partition(":")[2]) - 1]
            assert len(set(text.split()) & set(removed.split())) > LENGTH // 2
