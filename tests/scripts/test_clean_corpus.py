"""The command from raw text to a dataset: any number of tasks, kills, other formats, mistakes, jobs of SLURM."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import ipc, parquet
from support.commands import Forked, assert_refused, forked
from support.data import cleaning
from support.data.stores import RefusedLater, serving
from support.project import ROOT
from support.selection import slow_but
from support.slurm_cluster import reason_to_skip, running_cluster
from support.waiting import wait_until

from data_utils.cleaning import executors
from data_utils.cleaning.run import _open_work
from data_utils.common.files import open_locked
from data_utils.dataset.cleaning_record import cleaning_records, record_bytes
from data_utils.dataset.indexed_dataset import IndexedDataset

LENGTH = 40
SETTINGS = {
    "keep": 'language == "en" and score >= 3',
    "fields": ["url"],
    "filters": {"gopher_quality": {"min_doc_words": 10, "min_stop_words": None}},
    "exact_duplicates": True,
    "near_duplicates": {"num_buckets": 4},
}
# For tests of what is read: most of the time is that of near duplicates.
WITHOUT_NEAR_DUPLICATES = {name: value for name, value in SETTINGS.items() if name != "near_duplicates"}


def crawl(count=80):
    """Rows of a small crawl: some in another language or of a low score, short ones, copies and near copies."""
    generator = random.Random(2)
    texts = [text for _ in range(count // 2) for text in cleaning.pair(generator, LENGTH, LENGTH - 2)]
    texts += texts[:10] + ["few words"] * 5
    generator.shuffle(texts)
    return [
        {
            "text": text, "language": "de" if i % 7 == 0 else "en", "score": 2.5 if i % 11 == 0 else 3 + i % 2,
            "url": f"u{i}",
        }
        for i, text in enumerate(texts)
    ]  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def raw(tmp_path):
    write(tmp_path / "raw.jsonl", crawl())
    cleaning.recipe(tmp_path, **SETTINGS)
    return tmp_path


COMMAND = ["--recipe", "recipe.yaml", "--workers", "2"]


def run(directory, *arguments):
    return forked(cleaning.SCRIPT, *COMMAND, *arguments, cwd=directory)


def tree(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_any_number_of_tasks_gives_the_same_text_and_report(raw):
    outputs = []
    for tasks in (1, 3):
        found = cleaning.cleaned(raw, f"out{tasks}", *COMMAND[:2], "--input", "raw.jsonl", "--tasks", tasks)
        files = tree(raw / f"out{tasks}")
        outputs.append((found, files["report.json"], files["report.html"]))
        assert sorted(files)[:3] == ["manifest.json", "report.html", "report.json"]
    assert outputs[0] == outputs[1]
    found, report = outputs[0][0], json.loads(outputs[0][1])
    assert all(set(record) == {"text", "url"} for record in found)
    removed = {name: rule["documents"] for name, rule in report["rules"].items()}
    rows = crawl()
    kept = [row for row in rows if row["language"] == "en" and row["score"] >= 3]
    assert removed["keep"] == len(rows) - len(kept)
    assert removed["gopher_quality: gopher_short_doc"] == sum(row["text"] == "few words" for row in kept)
    longer = [row["text"] for row in kept if row["text"] != "few words"]
    assert removed["exact_duplicates"] == len(longer) - len(set(longer))
    assert removed["near_duplicates"] == len(set(longer)) - len(found) > 0
    assert not list(raw.glob("*.cleaning")) and not list(raw.glob(".*"))


def as_table(rows):
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    meta = [{"url": url} for url in columns.pop("url")]
    return pa.table({**columns, "meta": meta})


def write_other(path, rows):
    """Rows in the format that a name tells."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(lines))
    elif path.suffix == ".parquet":
        parquet.write_table(as_table(rows), path, row_group_size=17)
    elif path.suffix == ".arrow":
        with ipc.new_file(path, as_table(rows).schema) as file:
            file.write_table(as_table(rows), max_chunksize=17)
    else:
        names = ["language", "text", "score", "url"]
        path.write_text(
            "\n".join(",".join(map(str, row)) for row in [names, *([r[n] for n in names] for r in rows)])
        )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The clean text of the crawl, from JSON lines."""
    folder = tmp_path_factory.mktemp("expected")
    write(folder / "raw.jsonl", crawl())
    return cleaning.cleaned(folder, "out", "--input", "raw.jsonl", **WITHOUT_NEAR_DUPLICATES)


@pytest.mark.parametrize(
    "name",
    slow_but(["a.jsonl.gz", "a.parquet"], ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.csv"]),
)
def test_other_formats_give_the_same_text(raw, expected, name):
    """With fields of tables, in columns within others, and numbers that are text."""
    write_other(raw / name, crawl())
    nested = name.endswith((".parquet", ".arrow"))
    settings = {**WITHOUT_NEAR_DUPLICATES, "fields": ["meta.url" if nested else "url"]}
    found = cleaning.cleaned(raw, "out", "--input", name, "--tasks", 2, **settings)
    assert cleaning.texts(found) == cleaning.texts(expected)
    key = "meta.url" if nested else "url"
    assert [record[key] for record in found] == [record["url"] for record in expected]


def test_plain_text_and_bad_records_are_read_as_a_build_reads_them(tmp_path):
    generator = random.Random(1)
    texts = [" ".join(cleaning.words(generator, 8)) for _ in range(6)]
    (tmp_path / "a.txt").write_text("\n\n".join([*texts[:4], texts[0]]))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": texts[4]}) + '\n{"text": 3}\n{"text": ""}\n\n')
    options = ["--input", "a.txt", "b.jsonl", "--text-split", "blank_lines"]
    done = cleaning.clean(tmp_path, *options, "--output", "out", exact_duplicates=True)
    assert_stopped(done, r"b.jsonl:2: ")
    shutil.rmtree(tmp_path / "out.cleaning", ignore_errors=True)
    options += ["--on-bad-record", "skip"]
    found = cleaning.cleaned(tmp_path, "out", *options, exact_duplicates=True)
    assert cleaning.texts(found) == texts[:5]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["records"] == {
        "bad": {"field_not_text": 1}, "empty_documents": 1, "blank_lines": 1,
        "examples": [{"at": "b.jsonl:2", "problem": "field 'text' holds a number, not text"}],
    }  # fmt: skip


def test_the_summary_says_what_was_left_out(raw):
    """Bad records are named by file and line, and evaluation texts that are too short for any match are counted."""
    with (raw / "raw.jsonl").open("a") as file:
        file.write('{"text": 3}\n\n{"text": ""}\n')
    (raw / "eval.jsonl").write_text('{"text": 4}\n{"text": "too short"}\n')
    cleaning.recipe(raw, exact_duplicates=True)
    options = ["--input", "raw.jsonl", "--decontaminate", "eval.jsonl", "--on-bad-record", "skip"]
    lines = len((raw / "raw.jsonl").read_text().splitlines())
    outputs = []
    for tasks in ("1", "3"):
        done = run(raw, *options, "--tasks", tasks, "--output", f"out{tasks}")
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.partition("bytes removed\n")[2].splitlines()[:-1])
        page = (raw / f"out{tasks}/report.html").read_text()
        assert f"raw.jsonl:{lines - 2}" in page and "holds a number, not text" in page
    assert outputs[0] == outputs[1] == [
        "  skipped: 1 empty documents, 1 blank lines",
        "  skipped: 1 bad records (field_not_text)",
        f"    raw.jsonl:{lines - 2}: field 'text' holds a number, not text",
        "  1 of 1 evaluation texts have fewer than 13 words and are not searched for",
        "  skipped: 1 bad records of the evaluation texts (field_not_text)",
    ]  # fmt: skip


def test_a_field_too_deep_to_be_written_is_a_bad_record(tmp_path):
    """It ended the stage, and no option went past it."""
    deep = f'{{"text": "one", "meta": {"[" * 300}{"]" * 300}}}\n'
    (tmp_path / "a.jsonl").write_text('{"text": "two", "meta": [[1]]}\n' + deep)
    settings = {"fields": ["meta"], "exact_duplicates": True}
    options = ["--input", "a.jsonl", "--on-bad-record", "skip"]
    assert cleaning.cleaned(tmp_path, "out", *options, **settings) == [{"text": "two", "meta": [[1]]}]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["records"]["bad"] == {"too_deep": 1}


def assert_stopped(done, message):
    """One line on stderr, after the lines on stages."""
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, (
        done.stderr
    )
    assert message in done.stderr


def is_done(output, finished, goal):
    return output.exists() or finished() >= goal


def is_free(lock):
    try:
        os.close(open_locked(lock))
    except BlockingIOError:
        return False
    return True


def test_a_killed_command_continues_and_ends_with_the_same_output(raw):
    """kill -9 after one, two, ... finished tasks; no process is left over, and the lock is free again."""
    write(raw / "raw.jsonl", crawl(120))
    options = [*COMMAND, "--input", "raw.jsonl", "--tasks", "3"]

    def finished():
        return len(list(raw.glob("out.cleaning/logs/*/completions/*")))

    goal, kills = 1, 0
    while True:
        command = Forked(cleaning.SCRIPT, *options, "--output", "out", cwd=raw)
        wait_until(partial(is_done, raw / "out", finished, goal), what="another task is finished")
        if (raw / "out").exists():
            assert command.result().returncode == 0
            break
        goal, kills = finished() + 4, kills + 1
        os.kill(command.pid, signal.SIGKILL)
        assert command.result().returncode == -signal.SIGKILL
        # Workers hold the lock until they have noticed: nothing may write while they still do.
        wait_until(partial(is_free, raw / ".out.megatron_lite_lock"), what="the workers have ended")
        if (raw / "out").exists():  # the kill came when only the work was left to remove
            shutil.rmtree(raw / "out.cleaning", ignore_errors=True)
            break
    assert kills >= 2
    assert run(raw, *options[4:], "--output", "straight").returncode == 0
    assert tree(raw / "out") == tree(raw / "straight")
    assert sorted(path.name for path in raw.iterdir()) == ["out", "raw.jsonl", "recipe.yaml", "straight"]


def test_discarded_work_is_never_taken_for_finished(tmp_path, monkeypatch):
    """A kill while it is removed leaves the plan, and no mark of a task whose files are gone."""
    for name in ("counts", "data", "logs", "output"):
        (tmp_path / "out.cleaning" / name).mkdir(parents=True)
    (tmp_path / "out.cleaning/plan.json").write_text("{}")
    removed = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: removed.append(path.name))
    _open_work(tmp_path / "out.cleaning", {}, restart=True)
    assert removed[0] == "logs" and removed[-1] == "out.cleaning" and len(removed) == 5


def leave_work(raw):
    """Work of a command that was killed after the first task."""
    command = Forked(
        cleaning.SCRIPT, *COMMAND, "--input", "raw.jsonl", "--tasks", "4", "--output", "out", cwd=raw
    )
    work = raw / "out.cleaning"
    wait_until(lambda: list(work.glob("logs/*/completions/*")), what="a task is finished")
    os.kill(command.pid, signal.SIGKILL)
    assert command.result().returncode == -signal.SIGKILL
    wait_until(partial(is_free, raw / ".out.megatron_lite_lock"), what="its workers are gone")


@pytest.mark.slow
def test_work_of_another_run_is_refused(raw):
    leave_work(raw)
    options = ["--input", "raw.jsonl", "--output", "out", "--tasks", "4"]
    before = tree(raw)
    write(raw / "other.jsonl", crawl(20))
    for changed, message in (
        ([*options, "--tasks", "2"], "tasks 4 instead of 2"),
        (["--input", "other.jsonl", *options[2:]], "other --input files, without"),
        ([*options, "--text-key", "url"], "text_key"),
        ([*options, "--held-out", "other.jsonl"], "other --held-out files, without"),
    ):
        assert_refused(run(raw, *changed), message)
    cleaning.recipe(raw, **{**SETTINGS, "near_duplicates": {"n_grams": 4}})
    assert_refused(run(raw, *options), "near_duplicates.n_grams")
    cleaning.recipe(raw, **SETTINGS)
    os.utime(raw / "raw.jsonl", (1, 1))
    assert_refused(run(raw, *options), "another version of")
    assert {name: data for name, data in tree(raw).items() if "out.cleaning" in name} == {
        name: data for name, data in before.items() if "out.cleaning" in name
    }
    assert run(raw, *options, "--restart").returncode == 0


@pytest.mark.parametrize(
    ("stage", "name", "is_gone"),
    [
        ("filter", "raw.jsonl", False),
        ("held_out", "held.jsonl", True),
        pytest.param("filter", "raw.jsonl", True, marks=pytest.mark.slow),
        pytest.param("held_out", "held.jsonl", False, marks=pytest.mark.slow),
    ],
)
def test_input_that_changes_while_it_is_read_is_refused(raw, monkeypatch, stage, name, is_gone):
    """The output was of parts of two versions, and its record of neither."""
    write(raw / "held.jsonl", crawl(4))

    def run_stage(one, *arguments):
        finish_stage(one, *arguments)
        if one.name == stage:
            (raw / name).unlink() if is_gone else write(raw / name, crawl(120))

    finish_stage = executors.run_stage
    monkeypatch.setattr(executors, "run_stage", run_stage)
    cleaning.recipe(raw, near_duplicates={"num_buckets": 2, "hashes_per_bucket": 8})
    options = ["--input", "raw.jsonl", "--held-out", "held.jsonl", "--output", "out", "--tasks", "1"]
    message = f"{name}: cannot be read (No such file" if is_gone else f"another version of input {raw / name}"
    assert_stopped(run(raw, *options), message)
    if not is_gone:  # the same command begins again
        monkeypatch.undo()
        assert run(raw, *options).returncode == 0


@pytest.mark.slow
def test_a_second_command_waits_for_nobody(raw):
    """While one writes an output, another is refused; an output that exists is never replaced."""
    command = Forked(cleaning.SCRIPT, *COMMAND, "--input", "raw.jsonl", "--output", "out", cwd=raw)
    wait_until(lambda: (raw / "out.cleaning").exists(), what="the work begins")
    second = run(raw, "--input", "raw.jsonl", "--output", "out")
    assert second.returncode == 2 and command.result().returncode == 0
    before = tree(raw / "out")
    assert_refused(run(raw, "--input", "raw.jsonl", "--output", "out"), "already exists")
    assert tree(raw / "out") == before


@pytest.mark.parametrize("is_slow", [False, True], ids=["", "while the other begins"])
def test_a_killed_worker_is_one_line(raw, monkeypatch, is_slow):
    """datatrove's own pool would wait for it without end. Until it began, the other has the handlers of the command."""
    write(raw / "raw.jsonl", crawl(4000))
    begin = executors.begin_worker

    def begin_slowly():
        wait_until(lambda: signal.SIGTERM in signal.sigpending(), what="the worker is ended")
        begin()

    if is_slow:
        monkeypatch.setattr(executors, "begin_worker", begin_slowly)
    command = Forked(cleaning.SCRIPT, *COMMAND, "--input", "raw.jsonl", "--output", "out", cwd=raw)

    def workers():
        path = f"/proc/{command.pid}/task/{command.pid}/children"
        return [int(word) for word in open(path).read().split()]

    wait_until(lambda: len(workers()) > is_slow, what="a worker runs")
    os.kill(workers()[0], signal.SIGKILL)
    done = command.result()
    assert_stopped(done, "worker process")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "absent.jsonl"], "absent.jsonl does not exist"),
        (
            ["--tasks", "0", "--workers", "0"],
            "--workers is 0; it must be 1 or more. --tasks is 0; it must be in [1, 60000].",
        ),
        (["--tasks", "0"], "--tasks is 0"),
        (["--executor", "dask"], "--executor is 'dask'"),
        (["--partition", "cpu"], "--partition is given"),
        (["--executor", "slurm", "--partition", "a;b"], "--partition is 'a;b'"),
        (["--executor", "slurm", "--partition", "a", "--time", "long"], "--time is 'long'"),
        (
            ["--executor", "slurm", "--partition", "a", "--time", "9", "--cpus-per-task", "0"],
            "--cpus-per-task is 0",
        ),
        (["--held-out", "raw.jsonl"], "--held-out raw.jsonl is also an --input"),
        (["--decontaminate", "raw.jsonl"], "--decontaminate raw.jsonl is also an --input"),
        (["--recipe", "absent"], "absent"),
        (["--output", "raw.jsonl"], "raw.jsonl already exists"),
        (["--output", "/"], "--output is /; give a new directory"),
        (["--output", "s3://bucket/clean"], "'s3://bucket/clean', a URL; give a path of this machine"),
        (["--output", os.fsdecode(b"o\xff")], "names are not UTF-8"),
        (["--text-split", "words"], "invalid choice"),
        (["--max-bad-records", "-1"], "max_bad_records is -1"),
        (
            ["--max-bad-records", "5"],
            "max_bad_records is 5, but on_bad_record is error, which allows none; set",
        ),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(raw, arguments, message):
    given = ["--input", "raw.jsonl", "--output", "out", *arguments]
    assert_refused(run(raw, *given), message)
    assert sorted(path.name for path in raw.iterdir()) == ["raw.jsonl", "recipe.yaml"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": "lang == 'en'"}, "the field 'lang', but none of"),
        ({"fields": ["adress"]}, "removes nothing"),
        ({"exact_duplicates": True, "fields": ["adress"]}, "the field 'adress'"),
        ({"filters": {"gopher_quality": {"min_doc_words": 1000}}}, "no document is left of"),
        ({"contaminated": "report"}, "removes nothing"),
        ({"words": "spacy", "language": "none", "exact_duplicates": True}, "language is 'none'"),
    ],
)
def test_recipes_that_cannot_help_are_one_line(raw, settings, message):
    done = cleaning.clean(raw, "--input", "raw.jsonl", "--output", "out", **settings)
    assert_stopped(done, message)
    assert sorted(path.name for path in raw.iterdir()) == ["raw.jsonl", "recipe.yaml"]


