"""Fine-tuning on a task: a training run for each seed, evaluation of its best checkpoint, and results.json over all.

OUTPUT/seed_N/           a run, as pretraining has it, with metrics of the task as records of kind `scores`
OUTPUT/seed_N/best/      its best checkpoint
OUTPUT/seed_N/results.json, predictions/    of the best checkpoint
OUTPUT/results.json      all seeds, mean and deviation; written last
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_utils.base.errors import ExitStatus
from data_utils.base.files import write_whole
from data_utils.objectives import LOSS_NAMES
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.synthetic import optimum
from data_utils.tasks.scores.metrics_by_task import LOSS, Metrics, compared_by
from data_utils.tasks.scores.predictions import file_name, write_predictions
from megatron_lite.checkpoint.read import find_checkpoint, load_weights_only
from megatron_lite.finetune import policies
from megatron_lite.finetune.data import TaskData
from megatron_lite.finetune.evaluation import Evaluated, Evaluation, Model
from megatron_lite.finetune.judge import BEST, TaskJudge
from megatron_lite.finetune.language import LanguageDocuments
from megatron_lite.finetune.setup import RESULTS, Task, run_directory, settings_of
from megatron_lite.finetune.writing import writer
from megatron_lite.model.trunk.counts import parameter_shapes
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.engine.buckets import Rate
from megatron_lite.train.engine.engine import memory_advice
from megatron_lite.train.engine.plain import PlainEngine
from megatron_lite.train.guard.control import RunControl
from megatron_lite.train.guard.watchdog import NoWatchdog, Section, Watchdog
from megatron_lite.train.loop.trainer import Trainer
from megatron_lite.train.observe.records import read_metrics

log = logging.getLogger(__name__)

FROM_NOTHING = " Words and positions may begin too small (model.init_words_std): see docs/learning.md."
LITTLE = 0.9  # of what is known without learning, above which the last loss tells that little was learnt


def finetune(
    task: Task,
    output: Path,
    context: ParallelContext,
    control: RunControl | None = None,
    watchdog: Watchdog | None = None,
) -> ExitStatus:
    """Train every seed that is not done yet, then sum up. Returns FINISHED, or why it ended before."""
    seeds = task.config.finetune.seeds or (task.config.training.seed,)
    of_parameters = task_rates(task)
    if context.is_main and of_parameters:
        elements = {name: math.prod(shape) for name, shape in parameter_shapes(task.config.model).items()}
        log.info("%s", policies.described(of_parameters, elements, task.config.training.steps))
    for seed in seeds:
        directory = run_directory(output, seed)
        if _is_done(directory, context):
            continue
        config = replace(task.config, run=replace(task.config.run, directory=str(directory)))
        status = _one_seed(replace(task, config=config).seeded(seed), context, control, watchdog)
        if status is not None:
            return status
    if context.is_main:
        _sum_up(task, output, seeds)
    return ExitStatus.FINISHED


def task_rates(task: Task) -> dict[str, Rate]:
    """How the policies of a task's run train each parameter. Raises ConfigError if they train none."""
    return policies.rates(task.config, parameter_shapes(task.config.model), len(task.train))


def _is_done(directory: Path, context: ParallelContext) -> bool:
    """Whether a seed has its results: what the main rank sees counts, since other nodes may see it later."""
    (done,) = context.sum_of_hosts([float(context.is_main and (directory / RESULTS).exists())])
    return done > 0


def _one_seed(
    task: Task, context: ParallelContext, control: RunControl | None, watchdog: Watchdog | None
) -> ExitStatus | None:
    """Train and measure. Returns why it ended before its last step, None if it is done."""
    config, directory = task.config, Path(task.config.run.directory)
    size = config.batch.micro_batch_size
    validation, test = (
        {
            path: Evaluation(task.settings, task.renderer, records, context, size)
            for path, records in files.items()
        }
        for files in (task.validation, task.test)
    )
    with memory_advice(config):
        engine = PlainEngine(config, context, len(LOSS_NAMES) + 1, task_rates(task))
        model, judge = asked(task, engine, context), None
        if validation:
            metrics = compared_by(task.settings, config.finetune.best)
            if task.settings.writes_text and model.write is None:
                metrics = Metrics((LOSS,))
            # The words of LAMBADA are for people: training is judged without them.
            judging = model if task.settings.writes_text else Model(model.answer)
            judge = TaskJudge(validation, metrics, judging, context, directory, config.finetune.patience)
        trainer = Trainer(
            config=config,
            context=context,
            engine=engine,
            train_data=training_data(task),
            validation_data=None,
            loss_names=[*LOSS_NAMES, task.settings.name],
            control=control,
            watchdog=watchdog,
            judge=judge,
            language_weight=policies.language_weight(config, len(task.train)),
        )
        status = trainer.fit()
    if not trainer.is_over:
        return status
    (watchdog or NoWatchdog()).enter(Section.EVALUATION, "evaluating the best checkpoint")
    chosen = directory / (BEST if validation else "checkpoints")
    checkpoint = find_checkpoint(chosen, context)
    load_weights_only(checkpoint, engine, context)
    evaluated = {path: evaluation.run(model) for path, evaluation in (validation | test).items()}
    if context.is_main:
        _write_seed(task, directory, checkpoint.step, trainer.step, evaluated)
        warn_of_little_progress(task, directory, judge)
    context.barrier()
    return None


def training_data(task: Task) -> TaskData:
    """The samples that a run trains on."""
    with_language = None
    if task.config.finetune.lm_weight:
        with_language = LanguageDocuments(task.config, task.tokenizer).added
    return TaskData(task.train, task.renderer, task.config.training.seed, with_language)


