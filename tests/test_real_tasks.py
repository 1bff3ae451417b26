"""benchmarks/real_tasks.py: training and test have no film in common, and no label decides a text."""

import bz2
import csv
import io
import json

import pytest
import yaml
from support.tasks import write_vocabulary

from benchmarks import real_tasks
from benchmarks.real_tasks import Review
from data_utils.common.errors import DataError

FILMS = 40


@pytest.fixture
def reviews(tmp_path):
    """Reviews of films, each with its film's number in it; a third of them rotten, the word says which. And plots."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["category", "text", "movie_name"])
    for film in range(FILMS):
        writer.writerow(["plot", f"plot of{film}", f"f{film}"])
        for number in range(9):
            label = "rotten" if number % 3 == 0 else "fresh"
            word = {"rotten": "bad", "fresh": "good"}[label]
            writer.writerow([label, f"{word} film of{film} number{number}", f"f{film}"])
    path = tmp_path / "reviews.csv.bz2"
    path.write_bytes(bz2.compress(text.getvalue().encode()))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def films(objects):
    return {word for line in objects for word in line["text"].split() if word.startswith("of")}


def test_no_film_is_in_both_parts_and_labels_are_even(reviews, tmp_path):
    counts = real_tasks.write_files(reviews, 1000, tmp_path)
    train, test, text = (lines(tmp_path / f"{name}.jsonl") for name in ("train", "test", "text"))
    assert counts == {"train": len(train), "test": len(test), "text": len(text)}
    assert films(train) and films(test) and not films(test) & (films(train) | films(text))
    assert films(train) == films(text) and len(films(train) | films(test)) == FILMS
    for part in (train, test):
        labels = [line["label"] for line in part]
        assert labels.count("fresh") == labels.count("rotten") == 3 * len(films(part))
    assert real_tasks.write_files(reviews, 8, tmp_path)["test"] == 8


def test_documents_are_films_whose_order_knows_no_label(reviews):
    of_films, plots = real_tasks.read_reviews(reviews)
    whole = [text for text in real_tasks.texts(of_films, plots) if not text.startswith("plot")]
    assert all(text.count("\n") == 8 and len(films([{"text": text}])) == 1 for text in whole)
    swapped = [Review(one.text, "fresh", one.film) for one in reversed(of_films)]
    assert set(real_tasks.texts(swapped, plots)) == set(real_tasks.texts(of_films, plots))
    assert len({tuple(line.split()[0] for line in text.split("\n")) for text in whole}) > 5


def test_the_baseline_takes_the_samples_that_each_seed_draws(reviews, tmp_path):
    real_tasks.write_files(reviews, 1000, tmp_path)
    tokenizer = {"kind": "bert_wordpiece", "path": str(write_vocabulary(tmp_path)), "added_tokens": "glm"}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({**real_tasks.MODEL, "tokenizer": tokenizer}))
    case = real_tasks.Case("head", 16, real_tasks.HEAD, True)
    assert real_tasks.counted_words(case, tmp_path, [1, 2]) == [1.0, 1.0]  # a word says it


def test_a_file_without_reviews_is_refused(tmp_path):
    other = tmp_path / "other.csv.bz2"
    other.write_bytes(bz2.compress(b"category,text,movie_name\nplot,a,b\n"))
    plain = tmp_path / "plain.csv"
    plain.write_text("category,text,movie_name\nfresh,a,b\n")
    for path in (other, plain, tmp_path):
        with pytest.raises(DataError, match="holds no reviews"):
            real_tasks.read_reviews(path)


def test_rows_and_picture(tmp_path):
    line = real_tasks.row(32, "cloze", [0.5, 0.6, 0.7])
    assert line == "| 32 | cloze | 0.600 | 0.100 | 0.500 0.600 0.700 |"
    rows = [{"labels": 100, "name": "cloze", "accuracies": [0.5, 0.6]}]
    real_tasks.draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
