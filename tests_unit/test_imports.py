"""Imports point one way, form no cycle, and touch a framework only where its code lives.

The walker reads source text and imports nothing. It sees imports inside functions and behind `import_module("...")`;
imports under `if TYPE_CHECKING` form no cycle, since they never run, but must still point the right way.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP = "hyper_parallel"
WORKSHOP = "workshop"

FRAMEWORKS = {"torch", "torch_npu", "mindspore"}
TORCH_ZONES = {
    "platform.torch",
    "platform.torch.versions",
    "transport.checks.torch_distributed",
    "transport.frontends.c10d",
    "transport.host.torch",
    "transport.real.c10d",
}
MINDSPORE_ZONES = {
    "platform.mindspore",
    "platform.mindspore.versions",
    "transport.frontends.mindspore_comm",
    "transport.real.mindspore",
}
# The bug corpus holds users' programs: plain PyTorch or MindSpore, which import nothing of the library, and of which it
# imports nothing: they are run like a user's file.
FRAMEWORK_HOMES = {
    # MindSpore's CPU rehearsal borrows gloo from PyTorch
    "torch": TORCH_ZONES | {"transport.real.mindspore", "verify.bugs.torch", "verify.frameworks.torch"},
    "torch_npu": TORCH_ZONES,
    "mindspore": MINDSPORE_ZONES | {"verify.bugs.mindspore", "verify.frameworks.mindspore"},
}

# Zone -> zones that it may import besides itself. A module belongs to the zone with the longest matching name.
TRANSPORT = {"transport", "transport.host", "transport.checks", "transport.simulated", "transport.real"}
BASE = {"_caches", "_lazy", "_release", "_text", "_tree", "errors", "platform.contract", "platform", *TRANSPORT}
CORE = {
    "core.dtensor",
    "core.shard",
    "core.tensor_parallel",
    "core.data_parallel",
    "core.context_parallel",
    "core.expert_parallel",
    "core.checkpoint",
}
ARROWS = {
    "_caches": set(),
    "_lazy": set(),
    "_release": set(),
    "compat.paths": {"_lazy"},
    "compat": BASE | CORE,
    "_text": set(),
    "_tree": set(),
    "_versions": {"errors"},
    "errors": set(),
    # A framework's private names, which its transports need as well; they import nothing of the rest.
    "platform.torch.versions": {"_versions", "errors", "platform"},  # tested.py alone
    "platform.mindspore.versions": {"_versions", "platform"},  # tested.py alone
    # The transport is part of what a platform answers with: contracts name its interface.
    "platform.contract": {"_text", "_tree", "errors", "transport", "transport.checks", "transport.host"},
    "platform": {"_lazy", "errors", "platform.contract", "platform.torch", "platform.mindspore"},  # select.py alone
    # Levels of the transport: each imports those before it.
    "transport": {"_caches", "_text", "errors"},
    "transport.host": {"errors", "transport"},
    "transport.host.torch": {"errors", "platform.torch.versions", "transport", "transport.host"},
    "transport.checks": {"_text", "errors", "transport"},
    "transport.checks.torch_distributed": {"errors", "platform.torch.versions", "transport", "transport.checks"},
    "transport.simulated": {"_caches", "_text", "errors", "transport", "transport.host", "transport.checks"},
    "transport.frontends": set(),
    "transport.frontends.c10d": {
        "_text",
        "errors",
        "platform.torch.versions",
        "transport",
        "transport.checks",
        "transport.checks.torch_distributed",
        "transport.host",
        "transport.host.torch",
        "transport.simulated",
    },
    "transport.frontends.mindspore_comm": {
        "errors",
        "platform.mindspore.versions",
        "transport",
        "transport.checks",
        "transport.host",
        "transport.simulated",
    },
    "transport.real": {"_text", "errors", "transport", "transport.checks", "transport.host", "transport.simulated"},
    "transport.real.c10d": {
        "_text",
        "errors",
        "platform.torch.versions",
        "transport",
        "transport.checks",
        "transport.frontends.c10d",
        "transport.host",
        "transport.host.torch",
        "transport.real",
    },
    "transport.real.mindspore": {
        "errors",
        "platform.mindspore.versions",
        "transport",
        "transport.checks",
        "transport.frontends.mindspore_comm",
        "transport.host",
        "transport.real",
        "transport.real.c10d",  # its CPU rehearsal runs over gloo
        "transport.simulated",
    },
    # A framework subclasses the DTensor mixin and feeds the dispatcher, so it may look up; core may never look down.
    "platform.torch": {
        "_caches",
        "_versions",
        "platform",
        "platform.torch.versions",
        "_text",
        "_tree",
        "errors",
        "platform.contract",
        *TRANSPORT,
        "transport.frontends.c10d",
        "transport.host.torch",
        "transport.real.c10d",
        *CORE,
    },
    "platform.mindspore": {
        "_caches",
        "_versions",
        "platform",
        "platform.mindspore.versions",
        "_tree",
        "errors",
        "platform.contract",
        *TRANSPORT,
        "transport.frontends.mindspore_comm",
        "transport.real.mindspore",
        *CORE,
    },
    "core": set(),
    "core.dtensor": BASE,
    "core.shard": BASE | {"core.dtensor"},
    "core.tensor_parallel": BASE | {"core.dtensor", "core.shard"},
    "core.data_parallel": BASE | {"core.dtensor"},
    "core.context_parallel": BASE | {"core.dtensor"},
    "core.expert_parallel": BASE | {"core.dtensor"},
    "core.checkpoint": BASE | {"core.dtensor"},
    "verify": BASE
    | CORE
    | {"transport.frontends.c10d", "transport.host.torch", "transport.real.c10d", "transport.real.mindspore"}
    | {"verify.frameworks", ""},
    # What the harness needs of a framework; the rest of it comes here only by name, through `harness_of`.
    "verify.frameworks": BASE | CORE,
    "verify.frameworks.torch": BASE | CORE | TORCH_ZONES | {"verify.frameworks"},
    "verify.frameworks.mindspore": BASE | CORE | MINDSPORE_ZONES | {"verify.frameworks"},
    "verify.bugs.torch": set(),  # programs as users write them, who do not have this library
    "verify.bugs.mindspore": set(),
    "cli": BASE | CORE | {"verify", ""},
    "pytest_plugin": {"_text", "errors", "platform", *TRANSPORT, "verify", ""},
    "__main__": {"cli"},
    "": BASE | CORE | {"compat.paths", "verify"},  # hyper_parallel/__init__.py: public names, lazily
}
EAGER_AT_TOP = {"_lazy", "compat.paths", "errors", ""}


@dataclass(frozen=True)
class Edge:
    """An import: the importing and the imported module, the line, and when it happens."""

    source: str
    target: str
    line: int
    lazy_exports: bool
    typing_only: bool


def zone_of(module: str) -> str:
    """Zone of a module of the library: the longest zone name that is a prefix of its path."""
    path = module.removeprefix(TOP).lstrip(".")
    while path not in ARROWS:
        if not path:
            break
        path = path.rpartition(".")[0]
    return path if path or module == TOP else f"<unknown> {module}"


def find_modules(root: Path) -> dict[str, Path]:
    """Map the name of every module under `root/hyper_parallel` to its file."""
    modules = {}
    for path in sorted((root / TOP).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


class ImportCollector(ast.NodeVisitor):
    """Collects the imports of one module as edges."""

    def __init__(self, module: str, path: Path, known: dict[str, Path]):
        self.module, self.known = module, known
        self.package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        self.lazy_exports = self.typing_only = False
        self.edges: list[Edge] = []

    def add(self, target: str, node: ast.AST) -> None:
        """Record one import."""
        self.edges.append(Edge(self.module, target, node.lineno, self.lazy_exports, self.typing_only))

    def visit_Import(self, node: ast.Import) -> None:
        """`import a, b`."""
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """`from a import b`, where b may be a module, and a may be relative."""
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
        for alias in node.names:
            member = f"{base}.{alias.name}"
            self.add(member if member in self.known else base, node)

    def visit_Call(self, node: ast.Call) -> None:
        """`import_module("a")`, where the name is a literal."""
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        first = node.args[0] if node.args else None
        if name in {"import_module", "__import__"} and isinstance(first, ast.Constant) and isinstance(first.value, str):
            self.add(first.value, node)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """A block under `if TYPE_CHECKING`."""
        before = self.typing_only
        self.typing_only = before or ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for child in node.body:
            self.visit(child)
        self.typing_only = before
        for child in node.orelse:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """A function: imports inside it are lazy."""
        before, self.lazy_exports = self.lazy_exports, True
        self.generic_visit(node)
        self.lazy_exports = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name is ast's


def find_edges(root: Path) -> list[Edge]:
    """Collect every import of every module."""
    known, edges = find_modules(root), []
    for module, path in known.items():
        collector = ImportCollector(module, path, known)
        collector.visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        edges += collector.edges
    return edges


def arrow_problem(edge: Edge) -> str | None:
    """Say why an import points the wrong way, or return None."""
    source, head = zone_of(edge.source), edge.target.split(".")[0]
    if head in FRAMEWORKS and source not in FRAMEWORK_HOMES[head]:
        return f"imports the framework {head} outside its home"
    if head != TOP:
        return "imports the workshop, which is not in the wheel" if head == WORKSHOP else None
    target = zone_of(edge.target)
    if source not in ARROWS or target not in ARROWS:
        return f"has no place in the table of arrows (import of {edge.target})"
    if target != source and target not in ARROWS[source]:
        return f"must not import {edge.target}"
    if source == "" and target not in EAGER_AT_TOP and not (edge.lazy_exports or edge.typing_only):
        return f"imports {edge.target} at once; public names are lazy"
    return None


def opens_door(edge: Edge) -> bool:
    """Tell whether the edge is select.py loading a framework's folder.

    That edge goes down on purpose while every other one goes up, at the first use and by name: it is not a cycle.
    """
    return zone_of(edge.source) == "platform" and zone_of(edge.target) in {"platform.torch", "platform.mindspore"}


def graph_of(edges: list[Edge]) -> dict[str, set[str]]:
    """Build the graph in which cycles count: imports that run, lazily or not."""
    graph: dict[str, set[str]] = {}
    for edge in edges:
        if edge.target.split(".")[0] == TOP and not (edge.typing_only or opens_door(edge)):
            graph.setdefault(edge.source, set()).add(edge.target)
    return graph


def shortest_cycle(graph: dict[str, set[str]], start: str) -> list[str] | None:
    """Find the shortest way from a module back to itself."""
    came_from: dict[str, str] = {}
    queue = deque([start])
    while queue:
        module = queue.popleft()
        for target in sorted(graph.get(module, ())):
            if target == start:
                path = [module]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if target not in came_from:
                came_from[target] = module
                queue.append(target)
    return None


def cycles(edges: list[Edge]) -> list[str]:
    """List each cycle once, written from its first module in the alphabet."""
    graph, texts = graph_of(edges), set()
    for start in graph:
        if path := shortest_cycle(graph, start):
            first = path.index(min(path))
            path = path[first:] + path[:first]
            texts.add(" -> ".join([*path, path[0]]))
    return [f"cycle: {path}" for path in sorted(texts)]


def package_of(module: str, known: dict[str, Path]) -> str | None:
    """Return the package of a module of the library; a module of the top package is one of its own."""
    if module not in known or known[module].name == "__init__.py" or module.count(".") < 2:
        return module if module in known else None
    return module.rpartition(".")[0]


def knots(root: Path) -> list[set[str]]:
    """List the sets of packages that reach each other by imports that run, without the name of the top package."""
    known = find_modules(root)
    return _knots_of({(package_of(a, known), package_of(b, known)) for a, b in _imports(root) if b in known})


def folder_knots(root: Path) -> list[set[str]]:
    """List the sets of folders in one folder that reach each other, each with all that is in it.

    The modules of a folder that are in none of its folders count as one more folder, of its own name.
    """
    known = find_modules(root)
    between: dict[tuple[str, ...], set[tuple[str | None, str | None]]] = {}
    for source, target in _imports(root):
        ours, theirs = (str(package_of(module, known)).split(".") for module in (source, target))
        same = [a == b for a, b in zip(ours, theirs, strict=False)]
        shared = same.index(False) if False in same else len(same)
        if target in known and shared:
            pair = ".".join(ours[: shared + 1]), ".".join(theirs[: shared + 1])
            between.setdefault(tuple(ours[:shared]), set()).add(pair)
    return [knot for pairs in between.values() for knot in _knots_of(pairs)]


def _imports(root: Path) -> set[tuple[str, str]]:
    return {(source, target) for source, targets in graph_of(find_edges(root)).items() for target in targets}


def _knots_of(pairs: set[tuple[str | None, str | None]]) -> list[set[str]]:
    graph: dict[str, set[str]] = {}
    for source, target in pairs:
        if source is not None and target is not None and source != target:
            graph.setdefault(source, set()).add(target)
    reached = {package: reachable(graph, package) for package in graph}
    found: list[set[str]] = []
    for package in sorted(graph):
        if package in reached[package] and not any(package in knot for knot in found):
            found.append({other for other in reached[package] if package in reached.get(other, ())})
    return [{package.removeprefix(f"{TOP}.") for package in knot} for knot in found]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return what can be reached from ``start`` in one step or more."""
    seen: set[str] = set()
    queue = [start]
    while queue:
        new = graph.get(queue.pop(), set()) - seen
        seen |= new
        queue += new
    return seen


