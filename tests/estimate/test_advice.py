"""The dry run: which layouts are possible, which one is advised, and what the command says."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from support.commands import assert_refused, forked
from support.project import ROOT
from support.step_profiles import PAPER, config_of

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build
from megatron_lite.config.tree import Config, load_config
from megatron_lite.estimate import advice
from megatron_lite.estimate.advice import (
    ParallelLayout,
    Phase,
    advise,
    advise_for_all_phases,
    possible_layouts,
    propose_loss_chunks,
)
from megatron_lite.estimate.average_sequence import average_sequence
from megatron_lite.estimate.dry_run import dry_run_report
from megatron_lite.estimate.gpus import GPUS, gpu_named
from megatron_lite.estimate.step_estimate import RESERVED_GIB, estimate

TEN_B = ROOT / "configs/glm-10b.yaml"
DRAWS = 16


def test_possible_layouts_divide_processes_heads_and_batch():
    config = load_config([TEN_B])
    found = list(possible_layouts(config, 64))
    assert len(found) == len(set(found)) > 50
    for layout in found:
        dp = 64 // (layout.tensor * layout.pipeline)
        assert layout.tensor * layout.pipeline * dp == 64 and 5376 % (dp * layout.micro_batch) == 0
        assert layout.zero == 1 or layout.pipeline == 1
    layout = ParallelLayout(4, 2, 1, "none", 8)
    applied = layout.applied(config)
    assert applied.parallel.data_parallel_size(64) == 8 and applied.parallel.sequence_parallel
    assert layout.settings() == (
        "parallel.tensor_parallel_size=4 parallel.pipeline_parallel_size=2 parallel.sequence_parallel=true "
        "parallel.zero_stage=1 training.recompute=none batch.micro_batch_size=8"
    )
    given = "parallel.tensor_parallel_size=4", "parallel.sequence_parallel=true"
    settings = ParallelLayout(1, 1, 1, "none", 8).settings().split()
    assert load_config([TEN_B], [*given, *settings]) == ParallelLayout(1, 1, 1, "none", 8).applied(config)


@pytest.fixture(scope="module")
def glm_large():
    config = config_of(PAPER, 64, 1, ())
    rows = average_sequence(config)
    return config, rows, estimate(config, 64, GPUS["h100"], rows)


def test_the_given_layout_stays_where_no_other_is_clearly_faster(glm_large, monkeypatch):
    """Of the others the simplest is chosen, with large micro-batches."""
    config, rows, given = glm_large
    gpu = GPUS["h100"]
    layouts = [
        ParallelLayout(1, 2, 1, "none", 8),
        ParallelLayout(1, 1, 1, "none", 4),
        ParallelLayout(1, 1, 1, "none", 8),
    ]

    def with_others(*others):
        answers = iter(others)
        monkeypatch.setattr(advice, "possible_layouts", lambda *_: layouts[: len(others)])
        monkeypatch.setattr(advice, "estimate", lambda *_: next(answers))
        return advise(config, 64, gpu, rows, given)

    given = replace(given, communication_ms={})

    def taking(share, given=given):
        return replace(given, compute_ms=share * given.compute_ms)

    large = replace(taking(0.5), peak=replace(given.peak, rest=200 * 2**30))
    assert with_others(taking(0.95), large, taking(2.0)) == (None, given)
    assert with_others(taking(0.5), taking(0.54), taking(0.52)) == (layouts[2], taking(0.52))
    assert with_others(taking(0.5), taking(0.6), taking(0.7)) == (layouts[0], taking(0.5))
    given = replace(given, peak=large.peak)
    assert with_others(taking(2.0), large)[1] == taking(2.0)
    assert with_others(large) is None


def test_logits_in_parts_are_proposed_where_they_save_a_tenth_of_the_memory():
    """16 rows of 2,048 tokens, each predicted: 8.4 GB of logits, of which 2,048 rows are 0.5 GB."""

    def of(*settings):
        config = load_config(
            [ROOT / "configs/llama-3.2-1b.yaml"], ["phases=[]", "batch.micro_batch_size=16", *settings]
        )
        rows = average_sequence(config)
        given = estimate(config, 8, GPUS["h100"], rows)
        return given, propose_loss_chunks(config, 8, GPUS["h100"], rows, given)

    given, (setting, found) = of("training.recompute=full")
    most = 2 * 128_256 * (16 * 2048 - 2048)
    assert 0.5 * most < given.peak.rest - found.peak.rest < most
    assert of("training.recompute=full", setting) == (found, None)  # the run has them already
    assert of("model.vocab_size=32000")[1] is None  # what blocks keep is far more


def drawn(random_):
    """A configuration, processes and a GPU; None where the configuration's own rules refuse it."""
    heads = random_.choice([2, 4, 6, 8])
    tp, pp = random_.choice([1, 1, 2, 4]), random_.choice([1, 1, 2, 3])
    processes = tp * pp * random_.choice([1, 2, 8])
    micro = random_.choice([1, 2, 6, 8])
    dp = processes // (tp * pp)
    system = random_.choice(
        [[], [], ["model.system=bert", "objectives={masked_lm: 1}"], ["model.system=glm4"]]
    )
    settings = [
        "model.vocab_size=3000", "tokenizer=null", f"model.num_attention_heads={heads}", "training.precision=bf16",
        f"model.hidden_size={heads * random_.choice([64, 128, 256])}", f"model.num_layers={random_.randint(2, 5)}",
        f"parallel.tensor_parallel_size={tp}", f"parallel.pipeline_parallel_size={pp}",
        f"parallel.zero_stage={random_.choice([1, 1, 2, 3])}",
        f"parallel.sequence_parallel={random_.choice(['true', 'false'])}",
        f"parallel.offload_optimizer={random_.choice(['true', 'false', 'false'])}",
        f"training.recompute={random_.choice(['none', 'selective', 'full'])}",
        f"training.kernels={random_.choice(['fused', 'fused', 'torch'])}",
        f"batch.micro_batch_size={micro}", f"batch.global_batch_size={micro * dp * random_.choice([1, 3, 8])}",
        f"data.sequence_length={random_.choice([64, 256])}", "model.max_position=512",
        *system,
    ]  # fmt: skip
    # Some fit nowhere, some only in other layouts, some always.
    gpu = replace(GPUS["h100"], memory_gib=RESERVED_GIB + random_.choice([0.05, 0.3, 1.0, 60.0]))
    try:
        config = load_config([ROOT / "configs/tiny.yaml"], settings)
        config.deepspeed_options(config.parallel.data_parallel_size(processes))
    except ConfigError:
        return None
    return config, processes, gpu


