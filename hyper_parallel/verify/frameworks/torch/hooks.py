"""Connects a recorder to the modules, backwards and optimizers of the program that runs in a context.

PyTorch's hooks and the functions replaced here are shared by all threads of the process. Each call finds the recorder
of its own rank in a context variable; without a recorder, the call behaves as in PyTorch. If a program imported
``dropout`` or ``backward`` by name before the recording, its calls are not recorded; clipping always is.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint, distributed_c10d, fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.torch.intercept import RECORDED
from hyper_parallel.platform.torch.versions import function_table, loader_iterator, stand_in, transforms_active
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog, use_log
from hyper_parallel.verify.frameworks.torch import applied, thresholds
from hyper_parallel.verify.frameworks.torch.attention_mask import attention_mask, masked_attention
from hyper_parallel.verify.frameworks.torch.decisions import OPERATORS, POOLS, decided, pooled
from hyper_parallel.verify.frameworks.torch.dropouts import drop
from hyper_parallel.verify.frameworks.torch.half_precision import REDUCTIONS
from hyper_parallel.verify.frameworks.torch.local_values import lent
from hyper_parallel.verify.frameworks.torch.pretended.installation import asked, install
from hyper_parallel.verify.frameworks.torch.recorder import Recorder
from hyper_parallel.verify.frameworks.torch.stack_clipping import imported_clippings
from hyper_parallel.verify.frameworks.torch.upcast import upcast, without_autocast, without_half_precision

__all__ = ["inherited_world", "recording"]

_RECORDER: ContextVar[Recorder | None] = ContextVar("hyper_parallel_recorder", default=None)
_POLICIES = (fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy)
_NORMS = (
    (torch.linalg, "vector_norm"),
    (torch.linalg, "norm"),
    (torch, "norm"),
    (torch, "_foreach_norm"),
    (torch.Tensor, "norm"),
)
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
_IN_PLACE = ("uniform_", "normal_", "bernoulli_", "exponential_", "log_normal_", "cauchy_")
_DRAWING = ("rand", "randn", "rand_like", "randn_like", "normal", "bernoulli")

_DRAWS = (
    *((torch.Tensor, name) for name in (*_IN_PLACE, "bernoulli")),
    *((torch, name) for name in _DRAWING),
)
"""Owners and names of the functions."""


@contextmanager
def recording(log: RecordLog) -> Iterator[None]:
    """Record the PyTorch program that runs inside this context into ``log``.

    Args:
        log: log of the rank; its perturbation, if any, is applied.
    """
    if log.limits.pretend:
        install(log.limits.pretend)
    recorder, transport, before = Recorder(log), active_transport(), _compiled()
    leave = _INSTALLATION.enter()
    try:
        if transport is not None:
            transport.at_end(leave)  # a rank that is abandoned, for example in a deadlock, never leaves this context
        token = _RECORDER.set(recorder)
        try:
            with use_log(log), upcast(log.limits.upcast), lent() if log.limits.observe else nullcontext():
                yield
        finally:
            _RECORDER.reset(token)
            recorder.finish()
            log.notes.update({"uncompiled": True} if _ran_uncompiled(before) else {})
            log.notes.update({"pretended": asked()} if log.limits.pretend else {})
    finally:
        leave()


def _compiled() -> tuple[int, int, int]:
    """Return the compiler's counters in this process: requested frames, graphs, and graph breaks."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is None:
        return 0, 0, 0
    counters: Any = compiler.counters
    return counters["frames"]["total"], counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _ran_uncompiled(before: tuple[int, int, int]) -> bool:
    """Return whether the compiler captured no complete graph since ``before``; recorded modules cause graph breaks."""
    frames, graphs, breaks = (now - then for now, then in zip(_compiled(), before, strict=True))
    return frames > 0 and (breaks > 0 or not graphs)


@contextmanager
def inherited_world() -> Iterator[None]:
    """Inside this context, ``init_process_group`` keeps the world that a launched process has joined.

    This has no effect on simulated ranks. The world uses gloo, even if the program requests a different backend.
    """
    transport = active_transport()
    if transport is None or transport.backend == "simulated" or not distributed.is_initialized():
        yield
        return
    plain = distributed.init_process_group

    @functools.wraps(plain)
    def keep(*args: Any, **kwargs: Any) -> None:
        if not distributed.is_initialized():
            plain(*args, **kwargs)

    distributed.init_process_group = distributed_c10d.init_process_group = keep
    try:
        yield
    finally:
        distributed.init_process_group = distributed_c10d.init_process_group = plain


