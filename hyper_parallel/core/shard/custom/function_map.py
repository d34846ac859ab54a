"""A user's function of local tensors, called with DTensors: one operator whose layouts the user declares."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import CONTAINERS, leaves, named_leaves, unflatten
from hyper_parallel.core.dtensor.dtensor import DTensor, varying_axes
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.global_shape import layout_from_gathered_shapes
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Placement, Shard
from hyper_parallel.errors import (
    LayoutError,
    MeshMismatchError,
    MixedTensorError,
    NotPlainError,
    PlacementError,
    ShardMismatchError,
    UnsupportedOperatorError,
)

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["custom_shard", "local_map", "places_one_tensor"]

_KEEP = object()
_MOST_KNOWN = 1024
_LOCK = threading.Lock()  # one for all: a function that holds a lock cannot travel to another process
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
    """``func``, which works on local tensors, as a function of DTensors.

    Gradients follow the same contract as those of any operator: an operand that is whole along an axis on which
    another operand, or an output, is not, gets its gradient summed over that axis. What ``func`` communicates itself
    must be differentiable.

    Args:
        func: takes local tensors where the caller passes DTensors, in any nesting, by position or keyword. Without
            it a decorator is returned.
        out_placements: placements (objects or aliases) of the output; for several outputs, a sequence or mapping of
            them nested like the output, with None for what is no tensor.
        in_placements: one entry per positional value (nested sequences and mappings count each of their values),
            None for what is no DTensor; or a mapping from parameter name to that parameter's entry, or to a list of
            them. Without it, and for keyword arguments without an entry, DTensors enter as they are laid out.
        in_grad_placements: in which placements ``func`` produces the gradients, spelled like ``in_placements``; None
            stands for the contract above.
        device_mesh: the mesh; by default that of the DTensors.
        redistribute_inputs: bring DTensors to ``in_placements`` instead of refusing those that are laid out
            otherwise.

    Returns:
        The wrapped function. Its outputs are DTensors. The sizes of sharded outputs are exchanged on the first call
        with given layouts, and must be the same in later ones, whatever the other arguments are. Without a DTensor
        among the arguments it is ``func``.

    Raises:
        LayoutError: (a ValueError) by the wrapped function: a DTensor is not laid out as declared, or the number or
            nesting of entries does not fit the call.
        MixedTensorError: a plain tensor has an entry.
        MeshMismatchError: DTensors of another mesh.
        ShardMismatchError: (a ValueError) the outputs of the ranks make no tensor in ``out_placements``.
        NotPlainError: ``func`` returned a DTensor.
        UnsupportedOperatorError: ``func`` wrote into an operand that had to be moved. Seen where the framework counts
            writes into plain tensors, which MindSpore does not: there, return new values.
    """
    options = (out_placements, in_placements, in_grad_placements, device_mesh)
    if func is None:
        return lambda given: local_map(given, *options, redistribute_inputs=redistribute_inputs)
    region = _Region(func, *options, redistribute_inputs)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return region.run(args, kwargs)

    return call


custom_shard = local_map
"""The same function under the name that MindSpore's users know."""


