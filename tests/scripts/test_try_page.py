"""The page of scripts/try.py in a real browser: typed at, read, attacked, and looked at in the width of a phone."""

import os

import pytest
from support import chromium
from support.demos import address, generated, made_run, served
from support.waiting import wait_until

from data_utils.common.errors import DataError
from megatron_lite.inference.demo import Demo
from megatron_lite.inference.open_run import open_run
from megatron_lite.inference.server import MOST_BYTES

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


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
    before = browser.value("completionRequests")
    press(browser, "Enter", "\r")
    wait_until(
        lambda: (
            browser.value("completionRequests") > before
            and browser.value("!at('send').hasAttribute('aria-busy')")
        )
    )


def texts(browser, selector):
    return browser.value(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")


def assert_asked_nobody_else(browser, server):
    """No request but to the server, no error, nothing in the console."""
    asked = {event["request"]["url"] for event in browser.of("Network.requestWillBeSent")}
    own = {f"{address(server)}/{path}" for path in ("", "about", "complete", "attention")} | {"data:,"}
    assert asked and asked <= own
    for kind in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        assert browser.of(kind) == []


def shown(demo, row, **asked):
    """The words that tell a row of attention: the first one, and how much it takes."""
    found = demo.attention(**asked)
    weights = found["weights"][row]
    most = max(range(len(weights)), key=weights.__getitem__)
    share = 100 * weights[most]
    return (
        f"attends to {found['keys'][most]} {share:.0f} %"
        if share >= 9.95
        else f"attends to {found['keys'][most]} {share:.1f} %"
    )


def test_a_sentence_is_completed_by_keyboard_alone(browser, server, demo, run, monkeypatch, capsys):
    """As scripts/generate.py fills it; then token by token, layer by layer."""
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
    number = browser.value("completion.completion")
    found = demo.attention(number, "encoder", 1, None)
    rows = [row for row, query in enumerate(found["queries"]) if query["predicts"]]

    def told(row, **asked):
        words = shown(demo, row, completion=number, stack="encoder", **asked)
        wait_until(lambda: words in browser.value("at('looks').textContent"), 20, words)
        assert browser.value("at('query').value") == str(row)

    told(rows[0], layer=1, head=None)
    press(browser, "Tab")
    while not browser.value("document.activeElement.type === 'radio'"):
        press(browser, "Tab")
    press(browser, "ArrowRight")
    assert browser.value("document.querySelectorAll('.alternatives:not([hidden]) tbody tr').length") == 5
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
    weights = demo.attention(number, "encoder", 0, 0)["weights"]
    assert count == sum(weight >= 0.004 for row in weights for weight in row)
    assert_asked_nobody_else(browser, server)
    assert browser.of("Log.entryAdded") == []


def test_a_mistake_is_one_line_in_the_page(browser, server):
    open_page(browser, server)
    write(browser, "word1 without a blank")
    assert browser.value("at('error').textContent").startswith("the text has no blank")
    assert browser.value("at('result').hidden") is True
    browser.value("at('set-max_length').value = 0")
    write(browser, "word1 [MASK]")
    assert browser.value("at('error').textContent").startswith(
        "generation.max_length is 0; it must be at least 1"
    )
    browser.value("at('set-max_length').value = 3")
    write(browser, "word1 " * 40 + "[MASK]" + " word1" * MOST_BYTES)
    assert "bytes, more than 65,536; shorten the text." in browser.value("at('error').textContent")
    before = browser.value("completionRequests")
    browser.value("at('text').value = 'a'.repeat(12e6)")
    press(browser, "Enter", "\r")
    wait_until(
        lambda: (
            browser.value("completionRequests") > before
            and browser.value("!at('send').hasAttribute('aria-busy')")
        )
    )
    assert browser.value("at('error').textContent").startswith("the request has 12,000,")
    write(browser, "word1 [MASK]")
    assert browser.value("at('error').textContent") == "" and browser.value("at('result').hidden") is False


def test_hostile_text_stays_text(browser, tmp_path):
    """A run that writes on a text shows the text as it was typed."""
    with served(Demo(open_run(made_run(tmp_path, "causal")))) as server:
        open_page(browser, server)
        write(browser, HOSTILE)
        assert browser.value("at('filled').textContent").startswith(HOSTILE)
        assert texts(browser, "#stack option") == ["encoder: the text attends to itself"]
        assert_harmless(browser, server)


def assert_harmless(browser, server):
    assert browser.value("document.images.length") == 0 and browser.value("document.scripts.length") == 1
    assert "taken" not in browser.value("document.title")
    assert browser.value(
        "[...document.querySelectorAll('*')].every(e => [...e.attributes].every(a => !/^on/.test(a.name)))"
    )
    assert_asked_nobody_else(browser, server)


class HostileDemo:
    """Every text that the page gets from its server tries to become markup."""

    def __init__(self, demo):
        self.demo = demo

    def about(self):
        return self._hostile(self.demo.about())

    def complete(self, text, settings):
        if text == "refused":
            raise DataError(HOSTILE)
        return self._hostile(self.demo.complete("word1 [MASK]", {}))

    def attention(self, **asked):
        return self._hostile(self.demo.attention(**asked))

    def _hostile(self, found, key=""):
        if isinstance(found, dict):
            return {key: self._hostile(value, key) for key, value in found.items()}
        if isinstance(found, list):
            return [self._hostile(value, key) for value in found]
        return (
            HOSTILE
            if isinstance(found, str) and key not in ("name", "type", "only_for", "choices", "value")
            else found
        )


def test_hostile_words_of_a_model_stay_text(browser, demo):
    with served(HostileDemo(demo)) as server:
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
    directives = ["connect-src", "frame-src", "img-src", "script-src-elem", "style-src-elem"]
    assert browser.policy_violations() == directives
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
