"""The page in a real browser: no error, no request, no script, nothing wider than a phone, and it prints."""

import base64
import os

import pytest
from support import chromium
from support.training.report_runs import hostile_run, train, write_records

from scripts.report import main


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = chromium.executable()
    if program is None:
        # Continuous integration installs one (.ci/run): there a skipped test would prove nothing.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(chromium.ABSENT)
    with chromium.Browser(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page about a run like any other and one whose every text tries to become markup."""
    directory = tmp_path_factory.mktemp("runs")
    start = {"kind": "start", "step": 500, "time": 1.7e9, "restarts": 1, "processes": 2, "program": "f" * 300}
    steps = [train(step, grad_norm=10.0 ** (step % 4)) for step in range(1, 1000)]
    validation = [
        {"kind": "validation", "step": s, "time": 1.7e9, "loss": 5.0, "perplexity": 9.9} for s in (500, 999)
    ]
    words = [f"word{number}" for number in range(8)]
    item = {"text": "___1___ " + "long " * 80, "originals": words, "answers": words[::-1]}
    fillings = [{"kind": "fillings", "step": 999, "time": 1.7e9, "fillings": [item]}]
    usual = write_records(directory / "usual", [*steps[:500], start, *steps[500:], *validation, *fillings])
    page = directory / "page.html"
    main([str(usual), str(hostile_run(directory)), "--output", str(page)])
    return page


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_errors_requests_or_overflow(browser, report, width, scheme):
    browser.open(report, width, scheme)
    assert {request["request"]["url"] for request in browser.of("Network.requestWillBeSent")} == {
        report.as_uri()
    }
    for kind in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        assert browser.of(kind) == []
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    parts = "[...document.querySelectorAll('figure, svg text, .scroll, p, h1, h2')]"
    outside = f"{parts}.filter(part => part.getBoundingClientRect().right > innerWidth)"
    assert browser.value(f"{outside}.map(e => e.outerHTML.slice(0, 200))") == []
    back = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")


def test_texts_of_a_run_do_nothing(browser, report):
    browser.open(report, 800)
    assert browser.value("document.scripts.length + document.images.length") == 0
    assert browser.value("document.title").startswith("Training report: ") and "taken" in browser.value(
        "document.title"
    )
    assert browser.value("document.querySelectorAll('polyline').length") > 5
    assert (
        browser.value(
            "[...document.querySelectorAll('*')].some(e => [...e.attributes].some(a => /^on/.test(a.name)))"
        )
        is False
    )


def test_the_page_itself_forbids_requests_and_scripts(browser, report):
    """Whatever markup got in, the policy of the page would keep it from the network and from running."""
    browser.open(report, 800)
    directives = ["connect-src", "frame-src", "img-src", "script-src-elem", "style-src-elem"]
    assert browser.policy_violations() == directives
    assert browser.value("document.title") != "taken"
    asked = {event["requestId"]: event["request"]["url"] for event in browser.of("Network.requestWillBeSent")}
    blocked = {
        event["requestId"]
        for event in browser.of("Network.loadingFailed")
        if event.get("blockedReason") == "csp"
    }
    sent = {url for number, url in asked.items() if number not in blocked}
    # The browser shows its own error page, with pictures in data: addresses, in the refused frame.
    assert {url for url in sent if not url.startswith("data:")} == {report.as_uri()}


def test_the_page_prints(browser, report):
    browser.open(report, 800, "dark")
    printed = base64.b64decode(
        browser.ask("Page.printToPDF", printBackground=True, paperWidth=8.3, paperHeight=11.7)["data"]
    )
    assert printed.startswith(b"%PDF") and 2 <= printed.count(b"/Type /Page\n") <= 12
    browser.ask(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.ask("Emulation.setEmulatedMedia", media="")
