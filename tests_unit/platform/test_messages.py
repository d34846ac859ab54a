"""Messages that are not what the receiver expects, over gloo in real processes."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError, HandleError, MeshError, RankFailedError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.pytest_plugin.ranks import need_carrier
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

LONG = (700, 1000)
"""Shape of a message of several pieces."""
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
STRANGE = "recv: rank 0 sent a message by other means than isend, send_object_list or p2p_exchange, f32[9] was expected"

REFUSED = [
    "isend: tag 2147483648 is no integer from 0 to 2147483647; give both sides the same one, or none at all",
    (
        "irecv: nothing can be received into this tensor: of [2, 3] elements share memory, strides are [0, 1]; receive "
        "into its contiguous()"
    ),
]
"""What is told of a wrong tag, and of an expanded tensor."""
LEFT = [
    "send: f32[] to rank 0 (tag 0) is lost; that rank ended or died before, its output says why",
    "recv: i64[3] from rank 0 (tag 5) is lost; that rank ended or died before, its output says why",
    (
        "recv: i64[3] from rank 0 (tag 5) was not waited for before this rank left the world; wait, then call "
        "destroy_process_group"
    ),
]
"""What is told of a rank that has left, and once this one has."""


def _told(wait, *given, kind=CollectiveMismatchError):
    with pytest.raises(kind) as caught:
        wait(*given)
    return str(caught.value)


class _Ring:
    """One rank, which sends to the next one and receives from the one before."""

    def __init__(self, platform_name):
        self.platform = platform = platform_named(platform_name)
        self.me, size = platform.get_rank(), platform.get_world_size()
        self.after, self.before = (self.me + 1) % size, (self.me - 1) % size

    def make(self, what, value=0.0):
        """A tensor of this dtype and shape."""
        return self.platform.from_numpy(np.full(what[1], value, what[0]))

    def right(self, shape):
        """Two messages on their way at once, both what is expected, waited for in the other order."""
        wishes = [self.platform.irecv(self.make(("float32", shape)), self.before) for _ in range(2)]
        values = [self.make(("float32", shape), self.me + 10.0 * turn) for turn in range(2)]
        sent = [self.platform.isend(value, self.after) for value in values]
        arrived = [self.platform.tensor_to_numpy(wish.wait()) for wish in reversed(wishes)]
        for one in sent:
            one.wait()
        for turn, array in enumerate(reversed(arrived)):
            want = np.full(shape, self.before + 10.0 * turn, np.float32)
            np.testing.assert_array_equal(array, want, strict=True)

    def one_by_one(self):
        """Who waits for the sending first finds all others doing the same."""
        told = []
        for sends, expects in UNEQUAL:
            wish = self.platform.irecv(self.make(expects), self.before)
            self.platform.isend(self.make(sends), self.after).wait()
            told.append(_told(wish.wait))
            self.right((2, 3))
        return told

    def at_once(self):
        """All on their way, and the last one waited for first."""
        wishes = [self.platform.irecv(self.make(expects), self.before) for _, expects in UNEQUAL]
        sent = [self.platform.isend(self.make(sends), self.after) for sends, _ in UNEQUAL]
        told = [_told(wish.wait) for wish in reversed(wishes)]
        for one in reversed(sent):
            one.wait()
        self.right(LONG)
        return told[::-1]

    def blocking(self):
        """From rank 0 to rank 1, in the end one that this library has not sent."""
        import torch  # whose gloo carries MindSpore's, too
        import torch.distributed as dist

        transport = self.platform.transport()
        if self.me == 0:
            for sends, _ in UNEQUAL:
                transport.send(self.make(sends), 1)
            dist.send(torch.ones(9), 1)
        wishes = [*(expects for _, expects in UNEQUAL), ("float32", (9,))] if self.me == 1 else []
        told = [_told(transport.recv, self.make(expects), 0) for expects in wishes]
        self.right((0, 2))
        return told

    def late(self):
        """From rank 0 to rank 1, which joins a collective before it waits for what is longer than it expects."""
        wishes = [self.platform.irecv(self.make(("float32", (3,))), 0) for _ in range(3)] if self.me == 1 else []
        if self.me == 0:
            for turn, shape in enumerate((LONG, (3,), LONG)):
                self.platform.isend(self.make(("float32", shape), turn), 1).wait()
        self.platform.all_reduce(self.make(("float32", (2,))))
        told = [_told(wishes[2].wait), _told(wishes[0].wait)] if self.me == 1 else []
        told += [self.platform.tensor_to_numpy(wish.wait()).tolist() for wish in wishes[1:2]]
        self.right((2, 3))
        return told

    def refused(self):
        """What is wrong before anything is sent."""
        row = self.make(("float32", (1, 3)))
        told = []
        for call in (
            lambda: self.platform.isend(row, self.after, tag=2**31),
            lambda: self.platform.irecv(row.expand((2, 3)), self.before),
        ):
            with pytest.raises(ValueError, match=r"\w+: ") as caught:
                call()
            told.append(str(caught.value))
        return told

    def left(self):
        """Messages to and from rank 0, which leaves, and some that a rank waits for once it has left the world."""
        if self.me == 0:
            return []
        begun = [self.platform.irecv(self.make(("int64", (3,))), 0, tag=5) for _ in range(2)]
        waits = [lambda: self.platform.isend(self.make(("float32", ())), 0).wait(), begun[0].wait]
        told = [_told(wait, kind=RankFailedError).partition(": [")[0] for wait in waits]
        self.platform.destroy_process_group()
        return [*told, _told(begun[1].wait, kind=HandleError)]

    def swapped(self):
        """Of a pair either one has more."""
        told = []
        for larger in range(2) if self.me < 2 else ():
            mine = self.make(("float32", LONG if self.me == larger else (3,)))
            told.append(_told(self.platform.p2p_exchange, mine, 1 - self.me))
        self.right(LONG)
        return told


class _Pair:
    """Ranks 0 and 1 of a world, which send and receive in many ways at once: everything is a single number."""

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
        """As a tensor."""
        return self.platform.from_numpy(np.array([value]))

    def send(self):
        """In one order."""
        sent = [self.platform.isend(self.number(turn), 1, group, tag) for turn, (group, tag) in enumerate(self.ways)]
        for group in (None, (0, 1)):
            self.platform.send_object_list([group], 1, group)
        swapped = [self.value(self.platform.p2p_exchange(self.number(turn), 1, group))
                   for turn, group in ((20, None), (21, (0, 1)))]  # fmt: skip
        for one in sent:
            one.wait()
        return swapped

    def receive(self):
        """In another one."""
        found = []
        for group in (None, (0, 1)):
            room = [0]
            self.platform.recv_object_list(room, 0, group)
            found.append(room[0])
        found += [self.value(self.platform.p2p_exchange(self.number(30), 0, group)) for group in (None, (0, 1))]
        wishes = [self.platform.irecv(self.number(-1), 0, group, tag) for group, tag in reversed(self.spelled)]
        return found + [self.value(wish.wait()) for wish in reversed(wishes)]

    def again(self):
        """A group that is destroyed, which its receiver refuses before it has waited, and built again."""
        platform, peer, found = self.platform, 1 - self.me, []
        for value in (40, 41):
            group = platform.create_group([0, 1])
            if self.me == 0:
                platform.recv_object_list([None], peer)
                platform.isend(self.number(value), peer, group, 9).wait()
            else:
                wish = platform.irecv(self.number(-1), peer, (0, 1), 9)
                with pytest.raises(MeshError) as caught:
                    platform.destroy_process_group(group)
                platform.send_object_list([None], peer)
                found += [str(caught.value), self.value(wish.wait())]
            platform.destroy_process_group(group)
        return [*found, platform.transport().build_of((0, 1))]

    def value(self, tensor):
        """Of the single element."""
        return int(self.platform.tensor_to_numpy(tensor)[0])


def _apart(platform_name):
    """What arrives at ranks 0 and 1."""
    pair = _Pair(platform_name)
    return (pair.send() if pair.me == 0 else pair.receive()) + pair.again() if pair.me < 2 else []


def _compare_apart(found, groups):
    pending = (
        "destroy_process_group: rank 1 still receives from rank 0 with tag 9 in the group [0, 1]; wait for what irecv "
        "returned first"
    )
    again = [pending, 40, pending, 41, "after 2 destroyed"]
    assert found == [[30, 30, again[-1]], [None, (0, 1), 20, 21, *range(groups), *again], []]


def test_messages_of_other_members_tags_and_groups_are_told_apart(platform_name):
    """A message meets the receive of its member, tag and group, in whatever order others come; simulated ranks, too."""
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
    """Rank 0 sends to rank 1, which receives into each part of a tensor of its own; these tensors."""
    platform, found = platform_named(platform_name), {}
    for dtype in ("float32", "bfloat16", "bool", "complex64"):
        for name, part in PARTS.items():
            x = platform.zeros((2, 3), platform.str_to_dtype(dtype))
            if platform.get_rank() == 0:
                values = np.arange(1.0, 7.0)[: part(np.zeros((2, 3))).size].reshape(tuple(part(x).shape))
                platform.isend(platform.tensor_type_cast(platform.from_numpy(values), dtype), 1).wait()
                continue
            given = part(x)
            assert platform.irecv(given, 0).wait() is given
            found[dtype, name] = platform.tensor_to_numpy(x).astype(np.complex64)
    return found


def test_messages_are_received_into_parts_of_tensors(platform_name):
    """What arrives in a view shows in the tensor of which it is a part, for every dtype and stride."""
    found = simulate(_into_parts, 2, platform_name, (platform_name,))[1]
    assert len(found) == 4 * len(PARTS)
    for (dtype, name), array in found.items():
        want = np.zeros((2, 3), np.complex64)
        part = PARTS[name](want)
        part[...] = np.minimum(np.arange(1, 1 + part.size), 1 if dtype == "bool" else 6).reshape(part.shape)
        np.testing.assert_array_equal(array, want, err_msg=f"{dtype}, {name}")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.platforms("torch")
def test_tensors_that_cannot_be_received_into_are_refused():
    """At the call, with the reason; strides that reach over each other without meeting are fine."""
    import torch

    with torch.inference_mode():
        inference = torch.zeros(2)
    windows, ragged = torch.zeros(4).as_strided((3, 2), (1, 1)), [torch.ones(1), torch.ones(2)]
    reasons = {
        "of [3, 2] elements share memory, strides are [1, 1]; receive into its contiguous()": windows,
        "its layout is torch.sparse_coo; give a dense one": torch.eye(2).to_sparse(),
        "its layout is nested; give a dense one": torch._nested_tensor_from_tensor_list(ragged),
        "it was made in inference mode, which this is not; give its clone()": inference,
    }

    def rank():
        platform = platform_named("torch")
        if platform.get_rank():
            return platform.isend(torch.arange(6.0).reshape(3, 2), 0).wait()
        told = []
        for given in reasons.values():
            with pytest.raises(ValueError, match="irecv: ") as caught:
                platform.irecv(given, 1)
            told.append(str(caught.value))
        return told, platform.irecv(torch.zeros(8).as_strided((3, 2), (2, 3)), 1).wait().tolist()

    told, received = simulate(rank, 2, "torch")[0]
    assert told == [f"irecv: nothing can be received into this tensor: {reason}" for reason in reasons]
    assert received == [[0, 1], [2, 3], [4, 5]]


def _unequal(platform_name):
    """What each rank is told in every form there is, and a sum afterwards."""
    ring = _Ring(platform_name)
    told = [form() for form in (ring.one_by_one, ring.at_once, ring.blocking, ring.late, ring.refused, ring.swapped)]
    apart = _apart(platform_name) if ring.platform.get_world_size() > 2 else None
    total = ring.platform.all_reduce(ring.make(("float32", (2,)), ring.me))
    return apart, told, ring.platform.tensor_to_numpy(total).tolist(), ring.left()


def test_a_message_that_is_not_expected_is_told(platform_name):
    """Longer, shorter, of another dtype or shape: its receiver is told, nobody hangs or ends, and all go on."""
    need_carrier(platform_name)
    for world_size in (2, 3) if platform_name == "torch" else (3,):
        found = launch(_unequal, world_size, platform_name, (platform_name,), timeout=120)
        _compare(found, world_size)


def _compare(found, world_size):
    if world_size > 2:
        _compare_apart([apart for apart, *_ in found], 8)
    for me, (_, (one_by_one, at_once, blocking, late, refusals, swapped), total, left) in enumerate(found):
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
