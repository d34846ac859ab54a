"""``hyper-parallel verify model``: train a parallel and a single-device model and compare them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from hyper_parallel._text import near_hint
from hyper_parallel.cli.arguments import MOST_STEPS, add_device, add_reports, add_seed, int_range
from hyper_parallel.cli.devices import require_settings
from hyper_parallel.cli.output import can_be_written, coloured, print_result
from hyper_parallel.cli.progress import Progress
from hyper_parallel.platform.select import (
    FRAMEWORKS,
    MissingFrameworkError,
    frameworks_used_by,
    installed_frameworks,
    platform_named,
    require_framework,
)
from hyper_parallel.verify.report import report_json, write_report
from hyper_parallel.verify.report_files import write_text

if TYPE_CHECKING:
    from hyper_parallel.verify.model_report import ModelReport

__all__ = ["add_parser", "names_of", "platforms", "run", "user_platforms"]

Job = tuple[str, Callable[[], "ModelReport"]]

_DESCRIPTION = """\
Train the single-device model and the parallel one side by side on the same data, and compare outputs, loss, every
gradient and every updated weight after each step, as they are: no value is rescaled.

SPEC is package.module:function or path/file.py:function. The function returns (model, batches, loss): a batch is a
tuple of arrays, all but the last go to the model, and loss(output, batch) is a scalar. It may also return a
hyper_parallel.verify.ModelCase or a mapping of its fields. PLAN names a function that takes the mesh and returns the
plan of parallelize_module, or a hyper_parallel.verify.ParallelPlan.

Without SPEC, bundled models are verified: small byte-level transformers, trained on the sources of Python's standard
library.

Exit status: 0 if everything was compared and equal, 1 if not, 2 for invalid input, 130 after Ctrl-C."""

_EXAMPLES = (
    "hyper-parallel verify model my_model.py:case --plan my_model.py:plan --mesh 3",
    "hyper-parallel verify model --mesh 3 --inject drop-allreduce@layers.0 --html report.html",
)


def add_parser(kinds: Any) -> None:
    """Declare the subcommand."""
    subparser = kinds.add_parser(
        "model",
        help="train a model parallel and single-device side by side",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/first-plan.md",
    )
    subparser.add_argument(
        "spec",
        nargs="?",
        metavar="SPEC",
        help="function that returns the model, its batches and its loss (default: the bundled models)",
    )
    subparser.add_argument("--plan", metavar="PLAN", help="function that returns the parallel plan of SPEC")
    subparser.add_argument("--world-size", type=int_range(1), metavar="N", help="number of ranks")
    subparser.add_argument(
        "--mesh", metavar="2x2", help="shape of the mesh: 3 is tp=3, 2x2 is dp=2,tp=2; dp=2,tp=3 names the axes"
    )
    subparser.add_argument(
        "--platform",
        metavar="torch,mindspore",
        help="frameworks to run on (default: the one that SPEC imports, or those installed)",
    )
    subparser.add_argument(
        "--launch",
        default="simulated",
        metavar="simulated,processes",
        help="how ranks run: in a simulated cluster or as processes (default: simulated)",
    )
    add_device(subparser, "device of both models: simulated ranks share one, processes have one each")
    subparser.add_argument(
        "--steps", type=int_range(1, MOST_STEPS), default=3, metavar="N", help="training steps (default: 3)"
    )
    add_seed(subparser, "all random numbers")
    subparser.add_argument(
        "--scenario", action="append", metavar="NAME", help="run only this bundled model; repeatable"
    )
    subparser.add_argument(
        "--dtype", choices=("float64", "float32"), help="dtype of the bundled models (default: float64)"
    )
    faults = ", ".join(_faults())
    subparser.add_argument("--inject", metavar="FAULT[@MODULE]", help=f"break the parallel run on purpose: {faults}")
    subparser.add_argument(
        "--harden", action="store_true",
        help="run a case that hides fewer errors: unequal axes, uneven rows, several steps, random weights",
    )  # fmt: skip
    add_reports(subparser, "losses, gradients, collectives and layouts")
    subparser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run every job; return 0 if all were equal."""
    jobs = list(_jobs(arguments))
    can_be_written("--report", arguments.report)
    can_be_written("--html", arguments.html)
    done: list[ModelReport] = []
    progress = Progress(len(jobs))
    try:
        with progress.ticking():
            for name, job in jobs:
                progress.start(name)
                done.append(job())
                if done[-1].error:
                    platform_named(done[-1].platform)  # raises if the framework cannot be imported
                progress.finish()
                if not arguments.json:
                    print(coloured(done[-1].text()), end="\n\n", flush=True)
    except KeyboardInterrupt:
        progress.clear()
        line = _partial(done, len(jobs))
        _write(arguments, done, line)
        raise KeyboardInterrupt(line) from None
    _write(arguments, done, "")
    if arguments.json:
        print_result(report_json(_document(done)))
    else:
        print(coloured(_summary(done)))
    return 0 if done and all(report.ok for report in done) else 1


