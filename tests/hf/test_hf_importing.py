"""Export and import give the same bits, and training goes on from an import."""

from pathlib import Path

import pytest
import torch
import yaml
from support.distributed import run_ranks
from support.hf.hf_directories import assert_same_weights, weights_of
from support.hf.hf_runs import make_config, settings_of, write_run
from support.training.engines import layout, placed
from support.training.training import fit
from support.training.whole_weights import load_weights

from data_utils.common.settings import merge
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.read import load_checkpoint, newest_valid
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import load_run

# Round trips


def test_there_and_back_is_bit_equal(run, exports, tmp_path):
    found = import_directory(exports / "huggingface", tmp_path / "back", {})
    assert found.largest_difference <= 1e-5
    assert_same_weights(weights_of(tmp_path / "back"), weights_of(run))
    # The tokenizer comes along, with the fingerprint of the corpora, and the run can be opened.
    before, after = load_run(run), load_run(tmp_path / "back")
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    assert after.config.model == before.config.model
    written = yaml.safe_load((tmp_path / "back/config.yaml").read_text())
    assert written["run"]["directory"] == str(tmp_path / "back")
    assert written["training"]["steps"] == 6


def load_and_check(context, settings, directory):
    config = make_config(settings)
    engine = make_engine(config, context, num_losses=3)
    found = newest_valid(Path(directory) / "checkpoints", context)
    load_checkpoint(found, engine, context)
    whole = load_weights(found)
    for fragment, run, positions in placed(engine):
        expected = whole[fragment.name].flatten()[positions]
        for kind, values in fragment.tensors.items():
            part = values[run.start - fragment.start : run.stop - fragment.start]
            assert torch.equal(part, expected if kind == "weight" else torch.zeros_like(part))


@pytest.mark.parametrize("ranks, parallel", [(1, layout()), (4, layout(tp=2, pp=2))])
def test_an_import_continues_in_any_layout(run, vocabulary, exports, tmp_path, ranks, parallel):
    import_directory(exports / "huggingface", tmp_path / "back", {}, verify=False)
    assert_same_weights(weights_of(tmp_path / "back"), weights_of(run))
    settings = settings_of(vocabulary, parallel)
    run_ranks(load_and_check, ranks, settings, tmp_path / "back", parallel=ParallelConfig(**parallel))


def test_training_continues_from_an_import(settings, tmp_path):
    """The trainer resumes at step 0 with the imported weights; a tiny learning rate leaves them there."""
    write_run(tmp_path / "first", settings)
    export_run(tmp_path / "first", tmp_path / "export", ExportOptions(verify=False))
    change = {"training": {"stop_after_step": 1}, "optimizer": {"lr": 1e-12}, "run": {"directory": "ignored"}}
    settings = merge(settings, change)
    import_directory(tmp_path / "export", tmp_path / "back", settings, verify=False)
    settings = merge(settings, {"run": {"directory": str(tmp_path / "back")}})
    imported = weights_of(tmp_path / "back")
    for name, weight in run_ranks(fit, 2, settings)[0].items():
        torch.testing.assert_close(weight[: len(imported[name])], imported[name], rtol=0, atol=1e-10)
    saved = list_checkpoints(tmp_path / "back/checkpoints")
    assert [path.name for path in saved] == ["step_00000000", "step_00000001"]
