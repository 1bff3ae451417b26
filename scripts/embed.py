#!/usr/bin/env python3
"""Write the vectors of texts, a row a text. See docs/embeddings.md.

    python scripts/embed.py --checkpoint runs/bert --input texts.txt --output vectors.npy
    python scripts/embed.py --checkpoint runs/bert --input 'queries/*.jsonl' --prompt query --output queries.parquet

Takes runs in any layout, single checkpoints, exported directories, and directories of sentence-transformers. Texts are
the lines of .txt files, or a field of JSON lines, CSV or parquet. Settings of the section `embedding` on top of the
run's own say how vectors are made. The same command continues one that was stopped.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

# isort: split
from data_utils.common.errors import (
    INTERRUPTED_STATUS,
    ArgumentParser,
    ConfigError,
    DataError,
    expanded_path,
    run_command,
)
from data_utils.common.files import require_named
from data_utils.common.settings import merge, parse_override
from megatron_lite.checkpoint.resolve_path import MODEL_OR_EXPORT_PATH, resolve_model
from megatron_lite.finetune.setup import is_export

BATCH_TOKENS = 16384  # embedder.BATCH_TOKENS, whose file imports torch
ENDINGS = (".npy", ".parquet")
INTERRUPTED = "interrupted before the output was complete; run the command again to continue"


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="PATH", help="run, checkpoint or export")
    text = "files, globs, directories of parts and URLs with texts"
    add("--input", required=True, type=expanded_path, nargs="+", metavar="FILE", help=text)
    text = ".npy: fp32 [texts, numbers]; .parquet: the columns text and vector"
    add("--output", required=True, type=Path, metavar="FILE", help=text)
    add("--text-key", default="text", help="field or column with the text (default: text)")
    text = "name of a prompt in embedding.prompts; '' = none (default: embedding.default_prompt)"
    add("--prompt", metavar="NAME", help=text)
    text = "only the first N numbers of each vector, normalized after the cut (default: all)"
    add("--dimensions", type=int, metavar="N", help=text)
    add("--processes", type=int, metavar="N", help="default: one for each GPU, or else for each core")
    text = f"tokens of a forward pass (default {BATCH_TOKENS})"
    add("--batch-tokens", type=int, default=BATCH_TOKENS, metavar="N", help=text)
    add("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
    text = "settings of the section embedding, for example embedding.pooling=cls"
    add("overrides", nargs="*", metavar="section.key=value", help=text)
    arguments = parser.parse_intermixed_args()
    for name in ("dimensions", "processes", "batch_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    path = resolve_model(arguments.checkpoint, "--checkpoint", MODEL_OR_EXPORT_PATH)
    require_named(arguments.output, "--output", ENDINGS)
    if arguments.output.exists():
        raise DataError(f"--output {arguments.output} exists; remove it, or choose another.")
    tree = settings_of(arguments.overrides, path)
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.embedding.embedder import TextFormat, embedding_config
    from megatron_lite.embedding.files import Job, TextFiles, embed_files, use_one_thread
    from megatron_lite.finetune.checkpoints import opened

    files = TextFiles(arguments.input, arguments.text_key)
    use_one_thread()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    try:
        with opened(path, arguments.tokenizer, tree) as run:
            config = embedding_config(run, tree.get("embedding", {}))
            text_format = TextFormat(run, config, arguments.prompt)
            job = Job(run, text_format, arguments.dimensions, arguments.batch_tokens)
            count, size = embed_files(job, files, arguments.output, arguments.processes)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return INTERRUPTED_STATUS
    print(f"{arguments.output}: {count:,} vectors of {size:,} numbers")
    return 0


def settings_of(overrides: list[str], path: Path) -> dict[str, Any]:
    """The settings of the command line. Raises: ConfigError for others than those of `embedding` of a run."""
    tree: dict[str, Any] = {}
    for override in overrides:
        if not override.startswith("embedding.") and not is_export(path):
            raise ConfigError(
                f"{override} is given, but the run {path} has its own; only settings of embedding can be replaced."
            )
        tree = merge(tree, parse_override(override))
    return tree


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
