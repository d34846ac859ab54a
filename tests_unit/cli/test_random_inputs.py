"""Random input: command lines, flight records, reports, checkpoints. Right, or one error; never a traceback."""

import contextlib
import io
import json
import shutil
import string

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hyper_parallel.cli import main, parse, parser
from hyper_parallel.cli.arguments import UsageError
from hyper_parallel.cli.verify_ops import MOST_RANKS, mesh_sizes
from hyper_parallel.cli.verify_redistribute import _shape
from hyper_parallel.errors import CheckpointError
from hyper_parallel.verify.run_arguments import parse_mesh
from workshop import commands

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALL = {
    "number": 0, "sequence": 0, "state": "waiting", "started": 1.0, "ended": None, "site": "train.py:1", "facts": {},
    "kind": "collective", "operation": "all_reduce", "ranks": [0, 1], "group": "", "text": "all_reduce of f32[3]",
}  # fmt: skip
RECORD = {
    "rank": 0,
    "world_size": 2,
    "written": 2.0,
    "error": None,
    "doing": "",
    "calls": [CALL, {**CALL, "number": 1}],
}
BENCH = [{"name": "add", "plain": 1.0, "peer": 2.0, "ours": 2.0, "ratio": 1.0, "budget": 1.5, "ok": True}]
GATE = {"total": 90.0, "ranks": 2, "ok": True}
POWER = {
    "mutants": 2, "killed": 1, "equivalent": 0, "survived": 1, "score": 50.0, "kinds": {}, "operators": {},
    "survivors": [], "equivalents": [],
}  # fmt: skip
OPERATORS = {"columns": ["forward"], "operators": [{"op": "add", "platform": "torch", "coverage": {}}]}


