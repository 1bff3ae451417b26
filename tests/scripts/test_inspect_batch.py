"""The inspection script: every objective can be shown, the picture is the rule's mask, mistakes are one line."""

from __future__ import annotations

import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
import yaml
from support.data.recipes import make, text_of
from support.project import ROOT
from support.tasks.tasks import write_lines, write_task
from support.transformer.mask_rule import allowed

from data_utils.build.corpus import BuildConfig, build_corpus
from data_utils.common.errors import ConfigError, UserError
from data_utils.objectives import OBJECTIVES
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from scripts import inspect_batch

TEXT = "the cat sat on the mat . then it slept all day long"


def run(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["inspect_batch.py", *arguments])
    inspect_batch.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_can_be_shown(monkeypatch, capsys, name):
    shown = run(monkeypatch, capsys, "--objective", name, "--text", TEXT, "--samples", "3", "4")
    assert "sample 3" in shown and "sample 4" in shown
    assert "slept" in shown and "objective" in shown and "█" in shown
    # The loss of contrastive is of vectors, not of tokens.
    assert name == "contrastive" or any(role in shown for role in ("predicts", "query"))


def test_a_long_row_is_shown_by_its_ends(monkeypatch, capsys):
    text = " ".join(f"w{number}" for number in range(300))
    short = run(monkeypatch, capsys, "--text", text)
    assert short.count("\n") < 60 + 80 and "w0 " in short and "more tokens (--lines 0 shows all)" in short
    whole = run(monkeypatch, capsys, "--text", text, "--lines", "0")
    assert whole.count("\n") > 300 and "between" not in whole
    with pytest.raises(UserError, match="--lines is -1; it must be 0 or more"):
        run(monkeypatch, capsys, "--text", text, "--lines", "-1")


def test_roles_targets_and_labels(monkeypatch, capsys):
    shown = run(
        monkeypatch, capsys, "--objective", "masked_lm", "--text", TEXT, "masked_lm.next_sentence=true"
    )
    lines = shown.splitlines()
    assert "[cls]" in lines[2] and "label" in lines[2] and "class" in lines[2] and "next_sentence" in lines[2]
    shown = run(monkeypatch, capsys, "--objective", "mass", "--text", TEXT)
    assert "hidden" in shown and "content" not in shown
    assert "query" in run(monkeypatch, capsys, "--objective", "xlnet", "--text", TEXT)


def test_the_masks_match_the_rule():
    row = make("unilmv2", 40).example(text_of(30), 1)
    seen, by_group = inspect_batch.masks(row)
    assert (seen == allowed(row.doc, row.ord, row.grp)).all()
    assert (by_group == seen & ~allowed(row.doc, row.ord, 0 * row.grp)).all() and by_group.any()


def test_the_drawing_has_two_rows_to_a_line():
    assert inspect_batch.drawing(np.tri(3, dtype=bool)) == "█▄ \n▀▀▀"
    assert len(inspect_batch.drawing(np.ones((250, 250), bool)).splitlines()[0]) <= inspect_batch.MOST_COLUMNS


