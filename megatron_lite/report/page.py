"""One HTML page about one or several runs. It needs no network, no script and no other file."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from data_utils.common.errors import UserError
from data_utils.common.setting_files import shorten
from data_utils.common.settings import build
from data_utils.tasks.metrics.metrics_by_task import is_cost
from megatron_lite.config.tree import Config
from megatron_lite.report.charts import Chart, Line, draw, swatch
from megatron_lite.report.html import Html, element, table, whole_page
from megatron_lite.report.pairs import pair_figure
from megatron_lite.report.phases import phase_table
from megatron_lite.report.run import RunReport, flat
from megatron_lite.telemetry.formatting import format_count, format_duration

MAX_RUNS = 8  # as many as there are colours
MAX_TEXT = 400  # characters of a value
MISSING = "-"

Text = Callable[[float], str]


def page(runs: Sequence[RunReport], made_at: float) -> str:
    """The page. Args: made_at: Unix time."""
    names = ", ".join(run.name for run in runs)
    title = f"Training report: {names}"
    sections = [
        element("h1", title),
        element("p", f"Made at {utc(made_at)}.", class_="weak"),
        *_notes(runs),
        *_section("Overview", _overview(runs)),
        _legend(runs),
        *_section(f"Loss, {_loss_unit(runs)}", *_charts(_loss_charts(runs))),
        *_section(
            "Scores", *_charts(_score_charts(runs)), *(each for run in runs for each in _scores(run, runs))
        ),
        *_section("Minimal pairs", *(each for run in runs for each in _minimal_pairs(run, runs))),
        *_section("Latent space", *_charts(_latent_charts(runs))),
        *_section("Optimization", *_charts(_optimization_charts(runs))),
        *_section("Speed and memory", *_charts(_speed_charts(runs))),
        *_section("Infilled validation samples", *(each for run in runs for each in _fillings(run, runs))),
        *_section("Starts and events", *(each for run in runs for each in _events(run, runs))),
        *_section("Phases", *(each for run in runs for each in _phases(run, runs))),
        *_section("Corpora", *(each for run in runs for each in _corpora(run, runs))),
        *_section("Checkpoints", *(each for run in runs for each in _checkpoints(run, runs))),
        *_section("Configuration", *_configuration(runs)),
    ]
    return whole_page(title, sections)


def _section(title: str, *elements: object) -> list[Html]:
    """A section with a heading; none without elements."""
    return [element("section", element("h2", title), *elements)] if elements else []


def _heading(run: RunReport, runs: Sequence[RunReport]) -> list[Html]:
    """The run's name where there are several."""
    return [element("h3", run.name)] if len(runs) > 1 else []


def utc(time: Any) -> str:
    """Unix time as text; "-" for anything else, since records may be damaged."""
    try:
        return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError, TypeError):
        return MISSING


def _notes(runs: Sequence[RunReport]) -> list[Html]:
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    return (
        [element("div", *(element("p", shorten(note, MAX_TEXT)) for note in notes), class_="notes")]
        if notes
        else []
    )


def _legend(runs: Sequence[RunReport]) -> Html:
    colours = (
        [element("span", swatch(number), run.name) for number, run in enumerate(runs)]
        if len(runs) > 1
        else []
    )
    styles = "Thin: training. Thick with dots: validation."
    if any(run.unigram for run in runs):
        styles += " Dotted: unigram model."
    if _restarts(runs):
        styles += " Dashed vertical line: a restart."
    return element("p", *colours, element("span", styles), class_="legend")


# Overview


def _overview(runs: Sequence[RunReport]) -> Html:
    facts = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(name for run_facts in facts for name in run_facts)
    rows: list[list[object]] = [[name, *(each.get(name, MISSING) for each in facts)] for name in names]
    return table(["", *(run.name for run in runs)], rows, "numbers")


