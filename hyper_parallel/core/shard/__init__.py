"""Room 3: how operators act on layouts. Names are imported when first used; no framework comes with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.shard.dfunction import DFunction
    from hyper_parallel.core.shard.dispatch import implicit_replication
    from hyper_parallel.core.shard.distributed_op import DistributedOp

_HOMES = {
    "DFunction": "hyper_parallel.core.shard.dfunction",
    "DistributedOp": "hyper_parallel.core.shard.distributed_op",
    "implicit_replication": "hyper_parallel.core.shard.dispatch",
}

__all__ = [
    "DFunction",
    "DistributedOp",
    "implicit_replication",
]


def __getattr__(name: str) -> Any:
    """Import the home of a public name when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})
