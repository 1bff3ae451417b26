"""Profiles of training steps, traced on fake devices in one process.

    python tests/support/step_profiles.py NAME ...     # writes a line of JSON for each case

A plant is a mistake that is made in the product before the step is traced, or a task whose samples are learnt.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAPER = ("configs/glm-large.yaml", "configs/objectives/paper.yaml")
BERT, UNILMV2, T5 = ("configs/bert-large.yaml",), ("configs/unilmv2-base.yaml",), ("configs/t5-base.yaml",)
QWEN3, DEBERTA = ("configs/qwen3-0.6b.yaml",), ("configs/deberta-v3-base.yaml",)
MIXTURE = "model.experts={count: 8, per_token: 2, width: 768}"
XLNET = ("configs/xlnet-large.yaml",)
WINDOWED, MODERN = ("configs/modernbert-base.yaml",), ("configs/glm-modern-base.yaml",)
LLAMA, SHORT_ROWS = (
    ("configs/llama-3.2-1b.yaml",),
    ("data.sequence_length=1021", "phases=[]", "schedule.parts=[]"),
)
ADAMW = ("optimizer.kind=adamw", "optimizer.clip_grad_norm=1.0", "training.z_loss=0.0")
TP, PP = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
SHORT = "model.num_layers=5"
WHOLE = ("data.short_prob=0",)  # the traced micro-batches are near the mean

TASK = "task={name: one, kind: cloze, reader: jsonl}"
TASKS = {
    "choices": (),
    "classes": ("model.task_head.type=classes", "model.task_head.classes=3"),
    "values": ("model.task_head.type=values",),
    "tags": ("model.task_head.type=tags", "model.task_head.classes=3"),
    "spans": ("model.task_head.type=spans",),
}

SP = (TP, "parallel.sequence_parallel=true")
GLM_2B, GLM_10B = ("configs/glm-2b.yaml",), ("configs/glm-10b.yaml",)
TP4 = ("parallel.tensor_parallel_size=4", "parallel.sequence_parallel=true")
TWO = ("parallel.pipeline_parallel_size=2", "parallel.zero_stage=1")

# name -> (configuration, ranks, micro-batches, settings, plant, traced layers)
FEW = {
    "data parallel": (PAPER, 64, 1, (), None, 1),
    "tensor parallel": (PAPER, 2, 1, (TP,), None, 1),
    "pipeline": (PAPER, 2, 1, (PP,), None, 1),
}
MORE = {
    "bert": (BERT, 64, 2, WHOLE, None, 1),
    "sequence parallel": (PAPER, 2, 1, SP, None, 1),
    "unilmv2": (UNILMV2, 64, 1, ("model.relative=none",), None, 1),
    "t5": (T5, 64, 1, ADAMW, None, 1),
    "local layers": (WINDOWED, 1, 1, SHORT_ROWS, None, 1),
    "modern": (MODERN, 8, 1, (), None, 1),
    "deberta": (DEBERTA, 1, 1, ("batch.micro_batch_size=64",), None, 1),
    "xlnet": (XLNET, 1, 1, (), None, 1),
    "llama": (LLAMA, 8, 1, (), None, 1),
    **{
        f"llama, {name}": (LLAMA, 8, 1, (f"training.attention={name}",), None, 1)
        for name in ("fa3", "fa4", "torch")
    },
    "without dropout, fa3": (
        PAPER,
        64,
        1,
        ("model.attention_dropout=0.0", "training.attention=fa3"),
        None,
        1,
    ),
    "local layers, fa3": (WINDOWED, 1, 1, (*SHORT_ROWS, "training.attention=fa3"), None, 1),
    "qwen3": (QWEN3, 8, 1, (), None, 1),
    "experts": (QWEN3, 8, 1, (MIXTURE,), None, 1),
    "experts of two ranks": (QWEN3, 8, 1, (MIXTURE, "parallel.expert_parallel_size=2"), None, 1),
    "qwen3 without norms of heads": (QWEN3, 8, 1, ("model.query_key_norm=false",), None, 1),
    "loss rows": (PAPER, 64, 1, ("training.loss_rows=512",), None, 1),
    "label smoothing": (PAPER, 64, 1, ("training.label_smoothing=0.1",), None, 1),
    **{f"task, {head}": (PAPER, 64, 1, (TASK, *more), head, 1) for head, more in TASKS.items()},
    "bert, an item()": (BERT, 64, 1, (), "wait", 1),
    "bert, an attention call": (BERT, 64, 1, (), "attention", 1),
    "bert of 5 layers, extended": (BERT, 64, 2, (SHORT,), None, 2),
    "bert of 5 layers, all traced": (BERT, 64, 2, (SHORT,), None, 0),
}
# Further cases that formulas are compared with. Where a bucket holds one matrix the peak moves from one to the next,
# which two layers extended to all do not show: such a model has two layers, both traced. The same holds where only a
# deep model's weights are gathered again, at ZeRO 3.
LAYOUTS = {
    "335M, ZeRO 1": (PAPER, 64, 2, (), None, 1),
    "335M, ZeRO 2": (PAPER, 8, 2, ("parallel.zero_stage=2",), None, 1),
    "335M, ZeRO 3": (PAPER, 8, 2, ("parallel.zero_stage=3",), None, 1),
    "335M, full": (PAPER, 8, 2, ("training.recompute=full",), None, 1),
    "335M, selective": (PAPER, 8, 2, ("training.recompute=selective",), None, 1),
    "335M, TP 2 and SP": (PAPER, 4, 2, SP, None, 1),
    "335M, PP 4": (PAPER, 4, 4, ("parallel.pipeline_parallel_size=4",), None, 1),
    "335M, LAMB": (PAPER, 8, 1, ("optimizer.kind=lamb",), None, 1),
    "335M, StableAdamW": (PAPER, 8, 1, ("optimizer.kind=stable_adamw",), None, 1),
    "335M, AdaFactor": (PAPER, 8, 1, ("optimizer.kind=adafactor", "model.num_layers=6"), None, 0),
    "335M, LoRA": (PAPER, 64, 2, ("model.lora.rank=8", "training.precision=bf16"), None, 1),
    "1B, LoRA of two parts, ZeRO 3": (
        LLAMA, 8, 2, ("model.lora.rank=8", "model.lora.targets=[q_proj, v_proj]", "parallel.zero_stage=3"), None, 0,
    ),
    "335M, Muon": (PAPER, 1, 1, ("optimizer.kind=muon",), None, 1),
    "2B, ZeRO 3": (GLM_2B, 16, 2, (*WHOLE, "parallel.zero_stage=3", "model.num_layers=24"), None, 0),
    "2B, offload": (GLM_2B, 16, 2, (*WHOLE, "parallel.offload_optimizer=true"), None, 1),
    "2B, TP 4 and SP, ZeRO 2, selective": (
        GLM_2B, 16, 2, (*WHOLE, *TP4, "parallel.zero_stage=2", "training.recompute=selective"), None, 1,
    ),
    "10B, ZeRO 2, full": (GLM_10B, 64, 2, ("model.num_layers=2",), None, 0),
    "10B, TP 4 and SP, PP 2, full": (GLM_10B, 64, 4, (*TP4, *TWO), None, 1),
}  # fmt: skip
CASES = {**FEW, **MORE, **LAYOUTS}


def config_of(files, processes, micro_batches, settings):
    from megatron_lite.config.tree import load_config

    config = load_config([ROOT / file for file in files], ["phases=[]", *settings])
    dp = config.parallel.data_parallel_size(processes)
    samples = config.batch.micro_batch_size * dp * micro_batches
    return load_config([ROOT / file for file in files], (f"batch.global_batch_size={samples}", *settings))


def request_of(files, processes, micro_batches, settings, layers):
    from benchmarks.step_trace.request import Request
    from megatron_lite.estimate.gpus import GPUS

    config = config_of(files, processes, micro_batches, settings)
    return Request.of(config, processes, GPUS["h100"], layers)


def plant(kind):
    """Let every block of the model wait for the device, or call an attention kernel once more; or learn a task."""
    import torch.nn.functional as F

    from benchmarks.step_trace import trace
    from megatron_lite.transformer.block import Block
    from support.tasks.task_batches import task_batch

    if kind in TASKS:
        trace.random_batches = lambda config, count: [
            task_batch(kind, range(16 * i, 16 * i + 16)) for i in range(count)
        ]
        trace.LOSS_NAMES = [*trace.LOSS_NAMES, kind]
        return
    forward = Block.forward

    def planted(self, x, *rest):
        hidden = getattr(x, "hidden", x)
        if kind == "wait":
            hidden.sum().item()
        else:
            heads = hidden.view(1, len(hidden), -1, 64).transpose(1, 2)
            F.scaled_dot_product_attention(heads, heads, heads)
        return forward(self, x, *rest)

    Block.forward = planted


def main():
    from benchmarks.step_trace.expected import expect
    from benchmarks.step_trace.trace import run_case
    from benchmarks.step_trace.worker import forked, load_libraries

    load_libraries()

    def run(kind, case):
        if kind is not None:
            plant(kind)
        return run_case(case)

    for files, processes, micro_batches, settings, kind, layers in map(CASES.get, sys.argv[1:]):
        request = request_of(files, processes, micro_batches, settings, layers)
        trace = functools.partial(run, kind)
        print(
            json.dumps(expect(request, lambda case, trace=trace: forked(lambda: trace(case)))),
            flush=True,
        )


def traced_profiles(names):
    """Name -> Profile, of these cases."""
    from benchmarks.step_trace.request import read_answer

    environment = {**os.environ, "DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(names, map(read_answer, answers), strict=True))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    main()
