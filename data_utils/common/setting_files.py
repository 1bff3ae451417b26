"""Reads YAML files of settings, with limits, and shortens values for messages."""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from data_utils.common.errors import ConfigError, printable

# Far beyond what a configuration needs; a larger one is a mistake and could take all memory.
MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_ALIASES = 10  # each may stand for a large part of the file
SHOWN_LENGTH = 160  # characters of a value in a message


# YAML 1.1 reads some plain words as what few people mean: `yes` and `off` are true and false, 1:30 is 90, 2024-01-01 a
# date. Here they are text, as in YAML 1.2; a setting that is true or false takes yes, no, on and off (settings.py).
_BOOL, _INT, _FLOAT, _OCTAL = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "octal"))
_PLAIN = (
    (_BOOL, r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_OCTAL, r"[-+]?0[0-7_]+", "-+0"),
    (_INT, r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", "-+0123456789"),
    (_FLOAT, r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?", "-+.0123456789"),
    (_FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with limits and YAML 1.2's plain words.

    It refuses a key written twice, where plain YAML silently takes the last one.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = self.aliases = 0
        self.open_anchors: list[str] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self.aliases += 1
            # A few lines of aliases of aliases expand to hundreds of megabytes.
            if self.aliases > MAX_ALIASES:
                raise _refusal(f"more than {MAX_ALIASES} aliases (*name); write the values out", event)
            if event.anchor in self.open_anchors:
                raise _refusal(f"alias *{shorten(event.anchor)} holds itself; write the value out", event)
            return super().compose_node(parent, index)
        if self.depth == MAX_DEPTH:
            raise _refusal(f"more than {MAX_DEPTH} levels; a configuration has fewer", event)
        self.depth += 1
        self.open_anchors.append(event.anchor)
        node = super().compose_node(parent, index)
        self.open_anchors.pop()
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise _refusal(
                        f"key {shown(key.value)} appears twice in one mapping; keep one of them", key
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refusal(reason: str, where: Any) -> yaml.MarkedYAMLError:
    """The error at an event or a node of YAML."""
    return yaml.MarkedYAMLError(problem=reason, problem_mark=where.start_mark)


def _refuse_octal(loader: _Loader, node: yaml.ScalarNode) -> Any:
    raise _refusal(
        f"{node.value} is {int(node.value.replace('_', ''), 8)} to some readers of YAML and "
        f"{int(node.value.replace('_', ''))} to others; write the number without its first 0, or text in quotes",
        node,
    )


# Without the resolvers for which _PLAIN has others; the resolvers of null and << stay.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in _PLAIN:
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), list(_first))
_Loader.add_constructor(_OCTAL, _refuse_octal)


class YamlError(ValueError):
    """A YAML text that is none, in one short line. `line`: where, from 1; None: not known."""

    def __init__(self, reason: str, line: int | None):
        super().__init__(reason)
        self.line = line


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises YamlError, a ValueError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(error, text) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number or date that Python cannot hold
        raise YamlError(one_line(error, 400), None) from None


def _yaml_error(error: yaml.MarkedYAMLError, text: str) -> YamlError:
    """The library's error with the line that it draws, in words."""
    reason, mark = error.problem or error.context or "", error.problem_mark or error.context_mark
    if mark is None:
        return YamlError(one_line(reason, 400), None)
    line = (text.split("\n") + [""] * mark.line)[mark.line].strip()
    if "'\\t'" in reason:
        reason = "the line is indented by a tab; YAML takes only spaces"
    begins = error.context_mark.line if error.context and error.context_mark else mark.line
    reason += f" ({error.context} that begins in line {begins + 1})" if begins < mark.line else ""
    if not isinstance(error, yaml.constructor.ConstructorError) and line and mark.line:
        reason += f", in {shown(shorten(line, 60))}"
    return YamlError(one_line(reason, 400), mark.line + 1)


def parse_override_value(text: str) -> Any:
    """The value of an override: YAML in which # begins no comment, which nobody writes on a command line.

    Raises: ValueError for what YAML would drop: a comment behind more than a word, a name of a value, and `---`.
    """
    value = parse_yaml(text)
    node = yaml.compose(text, _Loader)
    rest = text if node is None else text[node.end_mark.index :]
    if (node is not None and text.strip()[0] in "&%!") or text.strip().startswith("---"):
        raise ValueError(f"{text.strip()[0]} would not be part of the value")
    if not rest.strip():
        return value
    is_word = node is None or (isinstance(node, yaml.ScalarNode) and node.style is None)
    if not is_word or not rest.strip().startswith("#"):
        raise ValueError(f"{shown(rest.strip())} would be a comment")
    return text.strip()


def setting_lines(path: str | Path) -> dict[str, int]:
    """Dotted keys of a YAML file that can be read -> their lines, from 1."""
    lines: dict[str, int] = {}

    def walk(node: yaml.Node, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name = f"{path}.{key.value}" if path else str(key.value)
                lines[name] = key.start_mark.line + 1
                walk(value, name)
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                lines[f"{path}[{number}]"] = item.start_mark.line + 1
                walk(item, f"{path}[{number}]")

    root = yaml.compose(read_text(path, "configuration file"), _Loader)
    if root is not None:
        walk(root, "")
    return lines


def read_text(path: str | Path, name: str) -> str:
    """A file of text of limited size, that the user named. Raises ConfigError, which calls it `name`.

    The shell's `<(command)` is a pipe that is open already, at /dev/fd or /proc. Opening another FIFO would wait for
    its other end, so it is refused. A file that the user did not name is read by `untrusted.read_bounded`.
    """
    if Path(path).is_fifo() and Path(path).parts[:2] not in (("/", "dev"), ("/", "proc")):
        raise ConfigError(f"{name} {path} is not a regular file; check the path.")
    try:
        with open(path, "rb") as file:
            # One byte more than allowed tells a file that is too long without reading it.
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}; check the path.") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name} {path} is longer than {MAX_BYTES} bytes; check the path.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} {path} is not UTF-8 text; convert it.") from None


def load_yaml(path: str | Path, folder: str = "") -> dict[str, Any]:
    """Read one YAML file as a mapping. Raises ConfigError when it is missing, malformed or not a mapping.

    Args:
        path: a file, or the name of a configuration in this `folder` of the project's own, such as small.
    """
    path = yaml_path(path, folder)
    text = read_text(path, "configuration file")
    try:
        tree = parse_yaml(text)
    except YamlError as error:
        location = path if error.line is None else f"{path}:{error.line}"
        raise ConfigError(f"configuration file {location} is not valid YAML: {error}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"configuration file {path} must hold a mapping of sections, not {type(tree).__name__}; see configs/."
        )
    return tree


def yaml_path(path: str | Path, folder: str = "") -> Path:
    """The file that `load_yaml` reads. Raises: ConfigError where there is none."""
    if not os.path.lexists(path) or os.path.isdir(path):
        return _named(Path(path), folder)
    return Path(path)


def _named(path: Path, folder: str) -> Path:
    """The project's configuration of this name. Raises ConfigError where there is none and nothing is at `path`."""
    # In a checkout, or where pip puts them (pyproject.toml).
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    installed = (Path(sysconfig.get_path("data", scheme)) / "share/megatron-lite-glm" for scheme in schemes)
    roots = [root / "configs" for root in (Path(__file__).resolve().parents[2], *installed)]
    names = {file.stem: file for root in reversed(roots) for file in (root / folder).glob("*.yaml")}
    if str(path) in names or os.path.isdir(path):
        return names.get(str(path), path)
    name = path.name.removesuffix(".yaml")
    same_name = [file for root in roots for file in sorted(root.rglob("*.yaml")) if file.stem == name]
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    remedy = f"check the path, or give the name of a file in configs/{folder}{'/' if folder else ''}"
    if close:
        remedy += f", such as {', '.join(close)}"
    if same_name:
        remedy = f"there is {' and '.join(map(str, dict.fromkeys(same_name)))}"
    raise ConfigError(f"configuration file {shorten(str(path))}: No such file or directory; {remedy}.")


def shorten(text: str, length: int = SHOWN_LENGTH) -> str:
    """`text` with its middle left out where it is longer than `length`."""
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def one_line(error: BaseException | str, length: int = 300) -> str:
    """A library's message in one line of bounded length, its kind if it has none; foreign names in it are escaped."""
    return printable(shorten(" ".join(str(error).split()) or type(error).__name__, length))


def listed(names: Iterable[str], length: int = 200) -> str:
    """Names of fields or columns as messages list them; quotes show spaces at their ends."""
    return shorten(", ".join(name if name == name.strip() else repr(name) for name in names), length)


def shown(value: Any) -> str:
    """A value as messages show it: `repr` of bounded length."""
    try:
        return shorten(repr(value))
    except ValueError:  # Python prints no number of more than 4300 digits
        return "a number of thousands of digits"
