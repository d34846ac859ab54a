"""``local_map`` and ``custom_shard``: turn a function on local tensors into a function on DTensors."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel._caches import CacheInfo, Owners, register, register_owners
from hyper_parallel._tree import CONTAINERS, leaves, named_leaves, unflatten
from hyper_parallel.core.dtensor.dtensor import SUMMED_OPERANDS, DTensor, resolve_mesh, varying_axes
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.global_shape import layout_from_gathered_shapes
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Placement, Shard, own_placements
from hyper_parallel.core.shard.custom.several_meshes import axes_to_sum
from hyper_parallel.core.shard.refusals import lost_write_error
from hyper_parallel.errors import (
    ArgumentTypeError,
    LayoutError,
    MixedTensorError,
    PlacementError,
    ShardMismatchError,
)

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["custom_shard", "is_single_placement_spec", "local_map"]

_NO_ENTRY = object()
_MAX_CACHED = 1024
_LOCK = threading.Lock()  # shared, because a function with its own lock could not be pickled
_MAPS: Owners[_LocalMap] = Owners()
_Leaf = tuple[str, Any]
_Out = tuple[str, Any, "Layout | None"]
_Known = tuple[Mapping[str, tuple[int, ...]], Mapping[str, Layout]]


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Turn ``func``, a function of local tensors, into a function of DTensors.

    Gradients follow the same contract as those of any operator: the gradient of an operand is summed over each axis on
    which it is replicated but another operand or an output is not. Communication in ``func`` must be differentiable.

    DTensors may be on several meshes, each with its own placements. A gradient is summed only along axes of its
    operand's own mesh: an operand on ``mesh["tp"]`` is a different tensor for each index of ``dp``.

    Args:
        func: is called with local tensors instead of DTensors, in any nesting, by position or keyword. With None, a
            decorator is returned.
        out_placements: placements (objects or aliases) of the output; for several outputs, a sequence or mapping of
            these, nested like the output, with None for a value that is not a tensor.
        in_placements: one entry per positional value (each value in a nested sequence or mapping counts), None for a
            value that is not a DTensor; or a mapping from parameter name to its entry or list of entries. DTensors
            without an entry keep their layout.
        in_grad_placements: placements of the gradients that ``func`` produces, in the form of ``in_placements``; None
            means the contract above. A ``func`` that makes replicated DTensors from its local tensors, for example
            because it calls another ``local_map``, produces complete gradients of them: pass ``[Replicate()]``.
        device_mesh: the mesh of the outputs; by default that of the first DTensor.
        redistribute_inputs: redistribute DTensors to ``in_placements`` instead of refusing those with another layout.

    Returns:
        The wrapped function. Its outputs are DTensors. The first call with given layouts exchanges the sizes of sharded
        outputs; later calls with these layouts must have the same sizes, whatever the other arguments are. A call
        without DTensors runs ``func`` itself.

    Raises:
        LayoutError: (a ValueError) by the wrapped function: a DTensor does not have its declared layout, or the number
            or nesting of entries does not match the call.
        MixedTensorError: a plain tensor has an entry.
        MeshMismatchError: (a ValueError) DTensors are on meshes for which the axes to sum a gradient along cannot be
            derived, or a declared layout is on another mesh.
        MeshLookupError: (a MeshError) this rank is outside of a mesh, so it has no local tensor for ``func``.
        ShardMismatchError: (a ValueError) the ranks' outputs do not form one tensor in ``out_placements``.
        ArgumentTypeError: ``func`` returned a DTensor.
        UnsupportedOperatorError: ``func`` wrote to an operand that had been redistributed. MindSpore does not count
            writes to plain tensors, so this is not detected there; return new values instead.
    """
    options = (out_placements, in_placements, in_grad_placements, device_mesh)
    if func is None:
        return lambda decorated: local_map(decorated, *options, redistribute_inputs=redistribute_inputs)
    region = _LocalMap(func, *options, redistribute_inputs)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return region.run(args, kwargs)

    return call


custom_shard = local_map
"""Alias for :func:`local_map` (MindSpore's name)."""


