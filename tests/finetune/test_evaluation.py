"""What an evaluation compares, and the files of its predictions."""

from pathlib import Path

from support.tasks.tasks import task_of, votes, write_lines, write_task

from megatron_lite.finetune import evaluation as module
from megatron_lite.finetune.evaluation import Evaluation, EvaluationResult, Model
from megatron_lite.finetune.run import write_file_predictions
from megatron_lite.parallel.context import ParallelContext


def test_summaries_are_compared_sentence_by_sentence(tmp_path, monkeypatch):
    """Marks of sentences are ends of lines on both sides, as ROUGE-Lsum wants it."""
    (tmp_path / "train.source").write_text("good film bad plot\n")
    (tmp_path / "train.target").write_text("good film <S_SEP> bad plot\n")
    pairs = str(tmp_path / "train.source")
    files = write_task(
        tmp_path / "task", name="cnn_dm", kind="seq2seq", reader="pairs", labels=[], target_length=16
    )
    task = task_of(files, tmp_path / "out", f"task.train={pairs}", f"task.validation=['{pairs}']")
    compared = []

    def measured(names, predictions, references, **others):
        compared.extend([*predictions, *references])
        return dict.fromkeys(names, 0.0)

    monkeypatch.setattr(module, "measure", measured)
    monkeypatch.setattr(Evaluation, "_generate", lambda self, write: ["bad plot <S_SEP> good film"])
    monkeypatch.setattr(Evaluation, "_outputs", lambda self, answer, samples: [])
    records = task.validation[pairs]
    evaluated = Evaluation(task.settings, task.renderer, records, ParallelContext.alone(), 2).run(
        Model(lambda batch: None, lambda contexts: [])
    )
    assert compared == ["bad plot\ngood film", "good film\nbad plot"]
    assert evaluated.predictions == ["bad plot <S_SEP> good film"]  # the file keeps what was written


def test_files_of_one_name_have_predictions_of_their_own(tmp_path):
    paths = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        paths.append(write_lines(tmp_path / place / "test.jsonl", votes(ord(place), 3)))
    task = task_of(write_task(tmp_path / "task", validation=paths), tmp_path / "out")
    evaluated = {
        path: EvaluationResult({}, list(records), [record.label for record in records], 0)
        for path, records in task.validation.items()
    }
    write_file_predictions(tmp_path / "out", task.settings, evaluated, "--output")
    written = sorted(Path(tmp_path / "out").iterdir())
    assert [path.name for path in written] == ["0_test_votes.jsonl", "1_test_votes.jsonl"]
    for path, source in zip(written, paths, strict=True):
        labels = [line.partition('"label"')[2] for line in path.read_text().splitlines()]
        assert labels == [line.partition('"label"')[2] for line in Path(source).read_text().splitlines()]
