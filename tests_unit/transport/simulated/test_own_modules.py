"""Simulated ranks have their own copies of the user's modules."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package of the user with state, which communicates while it is imported."""
    (tmp_path / "own_project").mkdir()
    (tmp_path / "own_project" / "__init__.py").write_text("")
    (tmp_path / "own_project" / "state.py").write_text(
        "import torch.distributed as dist\ndist.barrier()\nRANK = dist.get_rank()\nSEEN = []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_rank_imports_its_own_copy(project):
    """State of modules is not shared between ranks, even if ranks meet while importing; shared ones stay shared."""
    (project / "other").mkdir()

    def body():
        import os

        if dist.get_rank():
            os.chdir("other")
        import textwrap

        from own_project import state

        state.SEEN.append(dist.get_rank())
        dist.barrier()
        from own_project.state import RANK

        return RANK, state.SEEN, sys.modules["own_project.state"] is state, id(textwrap), Path.cwd().name

    results = simulate(body, 3, "torch", own_modules=True)
    assert [result[:3] for result in results] == [(rank, [rank], True) for rank in range(3)]
    assert len({result[3] for result in results}) == 1
    assert [result[4] for result in results] == [project.name, "other", "other"]
    assert not [name for name in sys.modules if name.startswith("own_project")]


def test_without_it_ranks_share_their_modules(project):
    """By default modules are shared, as in threads."""

    def body():
        import own_project as module

        dist.barrier()
        return id(module)

    assert len(set(simulate(body, 2, "torch"))) == 1


def test_a_module_that_nobody_has_is_nobodys(project):
    """A search for what does not exist ends, and the other finders are asked once."""
    from hyper_parallel.transport.real.c10d import TorchOps
    from hyper_parallel.transport.simulated.own_modules import OwnModules

    with OwnModules(TorchOps()) as modules:
        assert modules.find_spec("no_such_module") is None
        modules._searching.active = True
        assert modules.find_spec("json") is None
