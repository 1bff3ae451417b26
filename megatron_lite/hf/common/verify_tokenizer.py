"""Compares a tokenizer with a directory's AutoTokenizer, by the ids of texts that are hard to encode."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, TokenizersBackend
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import one_line, shorten, shown
from data_utils.tokenizers.special_tokens import SPECIAL_NAMES
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.hf.common.config_json import quiet
from megatron_lite.hf.common.weights import read_json

_SUPPORTED = "tokenizers of vocab.txt, vocab.json with merges.txt, spiece.model and tokenizer.json"
_GENERAL = "TokenizersBackend"  # the class of a model_type without its own
_SHOWN_IDS = 12
_FROM_VOCABULARY, _TOGETHER = 600, 12  # tokens, and how many of them make a text

# White space, controls, marks, scripts, quotes, and what else a normalizer may treat in a way of its own.
# ruff: noqa: RUF001 - characters that look alike are what is compared
_PIECES = (
    *("", " ", "  ", "\n", "\t", "\r\n", " \n\t ", "a  b", " a", "a ", "  a  ", "a\n\nb", "a\tb", "\n a \n"),
    *("\u00a0", "a\u00a0b", "a\u3000b", "a\u2003b", "a\u202fb", "a\u1680b", "a\u2028b\u2029c", "a\x85b"),
    "a\x0bb\x0cc",
    *("a\x00b", "\x00", "a\x07b\x1bc", "a\x7fb", "a\x80b\x9fc", "a\ufeffb", "\ufffd", "a\ufffdb", "\ufdd0a\uffff"),
    *("a\u200bb", "a\u200cb\u200dc", "a\u2060b", "a\u00adb", "a\u200eb\u200fc", "\u202aab\u202c"),
    "\U000e0041\U000e007f",
    *("The quick brown fox jumps over the lazy dog.", "THE QUICK BROWN FOX", "tHe qUiCk", "McDonald's iPhone eBay"),
    *("it's we're they've I'll he'd I'm can't 'tis", "O'Neill's 'S 'LL", "'", "''", "``", "`", "''''", "``quoted''"),
    *("‘single’ “double” „low“ «angle» ‹one›", '"straight"', "a``b''c", "´`¨^~", "don’t", "′ ″ ‴"),
    *("naïve café déjà vu", "nai\u0308ve cafe\u0301", "Größe ẞ straße", "Ångström A\u030angstro\u0308m", "É È Ê Ë"),
    *("İstanbul ısı I i", "ΟΔΥΣΣΕΥΣ ς σ Σ", "ΐ ΰ Ά", "ǅ ǆ Ǆ ŉ ǰ", "ﬁ ﬂ ﬀ ﬅ ĳ", "ſ K Å Ω", "Œ œ Æ æ Ø ø Đ đ Ł ł"),
    *("\u0301", "\u0301a", "a\u0301\u0301", "a\u0323\u0307 a\u0307\u0323", "\u0344", "\u0345", "\u20e3"),
    "1\ufe0f\u20e3",
    *("x\u0336y\u0336", "Z\u0351\u036b\u0343a\u0328l\u0301g\u0321o\u0358", "\u1e9b\u0323", "q\u0307\u0323"),
    *("今天天气很好。", "你好，世界！", "東京タワー", "がぎぐ か\u3099", "ｶﾞｷﾞ", "ＡＢＣ１２３", "ABC混合abc"),
    "豈\uf900\U0002f800",
    *("\U00020000\U0003134f", "⼀〇々〆", "中 文", "中a文b", "漢字かな交じり文", "「引用」『書名』", "㍿ ㋿ ㎏ ①"),
    "，。、；：",
    *("한국어 문장", "\u1112\u1161\u11ab\u1100\u116e\u11a8", "각 \u1100\u1161\u11a8", "ㄱㄴㄷ"),
    *("Привет, мир!", "Ёлка ёж Й й И\u0306", "українська ґ ї", "српски Љ", "Ελληνικά κείμενο", "Հայերեն"),
    "ქართული Ა",
    *("שָׁלוֹם עולם", "שלום ABC 123", "السَّلام عليكم", "ـــكلمةـــ", "فارسی می‌خواهم", "ﷺ ﻼ", "\u202bשלום\u202c"),
    *("नमस्ते दुनिया कि क्ष", "বাংলা ো", "தமிழ் ொ", "తెలుగు", "ไทย ภาษา ำ", "ພາສາລາວ", "ကမ္ဘာ", "ខ្មែរ", "བོད་"),
    *("አማርኛ", "Ꭰꭰ", "ᚠᛇᚻ", "\U00010400\U00010428", "\U0001d400\U0001d7d8", "𝒜𝓑ℂ", "ᵃᵇ ₁₂ ¹²³"),
    *("🙂", "👍🏽", "👨\u200d👩\u200d👧", "🇩🇪", "❤\ufe0f ❤\ufe0e", "🏴\U000e0067\U000e0062\U000e007f", "a🙂b", "☃☀☂"),
    *("0 1 12 345 6789", "1,234,567.89", "3.14e-10", "0x1F", "½ ¼ ² Ⅷ ٣٤ १२ 〇", "$5 €6 £7 ¥8 50%"),
    "12:30 1/2 -7 +8",
    *("x1y2z3", "2024-02-29", "a1", "1a", "1st 2nd", "９８７", "1 000 000"),
    *("https://example.org/a_b?c=d&e=%20#f", "user.name+tag@example.co.uk", "C:\\dir\\file.txt"),
    *("/usr/bin:/bin", "a.b.c"),
    *("def f(x):\n    return x ** 2  # square\n", "if (a && b || !c) { d += 1; }", "<a href=\"x\">y</a>"),
    "&amp; &#39;",
    *("{\"key\": [1, null]}", "#include <stdio.h>", "$PATH ${HOME}", "@user #tag", "a_b-c", "--flag=value"),
    "**bold** _it_",
    *("...", "…", ". . .", "!?!?", "-- — – ‑ −", "()[]{}<>", "a(b)c[d]", "~^|\\", "• · ‣", "§ ¶ † ‡ © ® ™", "° º ª"),
    *("≠ ≮ ≤ ∑ ∫ √ ∞", "⁇ \u037e \u1fef \u212b", "¿Qué? ¡Sí!", "x² + y² = z²", "→ ⇒ ↔", "─│┌ █ ▁ ▁▁ a▁b"),
    *("\u0378", "\U0001e030", "\U00011f02", "\u0897", "\U0010ffff", "\ue000\uf8ff", "\U0010fffd", "a\u0378b"),
    *("a" * 60, "a" * 99, "b" * 100, "c" * 101, "é" * 120, "antidisestablishmentarianism", "Donaudampfschifffahrt"),
    *("中" * 40, "🙂" * 20, "ab" * 150, "x" * 600, "!" * 50, " " * 40, "\n" * 10, "word " * 30),
    *("##ing", "##", "a ##b", "Ġthe", "Ċ", "</w>", "the</w>", "▁the", "<0x0A>", "<0xE4>", "\\n", "\\u0041"),
)  # fmt: skip
_SPECIAL = (
    *SPECIAL_NAMES.values(), "<s>", "</s>", "<unk>", "<pad>", "<mask>", "<cls>", "<sep>", "<eop>", "<eod>", "<sop>",
    "<bos>", "<eos>", "<PAD>", "<BOS>", "<EOS>", "<extra_id_0>", "<extra_id_99>", "<|user|>", "[mask]", "[Mask]",
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerComparison:
    """The result of a comparison, as `proof.json` records it."""

    tokenizer_class: str  # that AutoTokenizer chose
    texts: int
    spelled: int  # texts in which only theirs makes a special token of its spelling: the stated exception
    differing: int
    difference: str | None  # the first text that differs, with both ids

    def __str__(self) -> str:
        return f"tokenizer equal to {self.tokenizer_class} on {self.texts - self.differing} of {self.texts} texts"

    def require(self, what: str, remedy: str) -> None:
        """Raise CheckpointError if any text differs. Args: what: the tokenizer of ours, in the message."""
        if self.difference is not None:
            raise CheckpointError(
                f"{what} gives other ids than {self.tokenizer_class} of {self.differing} of {self.texts} texts: "
                f"{self.difference}; {remedy}"
            )


def compare_tokenizer(
    tokenizer: Tokenizer, directory: Path, more: Sequence[str] = (), copies: Path | None = None
) -> TokenizerComparison:
    """Compare a run's tokenizer with `AutoTokenizer.from_pretrained(directory)`, without the tokens around a text.

    The texts are those of `awkward_texts` and `more`. Both sides read spelled names of special tokens as text, theirs
    by `split_special_tokens`. Where the class makes a special token of such a name all the same, because its model
    holds it as a piece, ours must not: text never becomes a special token here.

    Args: copies: as for `load_theirs`.

    Raises: CheckpointError for a directory whose tokenizer transformers cannot load without code of its own.
    """
    return compare(tokenizer, load_theirs(directory, copies), more)


def compare_exported(tokenizer: Tokenizer, directory: Path) -> TokenizerComparison:
    """Compare a run's tokenizer with that of its export, loaded in its own right. Raises: CheckpointError."""
    result = compare_tokenizer(tokenizer, directory)
    result.require(
        f"tokenizer.kind {tokenizer.config.kind}",
        "the class of this system has no such tokenizer; --no-verify exports the model with it all the same.",
    )
    return result


