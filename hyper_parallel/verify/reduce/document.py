"""A configuration file: its values by key, and its text with some values replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.reduce.keys import FORMATS
from hyper_parallel.verify.report_files import parse_toml

__all__ = ["Document", "read_document"]

Span = tuple[int, int]


@dataclass(frozen=True)
class Document:
    """The content of a configuration file.

    Attributes:
        name: name of the file, for messages.
        format: one of ``FORMATS``.
        text: text of the file.
        values: numbers, texts and lists by key; keys of nested tables are joined by dots.
        spans: position of each value in the text; empty for JSON, which is written anew.
    """

    name: str
    format: str
    text: str
    values: Mapping[str, Any]
    spans: Mapping[str, Span] = field(default_factory=dict)

    def with_values(self, changed: Mapping[str, Any]) -> str:
        """Return the text with new values of some keys; all other text is unchanged.

        Args:
            changed: new values, by keys of :attr:`values`.

        Raises:
            InputError: (a ValueError) a value is in a position where it cannot be replaced.
        """
        if self.format == "huggingface":
            return _json_with(self.text, changed)
        text = self.text
        spans = {self.spans[key]: _written(value) for key, value in changed.items() if key in self.spans}
        for (start, end), written in sorted(spans.items(), reverse=True):
            text = text[:start] + written + text[end:]
        found = _READERS[self.format](Path(self.name), text).values
        for key, value in {**self.values, **changed}.items():
            if found.get(key) != value:
                msg = f"{self.name}: {key} cannot be replaced where it stands; write it on a line of its own"
                raise InputError(msg)
        return text


def read_document(path: Path) -> Document:
    """Read a configuration; its name and content determine the format.

    Raises:
        InputError: (a ValueError) the file cannot be read, or is not a configuration.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        msg = f"{path} cannot be read: {reason}"
        raise InputError(msg) from error
    form = _SUFFIXES.get(path.suffix, "megatron" if _MEGATRON.search(text) else "")
    if not form:
        msg = (
            f"{path} is not a configuration of a known format; known formats are .json of Hugging Face, .toml of "
            "torchtitan, .yaml of MindFormers, and arguments of Megatron such as --num-layers"
        )
        raise InputError(msg)
    return _READERS[form](path, text)


_SUFFIXES = {".json": "huggingface", ".toml": "torchtitan", ".yaml": "mindformers", ".yml": "mindformers"}
_MEGATRON = re.compile(r"(?<!\S)--(num-layers|hidden-size)\b")


def _read_json(path: Path, text: str) -> Document:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{path} cannot be read as {FORMATS['huggingface']}: {error}"
        raise InputError(msg) from error
    if not isinstance(content, dict):
        msg = f"{path} cannot be read as {FORMATS['huggingface']}: it must be a JSON object"
        raise InputError(msg)
    return Document(str(path), "huggingface", text, _flattened(content))


