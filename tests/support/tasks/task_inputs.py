"""Small tokenizers, input formats and settings of tasks, and a document as text, for tests of tasks."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from support.data.tokenizer_files import BERT_SPECIALS, bert_vocab, byte_bpe_json, write_gpt2

from data_utils.common.batch_fields import Example
from data_utils.tasks.base import TargetGroup, TaskRecord
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.templates.input_formats import FORMAT_OF_OBJECTIVE, InputFormat
from data_utils.tasks.templates.inputs import Inputs
from data_utils.tasks.templates.render import Renderer
from data_utils.tokenizers.tokenizer import Tokenizer, load_tokenizer
from data_utils.tokenizers.tokenizer_readers import TokenizerConfig

ALL_MASKS = ("mask", "smask", "gmask")
WORDS = (
    "yes no maybe true false neither good bad great terrible world sports business tech right wrong and is it was in "
    "cold rain falls wet street man city river runs north south he she they box red blue green i we"
)


@functools.cache
def tokenizer(kind: str = "bert", added_tokens: str = "glm") -> Tokenizer:
    """`bert`: WordPiece of whole words and letters; `gpt2`: byte-level BPE, in which a word begins with its space."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if kind == "bert":
            vocab = dict.fromkeys([*BERT_SPECIALS, *WORDS.split(), *bert_vocab(), *'"?/*-&()_#$。'])
            (root / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
            config = TokenizerConfig(
                kind="bert_wordpiece", path=str(root / "vocab.txt"), added_tokens=added_tokens
            )
        elif kind == "gpt2":
            model = byte_bpe_json([])["model"]
            vocab = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
            write_gpt2(root / "gpt2", vocab, model["merges"])
            config = TokenizerConfig(kind="gpt2_bpe", path=str(root / "gpt2"), added_tokens=added_tokens)
        else:
            raise ValueError(json.dumps(kind))
        return load_tokenizer(config)


def form(objective: str = "blank_infilling", **more: Any) -> InputFormat:
    return InputFormat(FORMAT_OF_OBJECTIVE[objective], objective, **more)


def settings(**more: Any) -> TaskConfig:
    return TaskConfig(**{"name": "own", "kind": "cloze", "reader": "jsonl", **more})


def inputs(objective: str = "blank_infilling", kind_of_tokenizer: str = "bert", **more: Any) -> Inputs:
    return Inputs(settings(**more), tokenizer(kind_of_tokenizer), form(objective), 7)


def renderer(
    objective: str = "blank_infilling",
    kind_of_tokenizer: str = "bert",
    labels: tuple[str, ...] = (),
    **more: Any,
) -> Renderer:
    made = Renderer(settings(**more), tokenizer(kind_of_tokenizer), form(objective), 7, labels)
    made.check()
    return made


def record(label: Any = None, **fields: Any) -> TaskRecord:
    return TaskRecord(0, fields, label, location="data.jsonl:1")


def shown(example: Example, made: Renderer, rows: slice = slice(None)) -> str:
    """The tokens of a document by name, special ones too."""
    return made.inputs.tokenizer.decode(example.tokens[rows])


def predicted(part: TargetGroup, made: Renderer) -> str:
    return made.inputs.tokenizer.decode(part.targets)
