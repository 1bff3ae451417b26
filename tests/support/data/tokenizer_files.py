"""Files of small tokenizers of every kind, texts, and names that text must not turn into special tokens."""

from __future__ import annotations

import io
import json

import sentencepiece
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from data_utils.tokenizers.library_tokenizer import HIDDEN
from data_utils.tokenizers.special_tokens import SPECIAL_NAMES

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1999, isn't it? Yes; they're here!\n\nNew line: done…",
    "Größe und naïve Café: déjà vu. Привет, мир! 今天天气很好。你好？是的；好！ 🙂 emoji",
    "def f(x):\n    return x ** 2  # a comment\n",
] * 40


SENTENCEPIECE_SIZE = 330


BYTE_SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())


WORDS = "the quick brown fox jump ##s ##ed over lazy dog naive cafe Cafe café 今 天 。 ' … 🙂 " + " ".join(
    ".,!?;:[]<>|#"
)


BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert_vocab():
    letters = [p + c for c in "abcdefghijklmnopqrstuvwxyzGM0123456789" for p in ("", "##")]
    return list(dict.fromkeys([*BERT_SPECIALS, *WORDS.split(), *letters]))


def train_json(model, trainer, pre_tokenizer):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_bpe_json(special_tokens):
    tokenizer = train_json(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=BYTE_SYMBOLS, special_tokens=special_tokens, show_progress=False
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return json.loads(tokenizer.to_str())


def unigram_json():
    """Like T5's: control pieces inside the model, a template, an ordinary added token, a late special one."""
    tokenizer = train_json(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=260,
            special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
            unk_token="<unk>",
            show_progress=False,
        ),
        pre_tokenizers.Metaspace(),
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding()
    return json.loads(tokenizer.to_str())


def sentencepiece_model(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in CORPUS for line in text.splitlines()),
        model_writer=model,
        vocab_size=SENTENCEPIECE_SIZE,
        byte_fallback=True,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def write_bert(directory, names, **options):
    """vocab.txt, and the class that reads it whatever the model: its options stand beside its name."""
    directory.mkdir(exist_ok=True)
    (directory / "vocab.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    described = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **options}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory / "vocab.txt"


def write_gpt2(directory, vocab, merges):
    directory.mkdir(exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps(vocab))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))


def roberta_vocab(size):
    """RoBERTa's order: four names, pieces, an entry that is never used near the end, <mask> last."""
    names = ["<s>", "<pad>", "</s>", "<unk>", *BYTE_SYMBOLS]
    names += [f"a{i}" for i in range(size - len(names) - 5)]
    names += ["<|endoftext|>", *(f"madeupword{i:04}" for i in range(3)), "<mask>"]
    return {name: i for i, name in enumerate(names)}


def roberta_json(vocab):
    """The tokenizer.json of RoBERTa: its names are added tokens, but for <|endoftext|>."""
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for name in ("<s>", "<pad>", "</s>", "<unk>", "<mask>"):
        backend.add_special_tokens(
            [tokenizers.AddedToken(name, lstrip=name == "<mask>", special=True, normalized=False)]
        )
    backend.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return backend.to_str()


def write_all(root):
    """One directory of files for every kind of tokenizer."""
    for name in ("bert", "json", "unigram", "sentencepiece", "roberta"):
        (root / name).mkdir()
    (root / "bert" / "vocab.txt").write_text("\n".join(bert_vocab()) + "\n", encoding="utf-8")
    model = byte_bpe_json([])["model"]
    write_gpt2(root / "gpt2", model["vocab"] | {"<|endoftext|>": len(model["vocab"])}, model["merges"])
    (root / "json" / "tokenizer.json").write_text(json.dumps(byte_bpe_json(list(SPECIAL_NAMES.values()))))
    (root / "unigram" / "tokenizer.json").write_text(json.dumps(unigram_json()))
    (root / "sentencepiece" / "tokenizer.model").write_bytes(
        sentencepiece_model(user_defined_symbols=["[MASK]", "<n>"])
    )
    (root / "roberta" / "tokenizer.json").write_text(roberta_json(roberta_vocab(300)))


KIND_OF = {
    "bert": "bert_wordpiece",
    "gpt2": "gpt2_bpe",
    "json": "hf_json",
    "unigram": "hf_json",
    "roberta": "hf_json",
    "sentencepiece": "sentencepiece",
}

LITERALS = [
    *SPECIAL_NAMES.values(),
    *("<s>", "</s>", "<unk>", "<pad>", "<mask>", "<eop>", "<sop>", "<bos>", "<0x0A>"),
    *(HIDDEN + name for name in ("<s>", "[MASK]", "<|endoftext|>", "<unk>")),
]
texts = st.text(st.characters(codec="utf-8"), max_size=60) | st.lists(
    st.sampled_from([*LITERALS, " ", "  ", "\n", "the", "quick", " fox", "é", "今", ".", "'s", "12"]),
    max_size=12,
).map("".join)