def test_names_that_are_not_utf8_are_refused_at_once(raw):
    names = [os.fsdecode(name) for name in (b"a\xff.jsonl", b"b\xff.jsonl")]
    for name in names:
        shutil.copy(raw / "raw.jsonl", raw / name)
    done = run(raw, "--input", *names, "--output", "out")
    assert_refused(
        done, r"not UTF-8, as the report needs them: 'a\udcff.jsonl', 'b\udcff.jsonl'; rename them"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("soft", "hard", "tasks"),
    [(64, 5000, 90), (64, 300, 90), (64, 370, 90)],
)
def test_finding_duplicates_may_open_three_files_of_each_task(raw, soft, hard, tasks):
    """Text, duplicates and their counts: every task has a copy of a text of another one."""
    write(raw / "raw.jsonl", crawl(180) * 2)
    cleaning.recipe(raw, exact_duplicates=True)
    command = [sys.executable, ROOT / cleaning.SCRIPT, *COMMAND, "--input", "raw.jsonl", "--output", "out"]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "-", *command, "--tasks", str(tasks)],
        cwd=raw, capture_output=True, text=True,
    )  # fmt: skip
    if 3 * tasks + 100 > hard:
        assert_refused(done, f"this machine allows {hard}; use fewer tasks")
    else:
        assert done.returncode == 0, done.stderr


