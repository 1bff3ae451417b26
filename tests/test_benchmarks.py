"""The benchmarks run and count what they say; the fast forms they compare compute what the plain ones do."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import forked
from support.project import ROOT
from support.transformer.attention import attend

from benchmarks import (
    attention,
    long_context,
    loss_curves,
    padding,
    parallel,
    train_step,
)
from data_utils.common.batch_fields import DOC, GRP, ORD, WEIGHTS
from data_utils.common.errors import ConfigError
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.objectives import OBJECTIVES
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import load_config, require_validation
from megatron_lite.transformer import loss as lm_loss
from megatron_lite.transformer.attention_backends.cpu_kernels import CPU_KERNELS
from megatron_lite.transformer.attention_backends.layout import make_layout
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.flops import parameter_count
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

CPU = torch.device("cpu")


@pytest.fixture
def small_shapes(monkeypatch):
    monkeypatch.setattr(train_step, "SHAPES", {"tiny": (3, 32, 2)})
    monkeypatch.setattr(train_step, "MATMUL_SHAPE", (16, 32, 32))
    monkeypatch.setattr(train_step, "SEQUENCE_LENGTH", 64)
    monkeypatch.setattr(train_step, "VOCAB_SIZE", 30524)


@pytest.mark.parametrize("depth", [pytest.param([], marks=pytest.mark.slow), ["--layers", "2"]])
def test_train_step_reports_every_variant(small_shapes, tmp_path, capsys, depth):
    file = tmp_path / "rows.json"
    arguments = [
        "--shapes",
        "tiny",
        "--dtype",
        "fp32",
        "--micro-batch",
        "2",
        "--repeats",
        "1",
        "--threads",
        "1",
    ]
    assert train_step.main([*arguments, "--optimizer", "--json", str(file), *depth]) == 0
    rows = {row["variant"]: row for row in json.loads(file.read_text())}
    assert list(rows) == [
        "matmul, torch",
        "matmul, project",
        "GLM",
        "GLM dense",
        "transformers BERT",
        "transformers GPT-2",
        "AdamW step",
    ]
    out = capsys.readouterr().out
    assert all(f"| tiny | {name} |" in out for name in rows)
    # In this run, so with any noise: the columns must agree with each other.
    glm, dense = rows["GLM"], rows["GLM dense"]
    assert dense["glm_speedup"] == pytest.approx(glm["tokens_per_second"] / dense["tokens_per_second"])
    assert glm["of_project_matmul"] == pytest.approx(glm["tflops"] / rows["matmul, project"]["tflops"])
    assert glm["glm_speedup"] is None and dense["flop_bound"] > 1


def test_flop_bound_from_a_slice_equals_full_depth(small_shapes):
    """Work grows in a straight line with depth, so extending the slice must give the full model's count."""
    work = [
        [
            v.work
            for v in train_step.glm_variants(train_step.model_config("tiny", depth), 2, torch.float32, CPU)
        ]
        for depth in (1, 2, 5)
    ]
    for one, two, five in zip(*work, strict=True):
        for name in ("useful_flops", "executed_flops"):
            extended = train_step.extend(getattr(one, name), getattr(two, name), 2, 5)
            assert extended == pytest.approx(getattr(five, name), rel=1e-12)  # float64 rounding only


def test_glm_variants_compute_the_same_loss_and_gradients(small_shapes):
    torch.manual_seed(0)
    variants = train_step.glm_variants(train_step.model_config("tiny", 2), 3, torch.float32, CPU)
    gradients = []
    for variant in variants:
        variant.step()
        model = variant.step.__closure__  # the step holds its model
        (module,) = [c.cell_contents for c in model if isinstance(c.cell_contents, Transformer)]
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
    for name in gradients[0]:
        # fp32 sums in another order: 1e-6 of the largest gradient is a few units in the last place.
        scale = gradients[1][name].abs().max().clamp(min=1e-3)
        assert (gradients[0][name] - gradients[1][name]).abs().max() <= 1e-5 * scale, name


