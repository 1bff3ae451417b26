"""scripts/convert_checkpoint.py: what the commands print, and a mistake in one line."""

import sys

import pytest
import yaml
from support.hf.hf_directories import write_model_parallel
from support.hf.hf_runs import tree

from data_utils.common.errors import CheckpointError, ConfigError, UserError
from megatron_lite.inference.open_run import load_run
from scripts import convert_checkpoint

# Command line


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, arguments)])
    return convert_checkpoint.main()


def test_the_commands_print_their_proof(run, vocabulary, exports, tmp_path, monkeypatch, capsys):
    command(
        monkeypatch,
        "export",
        "--checkpoint",
        run,
        "--output",
        tmp_path / "export",
        "--max-shard-size",
        "30KB",
    )
    assert "proof: largest logit difference" in capsys.readouterr().out
    command(
        monkeypatch,
        "import",
        "--input",
        tmp_path / "export",
        "--output",
        tmp_path / "run",
        "training.steps=9",
    )
    assert "argmax agreement 100.00%" in capsys.readouterr().out
    assert load_run(tmp_path / "run").config.training.steps == 9
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree(vocabulary)))
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2)
    arguments = ("--input", source, "--output", tmp_path / "run2", "--config", config, "--no-verify")
    command(monkeypatch, "import-megatron", *arguments)
    assert "not verified" in capsys.readouterr().out
    with pytest.raises(UserError, match="--max-shard-size is 'lots'"):
        command(
            monkeypatch, "export", "--checkpoint", run, "--output", tmp_path / "x", "--max-shard-size", "lots"
        )


ADAPTER = {"--no-verify": [], "--tolerance": ["0.1"], "--copy-eop-to-gmask": []}
EXPORT = {"--no-verify": [], "--tolerance": ["0.1"], "--layout": ["released"], "--max-shard-size": ["1GB"]}


def test_options_without_effect_are_refused_all_at_once(run, tmp_path, monkeypatch):
    """Of an adapter, of which no logits are compared; and of a comparison that is not made."""
    adapter, output = tmp_path / "adapter", tmp_path / "out"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    to, of = ["export", "--checkpoint", run, "--output", output], ["--input", adapter, "--output", output]
    for given, options in (([*to, "--adapter"], EXPORT), (["import", *of, "--base", run], ADAPTER)):
        with pytest.raises(ConfigError, match=r"an adapter|--adapter") as refused:
            command(
                monkeypatch, *given, *(word for name, values in options.items() for word in (name, *values))
            )
        removed = str(refused.value).rpartition("remove ")[2]
        assert {each.split()[0].strip(".") for each in removed.split(", ")} == options.keys()
    with pytest.raises(ConfigError, match=r"--tolerance is 0\.1, but --no-verify"):
        command(monkeypatch, *to, "--no-verify", "--tolerance", "0.1")
    with pytest.raises(CheckpointError, match=r"--decoder-tokenizer is .* one tokenizer"):
        command(monkeypatch, *to, "--decoder-tokenizer", adapter)
    assert not output.exists()


def test_a_mistake_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    absent = str(tmp_path / "absent")
    arguments = ["export", "--checkpoint", absent, "--output", str(tmp_path / "x")]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        convert_checkpoint.command()
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert "absent does not exist" in printed.err and not list(tmp_path.iterdir())
