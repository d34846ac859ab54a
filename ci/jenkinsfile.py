"""Check a declarative Jenkinsfile without Jenkins: `python ci/jenkinsfile.py ci/Jenkinsfile`.

Groovy's own parser takes `stags { }` for a method call, so it proves little. This reads the file into blocks and holds
each against a table of what may stand where, then against our own rules: retries for lost agents only, nothing that
hides a failure, reports that are published whatever happens, clean-up by recorded process numbers.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TOKENS = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<string>'{3}.*?'{3}|"{3}.*?"{3}|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")
  | (?P<word>[A-Za-z_][\w.]*|\d[\w.]*)
  | (?P<sign>[{}()\[\],.:=;<>!&|?+*%-])
    """,
    re.VERBOSE | re.DOTALL,
)
OPEN, CLOSE = "{([", "})]"

ONCE_STAGE = {"agent", "environment", "options", "input", "tools", "when", "post", "failFast"}
BODIES = {"steps", "stages", "parallel", "matrix"}
CONDITIONS = {
    "always", "changed", "fixed", "regression", "aborted", "failure", "success", "unstable", "unsuccessful", "cleanup",
}  # fmt: skip
STEPS = {
    "archiveArtifacts", "checkout", "cleanWs", "dir", "echo", "error", "junit", "lock", "publishHTML",
    "recordCoverage", "retry", "script", "sh", "stash", "timeout", "unstash", "withCredentials", "withEnv",
}  # fmt: skip
STAGE_OPTIONS = {"lock", "retry", "skipDefaultCheckout", "timeout", "timestamps"}
HIDES = {"catch", "catchError", "returnStatus", "warnError"}
UNITS = {"NANOSECONDS", "MICROSECONDS", "MILLISECONDS", "SECONDS", "MINUTES", "HOURS", "DAYS"}
CRON_FIELDS = 5
WHEN = {
    "allOf", "anyOf", "beforeAgent", "beforeInput", "beforeOptions", "branch", "buildingTag", "changeRequest",
    "changeset", "environment", "equals", "expression", "not", "tag", "triggeredBy",
}  # fmt: skip

# Section -> what may stand in it. None: anything that is balanced.
ALLOWED: dict[str, set[str] | None] = {
    "": {"pipeline"},
    "pipeline": {
        "agent", "environment", "libraries", "options", "parameters", "post", "stages", "tools", "triggers",
    },
    "stages": {"stage"},
    "parallel": {"stage"},
    "stage": ONCE_STAGE | BODIES,
    "matrix": {"agent", "axes", "environment", "excludes", "input", "options", "post", "stages", "tools", "when"},
    "axes": {"axis"},
    "axis": {"name", "values", "notValues"},
    "excludes": {"exclude"},
    "exclude": {"axis"},
    "post": CONDITIONS,
    "steps": STEPS,
    "agent": {"any", "docker", "dockerfile", "kubernetes", "label", "node", "none"},
    "options": STAGE_OPTIONS,
    "pipeline options": STAGE_OPTIONS
    | {"ansiColor", "buildDiscarder", "disableConcurrentBuilds", "disableResume", "newContainerPerStage",
       "parallelsAlwaysFailFast", "preserveStashes", "quietPeriod"},
    "triggers": {"cron", "parameterizedCron", "pollSCM", "upstream"},
    "parameters": {"booleanParam", "choice", "password", "string", "text"},
    "when": WHEN,
    "environment": None,
    "tools": None,
    "libraries": {"lib"},
    "input": {"id", "message", "ok", "parameters", "submitter", "submitterParameter"},
    "script": None,
}  # fmt: skip
REQUIRED = {
    "pipeline": {"agent", "stages"},
    "matrix": {"axes", "stages"},
    "axis": {"name"},
    "stages": {"stage"},
    "parallel": {"stage"},
    "axes": {"axis"},
}
REPEATABLE = {"stages", "parallel", "axes", "excludes", "steps", "triggers", "parameters", "when", "exclude"}
CALLS = {"options", "pipeline options", "triggers", "parameters"}
LEAVES = CALLS | {"steps", "agent", "axis", "input"}
LOST_AGENT = ("agent", "kubernetesAgent", "nonresumable")
REPORTS = {
    "junit": "test results",
    "recordCoverage": "coverage with quality gates",
    "publishHTML": "the HTML reports",
    "archiveArtifacts": "the logs of the ranks",
}


class JenkinsfileError(Exception):
    """What is wrong, with its line."""


@dataclass(frozen=True)
class Token:
    """One word, string or sign."""

    kind: str
    text: str
    line: int


@dataclass
class Node:
    """A statement: its name, its arguments, and its block if it has one."""

    name: str
    line: int
    arguments: list[Token] = field(default_factory=list)
    children: list[Node] | None = None
    raw: list[Token] = field(default_factory=list)

    def words(self) -> list[str]:
        """Texts of the arguments."""
        return [token.text for token in self.arguments]

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children or ():
            yield from child.walk()


def tokenize(text: str) -> list[Token]:
    """Split into tokens; a character that Groovy would not take, or a string without end, is an error."""
    tokens, place = [], 0
    while place < len(text):
        found = TOKENS.match(text, place)
        line = text.count("\n", 0, place) + 1
        if found is None:
            raise JenkinsfileError(f"line {line}: cannot read {text[place : place + 20].splitlines()[0]!r}")
        if found.lastgroup != "space":
            tokens.append(Token(str(found.lastgroup), found.group(), line))
        place = found.end()
    return tokens


def check_balance(tokens: list[Token]) -> None:
    """Every bracket is closed by its own kind."""
    stack: list[Token] = []
    for token in tokens:
        if token.kind == "sign" and token.text in OPEN:
            stack.append(token)
        elif token.kind == "sign" and token.text in CLOSE:
            if not stack or OPEN.index(stack[-1].text) != CLOSE.index(token.text):
                raise JenkinsfileError(f"line {token.line}: {token.text!r} closes nothing")
            stack.pop()
    if stack:
        raise JenkinsfileError(f"line {stack[-1].line}: {stack[-1].text!r} is never closed")


class Parser:
    """Reads balanced tokens into statements."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.place = 0

    def block(self) -> list[Node]:
        """Statements up to the end of the block."""
        nodes = []
        while self.place < len(self.tokens) and self.tokens[self.place].text != "}":
            if self.tokens[self.place].text == ";":
                self.place += 1
            else:
                nodes.append(self.statement())
        return nodes

    def statement(self) -> Node:
        """A name, arguments to the end of the line (or of their brackets), and perhaps a block."""
        head = self.tokens[self.place]
        node = Node(head.text, head.line)
        self.place += 1
        depth, last = 0, head.line
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            if token.text == "{" and depth == 0:
                self._take_block(node)
                return node
            ends = token.text in {"}", ";"} or (token.line > last and node.arguments[-1:] != [] and not _goes_on(node))
            if depth == 0 and (ends or (token.line > last and not node.arguments)):
                return node
            depth += (token.text in OPEN) - (token.text in CLOSE) if token.kind == "sign" else 0
            node.arguments.append(token)
            last = token.line
            self.place += 1
        return node

    def _take_block(self, node: Node) -> None:
        self.place += 1
        start = self.place
        if ALLOWED.get(node.name, set()) is None:
            depth = 1
            while depth:
                token = self.tokens[self.place]
                depth += (token.text == "{") - (token.text == "}")
                self.place += 1
            node.raw = self.tokens[start : self.place - 1]
            node.children = []
            return
        node.children = self.block()
        self.place += 1
        node.raw = self.tokens[start : self.place - 1]


def _goes_on(node: Node) -> bool:
    """Whether the arguments so far end in a comma, so that the next line belongs to them."""
    return node.arguments[-1].text == ","


def problems(text: str) -> list[str]:
    """Everything that is wrong with a Jenkinsfile."""
    try:
        tokens = tokenize(text)
        check_balance(tokens)
        nodes = Parser(tokens).block()
    except JenkinsfileError as error:
        return [str(error)]
    if [node.name for node in nodes] != ["pipeline"]:
        return ["line 1: a declarative file is one `pipeline { }` block and nothing else"]
    found: list[str] = []
    _check_section(nodes[0], "pipeline", found)
    return found + _check_rules(nodes[0], tokens)


def _check_section(node: Node, section: str, found: list[str]) -> None:
    """One section against the table, and everything in it."""
    if node.children is None:
        found.append(f"line {node.line}: `{node.name}` needs a block")
        return
    allowed = ALLOWED[section]
    if allowed is None:
        if not node.raw:
            found.append(f"line {node.line}: `{node.name}` is empty")
        return
    names = [child.name for child in node.children]
    missing = REQUIRED.get(section, set()) - set(names)
    found += [f"line {node.line}: `{section}` needs `{need}`" for need in sorted(missing)]
    if not names:
        found.append(f"line {node.line}: `{section}` needs something in it")
    if section == "axis" and not {"values", "notValues"} & set(names):
        found.append(f"line {node.line}: `axis` needs `values` or `notValues`")
    if section in {"stages", "parallel"}:
        told = Counter("".join(child.words()) for child in node.children)
        found += [f"line {node.line}: there is more than one stage{name}" for name, count in told.items() if count > 1]
    if section not in REPEATABLE:
        twice = [name for name, count in Counter(names).items() if count > 1]
        found.extend(f"line {node.line}: `{name}` stands more than once in `{section}`" for name in twice)
    for child in node.children:
        if child.name not in allowed:
            found.append(f"line {child.line}: `{child.name}` is not allowed in `{section}`")
        else:
            _check_child(child, section, found)


def _check_child(child: Node, section: str, found: list[str]) -> None:
    if child.name == "stage":
        if not any(token.kind == "string" and token.text.strip("'\"").strip() for token in child.arguments):
            found.append(f"line {child.line}: `stage` needs a name, such as stage('unit')")
        _check_stage(child, found)
    if section in CALLS and child.words()[:1] != ["("]:
        found.append(f"line {child.line}: `{child.name}` in `{section}` is a call: write `{child.name}(...)`")
    elif child.children is None and not child.arguments and section in LEAVES | {"when", "post"}:
        found.append(f"line {child.line}: `{child.name}` in `{section}` needs an argument")
    found += _check_arguments(child)
    if child.name == "agent" and child.children is None:
        if child.words() not in (["any"], ["none"]):
            found.append(f"line {child.line}: `agent` is `any`, `none` or a block")
        return
    inner = _inner_section(child, section)
    if inner is not None:
        _check_section(child, inner, found)


def _check_arguments(child: Node) -> list[str]:
    """What a statement is given: values with commas between them, and what a few calls cannot do without."""
    words, found = child.words(), []
    for one, other in zip(child.arguments, child.arguments[1:], strict=False):
        if (one.kind != "sign" or one.text in CLOSE) and other.kind != "sign":
            found.append(f"line {other.line}: between {one.text} and {other.text} a comma or a new line is missing")
    if child.name == "timeout":
        unit = words[words.index("unit") + 2].strip("'\"") if "unit" in words[:-2] else "MINUTES"
        if "time" not in words or unit not in UNITS:
            found.append(
                f"line {child.line}: write `timeout(time: <number>, unit: '<one of {', '.join(sorted(UNITS))}>')`"
            )
    if child.name == "cron":
        fields = [len(token.text.strip("'\"").split()) for token in child.arguments if token.kind == "string"]
        if fields != [CRON_FIELDS]:
            found.append(f"line {child.line}: `cron` takes one string of {CRON_FIELDS} fields, such as 'H 2 * * *'")
    return found


def _inner_section(child: Node, section: str) -> str | None:
    """The section as which the block of ``child`` is read, or None where it has none to read."""
    if section == "pipeline" and child.name == "options":
        return "pipeline options"
    if section == "post" or (section == "steps" and child.children is not None and child.name != "script"):
        return "steps"
    if section == "when":
        return "when" if child.name in {"allOf", "anyOf", "not"} else None
    if section in LEAVES:
        return "script" if child.name == "script" else None
    return child.name if child.name in ALLOWED else None


def _check_stage(stage: Node, found: list[str]) -> None:
    bodies = [child.name for child in stage.children or () if child.name in BODIES]
    if len(bodies) != 1:
        what = " and ".join(bodies) or "none"
        found.append(f"line {stage.line}: a stage has exactly one of {', '.join(sorted(BODIES))}; this one has {what}")


# -- our own rules ---------------------------------------------------------------------------------------------------


def _check_rules(pipeline: Node, tokens: list[Token]) -> list[str]:
    sections = {child.name: child for child in pipeline.children or ()}
    found = []
    if "cron" not in _names(sections.get("triggers")):
        found.append("rule: the run is nightly: `triggers { cron(...) }`")
    if "timeout" not in _names(sections.get("options")):
        found.append("rule: the whole run has an end: `options { timeout(...) }`")
    nodes = list(pipeline.walk())
    found += [problem for node in nodes if node.name == "retry" for problem in _check_retry(node)]
    found += [problem for node in nodes if node.name == "junit" for problem in _check_junit(node)]
    published = {step.name for node in nodes if node.name == "always" for step in node.walk()}
    found += [
        f"rule: `{name}` publishes {what}, in `always`" for name, what in REPORTS.items() if name not in published
    ]
    ungated = [node for node in nodes if node.name == "recordCoverage" and not _has_gates(node.words())]
    found += [f"line {node.line}: rule: `recordCoverage` without `qualityGates` checks nothing" for node in ungated]
    found += [problem for node in nodes if node.name == "matrix" for problem in _check_matrix(node)]
    found += _check_agents(pipeline, here=False)
    return found + _check_locks(tokens) + _check_shell(tokens) + _check_scripts(nodes) + _check_hidden(tokens)


def _has_gates(words: list[str]) -> bool:
    """Whether ``qualityGates: [`` is there, and is not closed at once."""
    return "qualityGates" in words and words[words.index("qualityGates") + 3 :][:1] != ["]"]


def _check_agents(node: Node, *, here: bool) -> list[str]:
    """Steps need an agent: of their stage, or of what it stands in."""
    own = next((child for child in node.children or () if child.name == "agent"), None)
    here = here if own is None else own.words() != ["none"]
    if node.name == "stage" and "steps" in _names(node) and not here:
        return [f"line {node.line}: rule: this stage has steps and no agent that runs them"]
    return [problem for child in node.children or () for problem in _check_agents(child, here=here)]


def _check_scripts(nodes: list[Node]) -> list[str]:
    """A script is not read into statements, so what it repeats cannot be held against the rule."""
    raw = [token for node in nodes if node.name == "script" for token in node.raw]
    return [f"line {token.line}: rule: `retry` stands in a stage's options, not in a script" for token in raw
            if token.text == "retry"]  # fmt: skip


def _check_hidden(tokens: list[Token]) -> list[str]:
    return [f"line {token.line}: rule: `{token.text}` hides a failure" for token in tokens
            if token.kind == "word" and token.text in HIDES]  # fmt: skip


def _names(node: Node | None) -> set[str]:
    return {child.name for child in (node.children if node is not None else None) or ()}


def _check_retry(node: Node) -> list[str]:
    words = node.words()
    conditions = words[words.index("conditions") :] if "conditions" in words else []
    named = {word for word in conditions if re.match(r"[A-Za-z]", word)} - {"conditions", "count"}
    if not named:
        return [f"line {node.line}: rule: `retry` without conditions runs failed tests again until they pass"]
    return [
        f"line {node.line}: rule: `retry` on `{name}`; only a lost agent is tried again ({', '.join(LOST_AGENT)})"
        for name in sorted(named.difference(LOST_AGENT))
    ]


def _check_junit(node: Node) -> list[str]:
    words = node.words()
    if "allowEmptyResults" in words and words[words.index("allowEmptyResults") + 2 :][:1] == ["true"]:
        return [f"line {node.line}: rule: `allowEmptyResults: true` makes a run without tests green"]
    return []


def _check_matrix(node: Node) -> list[str]:
    found = []
    if "timeout" not in {name for child in node.children or () if child.name == "options" for name in _names(child)}:
        found.append(f"line {node.line}: rule: each cell of a matrix has its own `timeout`")
    post = next((child for child in node.children or () if child.name == "post"), None)
    if not {"always", "cleanup"} <= _names(post):
        found.append(f"line {node.line}: rule: a matrix reports in `always` and ends its ranks in `cleanup`")
    ends = [
        step for child in (post.children if post else None) or () if child.name == "cleanup" for step in child.walk()
    ]
    if not any("guarded_run.py --end" in word for step in ends for word in step.words()):
        found.append(f"line {node.line}: rule: `cleanup` ends recorded processes: `ci/guarded_run.py --end`")
    return found


def _check_locks(tokens: list[Token]) -> list[str]:
    found = []
    for place, token in enumerate(tokens):
        if token.text != "lock" or tokens[place + 1].text != "(":
            continue
        names = [one.text for one in tokens[place:]]
        call = names[: names.index("{")] if "{" in names else names
        given = call[call.index("variable") + 2 :] if "variable" in call else []
        variable = given[0].strip("'\"") if given else None
        if variable is None or not any(variable in name for name in names[len(call) :]):
            found.append(
                f"line {token.line}: rule: what `lock` gave is in its `variable`; read it, or others use it too"
            )
    return found


def _check_shell(tokens: list[Token]) -> list[str]:
    found = []
    for token in tokens:
        if token.kind != "string":
            continue
        if re.search(r"\b(pkill|killall|pgrep|pidof)\b|kill -9 -1", token.text):
            found.append(f"line {token.line}: rule: end recorded processes (ci/guarded_run.py --end), never by name")
        hidden = re.search(r"\|\|.*|;\s*(true|:|exit 0)\s*['\"]|set \+e|[^|\s] \|(?!\|) .*", token.text)
        if hidden:
            found.append(f"line {token.line}: rule: `{hidden.group().rstrip(chr(39) + chr(34))}` hides a failure")
        if re.search(r"guarded_run\.py(?!.*--(end|minutes))", token.text):
            found.append(f"line {token.line}: rule: `guarded_run.py` needs --minutes or --end")
    return found


def main(arguments: list[str]) -> int:
    """Check the files; 0 if nothing is wrong, 1 if something is, 2 if there is nothing to read."""
    if not arguments:
        print("usage: python ci/jenkinsfile.py FILE...", file=sys.stderr)
        return 2
    status = 0
    for name in arguments:
        try:
            found = problems(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            print(f"{name}: {getattr(error, 'strerror', None) or 'is no UTF-8 text'}", file=sys.stderr)
            return 2
        for problem in found:
            print(f"{name}: {problem}", file=sys.stderr)
        status = status or bool(found)
        if not found:
            print(f"{name}: sections and rules hold")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
