"""The object or the text of a JSON line, or the reason why it cannot be used."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import orjson

from data_utils.common.setting_files import listed
from data_utils.corpus.stored_files import raise_if_out_of_memory

UTF8_BOM = b"\xef\xbb\xbf"
_OBJECT_REMEDY = "put each object on its own line: jq -c . FILE > NEW.jsonl"
_ARRAY_REMEDY = "put each object on its own line: jq -c '.[]' FILE > NEW.jsonl"
_LIST_REMEDY = "put each object on its own line: jq -c '.{}[]' FILE > NEW.jsonl"
_TABLE_REMEDY = "is this a table? Rename it to .csv or .tsv; plain text needs .txt"
_UTF16_REMEDY = "NUL bytes: UTF-16 or UTF-32 without a byte order mark (iconv -f UTF-16LE -t UTF-8)"
_COMMA_REMEDY = "remove the comma after each object: sed 's/}, *$/}/' FILE > NEW.jsonl"
_JOINED = re.compile(rb"\}\s*\{")
_LARGE_RECORD_BYTES = 1 << 20
_JSON_MEMORY = 16  # memory that orjson needs per byte of JSON, at most: a buffer of 12, and 4 for the text


class UnusableRecord(Exception):
    """A record that is counted as bad, by its kind."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


def parse_json_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, whose keys are all different. Raises UnusableRecord; MemoryError."""
    tree = _json_object(line)
    _refuse_repetition(line, tree)
    return tree


def _json_object(line: bytes) -> dict[str, Any]:
    if len(line) > _LARGE_RECORD_BYTES:
        bytearray(_JSON_MEMORY * len(line))  # raises MemoryError where orjson would end the process
    try:
        tree = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise_if_out_of_memory(error)
        tree = _with_other_numbers(line)
        if tree is None:
            raise _why_not_json(line, error) from None
    if not isinstance(tree, dict):
        hint = f" ({_ARRAY_REMEDY})" if isinstance(tree, list) else ""
        raise UnusableRecord("not_an_object", f"the line holds {json_type(tree)}, not an object{hint}")
    return tree


def _with_other_numbers(line: bytes) -> Any:
    """The value of a line with numbers that are not finite (1e999; NaN, which Python writes); None if it has none."""
    try:
        tree = json.loads(line.decode())  # of bytes it would take other encodings too
        orjson.dumps(tree)  # raises for half of a surrogate pair
    except (ValueError, TypeError, RecursionError):
        return None
    return tree


class _Object(dict[str, Any]):
    """An object of JSON that knows which key it has twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = next((k for k, count in Counter(k for k, _ in pairs).items() if count > 1), None)


def _refuse_repetition(line: bytes, keys: Collection[str]) -> None:
    """Raise UnusableRecord if one of the `keys` stands twice in the object of a line: JSON does not say which holds.

    Such keys are rare, so the line is parsed again only where a key's letters occur twice.
    """
    if all(line.count(b'"%b"' % key.encode()) == 1 for key in keys):
        return
    try:
        twice = json.loads(line, object_pairs_hook=_Object).twice
    except (ValueError, RecursionError):  # the standard library reads less deep objects
        return
    if twice is not None and twice in keys:
        raise UnusableRecord("key_twice", f"the field {twice[:80]!r} appears twice; keep one")


def field_at(tree: Any, key: str) -> Any:
    """The value of a field, or of `a.b` the field b of the field a; a field of the whole name comes first.

    Raises: KeyError.
    """
    if isinstance(tree, Mapping) and key in tree:
        return tree[key]
    first, dot, rest = key.partition(".")
    if not dot or not isinstance(tree, Mapping):
        raise KeyError(key)
    return field_at(tree[first], rest)


def parse_json_line(line: bytes, text_key: str) -> str:
    """The text of a line that holds a JSON object. Raises UnusableRecord; MemoryError."""
    tree = _json_object(line)
    try:
        text = field_at(tree, text_key)
    except KeyError:
        raise UnusableRecord("missing_field", _no_field(tree, text_key)) from None
    _refuse_repetition(line, (text_key,) if text_key in tree else text_key.split(".")[:1])
    if not isinstance(text, str):
        problem = f"field {text_key!r} holds {json_type(text)}, not text"
        if isinstance(text, dict) and text:
            problem += f"; --text-key {f'{text_key}.{next(iter(text))}'[:80]} selects the field inside it"
        raise UnusableRecord("field_not_text", problem)
    return text


def _no_field(tree: Mapping[str, Any], text_key: str) -> str:
    fields = listed(list(tree)[:10]) or "none"
    problem = f"there is no field {text_key!r} (fields: {fields}; set --text-key to the one with the text)"
    of_objects = [
        key for key, value in tree.items() if isinstance(value, list) and isinstance((value or [0])[0], dict)
    ]
    if len(tree) == 1 and of_objects:
        problem += f"; {_LIST_REMEDY.format(of_objects[0][:80])}"
    return problem


def _why_not_json(line: bytes, error: orjson.JSONDecodeError) -> UnusableRecord:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as decode_error:
        return not_utf8(decode_error)
    if b"\0" in line[:4]:
        return UnusableRecord("nul_byte", _UTF16_REMEDY)
    if line.startswith(UTF8_BOM):
        return UnusableRecord("byte_order_mark", "a byte order mark inside the file (joined files?)")
    if "control character" in error.msg:
        return UnusableRecord("control_character", f"{error.msg} at character {error.pos + 1}")
    if b"\\u" in line:
        try:  # the standard library accepts half a surrogate pair, which no UTF-8 text can hold
            json.loads(line)
        except (ValueError, RecursionError):
            pass
        else:
            return UnusableRecord("lone_surrogate", f"half of a surrogate pair: {error.msg}")
    problem = f"malformed JSON: {error.msg} at character {error.pos + 1}"
    opening = line.strip()
    if opening.startswith(b"["):  # the first line of an array
        problem += f" ({_ARRAY_REMEDY})"
    elif opening.endswith(b",") and _is_json(opening[:-1]):
        problem += f" ({_COMMA_REMEDY})"
    elif opening.endswith((b"{", b"[", b",", b":")) or _JOINED.search(opening):
        problem += f" ({_OBJECT_REMEDY})"  # one object on many lines, or many on one
    elif not opening.startswith((b"{", b'"', b"}", b"]")):
        problem += f" ({_TABLE_REMEDY})"
    return UnusableRecord("malformed_json", problem)


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def not_utf8(error: UnicodeDecodeError) -> UnusableRecord:
    byte = error.object[error.start]
    problem = f"invalid UTF-8: byte 0x{byte:02x} at position {error.start + 1}"
    return UnusableRecord("invalid_utf8", f"{problem} (another encoding? iconv -f LATIN1 -t UTF-8)")


def json_type(value: Any) -> str:
    """The type of a JSON value, in words for messages."""
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
