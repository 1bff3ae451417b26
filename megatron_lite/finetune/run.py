"""Fine-tuning on a task: a training run for each seed, evaluation of its best checkpoint, and a summary results.json.

OUTPUT/seed_N/           a run, as in pretraining, with the task's metrics as records of kind `scores`
OUTPUT/seed_N/best/      its best checkpoint
OUTPUT/seed_N/results.json, predictions/    of the best checkpoint
OUTPUT/results.json      all seeds, mean and deviation; written last

With several tasks the results and predictions of each are in tasks/NAME/, below OUTPUT and each seed's directory.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import ExitStatus
from data_utils.common.files import write_whole
from data_utils.objectives import LOSS_NAMES
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics.metrics_by_task import LOSS, Metrics, compared_by
from data_utils.tasks.metrics.prediction_files import file_name, write_predictions
from data_utils.tasks.readers.files import listed
from data_utils.tasks.readers.synthetic import optimum
from megatron_lite.checkpoint.manifest import BEST, RESULTS, TASK_HEAD
from megatron_lite.checkpoint.read import find_checkpoint, load_weights_only
from megatron_lite.config.model import ModelConfig
from megatron_lite.engine.engine import memory_advice
from megatron_lite.engine.plain import PlainEngine
from megatron_lite.finetune import policies
from megatron_lite.finetune.data import MultiTaskData, TaskData
from megatron_lite.finetune.evaluation import Evaluation, EvaluationResult, Model, frequency_loss
from megatron_lite.finetune.language import LanguageDocuments
from megatron_lite.finetune.metric_keeper import MultiTaskMetricKeeper, TaskMetricKeeper
from megatron_lite.finetune.multi_task import TaskOrder
from megatron_lite.finetune.setup import Task, run_directory, settings_of
from megatron_lite.finetune.writing import writer
from megatron_lite.optim.lr_multipliers import NO_MULTIPLIERS, LrMultipliers
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import RunControl
from megatron_lite.runtime.watchdog import NoWatchdog, Section, Watchdog
from megatron_lite.telemetry.records import read_metrics
from megatron_lite.train.trainer import Trainer
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.task_batch import TaskBatch

log = logging.getLogger(__name__)

INITIAL_WEIGHTS_ADVICE = (
    " Initial word and position embeddings may be too small (model.init_words_std): see docs/learning.md."
)
MOST_LOOKED_AT = 2000  # training samples, in even steps, of which the share that is cut is counted
LEAST_RATE = 1e-4  # that small models need
LITTLE_PROGRESS = 0.9  # a final loss above this share of a guess's loss means that little was learnt
# Relative: below the best possible score; of losses, what counts as better than a guess.
FAR_BELOW = 0.1


def finetune(
    task: Task,
    output: Path,
    context: ParallelContext,
    control: RunControl | None = None,
    watchdog: Watchdog | None = None,
) -> ExitStatus:
    """Train every seed without results, then summarize. Returns FINISHED, or why it stopped early."""
    seeds = task.config.finetune.seeds or (task.config.training.seed,)
    multipliers = task_lr_multipliers(task)
    if context.is_main and multipliers:
        shapes = model_spec(task.config).shapes(task.config)
        elements = {name: math.prod(shape) for name, shape in shapes.items()}
        log.info("%s", policies.describe_trained(multipliers, elements, task.config.training.steps))
    if context.is_main:
        warn_of_export(task.config.model)
    for seed in seeds:
        directory = run_directory(output, seed)
        if _is_done(task, directory, context):
            continue
        config = replace(task.config, run=replace(task.config.run, directory=str(directory)))
        # The summary of all seeds is written again when the last seed is done.
        for one in task.all_tasks if context.is_main else ():
            (output / one.subdirectory / RESULTS).unlink(missing_ok=True)
        status = _train_seed(replace(task, config=config).seeded(seed), context, control, watchdog)
        if status is not None:
            return status
    for one in task.all_tasks if context.is_main else ():
        _summarize(one, output, seeds)
    return ExitStatus.FINISHED


def warn_of_export(model: ModelConfig) -> None:
    """Warn before the training if no class of transformers has the head, and one setting would change that."""
    may_have_pooler = (
        model.task_head.type in ("classes", "values") or model.task_head.pooler_kind == "transform"
    )
    if model.system is None or model.task_head.type == "none" or model.has_task_pooler or not may_have_pooler:
        return
    # Imported here, since they load transformers, which other heads do not need.
    from megatron_lite.hf.published.heads import lacks_pooler
    from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME

    if model.system in SYSTEMS_BY_NAME and (name := lacks_pooler(SYSTEMS_BY_NAME[model.system], model)):
        log.warning(
            "the tuned model cannot be exported to transformers: %s has a layer before its classifier; set "
            "model.task_head.pooler=true to have it too",
            name,
        )


def task_lr_multipliers(task: Task) -> dict[str, LrMultipliers]:
    """Parameter -> multipliers by the policies of a task's run. Raises ConfigError if they train no parameter."""
    shapes = model_spec(task.config).shapes(task.config)
    return policies.lr_multipliers(task.config, shapes, task.epoch_samples)


