"""Builds from a web server: the same bytes as from local files, whatever the server does to its answers."""

import gzip
import os
import random
import signal
import subprocess
import sys

import pytest
from support.data.builds import finished_shards
from support.data.byte_tokenizer import ByteTokenizer
from support.data.stored_corpora import NAMES, build, corpus_files, dataset_bytes, lines, write_files
from support.data.stores import serving
from support.project import ROOT
from support.selection import slow_but
from support.waiting import wait_until

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.errors import DataError, UserError
from data_utils.corpus.documents import plan_shards
from data_utils.corpus.inputs import expand_inputs
from data_utils.corpus.stored_files import refuse_other_content
from data_utils.storage import objects
from scripts import split_sentences, train_tokenizer


@pytest.fixture
def files():
    return corpus_files()


def served(files):
    return {f"/{name}": content for name, content in files.items()}


@pytest.mark.parametrize("range_bytes", slow_but([7_000], [7_000, 8 << 20]))
def test_all_formats_give_the_bytes_of_local_files_under_cuts(tmp_path, files, monkeypatch, range_bytes):
    monkeypatch.setattr(objects, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(objects, "_SMALLEST_RANGE", 1000)
    expected = build(write_files(tmp_path / "raw", files), tmp_path / "local")
    with serving(served(files), cuts=0.85, busy=0.2, seed=2) as server:
        assert build([f"{server.url}/{name}" for name in NAMES], tmp_path / "remote") == expected
    assert len(server.seen) > len(NAMES)
    for _, asked, _ in server.seen:
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        assert last - first < range_bytes


@pytest.mark.parametrize("workers", slow_but([2], [1, 2, 4]))
def test_any_number_of_workers(tmp_path, files, workers):
    expected = build(write_files(tmp_path / "raw", files), tmp_path / "local")
    with serving(served(files), cuts=0.85, seed=workers) as server:
        urls = [f"{server.url}/{name}" for name in NAMES]
        assert build(urls, tmp_path / "remote", workers=workers) == expected


def test_a_killed_build_goes_on_with_what_is_missing(tmp_path):
    files = {"a.jsonl": lines("a", 1500), "b.jsonl.gz": gzip.compress(lines("b", 300))}
    expected = build(write_files(tmp_path / "raw", files), tmp_path / "local")
    with serving(served(files), cuts=0.5) as server:
        urls = [f"{server.url}/{name}" for name in files]
        program = (
            "import sys; sys.path[:0] = sys.argv[1:3]\n"
            "from pathlib import Path; from data_utils.storage import objects\n"
            "objects.RETRY_POLICY = objects.RetryPolicy(first_wait=0.001)\n"
            "from support.data.stored_corpora import build\n"
            "if __name__ == '__main__': build(sys.argv[4:], Path(sys.argv[3]), workers=2)"
        )
        script = tmp_path / "program.py"
        script.write_text(program)
        command = [
            sys.executable,
            str(script),
            str(ROOT),
            str(ROOT / "tests"),
            str(tmp_path / "remote"),
            *urls,
        ]
        process = subprocess.Popen(command, start_new_session=True)
        wait_until(lambda: finished_shards(tmp_path / "remote") >= 2 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        before = finished_shards(tmp_path / "remote")
        assert before >= 2
        assert build(urls, tmp_path / "remote") == expected


def test_an_object_that_changes_is_refused(tmp_path):
    content = lines("a", 2000)
    with serving({"/a.jsonl": content}) as server:
        [listed] = expand_inputs([f"{server.url}/a.jsonl"])
        server.files["/a.jsonl"] = content[::-1]
        with pytest.raises(DataError, match=r"/a.jsonl.* was replaced since it was listed"):
            listed.read(0, 100)
        server.checks_conditions = False  # as servers that do not know If-Match
        for replaced in (content[::-1], content + b"\n"):
            server.files["/a.jsonl"] = replaced
            with pytest.raises(DataError, match="not what it was"):
                listed.read(0, 100)


def test_an_answer_of_more_than_was_asked_for_is_not_read_to_its_end():
    """A server that sends the rest of the object for a range of it would fill the memory."""
    taken = []

    class Sending:
        retry_policy = objects.RetryPolicy(first_wait=0)

        def stream(self, stored, start, stop):
            for _ in range(1000):
                taken.append(1)
                yield bytes(1000)

    stored = objects.StoredObject("https://host/a", 10**6, "x", "a", Sending())
    with pytest.raises(DataError, match="not what it was"):
        stored.read(0, 2000)
    assert len(taken) == 3


def test_a_build_does_not_go_on_with_another_version(tmp_path):
    content = lines("a", 2000)
    with serving({"/a.jsonl": content}) as server:

        class Dying(ByteTokenizer):
            calls = 0

            def encode_batch(self, texts):
                Dying.calls += 1
                if Dying.calls > 3:
                    server.files["/a.jsonl"] = content + b"\n"
                return super().encode_batch(texts)

        config = BuildConfig(inputs=[f"{server.url}/a.jsonl"], output=str(tmp_path / "d"), shard_bytes=30_000)
        with pytest.raises(DataError, match="replaced since it was listed"):
            build_corpus(config, Dying)
        with pytest.raises(DataError, match=r"another version of input http://127.0.0.1:\d+/a.jsonl"):
            build_corpus(config, ByteTokenizer)


@pytest.mark.parametrize("status", [401, 403, 404, 410, 400])
def test_refusals_are_one_request_and_one_line(status):
    with serving({"/a.jsonl": b"{}\n"}) as server:
        server.refuse["/a.jsonl"] = status
        with pytest.raises(
            DataError, match=rf"^input http://127.0.0.1:\d+/a.jsonl: .*\(?status {status}\)?.*"
        ):
            expand_inputs([f"{server.url}/a.jsonl?X-Signature=SECRET"])
        assert len(server.seen) == 1


def test_redirects(caplog):
    """To where ranges are read, but to no other protocol, nowhere without end, and with no word of them."""
    with serving({"/b.jsonl": b"{}\n"}) as server:
        server.redirects["/a.jsonl"] = "/b.jsonl?sig=CANARY"
        [listed] = expand_inputs([f"{server.url}/a.jsonl"])
        assert listed.read(0, 3) == b"{}\n" and listed.label == f"{server.url}/a.jsonl"
        for where in ("ftp://host/CANARY.jsonl", "file:///CANARY", "http://[x/CANARY", "/a.jsonl?CANARY"):
            server.redirects["/a.jsonl"] = where
            with pytest.raises(DataError, match=r"/a.jsonl: .*; check the URL") as error:
                expand_inputs([f"{server.url}/a.jsonl"])
            assert "CANARY" not in str(error.value)
        assert "redirects lead to no file (status 302)" in str(error.value)  # of the last, a circle
    assert not caplog.text


def test_a_remedy_for_what_a_server_compresses():
    """Its user cannot rename it there."""
    with serving({"/a.jsonl": gzip.compress(b"{}\n")}) as server:
        [listed] = expand_inputs([f"{server.url}/a.jsonl"])
        with pytest.raises(DataError, match=r"gzip \(name it with \.gz\); download it first\."):
            refuse_other_content(listed.read(0, 2), listed)


def test_attempts_without_a_byte_end(caplog):
    with serving({"/a.jsonl": b"{}\n"}, busy=1.0) as server:
        with pytest.raises(DataError, match=r"10 attempts in a row brought nothing \(.*status 503\)"):
            expand_inputs([f"{server.url}/a.jsonl"])
        assert len(server.seen) == 10


def test_waits_double_up_to_a_minute():
    assert [objects.RetryPolicy().wait(failures) for failures in range(9)] == [1, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("what", ["ranges", "etags"])
def test_a_server_without_ranges_or_identities_is_refused(what):
    with serving({"/a.jsonl": b'{"text": "a"}\n'}) as server:
        setattr(server, f"has_{what}", False)
        with pytest.raises(DataError, match=r"download it first"):
            expand_inputs([f"{server.url}/a.jsonl"])


def test_secrets_are_in_no_file_and_no_message(tmp_path, capfd):
    """Signatures in queries and passwords; in the plan of a stopped build too, and in errors."""
    files = {"a.jsonl": lines("a", 2000), "b.jsonl": lines("b", 5) + b"no json\n"}
    with serving(served(files)) as server:
        server.needed = "sig=CANARY1"
        signed = [f"{server.url}/{name}?sig=CANARY1" for name in files]
        with pytest.raises(UserError) as error:
            build(signed, tmp_path / "signed")
        assert "b.jsonl" in str(error.value)
        build(signed, tmp_path / "signed", on_bad_record="skip", restart=True)
        server.needed = "Basic dXNlcjpDQU5BUlky"
        named = f"http://user:CANARY2@127.0.0.1:{server.server_port}/a.jsonl"
        build([named], tmp_path / "named")
        assert dataset_bytes(tmp_path / "named")
        server.needed = "another"
        script = [sys.executable, "scripts/train_tokenizer.py", "--kind", "hf_json", "--vocab-size", "300"]
        for arguments in (["--input", named], ["--input", "ftp://u:CANARY2@h/a.txt"], ["--inptu", signed[0]]):
            command = [*script, "--output", str(tmp_path / "tokenizer"), *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert done.returncode == 2 and "CANARY" not in done.stderr + done.stdout
            assert done.stderr.count("\n") == 1
    said = "".join(capfd.readouterr()) + str(error.value)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "CANARY" not in said and b"CANARY" not in written and b"dXNlcjpD" not in written
    assert f"{server.url}/a.jsonl".encode() in written


def test_two_files_of_one_name_are_refused_and_one_given_twice_is_read_once(caplog):
    with serving({"/a.jsonl": b"{}\n", "/b.jsonl": b"{}\n{}\n"}) as server:
        assert len(expand_inputs([f"{server.url}/a.jsonl?a=1", f"{server.url}/a.jsonl?a=2"])) == 1
        first = f"{server.url}/a.jsonl?a=1"
        listed = expand_inputs([first])
        assert [str(entry) for entry in listed] == [f"{server.url}/a.jsonl"]


@pytest.mark.parametrize(
    "url",
    [
        "https://host.invalid/a.jsonl",
        "http://127.0.0.1:bad/a.jsonl",
        "https://[x/a.jsonl",
        "https:///a.jsonl",
        "https://x/*.jsonl",
        "https://x/a b.jsonl?sig=CANARY",
        "https://me:a/CANARY@x/a.jsonl",
        "https://me:a'CANARY@x/a.jsonl",
        "https://me:CANARY'@x/a.jsonl",
    ],
)
def test_urls_that_cannot_be_read_are_one_line(url):
    with pytest.raises(UserError, match=r"check the URL|names no host|give each URL|write %20") as error:
        expand_inputs([url])
    assert "CANARY" not in str(error.value)


def test_a_reader_is_a_file(monkeypatch):
    """Reads at random positions and in order give the bytes of the object."""
    monkeypatch.setattr(objects, "RANGE_BYTES", 1000)
    content = random.Random(0).randbytes(12_345)
    with serving({"/a.txt": content}) as server:
        [listed] = expand_inputs([f"{server.url}/a.txt"])
        draw = random.Random(1)
        for _ in range(60):
            reader = objects.RangeReader(listed)
            start = draw.randrange(len(content) + 10)
            if draw.random() < 0.6:
                reader.expect(start, draw.randrange(len(content) + 10))
            reader.seek(start)
            for _ in range(4):
                size = draw.choice([1, 10, 999, 1000, 1001, 5000, -1])
                wanted = content[start:] if size < 0 else content[start : start + size]
                assert reader.read(size) == wanted
                start += len(wanted)
                assert reader.tell() == start
            reader.close()


def test_a_record_beyond_the_limit_is_named_without_reading_all_again(tmp_path, monkeypatch):
    monkeypatch.setattr("data_utils.corpus.documents.MAX_RECORD_BYTES", 400_000)
    content = lines("a", 100) + b'{"text": "' + b"x" * 1_000_000 + b'"}\n'
    with serving({"/a.jsonl": content}) as server:
        with pytest.raises(DataError, match=r"/a.jsonl:101: a record is longer than 400000 bytes"):
            build([f"{server.url}/a.jsonl"], tmp_path / "d", shard_bytes=1 << 20)
        server.files["/a.jsonl"] = lines("a", 100) + b"\n" * 5 + b"no json\n"
        after = rf"a.jsonl \(lines after byte {len(lines('a', 99))}\):\d+: .*JSON"
        with pytest.raises(DataError, match=after):
            build([f"{server.url}/a.jsonl"], tmp_path / "e", shard_bytes=len(lines("a", 99)))


def test_other_commands_read_urls(tmp_path, files):
    """The tokenizer's trainer and the cutter of sentences write what they write for local files."""
    local = write_files(tmp_path / "raw", {"a.jsonl": files["a.jsonl"]})
    with serving(served(files), cuts=0.85) as server:
        for name, inputs in (("local", local), ("remote", [f"{server.url}/a.jsonl"])):
            split_sentences.main(["--input", *inputs, "--output", str(tmp_path / f"{name}.txt")])
            options = ["--kind", "hf_json", "--vocab-size", "400", "--output", str(tmp_path / name)]
            train_tokenizer.main(["--input", *inputs, *options])
    assert (tmp_path / "local.txt").read_bytes() == (tmp_path / "remote.txt").read_bytes()
    for written in (tmp_path / "local").iterdir():
        assert written.read_bytes() == (tmp_path / "remote" / written.name).read_bytes()


@pytest.mark.slow
def test_workers_share_many_small_objects():
    """By bytes alone one of them would ask for all, one after another."""
    with serving({f"/{i}.jsonl": b"{}\n" for i in range(200)}) as server:
        listed = expand_inputs(f"{server.url}/{i}.jsonl" for i in range(200))
    assert [str(entry).rpartition("/")[2] for entry in listed] == [f"{i}.jsonl" for i in range(200)]
    shards = plan_shards(listed, "file", 16 << 20)
    assert len(shards) == 4 and [part.path for shard in shards for part in shard] == listed
