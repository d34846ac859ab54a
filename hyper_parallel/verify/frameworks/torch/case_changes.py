"""Changes weights, inputs, outputs and losses of a PyTorch program on one rank while it is recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from hyper_parallel._tree import CONTAINERS, named_leaves, tree_map
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.verify.frameworks.contract.case_changes import (
    IGNORED_LABEL,
    BaseAppliedChanges,
    kept_elements,
    noise_of,
)
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
from hyper_parallel.verify.frameworks.torch.local_values import local_of, read_tensor
from hyper_parallel.verify.frameworks.torch.partitions import overwrite_weight, read_weight

__all__ = ["AppliedChanges", "OwnGradients"]


class AppliedChanges(BaseAppliedChanges):
    """Applies the changes of a log to weights, inputs, outputs and losses."""

    def local_shape(self, parameter: Any) -> tuple[int, ...]:
        """Return the local shape of a parameter."""
        taken = read_weight(parameter)
        return tuple(local_of(parameter).shape) if taken is None else tuple(taken.array.shape)

    def write(self, parameter: Any, array: Any) -> None:
        """Write an array into the local tensor of a parameter."""
        overwrite_weight(parameter, lambda *_: array)

    def losses(self, tensors: Any) -> Any:
        """Return the losses on which backward is called, multiplied by the rank's share."""
        share = self._log.changes.share
        if share == 1.0:
            return tensors
        self._log.notes["shared losses"] = share
        if isinstance(tensors, torch.Tensor):
            return tensors * share
        return tuple(tensor * share for tensor in tensors)

    def output(self, name: str, output: Any) -> Any:
        """Return a module's output multiplied by its factors; called after the output was recorded.

        Raises:
            RecordingError: the shapes of the output and the factors differ.
        """
        factors = self.factors_of(name, tuple(output.shape)) if type(output) is torch.Tensor else None
        return output if factors is None else output * torch.from_numpy(factors).to(output)

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the changed arguments of a model; record the size of the storage of each argument."""
        changes = self._log.changes
        sizes = self._log.notes.setdefault("sizes of input memory", set())
        for name, value in named_leaves("", {**dict(enumerate(args)), **kwargs}, CONTAINERS):
            if _is_data(value):
                sizes.add((name, str(value.dtype), _memory(value)))
        if changes.input_seed is None and changes.mask_seed is None and not changes.strided:
            return args, kwargs
        changed: tuple[Any, Any] = tree_map(self._input, (args, kwargs), CONTAINERS)
        return changed

    def _input(self, value: Any) -> Any:
        changes = self._log.changes
        if not _is_data(value):
            return value
        if changes.input_seed is not None and value.is_floating_point():
            value = value + _in_place_of(value, noise_of(changes.input_seed, _memory(value))).to(value)
        elif changes.mask_seed is not None and value.dim() and _selects(value):
            kept = _in_place_of(value, kept_elements(changes.mask_seed, _memory(value)))
            value = value & kept if value.dtype is torch.bool else value.where(kept, IGNORED_LABEL)
        if changes.strided and value.dim() > 1:
            value = value.transpose(0, -1).contiguous().transpose(0, -1)
        return value


class OwnGradients:
    """Records the gradients of this rank's own backward, before any reduction.

    Ranks whose own gradients are equal have computed the same. Parameters that already have hooks, and DTensors, are
    skipped, because their gradients may be reduced already. For parameters of ``fully_shard``, the groups of ranks that
    together hold one copy are recorded, if all axes of the mesh are axes of replicas or shards of ``fully_shard``.

    Args:
        log: log of the rank.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._seen: set[str] = set()
        self._handles: list[Any] = []

    def watch(self, named: Mapping[str, Any], modules: Iterable[torch.nn.Module]) -> None:
        """Record the gradients of those parameters of a model that are not watched yet."""
        if self._log.perturbation is not None:
            return
        managed = [module for module in modules if issubclass(type(module), FSDPModule)]
        sharded = {id(value) for module in managed for value in module.parameters()}
        for name, parameter in named.items():
            if name in self._seen or not parameter.requires_grad:
                continue
            self._seen.add(name)
            if id(parameter) in sharded:
                copies = _copies(parameter)
                if copies is not None:
                    self._log.notes.setdefault("fully sharded parameters", {})[name] = copies
            elif (
                not isinstance(parameter, DTensor)
                and type(parameter.data) is torch.Tensor
                and not parameter._backward_hooks
            ):
                self._handles.append(parameter.register_hook(partial(self._note, name)))

    def _note(self, name: str, gradient: Any) -> None:
        taken = read_tensor(gradient) if not self._log.step else None
        if taken is not None:
            digests = self._log.notes.setdefault("own gradients", {}).setdefault(name, [])
            digests.append(hashlib.sha256(taken.array.tobytes()).hexdigest())

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


def _copies(parameter: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the groups of ranks that together hold one copy of a parameter that ``fully_shard`` shards.

    Returns:
        the groups; None if an axis of the mesh may belong to tensor parallelism. On a mesh of two axes, the first one
        replicates the parameter in hybrid sharding, but shards it if the second one belongs to tensor parallelism.
    """
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.ndim > 2 or (mesh.ndim == 2 and not parameter.placements[0].is_replicate()):
        return None
    return tuple(tuple(ranks) for ranks in mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist())


def _is_data(value: Any) -> bool:
    """Return whether an argument of a model is data: a plain tensor without a gradient."""
    return type(value) is torch.Tensor and not value.requires_grad and value.layout is torch.strided


def _memory(value: torch.Tensor) -> int:
    """Return the number of elements of a tensor's storage."""
    return value.untyped_storage().nbytes() // value.element_size()


def _in_place_of(value: torch.Tensor, memory: Any) -> torch.Tensor:
    """Return the elements of ``memory`` at the positions that ``value`` has in its own storage."""
    whole = torch.from_numpy(memory).to(value.device)
    return torch.as_strided(whole, value.shape, value.stride(), value.storage_offset())


def _selects(value: torch.Tensor) -> bool:
    """Return whether a tensor is a mask, or labels some of which, anywhere in its storage, are ignored."""
    if value.dtype is torch.bool:
        return True
    if value.is_floating_point() or value.is_complex():
        return False
    return bool((torch.as_strided(value, (_memory(value),), (1,), 0) == IGNORED_LABEL).any())
