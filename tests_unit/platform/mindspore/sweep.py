"""Sweep MindSpore's public functions and methods: which mean the same on DTensors as on plain tensors?

``python tests_unit/platform/mindspore/sweep.py --report table.md`` runs everything, in ``--jobs`` parallel children;
``--only pattern`` restricts it. ``test_sweep.py`` runs a subset. What has no kernel on CPU is compared with PyTorch's
function of the same name where there is one, else with its own run on a mesh of one rank.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import HyperParallelError, RankFailedError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.checker.shards import local_shard
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.simulate import simulate

__all__ = ["Case", "Outcome", "cases", "run_case"]

HOMES = ("mint", "mint.nn.functional", "mint.linalg", "mint.special", "ops", "Tensor")
GRADIENT_FAILS = "no gradient on CPU"


def _samples() -> Any:
    path = Path(__file__).with_name("sweep_samples.py")
    spec = importlib.util.spec_from_file_location("hyper_parallel_sweep_samples", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAMPLES = _samples()


@dataclass(frozen=True)
class Case:
    """One public name with the expressions to try.

    Attributes:
        name: with its home, ``mint.add``.
        expressions: calls over the named operands.
        guessed: the expressions are guesses; the first one that plain tensors can run is the sample.
    """

    name: str
    expressions: tuple[str, ...]
    guessed: bool = False


@dataclass
class Outcome:
    """The outcome of an expression: its kind, and a line of details."""

    name: str
    expression: str
    kind: str
    note: str = ""
    compared: int = 0


# -- which expressions --------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Every public name, with its samples."""
    table = _table()
    results = [
        Case(f"{home}.{name}", *_expressions(home, name, table))
        for home in HOMES
        for name in _public(home)
        if not _not_swept(name)
    ]
    written = [
        Case(f"Tensor.{name}", tuple(f"_written(x, lambda c: c.{name}({item.strip()}))" for item in args.split(" | ")))
        for names, args in _lines(SAMPLES.IN_PLACE)
        for name in names
    ]
    replaced = {item.name for item in written}
    spelled = [
        Case(f"= {item}", (item,)) for item in " | ".join(SAMPLES.EXPRESSIONS.split("\n")).split(" | ") if item.strip()
    ]
    return [item for item in results if item.name not in replaced] + written + spelled


def _lines(text: str) -> list[tuple[list[str], str]]:
    return [
        (names.split(), args.strip()) for names, _, args in (line.partition(":") for line in text.split("\n")) if names
    ]


def _table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for names, args in _lines(SAMPLES.TABLE):
        for name in names:
            table.setdefault(name, []).extend(item.strip() for item in args.split(" | "))
    return table


def _expressions(home: str, name: str, table: dict[str, list[str]]) -> tuple[tuple[str, ...], bool]:
    known = table.get(f"{home}.{name}") or table.get(name)
    return tuple(dict.fromkeys(_call(home, name, args) for args in known or SAMPLES.GENERIC)), not known


def _call(home: str, name: str, args: str) -> str:
    if args.startswith("="):
        before, own, after = args[1:].strip().split("@")
        return before + _call(home, name, own) + after
    if home != "Tensor":
        return f"{home}.{name}({args})"
    parsed = ast.parse(f"_({args})", mode="eval").body
    first, rest = parsed.args[0], [*map(ast.unparse, parsed.args[1:]), *map(ast.unparse, parsed.keywords)]
    return f"{ast.unparse(first)}.{name}({', '.join(rest)})"


def _public(home: str) -> list[str]:
    import mindspore

    if home == "Tensor":
        names = [item for item in dir(mindspore.Tensor) if not item.startswith("_")]
        return [item for item in names if callable(getattr(mindspore.Tensor, item, None))]
    where: Any = mindspore
    for part in home.split("."):
        where = getattr(where, part)
    names = sorted(set(getattr(where, "__all__", dir(where))))
    return [
        item for item in names if callable(getattr(where, item, None)) and not isinstance(getattr(where, item), type)
    ]


def _not_swept(name: str) -> bool:
    words = " ".join(SAMPLES.NOT_SWEPT.values()).split()
    return any(fnmatch.fnmatch(name, item) for item in words)


# -- running cases -----------------------------------------------------------------------------------------------------


