"""Selective checkpointing: outputs of chosen operators are kept and returned again when the forward runs again.

MindSpore's ``MsDispatchMode`` is called for every kernel, below autograd, which records what the mode returns. So a
kept output, returned instead of running the kernel again, has the gradient of its operator.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import Primitive

from hyper_parallel._tree import CONTAINERS, leaves, tree_map
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.intercept import LEGACY_PARTS
from hyper_parallel.platform.mindspore.ops.kernels import requires_grad
from hyper_parallel.platform.mindspore.runtime import device_type
from hyper_parallel.platform.mindspore.versions import MsDispatchMode
from hyper_parallel.transport.real.mindspore.transport import to_host

__all__ = ["Selection", "contexts", "fingerprint"]

_SAVE, _RECOMPUTE = ("MUST_SAVE", "PREFER_SAVE"), ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")
_DETACH = "StopGradient"  # called by recomputation itself; nothing to compute


@dataclass(frozen=True)
class Selection:
    """Context passed to a selective-checkpoint policy.

    Attributes:
        is_recompute: always False: the decisions of the forward are kept, and the policy is not called again.
    """

    is_recompute: bool = False


@dataclass
class _Kept:
    """A kept result, and a value that changes when the result is written to."""

    result: Any
    state: Any


_Entries = dict[str, list["_Kept | None"]]
"""Per operator, the kept result of each call in order; None where it was not kept."""


def contexts(policy: Any, *, mutation: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a forward and of its recomputation.

    Args:
        policy: names of operators to keep, or a function of ``(selection, name, *args, **kwargs)`` that decides.
        mutation: accept kept outputs that have been written to.

    Raises:
        TypeError: the policy is neither names nor a function.
    """
    kept: _Entries = defaultdict(list)
    return _Keeping(_decider(policy), kept), _Reusing(kept, mutation=mutation)


def fingerprint(result: Any) -> Any:
    """Return a checksum of the values of tensors in lists, tuples and dictionaries; None for all else."""
    if isinstance(result, (list, tuple)):
        return tuple(fingerprint(item) for item in result)
    if isinstance(result, dict):
        return tuple((key, fingerprint(item)) for key, item in result.items())
    local = result.to_local() if isinstance(result, DTensor) else result
    if not isinstance(local, Tensor):
        return None
    return zlib.crc32(np.ascontiguousarray(to_host(ops.stop_gradient(local))).view(np.uint8).data)


class _Keeping(MsDispatchMode):
    """Forward: every operator runs, and the results that the policy chooses are kept."""

    def __init__(self, keeps: Callable[..., bool], kept: _Entries) -> None:
        self._keeps, self._kept = keeps, kept

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """Run the operator and keep its result."""
        result = func(*args, **(kwargs or {}))
        if func.name == _DETACH:
            return result
        primitive, operands = _parts(args)
        kept = self._keeps(func.name, operands, kwargs or {}) and not (
            _writes(func.name, primitive) or _shares(result, (operands, kwargs))
        )
        if kept and any(requires_grad(tensor) for tensor in _tensors(result)):
            # Autograd runs inside this operator: skipping it would lose its gradient.
            msg = (
                f"create_selective_checkpoint_contexts: the output of {func.name} cannot be kept, since MindSpore "
                f"differentiates this primitive where it runs; leave {func.name!r} out, or call the function of "
                "mindspore.mint or mindspore.ops in its place"
            )
            raise UnsupportedOperatorError(msg)
        self._kept[func.name].append(_Kept(_detached(result), _state(result)) if kept else None)
        return result


