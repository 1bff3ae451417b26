"""Exported tokenizers against the training tokenizers, and the rows of part B that they build."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.data.tokenizer_files import KIND_OF
from transformers import AutoTokenizer, tokenization_utils_base

from data_utils.tasks.base import TaskRecord
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.templates.input_formats import InputFormat
from data_utils.tasks.templates.render import Renderer
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.hf.glm.tokenization_glm import GLMSentencePieceTokenizer, GLMTokenizerFast
from megatron_lite.hf.glm.tokenizer_files import compare_glm_tokenizer, training_tokenizer, write_tokenizer

CASES = [*KIND_OF, "sentencepiece shared gmask"]


@pytest.fixture(scope="module")
def exported(tokenizer_files, tmp_path_factory):
    """Case -> (training tokenizer, exported tokenizer, its directory)."""
    made = {}
    for case in CASES:
        name = case.split()[0]
        shared = "shared" in case
        config = TokenizerConfig(
            kind=KIND_OF[name], path=str(tokenizer_files / name), fixed_command_tokens=not shared
        )
        tokenizer = load_tokenizer(config)
        directory = tmp_path_factory.mktemp("export")
        write_tokenizer(tokenizer, directory, 513)
        cls = GLMSentencePieceTokenizer if name == "sentencepiece" else GLMTokenizerFast
        made[case] = tokenizer, cls.from_pretrained(directory), directory
    return made


@pytest.mark.parametrize("case", CASES)
def test_ids_match_training(exported, case):
    tokenizer, _, directory = exported[case]
    compare_glm_tokenizer(tokenizer, directory)


texts = st.lists(
    st.sampled_from(
        ["the quick", " fox", "\n", "  ", "é", "今", ".", "[MASK]", "[gMASK]", "[sMASK]", "X", "'s"]
    )
    | st.text(st.characters(codec="utf-8", exclude_characters="[]<>"), max_size=8),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_any_text_with_blanks_gives_the_ids_of_training(exported, case, text):
    """Texts that spell no other special token: transformers recognizes those everywhere, training nowhere."""
    tokenizer, hf, _ = exported[case]
    expected = [tokenizer.special.cls, *tokenizer.encode_with_specials(text), tokenizer.special.eos]
    assert hf(text)["input_ids"] == expected


@pytest.mark.parametrize("case", CASES)
def test_a_run_can_continue_with_the_original_files(exported, case):
    tokenizer, _, directory = exported[case]
    section = training_tokenizer(tokenizer.config, directory / "training_tokenizer")
    assert load_tokenizer(TokenizerConfig(**section)).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("case", ["bert", "gpt2", "sentencepiece"])
def test_saving_again_keeps_everything(exported, case, tmp_path):
    tokenizer, hf, _ = exported[case]
    hf.save_pretrained(tmp_path)
    compare_glm_tokenizer(tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert again("the [MASK] fox")["input_ids"] == hf("the [MASK] fox")["input_ids"]
    assert again.blank_token_ids == hf.blank_token_ids


def test_the_proof_of_a_model_with_few_positions_warns_of_nothing(exported, tmp_path, monkeypatch):
    """Its texts may be longer than the model takes: no model reads them."""
    tokenizer = exported["gpt2"][0]
    write_tokenizer(tokenizer, tmp_path, 9)
    said = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", lambda text, *_: said.append(text))
    GLMTokenizerFast.from_pretrained(tmp_path)("the quick brown fox jumps over the dog.")
    assert len(said) == 1 and "longer than the specified maximum" in said[0]  # so transformers would warn
    compare_glm_tokenizer(tokenizer, tmp_path)
    assert len(said) == 1


@pytest.mark.parametrize("case", ["bert", "gpt2", "sentencepiece"])
def test_text_comes_back(exported, case):
    tokenizer, hf, _ = exported[case]
    ids = tokenizer.encode("the quick brown fox jumps.")
    assert hf.decode(ids) == tokenizer.decode(ids)


def test_rows_for_training_by_hand(exported):
    """The document of the specification's worked example: two blanks, the answers in text order."""
    _, hf, _ = exported["bert"]
    the, quick, fox = hf.convert_tokens_to_ids(["the", "quick", "fox"])
    cls, mask, eos, sop, eop = (
        hf.cls_token_id,
        hf.mask_token_id,
        hf.eos_token_id,
        hf.sop_token_id,
        hf.eop_token_id,
    )
    inputs = hf.build_inputs_for_training(hf(["the [MASK] fox [MASK]"]), [["quick", "fox the"]])
    no = -100
    assert inputs["input_ids"].tolist() == [[cls, the, mask, fox, mask, eos, sop, quick, sop, fox, the]]
    assert inputs["labels"].tolist() == [[no] * 6 + [quick, eop, fox, the, eop]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 2, 2, 4, 4, 4]]
    assert inputs["block_position_ids"].tolist() == [[0] * 6 + [1, 2, 1, 2, 3]]
    assert inputs["attention_mask"].tolist() == [[1] * 11]


