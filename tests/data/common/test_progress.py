"""Bars of progress on terminals of every width; the terminal here is a pseudo-terminal."""

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from data_utils.common.progress import progress_bar


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 60), (40, 0), (24, 200)])
@pytest.mark.parametrize("options", [{}, {"dynamic_ncols": True}])
def test_a_terminal_shows_the_bar(monkeypatch, rows, columns, options):
    """Also one that does not say its width, as under `script` and in `docker run -t`."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress_bar(total=4, desc="tokenize", mininterval=0, **options) as bar:
            bar.update(4)
        terminal.write("end")
        terminal.flush()
        shown = ""
        while not shown.endswith("end"):
            shown += os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert "tokenize: 100%" in shown and "4/4" in shown
    assert max(map(len, shown.replace("\r", "\n").split("\n"))) <= (columns or 80)


def test_a_file_has_none(monkeypatch, tmp_path):
    with open(tmp_path / "log", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert list(progress_bar([1, 2])) == [1, 2]
    assert (tmp_path / "log").read_text() == ""
