"""Compare a call of an operator on DTensors with the call on plain tensors: values, types and gradients."""

import contextlib
import functools
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import cases
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.dtensor.random import manual_seed
from hyper_parallel.errors import (
    CollectiveMismatchError,
    HyperParallelError,
    RankFailedError,
    ShardMismatchError,
)
from hyper_parallel.platform.torch.dtensor import wrap
from hyper_parallel.verify.simulate import simulate

# Operators that return uninitialized memory, whose values are not compared.
UNSET = frozenset({"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted",
                   "resize_", "resize_as_"})  # fmt: skip
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-4, torch.complex64: 2e-4,
             torch.float16: 2e-2, torch.bfloat16: 5e-2}  # fmt: skip
CRASHES = 3
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
ORDER = ("wrong", "plain", "crash", "rejects", "ok")


@dataclass
class Outcome:
    """The result of checking an entry.

    Attributes:
        name: of the entry.
        outcome: the worst of its checks, or ``unexercised`` or ``no tensor``.
        counts: checks per outcome.
        backward: checks that compared gradients.
        messages: for each outcome but ok, what was seen first and where.
    """

    name: str
    outcome: str = "unexercised"
    counts: dict[str, int] = field(default_factory=dict)
    backward: int = 0
    messages: dict[str, str] = field(default_factory=dict)

    def add(self, kind, message, where):
        """Count one check."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind != "ok":
            self.messages.setdefault(kind, f"{where}: {message}")
        self.outcome = next(kind for kind in ORDER if self.counts.get(kind))


@dataclass
class Plain:
    """The single-device run."""

    outs: Any
    grads: list[Any] | None
    wants: list[bool]
    cotangents: list[Any]
    certain: bool
    unset: bool
    bound: float


def function(op, variant):
    """The callable of a variant: function (in a mode), method, or in-place method on a copy of its operand."""
    if variant == "function":
        return op.op
    if variant == "method":
        return op.method_variant
    if variant in MODES:
        return functools.partial(_in_mode, op.op, MODES[variant])
    if variant == "out":
        return functools.partial(_into, op.op) if op.supports_out else None
    if op.inplace_variant is None:
        return None
    return lambda x, *args, **kwargs: op.inplace_variant(x.clone(), *args, **kwargs)


def _in_mode(op, mode, *args, **kwargs):
    """A call without gradients; what it returns may be written afterwards."""
    with mode():
        result = op(*args, **kwargs)
    return tree_map(lambda leaf: leaf.clone() if type(leaf) is torch.Tensor else leaf, result)


def _into(op, *args, **kwargs):
    """A call with ``out=``, which is not differentiable."""
    with torch.no_grad():
        result = op(*args, **kwargs)
        if not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            msg = "not only tensors"
            raise TypeError(msg)
        out = tree_map(torch.zeros_like, result)
        return op(*args, **kwargs, out=out if isinstance(out, torch.Tensor) else tuple(tree_leaves(out))), out


def check_entry(name, op, dtype, meshes, variant="function", count=cases.SAMPLES):
    """Check every sample of one entry in every placement on every mesh."""
    warnings.simplefilter("ignore")
    outcome = Outcome(name)
    call = function(op, variant)
    if call is None:
        return outcome
    chosen = cases.samples(op, dtype, count)
    exercised = [sample for sample in chosen if sample.tensors]
    if chosen and not exercised:
        outcome.outcome = "no tensor"
    certain = op.name not in UNSET and all(_repeats(call, sample) for sample in exercised)
    for sample in exercised:
        try:
            plain = run_plain(call, op, sample, certain)
        except Exception as error:  # noqa: BLE001 - an operator that this build cannot run at all
            outcome.messages.setdefault("unexercised", f"{sample.text}: {type(error).__name__}: {error}"[:300])
            continue
        for mesh in meshes:
            _check_sample(outcome, call, sample, plain, mesh)
    return outcome


# -- the plain run -----------------------------------------------------------------------------------------------------


def _repeats(call, sample):
    """Return False for a call that samples random numbers."""
    try:
        first, *others = (tree_leaves(_plain_outs(call, sample, seed)) for seed in range(5))
    except Exception:  # noqa: BLE001 - it cannot run, which is reported elsewhere
        return True
    return all(len(first) == len(other) and all(map(_equal, first, other)) for other in others)


def run_plain(call, op, sample, certain):
    """Outputs and gradients of the single-device run; gradients where PyTorch gives any."""
    outs = _plain_outs(call, sample, 1)
    floating = [value.is_floating_point() or value.is_complex() for value in sample.values]
    marked = [want and value.requires_grad for want, value in zip(floating, sample.values, strict=True)]
    plain = Plain(outs, None, [False] * len(floating), [], certain, op.name in UNSET, _bound(sample))
    if not op.supports_autograd or getattr(call, "func", None) is _in_mode:
        return plain
    for wants in (floating, marked):
        with contextlib.suppress(Exception):
            grads, seeds = _plain_grads(call, sample, wants)
            plain.grads, plain.cotangents, plain.wants = grads, seeds, wants
            break
    return plain


def _bound(sample):
    """The tolerance of the coarsest operand dtype."""
    return max((TOLERANCE.get(value.dtype, 0.0) for value in sample.values), default=0.0)


def _plain_outs(call, sample, seed):
    torch.manual_seed(seed)
    args, kwargs = sample.arguments([value.detach().clone() for value in sample.values])
    return call(*args, **kwargs)


def _plain_grads(call, sample, wants):
    torch.manual_seed(1)
    leaves = [value.detach().clone().requires_grad_(want) for value, want in zip(sample.values, wants, strict=True)]
    args, kwargs = sample.arguments(leaves)
    roots = _roots(sample.process(call(*args, **kwargs)))
    seeds = [torch.randn_like(root) if root is not None else None for root in roots]
    return _grads(roots, leaves, wants, seeds), seeds


def _roots(outs):
    return [out if isinstance(out, torch.Tensor) and out.requires_grad else None for out in tree_leaves(outs)]


def _grads(roots, leaves, wants, seeds):
    pairs = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if root is not None and seed is not None]
    wanted = [leaf for leaf, want in zip(leaves, wants, strict=True) if want]
    if not pairs or not wanted:
        return [None] * len(leaves)
    grads = iter(
        torch.autograd.grad([root for root, _ in pairs], wanted, [seed for _, seed in pairs], allow_unused=True)
    )
    return [next(grads) if want else None for want in wants]


# -- the distributed run -----------------------------------------------------------------------------------------------


def _check_sample(outcome, call, sample, plain, mesh):
    combos = cases.placements(sample, outcome.name, len(mesh))
    world = math.prod(mesh)
    start, crashes = 0, 0
    while start < len(combos) and crashes < CRASHES:
        done = [{} for _ in range(world)]
        run = _Run(call, sample, plain, combos, start, done, mesh)
        error = None
        try:
            simulate(run.rank, world, "torch", timeout=240)
        except RankFailedError as failed:
            error = failed
        reached = min(max(by_index, default=start) for by_index in done)
        for index in range(start, reached + 1):
            where = f"{sample.text} as {_spelled(combos[index])} on {'x'.join(map(str, mesh))}"
            kind, message = _merged([by_index.get(index) for by_index in done], error)
            outcome.add(kind, message[:600], where)
            outcome.backward += plain.grads is not None
        if error is None and reached == len(combos) - 1:
            return
        crashes += 1
        start = reached + 1


def _spelled(combo):
    return " ".join(
        "/".join("R" if placement.is_replicate() else f"S({placement.dim})" for placement in places) for places in combo
    )


def _merged(outcomes, error):
    """The outcome of all ranks, which have to agree."""
    kinds = {outcome[0] if outcome is not None else "crash" for outcome in outcomes}
    if kinds & {"rejects"} and kinds - {"rejects"}:
        return "crash", f"ranks disagree: {outcomes} {_cause(error)}"
    for kind in ORDER:
        for outcome in outcomes:
            if outcome is not None and outcome[0] == kind:
                return outcome
        if kind == "crash" and None in outcomes:
            return "crash", _cause(error)
    return "crash", _cause(error)


def _cause(error):
    cause = error if error is None or error.__cause__ is None else error.__cause__
    return f"{type(cause).__name__}: {cause}"


class _Run:
    """A sample on a world, in each combination of placements."""

    def __init__(self, call, sample, plain, combos, start, done, shape):
        self.call, self.sample, self.plain, self.combos, self.start = call, sample, plain, combos, start
        self.done, self.shape = done, shape
        self.reference = None

    def rank(self):
        """The body of each rank."""
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=[f"m{axis}" for axis in range(len(self.shape))])
        mine = self.done[mesh.rank]
        for index in range(self.start, len(self.combos)):
            try:
                if index == self.start and not self.plain.certain:
                    whole = self._wholes(mesh, self.combos[0])
                    self.reference = self.reference or whole  # the first rank's, for all ranks
                mine[index] = self._check(mesh, self.combos[index])
            except (CollectiveMismatchError, ShardMismatchError) as error:  # noqa: PERF203 - each is tried by itself
                mine[index] = ("wrong", f"{type(error).__name__}: {error}")
                raise
            except HyperParallelError as error:
                mine[index] = ("rejects", f"{type(error).__name__}: {error}")
            except Exception as error:
                mine[index] = ("crash", f"{type(error).__name__}: {error}")
                raise

    def _run(self, mesh, combo):
        manual_seed(7)
        torch.manual_seed(mesh.rank)  # ranks draw apart: only the library's stream is common
        leaves = []
        for value, place, want in zip(self.sample.values, combo, self.plain.wants, strict=True):
            if value.layout is not torch.strided:
                leaves.append(DTensor.from_local(value.detach(), mesh, place, shape=tuple(value.shape)))
                continue
            layout = Layout.place(mesh, place, tuple(value.shape))
            local = value.detach()[tuple(slice(*bounds) for bounds in layout.local_box())].clone()
            leaves.append(wrap(local.requires_grad_(want), layout))
        args, kwargs = self.sample.arguments(leaves)
        return leaves, self.call(*args, **kwargs)

    def _wholes(self, mesh, combo):
        """A random operator's outputs and gradients on replicated operands, the reference for other placements."""
        leaves, outs = self._run(mesh, combo)
        values = [out.full_tensor().detach() if isinstance(out, DTensor) else out for out in tree_leaves(outs)]
        return values, self._gradients(mesh, leaves, outs)

    def _gradients(self, mesh, leaves, outs):
        if self.plain.grads is None:
            return None
        roots = _roots(self.sample.process(outs))
        whole = (Replicate(),) * mesh.ndim
        seeds = [
            None if seed is None else wrap(seed, Layout.place(mesh, whole, tuple(seed.shape)))
            for seed in self.plain.cotangents
        ]
        grads = _grads(roots, leaves, self.plain.wants, seeds)
        return [None if grad is None else grad.full_tensor() for grad in grads]

    def _check(self, mesh, combo):
        reference = self.reference
        leaves, outs = self._run(mesh, combo)
        expected = self.plain.outs
        (results, spec), (wanted, plain_spec) = tree_flatten(outs), tree_flatten(expected)
        if spec != plain_spec:
            return "wrong", f"returns {spec}, should return {plain_spec}"
        lost = [
            f"output {index} is a plain {type(result).__name__}"
            for index, (result, plain) in enumerate(zip(results, wanted, strict=True))
            if isinstance(plain, torch.Tensor) and not isinstance(result, DTensor)
        ]
        if lost:
            return "plain", "; ".join(lost)
        unlike = [
            f"output {index} {_unlike(result, plain)}"
            for index, (result, plain) in enumerate(zip(results, wanted, strict=True))
            if isinstance(plain, torch.Tensor) and _unlike(result, plain)
        ]
        if unlike:
            return "wrong", "; ".join(unlike)
        problems = []
        for index, (result, plain) in enumerate(zip(results, wanted, strict=True)):
            problem = self._value(result, plain, None if reference is None else reference[0][index])
            if problem:
                problems.append(f"output {index} {problem}")
        grads = self._gradients(mesh, leaves, outs)
        for index, grad in enumerate(grads or ()):
            source = self.plain.grads if reference is None else reference[1]
            problem = _gradient(grad, source[index], self.plain.bound) if self.plain.wants[index] else None
            if problem:
                problems.append(f"gradient of operand {index} {problem}")
        return ("wrong", "; ".join(problems)) if problems else ("ok", "")

    def _value(self, result, plain, same):
        if not isinstance(plain, torch.Tensor):
            return None if result == plain or not self.plain.certain else f"is {result!r}, should be {plain!r}"
        full = result.full_tensor()
        if full.shape != plain.shape:
            return f"is {list(full.shape)} as a whole, should be {list(plain.shape)}"
        if self.plain.certain:
            return difference(full, plain, self.plain.bound)
        return None if self.plain.unset else difference(full, same, self.plain.bound)


