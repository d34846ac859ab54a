"""Matrix products and einsum: a sharded contracted dim leaves Partial(sum), all other dims may be sharded.

Products are linear in each operand, so one of them may be Partial(sum) or Partial(avg). A bias is added once, whatever
is sharded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.labels import Labels, broadcast_labels, labelled_rows
from hyper_parallel.core.shard.rule import OpCall, Operand, Strategies, rule
from hyper_parallel.core.shard.sample import real, sample

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["contract", "parse_equation"]


Dims = tuple[str | None, ...]


@rule("linear", "x, weight, bias=None")
def linear(call: OpCall) -> Strategies:
    """``…k, nk, n -> …n``."""
    x, weight, bias = call["x"], call["weight"], call["bias"]
    batch = tuple(f"b{dim}" for dim in range(x.ndim - 1))
    out = () if weight.ndim == 1 else ("n",)
    if x.shape[-1] != weight.shape[-1]:
        msg = f"x has {x.shape[-1]} features, weight expects {weight.shape[-1]}"
        raise ValueError(msg)
    inputs: list[Dims] = [(*batch, "k"), (*out, "k")]
    if bias is not None:
        (joined,), _, _ = broadcast_labels([bias.shape])
        inputs.append(out if bias.shape == weight.shape[:-1] else tuple(None for _ in joined))
    labels = Labels(tuple(inputs), ((*batch, *out),), each=(0, 1), joins=(2,) if bias is not None else ())
    return Strategies(labelled_rows(labels), ((*x.shape[:-1], *weight.shape[:-1]),))


@rule("matmul", "x, y")
def matmul(call: OpCall) -> Strategies:
    """``…mk, …kn -> …mn``; a vector has no ``m`` (or no ``n``); batch dims broadcast."""
    x, y = call["x"], call["y"]
    if not x.ndim or not y.ndim:
        msg = "both operands need at least one dim"
        raise ValueError(msg)
    if x.shape[-1] != y.shape[-min(2, y.ndim)]:
        msg = f"x has {x.shape[-1]} columns, y has {y.shape[-min(2, y.ndim)]} rows"
        raise ValueError(msg)
    (left, right), batch, sizes = broadcast_labels([x.shape[:-2], y.shape[:-2]], "b")
    m, n = ("m",) * (x.ndim > 1), ("n",) * (y.ndim > 1)
    shape = (*sizes, *(x.shape[-2:-1] if m else ()), *(y.shape[-1:] if n else ()))
    labels = Labels(((*left, *m, "k"), (*right, "k", *n)), ((*batch, *m, *n),), each=(0, 1))
    return Strategies(labelled_rows(labels), (shape,))


def contract(call: OpCall, terms: Sequence[str], out: str, added: Operand | None = None) -> Strategies:
    """Strategies of a product of operands with dims ``terms``; ``added`` comes first and broadcasts to ``out``.

    Raises:
        ValueError: a wrong number of dims, or contradictory sizes.
    """
    operands = call.operands[1:] if added is not None else call.operands
    sizes: dict[str, int] = {}
    for operand, term in zip(operands, terms, strict=True):
        if operand.ndim != len(term):
            msg = f"{operand.name} has {operand.ndim} dims, it must have {len(term)}"
            raise ValueError(msg)
        for name, size in zip(term, operand.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                msg = f"{operand.name} has a dim of size {size} where {sizes[name]} is needed"
                raise ValueError(msg)
    inputs: list[Dims] = [tuple(term) for term in terms]
    shape = tuple(sizes[name] for name in out)
    if added is None:
        labels = Labels(tuple(inputs), (tuple(out),), each=tuple(range(len(terms))))
        return Strategies(labelled_rows(labels), (shape,))
    labels = Labels(
        (_bias_dims(added.shape, out, shape), *inputs),
        (tuple(out),),
        each=tuple(range(1, len(terms) + 1)),
        joins=(0,),
    )
    return Strategies(labelled_rows(labels), (shape,))


def _bias_dims(shape: Sequence[int], out: str, sizes: Sequence[int]) -> Dims:
    missing = len(out) - len(shape)
    if missing < 0 or any(size not in (1, wanted) for size, wanted in zip(shape, sizes[missing:], strict=True)):
        msg = f"{list(shape)} does not broadcast to {list(sizes)}"
        raise ValueError(msg)
    return tuple(
        name if size == wanted else None
        for name, size, wanted in zip(out[missing:], shape, sizes[missing:], strict=True)
    )


@rule("mm", "x, y")
def mm(call: OpCall) -> Strategies:
    """``mk, kn -> mn``."""
    return contract(call, ("mk", "kn"), "mn")


@rule("bmm", "x, y")
def bmm(call: OpCall) -> Strategies:
    """``bmk, bkn -> bmn``."""
    return contract(call, ("bmk", "bkn"), "bmn")


@rule("mv", "x, y")
def mv(call: OpCall) -> Strategies:
    """``mk, k -> m``."""
    return contract(call, ("mk", "k"), "m")


@rule("dot", "x, y")
def dot(call: OpCall) -> Strategies:
    """``k, k ->``."""
    return contract(call, ("k", "k"), "")


@rule("outer", "x, y")
def outer(call: OpCall) -> Strategies:
    """``m, n -> mn``."""
    return contract(call, ("m", "n"), "mn")


@rule("addmm", "bias, x, y, *, beta=1, alpha=1", by_value=False)
def addmm(call: OpCall) -> Strategies:
    """``mn, mk, kn -> mn``; the bias broadcasts."""
    return contract(call, ("mk", "kn"), "mn", call["bias"])


@rule("baddbmm", "bias, x, y, *, beta=1, alpha=1", by_value=False)
def baddbmm(call: OpCall) -> Strategies:
    """``bmn, bmk, bkn -> bmn``; the bias broadcasts."""
    return contract(call, ("bmk", "bkn"), "bmn", call["bias"])


@rule("addmv", "bias, x, y, *, beta=1, alpha=1", by_value=False)
def addmv(call: OpCall) -> Strategies:
    """``m, mk, k -> m``; the bias broadcasts."""
    return contract(call, ("mk", "k"), "m", call["bias"])


@rule("addr", "bias, x, y, *, beta=1, alpha=1", by_value=False)
def addr(call: OpCall) -> Strategies:
    """``mn, m, n -> mn``; the bias broadcasts."""
    return contract(call, ("m", "n"), "mn", call["bias"])


@rule("bilinear", "x, y, weight, bias=None")
def bilinear(call: OpCall) -> Strategies:
    """``…i, …j, nij -> …n``."""
    x, y, weight, bias = call["x"], call["y"], call["weight"], call["bias"]
    if x.shape[:-1] != y.shape[:-1] or (x.shape[-1], y.shape[-1]) != weight.shape[1:]:
        msg = f"x {list(x.shape)}, y {list(y.shape)} and weight {list(weight.shape)} do not match …i, …j, nij"
        raise ValueError(msg)
    batch = tuple(f"b{dim}" for dim in range(x.ndim - 1))
    inputs: list[Dims] = [(*batch, "i"), (*batch, "j"), ("n", "i", "j")]
    if bias is not None:
        inputs.append(("n",))
    labels = Labels(tuple(inputs), ((*batch, "n"),), each=(0, 1, 2), joins=(3,) if bias is not None else ())
    # The kernel does not accept empty contracted dims.
    features = {(0, Shard(x.ndim - 1)): x.ndim - 1, (1, Shard(y.ndim - 1)): y.ndim - 1}
    rows = [
        replace(
            row,
            full=tuple((index, dim) for (index, placement), dim in features.items() if row.inputs[index] == placement),
        )
        for row in labelled_rows(labels)
    ]
    return Strategies(tuple(rows), ((*x.shape[:-1], weight.shape[0]),))


@rule("block_diag", "*tensors")
def block_diag(call: OpCall) -> Strategies:
    """Blocks along a diagonal; no dim may be sharded. Partial passes if all blocks are Partial."""
    shapes = [(1,) * (2 - operand.ndim) + operand.shape for operand in call.operands]
    if any(len(shape) > 2 for shape in shapes):
        msg = f"blocks are matrices, got {[list(operand.shape) for operand in call.operands]}"
        raise ValueError(msg)
    inputs = tuple((None,) * operand.ndim for operand in call.operands)
    labels = Labels(inputs, ((None, None),), None, joint=tuple(range(len(inputs))))
    return Strategies(labelled_rows(labels), (tuple(map(sum, zip(*shapes, strict=True))),))


@rule("addbmm", "bias, x, y, *, beta=1, alpha=1", by_value=False)
def addbmm(call: OpCall) -> Strategies:
    """``mn, bmk, bkn -> mn``; the bias broadcasts."""
    return contract(call, ("bmk", "bkn"), "mn", call["bias"])


Names = tuple[str, ...]


@rule("einsum", "equation, *operands")
def einsum(call: OpCall) -> Strategies:
    """The labels are the equation's letters; a dim whose letter occurs twice in one operand must not be sharded."""
    shapes = [operand.shape for operand in call.operands]
    terms, out = parse_equation(call["equation"], [len(shape) for shape in shapes])
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for name, size in zip(term, shape, strict=True):
            known = sizes.get(name, 1)
            if 1 not in (known, size) and known != size:
                msg = f"einsum: {_shown(name)} has size {known} in one operand and {size} in another"
                raise ValueError(msg)
            sizes[name] = size if known == 1 else known
    whole = {name for term in terms for name, count in Counter(term).items() if count > 1}
    inputs = tuple(
        tuple(name if size == sizes[name] else None for name, size in zip(term, shape, strict=True))
        for term, shape in zip(terms, shapes, strict=True)
    )
    labels = Labels(inputs, (out,), whole=frozenset(whole), each=tuple(range(len(shapes))))
    only_moves = len(terms) == 1 and set(terms[0]) == set(out)
    return Strategies(labelled_rows(labels), (tuple(sizes[name] for name in out),), view=only_moves)


