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
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_utils.base.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.base.files import require_directory
from data_utils.text.tokenizers import PROMPT_MARKERS
from megatron_lite.config.generation import GenerationConfig

if TYPE_CHECKING:  # it imports torch
    from megatron_lite.generate.open_run import Run

TOGETHER = 16  # texts that are computed at a time


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "run directory (newest valid checkpoint), or one step_... of it"
    add("--checkpoint", required=True, type=Path, help=text)
    text = "a text, with blanks for a run that fills them; may be repeated"
    add("--text", action="append", default=[], help=text)
    add("--input", type=Path, help="file with one text per line")
    add("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
    add("--json", action="store_true", help="one JSON object per text: text, spans, filled; or text, answer")
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
    blanks = {blank for blank in PROMPT_MARKERS for text in texts if blank in text}
    if blanks:
        require_blanks(texts)
    require_directory(arguments.checkpoint, "give a run directory or one of its checkpoints")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.generate.decoders import may_write
    from megatron_lite.generate.open_run import open_run

    opened = open_run(arguments.checkpoint, arguments.tokenizer)
    work = answer if may_write(opened, has_blanks=bool(blanks)) else fill
    if work is fill:
        opened.require_blank_infilling(blanks)
        require_blanks(texts)
    for text, parts in work(opened.with_model(), config, texts):
        if not arguments.json:
            print("".join(f"[{part}]" if i % 2 else part for i, part in enumerate(parts)))
        elif work is fill:
            print_json(text=text, spans=parts[1::2], filled="".join(parts))
        else:
            print_json(text=text, answer=parts[1])


def print_json(**result: Any) -> None:
    print(json.dumps(result, ensure_ascii=False))


def require_blanks(texts: Iterable[str]) -> None:
    for text in texts:
        if not any(blank in text for blank in PROMPT_MARKERS):
            raise DataError(
                f"text {text[:60]!r} has no blank; mark at least one with {', '.join(PROMPT_MARKERS)}."
            )


def fill(run: Run, config: GenerationConfig, texts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each text, and its parts: what it says, a span, what it says, ..."""
    from megatron_lite.generate.decoders import ignored_tokens
    from megatron_lite.generate.filling import BlankFiller, blank_context, insert_spans

    special, decode = run.tokenizer.special, run.tokenizer.decode
    filler = BlankFiller(run.model, special, config, ignored_tokens(run.tokenizer, config))
    encoded = [run.tokenizer.encode_with_specials(text) for text in texts]
    contexts = [blank_context(tokens, special) for tokens in encoded]
    for context in contexts:  # refuse any text before the first answer is printed
        filler.require_room(context)
    for first in range(0, len(texts), TOGETHER):
        part = slice(first, first + TOGETHER)
        found = filler.fill_all(contexts[part])
        for text, tokens, spans in zip(texts[part], encoded[part], found, strict=True):
            yield text, [decode(part) for part in insert_spans(tokens, spans, special)]


def answer(run: Run, config: GenerationConfig, texts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each text, and its parts: itself, and what the run writes on it."""
    from megatron_lite.generate.decoders import decoder_of

    decoder = decoder_of(run, config)
    contexts = [decoder.context(run.tokenizer.encode_with_specials(text)) for text in texts]
    for context in contexts:
        decoder.require_room(context)
    for first in range(0, len(texts), TOGETHER):
        part = slice(first, first + TOGETHER)
        for text, tokens in zip(texts[part], decoder.generate(contexts[part]), strict=True):
            yield text, [text, run.tokenizer.decode(tokens)]


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
