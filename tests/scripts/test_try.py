"""scripts/try.py: its page in a real browser, its answers beside those of scripts/generate.py, and what it refuses."""

import contextlib
import http.client
import importlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from support import chromium
from support.hf_runs import tree, write_run, write_vocabulary
from support.project import ROOT
from support.waiting import wait_until

from data_utils.base.errors import ConfigError, DataError
from data_utils.base.settings import merge
from megatron_lite.generate.open_run import open_run
from megatron_lite.generate.server import MOST_BYTES, Server
from megatron_lite.generate.trial import KEPT, MOST_TOKENS, Trial
from scripts import generate

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@contextlib.contextmanager
def served(trial):
    server = Server(0)
    server.trial = trial
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def made_run(directory, objective="blank_infilling", **model):
    settings = merge(tree(write_vocabulary(directory), **model), {"objectives": {objective: 1}})
    write_run(directory / "run", settings)
    return directory / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def trial(run):
    return Trial(open_run(run))


@pytest.fixture(scope="module")
def server(trial):
    with served(trial) as server:
        yield server


def address(server):
    return f"http://127.0.0.1:{server.server_port}"


def generated(monkeypatch, capsys, run, text, **settings):
    """The object that scripts/generate.py prints."""
    options = [part for key, value in settings.items() for part in ("--" + key.replace("_", "-"), str(value))]
    monkeypatch.setattr(
        sys, "argv", ["generate.py", "--checkpoint", str(run), "--text", text, "--json", *options]
    )
    generate.main()
    return json.loads(capsys.readouterr().out)


