"""Tokenizers of every family, trained on prose and on text that spells the families' marks, and the words of a text."""

from __future__ import annotations

import io
import itertools
import json
import re

import sentencepiece
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

PROSE = (
    "The quick brown fox jumps over the lazy dog. Nobody was watching, and the dog's naive owner kept reading.",
    "Whoever travels slowly sees villages, rivers and mountains; travelling quickly, one sees only stations.",
    "In the evening they counted the stones, weighed the apples and wrote long letters to their relatives.",
)
MARKED = (
    "## Heading of a section\n\nA list with ## hashes ## inside, and #hashtags.\n### Deeper\n",
    "@@ -1,7 +1,9 @@\n-old line @@ with marks\n+new line @@ with marks\n@@ -20 +22 @@\n",
    "subword</w> units</w> end in </w> here, and lower ▁ one ▁ eighth ▁ blocks ▁▂▃ rise",
    "def counted(stones):\n    total = 0\n    for stone in stones:\n\ttotal += stone\n    return total\n",
)
CORPUS = [*PROSE, *MARKED] * 6
CHINESE = "The book 红楼梦 was written long ago. 曹雪芹 wrote it"
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZE = 260
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BERT_WORDS = pre_tokenizers.BertPreTokenizer


def _trained(model, trainer, pre_tokenizer=None, normalizer=None, decoder=None, texts=CORPUS):
    made = Tokenizer(model)
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    if decoder is not None:
        made.decoder = decoder
    made.train_from_iterator(texts, trainer)
    return made


def _bpe(pre_tokenizer, alphabet=(), size=SIZE, **options):
    model = {name: options.pop(name) for name in ("unk_token", "byte_fallback") if name in options}
    pipeline = {name: options.pop(name) for name in ("normalizer", "decoder") if name in options}
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=list(alphabet),
        show_progress=False,
        **options,
    )
    marks = ("continuing_subword_prefix", "end_of_word_suffix")
    model |= {name: options[name] for name in marks if name in options}
    return _trained(models.BPE(**model), trainer, pre_tokenizer, **pipeline)


def _byte_level(add_prefix_space, hashes=False):
    made = _bpe(
        pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space),
        BYTES,
        SIZE + 160,
        decoder=decoders.ByteLevel(),
    )
    assert any(name.startswith("##") for name in made.get_vocab()), "a token that looks like WordPiece's"
    return made


def _word_piece(prefix):
    trainer = trainers.WordPieceTrainer(
        vocab_size=SIZE, special_tokens=SPECIALS, continuing_subword_prefix=prefix, show_progress=False
    )
    model = models.WordPiece(unk_token="[UNK]", continuing_subword_prefix=prefix)
    normalizer = normalizers.BertNormalizer(lowercase=False)
    return _trained(model, trainer, BERT_WORDS(), normalizer, decoders.WordPiece(prefix=prefix))


def _unigram(pre_tokenizer, decoder=None, **options):
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=SPECIALS, unk_token="[UNK]", show_progress=False
    )
    return _trained(models.Unigram(), trainer, pre_tokenizer, decoder=decoder, **options)


_split = pre_tokenizers.Split


