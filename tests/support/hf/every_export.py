"""An export of every type, with small random weights and a tokenizer as its users have it.

    came/      imports of each published system, exported again: config.json and tokenizer files of the import
    heads/     the same of classes with the head of a task
    made/      runs that began here: all files are ours
    pairs/     ELECTRA, DeBERTa-v3 and OPTIMUS, of several directories
    glm/       GLM's own classes

`exports(root)` writes them below `root`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from support.data.tokenizer_files import byte_bpe_json, sentencepiece_model
from support.hf import hf_runs
from support.hf.published import CASES, random_model
from support.hf.published_tokenizers import add_json, write_files
from support.systems import optimus_runs
from support.systems.electra import electra_config, their_pair

from data_utils.common.settings import merge
from megatron_lite.config.model import BLOCK_POSITIONS
from megatron_lite.config.systems import SYSTEMS
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.heads import TASK_CLASSES
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME

_TREE: dict[str, Any] = {
    "training": {"steps": 6, "precision": "fp32", "seed": 7}, "data": {"sequence_length": 48},
}  # fmt: skip
# System -> its tokenizer in `published_tokenizers`, and the objective that continues it.
_FILES = {
    "unilm": "bert", "spanbert": "bert", "electra_generator": "bert", "ernie2": "ernie", "mass": "bart", "t5_1_1": "t5",
    "glm4_0414": "glm4", "mistral": "llama3", "qwen3": "qwen2", "glm4_moe": "glm4", "qwen3_moe": "qwen2",
}  # fmt: skip
_OBJECTIVE = {
    **dict.fromkeys(("gpt", "gpt2", "glm4", "glm4_0414", "llama", "mistral", "qwen2", "qwen3"), "causal"),
    **dict.fromkeys(("glm4_moe", "qwen3_moe", "olmoe", "modernbert_decoder"), "causal"),
    "xlnet": "xlnet", "albert": "albert", "unilm": "unilm", "ernie": "ernie",
    "ernie2": "ernie", "spanbert": "spanbert",
    **dict.fromkeys(("bart", "mass"), "bart"), **dict.fromkeys(("t5", "t5_1_1", "mt5"), "t5"),
}  # fmt: skip
_OF_BERT = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]


def _write_tokenizer(system: str, directory: Path) -> int:
    """Files of the system's users. Returns: the number of their tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    if system.startswith("modernbert"):
        described = byte_bpe_json(_OF_BERT)
        (directory / "tokenizer.json").write_text(json.dumps(described))
        names = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")}
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
        )
        return len(described["model"]["vocab"])
    return write_files(_FILES.get(system, system), directory)


