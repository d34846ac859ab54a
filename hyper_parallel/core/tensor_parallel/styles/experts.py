"""``ExpertParallel``: a module of stacked experts; each rank has some of them and computes their tokens."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import chunk_bounds
from hyper_parallel.core.dtensor.module import place_parameter
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle, options
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, on_axis, parallel_axis
from hyper_parallel.errors import LayoutError, PlanError, StyleError, UnsupportedModuleError
from hyper_parallel.platform.select import framework_of, platform_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.tensor_parallel.styles.base import Args, BoundaryLayout, Kwargs
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["ExpertParallel"]

_CALLS = "_hyper_parallel_expert_calls"
"""Attribute of a module with the style: its calls that are running, the innermost last."""
_COUNT = "num_experts"
"""Attribute by which a module keeps the number of its experts."""
_INPUTS, _MATRIX = 3, 2


class ExpertParallel(ParallelStyle):
    """Shard stacked experts over tp: each rank runs its experts on the tokens that are routed to them.

    Every rank has all tokens, and no token is dispatched; ``routed_experts`` dispatches them by an all-to-all.

    ::

        x_TD            [T, D]         @tp Replicate     hidden states
        experts_TK      [T, K]         @tp Replicate     chosen experts, integers in range(E)
        weights_TK      [T, K]         @tp Replicate     their weights
        parameters      [E@tp, ...]    @tp Shard(0)      every parameter of the module
        y_TD            [T, D]         @tp Replicate     sum over a token's choices of weight times expert

    For modules like the experts of Transformers: every parameter is stacked over experts, forward takes these three
    inputs, and y is that sum. Forward all-reduces y; backward all-reduces the gradients of x and of the weights. An
    expert is complete on its rank, so a parameter may pack gate and up in any way. A rank whose experts are chosen more
    often computes longer. E need not be divisible: the last ranks have fewer experts, or none.

    Inside forward the parameters are local tensors, ``num_experts`` is the number of the rank's experts, and every
    pair of a token and one of these experts is a row of its own, with K = 1. The choices are read on the host.

    Plain inputs and a plain output are complete on every rank; if x is a DTensor, y is one. On other axes of the mesh
    tokens may be sharded.

    Example:
        >>> parallelize_module(model, mesh, {"layers.*.mlp.experts": ExpertParallel()})
    """

    has_whole_siblings = True

    def placements_for(self, module: Any) -> Mapping[str, Placement]:
        """Experts are dim 0 of every parameter."""
        return dict.fromkeys(platform_of(module).direct_parameters(module), Shard(0))

    def unsupported_reason(self, module: Any) -> str | None:
        """The reason why the style does not apply, or None; it applies to modules of stacked experts."""
        platform, kind = platform_of(module), type(module).__name__
        if _CALLS in module.__dict__:
            return "it is already parallelized by ExpertParallel"
        if framework_of(module) != "torch":
            return f"ExpertParallel supports modules of PyTorch only; let {kind} call routed_experts instead"
        own = platform.direct_parameters(module)
        shapes = {name: tuple(value.shape) for name, value in platform.parameters_dict(module).items()}
        if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values() or shapes.keys() != own.keys():
            facts = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"
            return (
                "ExpertParallel needs parameters of the module itself that are all stacked over experts, dim 0; "
                f"{kind} has {facts}"
            )
        buffers = [
            f"{path}.{name}" if path else name
            for path, each in platform.get_cells_and_names(module)
            for name in platform.direct_buffers(each)
        ]
        if buffers:
            return (
                f"ExpertParallel does not shard buffers, but parameters and choices are those of one rank; {kind} has "
                f"the buffers {', '.join(buffers)}"
            )
        inputs = _input_names(platform, module)
        if len(inputs) != _INPUTS:
            return (
                "ExpertParallel needs a forward of three inputs, hidden states, chosen experts and their weights; that "
                f"of {kind} takes ({', '.join(inputs)})"
            )
        return None

    def outputs(self) -> Sequence[BoundaryLayout]:
        """The output, which is a local tensor if the hidden states are local."""
        return ((Replicate(), None),)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Shard the parameters and register hooks that select a rank's choices and sum the results.

        Raises:
            UnsupportedModuleError: (a NotImplementedError and ValueError) the module is not one of stacked experts.
        """
        reason = self.unsupported_reason(module)
        if reason is not None:
            raise UnsupportedModuleError(reason)
        platform, axis = platform_of(module), parallel_axis(device_mesh)
        for name, placement in self.placements_for(module).items():
            place_parameter(
                platform, module, name, device_mesh, on_axis(device_mesh, placement), src_data_rank=self.src_data_rank
            )
        module.__dict__[_CALLS] = []
        before = partial(self._before, device_mesh, axis, _input_names(platform, module))
        platform.register_forward_pre_hook(module, before, with_kwargs=True)
        platform.register_forward_hook(module, partial(self._after, device_mesh, axis), always_call=True)
        return module

    def _before(
        self, mesh: DeviceMesh, axis: int, names: Sequence[str], module: Any, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        platform, edge = platform_of(module), Boundary(type(self).__name__, module, mesh, axis)
        values = _by_name(edge, names, args, kwargs)
        x, experts, weights = _entered(edge, values)
        parameters = platform.direct_parameters(module)
        count = int(next(iter(parameters.values())).shape[0])
        choices = _choices(edge, platform, experts, names[1], count)
        start, stop = chunk_bounds(count, mesh.shape[axis], mesh.get_local_rank(axis))
        own = np.flatnonzero((choices >= start) & (choices < stop))
        call = _Call(edge, x, own // int(experts.shape[1]), local=not isinstance(values[names[0]], DTensor))
        tokens = x.to_local(call.summed)
        rows = _take(platform, tokens, call.tokens)
        factors = platform.reshape(weights.to_local(call.summed), (-1, 1))
        inputs = _inputs(platform, rows, choices[own] - start, _take(platform, factors, own), tokens)
        call.set_local(module, {name: _experts(platform, value, x) for name, value in parameters.items()}, count)
        module.__dict__[_CALLS].append(call)
        return inputs, {}

    def _after(self, mesh: DeviceMesh, axis: int, module: Any, args: Args, output: Any) -> Any:
        del args
        calls: list[_Call] = module.__dict__[_CALLS]
        if not calls:  # the inputs were refused
            return output
        call = calls.pop()
        call.restore(module)
        if output is None:  # forward raised
            return output
        edge = Boundary(type(self).__name__, module, mesh, axis)
        moved = edge.move(call.combined(edge, output), Replicate(), "output")
        return moved.to_local() if call.local else moved

    def __repr__(self) -> str:
        """Return the style."""
        return options(self)


class _Call:
    """One call of a module of experts.

    Args:
        edge: inputs and outputs of the module.
        x: the hidden states [T, D], replicated over the style's axis.
        tokens: the token of each row that this rank computes, integers [R].
        local: whether the output is to be a local tensor.
    """

    def __init__(self, edge: Boundary, x: DTensor, tokens: Any, *, local: bool) -> None:
        self.summed = tuple(Partial() if axis == edge.axis else each for axis, each in enumerate(x.placements))
        self.tokens, self.local = tokens, local
        self._x = x
        self._shown: dict[str, Any] = {}
        self._covered: dict[str, Any] = {}

    def set_local(self, module: Any, parameters: Mapping[str, Any], count: int) -> None:
        """Replace the module's parameters by the rank's ``parameters``, and ``count`` by the rank's number of experts.

        They are set as attributes of the instance, which hide the registered parameters.
        """
        attributes, self._shown = vars(module), dict(parameters)
        if attributes.get(_COUNT) == count:
            self._shown[_COUNT] = int(next(iter(parameters.values())).shape[0])
        self._covered = {name: attributes[name] for name in self._shown if name in attributes}
        attributes.update(self._shown)

    def restore(self, module: Any) -> None:
        """Undo :meth:`set_local`."""
        attributes = vars(module)
        for name in self._shown:
            del attributes[name]
        attributes.update(self._covered)

    def combined(self, edge: Boundary, output: Any) -> DTensor:
        """The sum over each token's choices on this rank, a partial sum over the style's axis."""
        edge.require_tensor(output, "output")
        platform, device, width = platform_of(output), platform_of(output).device_of(output), int(output.shape[1])
        total = platform.zeros((int(self._x.layout.local_shape[0]), width), dtype=output.dtype, device=device)
        local = platform.local_op("index_add")(
            x=total,
            dim=0,
            index=platform.from_numpy(self.tokens, device=device),
            source=platform.narrow(output, 0, 0, len(self.tokens)),
        )
        return DTensor.from_local(local, edge.mesh, self.summed, shape=(int(self._x.shape[0]), width))


def _input_names(platform: Platform, module: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(platform.get_cell_construct(module)).parameters)


def _by_name(edge: Boundary, names: Sequence[str], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The inputs of a call by name, in the order of forward.

    Raises:
        StyleError: (a ValueError) an input is missing, or there are more arguments.
    """
    more = (
        [f"{len(args)} positional arguments"]
        if len(args) > len(names)
        else [each for each in kwargs if each not in names]
    )
    if more:
        msg = f"{edge.module}: called with {' and '.join(more)}; its forward takes {', '.join(names)}"
        raise StyleError(msg)
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    missing = [name for name in names if name not in values]
    if missing:
        msg = f"{edge.module}: called without {' and '.join(missing)}, which {edge.style} converts"
        raise StyleError(msg)
    return {name: values[name] for name in names}


def _entered(edge: Boundary, values: Mapping[str, Any]) -> tuple[DTensor, DTensor, DTensor]:
    """The inputs as DTensors, replicated over the style's axis.

    Raises:
        StyleError: (a ValueError) shapes that do not match.
        LayoutError: (a ValueError) the three inputs differ in placements, or one is neither Shard(0) nor Replicate.
    """
    x, experts, weights = (
        edge.move(edge.enter(value, Replicate(), name), Replicate(), name) for name, value in values.items()
    )
    each = tuple(zip(values, (x, experts, weights), strict=True))
    is_matrix = len(x.shape) == len(experts.shape) == _MATRIX
    if not is_matrix or x.shape[0] != experts.shape[0] or tuple(weights.shape) != tuple(experts.shape):
        facts = ", ".join(f"{name} {list(value.shape)}" for name, value in each)
        msg = f"{edge.module}: {edge.style} needs inputs of [T, D], [T, K] and [T, K], got {facts}"
        raise StyleError(msg)
    alike = x.placements == experts.placements == weights.placements
    if not alike or any(placement not in (Replicate(), Shard(0)) for placement in x.placements):
        facts = ", ".join(f"{name} {value.layout.notation(value.dtype)}" for name, value in each)
        target = [placement if placement == Shard(0) else Replicate() for placement in x.placements]
        msg = (
            f"{edge.module}: {edge.style} needs all inputs on the same ranks, tokens (dim 0) sharded or replicated on "
            f"each axis, got {facts}; redistribute them to {target}"
        )
        raise LayoutError(msg)
    return x, experts, weights


def _choices(edge: Boundary, platform: Platform, experts: DTensor, name: str, count: int) -> Any:
    """The experts that this rank's tokens choose, one after the other.

    Raises:
        PlanError: (a ValueError) a chosen expert does not exist.
    """
    choices = platform.tensor_to_numpy(platform.detach(experts.to_local())).reshape(-1)
    if ((choices < 0) | (choices >= count)).any():
        msg = f"{edge.module}: {name} has values outside of range({count}), the experts of the module"
        raise PlanError(msg)
    return choices


def _take(platform: Platform, rows: Any, positions: Any) -> Any:
    index = platform.from_numpy(positions, device=platform.device_of(rows))
    return platform.local_op("index_select")(x=rows, dim=0, index=index)


def _inputs(platform: Platform, rows: Any, experts: Any, factors: Any, tokens: Any) -> Args:
    """The inputs of forward; a rank without rows computes one token, so that its tensors are on the graph.

    That result is dropped. If there is no token either, it computes a row of ones, not zeros, since experts may divide
    by a norm.
    """
    device = platform.device_of(rows)
    if not len(experts):
        experts = np.zeros(1, np.int64)
        some = platform.detach(platform.narrow(tokens, 0, 0, min(1, int(tokens.shape[0]))))
        ones = platform.ones((1 - int(some.shape[0]), int(rows.shape[1])), dtype=rows.dtype, device=device)
        rows = platform.cat([rows, some, ones], 0)
        factors = platform.cat([factors, platform.ones((1, 1), dtype=factors.dtype, device=device)], 0)
    return rows, platform.from_numpy(experts.reshape(-1, 1), device=device), factors


def _experts(platform: Platform, parameter: DTensor, x: DTensor) -> Any:
    """The rank's experts of a parameter, at least one; its gradient is a partial sum over axes that shard tokens."""
    placements = [
        Partial() if isinstance(own, Shard) and placement == Replicate() else placement
        for own, placement in zip(x.placements, parameter.placements, strict=True)
    ]
    local = parameter.to_local(placements)
    if local.shape[0]:
        return local
    zeros = platform.zeros((1, *local.shape[1:]), dtype=local.dtype, device=platform.device_of(local))
    return platform.cat([local, zeros], 0)
