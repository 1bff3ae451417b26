#!/usr/bin/env python3
"""Build a token dataset (.bin, .idx and manifest) from JSONL, parquet or text files. See docs/data.md."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_utils.build import BuildConfig, build_corpus
from data_utils.documents import BAD_RECORD_POLICIES, DEFAULT_MAX_BAD_RECORDS, TEXT_SPLITS
from data_utils.tokenizers import KINDS, TokenizerConfig, load_tokenizer
from megatron_lite.errors import run_command

INTERRUPTED_STATUS = 130


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files or globs: .jsonl .txt (each also .gz .zst) .parquet")
    add("--output", required=True, help="prefix of the files to write, for example data/corpus")
    add("--tokenizer-kind", required=True, choices=KINDS)
    add("--tokenizer-path", required=True, help="the tokenizer's file or directory")
    add("--cased", action="store_true", help="bert_wordpiece: keep upper case and accents")
    add(
        "--shared-command-tokens",
        action="store_true",
        help="sentencepiece: gMASK shares the id of eop, as in GLM-10B-Chinese",
    )
    add("--text-key", default="text", help="field or column that holds the text (default: text)")
    add("--text-split", default="file", choices=TEXT_SPLITS, help="how .txt files are cut (default: file)")
    add("--split", default="", help="NAME=FRACTION,...: several datasets, such as train=0.98,validation=0.02")
    add("--split-seed", type=int, default=0, help="another seed gives other splits (default: 0)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    add("--on-bad-record", default="error", choices=BAD_RECORD_POLICIES, help="(default: error)")
    add(
        "--max-bad-records",
        type=int,
        default=DEFAULT_MAX_BAD_RECORDS,
        help=f"with skip: stop beyond this many (default: {DEFAULT_MAX_BAD_RECORDS})",
    )
    add("--overwrite", action="store_true", help="replace existing output")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    config = BuildConfig(
        inputs=arguments.input,
        output=arguments.output,
        text_key=arguments.text_key,
        text_split=arguments.text_split,
        split=arguments.split,
        split_seed=arguments.split_seed,
        workers=arguments.workers,
        on_bad_record=arguments.on_bad_record,
        max_bad_records=arguments.max_bad_records,
        overwrite=arguments.overwrite,
    )
    tokenizer = TokenizerConfig(
        kind=arguments.tokenizer_kind,
        path=arguments.tokenizer_path,
        lowercase=not arguments.cased,
        fixed_command_tokens=not arguments.shared_command_tokens,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    try:
        report = build_corpus(config, partial(load_tokenizer, tokenizer))
    except KeyboardInterrupt:
        print("interrupted before the output was complete; run the command again", file=sys.stderr)
        return INTERRUPTED_STATUS
    print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    run_command(main)
