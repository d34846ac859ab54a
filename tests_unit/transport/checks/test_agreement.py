"""Members agree on collectives over gloo before they run them: in real processes, and label by label."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.transport.checks.agreement import LABEL, Proposal, _is_started, _label, _read_label
from hyper_parallel.transport.checks.compare import mismatch
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, Site
from hyper_parallel.verify.launch import launch

SITE = re.compile(r" at \S*test_agreement\.py:\d+$", re.MULTILINE)


def _without_sites(text):
    """Return an error's lines without their call sites, with one line per rank."""
    header, *lines = SITE.sub("", text).split("\n")
    assert len(SITE.findall(text)) == len(lines), text
    return header, _by_rank(lines)


def _by_rank(lines):
    ranks = [re.fullmatch(r"  ranks? ([\d, ]+): (.*)", line).groups() for line in lines]
    return {int(rank): text for names, text in ranks for rank in names.split(", ")}


def _mismatches(platform_name):
    """The errors of started collectives of unequal parts, either rank having more, and a sum afterwards."""
    platform = platform_named(platform_name)
    me, errors = platform.get_rank(), []
    for larger in (0, 1):
        x = platform.from_numpy(np.ones((9000 if me == larger else 2, 2), np.float32))
        for start in (
            lambda x: platform.all_reduce(x, None, True)[1].wait(),
            lambda x: platform.broadcast(x, 1, None, True)[1].wait(),
            lambda x: platform.tensor_to_numpy(platform.differentiable_all_to_all_single_async(x)),
            lambda x: (platform.all_gather_into_tensor if me else platform.all_reduce)(x, None, True)[1].wait(),
        ):
            with pytest.raises(CollectiveMismatchError) as caught:
                start(x)
            errors.append(_without_sites(str(caught.value)))
    output, handle = platform.all_reduce(platform.from_numpy(np.arange(3.0) + me), None, True)
    handle.wait()
    return errors, platform.tensor_to_numpy(output).tolist()


def test_started_collectives_that_differ_are_an_error_on_every_rank(platform_name):
    """If gloo collectives differ, every member raises in wait, names both fingerprints and goes on; no process dies."""
    require_transport(platform_name)
    expected = []
    for first, second, sent, wanted in (("[9000, 2]", "[2, 2]", 4500, 1), ("[2, 2]", "[9000, 2]", 1, 4500)):
        texts = [
            ("shape", "all_reduce(f32{}, sum)", "all_reduce(f32{}, sum)"),
            ("shape", "broadcast(f32{}, src=1)", "broadcast(f32{}, src=1)"),
            ("operation", "all_reduce(f32{}, sum)", "all_gather_into_tensor(f32{})"),
        ]
        shapes = {0: first, 1: second}
        errors = [
            (
                f"ranks 0 and 1 disagree about the {what} of a collective of ranks (0, 1):",
                {rank: text.format(shapes[rank]) for rank, text in enumerate(pair)},
            )
            for what, *pair in texts
        ]
        rows = {0: f"f32[{sent}, 2] f32[{sent}, 2]", 1: f"f32[{wanted}, 2] f32[{wanted}, 2]"}
        routed = (
            (
                "ranks 0 and 1 disagree about the chunk shapes of a collective of ranks (0, 1): "
                f"rank 0 sends [{sent}, 2] to rank 1, which expects [{wanted}, 2]"
            ),
            {rank: f"differentiable_all_to_all_single({text}, expects {text})" for rank, text in rows.items()},
        )
        expected += [*errors[:2], routed, errors[2]]
    assert launch(_mismatches, 2, platform_name, (platform_name,)) == [(expected, [1.0, 3.0, 5.0])] * 2


LARGE = 20_000
"""Elements that a blocking all-reduce takes in two steps, and a started one in one."""


