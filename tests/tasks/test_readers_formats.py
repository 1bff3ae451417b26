"""SQuAD, CoNLL, pairs of files: what is read and what is refused."""

import gzip
import json

import pytest
from support.tasks.labelled_files import task

from data_utils.tasks.readers.by_name import task_labels
from data_utils.tasks.readers.source_target import sentences_on_lines

SQUAD = task("squad", "squad", "spans")
CONTEXT = "Caf\u00e9 \U0001f600 opened in Rome."


def squad(*questions, context=CONTEXT):
    return json.dumps(
        {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": questions}]}]}
    )


def question(start=17, text="Rome", id="q1", **more):
    return {"id": id, "question": "where?", "answers": [{"text": text, "answer_start": start}], **more}


def test_squad(files):
    impossible = {"id": "q2", "question": "when?", "answers": [], "is_impossible": True,
                  "plausible_answers": [{"text": "Rome", "answer_start": 0}]}  # fmt: skip
    many = {
        **question(),
        "id": "q3",
        "answers": [{"text": "Rome", "answer_start": 17}, {"text": "in Rome", "answer_start": 14}],
    }
    records = files.read(SQUAD, squad(question(), impossible, many))
    assert records[0].fields == {"question": "where?", "context": CONTEXT, "answers": (("Rome", 17),)}
    assert [record.label for record in records] == [("Rome",), (), ("Rome", "in Rome")]
    assert [record.index for record in records] == ["q1", "q2", "q3"]
    assert records[1].location.endswith("train.txt: data[0].paragraphs[0].qas[1]")
    (record,) = files.read(SQUAD, squad({"id": "q", "question": "who?"}), labelled=False)
    assert (record.label, record.fields["answers"]) == (None, ())


def test_questions_of_squad_are_labels_where_they_are_written(files):
    impossible = {"id": "q2", "question": "when?", "answers": [], "is_impossible": True}
    records = files.read(task("squad", "squad_questions", "seq2seq"), squad(question(), impossible))
    assert [(r.label, r.fields["answers"]) for r in records] == [("where?", (("Rome", 17),))]


def test_squad_refuses(files):
    place = "train.txt: data[0].paragraphs[0].qas[1]: "
    bad = [
        (question(16, id="q2"), "the answer 'Rome' is not at character 16 (answer_start) of the text"),
        (question(-5, id="q2"), "the answer 'Rome' is not at character -5"),
        (question(0, "", id="q2"), "the answer '' is not at"),
        (question(), "index 'q1' already appears at"),
        ({"id": "q2", "question": "who?", "answers": []}, "the label is missing"),
        ({"id": "q2", "answers": [], "is_impossible": True}, "there is no field 'question'"),
        (question(id="q2", is_impossible=True), "field 'is_impossible' is True with 1 answers"),
    ]  # fmt: skip
    for second, message in bad:
        files.refused(SQUAD, squad(question(), second), place + message)
        records = files.read(
            task("squad", kind="spans", skip_bad_lines=True), squad(question(), second, question(id="q3"))
        )
        assert ([record.index for record in records], records.skipped) == (["q1", "q3"], 1)
    files.refused(SQUAD, "[1]", "the line holds an array, not an object")
    files.refused(SQUAD, "[1]", "task.reader squad needs one JSON object with articles in 'data'")
    files.refused(SQUAD, '{"data": 3}', "field 'data' must hold a list of objects, not 3; task.reader squad")
    files.refused(SQUAD, '{"data": [', "malformed JSON")


CONLL = task("conll", "conll2003", "tagging")


def conll(*sentences):
    return "-DOCSTART- -X- -X- O\n\n" + "\n".join(
        "".join(f"{word} NN B-NP {tag}\n" for word, tag in sentence) for sentence in sentences
    )


def tagged(tags):
    return [(f"w{i}", tag) for i, tag in enumerate(tags.split())]


def test_iob1_becomes_bio(files):
    first, second = "I-PER I-PER B-PER O I-LOC I-ORG I-ORG O I-MISC", "O I-PER"
    records = files.read(CONLL, conll(tagged(first), tagged(second)))
    assert records[0].label == ("B-PER", "I-PER", "B-PER", "O", "B-LOC", "B-ORG", "I-ORG", "O", "B-MISC")
    assert records[1].label == ("O", "B-PER")
    assert records[0].fields == {"words": tuple(f"w{i}" for i in range(9))}
    assert records[1].location.endswith("train.txt:13")


def test_bio_stays(files):
    """A B- that IOB1 would write as I- shows that the whole file is BIO."""
    tags = "B-PER I-PER B-PER O B-LOC B-ORG I-ORG"
    assert files.read(CONLL, conll(tagged("O O"), tagged(tags)))[1].label == tuple(tags.split())


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ("O I-PER B-LOC", "train.txt:4: tag I-PER follows O, so it does not continue an entity; line 5"),
        ("B-PER I-LOC", "train.txt:4: tag I-LOC follows B-PER, so it does not continue an entity"),
        ("O S-PER", "train.txt:4: tag 'S-PER' is not O, B-TYPE or I-TYPE"),
        ("O I-", "train.txt:4: tag 'I-' is not O, B-TYPE"),
        ("O I-THING", "train.txt:3: label 'B-THING' is unknown; the labels are O, B-PER, I-PER"),
    ],
)  # fmt: skip
def test_broken_tags(files, tags, message):
    files.refused(CONLL, conll(tagged(tags)), message)