def run(*words, main=main):
    """Run a command in this process; return its status, what it said, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return status, err.getvalue(), out.getvalue()


def outcome(call, expected):
    """Return what a call returns and None, or None and the expected error; any other error passes."""
    try:
        return call(), None
    except expected as error:
        return None, error


def leaves(command, words=()):
    """Yield the words of every command and its parser."""
    nested = [action for action in command._actions if isinstance(getattr(action, "choices", None), dict)]
    if not nested:
        yield words, command
    for action in nested:
        for word, child in action.choices.items():
            yield from leaves(child, (*words, word))


COMMANDS = dict(leaves(parser()))
VALUES = (
    st.text(max_size=8)
    | st.integers().map(str)
    | st.floats(allow_subnormal=False).map(str)
    | st.sampled_from(["2x3", "dp=2", "torch"])
)


@st.composite
def command_lines(draw):
    """A command with options of its own, and random values."""
    words = draw(st.sampled_from(sorted(COMMANDS)))
    options = [option for option in COMMANDS[words]._option_string_actions if option not in {"-h", "--help"}]
    rest = draw(st.lists(st.sampled_from(options) | VALUES, max_size=5))
    return [*words, *rest]


@given(command_lines())
def test_a_command_line_is_understood_or_refused_in_one_line(words):
    """Random options and values are parsed, or refused in one printable line that names the command."""
    _, error = outcome(lambda: parse(words), UsageError)
    if error is not None:
        assert error.command.startswith("hyper-parallel")
        assert str(error).isprintable()


DIGITS = st.text(alphabet=string.digits + "x=,.-dpt ²٣", max_size=12) | st.integers(min_value=0).map(str)


@given(DIGITS, st.none() | st.integers())
def test_a_mesh_is_one_of_few_ranks_or_refused(text, world_size):
    """Any text is a mesh of at most so many ranks, with names of their own, or an error that quotes it."""
    for parsed in (lambda: parse_mesh(text, world_size), lambda: parse_mesh(text, None, 7)):
        result, error = outcome(parsed, ValueError)
        if error is not None:
            assert "--mesh" in str(error)
        else:
            shape, names = result
            assert len(set(names)) == len(shape)
            assert all(size > 0 for size in shape)
    with contextlib.suppress(ValueError):
        sizes = mesh_sizes(text)
        assert 0 < len(sizes) < 4
        assert max(sizes) <= MOST_RANKS
    with contextlib.suppress(ValueError):
        assert len(_shape(text)) <= 6


@st.composite
def damaged(draw, document):
    """A document of which a part is another value or gone, or its text with bits flipped or its end cut off."""
    content = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 2))):
        where = content
        while True:
            keys = sorted(where) if isinstance(where, dict) else range(len(where))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(where[key], (dict, list)) and where[key] and draw(st.booleans()):
                where = where[key]
                continue
            if isinstance(where, dict) and draw(st.booleans()):
                del where[key]
            else:
                where[key] = draw(JSON)
            break
    text = json.dumps(content).encode()
    if draw(st.integers(0, 3)) == 0:
        text = flipped(draw, text)
    return text


def flipped(draw, data):
    """Bytes with some bits flipped, or cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        changed[draw(st.integers(0, len(changed) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed)


def told(status, err, folder, program="hyper-parallel"):
    """Check that a command succeeded, or said in one line what is wrong with which file."""
    assert status in {0, 2}
    if status == 2:
        assert err.startswith(f"{program}: error: {folder}")
        assert "Traceback" not in err


@given(damaged(RECORD))
@SHARED
def test_a_damaged_flight_record_is_shown_or_refused(tmp_path, text):
    """Whatever is in a record, trace shows it, also for Perfetto and as JSON, or says which file is wrong."""
    (tmp_path / "rank-0.json").write_bytes(text)
    (tmp_path / "rank-1.json").write_text(json.dumps({**RECORD, "rank": 1, "calls": [CALL]}))
    for options in ((), ("--json",), ("--perfetto", tmp_path / "trace.out")):
        status, err, _ = run("trace", tmp_path, *options)
        told(status, err, tmp_path)


@pytest.fixture
def project(tmp_path):
    """A project without floors, with an environment that ran."""
    (tmp_path / "pyproject.toml").write_text("[tool.hyper_parallel.coverage]\n")
    (tmp_path / "coverage_reports" / "torch").mkdir(parents=True)
    (tmp_path / "coverage_reports" / "torch" / "coverage.json").write_text("{}")
    return tmp_path


REPORTS = {
    "reports/bench.json": BENCH,
    "reports/mutation.json": POWER,
    "reports/operators-torch.json": OPERATORS,
    "reports/contract-torch.json": {"platform": "torch"},
    "coverage_reports/torch/gate.json": GATE,
}


@pytest.mark.parametrize("name", REPORTS)
@given(data=st.data())
@SHARED
def test_a_damaged_report_is_shown_or_refused(project, name, data):
    """Whatever is in a report, the pages are written, or one line says which file is wrong."""
    shutil.rmtree(project / "reports", ignore_errors=True)
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).write_bytes(data.draw(damaged(REPORTS[name])))
    status, err, _ = run("coverage", "html", "--root", project, main=commands.main)
    told(status, err, project, "python ci/workshop")


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.platforms("torch")
@given(data=st.data())
@SHARED
def test_a_damaged_checkpoint_gives_tensors_or_one_error(tmp_path, kind, data):
    """Bits flipped or cut off: the same names, shapes and dtypes are read, or it is a CheckpointError."""
    import torch

    from hyper_parallel.platform.select import platform_named

    platform = platform_named("torch")
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int64)}
    path = tmp_path / f"good.{kind}"
    if not path.exists():
        platform.save_checkpoint(state, path, kind)
    (tmp_path / f"bad.{kind}").write_bytes(flipped(data.draw, path.read_bytes()))
    loaded, error = outcome(lambda: platform.load_checkpoint(tmp_path / f"bad.{kind}", kind), CheckpointError)
    if error is not None:
        assert f"bad.{kind}" in str(error)
    else:
        assert all(platform.is_tensor(value) for value in loaded.values())
