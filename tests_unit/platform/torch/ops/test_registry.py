"""The three registry verbs for PyTorch's calls, and the tables that they make."""

import pytest
import torch

from hyper_parallel.core.shard.rule import Rule, find_rule, rule_names
from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.torch.ops import registry
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture
def empty(monkeypatch):
    """An empty registry, leaving the platform's tables unchanged."""
    for name in ("_SPELLINGS", "_KERNELS", "_DECOMPOSED", "_DIRECT", "_COPIED_BACK", "_IN_PLACE"):
        monkeypatch.setattr(registry, name, type(getattr(registry, name))())
    return registry


def build(of):
    """The table of the registrations so far."""
    kernels = of._kernels.__wrapped__()
    return of._build(kernels), kernels


def test_a_name_is_the_function_and_the_method(empty):
    """Without calls an operator is spelled by its own name; a trailing underscore means that the operand is written."""
    empty.spelling("mul", "mul", "mul_", torch.ops.aten.mul_.Tensor)
    table, kernels = build(empty)
    assert {call: entry.in_place for call, entry in table.items()} == {
        torch.mul: False, torch.Tensor.mul: False, torch.Tensor.mul_: True, torch.ops.aten.mul_.Tensor: True,
    }  # fmt: skip
    assert kernels["mul"](x=torch.tensor(2), y=torch.tensor(3)) == 6


def test_a_kernel_is_the_first_spelling_with_the_rules_arguments(empty):
    """A spelling that lacks an argument or must not run locally is no kernel; a registered kernel has precedence."""
    empty.spelling("sort", canonical=True)
    empty.spelling("sort", torch.ops.aten.sort.default, signature="x, dim=-1, descending=False")
    assert build(empty)[1] == {}
    empty.kernel("sort")(lambda **arguments: arguments)
    assert build(empty)[1]["sort"](dim=1) == {"dim": 1}


def test_a_kernel_in_c_takes_the_rules_names(empty):
    """A kernel in C is called with its own parameter names."""
    empty.kernel("t")(torch.t)
    assert build(empty)[1]["t"](x=torch.ones(2, 3)).shape == (3, 2)


def test_faults_are_refused(empty):
    """A call registered twice, a second kernel, and an operator without a rule are refused."""
    with pytest.raises(ValueError, match="canonical operator 'no_such' has no rule"):
        empty.spelling("no_such")
    empty.kernel("t")(torch.t)
    with pytest.raises(ValueError, match="canonical operator 't' already has a kernel"):
        empty.kernel("t")(torch.t)
    empty.spelling("abs", torch.abs)
    empty.spelling("neg", torch.abs)
    with pytest.raises(ValueError, match="abs is registered twice: as 'abs' and as 'neg'"):
        build(empty)


def test_every_operator_can_run_on_plain_tensors():
    """Each rule of the library has a kernel or a spelling; a name without a rule has neither."""
    rules = [op for op in rule_names() if isinstance(find_rule(op), Rule)]
    stated = {line.op for line in registry._SPELLINGS}
    assert [op for op in rules if op not in stated | registry._kernels().keys()] == []
    with pytest.raises(KeyError, match="no_such"):
        registry.local_op("no_such")


def test_results_are_copied_back():
    """``Tensor.<name>_`` without a rule computes, then copies; a result of another dtype is refused."""
    check_function(lambda x: x.clone().cumsum_(0), [torch.ones(3, 2).numpy()], (2,), platform="torch")

    def run():
        from hyper_parallel.core.dtensor.mesh import init_device_mesh
        from hyper_parallel.core.dtensor.module import distribute_tensor

        x = distribute_tensor(torch.arange(4), init_device_mesh("cpu", (1,)))
        message = r"cumsum_: the result is torch.float32 \[4\], and x is torch.int64 \[4\]"
        with pytest.raises(LayoutError, match=message):
            x.cumsum_(0, dtype=torch.float32)

    simulate(run, 1, platform="torch")
