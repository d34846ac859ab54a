"""How ``torch.distributed.checkpoint`` writes and reads our DTensors: the boxes that each rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.errors import CheckpointError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.dtensor import DTensor

__all__ = ["chunks", "write_items"]


def write_items(tensor: DTensor, name: str) -> list[Any]:
    """Return what this rank writes of ``tensor``; of equal boxes PyTorch keeps one, and an empty one is not written.

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
    """Return the box that this rank holds of ``tensor``; none if it is empty and the whole tensor is not."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if tensor.layout.mesh.get_coordinate() is None:
        return []
    box = tensor.layout.local_box()
    sizes = torch.Size([high - low for low, high in box])
    if not sizes.numel() and tensor.shape.numel():
        return []
    return [ChunkStorageMetadata(offsets=torch.Size([low for low, _ in box]), sizes=sizes)]
