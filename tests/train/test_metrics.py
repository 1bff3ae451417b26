import dataclasses
import json
import time

import numpy as np
import pytest
from support.waiting import wait_until

from megatron_lite.config.model import ModelConfig
from megatron_lite.telemetry.formatting import format_count, format_duration
from megatron_lite.telemetry.reports import (
    objective_losses,
    train_line,
    validation_line,
)
from megatron_lite.telemetry.writer import Metrics, has_saved, is_recorded
from megatron_lite.transformer.flops import layer_costs, step_flops


def test_flops_of_a_hand_counted_model():
    model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=10)
    # per token and layer 12 h^2 multiply-adds; per visible key 2 h (scores and values); head h V; x2 FLOPs x3 passes.
    expected = 6 * (2 * 12 * 64 * 5 + 2 * 2 * 8 * 11 + 8 * 10 * 3)
    assert step_flops(model, tokens=5, loss_tokens=3, visible_keys=11) == expected


def test_flops_of_an_encoder_and_a_decoder():
    model = ModelConfig(num_layers=2, decoder_layers=3, hidden_size=8, num_attention_heads=2, vocab_size=10)
    # 5 tokens, of which 2 are the decoder's. A decoder block: attention 4 h^2, cross-attention 2 h^2 on its tokens and
    # 2 h^2 on the encoder's, FFN 8 h^2.
    products = 2 * 12 * 64 * 3 + 3 * (14 * 64 * 2 + 2 * 64 * 3)
    pairs = 2 * (11 - 4) + 3 * 4
    expected = 6 * (products + 2 * 8 * pairs + 8 * 10 * 2)
    assert step_flops(model, 5, 2, 11, decoder_tokens=2, decoder_keys=4) == pytest.approx(expected, rel=1e-12)
    first, *blocks, _, head = layer_costs(model, 2 / 5)[1:]
    assert blocks == pytest.approx([3 / 5] * 2 + [(14 * 2 + 2 * 3) / (12 * 5)] * 3) and first == 0.05
    assert head == pytest.approx(10 * 2 / (12 * 8 * 5))


def test_flops_of_options_are_counted_from_shapes():
    plain = dict(num_layers=3, hidden_size=8, num_attention_heads=2, vocab_size=10)
    model = ModelConfig(**plain, embedding_size=4, share_layers="all", ffn_size=24, head_dim=6, rms_norm=True)
    # Queries, keys, values and output 8 x 12 each, two matrices 8 x 24; 4 -> 8 at the start, 8 -> 4 -> 10 at the end.
    expected = 6 * (5 * (3 * (4 * 8 * 12 + 2 * 8 * 24) + 4 * 8) + 3 * 2 * 12 * 11 + 3 * (8 * 4 + 4 * 10))
    assert step_flops(model, tokens=5, loss_tokens=3, visible_keys=11) == expected
    bert = ModelConfig(**plain, head_transform=True, head_bias=True, sentence_classes=2, segments=2)
    spans = dataclasses.replace(bert, sentence_classes=0, span_boundary_places=7)
    blocks, places = (
        3 * 12 * 64,
        (2 * 8 + 200) * 8 + 8 * 8,
    )  # SpanBERT: from the boundaries and a place of width 200
    assert step_flops(bert, 5, 3, 0) == 6 * (5 * blocks + 3 * (8 * 8 + 8 * 10))
    assert step_flops(spans, 5, 3, 0) == 6 * (5 * blocks + 3 * (8 * 8 + places + 2 * 8 * 10))


def test_losses_per_objective_are_weighted_means():
    sums = np.array([[6.0, 2.0], [0.0, 0.0], [1.0, 2.0]])
    losses = objective_losses(sums, ["token", "sentence", "document"])
    assert losses == {"loss": 1.75, "loss/token": 3.0, "loss/document": 0.5}


def test_records_go_to_jsonl_and_tensorboard_on_the_main_rank_only(tmp_path):
    for enabled in (False, True):
        metrics = Metrics(tmp_path / str(enabled), enabled, tensorboard=True)
        metrics.write("train", 3, {"loss": 1.5, "note": "x"}, "line")
        metrics.close("FINISHED")
    assert not (tmp_path / "False").exists()
    record = json.loads((tmp_path / "True/metrics.jsonl").read_text())
    assert (record["kind"], record["step"], record["loss"], record["note"]) == ("train", 3, 1.5, "x")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "True/tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 1.5)]


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    metrics = Metrics(tmp_path, True, tensorboard=False)
    metrics.write("train", 3, {"grad_norm": float("inf"), "by_layer": {"a": [float("nan"), 1.0]}}, "line")
    metrics.close("FINISHED")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (record["grad_norm"], record["by_layer"]) == (None, {"a": [None, 1.0]})


def test_a_full_disk_costs_records_and_no_run(small_disk, caplog):
    disk = small_disk("size=64k")
    metrics = Metrics(disk, True, tensorboard=False)
    (disk / "other").write_bytes(bytes(56 * 1024))
    for step in range(100):  # 100 bytes or more each: a page is left
        metrics.write("train", step, {"note": "x" * 60}, "line")
    kept = steps_in(disk / "metrics.jsonl")
    assert kept == list(range(len(kept))) and 0 < len(kept) < 100
    assert caplog.text.count("No space left on device; records are lost until the file can be written") == 1
    (disk / "other").unlink()
    metrics.write("train", 100, {}, "line")
    assert steps_in(disk / "metrics.jsonl") == [*kept, 100]
    assert f"{100 - len(kept)} records were lost" in caplog.text