def violations(root: Path) -> list[str]:
    """Everything that is wrong with the imports of the tree under `root`."""
    edges = find_edges(root)
    wrong = [f"{edge.source}:{edge.line} {why}" for edge in edges if (why := arrow_problem(edge))]
    return wrong + cycles(edges)


def test_every_import_of_the_library_is_allowed():
    """Imports point one way, form no cycle, and name a framework only in that framework's own files."""
    assert len(find_modules(ROOT)) > 10
    assert violations(ROOT) == []


# Packages that still import each other, although their files do not: these sets may only shrink.
KNOTS: list[set[str]] = []
# The same of folders with all that is in them. The first is the design: a framework's folder subclasses the DTensor of
# core, which asks the contract, and transports need a framework's private names, which import nothing of the rest.
FOLDER_KNOTS = [{"core", "platform", "transport"}]


def test_packages_import_each_other_in_no_new_cycle():
    """Packages form no cycles either, except those that are known."""
    assert [knot for knot in knots(ROOT) if not any(knot <= known for known in KNOTS)] == []


def test_folders_import_each_other_in_no_new_cycle():
    """The folders of one folder, as a whole, form no cycles either, except those that are known."""
    assert [knot for knot in folder_knots(ROOT) if not any(knot <= known for known in FOLDER_KNOTS)] == []


