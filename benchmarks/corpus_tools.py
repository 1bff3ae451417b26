#!/usr/bin/env python3
"""What a corpus build costs, compared with the tools that others build theirs with, on the same text and tokenizer.

    python benchmarks/corpus_tools.py --text corpus.jsonl --tokenizer tokenizer.json --work DIR --megatron-lm CHECKOUT

Whole runs, start-up, reading and writing included, each with --workers processes:

- ours: scripts/preprocess_data.py;
- megatron-lm: tools/preprocess_data.py of a checkout of Megatron-LM, with its HuggingFaceTokenizer;
- datatrove: its Megatron tokenizer, on a file for each worker;
- datasets: `load_dataset` of the JSON lines, `map` of transformers' fast tokenizer in batches, `save_to_disk`.

They take turns, --repeats times, each time in another order, because a machine that others use changes meanwhile. The
figures are medians: CPU seconds (user and system, of all processes), wall seconds, the ratios of both to ours, tokens
and peak memory. A tool that is not installed is left out. Exit status 1 if a tool makes another number of tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import orjson

from benchmarks.arguments import check_at_least, write_json
from benchmarks.preprocess import ROOT, Run, head
from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.common.files import require_writable

_BATCH = 1000  # of `datasets`, its default


def commands(work: Path, text: Path, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Tool -> the command that builds the text's tokens."""
    workers, tokenizer = str(arguments.workers), str(work / "tokenizer" / "tokenizer.json")
    itself = [sys.executable, str(Path(__file__).resolve()), "--text", str(text), "--tokenizer", tokenizer]
    itself += ["--work", str(work), "--workers", workers, "--tool"]
    ours = [sys.executable, str(ROOT / "scripts" / "preprocess_data.py"), "--input", str(text)]
    ours += ["--output", str(work / "ours"), "--overwrite", "--workers", workers]
    ours += ["--tokenizer-kind", "hf_json", "--tokenizer-path", tokenizer]
    found = {"ours": ours}
    if arguments.megatron_lm:
        script = Path(arguments.megatron_lm) / "tools" / "preprocess_data.py"
        megatron = [sys.executable, str(script), "--input", str(text), "--workers", workers]
        megatron += ["--output-prefix", str(work / "megatron"), "--tokenizer-type", "HuggingFaceTokenizer"]
        found["megatron-lm"] = [*megatron, "--tokenizer-model", str(work / "tokenizer")]
    for name in ("datatrove", "datasets"):
        if importlib.util.find_spec(name) is not None:
            found[name] = [*itself, name]
    return found


def with_datatrove(work: Path, text: Path, tokenizer: Path, workers: int) -> None:
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    output = work / "datatrove"
    shutil.rmtree(output, ignore_errors=True)
    pipeline = [
        JsonlReader(str(work / "parts"), glob_pattern="*.jsonl"),
        # Without a token at the end of documents, as the others.
        MegatronDocumentTokenizer(str(output), tokenizer_name_or_path=str(tokenizer), eos_token=""),
    ]
    LocalPipelineExecutor(pipeline, tasks=workers, workers=workers, logging_dir=str(output / "logs")).run()


def with_datasets(work: Path, text: Path, tokenizer: Path, workers: int) -> None:
    import datasets
    from transformers import PreTrainedTokenizerFast

    output = work / "datasets"
    shutil.rmtree(output, ignore_errors=True)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": fast(batch["text"], add_special_tokens=False)["input_ids"]}

    loaded = datasets.load_dataset(
        "json", data_files=str(text), split="train", cache_dir=str(output / "cache")
    )
    tokens = loaded.map(
        encode, batched=True, batch_size=_BATCH, num_proc=workers, remove_columns=loaded.column_names
    )
    tokens.save_to_disk(str(output / "saved"), num_proc=workers)


TOOLS: dict[str, Callable[[Path, Path, Path, int], None]] = {
    "datatrove": with_datatrove,
    "datasets": with_datasets,
}


def tokens_of(work: Path, tool: str) -> int:
    """The tokens of the text in a tool's output, without those that end a document."""
    if tool == "ours":
        manifest = orjson.loads((work / "ours.json").read_bytes())
        return manifest["num_tokens"] - manifest["num_documents"] * (manifest.get("eos") is not None)
    if tool == "datasets":
        import datasets

        lengths = (
            datasets.load_from_disk(str(work / "datasets" / "saved"))
            .data.column("input_ids")
            .combine_chunks()
        )
        return len(lengths.flatten())
    files = (
        [work / "megatron_text_document.bin"]
        if tool == "megatron-lm"
        else [*(work / "datatrove").glob("*.bin")]
    )
    return sum(file.stat().st_size for file in files) // 2  # uint16, for both of a vocabulary below 65,500


