#!/usr/bin/env python3
"""Fill the [MASK], [sMASK] and [gMASK] of texts with a trained model, or answer texts with a run of another objective.

A run of blank_infilling fills blanks. One of causal or prefix_lm continues a text. One of unilm, unilmv2, t5, bart or
mass writes a text on a text, as it has learnt: T5 the hidden spans, BART the whole text, a fine-tuned run the target.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from data_utils.common.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.tokenizers.tokenizer import PROMPT_MARKERS
from megatron_lite.checkpoint.resolve_path import resolve_model
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.models.optimus.inputs import read_lines


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "run directory (latest valid checkpoint), or a step_... directory"
    add("--checkpoint", required=True, type=Path, help=text)
    text = "prompt; with blanks for a run that fills them; repeatable"
    add("--text", action="append", default=[], help=text)
    add("--input", type=Path, help="file with one prompt per line")
    add("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
    add(
        "--json",
        action="store_true",
        help="write one JSON object per prompt: text, spans, filled; or text, answer",
    )
    for field in fields(GenerationConfig):
        kind = {"str": str, "int": int, "float": float}[str(field.type)]
        text = f"{field.metadata['help']} (default: {field.default})"
        add("--" + field.name.replace("_", "-"), type=kind, default=field.default, help=text)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    config = GenerationConfig(
        **{field.name: getattr(arguments, field.name) for field in fields(GenerationConfig)}
    )
    texts = list(arguments.text)
    if arguments.input is not None:
        texts += read_lines(arguments.input, "--input", "text", keep_spaces=True)
    if not texts:
        raise ConfigError("no text given; pass --text 'Paris is the [MASK] of France.' or --input FILE.")
    blanks = {blank for blank in PROMPT_MARKERS for text in texts if blank in text}
    if blanks:
        require_blanks(texts)
    resolve_model(arguments.checkpoint, "--checkpoint")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.inference.open_run import open_run
    from megatron_lite.inference.texts import complete, fills_blanks, make_text_generator

    opened = open_run(arguments.checkpoint, arguments.tokenizer)
    fills = fills_blanks(opened, blanks)
    if fills:
        require_blanks(texts)
    run = opened.with_model()
    for text, segments, *_ in complete(run, make_text_generator(run, config, fills), texts):
        if not arguments.json:
            print("".join(f"[{segment}]" if i % 2 else segment for i, segment in enumerate(segments)))
        elif fills:
            print_json(text=text, spans=segments[1::2], filled="".join(segments))
        else:
            print_json(text=text, answer=segments[1])


def print_json(**result: Any) -> None:
    print(json.dumps(result, ensure_ascii=False))


def require_blanks(texts: Iterable[str]) -> None:
    for text in texts:
        if not any(blank in text for blank in PROMPT_MARKERS):
            raise DataError(
                f"text {text[:60]!r} has no blank; mark at least one with {', '.join(PROMPT_MARKERS)}."
            )


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
