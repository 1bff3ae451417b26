"""A prompt's [MASK] is the sentinel that T5 was trained with."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from support.data.tokenizer_files import unigram_json

from data_utils.objectives import OBJECTIVES, ObjectiveChoice
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.inference.texts import with_sentinels


@pytest.mark.parametrize(
    "names", [["[MASK]", "<extra_id_0>", "<extra_id_1>"], ["<extra_id_0>", "<extra_id_1>"]]
)
@pytest.mark.parametrize("objective", ["t5", "ul2", "bart"])
def test_masks_of_a_prompt_are_the_sentinels_of_the_training(tmp_path, names, objective):
    """As the objective writes them."""
    tree = unigram_json()
    first = max(token["id"] for token in tree["added_tokens"]) + 1
    like = tree["added_tokens"][0] | {"special": True}
    tree["added_tokens"] += [{**like, "id": first + i, "content": name} for i, name in enumerate(names)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    added = "glm" if objective == "bart" else "none"
    tokenizer = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path), added_tokens=added))
    choice = ObjectiveChoice(objective, OBJECTIVES[objective].config_class())
    text = "The [MASK] fox [MASK] over the [MASK] dog."
    (tokens,) = with_sentinels(
        SimpleNamespace(tokenizer=tokenizer, objectives=[choice]), [tokenizer.encode_with_specials(text)]
    )
    shown = tokenizer.decode(tokens)
    if objective == "bart":
        assert shown.count("[MASK]") == 3
    else:
        assert shown.split("<extra_id_")[1:][0][0] == "0" and shown.count("<extra_id_0>") == 2
        assert "[MASK]" not in shown and shown.index("<extra_id_1>") > shown.index("<extra_id_0>")