# -- what to run -----------------------------------------------------------------------------------------------------


def _jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    launches = names_of(arguments.launch, "--launch", ("simulated", "processes"))
    require_settings(arguments.device)
    if arguments.spec is None:
        yield from _scenario_jobs(arguments, launches)
        return
    if arguments.plan is None:
        msg = "SPEC needs --plan PLAN, a function that returns the plan of parallelize_module"
        raise ValueError(msg)
    if arguments.scenario:
        msg = "--scenario names a bundled model, and SPEC names another model; leave out one of them"
        raise ValueError(msg)
    if arguments.dtype is not None:
        msg = "--dtype applies to the bundled models only; build the model of SPEC in the dtype that you want"
        raise ValueError(msg)
    from hyper_parallel.verify.model.run import verify_model
    from hyper_parallel.verify.run_arguments import parse_mesh

    shape, names = parse_mesh(arguments.mesh, arguments.world_size)
    if math.prod(shape) == 1:
        msg = (
            "the mesh has one rank, but the run on one rank is what the plan is compared with; give at least two ranks"
        )
        raise ValueError(msg)
    for platform in user_platforms(arguments):
        for launch in launches:
            yield (
                f"{arguments.spec} on {platform} ({launch})",
                partial(
                    verify_model, arguments.spec, arguments.plan, shape, names,
                    platform=platform, launch=launch, steps=arguments.steps, inject=arguments.inject,
                    seed=arguments.seed, harden=arguments.harden, device=arguments.device,
                    timeline=arguments.html is not None,
                ),
            )  # fmt: skip


def _scenario_jobs(arguments: argparse.Namespace, launches: list[str]) -> Iterator[Job]:
    from hyper_parallel.verify.model.run import verify_scenario
    from hyper_parallel.verify.run_arguments import parse_mesh
    from hyper_parallel.verify.scenarios import SCENARIOS, scenario_named

    if arguments.plan is not None:
        msg = "--plan needs SPEC, which gives the model of the plan; the bundled models have plans of their own"
        raise ValueError(msg)
    chosen = [scenario_named(name) for name in arguments.scenario or ()] or list(SCENARIOS)
    if arguments.mesh is not None or arguments.world_size is not None:
        shape, _ = parse_mesh(arguments.mesh, arguments.world_size)
        meshes = sorted({"x".join(map(str, scenario.mesh_shape)) for scenario in chosen})
        chosen = [scenario for scenario in chosen if scenario.mesh_shape == shape]
        if not chosen:
            wanted = "x".join(map(str, shape))
            msg = f"no bundled model has the mesh {wanted}; the bundled models have the meshes {', '.join(meshes)}"
            raise ValueError(msg)
    fewest = None if "simulated" in launches else min(math.prod(scenario.mesh_shape) for scenario in chosen)
    for platform in platforms(arguments.platform, arguments.device, fewest):
        for launch in launches:
            for scenario in chosen:
                yield (
                    f"{scenario.name} on {platform} ({launch})",
                    partial(
                        verify_scenario, scenario.with_dtype(arguments.dtype or "float64"),
                        platform=platform, launch=launch, steps=arguments.steps, inject=arguments.inject,
                        seed=arguments.seed, harden=arguments.harden, device=arguments.device,
                    timeline=arguments.html is not None,
                    ),
                )  # fmt: skip


