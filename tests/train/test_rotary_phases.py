"""Phases with another rotary base: as runs that follow each other with it, up to the export."""

import json

import pytest
import torch
from support.configs import tiny
from support.distributed import run_ranks
from support.training.training import fit, open_data, records

from data_utils.common.batch_fields import DOC, PADDING_DOC, WEIGHTS
from data_utils.common.errors import ConfigError
from data_utils.common.settings import merge
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import open_run
from megatron_lite.inference.validation import ALL, one_process, validation_losses
from megatron_lite.train.start import check_start

SHORT, LONG, LOCAL = 20.0, 500.0, 50.0


@pytest.fixture
def encoder(settings):
    """A ModernBERT with a local layer between two global ones."""
    model = {
        "system": "modernbert", "num_layers": 3, "global_every": 2, "attention_window": 4, "max_position": 66,
        "rotary_base": SHORT, "rotary_base_local": LOCAL,
    }  # fmt: skip
    settings = {name: part for name, part in settings.items() if name != "blank_infilling"}
    settings = merge(settings, {"model": model, "objectives": {"masked_lm": 1}})
    return merge(settings, {"training": {"eval_interval": 3}, "checkpoint": {"save_interval": 3}})


def test_a_phase_has_its_base_in_training_evaluation_and_export(encoder, tmp_path):
    """As two runs without phases, the second from the first's checkpoint; local layers keep their base."""

    def directory(name, **changes):
        return merge(encoder, {"run": {"directory": str(tmp_path / name)}, **changes})

    phased = directory("phased", phases=[{"steps": 3}, {"rotary_base": LONG}])
    whole = run_ranks(fit, 1, phased)[0]
    run_ranks(fit, 1, directory("first", training={"stop_after_step": 3}))
    start = {"initialize_from": str(tmp_path / "first/checkpoints/step_00000003"), "initialize": "all"}
    parts = run_ranks(fit, 1, directory("then", model={"rotary_base": LONG}, checkpoint=start))[0]
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    found = records(tmp_path / "phased", "validation")
    assert found == records(tmp_path / "first", "validation") | records(tmp_path / "then", "validation")

    # A start that evaluates before its first step.
    kept = [line for line in (tmp_path / "phased/metrics.jsonl").open() if '"validation"' not in line]
    (tmp_path / "phased/metrics.jsonl").write_text("".join(kept))
    run_ranks(fit, 1, phased)
    assert records(tmp_path / "phased", "validation") == {6: found[6]}

    # The checkpoints of both phases, opened by themselves.
    for step, base in ((3, SHORT), (6, LONG)):
        checkpoint = tmp_path / f"phased/checkpoints/step_{step:08}"
        with one_process() as context:
            losses = validation_losses(open_run(checkpoint), {}, context)[ALL]
        assert losses["loss"] == pytest.approx(found[step]["loss"], rel=1e-6)
        export_run(checkpoint, tmp_path / f"export{step}", ExportOptions())
        described = json.loads((tmp_path / f"export{step}/config.json").read_text())
        bases = [
            described["rope_parameters"][f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")
        ]
        assert bases == [described["global_rope_theta"], described["local_rope_theta"]] == [base, LOCAL]

    # The export goes on with a third base, from its weights.
    given = {name: part for name, part in encoder.items() if name != "model"}
    import_directory(tmp_path / "export6", tmp_path / "import", given | {"run": {}, "phases": []})
    further = directory("further", training={"stop_after_step": 1}, model={"rotary_base": 900.0})
    further = merge(further, {"checkpoint": {"initialize_from": str(tmp_path / "import")}})
    run_ranks(fit, 1, further)
    bases = open_run(tmp_path / "further").config.model
    assert (bases.rotary_base, bases.rotary_base_local) == (900.0, LOCAL)


def test_the_share_of_masks_falls_with_the_phases(encoder):
    shares = (0.3, 0.15, 0.05)
    phases = [{"steps": 2, "masked_lm": {"masked_ratio": share}} for share in shares]
    config, data = open_data(merge(encoder, {"phases": phases, "batch": {"global_batch_size": 64}}))
    firsts = [*config.phase_plan.first_samples, config.phase_plan.consumed(6)]
    for share, first, end in zip(shares, firsts, firsts[1:], strict=False):
        fields = data.train.batch(torch.arange(first, end).numpy())
        texts = fields[:, DOC] != PADDING_DOC
        masked = (fields[:, WEIGHTS].view("float32") > 0).sum()
        assert masked / texts.sum() == pytest.approx(share, rel=0.25)


def test_a_new_run_has_a_base_only_with_rotary_positions(tmp_path):
    given = "model.rotary_base=500", f"run.directory={tmp_path}"
    check_start(tiny(*given, "model.positions=rotary"))
    with pytest.raises(
        ConfigError, match=r"model\.rotary_base is 500\.0 with model.positions learned_blocks"
    ):
        check_start(tiny(*given))
