"""Reports of failed ranked tests: on what they ran, and why a test ran on a framework that it is not written for."""

import importlib
import importlib.util

import pytest

from hyper_parallel.errors import RankFailedError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.pytest_plugin.report import RanksRepr, other_framework
from hyper_parallel.transport.failures import world_failed

TORCH_NOTE = (
    "This test ran on MindSpore because both frameworks are installed, but test_it.py imports torch: for a test of "
    'PyTorch write @pytest.mark.platforms("torch"), or run pytest with --hp-platforms torch'
)
MINDSPORE_NOTE = (
    "This test ran on PyTorch because both frameworks are installed, but test_it.py imports mindspore: for a test of "
    'MindSpore write @pytest.mark.platforms("mindspore"), or run pytest with --hp-platforms mindspore'
)


@pytest.mark.parametrize(
    "code, ran_on, text, note",
    [
        ("import torch.nn\n", "mindspore", "", TORCH_NOTE),
        ("def test():\n    from torch import nn\n", "mindspore", "", TORCH_NOTE),
        ("import torch\n", "torch", "", ""),
        ("import torch\nimport mindspore\n", "mindspore", "", ""),
        ("import numpy\n", "mindspore", "", ""),
        ("import (\n", "mindspore", "", ""),
        (
            "from . import mindspore_model\nimport mindspore as ms\n",
            "torch",
            "",
            MINDSPORE_NOTE,
        ),
        (
            "from mypkg import step\n",
            "mindspore",
            'File "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 1',
            TORCH_NOTE.replace("test_it.py imports torch", "the traceback leads through torch"),
        ),
    ],
)
def test_a_test_of_the_other_framework_is_explained(tmp_path, code, ran_on, text, note):
    """A module that imports only the other framework, or a traceback through it, is reported with the fix."""
    path = tmp_path / "test_it.py"
    path.write_text(code)
    assert other_framework(ran_on, path, text) == note


@pytest.mark.parametrize(
    "cause, line",
    [
        (ValueError("bad: batch 7"), "rank 1: ValueError: bad: batch 7"),
        (ValueError("ranks differ:\n  rank 0: 5\n  rank 1: 7"), "rank 1: ValueError: ranks differ: rank 0: 5"),
        (ValueError(""), "rank 1: ValueError: "),
        (RankFailedError("rank 1 died of SIGKILL\nStack"), "rank 1 died of SIGKILL"),
        (RankFailedError("the world ended"), "rank 1: the world ended"),
    ],
)
def test_the_line_of_the_summary_has_the_rank_the_error_and_its_first_fact(cause, line):
    """The line that pytest prints last has the first rank that failed, its error, and what the error is about."""
    assert RanksRepr("text", "test_it.py", 3, world_failed(2, {1: cause}, {})).reprcrash.message == line


def test_a_failure_of_no_rank_is_its_own_line():
    """A world that did not end has no rank that failed first."""
    assert RanksRepr("text", "test_it.py", 3, RankFailedError("no ranks\nmore")).reprcrash.message == "no ranks"


def test_a_module_that_cannot_be_read_explains_nothing(tmp_path):
    """Without the module's text there is no explanation."""
    assert other_framework("mindspore", tmp_path / "gone.py", "") == ""


@pytest.fixture(scope="module")
def loaded(platform_name):
    """Import what the inner run needs here: pytester unloads modules, and no framework can be imported twice."""
    platform_named(platform_name)
    ranks = "frontends.c10d.simulated_world" if platform_name == "torch" else "simulated.processes"
    for name in (f"transport.{ranks}", "verify.simulate"):
        importlib.import_module(f"hyper_parallel.{name}")
    return platform_name


CODE = """
import importlib
import pytest

@pytest.mark.world_size({size})
def test_it(rank):
    importlib.import_module("{framework}")
    assert rank < 0
    import torch  # never reached
"""


def test_the_report_says_on_what_it_ran(pytester, monkeypatch, loaded):
    """A failed ranked test says how many ranks of which kind and framework it ran on; one framework needs no note."""
    monkeypatch.setenv("HP_TEST_PLATFORMS", loaded)
    pytester.makepyfile(CODE.format(size=2, framework=loaded))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "hyper_parallel.pytest_plugin")
    title = {"torch": "PyTorch", "mindspore": "MindSpore"}[loaded]
    result.stdout.fnmatch_lines(
        [f"on 2 simulated ranks of {title}:", "rank 0 of 2 failed", "AssertionError: assert 0 < 0"]
    )
    assert "because both" not in result.stdout.str()


@pytest.mark.platforms("torch")
@pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None, reason="[no-framework] needs both frameworks to be installed"
)
def test_with_both_frameworks_the_note_is_shown(pytester, monkeypatch, loaded):
    """Where both are installed and nothing chooses, the failed run on the other framework has the note."""
    monkeypatch.setenv("HP_TEST_PLATFORMS", "torch,mindspore")
    pytester.makepyfile(test_it=CODE.format(size=1, framework="torch"))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "hyper_parallel.pytest_plugin")
    result.assert_outcomes(failed=2)
    assert result.outlines.count(TORCH_NOTE) == 1
    assert "on 1 simulated rank of MindSpore:" in result.outlines