# The page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = chromium.executable()
    if program is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(chromium.ABSENT)
    with chromium.Browser(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def open_page(browser, server, width=1100, scheme="light"):
    browser.open(address(server), width, scheme)
    wait_until(lambda: browser.value("document.body.dataset.ready === 'true'"))


def press(browser, key, text=""):
    """A key, as a person presses it."""
    codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40, "ArrowUp": 38, "Home": 36}
    fields = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
    browser.ask("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
    browser.ask("Input.dispatchKeyEvent", type="keyUp", **fields)


def tab_to(browser, id):
    for _ in range(40):
        if browser.value("document.activeElement.id") == id:
            return
        press(browser, "Tab")
    raise AssertionError(f"{id} cannot be reached by Tab")


def write(browser, text):
    """Replace the text by typing, and press Enter."""
    tab_to(browser, "text")
    browser.value("document.activeElement.select()")
    browser.ask("Input.insertText", text=text)
    before = browser.value("asked")
    press(browser, "Enter", "\r")
    wait_until(
        lambda: browser.value("asked") > before and browser.value("!at('send').hasAttribute('aria-busy')")
    )


def texts(browser, selector):
    return browser.value(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")


def assert_asked_nobody_else(browser, server):
    """No request but to the server, no error, nothing in the console."""
    asked = {event["request"]["url"] for event in browser.of("Network.requestWillBeSent")}
    own = {f"{address(server)}/{path}" for path in ("", "about", "answer", "attention")} | {"data:,"}
    assert asked and asked <= own
    for kind in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        assert browser.of(kind) == []


def shown(trial, row, **asked):
    """The words that tell a row of attention: the first one, and how much it takes."""
    found = trial.attention(**asked)
    weights = found["weights"][row]
    most = max(range(len(weights)), key=weights.__getitem__)
    share = 100 * weights[most]
    return (
        f"looks at {found['keys'][most]} {share:.0f} %"
        if share >= 9.95
        else f"looks at {found['keys'][most]} {share:.1f} %"
    )


def test_a_sentence_is_answered_by_keyboard_alone(browser, server, trial, run, monkeypatch, capsys):
    """As scripts/generate.py answers it; then token by token, layer by layer."""
    open_page(browser, server)
    text = "word1 [MASK] word2 , word3 [MASK] ."
    write(browser, text)
    settings = {"strategy": "beam", "length_penalty": 0.0, "max_length": 16}
    expected = generated(monkeypatch, capsys, run, text, **settings)
    assert browser.value("at('filled').textContent") == expected["filled"]
    assert texts(browser, "#filled mark") == [span.strip() for span in expected["spans"]]
    listed = texts(browser, "#blanks > .two > table tbody tr")
    assert len(listed) == 8 and listed[0].startswith(expected["spans"][0]) and listed[0].endswith(" %")
    wait_until(lambda: browser.value("at('looks').textContent") != "")
    number = browser.value("answer.answer")
    found = trial.attention(number, "encoder", 1, None)
    rows = [row for row, query in enumerate(found["queries"]) if query["predicts"]]

    def told(row, **asked):
        words = shown(trial, row, answer=number, part="encoder", **asked)
        wait_until(lambda: words in browser.value("at('looks').textContent"), 20, words)
        assert browser.value("at('query').value") == str(row)

    told(rows[0], layer=1, head=None)
    press(browser, "Tab")
    while not browser.value("document.activeElement.type === 'radio'"):
        press(browser, "Tab")
    press(browser, "ArrowRight")
    assert browser.value("document.querySelectorAll('.others:not([hidden]) tbody tr').length") == 5
    told(rows[1], layer=1, head=None)
    tab_to(browser, "layer")
    press(browser, "ArrowUp")
    told(rows[1], layer=0, head=None)
    tab_to(browser, "head")
    press(browser, "ArrowDown")
    told(rows[1], layer=0, head=0)
    tab_to(browser, "query")
    press(browser, "Home")
    told(0, layer=0, head=0)
    count = browser.value("document.querySelectorAll('#picture rect:not(.row, .line)').length")
    weights = trial.attention(number, "encoder", 0, 0)["weights"]
    assert count == sum(weight >= 0.004 for row in weights for weight in row)
    assert_asked_nobody_else(browser, server)
    assert browser.of("Log.entryAdded") == []


def test_a_mistake_is_one_line_in_the_page(browser, server):
    open_page(browser, server)
    write(browser, "word1 without a blank")
    assert browser.value("at('error').textContent").startswith(
        "the text has no blank; mark at least one with [MASK]"
    )
    assert browser.value("at('result').hidden") is True
    browser.value("at('set-max_length').value = 0")
    write(browser, "word1 [MASK]")
    assert browser.value("at('error').textContent").startswith(
        "generation.max_length is 0; it must be at least 1"
    )
    browser.value("at('set-max_length').value = 3")
    write(browser, "word1 " * 40 + "[MASK]" + " word1" * MOST_BYTES)
    assert "bytes, more than 65,536; shorten the text." in browser.value("at('error').textContent")
    write(browser, "word1 [MASK]")
    assert browser.value("at('error').textContent") == "" and browser.value("at('result').hidden") is False


def test_hostile_text_stays_text(browser, tmp_path):
    """A run that writes on a text shows the text as it was typed."""
    with served(Trial(open_run(made_run(tmp_path, "causal")))) as server:
        open_page(browser, server)
        write(browser, HOSTILE)
        assert browser.value("at('filled').textContent").startswith(HOSTILE)
        assert texts(browser, "#part option") == ["encoder: the text reads itself"]
        assert_harmless(browser, server)


def assert_harmless(browser, server):
    assert browser.value("document.images.length") == 0 and browser.value("document.scripts.length") == 1
    assert "taken" not in browser.value("document.title")
    assert browser.value(
        "[...document.querySelectorAll('*')].every(e => [...e.attributes].every(a => !/^on/.test(a.name)))"
    )
    assert_asked_nobody_else(browser, server)


class HostileTrial:
    """Every text that the page gets from its server tries to become markup."""

    def __init__(self, trial):
        self.trial = trial

    def about(self):
        return self._hostile(self.trial.about())

    def answer(self, text, settings):
        if text == "refused":
            raise DataError(HOSTILE)
        return self._hostile(self.trial.answer("word1 [MASK]", {}))

    def attention(self, **asked):
        return self._hostile(self.trial.attention(**asked))

    def _hostile(self, found, key=""):
        if isinstance(found, dict):
            return {key: self._hostile(value, key) for key, value in found.items()}
        if isinstance(found, list):
            return [self._hostile(value, key) for value in found]
        return (
            HOSTILE
            if isinstance(found, str) and key not in ("name", "kind", "only_for", "choices", "value")
            else found
        )


def test_hostile_words_of_a_model_stay_text(browser, trial):
    with served(HostileTrial(trial)) as server:
        open_page(browser, server)
        write(browser, "word1 [MASK]")
        wait_until(lambda: browser.value("at('looks').textContent") != "")
        for selector in (
            "#run",
            "#filled mark",
            "#blanks td + td, #blanks tbody th",
            "#query option",
            "#strip span",
        ):
            assert "<img src=x" in texts(browser, selector)[0], selector
        write(browser, "refused")
        assert browser.value("at('error').textContent") == HOSTILE
        assert_harmless(browser, server)


def test_the_policy_forbids_other_scripts_and_hosts(browser, server):
    """Whatever markup got in, it could neither run nor tell anyone."""
    open_page(browser, server)
    refused = browser.value("""new Promise(done => {
        const refused = [];
        document.addEventListener('securitypolicyviolation', event => {
            refused.push(event.effectiveDirective);
            if (refused.length == 5) done(refused.sort());
        });
        const script = document.createElement('script');
        script.textContent = "document.title = 'taken'";
        const style = document.createElement('style');
        style.textContent = 'body { display: none }';
        const image = new Image();
        image.src = 'http://127.0.0.1:9/x';
        const frame = document.createElement('iframe');
        frame.src = 'http://127.0.0.1:9/y';
        document.body.append(script, style, image, frame);
        fetch('http://127.0.0.1:9/').catch(() => 0);
    })""")
    assert refused == ["connect-src", "frame-src", "img-src", "script-src-elem", "style-src-elem"]
    assert browser.value("document.title") == "Try a model"


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_names_its_controls(browser, server, width, scheme):
    open_page(browser, server, width, scheme)
    write(browser, "word1 [MASK] " + "word2 " * 30)
    wait_until(lambda: browser.value("at('looks').textContent") != "")
    browser.value("document.querySelector('details').open = true")
    assert browser.value("document.documentElement.scrollWidth") <= width
    parts = "[...document.querySelectorAll('p, h1, h2, table, select, input, button, textarea, .scroll')]"
    outside = f"{parts}.filter(part => part.getBoundingClientRect().right > innerWidth)"
    assert browser.value(f"{outside}.map(e => e.outerHTML.slice(0, 200))") == []
    tree = browser.ask("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in tree if node.get("role", {}).get("value") in
                ("button", "textbox", "combobox", "spinbutton", "radio", "DisclosureTriangle")]  # fmt: skip
    assert len(controls) > 10 and all(node["name"]["value"].strip() for node in controls)
    back = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")


# The server


def answered(server, method, path, body=None, **headers):
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


QUESTION = json.dumps({"text": "word1 [MASK]", "settings": {"max_length": 2}}).encode()


def test_questions_of_our_page_are_answered(server):
    own = f"127.0.0.1:{server.server_port}"
    for headers in ({}, {"Origin": f"http://{own}"}, {"Host": own.replace("127.0.0.1", "localhost")}):
        status, found = answered(server, "POST", "/answer", QUESTION, **headers)
        assert status == 200 and len(found["blanks"]) == 1
    assert answered(server, "GET", "/")[1].startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        ({"Host": "evil.example"}, QUESTION, 403, "open this address"),
        ({"Host": "127.0.0.1"}, QUESTION, 403, "open this address"),
        ({"Host": None}, QUESTION, 403, "open this address"),
        ({"Origin": "http://evil.example"}, QUESTION, 403, "open this address"),
        ({"Origin": "null"}, QUESTION, 403, "open this address"),
        ({"Content-Type": "text/plain"}, QUESTION, 415, "send Content-Type: application/json"),
        ({}, b"{", 400, "send JSON in UTF-8"),
        ({}, b"\xff", 400, "send JSON in UTF-8"),
        ({}, b"[" * 60000, 400, "send JSON in UTF-8"),
        ({}, b"[]", 400, "has text, settings"),
        ({}, b'{"text": 1, "settings": {}}', 400, "has text, settings"),
        ({}, b'{"text": "a [MASK]", "settings": {"beams": 1}}', 400, "unknown setting"),
        ({}, b'{"text": "a [MASK]", "settings": {"top_k": 3}}', 400, "strategy is greedy, which does not use it"),
        ({}, b" " * (MOST_BYTES + 1), 413, "the question has 65,537 bytes, more than 65,536; shorten the text."),
        ({"Content-Length": None}, None, 411, "send Content-Length"),
        ({"Content-Length": "-1"}, None, 411, "send Content-Length"),
        ({"Transfer-Encoding": "chunked"}, b"0\r\n\r\n", 411, "send Content-Length"),
    ],
)  # fmt: skip
def test_other_questions_are_refused_in_one_line(server, headers, body, status, words):
    found, reply = answered(server, "POST", "/answer", body, **headers)
    assert found == status and words in reply["error"] and "\n" not in reply["error"]