def _setting(run: RunReport, key: str) -> Any:
    """A setting of a configuration that may hold anything; None if it is not there."""
    value: Any = run.config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _what(run: RunReport) -> Iterator[tuple[str, str]]:
    """What was trained, on what, and how."""
    corpora = _setting(run, "data.train")
    task = [_setting(run, f"task.{key}") for key in ("name", "kind", "train", "sequence_length")]
    if task[0] is not None:
        yield "task", f"{task[0]} ({task[1]})"
        corpora, length = [{"prefix": task[2]}], task[3]
    else:
        with suppress(UserError):  # of another version
            choices = build(Config, run.config).objective_choices
            shares = (f"{one.name} {one.weight:g}" if len(choices) > 1 else one.name for one in choices)
            yield "objective", ", ".join(shares)
        length = _setting(run, "data.sequence_length")
    if isinstance(corpora, list):
        names = [Path(str(each.get("prefix"))).name for each in corpora if isinstance(each, Mapping)]
        yield "training data", ", ".join(names)
    kind, path = _setting(run, "tokenizer.kind"), _setting(run, "tokenizer.path")
    if kind is not None:
        yield "tokenizer", f"{kind}, {Path(str(path)).name}"
    batch, rate = _setting(run, "batch.global_batch_size"), _setting(run, "optimizer.lr")
    for name, value in (("sequence length", length), ("batch, samples", batch), ("peak learning rate", rate)):
        if value is not None:
            yield name, str(value)


def _facts(run: RunReport) -> Iterator[tuple[str, str]]:
    records, start = run.records, run.records.starts[-1] if run.records.starts else {}
    for name, text in _what(run):
        yield name, shorten(text, MAX_TEXT)
    yield "trained", f"step {records.last_step:,}" + (f" of {run.steps:,}" if run.steps is not None else "")
    for label, kind in (("training loss", "train"), ("validation loss", "validation")):
        if (curve := records.curve(kind, "loss")) is not None:
            yield (
                label,
                f"{curve.last.value:.4f}, lowest {curve.least.value:.4f} at step {curve.least.step:,}",
            )
    if (curve := records.curve("validation", "perplexity")) is not None:
        yield "perplexity", f"{curve.last.value:.4g}"
    if (curve := records.curve("scores", "score")) is not None:
        yield (
            "score",
            f"{curve.last.value:.4f}, best {curve.greatest.value:.4f} at step {curve.greatest.step:,}",
        )
    counted, at = _counted(run)
    for name, key in (("training tokens", "consumed_tokens"), ("samples", "consumed_samples")):
        if isinstance(value := counted.get(key), int):
            yield name, f"{value:,}" + ("" if at == records.last_step else f" at step {at:,}")
    if (curve := records.curve("train", "tokens_per_second")) is not None:
        yield "tokens/s, mean", format_count(curve.mean)
    if (share := _share(run)) is not None:
        yield share
    if records.first_time is not None:
        yield "first and last record", f"{utc(records.first_time)} to {utc(records.last_time)}"
        yield "training time, pauses excluded", format_duration(records.seconds)
    yield "restarts", f"{max(records.num_starts - 1, int_or_0(run.state.get('restarts'))):,}"
    yield "skipped steps (non-finite gradients)", f"{int_or_0(records.last_train.get('skipped_steps')):,}"
    for name in ("parameters", "processes"):
        if isinstance(start.get(name), int):
            yield name, f"{start[name]:,}"
    for name in ("layout", "device", "program"):
        if name in start:
            yield name, shorten(_brief(str(start[name])), MAX_TEXT)


def _counted(run: RunReport) -> tuple[dict[str, Any], int]:
    """The counts of consumed samples and tokens and their step: from the last record, or from a later checkpoint."""
    recorded = run.records.last_train, int_or_0(run.records.last_train.get("step"))
    saved = run.state, run.checkpoints[0].step if run.checkpoints else 0
    return saved if run.state and recorded[1] < saved[1] <= run.records.last_step else recorded


def _brief(text: str) -> str:
    """The text with each commit's hash cut to 10 digits."""
    return re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", text)


