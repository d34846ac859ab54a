"""What a framework's harness answers where the framework gives nothing of its own."""

import pytest

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform import get_platform
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.harness import HarnessPlatform


def test_a_framework_without_decompositions_says_where_proofs_are_made():
    """Primitives are refused with the framework's name; nothing is proved on another framework in its place."""
    harness = harness_of(get_platform())
    with pytest.raises(UnsupportedOnBackend) as caught:
        HarnessPlatform.primitives(harness, lambda *_: None, [], [], lambda _: None)
    own = harness.platform.platform_type
    assert str(caught.value) == f"{own} does not decompose operators; proofs are made on PyTorch, for the rules of both"


def test_a_framework_that_observes_no_calls_says_where_plans_are_proven():
    """Observing calls and storages is refused with the framework's name; such a framework has no groups to report."""
    harness = harness_of(get_platform())
    own = harness.platform.platform_type
    with pytest.raises(UnsupportedOnBackend) as caught:
        HarnessPlatform.observed_calls(harness, lambda *_: None, lambda _: None)
    assert str(caught.value) == f"{own} does not observe calls; plans are proven on PyTorch"
    with pytest.raises(UnsupportedOnBackend) as caught:
        HarnessPlatform.memory_of(harness, object())
    assert str(caught.value) == f"{own} does not say where tensors lie; plans are proven on PyTorch"
    assert HarnessPlatform.sharded_groups(harness, object()) == []


def test_defaults_of_a_framework():
    """A device that is missing is explained in general, and a block in one thread changes nothing."""
    harness = harness_of(get_platform())
    assert HarnessPlatform.missing_device(harness, "npu") == "check the driver and the build of the framework for npu"
    with HarnessPlatform.single_threaded(harness) as block:
        assert block is None
