"""The numbers of a whole step from those of traced ranks: extended to all layers and micro-batches, and put together.

Equal layers cost the same, so two traces with different numbers of layers give the numbers of all; where some layers
are local they differ by one global layer and the local ones that follow it. So with the micro-batches of a step.
Memory is extended phase by phase, because its peak may move from one phase to another. Of a pipeline the first, the
fullest inner and the last stage are traced, with all micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.step_trace.counts import difference, extended, scaled
from benchmarks.step_trace.request import Details, Expected, Request
from benchmarks.step_trace.trace import Case, layer_units
from data_utils.common.settings import build
from megatron_lite.config.tree import Config
from megatron_lite.engine.stage_counts import stage_shares

TRACED_MICRO_BATCHES = 2
# Phases that every micro-batch has, those of all but the last one, and those of a step.
_EVERY, _OTHERS, _ONCE = ("input", "forward"), ("backward", "sums"), ("last_backward", "last_sums", "step")
PLACES = ("waits", "pinned", "pageable", "unaligned", "attention")
_WITHIN = (*_EVERY, *_OTHERS, "last_backward", "last_sums")
_BACKWARD = ("backward", "last_backward")
Run = Callable[[Case], dict[str, Any]]


@dataclass(frozen=True)
class _Rank:
    """Numbers of one rank with all its layers."""

    phases: dict[str, Any]
    layer: dict[str, Any]  # what one layer adds to `phases`
    traced: int  # micro-batches
    micro_batches: int
    result: dict[str, Any]

    def of_step(self, key: str) -> Any:
        """A number, or numbers by name, of a whole step."""
        others = (self.micro_batches - 1) / (self.traced - 1) if self.traced > 1 else 0.0
        factors = dict.fromkeys(_EVERY, self.micro_batches / self.traced) | dict.fromkeys(_ONCE, 1.0)
        return _weighted(self.phases, key, factors | dict.fromkeys(_OTHERS, others))

    def of_micro_batch(self, key: str) -> Any:
        """A number of one micro-batch, the mean over those of the traced step."""
        return _weighted(self.phases, key, dict.fromkeys(_WITHIN, 1.0 / self.traced))

    def of_layer(self, key: str, *phases: str) -> Any:
        """The count `key` per layer and micro-batch, summed over these phases."""
        return _weighted(self.layer, key, dict.fromkeys(phases, 1.0 / self.traced))

    @property
    def peak_gib(self) -> float:
        return max(counts["peak"] for counts in self.phases.values()) / 2**30


def _weighted(phases: dict[str, Any], key: str, factors: dict[str, float]) -> Any:
    values = [(phases[phase][key], factor) for phase, factor in factors.items()]
    if not isinstance(values[0][0], dict):
        return sum(value * factor for value, factor in values)
    total: Counter[str] = Counter()
    for tree, factor in values:
        for name, value in tree.items():
            total[name] += value * factor
    return {name: value for name, value in total.items() if value}


def expect(request: Request, run: Run) -> dict[str, Any]:
    """{"expected": .., "details": ..} of a layout, or what `run` answers for a rank that fails.

    Args: run: traces a case, see `run_case`.
    """
    config = build(Config, request.tree)
    ranks, sent = [], None
    for stage, layers in _traced_stages(config):
        # A stage with blocks of encoder and decoder is traced whole; a whole model in units of both.
        has_both = config.parallel.pipeline_parallel_size > 1 and config.model.decoder_layers > 0
        step = _period(config)
        some = request.layers if step == 1 else layers % step or step
        depth = layers if request.layers == 0 or has_both else min(layers, some)
        less, more = (run(case) for case in _cases(request, config, stage, depth, step, sent))
        for result in (less, more):
            if "phases" not in result:
                return result
        sent = sent or less["sent"]
        ranks.append(_rank(request, config, less, more, layers - depth, step))
    return _answer(ranks)


def _period(config: Config) -> int:
    """Layers after which a model's kinds of layers begin again. Those of a pipeline's stage count as equal."""
    is_layered = config.model.attention_window and config.parallel.pipeline_parallel_size == 1
    return config.model.global_every if is_layered else 1


def _traced_stages(config: Config) -> Iterator[tuple[int, int]]:
    """Number of the stages to trace, and how many blocks, or units of them, each has."""
    if config.parallel.pipeline_parallel_size == 1:
        return iter([(0, layer_units(config.model))])
    blocks = [share[0] for share in stage_shares(config)]
    inner = range(1, len(blocks) - 1)
    chosen = {0, len(blocks) - 1, *([max(inner, key=lambda i: (blocks[i], -i))] if inner else [])}
    return ((stage, blocks[stage]) for stage in sorted(chosen))


def _micro_batches(request: Request, config: Config) -> tuple[int, int]:
    """Micro-batches that are traced, and those of a step. In a pipeline all are: the first tensors from other stages
    arrive in other phases than later ones.
    """
    count = config.batch.accumulation_steps(config.parallel.data_parallel_size(request.processes))
    return count if config.parallel.pipeline_parallel_size > 1 else min(count, TRACED_MICRO_BATCHES), count


def _cases(request: Request, config: Config, stage: int, depth: int, step: int, sent: Any) -> Iterator[Case]:
    """The first rank of a stage with `depth` layers, and with `step` more."""
    rank = stage * request.processes // config.parallel.pipeline_parallel_size
    traced, _ = _micro_batches(request, config)
    for more in (0, step):
        yield Case(request.tree, request.processes, rank, depth + more, traced, request.gpu, sent)


def _rank(
    request: Request,
    config: Config,
    less: dict[str, Any],
    more: dict[str, Any],
    layers: int,
    step: int,
) -> _Rank:
    first, second = less["phases"], more["phases"]
    fullest = extended(less["rank_parameters"], more["rank_parameters"], layers / step)
    model, unit = config.model, 1.0
    if config.parallel.pipeline_parallel_size == 1:
        unit = model.total_layers / layer_units(model)
    return _Rank(
        extended(first, second, layers / step),
        scaled(difference(second, first), 1 / unit / step),
        *_micro_batches(request, config),
        {**less, "rank_parameters": fullest},
    )


def _answer(ranks: list[_Rank]) -> dict[str, Any]:
    expected = Expected(
        attention_calls_per_layer=max(sum(rank.of_layer("attention", "forward").values()) for rank in ranks),
        launches_per_layer_forward=max(rank.of_layer("launches", "forward") for rank in ranks),
        launches_per_layer_backward=max(
            rank.of_layer("launches", *_BACKWARD) - rank.of_layer("sums", *_BACKWARD) for rank in ranks
        ),
        waits_per_micro_batch=max(sum(rank.of_micro_batch("waits").values()) for rank in ranks),
        copies_per_micro_batch=max(
            sum(rank.of_micro_batch("pinned").values()) + sum(rank.of_micro_batch("pageable").values())
            for rank in ranks
        ),
        unaligned_matmuls=max(sum(rank.of_micro_batch("unaligned").values()) for rank in ranks),
        collective_mb={name: size / 1e6 for name, size in _most(ranks, "collective_bytes").items()},
        peak_gib=max(rank.peak_gib for rank in ranks),
    )
    details = Details(
        places={key: _most_of_micro_batch(ranks, key) for key in PLACES},
        step_places=max(
            (rank.phases["step"]["waits"] for rank in ranks), key=lambda places: sum(places.values())
        ),
        sums_per_layer=max(rank.of_layer("sums", *_BACKWARD) for rank in ranks),
        stage_gib=[rank.peak_gib for rank in ranks],
        rank_parameters=max(rank.result["rank_parameters"] for rank in ranks),
    )
    return {"expected": asdict(expected), "details": asdict(details)}


def _most(ranks: list[_Rank], key: str) -> dict[str, float]:
    """Numbers of a step by name, each the maximum over the ranks."""
    found = [rank.of_step(key) for rank in ranks]
    return {
        name: max(numbers.get(name, 0.0) for numbers in found)
        for name in sorted({n for f in found for n in f})
    }


def _most_of_micro_batch(ranks: list[_Rank], key: str) -> dict[str, float]:
    return max((rank.of_micro_batch(key) for rank in ranks), key=lambda places: sum(places.values()))
