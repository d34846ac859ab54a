"""What gloo's transports send."""

import pytest
import torch

from hyper_parallel.transport.host.torch.ops import bytes_of

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_a_single_element_of_any_stride_is_sent(dtype):
    """One element counts as contiguous whatever its stride; its bytes are sent, and of no element none."""
    x = torch.arange(6).reshape(2, 3).to(dtype)[:1, 1]
    assert x.stride() == (3,)
    assert bytes_of(x).tolist() == bytes_of(x.clone()).tolist()
    assert bytes_of(x).numel() == x.element_size()
    assert bytes_of(x[:0]).tolist() == []


def test_a_transposed_tensor_is_sent_row_by_row():
    """The bytes are those of the values in row-major order, from the first element of a view on."""
    x = torch.arange(6.0).reshape(2, 3).T[1:]
    assert bytes_of(x).tolist() == bytes_of(torch.tensor([[1.0, 4.0], [2.0, 5.0]])).tolist()
