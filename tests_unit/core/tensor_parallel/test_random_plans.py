"""Plans of random content: a module that is parallel, or one error of the library that says what is wrong."""

import pytest
from hypothesis import example, given, settings, strategies as st

from hyper_parallel import init_device_mesh, parallelize_module
from hyper_parallel.core.tensor_parallel.plan_names import STYLE_NAMES
from hyper_parallel.errors import PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

PATTERNS = st.sampled_from(
    ["up", "down", "layers.*", "*", "", ".", "..", "../up", "up.weight", "[", "(", "\\", "nul\0"]
)
PLAIN = st.none() | st.booleans() | st.integers(-3, 5) | st.text(max_size=4) | st.sampled_from(sorted(STYLE_NAMES))
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(PATTERNS, inner, max_size=2))
PLANS = st.dictionaries(PATTERNS | st.text(max_size=4), VALUES, max_size=3) | VALUES


@example(plan={"layers.*": "colwise"})
@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore::UserWarning")
@given(plan=PLANS)
def test_a_plan_works_or_is_refused_in_words(plan):
    """Whatever stands in a plan by name, no other error leaves, and a refused plan leaves the module alone."""
    import torch

    def on_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = torch.nn.ModuleDict({"up": torch.nn.Linear(3, 5), "down": torch.nn.Linear(5, 3)})
        before = dict(model.named_parameters())
        try:
            parallelize_module(model, mesh, plan)
        except (PlanError, TypeError) as error:
            refusal = str(error)
        else:
            return "accepted"
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        return refusal

    for outcome in simulate(on_rank, 2, platform="torch"):
        assert outcome == "accepted" or outcome.startswith(("parallelize_", "the plan does not match the module ("))