def test_the_work_is_no_input_of_the_same_command(tmp_path):
    """A glob with ** finds the text that the first task has written."""
    generator = random.Random(4)
    cleaning.write_lines(tmp_path / "in.jsonl", [" ".join(cleaning.words(generator, 9)) for _ in range(20)])
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"text": 3}\n')
    quality = {"min_doc_words": 2, "min_stop_words": None}
    for _ in range(2):
        options = ["--input", "**/*.jsonl", "--output", "out", "--tasks", 2, "--workers", 1]
        done = cleaning.clean(tmp_path, *options, filters={"gopher_quality": quality})
        assert_stopped(done, "in.jsonl:21: ")
        assert (tmp_path / "out.cleaning/output/text/00000.jsonl").exists()


@pytest.mark.slow
def test_bad_records_of_held_out_texts_are_counted_over_all_tasks(raw):
    (raw / "held.jsonl").write_text(
        '{"text": 3}\n' * 3 + json.dumps({"text": "a " * 60}) + '\n{"text": 4}' * 3
    )
    options = ["--input", "raw.jsonl", "--output", "out", "--tasks", 2, "--held-out", "held.jsonl"]
    settings = {"near_duplicates": {"num_buckets": 2, "hashes_per_bucket": 8}}
    done = cleaning.clean(raw, *options, "--on-bad-record", "skip", "--max-bad-records", 5, **settings)
    assert_stopped(
        done, "6 bad records (6 field_not_text) exceed max_bad_records (5); the first is held.jsonl:1"
    )
    shutil.rmtree(raw / "out.cleaning")
    cleaning.cleaned(raw, "out", *options[:2], *options[4:], "--on-bad-record", "skip", **settings)
    assert json.loads((raw / "out/report.json").read_text())["held_out"]["bad"] == {"field_not_text": 6}


