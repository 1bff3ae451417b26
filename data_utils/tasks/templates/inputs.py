"""What the samples of all kinds of tasks are made with: settings, tokenizer, input format, seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from data_utils.common.errors import ConfigError, DataError
from data_utils.objectives.interface import role_token
from data_utils.tasks.base import TaskRecord, TaskSample
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.templates.examples import LOSS_OF_MASK
from data_utils.tasks.templates.input_formats import InputFormat
from data_utils.tasks.templates.patterns import TextSegment
from data_utils.tokenizers.special_tokens import NO_TOKEN, SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer
from data_utils.tokenizers.word_marks import is_chinese

# Which of the masks that a run has learnt a kind of task takes, the best first.
_MASKS = {"seq2seq": ("smask", "gmask", "mask")}
_DEFAULT_MASKS = ("mask", "smask", "gmask")


class TaskType(Protocol):
    """A kind of task: how its records become samples."""

    head: str  # one of HEADS

    @property
    def prediction_type(self) -> str:
        """The type of predictions, a key of METRICS_BY_PREDICTION_TYPE (metrics_by_task.py)."""

    def check(self) -> None:
        """Raise ConfigError for settings with which no sample can be made."""

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        """The records that samples are made of: more, fewer or others than those of the file."""
        ...

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        """The sample of a record; `number` and `epoch` decide what is drawn at random."""
        ...


@dataclass(frozen=True)
class TokenSegment:
    """A segment of a sample in tokens."""

    ids: list[int]
    shortenable: bool


@dataclass(frozen=True)
class Inputs:
    """What every kind of task needs to make samples."""

    config: TaskConfig
    tokenizer: Tokenizer
    input_format: InputFormat
    seed: int

    @property
    def special(self) -> SpecialTokens:
        return self.tokenizer.special

    @property
    def start(self) -> list[int]:
        """The token before a text, which predicts its first one in the causal format; [] where there is none."""
        ids = (role_token(role, self.special) for role in self.input_format.writing.before)
        return [token for token in ids if token != NO_TOKEN]

    def mask(self) -> tuple[int, int]:
        """The blank's token, and the number of the loss that goes with it in pretraining."""
        if self.input_format.name != "glm":
            return self.special.mask, self.input_format.loss()
        preferred = _MASKS.get(self.config.kind, _DEFAULT_MASKS)
        name = self.config.mask
        if name == "auto":
            name = next((mask for mask in preferred if mask in self.input_format.masks), preferred[0])
        return getattr(self.special, name), LOSS_OF_MASK[name]

    def part_a(self, tokens: Sequence[int]) -> list[int]:
        """GLM's context: CLS first; eos last unless the text is to be continued at a final [gMASK]."""
        special = self.special
        is_open = bool(tokens) and tokens[-1] == special.gmask and special.gmask != special.mask
        return [special.cls, *tokens] if is_open else [special.cls, *tokens, special.eos]

    def ended(self, tokens: Sequence[int]) -> list[int]:
        """The tokens and the end of a text, where the vocabulary has one."""
        return [*tokens] if self.special.eos == NO_TOKEN else [*tokens, self.special.eos]

    def encode(self, segments: Sequence[TextSegment], *, at_start: bool = True) -> list[TokenSegment]:
        """Each segment by itself: it may be cut. Args: at_start: whether they begin the text."""
        encoded = []
        for segment in segments:
            ids = self.tokenizer.encode_part(segment.text, at_start=at_start)
            encoded.append(TokenSegment(ids, segment.shortenable))
            at_start = at_start and not ids
        return encoded

    def continuation(self, text: str) -> list[int]:
        """Tokens of a text that follows another: with the space before it, but for Chinese, which has none."""
        text = text.strip()
        return self.tokenizer.encode_part(text if is_chinese(text[:1]) else " " + text, at_start=False)

    def require_format(self, allowed: Sequence[str], why: Mapping[str, str] | None = None) -> None:
        """Raise ConfigError unless the input format is one of `allowed` and the vocabulary has its special tokens.

        Args: why: format -> the reason why it is not allowed.
        """
        name = self.input_format.name
        if name not in allowed:
            reason = (why or {}).get(name, "does not support it")
            raise ConfigError(
                f"task.kind is {self.config.kind}, but the run's input format is {name} "
                f"({self.input_format.objective}), which {reason}; use a run with the format {' or '.join(allowed)}."
            )
        lacking = sorted(self.tokenizer.lacking.intersection(self.input_format.roles))
        if lacking:
            raise ConfigError(
                f"the input format {name} needs the special tokens {', '.join(lacking)}, which the tokenizer does "
                "not have; set tokenizer.added_tokens to glm, or choose another task.form."
            )

    def cut(
        self, segments: Sequence[TokenSegment], max_tokens: int, record: TaskRecord, *, at_start: bool = False
    ) -> tuple[list[TokenSegment], int]:
        """The segments in at most `max_tokens` tokens, and how many tokens were cut.

        Tokens go from the ends (`at_start`: the beginnings) of shortenable segments, always of the longest one.
        Raises: DataError if what must not be cut does not fit.
        """
        over = sum(len(segment.ids) for segment in segments) - max_tokens
        if over <= 0:
            return list(segments), 0
        lengths = {i: len(segment.ids) for i, segment in enumerate(segments) if segment.shortenable}
        if over > sum(lengths.values()):
            needed = self.config.sequence_length + over - sum(lengths.values())
            raise DataError(
                f"{record.location}: the sample needs {needed} tokens even with everything cut that may be cut, but "
                f"task.sequence_length is {self.config.sequence_length}; set it to {needed} or more."
            )
        for _ in range(over):
            longest = max(lengths, key=lambda i: lengths[i])
            lengths[longest] -= 1
        shortened = []
        for i, segment in enumerate(segments):
            length = lengths.get(i, len(segment.ids))
            ids = segment.ids[len(segment.ids) - length :] if at_start else segment.ids[:length]
            shortened.append(TokenSegment(ids, segment.shortenable))
        return shortened, over


def joined_ids(segments: Sequence[TokenSegment]) -> list[int]:
    """The tokens of all segments."""
    return [token for segment in segments for token in segment.ids]


def overlapping_windows(length: int, max_tokens: int, step: int) -> list[tuple[int, int]]:
    """[start, end) of windows of at most `max_tokens` that cover 0 .. length and start at most `step` apart."""
    step = min(step, max_tokens)
    starts = [0, *range(step, max(length - max_tokens + step, 1), step)]
    return [(start, min(start + max_tokens, length)) for start in starts]
