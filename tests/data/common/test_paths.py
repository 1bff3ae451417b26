"""`~` is expanded wherever a path is given, `$` is refused: every setting and every argument of a command is asked."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import ROOT

from data_utils.common.errors import ArgumentParser, ConfigError, expanded_path, local_path
from data_utils.common.settings import build
from data_utils.common.settings_listed import describe, path_settings
from megatron_lite.config.tree import Config

# Words of a setting's key or help that make it a path.
PATH = re.compile(r"director|\bpath\b|\bprefix\b|\bfiles?\b|\brun or\b|_from\b|\bstore\b", re.I)
NO_PATHS = {  # what else has such a word: a number, a switch, a name
    "contrastive.form",
    "fill_in_middle.prefix_token",
    *("tokenizer.kind", "decoder_tokenizer.kind", "tokenizer.added_tokens", "decoder_tokenizer.added_tokens"),
    *("model.system", "decoder.system", "checkpoint.resume", "checkpoint.initialize", "run.tensorboard"),
    *("timeouts.heartbeat_seconds", "trackers.wandb.mode", "trackers.wandb.name", "trackers.mlflow.name"),
    *(
        "profiler.first_step",
        "task.reader",
        "task.name",
        "task.labels",
        "deepspeed",
        "objectives",
        "data.train",
        "data.validation",
        "tasks",
    ),
    "finetune.evaluations_per_epoch",
}


def test_every_setting_that_sounds_like_a_path_is_one():
    lines = [line for line in describe(Config) if line]
    known = set(path_settings(Config))
    for line, meaning in zip(lines[::2], lines[1::2], strict=True):
        key = line.split()[0]
        sounds = PATH.search(f"{key} {meaning}") and key not in NO_PATHS
        assert bool(sounds) <= (key in known), f"{key}: {meaning.strip()}"
        assert (key in known) == ("path" in line.partition("(")[2].split(",")[0]), line


def test_each_of_them_expands_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    seen = []
    for key in path_settings(Config):
        section = Config
        *above, name = key.replace("[]", "").split(".")
        for part in above:
            section = _section(section, part)
        field = next(field for field in section.__dataclass_fields__.values() if field.name == name)
        is_list = "tuple" in str(field.type)
        required = {
            own.name: (own.metadata["one_of"] or ("x",))[0]
            for own in dataclasses.fields(section)
            if own.default is own.default_factory  # both MISSING
        }
        given = ["~/a b", "c"] if is_list else "~/a b"
        made = getattr(build(section, {**required, name: given}), name)
        assert made == (("/home/someone/a b", "c") if is_list else "/home/someone/a b"), key
        with pytest.raises(
            ConfigError, match=rf"{name}(\[0\])? is '\$HOME/x', but \$ is not expanded; write"
        ):
            build(section, {**required, name: ["$HOME/x"] if is_list else "$HOME/x"})
        seen.append(key)
    assert {"run.directory", "data.train[].prefix", "checkpoint.initialize_from", "task.validation"} <= set(
        seen
    )


def _section(section, name):
    import typing

    from data_utils.common.settings import keys_of

    hint, _ = keys_of(section)[name]
    return next(inner for inner in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(inner))


def test_nobodys_home_is_refused_and_a_name_can_begin_with_a_tilde():
    with pytest.raises(
        ConfigError, match=r"run.directory is '~no_such_user/x', but this user does not exist"
    ):
        expanded_path("~no_such_user/x", "run.directory")
    assert expanded_path("./~x") == "./~x" and expanded_path("a~b") == "a~b"


def test_a_url_is_no_path_of_this_machine(tmp_path):
    """It would become a directory with its name, and the output would be lost with the machine."""
    parser = ArgumentParser()
    parser.add_argument("--output", type=Path)
    for parse in (
        lambda url: parser.parse_args(["--output", url]),
        lambda url: build(Config, {"run": {"directory": url}}),
    ):
        with pytest.raises(ConfigError, match=r"is 's3://bucket/x', a URL; give a path of this machine"):
            parse("s3://bucket/x?sig=CANARY")
    assert parser.parse_args(["--output", str(tmp_path)]).output == tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["scripts/dataset.py", "vectors", "x", "--output"],
        ["scripts/dataset.py", "stats", "x", "--histogram"],
        ["scripts/inspect_batch.py", "--png"],
        ["scripts/profile_step.py", "--json"],
        ["-m", "scripts.quickstart.collect_corpus", "--output"],
    ],
)
def test_a_url_is_no_output_of_a_command(command):
    done = subprocess.run(
        [sys.executable, *command, "s3://bucket/x"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "a URL; give a path of this machine" in done.stderr, done.stderr


COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in [ROOT / "pretrain_glm.py", *sorted((ROOT / "scripts").rglob("*.py"))]
    if "ArgumentParser(" in path.read_text(encoding="utf-8")
]
ARGUMENT_NO_PATHS = {
    "--push-to-hub",  # a name of the hub
    "--text",
    "--text-key",
    "--text-split",
    "--tokenizer-kind",
    "overrides",
    "--objective",
    "--kind",
    "--max-shard-size",
    "--gpu",
}


OUTPUTS = re.compile(r"--(output|json|plot|png|histogram|trace|predictions|packages)")
PREFIXES = {"scripts.dataset", "scripts.preprocess_data"}  # whose --output is refused when it is opened


class Parsed(Exception):
    """Ends a command when it has made its parser."""


def parsers(command, monkeypatch):
    found = []

    def stop(self, *args, **kwargs):
        found.append(self)
        raise Parsed

    for name in ("parse_args", "parse_known_args", "parse_intermixed_args", "parse_known_intermixed_args"):
        monkeypatch.setattr(ArgumentParser, name, stop)
    module = importlib.import_module(command)
    entry = getattr(module, "parse_arguments", module.main)
    with pytest.raises(Parsed):
        entry(*[None] * entry.__code__.co_argcount)
    for action in found[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_of_commands(command, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for parser in parsers(command, monkeypatch):
        for action in parser._actions:
            name = (action.option_strings or [action.dest])[0]
            words = f"{name} {action.dest} {action.metavar} {action.help}"
            types = (None, str, Path, expanded_path, local_path)
            is_text = action.nargs != 0 and action.type in types and not action.choices
            sounds = re.search(r"\bFILE\b|\bDIR|\bPATH\b|director|\bfiles?\b|prefix|\brun\b", words)
            if (
                not is_text
                or name in ARGUMENT_NO_PATHS
                or not (sounds or action.type in (Path, expanded_path, local_path))
            ):
                continue
            assert str(parser._get_value(action, "~/x")) == "/home/someone/x", f"{name}: {action.help}"
            with pytest.raises(ConfigError, match=r"\$ is not expanded"):
                parser._get_value(action, "$HOME/x")
            if OUTPUTS.fullmatch(name) and not (name == "--output" and command in PREFIXES):
                with pytest.raises(ConfigError, match="a URL; give a path of this machine"):
                    parser._get_value(action, "s3://bucket/x")
