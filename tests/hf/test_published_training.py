"""Continued training of an imported model is that of its class of transformers under plain torch AdamW."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.distributed import run_ranks
from support.hf.class_losses import trained_losses
from support.hf.class_training import CASES, LR, TREE, batches_of, model_of, write_directory

from data_utils.common.batch_fields import OBJECTIVE, WEIGHTS
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSSES, OBJECTIVES
from megatron_lite.checkpoint.manifest import checkpoint_name
from megatron_lite.checkpoint.read import load_checkpoint
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.importing import import_directory
from megatron_lite.transformer.batch import Batch

# fp32: 50 steps add up the rounding of sums in another order.
TOLERANCE = 1e-4


# ModernBERT goes on with another rotary base in its global layers than that of its directory.
OTHER_BASE = {"modernbert": ({"rotary_base": 20.0}, {"global_rope_theta": 20.0})}


def ours(context, run, batches, options):
    settings = {"parallel": {"tensor_parallel_size": context.tp.size}, "model": options}
    config = build(Config, merge(load_yaml(run / "config.yaml"), settings))
    engine = make_engine(config, context, len(LOSSES))
    load_checkpoint(read_checkpoint(run / "checkpoints" / checkpoint_name(0)), engine, context)
    losses = []
    for step, fields in enumerate(batches):
        factor = 1.0 / np.count_nonzero(fields[:, WEIGHTS])
        result = engine.train_step([engine.prepared(Batch(fields), step, factor)], LR)
        losses.append(float(result.objective_sums[:, 0].sum()) * factor)
    return losses


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *(("bert", 1), ("glm4_moe", 2)),
        *(
            pytest.param(case, ranks, marks=pytest.mark.slow)
            for case, ranks in (
                *(("t5", 1), ("xlnet", 1), ("modernbert", 2)),
                *(("bert", 2), ("gpt2", 1), ("bart", 1), ("glm4", 1), ("qwen3", 2), ("neobert", 1)),
                *(("deberta_v3", 2), ("llama", 1), ("mistral", 1), ("qwen2", 1), ("eurobert", 1)),
                *(("xlm_roberta", 1), ("camembert", 1), ("t5_1_1", 1), ("mt5", 1), ("modernbert", 1)),
                *(("modernbert_decoder", 1), ("deberta_v3", 1), ("qwen3_moe", 1), ("olmoe", 1)),
            )
        ),
    ],
)
def test_losses_match_the_class(case, ranks, tmp_path):
    write_directory(case, tmp_path / "original")
    import_directory(tmp_path / "original", tmp_path / "run", TREE | CASES[case], verify=False)
    batches = batches_of(tmp_path / "run")
    layout = ParallelConfig(tensor_parallel_size=ranks)
    of_run, of_class = OTHER_BASE.get(case, ({}, {}))
    actual = run_ranks(ours, ranks, tmp_path / "run", batches, of_run, parallel=layout)[0]
    described = json.loads((tmp_path / "original/config.json").read_text())
    expected = trained_losses(
        model_of(case, described["vocab_size"], **of_class), batches, LR, **TREE["optimizer"]
    )
    assert np.mean(expected[-10:]) < np.mean(expected[:10]) - 0.1  # it learns
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE)
    if case == "bert":
        assert any((fields[:, OBJECTIVE] == 9).any() for fields in batches) and "masked_lm" in OBJECTIVES