def _llama():
    """No pre-tokenizer: the normalizer writes the marks, and pieces may hold several words."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    made = _bpe(pre_tokenizers.Metaspace(prepend_scheme="always"), unk_token="[UNK]", decoder=decoder)
    tree = json.loads(made.to_str())
    vocab = tree["model"]["vocab"]
    vocab |= {name: len(vocab) + i for i, name in enumerate(fallback)}
    tree |= {"pre_tokenizer": None, "normalizer": json.loads(_state(normalizer))}
    tree["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(tree))


def _state(part):
    holder = Tokenizer(models.BPE())
    holder.normalizer = part
    return json.dumps(json.loads(holder.to_str())["normalizer"])


def _word_level(pre_tokenizer, texts=CORPUS, decoder=None):
    trainer = trainers.WordLevelTrainer(vocab_size=4000, special_tokens=SPECIALS, show_progress=False)
    model, normalizer = models.WordLevel(unk_token="[UNK]"), normalizers.BertNormalizer(lowercase=False)
    return _trained(model, trainer, pre_tokenizer, normalizer, decoder, texts)


def subword_nmt(text):
    """A text as subword-nmt writes it: `sub@@ word`."""
    return " ".join(
        "@@ ".join(word[i : i + 3] for i in range(0, len(word), 3)) for word in text.replace("@@", "").split()
    )


def _subword_nmt(decoder=None):
    """With a decoder most words are whole, so that nothing but the decoder says what the mark is."""
    texts = [subword_nmt(text) for text in CORPUS]
    texts += [] if decoder is None else [" ".join(f"whole{i}" for i in range(3000))]
    return _word_level(pre_tokenizers.WhitespaceSplit(), texts, decoder)


def sentencepiece_model(model_type, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in CORPUS for line in text.splitlines()),
        model_writer=model,
        model_type=model_type,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        **{"vocab_size": SIZE} | options,
    )
    return model.getvalue()


def families():
    """Name -> a maker of the tokenizer, and how its words are cut (see `expected_starts`)."""
    made = {
        f"wordpiece {prefix}": (lambda prefix=prefix: _word_piece(prefix), "bert")
        for prefix in ("##", "@@", "~")
    }
    prefix, suffix = {"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"}
    bert = {"normalizer": normalizers.BertNormalizer(lowercase=False), "unk_token": "[UNK]"}
    end = decoders.BPEDecoder("</w>")
    joined = decoders.Sequence(
        [decoders.WordPiece("##", cleanup=False), decoders.Fuse(), decoders.Replace("@@ ", "")]
    )
    made |= {
        "bpe with a prefix": (lambda: _bpe(BERT_WORDS(), **bert, **prefix), "bert"),
        "bpe with a suffix": (lambda: _bpe(BERT_WORDS(), **bert, **suffix, decoder=end), "bert"),
        "byte level": (lambda: _byte_level(False), "spaces"),
        "byte level, space before": (lambda: _byte_level(True), "spaces"),
        "llama": (_llama, "spaces ▁"),
        "words": (lambda: _word_level(BERT_WORDS()), "bert"),
        "subword-nmt": (_subword_nmt, "nmt"),
        "subword-nmt by its decoder": (lambda: _subword_nmt(joined), "nmt"),
        "plain spaces": (lambda: _bpe(_split(Regex(" ?[^ ]+"), "isolated"), unk_token="[UNK]"), "spaces"),
        "spaces alone": (lambda: _bpe(_split(" ", "isolated"), unk_token="[UNK]"), "alone"),
        "spaces after": (lambda: _bpe(_split(" ", "merged_with_previous"), unk_token="[UNK]"), "after"),
        "no pre-tokenizer": (lambda: _bpe(None, unk_token="[UNK]"), "spaces"),
    }
    for scheme, split in itertools.product(("always", "first", "never"), (True, False)):
        space = {"prepend_scheme": scheme, "split": split}
        cut, decoder = pre_tokenizers.Metaspace(**space), decoders.Metaspace(**space)
        made[f"unigram, metaspace {scheme} {split}"] = (lambda a=cut, b=decoder: _unigram(a, b), "spaces ▁")
    cut, decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    both = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), cut])
    made["unigram after a split"] = (lambda: _unigram(both, decoder), "spaces ▁")
    made["bpe, metaspace"] = (lambda: _bpe(cut, unk_token="[UNK]", decoder=decoder), "spaces ▁")
    return made


MODELS = {
    "unigram": {"model_type": "unigram"},
    "unigram, bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": SIZE + 260},
    "bpe": {"model_type": "bpe"},
    "char": {"model_type": "char"},
    "word": {"model_type": "word", "vocab_size": 80},
    "suffix": {"model_type": "unigram", "treat_whitespace_as_suffix": True},
    "no prefix": {"model_type": "unigram", "add_dummy_prefix": False},
    "several words": {"model_type": "unigram", "split_by_whitespace": False},
}

_CHINESE = "\u4e00-\u9fff"
_CUTS = {
    "spaces": re.compile(rf"[{_CHINESE}]|[^\s{_CHINESE}]+"),
    "nmt": re.compile(r"(?:\S+@@ )*\S+"),  # a word with the parts that subword-nmt cut
}


def _words(text, cut):
    """First character and end of each word."""
    if cut != "bert":
        return [match.span() for match in _CUTS.get(cut, _CUTS["spaces"]).finditer(text)]
    spaced = re.sub(rf"[{_CHINESE}]", " ", text)  # as BertNormalizer, which keeps places
    words = [place for _, place in BERT_WORDS().pre_tokenize_str(spaced)]
    return sorted(words + [match.span() for match in re.finditer(rf"[{_CHINESE}]", text)])


def expected_starts(text, places, cut):
    """Index -> whether the token is a word's first one, by the characters of the tokens alone.

    Space before a word (cut "spaces") belongs to it, space after a word ("after") to that; other space ("bert",
    "alone") and the tokens of space elsewhere are left out. `▁` is a space where it stands for one.
    """
    cut, _, mark = cut.partition(" ")
    text = text.replace(mark, " ") if mark else text
    word_at = {}
    for number, (start, end) in enumerate(_words(text, cut)):
        word_at |= dict.fromkeys(range(start, end), number)
        if cut == "spaces" and text[start - 1 : start] == " " and not "\u4e00" <= text[start] <= "\u9fff":
            word_at.setdefault(start - 1, number)
        if cut == "after" and text[end : end + 1] == " ":
            word_at[end] = number
    before, expected = None, {}
    for i, (start, end) in enumerate(places):
        held = [word_at.get(at) for at in range(start, max(end, start + 1)) if at < len(text)]
        letters = [word for at, word in enumerate(held, start) if word is not None and not text[at].isspace()]
        words = letters or [word for word in held if word is not None]
        if words:
            expected[i] = words[0] != before
            before = words[-1]
        elif held:
            before = None
    return expected
