"""The merged record of a world."""

from __future__ import annotations

import json

import pytest

from hyper_parallel.transport.checks.flight_trace import read_flight


def call(number, text="all_reduce(f32[2], SUM)", state="completed", started=1.0, **other):
    """The record of one call."""
    usual = {"number": number, "sequence": number, "state": state, "started": started + number, "site": "train.py:7"}
    usual |= {"ended": started + number + 0.5 if state == "completed" else None, "facts": {"text": text}}
    usual |= {"kind": "collective", "operation": text.split("(")[0], "ranks": [0, 1, 2], "group": "", "text": text}
    return {**usual, **other}


def write(folder, rank, calls, size=3, **other):
    """Write the record of one rank."""
    record = {"rank": rank, "world_size": size, "written": 20.0, "error": None, "doing": "", "calls": calls, **other}
    (folder / f"rank-{rank}.json").write_text(json.dumps(record))


def test_the_first_difference_is_named_with_both_calls(tmp_path):
    """The table names who raised, where each rank is, who has no record, and the first call on which ranks differ."""
    usual = [call(0), call(1), call(2, state="started")]
    write(tmp_path, 0, usual)
    write(tmp_path, 1, [call(0), call(1, "barrier()", site="other.py:3"), call(2, "barrier()")], error="ValueError: no")
    assert read_flight(tmp_path).text().splitlines() == [
        "3 ranks",
        "raised: rank 1: ValueError: no",
        "no record of rank 2",
        "first difference: collective 1 of ranks (0, 1, 2)",
        "  rank 0 called all_reduce(f32[2], SUM) at train.py:7",
        "  rank 1 called barrier() at other.py:3",
        "  rank 0: call 2, started: all_reduce(f32[2], SUM) at train.py:7",
        "  rank 1: call 2, completed: barrier() at train.py:7",
    ]


def test_a_member_that_never_called_is_named(tmp_path):
    """A call that one member lacks is a difference, unless its record begins later; messages are none."""
    write(tmp_path, 0, [call(0), call(1, state="started", group="pair")], doing="waited")
    write(tmp_path, 1, [call(0), call(1, kind="message", text="send()")])
    write(tmp_path, 2, [])
    flight = read_flight(tmp_path)
    assert flight.difference() == (
        "first difference: collective 0 of ranks (0, 1, 2)\n"
        "  ranks 0, 1 called all_reduce(f32[2], SUM) at train.py:7\n"
        "  rank 2 never called it"
    )
    assert flight.text().splitlines()[-2:] == ["  rank 2: no calls", "--- rank 0: waited"]
    write(tmp_path, 2, [call(5)])
    assert read_flight(tmp_path).difference().splitlines()[0].startswith("first difference: collective 1")


def test_ranks_that_called_the_same_do_not_differ(tmp_path):
    """Equal records have no difference, even where rings begin at different calls."""
    write(tmp_path, 0, [call(3), call(4)], size=2)
    write(tmp_path, 1, [call(4)], size=2)
    for rank in range(2):
        path = tmp_path / f"rank-{rank}.json"
        path.write_text(path.read_text().replace("[0, 1, 2]", "[0, 1]"))
    assert read_flight(tmp_path).difference() is None


def test_the_trace_has_a_bar_per_call(tmp_path):
    """The file has a process per rank, a bar per call, which reaches the end where the call did not, and errors."""
    write(tmp_path, 1, [call(0), call(1, state="started")], error="ValueError: no\nmore")
    name, ended, open_ended, error = read_flight(tmp_path).chrome()["traceEvents"]
    assert name["args"] == {"name": "rank 1"}
    assert (ended["ph"], ended["name"], ended["ts"], ended["dur"], ended["pid"]) == ("X", "all_reduce", 1e6, 0.5e6, 1)
    assert open_ended["ts"] + open_ended["dur"] == 20e6
    assert open_ended["args"]["site"] == "train.py:7"
    assert (error["ph"], error["name"], error["args"]) == ("i", "ValueError: no", {"error": "ValueError: no\nmore"})


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "is not a flight record: "),
        ("[]", "it has an array instead of an object"),
        ("[" * 100_000, "is not a flight record: "),
        ('{"rank": 0}', "it has no world_size, written, error, doing, calls"),
        (
            '{"rank": 0, "world_size": 1, "written": 1, "error": null, "doing": "", "calls": [1]}',
            "it has a number instead of an object",
        ),
        ('{"rank": 0, "world_size": 1, "written": NaN}', "NaN is not a number"),
        ('{"rank": 0, "world_size": 1, "written": 1e999}', "1e999 is not a number"),
        ('{"rank": true, "world_size": 1, "written": 1, "error": null, "doing": "", "calls": []}', "it has no rank"),
        ('{"rank": 1, "world_size": 2, "written": 1, "error": null, "doing": "", "calls": []}', "the record of rank 1"),
        (
            '{"rank": 0, "world_size": 99999999999, "written": 1, "error": null, "doing": "", "calls": []}',
            "it has a world of more than 1048576 ranks",
        ),
    ],
)
def test_damaged_records_are_refused(tmp_path, text, problem):
    """A file that is not a record is named with what it lacks."""
    path = tmp_path / "rank-0.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="flight record: ") as caught:
        read_flight(tmp_path)
    assert problem in str(caught.value)


def test_a_record_does_not_steer_the_terminal(tmp_path):
    """Control characters of a record are spelled out in the table."""
    write(tmp_path, 0, [call(0, text="\x1b[2J(\u202e)", ranks=[0])], size=1, doing="\ta\nb\x07")
    assert read_flight(tmp_path).text().splitlines() == [
        "1 ranks",
        "  rank 0: call 0, completed: \\x1b[2J(\\u202e) at train.py:7",
        "--- rank 0: \ta",
        "b\\x07",
    ]


def test_records_must_belong_together(tmp_path):
    """An empty folder, records of two worlds, and ranks that are no numbers are refused."""
    with pytest.raises(ValueError, match="has no flight record"):
        read_flight(tmp_path)
    write(tmp_path, 0, [call(0, ranks=["a"])])
    with pytest.raises(ValueError, match="a call whose ranks are not numbers"):
        read_flight(tmp_path)
    write(tmp_path, 0, [])
    write(tmp_path, 1, [], size=2)
    with pytest.raises(ValueError, match=r"records of ranks \[0, 1\] of worlds of \[2, 3\] ranks; empty it"):
        read_flight(tmp_path)
