"""Tensors of published files that an import ignores, with the reason; and short lists of tensor names for messages.

The class of transformers that loads a directory ignores each of these tensors, in all its versions. A tensor that
neither these tables nor the rules of its system (published/systems.py) name is refused.

Source: `_keys_to_ignore_on_load_unexpected` and the buffers of the modeling files of transformers 3.5, 4.20, 4.57 and
5.23 (`authorized_unexpected_keys` in the first).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from data_utils.common.setting_files import one_line


@dataclass(frozen=True)
class Ignored:
    """Names of tensors, or of modules with all that is in them (`.*`).

    Args:
        what: they are.
        types: values of `model_type` whose files have them, after the prefix of the base model or without it; () = any
            file, below any module.
    """

    names: tuple[str, ...]
    what: str
    types: tuple[str, ...] = ()

    def shown(self, name: str, model_type: str, prefix: str) -> str | None:
        """A tensor's name with `*` for layers and for what is left out as a whole, None if it is not left out."""
        if self.types and model_type not in self.types:
            return None
        before = rf"(?:{re.escape(prefix)})?" if self.types else r"(?:.*\.)?"
        for each in self.names:
            module = each.removesuffix(".*")
            rest = "" if module == each else r"\..*"
            if match := re.fullmatch(rf"({before}{re.escape(module)}){rest}", name):
                return re.sub(r"(?<=\.)\d+(?=\.)", "*", match[1]) + (".*" if rest else "")
        return None


# Of any type of number: their values follow from the configuration, or nothing reads them.
BUFFERS = (
    Ignored(("position_ids", "token_type_ids"), "numbers of positions and segments"),
    Ignored(("attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias"), "causal masks"),
    Ignored(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"), "angles of rotary positions"),
    Ignored(("encoder.version", "decoder.version", "embed_positions._float_tensor"), "marks of fairseq"),
    Ignored(("EncDecAttention.relative_attention_bias.weight",), "a table of distances that no layer reads"),
)  # fmt: skip
_BERTS, _ROBERTAS = ("bert", "ernie"), ("roberta", "xlm-roberta", "camembert")
_LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "eurobert", "glm", "glm4", "glm4_moe", "qwen3_moe", "olmoe")
# Heads and layers that the class of a directory lacks and another class of the same system has.
OTHER_CLASS_TENSORS = (
    Ignored(("pooler.dense.*",), "a layer on the first token", (*_BERTS, *_ROBERTAS, "electra", "deberta-v2")),
    Ignored(("pooler.*",), "a layer on the first token", ("albert",)),
    Ignored(("cls.seq_relationship.*",), "a head that compares two segments", _BERTS),
    Ignored(("sop_classifier.*",), "a head that compares two segments", ("albert",)),
    Ignored(("cls.predictions.*",), "a head that predicts tokens", (*_BERTS, "deberta-v2")),
    Ignored(("predictions.*",), "a head that predicts tokens", ("albert",)),
    Ignored(("lm_head.*",), "a head that predicts tokens", (*_ROBERTAS, "eurobert")),
    Ignored(("lm_predictions.*",), "a head that predicts tokens", ("deberta-v2",)),
    Ignored(("generator_predictions.*", "generator_lm_head.*"), "a head that predicts tokens", ("electra",)),
    Ignored(("lm_loss.*",), "a head that predicts tokens", ("xlnet",)),
    Ignored(("head.*", "decoder.*"), "a head that predicts tokens", ("modernbert",)),
    Ignored(("discriminator_predictions.*",), "a head that finds replaced tokens", ("electra",)),
    Ignored(("mask_predictions.*",), "a head that finds replaced tokens", ("deberta-v2",)),
    Ignored(("embeddings.position_embeddings.weight",), "a table of positions that no input has", ("deberta-v2",)),
    Ignored(("embeddings_project.*",), "a product of embeddings that have the width of the blocks", ("electra",)),
    Ignored(
        ("classifier.*", "qa_outputs.*"), "a head of a task",
        (*_BERTS, *_ROBERTAS, "albert", "electra", "deberta-v2", "modernbert", "eurobert", "xlnet", "t5", "mt5"),
    ),
    Ignored(("logits_proj.*", "sequence_summary.*"), "a head of a task", ("xlnet",)),
    Ignored(("multiple_choice_head.*",), "a head of a task", ("gpt2", "openai-gpt")),
    Ignored(("classification_head.*", "qa_outputs.*"), "a head of a task", ("bart", "t5", "mt5")),
    Ignored(("layers.46.*", "layers.92.*"), "a layer that predicts further tokens (MTP)", ("glm4_moe",)),
    Ignored(("score.*",), "a head of a task", ("gpt2", "openai-gpt", *_LLAMAS)),
)  # fmt: skip


def is_buffer(name: str) -> bool:
    return any(each.shown(name, "", "") for each in BUFFERS)


def reason(name: str, model_type: str, prefix: str) -> tuple[str, str] | None:
    """What a tensor is that is left out, and how its name is shown; None for one that is not left out.

    Args: prefix: of the base model's parameters.
    """
    for each in (*BUFFERS, *OTHER_CLASS_TENSORS):
        if (shown := each.shown(name, model_type, prefix)) is not None:
            return each.what, shown
    return None


def ignored_lines(
    ignored: Mapping[str, tuple[str, str]], reader: str, doubles: Collection[str]
) -> Iterator[str]:
    """What an import says of tensors that it does not take as they are.

    Args:
        ignored: name -> what `reason` says of it.
        reader: whose parts they are not.
        doubles: names of those in fp64.
    """
    kinds: dict[str, list[str]] = {}
    for what, shown in ignored.values():
        kinds.setdefault(what, []).append(shown)
    for what, names in kinds.items():
        distinct = ", ".join(dict.fromkeys(names))
        yield f"left out: {distinct} ({len(names)}): {what}; {reader} does not use them"
    if doubles:
        yield f"{len(doubles)} tensors are of fp64; they are rounded to fp32"


_NUMBERED = re.compile(r"(.*?\.)(\d+)(\..*)")
_MOST_OF_A_MODULE, _MOST = 3, 12  # names that are listed one by one
_LONGEST = 200  # characters of a name that is shown


def listed(names: Iterable[str]) -> str:
    """Names of tensors: layers by ranges, and many in one module of a layer by `*`."""
    layers: dict[tuple[str, str], set[int]] = {}  # (before, after the number) -> numbers
    found: dict[str, int] = {}  # shown name -> how many it stands for
    for name in sorted(names):
        if match := _NUMBERED.fullmatch(name):
            layers.setdefault((match[1], match[3]), set()).add(int(match[2]))
        else:
            found[name] = 1
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (before, after), numbers in layers.items():
        groups.setdefault((before, tuple(sorted(numbers))), []).append(after)
    for (before, numbered), tails in groups.items():
        whole = f"{before}{_ranges(numbered)}"
        if len(tails) > _MOST_OF_A_MODULE:
            levels = zip(*(each.split(".") for each in tails), strict=False)
            same = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]
            found[f"{whole}{'.'.join(same)}.*"] = len(tails) * len(numbered)
        else:
            found |= {f"{whole}{each}": len(numbered) for each in tails}
    shown = [name if count == 1 else f"{name} ({count})" for name, count in found.items()]
    more = len(shown) - _MOST
    # A file's names are anything at all: line breaks and colours of a terminal are spelled out.
    return ", ".join(one_line(name, _LONGEST) for name in shown[:_MOST]) + (
        f" and {more} more" if more > 0 else ""
    )


def _ranges(numbers: Collection[int]) -> str:
    """`0-3,5` of the numbers of layers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
