"""Fine-tuning on a task: a training run for each seed, evaluation of its best checkpoint, and results.json over all.

OUTPUT/seed_N/           a run, as pretraining has it, with metrics of the task as records of kind `scores`
OUTPUT/seed_N/best/      its best checkpoint
OUTPUT/seed_N/results.json, predictions/    of the best checkpoint
OUTPUT/results.json      all seeds, mean and deviation; written last

Of several tasks each has its results and predictions in tasks/NAME/, below OUTPUT and each seed's directory.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import ExitStatus
from data_utils.common.files import write_whole
from data_utils.objectives import LOSS_NAMES
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics.metrics_by_task import LOSS, Metrics, compared_by
from data_utils.tasks.metrics.predictions import file_name, write_predictions
from data_utils.tasks.readers.synthetic import optimum
from megatron_lite.checkpoint.manifest import BEST, RESULTS, TASK_HEAD
from megatron_lite.checkpoint.read import find_checkpoint, load_weights_only
from megatron_lite.config.model import ModelConfig
from megatron_lite.engine.engine import memory_advice
from megatron_lite.engine.plain import PlainEngine
from megatron_lite.finetune import policies
from megatron_lite.finetune.data import SeveralTasks, TaskData
from megatron_lite.finetune.evaluation import Evaluated, Evaluation, Model
from megatron_lite.finetune.judge import TaskJudge, TasksJudge
from megatron_lite.finetune.language import LanguageDocuments
from megatron_lite.finetune.setup import Task, run_directory, settings_of
from megatron_lite.finetune.several import Turns
from megatron_lite.finetune.writing import writer
from megatron_lite.metrics.records import read_metrics
from megatron_lite.model.build import model_spec
from megatron_lite.model.task_batch import TaskBatch
from megatron_lite.optim.lr_multipliers import NO_MULTIPLIERS, LrMultipliers
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import RunControl
from megatron_lite.runtime.watchdog import NoWatchdog, Section, Watchdog
from megatron_lite.train.trainer import Trainer

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
        elements = {
            name: math.prod(shape) for name, shape in model_spec(task.config).shapes(task.config).items()
        }
        log.info("%s", policies.described(of_parameters, elements, task.config.training.steps))
    if context.is_main:
        warn_of_export(task.config.model)
    for seed in seeds:
        directory = run_directory(output, seed)
        if _is_done(task, directory, context):
            continue
        config = replace(task.config, run=replace(task.config.run, directory=str(directory)))
        if context.is_main:  # of all seeds: written again when the last one is done
            for one in task.each:
                (output / one.place / RESULTS).unlink(missing_ok=True)
        status = _one_seed(replace(task, config=config).seeded(seed), context, control, watchdog)
        if status is not None:
            return status
    for one in task.each if context.is_main else ():
        _sum_up(one, output, seeds)
    return ExitStatus.FINISHED


def warn_of_export(model: ModelConfig) -> None:
    """Say before the training that no class of transformers will have the head, where one setting changes that."""
    has_kind = model.task_head in ("classes", "values") or model.task_pooler_kind == "transform"
    if model.system is None or model.task_head == "none" or model.has_task_pooler or not has_kind:
        return
    # Imported here, since they load transformers, for which other heads need not wait.
    from megatron_lite.hf.published.heads import lacks_pooler
    from megatron_lite.hf.published.systems import OF_MODEL

    if model.system in OF_MODEL and (name := lacks_pooler(OF_MODEL[model.system], model)):
        log.warning(
            "the tuned model cannot be exported to transformers: %s has a layer before its classifier; set "
            "model.task_pooler=true to have it too",
            name,
        )


def task_rates(task: Task) -> dict[str, LrMultipliers]:
    """How the policies of a task's run train each parameter. Raises ConfigError if they train none."""
    return policies.rates(task.config, model_spec(task.config).shapes(task.config), task.epoch_samples)


def _in_turn(task: Task, rates: dict[str, LrMultipliers], turns: Turns) -> dict[str, LrMultipliers]:
    """The rates of a run of several tasks: the head of a task is trained by the task's own batches alone."""
    found = dict(rates)
    for number, one in enumerate(task.each):
        own, has_turn = f"{TASK_HEAD}{one.settings.name}.", partial(turns.has, number)
        for name in model_spec(task.config).shapes(task.config):
            if name.startswith(own):
                found[name] = replace(rates.get(name, NO_MULTIPLIERS), has_turn=has_turn)
    return found


def _is_done(task: Task, directory: Path, context: ParallelContext) -> bool:
    """Whether a seed has its results: what the main rank sees counts, since other nodes may see it later."""
    there = all((directory / one.place / RESULTS).exists() for one in task.each)
    (done,) = context.sum_of_hosts([float(context.is_main and there)])
    return done > 0


