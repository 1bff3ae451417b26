"""Imported first by every entry point: reports an old Python or a missing package in one line with the remedy.

It uses only the standard library, because nothing else may be installed, and syntax that an old Python reads.
"""

import sys

_REMEDY = (
    "activate the environment (source .venv/bin/activate), or install it: pip install -r requirements.txt"
)

if sys.version_info < (3, 11):  # noqa: UP036  the requirement of pyproject.toml is not checked by a script's start
    version = ".".join(map(str, sys.version_info[:2]))
    print("error: this is Python %s, but 3.11 is needed; %s." % (version, _REMEDY), file=sys.stderr)  # noqa: UP031
    sys.exit(2)


def _report_missing_package(kind, error, traceback):  # type: ignore[no-untyped-def]
    package = (getattr(error, "name", None) or "").split(".")[0]
    ours = ("megatron_lite", "data_utils", "scripts", "benchmarks", "tests")
    if not issubclass(kind, ModuleNotFoundError) or not package or package in ours:
        sys.__excepthook__(kind, error, traceback)
        return
    print(f"error: {sys.executable} has no package {package}; {_REMEDY}.", file=sys.stderr)
    sys.exit(2)


sys.excepthook = _report_missing_package
