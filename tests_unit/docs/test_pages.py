"""The pages are true: their Python runs, their command lines parse, and the names on them exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.cli import main

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="[no-tool] the pages are not installed")

# Names that the text around a block presupposes.
GIVEN = {
    "hyper_parallel/core/shard/README.md": """
from hyper_parallel.core.shard import rule as rules_
from hyper_parallel.core.shard.rule import OpCall, Strategies, rule
from hyper_parallel.core.shard.rules import matmul
from hyper_parallel.core.shard.sample import Sample, real, sample, sample_call, size
from hyper_parallel.core.shard.labels import Labels, labelled_rows
rules_._RULES.pop("linear", None)  # the page's own takes its place
""",
}
GIVEN_TO_TORCH = {
    "hyper_parallel/core/shard/README.md": """
import numpy, torch
from hyper_parallel.verify import check_function
x, w, b = (numpy.random.default_rng(0).standard_normal(size) for size in ((2, 3, 5), (7, 5), (7,)))
""",
}
RUNNER = """
import json, os, sys

pages = {}
for page, line, given, code in json.load(sys.stdin):
    names = pages.setdefault(page, {"__name__": "__page__"})
    exec(given, names)
    # As many empty lines as the page has above: a traceback names the line of the page.
    exec(compile("\\n" * line + code, os.path.join(sys.argv[1], page), "exec"), names)
    print(f"ran {page}:{line}")
"""


@pytest.fixture(scope="module")
def texts(pages):
    """Return every page with its text."""
    return {page: (ROOT / page).read_text(encoding="utf-8") for page in pages.PAGES}


@pytest.fixture(scope="module")
def blocks(pages, texts):
    """Return every fenced block of every page."""
    return [block for page, text in texts.items() for block in pages.blocks(page, text)]


def test_every_block_is_run_or_checked_or_says_why_not(blocks):
    """Every block is run or checked, or its fence gives a reason of the closed list."""
    assert len(blocks) >= 10
    assert not [block.problem for block in blocks if block.problem]


def test_python_blocks_run(platform_name, pages, blocks, tmp_path):
    """Python of all other pages runs, page by page from top to bottom, in a fresh process; PyTorch's on PyTorch."""
    asked = []
    for block in blocks:
        if block.page in (*pages.FOLLOWED, *pages.FOLLOWED_TOGETHER):
            continue
        if block.language != "python" or block.info or (platform_name != "torch" and "torch" in block.code):
            continue
        setup = GIVEN.get(block.page, "") if not any(entry[0] == block.page for entry in asked) else ""
        if platform_name == "torch" and setup:
            setup += GIVEN_TO_TORCH.get(block.page, "")
        asked.append((block.page, block.line, setup, block.code))
    assert len(asked) >= 4
    path = os.pathsep.join([str(Path(hyper_parallel.__file__).parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(ROOT)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        input=json.dumps(asked), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"ran {page}:{line}" for page, line, *_ in asked]


@pytest.mark.platforms("torch")
def test_the_readmes_model_is_verified(blocks, tmp_path, monkeypatch, capsys):
    """The README's model and plan pass under the README's command, and the fault it suggests is caught."""
    blocks = [block for block in blocks if block.page == "README.md"]
    (code,) = [block.code for block in blocks if block.code.startswith("# my_model.py\n")]
    (command,) = [block.code for block in blocks if "my_model.py:case" in block.code and block.language == "sh"]
    (tmp_path / "my_model.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = command.split()[1:]
    assert main(words) == 0, capsys.readouterr().out
    (fault,) = re.findall(r"`--inject (\S+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert main([*words, "--steps", "1", "--inject", fault]) == 1
    assert "first divergence in 2" in capsys.readouterr().out


def test_command_lines_make_sense(pages, texts):
    """Every command parses with the real parser; every environment, label, extra and file that one names exists."""
    lines = {line: page for page, text in texts.items() for line in pages.commands(page, text)}
    assert len(lines) >= 30
    assert not [f"{page}: {problem}" for line, page in lines.items() if (problem := pages.problem_of(line))]


def test_named_files_exist(pages, texts):
    """Files and folders that a page links to or names exist."""
    assert not {page: missing for page, text in texts.items() if (missing := pages.missing_files(page, text))}


def test_every_variable_is_listed():
    """The table has exactly the variables that code, tox and CI read from the environment."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"^\| `((?:HP|HYPER_PARALLEL)_[A-Z_]+)` \|", page, re.MULTILINE)
    files = [*(ROOT / "hyper_parallel").rglob("*.py"), *(ROOT / "ci").glob("*.py")]
    files += [ROOT / name for name in (".ci/run", "tox.ini", "pyproject.toml", "ci/Jenkinsfile")]
    read = {name for file in files for name in re.findall(r"\b(?:HP|HYPER_PARALLEL)_[A-Z_]+\b", file.read_text())}
    assert sorted(listed) == sorted(read)


# What these tests must notice

FAULTS = [
    ("hyper-parallel verify everything", "the parser refuses it"),
    ("hyper-parallel verify ops --quickly", "the parser refuses it"),
    ("python3 ci/bootstrap.py verify modell", "the parser refuses it"),
    ("python3 ci/bootstrap.py test -e torch,mindspore,jax", "there is no environment jax"),
    ("tox -e st-npu-*,st-gpu-*", "there is no environment st-gpu-*"),
    ("tox -m slow", "there is no label slow"),
    ("python3 ci/guarded_run.py --minutes 60 -- tox -e tensorflow", "there is no environment tensorflow"),
    ("python ci/changes.py check", "there is no ci/changes.py"),
    ("tox -e torch -- tests_unit/cores -k uneven", "there is no tests_unit/cores"),
    ('pip install "hyper-parallel[jax]"', "there is no extra jax"),
    ("python -m hyper_parallel verify everything", "the parser refuses it"),
    ("python -m make", "no test knows make"),
    ("make install", "no test knows make"),
    ("pytest test_nothing.py", "there is no test_nothing.py"),
]


@pytest.mark.parametrize("command, problem", FAULTS)
def test_a_wrong_command_line_is_noticed(pages, command, problem):
    """A page that names an unknown subcommand, option, environment, label, extra or file is an error."""
    assert problem in pages.problem_of(command)


def test_an_unchecked_block_is_noticed(pages):
    """An unchecked language or a reason outside the list is an error; a listed reason is not."""
    text = (
        "```yaml\na: b\n```\n```python not-run=later\nx\n```\n```console not-run=output\nok\n```\n```\nnothing\n```\n"
    )
    problems = [block.problem for block in pages.blocks("X.md", text)]
    assert problems == [
        "X.md:1: a block of language 'yaml' is neither run nor checked, and does not say why",
        "X.md:4: the fence says 'not-run=later'; known is not-run= with one of output, fragment, device, cluster",
        "",
        "X.md:10: a block of language '' is neither run nor checked, and does not say why",
    ]


def test_a_name_of_nothing_is_noticed(pages):
    """A link to, or the name of, a missing file or folder is an error."""
    text = "[here](README.md) [gone](docs/gone.md) `ci/README.md` `hyper_parallel/gone.py` `verify/` `gone/`"
    assert pages.missing_files("README.md", text) == ["docs/gone.md", "hyper_parallel/gone.py", "gone/"]
