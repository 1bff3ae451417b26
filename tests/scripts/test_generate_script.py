"""scripts/generate.py on a run: from any directory, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import pytest
import yaml
from support.commands import forked
from support.hf.hf_runs import tree, write_run, write_vocabulary
from support.project import ROOT

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.settings import merge
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.decoders import TextDecoder, make_decoder
from megatron_lite.inference.filling import BlankFiller, GenerationConfig
from megatron_lite.inference.open_run import load_run
from scripts import generate as generate_script


def generate(run, *arguments, directory=ROOT, text="word1 [MASK] word2"):
    return forked("scripts/generate.py", "--checkpoint", run, "--text", text, *arguments, cwd=directory)


def assert_refused(done, message):
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    write_run(directory / "run", tree(write_vocabulary(directory)))
    return directory / "run"


def test_a_run_trained_with_a_relative_tokenizer_opens_from_elsewhere(settings, corpus, tmp_path):
    shutil.copy(corpus / "vocab.txt", tmp_path)
    settings = merge(settings, {"tokenizer": {"path": "vocab.txt"}, "training": {"stop_after_step": 1}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    trained = forked("pretrain_glm.py", "--config", "config.yaml", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    (tmp_path / "elsewhere").mkdir()
    done = generate(tmp_path / "run", "--max-length", 2, directory=tmp_path / "elsewhere")
    assert done.returncode == 0 and done.stdout.startswith("word1["), done.stderr

    (tmp_path / "vocab.txt").rename(tmp_path / "moved.txt")
    lost = generate(tmp_path / "run", directory=tmp_path)
    assert_refused(lost, f"{tmp_path}/vocab.txt, does not exist; give its path with --tokenizer")
    found = generate(tmp_path / "run", "--tokenizer", "moved.txt", "--max-length", 2, directory=tmp_path)
    assert found.stdout == done.stdout


def test_an_import_with_relative_paths_opens_from_elsewhere(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export_run(run, tmp_path / "export", ExportOptions(verify=False))
    import_directory(tmp_path / "export", tmp_path.relative_to(tmp_path) / "back", {}, verify=False)
    (tmp_path / "elsewhere").mkdir()
    done = generate(tmp_path / "back", "--max-length", 2, directory=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr


def test_an_empty_line_of_the_input_is_named_and_not_left_out(run, tmp_path):
    """Answers would no longer stand in the lines of their texts."""
    (tmp_path / "in.txt").write_text("word1 [MASK]\n\nword2 [MASK]\n")
    done = forked("scripts/generate.py", "--checkpoint", run, "--input", tmp_path / "in.txt")
    assert_refused(done, "line 2 is empty")


def test_a_text_beyond_the_positions_is_refused_before_an_answer_is_printed(run):
    done = generate(run, "--text", "word1 " * 70 + "[MASK]")
    assert_refused(done, "positions for 65; shorten")


def test_more_beams_than_memory_are_refused(run, monkeypatch):
    opened = load_run(run)
    config = GenerationConfig(strategy="beam", num_beams=8)
    filler = BlankFiller(opened.model, opened.tokenizer.special, config)
    monkeypatch.setattr("megatron_lite.inference.memory.MAX_BYTES", 3 * 4 * (2 * 2 * 32 * (4 + 64) + 4 * 72))
    with pytest.raises(DataError, match=r"num_beams \(8\) need .* set it to 3 or less"):
        filler.fill([2, 10, 4, 3])
    three = dataclasses.replace(config, num_beams=3)
    assert len(BlankFiller(opened.model, opened.tokenizer.special, three).fill([2, 10, 4, 3])) == 1


def printed(monkeypatch, capsys, run, *arguments):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(run), *map(str, arguments)])
    generate_script.main()
    return capsys.readouterr().out.splitlines()


OTHERS = {
    "causal": "word1 word2",
    "prefix_lm": "word1 word2",
    "unilm": "word3 word4 .",
    "bart": "word1 [MASK] word3",
    "ul2": "word1 word2",
}


@pytest.mark.parametrize("objective", OTHERS)
def test_runs_of_other_objectives_write_on_whole_texts(objective, tmp_path, monkeypatch, capsys):
    settings = merge(tree(write_vocabulary(tmp_path)), {"objectives": {objective: 1}})
    if objective == "unilm":
        settings["model"]["segments"] = 6
        settings["unilm"] = {"next_sentence": False}
    if objective in ("bart", "ul2"):
        settings["model"]["decoder_layers"] = 1
    write_run(tmp_path / "run", settings)
    text, options = OTHERS[objective], ("--max-length", 5, "--min-length", 3)
    (plain,) = printed(monkeypatch, capsys, tmp_path / "run", "--text", text, *options)
    lines = printed(monkeypatch, capsys, tmp_path / "run", "--text", text, "--text", text, *options, "--json")
    assert lines[0] == lines[1]
    found = json.loads(lines[0])
    assert found["text"] == text and plain == f"{text}[{found['answer']}]"
    opened = load_run(tmp_path / "run")
    decoder = make_decoder(opened, GenerationConfig(max_length=5, min_length=3))
    context = decoder.context(opened.tokenizer.encode_with_specials(text))
    assert found["answer"] == opened.tokenizer.decode(decoder.generate([context])[0]) != ""
    if objective not in ("bart", "ul2"):
        with pytest.raises(ConfigError, match=f"trained on {objective}, which does not train"):
            printed(monkeypatch, capsys, tmp_path / "run", "--text", "word1 [MASK]")


def test_a_mode_chooses_the_token_before_the_text(tmp_path, monkeypatch, capsys):
    """The model reads the context that training has: the mode's token, the text, eos."""
    tokens = {"regular_token": 20, "extreme_token": 21, "sequential_token": 22}
    changes = {"objectives": {"ul2": 1}, "ul2": tokens, "model": {"decoder_layers": 1}}
    bare = tree(write_vocabulary(tmp_path))
    settings = merge(bare, changes)
    write_run(tmp_path / "run", settings)
    opened = load_run(tmp_path / "run")
    text = opened.tokenizer.encode_with_specials("word1 word2")
    find, read = TextDecoder.hypotheses, []
    monkeypatch.setattr(
        TextDecoder, "hypotheses", lambda self, texts: read.extend(texts) or find(self, texts)
    )
    modes = {"": 22, "regular": 20, "extreme": 21, "sequential": 22}
    for mode in modes:
        options = ("--mode", mode) if mode else ()
        printed(monkeypatch, capsys, tmp_path / "run", "--text", "word1 word2", "--max-length", 2, *options)
    assert read == [[token, *text, opened.tokenizer.special.eos] for token in modes.values()]
    write_run(tmp_path / "t5", merge(bare, {"objectives": {"t5": 1}, "model": {"decoder_layers": 1}}))
    with pytest.raises(
        ConfigError, match="mode is extreme, but the run was trained on t5, which has no modes; leave"
    ):
        printed(monkeypatch, capsys, tmp_path / "t5", "--text", "word1", "--mode", "extreme")


