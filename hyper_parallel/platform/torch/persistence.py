"""Facet *persistence* on PyTorch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.contract.persistence import PersistenceFacet
from hyper_parallel.transport.c10d import from_host, to_host

__all__ = ["TorchPersistence"]


class TorchPersistence(PersistenceFacet):
    """State dicts and files of PyTorch."""

    own_format = "pt"

    def _state(self, model: Any, *, ignore_frozen: bool) -> dict[str, Any]:
        """``state_dict``."""
        frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
        return {name: value for name, value in model.state_dict().items() if not (ignore_frozen and name in frozen)}

    def _detached(self, value: Any) -> Any:
        return value.detach()

    def _on_host(self, value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value

    def _to_host(self, value: Any) -> Any:
        return to_host(value)

    def _from_host(self, array: Any) -> Any:
        return from_host(array)

    def _save_own(self, state: dict[str, Any], path: Path) -> None:
        """``torch.save``."""
        torch.save(state, path)

    def _load_own(self, path: Path) -> dict[str, Any]:
        """``torch.load`` of tensors alone."""
        try:
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            reason = str(error).splitlines()[0]
            msg = f"load_checkpoint: {path} is no whole file of torch.save with tensors alone ({reason})"
            raise CheckpointError(msg) from error
        return found