class _Reusing(MsDispatchMode):
    """Recomputation: returns kept outputs and runs the other operators; each entry counts calls from zero."""

    def __init__(self, kept: _Entries, *, mutation: bool) -> None:
        self._kept, self._mutation = kept, mutation
        self._calls: dict[str, int] = {}

    def __enter__(self) -> Any:
        """Start over."""
        self._calls = {name: 0 for name, entries in self._kept.items() if any(entries)}
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Check that all results were used, unless an exception was raised; MindSpore raises one to stop early."""
        super().__exit__(kind, error, trace)
        if kind is None:
            for name, ran in self._calls.items():
                if ran != len(self._kept[name]):
                    raise UnsupportedOperatorError(_differs(name, len(self._kept[name]), f"{ran} times"))

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """Return the kept result, or run the operator."""
        if func.name not in self._calls:
            return func(*args, **(kwargs or {}))
        entries, call = self._kept[func.name], self._calls[func.name]
        if call == len(entries):
            raise UnsupportedOperatorError(_differs(func.name, call, "more often"))
        self._calls[func.name] += 1
        kept = entries[call]
        if kept is None:
            return func(*args, **(kwargs or {}))
        if not self._mutation and _state(kept.result) != kept.state:
            msg = (
                f"selective checkpointing: the kept output of {func.name}, call {call + 1} of {len(entries)}, was "
                "written to after it was computed; leave it out of the policy, or pass "
                "allow_cache_entry_mutation=True if what was written is what running again would compute"
            )
            raise UnsupportedOperatorError(msg)
        return _detached(kept.result)


def _differs(name: str, times: int, now: str) -> str:
    return (
        f"selective checkpointing: {name} ran {times} times in forward and {now} when running again, so kept "
        "outputs cannot be matched with calls; the function must make the same calls both times"
    )


def _decider(policy: Any) -> Callable[..., bool]:
    """The policy as a predicate of ``(name, args, kwargs)``.

    Raises:
        TypeError: it is neither names nor callable, or returns neither a bool nor the name of a policy.
    """
    if isinstance(policy, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in policy):
        names = frozenset(policy)
        return lambda name, _args, _kwargs: name in names
    if not callable(policy):
        msg = (
            f"create_selective_checkpoint_contexts: policy_fn_or_list is {policy!r}; it must be a list of names of "
            "MindSpore's operators, as ['MatMulExt', 'Dense'], or a function of (context, name, *args, **kwargs)"
        )
        raise TypeError(msg)
    selection = Selection()

    def keeps(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        answer = policy(selection, name, *args, **kwargs)
        word = getattr(answer, "name", None)
        if isinstance(answer, bool) or word in _SAVE + _RECOMPUTE:
            return answer if isinstance(answer, bool) else word in _SAVE
        msg = (
            f"create_selective_checkpoint_contexts: the policy returned {answer!r} for {name}; it must be a bool or a "
            f"policy named {', '.join(_SAVE + _RECOMPUTE)}"
        )
        raise TypeError(msg)

    return keeps


def _state(result: Any) -> Any:
    """A value that changes with writes: a checksum on CPU, whose tensors do not count assignments to elements."""
    if device_type() == "cpu":
        return fingerprint(result)
    return [tensor._version for tensor in _tensors(result)]


def _parts(args: Any) -> tuple[Any, tuple[Any, ...]]:
    """The legacy primitive or None, and the arguments of the operator."""
    legacy = len(args) == LEGACY_PARTS and isinstance(args[0], Primitive)
    return (args[0], tuple(args[2])) if legacy else (None, tuple(args))


def _writes(name: str, primitive: Any) -> bool:
    """True for operators that write to their arguments; recomputation must repeat the write."""
    return name.startswith("Inplace") or (primitive is not None and bool(primitive.attrs.get("side_effect_mem")))


def _shares(result: Any, operands: Any) -> bool:
    """True for views, which cost nothing to compute again."""
    return not _storages(result).isdisjoint(_storages(operands))


def _storages(tree: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(tree)}


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in leaves(tree, CONTAINERS) if isinstance(leaf, Tensor)]


def _detached(result: Any) -> Any:
    """Return detached aliases, so that autograd does not annotate the tensors themselves."""
    return tree_map(lambda leaf: ops.stop_gradient(leaf) if isinstance(leaf, Tensor) else leaf, result)