def platforms(asked: str | None, device: str = "cpu", ranks: int | None = None) -> list[str]:
    """Return the frameworks that ``--platform`` names, or else all installed ones; each can be imported.

    Args:
        asked: value of ``--platform``.
        device: value of ``--device``; each framework must support it.
        ranks: number of rank processes, the smallest one for several runs; None if ranks are simulated.

    Raises:
        UnsupportedOnBackend: a framework has no such device, or does not support such ranks on it.
        ValueError: a name is unknown, or the device's variables conflict.
    """
    if asked is None:
        names = list(installed_frameworks())
        if not names:
            msg = "neither PyTorch nor MindSpore is installed; hyper-parallel doctor says what to do"
            raise MissingFrameworkError(msg)
    else:
        names = names_of(asked, "--platform", FRAMEWORKS)
    for name in names:
        require_framework(name)
    if device != "cpu":
        from hyper_parallel.verify.simulate import require_device

        require_settings(device)
        for name in names:
            require_device(device, name, ranks=ranks)
    return names


def user_platforms(arguments: argparse.Namespace) -> list[str]:
    """Return the frameworks of ``--platform``, or else the one that SPEC and PLAN import."""
    from hyper_parallel.verify.spec import find_function

    before = set(sys.modules)
    if arguments.platform is not None:
        requested = platforms(arguments.platform)
    functions = [find_function(arguments.spec, "SPEC"), find_function(arguments.plan, "PLAN")]
    if arguments.platform is not None:
        return requested
    imported = [name for name in FRAMEWORKS if name in set(sys.modules) - before]
    used = {name for function in functions for name in frameworks_used_by(function)}
    imported = imported or [name for name in FRAMEWORKS if name in used]
    if len(imported) != 1:
        # If the framework is chosen inside the function, only the user knows it.
        usable = platforms(None)
        if len(usable) == 1:
            return usable
        msg = f"SPEC {arguments.spec!r}: unknown framework; add --platform torch or --platform mindspore"
        raise ValueError(msg)
    require_framework(imported[0])
    return imported


def names_of(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    """Return the names in an option's list, without duplicates.

    Raises:
        ValueError: a name is not in ``known``, or the list is empty.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if not names:
        msg = f"{option} {text!r} is empty; choose from {', '.join(known)}"
        raise ValueError(msg)
    if unknown:
        wrong = f"{', '.join(map(repr, unknown))} is not one of {', '.join(known)}{near_hint(unknown[0], known)}"
        msg = f"{option} {wrong}" if len(names) == 1 else f"{option} {text!r}: {wrong}"
        raise ValueError(msg)
    return list(dict.fromkeys(names))


def _faults() -> tuple[str, ...]:
    from hyper_parallel.verify.faults import FAULTS

    return tuple(FAULTS)


# -- reports -----------------------------------------------------------------------------------------------------


def _summary(done: list[ModelReport]) -> str:
    passed = sum(report.ok for report in done)
    tensors = sum(sum(report.counts.values()) for report in done)
    lines = [f"{passed} of {len(done)} runs equal to one device ({tensors} tensors compared on all ranks)"]
    for report in done:
        if not report.ok:
            module = f": first divergence in {report.faulty_module}" if report.faulty_module else ""
            lines.append(f"FAILED {report.name} on {report.platform} ({report.launch}){module}")
    return "\n".join(lines)


def _partial(done: list[ModelReport], total: int) -> str:
    passed = sum(report.ok for report in done)
    return f"partial report: {len(done)} of {total} runs finished, {passed} passed; the rest was not verified"


def _document(done: list[ModelReport], interrupted: str = "") -> dict[str, Any]:
    document: dict[str, Any] = {
        "ok": bool(done) and not interrupted and all(report.ok for report in done),
        "runs": [report.json() for report in done],
    }
    if interrupted:
        document["interrupted"] = interrupted
    return document


def _write(arguments: argparse.Namespace, done: list[ModelReport], interrupted: str) -> None:
    if arguments.html is not None:
        from hyper_parallel.verify.pages.model_page import model_page

        write_text(arguments.html, model_page(done, interrupted), "--html")
    if arguments.report is None:
        return
    write_report(
        arguments.report,
        lambda: _document(done, interrupted),
        lambda: "\n\n".join([*(report.text() for report in done), interrupted or _summary(done)]),
    )