def _with_turns(
    task: Task, multipliers: dict[str, LrMultipliers], order: TaskOrder
) -> dict[str, LrMultipliers]:
    """The multipliers of a run of several tasks: a task's head is trained by the task's batches only."""
    with_turns = dict(multipliers)
    for number, one in enumerate(task.all_tasks):
        prefix, has_turn = f"{TASK_HEAD}{one.settings.name}.", functools.partial(order.has, number)
        for name in model_spec(task.config).shapes(task.config):
            if name.startswith(prefix):
                # In a step of another task the head is frozen: no decay, no moments, and Adam does not count the step.
                with_turns[name] = replace(multipliers.get(name, NO_MULTIPLIERS), has_turn=has_turn)
    return with_turns


def _is_done(task: Task, directory: Path, context: ParallelContext) -> bool:
    """Whether a seed has its results, as the main rank sees it: other nodes may see files later."""
    has_results = all((directory / one.subdirectory / RESULTS).exists() for one in task.all_tasks)
    (done,) = context.sum_on_hosts([float(context.is_main and has_results)])
    return done > 0


def _train_seed(
    task: Task, context: ParallelContext, control: RunControl | None, watchdog: Watchdog | None
) -> ExitStatus | None:
    """Train and evaluate one seed. Returns why it stopped before its last step, None if it is done."""
    config, directory = task.config, Path(task.config.run.directory)
    evaluations = [_TaskEvaluations(one, context) for one in task.all_tasks]
    for one in evaluations if context.is_main else ():
        one.describe_data()
    multipliers = task_lr_multipliers(task)
    data: TaskData | MultiTaskData
    if task.others:
        order = TaskOrder(task.batches, config.training.seed)
        multipliers, data = _with_turns(task, multipliers, order), multi_task_data(task, order)
    else:
        data = training_data(task)
    with memory_advice(config):
        engine = PlainEngine(config, context, len(LOSS_NAMES) + len(evaluations), multipliers)
        options = (context, directory, config.finetune.patience)
        keepers = {
            one.task.settings.name: one.keeper(engine, *options) for one in evaluations if one.task.validation
        }
        keeper: TaskMetricKeeper | None = next(iter(keepers.values()), None)
        if keeper is not None and task.others:
            keeper = MultiTaskMetricKeeper(keepers, Model(engine.predict), *options)
        trainer = Trainer(
            config=config,
            context=context,
            engine=engine,
            train_data=model_spec(config).samples(config, data, "train"),
            validation_data=None,
            loss_names=[*LOSS_NAMES, *(one.settings.name for one in task.all_tasks)],
            control=control,
            watchdog=watchdog,
            task_evaluator=keeper,
            language_weight=policies.language_weight(config, task.epoch_samples),
        )
        status = trainer.fit()
    if not trainer.is_over:
        return status
    (watchdog or NoWatchdog()).enter(Section.EVALUATION, "evaluating the best checkpoint")
    # Without validation files there is no best checkpoint: the last one counts.
    checkpoint = find_checkpoint(directory / (BEST if keeper is not None else "checkpoints"), context)
    load_weights_only(checkpoint, engine, context)
    for one in evaluations:
        results = one.run(engine)
        if context.is_main:
            seed_directory = directory / one.task.subdirectory
            steps = trainer.progress.step
            _write_seed(one.task, seed_directory, checkpoint.step, steps, one.train_cut, results)
            of_task = keepers.get(one.task.settings.name)
            lack = "" if of_task is None else one.little_learnt(of_task.metrics, results)
            warn_of_little_progress(one.task, directory, lack)
    context.barrier()
    return None


