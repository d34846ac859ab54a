"""Facet *persistence* on PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.contract.persistence import PersistenceFacet
from hyper_parallel.transport.real.c10d import from_host, to_host

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.dtensor import DTensor

__all__ = ["TorchPersistence", "chunks", "write_items"]


class TorchPersistence(PersistenceFacet):
    """State dicts and files of PyTorch."""

    own_format = "pt"

    def _state(self, model: Any, *, ignore_frozen: bool) -> dict[str, Any]:
        """``state_dict``."""
        frozen = {name for name, value in model.named_parameters(remove_duplicate=False) if not value.requires_grad}
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
        """``torch.load`` of tensors only; its error message is omitted, because it advises executing the file."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # damaged pickles may raise any error
            msg = (
                f"load_checkpoint: {path} is not a complete file of torch.save with tensors alone; nothing of it was "
                f"executed; load another copy"
            )
            raise CheckpointError(msg) from error
        if not isinstance(state, dict):
            msg = f"load_checkpoint: {path} holds a {type(state).__name__}, not tensors by name; save a state dict"
            raise CheckpointError(msg)
        return state


def write_items(tensor: DTensor, name: str) -> list[Any]:
    """Return the boxes of ``tensor`` that this rank writes; of equal boxes PyTorch keeps one; empty boxes are omitted.

    Raises:
        CheckpointError: (a ValueError) the tensor is partial.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if tensor.layout.partials:
        msg = (
            f"save: {name} is a DTensor {tensor.layout.notation(tensor.dtype)}; reduce it first, with reduce_partial()"
        )
        raise CheckpointError(msg)
    local = tensor.to_local().detach()
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=torch.Size(tensor.shape)
            ),
        )
        for chunk in chunks(tensor)
    ]


def chunks(tensor: DTensor) -> list[Any]:
    """Return the box that this rank holds of ``tensor``; none if it is empty and the global tensor is not."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if tensor.layout.mesh.get_coordinate() is None:
        return []
    box = tensor.layout.local_box()
    sizes = torch.Size([high - low for low, high in box])
    if not sizes.numel() and tensor.shape.numel():
        return []
    return [ChunkStorageMetadata(offsets=torch.Size([low for low, _ in box]), sizes=sizes)]