def test_a_cycle_of_packages_is_reported(tmp_path):
    """Packages whose files import each other are reported together, also where no file is in a cycle."""
    for name, source in {
        "core/dtensor/mesh.py": "",
        "core/dtensor/dtensor.py": "def f():\n    from hyper_parallel.core.shard.rules import sums\n",
        "core/shard/rule.py": "from hyper_parallel.core.dtensor import mesh\nimport hyper_parallel.errors\n",
        "core/shard/rules/sums.py": "from hyper_parallel.core.shard import rule\n",
        "errors.py": "",
        "cli/main.py": "import hyper_parallel.core.shard.rule\n",
    }.items():
        path = tmp_path / TOP / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert cycles(find_edges(tmp_path)) == []
    assert knots(tmp_path) == [{"core.dtensor", "core.shard", "core.shard.rules"}]
    assert folder_knots(tmp_path) == [{"core.dtensor", "core.shard"}]


def test_a_cycle_of_folders_is_reported(tmp_path):
    """Folders that import each other are reported, although no packages in them do."""
    for name, source in {
        "transport/real/gloo/messages.py": "from hyper_parallel.transport.simulated import board\n",
        "transport/simulated/board.py": "",
        "transport/simulated/pool.py": "def f():\n    from hyper_parallel.transport.real import launched\n",
        "transport/real/launched.py": "",
    }.items():
        path = tmp_path / TOP / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert knots(tmp_path) == []
    assert folder_knots(tmp_path) == [{"transport.real", "transport.simulated"}]