class Expression:
    """An expression as a function of its operands; plain tensors may be served by a reference instead."""

    def __init__(self, text: str, reference: str = "plain") -> None:
        self.text, self.reference = text, reference
        named = {item.id for item in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(item, ast.Name)}
        self.operands = [item for item in SAMPLES.OPERANDS if item in named]

    def arrays(self) -> list[Any]:
        return [SAMPLES.OPERANDS[item] for item in self.operands]

    def value(self, tensors: Any) -> Any:
        import mindspore
        from mindspore import Tensor, mint, ops

        arguments = dict(zip(self.operands, tensors, strict=True))
        return eval(self.text.strip(), {"mindspore": mindspore, "mint": mint, "ops": ops, "Tensor": Tensor,
                                        "_written": _written, "_drawn": _drawn, "F": mint.nn.functional} | arguments)  # fmt: skip

    def __call__(self, *tensors: Any) -> list[Any]:
        """The tensors of the result."""
        if self.reference == "forward":
            from mindspore import ops

            tensors = tuple(ops.stop_gradient(item) for item in tensors)
        elif self.reference != "plain" and not any(isinstance(item, DTensor) for item in tensors):
            return _by_torch(self, tensors) if self.reference == "torch" else _by_one_rank(self, tensors)
        return _tensors(self.value(tensors))


def _written(x: Any, write: Any) -> Any:
    """The result of an in-place call on a copy, and the copy; plain CPU tensors are computed and not written."""
    copy = x * 1
    result = write(copy)
    return (result, copy) if isinstance(x, DTensor) else (result, result * 1)


def _drawn(value: Any) -> Any:
    """The shape, dtype and finiteness of random numbers, since their values differ."""
    return value * 0 + 1


def _tensors(value: Any) -> list[Any]:
    from mindspore import Tensor

    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _torch_value(expression: Expression, tensors: Any) -> Any:
    import torch

    class Mint:
        nn, linalg, special = torch.nn, torch.linalg, torch.special

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    names = {"mint": Mint(), "F": torch.nn.functional, "torch": torch, "_written": _written, "_drawn": _drawn}
    return eval(expression.text.strip(), names | dict(zip(expression.operands, tensors, strict=True)))