def _one_seed(
    task: Task, context: ParallelContext, control: RunControl | None, watchdog: Watchdog | None
) -> ExitStatus | None:
    """Train and measure. Returns why it ended before its last step, None if it is done."""
    config, directory = task.config, Path(task.config.run.directory)
    measured = [_Measured(one, context) for one in task.each]
    turns = Turns(task.batches, config.training.seed)
    rates = _in_turn(task, task_rates(task), turns) if task.others else task_rates(task)
    with memory_advice(config):
        engine = PlainEngine(config, context, len(LOSS_NAMES) + len(measured), rates)
        judging = (context, directory, config.finetune.patience)
        judges = {
            one.task.settings.name: one.judge(engine, *judging) for one in measured if one.task.validation
        }
        judge: TaskJudge | None = next(iter(judges.values()), None)
        if judge is not None and task.others:
            judge = TasksJudge(judges, Model(engine.answers), *judging)
        trainer = Trainer(
            config=config,
            context=context,
            engine=engine,
            train_data=model_spec(config).samples(
                config, several_data(task, turns) if task.others else training_data(task), "train"
            ),
            validation_data=None,
            loss_names=[*LOSS_NAMES, *(one.settings.name for one in task.each)],
            control=control,
            watchdog=watchdog,
            judge=judge,
            language_weight=policies.language_weight(config, task.epoch_samples),
        )
        status = trainer.fit()
    if not trainer.is_over:
        return status
    (watchdog or NoWatchdog()).enter(Section.EVALUATION, "evaluating the best checkpoint")
    chosen = directory / (BEST if judge is not None else "checkpoints")
    checkpoint = find_checkpoint(chosen, context)
    load_weights_only(checkpoint, engine, context)
    for one in measured:
        evaluated = one.evaluated(engine)
        if context.is_main:
            _write_seed(
                one.task, directory / one.task.place, checkpoint.step, trainer.progress.step, evaluated
            )
    if context.is_main and not task.others:
        warn_of_little_progress(task, directory, judge)
    context.barrier()
    return None


class _Measured:
    """A task with the samples of its files."""

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

    def judge(self, engine: PlainEngine, *arguments: Any) -> TaskJudge:
        """The judge of the validation files. Args: arguments: the last of a TaskJudge."""
        settings, model = self.task.settings, asked(self.task, engine, self._context)
        metrics = compared_by(settings, self.task.config.finetune.best)
        if settings.writes_text and model.write is None:
            metrics = Metrics((LOSS,))
        # The words of LAMBADA are for people: training is judged without them.
        judging = model if settings.writes_text else Model(model.answer)
        return TaskJudge(self._validation, metrics, judging, *arguments)

    def evaluated(self, engine: PlainEngine) -> dict[str, Evaluated]:
        """The results of each file with the weights of now."""
        model = asked(self.task, engine, self._context)
        return {path: evaluation.run(model) for path, evaluation in (self._validation | self._test).items()}


def several_data(task: Task, turns: Turns) -> SeveralTasks:
    """The samples that a run of several tasks trains on."""
    size = task.config.batch.global_batch_size
    return SeveralTasks([training_data(one) for one in task.each], turns, size)


def training_data(task: Task) -> TaskData:
    """The samples that a run trains on."""
    with_language = None
    if task.config.finetune.lm_weight:
        with_language = LanguageDocuments(task.config, task.tokenizer).added
    return TaskData(task.train, task.renderer, task.config.training.seed, with_language)


def asked(task: Task, engine: PlainEngine, context: ParallelContext) -> Model:
    """The model of an engine. It writes where every rank holds it whole."""
    config, read = task.config, model_spec(task.config).task_batches(task.config)

    def answer(batch: TaskBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return engine.answers(read(batch))

    if context.tp.size > 1 or config.parallel.zero_stage == 3:
        if (task.settings.writes_text or task.settings.kind == "lambada") and context.is_main:
            log.info("no rank holds the whole model: it is measured only; scripts/evaluate.py has it write")
        return Model(answer)
    write = writer(engine.model, config, task.tokenizer, config.objective_choices, config.run.directory)
    if write is None:
        return Model(answer)

    def written(contexts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        engine.named_parameters  # noqa: B018  (waits for the weights of the last step)
        return write(contexts)

    return Model(answer, written)


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
        of_labels, labels = task.renderer.answers in ("classes", "numbers of choices"), set[Any]()
        if of_labels or task.renderer.answers == "label sets":
            labels = {record.label if of_labels else tuple(record.label) for record in task.train}
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
    places = [run_directory(output, seed) / task.place / RESULTS for seed in seeds]
    of_seeds = [json.loads(path.read_text("utf-8")) for path in places]
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
    written = output / task.place / RESULTS
    write_json(written, results)
    log.info("results in %s", written)


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample (over n - 1); None of one value."""
    return statistics.stdev(values) if len(values) > 1 else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8"), "--output")
