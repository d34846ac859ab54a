"""Send and receive of simulated ranks: matched by source, tag and group, agreed upon, and never left unanswered."""

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify import launch as run_in_processes, simulate

pytestmark = pytest.mark.platforms("torch")


def cause(body, world_size=2):
    """The text of the error that a program ends with; ``{line}`` stands for the lines of its body."""
    with pytest.raises(RankFailedError) as caught:
        simulate(body, world_size, "torch")
    text, first = str(caught.value.__cause__), body.__code__.co_firstlineno
    for line in range(first, first + 10):
        text = text.replace(f"{__file__}:{line}", f"line {line - first}")
    return text


def test_messages_arrive_by_source_tag_and_group():
    """A receive takes the message of its source, tag and group, whatever was sent before; also from any source."""

    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        group, x = dist.new_group([0, 2]), torch.zeros(2)
        received = []
        if rank == 2:
            works = [
                dist.isend(torch.full((2,), 1.0), 0, tag=1),
                dist.isend(torch.full((2,), 2.0), 0, tag=2),
                dist.isend(torch.full((2,), 3.0), 0, group=group, tag=1),
            ]
            for work in works:
                work.wait()
        elif rank == 1:
            dist.send(torch.full((2,), 4.0), 0, tag=7)
        else:
            dist.recv(x, group_src=1, group=group, tag=1)
            received.append(x[0].item())
            for tag in [2, 1]:
                dist.recv(x, 2, tag=tag)
                received.append(x[0].item())
            received += [dist.recv(x, tag=7), x[0].item()]
        ring = torch.zeros(1)
        operations = [
            dist.P2POp(dist.isend, torch.ones(1) * rank, (rank + 1) % size),
            dist.P2POp(dist.irecv, ring, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received, ring.item()

    assert simulate(body, 3, "torch") == [([3.0, 2.0, 1.0, 1, 4.0], 2.0), ([], 0.0), ([], 1.0)]


def test_lists_of_objects():
    """send_object_list and recv_object_list carry objects."""

    def body():
        objects = [{"a": [1]}, "b"] if dist.get_rank() == 0 else [None, None]
        if dist.get_rank() == 0:
            dist.send_object_list(objects, 1)
        else:
            dist.recv_object_list(objects, 0)
        return objects

    assert simulate(body, 2, "torch") == [[{"a": [1]}, "b"]] * 2


def test_a_payload_is_the_value_at_the_time_of_sending():
    """A sender that writes into its tensor after an isend that it never waits for changes nobody's message."""

    def body():
        x = torch.ones(2)
        if dist.get_rank() == 0:
            dist.isend(x, 1)
            x.zero_()
        else:
            dist.recv(x.zero_(), 0)
        return x.tolist()

    assert simulate(body, 2, "torch")[1] == [1.0, 1.0]


@pytest.mark.parametrize(
    "fact, text, tensor",
    [("shape", "f32[3]", torch.zeros(3)), ("dtype", "f64[2]", torch.zeros(2, dtype=torch.float64))],
)
def test_sides_that_differ_are_both_shown(fact, text, tensor):
    """A receive whose shape or dtype differs from what is sent is an error that shows both calls and lines."""

    def body():
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1, tag=3)
        else:
            dist.recv(tensor.clone(), 0, tag=3)

    assert cause(body) == (
        f"ranks 0 and 1 disagree about the {fact} of a message:\n"
        "  rank 0: send(f32[2], dst=1, tag=3) at line 2\n"
        f"  rank 1: recv({text}, src=0, tag=3) at line 4"
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_sides_agree_about_the_number_of_elements(world_size):
    """A receive takes as many elements as were sent, in its own shape, as engines do: they see no shapes."""

    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        sent = [torch.full((), 5.0 + rank), torch.arange(6.0).reshape(2, 3) + rank, torch.ones(0, 3)]
        taken = [torch.zeros(1), torch.zeros(3, 1, 2), torch.zeros(0)]
        for x, y in zip(sent, taken, strict=True):
            calls = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, y, (rank - 1) % size)]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        return [y.tolist() for y in taken]

    for rank, values in enumerate(simulate(body, world_size, "torch")):
        peer = (rank - 1) % world_size
        flat = torch.arange(6.0) + peer
        assert values == [[5.0 + peer], flat.reshape(3, 1, 2).tolist(), []]