def _forms(platform_name):
    """Assert that blocking and started forms of a collective agree where each rank in turn calls the other form."""
    platform = platform_named(platform_name)
    me, size = platform.get_rank(), platform.get_world_size()
    parts = [np.arange(size * 4.0, dtype=np.float32).reshape(2 * size, 2) * (rank + 1) for rank in range(size)]
    x, total = platform.from_numpy(parts[me].copy()), sum(parts)
    large = np.arange(float(LARGE)) / 7
    sent = [rank + 1 for rank in range(size)]  # rows to each rank, from every rank
    rows = np.repeat(np.arange(float(size)), sent) + 10 * me
    checks = {
        "all_reduce": (lambda late: platform.all_reduce(x, None, late), total),
        "all_reduce of much": (
            lambda late: platform.all_reduce(platform.from_numpy(large * (me + 1)), None, late),
            sum(large * (rank + 1) for rank in range(size)),
        ),
        "all_gather": (lambda late: platform.all_gather_into_tensor(x, None, late), np.concatenate(parts)),
        "reduce_scatter": (lambda late: platform.reduce_scatter_tensor(x, None, late), total[2 * me : 2 * me + 2]),
        "broadcast": (lambda late: platform.broadcast(x, 1, None, late), parts[1]),
        "all_to_all": (
            lambda late: platform.all_to_all_single(x, (2 * size, 2), None, late)[: 2 if late else 1],
            np.concatenate([part[2 * me : 2 * me + 2] for part in parts]),
        ),
        "rows": (
            lambda late: getattr(platform, f"differentiable_all_to_all_single{'_async' if late else ''}")(
                platform.from_numpy(rows), sent, [me + 1] * size
            ),
            np.concatenate([np.full(me + 1, me + 10.0 * rank) for rank in range(size)]),
        ),
        "barrier": (lambda late: platform.barrier(None, late), None),
    }
    for name, (form, want) in checks.items():
        for turn in (*range(size + 1), None):  # one rank blocks, all have started it, all block
            result = form(late := turn is not None and me != turn)
            if late and name != "rows":
                result = (result if name == "barrier" else result[1]).wait()
            result = result[0] if name == "all_to_all" and not late else result
            if want is not None:
                np.testing.assert_array_equal(platform.tensor_to_numpy(result), want, err_msg=f"{name} {turn}")
    return True


def _apart(platform_name):
    """One rank in turn calls another collective, some blocking and some started: the errors, and a sum after each."""
    platform = platform_named(platform_name)
    me, size = platform.get_rank(), platform.get_world_size()

    def make(*shape):
        return platform.from_numpy(np.full(shape, 1.0, np.float32))

    def late(member, *arguments):
        def run():
            getattr(platform, member)(*arguments, None, True)[1].wait()

        return run

    def rows(form, *arguments):
        return lambda: platform.tensor_to_numpy(
            getattr(platform, f"differentiable_all_to_all_single{form}")(*arguments)
        )

    much, little = make(9000 * size), make(size)
    uneven = (make(3), [2, 1] + [0] * (size - 2), [3] + [0] * (size - 1))
    programs = [
        (lambda: platform.all_reduce(much), late("all_reduce", little)),
        (lambda: platform.all_reduce(little), late("all_reduce", much)),
        (lambda: platform.differentiable_all_reduce(little), rows("_async", much)),
        (late("all_reduce", much), rows("_async", little)),
        (platform.barrier, late("broadcast", much, 0)),
        (lambda: platform.barrier(None, True).wait(), lambda: platform.all_gather_into_tensor(much)),
        (lambda: platform.all_gather_object([], me), lambda: platform.barrier(None, True).wait()),
        (lambda: platform.all_gather_object([], me), lambda: platform.all_reduce(much)),
        (rows("", *uneven), rows("_async", *uneven)),
    ]
    errors = []
    for turn in range(size):
        for first, second in programs:
            with pytest.raises(CollectiveMismatchError) as caught:
                (first if me == turn else second)()
            errors.append(_without_sites(str(caught.value)))
            total = platform.tensor_to_numpy(platform.all_reduce(little)).tolist()
            assert total == [float(size)] * size
    return errors


def _both(platform_name):
    return _forms(platform_name), _apart(platform_name)


def test_blocking_and_started_forms_agree_or_raise(platform_name):
    """Both forms of one collective give the same bits; if the collectives differ, every rank raises and goes on."""
    require_transport(platform_name)
    for world_size in (2, 3) if platform_name == "torch" else (3,):
        results = launch(_both, world_size, platform_name, (platform_name,), timeout=120)
        assert [agreed for agreed, _ in results] == [True] * world_size
        _check([errors for _, errors in results], world_size)