def asked(task: Task, engine: PlainEngine, context: ParallelContext) -> Model:
    """The model of an engine. It writes where every rank holds it whole."""
    config = task.config
    if context.tp.size > 1 or config.parallel.zero_stage == 3:
        if (task.settings.writes_text or task.settings.kind == "lambada") and context.is_main:
            log.info("no rank holds the whole model: it is measured only; scripts/evaluate.py has it write")
        return Model(engine.answers)
    write = writer(engine.model, config, task.tokenizer, config.objective_choices, config.run.directory)
    if write is None:
        return Model(engine.answers)

    def written(contexts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        engine.named_parameters  # noqa: B018  (waits for the weights of the last step)
        return write(contexts)

    return Model(engine.answers, written)


def _write_seed(
    task: Task, directory: Path, best: int, steps: int, evaluated: Mapping[str, Evaluated]
) -> None:
    write_file_predictions(directory / "predictions", task.settings, evaluated, "--output")
    results = {
        "seed": task.config.training.seed,
        "best_step": best,
        "settings": settings_of(task.config),
        "steps": steps,
        "train_samples": len(task.train),
        "files": {path: described(found) for path, found in evaluated.items()},
    }
    write_json(directory / RESULTS, results)


def warn_of_little_progress(task: Task, directory: Path, judge: TaskJudge | None = None) -> None:
    """Warn if the training loss, or the scores of a judge, show that a task was hardly learnt, with likely reasons.

    The loss of the last fifth of the run is compared with that of a guess by the frequency of the labels; where there
    are no classes, with that of the first fifth. Language modelling is left out: what a pretrained model has left to
    learn there is a small part of its loss.
    """
    if task.settings.kind == "language_modelling":
        return
    told, settings, config = [], task.settings, task.config
    losses = [record["loss"] for record in read_metrics(directory) if record["kind"] == "train"]
    if len(losses) > 1:
        count = max(1, len(losses) // 5)
        first, last = (sum(part) / count for part in (losses[:count], losses[-count:]))
        guess = loss_of_guess(task)
        if last > LITTLE * (guess or first):
            compared = "guessing by the labels' frequency has" if guess else "it began at"
            told.append(f"the training loss has ended at {last:.4f}, {compared} {guess or first:.4f}")
    if judge is not None:
        of_labels = task.renderer.answers in ("classes", "numbers of choices")
        labels = {record.label for record in task.train} if of_labels else ()
        possible = {path: optimum(path) for path in task.validation if settings.reader == "synthetic"}
        told += filter(None, [judge.lack(labels, possible)])
    if told:
        log.warning(
            "%s: %s, so the task was hardly learnt. The likely cause is the learning rate: optimizer.lr is %g; small "
            "models need 1e-4 to 3e-3. Else raise finetune.epochs (%d now, %d steps), or look at samples with "
            "scripts/inspect_batch.py.%s",
            directory, "; ".join(told), config.optimizer.lr, config.finetune.epochs, config.training.steps,
            FROM_NOTHING * (config.checkpoint.initialize_from is None),
        )  # fmt: skip


def loss_of_guess(task: Task) -> float:
    """Entropy of the training samples' labels, nats, where the loss is the cross entropy of such; else 0."""
    of_labels = task.renderer.answers in ("classes", "numbers of choices")
    if not of_labels or task.settings.loss != "cross_entropy" or task.config.finetune.lm_weight:
        return 0.0
    counts = Counter(record.label for record in task.train).values()
    return sum(count / len(task.train) * math.log(len(task.train) / count) for count in counts)


def write_file_predictions(
    directory: Path, task: TaskConfig, evaluated: Mapping[str, Evaluated], option: str
) -> None:
    """A file for each that was evaluated, in the form of the benchmark's server. Args: option: names the directory."""
    stems = [Path(path.partition(":")[0]).stem for path in evaluated]
    for number, (stem, found) in enumerate(zip(stems, evaluated.values(), strict=True)):
        if not found.predictions:
            continue
        name = file_name(task)
        if len(stems) > 1:
            name = f"{stem}_{name}"
        if stems.count(stem) > 1:  # files of the same name in several directories
            name = f"{number}_{name}"
        indices = [record.index for record in found.records]
        write_predictions(directory / name, task, indices, found.predictions, option, found.beside)


def described(found: Evaluated) -> dict[str, Any]:
    """A file's entry in results.json."""
    return {
        "samples": len(found.records),
        "cut": found.cut,
        "skipped": found.skipped,
        "metrics": found.measured,
    }


def _sum_up(task: Task, output: Path, seeds: Sequence[int]) -> None:
    of_seeds = [json.loads((run_directory(output, seed) / RESULTS).read_text("utf-8")) for seed in seeds]
    files = {}
    for path, first in of_seeds[0]["files"].items():
        values = {key: [of["files"][path]["metrics"][key] for of in of_seeds] for key in first["metrics"]}
        files[path] = {
            "samples": first["samples"],
            "mean": {key: sum(each) / len(each) for key, each in values.items()},
            "deviation": {key: deviation(each) for key, each in values.items()},
        }
        for key, each in values.items():
            spread = deviation(each)
            shown = "" if spread is None else f" (deviation {spread:.4f} over {len(each)} seeds)"
            log.info("%s | %s %.4f%s", path, key, sum(each) / len(each), shown)
    initial = task.config.checkpoint.initialize_from
    results = {"task": task.settings.name, "began_with": initial, "files": files, "seeds": of_seeds}
    write_json(output / RESULTS, results)
    log.info("results in %s", output / RESULTS)


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample (over n - 1); None of one value."""
    return statistics.stdev(values) if len(values) > 1 else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8"), "--output")
