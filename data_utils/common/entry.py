"""Checks and settings that every entry point imports before anything else.

  Ctrl-C is answered in one line (interrupts.py).
  An old Python or a missing package is reported in one line with the remedy.
  Libraries that keep what they have compiled find a directory for it.

It uses only the standard library, because nothing else may be installed, and syntax that an old Python reads.
"""

import os
import sys

from data_utils.common import interrupts

interrupts.arm()

_REMEDY = (
    "activate the environment (source .venv/bin/activate), or install it: pip install -r requirements.txt"
)

if sys.version_info < (3, 11):  # noqa: UP036  the requirement of pyproject.toml is not checked by a script's start
    version = ".".join(map(str, sys.version_info[:2]))
    text = "error: this is Python %s, but 3.11 or newer is required; %s." % (version, _REMEDY)  # noqa: UP031
    print(text, file=sys.stderr)
    sys.exit(2)


def _report_in_one_line(error_type, error, traceback):  # type: ignore[no-untyped-def]
    errors = sys.modules.get("data_utils.common.errors")
    if errors is not None and issubclass(error_type, OSError):
        error_type, error = errors.UserError, errors.system_error(error)
    if errors is not None and issubclass(error_type, errors.UserError):  # found while modules are imported
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.status))
    package = (getattr(error, "name", None) or "").split(".")[0]
    ours = ("megatron_lite", "data_utils", "scripts", "benchmarks", "tests")
    if not issubclass(error_type, ModuleNotFoundError) or not package or package in ours:
        sys.__excepthook__(error_type, error, traceback)
        return
    print(f"error: {sys.executable} does not have the package {package}; {_REMEDY}.", file=sys.stderr)
    sys.exit(2)


sys.excepthook = _report_in_one_line

# Variable that names a directory for caches, and the directory in the home directory that is used if it is not set.
_CACHES = (
    ("XDG_CACHE_HOME", ".cache"),  # numba, which fails without one; torch; Hugging Face
    ("TRITON_HOME", ""),
    ("MPLCONFIGDIR", ".config/matplotlib"),
)


def _can_hold_files(folder):  # type: ignore[no-untyped-def]
    """Whether files can be made in a folder, which may not exist yet."""
    while not os.path.lexists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def use_private_caches():  # type: ignore[no-untyped-def]
    """Give caches a private directory, removed at the end, where the home directory takes none.

    So it is for a user who is unknown to a container's image: the home directory is /. Processes that this one starts
    share the directory.
    """
    home = os.path.expanduser("~")  # stays as it is for a user without one
    paths = [(name, os.environ.get(name) or os.path.join(home, below)) for name, below in _CACHES]
    unusable = [name for name, path in paths if not (os.path.isabs(path) and _can_hold_files(path))]
    if not unusable:
        return
    import atexit
    import shutil
    import tempfile

    owner = os.getpid()
    folder = tempfile.mkdtemp(prefix="glm-caches-")  # nobody else can enter it

    def remove():  # type: ignore[no-untyped-def]
        if os.getpid() == owner:  # and no process that was forked from it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    os.environ.update(dict.fromkeys(unusable, folder))


use_private_caches()
