"""The page about a cleaning run: what came in, what went out, what each rule removed, with examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
            _section("Largest groups of near-duplicates", *_groups(report.get("largest_groups", ()))),
            _section("Examples", *_examples(report["rules"])),
            _section("Records left out by the reader", *_records(report["records"])),
            _section("Recipe", *_recipe(report)),
        ],
    )


def _section(title: str, *parts: object) -> Html:
    return element("section", element("h2", title), *parts)


def _overview(report: Mapping[str, Any]) -> Html:
    steps = {"read": report["in"], **{f"after {step}": left for step, left in report["after"].items()}}
    rows: list[list[object]] = [
        [
            name, f"{left['documents']:,}", _share(left, report["in"], "documents"), f"{left['bytes']:,}",
            _share(left, report["in"], "bytes"),
        ]
        for name, left in {**steps, "written": report["out"]}.items()
    ]  # fmt: skip
    return table(["", "documents", "of all", "bytes of text", "of all"], rows, "numbers")


def _share(part: Mapping[str, int], whole: Mapping[str, int], key: str) -> str:
    return f"{100 * part[key] / max(whole[key], 1):.2f} %"


def _rules(report: Mapping[str, Any]) -> Iterator[Html]:
    before, rules = report["in"], report["rules"]
    rows: list[list[object]] = [
        [
            name, f"{rule['documents']:,}", _share(rule, before, "documents"), f"{rule['parts']:,}",
            f"{rule['bytes']:,}", _share(rule, before, "bytes"), "removed" if rule["removed"] else "only reported",
        ]
        for name, rule in rules.items()
    ]  # fmt: skip
    if not rows:
        yield element("p", "No rule met a document.")
        return
    yield element(
        "p",
        "A document counts for the first rule that removes it. Parts are lines and the like that are cut out of "
        "documents. Bytes read = bytes written + bytes removed by all rules.",
        class_="weak",
    )
    yield table(["rule", "documents", "of all", "parts", "bytes", "of all", ""], rows, "numbers")


def _groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    if not groups:
        yield element("p", "There is none.")
        return
    rows: list[list[object]] = [[f"{group['documents']:,}", *_stayed(group["stayed"])] for group in groups]
    yield table(["documents", *_STAYED], rows)


_STAYED = ("place of the one that stayed", "beginning of its text")


def _stayed(stayed: Mapping[str, str] | None) -> list[object]:
    return [stayed["at"], stayed["text"]] if stayed else ["a held-out text", ""]


def _examples(rules: Mapping[str, Any]) -> Iterator[Html]:
    for name, rule in rules.items():
        examples = rule["examples"]
        names: list[object] = ["place", "beginning of the text"]
        rows: list[list[object]] = [[example["at"], example["text"]] for example in examples]
        if examples and "stayed" in examples[0]:
            names += _STAYED
            rows = [[*row, *_stayed(ex["stayed"])] for row, ex in zip(rows, examples, strict=True)]
        count = f"{len(rows)} of {rule['parts'] or rule['documents']:,}"
        yield element("details", element("summary", f"{name}: {count}"), table(names, rows))


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
