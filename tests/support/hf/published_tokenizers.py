"""Tokenizer directories of published systems as their users have them, small, in every combination of their options."""

import io
import itertools
import json
from functools import cache

import sentencepiece
import transformers
from support.data.tokenizer_files import (
    BYTE_SYMBOLS,
    CORPUS,
    bert_vocab,
    byte_bpe_json,
    write_bert,
    write_gpt2,
)

SCRIPTS = [
    *CORPUS,
    *["``Quoted'' text, “typographic” ‘quotes’ and 'straight' \"ones\" (brackets) - dashes."] * 8,
    *["Ångström café naïve İstanbul ΟΔΥΣΣΕΥΣ straße ﬁne ½ ② ＡＢＣ 한국어 東京タワー שלום नमस्ते"] * 8,
]
MODEL_TYPE = {
    "bert_cased": "bert", "gpt": "openai-gpt", "glm4": "glm", "xlm_roberta": "xlm-roberta", "llama3": "llama",
    "deberta_v3": "deberta-v2",
}  # fmt: skip
SPIECE_FILE = {
    "xlm_roberta": "sentencepiece.bpe.model", "camembert": "sentencepiece.bpe.model", "llama": "tokenizer.model",
    "deberta_v3": "spm.model",
}  # fmt: skip
# The byte-level vocabularies that came as a tokenizer.json alone.
BYTES = {
    "glm4": ["<|endoftext|>", "[MASK]", "<sop>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>"],
    "eurobert": ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"],
    "olmoe": ["<|endoftext|>", "<|padding|>"],
}
_FLAGS = {
    "bert": ("do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    "albert": ("do_lower_case", "keep_accents", "remove_space"),
    "xlnet": ("do_lower_case", "keep_accents", "remove_space"),
    **dict.fromkeys(("roberta", "gpt2", "bart"), ("add_prefix_space",)),
    **dict.fromkeys(("gpt", "t5", "mt5", "ernie", "qwen2", *SPIECE_FILE, *BYTES), ()),
    "deberta_v3": ("do_lower_case", "split_by_punct"),
}


def combinations(system):
    """Every value of a system's options."""
    flags = _FLAGS[system]
    return [
        dict(zip(flags, values, strict=True))
        for values in itertools.product((True, False), repeat=len(flags))
    ]


@cache
def spiece(system):
    """A SentencePiece model with the control pieces of a system, in its order."""
    options = {
        "albert": {
            "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
            "user_defined_symbols": ["(", ")", '"', "-", "."],
        },
        "xlnet": {
            "unk_id": 0, "bos_id": 1, "eos_id": 2, "user_defined_symbols": ["<eop>", ".", "(", ")", '"', "-"],
            "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"],
        },
        "xlm_roberta": {"unk_id": 0, "bos_id": 1, "eos_id": 2},
        "camembert": {"unk_id": 0, "bos_id": 1, "eos_id": 2},
        "llama": {"unk_id": 0, "bos_id": 1, "eos_id": 2, "model_type": "bpe", "byte_fallback": True},
        "mt5": {
            "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1,
            "user_defined_symbols": [f"<extra_id_{99 - i}>" for i in range(100)],
        },
        "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        "deberta_v3": {
            "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]",
            "eos_piece": "[SEP]", "unk_piece": "[UNK]",
        },
    }[system]  # fmt: skip
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in SCRIPTS for line in text.splitlines()),
        model_writer=model,
        vocab_size=600 if system in ("llama", "mt5") else 300,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return model.getvalue()


@cache
def _merges():
    return byte_bpe_json([])["model"]


def write_files(system, directory, **options):
    """The files that a system's users have, with options in tokenizer_config.json. Returns: the vocabulary's size."""
    directory.mkdir(parents=True, exist_ok=True)
    described = {"model_type": MODEL_TYPE.get(system, system)}
    (directory / "config.json").write_text(json.dumps(described))
    if system in ("bert", "ernie"):
        write_bert(directory, [*bert_vocab(), "é", "##é", "É", "ö", "##ö", "中", "文", "中文"], **options)
    elif system == "gpt":
        letters = [chr(i) for i in range(33, 127)]
        names = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters), "th", "the</w>"]
        write_gpt2(directory, {name: i for i, name in enumerate(names)}, [("t", "h"), ("th", "e</w>")])
    elif system in BYTES:
        (directory / "tokenizer.json").write_text(json.dumps(byte_bpe_json(BYTES[system])))
    elif system == "qwen2":
        model = _merges()
        write_gpt2(directory, model["vocab"], model["merges"])  # its end of text is added by the class
    elif system in ("gpt2", "roberta", "bart"):
        model = _merges()
        pieces = [*BYTE_SYMBOLS, *(name for name in model["vocab"] if name not in BYTE_SYMBOLS)]
        first = [] if system == "gpt2" else ["<s>", "<pad>", "</s>", "<unk>"]
        last = ["<|endoftext|>"] if system == "gpt2" else ["<mask>"]
        names = [*first, *pieces, *last]
        write_gpt2(directory, {name: i for i, name in enumerate(names)}, model["merges"])
        (directory / "tokenizer_config.json").write_text(json.dumps(options))
    else:
        (directory / SPIECE_FILE.get(system, "spiece.model")).write_bytes(spiece(system))
        (directory / "tokenizer_config.json").write_text(json.dumps(options))
    return len(theirs_of(directory))


def theirs_of(directory):
    return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)


def add_json(directory):
    """The tokenizer.json of the directory's class, as most directories have it beside the older files."""
    (directory / "tokenizer.json").write_text(
        theirs_of(directory).backend_tokenizer.to_str(), encoding="utf-8"
    )
