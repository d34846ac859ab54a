"""Facet *persistence* on MindSpore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
from mindspore import Parameter, ops

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.contract.persistence import PersistenceFacet
from hyper_parallel.platform.mindspore.cells import walk
from hyper_parallel.transport.mindspore import from_host, to_host

__all__ = ["MindSporePersistence"]


class MindSporePersistence(PersistenceFacet):
    """State dicts and files of MindSpore."""

    own_format = "ckpt"
    DTensorBase: Any

    def _state(self, model: Any, *, ignore_frozen: bool) -> dict[str, Any]:
        """By path, as PyTorch does it, not by ``Parameter.name``."""
        state: dict[str, Any] = {}
        for path, cell in walk(model, ""):
            start = f"{path}." if path else ""
            for name, one in cell._params.items():  # noqa: SLF001 - no public spelling
                if one is not None and not (ignore_frozen and not one.requires_grad):
                    state[start + name] = self._detached(one)
            skipped = cell._non_persistent_buffers_set  # noqa: SLF001 - no public spelling
            for name, one in cell._buffers.items():  # noqa: SLF001
                if one is not None and name not in skipped:
                    state[start + name] = self._detached(one)
        return state

    def _detached(self, value: Any) -> Any:
        return value.detach() if isinstance(value, self.DTensorBase) else ops.stop_gradient(value)

    def _on_host(self, value: Any) -> Any:
        return value if str(value.device).startswith("CPU") or isinstance(value, self.DTensorBase) else value.to("CPU")

    def _to_host(self, value: Any) -> Any:
        return to_host(value)

    def _from_host(self, array: Any) -> Any:
        return from_host(array)

    def _save_own(self, state: dict[str, Any], path: Path) -> None:
        """``mindspore.save_checkpoint``, which insists on its suffix, and leaves out empty tensors without a word."""
        if empty := [name for name, value in state.items() if 0 in value.shape]:
            msg = f"save_checkpoint: ckpt files hold no empty tensors ({', '.join(empty)}); use safetensors"
            raise CheckpointError(msg)
        named = path.with_name(path.name + ".ckpt")
        listed = [{"name": name, "data": self._detached(value)} for name, value in state.items()]
        mindspore.save_checkpoint(listed, str(named))
        named.replace(path)

    def _load_own(self, path: Path) -> dict[str, Any]:
        """``mindspore.load_checkpoint``."""
        if not path.exists():
            raise FileNotFoundError(str(path))
        try:
            found = mindspore.load_checkpoint(str(path))
        except (ValueError, TypeError, RuntimeError) as error:
            msg = f"load_checkpoint: {path} is no whole file of mindspore.save_checkpoint ({error})"
            raise CheckpointError(msg) from error
        return {
            name: from_host(to_host(one).copy()) if isinstance(one, Parameter) else one for name, one in found.items()
        }