LIBRARY = ("core", "platform", "transport")
HARNESS = re.compile(r"""hyper_parallel[./]verify | hyper-parallel\ (?:verify|fuzz|explain|prove|record)
    | \bverify[./]\w | \bharness
    | \bverify\ (?:bugs|model|ops|program|redistribute)\b""", re.VERBOSE | re.IGNORECASE)  # fmt: skip


def mentions(root: Path) -> list[str]:
    """List the lines of the library, pages included, that name the harness."""
    return [
        f"{path.relative_to(root / TOP)}:{number}: {line.strip()}"
        for zone in LIBRARY
        for path in sorted((root / TOP / zone).rglob("*"))
        if path.suffix in {".py", ".md"}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if HARNESS.search(line)
    ]


def test_the_library_does_not_mention_the_harness():
    """`core`, `platform` and `transport` name nothing of `verify`: no module, no file, no command."""
    assert mentions(ROOT) == []


@pytest.mark.parametrize(
    "line, found",
    [
        ("# see hyper_parallel.verify.simulate", True),
        ('OWN = "verify/simulate.py"', True),
        ("rehearse with verify.launch(fn, 2)", True),
        ("run hyper-parallel verify model", True),
        ("as `verify ops` does", True),
        ("records of the harness", True),
        ("it has to be verified before; does this verify it?", False),
    ],
)
def test_a_mention_of_the_harness_is_reported(tmp_path, line, found):
    """Modules, files and commands of the harness are found in sources and pages; the verb is not one of them."""
    for zone, name in (("core/dtensor", "mesh.py"), ("transport", "README.md")):
        folder = tmp_path / TOP / zone
        folder.mkdir(parents=True)
        (folder / name).write_text(f"\n{line}\n")
    reported = [f"core/dtensor/mesh.py:2: {line}", f"transport/README.md:2: {line}"]
    assert mentions(tmp_path) == (reported if found else [])


