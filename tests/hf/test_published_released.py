"""Directories with the tensors and fields of released files come in, and what their class ignores is named."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from support.published_files import OBJECTIVE, TREE
from support.released_facts import RELEASED, write_released

from megatron_lite.hf.doors.export import ExportOptions, export_run
from megatron_lite.hf.doors.importing import import_directory

CAUSAL = {"objectives": {"causal": 1}}
WITHOUT_LABELS = {  # of sentences, for which the files have no head
    "bert": {"objectives": {"masked_lm": 1}, "masked_lm": {"next_sentence": False}},
    "albert": {"objectives": {"albert": 1}, "albert": {"sentence_order": False}},
    "electra_generator": {"objectives": {"masked_lm": 1}},
    "ernie": {"objectives": {"masked_lm": 1}},
    "gpt": CAUSAL,
}


def tree_of(case):
    key = case.partition(",")[0]
    return TREE | (WITHOUT_LABELS | {k: v for k, v in OBJECTIVE.items() if k not in WITHOUT_LABELS})[key]


@pytest.mark.parametrize("name", list(RELEASED))
def test_a_released_directory_comes_in_and_names_what_it_leaves_out(tmp_path, caplog, name):
    """The proof compares with the class; today's tensors are bit-equal in an export."""
    found = RELEASED[name]
    caplog.set_level(logging.WARNING)
    _, state = write_released(name, tmp_path / "theirs")
    proof = import_directory(tmp_path / "theirs", tmp_path / "run", tree_of(found.case))
    assert proof is not None and proof.agreement == 1.0
    lines = [record.getMessage() for record in caplog.records if "left out: " in record.getMessage()]
    assert all(any(module in line for line in lines) for module in found.named), lines
    assert bool(lines) == bool(found.named)
    export_run(tmp_path / "run", tmp_path / "ours", ExportOptions(verify=False))
    after = load_file(tmp_path / "ours/model.safetensors")
    assert after.keys() == state.keys()
    assert [key for key in state if not torch.equal(state[key], after[key])] == []
