"""Real text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BEGIN", "SOURCES", "text_batches"]

SOURCES = ("this.py", "textwrap.py", "heapq.py")
BEGIN = 256
"""Token that starts every sequence; bytes are tokens 0 to 255."""


def text_batches(count: int, batch: int, length: int) -> list[tuple[Any, Any]]:
    """``count`` pairs of tokens and labels, int64 of (batch, length); a label is the token that follows.

    The same Python gives the same batches; no two sequences overlap.

    Raises:
        ValueError: the text is too short.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in SOURCES)
    wanted = count * batch * length
    if wanted > len(text):
        msg = f"{count} batches of {batch} x {length} tokens need {wanted} bytes, the text has {len(text)}"
        raise ValueError(msg)
    labels = np.frombuffer(text[:wanted], np.uint8).astype(np.int64).reshape(count, batch, length)
    tokens = np.concatenate([np.full((count, batch, 1), BEGIN, np.int64), labels[:, :, :-1]], axis=2)
    return list(zip(tokens, labels, strict=True))
