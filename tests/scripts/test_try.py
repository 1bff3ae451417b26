"""scripts/try.py: completions as of scripts/generate.py, what its server refuses, and how it ends."""

import contextlib
import http.client
import importlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from support.demos import generated, made_run, served
from support.hf.hf_runs import tree, write_run, write_vocabulary
from support.project import ROOT

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.settings import merge
from megatron_lite.inference.demo import KEPT, MOST_TOKENS, Demo
from megatron_lite.inference.open_run import open_run
from megatron_lite.inference.server import MOST_BYTES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def demo(run):
    return Demo(open_run(run))


@pytest.fixture(scope="module")
def server(demo):
    with served(demo) as server:
        yield server


# The server


def reply_to(server, method, path, body=None, **headers):
    """Status, and the object of a reply. Args: headers: in place of the page's own; None = left out."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    own = {"Host": f"127.0.0.1:{server.server_port}", "Content-Type": "application/json", **headers}
    if body is not None and "Transfer-Encoding" not in own:
        own = {"Content-Length": str(len(body)), **own}
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for key, value in own.items():
        if value is not None:
            connection.putheader(key, value)
    connection.endheaders(body)
    with contextlib.closing(connection):
        reply = connection.getresponse()
        content = reply.read()
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        return reply.status, content if path == "/" and reply.status == 200 else json.loads(content)


REQUEST = json.dumps({"text": "word1 [MASK]", "settings": {"max_length": 2}}).encode()


def test_requests_of_our_page_are_served(server):
    own = f"127.0.0.1:{server.server_port}"
    for headers in ({}, {"Origin": f"http://{own}"}, {"Host": own.replace("127.0.0.1", "localhost")}):
        status, found = reply_to(server, "POST", "/complete", REQUEST, **headers)
        assert status == 200 and len(found["blanks"]) == 1
    assert reply_to(server, "GET", "/")[1].startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        ({"Host": "evil.example"}, REQUEST, 403, "open this address"),
        ({"Host": "127.0.0.1"}, REQUEST, 403, "open this address"),
        ({"Host": None}, REQUEST, 403, "open this address"),
        ({"Origin": "http://evil.example"}, REQUEST, 403, "open this address"),
        ({"Origin": "null"}, REQUEST, 403, "open this address"),
        ({"Content-Type": "text/plain"}, REQUEST, 415, "send Content-Type: application/json"),
        ({}, b"{", 400, "send JSON in UTF-8"),
        ({}, b"\xff", 400, "send JSON in UTF-8"),
        ({}, b"[" * 60000, 400, "send JSON in UTF-8"),
        ({}, b"[]", 400, "text (str), settings (dict)"),
        ({}, b'{"text": 1, "settings": {}}', 400, "text (str), settings (dict)"),
        ({}, b'{"text": "a [MASK]", "settings": {"beams": 1}}', 400, "unknown setting"),
        ({}, b'{"text": "a [MASK]", "settings": {"top_k": 3}}', 400, "strategy is greedy"),
        ({}, b" " * (MOST_BYTES + 1), 413, "has 65,537 bytes, more than 65,536"),
        ({"Content-Length": None}, None, 411, "Content-Length"),
        ({"Content-Length": "-1"}, None, 411, "Content-Length"),
        ({"Transfer-Encoding": "chunked"}, b"0\r\n\r\n", 411, "Content-Length"),
    ],
)  # fmt: skip
def test_other_requests_are_refused_in_one_line(server, headers, body, status, words):
    found, reply = reply_to(server, "POST", "/complete", body, **headers)
    assert found == status and words in reply["error"] and "\n" not in reply["error"]


LARGE = 12_000_000  # bytes: many times what the buffers of a connection hold


@contextlib.contextmanager
def begun(server, sent):
    """A request of LARGE bytes, of which the first `sent` are sent. Yields its connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        head = [
            f"POST /complete HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}",
            f"Content-Length: {LARGE}",
        ]
        connection.sendall("\r\n".join([*head, "Content-Type: application/json\r\n\r\n"]).encode())
        connection.sendall(b"a" * sent)
        yield connection


