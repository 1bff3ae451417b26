"""The tables of a run. A page shortens long cells."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.report.render import MISSING, utc
from megatron_lite.report.run import RunReport, flat

MAX_WORDS = 20  # blanks of a text that are shown

Cell = str | tuple[str, str]  # with the class by which style.css shows it


@dataclass(frozen=True)
class Table:
    """The first cell of each row is its heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    style: str = ""  # a class of style.css
    above: str = ""  # a remark
    above_style: str = "weak"


def side_by_side(columns: Sequence[tuple[str, Mapping[str, str]]]) -> Table:
    """A column for each of the mappings, a row for each of their keys."""
    names = dict.fromkeys(name for _, column in columns for name in column)
    rows = [[name, *(column.get(name, MISSING) for _, column in columns)] for name in names]
    return Table(["", *(name for name, _ in columns)], rows, "numbers")


def scores(run: RunReport) -> list[Table]:
    """A column for each model or file, a row for each metric."""
    texts = [
        (model, {name: MISSING if value is None else f"{value:.4g}" for name, value in figures.items()})
        for model, figures in run.scores.items()
    ]
    return [side_by_side(texts)] if texts else []


def fillings(run: RunReport) -> list[Table]:
    """One table for each text: its blanks are columns, steps are rows."""
    texts: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for record in run.records.fillings:
        items = record.get("fillings")
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict) and isinstance(item.get("text"), str):
                texts.setdefault(item["text"], []).append((record["step"], item))
    tables = []
    for text, steps in texts.items():
        originals = _words(steps[-1][1].get("originals"))
        rows: list[Sequence[Cell]] = [["original", *originals]]
        for step, item in steps:
            filled = _words(item.get("answers"))[: len(originals)]
            filled += [MISSING] * (len(originals) - len(filled))
            rows.append([f"step {step:,}", *map(_filled, filled, originals)])
        head = ["", *(f"blank {number}" for number in range(1, len(originals) + 1))]
        tables.append(Table(head, rows, above=text, above_style="text"))
    return tables


def _words(value: Any) -> list[str]:
    return list(map(str, value[:MAX_WORDS])) if isinstance(value, list) else []


def _filled(filled: str, original: str) -> Cell:
    if not filled:
        return "nothing", "weak"
    return (filled, "right") if filled == original else filled


def events(run: RunReport) -> list[Table]:
    shown, hidden = run.records.events, run.records.num_events - len(run.records.events)
    above = f"The {hidden:,} oldest are not shown." if hidden else ""
    rows = [[f"{event['step']:,}", utc(event.get("time")), _event_text(event)] for event in shown]
    return [Table(["step", "time", "what"], rows, "events", above)] if rows else []


def _event_text(event: dict[str, Any]) -> str:
    if event["kind"] == "event":
        return str(event.get("event", ""))
    again = event.get("restarts")
    what = "started" if not again else f"resumed from step {event['step']:,} (restart {again})"
    facts = [brief(event[name]) for name in ("layout", "compared_with", "program") if name in event]
    return f"{what}, processes {event.get('processes', '?')}: {'; '.join(facts)}"


def brief(value: Any) -> str:
    """A value as text, with each commit's hash cut to 10 digits."""
    return re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", str(value))


def corpora(run: RunReport) -> list[Table]:
    facts = run.state.get("data")
    rows: list[Sequence[Cell]] = []
    for split in ("train", "validation"):
        entries = run.setting(f"data.{split}")
        known = facts if split == "train" and isinstance(facts, list) else []
        for number, entry in enumerate(entries if isinstance(entries, list) else []):
            entry = entry if isinstance(entry, dict) else {}
            fact = known[number] if number < len(known) and isinstance(known[number], dict) else {}
            sizes = [
                f"{fact[name]:,}" if isinstance(fact.get(name), int) else MISSING
                for name in ("documents", "tokens")
            ]
            rows.append([split, (str(entry.get("prefix", MISSING)), "code"), _corpus_share(entry), *sizes])
    return [Table(["split", "prefix", "weight", "documents", "tokens"], rows)] if rows else []


def _corpus_share(corpus: Mapping[str, Any]) -> str:
    """A corpus's weight, or its share of the tokens, and its cap."""
    tokens, cap = corpus.get("tokens"), corpus.get("max_epochs")
    share = str(corpus.get("weight", MISSING)) if tokens is None else f"{tokens} of the tokens"
    return share if cap is None else f"{share}, at most {cap} epochs"


def checkpoints(run: RunReport) -> list[Table]:
    hidden = run.num_checkpoints - len(run.checkpoints)
    above = f"The latest {len(run.checkpoints)} of {run.num_checkpoints:,}." if hidden else ""
    rows: list[Sequence[Cell]] = []
    for saved in run.checkpoints:
        size = (
            (saved.problem, "bad")
            if saved.bytes is None
            else f"{saved.bytes / 2**20:,.1f} MiB in {saved.ranks} files"
        )
        rows.append([f"{saved.step:,}", saved.saved_at or MISSING, size])
    return [Table(["step", "saved at", "size"], rows, "events", above)] if rows else []


def settings(runs: Sequence[RunReport]) -> Table:
    """The settings that differ from the defaults or between the runs."""
    trees, defaults = [flat(run.config) for run in runs], [flat(run.defaults) for run in runs]
    default = next(filter(None, defaults), {})
    rows = []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [tree.get(key) for tree in trees]
        if len(set(values)) > 1 or (default and values[0] != default.get(key)):
            shown = [MISSING if value is None else value for value in values]
            rows.append([key, *shown, default.get(key, MISSING)])
    above = "Settings that differ from the defaults or between the runs."
    return Table(["setting", *(run.name for run in runs), "default"], rows, "settings", above)