def _by_torch(expression: Expression, tensors: Any) -> list[Any]:
    import torch
    from mindspore import Tensor
    from mindspore.common._grad_function import _Function

    def flat(value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            return [value]
        return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []

    class Reference(_Function):
        @staticmethod
        def forward(ctx: Any, *xs: Any) -> Any:
            ctx.leaves = [torch.from_numpy(tensor.asnumpy().copy()) for tensor in xs]
            for tensor in ctx.leaves:
                tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
            ctx.outs = flat(_torch_value(expression, ctx.leaves))
            results = tuple(Tensor(tensor.detach().numpy().copy()) for tensor in ctx.outs)
            return results if len(results) > 1 else results[0]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            pairs = [
                (o, torch.from_numpy(g.asnumpy().copy()))
                for o, g in zip(ctx.outs, grads, strict=True)
                if o.requires_grad
            ]
            leaves = [tensor for tensor in ctx.leaves if tensor.requires_grad]
            results = iter(
                torch.autograd.grad(
                    [o for o, _ in pairs], leaves, [g.reshape(o.shape) for o, g in pairs], allow_unused=True
                )
            )
            return tuple(_numbers(tensor, next(results)) if tensor.requires_grad else None for tensor in ctx.leaves)

    def _numbers(leaf: Any, grad: Any) -> Any:
        return Tensor((torch.zeros_like(leaf) if grad is None else grad).detach().numpy().copy())

    results = Reference.apply(*tensors)
    return list(results) if isinstance(results, tuple) else [results]


def _by_one_rank(expression: Expression, tensors: Any) -> list[Any]:
    raise NotImplementedError


def _probe(expression: Expression, arrays: Any) -> tuple[str, str]:
    """The outcome on plain tensors: ``tensor``, ``host`` (no tensor), ``gradient`` (it has none) or ``fails``."""
    platform = platform_named("mindspore")
    try:
        value = expression.value([platform.from_numpy(item) for item in arrays])
        outs = _tensors(value)
        for item in outs:
            item.asnumpy()
    except Exception as error:  # noqa: BLE001 - any failure means the same
        return "fails", _first_line(error)
    if not outs:
        return "host", repr(value)[:80]
    if expression.reference == "torch" or any(item.size == 0 for item in outs):
        return "tensor", ""
    return _probe_gradient(platform, expression, arrays)


def _probe_gradient(platform: Any, expression: Expression, arrays: Any) -> tuple[str, str]:
    rng = np.random.default_rng(0)
    wanted = [item.dtype.kind in "fc" for item in arrays]

    def seeds(outs: Any) -> list[Any]:
        return [
            platform.from_numpy(np.asarray(rng.standard_normal(tuple(item.shape))).astype(item.asnumpy().dtype))
            if platform.is_floating(item) else None
            for item in outs
        ]  # fmt: skip

    try:
        _, grads = harness_of(platform).vjp(expression, [platform.from_numpy(item) for item in arrays], seeds, wanted)
        for grad in grads:
            if grad is not None:
                grad.asnumpy()
    except Exception as error:  # noqa: BLE001 - any failure means the same
        return "gradient", _first_line(error)
    return "tensor", ""


def _probe_torch(expression: Expression, arrays: Any) -> tuple[str, str]:
    platform = platform_named("mindspore")
    try:
        outs = _by_torch(expression, [platform.from_numpy(item) for item in arrays])
    except Exception as error:  # noqa: BLE001 - any failure means the same
        return "fails", _first_line(error)
    return _probe_gradient(platform, expression, arrays) if outs else ("fails", "no tensor")


def _host(expression: Expression, arrays: Any) -> str:
    """Check that Python values are the plain ones for every placement of the operands."""
    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("m",))
    wanted = expression.value([platform.from_numpy(item) for item in arrays])
    for place in (lambda _: Replicate(), lambda item: Shard(0) if item.ndim else Replicate()):
        from hyper_parallel.core.dtensor.layout import Layout

        layouts = [Layout.place(mesh, [place(item)], item.shape) for item in arrays]
        tensors = [
            platform.wrap(platform.from_numpy(local_shard(item, layout, 0)), layout)
            for item, layout in zip(arrays, layouts, strict=True)
        ]
        results = expression.value(tensors)
        same = (
            np.isclose(results, wanted, rtol=1e-6).all()
            if isinstance(wanted, (np.ndarray, float))
            else results == wanted
        )
        if not same:
            return f"is {results!r}, should be {wanted!r}"[:200]
    return ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip() and not line.startswith("---")]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:220]


def _in_one(fn: Any, *args: Any) -> tuple[str, str]:
    try:
        return simulate(fn, 1, platform="mindspore", args=args, timeout=240)[0]
    except RankFailedError as error:
        return "fails", "died: " + _first_line(error.__cause__ or error)


def run_case(case: Case, meshes: Any = ((2,), (3,)), limit: int = 6) -> list[Outcome]:
    """Outcomes of a name's expressions; of guessed ones that of the first which plain tensors can run."""
    results = []
    for text in case.expressions:
        outcome = _run_expression(case, text, meshes, limit)
        results.append(outcome)
        if case.guessed and outcome.kind != "no plain form":
            return [outcome]
    return results[:1] if case.guessed else results


def _run_expression(case: Case, text: str, meshes: Any, limit: int) -> Outcome:
    expression = Expression(text)
    if not expression.operands:
        return Outcome(case.name, text, "no operand")
    arrays = expression.arrays()
    state, note = _in_one(_probe, expression, arrays)
    served = ""
    if state in ("fails", "gradient") and not case.guessed:
        torch_state, _ = (
            _in_one(_probe_torch, Expression(text, "torch"), arrays) if _torch_knows(text) else ("fails", "")
        )
        if torch_state == "tensor":
            expression, served = Expression(text, "torch"), f"reference PyTorch; {state}: {note}"
            state = "tensor"
    if state == "gradient":
        expression, served = Expression(text, "forward"), f"forward only: {note}"
    if state == "fails":
        return Outcome(case.name, text, "no plain form", note)
    try:
        if state == "host":
            problem = next(
                (item for item in simulate(_host, 2, platform="mindspore", args=(expression, arrays)) if item), ""
            )
            return Outcome(case.name, text, "wrong" if problem else "ok", problem or "Python value", 2)
        return _checked(case, text, expression, arrays, meshes, limit, served)
    except RankFailedError as error:
        return _failed(case, text, error, served)
    except Exception as error:  # noqa: BLE001 - reported
        return Outcome(case.name, text, "crash", _first_line(error))