def test_advice_fits_and_is_never_slower_than_what_was_given():
    random_, outcomes, count = random.Random(0), [], 0
    while count < DRAWS:
        case = drawn(random_)
        if case is None:
            continue
        count += 1
        config, processes, gpu = case
        rows = average_sequence(config)
        given = estimate(config, processes, gpu, rows)
        advised = advise(config, processes, gpu, rows, given)
        if advised is None:
            assert not given.fits(gpu)
            outcomes.append("none")
            continue
        layout, found = advised
        assert found.fits(gpu)
        if given.fits(gpu):
            assert found is given or found.step_ms < given.step_ms
        if layout is None:
            assert found is given
            outcomes.append("given")
            continue
        outcomes.append("other")
        applied = layout.applied(config)
        assert estimate(applied, processes, gpu, rows) == found
        assert "it fits" in dry_run_report(applied, processes, gpu, found)
    assert min(outcomes.count(kind) for kind in ("none", "given", "other")) > 1, outcomes


def test_the_dry_run_shows_a_layout_and_advises_one():
    settings = ["model.vocab_size=300", "tokenizer=null"]
    done = forked(
        "pretrain_glm.py", "--config", "configs/tiny.yaml", "--dry-run", "2", "--gpu", "a100", *settings
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("parameters ") and "2 processes: pipeline 1 x data 2 x tensor 1" in done.stdout
    )
    assert (
        "it fits 79 GiB" in done.stdout and "tokens/s, MFU" in done.stdout and "at 0.4 of 312" in done.stdout
    )
    assert re.search(r"\nadvice            (parallel\.tensor_parallel_size=|keep this layout)", done.stdout)
    assert done.stderr == ""


def test_no_line_of_the_report_is_wider_than_a_terminal():
    done = forked("pretrain_glm.py", "--config", "configs/glm-base.yaml", "--dry-run", "64")
    assert done.returncode == 0, done.stderr
    wide = [line for line in done.stdout.splitlines() if len(line) > 120]
    assert not [line for line in wide if not line.startswith("advice ")], wide  # settings to be copied
    assert "1 micro-batch of 16 x" in done.stdout


def test_half_of_the_efficiency_is_half_of_the_speed():
    def speed(*options):
        done = forked("pretrain_glm.py", "--config", "configs/glm-base.yaml", "--dry-run", "1", *options)
        assert done.returncode == 0, done.stderr
        return float(re.search(r"about ([\d,]+) tokens/s", done.stdout)[1].replace(",", ""))

    assert speed("--efficiency", "0.2") == pytest.approx(speed() / 2, rel=1e-4)


