"""Names of values, steps and ranks in reports: "the gradient of head.weight", "after step 2", "ranks 0-5"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = [
    "count_words",
    "numbered",
    "plural",
    "ranks_words",
    "state_parameter",
    "summary",
    "value_words",
    "when_words",
]

_NAMES_SHOWN = 4
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
_UPDATED = ("state", "weight", "buffer", "saved")  # kinds that are recorded after the optimizer's step
_COUNTED = {
    "value": ("recorded value", "recorded values"),
    "output": ("output", "outputs"),
    "mask": ("dropout mask", "dropout masks"),
    "choice": ("choice", "choices"),
    "loss": ("loss", "losses"),
    "norm": ("gradient norm or clip factor", "gradient norms and clip factors"),
    "gradient": ("gradient", "gradients"),
    "state": ("optimizer state", "optimizer states"),
    "weight": ("parameter", "parameters"),
    "buffer": ("buffer", "buffers"),
    "rate": ("learning rate", "learning rates"),
    "saved": ("saved tensor", "saved tensors"),
    "dtype": ("dtype", "dtypes"),
    "reduction": ("reduction", "reductions"),
    "logged": ("logged number", "logged numbers"),
    "sample": ("drawn sample", "drawn samples"),
    "call": ("tensor of an operator", "tensors of operators"),
}


def value_words(kind: str, name: str) -> str:
    """Return the name of a value in reports: ``the gradient of head.weight``, ``the loss``, ``parameter head.weight``.

    Args:
        kind: one of ``KINDS`` in ``verify/frameworks/contract/records.py``.
        name: name of the record.
    """
    if kind in {"loss", "norm"}:
        return f"the {name}"
    if kind in {"weight", "buffer", "value", "saved", "logged"}:
        return f"{_COUNTED[kind][0]} {name}"
    if kind in {"call", "sample"}:
        return name if kind == "call" else f"the samples of {name}"
    if kind == "state":
        entry = name.rpartition(":")[2]
        return f"optimizer state {entry} of {state_parameter(name)}"
    if kind == "output" and (not name or name.startswith("(model)")):
        return f"the model's output{name.removeprefix('(model)')}"
    return f"the {_COUNTED.get(kind, (kind, kind))[0]} of {name}"


def count_words(kind: str, count: int) -> str:
    """Return a count of values of a kind: ``1 loss``, ``12 gradients``."""
    return f"{count} {_COUNTED.get(kind, (kind,))[0] if count == 1 else plural(kind)}"


def plural(kind: str) -> str:
    """Return the plural of a kind: ``losses``, ``parameters``."""
    return _COUNTED.get(kind, (kind, f"{kind}s"))[1]


def state_parameter(name: str) -> str:
    """Return the parameter of an entry of the optimizer's state."""
    return name.rpartition(":")[0] or name


def when_words(kind: str, step: int, call: int = 0) -> str:
    """Return the step in which or after which a value was recorded, in words.

    Args:
        kind: kind of the value.
        step: number of optimizer steps completed before the value; -1 before training.
        call: number of earlier values of this kind and name in the step.
    """
    if step < 0:
        return "before training"
    again = f" (occurrence {call + 1})" if call else ""
    return f"{'after' if kind in _UPDATED else 'in'} step {step + 1}{again}"


def ranks_words(ranks: Iterable[int]) -> str:
    """Return ``rank 1``, ``ranks 0, 2`` or ``ranks 0-5, 7``; four or more consecutive ranks are written as a range."""
    return numbered("rank", ranks)


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """Return a noun with numbers, in the format of :func:`ranks_words`: ``epochs 1-7``."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"{noun}{'' if len(ordered) == 1 else 's'} {', '.join(parts)}"


def summary(values: Sequence[tuple[str, str]]) -> str:
    """Return a short list of values, with layer numbers as ``*``: ``gradients of layers.*.weight, head.weight``.

    Args:
        values: kind and name of each value.
    """
    names: dict[str, dict[str, None]] = {}
    for kind, name in values:
        short = state_parameter(name) if kind == "state" else name
        names.setdefault(kind, {}).setdefault(_LAYER_NUMBER.sub("*", short))
    return "; ".join(_listed(kind, list(patterns)) for kind, patterns in names.items())


def _listed(kind: str, patterns: list[str]) -> str:
    if len(patterns) == 1:
        return f"optimizer state of {patterns[0]}" if kind == "state" else value_words(kind, patterns[0])
    more = len(patterns) - _NAMES_SHOWN
    shown = ", ".join(patterns[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    if kind in {"loss", "norm"}:
        return f"the {shown}"
    words = "optimizer state" if kind == "state" else plural(kind)
    return f"{words} {shown}" if kind in {"weight", "buffer", "value", "saved"} else f"{words} of {shown}"
