#!/usr/bin/env python3
"""Clean text before a corpus build: filters, duplicates, near-duplicates, evaluation texts. See docs/cleaning.md.

    python scripts/clean_corpus.py --recipe fineweb --input 'raw/*.parquet' --output clean
    python scripts/preprocess_data.py --input 'clean/text/*.jsonl' ...

The library datatrove does the work: pip install '.[clean]'. The same command continues a run that was stopped. With
--executor slurm the command submits one job array after another and waits for each.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_utils.cleaning.recipe import read_recipe
from data_utils.cleaning.run import CleaningConfig, clean_corpus, require_datatrove
from data_utils.common.cores import usable_cores
from data_utils.common.errors import (
    INTERRUPTED_STATUS,
    ArgumentParser,
    ConfigError,
    expanded_path,
    printable,
    run_command,
)
from data_utils.corpus.documents import add_reading_options
from megatron_lite.report.cleaning import page

INTERRUPTED = "interrupted before the output was complete; run the command again to continue"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "YAML file of rules, or the name of one in configs/cleaning/: gopher, c4, fineweb, wikipedia-like"
    add("--recipe", type=expanded_path, required=True, help=text)
    text = "files, globs, directories of parts and URLs, as scripts/preprocess_data.py takes them"
    add("--input", type=expanded_path, dest="inputs", nargs="+", required=True, help=text)
    text = "new directory for text/*.jsonl, manifest.json, report.html and report.json"
    add("--output", type=Path, required=True, help=text)
    add_reading_options(parser)
    text = "remove, or report (`contaminated` of the recipe), documents that share 13 words with these evaluation texts"
    add(
        "--decontaminate",
        type=expanded_path,
        dest="evaluation_inputs",
        nargs="+",
        default=[],
        metavar="FILE",
        help=text,
    )
    text = "validation texts of your own: their near-duplicates are removed from the output, and they are not in it"
    add("--held-out", type=expanded_path, nargs="+", default=[], metavar="FILE", help=text)
    text = "processes of this machine, jobs of SLURM, or tasks of Ray (default: local)"
    add("--executor", default="local", help=text)
    text = "parts of the work, each a file of the output; a stopped run repeats unfinished ones (default: --workers)"
    add("--tasks", type=int, help=text)
    add("--workers", type=int, default=usable_cores(), help="tasks at the same time (default: all cores)")
    add("--partition", help="of SLURM")
    add("--time", help="of SLURM: the limit of a task, minutes or hours:minutes:seconds")
    add("--cpus-per-task", type=int, help="of SLURM and Ray (default: 1); more give a task more memory")
    add("--gigabytes-per-cpu", type=int, help="of SLURM and Ray: memory (default: 2)")
    add("--restart", action="store_true", help="discard the work of a stopped run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    recipe = read_recipe(args.recipe)
    require_datatrove()
    # Late: they need datatrove.
    from data_utils.cleaning.executors import Execution
    from data_utils.cleaning.reader import Reading

    problems = []
    try:
        execution = Execution(
            executor=args.executor,
            workers=args.workers,
            partition=args.partition,
            time=args.time,
            cpus_per_task=args.cpus_per_task,
            gigabytes_per_cpu=args.gigabytes_per_cpu,
        )
    except ConfigError as error:
        problems.append(str(error))
    try:
        config = CleaningConfig(
            recipe=recipe,
            inputs=args.inputs,
            output=args.output,
            evaluation_inputs=args.evaluation_inputs,
            held_out=args.held_out,
            reading=Reading(args.text_key, args.text_split, args.on_bad_record, args.max_bad_records),
            tasks=max(args.workers, 1) if args.tasks is None else args.tasks,  # wrong workers are named once
            restart=args.restart,
        )
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(" ".join(problems))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    try:
        report = clean_corpus(config, execution, page, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return INTERRUPTED_STATUS
    before, after = report["in"], report["out"]
    print(
        f"{after['documents']:,} of {before['documents']:,} documents, {after['bytes']:,} of {before['bytes']:,} bytes"
    )
    for name, rule in report["rules"].items():
        met = f"{rule['parts']:,} parts" if rule["parts"] else f"{rule['documents']:,} documents"
        print(f"  {name}: {met}, {rule['bytes']:,} bytes {'removed' if rule['removed'] else 'reported'}")
    print("".join(f"  {printable(line)}\n" for line in removed(report)), end="")
    print(f"report: {args.output / 'report.html'}")
    return 0


def removed(report: Mapping[str, Any]) -> Iterator[str]:
    """What the readers left out of input, evaluation and held-out texts, as the summary of a build has it."""
    records = report["records"]
    if records["empty_documents"] or records["blank_lines"]:
        yield f"skipped: {records['empty_documents']:,} empty documents, {records['blank_lines']:,} blank lines"
    for kind, count in records["bad"].items():
        yield f"skipped: {count:,} bad records ({kind})"
    for example in records["examples"]:
        yield f"  {example['at']}: {example['problem']}"
    evaluation = report.get("evaluation", {})
    if short := evaluation.get("texts_too_short"):
        yield (
            f"{short:,} of {evaluation['texts']:,} evaluation texts have fewer than {evaluation['words']} words and "
            "are not searched for"
        )
    for name, texts in (("evaluation", evaluation), ("held-out", report.get("held_out", {}))):
        for kind, count in texts.get("bad", {}).items():
            yield f"skipped: {count:,} bad records of the {name} texts ({kind})"


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
