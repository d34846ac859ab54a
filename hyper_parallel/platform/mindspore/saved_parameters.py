"""MindSpore's own checkpoint functions on cells with DTensor parameters.

A checkpoint has complete values under the names of the parameters, like a checkpoint of a single device. Saving gathers
them, so all ranks of the mesh must call it; of the ranks that name the same file on the same machine, one writes it.
Loading takes complete values, of which each rank keeps its shard.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.errors import CheckpointError

__all__ = ["entries_of", "loading_shards", "saving_whole"]


def saving_whole(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``mindspore.save_checkpoint`` to save the complete values of DTensors, each file once."""

    @wraps(save)
    def save_checkpoint(save_obj: Any, ckpt_file_name: Any, *args: Any, **kwargs: Any) -> Any:
        entries = entries_of(save_obj)
        dtensors = [value for _, value in entries if isinstance(value, DTensor)]
        if not dtensors:
            return save(save_obj, ckpt_file_name, *args, **kwargs)
        whole = [{"name": name, "data": _whole(value)} for name, value in entries]
        _write_once(dtensors, str(ckpt_file_name), lambda: save(whole, ckpt_file_name, *args, **kwargs))
        return None

    return save_checkpoint


def entries_of(save_obj: Any) -> list[tuple[str, Any]]:
    """Return names and values in an argument of ``mindspore.save_checkpoint``; none for an argument that it refuses."""
    if isinstance(save_obj, nn.Cell):
        return [(parameter.name, parameter) for parameter in save_obj.get_parameters()]
    if isinstance(save_obj, dict):
        return list(save_obj.items())
    if not isinstance(save_obj, (list, tuple)):
        return []
    return [
        (entry.get("name", ""), entry.get("data")) if isinstance(entry, dict) else (getattr(entry, "name", ""), entry)
        for entry in save_obj
    ]


def _whole(value: Any) -> Any:
    """Return the complete values as a new plain tensor; other values unchanged."""
    if isinstance(value, DTensor):
        return ops.stop_gradient(value.full_tensor())
    return value


def _write_once(dtensors: list[Any], name: str, write: Callable[[], Any]) -> None:
    """Write on the first rank of those that name one file on one machine; return when all files are written.

    Raises:
        CheckpointError: another rank could not write the file.
    """
    mesh = dtensors[0].layout.mesh
    ranks = tuple(sorted({rank for dtensor in dtensors for rank in dtensor.layout.mesh.ranks}))
    transport, rank = dtensors[0]._platform.transport(), mesh.get_rank()
    file = (socket.gethostname(), str(Path(name).absolute()))
    files = dict(zip(ranks, transport.all_gather_object(file, ranks), strict=True))
    writer = next(other for other in ranks if files[other] == file)
    failure: Exception | None = None
    if writer == rank:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know of it
            failure = error
    failures = dict(zip(ranks, transport.all_gather_object(failure and str(failure), ranks), strict=True))
    if failure is not None:
        raise failure
    if failures[writer] is not None:
        msg = f"save_checkpoint: rank {writer}, which writes {name} for rank {rank}, could not: {failures[writer]}"
        raise CheckpointError(msg)


def loading_shards(update: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function that ``mindspore.load_param_into_net`` calls per parameter, to accept complete values."""

    @wraps(update)
    def update_param(param: Any, new_param: Any, strict_load: bool) -> None:
        value = _whole(new_param)
        if value is not new_param:
            value = Parameter(value, name=new_param.name)
        if not isinstance(param, DTensor):
            update(param, value, strict_load)
            return
        _load_shard(param, value, update, strict_load)

    return update_param


def _load_shard(param: Any, value: Any, update: Callable[..., None], strict_load: bool) -> None:
    """Let MindSpore check and convert the complete value in a plain parameter, and keep this rank's shard of it."""
    stand_in = Parameter(ops.zeros(param.shape, param.dtype), name=param.name, requires_grad=param.requires_grad)
    update(stand_in, value, strict_load)
    loaded = Tensor(stand_in.asnumpy(), param.dtype)
    layout = Layout.of(param.layout.mesh, ((),) * loaded.ndim, (), tuple(loaded.shape))
    param.set_data(param._platform.wrap(loaded, layout))
