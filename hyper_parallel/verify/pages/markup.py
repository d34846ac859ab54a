"""Text and markup are two types: text is escaped wherever it enters a page, markup says that it is one."""

from __future__ import annotations

import html
from dataclasses import dataclass

__all__ = ["Html", "Text", "escape"]


@dataclass(frozen=True)
class Html:
    """Markup that is right as it is.

    Attributes:
        text: the markup.
    """

    text: str

    def __str__(self) -> str:
        """The markup."""
        return self.text


Text = str | int | float | Html


def escape(value: Text) -> str:
    """Markup of anything that may enter a page: :class:`Html` as it is, everything else escaped."""
    return value.text if isinstance(value, Html) else html.escape(str(value))