# -- comparing ---------------------------------------------------------------------------------------------------------


def _equal(value, other):
    if not isinstance(value, torch.Tensor):
        return value == other
    return value.shape == other.shape and difference(value, other) is None


def _gradient(grad, wanted, bound):
    if wanted is None or grad is None:
        present = wanted if grad is None else grad
        if present is None or not present.any():
            return None
        return "is missing" if grad is None else "is there, and should not be"
    return _unlike(grad, wanted) or difference(grad, wanted, bound)


def _unlike(result, wanted):
    if result.shape != wanted.shape:
        return f"has shape {list(result.shape)}, should have {list(wanted.shape)}"
    if result.dtype != wanted.dtype:
        return f"has dtype {result.dtype}, should have {wanted.dtype}"
    return None


def difference(result, wanted, bound=0.0):
    """Describe the difference between two plain tensors of one shape, or return None."""
    if wanted.layout is not torch.strided:
        result, wanted = result.to_dense(), wanted.to_dense()
    if wanted.dtype not in TOLERANCE:
        wrong = int((result != wanted).sum())
        return f"differs in {wrong} of {wanted.numel()} elements" if wrong else None
    if not wanted.numel():
        return None
    bound = max(bound, TOLERANCE[wanted.dtype])
    finite = wanted[wanted.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    same = torch.isclose(result, wanted, rtol=bound, atol=bound * scale, equal_nan=True)
    if bool(same.all()):
        return None
    at = tuple(int(index) for index in (~same).nonzero()[0])
    return f"is {result[at].item()!r} at {at}, should be {wanted[at].item()!r} ({int((~same).sum())} of {same.numel()})"