def received(connection):
    """All that comes until the server has closed the connection, which a reset would make an error."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_a_much_too_large_request_is_read_to_its_end_and_refused_once(server):
    """The browser is not cut off while it sends, and others are served meanwhile."""
    with begun(server, LARGE // 2) as connection:
        assert reply_to(server, "POST", "/complete", REQUEST)[0] == 200
        connection.sendall(b"a" * (LARGE - LARGE // 2))
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ") and b"\r\nConnection: close" in head
    message = "the request has 12,000,000 bytes, more than 65,536; shorten the text."
    assert json.loads(body) == {"error": message}
    assert reply_to(server, "POST", "/complete", REQUEST)[0] == 200


def test_a_large_request_that_never_ends_blocks_no_other(server, monkeypatch):
    """A browser that stops sending gets the error; one that only waits is disconnected."""
    with begun(server, LARGE // 2) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert received(connection).startswith(b"HTTP/1.1 413 ")
    monkeypatch.setattr(server.RequestHandlerClass, "timeout", 0.1)
    with begun(server, LARGE // 2) as connection:
        assert received(connection) == b""
    assert reply_to(server, "POST", "/complete", REQUEST)[0] == 200


def test_other_paths_and_methods_are_refused(server):
    assert reply_to(server, "GET", "/../page.html")[0] == 404
    assert reply_to(server, "POST", "/other", REQUEST)[0] == 404
    assert reply_to(server, "GET", "/", Host="evil.example")[0] == 403
    assert reply_to(server, "PUT", "/complete", REQUEST)[0] == 501


def test_a_completion_that_fails_is_reported_and_the_next_one_is_served(server, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setattr(server.demo, "complete", lambda **request: 1 // 0)
        status, found = reply_to(server, "POST", "/complete", REQUEST)
    assert status == 500 and "ZeroDivisionError" in found["error"]
    assert "Traceback" in capsys.readouterr().err
    assert reply_to(server, "POST", "/complete", REQUEST)[0] == 200


def test_attention_is_refused_where_there_is_none(demo):
    number = demo.complete("word1 [MASK]", {"max_length": 2})["completion"]
    for asked in (("cross", 0, None), ("encoder", 2, None), ("encoder", -1, 0), ("encoder", 0, 4)):
        with pytest.raises(DataError, match=r"there is no head .* in layer"):
            demo.attention(number, *asked)
    for _ in range(KEPT):
        demo.complete("word1 [MASK]", {"max_length": 1})
    with pytest.raises(DataError, match="no longer kept"):
        demo.attention(number, "encoder", 0, None)


# Systems


TEXTS = {
    "blank_infilling": ("word1 [MASK] word2 [gMASK]", {}),
    "causal": ("word1 word2", {}),
    "unilm": ("word3 word4 .", {"segments": 6}),
    "bart": ("word1 [MASK] word3", {"decoder_layers": 1}),
}
SETTINGS = [
    {"max_length": 5, "min_length": 3},
    {"max_length": 5, "strategy": "sample", "seed": 3, "temperature": 1.5},
    {"max_length": 4, "strategy": "beam", "num_beams": 3, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("objective", TEXTS)
def test_completions_match_generate(objective, tmp_path, monkeypatch, capsys):
    text, model = TEXTS[objective]
    settings = merge(tree(write_vocabulary(tmp_path), **model), {"objectives": {objective: 1}})
    if objective == "unilm":
        settings["unilm"] = {"next_sentence": False}
    write_run(tmp_path / "run", settings)
    demo = Demo(open_run(tmp_path / "run"))
    about = demo.about()
    # The page shows what the run's way of generating reads, and nothing that it refuses.
    shown = {each["name"] for each in about["settings"]}
    for name, value in {"mode": "regular", "unmask_steps": 2, "unmask_block": 2, "guidance": 1.0}.items():
        with contextlib.nullcontext() if name in shown else pytest.raises(ConfigError, match=name):
            demo.complete(text, {name: value})
    assert not shown & {"mode", "guidance"} and "max_length" in shown
    assert about["fills"] == (objective == "blank_infilling") == bool(about["blanks"])
    first = {each["name"]: each["value"] for each in about["settings"] if each["only_for"] is None}
    assert demo.complete(about["example"], first)["segments"]
    for settings in SETTINGS:
        found = demo.complete(text, settings)
        expected = generated(monkeypatch, capsys, tmp_path / "run", text, **settings)
        if objective == "blank_infilling":
            assert (
                found["segments"][1::2] == expected["spans"]
                and "".join(found["segments"]) == expected["filled"]
            )
        else:
            assert found["segments"] == [text, expected["answer"]]
        for blank in found["blanks"]:
            product = 1.0
            for token in blank["tokens"]:
                product *= token["p"]
            assert len(blank["spans"]) in (settings.get("num_beams", 1), 2 * ("num_beams" in settings))
            assert blank["spans"][0]["p"] == pytest.approx(product, rel=1e-3)
    tokens = sum(len(blank["tokens"]) for blank in found["blanks"])
    for stack, layers in about["stacks"].items():
        for layer in range(layers):
            looked = demo.attention(found["completion"], stack, layer, 1)
            assert len(looked["weights"]) == len(looked["queries"])
            assert all(len(row) == len(looked["keys"]) for row in looked["weights"])
            assert all(sum(row) == pytest.approx(1, abs=0.01) for row in looked["weights"])
            is_text = stack == "encoder" and len(about["stacks"]) > 1
            assert sum(query["predicts"] for query in looked["queries"]) == (0 if is_text else tokens)


def test_a_long_text_is_completed_without_its_attention(tmp_path):
    demo = Demo(open_run(made_run(tmp_path, max_position=200)))
    found = demo.complete("word1 " * 140 + "[MASK]", {"max_length": 2})
    assert found["blanks"]
    with pytest.raises(DataError, match=rf"has 14\d tokens .* up to {MOST_TOKENS}"):
        demo.attention(found["completion"], "encoder", 0, None)


def test_a_run_that_cannot_generate_is_refused_before_its_weights_are_loaded(tmp_path, monkeypatch):
    opened = open_run(made_run(tmp_path, "masked_lm"))
    monkeypatch.setattr("megatron_lite.inference.open_run.load_model", None)
    with pytest.raises(
        ConfigError, match=r"trained on masked_lm, which .* give a run of one of blank_infilling, causal"
    ):
        Demo(opened)


# The command


def test_a_port_that_is_taken_is_refused(server, run):
    page = importlib.import_module("scripts.try")
    with pytest.raises(ConfigError, match=r"port \d+ of 127.0.0.1 .*--port"):
        page.main([str(run), "--port", str(server.server_port)])
    with pytest.raises(ConfigError, match=r"--port is 65536; it must be in \[0, 65535\]"):
        page.main([str(run), "--port", "65536"])


def test_the_command_prints_its_address_and_ends_with_ctrl_c(run):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/try.py"), str(run), "--port", "0"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with started:
        port = int(started.stdout.readline().rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/about")
        assert json.loads(connection.getresponse().read())["run"].endswith("step_00000000")
        started.send_signal(signal.SIGINT)  # while a browser holds a connection
        rest, errors = started.communicate(timeout=60)
        connection.close()
    assert (started.returncode, rest, errors) == (130, "", "interrupted\n")