def test_rows_for_generation(exported):
    _, hf, _ = exported["gpt2"]
    texts = ["the quick[MASK] fox [MASK]", "the [gMASK]"]
    first = hf.build_inputs_for_generation(hf(texts, padding=True))
    assert first["input_ids"][:, -1].tolist() == [hf.sop_token_id] * 2
    assert first["block_position_ids"][:, -1].tolist() == [1, 1]
    row, mask = first["input_ids"][1].tolist(), first["attention_mask"][1].tolist()
    real = row[mask.index(1) :]
    assert real == [*hf("the [gMASK]")["input_ids"][:-1], hf.sop_token_id]  # to be continued: no end of text
    assert first["position_ids"][1, -1] == len(real) - 2
    unpadded = hf.build_inputs_for_generation(hf(texts[0], return_tensors="pt"), [[[5, 6]]])
    assert unpadded["input_ids"][0, -4:].tolist() == [hf.sop_token_id, 5, 6, hf.sop_token_id]
    assert unpadded["block_position_ids"][0, -4:].tolist() == [1, 2, 3, 1]
    single = hf.build_inputs_for_generation(hf(texts[0]))
    assert torch.equal(single["input_ids"][0], first["input_ids"][0][first["attention_mask"][0] == 1])


@pytest.mark.parametrize("case", CASES)
def test_a_task_and_its_export_have_the_same_inputs(exported, case):
    tokenizer, hf, _ = exported[case]
    verbalizers = {"0": "the fox", "1": "quick"}
    task = TaskConfig(
        name="own",
        kind="cloze",
        reader="jsonl",
        template="{text} It was [MASK], yes",
        verbalizers=verbalizers,
        scoring="sum",
    )
    renderer = Renderer(task, tokenizer, InputFormat("glm", "blank_infilling"), 1)
    sample = renderer.sample(TaskRecord(0, {"text": "The lazy dog jumps."}, "1"), 0)
    choices = [f" {words}" for words in verbalizers.values()]
    theirs = hf.build_inputs_for_multiple_choice(hf(["The lazy dog jumps. It was [MASK], yes"]), [choices])
    for number, (example, part) in enumerate(zip(sample.documents, sample.target_groups, strict=True)):
        size = len(example.tokens)
        for name, field in (
            ("input_ids", "tokens"),
            ("position_ids", "position_ids"),
            ("block_position_ids", "block_position_ids"),
        ):
            assert theirs[name][0, number, -size:].tolist() == getattr(example, field).tolist()
        labels = theirs["choice_labels"][0, number, -size:]
        assert labels[part.positions].tolist() == part.targets.tolist() and (labels >= 0).sum() == len(
            part.positions
        )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda hf: hf.build_inputs_for_generation(hf("the fox")), "a text has 0 blanks"),
        (
            lambda hf: hf.build_inputs_for_generation(hf("the [MASK]"), [[[5]]]),
            "a text has 1 blanks; mark more",
        ),
        (lambda hf: hf.build_inputs_for_training(hf(["[MASK]"]), [["a", "b"]]), "1 blanks but 2 targets"),
        (
            lambda hf: hf.build_inputs_for_multiple_choice(hf(["[MASK]"]), [["a"], ["b"]]),
            "one list of choices",
        ),
    ],
)
def test_mistakes_are_named(exported, call, message):
    with pytest.raises(ValueError, match=message):
        call(exported["bert"][1])


def test_a_vocabulary_with_other_names_keeps_its_blanks(exported):
    """[gMASK] in a text is a blank even where the vocabulary calls its id eop."""
    tokenizer, hf, _ = exported["sentencepiece shared gmask"]
    assert hf("the [gMASK]")["input_ids"][-2] == tokenizer.special.eop == hf.gmask_token_id
    tree = json.loads((exported["unigram"][2] / "tokenizer.json").read_text())
    assert not any("\ufdd0" in token["content"] for token in tree["added_tokens"])
