"""Cleaning of text in stores: the output of local files, the record for a build, and nowhere a secret."""

import gzip
import io
import json
import os
import random
import signal

import pyarrow
import pytest
from pyarrow import ipc, parquet
from support.commands import Forked, assert_refused, forked
from support.data import cleaning
from support.data.stored_corpora import build, write_files
from support.data.stores import RefusedLater, serving
from support.waiting import wait_until

from data_utils.common.errors import DataError
from data_utils.dataset.indexed_dataset import IndexedDataset

SETTINGS = {
    "keep": "score >= '3'",
    "fields": ["url"],
    "filters": {"gopher_quality": {"min_doc_words": 10, "min_stop_words": None}},
    "exact_duplicates": True,
    "near_duplicates": {"num_buckets": 4},
}


def rows(name, count):
    generator = random.Random(name)
    texts = [text for _ in range(count // 2) for text in cleaning.pair(generator, 40, 38)]
    texts = [*texts, *texts[:3], *["few words"] * 3]
    generator.shuffle(texts)
    return [{"text": text, "score": str(2 + i % 3), "url": f"{name}{i}"} for i, text in enumerate(texts)]


def lines(found):
    return "".join(json.dumps(row) + "\n" for row in found).encode()


def raw_files():
    """name -> content of a file in each format that has fields."""
    table, arrow = pyarrow.Table.from_pylist(rows("b", 60)), pyarrow.Table.from_pylist(rows("c", 30))
    buffers = io.BytesIO(), io.BytesIO()
    parquet.write_table(table, buffers[0], row_group_size=17)
    with ipc.new_stream(buffers[1], arrow.schema) as file:
        file.write_table(arrow, max_chunksize=11)
    csv = "".join(f"{row['score']},{row['text']},{row['url']}\n" for row in rows("d", 20))
    return {
        "a.jsonl": lines(rows("a", 300)),
        "b.parquet": buffers[0].getvalue(),
        "c.arrow": buffers[1].getvalue(),
        "d.csv": f"score,text,url\n{csv}".encode(),
        "e.jsonl.gz": gzip.compress(lines(rows("e", 20))),
    }


def output(directory):
    return {
        str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()
    }


def assert_no_secret(directory):
    written = b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    assert b"CANARY" not in written


def test_objects_give_the_output_of_local_files(tmp_path, bucket):
    """Fields by column, examples at their lines, evaluation texts and texts that are held out."""
    files = {
        **raw_files(),
        "held/h.jsonl": lines(rows("a", 300)[:20]),
        "e/v.jsonl": lines(rows("e", 20)[:5]),
    }
    for name, content in files.items():
        bucket.put(f"raw/{name}", content)
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / name).write_bytes(content)
    outputs = []
    for where, number in (("raw", "1"), ("s3://corpora/raw", "4")):
        options = ["--input", f"{where}/?.*", "--held-out", f"{where}/held/h.jsonl"]
        options += ["--decontaminate", f"{where}/e/v.jsonl", "--tasks", number]
        found = cleaning.cleaned(tmp_path, f"out{number}", *options, **SETTINGS)
        tree = output(tmp_path / f"out{number}")
        outputs.append((found, tree["report.json"].replace("s3://corpora/", "")))
    assert outputs[0] == outputs[1]
    report = json.loads(outputs[0][1])
    assert {"keep", "contamination", "exact_duplicates", "near_duplicates"} <= set(report["rules"])
    assert len({record["url"][0] for record in outputs[0][0]}) == 5
    assert_no_secret(tmp_path)


def test_an_object_that_is_held_out_is_no_input(tmp_path, bucket):
    bucket.put("raw/a.jsonl", lines(rows("a", 10)))
    arguments = ["--input", "s3://corpora/raw/*", "--output", "out", "--held-out", "s3://corpora/raw/a.jsonl"]
    done = cleaning.clean(tmp_path, *arguments, **SETTINGS)
    assert_refused(done, "--held-out s3://corpora/raw/a.jsonl is also an --input")


def test_no_secret_is_written_when_the_work_stops(tmp_path):
    """By a refusal amid the work, and by kill -9; the same command with another signature goes on."""
    files = {"/a.jsonl": lines(rows("a", 60)), "/b.jsonl": lines(rows("b", 60))}
    cleaning.recipe(tmp_path, **SETTINGS)
    options = ["--recipe", "recipe.yaml", "--workers", "1", "--tasks", "4", "--output", "out", "--input"]
    work = tmp_path / "out.cleaning"

    def finished():
        return list(work.glob("logs/*/completions/*"))

    with serving(files) as server:
        signed = [f"{server.url}{path}?sig=CANARY" for path in files]
        server.needed, server.refuse = "sig=CANARY", RefusedLater({"/b.jsonl": 1})
        done = forked(cleaning.SCRIPT, *options, *signed, cwd=tmp_path)
        assert done.returncode == 2 and finished() and "CANARY" not in done.stdout + done.stderr
        assert done.stderr.startswith(f"error: input {server.url}/b.jsonl: ") and done.stderr.count("\n") == 1
        assert_no_secret(tmp_path)
        server.refuse, server.most_bytes, server.sent = {}, 2, 0
        command = Forked(cleaning.SCRIPT, *options, *signed, cwd=tmp_path)
        wait_until(lambda: server.sent > 2, what="a task reads")
        os.kill(command.pid, signal.SIGKILL)
        server.most_bytes = None
        assert command.result().returncode == -signal.SIGKILL and finished()
        assert_no_secret(tmp_path)
        server.needed = "sig=OTHER"
        again = [url.replace("CANARY", "OTHER") for url in signed]
        wait_until(lambda: forked(cleaning.SCRIPT, *options, *again, cwd=tmp_path).returncode == 0)
    write_files(tmp_path / "raw", {path[1:]: content for path, content in files.items()})
    expected = cleaning.cleaned(tmp_path, "local", "--input", "raw/*.jsonl", **SETTINGS)
    assert cleaning.records(tmp_path / "out") == expected
    assert b"OTHER" not in b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*.*"))


def test_inputs_that_need_too_large_a_plan_are_refused_before_the_work(tmp_path, monkeypatch):
    write_files(tmp_path / "raw", {f"{number}.jsonl": b"{}\n" for number in range(30)})
    monkeypatch.setattr("data_utils.cleaning.run._MAX_BYTES", 1000)
    done = cleaning.clean(tmp_path, "--input", "raw/*", "--output", "out", **SETTINGS)
    assert_refused(done, "30 input files need a plan of")
    assert not (tmp_path / "out.cleaning").exists()


@pytest.fixture
def clean_text(tmp_path):
    """Files of an output, by their names below it."""
    write_files(tmp_path / "raw", {"a.jsonl": lines(rows("a", 20))})
    cleaning.cleaned(tmp_path, "clean", "--input", "raw/a.jsonl", "--tasks", 2, keep=SETTINGS["keep"])
    return {name: text.encode() for name, text in output(tmp_path / "clean").items()}


def record(tmp_path, name, *urls):
    build(urls, tmp_path / name)
    return IndexedDataset(tmp_path / name).manifest.get("cleaning")


def test_a_dataset_records_how_text_in_a_bucket_was_cleaned(tmp_path, bucket, clean_text):
    for name, content in clean_text.items():
        bucket.put(f"sets/clean/{name}", content)
    [found] = record(tmp_path, "d", "s3://corpora/sets/clean/text/*.jsonl")
    assert found.pop("output") == "s3://corpora/sets/clean"
    written = json.loads(clean_text["manifest.json"])
    del written["files"]
    assert found == written
    bucket.put("sets/clean/text/00000.jsonl", clean_text["text/00000.jsonl"] * 2)
    with pytest.raises(DataError, match=r"clean/text/00000.jsonl is not as the cleaning run wrote it"):
        record(tmp_path, "e", "s3://corpora/sets/clean/text/*.jsonl")
    for key in ("text/a.jsonl", "sets/clean/more/a.jsonl"):
        bucket.put(key, clean_text["text/00000.jsonl"])
    assert record(tmp_path, "f", "s3://corpora/text/a.jsonl", "s3://corpora/sets/clean/more/a.jsonl") is None


def test_a_dataset_of_text_on_a_web_server_has_the_record_if_the_server_gives_it(tmp_path, clean_text):
    with serving({f"/clean/{name}": content for name, content in clean_text.items()}) as server:
        url = f"{server.url}/clean/text/00000.jsonl"
        [found] = record(tmp_path, "a", url)
        assert found["output"] == f"{server.url}/clean"
        assert record(tmp_path, "b", f"{url}?sig=x") is None
        for status in (403, 404):
            server.refuse["/clean/manifest.json"] = status
            assert record(tmp_path, f"c{status}", url) is None
        server.refuse["/clean/manifest.json"] = 500
        with pytest.raises(DataError, match="attempts in a row brought nothing"):
            record(tmp_path, "d", url)