def _torch_knows(text: str) -> bool:
    return text.startswith(("mint.", "_written", "x.")) and "ops." not in text


def _checked(
    case: Case, text: str, expression: Expression, arrays: Any, meshes: Any, limit: int, served: str
) -> Outcome:
    compared, rejected, total = 0, [], 0
    tolerance = 2e-4 if expression.reference == "torch" else None
    for mesh in meshes:
        report = check_function(expression, arrays, mesh, platform="mindspore", limit=limit, tolerance=tolerance)
        if report.wrong:
            return Outcome(case.name, text, "wrong", f"{report.wrong[0]} {served}"[:300])
        compared += report.forward + report.backward
        total += report.forward
        rejected.extend(report.rejected)
    if not total:
        return Outcome(case.name, text, "rejects", rejected[0][:300] if rejected else "nothing compared")
    note = f"{len(rejected)} placements rejected: {rejected[0][:160]}" if rejected else ""
    return Outcome(case.name, text, "ok", "; ".join(filter(None, (note, served))), compared)


def _failed(case: Case, text: str, error: RankFailedError, served: str) -> Outcome:
    cause = error.__cause__ or error
    note = _first_line(cause)
    places = [line.strip() for line in str(error).split("\n") if line.strip().startswith("File")]
    if "returned a plain" in note:
        return Outcome(case.name, text, "plain result", note)
    kind = "rejects" if isinstance(cause, HyperParallelError) and not isinstance(cause, RankFailedError) else "crash"
    if "all zero or not finite" in note:
        kind = "bad sample"
    return Outcome(case.name, text, kind, f"{note} {served} {' < '.join(places[-2:]) if kind == 'crash' else ''}"[:500])


# -- all of them --------------------------------------------------------------------------------------------------------


def _child(part: int, parts: int, only: str, limit: int) -> None:
    for case in [item for item in cases() if fnmatch.fnmatch(item.name, only)][part::parts]:
        started = time.monotonic()
        for outcome in run_case(case, limit=limit):
            print(json.dumps(asdict(outcome) | {"seconds": round(time.monotonic() - started, 2)}), flush=True)


def _parent(jobs: int, only: str, limit: int, report: Path) -> int:
    command = [sys.executable, __file__, "--only", only, "--limit", str(limit)]
    parts = [report.with_suffix(f".{part}.jsonl") for part in range(jobs)]
    children = []
    for part, path in enumerate(parts):
        with path.open("w", encoding="utf-8") as out:
            children.append(subprocess.Popen([*command, "--part", f"{part}/{jobs}"], stdout=out))
    for child in children:
        child.wait()
    results = [json.loads(line) for path in parts for line in path.read_text().splitlines() if line.startswith("{")]
    counts = Counter(item["kind"] for item in results)
    lines = [
        "# MindSpore's public names on DTensors",
        "",
        *(f"- {kind}: {count}" for kind, count in counts.most_common()),
        "",
    ]
    lines += ["| name | expression | outcome | compared | note |", "|---|---|---|---|---|"]
    for item in sorted(results, key=lambda item: (item["kind"], item["name"])):
        note = item["note"].replace("|", "\\|").replace("\n", " ")
        expression = item["expression"].replace("|", "\\|")
        lines.append(f"| {item['name']} | `{expression}` | {item['kind']} | {item['compared']} | {note} |")
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, results)) + "\n", encoding="utf-8")
    print(dict(counts))
    return 1 if {"wrong", "plain result", "crash"} & set(counts) else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="names, as a file pattern")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=int, default=6, help="placements per expression and mesh")
    parser.add_argument("--report", type=Path, default=Path("sweep.md"))
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        part, parts = map(int, arguments.part.split("/"))
        _child(part, parts, arguments.only, arguments.limit)
        return 0
    return _parent(arguments.jobs, arguments.only, arguments.limit, arguments.report)


if __name__ == "__main__":
    sys.exit(main())