def phased(*lengths: int) -> list[Phase]:
    """Phases of 100 steps of a small model."""
    tree = {
        "model": {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 9, "max_position": 512},
        "training": {"steps": 100},
    }  # fmt: skip
    found = []
    for length in lengths:
        batch = {"micro_batch_size": 1, "global_batch_size": 64}
        config = build(Config, {**tree, "batch": batch, "data": {"sequence_length": length}})
        rows = average_sequence(config)
        found.append((config, rows, estimate(config, 4, GPU, rows)))
    return found


GPU = gpu_named("a100")
FLAT, FULL, STAGES = (
    ParallelLayout(1, 1, 1, "none", 16),
    ParallelLayout(1, 1, 1, "full", 16),
    ParallelLayout(1, 2, 1, "none", 16),
)


def hours_of(layout: ParallelLayout, phases: list[Phase]) -> float:
    return sum(estimate(layout.applied(c), 4, GPU, rows).step_ms * 100 / 3600e3 for c, rows, _ in phases)


def test_phases_share_the_layout_that_makes_all_of_them_shortest():
    phases = phased(128, 512)
    for advised, best in (([FULL, FLAT], 2), ([FLAT, FULL], 1)):
        said = advise_for_all_phases(phases, [(one, phases[0][2]) for one in advised], 4, GPU)
        assert said.startswith(f"parallel.* and training.recompute as recommended for phase {best}, ")
        assert f" {hours_of(FLAT, phases):.3g} hours" in said


@pytest.mark.parametrize(
    ("lengths", "said"), [((512, 512), "parallel.* and training"), ((128, 512), "keep this layout: ")]
)
def test_phases_of_several_lengths_are_given_no_stages(lengths, said):
    """Even where their own layout takes for ever."""
    slow = [(config, rows, replace(given, compute_ms=1e9)) for config, rows, given in phased(*lengths)]
    assert advise_for_all_phases(slow, [(STAGES, slow[0][2])] * 2, 4, GPU).startswith(said)


def test_the_dry_run_advises_each_phase_and_all_of_them():
    done = forked("pretrain_glm.py", "--config", "configs/bert-base.yaml", "--dry-run", "8")
    assert done.returncode == 0, done.stderr
    for phase in (1, 2):
        assert re.search(
            rf"\nadvice, phase {phase}   (parallel\.tensor_parallel_size=|keep this layout)", done.stdout
        )
    assert re.search(r"\nall phases        (parallel\.\* and|keep this layout)", done.stdout)


@pytest.mark.slow
def test_the_dry_run_loads_no_fake_devices():
    """So it works with any build of torch on any machine."""
    program = (
        "import sys; sys.argv = ['pretrain_glm.py', '--config', 'configs/tiny.yaml', 'model.vocab_size=300', "
        "'tokenizer=null', '--dry-run', '2']\n"
        "import pretrain_glm; pretrain_glm.main()\n"
        "print(sorted(name for name in sys.modules if name.startswith('megatron_lite.estimate')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = set(re.findall(r"\w+", done.stdout.splitlines()[-1]))
    assert {"advice", "estimate", "average_sequence"} <= names
    assert not {"guards", "fake_cuda", "record", "trace", "worker", "without_gpu"} & names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "0"], "--dry-run is 0; it must be a number of processes"),
        (["--dry-run", "5"], "data-parallel ranks (5)"),
        (["--dry-run", "8", "--gpu", "z80"], "--gpu is 'z80'; it must be one of"),
        (["--dry-run", "8", "--efficiency", "1.5"], "--efficiency is 1.5; it must be above 0 and at most 1"),
        (["--gpu", "a100"], "--gpu and --efficiency describe GPUs for --dry-run; add --dry-run PROCESSES"),
        (
            ["--dry-run", "8", "model.vocab_size=null", "tokenizer.path=absent"],
            "tokenizer absent does not exist",
        ),
        (
            [
                "--dry-run",
                "8",
                "model.vocab_size=300",
                "tokenizer={kind: bert_wordpiece, path: CORPUS/vocab.txt}",
            ],
            "model.vocab_size is 300, but the tokenizer has ",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(arguments, message, corpus):
    arguments = [argument.replace("CORPUS", str(corpus)) for argument in arguments]
    assert_refused(forked("pretrain_glm.py", "--config", TEN_B, *arguments), message)
