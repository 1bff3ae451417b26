"""Documents cut into sentences, and the corpus that is made of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_utils.common.errors import ConfigError, DataError, UserError
from scripts.split_sentences import main, sentences_of


def test_where_sentences_end():
    text = (
        'It rains. "Does it?" He (a man)\nlooked out... No!\n\nA heading\n\n'
        "3.5 percent, e.g. here. (So it is.) Über 2 a.m. The end"
    )
    assert list(sentences_of(text)) == [
        "It rains.",
        '"Does it?"',
        "He (a man) looked out...",
        "No!",
        "A heading",
        "3.5 percent, e.g. here.",
        "(So it is.)",
        "Über 2 a.m.",
        "The end",
    ]
    assert list(sentences_of(" \n\n \n")) == []
    for sentences, between in (
        (["Он ушёл.", "«Она осталась?»", "Łódź jest tu."], " "),
        (["यह घर है।", "वह नहीं है।"], " "),
        (["هل هذا بيت؟", "نعم."], " "),
        (["今日は雨です。", "「本当？」", "はい！！", "終わり"], ""),
    ):
        assert list(sentences_of(between.join(sentences))) == sentences


@given(st.text(alphabet="aB1.!?\"') \n", max_size=40))
def test_no_character_is_lost(text):
    """But white space, of which one space is left between words and none between sentences."""
    found = list(sentences_of(text))
    assert " ".join(found) == " ".join(text.split())
    assert all(sentence and "\n" not in sentence for sentence in found)


def test_one_sentence_a_line(tmp_path, capsys):
    source, output = tmp_path / "raw.jsonl", tmp_path / "new/sentences.txt"  # the directory is made
    texts = ["One two. Three four five six. Seven.", "Eight\nnine. Ten"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    main(["--input", str(source), "--output", str(output), "--most-words", "3"])
    assert output.read_text() == "One two.\nSeven.\nEight nine.\nTen\n"
    assert capsys.readouterr().out == f"{output}: 4 sentences; skipped: 1 with more than 3 words\n"
    assert [path.name for path in output.parent.iterdir()] == ["sentences.txt"]
    with pytest.raises(DataError, match=r"sentences.txt exists; remove it"):
        main(["--input", str(source), "--output", str(output)])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--most-words", "0"], ConfigError, "--most-words is 0; it must be 1 or more"),
        (["--most-words", "1"], DataError, "has no sentence of at most 1 words; give other texts, or raise"),
        (["--input", "absent.txt"], UserError, "absent.txt"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, kind, message):
    source, output = tmp_path / "raw.txt", tmp_path / "sentences.txt"
    source.write_text("one two\n")
    with pytest.raises(kind, match=message):
        main(["--input", str(source), "--output", str(output), *arguments])
    assert not output.exists() and len(list(tmp_path.iterdir())) == 1
