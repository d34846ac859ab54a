"""Facet *groups* on MindSpore."""

from __future__ import annotations

import os
from typing import Any

from mindspore import mint

from hyper_parallel.errors import MeshError, UnsupportedOnBackend
from hyper_parallel.platform.contract.groups import GroupsFacet
from hyper_parallel.transport.base import Transport
from hyper_parallel.transport.real.mindspore.transport import connect, start_rehearsal

__all__ = ["MindSporeGroups"]


class MindSporeGroups(GroupsFacet):
    """Worlds and groups of ``mindspore.mint.distributed``; on CPU the rehearsal over gloo."""

    _rehearsal: Transport | None

    def _join(self, asked: dict[str, Any]) -> None:
        """``hccl`` by MindSpore itself, ``gloo`` by PyTorch in this process; ``mccl`` is refused with the reason."""
        backend = asked["backend"]
        if backend != "gloo":
            options = {name: value for name, value in asked.items() if value is not None and name != "backend"}
            connect(backend, **options)
            return
        refused = [name for name in ("store", "pg_options", "device_id", "timeout") if asked[name] is not None]
        if refused:
            msg = f"init_process_group: the CPU rehearsal over gloo takes no {', '.join(refused)}; leave them out"
            raise UnsupportedOnBackend(msg)
        rank, size = _number(asked, "rank", "RANK"), _number(asked, "world_size", "WORLD_SIZE")
        self._rehearsal = start_rehearsal(rank, size, asked["init_method"] or "env://")

    def _barrier_tensor(self) -> Any:
        return mint.zeros((1,))


def _number(asked: dict[str, Any], name: str, variable: str) -> int:
    value = asked[name] if asked[name] is not None else os.environ.get(variable)
    if value is None:
        msg = f"init_process_group: {name} is not given, and no launcher set {variable}; pass {name}="
        raise MeshError(msg)
    return int(value)
