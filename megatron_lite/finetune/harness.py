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
from data_utils.common.settings import build, check
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
from megatron_lite.inference.open_run import OpenRun, Run
from megatron_lite.transformer.task_batch import TaskBatch

DEFAULT_MAX_NEW_TOKENS = 256  # new tokens, if a task does not set a limit (lm_eval's default)
# Names of the limit of new tokens; as in lm_eval the first one given is used.
_LENGTH_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING_OPTIONS, _BEAM_OPTIONS = ("temperature", "top_k", "top_p", "seed"), ("num_beams", "length_penalty")
_COMMON_OPTIONS = ("min_length", "no_repeat_ngram_size")
_KNOWN_OPTIONS = (
    "until",
    "do_sample",
    *_LENGTH_OPTIONS,
    *_SAMPLING_OPTIONS,
    *_BEAM_OPTIONS,
    *_COMMON_OPTIONS,
)
PSEUDO = (
    "scores are pseudo log likelihoods, the sums of the log probabilities of each token given all others; "
    "they are not probabilities of texts"
)


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """How requests become model inputs.

    Args:
        form, mask: as in the section `task`; auto takes [gMASK] of a run that has learnt it.
        sequence_length: most tokens of an input; None = as many as the model has positions.
        stride: tokens between the starts of windows of whole texts; None = half a window.
        bidirectional, score_end, allow_masks, first_token, no_start: see Continuations.
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
        size: documents of a forward pass, and texts of a batch of generation.
    Raises: ConfigError for settings that the run cannot take.
    """

    def __init__(self, run: Run, options: HarnessOptions | None = None, size: int = 16):
        options = options or HarnessOptions()
        self.run, self.options, self.size = run, options, size
        self.template = make_template(run, options)
        self.longest = self.template.max_length
        self._predict = make_predict(run)
        self.cut = 0  # contexts truncated on the left
        self.num_requests = {"loglikelihood": 0, "loglikelihood_rolling": 0, "generate_until": 0}

    def report(self) -> dict[str, Any]:
        """The number of requests of each type, of cut contexts, and the input format, for a JSON file."""
        input_format, task = self.template.inputs.input_format, self.template.inputs.config
        report: dict[str, Any] = {
            "form": input_format.name, "objective": input_format.objective, "step": self.run.checkpoint.step,
            "sequence_length": self.longest, "stride": task.stride, "score_end": self.options.score_end,
            "first_token": self.template.first_token, "no_start": self.template.no_start,
            "requests": dict(self.num_requests), "cut": self.cut,
        }  # fmt: skip
        if input_format.name == "glm":
            mask, _ = self.template.inputs.mask()
            report |= {
                "mask": self.run.tokenizer.special_names[mask],
                "bidirectional": self.options.bidirectional,
            }
        return report | ({"note": PSEUDO} if self.template.is_pseudo else {})

    # ---- log probabilities ----

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log probability in nats of each (context, continuation), and whether greedy search generates it.

        Raises: DataError as `Continuations.asked`.
        """
        self.num_requests["loglikelihood"] += len(pairs)
        requests = [self.template.tokenize(*pair) for pair in pairs]
        self.cut += sum(request.cut > 0 for request in requests)
        # Longest first: running out of memory shows at once, and equal contexts are neighbours.
        order = sorted(
            range(len(requests)),
            key=lambda number: (-len(requests[number].context), requests[number].context, number),
        )
        samples = ((number, self.template.sample(requests[number])) for number in order)
        totals, greedy = self._score_samples(samples, len(pairs))
        return list(zip(totals.tolist(), greedy.tolist(), strict=True))

    def pseudo_loglikelihood(self, texts: Sequence[str], unit: str) -> list[float]:
        """Pseudo log likelihood of each text, in nats. Args: unit: see `Continuations.pseudo`.

        Raises: ConfigError for a run that does not predict such units; DataError for a text without a token.
        """
        self.template.check_score(unit)
        samples = ((number, self.template.pseudo_sample(text, unit)) for number, text in enumerate(texts))
        return self._score_samples(samples, len(texts))[0].tolist()

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log probability of each text, in nats. Raises: ConfigError for a run whose objective has none."""
        self.template.check_texts()
        self.num_requests["loglikelihood_rolling"] += len(texts)
        samples = (
            (number, sample) for number, text in enumerate(texts) for sample in self.template.windows(text)
        )
        return self._score_samples(samples, len(texts))[0].tolist()

    def _score_samples(
        self, samples: Iterable[tuple[int, TaskSample]], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each request the sum of the log probabilities, and whether all tokens are the likeliest.

        Args: samples: each with the number of its request, below `count`.
        """
        totals, greedy = np.zeros(count), np.ones(count, bool)
        for batch in self._batches(samples):
            numbers = [number for _, groups in batch for number, _ in groups]
            scores, likeliest = self._score_batch(batch)
            # Not `totals[numbers] += scores`: that adds once where a number occurs several times (windows of a text).
            np.add.at(totals, numbers, scores)
            np.logical_and.at(greedy, numbers, likeliest)
        return totals, greedy

    def _batches(
        self, samples: Iterable[tuple[int, TaskSample]]
    ) -> Iterator[list[tuple[Example, list[tuple[int, TargetGroup]]]]]:
        """Batches of documents, each with the numbers and the target groups of the requests on it.

        Equal documents are computed once, as choices of one token are.
        """
        batch: dict[bytes, tuple[Example, list[tuple[int, TargetGroup]]]] = {}
        for number, sample in samples:
            for group in sample.target_groups:
                example = sample.documents[group.document]
                key = _identity(example)
                if key not in batch and len(batch) == self.size:
                    yield list(batch.values())
                    batch = {}
                batch.setdefault(key, (example, []))[1].append((number, group))
        if batch:
            yield list(batch.values())

    def _score_batch(
        self, batch: Sequence[tuple[Example, list[tuple[int, TargetGroup]]]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log probability of each target group, fp64, and whether all its tokens are the likeliest, bool."""
        samples = [
            TaskSample([example], [TargetGroup(0, group.positions, group.targets) for _, group in groups])
            for example, groups in batch
        ]
        fields, target_groups = collate(samples)
        outputs = self._predict(TaskBatch(fields, np.arange(len(samples)), target_groups, "choices"))
        scores, likeliest = (output.double().cpu().numpy() for output in outputs)
        return scores, likeliest > 0

    # ---- texts ----

    def generate_until(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The text generated after each context, cut at the first of the strings `until`.

        Raises: ConfigError for settings of generation that are unknown or out of range, or a run that does not
            generate.
        """
        self.num_requests["generate_until"] += len(prompts)
        texts = [""] * len(prompts)
        settings = [json.dumps(dict(options), sort_keys=True, default=str) for _, options in prompts]
        # By settings first: all texts of a batch have the same search.
        order = sorted(
            range(len(prompts)), key=lambda number: (settings[number], -len(prompts[number][0]), number)
        )
        for _, same in itertools.groupby(order, key=settings.__getitem__):
            numbers = list(same)
            config, until = self._generation(prompts[numbers[0]][1])
            decoder = self._decoder(config, until)
            for first in range(0, len(numbers), self.size):
                batch, contexts = numbers[first : first + self.size], []
                for number in batch:
                    tokens, cut = self.template.prompt(prompts[number][0], config.max_length)
                    self.cut += cut > 0
                    contexts.append(tokens)
                for number, completion in zip(batch, decoder.generate(contexts), strict=True):
                    text = self.run.tokenizer.decode(completion, skip_special=True)
                    texts[number] = before_first(text, until)
        return texts

    def _decoder(self, config: GenerationConfig, until: Sequence[str]) -> Decoder:
        run, decode = self.run, self.run.tokenizer.decode
        input_format = self.template.inputs.input_format
        objectives = [choice for choice in run.objectives if choice.name == input_format.objective]
        check(
            bool(objectives),
            f"{run.checkpoint.path} was not trained on {input_format.objective}, so it does not generate in form "
            f"{input_format.name}; remove the form.",
        )

        def stops(tokens: list[int]) -> bool:
            text = decode(tokens, skip_special=True)
            return any(string in text for string in until)

        name = str(run.checkpoint.path)
        return make_decoder_for(run.model, run.tokenizer, objectives, config, name, stops if until else None)

    def _generation(self, options: Mapping[str, Any]) -> tuple[GenerationConfig, list[str]]:
        """The settings of a task's `generation_kwargs`."""
        unknown = sorted(set(options) - set(_KNOWN_OPTIONS))
        check(
            not unknown,
            f"generation_kwargs has the unknown {', '.join(unknown)}; use {', '.join(_KNOWN_OPTIONS)}.",
        )
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        check(
            isinstance(until, (list, tuple)) and all(isinstance(string, str) for string in until),
            f"generation_kwargs.until is {until!r}; it must be strings.",
        )
        for name in ("temperature", "num_beams"):  # by which the strategy is chosen
            value = options.get(name)
            check(
                value is None or isinstance(value, (int, float)),
                f"generation_kwargs.{name} is {value!r}; it must be a number.",
            )
        longest = next((options[name] for name in _LENGTH_OPTIONS if options.get(name) is not None), None)
        if longest is None:
            longest = min(DEFAULT_MAX_NEW_TOKENS, max(1, self.longest // 2))
        temperature = options.get("temperature") or 0.0
        do_sample = options.get("do_sample")
        do_sample = temperature > 0 if do_sample is None else bool(do_sample)
        strategy = "sample" if do_sample else "beam" if (options.get("num_beams") or 1) > 1 else "greedy"
        used = {"sample": _SAMPLING_OPTIONS, "beam": _BEAM_OPTIONS, "greedy": ()}[strategy]
        settings = {
            name: options[name] for name in (*used, *_COMMON_OPTIONS) if options.get(name) is not None
        }
        if do_sample and not temperature:
            settings.pop("temperature", None)
        tree = {"strategy": strategy, "max_length": longest, **settings}
        # An empty string is in every text: it would end each after one token.
        return build(GenerationConfig, tree, "generation_kwargs."), [string for string in until if string]


def make_template(run: OpenRun, options: HarnessOptions) -> Continuations:
    """What makes model inputs of requests; needs no weights. Raises: ConfigError as `Harness`."""
    longest = _longest(run.config, options.sequence_length)
    input_format = choose_input_format(
        options.form, run.config.objective_choices, run.config.model.decoder_layers > 0
    )
    mask = options.mask
    if mask == "auto" and input_format.name == "glm":
        mask = next(name for name in ("gmask", "mask", "smask") if name in input_format.masks)
    task = TaskConfig(
        name="harness",
        kind="blanks",
        reader="text",
        form=options.form,
        mask=mask,
        sequence_length=longest,
        stride=options.stride or max(1, (longest - 1) // 2),
    )
    template = Continuations(
        Inputs(task, run.tokenizer, input_format, run.config.training.seed),
        bidirectional=options.bidirectional,
        score_end=options.score_end,
        allow_masks=options.allow_masks,
        first_token=options.first_token,
        no_start=options.no_start,
    )
    template.check()
    return template


def before_first(text: str, until: Iterable[str]) -> str:
    """The text before the first of some strings."""
    offsets = [text.find(string) for string in until if string]
    return text[: min((offset for offset in offsets if offset >= 0), default=len(text))]


def _identity(example: Example) -> bytes:
    """Bytes that are equal for two documents exactly if the model's inputs are."""
    fields = (example.tokens, example.position_ids, example.block_position_ids, example.ord, example.grp)
    return b"".join(field.tobytes() for field in (*fields, example.segment_ids, example.objective))


def _longest(config: Config, sequence_length: int | None) -> int:
    """Most tokens of an input. Raises: ConfigError for more than the model has positions."""
    model = config.model
    is_bounded = model.positions not in ("none", "rotary")
    default = model.max_position + 1 if is_bounded else config.data.sequence_length
    if sequence_length is None:
        return max(8, default)
    check(sequence_length >= 8, f"sequence_length is {sequence_length}; it must be at least 8.")
    check(
        sequence_length <= default or not is_bounded,
        f"sequence_length is {sequence_length}, but the model has {default} positions (model.max_position "
        f"{model.max_position}); lower it.",
    )
    return sequence_length
