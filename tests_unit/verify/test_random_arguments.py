"""Arguments of the wrong kind to cases and plans: right, or an error of the library that says which; nothing else."""

from collections.abc import Mapping

from hypothesis import given, strategies as st

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel
from hyper_parallel.verify import ModelCase, ParallelPlan

SCALARS = st.none() | st.booleans() | st.integers(-3, 5) | st.floats(allow_subnormal=False) | st.text(max_size=3)
PLACEMENTS = st.sampled_from([Shard(0), Shard(-1), Shard(7), Replicate(), Partial()])
ANYTHING = st.recursive(
    SCALARS | PLACEMENTS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(SCALARS, inner, max_size=2),
    max_leaves=4,
)
EXPECTED = (TypeError, ValueError)
"""What wrong arguments raise; errors of the library are one of both, and name what is wrong."""


def survives(call, *args, **kwargs):
    """Call a function; any error but those that are documented passes on."""
    try:
        return call(*args, **kwargs)
    except EXPECTED as error:
        text = str(error)
    assert text
    return None


@given(st.dictionaries(st.sampled_from(sorted(ModelCase.__dataclass_fields__)), ANYTHING))
def test_a_model_case_is_one_or_refused(options):
    """A case of random values is refused by name, or holds batches that can be trained on."""
    case = survives(ModelCase, **{"build": dict, "batches": [(1,)], "loss": max, **options})
    if case is not None:
        assert callable(case.build)
        assert case.micro_batches(0)


@given(st.dictionaries(st.sampled_from(sorted(ParallelPlan.__dataclass_fields__)), ANYTHING))
def test_a_plan_is_one_or_refused(options):
    """A plan of random values is refused by name, or has styles and placements."""
    plan = survives(ParallelPlan, **{"styles": {"fc": ColwiseParallel()}, **options})
    if plan is not None:
        assert isinstance(plan.styles, Mapping) or callable(plan.styles)