def test_values_within_columns_of_a_table_are_written_as_json(raw):
    day, number = datetime.date(2026, 1, 2), decimal.Decimal("1.5")
    column = [{"day": day, "list": [number], "code": b"ab"}]
    parquet.write_table(pa.table({"text": ["some words"], "meta": column, "day": [day]}), raw / "a.parquet")
    settings = {"exact_duplicates": True, "fields": ["meta", "day"]}
    (record,) = cleaning.cleaned(raw, "out", "--input", "a.parquet", "--tasks", 1, **settings)
    assert record["meta"] == {"day": "2026-01-02", "list": ["1.5"], "code": "ab"}
    assert record["day"] == "2026-01-02"


@pytest.mark.parametrize("option", ["--held-out", "--decontaminate"])
@pytest.mark.parametrize("text", ["", '{"text": ""}\n'], ids=["nothing", "no text"])
def test_files_without_a_document_protect_nothing(raw, option, text):
    (raw / "other.jsonl").write_text(text)
    done = run(raw, "--input", "raw.jsonl", "--output", "out", "--tasks", "1", option, "other.jsonl")
    assert done.returncode == 2 and f"the files of {option} have no document" in done.stderr
    assert sorted(path.name for path in raw.iterdir()) == ["other.jsonl", "raw.jsonl", "recipe.yaml"]


