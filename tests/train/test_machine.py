"""What a run's rate is compared with."""

import itertools

import pytest
import torch
from support.distributed import run_ranks
from support.training.training import make_trainer

from data_utils.common.settings import merge
from megatron_lite.checkpoint.verify import newest_readable
from megatron_lite.estimate.gpus import GPUS
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.telemetry import peak_flops as machine
from megatron_lite.telemetry.peak_flops import PeakFlops, best_seconds, device_name, known_peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA H20", None),
        ("NVIDIA L4", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_of_gpus_are_found_by_whole_words(name, peak):
    assert known_peak_tflops(name) == peak


def test_the_profile_has_the_same_peaks():
    for gpu in GPUS.values():
        assert known_peak_tflops(f"NVIDIA {gpu.name.upper()}") == gpu.peak_tflops, gpu.name


def test_one_undisturbed_product_is_enough():
    """A virtual CPU that is slow for most of the measurement gives the rate of one that never is."""

    def timed(durations):
        now, products = [0.0], iter(durations)

        def product():
            now[0] += next(products)

        return best_seconds(product, 1.0, lambda: now[0])

    busy = itertools.chain([0.3, 0.3, 0.3, 0.1], itertools.repeat(0.3))
    assert timed(busy) == pytest.approx(timed(itertools.repeat(0.1)))
    assert timed(itertools.repeat(5.0)) == 5.0  # longer than the time for it: one counts


def test_the_cpu_is_named(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert device_name(torch.device("cpu"), cpuinfo) == "Some CPU @ 2 GHz, 1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert device_name(torch.device("cpu"), tmp_path / "none") == "CPU, 2 threads"


@pytest.fixture
def rates(monkeypatch):
    """The rates that measurements find, one after the other."""
    found = []
    monkeypatch.setattr(machine, "matmul_tflops", lambda *arguments: found.pop(0))
    return found


def test_the_highest_rate_counts_and_a_resumed_run_has_it(rates):
    rates += [2.0, 4.0, 3.0, 1.0]
    first = PeakFlops(None, torch.float32, ParallelContext.alone())
    first.measure_again()
    first.measure_again()
    assert first.utilisation(1.0) == {"machine_share": 0.25, "machine_tflops": 4.0}
    resumed = PeakFlops(None, torch.float32, ParallelContext.alone(), first.rates)
    assert resumed.tflops == 4.0 and resumed.rates == first.rates
    rates += [1.5]
    assert (
        PeakFlops(None, torch.bfloat16, ParallelContext.alone(), first.rates).tflops == 1.5
    )  # another precision


def test_it_is_measured_a_limited_number_of_times(rates, monkeypatch):
    monkeypatch.setattr(machine, "LATER_TIMES", 2)
    rates += [1.0, 2.0, 3.0, 4.0]
    peak = PeakFlops(None, torch.float32, ParallelContext.alone())
    for _ in range(5):
        peak.measure_again()
    assert peak.tflops == 3.0 and rates == [4.0]


def test_a_given_peak_is_not_measured(rates):
    given = PeakFlops(2.0, torch.float32, ParallelContext.alone())
    given.measure_again()
    assert given.utilisation(1.0) == {"mfu": 0.5} and given.rates == {}


def measured_rates(context, tree):
    machine.matmul_tflops = lambda *arguments: 1.0 + context.rank  # in this rank's own process
    trainer = make_trainer(context, tree)
    trainer.fit()
    return trainer.peak_flops.tflops


def test_ranks_share_their_mean_and_checkpoints_keep_it(settings, tmp_path):
    found = run_ranks(
        measured_rates, 2, merge(settings, {"run": {"peak_tflops": None}, "training": {"stop_after_step": 1}})
    )
    assert found == [1.5, 1.5]
    (rate,) = newest_readable(tmp_path / "run/checkpoints").trainer_state().machine_rates.items()
    assert rate[0].startswith("2 x ") and rate[0].endswith(", float32") and rate[1] == 1.5
