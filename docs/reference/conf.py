"""Sphinx: the API reference, from the docstrings of the installed package. ``tox -e docs`` builds it.

No framework is needed, and none is imported: public names come without one.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "hyper-parallel"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Attributes are described in the class' own docstring; an object description for each would describe them twice.
napoleon_use_ivar = True
python_use_unqualified_type_names = True
# A role in a docstring that leads nowhere is an error; what annotations name need not have a page.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(abc|collections|contextlib|enum|hyper_parallel|pathlib)\..*"),
    ("py:class", r"np\.ndarray"),  # NumPy is imported for type checkers only
    ("py:class", r"dict\[str"),  # half of a type, in a signature with "<factory>", which Sphinx cannot parse
    ("py:obj", r".*\._\w+"),  # variables of types
    (
        "py:class",
        "AbstractContextManager|Cause|Dispatcher|BoundaryLayout|Graph|ModuleT|Names|OpCall|ParameterLayout|Part|Path",
    ),
    ("py:class", r"ProvenCalls|Ranks|RecordLog|Report|StepCall|TensorCheck|Training|Transport|_\w+"),
]
html_theme = "furo"
html_title = "hyper-parallel"
html_show_sourcelink = html_copy_source = False
html_show_sphinx = False

# Every name in ``__all__`` of these must be on a page: it is what users import.
PUBLIC = (
    "hyper_parallel",
    "hyper_parallel.core.checkpoint",
    "hyper_parallel.core.context_parallel",
    "hyper_parallel.core.data_parallel",
    "hyper_parallel.core.dtensor",
    "hyper_parallel.core.expert_parallel",
    "hyper_parallel.core.shard",
    "hyper_parallel.core.tensor_parallel",
    "hyper_parallel.errors",
    "hyper_parallel.pytest_plugin",
    "hyper_parallel.verify",
)


def undescribed(described: set[str]) -> list[str]:
    """Public names that no page describes, and members of the platform contract that none does.

    A name that several packages offer is described once, in its home.

    Args:
        described: full names of all objects on the pages.
    """
    last = {name.rsplit(".", 1)[-1] for name in described}
    missing = [f"{package}.{name}" for package in PUBLIC for name in _names(package) if name not in last]
    sys.path.append(str(Path(__file__).parents[2] / "ci"))
    inventory = importlib.import_module("workshop.conformance.inventory")
    members = [name for facet in inventory.MEMBERS.values() for name in facet]
    return missing + [f"member {name} of the platform contract" for name in members if name not in last]


def _names(package: str) -> list[str]:
    names: list[str] = importlib.import_module(package).__all__
    return names


def _check(app: Sphinx, env: Any) -> None:
    from sphinx.util import logging

    del app
    described = {name for name, *_ in env.get_domain("py").get_objects()}
    for name in undescribed(described):
        logging.getLogger(__name__).warning("%s is public, and no page describes it", name)
    for framework in {"torch", "mindspore"} & set(sys.modules):
        logging.getLogger(__name__).warning("%s was imported: public names come without a framework", framework)


def setup(app: Sphinx) -> None:
    """Check the pages once all of them are read; a warning fails the build."""
    app.connect("env-check-consistency", _check)