def test_a_tensorboard_that_fails_is_given_up(tmp_path, monkeypatch, caplog):
    metrics = Metrics(tmp_path, True, tensorboard=True)

    def broken(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics._board, "add_scalar", broken)
    for step in (1, 2):
        metrics.write("train", step, {"loss": 1.0}, "line")
    metrics.close("FINISHED")
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]
    assert caplog.text.count("TensorBoard's file cannot be written") == 1


def test_a_line_cut_by_a_crash_is_removed_when_the_run_continues(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    metrics = Metrics(tmp_path, True, tensorboard=False)
    metrics.write("train", 2, {}, "line")
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]


def test_tensorboard_hides_what_was_logged_after_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, losses in ((0, {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}), (2, {3: 2.5})):
        metrics = Metrics(tmp_path, True, tensorboard=True, step=start)
        for step, loss in losses.items():
            metrics.write("train", step, {"loss": loss}, "line")
        metrics.close("FINISHED")
        second = int(time.time())
        wait_until(
            lambda last=second: int(time.time()) > last
        )  # files are ordered by names that hold the second
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 5.0), (2, 4.0), (3, 2.5)]


VALUES = {
    "consumed_samples": 1600, "consumed_tokens": 819200, "loss": 2.5, "loss/token": 3.0, "lr": 1e-4, "grad_norm": 0.5,
    "loss_scale": 1.0, "skipped_steps": 0, "tokens_per_second": 12345.6, "tflops_per_device": 0.123, "mfu": 0.4567,
    "memory_gib": 1.25, "padding": 0.01, "data_share": 0.01, "eta_seconds": 3723.0,
}  # fmt: skip


def test_the_line_shows_what_a_person_watches():
    assert train_line(100, 1000, VALUES) == (
        "step 100/1000 | loss 2.5000 | lr 1.00e-04 | grad norm 0.5 | 12,346 tokens/s | MFU 45.7% | 1h02m left"
    )
    measured = {name: value for name, value in VALUES.items() if name != "mfu"} | {"machine_share": 0.25}
    assert " | machine 25.0% | " in train_line(100, 1000, measured)
    unusual = train_line(9, 10, {**VALUES, "skipped_steps": 2, "data_share": 0.2})
    assert unusual.endswith(" | MFU 45.7% | skipped 2 | data wait 20%")  # rather than the time that is left
    assert " | MFU 45.7% | padding 12% | 1h02m left" in train_line(9, 10, {**VALUES, "padding": 0.12})


def test_lines_fit_a_terminal_of_120_columns():
    large = {**VALUES, "loss": 1234.5, "grad_norm": 123456.0, "tokens_per_second": 12345678.9, "mfu": 1.0}
    large |= {"eta_seconds": 86400 * 123, "skipped_steps": 12345, "data_share": 0.99, "lr": 1.234e-05}
    line = train_line(1_000_000, 2_000_000, large)
    assert len(f"12:34:56 {line}") <= 120 and "12.3M tokens/s" in line and "MFU" in line
    losses = {f"loss/objective_{i}": 3.0 for i in range(20)}
    line = validation_line(1_000_000, {"loss": 3.0, "perplexity": 20.1, **losses})
    assert len(f"12:34:56 {line}") <= 120 and "objective_0 3.0000" in line and "objective_19" not in line


def test_durations():
    assert [format_duration(x) for x in (5.9, 185, 3600, 7650, 90061)] == [
        "5s",
        "3m05s",
        "1h00m",
        "2h07m",
        "1d01h",
    ]


def test_counts():
    assert [format_count(x) for x in (67.2, 5923.4, 123456, 12.34e6, 2e9)] == [
        "67",
        "5,923",
        "123k",
        "12.3M",
        "2G",
    ]


def test_whether_a_step_has_a_record_is_found_without_reading_the_file(tmp_path):
    assert not is_recorded(tmp_path, "validation", 7)
    lines = [json.dumps({"kind": "validation", "step": 7}), "not a record", '"text"', "[" * 100_000]
    lines += [json.dumps({"kind": "train", "step": step}) for step in range(8, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "val')
    assert is_recorded(tmp_path, "validation", 7)
    assert not is_recorded(tmp_path, "validation", 8) and not is_recorded(tmp_path, "event", 7)


@pytest.mark.parametrize(
    ("records", "saved"),
    [
        ([{"kind": "start", "step": 0, "restarts": 0}, {"kind": "train", "step": 9}], False),
        (
            [{"kind": "train", "step": 9}, {"kind": "checkpoint", "step": 9}, {"kind": "train", "step": 10}],
            True,
        ),
        ([{"kind": "start", "step": 4, "restarts": 1}], True),
        ([{"kind": "event", "step": 4, "restarts": 1}], False),
        ([], False),
    ],
)
def test_the_records_say_whether_a_run_has_saved(records, saved, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert has_saved(tmp_path) is saved
