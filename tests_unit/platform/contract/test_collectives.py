"""Facet *collectives*: the same values and errors on every framework; over gloo, mismatched messages."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hyper_parallel.errors import (
    CollectiveMismatchError,
    HandleError,
    HyperParallelError,
    MeshError,
    RankFailedError,
)
from hyper_parallel.platform.select import platform_named
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.transport.base import active_transport, use_transport
from hyper_parallel.transport.real.guarded import GuardedTransport
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

WORLDS = pytest.mark.parametrize("world", [2, 3])
REDUCE = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) / len(parts),
    "max": lambda parts: parts.max(0),
    "min": lambda parts: parts.min(0),
    "prod": lambda parts: parts.prod(0),
    "all": lambda parts: parts.all(0),
    "any": lambda parts: parts.any(0),
}


def data(world, op="sum", rows=None):
    """The arrays of all ranks, rank first: booleans for all and any, else numbers with exact sums and products."""
    rng = np.random.default_rng(world)
    shape = (world, *(() if rows is None else (rows,)), 3)
    if op in {"all", "any"}:
        return rng.integers(0, 3, shape) > (0 if op == "all" else 1)
    return rng.integers(-4, 5, shape) / 4 + 0.125


def groups(world):
    """The ways to name a group: None, a tuple and a list in other orders, some of the ranks."""
    return [None, tuple(range(world))[::-1], [*range(1, world), 0], (world - 1,), tuple(range(world - 1))]


def members(group, world):
    """The global ranks of a group, however it is named."""
    return list(range(world)) if group is None else list(group)


def run(platform_name, world, rank):
    """Run ``rank(platform)`` on every simulated rank."""

    def on_platform():
        return rank(platform_named(platform_name))

    return simulate(on_platform, world, platform_name)


def refusals(platform, calls):
    """Return the type and message of each call's error."""
    results = []
    for call in calls:
        with pytest.raises((HyperParallelError, ValueError)) as caught:
            call()
        results.append((type(caught.value).__name__, str(caught.value)))
    return results


def each_group(world, platform, call):
    """Results of ``call(group)`` for every group that has this rank, as NumPy, by the group's index."""
    mine = platform.get_rank()
    named = [(number, group) for number, group in enumerate(groups(world)) if mine in members(group, world)]
    return {number: platform.tensor_to_numpy(call(group)) for number, group in named}


def same(result, wanted):
    """Assert equality in every bit, dtype and shape included."""
    assert result.dtype == wanted.dtype
    np.testing.assert_array_equal(result, wanted, strict=True)


@WORLDS
@pytest.mark.parametrize("op", REDUCE)
def test_all_reduce(platform_name, world, op):
    """Every reduction over every group, on every member; the input keeps its values."""
    parts = data(world, op)

    def rank(platform):
        mine = platform.from_numpy(parts[platform.get_rank()].copy())
        results = each_group(world, platform, lambda group: platform.all_reduce(mine, group, op=op))
        return results, platform.tensor_to_numpy(mine)

    for number, (results, mine) in enumerate(run(platform_name, world, rank)):
        same(mine, parts[number])
        assert 0 in results
        for index, value in results.items():
            same(value, np.asarray(REDUCE[op](parts[members(groups(world)[index], world)])))


@WORLDS
@pytest.mark.parametrize("op", REDUCE)
def test_reduce_scatter_tensor(platform_name, world, op):
    """Each member of the group gets the slice of its position."""
    parts = data(world, op, rows=6)

    def rank(platform):
        mine = platform.from_numpy(parts[platform.get_rank()].copy())
        return each_group(world, platform, lambda group: platform.reduce_scatter_tensor(mine, group, op=op))

    for number, results in enumerate(run(platform_name, world, rank)):
        for index, value in results.items():
            ranks = members(groups(world)[index], world)
            same(value, np.split(REDUCE[op](parts[ranks]), len(ranks))[ranks.index(number)])