def test_different_tags_are_a_deadlock():
    """Sides whose tags differ wait for each other, which is told at once."""

    def body():
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1, tag=1)
        else:
            dist.recv(torch.ones(2), 0, tag=2)

    assert cause(body) == (
        "deadlock, no rank can go on; ranks 0 and 1 disagree about the tag of a message:\n"
        "  rank 0 waited in send(f32[2], dst=1, tag=1) at line 2\n"
        "  rank 1 waited in recv(f32[2], src=0, tag=2) at line 4"
    )


def test_two_ranks_that_send_first_are_a_deadlock():
    """A send is complete when its receive is posted, as over gloo."""

    def body():
        peer = 1 - dist.get_rank()
        dist.send(torch.ones(2), peer)
        dist.recv(torch.ones(2), peer)

    assert cause(body) == (
        "deadlock, no rank can go on:\n"
        "  rank 0 waited in send(f32[2], dst=1, tag=0) at line 2\n"
        "  rank 1 waited in send(f32[2], dst=0, tag=0) at line 2"
    )


def test_a_receive_that_nobody_answers_is_named():
    """When the source has returned, its receiver is reported, with what the source sent in another way."""

    def body():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            dist.isend(torch.ones(2), 1, group=group)
        else:
            dist.recv(torch.ones(2), tag=2)

    assert cause(body) == (
        "rank 0 returned without sending what rank 1 waits for:\n"
        "  rank 1: recv(f32[2], src=any, tag=2) at line 5\n"
        "  rank 0, unanswered: send(f32[2], dst=1, tag=0, group [0, 1], named '1') at line 3"
    )


def test_a_send_that_nobody_receives_is_named():
    """A sender that waits is told when its receiver returns; one that does not wait is told at the end."""

    def waits():
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)

    def leaves():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(2), 1)

    assert cause(waits) == (
        "rank 1 returned without receiving what rank 0 sends:\n  rank 0: send(f32[2], dst=1, tag=0) at line 2"
    )
    assert cause(leaves) == (
        "messages were lost:\n  rank 0: send(f32[2], dst=1, tag=0) was never received; sent at line 2"
    )


def test_a_message_to_oneself_is_refused():
    """A rank that names itself, or no member of the group, is told so."""

    def body():
        dist.distributed_c10d._get_default_group().send([torch.ones(1)], dist.get_rank(), 0)

    assert cause(body) == ("send on group rank 0 names group rank 0; it must be another rank of the group's 2")


def test_asking_lets_others_run_and_tells_the_source():
    """is_completed() of a receive lets the sender run; its work tells who sent."""

    def body():
        x = torch.zeros(1)
        if dist.get_rank() == 1:
            dist.send(x + 5, 0)
            return None
        work = dist.irecv(x)
        while not work.is_completed():
            pass
        return x.item(), work.source_rank()

    assert simulate(body, 2, "torch")[0] == (5.0, 1)


def test_shapes_of_equal_size_make_no_difference():
    """A tensor may be received into one of another shape and equal size, as over gloo, with its values in order."""

    def body(sent, taken):
        if dist.get_rank():
            dist.send(torch.full(sent, 3.5), 0)
            return None
        x = torch.zeros(taken)
        dist.recv(x, 1)
        return x.tolist()

    assert simulate(body, 2, "torch", args=((), (1,)))[0] == [3.5]
    assert simulate(body, 2, "torch", args=((1,), ()))[0] == 3.5
    assert simulate(body, 2, "torch", args=((3, 1, 2), (3, 2)))[0] == [[3.5] * 2] * 3


