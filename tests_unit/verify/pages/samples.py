"""Small data of every page, for the tests of its structure and in the browser."""

from collections import Counter
from dataclasses import replace

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.transport.checks.flight_trace import Flight
from hyper_parallel.verify.bugs.registry import Bug
from hyper_parallel.verify.bugs.results import BugResult, CorpusReport, FormResult
from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.checks import TensorCheck
from hyper_parallel.verify.engine.verdict import Difference, UnequalReplicas, Verdict
from hyper_parallel.verify.explained_step import Memory
from hyper_parallel.verify.explanation import Explanation
from hyper_parallel.verify.fuzz.report import Finding, FuzzReport
from hyper_parallel.verify.links import Link
from hyper_parallel.verify.model_report import REQUIRED, ModelReport, Traffic
from hyper_parallel.verify.parameter_layouts import ParameterLayout
from hyper_parallel.verify.program.report import HardenedCase, ProgramReport
from hyper_parallel.verify.report_values import Measured
from hyper_parallel.verify.run_comparison import Change, Comparison
from workshop.nights.changes import NightChanges
from workshop.nights.history import History, Night, night_of
from workshop.nights.reports import CaseResult, CommandReport, NightReports, SuiteReport

COLUMNS = ("forward", "backward", "uneven", "several axes", "partial")


def mesh(*shape, names=("pp", "dp", "tp")):
    """A mesh without a world."""
    size = 1
    for axis_size in shape:
        size *= axis_size
    return DeviceMesh.abstract("cpu", shape, tuple(range(size)), tuple(names[len(names) - len(shape) :]))


def layout(on, placements, shape):
    """A layout of a tensor."""
    return Layout.place(on, placements, shape)


def check(kind, module="a", *, step=0, rank=0, why="", error=0.0):
    """One comparison."""
    return TensorCheck(kind, module, f"{module}.x", step, rank, 3, error, 1e-9, why)


def run(*, wrong=False, error="", modules=("layers.0.up", "layers.0.down")):
    """One run: equal, diverged in the second module, or ended."""
    why = "0.5, single device 0.25 (error 1.0e+00, bound 1.0e-09)" if wrong else ""
    checks = [check(kind, module) for kind in REQUIRED for module in modules]
    checks[1] = check("output", modules[1], why=why, error=1.0 if wrong else 1e-16)
    checks[5] = check("gradient", modules[1], why=why, error=float("inf") if wrong else 2e-12)
    return ModelReport(
        "toy <1>",
        "torch",
        "simulated",
        "dp=2 x tp=2",
        3,
        checks,
        skipped=["output of <norm>: why not"],
        losses=[3.0, 2.0, 1.5],
        parallel_losses=[3.0, 2.0, 1.75 if wrong else 1.5],
        traffic=[Traffic(modules[1], "forward", "all_reduce", ("tp",), 2, 640, 1)],
        bound="1e-9 x step",
        error=error,
        cause="ValueError: <no>" if error else "",
        axes={"dp": 2, "tp": 2},
        parameter_layouts=[
            ParameterLayout("up.weight", (7, 3), (2, 2), ("dp", "tp"), (0, 1, 2, 3), ((1,), ())),
            ParameterLayout("up.bias", (7,), (2, 2), ("dp", "tp"), (0, 1, 2, 3), ((),)),
            ParameterLayout("scale", (1,)),
        ],
        settings={"optimizer": "sgd, learning rate 0.1"},
    )


def explained():
    """Return an explanation of a sharded, a replicated and a plain parameter on two by two ranks."""
    mesh = ((2, 2), ("dp", "tp"), (0, 1, 2, 3))
    parameters = [
        *(ParameterLayout(f"layers.{number}.up", (7, 3), *mesh, ((1,), ())) for number in range(2)),
        ParameterLayout("bias", (7,), *mesh, ((),)), ParameterLayout("scale", (1,)),
    ]  # fmt: skip
    paths = [parameter.path for parameter in parameters]
    return Explanation(
        "toy <1>", "torch", {"dp": 2, "tp": 2}, parameters, dict.fromkeys(paths, "f32"), dict.fromkeys(paths, 4),
        [Traffic("layers.0", "forward", "all_reduce", ("tp",), 2, 640, 1)], Memory(128, 128, 256, 512),
        {"dp": Link(1e9, 1e-6), "tp": Link(1e9, 1e-6)}, ["holds"], [], ["a note"], plan="fast",
    )  # fmt: skip