@WORLDS
@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_all_gather_into_tensor_and_broadcast(platform_name, world, dtype):
    """Shards are concatenated in the group's order; the source is a global rank."""
    parts = data(world, rows=2).astype(dtype)

    def rank(platform):
        mine = platform.from_numpy(parts[platform.get_rank()].copy())
        gathered = each_group(world, platform, lambda group: platform.all_gather_into_tensor(mine, group))
        sent = each_group(world, platform, lambda group: platform.broadcast(mine, members(group, world)[-1], group))
        return gathered, sent, platform.tensor_to_numpy(mine)

    for number, (gathered, sent, mine) in enumerate(run(platform_name, world, rank)):
        same(mine, parts[number])
        assert gathered.keys() == sent.keys()
        for index, value in gathered.items():
            ranks = members(groups(world)[index], world)
            same(value, np.concatenate(parts[ranks]))
            same(sent[index], parts[ranks[-1]])


@WORLDS
def test_all_gather_object(platform_name, world):
    """The given list is filled in the group's order, whatever its length was."""

    def rank(platform):
        everyone, reverse = [None] * world, []
        platform.all_gather_object(everyone, {"rank": platform.get_rank()})
        platform.all_gather_object(reverse, (platform.get_rank(), "x"), tuple(range(world))[::-1])
        return everyone, reverse

    for everyone, reverse in run(platform_name, world, rank):
        assert everyone == [{"rank": value} for value in range(world)]
        assert reverse == [(value, "x") for value in range(world)][::-1]


@WORLDS
def test_refusals(platform_name, world):
    """Invalid calls are refused on every rank, before anything is sent, with the same message."""

    def rank(platform):
        mine, x = platform.get_rank(), platform.from_numpy(np.ones((5 * world + 1, 2)))
        other = ((mine + 1) % world,)
        results = refusals(
            platform,
            [
                lambda: platform.reduce_scatter_tensor(x),
                lambda: platform.get_group_local_rank(other),
                lambda: platform.get_global_rank((0, 1), 2),
                lambda: platform.get_global_rank(None, -1),
                lambda: platform.create_group([0, 0]),
                lambda: platform.create_group([0, world]),
                lambda: platform.create_group([]),
            ],
        )
        outside = refusals(
            platform,
            [
                lambda: platform.all_reduce(x, other),
                lambda: platform.all_gather_into_tensor(x, other),
                lambda: platform.all_gather_object([], 1, other),
                lambda: platform.barrier(other),
                lambda: platform.broadcast(x, world),
                lambda: platform.all_reduce(x, op="median"),
                lambda: platform.all_reduce(platform.from_numpy(np.ones(2, np.int64)), op="avg"),
            ],
        )
        return results, outside

    everyone = list(range(world))
    for number, (results, outside) in enumerate(run(platform_name, world, rank)):
        other = [(number + 1) % world]
        assert results == [
            (
                "ValueError",
                f"reduce_scatter_tensor: dim 0 of size {5 * world + 1} is not divisible by {world} ranks",
            ),
            ("MeshError", f"get_group_local_rank: rank {number} is not in the group of ranks {other}"),
            ("MeshError", "get_global_rank: group_rank 2 is outside the group of ranks [0, 1]"),
            ("MeshError", f"get_global_rank: group_rank -1 is outside the group of ranks {everyone}"),
            ("MeshError", f"create_group: rank_list [0, 0] must name distinct ranks of the world of {world}"),
            ("MeshError", f"create_group: rank_list [0, {world}] must name distinct ranks of the world of {world}"),
            ("MeshError", f"create_group: rank_list [] must name distinct ranks of the world of {world}"),
        ]
        refused = f"rank {number} calls a collective over ranks ({other[0]},), of which it is not a member"
        sourceless = f"broadcast from rank {world}, which is not among ranks {tuple(everyone)}; src is a global rank"
        everywhere = ", ".join(REDUCE)
        average = "the average of integers or booleans is not an integer: use 'sum', or convert to a float first"
        assert outside == [
            *[("CollectiveMismatchError", refused)] * 4,
            ("CollectiveMismatchError", sourceless),
            ("ReductionError", f"unknown reduction 'median'; known: {everywhere}"),
            ("ReductionError", average),
        ]