class _Installation:
    """The hooks and replaced functions of PyTorch while at least one recording runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[object] = set()
        self._plain: list[tuple[Any, str, Any]] = []
        self._handles: list[Any] = []
        self._imported = 0

    def enter(self) -> Callable[[], None]:
        """Start a recording; return the function that ends it, callable from any thread and more than once."""
        mark = object()
        with self._lock:
            self._running.add(mark)
            if len(self._running) == 1:
                self._replace_functions()
                self._handles = [
                    register_module_forward_hook(_keep_inner),
                    register_optimizer_step_pre_hook(_before_step),
                    register_optimizer_step_post_hook(_after_step),
                ]
        return functools.partial(self._leave, mark)

    def _leave(self, mark: object) -> None:
        with self._lock:
            if mark not in self._running:
                return
            self._running.remove(mark)
            if self._running:
                return
            for handle in self._handles:
                handle.remove()
            for owner, name, plain in reversed(self._plain):
                function_table._get_builtin_table().pop(id(getattr(owner, name)), None)  # noqa: SLF001 - undoes stand_in
                setattr(owner, name, plain)
            self._plain, self._imported = [], 0

    def follow_imports(self) -> None:
        """Replace functions of training stacks that the program has imported since the last call."""
        if len(sys.modules) == self._imported:
            return
        with self._lock:
            self._imported = len(sys.modules)
            for clipping in imported_clippings():
                if self._running and not hasattr(getattr(clipping.owner, clipping.name), RECORDED):
                    self._replace(
                        clipping.owner, clipping.name, functools.partial(clipping.replaced, record=_record_clipping)
                    )

    def _replace_functions(self) -> None:
        self._replace(torch.autocast, "__init__", without_autocast)
        for policy in _POLICIES:
            self._replace(policy, "__init__", without_half_precision)
        self._replace(nn.Module, "__call__", _module_call)
        self._replace(torch.autograd, "backward", _backward)
        self._replace(nn.Module, "zero_grad", _zero_grad)
        self._replace(Optimizer, "__init__", functools.partial(_made, add=Recorder.add_optimizer))
        self._replace(DeviceMesh, "__init__", functools.partial(_made, add=Recorder.add_mesh))
        self._replace(clip_grad, "_clip_grads_with_norm_", _clipped)
        self._replace(nn.utils, "clip_grads_with_norm_", _clipped)
        self._replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", _clipped_by_fsdp)
        for owner, name in ((torch, "save"), (checkpoint, "save"), *_safetensors()):
            self._replace(owner, name, _save)
        self._replace(checkpoint, "async_save", _async_save)
        for owner, name in _NORMS:
            self._replace(owner, name, _norm)
        for name in _DROPOUTS:
            self._replace(nn.functional, name, _dropout)
        for owner, name in _DRAWS:
            self._replace(owner, name, functools.partial(_draw, name))
        for name, argument in REDUCTIONS.items():
            if hasattr(distributed, name):
                self._replace(distributed, name, functools.partial(_reduction, argument))
        for make, functions in _OPERATORS:
            for owner, name in functions:
                self._replace(owner, name, functools.partial(make, name))
        self._replace(nn.functional, "scaled_dot_product_attention", _attention)
        self._replace(DataLoader, "__iter__", _pass)
        self._replace(loader_iterator, "_next_index", _indices)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        plain = getattr(owner, name)
        self._plain.append((owner, name, plain))
        replacement = functools.wraps(plain)(make(plain))
        setattr(replacement, RECORDED, plain)
        setattr(owner, name, replacement)
        stand_in(replacement, plain)


_INSTALLATION = _Installation()


def _active() -> Recorder | None:
    """Return the recorder of this rank, unless it is paused."""
    recorder = _RECORDER.get()
    return None if recorder is None or recorder.log.paused else recorder


def _deciding() -> Recorder | None:
    """Return the recorder of this rank if it may replace draws, choices or computations of the program."""
    recorder = _active()
    return None if recorder is None or recorder.log.limits.observe else recorder


def _module_call(plain: Any) -> Any:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = _active()
        if recorder is None or torch.compiler.is_compiling():
            return plain(module, *args, **kwargs)
        _INSTALLATION.follow_imports()
        return recorder.call(plain, module, args, kwargs)

    return call


def _pass(plain: Any) -> Any:
    def iterate(loader: DataLoader[Any]) -> Any:
        recorder = _active()
        if recorder is None or recorder.draws is None:
            return plain(loader)
        made = recorder.draws.begin(loader)
        iterator = plain(loader)
        recorder.draws.iterates(iterator, made)
        return iterator

    return iterate


def _indices(plain: Any) -> Any:
    def next_index(iterator: Any) -> Any:
        recorder = _active()
        draws = None if recorder is None else recorder.draws
        try:
            indices = plain(iterator)
        except StopIteration:
            if draws is not None:
                draws.drawn(iterator, None)
            raise
        if draws is not None:
            draws.drawn(iterator, indices)
        return indices

    return next_index


def _backward(plain: Any) -> Any:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _active()
        if recorder is None:
            return plain(tensors, *args, **kwargs)
        return recorder.backward(plain, tensors, args, kwargs)

    return backward


def _zero_grad(plain: Any) -> Any:
    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        recorder = _active()
        if recorder is not None:
            recorder.before_zero()
        plain(module, *args, **kwargs)

    return zero_grad


def _made(plain: Any, add: Callable[[Recorder, Any], None]) -> Any:
    """Return a constructor that passes the new object to the active recorder."""

    def constructor(made: Any, *args: Any, **kwargs: Any) -> None:
        plain(made, *args, **kwargs)
        recorder = _active()
        if recorder is not None:
            add(recorder, made)

    constructor.__name__ = "__init__"  # shown in tracebacks
    return constructor


def _clipped(plain: Any) -> Any:
    def clip(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        call = functools.partial(plain, parameters, max_norm, total_norm, *args, **kwargs)
        recorder = _active()
        return call() if recorder is None else recorder.record_clipping(parameters, call, float(max_norm), total_norm)

    return clip


def _record_clipping(held: Any, call: Callable[[], Any], largest: float, total: Any) -> Any:
    """Record a call of a training stack's own clipping function."""
    recorder = _active()
    if recorder is None:
        return call()
    return recorder.record_clipping(held, call, largest, torch.as_tensor(total, dtype=torch.float32))