def test_computed_keys_cover_the_visible_ones():
    batch = train_step.make_batch(2)
    computed, visible = train_step.computed_keys(batch), Batch(batch).visible_keys
    in_part_b = [
        int(((doc >= 0) & (order > 0)).sum()) for doc, order in zip(batch[:, DOC], batch[:, ORD], strict=True)
    ]
    # What is computed and not visible is part B's upper triangle.
    assert computed - visible == sum(b * (b - 1) // 2 for b in in_part_b)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--micro-batch", "0"], "--micro-batch is 0"),
        (["--layers", "1"], "--layers is 1"),
        (["--clock", "process", "--threads", "2"], "--clock process"),
    ],
)
def test_bad_options_are_one_line_errors(arguments, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        train_step.main(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train_step", "attention", "optimizers", "parallel", "checkpoint"])
def test_no_repeats_are_refused(tmp_path, name):
    result = forked(f"benchmarks/{name}.py", "--repeats", "0", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.strip() == "error: --repeats is 0; it must be at least 1."


MISTAKES = {
    "attention": (["--lengths", "8"], "--lengths is 8; it must be at least 16"),
    "checkpoint": (["--directory", "absent"], "absent does not exist; give --directory an existing one"),
    "collate": (["--no-such"], "unrecognized arguments: --no-such"),
    "dataset": (["--directory", "absent"], "absent does not exist; give --directory an existing one"),
    "experts_step": (["--size", "8"], "--size is 8; it must be at least 64"),
    "kernels": (["--json", "x.json"], "--device is cuda, and torch sees no GPU; set --device cpu"),
    "laptop_vectors": (
        ["--run", "absent", "--sts", "absent", "--retrieval", "absent"],
        "--run absent",
    ),
    "long_context": (["--no-such"], "the following arguments are required: --work"),
    "loss_curves": (
        ["--output", "x.json", "--compare", "absent"],
        "--compare absent is not a file that --output",
    ),
    "optimizers": (["--hidden", "8"], "--hidden is 8; it must be at least 64"),
    "padding": (["--prefix", "absent", "--samples", "0"], "--samples is 0; it must be at least 1"),
    "parallel": (["--json", "file/rows.json"], "--json file/rows.json: "),
    "pretraining_pays": (
        ["--run", "absent", "--wheels", "absent", "--work", "work"],
        "absent/checkpoints does not exist; run scripts/laptop.sh",
    ),
    "pairs_step": (["--longest", "8"], "--longest is 8; it must be at least 20"),
    "preprocess": (["--work", "file/work"], "file is not a writable directory"),
    "reading": (["absent"], "CHECKOUT is absent, which is not a directory"),
    "recipe_trials": (
        ["--laptop", "absent", "--work", "work", "recipe"],
        "absent/tokenizer does not exist; run scripts/laptop.sh",
    ),
    "same_hours": (
        ["--laptop", "absent", "--work", "work"],
        "absent/tokenizer does not exist; run scripts/laptop.sh",
    ),
    "train_step": (["--repeats", "many"], "argument --repeats: invalid int value: 'many'"),
}


def test_every_benchmark_has_a_mistake_to_refuse():
    starts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert starts == set(MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_measured(tmp_path, name):
    (tmp_path / "file").write_text("")
    arguments, message = MISTAKES[name]
    result = forked(f"benchmarks/{name}.py", *arguments, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == "" and message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", loss_curves.RUNS)
def test_the_runs_of_loss_curves_are_accepted(tmp_path, name):
    """They take minutes, so that a rule that refuses one of them would be met only when it is needed."""
    file, settings = loss_curves.RUNS[name][1], loss_curves.settings_of(tmp_path, tmp_path / "run", name)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config([ROOT / "configs" / file], overrides)
    require_validation(overrides, config)
    assert config.training.steps == loss_curves.STEPS and not config.data.validation


@pytest.mark.slow
def test_parallel_counts_the_bytes_that_follow_from_the_shapes(small_shapes, tmp_path, capsys):
    file = tmp_path / "rows.json"
    layouts = ["1x1x1", "1x1x2", "1x1x2+zero2", "2x1x1", "1x2x1+full"]
    arguments = ["--layouts", *layouts, "--samples", "4", "--repeats", "1"]
    assert parallel.main([*arguments, "--json", str(file)]) == 0
    rows = {row["layout"]: row for row in json.loads(file.read_text())}
    config, samples = train_step.model_config("tiny", 3), train_step.make_batch(4)
    tokens, loss_rows = int((samples[:, DOC] >= 0).sum()), int(np.count_nonzero(samples[:, WEIGHTS]))
    hidden = 4 * config.hidden_size
    # Gradients in an all-reduce, weights gathered from two halves. Sums of few numbers besides, hence 1 %.
    expected = {"1x1x1": 0, "1x1x2": 1.5 * 4 * parameter_count(config)}
    # ZeRO 2: the all-reduce again in each of the two micro-batches of a rank.
    expected["1x1x2+zero2"] = (2 + 0.5) * 4 * parameter_count(config)
    # Two sums per block and direction, one for the embedding; one for the rows with loss, and three numbers each.
    expected["2x1x1"] = (4 * 3 + 1) * tokens * hidden + loss_rows * (hidden + 12)
    for layout, sent in expected.items():
        assert rows[layout]["megabytes"] == pytest.approx(sent / 1e6, rel=1e-2)
    # Each stage sends whole rows with padding once per sample, and its half of the tied embedding's sum.
    tied = 4 * 30592 * config.hidden_size
    assert rows["1x2x1+full"]["megabytes"] == pytest.approx(
        (tied + samples[:, DOC].size * hidden) / 1e6, rel=2e-2
    )
    out = capsys.readouterr().out
    assert all(f"| {layout} | " in out for layout in rows)
    assert rows["1x1x1"]["calls"] == 0 and rows["1x1x1"]["mfu"] is None


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--layouts", "2x2"], "--layouts 2x2 is no layout"),
        (["--layouts", "2x1x1+zero4"], r"2x1x1\+zero4 is no layout"),
        (["--layouts", "1x1x3"], r"data-parallel ranks \(3\)"),
        (["--layouts", "1x1x2", "--launched"], "needs 2 processes, but 1 were started"),
        (["--samples", "0"], "--samples is 0"),
    ],
)
def test_bad_layouts_are_one_line_errors(monkeypatch, arguments, expected):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=expected) as caught:
        parallel.main(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_attention_reports_every_case_and_draws_it(tmp_path, capsys):
    file, picture = tmp_path / "rows.json", tmp_path / "attention.png"
    arguments = "--objectives blank_infilling unilmv2 --lengths 32 --heads 1 --repeats 1 --threads 1"
    arguments += " --dtype bf16 --shapes 2,2,40,16 1,1,520,8"
    assert attention.main([*arguments.split(), "--json", str(file), "--plot", str(picture)]) == 0
    measured = json.loads(file.read_text())
    rows = measured["objectives"]
    cases = [(row["length"], row["documents"], row["objective"]) for row in rows]
    kinds = ("one", "packed")
    assert cases == [(32, kind, o) for kind in kinds for o in ("blank_infilling", "unilmv2")]
    assert all(
        row["ours ms"] > 0 and row["dense ms"] > 0 and row["row tokens"] > row["length"] for row in rows
    )
    assert [row["shape"] for row in measured["kernels"]] == [[2, 2, 40, 16], [1, 1, 520, 8]]
    for row in measured["kernels"]:
        assert row["over"] == row[row["taken"]] / min(row[name] for name in CPU_KERNELS) >= 1
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows) + 3 + 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_padding_reports_every_objective(tmp_path, capsys):
    lengths = np.random.default_rng(0).integers(20, 200, 60)
    with IndexedDatasetWriter(tmp_path / "d", 4000) as writer:
        writer.add(np.arange(lengths.sum()) % 3000 + 10, lengths)
        writer.finish({})
    assert padding.main(["--prefix", str(tmp_path / "d"), "--lengths", "128", "--samples", "40"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    of_text = [name for name in OBJECTIVES if name != "contrastive"]
    assert [row[0].strip() for row in rows[: len(of_text)]] == of_text
    for name, row_length, padded, lost in rows:
        # Few rows of whole documents: the last one is not full.
        # Denoisers of ul2 differ in what a text needs, and so do the two pieces of a distance.
        most = {"optimus": 40, "tsdae": 40, "ul2": 30, "sentence_distance": 20}.get(name.strip(), 15)
        assert int(row_length) >= 128 and 0 <= float(padded.strip(" %")) < most
        assert 0 <= float(lost.strip(" %")) < 1, name
    with pytest.raises(ConfigError, match="--samples is 0"):
        padding.main(["--prefix", str(tmp_path / "d"), "--samples", "0"])
    with pytest.raises(ConfigError, match="no objective's name contains"):
        padding.main(["--prefix", str(tmp_path / "d"), "--case", "elmo"])


@pytest.mark.slow
def test_optimizers_are_measured_against_adamw(tmp_path):
    """Weights, moments and averages have 4 bytes a number."""
    arguments = ["--layers", "1", "--hidden", "64", "--repeats", "1", "--json", tmp_path / "rows.json"]
    result = forked("benchmarks/optimizers.py", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = {row["variant"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert [len(rows), rows["adamw"]["of_step"], rows["adamw"]["of_update"]] == [7, 1, 1]
    kept = {name: row["bytes_per_parameter"] for name, row in rows.items()}
    assert kept["adamw"] == kept["lamb"] == kept["stable_adamw"] == pytest.approx(12, abs=0.01)
    assert 4 < kept["adafactor"] < 4.1 < kept["muon"] < 12
    assert kept["adamw, ema of each step"] == pytest.approx(16, abs=0.01)


@pytest.mark.slow
def test_memory_of_attention_grows_linearly():
    """Measured by the operating system: no mask of all pairs exists anywhere.

    In a process of its own, because other tests make this one keep freed memory.
    """
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "from benchmarks.attention import make_batch, memory_megabytes\n"
        "for kernel in ('auto', 'dense'):\n"
        "    for length in (1024, 4096):\n"
        "        batch = make_batch('unilmv2', length, 1, False)\n"
        "        print(memory_megabytes(batch, kernel, 1, torch.float32))\n"
    )
    command = [sys.executable, "-c", code, str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, ours_longer, dense, dense_longer = map(float, result.stdout.split())
    # A mask of all pairs is 105 MB of fp32 more for the longer row; ours have 256 rows of it (5 MB) and 256 bytes
    # per token and copy of q, k, v or a gradient (12 MB).
    assert ours_longer - ours < 45 and dense_longer - dense > 80


@pytest.mark.parametrize("deepspeed", [False, True])
@pytest.mark.slow
def test_checkpoint_times_every_way_and_all_bring_the_state_back(tmp_path, deepspeed):
    file = tmp_path / "measured.json"
    options = [] if deepspeed else ["--without-deepspeed"]
    arguments = ["--size", "tiny", "--repeats", "1", "--json", file, *options]
    result = forked("benchmarks/checkpoint.py", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "STATE DIFFERS" not in result.stdout and result.stdout.count("\n| ") == (11 if deepspeed else 9)
    measured = json.loads(file.read_text())
    layers, hidden = 2, 64
    parameters = layers * (12 * hidden**2 + 13 * hidden) + (30524 + 2 * 513) * hidden + 2 * hidden
    assert measured["saved"]["parameters"] == parameters
    assert measured["saved"]["save_bytes"] == pytest.approx(12 * parameters, rel=0.01)  # headers and manifest
    assert list(tmp_path.iterdir()) == [file]  # it cleans up


def rule(doc, order, grp, q, k):
    """May q look at k? The sentence in megatron_lite/transformer/attention_backends/layout.py, one pair at a time."""
    key_time = order[k] if order[k] >= 0 else float("inf")
    query_bound = order[q] if order[q] >= 0 else -order[q] - 1
    return doc[q] == doc[k] >= 0 and (key_time <= query_bound or grp[q] == grp[k] != 0)


@st.composite
def packed_batches(draw):
    """Rows of documents (context, predicted) and padding at the end, as doc, ord, grp."""
    documents = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any), min_size=0, max_size=4)
    rows = draw(st.lists(documents, min_size=1, max_size=3).filter(lambda rows: any(rows)))
    length = max(sum(a + b for a, b in row) for row in rows) + draw(st.integers(0, 3))
    doc = np.full((len(rows), length), -1, np.int32)
    order = np.zeros((len(rows), length), np.int32)
    for i, row in enumerate(rows):
        at = 0
        for number, (a, b) in enumerate(row):
            doc[i, at : at + a + b] = number
            order[i, at + a : at + a + b] = np.arange(1, b + 1)
            at += a + b
    return doc, order, np.zeros_like(doc)


@settings(max_examples=40, deadline=None)
@given(packed_batches(), st.sampled_from(["cpu", "dense", "auto"]))
def test_plans_follow_the_rule_and_give_padding_zero(arrays, kernel):
    doc, order, grp = arrays
    rows, length = doc.shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, rows, length, 2, 4, generator=generator)
    out = attend(plan_attention(make_layout(doc, order, grp), CPU, kernel), (q, k, v))
    for b in range(rows):
        for i in range(length):
            seen = [j for j in range(length) if rule(doc[b], order[b], grp[b], i, j)]
            if not seen:
                assert (out[b, i] == 0).all()
                continue
            weights = torch.softmax(torch.einsum("hd,jhd->hj", q[b, i], k[b, seen]) / 2.0, -1)
            expected = torch.einsum("hj,jhd->hd", weights, v[b, seen])
            torch.testing.assert_close(
                out[b, i], expected, rtol=1e-5, atol=1e-5
            )  # fp32, other summation order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropping_padding_changes_nothing(dtype):
    batch = train_step.make_batch(3)[:, :, :]
    batch[1, DOC, 100:] = -1  # rows of different lengths
    batch[1, [ORD, GRP], 100:] = 0
    batch[1, 4, 100:] = 0  # weights
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=30524)
    model = Transformer(config)
    initialize_parameters(model.named_parameters(), model.config, 1)
    model.to(dtype).eval()
    results = []
    for multiple in (batch[:, DOC].size, 1):
        inputs = MicroBatch.from_batch(Batch(batch), CPU, model.config, multiple=multiple)
        model.zero_grad()
        loss, _ = model(inputs)
        loss.backward()
        results.append((loss.detach(), {name: p.grad.float() for name, p in model.named_parameters()}))
    assert inputs.tokens.shape == (int((batch[:, DOC] >= 0).sum()),)
    # Matmuls of another row count may sum in another order: a few units in the last place of the dtype.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    (padded, padded_grads), (dropped, dropped_grads) = results
    torch.testing.assert_close(dropped, padded, rtol=tolerance, atol=0)
    for name, gradient in padded_grads.items():
        assert (dropped_grads[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 11 * 3, 1 << 20])
def test_cross_entropy_and_its_gradient_match_float64(monkeypatch, chunk_bytes):
    monkeypatch.setattr(lm_loss, "_CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(7, 11, generator=generator)
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.rand(7, generator=generator)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (expected * weights).sum().backward()
    leaf = logits.clone().requires_grad_()
    loss = lm_loss.cross_entropy(leaf * 1.0, targets)
    (loss * weights).sum().backward()
    # fp32 arithmetic on values up to 20: absolute error of a few 1e-6.
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize("keep", [True, False])
def test_keep_freed_memory(keep):
    """In a process of its own, because it changes how the C library allocates for good."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import resource, torch\n"
        "from data_utils.common.memory import keep_freed_memory\n"
        "if sys.argv[2] == 'True': keep_freed_memory()\n"
        "for _ in range(40): torch.ones(1 << 24)\n"  # the heap settles
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(4): torch.ones(1 << 24)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(keep)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    # 4 x 64 MiB are 65,536 pages of 4 KiB. (Huge pages would need 128 faults: then there is nothing to win.)
    faults = int(result.stdout)
    assert faults < 100 if keep else faults > 100


@pytest.mark.parametrize("distance", [None, *long_context.DISTANCES])
def test_a_value_stands_with_its_key_once_more_at_a_distance(distance):
    tokens, place = long_context.text(np.random.default_rng(0), 1020, distance)
    words = [long_context.vocabulary()[token] for token in tokens]
    assert len(words) == 1020 and "v" in words[place]
    pairs = [(i, word) for i, word in enumerate(words) if "v" in word]
    assert all(words[i - 1] == word.partition("v")[0] for i, word in pairs)
    assert len({word for _, word in pairs}) == long_context.KEYS
    places = [i for i, word in pairs if word == words[place]]
    assert len(places) == long_context.PLACES if distance is None else places == [place - distance, place]


@pytest.mark.slow  # two CPU minutes
def test_a_raised_base_recalls_farther_than_a_kept_one(tmp_path):
    """The record docs/records/long_context.json, with fewer texts."""
    path = tmp_path / "found.json"
    long_context.main(["--work", str(tmp_path / "work"), "--texts", "40", "--json", str(path)])
    found = {row["distance"]: row for row in json.loads(path.read_text())["rows"]}
    assert found[128]["raised"] > 0.6 and found[512]["raised"] > 0.5
    assert max(found[512][name] for name in ("kept", "short")) < 0.45 < found[128]["kept"]
