"""scripts/laptop/collect_pairs.py: pairs of made packages; what is held out for retrieval is in no other file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.data.laptop_packages import bible, descriptions, prose, write, write_packages

from data_utils.common.errors import DataError
from data_utils.tasks.readers.similarity import read_retrieval
from scripts.laptop import collect_pairs, collect_text


def written(path: Path) -> list[tuple[str, str]]:
    records = map(json.loads, path.read_text("utf-8").splitlines())
    return [(record["query"], record["positive"]) for record in records]


@pytest.fixture
def packages(tmp_path):
    write_packages(tmp_path / "packages")
    return tmp_path / "packages"


def collected(packages: Path, output: Path) -> Path:
    collect_pairs.main(["--packages", str(packages), "--output", str(output)])
    return output


def test_each_source_is_a_file_and_the_same_packages_give_the_same_bytes(packages, tmp_path):
    first, second = (collected(packages, tmp_path / name) for name in ("first", "second"))
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert [str(path) for path in files if len(path.parts) == 1] == sorted(
        f"{n}.jsonl" for n in collect_pairs.PAIRS
    )
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)
    sentences = written(first / "sentences.jsonl")
    assert sentences and all(positive.startswith("It was a bright day") for _, positive in sentences)
    for name in collect_pairs.PAIRS:
        queries, positives = zip(*written(first / f"{name}.jsonl"), strict=True)
        assert len({*queries}) == len(queries) and len({*positives}) == len(positives)


def test_held_out_descriptions_are_in_no_file_of_pairs(packages, tmp_path, monkeypatch):
    monkeypatch.setattr(collect_pairs, "DOCUMENTS", 50)
    output = collected(packages, tmp_path / "pairs")
    task = read_retrieval(output / "retrieval")
    assert len(task.queries) == 6 and len(task.documents) == 50  # a tenth, where there are few
    asked = [(task.queries[q], task.documents[d]) for q, found in task.relevant.items() for d in found]
    described = [(f"the tool {number}", prose(number)) for number in range(60)]
    assert {*asked, *written(output / "descriptions.jsonl")} == {*described}
    trained = "".join(path.read_text("utf-8") for path in output.glob("*.jsonl"))
    assert not any(json.dumps(text) in trained for pair in asked for text in pair)
    # A package more moves no other one from one side to the other.
    monkeypatch.setattr(collect_pairs, "HELD_OUT", 6)
    more = descriptions([*((s, f" {long}\n") for s, long in described), ("another tool", f" {prose(99)}\n")])
    write(packages / "descriptions/a_main_i18n_Translation-en", more)
    other = read_retrieval(collected(packages, tmp_path / "more") / "retrieval")
    assert len({*other.queries.values()} & {*task.queries.values()}) >= 5


def test_a_description_is_prose_and_one_of_its_family(tmp_path, packages):
    family = f" {prose(1, 1)}\n"
    texts = [
        ("a library - development files", f"{family} .\n {prose(2, 1)}\n"),
        ("a library", f"{family} .\n Features:\n  * {prose(3, 1)}\n .\n {prose(4, 1)}\n"),
        ("a list", "  * one\n  * two\n"),
        ("old name", f" {prose(5, 1)} This is a transitional package.\n"),
    ]
    write(packages / "descriptions/a_main_i18n_Translation-en", descriptions(texts))
    assert list(collect_pairs.descriptions(packages)) == [("a library", f"{prose(1, 1)} {prose(4, 1)}")]


def test_words_meanings_and_examples(tmp_path):
    entry = (
        'bid\n    n 1: an attempt to get something; "a futile play for\n       power"; "a bid" [syn: {bid},\n'
        "       {play}]\n    2: a formal proposal\n    v 1: invite [ant: {refuse}]\nbide\n    v 1: dwell\n"
    )
    write(tmp_path / "wn.dict.dz", gzip.compress(entry.encode()))
    attempt = "an attempt to get something"
    assert list(collect_pairs.read_senses(tmp_path / "wn.dict.dz")) == [
        ("bid, play", attempt), (attempt, "a futile play for power"), (attempt, "a bid"),
        ("bid", "a formal proposal"), ("bid", "invite"), ("bide", "dwell"),
    ]  # fmt: skip


def test_verses_are_paired_by_chapter_and_number(packages):
    """Translations divide the books otherwise: only the second has the chapter Tob.1, and 3 verses in John.1."""
    first = {"John.1": ["\N{PILCROW SIGN} <w>Verily</w> one.<note>no</note>", "Two."], "John.2": ["Three."]}
    second = {"Tob.1": ["Other."], "John.1": ["One.", "", "More."], "John.2": ["Indeed three."]}
    for name, chapters in (("kjv", first), ("web", second)):
        bible(packages / f"sword-text-{name}/usr/nt.bzs", chapters)
    pairs = [("Verily one.", "One."), ("Three.", "Indeed three.")]
    assert collect_pairs.once(collect_pairs.verses(packages)) == pairs


def test_headings_stand_before_their_paragraph(tmp_path):
    page = (
        f'<h1>5.2. A <i>title</i><a href="#a">\N{PILCROW SIGN}</a></h1>\n<div class="b"><p>{prose(1)}</p></div>'
        f"<h2>Code</h2><pre>x = 1</pre><p>{prose(2)}</p><h2>Short</h2><p>No prose.</p><h3>B</h3><p>{prose(3)}</p>"
    )
    write(tmp_path / "a.html", page)
    assert list(collect_pairs.read_headings(tmp_path / "a.html")) == [("A title", prose(1)), ("B", prose(3))]


def test_an_article_has_its_title_and_its_first_sentence(tmp_path):
    text = "Mrs. Dalloway is a novel. It was written by Virginia Woolf."
    write(tmp_path / "a.json", json.dumps({"Dalloway": {"extract": text}}))
    assert list(collect_pairs.read_articles(tmp_path / "a.json")) == [
        ("Dalloway", text), ("Mrs. Dalloway is a novel.", "It was written by Virginia Woolf."),
    ]  # fmt: skip


def test_without_network_there_is_one_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(collect_text.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(DataError, match=r"descriptions cannot be fetched .*; check the network"):
        collected(tmp_path / "packages", tmp_path / "pairs")
    assert capsys.readouterr().err == "" and not (tmp_path / "pairs").exists()


def test_descriptions_are_fetched_from_apt(tmp_path, monkeypatch):
    """apt-get is a stand-in that writes what the real one writes, and fails for another of the machine's sources."""
    program = """#!/bin/sh
for word; do case $word in Dir::State=*) lists=${word#*=}/lists ;; esac; done
echo text > "$lists/a_main_i18n_Translation-en"; echo > "$lists/a_contrib_i18n_Translation-en"; exit 100
"""
    write(tmp_path / "bin/apt-get", program)
    (tmp_path / "bin/apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    found = collect_text.unpacked(collect_pairs.DESCRIPTIONS, tmp_path / "packages")
    assert [path.name for path in found.iterdir()] == ["a_main_i18n_Translation-en"]