def _ids(system: str, directory: Path) -> dict[str, int]:
    """Ids of tokens that config.json names, as the directory's class of a tokenizer has them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = {
        role: getattr(tokenizer, f"{role}_token_id") for role in ("pad", "eos", "bos", "cls", "sep", "mask")
    }
    return {f"{role}_token_id": number for role, number in found.items() if number is not None}


def _brought(
    directory: Path, case: str, objective: str, class_name: str | None = None, **changes: Any
) -> Path:
    """The run of an import of a model of `CASES`."""
    system, source = case.partition(",")[0], directory / "source"
    source.mkdir(parents=True)
    size = _write_tokenizer(system, source)
    ids = _ids(system, source)
    if system in ("bart", "mass"):
        ids |= {"decoder_start_token_id": ids["eos_token_id"]}
    if system.startswith(("t5", "mt5")):
        ids |= {"decoder_start_token_id": ids["pad_token_id"]}
    if system == "eurobert":
        ids |= {"mask_token_id": size - 1, "eos_token_id": 1, "bos_token_id": 0}
    if CASES[case][1].get("num_decoder_layers", 0) > CASES[case][1].get("num_layers", 0):
        changes["num_layers"] = (
            2  # the class of T5 cannot generate by a decoder that is deeper than the encoder
        )
    model = random_model(case, class_name=class_name, vocab_size=size, **{**ids, **changes})
    model.save_pretrained(source)
    tree = merge(_TREE, {"objectives": {objective: 1}})
    labels = {"masked_lm": "next_sentence", "albert": "sentence_order", "unilm": "next_sentence"}
    is_pretrained = class_name is None and type(model).__name__.endswith("ForPreTraining")
    if objective in labels and not is_pretrained:
        tree = merge(tree, {objective: {labels[objective]: False}})
    import_directory(source, directory / "run", tree, verify=False)
    return directory / "run"


def _tokenizer(system: str, directory: Path) -> dict[str, Any]:
    """The section of a run that begins here, with the kind that configs/ has for its system."""
    name = _FILES.get(system, system)
    _write_tokenizer(system, directory)
    kinds = {**dict.fromkeys(("bert", "ernie"), "bert_wordpiece"), "gpt": "gpt_bpe"}
    kinds |= dict.fromkeys(("gpt2", "roberta", "bart"), "gpt2_bpe")
    if name in kinds:
        path = directory / "vocab.txt" if kinds[name] == "bert_wordpiece" else directory
        return {"kind": kinds[name], "path": str(path), "added_tokens": "none"}
    alone = directory / "alone"
    alone.mkdir()
    if not (directory / "tokenizer.json").exists():
        add_json(directory)
    shutil.copyfile(directory / "tokenizer.json", alone / "tokenizer.json")
    return {"kind": "hf_json", "path": str(alone / "tokenizer.json"), "added_tokens": "none"}


def _made(directory: Path, system: str, tokenizer: dict[str, Any], **model: Any) -> Path:
    """A run that began here."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "init_std": 0.15,
        "max_position": 63,
    }
    if SYSTEMS_BY_NAME[system].is_encoder_decoder:
        sizes["decoder_layers"] = 2
    if "num_key_value_heads" in SYSTEMS[system] and system != "neobert":
        sizes["num_key_value_heads"] = 2
    sizes |= {"ernie": {"max_position": 64}}.get(system, {})
    if system.startswith("modernbert"):
        sizes |= {"attention_window": 6, "num_layers": 4}
    if "moe" in system:
        sizes["experts"] = {"count": 4, "per_token": 2, "width": 16}
    sizes |= {
        "albert": {"embedding_size": 16}, "qwen3": {"head_dim": 16}, "deberta_v3": {"position_buckets": 16},
    }.get(system, {})  # fmt: skip
    objective = _OBJECTIVE.get(system, "masked_lm")
    tree = merge(_TREE, {"model": {"system": system, **sizes, **model}, "tokenizer": tokenizer})
    tree["objectives"] = {objective: 1}
    if objective == "masked_lm" and not SYSTEMS[system].get("sentence_classes"):
        tree["masked_lm"] = {"next_sentence": False}
    hf_runs.write_run(directory / "run", tree)
    return directory / "run"


def _glm(directory: Path, tokenizer: dict[str, Any] | None = None, **model: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tree = hf_runs.tree(hf_runs.write_vocabulary(directory), **model)
    if tokenizer is not None:
        tree["tokenizer"] = tokenizer
    if "task_head" in model:
        tree["task"] = {
            "name": "own",
            "kind": "classification",
            "reader": "jsonl",
            "labels": ["bad", "fair", "good"],
        }
    hf_runs.write_run(directory / "run", tree)
    return directory / "run"


def _sentencepiece(directory: Path) -> dict[str, Any]:
    directory.mkdir(parents=True)
    (directory / "tokenizer.model").write_bytes(sentencepiece_model())
    return {"kind": "sentencepiece", "path": str(directory / "tokenizer.model")}


def _byte_bpe(directory: Path) -> dict[str, Any]:
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps(byte_bpe_json([])))
    return {"kind": "hf_json", "path": str(directory / "tokenizer.json")}


