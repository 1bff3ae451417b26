#!/usr/bin/env python3
"""Fill the [MASK], [sMASK] and [gMASK] of texts with a trained model."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

if __name__ == "__main__":
    import entry  # noqa: F401

from data_utils.base.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.base.files import require_directory
from data_utils.text.tokenizers import PROMPT_MARKERS
from megatron_lite.config.generation import GenerationConfig


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "run directory (newest valid checkpoint), or one step_... of it"
    add("--checkpoint", required=True, type=Path, help=text)
    add("--text", action="append", default=[], help="a text with blanks; may be repeated")
    add("--input", type=Path, help="file with one text per line")
    add("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
    add("--json", action="store_true", help="one JSON object per text: text, spans, filled")
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
    texts = [*arguments.text, *read_lines(arguments.input)]
    if not texts:
        raise ConfigError("no text given; pass --text 'Paris is the [MASK] of France.' or --input FILE.")
    for text in texts:
        if not any(blank in text for blank in PROMPT_MARKERS):
            raise DataError(
                f"text {text[:60]!r} has no blank; mark at least one with {', '.join(PROMPT_MARKERS)}."
            )
    require_directory(arguments.checkpoint, "give a run directory or one of its checkpoints")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.generate.filling import BlankFiller, blank_context, insert_spans
    from megatron_lite.generate.open_run import open_run

    opened = open_run(arguments.checkpoint, arguments.tokenizer)
    opened.require_blank_infilling({blank for blank in PROMPT_MARKERS for text in texts if blank in text})
    run = opened.with_model()
    filler = BlankFiller(run.model, run.tokenizer.special, config)
    encoded = [run.tokenizer.encode_with_specials(text) for text in texts]
    for tokens in encoded:  # refuse any text before the first answer is printed
        filler.require_room(blank_context(tokens, run.tokenizer.special))
    for text, tokens in zip(texts, encoded, strict=True):
        spans = filler.fill(blank_context(tokens, run.tokenizer.special))
        decode = run.tokenizer.decode
        parts = [decode(part) for part in insert_spans(tokens, spans, run.tokenizer.special)]
        if arguments.json:
            print(
                json.dumps({"text": text, "spans": parts[1::2], "filled": "".join(parts)}, ensure_ascii=False)
            )
        else:
            print("".join(f"[{part}]" if i % 2 else part for i, part in enumerate(parts)))


def read_lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"--input {path}: {error.strerror}; name a file with one text per line.") from None
    except UnicodeDecodeError:
        raise DataError(f"--input {path} is not UTF-8 text; convert it.") from None


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
