"""The model card of an export: what was trained, on what, from which seeds, and how it evaluates."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from data_utils.objectives import ObjectiveChoice
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.config.lora import LORA
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.provenance import provenance, task_of
from megatron_lite.inference.open_run import OpenRun, blank_shares, objective_names
from megatron_lite.telemetry.records import valid_records

_CARD = """---
library_name: transformers
tags:
{tags}
---

# {title}, {parameters:,} parameters

{introduction} It has {sizes}.

```python
{example}
```

## Training

| | |
|---|---|
| run | {run} |
| step | {step} of {steps} |
| samples, tokens | {samples:,}, {tokens:,} |
| seed (weights, samples, dropout) | {seed} |
| precision | {precision} |
| restarts | {restarts} |
| skipped steps | {skipped} |
| global batch | {batch} samples of {length} tokens |
| {learnt} | {objectives} |
| tokenizer | {tokenizer_kind}, {vocabulary:,} tokens, fingerprint `{fingerprint}` |

## Data

{data}

## Evaluation

{evaluation}

## License

Not stated: it is for whoever publishes this directory to choose, as far as the licenses of the data {sources}allow.
"""


_FILLS = """A GLM (autoregressive blank infilling, arXiv:2103.10360). It fills the blanks {blanks}."""
_PIPELINE = """from transformers import pipeline

fill = pipeline("blank-infilling", model="PATH", trust_remote_code=True)  # runs this directory's .py files
fill("Paris is the {blank} of France.")"""
_BLANKS = {
    "[MASK]": "`[MASK]` (a phrase)",
    "[sMASK]": "`[sMASK]` (sentences)",
    "[gMASK]": "`[gMASK]` (the continuation of a text)",
}
_OTHER = """A Transformer in GLM's layout, trained on {names}. It was not trained to fill blanks: the pipeline
and `generate` refuse it until it is trained on that. Without `block_position_ids` every token sees every other; a
boolean `attention_mask` of shape [B, 1, S, S] sets another rule."""
_ENCODER = """from transformers import AutoModelForSeq2SeqLM

model = AutoModelForSeq2SeqLM.from_pretrained("PATH", trust_remote_code=True)  # runs this directory's .py files
model(input_ids).logits  # AutoModel gives hidden states"""


_PUBLISHED = """{system}, written for the class `{class_name}` of transformers. {origin}{more}"""
_CLASS = """from transformers import {class_name}

model = {class_name}.from_pretrained("PATH")"""
_VERSIONS = " Use transformers {oldest} or newer."
_EXTRA = " `{file}` holds the weights of a head that the class does not have."


_CLASSIFIER = """from transformers import pipeline

classify = pipeline("text-classification", model="PATH", trust_remote_code=True)  # runs this directory's .py files
classify("A text.")"""


def model_card(run: OpenRun) -> str:
    """The card of an export in GLM's format, in Markdown."""
    words, task = _introduction(run.objectives), run.config.task
    if task is not None:
        words["introduction"] = f"Tuned on the task `{task.name}` ({task.kind}). {words['introduction']}"
    origin = provenance(run)
    if origin.is_imported or len(origin.trained) > 1:  # of others a directory may not tell
        words["introduction"] += f" {origin}"
    if run.config.model.task_head.type != "none":
        words |= {"tags": "- glm\n- text-classification", "example": _CLASSIFIER}
    return write_card(run, words, origin.is_imported)


def published_card(run: OpenRun, class_name: str, oldest: str, *, extra_file: str | None = None) -> str:
    """The card of an export to a class of transformers, in Markdown.

    Args:
        oldest: the first version of transformers that computes it.
        extra_file: with weights that the class has not.
    """
    system, origin = str(run.config.model.system), provenance(run)
    introduction = _PUBLISHED.format(
        system=system,
        class_name=class_name,
        origin=origin,
        more="" if extra_file is None else _EXTRA.format(file=extra_file),
    )
    introduction += _VERSIONS.format(oldest=oldest)
    words = {
        "tags": f"- {system}",
        "title": system,
        "introduction": introduction,
        "example": _CLASS.format(class_name=class_name),
    }
    return write_card(run, words, origin.is_imported)


def sizes(model: ModelConfig) -> str:
    layers = f"{model.num_layers} layers"
    if model.decoder_layers:
        layers = f"{model.num_layers} layers of an encoder, {model.decoder_layers} of a decoder"
    positions = "" if model.positions == "none" else f", positions up to {model.max_position}"
    return (
        f"{layers}, hidden size {model.hidden_size}, {model.num_attention_heads} attention heads{positions}"
    )


