"""Sentences with blanks, as people write them, have the ids of training: its text with the words cut out.

Prompts here and AutoTokenizer of an export are asked, for every kind of tokenizer and every system.
"""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
from support.data.tokenizer_files import CORPUS, KIND_OF
from support.hf import published_tokenizers
from transformers import AutoTokenizer

from data_utils.objectives import OBJECTIVES, ObjectiveChoice
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.hf.glm import tokenizer_files as of_glm
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME
from megatron_lite.hf.published.tokenizers import write_tokenizer
from megatron_lite.inference.texts import with_sentinels
from scripts import train_tokenizer

# Each blank is in braces.
SENTENCES = (
    "The {quick} brown {fox} jumps over the lazy {dog}.",
    "{Yes}; they're here, it's {done}, isn't it? The {dog} is (not {here})!",
    'The dog says "{fox}" and {jumps} {over} the {brown}...',
)
CHINESE = "今天{天气}很{好}。你好？"
TRAINED = ("hf_json", "bert_wordpiece", "sentencepiece")
T5_LIKE = ("t5", "t5_1_1", "mt5")
MASKED = [
    system
    for system in SYSTEMS_BY_NAME
    if system not in ("gpt", "gpt2", "llama", "mistral", "qwen2", "qwen3", "modernbert_decoder")
]
CASES = [
    *(("hf_json", system) for system in MASKED),
    *itertools.product(("bert_wordpiece", "gpt2", "roberta"), ("bert", "roberta", "modernbert", "t5")),
    *itertools.product((*TRAINED, "gpt2", "roberta", "unigram"), ("glm",)),
]


@pytest.fixture(scope="module")
def files(tokenizer_files, tmp_path_factory):
    """Name -> kind and path: those that train_tokenizer.py makes, and imported ones."""
    root = tmp_path_factory.mktemp("trained")
    (root / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS))
    found = {name: (kind, tokenizer_files / name) for name, kind in KIND_OF.items()}
    for name in TRAINED:
        arguments = ["--kind", name, "--input", str(root / "corpus.jsonl"), "--vocab-size", "340"]
        train_tokenizer.main([*arguments, "--output", str(root / name)])
        found[name] = name, root / name
    return found


def cut_out(tokenizer, sentence, blanks):
    """The ids of a whole text in training, each blank and the space before it replaced by the next of `blanks`."""
    parts = sentence.replace("}", "{").split("{")
    ids, offsets = tokenizer.encode_with_offsets("".join(parts))
    assert ids == tokenizer.encode("".join(parts))
    made, done, at, blanks = [], 0, 0, iter(blanks)
    for number, part in enumerate(parts):
        first, last = at - (number % 2 and parts[number - 1].endswith(" ")), at + len(part)
        if number % 2:
            hidden = [i for i, (start, end) in enumerate(offsets) if start < last and end > max(first, 0)]
            begin = 0 if at == 0 else hidden[0]  # what is put before a text belongs to its first word
            made += [*ids[done:begin], next(blanks)]
            done = hidden[-1] + 1
        at = last
    return made + ids[done:]


def with_blanks(sentence, names):
    names = iter(names)
    parts = sentence.replace("}", "{").split("{")
    return "".join(next(names) if number % 2 else part for number, part in enumerate(parts))


@pytest.mark.parametrize("system", ["t5", "xlnet", "xlm_roberta", "llama", "deberta_v3"])
def test_prompts_of_a_released_tokenizer_have_the_ids_of_training(tmp_path, system):
    """Of SentencePiece, whose classes put a space before what follows a mask: none is put here."""
    published_tokenizers.write_files(system, tmp_path)
    published_tokenizers.add_json(tmp_path)
    tokenizer = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))
    for sentence in SENTENCES:
        expected = cut_out(tokenizer, sentence, [tokenizer.special.mask] * 9)
        assert tokenizer.encode_with_specials(with_blanks(sentence, ["[MASK]"] * 9)) == expected, sentence


@pytest.mark.parametrize(("name", "system"), CASES, ids=str)
def test_a_sentence_with_blanks_has_the_ids_of_training(files, tmp_path, name, system):
    kind, path = files[name]
    added = "glm" if system == "glm" else "t5" if system in T5_LIKE else "none"
    if name == "gpt2" and added == "none":
        added = "glm"  # it has no mask
    tokenizer = load_tokenizer(TokenizerConfig(kind=kind, path=str(path), added_tokens=added))
    if system == "glm":
        of_glm.write_tokenizer(tokenizer, tmp_path / "export", 513)
    else:
        (tmp_path / "export").mkdir()
        described = {"model_type": SYSTEMS_BY_NAME[system].model_type}
        (tmp_path / "export/config.json").write_text(json.dumps(described))
        ids = {"pad_token_id": tokenizer.special.pad, "eos_token_id": tokenizer.special.eos}
        write_tokenizer(
            tmp_path / "export", tokenizer, ids, tmp_path / "none", system, has_segments=system == "bert"
        )
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export", trust_remote_code=system == "glm")
    choice = ObjectiveChoice("t5", OBJECTIVES["t5"].config_class())
    run = SimpleNamespace(tokenizer=tokenizer, objectives=[choice] if added == "t5" else [])
    names = [f"<extra_id_{k}>" for k in range(9)] if added == "t5" else [theirs.mask_token] * 9
    blanks = tokenizer.sentinels[:9] if added == "t5" else [tokenizer.special.mask] * 9
    for sentence in (*SENTENCES, *[CHINESE] * (name == "sentencepiece")):  # bytes are merged across its words
        expected = cut_out(tokenizer, sentence, blanks)
        prompt = tokenizer.encode_with_specials(with_blanks(sentence, ["[MASK]"] * 9))
        (ours,) = with_sentinels(run, [prompt])
        assert ours == expected, sentence
        text = with_blanks(sentence, ["[MASK]"] * 9 if system == "glm" else names)
        assert theirs(text, add_special_tokens=False)["input_ids"] == expected, text
