"""``torch.distributed``'s own collectives, agreed upon before they start: users call them beside ours."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.transport.c10d.functional import guard_operators
from hyper_parallel.transport.c10d.statements import OPERATIONS, Statement, group_of

__all__ = ["guard_functions"]

_OURS = f"{__package__}."  # the transport's own calls are agreed upon before, as what they are part of
_BENEATH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep  # noqa: PTH100, PTH120 - compared with co_filename


def guard_functions(agree: Callable[..., None]) -> None:
    """Let ``torch.distributed``'s own collectives in this process be agreed upon first, too.

    Args:
        agree: called with what a rank is about to do, before the collective starts: see
            :meth:`hyper_parallel.transport.guarded.GuardedTransport.agree`.
    """
    for name in OPERATIONS:
        guarded = _guarded(name, getattr(distributed_c10d, name), agree)
        setattr(distributed_c10d, name, guarded)
        setattr(dist, name, guarded)
    guard_operators(functools.partial(_agree, agree, wait=False))


def _guarded(name: str, plain: Callable[..., Any], agree: Callable[..., None]) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001 - the only cheap way to a caller
        if caller != distributed_c10d.__name__ and not caller.startswith(_OURS):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            group = group_of(bound.arguments)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                _agree(agree, group, OPERATIONS[name](bound.arguments), wait=not bound.arguments.get("async_op"))
        return plain(*args, **kwargs)

    return call


def _agree(agree: Callable[..., None], group: Any, said: Statement, *, wait: bool) -> None:
    ranks = tuple(dist.get_process_group_ranks(group))
    agree(f"dist.{said.operation}", ranks, said.facts, said.sends, said.expects, wait=wait, beneath=_BENEATH)