def _pair(directory: Path, system: str) -> Path:
    for part in ("generator", "discriminator"):
        own = directory / "source" / part
        size = _write_tokenizer("bert" if system == "electra" else system, own)
        if system == "electra":
            continue
        name = "DebertaV2ForMaskedLM" if part == "generator" else "DebertaV2Model"
        random_model(system, class_name=name, vocab_size=size).save_pretrained(own)
    if system == "electra":
        for part, model in zip(
            ("generator", "discriminator"),
            their_pair(electra_config(model={"vocab_size": size})),
            strict=True,
        ):
            model.save_pretrained(directory / "source" / part)
    import_directory(directory / "source", directory / "run", _TREE, verify=False)
    return directory / "run"


ROTARY = {"positions": "rotary", "rotary_share": 0.5, "rotary_base": 100.0}
MODERN = {
    "positions": "rotary", "block_positions": "halves", "rms_norm": True, "ffn": "gated", "ffn_size": 40,
    "biases": "none", "activation": "gelu_erf",
}  # fmt: skip
LOCAL = {**MODERN, "attention_window": 5, "global_every": 2, "rotary_base_local": 50.0, "num_layers": 3}
_LABELS = {
    "num_labels": 3,
    "id2label": {0: "bad", 1: "fair", 2: "good"},
    "label2id": {"bad": 0, "fair": 1, "good": 2},
}


def runs() -> Iterator[tuple[str, Callable[[Path], Path]]]:
    """Name of an export -> what writes its run below a directory."""
    for case in CASES:
        system = case.partition(",")[0]
        if system != "neobert":  # transformers has no class of it
            objective = _OBJECTIVE.get(system, "masked_lm")
            yield (
                f"came/{case.replace(', ', '-').replace(' ', '-')}",
                partial(_brought, case=case, objective=objective),
            )
    for model_type, kinds in TASK_CLASSES.items():
        system = {"electra": "electra_generator", "deberta-v2": "deberta_v3"}.get(
            model_type, model_type.replace("-", "_")
        )
        objective = {"albert": "albert", "xlnet": "xlnet"}.get(system, "masked_lm")
        for kind, found in kinds.items():
            labels = {} if kind == "spans" else _LABELS
            make = partial(_brought, case=system, objective=objective, class_name=found.name, **labels)
            yield f"heads/{model_type}-{kind}", make
    yield (
        "heads/deberta-v2-body",
        partial(_brought, case="deberta_v3", objective="masked_lm", class_name="DebertaV2Model"),
    )
    for system in SYSTEMS_BY_NAME:
        if system not in ("neobert", "electra"):
            yield (
                f"made/{system}",
                partial(
                    lambda directory, system: _made(directory, system, _tokenizer(system, directory / "own")),
                    system=system,
                ),
            )
    for system in ("bert", "gpt2", "t5", "xlnet", "llama"):  # words of another kind than the class's
        kind = "glm4" if system != "llama" else "bert"
        yield f"made/{system}-other", partial(
            lambda directory, system, kind: _made(directory, system, _tokenizer(kind, directory / "own")),
            system=system, kind=kind,
        )  # fmt: skip
    yield "pairs/electra", partial(_pair, system="electra")
    yield "pairs/deberta", partial(_pair, system="deberta_v3")
    yield "pairs/optimus", lambda directory: optimus_runs.write_run(directory)[0]
    yield "glm/plain", _glm
    yield "glm/erf", partial(_glm, activation="gelu_erf")
    for kind in BLOCK_POSITIONS:
        yield f"glm/rotary-{kind}", partial(_glm, block_positions=kind, **ROTARY)
    yield "glm/modern", partial(_glm, **MODERN)
    yield "glm/local", partial(_glm, **LOCAL)
    yield "glm/classes", partial(_glm, task_head={"type": "classes", "classes": 3})
    yield "glm/sentencepiece", lambda directory: _glm(directory, _sentencepiece(directory / "own"))
    yield "glm/bytes", lambda directory: _glm(directory, _byte_bpe(directory / "own"))


def exports(root: Path, verify: bool = False, only: str = "") -> list[Path]:
    """Every directory that transformers loads a model from, below `root`."""
    for name, make in runs():
        if only in name:
            export_run(make(root / "runs" / name), root / name, ExportOptions(verify=verify))
    return sorted(
        path.parent for path in root.glob("*/**/config.json") if "runs" not in path.relative_to(root).parts
    )