def compare(tokenizer: Tokenizer, theirs: TokenizersBackend, more: Sequence[str] = ()) -> TokenizerComparison:
    """`compare_tokenizer` with a tokenizer of transformers that is loaded already."""
    texts = [*awkward_texts(theirs), *more]
    # AutoTokenizer decides the ids, not the files: transformers 5 rebuilds a class's pipeline from options.
    found = encoded(theirs, texts, add_special_tokens=False, split_special_tokens=True)
    normalizer = theirs.backend_tokenizer.normalizer
    normalized: Callable[[str], str] = str if normalizer is None else normalizer.normalize_str
    special = dict(tokenizer.special_names)
    special |= {i: str(token) for i, token in theirs.added_tokens_decoder.items() if token.special}
    spelled, differing, difference = 0, 0, None
    for text, expected in zip(texts, found, strict=True):
        actual = tokenizer.encode(text)
        names = {special[i] for i in special.keys() & set(expected)}
        if actual == expected:
            continue
        # The stated exception: theirs made a special token of its spelled name, ours made none.
        if any(name in read for name in names for read in (text, normalized(text))) and not (
            special.keys() - {tokenizer.special.unk}
        ) & set(actual):
            spelled += 1
            continue
        differing += 1
        if difference is None:
            difference = _described(text, actual, expected)
    return TokenizerComparison(type(theirs).__name__, len(texts), spelled, differing, difference)


