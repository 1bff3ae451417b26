"""The corpus collector: what counts as prose, determinism, and that no module is ever run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.project import ROOT

from data_utils.common.errors import ConfigError, DataError
from scripts.quickstart.collect_corpus import (
    collect,
    english_paragraphs,
    is_english,
    main,
    read_texts,
    string_constants,
    unseen,
    whole_sentences,
)

PROSE = "This is a sentence about the weather, and it goes on for a while so that it can be read as English."


def module(*docstrings: str) -> str:
    return "\n".join(f'def f{i}():\n    """{text}\n    """' for i, text in enumerate(docstrings))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Packages with prose, with side effects on import, with damage, and without prose."""
    root = tmp_path / "packages"
    (root / "tests").mkdir(parents=True)
    (root / "lib-1.0.dist-info").mkdir()
    stories = [
        f"{PROSE} The {word} of it is what I would like to have." for word in ("blue", "rest", "end", "top")
    ]
    witness = tmp_path / "imported"
    (root / "side_effect.py").write_text(f"open({str(witness)!r}, 'w')\n" + module(*stories))
    (root / "broken.py").write_text("def (:\n" + module(*stories))
    (root / "binary.py").write_bytes(b"\xff\xfe" + module(*stories).encode())
    (root / "table.py").write_text('x = """\n' + "1.0 2.0 3.0\n" * 100 + '"""\n')
    (root / "tests" / "test_it.py").write_text(module(*(story.upper() for story in stories)))
    readme = "\n\n".join(story.replace("weather", "package") for story in stories)
    (root / "lib-1.0.dist-info" / "METADATA").write_text(f"Name: lib\nAuthor: {PROSE}\n\n{readme}\n")
    return root


def test_collects_prose_and_runs_nothing(tree: Path) -> None:
    output = tree.parent / "out" / "corpus.jsonl"
    main(["--root", str(tree), "--output", str(output), "--workers", "1"])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(record["source"] for record in records) == ["lib-1.0.dist-info/METADATA", "side_effect.py"]
    assert all(record["text"].count("\n\n") == 3 and "Author" not in record["text"] for record in records)
    assert not (tree.parent / "imported").exists()
    assert [path.name for path in output.parent.iterdir()] == ["corpus.jsonl"]


def test_same_documents_for_any_number_of_workers(tree: Path) -> None:
    for number in range(150):  # several tasks
        (tree / f"m{number}.py").write_text(
            module(
                *(
                    f"{PROSE} The {'so ' * (number // 15)}{'as ' * (number % 15)}{'we ' * i}end of it."
                    for i in range(4)
                )
            )
        )
    assert len(alone := collect([tree], 10**6, 1)) > 100
    assert collect([tree], 10**6, 2) == alone


def test_stops_at_the_limit(tree: Path) -> None:
    sizes = [len(text.encode()) for _, text in collect([tree], 10**6, 1)]
    assert len(sizes) == 2
    assert len(collect([tree], sizes[0], 1)) == 1
    assert len(collect([tree], sizes[0] + 1, 1)) == 2


def test_repeated_paragraphs_are_dropped() -> None:
    first = "Construct a BertModel from the given path, and return it to the one who asked."
    renamed = first.replace("BertModel", "GPT2Model").replace("path", "path")
    seen: set[str] = set()
    assert list(unseen([first, renamed, PROSE], seen)) == [first, PROSE]
    assert list(unseen([PROSE], seen)) == []


def test_paragraphs_lose_markup_and_code() -> None:
    text = f"""
    See :class:`~Module` and [this
    page](https://example.org/x) for what ``it`` does with **all** of the others in the <b>list</b>.

        >>> for it is the time that we have to be in the house with you
        3

    def this is not what it would be if it were the text of a book:

    - {PROSE}
    """
    assert list(english_paragraphs(text)) == [
        "See Module and this page for what it does with all of the others in the list .",
        PROSE,
    ]


def test_whole_sentences_without_code_or_arguments() -> None:
    paragraph = (
        "n : int, optional. The number of the rows that it has. If x = 3 then it is not what we want. Short it is. "
        "See torch.nn.Module for what it is. Is it what you would like to have? It ends without a full stop"
    )
    assert list(whole_sentences(paragraph)) == [
        "The number of the rows that it has.",
        "Is it what you would like to have?",
    ]


@pytest.mark.parametrize(
    "paragraph",
    [
        "the of and",
        "der Hund und die Katze sind im Haus und das ist gut so wie es ist",
        "numpy scipy pandas torch matplotlib sympy networkx deepspeed transformers tokenizers",
        "x = (a + b) * {c: [1, 2, 3]} if the != of else -> {is: (to, in)} // [for + with]",
        "Ta wiadomość jest po polsku i nie należy jej brać do tego zbioru",
    ],
)
def test_other_text_is_not_english(paragraph: str) -> None:
    assert not is_english(paragraph)


def test_english_is_english() -> None:
    assert is_english(PROSE)


def test_string_constants_in_source_order() -> None:
    source = 'a = f("""first\n""")\nclass A:\n    """second\n    line"""\n    b = "short"\n'
    assert string_constants(source) == ["first\n", "second\n    line"]
    assert string_constants("'''\n\x00'''") == []


@given(st.binary(max_size=200))
def test_any_file_can_be_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "module.py"
    path.write_bytes(content)
    for text in read_texts(path):
        for paragraph in english_paragraphs(text):
            assert is_english(paragraph)


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--root .* is not a directory"):
        main(["--root", str(tmp_path / "none"), "--output", str(tmp_path / "x")])
    with pytest.raises(DataError, match=r"no English text .* --root"):
        main(["--root", str(tmp_path), "--output", str(tmp_path / "x")])


def test_command_line(tree: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "scripts.quickstart.collect_corpus",
        "--root",
        str(tree),
        "--output",
        str(tree / "side_effect.py" / "x"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --output") and result.stderr.count("\n") == 1
