"""Labelled pairs: read from JSON lines or found in texts, stored as documents, and refused in one line."""

import json
import random

import numpy as np
import pytest
from support.commands import assert_refused, forked
from support.data.builds import build, outputs
from support.data.corpora import texts_of
from support.project import ROOT

from data_utils.build.config import BuildConfig
from data_utils.build.labelled_pairs import Pair, PairReader
from data_utils.common.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.local_copy import local_copy
from data_utils.dataset.tools import merge_datasets
from data_utils.dataset.verification import verify
from data_utils.objectives.labelled_pairs import MARKERS

NAMES = ("however", "in fact", "so")


@pytest.fixture
def names(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("".join(f"{name}\n" for name in NAMES))
    return str(path)


def pairs_of(prefix):
    """A, B and label of each document, which ends with eos."""
    dataset = IndexedDataset(prefix)
    verify(dataset)
    found = []
    for number in range(len(dataset)):
        start, tokens = int(dataset.pointers[number]) // dataset.dtype.itemsize, dataset.document(number)
        marks = dataset.entities[start : start + len(tokens)]
        (cut,) = np.flatnonzero(marks >= 0)
        first, second = (bytes(part.tolist()).decode() for part in (tokens[:cut], tokens[cut:-1]))
        found.append((first, second, int(marks[cut])))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It was late. However, we went.", [("It was late.", "we went.", 0)]),
        ("Late! HOWEVER , we went. So, no.", [("Late!", "we went.", 0), ("HOWEVER , we went.", "no.", 2)]),
        ('He said "No." In fact, he left.', [('He said "No."', "he left.", 1)]),
        ("However, it begins.", []),  # without a sentence before it
        ("One paragraph.\n\nHowever, another.", []),
        ("One line.\nHowever, another.", [("One line.", "another.", 0)]),
        ("We went. However late, we went. So we went. Sofar, no. It was so, he said.", []),
        ("We went. So,", []),  # nothing behind the comma
        ("3.5 so, no. Thus, we know of no 1.So, either.", []),
        ("", []),
    ],
)  # fmt: skip
def test_pairs_are_found_where_a_sentence_begins_with_a_marker_and_a_comma(text, expected):
    assert PairReader(NAMES, None).pairs(b"", text) == [Pair(*pair) for pair in expected]


def test_pairs_are_found_with_the_punctuation_of_other_scripts():
    reader = PairReader(("但是", "لكن", "लेकिन"), None)
    for text, pair in (
        ("我们走了。但是，他没有。", Pair("我们走了。", "他没有。", 0)),
        ("هل ذهب؟ لكن، لم نذهب.", Pair("هل ذهب؟", "لم نذهب.", 1)),
        ("हम गए। लेकिन, वह नहीं गया।", Pair("हम गए।", "वह नहीं गया।", 2)),
    ):
        assert reader.pairs(b"", text) == [pair]


def test_the_longest_marker_holds_and_no_marker_is_a_pattern():
    reader = PairReader(("in", "in fact", "a.b"), None)
    assert [pair.label for pair in reader.pairs(b"", "A. In fact, b. In, c. A.b, c. Axb, d.")] == [1, 0, 2]


def test_texts_become_pairs_in_the_split_of_their_text(tmp_path, names):
    """Brute force over texts made of sentences with and without markers; every text's pairs are in its own split."""
    rng, records, expected = random.Random(3), [], {}
    for number in range(300):
        sentences, found = [f"Text {number}."], []
        for place in range(rng.randrange(4)):
            label = rng.randrange(-1, 3)
            body = f"sentence {place} of {number}."
            sentences.append(body if label < 0 else f"{NAMES[label].capitalize()}, {body}")
            if label >= 0:
                found.append((sentences[-2], body, label))
        records.append(" ".join(sentences))
        expected[number] = found
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    report = build(path, tmp_path / "pairs", markers=names)
    build(path, tmp_path / "text")
    for split in "ab":
        numbers = [int(text.split(".")[0].split()[1]) for text in texts_of(f"{tmp_path}/text_{split}")]
        assert pairs_of(f"{tmp_path}/pairs_{split}") == [
            pair for number in numbers for pair in expected[number]
        ]
    count = sum(map(len, expected.values()))
    empty = sum(not found for found in expected.values())
    assert f"labelled pairs: {count:,}; {empty:,} texts have no pair" in "\n".join(report.lines())
    assert not [line for line in report.lines() if "tokens or fewer" in line]
    facts = IndexedDataset(f"{tmp_path}/pairs_a").manifest["entities"]
    assert facts["count"] == 3 and facts["names"] == list(NAMES) and facts["ids"].startswith("labels ")
    build(path, tmp_path / "again/pairs", markers=names, shard_bytes=10_000, workers=2)
    assert outputs(tmp_path / "again") == {
        k: v for k, v in outputs(tmp_path).items() if k.startswith("pairs")
    }


