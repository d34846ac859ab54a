"""A configuration file: its values by key, and its text with some of them replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.reduce.keys import FORMATS

__all__ = ["Document", "read_document"]


@dataclass(frozen=True)
class Document:
    """A configuration as it stands in a file.

    Attributes:
        name: of the file, for messages.
        format: one of ``FORMATS``.
        text: of the file.
        values: numbers, texts and lists by key; keys of nested tables are joined by dots.
    """

    name: str
    format: str
    text: str
    values: Mapping[str, Any]

    def with_values(self, changed: Mapping[str, Any]) -> str:
        """Return the text with other values of some keys; everything else is as it was.

        Args:
            changed: new values, by keys of :attr:`values`.
        """
        content = copy.deepcopy(json.loads(self.text))
        for key, value in changed.items():
            *tables, last = key.split(".")
            table = content
            for each in tables:
                table = table[each]
            table[last] = value
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def read_document(path: Path) -> Document:
    """Read a configuration, in the format that its name and content tell.

    Raises:
        InputError: (a ValueError) the file cannot be read, or is not a configuration.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        msg = f"{path} cannot be read: {reason}"
        raise InputError(msg) from error
    return _read_json(path, text)


def _read_json(path: Path, text: str) -> Document:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{path} is not a {FORMATS['huggingface']}: {error}"
        raise InputError(msg) from error
    if not isinstance(content, dict):
        msg = f"{path} is not a {FORMATS['huggingface']}: it must be a JSON object"
        raise InputError(msg)
    return Document(str(path), "huggingface", text, _flattened(content))


def _flattened(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their joined keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flattened(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found