def operator(name, platform, outcome="ok", **counts):
    """Return one operator's entry in a report of verify ops."""
    coverage = {column: {"checked": 0, "state": "not applicable"} for column in COLUMNS}
    for column, count in counts.items():
        state = "checked" if count else "not exercised"
        coverage[column.replace("_", " ")] = {"checked": count, "state": state}
    return {
        "op": name,
        "platform": platform,
        "outcome": outcome,
        "checks": counts.get("forward", 0),
        "coverage": coverage,
        "wrong": [],
        "crash": [],
        "exempt": "why <not>" if outcome == "exempt" else "",
        "skipped": {},
        "unexercised": [],
        "rejected": {},
        "rule": f"{name}(x) in core.shard.rules",
        "by_sample": {"sample 0": counts.get("forward", 0)},
        "by_placement": {"Shard(dim=0), Shard(dim=0)": counts["forward"]} if "forward" in counts else {},
    }


def sweep(platform="torch", *operators):
    """Return a report of verify ops."""
    entries = operators or (
        operator("add", platform, forward=1200, backward=600, uneven=90, several_axes=40, partial=7),
        operator("argsort", platform, forward=20, uneven=0, several_axes=3),
        operator("zeros", platform, "exempt"),
        operator("matmul", platform, forward=90, backward=80, uneven=10, several_axes=9, partial=8),
    )
    return {"ok": True, "mode": "quick", "columns": list(COLUMNS), "operators": list(entries)}


def mutation(survived=1):
    """Return a report on the verifier's power."""
    counts = {"mutants": 9 + survived, "killed": 7, "equivalent": 2, "survived": survived}
    slip = {"op": "matmul", "kind": "dropped <Partial>", "change": "row 3: Partial(sum) is Replicate"}
    return {
        "platform": "torch",
        "wanted": 10,
        "seed": 0,
        "generated": 400,
        **counts,
        "score": 7 / (7 + survived),
        "seconds": 61.2,
        "kinds": {"dropped <Partial>": counts, "swapped dim": dict.fromkeys(counts, 0)},
        "operators": {"matmul": counts},
        "survivors": [{**slip, "full": "held"}] * survived,
        "equivalents": [{**slip, "reason": "the row is claimed by another"}] * 2,
    }


def verdict(name="<head>.weight"):
    """A verdict on two ranks: a gradient and then a loss differ, and one of everything else."""
    cause = Cause("missing-reduction", "dp", f"the sum over dp is that of {name}")
    differences = [
        Difference("gradient", name, "model", (0, 1), 0, 0, 0.25, 1e-9, f"{name}: 1 instead of 2", "all", cause, name),
        Difference("loss", "loss", "", (1,), 1, 0, float("inf"), 1e-9, "not a number"),
    ]
    return Verdict(
        2, differences, Counter(gradient=4, loss=4, weight=2), 40, [f"declare {name}"], [f"no step of {name}"],
        [f"{name} of one rank"], [UnequalReplicas("weight", name, 0, (0, 1), "all")], 3, [f"{name} is a note"],
        [BlindSpot("one-step", "", name, "use more")], 2.0, {"platform": name},
    )  # fmt: skip


def program(name="<head>.weight"):
    """A program that differs, was refused, and failed in a harder case after it was equal in another."""
    equal = Verdict(2, counts=Counter(loss=2), checked=2)
    hardened = [
        HardenedCase([f"noise on {name}"], equal),
        HardenedCase([name], failure=name, cause=f"KeyError: {name}"),
    ]
    return ProgramReport(
        name, "torch", "simulated", 2, 7, {"dp": 2}, 3, verdict(name), hardened=hardened, rounding=f"{name} at step 1"
    )


def failed_program(name="<head>.weight"):
    """A program whose ranks call different collectives."""
    return ProgramReport(
        name, "torch", "processes", 2, 7, failure=f"rank 0: {name}", cause=f"ValueError: {name}", kind="unequal-calls",
        calls=[f"rank 0 calls all_reduce at {name}"],
    )  # fmt: skip