# Messages from one rank to another, over gloo in real processes

LONG = (700, 1000)
"""Shape of a message that is sent in several chunks."""
UNEQUAL = (
    (("float32", LONG), ("float32", (3,))),
    (("float64", LONG), ("float32", LONG)),
    (("float32", (5, 2)), ("float32", LONG)),
    (("int64", (4,)), ("float32", (0, 2))),
    (("float32", (2, 0)), ("int64", (4,))),
    (("float32", (2, 3)), ("float32", (3, 2))),
)
"""What is sent, and what is expected."""
SENT = ["f32[700, 1000]", "f64[700, 1000]", "f32[5, 2]", "i64[4]", "f32[2, 0]", "f32[2, 3]"]
EXPECTED = ["f32[3]", "f32[700, 1000]", "f32[700, 1000]", "f32[0, 2]", "i64[4]", "f32[3, 2]"]
STRANGE = "recv: rank 0 sent a message not sent by isend, send_object_list or p2p_exchange, f32[9] was expected"

REFUSED = [
    "isend: tag 2147483648 must be an integer from 0 to 2147483647, the same on both sides",
    (
        "irecv: cannot receive into this tensor: elements of [2, 3] overlap in memory (strides [0, 1]); receive "
        "into its contiguous()"
    ),
]
"""The messages about a wrong tag and an expanded tensor."""
LEFT = [
    "send: f32[] to rank 0 (tag 0) is lost; that rank ended or died before, its output says why",
    "recv: i64[3] from rank 0 (tag 5) is lost; that rank ended or died before, its output says why",
    (
        "recv: i64[3] from rank 0 (tag 5) was not waited for before this rank left the world; wait, then call "
        "destroy_process_group"
    ),
]
"""The messages about a rank that has left the world, and after this rank has left it."""


def _message_of(wait, *arguments, kind=CollectiveMismatchError):
    with pytest.raises(kind) as caught:
        wait(*arguments)
    return str(caught.value)


