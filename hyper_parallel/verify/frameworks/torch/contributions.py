"""What each backward of a PyTorch program adds to the gradients of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
from hyper_parallel.verify.frameworks.torch.local_values import read_part

__all__ = ["noting_contributions"]


@contextmanager
def noting_contributions(log: RecordLog, named: Mapping[str, Any]) -> Iterator[None]:
    """Note by how much the backward inside changes each gradient, in the step for which the limits ask for it.

    Args:
        log: of the rank.
        named: parameters by name.
    """
    if log.limits.contributions != log.step:
        yield
        return
    before = _gradients(named)
    yield
    added = {name: value - before[name] if name in before else value for name, value in _gradients(named).items()}
    log.notes.setdefault("contributions", []).append(added)


def _gradients(named: Mapping[str, Any]) -> dict[str, Any]:
    taken = {name: read_part(parameter, parameter.grad) for name, parameter in named.items()}
    return {name: value.array for name, value in taken.items() if value is not None}