def campaign(text="<b>"):
    """Random programs: one is wrong, some are refused."""
    finding = Finding("torch", "wrong", text, 5, 7, (2,), f"if a < b: {text}", "f.py", shown=True)
    outcomes = {"torch": Counter(equal=8, refused=2, wrong=1)}
    return FuzzReport(5, ("torch",), outcomes, steps=Counter({text: 9}), refusals=Counter({text: 2}),
                      worlds=Counter({4: 9}), findings=[finding])  # fmt: skip


COST = {"name": "add", "plain": 1.0, "peer": 2.0, "ours": 9.0, "ratio": 4.0, "budget": 1.0, "ok": False}
"""A row of the costs of PyTorch's operations, too slow."""

TIMING = {"name": "selftest", "seconds": 9.0, "budget": 1.0, "problem": "slow", "ok": False}
"""A time of the harness, over its budget."""


def corpus():
    """A run of the bug corpus: one program, all right."""
    bug = Bug("torch", "router_weight", "Wrong.", "repo 1", {"tp": 3}, "gradient", "router.*", "missing-reduction")
    broken = FormResult(False, 40, "gradient", "router.weight", "missing-reduction", "tp", "the sum is <equal>")
    return CorpusReport([BugResult(bug, broken, FormResult(True, 50), 0.25)])


def call(number, started, ended, operation="all_reduce", **facts):
    """One recorded call."""
    return {
        "number": number, "sequence": number, "state": "waiting" if ended is None else "done", "started": started,
        "ended": ended, "site": "<a>.py:3", "facts": facts, "kind": "collective", "operation": operation,
        "ranks": [0, 1], "group": "", "text": f"{operation} of f32[3]",
    }  # fmt: skip


def flight(*, error=None):
    """Two ranks: one waits in its second call, the other has overlapping calls; a third left no calls."""
    first = [call(0, 10.0, 10.25), call(1, 11.0, None, "all_gather")]
    second = [call(0, 10.5, 11.0), call(1, 10.75, 11.5, "all_gather")]
    records = {
        rank: {"rank": rank, "world_size": 3, "written": 12.0, "error": error, "doing": "", "calls": calls}
        for rank, calls in enumerate((first, second, []))
    }
    return Flight(3, records)


def comparison():
    """Two runs: one value is worse, one better, one new."""
    header = {"date": "2026-01-02", "command": "hyper-parallel " + "x" * 90, "versions": {"torch": "2.13"}}
    verdicts = ("worse", "better", "other")
    return Comparison((header, {}), 4, tuple(Change(f"{'a' * 50}: checks", "3", "2", name) for name in verdicts))


def history(text="torch", nights=3):
    """Nights in which one value falls, one rises, one is absent at first; a test was skipped."""
    header = {"date": "2026-01-02", "revision": text, "command": text + "x" * 90, "versions": {"torch": "2.13"}}
    return History(
        tuple(
            Night(
                header,
                {
                    f"{text} checks": Measured(7 - night, "more"),
                    f"{text} time": Measured(1.5 + night, "time"),
                    **({f"{text} new": Measured(1, "less")} if night else {}),
                },
                {text: {f"{text} reason": 2}},
            )
            for night in range(nights)
        )
    )


def night(text="torch"):
    """Return a night after another one: a new failure, an old one, skips, a suite without a report, a command."""
    facts = {"frameworks": text, "device": "npu", "devices": "4", "revision": text, "command": text + "x" * 90}
    cases = (
        CaseResult(f"{text} new", "failed", text, "log"),
        CaseResult(f"{text} old", "failed", text, "log"),
        CaseResult("c", "passed"),
        CaseResult("d", "skipped", f"{text} reason"),
    )
    command = CommandReport(f"{text}/gate", {text: Measured(97.5, "more"), f"{text} gates": Measured(text, "more")}, {})
    suites = (SuiteReport(f"{text}/st", cases, facts), SuiteReport("cpu/unit", cases[2:3], {}))
    values = {"tests of lost: executed": Measured(5, "more"), f"{text}: {text}": Measured(99.5, "more")}
    before = replace(history(text, 1).last, failed={f"{text}/st": {f"{text} old": "2026-11-20"}}, values=values)
    reports = NightReports(suites, (command,))
    return NightChanges(reports, History((before, night_of(reports, before))))
