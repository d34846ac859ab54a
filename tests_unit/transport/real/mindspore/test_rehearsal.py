"""The rehearsal of HCCL for MindSpore refuses what HCCL refuses, and calls that MindSpore's functions do not take."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import UnsupportedOnBackend

pytestmark = pytest.mark.platforms("mindspore")


class _Carrier:
    """A world of two, of which nothing is used but its size."""

    rank, world_size = 0, 2


@pytest.fixture
def engine():
    """A rehearsal whose calls are refused before they reach the carrier."""
    from hyper_parallel.transport.real.mindspore.rehearsal import RehearsedHccl

    return RehearsedHccl(_Carrier())


def test_what_hccl_refuses_is_refused(engine):
    """Strides, dtypes and reductions that HCCL does not carry, and tags, which it ignores."""
    import mindspore
    from mindspore import Tensor, mint

    x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    calls = [
        (lambda: engine.broadcast(x.T if not x.T.is_contiguous() else mint.transpose(x, 0, 1), 0, [0, 1], True),
         "broadcast: HCCL would refuse this call: a tensor of shape [2, 2] has strides [1, 2]"),
        (lambda: engine.all_gather([Tensor([True])], Tensor([True]), [0, 1], True),
         "all_gather: HCCL would refuse this call: a tensor has dtype Bool"),
        (lambda: engine.all_reduce(Tensor([1.0], mindspore.float64), "sum", [0, 1], True),
         "all_reduce: HCCL would refuse this call: a tensor has dtype Float64"),
        (lambda: engine.all_reduce(x, "avg", [0, 1], True),
         "all_reduce: HCCL would refuse this call: it has no reduction 'avg'"),
        (lambda: engine.send(x, 1, tag=3),
         "send: HCCL would refuse this call: tag 3 is ignored, so messages would be mixed up"),
    ]  # fmt: skip
    for call, says in calls:
        with pytest.raises(UnsupportedOnBackend) as caught:
            call()
        assert str(caught.value) == says


def test_calls_fit_mindspores_signatures(engine):
    """An argument that MindSpore's own function does not have is refused, although the rehearsal could take it."""
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'blocking'"):
        engine.barrier([0, 1], blocking=True)


def test_tensors_in_lists_and_objects_are_told_apart():
    """A list of tensors is checked one by one; objects may hold anything."""
    from mindspore import Tensor

    from hyper_parallel.transport.real.mindspore.rehearsal import RehearsedHccl

    class Carrier(_Carrier):
        def all_gather_object(self, obj, _ranks):
            return [obj, obj]

    gathered = [None, None]
    engine = RehearsedHccl(Carrier())
    engine.all_gather_object(gathered, [Tensor([True])], engine.new_group(None))
    assert [type(each) for each in gathered] == [list, list]
