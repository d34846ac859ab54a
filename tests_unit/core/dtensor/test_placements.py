from __future__ import annotations

import pickle

import pytest

from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Replicate, Shard, StridedShard


def test_each_kind_answers_for_itself_only():
    """Exactly one of is_shard, is_replicate and is_partial is true of a placement."""
    for placement, kind in ((Shard(1), "shard"), (Replicate(), "replicate"), (Partial(), "partial")):
        answers = {name for name in ("shard", "replicate", "partial") if getattr(placement, f"is_{name}")()}
        assert answers == {kind}


def test_questions_may_be_narrowed():
    """is_shard takes a dim and is_partial a reduction, and both compare them."""
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Partial("avg").is_partial("avg")
    assert not Partial("avg").is_partial("sum")


def test_placements_are_values():
    """Equal placements hash alike and survive pickling, and cannot be changed."""
    for placement in (Shard(0), Replicate(), Partial("max"), StridedShard(1, 3)):
        assert pickle.loads(pickle.dumps(placement)) == placement  # noqa: S301 - our own bytes
        assert hash(pickle.loads(pickle.dumps(placement))) == hash(placement)  # noqa: S301 - the same
        with pytest.raises(AttributeError):
            placement.dim = 2


def test_a_strided_shard_is_a_shard_but_another_value():
    """StridedShard is a Shard of its dim and differs from the plain one."""
    strided = StridedShard(0, 2)
    assert strided.is_shard(0)
    assert isinstance(strided, Shard)
    assert strided != Shard(0)


def test_repr_is_what_one_types():
    """The repr of a placement is the expression that makes it."""
    spelt = [repr(placement) for placement in (Shard(-1), Replicate(), Partial("min"), StridedShard(0, 2))]
    assert spelt == ["Shard(-1)", "Replicate()", "Partial(min)", "StridedShard(0, split_factor=2)"]


@pytest.mark.parametrize("dim", [1.0, "0", None, True])
def test_a_dim_is_an_int(dim):
    """Shard refuses a dim that is not an int, booleans included."""
    with pytest.raises(TypeError) as caught:
        Shard(dim)
    assert str(caught.value) == f"Shard(dim): dim must be an int, got {dim!r}"


@pytest.mark.parametrize("factor", [0, -2, 1.5])
def test_a_split_factor_is_a_positive_int(factor):
    """StridedShard refuses a factor that is not a positive int."""
    with pytest.raises(ValueError, match="split_factor") as caught:
        StridedShard(0, factor)
    assert str(caught.value) == (
        f"StridedShard(dim, split_factor): split_factor must be a positive int, got {factor!r}"
    )


def test_only_known_reductions():
    """Partial refuses an unknown reduction and lists the known ones."""
    for op in PARTIAL_OPS:
        assert Partial(op).reduce_op == op
    with pytest.raises(ValueError, match="mean") as caught:
        Partial("mean")
    assert str(caught.value) == (
        "Partial(reduce_op): unknown reduction 'mean'; known: sum, avg, max, min, prod, all, any"
    )
