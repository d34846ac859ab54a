"""Runs the checks of the contract on one rank, and on all ranks of a simulated or a real world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.select import platform_named
from workshop.conformance.communication import COLLECTIVES, GROUPS, IDENTITY
from workshop.conformance.differentiable import DIFFERENTIABLE
from workshop.conformance.inventory import MEMBERS
from workshop.conformance.models import MEMORY, MODULES, PERSISTENCE
from workshop.conformance.single_rank import PIPELINE, RUNTIME, TENSORS
from workshop.conformance.world import Contract, World

__all__ = ["CHECKS", "check_contract", "run_contract"]

CHECKS: dict[str, Contract] = {
    "identity": IDENTITY,
    "groups": GROUPS,
    "collectives": COLLECTIVES,
    "differentiable": DIFFERENTIABLE,
    "tensors": TENSORS,
    "modules": MODULES,
    "runtime": RUNTIME,
    "memory": MEMORY,
    "persistence": PERSISTENCE,
    "pipeline": PIPELINE,
}

# Arguments for the members that a gap ledger may list; their values do not matter.
_PROBES: dict[str, tuple[Any, ...]] = {
    "fully_sharded": (None, None, ()),
    "get_symmetric_memory_handler": (),
    "create_selective_checkpoint_contexts": ([],),
    "replicated": (None, None),
}


def check_contract(
    platform_name: str, facets: Sequence[str] = tuple(CHECKS), seed: int = 0, device: str = "cpu"
) -> dict[str, str]:
    """Check every member of ``facets`` on this rank; all ranks of a world call this together.

    Args:
        platform_name: ``torch`` or ``mindspore``.
        facets: names of facets; all by default.
        seed: of the data of all ranks.
        device: on which tensors are made.

    Returns:
        per member ``served``, or ``gap: `` and the ledger's reason.

    Raises:
        AssertionError: a member contradicts the contract, refuses although it is not in the gap ledger, or works
            although it is.
    """
    platform = platform_named(platform_name)
    world, states = World(platform, seed, device), {}
    for facet in facets:
        for check in CHECKS[facet]:
            gaps = [gap for gap in map(platform.gap, check.members) if gap is not None]
            if gaps:
                states.update({gap.member: f"gap: {gap.reason}" for gap in gaps})
                for gap in gaps:
                    _must_refuse(platform, gap.member)
                continue
            try:
                check.run(world)
            except UnsupportedOnBackend as error:
                msg = f"{', '.join(check.members)}: refused, but not in the gap ledger: {error}"
                raise AssertionError(msg) from error
            states.update(dict.fromkeys(check.members, "served"))
    missing = [member for facet in facets for member in MEMBERS[facet] if member not in states]
    assert not missing, f"no check covers {missing}"
    return states


def _must_refuse(platform: Any, member: str) -> None:
    try:
        getattr(platform, member)(*_PROBES[member])
    except UnsupportedOnBackend:
        return
    msg = f"{member} is in the gap ledger of {platform.platform_type} and works; remove it there"
    raise AssertionError(msg)


def run_contract(
    platform_name: str,
    world_size: int = 2,
    launch: str = "simulated",
    facets: Sequence[str] = tuple(CHECKS),
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, str]:
    """Run :func:`check_contract` on every rank of a world, and return rank 0's result.

    Args:
        platform_name: ``torch`` or ``mindspore``.
        world_size: number of ranks, at least two.
        launch: ``simulated``, or ``processes`` for real ones.
        facets: names of facets; all by default.
        seed: of the data of all ranks.
        device: ``cpu``, ``cuda`` or ``npu``: where tensors are; see :func:`simulate` and :func:`launch`.

    Raises:
        RankFailedError: a check failed on a rank.
    """
    from hyper_parallel.verify.launch import launch as launched
    from hyper_parallel.verify.simulate import simulate

    runner = simulate if launch == "simulated" else launched
    given = (platform_name, tuple(facets), seed, device)
    results = runner(check_contract, world_size, platform_name, given, timeout=280.0, device=device)
    first: dict[str, str] = results[0]
    return first
