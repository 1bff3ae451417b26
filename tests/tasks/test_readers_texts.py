"""Documents in lines, and lines with blanks."""

import random

import pytest
from support.tasks.labelled_files import task

from data_utils.tasks.readers.files import BadLine
from data_utils.tasks.readers.texts import fillings

BLANKS = task("text", "yahoo_blanks", "blanks")


def test_documents_in_lines(files):
    records = files.read(BLANKS, "one \n\ntwo\u2028three\n")
    assert [record.fields["text"] for record in records] == ["one ", "two\u2028three"]
    assert all(record.label == record.fields["text"] for record in records)
    (record,) = files.read(BLANKS, [{"text": "he saw a dog"}], "test.jsonl")
    assert record.fields == {"text": "he saw a dog"}
    files.refused(BLANKS, b"one\n\xe9\n", "train.txt:2: invalid UTF-8: byte 0xe9")
    files.refused(BLANKS, [{"txt": "a b"}], "test.jsonl:1: there is no field 'text'", name="test.jsonl")


def test_lines_with_blanks(files):
    files.write("test.txt", "a b c d\none two\n")
    records = files.read(BLANKS, "a <blank> d\n<blank> two\n", "blank/test.maskratio0.1.blank")
    assert records[0].fields == {"text": "a b c d", "masked": "a <blank> d", "fillings": ("b c",)}
    assert [record.label for record in records] == ["a b c d", "one two"]
    assert files.read(BLANKS, "a b c d\n", "train.txt")[0].fields == {"text": "a b c d"}


def test_lines_with_blanks_without_the_texts(files):
    (record,) = files.read(BLANKS, "a <blank>\n", "blank/some.blank", labelled=False)
    assert (record.fields, record.label) == ({"masked": "a <blank>"}, None)
    files.refused(BLANKS, "a <blank>\n", "some.txt with the complete texts is missing", name="some.blank")


def test_lines_with_blanks_refuse(files):
    files.write("test.txt", "a b\nc d\n")
    name = "test.blank"
    files.refused(BLANKS, "a b\nc <blank>\n", "test.blank:1: the line has 0 <blank>, 0 of them", name=name)
    files.refused(
        BLANKS, "<blank>b\nc <blank>\n", "test.blank:1: the line has 1 <blank>, 0 of them", name=name
    )
    files.refused(
        BLANKS, "x <blank>\nc <blank>\n", "test.blank:1: the line with blanks does not agree", name=name
    )
    files.refused(BLANKS, "a <blank>\n", "test.txt:2: ", "test.blank has fewer lines", name=name)
    files.refused(BLANKS, "<blank> b\n" * 3, "test.blank:2: the line", name=name)
    files.refused(
        BLANKS, "<blank> b\n<blank> d\n<blank>\n", "test.blank:3: ", "test.txt has fewer lines", name=name
    )


def test_fillings_put_together_are_the_text():
    """Over few words, where a piece stands at many places; every second case is made not to agree."""
    draw = random.Random(3)
    agreed = 0
    for case in range(3000):
        whole = [draw.choice("ab") for _ in range(draw.randint(1, 9))]
        hidden = [draw.random() < 0.4 for _ in whole]
        masked = []
        for word, is_hidden in zip(whole, hidden, strict=True):
            if not is_hidden:
                masked.append(word)
            elif masked[-1:] != ["<blank>"] or draw.random() < 0.3:
                masked.append("<blank>")
        if case % 2:
            masked[draw.randrange(len(masked))] = draw.choice(["a", "b", "<blank>"])
        if "<blank>" not in masked:
            continue
        possible = agree(masked, whole)
        assert possible or case % 2
        if not possible:
            with pytest.raises(BadLine):
                fillings(masked, whole)
            continue
        agreed += 1
        left = iter(fillings(masked, whole))
        filled = " ".join(next(left) if word == "<blank>" else word for word in masked)
        assert filled.split() == whole and next(left, None) is None
    assert agreed > 1500


def agree(masked, whole):
    """Whether blanks of one word or more can make `whole` of `masked`, by trying every length."""
    if not masked or not whole:
        return not masked and not whole
    if masked[0] != "<blank>":
        return masked[0] == whole[0] and agree(masked[1:], whole[1:])
    return any(agree(masked[1:], whole[size:]) for size in range(1, len(whole) + 1))