@pytest.mark.parametrize("launch", ["simulated", "processes"])
def test_a_tensor_is_not_written_while_its_send_is_pending(launch):
    """Writing to what is being sent is an error at its wait; other rows of its memory and equal values are none."""

    def body(rows, value):
        room = torch.ones(3, 2)
        if dist.get_rank():
            work = dist.isend(room[0], 0)
            room[rows] = value
            work.wait()
            return None
        dist.recv(room[0], 1)
        return room[0].tolist()

    run = simulate if launch == "simulated" else run_in_processes
    for rows, value in ((1, 7.0), (0, 1.0)):
        assert run(body, 2, "torch", args=(rows, value))[0] == [1.0, 1.0]
    with pytest.raises(RankFailedError) as caught:
        run(body, 2, "torch", args=(0, 7.0))
    line = body.__code__.co_firstlineno + 3
    assert (
        f"the tensor of the isend at {__file__}:{line} was written before its wait: the receiver may get the old "
        "values, the new ones or some of both; wait for the send first, or send a copy" in str(caught.value)
    )


def _read_early(use, rows=0, count=3):
    """Receive rows of a tensor, and use it before the wait."""
    room = torch.zeros(6, 2)
    if dist.get_rank():
        dist.send(torch.full((count, 2), 3.5), 0)
        return None
    work = dist.irecv(room[rows : rows + count], 1)
    found = use(room)
    work.wait()
    work.wait()
    return found, room.sum().item()


UNREAD = {
    "other rows": lambda room: room[3:].sum().item(),
    "every other column of other rows": lambda room: room.T[:, 3:].exp().sum().item(),
    "shape": lambda room: tuple(torch.zeros_like(room.view(12)[1:]).shape),
    "a subclass": lambda room: room.to_sparse() if room.numel() == 1 else None,
}
TOUCHED = {
    "read": ("read", lambda room: room.sum()),
    "read through a view": ("read", lambda room: room[2, 1:].clone()),
    "read in columns": ("read", lambda room: room.T[1].exp()),
    "read in a list": ("read", lambda room: torch.cat([torch.ones(1, 2), room[:1]])),
    "read in backward": ("read", lambda room: torch.ones(6, 2, requires_grad=True).mul(room)),
    "written": ("written", lambda room: room[1].zero_()),
    "sent": ("read", lambda room: dist.isend(room.clone(), 1)),
}


@pytest.mark.parametrize("use", UNREAD)
@pytest.mark.parametrize("launch", ["simulated", "processes"])
def test_what_is_not_received_may_be_read_while_a_receive_is_pending(use, launch):
    """Other rows, views and shapes of the memory that is received into are no error before the wait."""
    run = simulate if launch == "simulated" else run_in_processes
    found, total = run(_read_early, 2, "torch", args=(UNREAD[use],))[0]
    assert total == 21.0
    assert found in (0.0, 6.0, (11,), None)


@pytest.mark.parametrize("use", TOUCHED)
@pytest.mark.parametrize("launch", ["simulated", "processes"])
def test_a_tensor_is_not_read_before_its_receive_is_waited_for(use, launch):
    """Reading or writing what is being received, in any spelling, is an error at that line."""
    verb, touch = TOUCHED[use]
    run = simulate if launch == "simulated" else run_in_processes
    with pytest.raises(RankFailedError) as caught:
        run(_read_early, 2, "torch", args=(touch,))
    line = _read_early.__code__.co_firstlineno + 6
    assert (
        f"the tensor of the irecv at {__file__}:{line} was {verb} before its wait: it may hold the old values, the "
        "received ones or some of both; wait for the receive first" in str(caught.value)
    )


def test_modes_of_the_program_outlive_a_pending_receive():
    """A mode that is entered between irecv and wait is still there after it, and the watch is not."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import FlopCounterMode

    def body():
        if dist.get_rank():
            dist.send(torch.ones(2, 2), 0)
            return None
        x = torch.zeros(2, 2)
        work = dist.irecv(x, 1)
        with FlopCounterMode(display=False) as counter:
            work.wait()
            x @ x
        return counter.get_total_flops(), len(_get_current_dispatch_mode_stack())

    assert simulate(body, 2, "torch")[0] == (16, 0)
