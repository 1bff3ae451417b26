"""A headless Chromium, driven through two pipes by the DevTools protocol. No port is opened."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ABSENT = "there is no Chromium; install it (Debian: apt-get install --no-install-recommends chromium)"
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--remote-debugging-pipe"),
)
ANSWER_SECONDS = 60.0


def executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser process with one page. Use it as a context manager."""

    def __init__(self, program: str, user_data: Path):
        """Args: user_data: a new, empty directory."""
        commands, self._write = _pipe()
        self._read, answers = _pipe()
        actions = [(os.POSIX_SPAWN_DUP2, commands, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
        actions += [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        arguments = [program, *OPTIONS, f"--user-data-dir={user_data}", "about:blank"]
        environment = {**os.environ, "HOME": str(user_data)}
        self._process = os.posix_spawn(program, arguments, environment, file_actions=actions, setpgroup=0)
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self.session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        (page,) = (t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command. What happens meanwhile goes to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)
        raise AssertionError(f"Chromium does not answer {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            while b"\0" in self._buffer:
                text, _, self._buffer = self._buffer.partition(b"\0")
                yield json.loads(text)
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                return
            self._buffer += data

    def open(self, page: Path | str, width: int, scheme: str = "light") -> None:
        """Load a file or an address at a width in pixels, and wait until it is shown."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self.of("Page.loadEventFired"):
            self.ask("Runtime.evaluate", expression="0")

    def of(self, method: str) -> list[dict[str, Any]]:
        """The parameters of the events of a kind since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def policy_violations(self) -> list[str]:
        """The directives of the page's content security policy that refuse a script, a style, an image, a frame and a
        request, sorted; waits for all five.
        """
        return self.value("""new Promise(done => {
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

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression, within the page; promises are awaited."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


def _pipe() -> tuple[int, int]:
    """Read and write end, away from the numbers that the browser expects its own at."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