def encoded(theirs: TokenizersBackend, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """The ids of texts by a tokenizer of transformers. Raises: CheckpointError if it cannot be used."""
    try:
        return theirs(list(texts), verbose=False, **options)["input_ids"]
    except Exception as error:  # a plain one of the library, such as for a vocabulary without its [UNK]
        raise CheckpointError(
            f"{type(theirs).__name__} cannot encode texts by these files ({one_line(error)}); check that they "
            "belong together."
        ) from None


def _described(text: str, actual: Sequence[int], expected: Sequence[int]) -> str:
    """A text and both ids, from a little before the first that differ."""
    same = next(
        (i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b),
        min(len(actual), len(expected)),
    )
    start = max(0, same - 3)

    def listed(ids: Sequence[int]) -> str:
        part = ", ".join(map(str, ids[start : start + _SHOWN_IDS]))
        return f"[{'... ' if start else ''}{part}{' ...' if len(ids) > start + _SHOWN_IDS else ''}]"

    return f"{shorten(text, 60)!a} is {listed(actual)} here, and {listed(expected)} there"


def load_theirs(directory: Path, copies: Path | None = None) -> TokenizersBackend:
    """The directory's AutoTokenizer, from its files alone and without code of its own. Raises: CheckpointError.

    Args: copies: a directory with the same files, and a config.json that is completed.
    """
    described = (
        read_json(directory / "tokenizer_config.json")
        if (directory / "tokenizer_config.json").exists()
        else {}
    )
    name = shown(described["tokenizer_class"]) if described.get("tokenizer_class") else "of its own kind"
    _require_files(directory, described.get("tokenizer_class"))
    try:
        with quiet():
            theirs = AutoTokenizer.from_pretrained(
                copies or directory, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # the library raises what its parts do
        raise CheckpointError(
            f"{directory} has a tokenizer {name} that transformers cannot load ({one_line(error)}); "
            f"supported are {_SUPPORTED}."
        ) from None
    if not isinstance(theirs, TokenizersBackend):
        raise CheckpointError(
            f"{directory} has a tokenizer {type(theirs).__name__}, which splits texts by code of its own; supported "
            f"are {_SUPPORTED}."
        )
    return theirs


def _require_files(directory: Path, named: Any) -> None:
    """Raise CheckpointError if the directory's class reads none of its vocabularies; it may load and be empty then.

    Args: named: the class in tokenizer_config.json. Only vocab.txt and vocab.json alone are judged: of other files
    classes of today make what they need in several ways.
    """
    present = [name for name in ("vocab.txt", "vocab.json") if (directory / name).exists()]
    others = ("tokenizer.json", "merges.txt", "*.model")
    if not present or any(next(directory.glob(name), None) for name in others):
        return
    config = directory / "config.json"
    model_type = read_json(config).get("model_type") if config.exists() else None
    name = named if isinstance(named, str) else TOKENIZER_MAPPING_NAMES.get(str(model_type)) or _GENERAL
    found = tokenizer_class_from_name(name)
    if found is None or not issubclass(found, TokenizersBackend):
        return
    needed = [file for kind, file in found.vocab_files_names.items() if kind != "tokenizer_file"]
    if all((directory / file).exists() for file in needed):
        return
    reads = "tokenizer.json" + f", or {' with '.join(needed)}" * (name != _GENERAL)
    remedy = "fetch what lacks"
    if present == ["vocab.txt"]:
        files = f"d = '{directory}/'; T(d + 'vocab.txt').save_pretrained(d)"
        command = f"from transformers import BertTokenizer as T; {files}"
        remedy += f', or make tokenizer.json of a WordPiece vocabulary: python -c "{command}"'
    raise CheckpointError(
        f"{directory} has {' and '.join(present)}, but the tokenizer of a {model_type} ({name}) reads {reads}; {remedy}"
    )


def awkward_texts(theirs: TokenizersBackend | None = None) -> list[str]:
    """Some 400 texts that tokenizers treat in different ways; with `theirs` also its vocabulary and special names."""
    texts = list(_PIECES)
    texts += [" ".join(_PIECES[i : i + 9]) for i in range(0, len(_PIECES), 9)]
    texts += ["".join(_PIECES[i :: len(_PIECES) // 8]) for i in range(16)]
    texts += [form for text in _PIECES[::5] for form in _changed(text)]
    names = dict.fromkeys(_SPECIAL)
    if theirs is not None:
        names |= dict.fromkeys(str(token) for token in list(theirs.added_tokens_decoder.values())[:20])
    texts += [spelling for name in names for spelling in (name, f"the {name} of", f"x{name}y")]
    if theirs is not None:
        texts += _from_vocabulary(theirs)
    return list(dict.fromkeys(texts))


def _changed(text: str) -> Iterator[str]:
    yield text.upper()
    yield text.lower()
    yield unicodedata.normalize("NFD", text)
    yield unicodedata.normalize("NFKC", text)


def _from_vocabulary(theirs: TokenizersBackend) -> Iterator[str]:
    step = max(1, len(theirs) // _FROM_VOCABULARY)
    tokens = [
        str(theirs.decode([i])) for i in range(0, len(theirs), step) if i not in theirs.added_tokens_decoder
    ]
    for start in range(0, len(tokens), _TOGETHER):
        yield "".join(tokens[start : start + _TOGETHER])
        yield " ".join(tokens[start : start + _TOGETHER])
