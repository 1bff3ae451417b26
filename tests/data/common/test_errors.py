"""Entry points: one line for what a user can mend, and the exit status that says what happened."""

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.project import ROOT

from data_utils.common.errors import (
    INTERRUPTED_STATUS,
    ArgumentParser,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceMemoryError,
    ExitStatus,
    HaltedError,
    TrainingError,
    expanded_path,
    print_error,
    run_command,
    system_problem,
)
from data_utils.common.urls import without_secrets
from megatron_lite.parallel import rendezvous


def ended(main, **options):
    """Exit status of an entry point, and what it reported."""
    reported = []
    with pytest.raises(SystemExit) as exit:
        run_command(main, leave=lambda *values: reported.append(values), **options)
    return exit.value.code, [status for status, *_ in reported]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError, ExitStatus.USER_ERROR),
        (DataError, ExitStatus.USER_ERROR),
        (CheckpointError, ExitStatus.USER_ERROR),
        (DeviceMemoryError, ExitStatus.USER_ERROR),
        (HaltedError, ExitStatus.HALTED),
        (TrainingError, ExitStatus.UNSOUND),
    ],
)
def test_an_error_has_its_status_and_one_line(error, status, capsys):
    def main():
        raise error("a is 1; it must be 2.")

    assert ended(main) == (status, [status])
    assert capsys.readouterr().err == "error: a is 1; it must be 2.\n"
    assert ended(main, quiet=True) == (status, [status])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "status", "remedy"),
    [
        (errno.ENOSPC, ExitStatus.USER_ERROR, "; free some space, and repeat the command"),
        (
            errno.EMFILE,
            ExitStatus.USER_ERROR,
            "; raise the limit of open files (ulimit -n), and repeat the command",
        ),
        (errno.EROFS, ExitStatus.USER_ERROR, "; change its permissions, and repeat the command"),
        (errno.EIO, ExitStatus.CRASHED, ""),  # may pass
    ],
)
def test_an_error_of_the_system_is_one_line_of_the_rank_that_has_it(number, status, remedy, capsys):
    def main():
        raise OSError(number, os.strerror(number), "a/file")

    assert ended(main, quiet=True) == (status, [status])
    assert capsys.readouterr().err == f"error: a/file: {os.strerror(number)}{remedy}.\n"


def test_a_closed_directory_is_named_and_no_file_that_it_may_not_have(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "runs/r")
    error = PermissionError(errno.EACCES, "Permission denied", "runs/r/manifest.json")
    assert system_problem(error) == "runs/r: Permission denied"


