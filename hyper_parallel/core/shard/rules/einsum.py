"""einsum: the equation is the rule."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hyper_parallel.core.shard.rule import Strategies, rule
from hyper_parallel.core.shard.sample import real, sample
from hyper_parallel.core.shard.signature import Labels, labelled_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.shard.call import OpCall

__all__ = ["parse_equation"]

Names = tuple[str, ...]


@rule("einsum", "equation, *operands")
def einsum(call: OpCall) -> Strategies:
    """Dims by the equation's letters, linear in each operand; a letter twice in one of them stays whole."""
    shapes = [operand.shape for operand in call.operands]
    terms, out = parse_equation(call["equation"], [len(shape) for shape in shapes])
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for name, size in zip(term, shape, strict=True):
            known = sizes.get(name, 1)
            if 1 not in (known, size) and known != size:
                msg = f"einsum: {_shown(name)} is {known} in one operand and {size} in another"
                raise ValueError(msg)
            sizes[name] = size if known == 1 else known
    whole = {name for term in terms for name, count in Counter(term).items() if count > 1}
    inputs = tuple(
        tuple(name if size == sizes[name] else None for name, size in zip(term, shape, strict=True))
        for term, shape in zip(terms, shapes, strict=True)
    )
    labels = Labels(inputs, (out,), whole=frozenset(whole), each=tuple(range(len(shapes))))
    return Strategies(labelled_rows(labels), (tuple(sizes[name] for name in out),))


def _shown(name: str) -> str:
    return f"dim {name[3:]} of the ellipsis" if name.startswith("...") else repr(name)


def parse_equation(equation: str, ndims: Sequence[int]) -> tuple[list[Names], Names]:
    """Labels per operand and of the output; the ellipsis stands for labels counted from its right end.

    Raises:
        ValueError: an equation that does not fit the operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(ndims):
        msg = f"einsum: equation {equation!r} names {len(texts)} operands, {len(ndims)} are given"
        raise ValueError(msg)
    terms = [_term(text, ndim, equation) for text, ndim in zip(texts, ndims, strict=True)]
    dots = max((sum(name.startswith("...") for name in term) for term in terms), default=0)
    ellipsis = tuple(f"...{position}" for position in reversed(range(dots)))
    counts = Counter(name for term in terms for name in term)
    if not arrow:
        single = sorted(name for name, count in counts.items() if count == 1 and not name.startswith("..."))
        return terms, (*ellipsis, *single)
    before, found, after = right.partition("...")
    out = (*before, *ellipsis, *after) if found else tuple(right)
    if len(set(out)) != len(out) or any(name not in counts for name in out):
        msg = f"einsum: the output of {equation!r} names a dim twice, or one that no operand has"
        raise ValueError(msg)
    return terms, out


def _term(text: str, ndim: int, equation: str) -> Names:
    before, found, after = text.partition("...")
    named = len(before) + len(after)
    if (named > ndim) or (not found and named != ndim) or not (before + after).isalpha() * (named > 0) + (named == 0):
        msg = f"einsum: {text!r} in {equation!r} does not fit an operand of {ndim} dims"
        raise ValueError(msg)
    middle = tuple(f"...{position}" for position in reversed(range(ndim - named))) if found else ()
    return (*before, *middle, *after)


sample("einsum", "bij,jk->bik", real("bij"), real("jk"))
sample("einsum", "ij,jk,kl->il", real("ij"), real("jk"), real("kl"))
sample("einsum", "...i,ij->...j", real("abi"), real("ij"))
sample("einsum", "ij,ij->", real("ij"), real("ij"))
sample("einsum", "ij->ji", real("ij"))
sample("einsum", "ii->i", real("ii"))
sample("einsum", "bi,bj->bij", real("bi"), real("bj"))