def _json_with(text: str, changed: Mapping[str, Any]) -> str:
    content = json.loads(text)
    for key, value in changed.items():
        *tables, last = key.split(".")
        table = content
        for each in tables:
            table = table[each]
        table[last] = value
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _flattened(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their joined keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flattened(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


_TABLE = re.compile(r"\s*\[([\w.-]+)\]")
_ENTRY = re.compile(r"\s*([\w-]+)\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s#\[{]+)\s*(#.*)?$")


def _read_toml(path: Path, text: str) -> Document:
    try:
        values = _flattened(parse_toml(text))
    except ValueError as error:
        msg = f"{path} cannot be read as {FORMATS['torchtitan']}: {error}"
        raise InputError(msg) from error
    spans: dict[str, Span] = {}
    table, start = "", 0
    for line in text.splitlines(keepends=True):
        if header := _TABLE.match(line):
            table = f"{header[1]}."
        elif entry := _ENTRY.match(line.rstrip("\r\n")):
            spans[table + entry[1]] = (start + entry.start(2), start + entry.end(2))
        start += len(line)
    return Document(str(path), "torchtitan", text, values, spans)


_ARGUMENT = re.compile(r"(?<!\S)--([a-z][a-z0-9-]*)(?:(?:=|[ \t]+)(\"[^\"\n]*\"|'[^'\n]*'|(?!-[-a-z])[^\s\\]+))?")
_VARIABLE = re.compile(r"\"?\$\{?(\w+)\}?\"?")
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)


def _read_megatron(path: Path, text: str) -> Document:
    """Read the arguments of a command line, of a file of arguments, or of a shell script with its variables."""
    values: dict[str, Any] = {}
    spans: dict[str, Span] = {}
    uncommented = _COMMENT.sub(lambda comment: " " * len(comment[0]), text)
    for argument in _ARGUMENT.finditer(uncommented):
        key, value, span = argument[1], argument[2], argument.span(2)
        if value is None:
            values[key] = True
            continue
        if variable := _VARIABLE.fullmatch(value):
            assigned = rf"^[ \t]*(?:export[ \t]+)?{variable[1]}=\"?(?:\$\{{\w+:-)?(\d+)\}}?\"?[ \t]*(?:#.*|;.*)?$"
            found = list(re.finditer(assigned, uncommented, re.MULTILINE))
            if len(found) == 1:
                value, span = found[0][1], found[0].span(1)
        if value[0] in "\"'":
            value, span = value[1:-1], (span[0] + 1, span[1] - 1)
        values[key] = _scalar(value)
        spans[key] = span
    return Document(str(path), "megatron", text, values, spans)


_LINE = re.compile(r"( *)(- +)?([\w.-]+):(?: +(?:&\S+ *)?(\[[^\]#]*\]|\"[^\"]*\"|'[^']*'|[^#\s][^#]*?)?)?\s*(?:#.*)?$")


def _read_yaml(path: Path, text: str) -> Document:
    """Read nested mappings of scalars, one line each; sequences and other notations are skipped."""
    values: dict[str, Any] = {}
    spans: dict[str, Span] = {}
    parents: list[tuple[int, str]] = []
    start, literal = 0, -1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        body = line.rstrip("\r\n")
        before, start = start, start + len(line)
        indent = len(body) - len(body.lstrip(" "))
        if body[indent : indent + 1] == "\t":
            msg = f"{path} cannot be read as {FORMATS['mindformers']}: line {number} is indented by a tab"
            raise InputError(msg)
        if not body.strip() or 0 <= literal < indent:
            continue
        literal = -1
        while parents and parents[-1][0] >= indent:
            parents.pop()
        entry = _LINE.match(body)
        if entry is None or entry[2]:
            parents.append((indent, "-")) if body.lstrip().startswith("-") else None
            continue
        path_of = [key for _, key in parents] + [entry[3]]
        value = entry[4]
        if value is None:
            parents.append((indent, entry[3]))
        elif value[0] in "|>":
            literal = indent
        elif "-" not in path_of:
            key = ".".join(path_of)
            values[key], spans[key] = _scalar(value), (before + entry.start(4), before + entry.end(4))
    return Document(str(path), "mindformers", text, values, spans)


def _scalar(text: str) -> Any:
    """Return the value of a text: a number, true or false, None, a list of integers, or a text."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"\[\s*(-?\d+\s*(,\s*-?\d+\s*)*)?\]", text):
        return [int(number) for number in re.findall(r"-?\d+", text)]
    words = {"true": True, "false": False, "null": None, "none": None, "~": None}
    return words.get(text.lower(), text)


def _written(value: Any) -> str:
    """Return a value as text, in a notation that is valid in all text formats."""
    return f'"{value}"' if isinstance(value, str) and value.isidentifier() else str(value)


_READERS: dict[str, Callable[[Path, str], Document]] = {
    "huggingface": _read_json,
    "torchtitan": _read_toml,
    "megatron": _read_megatron,
    "mindformers": _read_yaml,
}
