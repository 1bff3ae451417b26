"""Directories of sentence-transformers: a Transformer, pooling, normalization, prompts.

    modules.json                        the modules in their order
    1_Pooling/config.json               the pooling
    sentence_bert_config.json           max_seq_length
    config_sentence_transformers.json   prompts and similarity

`read_settings` gives the section `embedding` of a directory, or refuses what is not computed here (Dense, other
poolings). `write_modules` makes the directory of an export one that versions 2 to 6 read. `compare_vectors` asks the
package itself.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import one_line, shown
from data_utils.common.settings import build
from data_utils.common.untrusted import conform, parse_json, read_bounded
from megatron_lite.config.embedding import SIMILARITIES, EmbeddingConfig
from megatron_lite.embedding.embedder import Embedder, TextFormat
from megatron_lite.hf.common.config_json import quiet
from megatron_lite.hf.common.verify import Comparison, joined
from megatron_lite.hf.common.verify_tokenizer import encoded, load_theirs
from megatron_lite.hf.common.weights import DTYPES, MAX_JSON_BYTES, read_json, write_json
from megatron_lite.inference.open_run import OpenRun

log = logging.getLogger(__name__)

MODULES = "modules.json"
_SETTINGS, _POOLING = "config_sentence_transformers.json", "1_Pooling"
_TRANSFORMER = "sentence_bert_config.json"
_OTHER_TRANSFORMERS = "sentence_*_config.json"  # older ones name the model: sentence_roberta_config.json
# Our pooling -> the name of theirs, and the key of versions before 6.
_POOLINGS = {
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "cls": ("cls", "pooling_mode_cls_token"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
}
# Files of the module Transformer: key -> values that change nothing; others are refused.
_PLAIN = {
    "do_lower_case": (False,),
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "unpad_inputs": (False,),
}
_IGNORED = ("max_seq_length", "modality_config")
_DECODER_STATES = ("bart", "mass")  # systems of whose models the package takes the decoder's last states
_VERSION = "2.4.0"  # the first one that reads what is written here
_NO_LIMIT = 10**6  # tokenizers without a limit have a huge one
_TEXTS = (
    "A man is playing a guitar.",
    "",
    "x",
    "Größe, 今天 🙂 and a̐éö̲",
    "a text that is longer than all others, " * 99,
)


def is_sentence_transformers(directory: Path) -> bool:
    return (directory / MODULES).exists()


def read_settings(directory: Path) -> tuple[Path, dict[str, Any]]:
    """The directory of the Transformer, and the settings of the section `embedding`.

    Raises: CheckpointError for modules that are not computed here.
    """
    modules = _modules(directory)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"{directory / MODULES} has the modules {', '.join(kinds) or 'none'}; only Transformer, Pooling and "
            "Normalize are computed here, in this order. To import the Transformer alone, remove this file."
        )
    transformer, pooling = (directory / path for _, path in modules[:2])
    settings = {
        "normalize": "Normalize" in kinds,
        "max_length": _max_length(transformer),
        **_read_pooling(pooling / "config.json"),
        **_read_prompts(directory / _SETTINGS),
    }
    return transformer, settings


def _modules(directory: Path) -> list[tuple[str, str]]:
    """The last part of each module's type, and its path."""
    path = directory / MODULES
    try:
        listed = conform(parse_json(read_bounded(path, MAX_JSON_BYTES)), list[dict[str, Any]])
        listed = [
            conform({key: each.get(key) for key in ("type", "path")}, dict[str, str]) for each in listed
        ]
    except ValueError as error:
        raise CheckpointError(f"{path} {error}; fetch it again.") from None
    for each in listed:
        if not each["type"].startswith("sentence_transformers."):
            raise CheckpointError(
                f"{path} names the module {each['type']}, which is code of its own; only modules of "
                "sentence-transformers are computed here."
            )
        if Path(each["path"]).is_absolute() or ".." in Path(each["path"]).parts:
            raise CheckpointError(f"{path} names the path {shown(each['path'])}, outside of the directory.")
    return [(each["type"].rsplit(".", 1)[-1], each["path"]) for each in listed]


def _read_pooling(path: Path) -> dict[str, Any]:
    config = read_json(path)
    named = config.get("pooling_mode")
    if named is None:
        named = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    names = [named] if isinstance(named, str) else list(named)
    found = [ours for ours, theirs in _POOLINGS.items() if names and names[0] in theirs]
    if len(names) != 1 or not found:
        raise CheckpointError(
            f"{path} pools by {', '.join(map(str, names)) or 'nothing'}; only one of "
            f"{', '.join(theirs for theirs, _ in _POOLINGS.values())} is computed here."
        )
    return {"pooling": found[0], "include_prompt": config.get("include_prompt", True)}


