"""Entities of texts: read from JSON lines, aligned with tokens, stored with them, and checked wherever they go."""

import json
import math
import os
import re
import tracemalloc
from functools import partial

import numpy as np
import pytest
from support.data.byte_tokenizer import ByteTokenizer
from support.project import small_corpus

from data_utils.build.annotations import CapitalReader
from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.errors import ConfigError, DataError
from data_utils.corpus.mentions import read_names
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.local_copy import local_copy
from data_utils.dataset.tools import merge_datasets
from data_utils.dataset.verification import verify
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

TEXT = "word1 word2 word1 ."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def made(corpus, tmp_path):
    """Builds records with mentions as a dataset: records -> its prefix."""
    (tmp_path / "ids.txt").write_text("3\nQ1\t2\nQ2\t0\nnaïve one\t1\n")
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt"))

    def build(records, name="out", **options):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        given = {"entities_key": "entities", "entity_ids": str(tmp_path / "ids.txt")} | options
        config = BuildConfig(inputs=[str(path)], output=str(tmp_path / "made" / name), **given)
        build.report = build_corpus(config, partial(load_tokenizer, tokenizer))
        return str(tmp_path / "made" / name)

    return build


def record(*mentions, text=TEXT):
    return {"text": text, "entities": [list(mention) for mention in mentions]}


def entities_of(prefix):
    dataset = IndexedDataset(prefix)
    verify(dataset)
    return np.array(dataset.entities).tolist()


def test_an_entity_stands_on_the_first_token_of_its_mention(made):
    prefix = made([record((6, 17, "Q1"), (0, 5, "naïve one")), record(), record((0, 5, "Q2"))])
    assert entities_of(prefix) == [1, 2, -1, -1, -1, *[-1] * 5, 0, *[-1] * 4]  # the last of each is eos
    facts = IndexedDataset(prefix).manifest["entities"]
    assert facts["count"] == 3 and facts["mentions"] == {"kept": 3, "low_score": 0, "unknown": 0}


def test_mentions_of_unknown_entities_and_of_low_scores_are_left_out_and_counted(made):
    records = [record((0, 5, "Q9"), (6, 11, "Q1", 0.2), (12, 17, "Q1", 0.3))]
    assert entities_of(made(records, min_score=0.3)) == [-1, -1, 2, -1, -1]
    assert "1 mentions; skipped: 1 of unknown entities, 1 with a low score" in "".join(made.report.lines())


def test_shards_workers_and_splits_move_no_entity(made):
    records = [
        record((6 * (i % 3), 6 * (i % 3) + 5, f"Q{1 + i % 2}"), text=f"{TEXT} word{i % 60}")
        for i in range(200)
    ]
    whole = made(records, "whole")
    others = made(records, "others", shard_bytes=900, workers=2)
    assert entities_of(whole) == entities_of(others)
    made(records, "cut", split="a=0.5,b=0.5", deduplicate=True)
    dataset = IndexedDataset(whole)
    by_text = {tuple(dataset.document(i)): i for i in range(len(dataset))}
    for part in "ab":
        found = IndexedDataset(f"{whole.removesuffix('whole')}cut_{part}")
        verify(found)
        for number in range(len(found)):
            start = int(found.pointers[number]) // found.dtype.itemsize
            first = int(dataset.pointers[by_text[tuple(found.document(number))]]) // dataset.dtype.itemsize
            length = int(found.lengths[number])
            assert found.entities[start : start + length].max() >= 0
            assert (
                found.entities[start : start + length].tolist()
                == dataset.entities[first : first + length].tolist()
            )


def test_duplicates_leave_with_their_entities(made):
    """The first of equal texts stays with its own mentions, and only mentions that stay are counted as kept."""
    other, mention = f"word3 {TEXT}", (0, 5, "Q1")
    again = record((0, 5, "Q2"), (6, 11, "Q1"))
    records = [record((6, 11, "Q1")), again, record(mention, text=other), again, record(text=other)]
    prefix = made(records, deduplicate=True)
    assert entities_of(prefix) == [-1, 2, -1, -1, -1, 2, *[-1] * 5]
    assert IndexedDataset(prefix).manifest["entities"]["mentions"]["kept"] == 2
    assert "2 mentions; skipped: 0 of" in "".join(made.report.lines()) and made.report.duplicates == 3