def test_columns_that_a_table_has_not_are_one_line(raw):
    write_other(raw / "a.parquet", crawl())
    write_other(raw / "a.csv", crawl())
    for name in ("a.parquet", "a.csv"):
        done = cleaning.clean(raw, "--input", name, "--output", name[2:], keep="lang == 'en'")
        assert_stopped(done, "there is no column 'lang'")


def test_fields_that_are_bytes_are_text(raw):
    """As old Spark and Hive write text: "b'en'" was never equal to "en"."""
    rows = crawl()
    languages = pa.array([row["language"].encode() for row in rows], pa.binary())
    table = pa.table({"text": [row["text"] for row in rows], "language": languages})
    parquet.write_table(table, raw / "a.parquet")
    settings = {"keep": 'language == "en"', "fields": ["language"]}
    found = cleaning.cleaned(raw, "out", "--input", "a.parquet", **settings)
    assert cleaning.texts(found) == [row["text"] for row in rows if row["language"] == "en"]
    assert all(record["language"] == "en" for record in found)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_field_that_two_columns_name_is_one_line(raw, name):
    """The last one decided, while a build and a CSV file refuse two columns of one name."""
    columns = [pa.array(["some words"]), pa.array(["en"]), pa.array(["de"])]
    table = pa.Table.from_arrays(columns, names=["text", "language", "language"])
    if name.endswith(".parquet"):
        parquet.write_table(table, raw / name)
    else:
        with ipc.new_file(raw / name, table.schema) as file:
            file.write_table(table)
    done = cleaning.clean(raw, "--input", name, "--output", "out", keep='language == "de"')
    assert_stopped(done, f"{name}: 2 columns have the name 'language'; rename all but one")