def _shown(name: str) -> str:
    return f"dim {name[3:]} of the ellipsis" if name.startswith("...") else repr(name)


def parse_equation(equation: str, ndims: Sequence[int]) -> tuple[list[Names], Names]:
    """Return the labels of each operand and of the output; dims of the ellipsis are numbered from the right.

    Raises:
        ValueError: the equation does not match the operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(ndims):
        msg = f"einsum: equation {equation!r} has {len(texts)} operands, but {len(ndims)} were given"
        raise ValueError(msg)
    terms = [_term(text, ndim, equation) for text, ndim in zip(texts, ndims, strict=True)]
    dots = max((sum(name.startswith("...") for name in term) for term in terms), default=0)
    ellipsis = tuple(f"...{position}" for position in reversed(range(dots)))
    counts = Counter(name for term in terms for name in term)
    if not arrow:
        single = sorted(name for name, count in counts.items() if count == 1 and not name.startswith("..."))
        return terms, (*ellipsis, *single)
    before, ellipsis_there, after = right.partition("...")
    out = (*before, *ellipsis, *after) if ellipsis_there else tuple(right)
    if len(set(out)) != len(out) or any(name not in counts for name in out):
        msg = f"einsum: the output of {equation!r} names a dim twice, or one that no operand has"
        raise ValueError(msg)
    return terms, out


def _term(text: str, ndim: int, equation: str) -> Names:
    before, dots, after = text.partition("...")
    named = len(before) + len(after)
    if (named > ndim) or (not dots and named != ndim) or not (before + after).isalpha() * (named > 0) + (named == 0):
        msg = f"einsum: {text!r} in {equation!r} does not match an operand of {ndim} dims"
        raise ValueError(msg)
    middle = tuple(f"...{position}" for position in reversed(range(ndim - named))) if dots else ()
    return (*before, *middle, *after)


# -- samples -----------------------------------------------------------------------------------------------------------

sample("linear", real("bk"), real("nk"), real("n"))
sample("linear", real("abk"), real("nk"))
sample("linear", real("k"), real("nk"), real("n"))
sample("linear", real("bk"), real("k"))
sample("linear", real("bk"), real("nk"), real(1))
sample("matmul", real("mk"), real("kn"))
sample("matmul", real("bmk"), real("kn"))
sample("matmul", real("bmk"), real("a1kn"))
sample("matmul", real("k"), real("kn"))
sample("matmul", real("bmk"), real("k"))
sample("matmul dot", real("k"), real("k"))
sample("mm", real("mk"), real("kn"))
sample("bmm", real("bmk"), real("bkn"))
sample("mv", real("mk"), real("k"))
sample("outer", real("m"), real("n"))
sample("addmm", real("mn"), real("mk"), real("kn"), beta=2, alpha=3)
sample("addmm", real("n"), real("mk"), real("kn"))
sample("addmm", real("m1"), real("mk"), real("kn"))
sample("baddbmm", real("bmn"), real("bmk"), real("bkn"), beta=2, alpha=3)
sample("baddbmm", real("n"), real("bmk"), real("bkn"))
sample("addbmm", real("mn"), real("bmk"), real("bkn"), beta=2, alpha=3)
sample("addbmm", real("n"), real("bmk"), real("bkn"))
sample("addmv", real("m"), real("mk"), real("k"))
sample("addmv", real(1), real("mk"), real("k"), beta=2, alpha=3)
sample("addr", real("mn"), real("m"), real("n"), beta=2, alpha=3)
sample("addr", real("n"), real("m"), real("n"))
sample("bilinear", real("bi"), real("bj"), real("nij"), real("n"))
sample("bilinear", real("abi"), real("abj"), real("nij"))
sample("bilinear", real("i"), real("j"), real("nij"))
sample("block_diag", real("ab"), real("c"), real("cd"))
sample("einsum", "bij,jk->bik", real("bij"), real("jk"))
sample("einsum", "ij,jk,kl->il", real("ij"), real("jk"), real("kl"))
sample("einsum", "...i,ij->...j", real("abi"), real("ij"))
sample("einsum", "ij,ij->", real("ij"), real("ij"))
sample("einsum", "ij->ji", real("ij"))
sample("einsum", "ii->i", real("ii"))
sample("einsum", "bi,bj->bij", real("bi"), real("bj"))