class _Ring:
    """A rank that sends to the next one and receives from the one before."""

    def __init__(self, platform_name):
        self.platform = platform = platform_named(platform_name)
        self.me, size = platform.get_rank(), platform.get_world_size()
        self.after, self.before = (self.me + 1) % size, (self.me - 1) % size

    def make(self, what, value=0.0):
        """A tensor of this dtype and shape."""
        return self.platform.from_numpy(np.full(what[1], value, what[0]))

    def right(self, shape):
        """Two matching messages at once, waited for in reverse order."""
        receives = [self.platform.irecv(self.make(("float32", shape)), self.before) for _ in range(2)]
        values = [self.make(("float32", shape), self.me + 10.0 * turn) for turn in range(2)]
        sent = [self.platform.isend(value, self.after) for value in values]
        arrived = [self.platform.tensor_to_numpy(receive.wait()) for receive in reversed(receives)]
        for sending in sent:
            sending.wait()
        for turn, array in enumerate(reversed(arrived)):
            want = np.full(shape, self.before + 10.0 * turn, np.float32)
            np.testing.assert_array_equal(array, want, strict=True)

    def one_by_one(self):
        """Each rank waits for its send first, as all others do."""
        messages = []
        for sends, expects in UNEQUAL:
            receive = self.platform.irecv(self.make(expects), self.before)
            self.platform.isend(self.make(sends), self.after).wait()
            messages.append(_message_of(receive.wait))
            self.right((2, 3))
        return messages

    def at_once(self):
        """All messages at once, the last one waited for first."""
        receives = [self.platform.irecv(self.make(expects), self.before) for _, expects in UNEQUAL]
        sent = [self.platform.isend(self.make(sends), self.after) for sends, _ in UNEQUAL]
        messages = [_message_of(receive.wait) for receive in reversed(receives)]
        for value in reversed(sent):
            value.wait()
        self.right(LONG)
        return messages[::-1]

    def blocking(self):
        """Blocking messages from rank 0 to rank 1, the last one not sent by this library."""
        import torch  # whose gloo carries MindSpore's, too
        import torch.distributed as dist

        transport = self.platform.transport()
        if self.me == 0:
            for sends, _ in UNEQUAL:
                transport.send(self.make(sends), 1)
            dist.group.WORLD.send([torch.ones(9)], 1, 0).wait()  # dist.send asks the coordinator
        receives = [*(expects for _, expects in UNEQUAL), ("float32", (9,))] if self.me == 1 else []
        messages = [_message_of(transport.recv, self.make(expects), 0) for expects in receives]
        self.right((0, 2))
        return messages

    def late(self):
        """Rank 1 joins a collective before it waits for a message that is longer than expected."""
        receives = [self.platform.irecv(self.make(("float32", (3,))), 0) for _ in range(3)] if self.me == 1 else []
        if self.me == 0:
            for turn, shape in enumerate((LONG, (3,), LONG)):
                self.platform.isend(self.make(("float32", shape), turn), 1).wait()
        self.platform.all_reduce(self.make(("float32", (2,))))
        messages = [_message_of(receives[2].wait), _message_of(receives[0].wait)] if self.me == 1 else []
        messages += [self.platform.tensor_to_numpy(receive.wait()).tolist() for receive in receives[1:2]]
        self.right((2, 3))
        return messages

    def refused(self):
        """Calls that are refused before anything is sent."""
        row = self.make(("float32", (1, 3)))
        messages = []
        for call in (
            lambda: self.platform.isend(row, self.after, tag=2**31),
            lambda: self.platform.irecv(row.expand((2, 3)), self.before),
        ):
            with pytest.raises(ValueError, match=r"\w+: ") as caught:
                call()
            messages.append(str(caught.value))
        return messages

    def left(self):
        """Messages to and from a rank that leaves the world, and waits after leaving it."""
        begun = [self.platform.irecv(self.make(("int64", (3,))), 0, tag=5) for _ in range(2) if self.me]
        self.platform.all_reduce(self.make(("float32", (2,)), self.me))  # rank 0 leaves when the others have begun
        if self.me == 0:
            return []
        waits = [lambda: self.platform.isend(self.make(("float32", ())), 0).wait(), begun[0].wait]
        messages = [_message_of(wait, kind=RankFailedError).partition(": [")[0] for wait in waits]
        self.platform.destroy_process_group()
        return [*messages, _message_of(begun[1].wait, kind=HandleError)]

    def swapped(self):
        """Two ranks exchange messages of different lengths."""
        messages = []
        for larger in range(2) if self.me < 2 else ():
            mine = self.make(("float32", LONG if self.me == larger else (3,)))
            messages.append(_message_of(self.platform.p2p_exchange, mine, 1 - self.me))
        self.right(LONG)
        return messages