def records_of(tmp_path, *records, name="pairs.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_json_lines_name_both_texts_and_a_label(tmp_path, names):
    """A label is a name or a number. All pairs of a first text are in one split; equal pairs stay once."""
    records = [
        {"query": f"q{i % 20}", "title": f"t{i}", "label": NAMES[i % 3] if i % 2 else i % 3}
        for i in range(100)
    ]
    path = records_of(tmp_path, *records, records[3])
    options = {"text_key": "query", "second_key": "title", "labels": names}
    build(path, tmp_path / "out", deduplicate=True, **options)
    found = [pairs_of(f"{tmp_path}/out_{split}") for split in "ab"]
    assert sorted(found[0] + found[1]) == sorted((f"q{i % 20}", f"t{i}", i % 3) for i in range(100))
    queries = [{first for first, _, _ in pairs} for pairs in found]
    assert queries[0] and queries[1] and not queries[0] & queries[1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"text": "a", "b": "c"},
            r"the label is None; it must be a name in the --labels file or a number from 0 to 2",
        ),
        ({"text": "a", "b": "c", "label": 3}, "the label is 3"),
        ({"text": "a", "b": "c", "label": -1}, "the label is -1"),
        ({"text": "a", "b": "c", "label": True}, "the label is True"),
        ({"text": "a", "b": "c", "label": 1.0}, r"the label is 1\.0"),
        ({"text": "a", "b": "c", "label": "hence"}, "the label is 'hence'"),
        ({"text": "a", "label": 1}, r"field 'b' holds null, not text \(set with --second-key\)"),
        ({"text": "a", "b": " ", "label": 1}, "field 'b' holds"),
        ({"b": "c", "label": 1}, "there is no field 'text'"),
    ],
)
def test_bad_records_are_refused_with_their_line_or_counted(tmp_path, names, record, message):
    good = {"text": "a", "b": "c", "label": 0}
    path, options = records_of(tmp_path, good, record), {"second_key": "b", "labels": names, "split": ""}
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*{message}") as error:
        build(path, tmp_path / "out", **options)
    assert "\n" not in str(error.value) and not list(tmp_path.glob("out*"))
    report = build(path, tmp_path / "out", on_bad_record="skip", **options)
    assert pairs_of(tmp_path / "out") == [("a", "c", 0)] and report.counts.num_bad == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("however\n\nso\n", r"names\.txt:2: the name '' is empty, repeated or has a comma"),
        ("however\nso, that\n", r":2: the name 'so, that'"),
        ("however\nHowever\n", r":2: the name 'However'"),
        ("however\n", "has 1 names; it needs 2"),
        ("", "has 0 names"),
    ],
)
def test_bad_files_of_names_are_refused(tmp_path, content, message):
    (tmp_path / "names.txt").write_text(content)
    path = records_of(tmp_path, {"text": "a"})
    with pytest.raises(ConfigError, match=message):
        build(path, tmp_path / "out", markers=str(tmp_path / "names.txt"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"second_key": "b"},
            "--second-key is given without --labels, which it is for; give both or neither",
        ),
        ({"labels": "f"}, "--labels is given without --second-key"),
        (
            {"markers": "f", "capitals": True},
            "--capitals is given with --markers, but a dataset",
        ),
        ({"markers": "f", "labels": "f", "second_key": "b"}, "--second-key is given with --markers"),
        ({"entities_key": "e", "entity_ids": "f", "markers": "f"}, "--entities-key is given with --markers"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BuildConfig(inputs=["a"], output="b", **options)


def test_joined_and_copied_datasets_keep_pairs_of_the_same_labels_only(tmp_path, names):
    options = {"second_key": "b", "labels": names, "split": ""}
    prefixes = []
    for number, name in enumerate("ab"):
        path = records_of(tmp_path, {"text": f"a{name}", "b": "c", "label": number}, name=f"{name}.jsonl")
        build(path, tmp_path / name, **options)
        prefixes.append(str(tmp_path / name))
    joined = merge_datasets(prefixes, str(tmp_path / "joined"))
    assert pairs_of(joined.prefix) == [("aa", "c", 0), ("ab", "c", 1)]
    assert joined.manifest["entities"]["names"] == list(NAMES)
    assert pairs_of(local_copy(str(joined.prefix), tmp_path / "near")) == pairs_of(joined.prefix)
    (tmp_path / "names.txt").write_text("yes\nno\n")
    build(tmp_path / "a.jsonl", tmp_path / "other", **options)
    with pytest.raises(DataError, match="do not have the same entities"):
        merge_datasets([prefixes[0], str(tmp_path / "other")], str(tmp_path / "mixed"))


def test_from_a_shell(corpus, tmp_path, names):
    """Texts of the small vocabulary, a marker of which is a word; a text file has no fields."""
    markers = ROOT / "configs/labels/markers.txt"
    assert len(markers.read_text().splitlines()) == MARKERS
    text = tmp_path / "text.txt"
    text.write_text("word1 word2 . However, word3 word4 .")
    command = ["scripts/preprocess_data.py", "--input", text, "--output", tmp_path / "out", "--workers", "1"]
    command += ["--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", corpus / "vocab.txt"]
    done = forked(*command, "--markers", markers)
    assert done.returncode == 0, done.stderr
    assert "labelled pairs: 1; 0 texts have no pair" in done.stdout
    text.write_text("word1 word2 . word3, word4 .")
    done = forked(*command, "--overwrite", "--markers", markers)
    assert_refused(done, "none of the 1 texts has a sentence")
    done = forked(*command, "--overwrite", "--second-key", "b", "--labels", names)
    assert_refused(done, "needs JSON lines")
    done = forked(*command, "--overwrite", "--markers", tmp_path / "absent")
    assert_refused(done, "absent: No such file or directory; check the path")