def test_many_texts_are_filled_together(run, monkeypatch, capsys):
    """As if alone, and in their order; 20 are more than are computed at a time."""
    texts = [f"word{i % 9} " * (1 + i % 4) + "[MASK] word2 [sMASK]" for i in range(20)]
    arguments = [part for text in texts for part in ("--text", text)]
    together = printed(monkeypatch, capsys, run, *arguments, "--max-length", 4, "--json")
    assert [json.loads(line)["text"] for line in together] == texts
    for text, line in list(zip(texts, together, strict=True))[::6]:
        assert printed(monkeypatch, capsys, run, "--text", text, "--max-length", 4, "--json") == [line]


def test_a_text_without_a_blank_is_refused_by_a_run_that_fills_them(run, monkeypatch, capsys):
    with pytest.raises(DataError, match=r"text 'word1 word2' has no blank; mark at least one"):
        printed(monkeypatch, capsys, run, "--text", "word1 word2")


def test_tokens_after_which_all_may_repeat_are_named_by_their_text(run, monkeypatch, capsys):
    options = (
        "--text",
        "word1 [MASK]",
        "--no-repeat-ngram-size",
        2,
        "--no-repeat-except",
        "word1 unheard-of",
    )
    with pytest.raises(ConfigError, match=r"no_repeat_except has 'unheard-of', which is .* tokens"):
        printed(monkeypatch, capsys, run, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--mode", "regular"),
            "mode is regular, but the run was trained on blank_infilling, which has no modes",
        ),
        (("--unmask-steps", 4), "unmask_steps, unmask_block or guidance is set, but the run was trained on"),
        (
            ("--strategy", "sample", "--temperature", "1e-300"),
            "temperature is 1e-300; it must be at least 1e-06 and",
        ),
        (
            ("--strategy", "beam", "--length-penalty", "1e308"),
            "length_penalty is 1e+308; it must be at least -50 and at most 50",
        ),
    ],
)
def test_options_without_effect_or_sense_are_refused(run, options, message):
    assert_refused(generate(run, *options), message)


def test_extreme_settings_have_answers(run):
    greedy = generate(run, "--max-length", 3)
    for options in (("--top-p", "1e-320"), ("--temperature", "1e-6"), ("--top-k", 1)):
        done = generate(run, "--max-length", 3, "--strategy", "sample", *options)
        assert done.returncode == 0 and done.stdout == greedy.stdout, done.stderr
    for penalty in (-50, 50):
        done = generate(run, "--max-length", 3, "--strategy", "beam", "--length-penalty", penalty)
        assert done.returncode == 0, done.stderr
