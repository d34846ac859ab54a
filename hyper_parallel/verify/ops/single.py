"""One check by its coordinates: what a reproducer calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.ops.effort import Effort
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.sweep import Sweep
from hyper_parallel.verify.ops.user import UserOperator, load_user_file, samples_of_user

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placements import Placement

__all__ = ["check_one"]


def check_one(
    platform: str,
    op: str,
    *,
    sample: int,
    sizes: dict[str, int],
    mesh: Sequence[int],
    places: Sequence[Sequence[Placement]],
    integral: bool = True,
    dtype: str = "float64",
    file: str | None = None,
) -> OperatorReport:
    """Check operator ``op`` on one of its samples, with these sizes, on one mesh, in one tuple of placements.

    Args:
        platform: ``torch`` or ``mindspore``.
        op: canonical name, or that of a function of ``file``.
        sample: its number.
        sizes: of the sample's letters.
        mesh: shape.
        places: per operand a placement per axis.
        integral: small integers instead of real numbers.
        dtype: floating dtype.
        file: a user's file.
    """
    report = OperatorReport(op, platform)
    platform_named(platform)
    what: str | UserOperator = op
    rule, samples = find_rule(op), samples_of(op)
    if file is not None:
        user = load_user_file(platform, file)[op]
        what, rule, samples = user, None, samples_of_user(user)
    with use_platform(platform):
        sweep = Sweep(report, platform, what, rule, samples, Effort(meshes=(tuple(mesh),)))
        sweep.only(sample, sizes, dtype, tuple(tuple(one) for one in places), integral=integral)
    return report