@dataclass(frozen=True)
class _PreparedCall:
    """The operands of one call, ready for the function.

    Attributes:
        platform: the platform of the DTensors.
        mesh: the mesh of the outputs.
        targets: layouts in which the DTensors enter, in order.
        args: positional arguments with local tensors instead of DTensors.
        kwargs: keyword arguments, in the same form.
        moved: name, layout and local tensor of each operand that differs from the caller's own local tensor.
        summed: operands whose gradients are summed by default, for ``SUMMED_OPERANDS``.
    """

    platform: Platform
    mesh: DeviceMesh
    targets: tuple[Layout, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    moved: tuple[tuple[str, Layout, Any], ...]
    summed: Mapping[int, tuple[str, DeviceMesh, tuple[int, ...]]] | None


class _LocalMap:
    """A wrapped function with its declarations, and its output layouts for the input layouts seen so far."""

    def __init__(
        self,
        func: Callable[..., Any],
        out_placements: Any,
        in_placements: Any,
        in_grad_placements: Any,
        device_mesh: DeviceMesh | None,
        redistribute_inputs: bool,
    ) -> None:
        self.func, self.out, self.moves = func, own_placements(out_placements), redistribute_inputs
        self.mesh = None if device_mesh is None else resolve_mesh(device_mesh)
        self.entries, self.grads = own_placements(in_placements), own_placements(in_grad_placements)
        self.name = getattr(func, "__name__", type(func).__name__)
        self._known: dict[DeviceMesh, dict[tuple[Layout, ...], _Known]] = {}  # meshes differ per rank

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function on local tensors, and wrap its outputs."""
        arguments = [*_named_leaves(args, kwargs, self.func)]
        first = next((value for _, value in arguments if isinstance(value, DTensor)), None)
        if first is None:
            return self.func(*args, **kwargs)
        entered = self._enter(first, arguments, args, kwargs)
        platform = entered.platform
        before = [platform.version(local) for _, _, local in entered.moved]
        token = SUMMED_OPERANDS.set(entered.summed)
        try:
            output = self.func(*entered.args, **entered.kwargs)
        finally:
            SUMMED_OPERANDS.reset(token)
        for (name, layout, local), version in zip(entered.moved, before, strict=True):
            if platform.version(local) != version:
                moved = f"moved to {layout.notation(local.dtype)}"
                raise lost_write_error(f"local_map({self.name})", name, moved, "return the new value instead")
        return self._wrapped(output, entered)

    # -- in --------------------------------------------------------------------------------------------------------

    def _enter(
        self, first: Any, arguments: list[_Leaf], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _PreparedCall:
        mesh = first.device_mesh if self.mesh is None else self.mesh
        platform = first._platform
        mesh.own_coordinate()  # raises outside of the mesh, where the function would get empty tensors
        entries = self._entries_per_argument("in_placements", self.entries, arguments, args, kwargs)
        grads = self._entries_per_argument("in_grad_placements", self.grads, arguments, args, kwargs)
        targets = [
            None if argument[1] is None else self._target(platform, argument, entry)
            for argument, entry in zip(arguments, entries, strict=True)
        ]
        layouts = [target for target in targets if target is not None]
        locals_, summed = self._locals(arguments, targets, grads, mesh)
        entering = iter(locals_)
        moved = tuple(
            (name, target, local)
            for (name, value), target, local in zip(arguments, targets, locals_, strict=True)
            if target is not None and local is not value._local
        )
        return _PreparedCall(
            platform,
            mesh,
            tuple(layouts),
            unflatten(args, entering, CONTAINERS),
            unflatten(kwargs, entering, CONTAINERS),
            moved,
            summed or None,
        )

    def _target(self, platform: Platform, argument: _Leaf, entry: Any) -> Layout | None:
        """The layout in which the function gets an argument; None if that is not a DTensor."""
        name, value = argument
        if not isinstance(value, DTensor):
            if entry is not _NO_ENTRY and entry is not None:
                described = "a plain tensor" if platform.is_tensor(value) else f"a {type(value).__name__}"
                msg = (
                    f"local_map({self.name}): {name} is {described}, its entry of in_placements is {entry!r}; "
                    f"use None there, or pass a DTensor"
                )
                raise MixedTensorError(msg) if platform.is_tensor(value) else LayoutError(msg)
            return None
        value.device_mesh.own_coordinate()  # raises outside of the mesh, where the function would get an empty tensor
        if entry is _NO_ENTRY:
            return value.layout
        if entry is None:
            msg = (
                f"local_map({self.name}): {name} is a DTensor, its entry of in_placements is None; give its placements"
            )
            raise PlacementError(msg)
        target = self._placed(name, value.device_mesh, entry, tuple(value.shape))
        if target is not value.layout and not self.moves:
            msg = (
                f"local_map({self.name}): {name} is laid out as {value.layout.notation(value.dtype)}, in_placements "
                f"asks for {target.notation(value.dtype)}; use "
                f"{name}.redistribute(placements={list(target.placements)}), or redistribute_inputs=True"
            )
            raise LayoutError(msg)
        return target

    def _placed(self, what: str, mesh: DeviceMesh, placements: Any, shape: tuple[int, ...]) -> Layout:
        """Return the layout of a value; an error names the value and the mesh."""
        try:
            return Layout.place(mesh, placements, shape)
        except PlacementError as error:
            msg = f"local_map({self.name}): {what} on {mesh!r}: {error}"
            raise PlacementError(msg) from None

    def _locals(
        self, arguments: list[_Leaf], targets: list[Layout | None], grads: list[Any], mesh: DeviceMesh
    ) -> tuple[list[Any], dict[int, tuple[str, DeviceMesh, tuple[int, ...]]]]:
        """Return the arguments with local tensors for DTensors, and the operands whose gradients are summed."""
        values = [(name, target) for (name, _), target in zip(arguments, targets, strict=True) if target is not None]
        values += [("the output", layout) for layout in self._declared_layouts(mesh, self.out)]
        several = any(layout.mesh is not mesh for _, layout in values)
        differing = () if several else _differing_axes(mesh, [layout for _, layout in values])
        locals_ = []
        summed: dict[int, tuple[str, DeviceMesh, tuple[int, ...]]] = {}
        for (name, value), target, grad in zip(arguments, targets, grads, strict=True):
            if target is None:
                locals_.append(value)
                continue
            if grad is not _NO_ENTRY and grad is not None:
                varying = varying_axes(target, grad, f"local_map({self.name}): {name}")
            elif not several:
                varying = tuple(axis for axis in differing if target.placement_on(axis).is_replicate())
            elif value._platform.grad_enabled() and value._platform.needs_grad(value._local):
                varying = axes_to_sum(f"local_map({self.name})", name, target, tuple(values))
            else:
                varying = ()
            local = value.local_for(target, varying, Cause(f"local_map({self.name})", name))
            locals_.append(local)
            if varying and (grad is _NO_ENTRY or grad is None) and value._platform.needs_grad(local):
                summed[id(local)] = name, target.mesh, varying
        return locals_, summed

    def _declared_layouts(self, mesh: DeviceMesh, placements: Any) -> Iterator[Layout]:
        """The layouts that out_placements declare, without sizes."""
        if isinstance(placements, Layout):
            yield placements
        elif is_single_placement_spec(placements):
            several = (placements,) if isinstance(placements, Placement) else tuple(placements)
            dims = [placement.dim for placement in several if isinstance(placement, Shard)]
            aliases = sum(not isinstance(placement, Placement) for placement in several)
            ndim = aliases or max((dim + 1 if dim >= 0 else -dim for dim in dims), default=0)
            yield self._placed("output", mesh, several, (0,) * ndim)
        elif isinstance(placements, (Mapping, Sequence)) and not isinstance(placements, str):
            for inner in placements.values() if isinstance(placements, Mapping) else placements:
                yield from self._declared_layouts(mesh, inner)

    def _entries_per_argument(
        self, option: str, entries: Any, arguments: list[_Leaf], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """The entry of every argument, including nested ones."""
        count = len(arguments)
        if entries is None:
            return [_NO_ENTRY] * count
        if isinstance(entries, Mapping):
            return self._by_name(option, entries, arguments)
        positional = count - sum(1 for _ in leaves(kwargs, CONTAINERS))
        aligned = list(entries)
        if len(aligned) != positional:
            msg = (
                f"local_map({self.name}): {option} has {len(aligned)} entries, the call has {positional} positional "
                f"values in {len(args)} arguments; give one entry each, None for a value that is not a DTensor"
            )
            raise PlacementError(msg)
        return aligned + [_NO_ENTRY] * (count - positional)

    def _by_name(self, option: str, entries: Mapping[str, Any], arguments: list[_Leaf]) -> list[Any]:
        names = [name.partition("[")[0] for name, _ in arguments]
        unknown = sorted(set(entries) - set(names))
        if unknown:
            msg = (
                f"local_map({self.name}): {option} names {unknown[0]!r}; the call has {', '.join(dict.fromkeys(names))}"
            )
            raise PlacementError(msg)
        aligned: list[Any] = [_NO_ENTRY] * len(arguments)
        for name, entry in entries.items():
            indices = [index for index, argument in enumerate(names) if argument == name]
            if entry is None:  # the argument contains no DTensor
                several = [None] * len(indices)
            else:
                nested = "[" in arguments[indices[0]][0]
                several = [entry] if len(indices) == 1 and not nested else list(entry)
            if len(several) != len(indices):
                msg = f"local_map({self.name}): {option}[{name!r}] has {len(several)} entries for {len(indices)} values"
                raise PlacementError(msg)
            for index, value_entry in zip(indices, several, strict=True):
                aligned[index] = value_entry
        return aligned

    # -- out -------------------------------------------------------------------------------------------------------

    def _wrapped(self, output: Any, entered: _PreparedCall) -> Any:
        """Return ``output``, nested as before, with a DTensor for each tensor."""
        values = list(self._outputs(output, self.out, entered, ""))
        tensors = {where: (value, layout) for where, value, layout in values if layout is not None}
        layouts = self._sized(tensors, entered)
        wrap = entered.platform.wrap
        wrapped = [value if layout is None else wrap(value, layouts[where]) for where, value, layout in values]
        return unflatten(output, wrapped, CONTAINERS)

    def _outputs(self, output: Any, placements: Any, entered: _PreparedCall, where: str) -> Iterator[_Out]:
        """Yield every value in ``output``: its path, and if it is a tensor its layout without sizes."""
        if isinstance(output, DTensor):
            msg = f"local_map({self.name}): output{where} is a DTensor; return local tensors"
            raise ArgumentTypeError(msg)
        if entered.platform.is_tensor(output):
            if placements is None or not is_placement_spec(placements):
                raise self._wrong_output_error(output, placements, where, "the placements of one tensor")
            layout = self._placed(f"output{where}", entered.mesh, placements, (0,) * len(output.shape))
            yield where, output, layout.with_shape(None)
        elif isinstance(output, Mapping) or (isinstance(output, (list, tuple)) and placements is not None):
            for value, inner, key in self._items(output, placements, where):
                yield from self._outputs(value, inner, entered, where + key)
        elif placements is not None:
            raise self._wrong_output_error(output, placements, where, "None")
        else:
            values = leaves(output, CONTAINERS)
            if any(entered.platform.is_tensor(value) for value in values):
                raise self._wrong_output_error(output, placements, where, "placements")
            yield from ((where, value, None) for value in values)

    def _items(self, output: Any, placements: Any, where: str) -> list[tuple[Any, Any, str]]:
        """The values of a mapping or sequence, each with its placements and key."""
        if isinstance(output, Mapping):
            if not isinstance(placements, Mapping) or placements.keys() != output.keys():
                raise self._wrong_output_error(output, placements, where, f"a mapping with the keys {list(output)}")
            return [(value, placements[name], f"[{name!r}]") for name, value in output.items()]
        if (
            is_single_placement_spec(placements)
            or not isinstance(placements, Sequence)
            or len(placements) != len(output)
        ):
            raise self._wrong_output_error(output, placements, where, f"a sequence of {len(output)}")
        pairs = enumerate(zip(output, placements, strict=True))
        return [(value, inner, f"[{index}]") for index, (value, inner) in pairs]

    def _sized(self, outputs: Mapping[str, tuple[Any, Layout]], entered: _PreparedCall) -> Mapping[str, Layout]:
        """The outputs' layouts with global sizes, which the first call with these input layouts exchanges.

        Only the input layouts, which are equal on all ranks, determine whether to exchange. If other arguments or this
        rank's outputs mattered, one rank could wait forever for the others.
        """
        shapes = {where: tuple(local.shape) for where, (local, _) in outputs.items()}
        with _LOCK:
            regions = self._known.get(entered.mesh)
            if regions is None:
                regions = self._known[entered.mesh] = {}
                _MAPS.add(self)
            known = regions.get(entered.targets)
        if known is None:
            known = (shapes, self._exchange_global_shapes(outputs, entered))
            with _LOCK:
                if len(regions) >= _MAX_CACHED:  # bounds the memory of sequences of many lengths
                    regions.clear()
                regions[entered.targets] = known
        before, layouts = known
        if before != shapes:
            raise self._changed(before, shapes)
        return layouts

    def cache_info(self) -> CacheInfo:
        """Return how many input layouts have known output layouts; the limit is per mesh."""
        with _LOCK:
            entries = sum(map(len, self._known.values()))
            return CacheInfo(f"sizes of outputs of {self.name}", entries, _MAX_CACHED * len(self._known))

    def _changed(self, before: Mapping[str, tuple[int, ...]], now: Mapping[str, tuple[int, ...]]) -> Exception:
        where = next(path for path in (*now, *before) if before.get(path) != now.get(path))
        has, had = (f"the local shape {list(of[where])}" if where in of else "no tensor" for of in (now, before))
        return ShardMismatchError(
            f"local_map({self.name}): output{where} has {has} but had {had} in an earlier call with the same "
            "layouts; the other ranks do not know about the change. If an argument determines the sizes, wrap the "
            "function for each of its values: local_map(functools.partial(func, argument=value), ...)"
        )

    def _exchange_global_shapes(
        self, outputs: Mapping[str, tuple[Any, Layout]], entered: _PreparedCall
    ) -> Mapping[str, Layout]:
        """Layouts with global shapes, computed from the local shapes of all ranks, which must be consistent."""
        ranks = entered.mesh.ranks
        shapes = {where: tuple(local.shape) for where, (local, _) in outputs.items()}
        gathered = entered.platform.transport().all_gather_object(shapes, ranks)
        if len({tuple(rank_shapes) for rank_shapes in gathered}) > 1:
            facts = ", ".join(
                f"rank {rank}: {', '.join(f'output{where}' for where in rank_shapes) or 'none'}"
                for rank, rank_shapes in zip(ranks, gathered, strict=True)
            )
            msg = f"local_map({self.name}): ranks returned tensors in different places ({facts})"
            raise ShardMismatchError(msg)
        return {
            where: self._global(
                local, layout, dict(zip(ranks, [rank_shapes[where] for rank_shapes in gathered], strict=True)), where
            )
            for where, (local, layout) in outputs.items()
        }

    def _global(self, local: Any, layout: Layout, shapes: Mapping[int, tuple[int, ...]], where: str) -> Layout:
        """Return ``layout`` with the global shape that follows from the local shapes of all ranks."""
        cut = [dim for dim, axes in enumerate(layout.dim_axes) if axes]
        uncut = {tuple(size for dim, size in enumerate(sizes) if dim not in cut) for sizes in shapes.values()}
        if len(uncut) > 1 or len({len(sizes) for sizes in shapes.values()}) > 1:
            facts = ", ".join(f"rank {rank}: {list(sizes)}" for rank, sizes in shapes.items())
            msg = (
                f"local_map({self.name}): ranks returned different sizes of output{where} in dims that "
                f"{layout.placements} do not shard ({facts})"
            )
            raise ShardMismatchError(msg)
        what = f"local_map({self.name}): the local shards of output{where}"
        return layout_from_gathered_shapes(layout.with_shape(local.shape), shapes, local.dtype, what, cut)

    def _wrong_output_error(self, output: Any, placements: Any, where: str, wanted: str) -> LayoutError:
        return PlacementError(
            f"local_map({self.name}): output{where} is a {type(output).__name__}, its out_placements are "
            f"{placements!r}; they must be {wanted}"
        )


# -- nested values -----------------------------------------------------------------------------------------------------


def _named_leaves(args: tuple[Any, ...], kwargs: dict[str, Any], func: Callable[..., Any]) -> Iterator[_Leaf]:
    """Yield every value in the arguments with its name: positional arguments first."""
    names = _positions(func)
    for index, arg in enumerate(args):
        yield from named_leaves(names[index] if index < len(names) else f"args[{index}]", arg, CONTAINERS)
    for name, value in kwargs.items():
        yield from named_leaves(name, value, CONTAINERS)


@functools.lru_cache(maxsize=1024)
def _positions(func: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters that can be passed by position."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return ()  # many C functions have no signature
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def _differing_axes(mesh: DeviceMesh, layouts: Sequence[Layout]) -> tuple[int, ...]:
    """Axes along which ranks may compute different values, because an operand or output is not replicated there."""
    return tuple(
        axis for axis in range(mesh.ndim) if not all(layout.placement_on(axis).is_replicate() for layout in layouts)
    )


# If one rank dropped its entries, it would wait for sizes that no other rank sends. So meshes live as long as the
# function.
register_owners(_MAPS, _LocalMap.cache_info)
register("parameters of functions", _positions)

# -- placements of nested values ---------------------------------------------------------------------------------------


def is_placement_spec(placements: Any) -> bool:
    """Whether this may be the placements of one tensor, in any form."""
    if isinstance(placements, (Layout, Placement)):
        return True
    return isinstance(placements, Sequence) and all(
        isinstance(item, (Placement, str)) or _axis_names(item) for item in placements
    )


def is_single_placement_spec(placements: Any) -> bool:
    """Whether this can only be placements of one tensor; tuples of axis names may also belong to several tensors."""
    if isinstance(placements, (Layout, Placement)):
        return True
    return is_placement_spec(placements) and any(isinstance(item, (Placement, str)) for item in placements)


def _axis_names(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) for name in value)