def _check(errors_by_rank, world_size):
    much, little = f"f32[{9000 * world_size}]", f"f32[{world_size}]"
    even = [f"differentiable_all_to_all_single({row}, expects {row})"
            for row in (" ".join([f"f32[{count}]"] * world_size) for count in (9000, 1))]  # fmt: skip
    pairs = [
        ("shape", f"all_reduce({much}, sum)", f"all_reduce({little}, sum)"),
        ("shape", f"all_reduce({little}, sum)", f"all_reduce({much}, sum)"),
        ("operation", f"differentiable_all_reduce({little}, sum)", even[0]),
        ("operation", f"all_reduce({much}, sum)", even[1]),
        ("operation", "barrier()", f"broadcast({much}, src=0)"),
        ("operation", "barrier()", f"all_gather_into_tensor({much})"),
        ("operation", "all_gather_object()", "barrier()"),
        ("operation", "all_gather_object()", f"all_reduce({much}, sum)"),
    ]
    everyone = tuple(range(world_size))
    for errors in errors_by_rank:
        expected = []
        for turn in everyone:
            other = next(rank for rank in everyone if (rank == turn) != (turn == 0))
            for what, first, second in pairs:
                usual = ", ".join(str(rank) for rank in everyone if rank != turn)
                who = f"rank {turn} disagrees with ranks {usual}" if world_size > 2 else f"ranks 0 and {other} disagree"
                header = f"{who} about the {what} of a collective of ranks {everyone}:"
                expected.append((header, {rank: first if rank == turn else second for rank in everyone}))
            sends = " ".join(["f32[2]", "f32[1]"] + ["f32[0]"] * (world_size - 2))
            expects = " ".join(["f32[3]"] + ["f32[0]"] * (world_size - 1))
            header = (
                f"rank 0 disagrees with itself about the chunk shapes of a collective of ranks {everyone}: "
                "rank 0 sends [2] to itself, and expects [3]"
            )
            text = f"differentiable_all_to_all_single({sends}, expects {expects})"
            expected.append((header, dict.fromkeys(everyone, text)))
        assert errors == expected


def proposal(position, operation="all_reduce", sends=None, expects=None, *, row=(), **facts):
    """Return the proposal of one member of three; ``sends`` and ``expects`` are numbers of rows."""
    chunks = (None if rows is None else tuple((count, *row) for count in rows) for rows in (sends, expects))
    site = Site((f"train{position}.py", 3))
    return Proposal(
        position, operation, CollectiveFingerprint(operation, (0, 1, 2), tuple(facts.items()), site, *chunks)
    )


def test_a_proposal_comes_back_from_its_text():
    """A later member can read an earlier proposal, and compare its own with it."""
    total = proposal(1, dtype="float32", shape=(2, 3), reduction="sum")
    assert Proposal.from_json(total.to_json(), (0, 1, 2)) == total
    assert total.same(proposal(0, dtype="float32", shape=(2, 3), reduction="sum"))
    assert not total.same(proposal(0, dtype="float32", shape=(2, 3), reduction="max"))
    assert total.rows() == ([0, 0, 0], [0, 0, 0])
    assert total.row is None
    rows = proposal(2, "all_to_all", (1, 2, 3), (4, 5, 6), row=(7,), dtype="float32")
    assert Proposal.from_json(rows.to_json(), (0, 1, 2)) == rows
    assert rows.row == (7,)
    assert not total.same(rows)


def test_a_label_has_one_size():
    """A label has a fixed size and carries a fingerprint and numbers of rows; a digest replaces long facts."""
    rows = proposal(2, "all_to_all", (1, 2, 3), (4, 5, 6), row=(7,), dtype="float32")
    for started in (False, True):
        label = _label(rows, started=started)
        assert len(label) == LABEL + 2 * 3 * 8
        assert _is_started(label) == started
        assert _read_label(label, (0, 1, 2)) == rows.fingerprint
    for sends in (None, (2, 2, 2)):
        long = [proposal(0, "all_reduce", sends, sends, what="é" * LABEL + end) for end in "aab"]
        labels = [_label(each, started=False) for each in long]
        assert {len(label) for label in labels} == {LABEL + 2 * 3 * 8}
        first, same, other = (_read_label(label, (0, 1, 2)) for label in labels)
        assert str(first).startswith("all_reduce(")
        assert "digest=" in str(first)
        assert mismatch({0: first, 1: same}, (0, 1, 2)) is None
        assert "disagree about the digest" in mismatch({0: first, 1: other}, (0, 1, 2))


def test_a_later_member_fits_the_earlier_ones():
    """A later member's rows are changed to fit the earlier members'; rows to itself fit each other."""
    first = proposal(2, "all_to_all", (1, 2, 3), (4, 5, 6), row=(7,), dtype="float32")
    second = proposal(0, "all_to_all", (1, 1, 1), (2, 2, 2), dtype="int8")
    third = proposal(1, "all_to_all", (9, 9, 9), (9, 9, 9), dtype="int8")
    assert first.fitted([]) == ([1, 2, 3], [4, 5, 3])
    assert second.fitted([first]) == ([1, 1, 4], [1, 2, 1])
    assert third.fitted([first, second]) == ([2, 9, 5], [1, 9, 2])
