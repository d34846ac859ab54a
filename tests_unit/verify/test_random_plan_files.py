"""Plan files of random content: a verdict, or one line that says what is wrong with the file; never a traceback."""

import contextlib
import io
import re

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hyper_parallel.cli import main

pytestmark = pytest.mark.platforms("torch")

SPEC = """
import torch
from hyper_parallel.verify import ModelCase

NAMES = {names!r}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for place, name in enumerate(NAMES):
            self.register_parameter(name, torch.nn.Parameter(torch.full((3, 5), 0.5 + place)))

    def forward(self, x):
        return sum(x @ value for value in self.parameters())


def case():
    torch.manual_seed(0)
    x, y = torch.randn(7, 3), torch.randn(7, 5)
    return ModelCase(Net(), [(x, y)], lambda output, batch: (output - batch[1]).square().mean())
"""
WORDS = st.sampled_from(["colwise", "rowwise", "*", "", "..", "dp", "tp", "Net", "styles", "batch", "[", "\\", "nul\0"])
PLAIN = (
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats() | st.binary(max_size=3) | st.text(max_size=4) | WORDS
)
RETURNED = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=5,
)
SOURCE = """\
from hyper_parallel import Shard
from hyper_parallel.verify import ParallelPlan


def plan(mesh):
    return {}
"""
FILES = st.one_of(
    RETURNED.map(repr),
    st.builds("ParallelPlan({!r}, {!r})".format, RETURNED, RETURNED),
    st.builds("ParallelPlan({{}}, {{{!r}: Shard({!r})}})".format, WORDS, PLAIN),
    st.builds("lambda model, mesh: {!r}".format, RETURNED),
).map(SOURCE.format)
HOSTILE = ["\x1b[31m", "<script>", "%s{0}", "é\u202e", "nul\0", "new\nline", "$(id)", "a b", "__proto__", "ω" * 300]


def verify(folder, source, names=("weight",)):
    """Return the exit status of ``verify model``, and what it wrote to stderr and to its page."""
    (folder / "case.py").write_text(SPEC.format(names=list(names)), encoding="utf-8")
    (folder / "plan.py").write_text(source, encoding="utf-8", errors="surrogatepass")
    out, err = io.StringIO(), io.StringIO()
    page = folder / "page.html"
    page.unlink(missing_ok=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        where = [f"{folder / 'case.py'}:case", "--plan", f"{folder / 'plan.py'}:plan"]
        status = main(["verify", "model", *where, "--world-size", "2", "--platform", "torch", "--html", str(page)])
    return status, err.getvalue(), out.getvalue(), page.read_text(encoding="utf-8") if page.exists() else ""


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=FILES, cut=st.integers(0, 200), damaged=st.integers(0, 5))
def test_a_plan_file_gives_a_verdict_or_one_line(tmp_path, source, cut, damaged):
    """Whatever a plan file returns, and wherever it is cut off, the status is 0, 1 or 2, and 2 comes with one line."""
    status, err, out, _ = verify(tmp_path, source[: len(source) - cut] if damaged == 0 else source)
    assert status in (0, 1, 2)
    said = [line for line in err.splitlines() if line.startswith("hyper-parallel")]
    assert bool(said) == (status == 2)
    assert len(said) <= 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_parameters_reach_no_terminal_and_no_page_as_they_are(tmp_path, name):
    """A parameter may be called anything: the verdict is the same, and control characters and markup are escaped."""
    status, err, out, page = verify(tmp_path, SOURCE.format("ParallelPlan({}, {})"), (name, "weight"))
    assert status == 0, err + out
    *_, plain = verify(tmp_path, SOURCE.format("ParallelPlan({}, {})"), ("plain", "weight"))
    text = err + out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)
    assert page.count("<script>") == plain.count("<script>")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", page)
