"""The three request types of lm_eval for a run, without the package lm_eval.

    loglikelihood          log probability of a continuation of a context, and whether greedy search generates it
    loglikelihood_rolling  log probability of a whole text
    generate_until         generated continuation of a context, up to a stop string

Results are in the order of the requests. `lm_eval_model.py` forwards lm_eval's requests to this class.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError
from data_utils.common.settings import check
from data_utils.tasks.base import TargetGroup, TaskSample
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.templates.collate import collate
from data_utils.tasks.templates.continuations import Continuations
from data_utils.tasks.templates.input_formats import choose_input_format
from data_utils.tasks.templates.inputs import Inputs
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.tree import Config
from megatron_lite.finetune.checkpoints import make_predict
from megatron_lite.inference.decoders import Decoder, make_decoder_for
from megatron_lite.inference.open_run import Run
from megatron_lite.model.task_batch import TaskBatch

MOST_WRITTEN = 256  # new tokens, if a task does not set a limit (lm_eval's default)
# Names of the limit of new tokens; as in lm_eval the first one given is used.
_LONGEST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OF_SAMPLES, _OF_BEAMS = ("temperature", "top_k", "top_p", "seed"), ("num_beams", "length_penalty")
_OTHERS = ("min_length", "no_repeat_ngram_size")
_KNOWN = ("until", "do_sample", *_LONGEST, *_OF_SAMPLES, *_OF_BEAMS, *_OTHERS)
PSEUDO = (
    "scores are pseudo log likelihoods, the sums of the log probabilities of each token given all others; "
    "they are not probabilities of texts"
)


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """How requests become model inputs.

    Args:
        form, mask, bidirectional: as in the section `task`.
        sequence_length: most tokens of an input; None = as many as the model has positions.
        stride: tokens between the starts of windows of whole texts; None = half a window.
        score_end, allow_masks, first_token, no_start: see Continuations.
    """

    form: str = "auto"
    mask: str = "auto"
    bidirectional: bool = True
    sequence_length: int | None = None
    stride: int | None = None
    score_end: bool = False
    allow_masks: bool = False
    first_token: bool = True
    no_start: bool = False


class Harness:
    """Log probabilities and generated texts of a run, for the requests of lm_eval.

    Args:
        run: with its model.
        options: None = the defaults.
        size: documents of a forward pass, and texts that are written together.
    Raises: ConfigError for settings that the run cannot take.
    """

    def __init__(self, run: Run, options: HarnessOptions | None = None, size: int = 16):
        options = options or HarnessOptions()
        self.run, self.options, self.size = run, options, size
        self.longest = _longest(run.config, options.sequence_length)
        task = TaskConfig(
            name="harness",
            kind="language_modelling",
            reader="text",
            form=options.form,
            mask=options.mask,
            sequence_length=self.longest,
            stride=options.stride or max(1, (self.longest - 1) // 2),
            bidirectional=options.bidirectional,
        )
        form = choose_input_format(options.form, run.config.objective_choices)
        inputs = Inputs(task, run.tokenizer, form, run.config.training.seed)
        self.template = Continuations(
            inputs,
            score_end=options.score_end,
            allow_masks=options.allow_masks,
            first_token=options.first_token,
            no_start=options.no_start,
        )
        self.template.check()
        self._answer = make_predict(run)
        self.cut = 0  # contexts truncated on the left
        self.asked = {"loglikelihood": 0, "loglikelihood_rolling": 0, "generate_until": 0}

    def report(self) -> dict[str, Any]:
        """Number of requests of each kind, contexts cut, and the form in which the model got them, for a JSON file."""
        form, task = self.template.inputs.input_format, self.template.inputs.config
        found: dict[str, Any] = {
            "form": form.name, "objective": form.objective, "step": self.run.checkpoint.step,
            "sequence_length": self.longest, "stride": task.stride, "score_end": self.options.score_end,
            "first_token": self.template.first_token, "no_start": self.template.no_start, "requests": dict(self.asked),
            "cut": self.cut,
        }  # fmt: skip
        if form.name == "glm":
            mask, _ = self.template.inputs.mask()
            found |= {"mask": self.run.tokenizer.special_names[mask], "bidirectional": task.bidirectional}
        return found | ({"note": PSEUDO} if self.template.is_pseudo else {})

    # ---- log probabilities ----

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log probability in nats of each (context, continuation), and whether greedy search would write it.

        Raises: DataError as `Continuations.asked`.
        """
        self.asked["loglikelihood"] += len(pairs)
        asked = [self.template.tokenize(*pair) for pair in pairs]
        self.cut += sum(one.cut > 0 for one in asked)
        # Longest first: running out of memory shows at once, and equal contexts are neighbours.
        order = sorted(
            range(len(asked)),
            key=lambda number: (-len(asked[number].context), asked[number].context, number),
        )
        totals, greedy = self._scores(
            ((number, self.template.sample(asked[number])) for number in order), len(pairs)
        )
        return list(zip(totals.tolist(), greedy.tolist(), strict=True))

    def pseudo_loglikelihood(self, texts: Sequence[str], unit: str) -> list[float]:
        """Pseudo log likelihood of each text, in nats. Args: unit: see `Continuations.pseudo`.

        Raises: ConfigError for a run that does not predict such units; DataError for a text without a token.
        """
        self.template.check_score(unit)
        samples = ((number, self.template.pseudo_sample(text, unit)) for number, text in enumerate(texts))
        return self._scores(samples, len(texts))[0].tolist()

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log probability of each text, in nats. Raises: ConfigError for a run whose objective has none."""
        self.template.check_texts()
        self.asked["loglikelihood_rolling"] += len(texts)
        samples = (
            (number, sample) for number, text in enumerate(texts) for sample in self.template.windows(text)
        )
        return self._scores(samples, len(texts))[0].tolist()

    def _scores(self, samples: Iterable[tuple[int, TaskSample]], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sums over the parts of each question: log probabilities, and whether all tokens are the likeliest.

        Args: samples: each with the number of its question, below `count`.
        """
        totals, greedy = np.zeros(count), np.ones(count, bool)
        for batch in self._batches(samples):
            numbers = [number for _, asked in batch for number, _ in asked]
            scores, likeliest = self._computed(batch)
            # `add.at`, since a number occurs several times in a batch (windows of a text), where
            # `totals[numbers] +=` adds once.
            np.add.at(totals, numbers, scores)
            np.logical_and.at(greedy, numbers, likeliest)
        return totals, greedy

    def _batches(
        self, samples: Iterable[tuple[int, TaskSample]]
    ) -> Iterator[list[tuple[Example, list[tuple[int, TargetGroup]]]]]:
        """Documents with their requested continuations. Equal documents are computed once: choices of one token."""
        batch: dict[bytes, tuple[Example, list[tuple[int, TargetGroup]]]] = {}
        for number, sample in samples:
            for part in sample.target_groups:
                example = sample.documents[part.document]
                key = _identity(example)
                if key not in batch and len(batch) == self.size:
                    yield list(batch.values())
                    batch = {}
                batch.setdefault(key, (example, []))[1].append((number, part))
        if batch:
            yield list(batch.values())

    def _computed(
        self, batch: Sequence[tuple[Example, list[tuple[int, TargetGroup]]]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log probability of every part, fp64, and whether each of its tokens is the likeliest, bool."""
        samples = [
            TaskSample([example], [TargetGroup(0, part.positions, part.targets) for _, part in asked])
            for example, asked in batch
        ]
        fields, parts = collate(samples)
        answered = self._answer(TaskBatch(fields, np.arange(len(samples)), parts, "choices"))
        scores, likeliest = (one.double().cpu().numpy() for one in answered)
        return scores, likeliest > 0

    # ---- texts ----

    def generate_until(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The text generated after each context, cut at the first of the strings `until`.

        Raises: ConfigError for settings of generation that are unknown or out of range, or a run that does not write.
        """
        self.asked["generate_until"] += len(prompts)
        found = [""] * len(prompts)
        settings = [json.dumps(dict(options), sort_keys=True, default=str) for _, options in prompts]
        # By settings first: one search serves a batch only with the same settings.
        order = sorted(
            range(len(prompts)), key=lambda number: (settings[number], -len(prompts[number][0]), number)
        )
        for _, same in itertools.groupby(order, key=settings.__getitem__):
            numbers = list(same)
            config, until = self._generation(prompts[numbers[0]][1])
            decoder = self._decoder(config, until)
            for first in range(0, len(numbers), self.size):
                chosen = numbers[first : first + self.size]
                contexts = [self._prompt(prompts[number][0], config.max_length) for number in chosen]
                for number, answer in zip(chosen, decoder.generate(contexts), strict=True):
                    found[number] = before_first(self.run.tokenizer.decode(answer, skip_special=True), until)
        return found

    def _prompt(self, context: str, longest: int) -> list[int]:
        tokens, cut = self.template.prompt(context, longest)
        self.cut += cut > 0
        return tokens

    def _decoder(self, config: GenerationConfig, until: Sequence[str]) -> Decoder:
        run, decode = self.run, self.run.tokenizer.decode
        form = self.template.inputs.input_format
        objectives = [choice for choice in run.objectives if choice.name == form.objective]
        check(
            bool(objectives),
            f"{run.checkpoint.path} was not trained on {form.objective}, so it does not generate in form "
            f"{form.name}; remove the form.",
        )

        def stops(tokens: list[int]) -> bool:
            text = decode(tokens, skip_special=True)
            return any(string in text for string in until)

        name = str(run.checkpoint.path)
        return make_decoder_for(run.model, run.tokenizer, objectives, config, name, stops if until else None)

    def _generation(self, options: Mapping[str, Any]) -> tuple[GenerationConfig, list[str]]:
        """The settings of a task's `generation_kwargs`."""
        unknown = sorted(set(options) - set(_KNOWN))
        check(
            not unknown,
            f"generation_kwargs has the unknown {', '.join(unknown)}; use {', '.join(_KNOWN)}.",
        )
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        check(
            all(isinstance(string, str) for string in until),
            f"generation_kwargs.until is {until!r}; it must be strings.",
        )
        longest = next((options[name] for name in _LONGEST if options.get(name) is not None), None)
        if longest is None:
            longest = min(MOST_WRITTEN, max(1, self.longest // 2))
        temperature = float(options.get("temperature") or 0.0)
        is_drawn = options.get("do_sample")
        is_drawn = temperature > 0 if is_drawn is None else bool(is_drawn)
        strategy = "sample" if is_drawn else "beam" if (options.get("num_beams") or 1) > 1 else "greedy"
        used = {"sample": _OF_SAMPLES, "beam": _OF_BEAMS, "greedy": ()}[strategy]
        given = {name: options[name] for name in (*used, *_OTHERS) if options.get(name) is not None}
        if is_drawn and not temperature:
            given.pop("temperature", None)
        try:
            return GenerationConfig(strategy=strategy, max_length=longest, **given), until
        except ConfigError as error:
            raise ConfigError(str(error).replace("generation.", "generation_kwargs.", 1)) from None


def before_first(text: str, until: Iterable[str]) -> str:
    """The text before the first of some strings."""
    places = [text.find(string) for string in until if string]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def _identity(example: Example) -> bytes:
    """Bytes that are equal for two documents exactly if the model's inputs are."""
    fields = (example.tokens, example.position_ids, example.block_position_ids, example.ord, example.grp)
    return b"".join(field.tobytes() for field in (*fields, example.segment_ids, example.objective))


def _longest(config: Config, given: int | None) -> int:
    """Most tokens of an input. Raises: ConfigError for more than the model has positions."""
    model = config.model
    is_bounded = model.positions not in ("none", "rotary")
    known = model.max_position + 1 if is_bounded else config.data.sequence_length
    check(
        given is None or given >= 8,
        f"sequence_length is {given}; it must be at least 8.",
    )
    check(
        given is None or given <= known or not is_bounded,
        f"sequence_length is {given}, but the model has {known} positions (model.max_position {model.max_position}); "
        "lower it.",
    )
    return given or max(8, known)