@pytest.mark.parametrize("arguments", [["--help"], ["list", "RUN"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line(arguments, tmp_path):
    (tmp_path / "RUN/checkpoints/step_00000001").mkdir(parents=True)  # damaged, as the table says
    command = [sys.executable, ROOT / "scripts/checkpoints.py", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    error = "error: standard output: No space left on device; free some space, and repeat the command.\n"
    assert done.returncode == 2 and done.stderr.endswith(error) and "Traceback" not in done.stderr


def test_every_rank_prints_its_error_without_secrets_and_on_one_line(capsys):
    error = DataError("input https://me:word@host/a?sig=word: a\nb\x1b[31m; correct it.")
    rendezvous._print_error(error, rendezvous.Leaver(1, 0, "host", 2, "reason"))
    print_error(error)
    first, second = capsys.readouterr().err.splitlines()
    assert first == second.replace("error: ", "error: rank 1 on host: ")
    assert "word" not in first and r"a\nb\x1b[31m; correct it." in first


def test_an_error_is_written_at_once_so_that_lines_of_two_ranks_stay_apart(monkeypatch):
    pieces = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=pieces.append, flush=lambda: None))
    print_error(DataError("a is 1"))
    assert pieces == ["error: a is 1\n"]


def test_names_from_files_stay_on_the_line_of_the_error(capsys):
    """Fields and files may have any name: one of several lines, or that colours or clears a terminal."""

    def main():
        raise DataError("fields: a\nb\x1b[31m, \u2028, Größe, \udcff; correct them.")

    assert ended(main)[0] == ExitStatus.USER_ERROR
    assert (
        capsys.readouterr().err == "error: fields: a\\nb\\x1b[31m, \\u2028, Größe, \\udcff; correct them.\n"
    )


def test_a_message_has_a_bound(capsys):
    def main():
        raise ConfigError(f"first {'x' * 1_000_000} last")

    assert ended(main)[0] == ExitStatus.USER_ERROR
    printed = capsys.readouterr().err
    assert printed.startswith("error: first xxx") and printed.endswith("xxx last\n") and len(printed) < 5000


def test_what_one_rank_alone_has_found_it_reports(capsys):
    def main():
        error = DataError("row 3 is cut off.")
        error.only_here = True
        raise error

    assert ended(main, quiet=True)[0] == ExitStatus.USER_ERROR
    assert capsys.readouterr().err == "error: row 3 is cut off.\n"


@pytest.mark.parametrize("result", [None, 0, ExitStatus.STOPPED])
def test_the_result_of_an_entry_point_is_its_status(result):
    assert ended(lambda: result) == (result or 0, [result or 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --steps"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--step", "1"], "required: --steps"),  # nothing is guessed
    ],
)
def test_mistakes_in_arguments_are_one_line(arguments, message, capsys):
    parser = ArgumentParser(description="Says something.")
    parser.add_argument("--steps", type=int, required=True)
    assert ended(lambda: parser.parse_args(arguments) and None)[0] == ExitStatus.USER_ERROR
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert message in printed and printed.endswith("; see --help.\n")


def test_a_password_with_a_slash_is_in_no_message():
    """Keys of s3:// have slashes. What is no password stays: ports, and an @ in a path."""
    for url in ("s3://KEY:1/CANARY+x@bucket/a", "https://me:a/CANARY@host/a", "https://me:a?CANARY@host/a"):
        assert without_secrets(f"input {url} is") == f"input {url.partition('//')[0]}//... is"
    for url in ("https://host:80/a@b", "http://[::1]:80/a@b", "s3://bucket/a:b@c", "s3://bucket: a@b"):
        assert without_secrets(url) == url
    assert without_secrets("https://me:CANARY@host/a@b") == "https://host/a@b"


def test_a_url_of_other_bytes_than_utf_8_is_refused():
    with pytest.raises(ConfigError, match=r"'s3://bucket/\\udcff', which is not UTF-8"):
        expanded_path("s3://bucket/\udcff")
    assert expanded_path("s3://bucket/a ä#?%20") == "s3://bucket/a ä#?%20"


def test_an_interrupted_command_leaves_no_traceback(capsys):
    def main():
        raise KeyboardInterrupt

    assert ended(main)[0] == INTERRUPTED_STATUS
    assert capsys.readouterr().err == "interrupted\n"


def test_other_errors_keep_their_traceback_and_report_nothing():
    reported = []
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0, leave=lambda *values: reported.append(values))
    assert reported == []


def test_statuses_are_distinct_and_leave_those_of_signals_free():
    assert len({int(status) for status in ExitStatus}) == len(ExitStatus) and max(ExitStatus) < 128


def test_the_guide_lists_every_status():
    guide = (ROOT / "docs/cluster.md").read_text()
    for status in ExitStatus:
        assert f"\n| {int(status)} | " in guide


def test_settings_may_follow_an_option_of_several_values():
    parser = ArgumentParser()
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--text")
    parser.add_argument("overrides", nargs="*")
    found = parser.parse_intermixed_args(
        ["a=1", "--widths", "64", "128", "model.x=2", "b.c=[1, 2]", "--text", "d=4", "e=5"]
    )
    assert found.widths == [64, 128] and found.text == "d=4"
    assert found.overrides == ["a=1", "model.x=2", "b.c=[1, 2]", "e=5"]
    with pytest.raises(ConfigError, match="invalid int value: 'x'"):
        parser.parse_intermixed_args(["--widths", "64", "x"])
