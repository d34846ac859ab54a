"""Facet *persistence*: state dicts, and checkpoint files that are written atomically."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CheckpointError, CheckpointWriteError
from hyper_parallel.platform.contract import safetensors_file
from hyper_parallel.platform.contract.identity import IdentityFacet

__all__ = ["PersistenceFacet", "StateDictOptions"]


@dataclass(frozen=True)
class StateDictOptions:
    """Options of a state dict; any object with these attributes works.

    Attributes:
        full_state_dict: complete tensors on every rank instead of DTensors.
        cpu_offload: tensors on the host.
        ignore_frozen_params: without parameters that are not trained.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False


class PersistenceFacet(IdentityFacet):
    """Facet *persistence*."""

    def get_model_state_dict(self, model: Any, *, options: Any = None) -> dict[str, Any]:
        """Return parameters and persistent buffers by path, off the graph.

        Args:
            model: a model of plain tensors or DTensors.
            options: a :class:`StateDictOptions`; with ``full_state_dict`` all ranks must call this together.

        Raises:
            ValueError: an option is set that is not supported.
        """
        chosen = _options(options)
        state = self._state(model, ignore_frozen=chosen.ignore_frozen_params)
        if chosen.full_state_dict:
            state = {name: self._whole(value) for name, value in state.items()}
        if chosen.cpu_offload:
            state = {name: self._on_host(value) for name, value in state.items()}
        return state

    def save_checkpoint(self, cell: Any, file_path: Any, ckpt_format: str = "safetensors") -> None:
        """Write a model or a state dict atomically: the old file stays until the new one is complete.

        A state with DTensors is written by rank 0 of the world, as complete tensors; all ranks call this together, and
        all raise if it fails. Without DTensors every rank that calls this writes.

        Args:
            cell: a module, or a mapping of names to tensors.
            file_path: path of the file.
            ckpt_format: ``safetensors``, or the framework's own.

        Raises:
            CheckpointError: (a ValueError) an unknown format, or values that are not tensors.
            CheckpointWriteError: (an OSError) the file cannot be written; an old file is unchanged.
        """
        self._check_format("save_checkpoint", ckpt_format)
        if cell is None:
            msg = "save_checkpoint: expected a module or a mapping of names to tensors, got None"
            raise CheckpointError(msg)
        values = dict(cell) if isinstance(cell, Mapping) else self.get_model_state_dict(cell)
        unsavable = [
            str(name) for name, value in values.items() if not isinstance(name, str) or not self._is_savable(value)
        ]
        if unsavable:
            verb = "is not a named tensor" if len(unsavable) == 1 else "are not named tensors"
            msg = f"save_checkpoint: {', '.join(unsavable)} {verb}"
            raise CheckpointError(msg)
        path = Path(file_path)
        if not any(hasattr(value, "full_tensor") for value in values.values()):
            self._write(values, path, ckpt_format)
            return
        state = {name: self._whole(value) for name, value in values.items()}
        everyone = tuple(range(self.get_world_size()))
        failure = self._attempt(state, path, ckpt_format) if self.get_rank() == 0 else None
        failure = self.transport().all_gather_object(failure, everyone)[0]
        if failure is not None:
            raise failure

    def load_checkpoint(self, file_path: Any, ckpt_format: str = "safetensors") -> dict[str, Any]:
        """Return the tensors of a file by name, on the host; nothing in the file is executed.

        Args:
            file_path: path of the file.
            ckpt_format: ``safetensors``, or the framework's own.

        Raises:
            FileNotFoundError: no such file.
            CheckpointError: (a ValueError) an unknown format, or the file is truncated or of another format.
        """
        self._check_format("load_checkpoint", ckpt_format)
        path = Path(file_path)
        safetensors_file.check_regular(path, "load_checkpoint")
        if ckpt_format != "safetensors":
            return self._load_own(path)
        return {name: self._from_host(array) for name, array in safetensors_file.read(path).items()}

    # -- helpers -------------------------------------------------------------------------------------------------

    own_format: str

    def _check_format(self, member: str, ckpt_format: str) -> None:
        known = ("safetensors", self.own_format)
        if ckpt_format not in known:
            msg = f"{member}: ckpt_format {ckpt_format!r} is unknown; known: {', '.join(known)}"
            raise CheckpointError(msg)

    def _is_savable(self, value: Any) -> bool:
        return bool(self.is_tensor(value))

    @abc.abstractmethod
    def is_tensor(self, obj: Any) -> bool:
        """Return True for any tensor of the framework; see facet *tensors*."""

    def _attempt(
        self, state: dict[str, Any], path: Path, ckpt_format: str
    ) -> CheckpointError | CheckpointWriteError | None:
        """Write, and return the error instead of raising it, because the other ranks must raise too."""
        try:
            self._write(state, path, ckpt_format)
        except (CheckpointError, CheckpointWriteError) as error:
            return type(error)(str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks must raise too
            return CheckpointWriteError(f"save_checkpoint: {path} cannot be written ({error})")
        return None

    def _write(self, state: dict[str, Any], path: Path, ckpt_format: str) -> None:
        if ckpt_format == "safetensors":
            arrays = {name: self._to_host(value) for name, value in state.items()}
            safetensors_file.write(arrays, path)
        else:
            safetensors_file.atomically(path, lambda part: self._save_own(state, part))

    def _whole(self, value: Any) -> Any:
        return self._detached(value).full_tensor() if hasattr(value, "full_tensor") else value

    @abc.abstractmethod
    def _state(self, model: Any, *, ignore_frozen: bool) -> dict[str, Any]:
        """Return parameters and persistent buffers, off the graph."""

    @abc.abstractmethod
    def _detached(self, value: Any) -> Any:
        """Return ``value`` off the graph."""

    @abc.abstractmethod
    def _on_host(self, value: Any) -> Any:
        """Return the tensor on the CPU."""

    @abc.abstractmethod
    def _to_host(self, value: Any) -> Any:
        """Return a NumPy array; bfloat16 has the dtype that transports use."""

    @abc.abstractmethod
    def _from_host(self, array: Any) -> Any:
        """Return a tensor that takes over the array's memory."""

    @abc.abstractmethod
    def _save_own(self, state: dict[str, Any], path: Path) -> None:
        """Write the framework's own format."""

    @abc.abstractmethod
    def _load_own(self, path: Path) -> dict[str, Any]:
        """Read the framework's own format."""


_SUPPORTED = ("full_state_dict", "cpu_offload", "ignore_frozen_params")
# Other options of PyTorch's class, with their neutral values.
_NEUTRAL = {"broadcast_from_rank0": False, "keep_submodule_prefixes": True, "flatten_optimizer_state_dict": False}


def _options(options: Any) -> StateDictOptions:
    if options is None:
        return StateDictOptions()
    if not any(hasattr(options, name) for name in (*_SUPPORTED, *_NEUTRAL)):
        msg = f"get_model_state_dict: {options!r} must have the attributes {', '.join(_SUPPORTED)}"
        raise ValueError(msg)
    if unsupported := [name for name, value in _NEUTRAL.items() if getattr(options, name, value) != value]:
        names = ", ".join(unsupported)
        msg = f"get_model_state_dict: option {names} is not supported; supported: {', '.join(_SUPPORTED)}"
        raise ValueError(msg)
    return StateDictOptions(**{name: bool(getattr(options, name, False)) for name in _SUPPORTED})
