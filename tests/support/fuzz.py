"""Mutations of files of foreign origin, and what a reader does with each: one line of a UserError, or it works.

A mutation is a pure function of its seed and the file's content. `tried` applies one, calls the reader with an alarm
set, and puts the file back.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.common.errors import UserError

ALARM_SECONDS = (
    120  # far beyond what a reader takes on a busy machine; one that waits for ever would never end
)
STRANGER = "stranger"  # is in every setting that a mutation smuggles in

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        7,
        1.5,
        -0.5,
        1e308,
        2**31,
        2**63,
        2**64,
        -(2**63),
        10**400,
        10_000_000,
    ),
    *(
        "",
        "x",
        "0",
        "true",
        "../../../etc/passwd",
        "/dev/zero",
        "a" * 10_000,
        "\0",
        "\ud800",
        "é\u202e\n",
        "%s{0}$HOME~",
    ),
    *([], {}, [[]], [0], [1, 2], [None], ["x"], {"x": 1}, {"": {}}, [{}], list(range(300))),
]
RAW = {  # whole contents
    "nothing": b"",
    "a scalar": b"0",
    "null": b"null",
    "an empty list": b"[]",
    "an empty object": b"{}",
    "NUL bytes": b"\0" * 64,
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 50_000,
    "UTF-16": "{}".encode("utf-16"),
    "a long number": b"1" * 5000,
    "NaN": b"NaN",
    "lines": b"\n" * 1000,
    "binary": bytes(range(256)) * 4,
}
STRANGERS_SETTINGS = {
    "run": {"directory": STRANGER},
    "trackers": {"wandb": {"project": STRANGER}},
    "checkpoint": {"initialize_from": STRANGER},
    "data": {"local_directory": STRANGER, "train": [{"prefix": STRANGER}]},
    "deepspeed": {"comment": STRANGER},
    "optimus": {"encoder_from": STRANGER},
    "task": {"name": STRANGER, "train": STRANGER, "kind": "classification", "reader": "jsonl"},
}


@dataclass(frozen=True)
class Target:
    """A file and its reader."""

    name: str
    file: Path
    read: Callable[[], None]
    seal: Callable[[], None] | None = None  # makes the file's own checksum right again, where it can be


def places(tree: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value in a tree, the tree's own left out."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in items:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def parent_of(tree: Any, path: tuple) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def changed_tree(tree: Any, rng: random.Random) -> tuple[str, bytes]:
    """A description, and the JSON text of a tree with one to three changes."""
    tree, done = copy.deepcopy(tree), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        known = places(tree)
        if not known:
            break
        top = [path for path in known if len(path) <= 2]  # lists of many pieces would get all the changes
        path = rng.choice(top if rng.random() < 0.5 else known)
        parent, key = parent_of(tree, path), path[-1]
        kind = rng.choice(
            ("replace", "replace", "delete", "neighbour", "wrap", "number", "stranger", "double")
        )
        if kind == "delete":
            del parent[key]
        elif kind == "neighbour":  # the value of another place
            other = rng.choice(known)
            parent[key] = copy.deepcopy(parent_of(tree, other)[other[-1]])
        elif kind == "wrap":
            for _ in range(rng.choice((1, 2, 60))):
                parent[key] = [parent[key]] if rng.random() < 0.5 else {"x": parent[key]}
        elif kind == "number" and type(parent[key]) in (int, float):
            parent[key] = rng.choice(
                (-parent[key], parent[key] + 1, parent[key] * 10**6, float(parent[key]) + 0.5)
            )
        elif kind == "stranger" and isinstance(parent[key], dict):
            section = rng.choice(list(STRANGERS_SETTINGS))
            parent[key] = {**parent[key], section: STRANGERS_SETTINGS[section]}
        elif kind == "double" and isinstance(parent, list):
            parent.insert(0, copy.deepcopy(parent[key]))
        else:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
        done.append(f"{kind} {'.'.join(map(str, path))}")
    text = json.dumps(tree)
    if rng.random() < 0.08:
        text, note = text_change(text, rng)
        done.append(note)
    return "; ".join(done), text.encode("utf-8", "surrogatepass")


def text_change(text: str, rng: random.Random) -> tuple[str, str]:
    number = rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "[" * 50 + "]" * 50))
    if rng.random() < 0.5 and text.startswith("{"):
        key = text[1:].partition(":")[0] or '"x"'
        return f"{{{key}: {number},{text[1:]}", "a key twice"
    return text.replace(": ", f": {number}, {json.dumps('x')}: ", 1), f"the number {number[:9]}"


def changed_bytes(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choice(("cut", "flip", "flip", "insert", "remove", "repeat", "raw"))
    at = rng.randrange(len(content) + 1)
    size = rng.choice((1, 1, 2, 8, 100))
    if kind == "raw":
        name = rng.choice(list(RAW))
        return name, RAW[name]
    if kind == "flip":
        mutable = bytearray(content)
        for _ in range(rng.choice((1, 1, 5, 50))):
            mutable[rng.randrange(len(mutable))] ^= 1 << rng.randrange(8)
        return "bits flipped", bytes(mutable)
    middle = {
        "cut": None,
        "insert": rng.randbytes(size),
        "remove": b"",
        "repeat": content[at : at + size] * 20,
    }[kind]
    if middle is None:
        return f"cut at {at}", content[:at]
    return f"{kind} at {at}", content[:at] + middle + content[at + size * (kind == "remove") :]


def put(path: Path, kind: str) -> None:
    """Something else than a file under its name."""
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind != "absent":
        path.symlink_to({"endless device": "/dev/zero", "loop": path.name, "dangling": "nowhere"}[kind])


SPECIAL = ("FIFO", "endless device", "loop", "dangling", "directory", "absent")


def mutate(file: Path, seed: int) -> str:
    """Change a file. Returns a description."""
    rng, content = random.Random(seed), file.read_bytes()
    if seed % 20 < 2:
        kind = SPECIAL[seed // 20 % len(SPECIAL)]
        put(file, kind)
        return kind
    try:
        tree = json.loads(content)
    except ValueError:
        tree = None
    changed = changed_bytes if tree is None or rng.random() < 0.2 else changed_tree
    description, made = changed(content if changed is changed_bytes else tree, rng)  # type: ignore[arg-type]
    file.write_bytes(made)
    return description


class Hang(BaseException):
    """The alarm."""


@contextmanager
def alarm() -> Any:
    def ring(number: int, frame: Any) -> None:
        raise Hang(f"nothing came back for {ALARM_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(ALARM_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(target: Target, seed: int) -> tuple[str, str]:
    """Outcome, `refused`, `read` or what went wrong, and the description of one mutation."""
    original = target.file.read_bytes()
    description = f"{target.name}, seed {seed}: {mutate(target.file, seed)}"
    if target.seal is not None and seed % 4:
        target.seal()
    try:
        with alarm():
            target.read()
    except UserError as error:
        message = str(error)
        good = message and "\n" not in message and message.isprintable() and len(message) < 4000
        return ("refused" if good else f"message {message!r:.300}"), description
    except (Exception, Hang) as error:
        return f"{type(error).__name__}: {error!s:.300}", description
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library in Rust
            raise
        return f"panic: {error!s:.300}", description
    finally:
        if target.file.is_dir() and not target.file.is_symlink():
            target.file.rmdir()
        target.file.unlink(missing_ok=True)
        target.file.write_bytes(original)
    return "read", description