def _max_length(directory: Path) -> int | None:
    """Most tokens of a text, by the module Transformer. Raises: CheckpointError for what changes its texts."""
    path = directory / _TRANSFORMER
    if (others := sorted(directory.glob(_OTHER_TRANSFORMERS))) and path not in others:
        path = others[0]
    config = read_json(path) if path.exists() else {}
    for key, value in config.items():
        if key not in _IGNORED and value not in (*_PLAIN.get(key, ()), None, {}):
            raise CheckpointError(
                f"{path}: {key} is {shown(value)}, which is not computed here; remove it if texts are read without it."
            )
    if config.get("max_seq_length") is not None:
        return config["max_seq_length"]
    tokenizer = directory / "tokenizer_config.json"
    limit = read_json(tokenizer).get("model_max_length") if tokenizer.exists() else None
    return limit if isinstance(limit, int) and limit < _NO_LIMIT else None


def _read_prompts(path: Path) -> dict[str, Any]:
    config = read_json(path) if path.exists() else {}
    for key, plain in (("truncate_dim", None), ("model_type", "SentenceTransformer")):
        if config.get(key) not in (None, plain):
            raise CheckpointError(f"{path}: {key} is {shown(config[key])}, which is not computed here.")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise CheckpointError(
            f"{path}: similarity_fn_name is {shown(similarity)}; it must be one of {', '.join(SIMILARITIES)}."
        )
    prompts = {name: text for name, text in (config.get("prompts") or {}).items() if text}
    default = config.get("default_prompt_name")
    default = default if default in prompts else None  # the prompt of an empty text is none
    return {"prompts": prompts, "default_prompt": default, "similarity": similarity}


def require_same_tokens(run: OpenRun, directory: Path) -> None:
    """Raise CheckpointError unless the run reads texts as the directory's tokenizer writes them.

    Args: directory: of the Transformer.
    """
    theirs = load_theirs(directory)
    for prompt in ("", *run.config.embedding.prompts):
        text_format = TextFormat(run, prompt=prompt)
        before = run.config.embedding.prompt_text(prompt)
        options = {"truncation": True, "max_length": text_format.length}
        texts = _texts(text_format)
        ids = encoded(theirs, [before + text for text in texts], **options)
        for text, document, expected in zip(texts, text_format.documents(texts), ids, strict=True):
            ours = document.example.tokens.tolist()
            if ours != expected:
                remedy = "; causal.begin is the token before a text" if text_format.is_causal else ""
                raise CheckpointError(
                    f"{directory}: its tokenizer reads {shown(before + text[:40])} as {_ends(expected)}, but the run "
                    f"as {_ends(ours)}, so vectors would differ{remedy}."
                )


def _ends(ids: Sequence[int]) -> str:
    first, last = ", ".join(map(str, ids[:4])), ", ".join(map(str, ids[-2:]))
    return f"{len(ids)} tokens [{first} ... {last}]"


def compare_imported(run: OpenRun, directory: Path, tolerance: float) -> dict[str, Comparison]:
    """`compare_vectors` of an import, where the package is installed and the settings are the directory's."""
    _, settings = read_settings(directory)
    if run.config.embedding != build(EmbeddingConfig, settings, "embedding."):
        return {}  # the user asks for other vectors
    if importlib.util.find_spec("sentence_transformers") is None:
        log.warning("sentence-transformers is not installed, so vectors were not compared")
        return {}
    return compare_vectors(run, directory, tolerance)


def compare_vectors(
    run: OpenRun, directory: Path, tolerance: float, dtype: str = "fp32", is_ours: bool = False
) -> dict[str, Comparison]:
    """Compare the run's vectors with those of sentence-transformers, which must be installed.

    Args: dtype: of the directory's weights. is_ours: it is an export, whose code may run.
    Raises: CheckpointError unless they are equal.
    """
    loaded = run.with_model(torch.device("cpu"))
    loaded.model.to(DTYPES[dtype]).float()
    found = []
    for prompt in ("", *run.config.embedding.prompts):
        text_format = TextFormat(loaded, prompt=prompt)
        texts = _texts(text_format)
        expected = _theirs(directory, texts, loaded.config.embedding.prompt_text(prompt), is_ours)
        actual = Embedder(loaded, text_format).embed(texts)
        found.append(_compared(actual, expected))
    result = joined({str(number): each for number, each in enumerate(found)})
    result.require(tolerance, f"{run.checkpoint.path}, as a directory of sentence-transformers,")
    return {"vectors": result}


