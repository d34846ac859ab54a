"""The fixture of scenarios: one rank of a simulated mesh, and operators that exist only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.dispatch import Ops
from hyper_parallel.core.shard.entry import Binder, OpEntry
from hyper_parallel.core.shard.rule import OpCall, Row, Rule, Strategies
from hyper_parallel.platform.select import platform_named

__all__ = ["S0", "Fixture", "P", "R", "never", "raises", "rowwise", "values"]

P, R, S0 = Partial(), Replicate(), Shard(0)


class Fixture:
    """One rank.

    Attributes:
        platform: PyTorch's.
        mesh: ``sizes``.
        ops: canonical operators, entries made anew.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.platform = platform_named("torch")
        self.mesh: DeviceMesh = init_device_mesh(
            "cpu", tuple(sizes), mesh_dim_names=[f"m{axis}" for axis in range(len(sizes))]
        )
        self.ops = Ops(self.platform.dispatcher)

    def spread(self, array: Any, *places: Placement) -> Any:
        """Return a leaf DTensor of ``array``, sharded by rows by default."""
        layout = Layout.place(self.mesh, places or [S0] * self.mesh.ndim, array.shape)
        box = tuple(slice(*bounds) for bounds in layout.local_box())
        return self.platform.wrap(self.plain(array[box]), layout)

    def plain(self, array: Any) -> Any:
        """A plain tensor."""
        return self.platform.from_numpy(np.array(array))

    def whole(self, result: Any) -> Any:
        """The global values of a DTensor."""
        return self.platform.tensor_to_numpy(self.platform.detach(result.full_tensor()))

    def same(self, result: Any, expected: Any) -> None:
        """Assert that global values and dtype equal those of ``expected``."""
        expected = np.asarray(expected)
        actual = self.whole(result)
        assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
        assert actual.shape == expected.shape, (actual.shape, expected.shape)
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)

    def entry(
        self,
        func: Callable[..., Any],
        signature: str = "x",
        strategies: Callable[[OpCall], Any] | None = None,
        *,
        rule: dict[str, Any] | None = None,
        local: Callable[..., Any] | None = None,
        **options: Any,
    ) -> OpEntry:
        """Return a new entry for a test-only operator."""
        made = Rule("probe", signature, strategies or rowwise, **(rule or {}))
        return OpEntry("probe", func, Binder(signature), made, local or func, **options)

    def call(self, entry: OpEntry, *args: Any, **kwargs: Any) -> Any:
        """Dispatch."""
        return self.platform.dispatcher.dispatch(entry, args, kwargs)


def rowwise(call: OpCall) -> Strategies:
    """Every operand sharded by rows, or whole, like the one output of the first operand's shape."""
    count = len(call.operands)
    rows = (Row((S0,) * count, (S0,)), Row((R,) * count, (R,)))
    return Strategies(rows, (call.operands[0].shape,))


def values(*shape: int, seed: int = 0) -> Any:
    """Random normal values."""
    return np.random.default_rng(seed).standard_normal(shape)


def raises(kind: type[BaseException], function: Callable[[], Any]) -> str:
    """The text of the error of this kind that ``function`` raises."""
    try:
        function()
    except kind as error:
        return str(error)
    msg = f"{kind.__name__} was expected"
    raise AssertionError(msg)


def never(*_: Any, **__: Any) -> Any:
    """A function that fails if it is called."""
    msg = "the spelling cannot run on locals"
    raise AssertionError(msg)
