"""A run of another commit: its files and modules come from a temporary worktree, and the checkout stays as it is."""

import subprocess
import sys

import pytest

from hyper_parallel.verify.diff.revision import at_revision
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import Program, find_program, started_by_python

TRAIN = """
import torch
from settings.rates import RATE
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
for _ in range(2):
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
"""


def git(folder, *words):
    """Run git with a name for its commits."""
    own = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run([*own, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path):
    """A repository of two commits: the second has another learning rate and one more script."""
    folder = tmp_path / "project"
    (folder / "settings").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / ".gitignore").write_text("__pycache__/\n")  # Python's own, of whatever imports a module
    (folder / "settings" / "rates.py").write_text("RATE = 0.1\n")
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    (folder / "settings" / "rates.py").write_text("RATE = 0.2\n")
    (folder / "later.py").write_text("x = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "second")
    return folder


@pytest.mark.platforms("torch")
def test_a_commit_is_compared_with_the_one_before(checkout):
    """Modules are those of the commit: the learning rate differs, and nothing of the checkout changes."""
    script = str(checkout / "train.py")
    (checkout / "notes.txt").write_text("mine\n")
    before = git(checkout, "status", "--porcelain"), git(checkout, "worktree", "list")
    report = verify_diff(DiffSide(script, revision="HEAD~1"), DiffSide(script))
    assert (report.verdict.first.kind, report.verdict.first.step) == ("rate", 0), report.text()
    assert report.names[0] == f"{script} of HEAD~1 on torch, 1 rank"
    assert (git(checkout, "status", "--porcelain"), git(checkout, "worktree", "list")) == before


def test_the_search_path_is_that_of_the_commit(checkout, monkeypatch):
    """Folders of the checkout on the search path are replaced by those of the commit; others stay."""
    monkeypatch.setattr(sys, "path", [str(checkout / "settings"), "/elsewhere"])
    with at_revision(find_program(str(checkout / "train.py"), (), "A"), "HEAD~1", "--a-rev") as program:
        tree = program.moved[1]
        with started_by_python(program, "nothing", "one rank"):
            assert sys.path == [tree, f"{tree}/settings", "/elsewhere"]
    assert sys.path == [str(checkout / "settings"), "/elsewhere"]


@pytest.mark.parametrize(
    "file, revision, said",
    [
        ("train.py", "nosuch", "--a-rev: git rev-parse fails in {folder}: there is no such commit"),
        ("train.py", "--all", "--a-rev '--all' is not the name of a commit"),
        ("later.py", "HEAD~1", "--a-rev HEAD~1: the commit {commit} has no later.py"),
    ],
)
def test_wrong_commits_are_refused(checkout, file, revision, said):
    """A name of no commit, an option of git, and a commit without the script are named."""
    program = find_program(str(checkout / file), (), "A")
    with pytest.raises(InputError) as refused, at_revision(program, revision, "--a-rev"):
        pass
    commit = git(checkout, "rev-parse", "HEAD~1")[:12]
    assert str(refused.value) == said.format(folder=checkout, commit=commit)
    assert len(git(checkout, "worktree", "list").splitlines()) == 1


def test_a_function_has_no_other_revision():
    """A function object is not read from a file."""
    with (
        pytest.raises(
            InputError, match="--b-rev HEAD: f is a function of this process; only a script has other revisions"
        ),
        at_revision(Program("f", "", lambda: None), "HEAD", "--b-rev"),
    ):
        pass


def test_a_script_in_no_repository_is_refused(tmp_path):
    """What git says is in the message."""
    (tmp_path / "train.py").write_text("")
    program = find_program(str(tmp_path / "train.py"), (), "A")
    with pytest.raises(InputError, match="not a git repository"), at_revision(program, "HEAD", "--a-rev"):
        pass
