"""DTensors have the dtypes and values of plain tensors, whatever the dtypes of operands are."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from hyper_parallel.platform.select import use_platform

pytestmark = pytest.mark.platforms("mindspore")


def _promotion():
    path = Path(__file__).with_name("promotion.py")
    spec = importlib.util.spec_from_file_location("hyper_parallel_mindspore_promotion", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PROMOTION = _promotion()
# One of each kind that was wrong once: promotion by arithmetic, by the first operand, to float32, to int32, to itself.
QUICK = """
n & n2 | t & 2 | t |True | t ^ 3 | mint.add(x, y, alpha=3) | mint.sub(x, True, alpha=3) | x + y | x * 2 | x / 2
2.5 - x | ops.div(x, p, rounding_mode="trunc") | ops.div(x, 2, rounding_mode="trunc")
ops.div(x, 2.5, rounding_mode="floor") | ops.fmod(x, p) | ops.fmod(x, 2) | ops.fmod(x, True) | ops.truncate_div(x, 2)
x.var() | x.std(0) | x.var(axis=0, ddof=1) | x.cumsum(0) | t.cumsum() | ops.CumProd()(x, 0) | ops.CumSum()(x, 0)
ops.fmax(x, True) | ops.fmax(x, 2.5)
ops.trace(sq) | sq.trace() | mint.nansum(x) | mint.any(t) | mint.all(t) | mint.cross(x, y, 1) | ops.fmax(x, p)
ops.selu(x) | ops.addcdiv(x, y, p, o) | x.addcmul(y, p, value=2.0) | m.addbmm(d, e) | line.bincount()
ops.bincount(labels, s) | labels.bincount(s)
ops.clip_by_norm(x, 1.0) | ops.trapz(x) | ops.scatter_nd(pairs, r, (5, 3)) | ops.unsorted_segment_sum(x, seg32, 3)
ops.DivNoNan()(x, p) | ops.MulNoNan()(x, 2.5) | ops.Xdivy()(x, p) | ops.diagonal(v, 0, 0, 2)
mint.nn.functional.binary_cross_entropy_with_logits(x, w) | ops.isreal(x) | mindspore.numpy.sign(x)
mindspore.numpy.flip(x) | mindspore.numpy.clip(x, -1, 1) | _written(x, lambda c: [c.__setitem__(0, 1), c][1])
_written(x, lambda c: [c.__setitem__(ids, y[ids]), c][1])
"""
MIXED = """
mint.flatten(v, 1) | ops.flatten(v) | v.flatten(1) | x.flatten() | v.unbind(1) | mint.unbind(v, 1) | x[1:3] | v[:, 1:]
x[0] | x[ids] | x.copy() | x.reshape((-1,)) | ops.reshape(v, (8, 3)) | x.T | v.transpose(0, 2) | ops.concat([x, y])
mint.exp(x) | ops.softmax(x) | mint.matmul(x, a) | x + y | x * 2.5 | mint.xlogy(p, 2) | ops.cast(x, mindspore.float32)
x.sum() | x.float() | mint.nn.functional.mish(x) | ops.std(x) | mint.where(t, x, y) | ops.ExpandDims()(x, 0)
ops.hardtanh(x) | ops.ldexp(x, small)
"""


# What DTensors are computed with where an operator has no kernel of its own.
_COMPONENTS = {
    "ops.truncate_div(x, 2)": lambda ms, x: ms.ops.div(x.astype(ms.int64), 2, rounding_mode="trunc"),
    "mint.add(x, y, alpha=3)": lambda ms, x: x.astype(ms.bfloat16) * 3,
}


def _refusal(component):
    import mindspore

    try:
        component(mindspore, mindspore.Tensor([4.0])).astype(mindspore.float32).asnumpy()
    except TypeError as error:
        return str(error).partition("\n")[0]
    return ""


def _texts(table):
    return [item.strip() for line in table.split("\n") for item in line.split(" | ") if item.strip()]


def _wrong(pairs, outcomes):
    return [
        f"{pair.text} of {pair.dtypes}: {outcome.plain}: {outcome.outcome} {outcome.note}"
        for pair, outcome in zip(pairs, outcomes, strict=True)
        if outcome.outcome in PROMOTION.BAD and not PROMOTION.unsound(pair, outcome.outcome)
    ]


@pytest.mark.parametrize("text", _texts(QUICK))
def test_every_pair_of_dtypes_has_the_dtype_and_values_of_plain_tensors(text):
    """An operator promotes the dtypes of DTensors as MindSpore promotes those of plain tensors."""
    if (component := _COMPONENTS.get(text)) and (refusal := _refusal(component)):
        pytest.skip(f"MindSpore itself lacks what it is composed of: {refusal}")
    pairs = PROMOTION.pairs(text)
    with use_platform("mindspore"):
        outcomes = PROMOTION.trials(pairs)
    assert _wrong(pairs, outcomes) == []
    assert any(outcome.outcome == "equal" for outcome in outcomes)


def test_mixed_precision_casts_what_it_casts_of_plain_tensors():
    """In a cell of mixed precision operands are cast, and those of views are not."""
    pairs = [pair for text in _texts(MIXED) for kind in ("float16", "bfloat16") for pair in PROMOTION.mixed(text, kind)]
    with use_platform("mindspore"):
        outcomes = PROMOTION.trials(pairs)
    assert _wrong(pairs, outcomes) == []
    assert Counter(outcome.outcome for outcome in outcomes)["equal"] > 40


PARTS = 40


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_every_expression_has_the_dtypes_and_values_of_plain_tensors(part):
    """No expression of the operator sweep differs, for any dtypes of its first two tensors, or in mixed precision."""
    texts = PROMOTION.expressions()[part::PARTS]
    pairs = [pair for text in texts for pair in (*PROMOTION.pairs(text), *PROMOTION.mixed(text))]
    outcomes = PROMOTION.isolated(pairs)
    assert _wrong(pairs, outcomes) == []
    counts = Counter(outcome.outcome for outcome in outcomes)
    print(f"part {part}: {len(texts)} expressions, {dict(counts)}")  # noqa: T201 - the report has it
    assert counts["equal"] > 0