def test_the_picture(monkeypatch, capsys, tmp_path):
    path = tmp_path / "mask.png"
    run(monkeypatch, capsys, "--objective", "causal", "--text", "a b c", "--png", str(path))
    picture = matplotlib.image.imread(path)[:, :, 0]
    side = picture.shape[0] // 4
    assert (picture[side // 2 :: side, side // 2 :: side][:4, :4] < 0.5).tolist() == np.tri(
        4, dtype=bool
    ).tolist()


def test_samples_of_a_run(monkeypatch, capsys, settings, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    shown = run(monkeypatch, capsys, "--config", str(config), "--objective", "prefix_lm", "--samples", "5")
    assert "sample 5" in shown and "word" in shown and "prefix" in shown and "padding tokens" in shown
    shown = run(monkeypatch, capsys, "--config", str(config), "--text", "word1 word2 word3 .")
    assert "word2" in shown and "padding tokens" not in shown


def test_a_sentence_and_its_slot(monkeypatch, capsys):
    """OPTIMUS: nothing of the encoder is seen by the decoder, which the rule for one stack would allow."""
    shown = run(monkeypatch, capsys, "--objective", "optimus", "--text", "a b")
    assert [line.split()[1:3] for line in shown.splitlines()[2:10]] == [
        *(["[cls]", "context"], ["a", "context"], ["b", "context"], ["[sep]", "context"]),
        *(["sop", "slot"], ["sop", "predicts"], ["a", "predicts"], ["b", "predicts"]),
    ]
    row = make("optimus", 12).example(text_of(3), 1)
    seen, _ = inspect_batch.masks(row)
    reads = row.ord == 0
    assert seen[np.ix_(reads, reads)].all() and not seen[np.ix_(~reads, reads)].any()
    assert (seen[np.ix_(~reads, ~reads)] == np.tri((~reads).sum(), dtype=bool)).all()
    assert allowed(row.doc, row.ord, row.grp)[np.ix_(~reads, reads)].all()


def test_sentences_of_a_run_with_two_vocabularies(monkeypatch, capsys, settings, tokenizer_files, tmp_path):
    """Each side in its own words, from a text and from the corpora."""
    lines, config = tmp_path / "lines.txt", tmp_path / "config.yaml"
    lines.write_text("word1 word2 .\nword3 .\n")
    decoders = {"kind": "gpt2_bpe", "path": str(tokenizer_files / "gpt2"), "added_tokens": "optimus"}
    for name, tokenizer in (("e", settings["tokenizer"]), ("d", decoders)):
        build_corpus(
            BuildConfig(inputs=[str(lines)], output=str(tmp_path / name), text_split="lines"),
            lambda tokenizer=tokenizer: load_tokenizer(TokenizerConfig(**tokenizer)),
        )
    stack = settings["model"] | {"positions": "learned"}
    two = {
        "objectives": {"optimus": 1}, "optimus": {"feature": "cls"}, "model": stack, "decoder": stack,
        "decoder_tokenizer": decoders, "tokenizer": settings["tokenizer"], "training": {"steps": 20},
        "schedule": {"warmup_steps": 2}, "data": {
            "train": [{"prefix": str(tmp_path / "e"), "decoder_prefix": str(tmp_path / "d")}],
            "sequence_length": 32,
        },
    }  # fmt: skip
    config.write_text(yaml.safe_dump(two))
    for more in ((), ("--text", "word1 word2 .")):
        shown = run(monkeypatch, capsys, "--config", str(config), *more).splitlines()
        assert [line.split()[1] for line in shown[2:9]] == [
            "[CLS]",
            "word1",
            "word2",
            ".",
            "[SEP]",
            "<BOS>",
            "<BOS>",
        ]
        spelled = "".join(line.split()[1] for line in shown[9:] if "predicts" in line)
        assert spelled.startswith("word1_word2_.")
        assert any(line.split()[2:4] == ["predicts", "<EOS>"] for line in shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to show"),
        (["--text", "a b", "--objective", "bert"], "must be one of blank_infilling"),
        (["--text", ""], "has no token"),
        (["--text", "a b", "--samples", "-1"], "0 or more"),
        (["--text", "a b c d", "causal.x=1"], "only settings of blank_infilling"),
        (["--text", "a b c d", "--png", "/absent/mask.png"], "/absent/mask.png"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, arguments, message):
    with pytest.raises(UserError, match=message):
        run(monkeypatch, capsys, *arguments)


def test_it_runs_as_a_script():
    command = [
        sys.executable,
        str(ROOT / "scripts" / "inspect_batch.py"),
        "--text",
        "a b",
        "--objective",
        "no",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


CLOZE = {"kind": "cloze", "template": "{text} It was [MASK] .", "verbalizers": {"0": "bad", "1": "good"}}
SPANS = {
    "question": "film ?",
    "context": "good film bad plot",
    "answers": [{"text": "bad plot", "answer_start": 10}],
}
PLAIN = {"labels": [], "validation": []}


def shown_task(monkeypatch, capsys, directory, *arguments, **task):
    model, file = write_task(directory, **task)
    return run(monkeypatch, capsys, "--config", model, "--task", file, *arguments)


def test_what_a_task_scores(monkeypatch, capsys, tmp_path):
    """Documents as the model reads them, and the parts of each."""
    shown = shown_task(monkeypatch, capsys, tmp_path / "cloze", "--samples", "0", "2", **CLOZE)
    assert "sample 0\n" in shown and "sample 2\n" in shown and "[MASK]" in shown
    parts = [line for line in shown.splitlines() if line.startswith("scored: group")]
    assert len(parts) == 4 and sum(line.endswith("(right)") for line in parts) == 2
    assert parts[0].startswith("scored: group 0, row ") and ": bad" in parts[0] and ": good" in parts[1]
    long = shown_task(monkeypatch, capsys, tmp_path / "sum", "task.scoring=sum", **CLOZE)
    assert "sample 0, document 0 of 2" in long and "rows " in long and "good <|endofpiece|>" in long
    classes = shown_task(monkeypatch, capsys, tmp_path / "classes", labels=["0", "1"])
    assert "scored: group 0, row 0: " in classes and "(right)" not in classes
    words = write_lines(tmp_path / "long.jsonl", [{"text": "good " * 12, "label": "1"}])
    cut = shown_task(
        monkeypatch, capsys, tmp_path / "cut", f"task.train={words}", "task.sequence_length=8", **CLOZE
    )
    assert "\n11 tokens were cut off" in cut and "cut off" not in classes
    lines = write_lines(tmp_path / "spans.jsonl", [{"id": "a", **SPANS}])
    spans = shown_task(monkeypatch, capsys, tmp_path / "s", f"task.train={lines}", **{**PLAIN, "kind": "spans"},
                       question_length=4, answer_length=4)  # fmt: skip
    assert "scored: group 0, rows 0 to 7: row 6 to row 7" in spans
    targets = write_lines(tmp_path / "seq2seq.jsonl", [{"src": "good film", "tgt": "bad plot"}])
    written = shown_task(
        monkeypatch,
        capsys,
        tmp_path / "w",
        f"task.train={targets}",
        **{**PLAIN, "kind": "seq2seq", "target_length": 8},
    )
    assert "scored" not in written and "predicts" in written


def test_mistakes_with_tasks_are_one_line(monkeypatch, capsys, tmp_path):
    with pytest.raises(UserError, match=r"--samples contains 99, but the task has 64 records"):
        shown_task(monkeypatch, capsys, tmp_path / "a", "--samples", "99", labels=["0", "1"])
    with pytest.raises(UserError, match="--task shows the records of a task; combine it with --config"):
        run(monkeypatch, capsys, "--task", "x.yaml", "--text", TEXT)
    with pytest.raises(UserError, match=r"the task has no file; set task.train or task.validation"):
        shown_task(monkeypatch, capsys, tmp_path / "b", "task.train=null", labels=["0", "1"], validation=[])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (["-1"], "--samples is -1; it must be 0 or more"),
        (["0", str(10**20)], f"--samples is {10**20}; it must be 0 or more, and below 2"),
        (
            ["0", "albert.masked_ratio=0.1"],
            "'albert.masked_ratio=0.1': without --config only settings of blank_infilling apply",
        ),
        (["x"], "'x' is not a sample number; see --help"),
    ],
)
def test_numbers_that_no_sample_has(monkeypatch, capsys, samples, message):
    with pytest.raises(ConfigError, match=message):
        run(monkeypatch, capsys, "--text", TEXT, "--samples", *samples)
