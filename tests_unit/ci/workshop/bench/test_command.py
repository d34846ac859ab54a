"""``python ci/workshop bench``: its measurements, not their values."""

import contextlib
import json
import math

import pytest

from workshop.commands import main


@pytest.mark.platforms("torch")
@pytest.mark.sweep  # the nightly benchmark itself prints every row
@pytest.mark.parametrize("sizes", [(2, 4), (2, 8, 64, 512)])
def test_every_row_is_measured(sizes, monkeypatch, capsys):
    """Every operation is measured in all three implementations, and the rows come as JSON.

    The sizes of the worlds that take long are among the sweeps.
    """
    import torch

    from workshop.bench.torch import operators as benchmark

    assert (benchmark.SIZES, benchmark.BLOCK_SIZES) == ((2, 8, 64, 512), (2, 8, 64))
    monkeypatch.setattr(benchmark, "SIZES", sizes)
    monkeypatch.setattr(benchmark, "BLOCK_SIZES", sizes[:3])
    x = torch.randn(2, 3, 4)
    attention, whole = benchmark.attention, (x @ x.mT / 2).softmax(-1) @ x
    torch.testing.assert_close(attention(x), whole)
    # Stands in for attention, which PyTorch's DTensor takes half a minute to plan.
    monkeypatch.setattr(benchmark, "attention", lambda x: (x @ x.mT).softmax(-1) @ x)
    assert main(["bench", "--repeats", "3", "--json"]) in (0, 1)  # 1: a ratio is over its budget, which time decides
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = [row["name"] for row in rows]
    light = ["add", "multiply by a number", "linear", "view", "layer_norm"]
    views = ["relu", "x[:, 0:4]", "x[:, 0]", "chunk", "cat"]
    assert names[:10] == [*light, *views]
    assert names[27:34] == ["clone", "attention", *(f"{name} + backward" for name in light)]
    median = names.pop()
    assert median.removeprefix("median operator: ") in names[:28]
    assert rows.pop()["budget"] == 0.3
    names, rows = names[18:], rows[18:]
    assert names[16:21] == ["block", "AdamW step, foreach", "AdamW step", "SGD step, foreach", "SGD step"]
    rest = ["from_local", "redistribute to the same", "detach", "grad of a product"]
    assert names[21:27] == [*rest, "chain of 24", "chain of 24 + backward"]
    moves = ("partial to shard(1)", "shard(1) to replicate", "shard(1) to shard(2)")
    worlds = {size: [f"{what}, {size} ranks" for what in moves] for size in sizes}
    for size in sizes[:3]:
        worlds[size] += [f"block, sequence parallel, {how}{size} ranks" for how in ("", "compiled, ")]
    assert names[27:] == [name for world in worlds.values() for name in world]
    assert [row["by_hand"] for row in rows] == [False] * 16 + [True] * 5 + [False] * 4 + [True] * (len(names) - 25)
    for row in rows:
        assert set(row) == {"name", "plain", "peer", "ours", "budget", "ratio", "ok", "by_hand"}
        times = ["plain", "ours", "budget", *([] if "compiled" in row["name"] else ["peer"])]
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in times)
        assert math.isfinite(row["ratio"])


@pytest.mark.platforms("torch")
def test_rows_are_a_table(monkeypatch, capsys):
    """Microseconds, ratio and budget stand in columns, a dash where there is no peer; status 0: all within budget."""
    from workshop.bench.turns import BenchmarkRow

    rows = [BenchmarkRow("add", 1.0, 41.0, 21.0, 0.7), BenchmarkRow("linear", 2.0, 22.0, 12.0, 0.7)]
    rows.append(BenchmarkRow("block, compiled", 4.0, None, 3.0, 1.02, by_hand=True))
    monkeypatch.setattr("workshop.bench.torch.operators.run", lambda *_: iter(rows))
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["add", "1.0", "41.0", "21.0", "0.50", "0.70"],
        ["linear", "2.0", "22.0", "12.0", "0.50", "0.70"],
        ["block,", "compiled", "4.0", "-", "3.0", "0.75", "1.02"],
    ]
    assert lines[0].split() == ["plain", "µs", "peer", "µs", "ours", "µs", "ratio", "budget"]
    rows[1] = BenchmarkRow("linear", 2.0, 22.0, 32.0, 0.7)
    assert main(["bench"]) == 1