def split_for_workers(work: Path, text: Path, workers: int) -> None:
    """A file for each worker, as datatrove shares out files."""
    shutil.rmtree(work / "parts", ignore_errors=True)
    (work / "parts").mkdir()
    lines = text.read_bytes().splitlines(keepends=True)
    for worker in range(workers):
        (work / "parts" / f"{worker}.jsonl").write_bytes(b"".join(lines[worker::workers]))


def measure(work: Path, text: Path, arguments: argparse.Namespace) -> dict[str, list[Run]]:
    tools = commands(work, text, arguments)
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(work / "home"), "OMP_NUM_THREADS": "1"}
    runs: dict[str, list[Run]] = {name: [] for name in tools}
    for repeat in range(arguments.repeats):
        names = [*tools]
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            more = {"PYTHONPATH": str(arguments.megatron_lm)} if name == "megatron-lm" else {}
            runs[name].append(Run(tools[name], environment | more))
            last = runs[name][-1]
            print(f"{name}: {last.cpu_seconds:.1f} CPU s, {last.seconds:.1f} s", file=sys.stderr, flush=True)
    return runs


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--text", required=True, help="JSON lines with the field text")
    add("--tokenizer", required=True, help="tokenizer.json of fewer than 65,500 tokens")
    add("--work", required=True, help="directory for the outputs (several times --megabytes)")
    add("--megabytes", type=float, default=60, help="of the text, from its beginning (default: 60)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    add("--repeats", type=int, default=3, help="runs of each tool (default: 3)")
    add("--megatron-lm", metavar="CHECKOUT", help="of Megatron-LM; without it this tool is left out")
    add("--json", type=Path, help="also write the figures to this file")
    add("--tool", choices=TOOLS, help=argparse.SUPPRESS)  # of the processes that this one starts
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    work, text, tokenizer = Path(arguments.work).resolve(), Path(arguments.text), Path(arguments.tokenizer)
    if arguments.tool:
        TOOLS[arguments.tool](work, text, tokenizer, arguments.workers)
        return 0
    check_at_least(arguments, 1, "megabytes", "workers", "repeats")
    require_writable(work / "text", "--work")
    for option, path in (("--text", text), ("--tokenizer", tokenizer)):
        if not path.is_file():
            raise DataError(f"{option} {path} is no file; give one.")
    work.mkdir(parents=True, exist_ok=True)
    (work / "tokenizer").mkdir(exist_ok=True)
    shutil.copyfile(tokenizer, work / "tokenizer" / "tokenizer.json")
    (work / "tokenizer" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    shutil.copyfile(text, work / "text.jsonl")
    shorter, size = head(work / "text.jsonl", arguments.megabytes)
    split_for_workers(work, shorter, arguments.workers)
    Run(commands(work, work / "parts" / "0.jsonl", arguments)["ours"])  # compiles what is not compiled yet
    runs = measure(work, shorter, arguments)
    tokens = {name: tokens_of(work, name) for name in runs}
    print_table(runs, tokens, size)
    if arguments.json:
        figures = {
            name: {"cpu_seconds": [run.cpu_seconds for run in each], "seconds": [run.seconds for run in each]}
            for name, each in runs.items()
        }
        write_json(arguments.json, {"megabytes": size / 1e6, "tokens": tokens, "tools": figures})
    return int(len(set(tokens.values())) > 1)


def print_table(runs: dict[str, list[Run]], tokens: dict[str, int], size: int) -> None:
    def median(each: Sequence[Run], name: str) -> float:
        return statistics.median(getattr(run, name) for run in each)

    print(
        f"{size / 1e6:.1f} MB of text\n\n| tool | CPU s | times ours | wall s | times ours | tokens | peak MB |"
    )
    print("|---|---|---|---|---|---|---|")
    ours = {name: median(runs["ours"], name) for name in ("cpu_seconds", "seconds")}
    for tool, each in runs.items():
        cpu, wall = median(each, "cpu_seconds"), median(each, "seconds")
        spread = f"{min(run.cpu_seconds for run in each):.1f} to {max(run.cpu_seconds for run in each):.1f}"
        peak = max(run.peak_bytes for run in each) / 1e6
        print(
            f"| {tool} | {cpu:.1f} ({spread}) | {cpu / ours['cpu_seconds']:.1f} | {wall:.1f} | "
            f"{wall / ours['seconds']:.1f} | {tokens[tool]:,} | {peak:.0f} |"
        )


if __name__ == "__main__":
    run_command(main)
