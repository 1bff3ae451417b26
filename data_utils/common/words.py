"""Words and sentences of text in any script.

The words are for comparing texts: evaluation texts of builds and cleaning, and near-duplicates. Two spellings of one
text have the same words:

- The text is in Unicode's form NFKC_Casefold: composed and decomposed accents, full-width letters, ligatures and
  Arabic presentation forms are one, letter case is ignored, and what nobody sees (soft hyphens, joiners, variation
  selectors, direction marks, tag characters) is left out. NFC would keep apart what fonts and extraction from PDF
  change.
- Marks (Unicode M: vowel signs, accents) belong to the word of their letter.
- Markup is no text: HTML's tags within a line, as in wo<b>rd</b>, are left out; other tags end a word.
- All else that is neither letter nor digit ends a word, also the underscore.
- Scripts without spaces between words have a word for each letter with its marks. To say how long a passage is,
  `thirds` counts such a letter, other than a Chinese character, as a third of a word: words of Thai, Lao, Khmer and
  Burmese have three to four letters besides their marks.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

import numpy as np

# The end of a sentence with the quotes and brackets that close it, then the space behind it, which full-width marks do
# without. Ends are . ! ? and the same of Arabic, Urdu, Hindi, Amharic, Burmese and Khmer.
SENTENCE_END = re.compile(
    "(?:[.!?\u2026\u061f\u06d4\u0964\u0965\u1362\u104b\u17d4\u17d5][\"'\u201d\u2019\xbb)\\]]*(?=\\s)"
    "|[\u3002\uff01\uff1f\uff61]+[\"'\u201d\u2019\u300d\u300f\u3011\uff09)\\]]*)(\\s*)"
)
_SPACE, _LETTER, _MARK, _HAN, _UNSPACED, _IGNORABLE = range(6)
_ASCII = bytes(ord(chr(i).lower()) if chr(i).isalnum() and i < 128 else ord(" ") for i in range(256))
_TAG = re.compile(
    r"</?(?:(a|abbr|b|bdi|bdo|big|cite|code|del|dfn|em|font|i|ins|kbd|mark|q|s|samp|small|span|strike|strong|sub|sup|tt|u"
    r"|var|wbr)|[a-z][a-z0-9]*)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)  # of HTML; the first group: within a line
_CASED = 0x20000  # beyond it there are Chinese characters, and nothing else that is a letter or a mark
_HAN_BLOCKS = ((0x3005, 0x3007), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_UNSPACED_BLOCKS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19DF), (0x1A20, 0x1AAF), (0xAA80, 0xAADF), (0x11700, 0x1174F),  # other Tai scripts
    (0x1B00, 0x1B7F), (0xA980, 0xA9DF),  # Balinese, Javanese
    (0x3040, 0x312F), (0x31A0, 0x31BF), (0x31F0, 0x31FF), (0x1AFF0, 0x1B16F),  # kana, bopomofo
    (0xA000, 0xA4CF), (0x17000, 0x18D7F), (0x1B170, 0x1B2FF),  # Yi, Tangut, Nushu
)  # fmt: skip
# Unicode's Default_Ignorable_Code_Point.
_IGNORABLE_BLOCKS = (
    (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F),
    (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip


def words(text: str) -> list[str]:
    """The words of a text, in order."""
    return separated(text).split()


def separated(text: str) -> str:
    """The words of a text with spaces between them."""
    if "<" in text:
        text = _TAG.sub(lambda tag: "" if tag[1] else " ", text)
    if text.isascii():
        return text.encode().translate(_ASCII).decode()
    codes, kinds = _kinds(text)
    if (kinds == _IGNORABLE).any():
        text = _text(codes[kinds != _IGNORABLE])
    text = unicodedata.normalize("NFKC", text).casefold()
    codes, kinds = _kinds(
        f" {unicodedata.normalize('NFKC', text)}"
    )  # a space before a mark that begins a text
    is_mark, is_unspaced = kinds == _MARK, kinds >= _HAN
    if is_mark.any() or is_unspaced.any():
        base = np.maximum.accumulate(np.where(is_mark, 0, np.arange(len(kinds))))  # a mark's letter
        kinds = np.where(kinds[base] == _SPACE, _SPACE, kinds)
        follows_unspaced = np.r_[False, kinds[base][:-1] >= _HAN]
        begins = np.flatnonzero(is_unspaced | ((kinds == _LETTER) & follows_unspaced))
    codes = np.where(kinds == _SPACE, ord(" "), codes)
    if is_unspaced.any():
        codes = np.insert(codes, begins, ord(" "))
    return _text(codes)


def thirds(text: str) -> np.ndarray | None:
    """How many thirds of a word each word of a `separated` text counts, int64 [words]; None: all are whole words."""
    if text.isascii():
        return None
    codes, kinds = _kinds(text)
    begins = (codes != ord(" ")) & np.r_[True, codes[:-1] == ord(" ")]
    return np.where(kinds[begins] == _UNSPACED, 1, 3) if (kinds == _UNSPACED).any() else None


def _kinds(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The code points of a text, and the kind of each."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    return codes, _table()[codes]


def _text(codes: np.ndarray) -> str:
    return codes.astype("<u4", copy=False).tobytes().decode("utf-32-le", "surrogatepass")


@cache
def _table() -> np.ndarray:
    """The kind of each code point, uint8. Made late: text in ASCII does without."""
    kind_of = {"L": _LETTER, "N": _LETTER, "M": _MARK}
    table = np.zeros(0x110000, np.uint8)
    table[:_CASED] = [kind_of.get(unicodedata.category(chr(i))[0], _SPACE) for i in range(_CASED)]
    table[_CASED:0x40000] = _LETTER
    for kind, blocks in ((_HAN, _HAN_BLOCKS), (_UNSPACED, _UNSPACED_BLOCKS)):
        for first, last in blocks:
            block = table[first : last + 1]
            block[block == _LETTER] = kind
    for first, last in _IGNORABLE_BLOCKS:
        table[first : last + 1] = _IGNORABLE
    return table