def int_or_0(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _share(run: RunReport) -> tuple[str, str] | None:
    """The mean of the utilization that the run reports: of the measured peak, or MFU."""
    share, machine = (run.records.curve("train", name) for name in ("machine_share", "machine_tflops"))
    if share is not None and machine is not None:
        return (
            "share of the measured peak, mean",
            f"{_percent(share.mean)}; peak measured during the run: {machine.last.value:.3g} TFLOP/s per rank",
        )
    mfu = run.records.curve("train", "mfu")
    return None if mfu is None else ("MFU, mean", _percent(mfu.mean))


# Curves


def _charts(charts: Sequence[Chart]) -> list[Html]:
    drawn = [draw(chart) for chart in charts if chart.lines]
    return [element("div", *drawn, class_="charts")] if drawn else []


def _lines(
    runs: Sequence[RunReport], kind: str, name: str, label: str = "", thin: bool = False
) -> list[Line]:
    """One line for each run that has the number. Args: label: of the number, in the caption."""
    found = [(number, run, run.records.curve(kind, name)) for number, run in enumerate(runs)]
    names = [", ".join(filter(None, (run.name if len(runs) > 1 else "", label))) for run in runs]
    return [Line(curve, number, names[number], thin) for number, run, curve in found if curve is not None]


def _restarts(runs: Sequence[RunReport]) -> list[tuple[int, int]]:
    return [
        (number, start["step"])
        for number, run in enumerate(runs)
        for start in run.records.starts
        if start["step"] > 0
    ]


def _loss_charts(runs: Sequence[RunReport]) -> list[Chart]:
    names = dict.fromkeys(
        name
        for kind in ("validation", "train")
        for run in runs
        for name in run.records.curves[kind]
        if name.startswith("loss/")
    )
    charts = []
    for name in ("loss", *names):
        lines = [
            *_lines(runs, "train", name, "training", thin=True),
            *_lines(runs, "validation", name, "validation"),
        ]
        levels = [
            (number, run.unigram[name], "unigram model")
            for number, run in enumerate(runs)
            if name in run.unigram
        ]
        levels = [level for level in levels if math.isfinite(level[1])]
        title = "all objectives" if name == "loss" else shorten(name.removeprefix("loss/"), 60)
        charts.append(Chart(title, lines, "{:.4g}".format, levels, _restarts(runs)))
    return _distinct(charts)


def _distinct(charts: Sequence[Chart]) -> list[Chart]:
    """Each set of curves once: a loss that is the only one, or a metric that is the score, under its own name."""
    found: dict[Any, Chart] = {}
    for chart in charts:
        key = tuple((line.run, line.thin, tuple(line.curve.points())) for line in chart.lines)
        found[key] = replace(found[key], title=chart.title) if key in found else chart
    return list(found.values())


def _loss_unit(runs: Sequence[RunReport]) -> str:
    """Of a task as its kind has it; per sentence for OPTIMUS, whose loss bounds a sentence's likelihood."""
    units = []
    for run in runs:
        kind = _setting(run, "task.kind")
        if kind is None:
            is_optimus = run.records.curve("train", "beta") is not None
            units.append("nats per sentence" if is_optimus else "nats per token")
        elif kind == "regression":
            units.append("squared error")
        else:
            by_tokens = {
                "tagging": "word",
                **dict.fromkeys(("seq2seq", "blanks", "language_modelling"), "token"),
            }
            units.append(f"nats per {by_tokens.get(kind, 'sample')}")
    return " or ".join(dict.fromkeys(units))


def _score_charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Metrics of a task's validation, the score that chooses the best checkpoint first."""
    names = dict.fromkeys(["score", *(name for run in runs for name in run.records.curves["scores"])])
    return _distinct(
        [
            Chart(
                shorten(name, 60), _lines(runs, "scores", name), "{:.4g}".format, (), _restarts(runs),
                also="lowest" if is_cost(name.rpartition("/")[2]) else "highest",
            )
            for name in names
        ]
    )  # fmt: skip


def _latent_charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Charts of the latent space, for runs of the objective optimus."""
    measured = (("mutual information, nats", "mutual_information"), ("active units", "active_units"))
    charts = [Chart(title, _lines(runs, "validation", name), "{:.4g}".format) for title, name in measured]
    options: dict[str, Any] = {"from_zero": True, "also": "highest"}
    return [*charts, _chart(runs, "KL weight (beta)", "beta", "{:.3g}".format, **options)]


def _chart(runs: Sequence[RunReport], title: str, name: str, text: Text, **options: Any) -> Chart:
    """A chart of one number of the training records. Args: options: further fields of Chart."""
    return Chart(title, _lines(runs, "train", name), text, (), _restarts(runs), **options)


def _optimization_charts(runs: Sequence[RunReport]) -> list[Chart]:
    scales = [curve for run in runs if (curve := run.records.curve("train", "loss_scale")) is not None]
    options: dict[str, Any] = {"logarithmic": True, "also": "highest"}
    charts = [
        _chart(runs, "learning rate", "lr", "{:.3g}".format, from_zero=True, also="highest"),
        _chart(runs, "gradient norm before clipping", "grad_norm", "{:.3g}".format, **options),
    ]
    if any(run.records.curve("train", "z_loss") is not None for run in runs):
        charts.append(_chart(runs, "z-loss, not included in the loss", "z_loss", "{:.3g}".format))
    if any(curve.least.value < curve.greatest.value for curve in scales):
        charts.append(_chart(runs, "loss scale", "loss_scale", "{:g}".format, **options))
    return charts


def _speed_charts(runs: Sequence[RunReport]) -> list[Chart]:
    options: dict[str, Any] = {"from_zero": True, "also": "mean"}
    return [
        _chart(runs, "tokens per second", "tokens_per_second", format_count, **options),
        _chart(runs, "share of the measured peak", "machine_share", _percent, **options),
        _chart(runs, "MFU", "mfu", _percent, **options),
        _chart(runs, "TFLOP/s per device", "tflops_per_device", "{:.3g}".format, **options),
        _chart(
            runs, "peak memory of rank 0, GiB", "memory_gib", "{:.3g}".format, from_zero=True, also="highest"
        ),
        _chart(runs, "data waiting time, share", "data_share", _percent, **options),
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


# Tables of each run


def _scores(run: RunReport, runs: Sequence[RunReport]) -> Iterator[Html]:
    """A column for each model or file, a row for each metric."""
    if not run.scores:
        return
    yield from _heading(run, runs)
    names = dict.fromkeys(name for figures in run.scores.values() for name in figures)
    rows: list[list[object]] = [
        [shorten(name, 60), *(_figure(figures.get(name)) for figures in run.scores.values())]
        for name in names
    ]
    yield table(["", *(shorten(name, 60) for name in run.scores)], rows, "numbers")


def _minimal_pairs(run: RunReport, runs: Sequence[RunReport]) -> Iterator[Html]:
    if run.minimal_pairs:
        yield from [*_heading(run, runs), *pair_figure(run)]


def _figure(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"


def _fillings(run: RunReport, runs: Sequence[RunReport]) -> Iterator[Html]:
    """One table for each text: its blanks are columns, steps are rows."""
    texts: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for record in run.records.fillings:
        items = record.get("fillings")
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict) and isinstance(item.get("text"), str):
                texts.setdefault(item["text"], []).append((record["step"], item))
    if texts:
        yield from _heading(run, runs)
    for text, items in texts.items():
        originals = _words(items[-1][1].get("originals"))
        rows: list[list[object]] = [["original", *originals]]
        for step, item in items:
            filled = _words(item.get("answers"))[: len(originals)]
            filled += [MISSING] * (len(originals) - len(filled))
            rows.append([f"step {step:,}", *map(_span, filled, originals)])
        yield element("p", shorten(text, 4 * MAX_TEXT), class_="text")
        yield table(["", *(f"blank {number}" for number in range(1, len(originals) + 1))], rows)


def _words(value: Any) -> list[str]:
    return [shorten(str(word), MAX_TEXT) for word in value[:20]] if isinstance(value, list) else []


def _span(filled: str, original: str) -> object:
    if not filled:
        return element("span", "nothing", class_="weak")
    return element("span", filled, class_="right") if filled == original else filled


def _events(run: RunReport, runs: Sequence[RunReport]) -> Iterator[Html]:
    events, hidden = run.records.events, run.records.num_events - len(run.records.events)
    if not events:
        return
    yield from _heading(run, runs)
    if hidden:
        yield element("p", f"The {hidden:,} oldest are not shown.", class_="weak")
    rows: list[list[object]] = [
        [f"{event['step']:,}", utc(event.get("time")), shorten(_event_text(event), MAX_TEXT)]
        for event in events
    ]
    yield table(["step", "time", "what"], rows, "events")


def _event_text(event: dict[str, Any]) -> str:
    if event["kind"] == "event":
        return str(event.get("event", ""))
    again = event.get("restarts")
    what = "started" if not again else f"resumed from step {event['step']:,} (restart {again})"
    facts = [str(event[name]) for name in ("layout", "compared_with", "program") if name in event]
    return f"{what}, processes {event.get('processes', '?')}: {_brief('; '.join(facts))}"


def _corpora(run: RunReport, runs: Sequence[RunReport]) -> Iterator[Html]:
    data = run.config.get("data")
    facts = run.state.get("data")
    rows: list[list[object]] = []
    for split in ("train", "validation"):
        entries = data.get(split) if isinstance(data, dict) else None
        known = facts if split == "train" and isinstance(facts, list) else []
        for number, entry in enumerate(entries if isinstance(entries, list) else []):
            entry = entry if isinstance(entry, dict) else {}
            fact = known[number] if number < len(known) and isinstance(known[number], dict) else {}
            sizes = [
                f"{fact[name]:,}" if isinstance(fact.get(name), int) else MISSING
                for name in ("documents", "tokens")
            ]
            prefix = shorten(str(entry.get("prefix", MISSING)), MAX_TEXT)
            rows.append([split, element("code", prefix), _corpus_share(entry), *sizes])
    if rows:
        yield from _heading(run, runs)
        yield table(["split", "prefix", "weight", "documents", "tokens"], rows)


def _corpus_share(corpus: Mapping[str, Any]) -> str:
    """A corpus's weight, or its share of the tokens, and its cap."""
    tokens, cap = corpus.get("tokens"), corpus.get("max_epochs")
    share = str(corpus.get("weight", MISSING)) if tokens is None else f"{tokens} of the tokens"
    return share if cap is None else f"{share}, at most {cap} epochs"


def _phases(run: RunReport, runs: Sequence[RunReport]) -> Iterator[Html]:
    for phases in phase_table(run):
        yield from [*_heading(run, runs), phases]


def _checkpoints(run: RunReport, runs: Sequence[RunReport]) -> Iterator[Html]:
    if not run.checkpoints:
        return
    yield from _heading(run, runs)
    if run.num_checkpoints > len(run.checkpoints):
        yield element("p", f"The latest {len(run.checkpoints)} of {run.num_checkpoints:,}.", class_="weak")
    rows: list[list[object]] = []
    for saved in run.checkpoints:
        problem = element("span", shorten(saved.problem, MAX_TEXT), class_="bad")
        size = problem if saved.bytes is None else f"{saved.bytes / 2**20:,.1f} MiB in {saved.ranks} files"
        rows.append([f"{saved.step:,}", saved.saved_at or MISSING, size])
    yield table(["step", "saved at", "size"], rows, "events")


# Configuration


def _configuration(runs: Sequence[RunReport]) -> list[Html]:
    trees, defaults = [flat(run.config) for run in runs], [flat(run.defaults) for run in runs]
    default = next(filter(None, defaults), {})
    elements = []
    rows: list[list[object]] = []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [tree.get(key) for tree in trees]
        if len(set(values)) > 1 or (default and values[0] != default.get(key)):
            shown = [MISSING if value is None else shorten(value, MAX_TEXT) for value in values]
            rows.append(
                [
                    element("code", shorten(key, MAX_TEXT)),
                    *shown,
                    shorten(default.get(key, MISSING), MAX_TEXT),
                ]
            )
    if rows:
        elements.append(
            element("p", "Settings that differ from the defaults or between the runs.", class_="weak")
        )
        elements.append(table(["setting", *(run.name for run in runs), "default"], rows))
    for run in runs:
        if run.config:
            text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
            title = f"Full configuration of {run.name}"
            elements.append(element("details", element("summary", title), element("pre", text, tabindex="0")))
    return elements
