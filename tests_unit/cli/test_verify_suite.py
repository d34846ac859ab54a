"""``hyper-parallel verify`` alone: the checks of pyproject.toml run, and their options are those of their commands."""

import json
import runpy
from pathlib import Path

import pytest

from hyper_parallel.cli import main, verify_suite
from hyper_parallel.verify.suite import run as runner
from hyper_parallel.verify.suite.report import CheckResult

ROOT = Path(__file__).parents[1]
problems_of = runpy.run_path(str(ROOT / "verify" / "suite" / "schema.py"))["problems_of"]

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(5, 3).tensor_split(dist.get_world_size())[dist.get_rank()]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


OWN = "`hyper-parallel verify` has --json and --reports"
HELP = "(see hyper-parallel verify program --help)"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes settings into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HP_PROGRESS_LINES", "0")

    def write(text):
        (tmp_path / "pyproject.toml").write_text(text)

    return write


@pytest.fixture
def lines(monkeypatch):
    """The command lines that run, none of which does; a check named ``stop`` is interrupted."""
    found = []

    def run_check(check, words, folder, html):
        if check.name == "stop":
            raise KeyboardInterrupt
        found.append((words, folder, html))
        return CheckResult(check, "c", 0, 1, {"headline": "equal"})

    monkeypatch.setattr(runner, "run_check", run_check)
    return found