def not_utf8(size):
    return pa.array([b"en"] * (size - 1) + [b"\xff"], pa.binary()).view(pa.string())


@pytest.mark.parametrize(
    "column",
    [
        not_utf8(3),
        pa.array([1, 2, 1 << 61], pa.timestamp("us")),
    ],
    ids=["not UTF-8", "the year 75000"],
)
def test_fields_that_python_cannot_hold_are_one_line(raw, column):
    """The error of a stage named a log and advised to repeat the command."""
    parquet.write_table(pa.table({"text": ["a", "b", "c"], "field": column}), raw / "a.parquet")
    done = cleaning.clean(raw, "--input", "a.parquet", "--output", "out", keep="field != null")
    assert_stopped(done, "a.parquet: a value of field, which the recipe names, cannot be read (")
    assert "leave it out of the recipe" in done.stderr


def test_a_damaged_arrow_column_is_one_line(raw):
    """Arrow believes the offsets of a text: such a file ended the worker, and the error spoke of memory."""
    offsets = b"".join(number.to_bytes(4, "little") for number in range(0, 21 * 6, 6))
    table = pa.table(
        {"text": [f"words {i}" for i in range(20)], "language": [f"name{i:02}" for i in range(20)]}
    )
    with ipc.new_file(raw / "a.arrow", table.schema) as file:
        file.write_table(table)
    content = (raw / "a.arrow").read_bytes()
    assert content.count(offsets) == 1
    damaged = offsets[:40] + b"\xf0\xff\xff\x7f" * 11
    (raw / "a.arrow").write_bytes(content.replace(offsets, damaged))
    done = cleaning.clean(raw, "--input", "a.arrow", "--output", "out", keep="language != null")
    assert_stopped(done, "a.arrow: not a readable Arrow file")


def test_a_damaged_column_is_one_line(raw):
    """The column of a field is damaged, the column of the text is whole."""
    path = raw / "a.parquet"
    write_other(path, crawl())
    group = parquet.read_metadata(path).row_group(0)
    damaged = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "score")
    content = bytearray(path.read_bytes())
    content[damaged.data_page_offset : damaged.data_page_offset + 8] = b"\xff" * 8
    path.write_bytes(content)
    done = cleaning.clean(raw, "--input", "a.parquet", "--output", "out", keep="score > 3")
    assert_stopped(done, "a.parquet: not a readable parquet file")


def test_without_datatrove_the_remedy_is_named(raw):
    """Its package is hidden in a new process."""
    hidden = raw / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'datatrove' else find(name, *a)\n"
    )
    command = [sys.executable, ROOT / cleaning.SCRIPT, *COMMAND, "--input", "raw.jsonl", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(hidden)}
    done = subprocess.run(command, cwd=raw, env=environment, capture_output=True, text=True)
    assert_refused(done, "pip install '.[clean]'")


