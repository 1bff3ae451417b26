"""The page about a cleaning run: what came in, what went out, what each rule removed, with examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from megatron_lite.report.html import Html, element, joined, table, whole_page


def page(report: Mapping[str, Any]) -> str:
    """The page of a report of `data_utils.cleaning.run`."""
    title = "Cleaning report"
    return whole_page(
        title,
        [
            element("h1", title),
            _section("Overview", _overview(report)),
            _section("Rules", *_rules(report)),
            _section("Examples", *_examples(report["rules"])),
            _section("Records left out by the reader", *_records(report["records"])),
            _section("Recipe", *_recipe(report)),
        ],
    )


def _section(title: str, *parts: object) -> Html:
    return element("section", element("h2", title), *parts)


def _overview(report: Mapping[str, Any]) -> Html:
    before, after = report["in"], report["out"]
    rows: list[list[object]] = [
        [
            "documents",
            f"{before['documents']:,}",
            f"{after['documents']:,}",
            _share(after, before, "documents"),
        ],
        ["bytes of text", f"{before['bytes']:,}", f"{after['bytes']:,}", _share(after, before, "bytes")],
    ]
    return table(["", "in", "out", "kept"], rows, "numbers")


def _share(part: Mapping[str, int], whole: Mapping[str, int], key: str) -> str:
    return f"{100 * part[key] / max(whole[key], 1):.2f} %"


def _rules(report: Mapping[str, Any]) -> Iterator[Html]:
    before, rules = report["in"], report["rules"]
    rows: list[list[object]] = [
        [
            name, f"{rule['documents']:,}", _share(rule, before, "documents"), f"{rule['bytes']:,}",
            _share(rule, before, "bytes"), "removed" if rule["removed"] else "only reported",
        ]
        for name, rule in rules.items()
    ]  # fmt: skip
    if not rows:
        yield element("p", "No rule met a document.")
        return
    yield element("p", "A document counts for the first rule that removes it.", class_="weak")
    yield table(["rule", "documents", "of all", "bytes", "of all", ""], rows, "numbers")
    removed = sum(rule["bytes"] for rule in rules.values() if rule["removed"])
    within = before["bytes"] - removed - report["out"]["bytes"]
    if within:
        yield element(
            "p", f"Within documents that stayed, or that a later rule removed, c4 cut out {within:,} bytes."
        )


def _examples(rules: Mapping[str, Any]) -> Iterator[Html]:
    for name, rule in rules.items():
        rows: list[list[object]] = [[example["at"], example["text"]] for example in rule["examples"]]
        shown = table(["place", "beginning of the text"], rows)
        yield element("details", element("summary", f"{name}: {len(rows)} of {rule['documents']:,}"), shown)


def _records(records: Mapping[str, Any]) -> Iterator[Html]:
    rows: list[list[object]] = [[name, f"{count:,}"] for name, count in records["bad"].items()]
    rows += [[name.replace("_", " "), f"{records[name]:,}"] for name in ("empty_documents", "blank_lines")]
    yield table(["", "records"], rows, "numbers")
    if examples := [[example["at"], example["problem"]] for example in records["examples"]]:
        yield table(["the first bad records", "problem"], examples)


def _recipe(report: Mapping[str, Any]) -> Iterator[Html]:
    recipe_file, versions = report["recipe_file"], report["versions"]
    yield element("p", f"{recipe_file['name']}, SHA-256 {recipe_file['sha256']}", class_="weak")
    yield element("p", ", ".join(f"{name} {version}" for name, version in versions.items()), class_="weak")
    if evaluation := report.get("evaluation"):
        yield element(
            "p",
            f"Evaluation texts: {evaluation['texts']:,}; {evaluation['texts_too_short']:,} of them have fewer than "
            f"{evaluation['words']} words and are not searched for. {sum(evaluation['bad'].values()):,} bad "
            "records were left out.",
        )
    if held_out := report.get("held_out"):
        bad = sum(held_out["bad"].values())
        yield element(
            "p", f"Held-out texts: {held_out['documents']:,} documents, {bad:,} bad records left out."
        )
    written = yaml.safe_dump(report["recipe"], sort_keys=False, allow_unicode=True)
    yield element("pre", joined(element("code", written)))
