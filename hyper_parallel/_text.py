"""Text for people: one line of an error, control characters spelled out, names that were probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["an_object", "byte_words", "first_line", "near_hint", "near_names", "printable", "ranked", "shortened"]


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNIT = 1024


def an_object(value: object) -> str:
    """Return the type of a value in words, ``an object of type int``; ``None`` for None."""
    return "None" if value is None else f"an object of type {type(value).__name__}"


def byte_words(count: int) -> str:
    """Return a number of bytes in the largest unit that it reaches, with three digits: ``2.19 KiB``."""
    value, unit = float(count), 0
    while value >= _UNIT and unit < len(_UNITS) - 1:
        value, unit = value / _UNIT, unit + 1
    digits = 0 if unit == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def first_line(value: object) -> str:
    """Return the first line of a text or an error, ``""`` if it has none: PyTorch appends its C++ stack to errors."""
    return str(value).partition("\n")[0]


def near_names(name: str, known: Iterable[str], most: int = 3, likeness: float = 0.6) -> list[str]:
    """Return the names that resemble ``name``, the nearest first.

    Args:
        name: name that is not known.
        known: names to choose from.
        most: maximum number of returned names.
        likeness: minimum similarity of the returned names, from 0 to 1.
    """
    import difflib  # imported here, because only errors need it

    return difflib.get_close_matches(name, known, most, likeness)


def near_hint(name: str, known: Iterable[str], likeness: float = 0.7) -> str:
    """Return the end of a message about an unknown name: ``; did you mean a or b?``, or nothing."""
    near = near_names(name, known, likeness=likeness)
    listed = " or ".join(filter(None, (", ".join(near[:-1]), *near[-1:])))
    return f"; did you mean {listed}?" if near else ""


def shortened(names: Sequence[str], most: int = 8) -> str:
    """Return a list of names for a message, such as ``a, b and 3 more``."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{rest}"


def printable(text: str, *, keep: str = "") -> str:
    """Return ``text`` with control characters, which could affect a terminal, escaped, except those in ``keep``."""
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )


def ranked(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
