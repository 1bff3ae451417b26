"""Small runs behind the server of the demo page, and what scripts/generate.py prints for the same texts."""

import contextlib
import json
import sys
import threading

from data_utils.common.settings import merge
from megatron_lite.inference.server import Server
from scripts import generate
from support.hf.hf_runs import tree, write_run, write_vocabulary


@contextlib.contextmanager
def served(demo):
    server = Server(0)
    server.demo = demo
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
