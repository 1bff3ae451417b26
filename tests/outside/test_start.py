"""What commands import before they are at work: each of these packages takes as long as the rest of a start."""

import subprocess
import sys

import pytest
import yaml
from support.project import ROOT, small_corpus, small_run

CODE = """
import runpy, sys
script, packages = sys.argv[1], sys.argv[2].split(",")
sys.argv = [script, *sys.argv[3:]]
sys.path.insert(0, script.rpartition("/")[0])
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    assert not end.code
print("imported", [name for name in packages if name in sys.modules])
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "packages"),
    [
        ("scripts/preprocess_data.py", "numba,scipy,torch"),
        ("pretrain_glm.py", "torch._dynamo,sympy,awkward,scipy.linalg,mlflow"),
    ],
)
def test_a_start_imports_no_large_package_that_it_does_not_use(corpus, tmp_path, script, packages):
    if script == "pretrain_glm.py":
        tree = small_run(corpus, tmp_path / "run")
        tree["training"]["steps"], tree["schedule"]["warmup_steps"] = 1, 0
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        arguments = ["--config", str(tmp_path / "run.yaml")]
    else:
        (tmp_path / "text.jsonl").write_text('{"text": "word1 word2"}\n')
        arguments = ["--input", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "out")]
        arguments += ["--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", str(corpus / "vocab.txt")]
    command = [sys.executable, "-c", CODE, str(ROOT / script), packages, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "imported []" in done.stdout, done.stdout + done.stderr