def _texts(text_format: TextFormat) -> list[str]:
    return [text for text in _TEXTS if text or text_format.reads_empty_texts]


def _theirs(directory: Path, texts: Sequence[str], prompt: str, has_code: bool) -> np.ndarray:
    """The vectors of sentence-transformers, fp32. Raises: CheckpointError if it makes none."""
    try:
        with quiet():
            from sentence_transformers import SentenceTransformer

            options: dict[str, Any] = {
                "trust_remote_code": has_code,
                "model_kwargs": {"dtype": torch.float32},
            }
            model = SentenceTransformer(str(directory), device="cpu", **options)
            return np.asarray(model.encode(list(texts), prompt=prompt, show_progress_bar=False), np.float32)
    except Exception as error:  # the library raises what its parts do
        raise CheckpointError(
            f"sentence-transformers makes no vectors of {directory} ({one_line(error)}); --no-verify writes it all the "
            "same."
        ) from None


def _compared(actual: np.ndarray, expected: np.ndarray) -> Comparison:
    difference = float(np.abs(actual - expected).max())
    return Comparison(difference, 1.0, len(actual), float(np.abs(expected).max()))


def write_modules(directory: Path, run: OpenRun) -> None:
    """Make the directory of an export, which has its card, one of sentence-transformers.

    Raises: ConfigError for a run that makes no vectors; CheckpointError for what the package, or an older version,
        computes otherwise.
    """
    system = run.config.model.system
    if system in _DECODER_STATES:
        raise CheckpointError(
            f"model.system is {system}, of whose models sentence-transformers takes the decoder's states, not the "
            "encoder's; export without --sentence-transformers, or embed with scripts/embed.py."
        )
    text_format = TextFormat(run)
    config, size = text_format.config, run.config.model.hidden_size
    tokenizer = directory / "tokenizer_config.json"
    if config.pooling == "cls" and read_json(tokenizer).get("padding_side") == "left":
        raise CheckpointError(
            "embedding.pooling is cls, but the tokenizer of this model pads on the left, where older versions of "
            "sentence-transformers take the first token from; set it to mean."
        )
    theirs, key = _POOLINGS[config.pooling]
    pooling: dict[str, Any] = {"word_embedding_dimension": size}
    for name, old in _POOLINGS.values():
        if name == theirs or name != "lasttoken":  # the oldest versions do not know this key
            pooling[old] = old == key
    if not config.include_prompt:
        pooling["include_prompt"] = False
    kinds = {
        "Transformer": "",
        "Pooling": _POOLING,
        **({"Normalize": "2_Normalize"} if config.normalize else {}),
    }
    modules = [
        # The names of all versions: today's are read as other names of the same.
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds.items())
    ]
    for path in kinds.values():
        (directory / path).mkdir(exist_ok=True)
    (directory / MODULES).write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    write_json(directory / _POOLING / "config.json", pooling)
    write_json(directory / _TRANSFORMER, {"max_seq_length": text_format.length, "do_lower_case": False})
    versions = {"transformers": transformers.__version__, "pytorch": torch.__version__}
    write_json(
        directory / _SETTINGS,
        {
            "__version__": {"sentence_transformers": _VERSION, **versions},
            "prompts": config.prompts,
            "default_prompt_name": config.default_prompt,
            "similarity_fn_name": config.similarity,
        },
    )
    card = directory / "README.md"
    card.write_text(_with_vectors(card.read_text(encoding="utf-8"), text_format, size), encoding="utf-8")


_CARD = """## Vectors of texts

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("PATH"{remote})
vectors = model.encode(["A man is playing a guitar.", "Somebody makes music."])
model.similarity(vectors, vectors)
```

| | |
|---|---|
| numbers | {size} |
| pooling | {pooling} |
| normalized | {normalize} |
| compared by | {similarity} |
| tokens of a text | {length} |
| prompts | {prompts} |

"""


def _with_vectors(card: str, text_format: TextFormat, size: int) -> str:
    """The card of an export with what users of its vectors need."""
    config, has_code = text_format.config, "trust_remote_code" in card
    section = _CARD.format(
        remote=", trust_remote_code=True" if has_code else "",
        size=size,
        pooling=config.pooling,
        normalize="yes" if config.normalize else "no",
        similarity=config.similarity,
        length=text_format.length,
        prompts=", ".join(f"{name}: {text!r}" for name, text in config.prompts.items()) or "none",
    )
    head = "library_name: transformers\ntags:\n"
    ours = "library_name: sentence-transformers\npipeline_tag: sentence-similarity\ntags:\n- sentence-transformers\n"
    before, heading, after = card.replace(head, ours, 1).partition("## Training\n")
    return f"{before}{section}{heading}{after}"