def test_joined_and_copied_datasets_keep_entities(made, tmp_path):
    first, second = (made([record((0, 5, name))], name) for name in ("Q1", "Q2"))
    joined = merge_datasets([first, second], str(tmp_path / "joined"))
    assert joined.entities.tolist() == [2, *[-1] * 4, 0, *[-1] * 4]
    assert joined.manifest["entities"]["mentions"]["kept"] == 2
    assert entities_of(local_copy(str(tmp_path / "joined"), tmp_path / "near")) == joined.entities.tolist()
    plain = made([{"text": TEXT}], "plain", entities_key=None, entity_ids=None)
    assert IndexedDataset(plain).entities is None
    with pytest.raises(DataError, match="do not have the same entities or labels; rebuild one"):
        merge_datasets([first, plain], str(tmp_path / "mixed"))


def test_a_window_has_the_entities_of_its_tokens(made):
    prefix = made([record((0, 5, "Q1"), (12, 17, "Q2"), text=f"{TEXT} word{i}") for i in range(60)])
    dataset = IndexedDataset(prefix)
    index = WindowIndex(dataset, 16, DOCUMENT_OVERHEAD, has_entities=True)
    windows = np.arange(index.num_windows)
    (tokens, entities), *_ = index.gather(windows)
    assert tokens.tolist() == dataset.tokens.tolist() and entities.tolist() == dataset.entities.tolist()


def change(path, place, value):
    data = bytearray(path.read_bytes())
    data[place] = value
    path.write_bytes(data)


def test_a_damaged_file_of_entities_is_noticed(made, tmp_path):
    path = tmp_path / "made/out.ent"
    prefix = made([record((0, 5, "Q1"))])
    change(path, 0, 1)
    with pytest.raises(DataError, match=r"out\.ent has another checksum|out\.ent .*differ|out\.ent"):
        verify(IndexedDataset(prefix))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"out\.ent has 16 bytes, but the manifest records 20"):
        IndexedDataset(prefix)
    path.unlink()
    with pytest.raises(DataError, match=r"out\.ent does not exist"):
        IndexedDataset(prefix)