def test_other_paths_and_methods_are_refused(server):
    assert answered(server, "GET", "/../page.html")[0] == 404
    assert answered(server, "POST", "/other", QUESTION)[0] == 404
    assert answered(server, "GET", "/", Host="evil.example")[0] == 403
    assert answered(server, "PUT", "/answer", QUESTION)[0] == 501


def test_an_answer_that_fails_is_told_and_the_next_one_is_given(server, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setattr(server.trial, "answer", lambda **question: 1 // 0)
        status, found = answered(server, "POST", "/answer", QUESTION)
    assert status == 500 and found["error"] == "no answer, because of ZeroDivisionError: see the terminal."
    assert "Traceback" in capsys.readouterr().err
    assert answered(server, "POST", "/answer", QUESTION)[0] == 200


def test_attention_is_refused_where_there_is_none(trial):
    number = trial.answer("word1 [MASK]", {"max_length": 2})["answer"]
    for asked in (("cross", 0, None), ("encoder", 2, None), ("encoder", -1, 0), ("encoder", 0, 4)):
        with pytest.raises(DataError, match=r"there is no head .* in layer"):
            trial.attention(number, *asked)
    for _ in range(KEPT):
        trial.answer("word1 [MASK]", {"max_length": 1})
    with pytest.raises(DataError, match="this answer is no longer kept; ask for it again"):
        trial.attention(number, "encoder", 0, None)


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
def test_answers_are_those_of_generate(objective, tmp_path, monkeypatch, capsys):
    text, model = TEXTS[objective]
    settings = merge(tree(write_vocabulary(tmp_path), **model), {"objectives": {objective: 1}})
    if objective == "unilm":
        settings["unilm"] = {"next_sentence": False}
    write_run(tmp_path / "run", settings)
    trial = Trial(open_run(tmp_path / "run"))
    about = trial.about()
    assert about["fills"] == (objective == "blank_infilling") == bool(about["blanks"])
    first = {each["name"]: each["value"] for each in about["settings"] if each["only_for"] is None}
    assert trial.answer(about["example"], first)["parts"]
    for settings in SETTINGS:
        found = trial.answer(text, settings)
        expected = generated(monkeypatch, capsys, tmp_path / "run", text, **settings)
        if objective == "blank_infilling":
            assert found["parts"][1::2] == expected["spans"] and "".join(found["parts"]) == expected["filled"]
        else:
            assert found["parts"] == [text, expected["answer"]]
        for blank in found["blanks"]:
            product = 1.0
            for token in blank["tokens"]:
                product *= token["p"]
            assert len(blank["answers"]) in (settings.get("num_beams", 1), 2 * ("num_beams" in settings))
            assert blank["answers"][0]["p"] == pytest.approx(product, rel=1e-3)
    tokens = sum(len(blank["tokens"]) for blank in found["blanks"])
    for part, layers in about["parts"].items():
        for layer in range(layers):
            looked = trial.attention(found["answer"], part, layer, 1)
            assert len(looked["weights"]) == len(looked["queries"])
            assert all(len(row) == len(looked["keys"]) for row in looked["weights"])
            assert all(sum(row) == pytest.approx(1, abs=0.01) for row in looked["weights"])
            is_text = part == "encoder" and len(about["parts"]) > 1
            assert sum(query["predicts"] for query in looked["queries"]) == (0 if is_text else tokens)


def test_a_long_text_is_answered_without_its_attention(tmp_path):
    trial = Trial(open_run(made_run(tmp_path, max_position=200)))
    found = trial.answer("word1 " * 140 + "[MASK]", {"max_length": 2})
    assert found["blanks"]
    with pytest.raises(
        DataError, match=rf"has 14\d tokens with its answers, .* for up to {MOST_TOKENS}; shorten it"
    ):
        trial.attention(found["answer"], "encoder", 0, None)


def test_a_run_that_does_neither_is_refused_before_its_weights_are_loaded(tmp_path, monkeypatch):
    opened = open_run(made_run(tmp_path, "masked_lm"))
    monkeypatch.setattr("megatron_lite.generate.open_run.load_model", None)
    with pytest.raises(
        ConfigError, match=r"trained on masked_lm, which .* give a run of one of blank_infilling, causal"
    ):
        Trial(opened)


# The command


def test_a_port_that_is_taken_is_refused(server, run):
    page = importlib.import_module("scripts.try")
    with pytest.raises(
        ConfigError, match=r"port \d+ of 127.0.0.1 cannot be had .*; give another with --port, or 0"
    ):
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