def test_columns_of_conll(files):
    two = task("conll", "mine", "tagging", labels=("NOUN", "VERB"))
    (record,) = files.read(two, "A\u00a0b\tNOUN\r\nruns \t VERB\r\n")
    assert (record.fields["words"], record.label) == (("A\u00a0b", "runs"), ("NOUN", "VERB"))
    files.refused(
        two, "a NOUN\nb\n", "train.txt:2: the line has 1 columns, fewer than 2 (first the word, last the tag)"
    )
    files.refused(two, "a x NOUN\nb VERB\n", "train.txt:2: the line has 2 columns, fewer than 3")
    assert files.read(two, "a\nb\n", labelled=False)[0].label is None
    assert task_labels(CONLL)[:3] == ("O", "B-PER", "I-PER") and len(task_labels(CONLL)) == 9
    files.refused(
        task("conll", "mine", "tagging"),
        "a x\n",
        "task.labels is empty, and task 'mine' has no predefined classes",
    )


def test_sentences_that_are_left_out(files):
    config = task("conll", "conll2003", "tagging", skip_bad_lines=True)
    records = files.read(config, conll(tagged("O O"), tagged("O X-PER"), tagged("O")))
    assert ([record.index for record in records], records.skipped) == ([0, 2], 1)


PAIRS = task("pairs", "mine", "seq2seq")


@pytest.mark.parametrize(
    ("sources", "targets"), [("train.source", "train.target"), ("a.src.txt", "a.tgt.txt")]
)
def test_pairs(files, sources, targets):
    files.write(targets, "short one\nshort two\n")
    records = files.read(PAIRS, "a long one \na long two\n", sources)
    assert [record.fields for record in records] == [
        {"source": "a long one ", "target": "short one"},
        {"source": "a long two", "target": "short two"},
    ]
    assert [record.label for record in records] == ["short one", "short two"]
    assert [record.index for record in records] == [0, 1]


def test_compressed_pairs_and_no_targets(files):
    (record,) = files.read(PAIRS, "a long one\n", "test.source", labelled=False)
    assert (record.fields, record.label) == ({"source": "a long one"}, None)
    files.write("test.target.gz", gzip.compress(b"short\n"))
    (record,) = files.read(PAIRS, gzip.compress(b"\xef\xbb\xbflong\n"), "test.source.gz")
    assert record.fields == {"source": "long", "target": "short"}


def test_summaries_have_a_sentence_in_each_line_of_the_reference(files):
    assert sentences_on_lines("<t> a b . </t> <t> c . </t>") == "a b .\nc ."
    assert sentences_on_lines("a b . <S_SEP> c .") == sentences_on_lines("a b .[X_SEP]c .") == "a b .\nc ."
    for name, label in (("CNN/DM", "a .\nb ."), ("mine", "a . <S_SEP> b .")):
        files.write("train.target", "a . <S_SEP> b .\n")
        (record,) = files.read(task("pairs", name, "seq2seq"), "x <S_SEP> y\n", "train.source")
        assert (record.fields["target"], record.label) == ("a . <S_SEP> b .", label)


def test_pairs_refuse(files):
    files.write("train.target", "one\ntwo\n")
    files.refused(PAIRS, "a\n", "train.target:2: ", "train.source has fewer lines", name="train.source")
    files.refused(PAIRS, "a\nb\nc\n", "train.source:3: ", "train.target has fewer lines", name="train.source")
    files.refused(PAIRS, "a\n \n", "train.source:2: the source is empty", name="train.source")
    files.write("train.target", "one\n\n")
    files.refused(PAIRS, "a\nb\n", "train.source:2: the target is empty", name="train.source")
    config = task("pairs", "mine", "seq2seq", skip_bad_lines=True)
    assert files.read(config, "a\nb\n", "train.source").skipped == 1
    files.refused(PAIRS, "a\n", "valid.target does not exist; check the paths", name="valid.source")
    files.refused(PAIRS, "a\n", "is not a file of sources; its name must contain source or src", name="a.txt")
