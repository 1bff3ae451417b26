#!/usr/bin/env python3
"""Which positions small GLMs learn from: learned tables, or rotary ones with each `model.block_positions`.

    bash scripts/quickstart.sh
    python benchmarks/second_positions.py --plot second_positions.png

Trains configs/tiny.yaml's model on the quickstart's corpus, with every kind of positions and seed on the same tokens in
the same order of rates, and validates each run on the same samples. A table shows the mean of the seeds and their
deviation, for all tokens with loss, for those of short spans and for those of long ones.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
from benchmarks.arguments import check_at_least, check_places, write_json
from benchmarks.quickstart_runs import LOSSES, ROOT, settings_of, train, validations
from data_utils.common.errors import ArgumentParser, expanded_path, run_command
from data_utils.common.files import require_directory, require_writable

# Name -> settings on top of tiny.yaml.
KINDS: dict[str, tuple[str, ...]] = {
    "learned tables": ("model.positions=learned_blocks", "model.block_positions=added"),
    **{
        f"rotary, {name}": ("model.positions=rotary", f"model.block_positions={name}")
        for name in ("added", "table", "halves")
    },
}
Curves = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]  # by kind: of each seed the points of a run
EVALUATIONS = 10  # of a run


def curve(options: Any, run: Path, seed: int, kind: str) -> list[dict[str, float]]:
    """Every validation of a run, which is made now or was finished before. Raises DataError if it fails."""
    if not (found := validations(run)) or found[-1]["step"] < options.steps:
        settings = [*settings_of(options, run, seed, EVALUATIONS), *KINDS[kind]]
        found = train(run, settings, options.threads)
    return found


def table(curves: Curves) -> str:
    """The last validation of each kind: mean of the seeds, and their deviation."""
    lines = [f"| positions | seeds | {' | '.join(LOSSES.values())} |", f"|---|---|{'---|' * len(LOSSES)}"]
    for kind, of_seeds in curves.items():
        cells = []
        for name in LOSSES:
            last = [one[-1][name] for one in of_seeds]
            deviation = f" ± {statistics.stdev(last):.3f}" if len(last) > 1 else ""
            cells.append(f"{statistics.mean(last):.3f}{deviation}")
        lines.append(f"| {kind} | {len(of_seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(curves: Curves, path: Path, value: str, meaning: str) -> None:
    """A value of every seed over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, (kind, of_seeds) in enumerate(curves.items()):
        for seed, one in enumerate(of_seeds):
            steps = [point["step"] for point in one]
            label = None if seed else kind
            axes.plot(steps, [point[value] for point in one], color=f"C{number}", label=label, alpha=0.8)
    axes.set_xlabel("step; a line for each seed")
    axes.set_ylabel(meaning)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--quickstart", type=Path, default=ROOT / "quickstart", help="what scripts/quickstart.sh wrote")
    add("--steps", type=int, default=1000, help="of each run (default: 1000)")
    add("--samples", type=int, default=1024, help="of a validation (default: 1024)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--threads", type=int, default=None)
    add("--work", type=Path, help="directory that keeps the runs, and goes on after an interruption")
    add("--json", type=expanded_path, metavar="FILE", help="write the curves there")
    add("--plot", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "steps", "samples", "threads")
    check_at_least(options, 0, "seeds")
    check_places(result=options.json)
    if options.plot is not None:
        require_writable(options.plot, "--plot")
    require_directory(
        options.quickstart / "data", "run scripts/quickstart.sh, or give --quickstart its directory"
    )
    curves: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        for seed in options.seeds:
            for kind, own in curves.items():
                run = work / f"{kind.replace(', ', '_').replace(' ', '_')}_{seed}_{options.steps}"
                own.append(curve(options, run, seed, kind))
                print(f"{run.name}: {own[-1][-1]['loss']:.4f}", flush=True)
    print(table(curves))
    if options.json is not None:
        write_json(options.json, curves)
    if options.plot is not None:
        draw(curves, options.plot, "loss", "validation loss (nats per token)")
    return 0


if __name__ == "__main__":
    run_command(main)
