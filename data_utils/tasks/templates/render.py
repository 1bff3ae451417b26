"""TaskRecords -> samples, for every kind of task and every input format.

The head and the target groups of a record's sample, by kind; `prepare` may make several records of one, and fewer or
more in training:

    cloze                       choices    right: the class or the choice; groups in the order of `choices(record)`
    classification, regression  classes, values    one group
    typing                      sets       one group
    tagging                     tags       groups of one sentence, which follow each other
    spans                       spans      a group for each window; `answer_text` cuts the answer's characters
    seq2seq, blanks             tokens     `prompt` is what a completion follows in use, `written` the text it gives
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from data_utils.tasks.base import TaskRecord, TaskSample
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.templates.blanks import Blanks
from data_utils.tasks.templates.cloze import Cloze
from data_utils.tasks.templates.heads_input import Spans, Tagging, TextHead, Typing
from data_utils.tasks.templates.input_formats import InputFormat
from data_utils.tasks.templates.inputs import Inputs, TaskType
from data_utils.tasks.templates.marked import refuse_marks
from data_utils.tasks.templates.sequence import Seq2Seq
from data_utils.tokenizers.tokenizer import Tokenizer

TASK_TYPES: dict[str, Callable[[Inputs, Sequence[str]], TaskType]] = {
    "cloze": Cloze,
    "classification": TextHead,
    "regression": TextHead,
    "tagging": Tagging,
    "typing": Typing,
    "spans": Spans,
    "seq2seq": Seq2Seq,
    "blanks": Blanks,
}


class Renderer:
    """Makes the samples of a task. All of it is pure: (seed, number, epoch, record) -> sample.

    Args:
        input_format: of the run (input_formats.py).
        seed: that of the run.
        labels: the classes or tags in the order of their numbers; () where the kind has none.
    Raises: ConfigError for a pattern or verbalizers that do not exist or do not go together.
    """

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        input_format: InputFormat,
        seed: int,
        labels: Sequence[str] = (),
    ) -> None:
        self.inputs = Inputs(config, tokenizer, input_format, seed)
        self.task_type = TASK_TYPES[config.kind](self.inputs, labels)

    @property
    def head(self) -> str:
        """How the samples' target groups are scored: one of HEADS."""
        return self.task_type.head

    @property
    def prediction_type(self) -> str:
        """The type of predictions, a key of METRICS_BY_PREDICTION_TYPE (metrics_by_task.py)."""
        return self.task_type.prediction_type

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes or tags in the order of their numbers."""
        return getattr(self.task_type, "labels", ())

    @property
    def max_position_needed(self) -> int:
        """Largest position id, of text or block, that a sample can have; the model needs one position more."""
        last = self.inputs.config.sequence_length - 1
        return max(last, self.task_type.last_position) if isinstance(self.task_type, Seq2Seq) else last

    def check(self) -> None:
        """Raise ConfigError for what can be known before any record is read: format, tokens, lengths."""
        self.task_type.check()
        if not isinstance(self.task_type, TextHead):
            refuse_marks(self.inputs.config)

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        """The records that `sample` takes: more or fewer than the file's where the kind says so."""
        return self.task_type.prepare(records, training=training)

    def sample(self, record: TaskRecord, number: int, epoch: int = 0) -> TaskSample:
        """The sample of a prepared record.

        Args: number, epoch: decide what is drawn at random.
        Raises: DataError for a record that gives no sample.
        """
        return self.task_type.sample(record, number, epoch)

    def prompt(self, record: TaskRecord, number: int, epoch: int = 0) -> list[int]:
        """Token ids that the model reads before it completes a record (seq2seq and blanks).

        In GLM's format they are part A, which ends with eos and has a mask for each blank.
        """
        return self._writer().prompt(record, number, epoch)

    def written(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> str:
        """The text that completions give: the target, or the whole text with its blanks filled.

        Args: completions: tokens that the model has written, without an end; several where the prompt has several
            blanks.
        """
        return self._writer().written(prompt, completions)

    def _writer(self) -> Seq2Seq | Blanks:
        assert isinstance(self.task_type, (Seq2Seq, Blanks)), f"{self.inputs.config.kind} generates no text"
        return self.task_type
