"""The model card of an export: what was trained, on what, from which seeds, and how it evaluates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_utils.objectives.blank_infilling import BlankInfillingConfig
from data_utils.tokenizers import Tokenizer
from megatron_lite.checkpoint import Checkpoint
from megatron_lite.config import Config

_CARD = """---
library_name: transformers
tags:
- glm
- blank-infilling
---

# GLM, {parameters:,} parameters

A GLM (autoregressive blank infilling, arXiv:2103.10360) with {layers} layers, hidden size {hidden}, {heads}
attention heads and positions up to {positions}. It fills the blanks `[MASK]` (a phrase), `[sMASK]`
(sentences) and `[gMASK]` (the continuation of a text).

```python
from transformers import pipeline

fill = pipeline("blank-infilling", model="PATH", trust_remote_code=True)  # runs this directory's .py files
fill("Paris is the [MASK] of France.")
```

## Training

| | |
|---|---|
| step | {step} of {steps} |
| samples, tokens | {samples:,}, {tokens:,} |
| seed (weights, samples, dropout) | {seed} |
| precision | {precision} |
| restarts | {restarts} |
| skipped steps | {skipped} |
| global batch | {batch} samples of {length} tokens |
| objectives | {objectives} |
| tokenizer | {tokenizer_kind}, {vocabulary:,} tokens, fingerprint `{fingerprint}` |

## Data

{data}

## Evaluation

{evaluation}
"""


def model_card(found: Checkpoint, config: Config, tokenizer: Tokenizer) -> str:
    """Markdown; what the checkpoint does not record is said to be not recorded."""
    state, model, objective = found.state, config.model, config.objective_sections["blank_infilling"]
    assert isinstance(objective, BlankInfillingConfig)
    token, sentence = objective.token_prob, objective.sentence_prob
    objectives = {"token": token, "sentence": sentence, "document": 1 - token - sentence}
    return _CARD.format(
        parameters=_parameters(config, tokenizer),
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        positions=model.max_position,
        step=found.step,
        steps=config.training.steps,
        samples=state.get("consumed_samples", 0),
        tokens=state.get("consumed_tokens", 0),
        seed=config.training.seed,
        precision=config.training.precision,
        restarts=state.get("restarts", "not recorded"),
        skipped=state.get("skipped_steps", "not recorded"),
        batch=config.batch.global_batch_size,
        length=config.data.sequence_length,
        objectives=", ".join(f"{name} {share:g}" for name, share in objectives.items()),
        tokenizer_kind=tokenizer.config.kind,
        vocabulary=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        data=_data_table(state.get("data")),
        evaluation=_evaluation(found),
    )


def _parameters(config: Config, tokenizer: Tokenizer) -> int:
    h = config.model.hidden_size
    per_block = 12 * h * h + 13 * h
    rows = tokenizer.vocab_size + 2 * (config.model.max_position + 1)
    return rows * h + config.model.num_layers * per_block + 2 * h


def _data_table(corpora: Any) -> str:
    if not isinstance(corpora, list) or not corpora:
        return "The training corpora are not recorded."
    lines = ["| documents | tokens | weight | SHA-256 of the token file |", "|---|---|---|---|"]
    for corpus in corpora:
        documents, tokens = corpus.get("documents", "?"), corpus.get("tokens", "?")
        lines.append(f"| {documents} | {tokens} | {corpus.get('weight', '?')} | `{corpus.get('sha256')}` |")
    return "\n".join(lines)


def _evaluation(found: Checkpoint) -> str:
    """The newest validation record of the run that is not newer than the checkpoint."""
    record = _last_validation(found.path.parent.parent / "metrics.jsonl", found.step)
    if record is None:
        return "No evaluation is recorded."
    rows = [
        f"| {name} | {value:.4f} |"
        for name, value in record.items()
        if name.startswith(("loss", "perplexity"))
    ]
    return "\n".join(
        [f"Validation at step {record['step']} (losses in nats per token):", "", "| | |", "|---|---|", *rows]
    )


def _last_validation(path: Path, step: int) -> dict[str, Any] | None:
    newest = None
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if '"validation"' in line:
                    record = json.loads(line)
                    newest = record if record.get("step", step + 1) <= step else newest
    except (OSError, ValueError):  # no metrics beside the checkpoint, or a line cut short by a crash
        return newest
    return newest