class _TaskEvaluations:
    """The evaluations of one task's validation and test files."""

    def __init__(self, task: Task, context: ParallelContext):
        self.task, self._context = task, context
        size = task.config.batch.micro_batch_size
        self._validation, self._test = (
            {
                path: Evaluation(task.settings, task.renderer, records, context, size)
                for path, records in files.items()
            }
            for files in (task.validation, task.test)
        )

    @functools.cached_property
    def train_cut(self) -> float:
        """Share of the training samples of which tokens are cut off, of MOST_LOOKED_AT of them at most."""
        records, renderer = self.task.train, self.task.renderer
        numbers = range(0, len(records), -(-len(records) // MOST_LOOKED_AT))
        return statistics.mean(renderer.sample(records[number], number).cut > 0 for number in numbers)

    def describe_data(self) -> None:
        """Log how many samples there are and are cut, and which classes a file lacks."""
        name, settings, train = self.task.settings.name, self.task.settings, self.task.train
        parts = [f"{len(train)} training samples, {self.train_cut:.1%} of them cut"]
        for path, file in (self._validation | self._test).items():
            parts.append(f"{path} {len(file.records)}, {file.cut / len(file.records):.1%} cut")
        limit = f"task.sequence_length {settings.sequence_length}"
        log.info("task %s, cut to fit %s: %s", name, limit, "; ".join(parts))
        # WSC has classes without words, and trains on the samples of one of them.
        classes = self.task.renderer.labels if getattr(self.task.renderer.task_type, "words", True) else ()
        files = {"the training file": train} | {path: file.records for path, file in self._validation.items()}
        for path, records in files.items():
            labels = [record.label for record in records]
            held = {name for label in labels for name in (label if isinstance(label, tuple) else (label,))}
            if lacking := [label for label in classes if label not in held]:
                so = "which the model cannot learn" if records is train else "of which the score says nothing"
                log.warning("task %s: %s has no sample of %s, %s", name, path, listed(tuple(lacking)), so)

    def keeper(self, engine: PlainEngine, *arguments: Any) -> TaskMetricKeeper:
        """The metric keeper of the validation files. Args: arguments: the last arguments of a TaskMetricKeeper."""
        settings, model = self.task.settings, engine_model(self.task, engine, self._context)
        metrics = compared_by(settings, self.task.config.finetune.best)
        # Ranks that hold a shard of the model cannot generate; the loss then decides which checkpoint is best.
        if settings.writes_text and model.write is None:
            metrics = Metrics((LOSS,))
        return TaskMetricKeeper(self._validation, metrics, model, *arguments)

    def little_learnt(self, metrics: Metrics, results: Mapping[str, EvaluationResult]) -> str:
        """As `little_learnt`, of the validation files."""
        possible = [optimum(path) for path in self._validation if self.task.settings.reader == "synthetic"]
        return little_learnt(metrics, self._validation, results, possible)

    def run(self, engine: PlainEngine) -> dict[str, EvaluationResult]:
        """The results of each file with the current weights."""
        model = engine_model(self.task, engine, self._context)
        return {path: evaluation.run(model) for path, evaluation in (self._validation | self._test).items()}


def little_learnt(
    metrics: Metrics,
    files: Mapping[str, Evaluation],
    results: Mapping[str, EvaluationResult],
    possible: Sequence[Mapping[str, float]],
) -> str:
    """Words on a score that shows little learning, else "".

    It is compared with the best possible score where that is known, else with that of the best answer that reads no
    sample. Up to 1/sqrt(samples) above it can be chance: twice the standard error of a share or a correlation at most.

    Args:
        metrics: by which evaluations are compared. files, results: of the validation files, of the best checkpoint.
        possible: the best possible metrics of each file, where they are known.
    """
    # A score that does not change is no sign: it may have reached its optimum.
    best = statistics.mean(metrics.score(results[path].metrics) for path in files)
    if possible and all({*(metrics.compared or metrics.names)} <= each.keys() for each in possible):
        highest = statistics.mean(map(metrics.score, possible))
        is_far = best < highest - FAR_BELOW * abs(highest)
        return f"the best score is {best:.4f} of a possible {highest:.4f}" if is_far else ""
    guess = statistics.mean(max(map(metrics.score, file.guesses())) for file in files.values())
    count = sum(len(file.records) for file in files.values())
    if best > guess + (FAR_BELOW * abs(guess) if metrics.has_costs else count**-0.5):
        return ""
    without = f"a guess that reads none of the {count} validation samples scores {guess:.4f}"
    return f"the best score is {best:.4f}, and {without}"


def multi_task_data(task: Task, order: TaskOrder) -> MultiTaskData:
    """The samples that a run of several tasks trains on."""
    size = task.config.batch.global_batch_size
    return MultiTaskData([training_data(one) for one in task.all_tasks], order, size)


def training_data(task: Task) -> TaskData:
    """The samples that a run of one task trains on."""
    add_language = None
    if task.config.finetune.lm_weight:
        add_language = LanguageDocuments(task.config, task.tokenizer).added
    return TaskData(task.train, task.renderer, task.config.training.seed, add_language)


def engine_model(task: Task, engine: PlainEngine, context: ParallelContext) -> Model:
    """The model of an engine. It generates only if every rank holds all of it."""
    config, convert = task.config, model_spec(task.config).task_batches(task.config)

    def predict(batch: TaskBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return engine.predict(convert(batch))

    if context.tp.size > 1 or context.ep.size > 1 or config.parallel.zero_stage == 3:
        if task.settings.writes_text and context.is_main:
            log.info(
                "no rank holds the whole model, so no text is generated; use scripts/evaluate.py for that"
            )
        return Model(predict)
    write = writer(engine.model, config, task.tokenizer, config.objective_choices, config.run.directory)
    if write is None:
        return Model(predict)

    def generate(contexts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        engine.named_parameters  # noqa: B018  (waits for the weights of the last step)
        return write(contexts)

    return Model(predict, generate)


def _write_seed(
    task: Task, directory: Path, best: int, steps: int, cut: float, results: Mapping[str, EvaluationResult]
) -> None:
    write_file_predictions(directory / "predictions", task.settings, results, "--output")
    summary = {
        "seed": task.config.training.seed,
        "best_step": best,
        "settings": settings_of(task.config),
        "steps": steps,
        "train_samples": len(task.train),
        "train_cut": round(cut, 4),
        "files": {path: file_result(result) for path, result in results.items()},
    }
    # Last, since this file says that the seed is done.
    write_json(directory / RESULTS, summary)


def warn_of_little_progress(task: Task, directory: Path, lack: str = "") -> None:
    """Warn if the training loss or the validation scores show that a task was hardly learnt, with likely reasons.

    The loss of the last fifth of the run is compared with the loss of guessing; where that is not known, with the loss
    of the first fifth.

    Args: lack: what the validation scores show.
    """
    reasons, settings, config = [], task.settings, task.config
    records = [record for record in read_metrics(directory) if record["kind"] == "train"]
    # Its own: the sum has the losses of other tasks too. Tasks of text have no loss of their own.
    losses = [record[name] for record in records if (name := f"loss/{settings.name}") in record]
    if not losses and not config.tasks:
        losses = [record["loss"] for record in records]
    guess = guess_loss(task)
    if len(losses) > 1:
        # The loss and not the scores alone: an easy task may be learnt before the first evaluation.
        count = max(1, len(losses) // 5)
        first, last = sum(losses[:count]) / count, sum(losses[-count:]) / count
        if last > LITTLE_PROGRESS * (guess or first):
            compared = "guessing by frequency has" if guess else "the first was"
            reasons.append(f"the final training loss is {last:.4f}, {compared} {guess or first:.4f}")
    reasons += filter(None, [lack])
    if reasons:
        rate = config.optimizer.lr
        low = (
            f"raise it: small models need {LEAST_RATE:g} to 3e-3"
            if rate < LEAST_RATE
            else "try three times less and more"
        )
        log.warning(
            "%s: %s, so the task %s was hardly learnt. The likely cause is the learning rate (optimizer.lr is %g): %s. "
            "Else raise finetune.epochs (%d now, %d steps), or look at samples with scripts/inspect_batch.py.%s",
            directory, "; ".join(reasons), settings.name, rate, low, config.finetune.epochs, config.training.steps,
            INITIAL_WEIGHTS_ADVICE * (config.checkpoint.initialize_from is None),
        )  # fmt: skip


def guess_loss(task: Task) -> float:
    """The loss of guessing by the frequency of the training labels; 0 where it is not known.

    Nats: the entropy of classes, choices and tags, and the mean one of the classes of sets; of numbers the variance.
    """
    labels, head = [record.label for record in task.train], task.renderer.head
    if head == "values":
        return statistics.pvariance(labels)
    if head == "tags":
        return frequency_loss([tag for tags in labels for tag in tags])
    if head == "sets":
        return statistics.mean(
            frequency_loss([name in held for held in labels]) for name in task.renderer.labels
        )
    is_single = task.renderer.prediction_type in ("classes", "numbers of choices")
    return frequency_loss(labels) if is_single and task.settings.loss == "cross_entropy" else 0.0


def write_file_predictions(
    directory: Path, task: TaskConfig, results: Mapping[str, EvaluationResult], option: str
) -> None:
    """Write a file for each evaluated file, in the format of the benchmark's server.

    Args: option: the option of the command line that names the directory, for messages.
    """
    stems = [Path(path.partition(":")[0]).stem for path in results]
    for number, (stem, result) in enumerate(zip(stems, results.values(), strict=True)):
        if not result.predictions:
            continue
        name = file_name(task)
        if len(stems) > 1:
            name = f"{stem}_{name}"
        if stems.count(stem) > 1:  # files of the same name in several directories
            name = f"{number}_{name}"
        indices = [record.index for record in result.records]
        write_predictions(directory / name, task, indices, result.predictions, option, result.extra)


def file_result(result: EvaluationResult) -> dict[str, Any]:
    """A file's entry in results.json."""
    return {
        "samples": len(result.records),
        "cut": result.cut,
        "skipped": result.skipped,
        "metrics": result.metrics,
    }


def _summarize(task: Task, output: Path, seeds: Sequence[int]) -> None:
    """Write the results of all seeds, with mean and deviation of each metric."""
    seed_results = [
        json.loads((run_directory(output, seed) / task.subdirectory / RESULTS).read_text("utf-8"))
        for seed in seeds
    ]
    files = {}
    for path, first in seed_results[0]["files"].items():
        values = {
            key: [result["files"][path]["metrics"][key] for result in seed_results]
            for key in first["metrics"]
        }
        files[path] = {
            "samples": first["samples"],
            "mean": {key: sum(each) / len(each) for key, each in values.items()},
            "deviation": {key: deviation(each) for key, each in values.items()},
        }
        for key, each in values.items():
            spread = deviation(each)
            detail = "" if spread is None else f" (deviation {spread:.4f} over {len(each)} seeds)"
            log.info("%s | %s %.4f%s", path, key, sum(each) / len(each), detail)
    initial = task.config.checkpoint.initialize_from
    summary = {"task": task.settings.name, "began_with": initial, "files": files, "seeds": seed_results}
    write_json(output / task.subdirectory / RESULTS, summary)
    log.info("results in %s", output / task.subdirectory / RESULTS)


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample (over n - 1); None for one value."""
    return statistics.stdev(values) if len(values) > 1 else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8"), "--output")
