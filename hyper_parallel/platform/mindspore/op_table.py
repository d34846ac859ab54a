"""MindSpore's names: which operator is which canonical one, and what computes it on plain tensors.

Operators arrive as strings. A spelling is one line: the name, the canonical operator, and its parameters in canonical
names where they differ from the rule's own order. ``LOCAL`` uses kernels that exist on CPU as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.binder import binder
from hyper_parallel.core.shard.dispatch import Dispatcher, Entry
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.platform.mindspore.local_ops import LOCAL, write_back
from hyper_parallel.platform.mindspore.primitives import COMPOSED

__all__ = ["LOCAL", "Line", "lines"]

rules.load()

# MindSpore's operator name -> canonical operator, with the rule's own parameters.
SAME = """
Abs abs  Neg neg  Exp exp  Sqrt sqrt  Rsqrt rsqrt  Sin sin  Cos cos  Tanh tanh  Sigmoid sigmoid  ReLU relu
SiLU silu  GeluExt gelu  Erf erf  Log log  Reciprocal reciprocal  Square square  Sign sign  Floor floor  Ceil ceil
Round round
AddExt add  AddScalar add  Add add  SubExt sub  SubScalar sub  Sub sub  Mul mul  Muls mul
Div div  Divs div  RealDiv div  Pow pow  PowTensorScalar pow  PowScalarTensor pow  Maximum maximum  Minimum minimum
SumExt sum  Dense linear  LayerNormExt layer_norm
Reshape view  View view
"""

# Name -> canonical operator and parameters in canonical names, in MindSpore's order.
REORDERED = {
    "DivMod": ("div", "x, y, rounding_mode=None"),
    "DivMods": ("div", "x, y, rounding_mode=None"),
    "DeprecatedSum": ("sum", "x, dim=None, dtype=None, keepdim=False"),
}

# In-place name -> canonical operator. CPU kernels compute these and leave the tensor as it was: results are written.
IN_PLACE = """
InplaceAddExt add  InplaceAddsExt add  InplaceSubExt sub  InplaceSubScalar sub  InplaceMul mul  InplaceMuls mul
InplaceDiv div  InplaceDivs div
"""

# Names that callers may use as keywords.
KEYWORDS = {"input": "x", "self": "x", "other": "y", "axis": "dim", "keep_dims": "keepdim", "keepdims": "keepdim"}


class Line:
    """One spelling: renames keywords and dispatches."""

    __slots__ = ("entry", "names")

    def __init__(self, name: str, op: str, signature: str | None = None, *, in_place: bool = False) -> None:
        """Tie ``name`` to the rule of ``op``.

        Raises:
            ValueError: there is no such rule.
        """
        rule = find_rule(op)
        if rule is None:
            msg = f"table line for {name}: canonical operator {op!r} has no rule"
            raise ValueError(msg)
        local = LOCAL[op]
        bound = binder(signature or rule.signature)
        if in_place:
            local = write_back(local)
        canonical = signature is not None or bound.starred is not None
        self.entry = Entry(op, local, bound, rule, local, canonical=canonical, in_place=in_place)
        self.names = frozenset(bound.names)

    def __call__(self, dispatcher: Dispatcher, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dispatch; a primitive's own attributes play no part here."""
        del primitive
        if kwargs:
            kwargs = {name if name in self.names else KEYWORDS.get(name, name): value for name, value in kwargs.items()}
        return dispatcher.dispatch(self.entry, args, kwargs)


@cache
def lines() -> dict[str, Callable[..., Any]]:
    """What to call per MindSpore operator name: ``line(dispatcher, primitive, args, kwargs)``."""
    table: dict[str, Callable[..., Any]] = {name: Line(name, op) for name, op in _pairs(SAME)}
    table.update({name: Line(name, op, signature) for name, (op, signature) in REORDERED.items()})
    table.update({name: Line(name, op, in_place=True) for name, op in _pairs(IN_PLACE)})
    table.update(COMPOSED)
    return table


def _pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))
