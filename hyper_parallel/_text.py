"""Text for people: one line of an error, control characters spelled out."""

from __future__ import annotations

__all__ = ["first_line", "printable"]


def first_line(value: object) -> str:
    """Return the first line of a text or an error, ``""`` if it has none: PyTorch appends its C++ stack to errors."""
    return str(value).partition("\n")[0]


def printable(text: str, *, keep: str = "") -> str:
    """Return ``text`` with every character escaped that could steer a terminal, but for those of ``keep``."""
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )
