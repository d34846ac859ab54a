"""The project's pages as their tests read them: code blocks, command lines, names of files and environments."""

from __future__ import annotations

import configparser
import importlib.util
import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "ci/README.md",
    "ci/workshop/README.md",
    "tests_unit/conformance/README.md",
    "ci/changelog.d/README.md",
    "coverage_reports/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    "docs/devices/README.md",
    "examples/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "hyper_parallel").rglob("README.md")),
]

FOLLOWED = [f"docs/{name}.md" for name in ("first-plan", "launchers", "porting", "rank-tests", "reading-the-reports")]
"""Pages that ``test_guides.py`` follows: their files are written, and their commands run, in the page's order."""

FOLLOWED_TOGETHER = ["docs/mindspore.md"]
"""Pages that are followed where both frameworks are: real processes of MindSpore communicate by PyTorch's gloo."""

NOT_RUN = {
    "output": "what a command prints",
    "fragment": "part of a program that is somewhere else as a whole",
    "device": "needs an accelerator",
    "cluster": "needs several machines",
}
"""Why a block is neither run nor checked: its fence says ```` ```python not-run=fragment ````."""

GENERATED = ("reports/", "coverage_reports/", "data/", ".venv", ".tox", "html/", "<", "combined/", "reference/")
"""Where files come from commands, or are the reader's own."""
OWN = {"my_model.py", "ms_model.py", "ms_train.py", "attention.py", "train.py", "port.py", "test_plan.py",
       "test_averaging.py", "FILE", "PAGE.html",
       "report.html", "layout.html", "uneven-all-to-all.fixed.md"}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its fence, its language, the fence's other words, and its text."""

    page: str
    line: int
    language: str
    info: str
    code: str

    @property
    def problem(self) -> str:
        """Return why no test checks this block, or nothing if a test does."""
        where = f"{self.page}:{self.line}: "
        name, _, reason = self.info.partition("=")
        if self.info and (name != "not-run" or reason not in NOT_RUN):
            return where + f"the fence says {self.info!r}; known is not-run= with one of {', '.join(NOT_RUN)}"
        if self.language not in {"python", "sh"} and not self.info:
            return where + f"a block of language {self.language!r} is neither run nor checked, and does not say why"
        return ""


def blocks(page: str, text: str) -> list[Block]:
    """Return every fenced block of a page."""
    blocks_found = []
    fence = re.compile(r"^```([^\n]*)\n(.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
    for match in fence.finditer(text):
        language, _, info = match[1].strip().partition(" ")
        blocks_found.append(Block(page, text.count("\n", 0, match.start()) + 1, language, info.strip(), match[2]))
    return blocks_found


def commands(page: str, text: str) -> list[str]:
    """Return the command lines of a page, from shell blocks and from running text."""
    lines = [line for block in blocks(page, text) if block.language == "sh" and not block.info
             for line in block.code.replace("\\\n", " ").splitlines()]  # fmt: skip
    quoted = [span for span in spans(text) if span.split(" ")[0] in CHECKS and " " in span]
    return [line for line in (*lines, *quoted) if line.split("#")[0].strip()]


def spans(text: str) -> list[str]:
    """Return the texts in backticks, outside fenced blocks."""
    outside = re.sub(r"^```.*?^```[ ]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", outside)]


# -- command lines -------------------------------------------------------------------------------------------------


def problem_of(command: str) -> str:
    """Return what is wrong with a command line, without running it."""
    words = shlex.split(command, comments=True)
    check = CHECKS.get(words[0]) if words else None
    if check is None:
        return f"{command}: no test knows {words[0]}"
    problem = check(words[1:])
    return f"{command}: {problem}" if problem else ""


def _hyper_parallel(words: list[str]) -> str:
    return _parsed(words, None)


def _parsed(words: list[str], top) -> str:
    from hyper_parallel.cli import parse

    if not words or words[0].startswith("<") or "…" in words:
        return ""
    try:
        parse([{"N": "2"}.get(word, word) for word in words], top)
    except (SystemExit, ValueError) as error:
        return f"the parser refuses it ({error})"
    return ""


def _tox(words: list[str]) -> str:
    if words[:1] == ["run"]:
        words = words[1:]
    there, labels = environments()
    options = [word for word in itertools.takewhile(lambda word: word != "--", words) if not word.startswith("<")]
    for option, value in itertools.pairwise(options):
        known = there if option == "-e" else labels if option == "-m" else None
        for name in value.split(",") if known is not None else ():
            pattern = re.escape(name).replace(r"\*", ".*")
            if name != "ENV" and not any(re.fullmatch(pattern, candidate) for candidate in known):
                return f"there is no {'environment' if option == '-e' else 'label'} {name}"
    missing = [path for path in words[len(options) + 1 :] if path.startswith("tests_") and not (ROOT / path).exists()]
    return f"there is no {', '.join(missing)}" if missing else ""


def _pip(words: list[str]) -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(
        re.findall(r"^(\w+) = \[", text.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE)
    )
    for word in words[1:]:
        asked = re.search(r"\[([^\]]*)\]", word)
        unknown = set(asked[1].split(",")) - extras if asked else set()
        if unknown:
            return f"there is no extra {', '.join(sorted(unknown))}"
    return _files([word for word in words if "/" in word and "://" not in word])


def _python(words: list[str]) -> str:
    if words[:1] == ["ci/bootstrap.py"]:
        name, command = _script("bootstrap").command_for(words[1:]) if words[1:] else ("tox", [])
        return _tox(command[6:]) if name == "tox" else problem_of(shlex.join(command))
    if words[0].endswith("ci/workshop"):
        from workshop.commands import parser

        return _parsed(words[1:], parser())
    if words[:1] == ["ci/guarded_run.py"] and "--" in words:
        return problem_of(shlex.join(words[words.index("--") + 1 :]))
    if words[:2] == ["-m", "hyper_parallel"]:
        return _hyper_parallel(words[2:])
    if words[:1] == ["-m"]:
        return problem_of(shlex.join(words[1:]))
    return _files(words[:1])


def _files(paths: list[str]) -> str:
    missing = [path for path in paths if not (ROOT / path).exists()]
    return f"there is no {', '.join(missing)}" if missing else ""


def _own_files(words: list[str]) -> str:
    """Check a command whose files the page makes: the tests of the guides run it."""
    return _files([word for word in words if word.endswith(".py") and word not in OWN])


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _source(words: list[str]) -> str:
    return "" if words == [".venv/run/bin/activate"] else "what it reads is not known"


CHECKS = {
    "hyper-parallel": _hyper_parallel,
    "tox": _tox,
    "pip": _pip,
    "python": _python,
    "python3": _python,
    ".ci/run": _tox,
    "pytest": _own_files,
    "torchrun": _own_files,
    "msrun": _own_files,
    ".": _source,
}


def environments() -> tuple[set[str], set[str]]:
    """Return the names of tox's environments, and of its labels."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini", encoding="utf-8")
    named = {name.strip() for name in config["tox"]["env_list"].split(",")}
    for section in config.sections():
        if section.startswith("testenv:"):
            named |= _expanded(section.removeprefix("testenv:"))
    labels = {line.split("=")[0].strip() for line in config["tox"]["labels"].splitlines() if "=" in line}
    return named, labels


def _expanded(text: str) -> set[str]:
    match = re.search(r"\{([^}]*)\}", text)
    if match is None:
        return {text}
    return set().union(*(_expanded(text.replace(match[0], pattern, 1)) for pattern in match[1].split(",")))


def not_printed(lines: list[str], printed: str) -> list[str]:
    """Return the lines of a page that no line of an output has in it.

    Numbers are compared digit by digit. A ``…`` stands for anything: times, rounding errors, what varies by machine.
    Indentation and folders are left out.
    """
    seen = [re.sub(r"\s+", " ", re.sub(r"(/[\w.-]+)+/", "", line)) for line in printed.splitlines()]
    patterns = {line: ".*".join(map(re.escape, re.sub(r"\s+", " ", line).strip().split("…"))) for line in lines}
    return [line for line, pattern in patterns.items() if not any(re.search(pattern, text) for text in seen)]


# -- files ---------------------------------------------------------------------------------------------------------


def missing_files(page: str, text: str) -> list[str]:
    """Return the missing files and folders that a page names, as a link or in backticks."""
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    outside = re.sub(r"^```.*?^```[ ]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    named = [name for name in re.findall(r"`([^`\s]+)`", outside) if _is_path(name)]
    return [name for name in (*links, *named) if not _found(page, name)]


def _is_path(name: str) -> bool:
    """Return whether a name in backticks is that of a file or folder here, and not of a command's output."""
    if name in OWN or name.startswith(GENERATED) or any(sign in name for sign in "()=[]{},:%"):
        return False
    return bool(re.fullmatch(r"[\w.*<>-]+(/[\w.*<>-]+)*/?", name)) and (
        name.endswith(("/", ".py", ".md", ".ini", ".toml", ".txt", ".css", ".js", ".png", "Jenkinsfile"))
    )


def _found(page: str, name: str) -> bool:
    """Return whether a file exists, from the page's folder, the root or the package; ``*`` and ``<…>`` match any."""
    pattern = re.sub(r"<[^>]*>", "*", name).rstrip("/")
    homes = [(ROOT / page).parent, ROOT, ROOT / "hyper_parallel"]
    return any(next(home.glob(pattern), None) is not None for home in homes)
