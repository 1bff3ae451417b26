"""The progress bar: on a terminal, in no file."""

import io
import logging
import sys

from megatron_lite.metrics.progress_bar import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, wanted=True):
    """What a bar over ten steps writes to stderr, and a log line within it to the console."""
    console = io.StringIO()
    handler = logging.StreamHandler(console)
    logger = logging.getLogger()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(sys, "stdout", console)
    handler.setStream(sys.stdout)
    with progress_bar(wanted, 4, 10) as advance:
        for step in range(5, 11):
            advance(step)
        logger.warning("a line")
    assert console.getvalue() == "a line\n"
    return stream.getvalue()


def test_a_terminal_shows_the_steps(monkeypatch):
    text = shown(monkeypatch, Terminal())
    assert "4/10" in text and "10/10" in text


def test_a_file_gets_no_bar(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == ""


def test_no_bar_unless_asked_for(monkeypatch):
    assert shown(monkeypatch, Terminal(), wanted=False) == ""