BAD = {
    "no list": ({"text": TEXT}, "there is no list 'entities'"),
    "a number": ({"text": TEXT, "entities": 3}, "there is no list 'entities'"),
    "two fields": (record((0, 5)), r"the mention \[0, 5\] is not \[start, end, \"name\"\]"),
    "a score as text": (record((0, 5, "Q1", "1")), "is not"),
    "a score that is no number": (record((0, 5, "Q1", math.nan)), r"the mention \[0, 5, 'Q1', nan\] is not"),
    "true as a place": (record((True, 5, "Q1")), "is not"),
    "outside": (record((14, 40, "Q1")), "is not within the text of 19 characters"),
    "backwards": (record((5, 0, "Q1")), "is not within the text"),
    "overlap": (record((0, 11, "Q1"), (6, 17, "Q2")), r"two mentions overlap: \[0, 11\] and \[6, 17\]"),
    "half a token": (record((0, 3, "Q1")), "'wor' at 0 begins or ends inside a token"),
    "from within a token": (record((2, 5, "Q1")), "'rd1' at 2 begins or ends inside a token"),
    "a space": (record((5, 6, "Q1")), "at 5 covers no token"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_mentions_are_bad_records(made, name):
    bad, message = BAD[name]
    with pytest.raises(DataError, match=rf"out\.jsonl:2: .*{message}.*; correct or remove") as caught:
        made([record(), bad])
    assert "\n" not in str(caught.value)
    prefix = made([record(), bad, record((0, 5, "Q1"))], on_bad_record="skip")
    assert entities_of(prefix) == [*[-1] * 5, 2, *[-1] * 4]


IDS = {
    "no count": ("Q1\t0\n", r"ids\.txt:1: the first line is 'Q1\\t0', but 0 lines follow"),
    "another count": ("3\nQ1\t0\n", "the first line is '3', but 1 lines follow"),
    "no tab": ("1\nQ1 0\n", r"ids\.txt:2: the line is 'Q1 0'; it must be a name"),
    "a large number": ("1\nQ1\t1\n", "a number below 1"),
    "a name twice": ("2\nQ1\t0\nQ1\t1\n", "the name 'Q1' appears twice"),
    "a number twice": ("2\nQ1\t0\nQ2\t0\n", "the number 0 appears twice"),
}


@pytest.mark.parametrize("name", IDS)
def test_bad_files_of_numbers(made, tmp_path, name):
    (tmp_path / "ids.txt").write_text(IDS[name][0])
    with pytest.raises(DataError, match=IDS[name][1]):
        made([record()])


def test_options_that_do_not_go_together(made, tmp_path):
    with pytest.raises(ConfigError, match="--entity-ids is given without --entities-key"):
        made([record()], entities_key=None)
    with pytest.raises(ConfigError, match="--min-score is given without --entities-key or --spans-key"):
        BuildConfig(inputs=["a"], output="b", min_score=0.5)
    with pytest.raises(DataError, match=r"--entity-ids .*none\.txt: No such file"):
        made([record()], entity_ids=str(tmp_path / "none.txt"))
    path = tmp_path / "text.txt"
    path.write_text("word1")
    given = {"entities_key": "entities", "entity_ids": str(tmp_path / "ids.txt")}
    with pytest.raises(ConfigError, match="needs JSON lines"):
        build_corpus(BuildConfig(inputs=[str(path)], output=str(tmp_path / "o"), **given), ByteTokenizer)


def test_capitals_match_the_text_on_the_first_token_of_each_word(corpus, tmp_path):
    """The vocabulary has lost them; unknown words have them too, numbers and punctuation none."""
    path, text = tmp_path / "text.txt", "Word1 word2, (WORD3) Étoile 7up xWord4 ."
    path.write_text(f"{text}\n", encoding="utf-8")
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt"))
    config = BuildConfig(inputs=[str(path)], output=str(tmp_path / "out"), capitals=True)
    report = build_corpus(config, partial(load_tokenizer, tokenizer))
    _, places = load_tokenizer(tokenizer).encode_with_offsets(text)
    begins = {match.start(): int(match[0][0].isupper()) for match in re.finditer(r"[^\W\d_]\w*", text)}
    del begins[text.index("up")]
    expected = [begins.get(start, -1) for start, _ in places]
    assert (
        entities_of(tmp_path / "out") == [*expected, -1] and expected.count(1) == 3 and expected.count(0) == 2
    )
    pieces, _ = CapitalReader().token_values(
        b"", "McDon no 7Up B", [(0, 2), (2, 5), (5, 8), (9, 10), (10, 12), (12, 14)]
    )
    assert pieces.tolist() == [1, -1, 0, -1, -1, 1]  # a token may begin with a space
    pieces, _ = CapitalReader().token_values(b"", "E\u0301tE\u0301", [(0, 2), (2, 3), (3, 4)])
    assert pieces.tolist() == [1, -1, -1]  # a mark is within its word
    assert IndexedDataset(tmp_path / "out").manifest["entities"]["ids"] == "capitals"
    assert "words with stored capitalization: 5" in "".join(report.lines())


WITHOUT_NUMBERS = {"entities_key": None, "entity_ids": None, "spans_key": "entities"}


def test_spans_have_their_length_in_tokens_on_the_first(made):
    """Both ends of a span are known, whatever its kind; shards do not matter, and scores do."""
    records = [
        record((6, 17, "phrase"), (0, 5, "Q1", 0.2)),
        record(),
        record((0, 19, "entity", 0.5)),
        *[record((0, 5, "x"))] * 50,
    ]
    prefix = made(records, min_score=0.3, **WITHOUT_NUMBERS)
    expected = [-1, 2, -1, -1, -1, *[-1] * 5, 4, *[-1] * 4, *[1, -1, -1, -1, -1] * 50]
    assert entities_of(prefix) == expected
    facts = IndexedDataset(prefix).manifest["entities"]
    assert (facts["ids"], facts["mentions"]) == ("spans", {"kept": 52, "low_score": 1})
    assert "spans: 52; skipped: 1 with a low score" in "".join(made.report.lines())
    again = made(records, "again", min_score=0.3, shard_bytes=900, workers=2, **WITHOUT_NUMBERS)
    assert entities_of(again) == expected
    joined = merge_datasets([prefix, again], f"{prefix}-joined")
    assert joined.entities.tolist() == expected * 2


BAD_SPANS = {
    "no list": ({"text": TEXT}, r"there is no list 'entities' .*set with --spans-key"),
    "half a token": (record((0, 3, "noun")), "'wor' at 0 begins or ends inside a token"),
    "overlap": (record((0, 11, "noun"), (6, 17, "verb")), r"two mentions overlap"),
    "no kind": (record((0, 5)), r"the mention \[0, 5\] is not"),
}


@pytest.mark.parametrize("name", BAD_SPANS)
def test_bad_spans_are_bad_records(made, name):
    bad, message = BAD_SPANS[name]
    with pytest.raises(DataError, match=rf"out\.jsonl:2: .*{message}.*; correct or remove"):
        made([record(), bad], **WITHOUT_NUMBERS)


def test_capitals_entities_and_spans_do_not_stand_in_one_file(made, tmp_path):
    numbers = {"entities_key": "entities", "entity_ids": "ids.txt"}
    for given, first, second in (
        ({"capitals": True, **numbers}, "capitals", "entities-key"),
        ({"capitals": True, "spans_key": "spans"}, "capitals", "spans-key"),
        ({"spans_key": "spans", **numbers}, "spans-key", "entities-key"),
    ):
        message = f"--{first} is given with --{second}, but a dataset"
        with pytest.raises(ConfigError, match=message):
            BuildConfig(inputs=["a"], output="b", **given)
    (tmp_path / "text.txt").write_text("word1")
    config = BuildConfig(inputs=[str(tmp_path / "text.txt")], output=str(tmp_path / "o"), spans_key="spans")
    with pytest.raises(ConfigError, match=r"--spans-key needs JSON lines"):
        build_corpus(config, ByteTokenizer)
    datasets = [IndexedDataset(made([record()], "a"))]
    datasets.append(IndexedDataset(made([record()], "b", entities_key=None, entity_ids=None, capitals=True)))
    with pytest.raises(DataError, match="do not have the same entities"):
        merge_datasets([dataset.prefix for dataset in datasets], str(datasets[0].prefix) + "-both")


def test_a_long_name_takes_its_own_memory(tmp_path):
    """Of 400 names one has 2 MB; as rows of one width they would take 800 MB."""
    names = [f"entity {number}" for number in range(399)] + ["long " * 400_000]
    lines = [f"{name}\t{number}\n" for number, name in enumerate(names)]
    (tmp_path / "ids.txt").write_text(f"{len(names)}\n{''.join(lines)}")
    tracemalloc.start()
    try:
        found = read_names(str(tmp_path / "ids.txt"), "--entity-ids")
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert found.count == 400 and [found.number(name) for name in names] == list(range(400))
    assert found.number("entity") == found.number("\ud800") == found.number("") == -1


@pytest.mark.parametrize(
    "content", ["1\na\t" + "9" * 5000 + "\n", "9" * 5000 + "\na\t0\n", "1\na\t-0\n", "1\na\t1\n"]
)
def test_a_number_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "ids.txt").write_text(content)
    with pytest.raises(DataError, match=r"ids\.txt:[12]: ") as error:
        read_names(str(tmp_path / "ids.txt"), "--entity-ids")
    assert len(str(error.value)) < 400


def test_a_pipe_of_names_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "ids.txt")
    with pytest.raises(DataError, match=r"ids\.txt is a pipe"):
        read_names(str(tmp_path / "ids.txt"), "--entity-ids")
