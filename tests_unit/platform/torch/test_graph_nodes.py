"""The nodes of autograd's graph that users of DTensors see."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import Shard, distribute_tensor, init_device_mesh
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def test_a_node_is_read_as_autograds_own():
    """Name, sequence number, metadata and operands are those of the local operation; a node equals itself."""

    def rank():
        x = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
        node = (x * 2).exp().grad_fn
        assert repr(node).startswith("<local <ExpBackward0")
        assert node.name() == "ExpBackward0"
        assert node.metadata() == {}
        assert isinstance(node._sequence_nr(), int)
        assert [tuple(each.shape) for each in node._input_metadata] == [(3,)]
        (operand, number), *_ = node.next_functions
        assert (operand.name(), number) == ("MulBackward0", 0)
        assert operand == node.next_functions[0][0]
        assert hash(operand) == hash(node.next_functions[0][0])
        assert operand != node
        for register in (node.register_hook, node._register_hook_dict):
            with pytest.raises(UnsupportedOperatorError):
                register(lambda *_: None)
        return True

    assert simulate(rank, 2, "torch") == [True, True]