class _Pair:
    """Ranks 0 and 1 of a world, which send and receive single numbers in many ways at once."""

    def __init__(self, platform_name):
        self.platform = platform = platform_named(platform_name)
        self.me = platform.get_rank()
        if self.me > 1:
            return
        group = platform.create_group([0, 1])
        # Members, tags and groups; the last is spelled in another way by the receiver, where that means the same.
        self.ways = [(None, 0), (None, 7), (None, 2**31 - 1), (group, 0), (group, 7), ((0, 1), 1)]
        self.spelled = [*self.ways[:-1], (group, 1)]
        if platform.transport().backend == "gloo":
            self.ways += [(other, 0) for other in self._elsewhere()]
            self.spelled = [*self.spelled, *self.ways[6:]]

    def _elsewhere(self):
        """Two groups of the same ranks, built by PyTorch itself."""
        import torch.distributed as dist  # whose gloo carries MindSpore's, too

        return [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(2)]

    def number(self, value):
        """The number as a tensor."""
        return self.platform.from_numpy(np.array([value]))

    def send(self):
        """Send in one order."""
        sent = [self.platform.isend(self.number(turn), 1, group, tag) for turn, (group, tag) in enumerate(self.ways)]
        for group in (None, (0, 1)):
            self.platform.send_object_list([group], 1, group)
        swapped = [self.value(self.platform.p2p_exchange(self.number(turn), 1, group))
                   for turn, group in ((20, None), (21, (0, 1)))]  # fmt: skip
        for value in sent:
            value.wait()
        return swapped

    def receive(self):
        """Receive in another order."""
        results = []
        for group in (None, (0, 1)):
            room = [0]
            self.platform.recv_object_list(room, 0, group)
            results.append(room[0])
        results += [self.value(self.platform.p2p_exchange(self.number(30), 0, group)) for group in (None, (0, 1))]
        receives = [self.platform.irecv(self.number(-1), 0, group, tag) for group, tag in reversed(self.spelled)]
        return results + [self.value(receive.wait()) for receive in reversed(receives)]

    def again(self):
        """A group is destroyed, which is refused while a receive is pending, and built again."""
        platform, peer, results = self.platform, 1 - self.me, []
        for value in (40, 41):
            group = platform.create_group([0, 1])
            if self.me == 0:
                platform.recv_object_list([None], peer)
                platform.isend(self.number(value), peer, group, 9).wait()
            else:
                receive = platform.irecv(self.number(-1), peer, (0, 1), 9)
                with pytest.raises(MeshError) as caught:
                    platform.destroy_process_group(group)
                platform.send_object_list([None], peer)
                results += [str(caught.value), self.value(receive.wait())]
            platform.destroy_process_group(group)
        return [*results, platform.transport().build_of((0, 1))]

    def value(self, tensor):
        """The value of the single element."""
        return int(self.platform.tensor_to_numpy(tensor)[0])


def _apart(platform_name):
    """The values that arrive at ranks 0 and 1."""
    pair = _Pair(platform_name)
    return (pair.send() if pair.me == 0 else pair.receive()) + pair.again() if pair.me < 2 else []


def _compare_apart(results, groups):
    pending = (
        "destroy_process_group: rank 1 has pending receives from rank 0 with tag 9 in the group [0, 1]; first call "
        "wait() on the handles that irecv returned"
    )
    again = [pending, 40, pending, 41, "after 2 destroyed"]
    assert results == [[30, 30, again[-1]], [None, (0, 1), 20, 21, *range(groups), *again], []]


def test_messages_are_matched_by_sender_tag_and_group(platform_name):
    """A message reaches the receive of its sender, tag and group in any order; on simulated ranks too."""
    _compare_apart(simulate(_apart, 3, platform_name, (platform_name,)), 6)


PARTS = {
    "a row": lambda x: x[1:2],
    "a column": lambda x: x[:, 1:2],
    "every other column": lambda x: x[:, ::2],
    "an element": lambda x: x[1:, 2:].reshape(()),
    "all, transposed": lambda x: x.T,
    "all": lambda x: x,
    "all, flat": lambda x: x.reshape(-1),
    "nothing": lambda x: x[2:],
}


def _into_parts(platform_name):
    """Rank 0 sends to rank 1, which receives into each part of a tensor; return these tensors."""
    platform, results = platform_named(platform_name), {}
    for dtype in ("float32", "bfloat16", "bool", "complex64"):
        for name, part in PARTS.items():
            x = platform.zeros((2, 3), platform.str_to_dtype(dtype))
            if platform.get_rank() == 0:
                values = np.arange(1.0, 7.0)[: part(np.zeros((2, 3))).size].reshape(tuple(part(x).shape))
                platform.isend(platform.tensor_type_cast(platform.from_numpy(values), dtype), 1).wait()
                continue
            received = part(x)
            assert platform.irecv(received, 0).wait() is received
            results[dtype, name] = platform.tensor_to_numpy(x).astype(np.complex64)
    return results


def test_messages_are_received_into_parts_of_tensors(platform_name):
    """A receive into a view writes the tensor of which it is a part, for every dtype and stride."""
    results = simulate(_into_parts, 2, platform_name, (platform_name,))[1]
    assert len(results) == 4 * len(PARTS)
    for (dtype, name), array in results.items():
        want = np.zeros((2, 3), np.complex64)
        part = PARTS[name](want)
        part[...] = np.minimum(np.arange(1, 1 + part.size), 1 if dtype == "bool" else 6).reshape(part.shape)
        np.testing.assert_array_equal(array, want, err_msg=f"{dtype}, {name}")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.platforms("torch")
