"""How much of an operator is checked."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MESHES", "QUICK", "USER", "Effort"]

MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2))


@dataclass(frozen=True)
class Effort:
    """How much is checked.

    Attributes:
        meshes: shapes.
        choices: choices of sizes per sample.
        draws: random splits into summands, of the first choice of sizes.
        both: check the first choice of sizes with integers and with real numbers, not with one of them only.
        rule_level: check claimed rows on plain tensors.
        public: run every row on DTensors.
        public_meshes: on these meshes; None for all.
        apart: the rule level has a process of its own, and ranks are processes: on DTensors a row runs once per mesh,
            on several axes beside another one that has not run yet, and further placements on one mesh per sample,
            or fewer on each where there are no rows; what the rule level checks does not count again.
        moved: how many further placements per sample and mesh go through implicit redistribution.
        seconds: of processor time after which no further choice of sizes is begun.
        reproducers: write programs that show what is wrong.
        missing: number of samples on which to look for placements that are true and not claimed.
    """

    meshes: tuple[tuple[int, ...], ...] = MESHES
    choices: int = 60
    draws: int = 2
    both: bool = True
    rule_level: bool = True
    public: bool = True
    public_meshes: tuple[tuple[int, ...], ...] | None = None
    apart: bool = False
    moved: int = 1
    seconds: float = 30.0
    reproducers: bool = True
    missing: int = 2


QUICK = Effort(
    meshes=((3,), (2, 2)), choices=1, draws=1, both=False, public_meshes=((2,),), moved=0, seconds=10.0, missing=0
)
USER = Effort(choices=2, moved=16, seconds=8.0)