@pytest.mark.skipif(not (ROOT / "ci").exists(), reason="[no-tool] the workshop is not installed")
def test_the_workshop_names_a_framework_in_folders_of_its_name_only():
    """A framework is imported in folders of its name (benchmarks, seeded bugs), nowhere else in the workshop."""
    wrong = []
    for path in (ROOT / "ci" / WORKSHOP).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "ci").with_suffix("").parts)
        collector = ImportCollector(module, path, {})
        collector.visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        heads = {edge.target.split(".")[0] for edge in collector.edges} & FRAMEWORKS
        wrong += [module for head in heads if f".{head}." not in module]
    assert wrong == []


# The walker fires


@pytest.fixture
def tree(tmp_path):
    """Write a synthetic package from {path: source}, with the `__init__.py` files it needs, and walk it."""

    def walk(files):
        for name, source in files.items():
            path = tmp_path / TOP / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return violations(tmp_path)

    return walk


GOOD = {
    "__init__.py": "from . import errors\ndef __getattr__(n):\n    import hyper_parallel.core.dtensor.mesh\n",
    "errors.py": "",
    "core/dtensor/mesh.py": "import numpy\nfrom hyper_parallel.platform.select import get\n",
    "core/shard/rule.py": "from hyper_parallel.core.dtensor import mesh\nfrom . import signature\n",
    "core/shard/labels.py": "from ..dtensor.mesh import Mesh\n",
    "platform/select.py": "def get():\n    from hyper_parallel.platform.torch import tensors\n",
    "platform/torch/tensors.py": "import torch\nfrom hyper_parallel.core.dtensor.mesh import Mesh\n",
    "transport/base.py": "from hyper_parallel.errors import X\n",
    "transport/real/c10d.py": "import torch.distributed\nfrom hyper_parallel.transport.base import T\n",
    "transport/real/mindspore.py": "import mindspore\nimport torch\n",
    "verify/run.py": "import hyper_parallel\nfrom hyper_parallel.core.shard import rule\n",
    "verify/bugs/torch/case.py": "import torch\n",
    "verify/frameworks/torch/recorder.py": "import torch\nfrom hyper_parallel.platform.torch import tensors\n",
    "verify/bugs/mindspore/case.py": "import mindspore\n",
    "cli/__init__.py": "from hyper_parallel.verify import run\n",
}


def test_a_good_tree_passes(tree):
    """The walker reports nothing for a tree that keeps the rules, select.py's imports by name included."""
    assert tree(GOOD) == []


@pytest.mark.parametrize(
    "name, source, message",
    [
        ("errors.py", "import hyper_parallel.core.dtensor.mesh", "must not import hyper_parallel.core.dtensor.mesh"),
        ("core/dtensor/mesh.py", "from ..shard import rule", "must not import hyper_parallel.core.shard.rule"),
        ("core/shard/rule.py", "def f():\n    from hyper_parallel import verify", "must not import"),
        ("core/dtensor/mesh.py", "from hyper_parallel.platform.torch import tensors", "must not import"),
        ("verify/run.py", "from hyper_parallel.platform.torch import tensors", "must not import"),
        ("platform/torch/tensors.py", "import hyper_parallel.platform.mindspore", "must not import"),
        ("platform/contract/groups.py", "import hyper_parallel.core.dtensor.mesh", "must not import"),
        ("transport/base.py", "import hyper_parallel.platform.select", "must not import"),
        ("verify/run.py", "def f():\n    from workshop.bench import turns", "imports the workshop"),
        ("verify/bugs/torch/case.py", "from hyper_parallel.errors import X", "must not import"),
        ("verify/run.py", "from hyper_parallel.verify.frameworks.torch import recorder", "must not import"),
        ("verify/frameworks/torch/recorder.py", "import hyper_parallel.platform.mindspore", "must not import"),
        ("verify/frameworks/torch/recorder.py", "import hyper_parallel.verify.run", "must not import"),
        ("platform/torch/tensors.py", "from hyper_parallel.verify.frameworks import torch", "must not import"),
        ("verify/run.py", "import hyper_parallel.verify.bugs.torch", "must not import"),
        ("core/dtensor/mesh.py", "import hyper_parallel.transport.real.c10d", "must not import"),
        ("core/shard/rule.py", "import hyper_parallel", "must not import hyper_parallel"),
        (
            "core/dtensor/mesh.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hyper_parallel.core.shard import rule",
            "must not import",
        ),
        ("__init__.py", "from hyper_parallel.core.dtensor import mesh", "public names are lazy"),
        ("stray/module.py", "import hyper_parallel.errors", "has no place"),
    ],
)
def test_a_wrong_arrow_is_reported(tree, name, source, message):
    """An import against the arrows is reported, also inside a function and under TYPE_CHECKING."""
    (only,) = [text for text in tree({**GOOD, name: source}) if not text.startswith("cycle")]
    assert message in only