def test_tensors_that_cannot_be_received_into_are_refused():
    """Irecv refuses tensors that cannot be received into, with the reason; interleaved strides are allowed."""
    import torch

    with torch.inference_mode():
        inference = torch.zeros(2)
    windows, ragged = torch.zeros(4).as_strided((3, 2), (1, 1)), [torch.ones(1), torch.ones(2)]
    reasons = {
        "elements of [3, 2] overlap in memory (strides [1, 1]); receive into its contiguous()": windows,
        "its layout is torch.sparse_coo; pass a dense tensor": torch.eye(2).to_sparse(),
        "its layout is nested; pass a dense tensor": torch._nested_tensor_from_tensor_list(ragged),
        "it was made in inference mode, which is off now; pass its clone()": inference,
    }

    def rank():
        platform = platform_named("torch")
        if platform.get_rank():
            return platform.isend(torch.arange(6.0).reshape(3, 2), 0).wait()
        messages = []
        for tensor in reasons.values():
            with pytest.raises(ValueError, match="irecv: ") as caught:
                platform.irecv(tensor, 1)
            messages.append(str(caught.value))
        return messages, platform.irecv(torch.zeros(8).as_strided((3, 2), (2, 3)), 1).wait().tolist()

    messages, received = simulate(rank, 2, "torch")[0]
    assert messages == [f"irecv: cannot receive into this tensor: {reason}" for reason in reasons]
    assert received == [[0, 1], [2, 3], [4, 5]]


def _unequal(platform_name):
    """The messages of mismatched sends and receives in every form, and a sum afterwards, without a coordinator."""
    with use_transport(_unguarded(active_transport())):
        return _unequal_unguarded(platform_name)


def _unguarded(transport):
    """The transport without the comparison by a coordinator, which MindSpore's bridge has inside."""
    if isinstance(transport, GuardedTransport):
        return transport._inner
    bare = copy.copy(transport)
    bare._inner = transport._inner._inner
    return bare


def _unequal_unguarded(platform_name):
    ring = _Ring(platform_name)
    messages = [
        form() for form in (ring.one_by_one, ring.at_once, ring.blocking, ring.late, ring.refused, ring.swapped)
    ]
    apart = _apart(platform_name) if ring.platform.get_world_size() > 2 else None
    total = ring.platform.all_reduce(ring.make(("float32", (2,)), ring.me))
    return apart, messages, ring.platform.tensor_to_numpy(total).tolist(), ring.left()


def test_a_mismatched_message_raises_on_its_receiver(platform_name):
    """A message of another length, dtype or shape raises on its receiver, and all ranks continue."""
    require_transport(platform_name)
    for world_size in (2, 3) if platform_name == "torch" else (3,):
        results = launch(_unequal, world_size, platform_name, (platform_name,), timeout=120)
        _compare(results, world_size)


def _compare(results, world_size):
    if world_size > 2:
        _compare_apart([apart for apart, *_ in results], 8)
    for me, (_, (one_by_one, at_once, blocking, late, refusals, swapped), total, left) in enumerate(results):
        before = (me - 1) % world_size
        wanted = [f"recv: rank {before} sent {sent}, {expected} was expected"
                  for sent, expected in zip(SENT, EXPECTED, strict=True)]  # fmt: skip
        assert left == (LEFT if me else [])
        assert one_by_one == at_once == wanted
        assert blocking == ([*wanted, STRANGE] if me == 1 else [])
        assert refusals == REFUSED
        refused = "recv: rank 0 sent f32[700, 1000], f32[3] was expected"
        assert late == ([refused, refused, [1.0] * 3] if me == 1 else [])
        more = f"recv: rank {1 - me} sent f32[700, 1000], f32[3] was expected"
        less = f"recv: rank {1 - me} sent f32[3], f32[700, 1000] was expected"
        assert swapped == [[less, more], [more, less], []][me]
        assert total == [world_size * (world_size - 1) / 2] * 2