@pytest.mark.platforms("torch")
def test_a_check_that_differs_is_reported_at_its_line(written, tmp_path, capsys):
    """The real command runs; its JSON is as the schema says, and the files of CI are written."""
    (tmp_path / "train.py").write_text(SCRIPT)
    written('[tool.hyper_parallel.verify.programs.ddp]\nrun = "train.py"\nworld-size = 2\n')
    assert main(["verify", "--json", "--reports", "reports"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert problems_of(document, "verify") == []
    (check,) = document["checks"]
    assert (check["rule"], check["file"], check["line"]) == ("missing-reduction", "train.py", 9)
    assert problems_of(check["report"], "program") == []
    assert check["report"]["verdict"]["first"]["site"] == f"{tmp_path / 'train.py'}:9"
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {
        *("verify.json", "junit.xml", "verify.sarif", "ddp.html")
    }


def test_options_are_those_of_the_command(written, lines, tmp_path, capsys):
    """Flags, lists, numbers and texts become words of the command line; shared options go where they are known."""
    written("""\
[tool.hyper_parallel.verify]
timeout = 200
upcast = false
[tool.hyper_parallel.verify.programs.all]
run = "torchrun --nproc-per-node 2 train.py --lr 0.1"
steps = 3
harden = true
allow = ["equal-data", "equal-sizes"]
logged = true
resume = "--resume last.pt"
[tool.hyper_parallel.verify.programs.function]
run = "train.py:main"
mesh = "dp=2"
harden = false
[tool.hyper_parallel.verify.diffs.pair]
a = "train.py --zero 2"
b = "train.py --zero 3"
a-world-size = 2
[tool.hyper_parallel.verify.models.tiny]
spec = "case.py:case"
plan = "case.py:plan"
mesh = ["2x2", "3"]
""")
    assert main(["verify", "--reports", "out"]) == 0
    assert [words[1:] for words, _, _ in lines] == [
        ["program", "--timeout=200", "--no-upcast", "--steps=3", "--harden", "--allow=equal-data",
         "--allow=equal-sizes", "--logged", "--resume=--resume last.pt", "--", "torchrun", "--nproc-per-node", "2",
         "train.py", "--lr", "0.1"],
        ["program", "--timeout=200", "--no-upcast", "--mesh=dp=2", "train.py:main", "--"],
        ["diff", "--timeout=200", "--a-world-size=2", "train.py --zero 2", "train.py --zero 3"],
        ["model", "--plan=case.py:plan", "--mesh=2x2", "case.py:case"],
        ["model", "--plan=case.py:plan", "--mesh=3", "case.py:case"],
    ]  # fmt: skip
    assert {folder for _, folder, _ in lines} == {tmp_path}
    pages = [None if page is None else page.name for _, _, page in lines]
    assert pages == ["all.html", "function.html", None, "tiny-mesh-2x2.html", "tiny-mesh-3.html"]
    assert capsys.readouterr().out.splitlines()[-1] == "5 of 5 checks passed"


@pytest.mark.parametrize(
    "text, said",
    [
        ("run = 3", "run is 3; it must be a text"),
        ("run = \"'\"", "run \"'\" cannot be split into arguments: No closing quotation"),
        ("steps = 3", "run is missing: it names what is verified"),
        ('run = "a.py"\nstep = 3', "unknown option step; did you mean steps?"),
        ('run = "a"\njson = true', "json is not an option of a check: " + OWN),
        ('run = "a.py"\nharden = 1', "harden is 1; it must be true or false"),
        ('run = "a.py"\nsteps = [1]', "steps is [1]; it must be a text or a number"),
        ('run = "a.py"\nallow = {a = 1}', "allow is {'a': 1}; it must be a text or a number, or a list of them"),
        ('run = "a.py"\nsteps = 0', f"argument --steps: '0' must be an integer from 1 to 1000000 {HELP}"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_said_before_anything_runs(written, lines, tmp_path, capsys, text, said):
    """Status 2, with the file and the table; a check before it has not run."""
    written(f'[tool.hyper_parallel.verify.programs.a]\nrun = "a.py"\n[tool.hyper_parallel.verify.programs.b]\n{text}\n')
    assert main(["verify"]) == 2
    assert capsys.readouterr().err == (
        f"hyper-parallel: error: {tmp_path / 'pyproject.toml'}: [tool.hyper_parallel.verify.programs] b: {said}\n"
    )
    assert lines == []


def test_a_shared_option_that_no_command_has_is_wrong(written, lines, capsys):
    """A slip in the common table is not passed over."""
    written('[tool.hyper_parallel.verify]\ntimeuot = 3\n[tool.hyper_parallel.verify.programs.b]\nrun = "a.py"\n')
    assert main(["verify"]) == 2
    assert capsys.readouterr().err.endswith("b: unknown option timeuot; did you mean timeout?\n")
    assert lines == []


def test_some_checks_run_by_name(written, lines, capsys):
    """With the world or without it; another name is refused with the near ones."""
    written('[tool.hyper_parallel.verify.programs.ddp]\nrun = "a.py"\nworld-size = [2, 3]\n'
            '[tool.hyper_parallel.verify.programs.other]\nrun = "b.py"\nworld-size = 2\n')  # fmt: skip
    assert main(["verify", "--only", "ddp"]) == 0
    assert main(["verify", "--config", "pyproject.toml", "--only", "ddp (world-size 3)", "--only", "other"]) == 0
    assert [words[-3] for words, _, _ in lines] == [f"--world-size={size}" for size in (2, 3, 3, 2)]
    assert main(["verify", "--only", "othr"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: --only 'othr' names no check of the settings; did you mean other?\n"
    )
    assert main(["verify", "--only", "x"]) == 2
    assert capsys.readouterr().err.endswith("; checks: ddp (world-size 2), ddp (world-size 3), other\n")


def test_a_run_that_is_stopped_writes_what_it_has(written, lines, capsys):
    """Status 130; the checks that are left are in the report, which is not good."""
    written(
        "".join(f'[tool.hyper_parallel.verify.programs.{name}]\nrun = "{name}.py"\n' for name in ("a", "stop", "c"))
    )
    assert main(["verify", "--reports", "out"]) == 130
    document = json.loads(Path("out/verify.json").read_text())
    assert (document["ok"], document["status"], document["left"]) == (False, 1, ["stop", "c"])
    assert "stop: did not run" in capsys.readouterr().err
    assert len(lines) == 1


def test_options_before_a_command_are_refused(capsys):
    """They would be passed over: each command has its own."""
    assert main(["verify", "--json", "program", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: --json is given before the word 'program'; give options of verify program after it "
        "(see hyper-parallel --help)\n"
    )
    assert sorted(verify_suite._COMMANDS) == ["diff", "model", "program"]