def _clipped_by_fsdp(plain: Any) -> Any:
    def clip_grad_norm_(module: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        call = functools.partial(plain, module, max_norm, norm_type)
        recorder = _active()
        return call() if recorder is None else recorder.record_clipping(module.parameters(), call, float(max_norm))

    return clip_grad_norm_


def _safetensors() -> list[tuple[Any, str]]:
    """Return the function of safetensors that writes PyTorch tensors, if it is installed."""
    try:
        import safetensors.torch as written
    except ImportError:
        return []
    return [(written, "save_file")]


def _save(plain: Any) -> Any:
    def save(state: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _active()
        if recorder is not None:
            recorder.record_saved(state)
        return plain(state, *args, **kwargs)

    return save


def _async_save(plain: Any) -> Any:
    def async_save(*args: Any, **kwargs: Any) -> Any:
        transport = active_transport()
        kind = kwargs.get("async_checkpointer_type")
        if getattr(kind, "name", "") == "PROCESS" and transport is not None and transport.backend == "simulated":
            msg = (
                "async_save(async_checkpointer_type=PROCESS) starts a process that joins those of other ranks over a "
                "network, which simulated ranks do not have; call dcp.save in verified runs"
            )
            raise UnsupportedOnBackend(msg)
        return plain(*args, **kwargs)

    return async_save


def _norm(plain: Any) -> Any:
    def norm(values: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _active()
        perturbation = None if recorder is None else recorder.log.perturbation
        many = isinstance(values, (list, tuple))
        tensors = list(values) if many else [values]
        if (
            perturbation is None
            or {"dtype", "out"} & set(kwargs)
            or any(getattr(tensor, "dtype", None) != torch.float32 for tensor in tensors)
            or not perturbation.computes_exact_norms()
        ):
            return plain(values, *args, **kwargs)
        exact = plain([tensor.double() for tensor in tensors] if many else values.double(), *args, **kwargs)
        return [result.float() for result in exact] if many else exact.float()

    return norm


def _dropout(plain: Any) -> Any:
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002 - PyTorch's signature
        recorder = _deciding()
        if recorder is None or not training or p <= 0 or recorder.drops:
            return plain(input, p, training, inplace)
        recorder.drops = True  # a torch function mode may call this function again inside ``plain``
        try:
            log = recorder.log
            redraw, replays = log.place is None, bool(log.limits.replay)
            return drop(plain, recorder.decided.mask, input, p, inplace=inplace, redraw=redraw, replays=replays)
        finally:
            recorder.drops = False

    return dropout


def _attention(plain: Any) -> Any:
    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        recorder = _deciding()
        if recorder is None or dropout_p <= 0 or torch.compiler.is_compiling():
            return plain(query, key, value, attn_mask, dropout_p, *args, **kwargs)
        state = torch.get_rng_state()
        output = plain(query, key, value, attn_mask, dropout_p, *args, **kwargs)
        again = functools.partial(plain, dropout_p=dropout_p, enable_gqa=kwargs.get("enable_gqa", False))
        mask = recorder.decided.attention_mask(attention_mask(again, query, key, state))
        if mask is None:
            return output
        return masked_attention(mask, query, key, value, attn_mask, dropout_p, *args, **kwargs)

    return scaled_dot_product_attention


def _is_traced() -> bool:
    """Return whether tensors are placeholders without values: in a compiler, or under a function transform."""
    return bool(torch.compiler.is_compiling() or transforms_active())


def _draw(name: str, plain: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        recorder = _deciding()
        if recorder is None or not recorder.is_training or recorder.drops or _is_traced():
            return result
        return _drawn(result, name, recorder.decided.draw)

    return function


def _decision(name: str, plain: Any, decide: Any = decided) -> Any:
    def operator(*args: Any, **kwargs: Any) -> Any:
        recorder = _deciding()
        if recorder is None or _is_traced():
            return plain(*args, **kwargs)
        return decide(plain, name, recorder.decided.choice, args, kwargs)

    return operator


def _reduction(argument: str, plain: Any) -> Any:
    place = list(inspect.signature(plain).parameters).index(argument)

    def collective(*args: Any, **kwargs: Any) -> Any:
        recorder = _active()
        if recorder is not None and not _is_traced():
            given = args[place] if len(args) > place else kwargs.get(argument)
            if recorder.log.limits.observe:
                recorder.observe_collective(plain.__name__, given)
            else:
                recorder.half.reduced(given)
        return plain(*args, **kwargs)

    return collective


def _threshold(name: str, plain: Any) -> Any:
    def operator(*args: Any, **kwargs: Any) -> Any:
        recorder = _deciding()
        if recorder is None or recorder.sides or _is_traced():
            return plain(*args, **kwargs)
        recorder.sides = True  # the computation of thresholds itself calls comparisons, which are not recorded
        try:
            return thresholds.sided(plain, name, recorder.decided.side, args, kwargs)
        finally:
            recorder.sides = False

    return operator


def _application(name: str, plain: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        recorder = _deciding()
        if recorder is not None and recorder.decided.trains and not _is_traced():
            applied.applied(name, recorder.decided.applied, args, kwargs)
        return plain(*args, **kwargs)

    return function


_OPERATORS: tuple[tuple[Any, Any], ...] = (
    (_decision, OPERATORS),
    (functools.partial(_decision, decide=pooled), POOLS),
    (_threshold, thresholds.OPERATORS),
    (_application, applied.FUNCTIONS),
)
"""Makers of replacements, each with the owners and names of the functions to replace."""


def _keep_inner(module: nn.Module, args: Any, output: Any) -> None:
    del args
    recorder = _active()
    if recorder is not None:
        recorder.inner = (module, output)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    recorder = _active()
    return None if recorder is None else recorder.before_step(optimizer, args, kwargs)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    del args, kwargs
    recorder = _active()
    if recorder is not None:
        recorder.after_step(optimizer)


def _drawn(result: Any, name: str, record: Callable[[str, Any], Any | None]) -> Any:
    """Record the random numbers of a function; return its result, or the numbers that ``record`` returns.

    Args:
        result: result of the function.
        name: a name in ``_DRAWS``.
        record: called with the name and the numbers.
    """
    if type(result) is not torch.Tensor or result.is_meta or not result.is_floating_point() or not result.numel():
        return result
    other = record(name, result)
    if other is None:
        return result
    numbers = torch.from_numpy(other).to(device=result.device, dtype=result.dtype)
    if name in _IN_PLACE:
        with torch.no_grad():
            return result.copy_(numbers)
    return numbers.requires_grad_(result.requires_grad)