@dataclass(frozen=True)
class _Entered:
    """One call's operands.

    Attributes:
        platform: of the DTensors.
        mesh: of the DTensors.
        targets: layouts in which they enter, in order.
        args: positional arguments with locals in their place.
        kwargs: keyword arguments likewise.
        moved: name, layout and local of each operand that is not the caller's own storage, or differs along an axis.
    """

    platform: Platform
    mesh: DeviceMesh
    targets: tuple[Layout, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    moved: tuple[tuple[str, Layout, Any], ...]


class _Region:
    """A wrapped function with its declarations, and the global shapes of its outputs as far as they are known."""

    def __init__(
        self,
        func: Callable[..., Any],
        out_placements: Any,
        in_placements: Any,
        in_grad_placements: Any,
        device_mesh: DeviceMesh | None,
        redistribute_inputs: bool,
    ) -> None:
        self.func, self.out, self.mesh, self.moves = func, out_placements, device_mesh, redistribute_inputs
        self.entries, self.grads = in_placements, in_grad_placements
        self.name = getattr(func, "__name__", type(func).__name__)
        self._known: dict[DeviceMesh, dict[tuple[Layout, ...], _Known]] = {}  # a mesh is one rank's

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter, call, leave."""
        arguments = [*_named_leaves(args, kwargs, self.func)]
        first = next((value for _, value in arguments if isinstance(value, DTensor)), None)
        if first is None:
            return self.func(*args, **kwargs)
        entered = self._enter(first, arguments, args, kwargs)
        platform = entered.platform
        before = [platform.version(local) for _, _, local in entered.moved]
        found = self.func(*entered.args, **entered.kwargs)
        for (name, layout, local), version in zip(entered.moved, before, strict=True):
            if platform.version(local) != version:
                msg = (
                    f"local_map({self.name}): {name} was written in place, but had to be moved to "
                    f"{layout.notation(local.dtype)} first, so the write is lost; return the new value instead"
                )
                raise UnsupportedOperatorError(msg)
        return self._leave(found, entered)

    # -- in --------------------------------------------------------------------------------------------------------

    def _enter(self, first: Any, arguments: list[_Leaf], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entered:
        mesh = first.device_mesh if self.mesh is None else self.mesh
        platform = first._platform
        entries = self._aligned("in_placements", self.entries, arguments, args, kwargs)
        grads = self._aligned("in_grad_placements", self.grads, arguments, args, kwargs)
        targets = [
            None if leaf[1] is None else self._target(mesh, platform, leaf, entry)
            for leaf, entry in zip(arguments, entries, strict=True)
        ]
        placed = [one for one in targets if one is not None]
        axes = self._varying(mesh, placed)
        locals_ = [
            value if target is None else self._local(name, value, target, axes, grad)
            for (name, value), target, grad in zip(arguments, targets, grads, strict=True)
        ]
        entering = iter(locals_)
        moved = tuple(
            (name, target, local)
            for (name, value), target, local in zip(arguments, targets, locals_, strict=True)
            if target is not None and local is not value._local
        )
        return _Entered(
            platform,
            mesh,
            tuple(placed),
            unflatten(args, entering, CONTAINERS),
            unflatten(kwargs, entering, CONTAINERS),
            moved,
        )

    def _target(self, mesh: DeviceMesh, platform: Platform, leaf: _Leaf, entry: Any) -> Layout | None:
        """The layout in which a value enters; None for what is no DTensor."""
        name, value = leaf
        if not isinstance(value, DTensor):
            if entry is not _KEEP and entry is not None:
                kind = "a plain tensor" if platform.is_tensor(value) else f"a {type(value).__name__}"
                msg = (
                    f"local_map({self.name}): {name} is {kind}, its entry of in_placements is {entry!r}; "
                    f"say None there, or pass a DTensor"
                )
                raise MixedTensorError(msg) if platform.is_tensor(value) else LayoutError(msg)
            return None
        if value.device_mesh is not mesh:
            msg = f"local_map({self.name}): {name} lives on {value.device_mesh!r}, the function on {mesh!r}"
            raise MeshMismatchError(msg)
        if entry is _KEEP:
            return value.layout
        if entry is None:
            msg = f"local_map({self.name}): {name} is a DTensor, in_placements says None there; give its placements"
            raise LayoutError(msg)
        target = Layout.place(mesh, entry, tuple(value.shape))
        if target is not value.layout and not self.moves:
            msg = (
                f"local_map({self.name}): {name} is laid out as {value.layout.notation(value.dtype)}, in_placements "
                f"says {target.notation(value.dtype)}; use {name}.redistribute(placements={list(target.placements)}), "
                f"or redistribute_inputs=True"
            )
            raise LayoutError(msg)
        return target

    def _varying(self, mesh: DeviceMesh, targets: Sequence[Layout]) -> tuple[int, ...]:
        """Axes along which the function computes different things: there an operand or an output is not whole."""
        outs = list(_layouts(mesh, self.out))
        return tuple(
            axis
            for axis in range(mesh.ndim)
            if not all(one.placement_on(axis).is_replicate() for one in (*targets, *outs))
        )

    def _local(self, name: str, value: Any, target: Layout, axes: tuple[int, ...], grad: Any) -> Any:
        if grad is _KEEP or grad is None:
            varying = tuple(axis for axis in axes if target.placement_on(axis).is_replicate())
        else:
            varying = varying_axes(target, grad, f"local_map({self.name}): {name}")
        return value.local_for(target, varying, Cause(f"local_map({self.name})", name))

    def _aligned(
        self, option: str, entries: Any, arguments: list[_Leaf], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """One entry per leaf."""
        count = len(arguments)
        if entries is None:
            return [_KEEP] * count
        if isinstance(entries, Mapping):
            return self._by_name(option, entries, arguments)
        positional = count - sum(1 for _ in leaves(kwargs, CONTAINERS))
        given = list(entries)
        if len(given) != positional:
            msg = (
                f"local_map({self.name}): {option} has {len(given)} entries, the call has {positional} positional "
                f"values in {len(args)} arguments; give one entry each, None for what is no DTensor"
            )
            raise PlacementError(msg)
        return given + [_KEEP] * (count - positional)

    def _by_name(self, option: str, entries: Mapping[str, Any], arguments: list[_Leaf]) -> list[Any]:
        names = [name.partition("[")[0] for name, _ in arguments]
        unknown = sorted(set(entries) - set(names))
        if unknown:
            msg = (
                f"local_map({self.name}): {option} names {unknown[0]!r}; the call has {', '.join(dict.fromkeys(names))}"
            )
            raise PlacementError(msg)
        found: list[Any] = [_KEEP] * len(arguments)
        for name, entry in entries.items():
            at = [index for index, one in enumerate(names) if one == name]
            if entry is None:  # no DTensor anywhere in the argument
                several = [None] * len(at)
            else:
                several = [entry] if len(at) == 1 and "[" not in arguments[at[0]][0] else list(entry)
            if len(several) != len(at):
                msg = f"local_map({self.name}): {option}[{name!r}] has {len(several)} entries for {len(at)} values"
                raise PlacementError(msg)
            for index, one in zip(at, several, strict=True):
                found[index] = one
        return found

    # -- out -------------------------------------------------------------------------------------------------------

    def _leave(self, found: Any, entered: _Entered) -> Any:
        """Wrap what came out, nested as it is."""
        arguments = list(self._outputs(found, self.out, entered, ""))
        outs = {where: (one, layout) for where, one, layout in arguments if layout is not None}
        layouts = self._sized(outs, entered)
        wrap = entered.platform.wrap
        made = iter([one if layout is None else wrap(one, layouts[where]) for where, one, layout in arguments])
        return unflatten(found, made, CONTAINERS)

    def _outputs(self, found: Any, placements: Any, entered: _Entered, where: str) -> Iterator[_Out]:
        """Every value that came out, in order: where it is, and its layout without sizes if it is a tensor."""
        if isinstance(found, DTensor):
            msg = f"local_map({self.name}): output{where} is a DTensor; return local tensors"
            raise NotPlainError(msg)
        if entered.platform.is_tensor(found):
            if placements is None or not may_place_a_tensor(placements):
                raise self._misfit(found, placements, where, "the placements of one tensor")
            yield where, found, Layout.place(entered.mesh, placements, (0,) * len(found.shape)).with_shape(None)
        elif isinstance(found, Mapping) or (isinstance(found, (list, tuple)) and placements is not None):
            for one, spec, inner in self._inside(found, placements, where):
                yield from self._outputs(one, spec, entered, where + inner)
        elif placements is not None:
            raise self._misfit(found, placements, where, "None")
        else:
            values = list(leaves(found, CONTAINERS))
            if any(entered.platform.is_tensor(one) for one in values):
                raise self._misfit(found, placements, where, "placements")
            yield from ((where, one, None) for one in values)

    def _inside(self, found: Any, placements: Any, where: str) -> list[tuple[Any, Any, str]]:
        """The values of a mapping or sequence, each with its placements and its place."""
        if isinstance(found, Mapping):
            if not isinstance(placements, Mapping) or placements.keys() != found.keys():
                raise self._misfit(found, placements, where, f"a mapping with the keys {list(found)}")
            return [(one, placements[name], f"[{name!r}]") for name, one in found.items()]
        if places_one_tensor(placements) or not isinstance(placements, Sequence) or len(placements) != len(found):
            raise self._misfit(found, placements, where, f"a sequence of {len(found)}")
        return [(one, spec, f"[{index}]") for index, (one, spec) in enumerate(zip(found, placements, strict=True))]

    def _sized(self, outs: Mapping[str, tuple[Any, Layout]], entered: _Entered) -> Mapping[str, Layout]:
        """The outputs' layouts with global sizes, exchanged in the first call with these layouts.

        Whether to exchange is decided by what is the same on every rank: layouts, not the other arguments, and not
        what came out here. A rank that decided otherwise than the others would wait for them for ever.
        """
        mine = {where: tuple(one.shape) for where, (one, _) in outs.items()}
        with _LOCK:
            regions = self._known.setdefault(entered.mesh, {})
            known = regions.get(entered.targets)
        if known is None:
            known = (mine, self._agreed(outs, entered))
            with _LOCK:
                if len(regions) >= _MOST_KNOWN:  # sequences of many lengths must not fill the memory
                    regions.clear()
                regions[entered.targets] = known
        before, layouts = known
        if before != mine:
            raise self._changed(before, mine)
        return layouts

    def _changed(self, before: Mapping[str, tuple[int, ...]], mine: Mapping[str, tuple[int, ...]]) -> Exception:
        where = next(one for one in (*mine, *before) if before.get(one) != mine.get(one))
        now, then = (f"the local shape {list(one[where])}" if where in one else "no tensor" for one in (mine, before))
        return ShardMismatchError(
            f"local_map({self.name}): output{where} has {now}, and had {then} in an earlier call with the same "
            "layouts; the other ranks cannot know. Where an argument decides on sizes, wrap the function for each of "
            "its values: local_map(functools.partial(func, argument=value), ...)"
        )

    def _agreed(self, outs: Mapping[str, tuple[Any, Layout]], entered: _Entered) -> Mapping[str, Layout]:
        """Layouts with global shapes: every rank tells what it returned, and all of it must fit together."""
        ranks = entered.mesh.ranks
        mine = {where: tuple(one.shape) for where, (one, _) in outs.items()}
        told = entered.platform.transport().all_gather_object(mine, ranks)
        if len({tuple(one) for one in told}) > 1:
            facts = ", ".join(
                f"rank {rank}: {', '.join(f'output{where}' for where in one) or 'none'}"
                for rank, one in zip(ranks, told, strict=True)
            )
            msg = f"local_map({self.name}): ranks returned tensors in different places ({facts})"
            raise ShardMismatchError(msg)
        return {
            where: self._whole(one, layout, dict(zip(ranks, [shapes[where] for shapes in told], strict=True)), where)
            for where, (one, layout) in outs.items()
        }

    def _whole(self, found: Any, layout: Layout, held: Mapping[int, tuple[int, ...]], where: str) -> Layout:
        """``layout`` with the global shape that the pieces of all ranks make."""
        cut = [dim for dim, axes in enumerate(layout.dim_axes) if axes]
        whole = {tuple(size for dim, size in enumerate(sizes) if dim not in cut) for sizes in held.values()}
        if len(whole) > 1 or len({len(sizes) for sizes in held.values()}) > 1:
            facts = ", ".join(f"rank {rank}: {list(sizes)}" for rank, sizes in held.items())
            msg = (
                f"local_map({self.name}): ranks returned different sizes of output{where} in dims that "
                f"{layout.placements} leave whole ({facts})"
            )
            raise ShardMismatchError(msg)
        what = f"local_map({self.name}): the pieces of output{where}"
        return layout_from_gathered_shapes(layout.with_shape(found.shape), held, found.dtype, what, cut)

    def _misfit(self, found: Any, placements: Any, where: str, wanted: str) -> LayoutError:
        kind = type(found).__name__
        return PlacementError(
            f"local_map({self.name}): output{where} is a {kind}, its out_placements are {placements!r}; "
            f"they must be {wanted}"
        )


# -- nested values -----------------------------------------------------------------------------------------------------


def _named_leaves(args: tuple[Any, ...], kwargs: dict[str, Any], func: Callable[..., Any]) -> Iterator[_Leaf]:
    """Every value in the arguments with a name for it, in order: positions, then keywords."""
    names = _positions(func)
    for index, arg in enumerate(args):
        yield from named_leaves(names[index] if index < len(names) else f"args[{index}]", arg, CONTAINERS)
    for name, value in kwargs.items():
        yield from named_leaves(name, value, CONTAINERS)


@functools.lru_cache(maxsize=1024)
def _positions(func: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return ()  # functions of C often have none
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in parameters if one.kind in kinds)


def _layouts(mesh: DeviceMesh, placements: Any) -> Iterator[Layout]:
    """Layouts that out_placements declare, for tensors of unknown sizes."""
    if placements is None:
        return
    if places_one_tensor(placements):
        yield _placed(mesh, placements)
    elif isinstance(placements, Mapping):
        for one in placements.values():
            yield from _layouts(mesh, one)
    elif isinstance(placements, Sequence) and not isinstance(placements, str):
        for one in placements:
            yield from _layouts(mesh, one)


def _placed(mesh: DeviceMesh, placements: Any) -> Layout:
    if isinstance(placements, Layout):
        return placements
    several = (placements,) if isinstance(placements, Placement) else tuple(placements)
    dims = [one.dim for one in several if isinstance(one, Shard)]
    aliases = sum(not isinstance(one, Placement) for one in several)
    ndim = aliases or max((dim + 1 if dim >= 0 else -dim for dim in dims), default=0)
    return Layout.place(mesh, several, (0,) * ndim)


# -- placements of nested values ---------------------------------------------------------------------------------------


def may_place_a_tensor(placements: Any) -> bool:
    """Whether these may be the placements of one tensor, in any spelling."""
    if isinstance(placements, (Layout, Placement)):
        return True
    return isinstance(placements, Sequence) and all(
        isinstance(item, (Placement, str)) or _axis_names(item) for item in placements
    )


def places_one_tensor(placements: Any) -> bool:
    """Whether these can only be one tensor's placements: tuples of axis names alone may also be several tensors'."""
    if isinstance(placements, (Layout, Placement)):
        return True
    return may_place_a_tensor(placements) and any(isinstance(item, (Placement, str)) for item in placements)


def _axis_names(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) for name in value)
