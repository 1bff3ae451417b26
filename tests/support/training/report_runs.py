"""Runs to be reported: a real one that was interrupted, and records as a run would write them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_utils.common.settings import build, merge
from data_utils.loader.loader import open_datasets
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.inference.samples import SampleFillings
from megatron_lite.train.trainer import Trainer

FILLED = {
    "training": {"eval_fillings": 2, "eval_interval": 2},
    "blank_infilling": {"token_prob": 1.0, "sentence_prob": 0.0},
}


def fit_and_fill(context: Any, tree: dict[str, Any]) -> None:
    """Train as pretrain_glm.py does, with blanks filled at evaluations."""
    config = build(Config, tree)
    tokenizer = load_tokenizer(config.tokenizer)
    config = config.with_vocab_size(tokenizer.vocab_size)
    data = open_datasets(config.data, config.objective_choices, tokenizer, config.training.seed)
    engine = make_engine(config, context, len(data.loss_names))
    training = config.training
    fill = SampleFillings(data.validation, tokenizer, training.eval_fillings, training.eval_samples)
    Trainer(config, context, engine, data.train, data.validation, data.loss_names, fill=fill).fit()


def interrupted(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The trees of two starts of one run, the second of which continues the first."""
    tree = merge(settings, FILLED)
    return [merge(tree, {"training": {"stop_after_step": 3}}), tree]


def train(step: int, **values: Any) -> dict[str, Any]:
    usual = {"loss": 5.0 - step / 1000, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1000.0}
    return {"kind": "train", "step": step, "time": 1.7e9 + step, **usual, **values}


def write_records(run: Path, records: Iterable[dict[str, Any] | str]) -> Path:
    """A run of records alone. Args: records: a str is a line as it stands."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(
            (record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records
        )
    return run


SCRIPT = "<script>document.title='taken'</script>"
HOSTILE = f"<img src=http://example.invalid/x onerror=\"document.title='taken'\">'&amp;{SCRIPT}"
HOSTILE_NAME = "<img src=x onerror=document.title='taken'>"  # of a directory


def hostile_run(parent: Path) -> Path:
    """A run whose every text tries to become markup."""
    records = [
        {"kind": "start", "step": 0, **dict.fromkeys(("time", "restarts", "layout", "device", "program"), HOSTILE)},
        *(train(step, **{f"loss/{HOSTILE}": 1.0, "consumed_tokens": HOSTILE}) for step in (1, 2)),
        {"kind": "event", "step": 2, "time": 1e300, "event": f"{HOSTILE}\0"},
        {"kind": "fillings", "step": 2, "fillings": [{"text": HOSTILE, "originals": [HOSTILE], "answers": [SCRIPT]}]},
        {"kind": "fillings", "step": 2, "fillings": [3, {"text": 3}, {"text": "no lists", "originals": 1}]},
        {"kind": "fillings", "step": 3, "fillings": {"text": 5}},
    ]  # fmt: skip
    run = write_records(parent / HOSTILE_NAME, records)
    config = {
        "run": {"directory": HOSTILE},
        HOSTILE: HOSTILE,
        "data": {"train": [{"prefix": HOSTILE}, HOSTILE]},
        f"</pre>{SCRIPT}": ["\u202e", "</style>"],
    }
    (run / "config.yaml").write_text(json.dumps(config))
    (run / "unigram.json").write_text(json.dumps({f"loss/{HOSTILE}": 2.0, "loss": 3.0}))
    checkpoint = run / "checkpoints/step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(HOSTILE)
    return run