@pytest.mark.parametrize(
    "name, source",
    [
        ("core/dtensor/mesh.py", "import torch"),
        ("core/dtensor/mesh.py", "def f():\n    from torch.nn import functional"),
        ("verify/run.py", "from importlib import import_module\nimport_module('mindspore.mint')"),
        ("platform/select.py", "import importlib\nimportlib.import_module('torch')"),
        ("platform/torch/tensors.py", "import mindspore"),
        ("platform/mindspore/tensors.py", "import torch"),
        ("transport/real/c10d.py", "import mindspore"),
        ("verify/bugs/corpus.py", "import torch"),
        ("verify/bugs/mindspore/case.py", "import torch"),
        ("verify/frameworks/mindspore/recorder.py", "import torch"),
        ("transport/simulated/transport.py", "if True:\n    pass\nelse:\n    import torch"),
        ("cli/__init__.py", "try:\n    import torch_npu\nexcept ImportError:\n    pass"),
    ],
)
def test_a_framework_outside_its_home_is_reported(tree, name, source):
    """A framework is imported only by its own platform folder and its own transport file."""
    (only,) = tree({**GOOD, name: source})
    assert "imports the framework" in only


@pytest.mark.parametrize("form", ["from hyper_parallel.core.shard import {0}", "def f():\n    from . import {0}"])
def test_a_cycle_is_reported_once(tree, form):
    """A cycle of three modules is reported once with its whole path, lazy imports included."""
    ring = {f"core/shard/{a}.py": form.format(b) for a, b in ("xy", "yz", "zx")}
    report = tree({**GOOD, **ring})
    names = [f"hyper_parallel.core.shard.{name}" for name in "xyzx"]
    assert report == ["cycle: " + " -> ".join(names)]


def test_a_cycle_that_exists_for_types_only_is_none(tree):
    """A cycle of imports under TYPE_CHECKING is allowed, since these never run."""
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import x\n"
    assert tree({**GOOD, "core/shard/x.py": "from . import y", "core/shard/y.py": guarded}) == []


# Importing is light


def fresh_python(*args, tmp_path):
    """Run a new interpreter that finds the same package, without coverage (which would be measured, too)."""
    package = importlib.util.find_spec(TOP).submodule_search_locations[0]
    env = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")}
    env["PYTHONPATH"] = str(Path(package).parent)
    return subprocess.run(
        [sys.executable, *args], env=env, cwd=tmp_path, text=True, capture_output=True, check=True, timeout=120
    )


def test_import_loads_no_framework(tmp_path):
    """`import hyper_parallel` loads neither PyTorch nor MindSpore."""
    code = f"import sys, hyper_parallel; print(sorted({FRAMEWORKS!r} & set(sys.modules)))"
    assert fresh_python("-c", code, tmp_path=tmp_path).stdout.strip() == "[]"


def test_import_brings_almost_nothing(tmp_path):
    """`import hyper_parallel` loads four modules of the library and none of another package."""
    code = f"import sys; before = set(sys.modules); import {TOP}; print(*sorted(set(sys.modules) - before))"
    loaded = fresh_python("-c", code, tmp_path=tmp_path).stdout.split()
    assert [name for name in loaded if name.split(".")[0] == TOP] == [
        TOP, f"{TOP}._lazy", f"{TOP}.compat", f"{TOP}.compat.paths",
    ]  # fmt: skip
    assert {name.split(".")[0] for name in loaded} - {TOP} <= sys.stdlib_module_names