@pytest.mark.platforms("torch")
def test_the_harness_has_no_device(capsys):
    """The harness is timed on CPU only, and a device that PyTorch does not see is refused: status 2 and one line."""
    assert main(["bench", "--harness", "--device", "npu"]) == 2
    text = "python ci/workshop: error: --harness times the commands on cpu; leave out --device, or --harness\n"
    assert capsys.readouterr().err == text
    assert main(["bench", "--device", "npu"]) == 2
    assert capsys.readouterr().err.startswith(
        "python ci/workshop: error: --device npu: torch sees no such device here, only "
    )


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "name, file",
    [("linear", "core/shard/dispatch.py"), ("shard(1) to replicate, 8 ranks", "core/dtensor/redistribute.py")],
)
def test_the_time_of_a_call_is_divided_among_functions(name, file, capsys, tmp_path):
    """A profile lists the functions of one call with their own and total time; own times add up to that of the call."""
    report = tmp_path / "profile.json"
    assert main(["bench", "--profile", name, "--repeats", "30", "--json", "--report", str(report)]) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    assert json.loads(report.read_text())["profile"] == profile
    assert set(profile) == {"name", "microseconds", "profiled", "functions"}
    assert (profile["name"], profile["microseconds"] > 0) == (name, True)
    functions = profile["functions"]
    assert any(f"hyper_parallel/{file}:" in function["function"] for function in functions)
    assert math.isclose(sum(function["own"] for function in functions), profile["profiled"])
    assert [function["own"] for function in functions] == sorted((each["own"] for each in functions), reverse=True)
    for function in functions:
        assert set(function) == {"function", "calls", "own", "total"}
        assert function["calls"] >= 0
        assert function["total"] >= function["own"] >= 0
    assert not any("_lsprof" in function["function"] for function in functions)


