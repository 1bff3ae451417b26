"""Load an export with transformers alone and let it fill blanks, and compare with the run that it was exported from.

    python -m scripts.quickstart.fill_export --export DIRECTORY --checkpoint RUN_DIRECTORY --text 'The [MASK] of it.'

Fails if both do not fill in the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data_utils.common.errors import ArgumentParser, run_command
from data_utils.common.files import require_directory
from megatron_lite.config.generation import GenerationConfig

DIFFERENT_STATUS = 1
MAX_LENGTH = 16


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    require_directory(args.export, "give a directory that scripts/convert_checkpoint.py export wrote")
    require_directory(args.checkpoint, "give a run directory or one of its checkpoints")
    from transformers import pipeline

    from megatron_lite.inference.filling import BlankFiller, blank_context
    from megatron_lite.inference.open_run import load_run

    # The task is one that the export itself brings.
    fill = pipeline("blank-infilling", model=str(args.export), trust_remote_code=True)  # type: ignore[call-overload]
    exported = fill(args.text, max_new_tokens=MAX_LENGTH)
    run = load_run(args.checkpoint)
    filler = BlankFiller(run.model, run.tokenizer.special, GenerationConfig(max_length=MAX_LENGTH))
    ours = filler.fill(blank_context(run.tokenizer.encode_with_specials(args.text), run.tokenizer.special))
    print(f"transformers: {exported['filled']}")
    if exported["span_ids"] != ours:
        print(f"the run itself fills in {[run.tokenizer.decode(span) for span in ours]}", file=sys.stderr)
        return DIFFERENT_STATUS
    print("the run itself fills in the same")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--export", required=True, type=Path, help="directory of an export")
    parser.add_argument("--checkpoint", required=True, type=Path, help="run directory or one step_... of it")
    parser.add_argument("--text", required=True, help="a text with blanks")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
