"""Operators are filed by family, under the names of ``core/shard/rules``."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

# Files of platform/<framework>/ops that are no family, each with its reason.
OTHERS = {
    "torch": {
        "registry": "the three verbs",
        "foreach": "optimizers' calls on lists of tensors",
        "fused": "kernels that step many parameters",
        "python_api": "functions that PyTorch wrote in Python",
    },
    "mindspore": {
        "registry": "the three verbs",
        "empty_shards": "wraps kernels that are wrong, or refuse, where they reduce over no element",
        "loss_scale": "scaling of losses, the check for overflow, and steps of optimizers as operators",
        "numpy_api": "functions of mindspore.numpy",
        "kernels": "copy, fill, write and sample, which several families use",
        "python_api": "functions of MindSpore's Python layer, and methods in older spellings",
    },
}


def files(package):
    """The names of a package's modules, without importing them."""
    room = Path(find_spec("hyper_parallel").origin).parent
    return {path.stem for path in (room / package).glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("framework", OTHERS)
def test_operators_are_filed_by_family(framework):
    """A file of a framework's operators is named as a file of rules, or is listed here with its reason."""
    names = files(f"platform/{framework}/ops")
    assert names - files("core/shard/rules") == OTHERS[framework].keys()


@pytest.mark.parametrize("package", ["core/shard/rules", "platform/torch/ops", "platform/mindspore/ops"])
def test_cross_is_linear_algebra(package):
    """An operator has one family, the same in all three folders."""
    room = Path(find_spec("hyper_parallel").origin).parent / package
    assert [path.stem for path in sorted(room.glob("*.py")) if '"cross"' in path.read_text(encoding="utf-8")] == [
        "linalg"
    ]


@pytest.mark.parametrize("framework", OTHERS)
def test_each_spelling_is_beside_its_operators_rule(framework):
    """A family's file states spellings and kernels only of operators whose rule is in the file of that name."""
    room = Path(find_spec("hyper_parallel").origin).parent
    families = files("core/shard/rules")
    home = {op: family for family in families for op in literals(room / f"core/shard/rules/{family}.py", RULES)}
    misplaced = {}
    for family in families & files(f"platform/{framework}/ops"):
        tree = ast.parse((room / f"platform/{framework}/ops/{family}.py").read_text(encoding="utf-8"))
        for op in [op for node in ast.walk(tree) if isinstance(node, ast.Call) for op in stated(node)]:
            if home.get(op, family) != family:
                misplaced[op] = (family, home[op])
    assert misplaced == {}


def stated(call):
    """The canonical operators that a call of a registry's verbs names literally."""
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    match getattr(call.func, "id", None):
        case "spelling":
            return texts[:1]
        case "kernel":
            return texts
        case "spellings":
            return texts[0].split()[1::2]
        case _:
            return []


RULES = {"rule", "decomposition", "Rule", "Decomposition"}


def literals(path, calls):
    """The operators that a file of rules declares by a literal name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls
        and node.args and isinstance(node.args[0], ast.Constant)
    }  # fmt: skip