@pytest.mark.platforms("torch")
def test_a_profile_is_a_table(monkeypatch, capsys):
    """A line per function, at most thirty; the others are one line."""
    from workshop.bench.call_profile import CallProfile, FunctionTime

    times = [FunctionTime(f"a.py:{number} f", 1.0, 2.0, 3.5) for number in range(32)]
    profile = [CallProfile("add", 4.0, 64.0, tuple(times))]
    monkeypatch.setattr("workshop.bench.torch.operators.profile", lambda *_: profile[0])
    assert main(["bench", "--profile", "add"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "add: 4.0 µs per call, 64.0 µs while it is profiled",
        "   own µs  total µs   calls  function",
        "     2.00      3.50    1.00  a.py:0 f",
    ]
    assert (len(lines), lines[-1].split()) == (33, ["4.00", "2", "others"])
    profile[:] = [CallProfile("add", 4.0, 2.0, tuple(times[:1]))]
    assert main(["bench", "--profile", "add"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.platforms("torch")
def test_no_repeats(capsys):
    """Measuring nothing is an error."""
    assert main(["bench", "--repeats", "0"]) == 2
    assert capsys.readouterr().err == (
        "python ci/workshop bench: error: argument --repeats: '0' must be an integer from 1 to 1000000 "
        "(see python ci/workshop bench --help)\n"
    )


@pytest.mark.platforms("torch")
def test_the_harness_is_timed_into_a_report(monkeypatch, capsys, tmp_path):
    """Seconds are printed beside budgets and written to the report; a failed part fails the command."""
    from workshop.bench import command as bench
    from workshop.bench.harness_timings import Figure

    jobs = [Figure("quick", 2.0, lambda: (1.0, "")), Figure("broken", 2.0, lambda: (0.5, "exit status 1: no"))]
    monkeypatch.setattr(bench, "figures", lambda _: jobs)
    monkeypatch.setattr(bench, "planning_figures", list)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--harness", "--report", "reports/bench-harness.json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=3) for line in lines[1:]] == [
        ["quick", "1.00", "2.0"],
        ["broken", "0.50", "2.0", "exit status 1: no"],
    ]
    rows = json.loads((tmp_path / "reports" / "bench-harness.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [True, False]
    jobs.pop()
    assert main(["bench", "--harness", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows[:1]


@pytest.mark.sweep  # as PyTorch's
@pytest.mark.platforms("mindspore")
def test_operators_of_mindspore_are_measured(monkeypatch, capsys, tmp_path):
    """Operators and the training step stand beside plain MindSpore, the start of ranks beside its limit in seconds."""
    from workshop.bench import command as bench
    from workshop.bench.harness_timings import Figure
    from workshop.bench.mindspore import operators as benchmark

    monkeypatch.setattr(bench, "warm_start", lambda: Figure("warm start of 4 simulated ranks", 1.0, lambda: (0.25, "")))
    report = tmp_path / "bench-mindspore.json"
    words = ["bench", "--platform", "mindspore", "--repeats", "8", "--report", str(report)]
    assert main(words) in (0, 1)  # 1: a ratio is over its budget, which time decides
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(report.read_text())["rows"]
    computing = ["add", "mint.add", "multiply by a number", "subtract", "exp", "relu", "silu", "softmax", "sum"]
    computing += ["linear", "matmul", "LayerNorm", "cat"]
    viewing = ["mint.reshape", "reshape", "view", "transpose", "permute", "unsqueeze", "x[:, 0:4]", "x[:, 0]", "chunk"]
    assert [row["name"] for row in rows[:22]] == computing + viewing
    assert [row["name"].split(":")[0] for row in rows[22:]] == [
        "training step of an MLP", "median operator", "warm start of 4 simulated ranks",
    ]  # fmt: skip
    assert len(rows) == benchmark.ROWS + 1
    for row in rows[:-1]:
        assert set(row) == {"name", "plain", "peer", "ours", "budget", "ratio", "ok", "by_hand"}
        assert (row["peer"], row["by_hand"]) == (None, row["name"] == "training step of an MLP")
        assert math.isclose(row["ratio"], row["ours"] / row["plain"])
        assert row["ok"] is (row["ratio"] <= row["budget"])
    ratios = sorted(row["ratio"] for row in rows[:22])
    assert rows[23]["ratio"] == ratios[10]
    assert rows[-1] == {
        "name": "warm start of 4 simulated ranks", "seconds": 0.25, "budget": 1.0, "problem": "", "ok": True,
    }  # fmt: skip
    assert lines[0].split() == ["plain", "µs", "ours", "µs", "ratio", "budget"]
    assert lines[-2].split() == ["warm", "start", "of", "4", "simulated", "ranks", "0.25", "s", "1.00", "s"]
    assert len(lines) == len(rows) + 2


@pytest.mark.platforms("mindspore")
def test_a_call_of_mindspore_is_profiled(capsys):
    """The functions of one call are listed, and a name that no row has is refused with those that are near."""
    assert main(["bench", "--platform", "mindspore", "--profile", "exp", "--repeats", "8"]) == 0
    assert "core/shard/dispatch.py" in capsys.readouterr().out
    assert main(["bench", "--platform", "mindspore", "--profile", "reshap", "--repeats", "8"]) == 2
    assert capsys.readouterr().err == (
        "python ci/workshop: error: no row of the benchmark is called 'reshap'; did you mean 'reshape' or "
        "'mint.reshape' or 'exp'?\n"
    )


@pytest.mark.platforms("mindspore")
def test_a_card_is_refused_for_mindspore(capsys):
    """MindSpore is measured on cpu only: another device is refused before anything is measured."""
    assert main(["bench", "--platform", "mindspore", "--device", "npu"]) == 2
    assert capsys.readouterr().err.startswith("python ci/workshop: error: --device npu: mindspore sees no such device")


@pytest.mark.platforms("torch")
def test_a_figure_of_the_harness_shows_progress_while_it_runs(monkeypatch, capsys):
    """Figures take minutes: the running one and those done are shown while it runs, not only when it is over."""
    from workshop.bench.harness_timings import Figure

    shown = []
    monkeypatch.setattr("workshop.bench.command.recorded", lambda _: iter(()))
    monkeypatch.setattr("workshop.bench.command.Progress.ticking", lambda _: ticking(shown))
    jobs = [Figure(name, 10.0, lambda: (float(len(shown)), "")) for name in ("a", "b")]
    monkeypatch.setattr("workshop.bench.command.figures", lambda _: jobs)
    monkeypatch.setattr("workshop.bench.command.planning_figures", list)
    assert main(["bench", "--harness", "--json"]) == 0
    assert [row["seconds"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 1]


@contextlib.contextmanager
def ticking(shown):
    """Stand for the thread that shows progress; ``shown`` has an entry while it runs."""
    shown.append(True)
    yield
    shown.clear()
