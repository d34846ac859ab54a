"""Functions of ``torch.nn.utils`` that assign values to parameters, or choose elements of them, on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import starmap
from typing import Any

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.tensor_parallel.clip import clip_grad_norm_, total_norm
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.torch.dtensor import TorchDTensor, invalidate_with
from hyper_parallel.platform.torch.replicated_factories import ReplicatedFactories
from hyper_parallel.platform.torch.shared_storage import check_unfollowed, is_shared

__all__ = [
    "clipped_on_all_meshes",
    "masks_of_whole_tensors",
    "norm_on_all_meshes",
    "on_whole_tensors",
    "set_in_own_layout",
    "vector_into_dtensors",
]

Call = Callable[..., Any]


# -- vector_to_parameters ----------------------------------------------------------------------------------------------


def vector_into_dtensors(assign: Call) -> Call:
    """``torch.nn.utils.vector_to_parameters``: each rank copies its shards from a vector that is a DTensor."""

    @wraps(assign)
    def call(vec: Any, parameters: Iterable[Any]) -> None:
        targets = list(parameters)
        if not any(isinstance(value, DTensor) for value in (vec, *targets)):
            assign(vec, targets)
            return
        _check_vector(vec, targets)
        parts = vec.detach().redistribute().split([target.numel() for target in targets])
        with torch.no_grad():
            list(starmap(_assign, zip(targets, parts, strict=True)))
        # On one device the parameters are views of the vector from here on.
        vec._readonly = "vector_to_parameters copied its parts into parameters; give it vec.clone()"
        invalidate_with(vec, *targets)

    return call


def _check_vector(vec: Any, targets: list[Any]) -> None:
    what = "vector_to_parameters: the vector"
    for index, value in enumerate([vec, *targets]):
        if not isinstance(value, TorchDTensor):
            name = f"parameter {index - 1}" if index else "the vector"
            msg = (
                f"vector_to_parameters: {name} is a plain {type(value).__name__}, but others are DTensors; make all "
                "of them DTensors: distribute_tensor(vector, mesh), distribute_module(model, mesh)"
            )
            raise MixedTensorError(msg)
    total = sum(target.numel() for target in targets)
    if vec.ndim != 1 or vec.numel() != total:
        msg = f"{what} is {vec._layout.notation(vec.dtype)}, the parameters have {total} elements"
        raise LayoutError(msg)
    check_unfollowed(what, vec)
    vec.drop_views()
    if is_shared(vec):
        msg = (
            f"{what} shares its storage with another tensor (a view, its local tensor, or what a backward keeps). On "
            "one device the parameters would be views of that storage, but here they are copies; use vec.clone()"
        )
        raise UnsupportedOperatorError(msg)


def _assign(target: Any, part: Any) -> None:
    target.data = part.view(target.shape).redistribute(placements=target.placements).to(target.dtype).clone()


# -- parametrizations --------------------------------------------------------------------------------------------------


def set_in_own_layout(assign: Call) -> Call:
    """``parametrize._maybe_set``: a parameter takes what ``right_inverse`` returned, in its own layout."""

    @wraps(assign)
    def call(dest: Any, src: Any) -> None:
        if not isinstance(dest, DTensor) or not isinstance(src, DTensor) or dest._layout is src._layout:
            assign(dest, src)
            return
        check_unfollowed("what right_inverse returned", src)
        assign(dest, src.redistribute(placements=dest.placements).clone())
        src._readonly = "it was given to a parametrization in another layout, which made a copy"
        invalidate_with(src, dest)

    return call


# -- norms of gradients ------------------------------------------------------------------------------------------------


def _are_on_several_meshes(tensors: Iterable[Any]) -> bool:
    return len({each._layout.mesh for each in tensors if isinstance(each, DTensor)}) > 1


def clipped_on_all_meshes(clip: Call) -> Call:
    """``torch.nn.utils.clip_grad_norm_``, which calls this library's function for gradients on several meshes."""

    @wraps(clip)
    def call(parameters: Any, *args: Any, **options: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        several = _are_on_several_meshes(each.grad for each in listed)
        return (clip_grad_norm_ if several else clip)(listed, *args, **options)

    return call


def norm_on_all_meshes(norm: Call) -> Call:
    """``torch.nn.utils.get_total_norm``, which calls this library's function for tensors on several meshes."""

    @wraps(norm)
    def call(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Any:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not _are_on_several_meshes(listed):
            return norm(listed, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            return total_norm(listed, norm_type, error_if_nonfinite)

    return call


# -- computations on complete tensors ----------------------------------------------------------------------------------


def on_whole_tensors(method: Call) -> Call:
    """A method of a parametrization that needs its one argument complete; its result is laid out like the argument."""

    @wraps(method)
    def call(parametrization: Any, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return method(parametrization, x)
        with ReplicatedFactories(x.device_mesh):
            result = method(parametrization, x.redistribute())
        return result.redistribute(placements=x.placements)

    return call


def masks_of_whole_tensors(apply: Any) -> Any:
    """``BasePruningMethod.apply``: masks of DTensors are chosen from the complete tensor, and laid out like it."""

    @wraps(apply)
    def call(cls: Any, module: Any, name: str, *args: Any, importance_scores: Any = None, **kwargs: Any) -> Any:
        own = getattr(module, name)
        scores = own if importance_scores is None else importance_scores
        if not isinstance(own, DTensor):
            return apply(cls, module, name, *args, importance_scores=importance_scores, **kwargs)
        with _whole_in(module, name, own), ReplicatedFactories(own.device_mesh):
            method = apply(cls, module, name, *args, importance_scores=_whole(scores), **kwargs)
        module._buffers[f"{name}_mask"] = module._buffers[f"{name}_mask"].redistribute(placements=own.placements)
        setattr(module, name, method.apply_mask(module))
        return method

    return call


@contextmanager
def _whole_in(module: Any, name: str, own: DTensor) -> Iterator[None]:
    """Replace parameter ``name`` of ``module``, or its mask, with the complete tensor inside this context."""
    parameters, buffers, masked = module._parameters, module._buffers, f"{name}_mask"
    if name in parameters:
        parameters[name] = torch.nn.Parameter(_whole(own), requires_grad=own.requires_grad)
        try:
            yield
        finally:
            parameters[f"{name}_orig" if f"{name}_orig" in parameters else name] = own
        return
    mask = buffers[masked]
    buffers[masked] = _whole(mask)
    try:
        yield
    except BaseException:
        buffers[masked] = mask
        raise


def _whole(value: Any) -> Any:
    return value.detach().redistribute() if isinstance(value, DTensor) else value