def write_card(run: OpenRun, words: Mapping[str, str], is_imported: bool) -> str:
    checkpoint, config, tokenizer = run.checkpoint, run.config, run.tokenizer
    state, model, task = checkpoint.state, config.model, config.task
    objectives = "; ".join(map(_described, run.objectives))
    parameters = sum(math.prod(shape) for name, shape in checkpoint.shapes.items() if LORA not in name)
    sources = "and of the imported weights " if is_imported else ""
    return _CARD.format(
        **{"sizes": sizes(model), **words}, parameters=parameters,
        sources=sources, run=checkpoint.path.parent.parent.name, step=checkpoint.step, steps=config.training.steps,
        samples=state.get("consumed_samples", 0), tokens=state.get("consumed_tokens", 0), seed=config.training.seed,
        precision=config.training.precision, restarts=state.get("restarts", "not recorded"),
        skipped=state.get("skipped_steps", "not recorded"), batch=config.batch.global_batch_size,
        length=config.data.sequence_length if task is None else task.sequence_length,
        learnt="objectives" if task is None else "task", objectives=objectives if task is None else task_of(task),
        tokenizer_kind=tokenizer.config.kind, vocabulary=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint,
        data=_data_table(state.get("data")), evaluation=_evaluation(checkpoint),
    )  # fmt: skip


def _introduction(objectives: Sequence[ObjectiveChoice]) -> dict[str, str]:
    names = objective_names(objectives)
    if "blank_infilling" not in names:
        text = _OTHER.format(names=", ".join(names))
        return {"tags": "- glm", "title": "Transformer", "introduction": text, "example": _ENCODER}
    blanks = [blank for blank, share in blank_shares(objectives).items() if share]
    text = _FILLS.format(blanks=", ".join(_BLANKS[blank] for blank in blanks))
    example = _PIPELINE.format(blank=blanks[0])
    return {"tags": "- glm\n- blank-infilling", "title": "GLM", "introduction": text, "example": example}


def _described(choice: ObjectiveChoice) -> str:
    """Name and weight, the shares of blank infilling, and what else differs from the defaults."""
    section = choice.section
    changed = {
        field.name: getattr(section, field.name)
        for field in fields(section)
        if getattr(section, field.name) != field.default
    }
    if choice.name == "blank_infilling":
        shares = (section.token_prob, section.sentence_prob, round(section.document_prob, 9))
        named = dict(zip(("token", "sentence", "document"), shares, strict=True))
        changed = {**named, **{k: v for k, v in changed.items() if k not in ("token_prob", "sentence_prob")}}
    details = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in changed.items()
    )
    return f"{choice.name} {choice.weight:g}" + (f" ({details})" if details else "")


def _data_table(corpora: Any) -> str:
    if not isinstance(corpora, list) or not corpora:
        return "The training corpora are not recorded."
    if "samples" in corpora[0]:
        labelled = [f"| {corpus['samples']} | `{corpus.get('sha256')}` |" for corpus in corpora]
        return "\n".join(["| labelled samples | SHA-256 of the records |", "|---|---|", *labelled])
    lines = ["| documents | tokens | weight | SHA-256 of the token file |", "|---|---|---|---|"]
    for corpus in corpora:
        documents, tokens = corpus.get("documents", "?"), corpus.get("tokens", "?")
        lines.append(f"| {documents} | {tokens} | {corpus.get('weight', '?')} | `{corpus.get('sha256')}` |")
    return "\n".join(lines)


def _evaluation(checkpoint: Checkpoint) -> str:
    """The newest evaluation of the run that is not newer than the checkpoint."""
    run = checkpoint.path.parent.parent
    scores = _last_record(run / "metrics.jsonl", "scores", checkpoint.step)
    if scores is not None:
        return _scores(run / "results.json", scores, checkpoint.step)
    record = _last_record(run / "metrics.jsonl", "validation", checkpoint.step)
    if record is None:
        return "No evaluation is recorded."
    rows = [
        f"| {name} | {_shown(value)} |"
        for name, value in record.items()
        if name.startswith(("loss", "perplexity"))
    ]
    return "\n".join(
        [f"Validation at step {record['step']} (losses in nats per token):", "", "| | |", "|---|---|", *rows]
    )


def _scores(results: Path, scores: Mapping[str, Any], step: int) -> str:
    """A table of a task's metrics: by file if results.json is of this checkpoint, else of the last evaluation."""
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    lines = [f"On the task at step {scores['step']}:", "", "| | |", "|---|---|"]
    if found.get("best_step") == step:
        lines = [f"On the task at step {step}:", "", "| file | samples | metric | |", "|---|---|---|---|"]
        for name, of_file in found["files"].items():
            for metric, value in of_file["metrics"].items():
                lines.append(f"| {Path(name).name} | {of_file['samples']} | {metric} | {_shown(value)} |")
    else:
        named = {k: v for k, v in scores.items() if k not in ("kind", "step", "time", "score")}
        lines += [f"| {name} | {_shown(value)} |" for name, value in named.items()]
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    """A number of a record, which has null for NaN and infinity."""
    return "not finite" if value is None else f"{value:.4f}"


def _last_record(path: Path, kind: str, step: int) -> dict[str, Any] | None:
    """The last record of a kind that is not of a later step; None without one."""
    newest = None
    with contextlib.suppress(OSError):  # no metrics beside the checkpoint
        for record in valid_records(path, damaged=lambda number: None):
            if record["kind"] == kind and record["step"] <= step:
                newest = record
    return newest