def test_torch_is_not_loaded(raw):
    code = (
        "import sys\nfrom scripts.clean_corpus import main\n"
        "main(sys.argv[1:])\nprint([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers')])"
    )
    arguments = [*COMMAND, "--input", "raw.jsonl", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=raw, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("\n[]\n"), done.stderr


class Page(HTMLParser):
    """Elements and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def test_the_report_shows_examples_and_runs_nothing(tmp_path):
    evil = "<script>alert(1)</script> <img src=x> & 'quotes' \u202e turned"
    cleaning.write_lines(tmp_path / "raw.jsonl", [evil, "one two three four five six"])
    filters = {"gopher_quality": {"min_doc_words": 6, "min_stop_words": None, "max_avg_word_length": 8}}
    cleaning.cleaned(tmp_path, "out", "--input", "raw.jsonl", filters=filters)
    page = Page((tmp_path / "out/report.html").read_text())
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags and "img" not in tags and "link" not in tags
    assert not any("src" in attributes or "href" in attributes for _, attributes in page.tags)
    assert "raw.jsonl:1" in page.texts and any(text.startswith("<script>alert(1)") for text in page.texts)
    policy = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy and "default-src 'none'" in policy[0]


def test_the_record_is_found_from_the_folder_of_the_text(tmp_path, monkeypatch):
    (tmp_path / "out/text").mkdir(parents=True)
    (tmp_path / "out/text/00000.jsonl").write_text("{}\n")
    (tmp_path / "out/manifest.json").write_bytes(record_bytes({"in": 1}, {"00000.jsonl": 3}))
    for folder, name in (
        ("out/text", "00000.jsonl"),
        ("out", "text/00000.jsonl"),
        (".", "out/text/00000.jsonl"),
    ):
        monkeypatch.chdir(tmp_path / folder)
        (record,) = cleaning_records([Path(name)])
        assert record["in"] == 1 and Path(record["output"]).resolve() == tmp_path / "out"


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrst",
    *(f"##{c}" for c in "abcdefghijklmnopqrst"),
]
TOKENIZER = ["--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", "vocab.txt", "--workers", "1"]


def build(directory, *arguments):
    return forked("scripts/preprocess_data.py", *TOKENIZER, *arguments, cwd=directory)


def test_a_dataset_records_how_its_text_was_cleaned(raw):
    """Also after a merge; splits hold no near copies of each other; a changed text is refused."""
    (raw / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    found = cleaning.cleaned(raw, "out", *COMMAND[:2], "--input", "raw.jsonl", "--tasks", 2)
    done = build(
        raw, "--input", "out/text/*.jsonl", "--output", "data/c", "--split", "train=0.6,validation=0.4"
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((raw / "out/manifest.json").read_text())
    for split in ("train", "validation"):
        (record,) = IndexedDataset(raw / f"data/c_{split}").manifest["cleaning"]
        assert record.pop("output") == "out"
        assert record == {key: value for key, value in written.items() if key != "files"}
    assert written["out"]["documents"] == len(found) and written["recipe"]["keep"] == SETTINGS["keep"]
    assert written["versions"]["datatrove"] and len(written["recipe_file"]["sha256"]) == 64
    # What was split apart is not similar, by datatrove's own steps.
    texts = cleaning.texts(found)
    assert cleaning.without_near_duplicates(raw / "reference", texts, num_buckets=4) == texts
    merge = ["merge", "data/c_train", "data/c_validation", "--output", "data/m"]
    assert forked("scripts/dataset.py", *merge, cwd=raw).returncode == 0
    done = forked("scripts/dataset.py", "inspect", "data/m", "--documents", "0", cwd=raw)
    assert done.returncode == 0 and "near_duplicates" in done.stdout
    with (raw / "out/text/00000.jsonl").open("a") as file:
        file.write('{"text": "added later"}\n')
    refused = build(raw, "--input", "out/text/*.jsonl", "--output", "data/d")
    assert_refused(refused, "out/text/00000.jsonl is not as the cleaning run wrote it")
    shutil.move(raw / "out/text", raw / "text")
    assert build(raw, "--input", "text/*.jsonl", "--output", "data/d").returncode == 0
    assert "cleaning" not in IndexedDataset(raw / "data/d").manifest


STUB = """#!/bin/bash
# A stand-in for SLURM's {name}: runs the tasks of an array one after another, here.
{body}
"""
SBATCH = """script="${@: -1}"
echo "$script" >> "$(dirname "$0")/calls"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
status=0
for task in $(seq 0 "$last"); do
    SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=localhost bash "$script" >/dev/null 2>&1 || status=1
done
echo "Submitted batch job 7"
exit $status"""


@pytest.fixture
def stub(tmp_path_factory):
    """A PATH on which sbatch runs its script at once."""
    folder = tmp_path_factory.mktemp("slurm")
    bodies = {"sbatch": SBATCH, "squeue": "cat \"$(dirname \"$0\")/queue\" 2>/dev/null; exit 0", "scancel": "exit 0",
              "scontrol": "echo localhost"}  # fmt: skip
    for name, body in bodies.items():
        path = folder / name
        path.write_text(STUB.format(name=name, body=body))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


SLURM = ["--executor", "slurm", "--partition", "all", "--time", "10"]


def on_slurm(raw, folder, *arguments):
    path = f"{folder}:{os.environ['PATH']}"
    return forked(cleaning.SCRIPT, *COMMAND, *SLURM, "--input", "raw.jsonl", *arguments, cwd=raw, PATH=path)


def test_job_scripts_of_slurm_give_the_same_output(raw, stub):
    cleaning.recipe(raw, keep=SETTINGS["keep"], exact_duplicates=True)
    done = on_slurm(raw, stub, "--output", "jobs", "--tasks", "2")
    assert done.returncode == 0, done.stderr
    assert run(raw, "--input", "raw.jsonl", "--output", "here", "--tasks", "2").returncode == 0
    assert tree(raw / "jobs") == tree(raw / "here")
    assert len((stub / "calls").read_text().splitlines()) == 3  # stages, each of which is one array


@pytest.mark.slow
def test_jobs_of_slurm_read_objects_but_no_url_with_a_secret(raw, stub):
    """A job reads its pipeline, and so its inputs, from a file."""
    cleaning.recipe(raw, keep=SETTINGS["keep"])
    with serving({"/raw.jsonl": (raw / "raw.jsonl").read_bytes()}) as server:
        url = f"{server.url}/raw.jsonl"
        for secret in (f"{url}?sig=CANARY", url.replace("//", "//user:CANARY@")):
            refused = on_slurm(raw, stub, "--output", "jobs", "--input", "raw.jsonl", secret)
            assert_refused(refused, f"--input {url} is given with a password or a query")
            assert "CANARY" not in refused.stderr and not server.seen
        done = on_slurm(raw, stub, "--output", "jobs", "--tasks", "2", "--input", url)
        assert done.returncode == 0, done.stderr
        server.refuse = RefusedLater({"/raw.jsonl": 1})
        failed = on_slurm(raw, stub, "--output", "failed", "--tasks", "2", "--input", url)
        assert_stopped(failed, f"input {url}: ")
    assert run(raw, "--input", "raw.jsonl", "--output", "here", "--tasks", "2").returncode == 0
    assert cleaning.records(raw / "jobs") == cleaning.records(raw / "here")


def test_a_mistake_in_a_job_is_one_line(raw, stub):
    """Other jobs, which write into the work, are cancelled before it is removed."""
    (raw / "raw.jsonl").write_text('{"text": 3}\n')
    body = '[ -d out.cleaning ] && touch "$(dirname "$0")/cancelled"'
    (stub / "scancel").write_text(STUB.format(name="scancel", body=body))
    cleaning.recipe(raw, exact_duplicates=True)
    assert_stopped(on_slurm(raw, stub, "--output", "out", "--tasks", "1"), "raw.jsonl:1: ")
    assert (stub / "cancelled").exists() and not (raw / "out.cleaning").exists()


def test_running_jobs_of_an_earlier_command_are_not_joined(raw, stub):
    (stub / "queue").write_text("12_[0-3]\n")
    assert_refused(on_slurm(raw, stub, "--output", "out"), "12_[0-3]")
    assert not (stub / "calls").exists() and not (raw / "out.cleaning").exists()


def test_slurm_needs_its_commands(raw):
    done = forked(
        cleaning.SCRIPT, *COMMAND, *SLURM, "--input", "raw.jsonl", "--output", "out", cwd=raw, PATH="/nowhere"
    )
    assert_refused(done, "there is no squeue")


@pytest.mark.slow
@pytest.mark.launcher
def test_a_real_slurm_gives_the_same_output(raw):
    """All stages, on two nodes. Minutes: sbatch --wait asks every ten seconds whether a stage is done."""
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    options = [*COMMAND, "--input", "raw.jsonl", "--tasks", "3"]
    with running_cluster() as cluster:
        command = [sys.executable, ROOT / cleaning.SCRIPT, *options, *SLURM, "--gigabytes-per-cpu", "1"]
        command += ["--output", "jobs"]
        done = subprocess.run(command, cwd=raw, env=cluster.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}{cluster.logs()}"
    assert run(raw, *options[4:], "--output", "here").returncode == 0
    assert tree(raw / "jobs") == tree(raw / "here")
