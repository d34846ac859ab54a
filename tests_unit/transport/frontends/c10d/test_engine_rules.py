"""What NCCL and HCCL refuse, refused on simulated and on rehearsed ranks."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import RankFailedError, UnsupportedOnBackend
from hyper_parallel.transport.processes import ENGINE_VARIABLE
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

_DTYPES = "bfloat16, bool, float16, float32, float64, int16, int32, int64, int8, uint8"


def _strided(dist, torch):
    dist.all_reduce(torch.ones(3, 4).t())


def _uint16(dist, torch):
    dist.broadcast(torch.ones(2, dtype=torch.uint16), 0)


def _float64_sum(dist, torch):
    dist.all_reduce(torch.ones(2, dtype=torch.float64))


def _average(dist, torch):
    dist.all_reduce(torch.ones(2), dist.ReduceOp.AVG)


def _uneven(dist, torch):
    rank = dist.get_rank()
    dist.all_gather([torch.empty(size + 1) for size in range(2)], torch.ones(rank + 1))


def _sparse(dist, torch):
    dist.all_reduce(torch.eye(2).to_sparse())


def _tag(dist, torch):
    (dist.send if dist.get_rank() == 0 else dist.recv)(torch.ones(2), 1 - dist.get_rank(), tag=3)


def _any_source(dist, torch):
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2))


def _monitored(dist, torch):
    dist.monitored_barrier()


_REFUSED = {
    _strided: "allreduce: hccl would refuse this call: float32[4, 3] with strides [1, 4] is not contiguous; call "
    ".contiguous() first, and copy a received buffer back",
    _uint16: f"broadcast: hccl would refuse this call: uint16[2] has a dtype that it does not carry; cast to one "
    f"of {_DTYPES}",
    _float64_sum: "allreduce: hccl would refuse this call: float64[2] has a dtype that it does not reduce; cast to one "
    "of bfloat16, float16, float32, int16, int32, int64, int8",
    _average: "allreduce: hccl would refuse this call: it has no reduction AVG; it has MAX, MIN, PRODUCT, SUM; "
    "platform.all_reduce serves every reduction",
    _uneven: "allgather: hccl would refuse this call: the tensors of all members have [1, 2] elements; they must be "
    "equal; pad them to the largest, or use all_to_all_single with split sizes",
    _sparse: "allreduce: hccl would refuse this call: float32[2, 2] is sparse; call .to_dense() first",
    _tag: ": hccl would refuse this call: tag 3 is ignored by it, so messages would be mixed up; send messages with "
    "tag 0, in the order in which they are received",
    _any_source: "recv_anysource: hccl would refuse this call: it has no receive from any rank; name the rank",
    _monitored: "monitored_barrier: hccl would refuse this call: only gloo has it; call barrier()",
}


def _call(program):
    import torch
    import torch.distributed as dist

    program(dist, torch)


@pytest.mark.parametrize("program", _REFUSED, ids=lambda program: program.__name__)
def test_a_seeded_call_is_refused_on_simulated_ranks(program, monkeypatch):
    """Each class of calls that HCCL refuses raises with what, why and what to do."""
    monkeypatch.setenv(ENGINE_VARIABLE, "hccl")
    with pytest.raises(RankFailedError) as caught:
        simulate(_call, 2, "torch", (program,))
    assert isinstance(caught.value.__cause__, UnsupportedOnBackend)
    assert str(caught.value.__cause__).endswith(_REFUSED[program])


@pytest.mark.parametrize("program", [_strided, _float64_sum, _average, _uneven], ids=lambda program: program.__name__)
def test_without_rules_the_call_is_served(program, monkeypatch):
    """What the engine refuses is served where no engine is named."""
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
    simulate(_call, 2, "torch", (program,))


@pytest.mark.parametrize("program", [_float64_sum, _average, _uneven], ids=lambda program: program.__name__)
def test_nccl_serves_what_only_hccl_refuses(program, monkeypatch):
    """NCCL reduces float64, averages, and gathers lists of unequal sizes."""
    monkeypatch.setenv(ENGINE_VARIABLE, "nccl")
    simulate(_call, 2, "torch", (program,))


def test_an_unknown_engine_is_refused():
    """A name that is not an engine is an error that lists the engines."""
    from hyper_parallel.transport.frontends.c10d.engine_rules import rules_of

    assert rules_of("") is None
    with pytest.raises(ValueError, match=r"^HYPER_PARALLEL_ENGINE_RULES='mccl' is not an engine; set hccl or nccl"):
        rules_of("mccl")


def test_tensors_are_found_in_lists_of_lists():
    """The rules see the tensors of every form of call, and an empty list has none."""
    import torch

    from hyper_parallel.transport.frontends.c10d.engine_rules import tensors_in

    x = torch.ones(2)
    assert [y is x for y in tensors_in([x, [[x]], (), 3, None])] == [True, True]
