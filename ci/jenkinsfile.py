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
KINDS = {"string": "string", "number": "number", "boolean": "boolean", "digits": "number in a string"}
GROOVY = {"as", "in", "instanceof", "new", "return"}
GOOD_ENDS = {"true", ":", "exit 0"}
# Quoted and escaped text, comments and redirections are read as such, so that a sign is a sign.
SHELL = re.compile(
    r"""(?P<quoted>\\.|'[^']*'|"(?:\\.|[^"\\])*")|(?P<comment>(?:^|(?<=\s))\#[^\n]*)|(?P<redirected>[<>]&|&>>?|>\|)"""
    r"""|(?P<sign>\|\||&&|\|&|;;|[|;&\n])""",
    re.DOTALL,
)
UNITS = {"NANOSECONDS", "MICROSECONDS", "MILLISECONDS", "SECONDS", "MINUTES", "HOURS", "DAYS"}
CRON = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
CRON_ITEM = re.compile(r"(?:\*|H(?:\((\d+)-(\d+)\))?|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?")
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
WHEN_BLOCKS = {"allOf", "anyOf", "expression", "not"}
WHEN_SETTINGS = {"beforeAgent", "beforeInput", "beforeOptions"}
LOST_AGENT = ("agent", "kubernetesAgent", "nonresumable")
REPORTS = {
    "junit": "test results",
    "recordCoverage": "coverage with quality gates",
    "publishHTML": "the HTML reports",
    "archiveArtifacts": "the logs of the ranks",
}


@dataclass(frozen=True)
class Signature:
    """What a call may be given.

    Attributes:
        named: argument to the kind of its value: ``string``, ``number``, ``digits`` (in a string), ``boolean``,
            ``any``, or one that has a reader of its own.
        first: the argument that may stand without its name, or "".
        needs: must be given.
    """

    named: dict[str, str] = field(default_factory=dict)
    first: str = ""
    needs: tuple[str, ...] = ()


def _parameter(default: str = "string", **more: str) -> Signature:
    named = {"name": "string", "defaultValue": default, "description": "string", **more}
    return Signature(named, needs=("name",))


ROTATOR = Signature(
    dict.fromkeys(("numToKeepStr", "daysToKeepStr", "artifactNumToKeepStr", "artifactDaysToKeepStr"), "digits")
)
# What is not here is not held against anything but its section.
SIGNATURES = {
    "ansiColor": Signature({"colorMapName": "string"}, "colorMapName", ("colorMapName",)),
    "archiveArtifacts": Signature(
        {"artifacts": "string", "excludes": "string", "allowEmptyArchive": "boolean", "caseSensitive": "boolean",
         "defaultExcludes": "boolean", "fingerprint": "boolean", "followSymlinks": "boolean",
         "onlyIfSuccessful": "boolean"},
        "artifacts", ("artifacts",),
    ),
    "booleanParam": _parameter("boolean"),
    "buildDiscarder": Signature({"strategy": "rotator"}, "strategy", ("strategy",)),
    "choice": _parameter(choices="any"),
    "cron": Signature({"spec": "cron"}, "spec", ("spec",)),
    "dir": Signature({"path": "string"}, "path", ("path",)),
    "disableConcurrentBuilds": Signature({"abortPrevious": "boolean"}),
    "disableResume": Signature(),
    "echo": Signature({"message": "string"}, "message", ("message",)),
    "error": Signature({"message": "string"}, "message", ("message",)),
    "junit": Signature(
        {"testResults": "string", "allowEmptyResults": "boolean", "checksName": "string", "healthScaleFactor": "number",
         "keepLongStdio": "boolean", "keepProperties": "boolean", "skipMarkingBuildUnstable": "boolean",
         "skipOldReports": "boolean", "skipPublishingChecks": "boolean", "stdioRetention": "string",
         "testDataPublishers": "any"},
        "testResults", ("testResults",),
    ),
    "lock": Signature(
        {"resource": "string", "label": "string", "quantity": "number", "variable": "string", "extra": "any",
         "inversePrecedence": "boolean", "priority": "number", "resourceSelectStrategy": "string",
         "skipIfLocked": "boolean"},
        "resource",
    ),
    "newContainerPerStage": Signature(),
    "parallelsAlwaysFailFast": Signature(),
    "password": _parameter(),
    "pollSCM": Signature({"spec": "cron", "ignorePostCommitHooks": "boolean"}, "spec", ("spec",)),
    "preserveStashes": Signature({"buildCount": "number"}),
    "publishHTML": Signature({"target": "any"}, "target", ("target",)),
    "quietPeriod": Signature({"quietPeriod": "number"}, "quietPeriod", ("quietPeriod",)),
    "retry": Signature({"count": "number", "conditions": "any"}, "count", ("count",)),
    "sh": Signature(
        {"script": "string", "label": "string", "encoding": "string", "returnStatus": "boolean",
         "returnStdout": "boolean"},
        "script", ("script",),
    ),
    "skipDefaultCheckout": Signature({"skip": "boolean"}, "skip"),
    "stash": Signature(
        {"name": "string", "includes": "string", "excludes": "string", "allowEmpty": "boolean",
         "useDefaultExcludes": "boolean"},
        "name", ("name",),
    ),
    "string": _parameter(trim="boolean"),
    "text": _parameter(trim="boolean"),
    "timeout": Signature({"time": "number", "unit": "string", "activity": "boolean"}, "time"),
    "timestamps": Signature(),
    "unstash": Signature({"name": "string"}, "name", ("name",)),
    "withCredentials": Signature({"bindings": "any"}, "bindings", ("bindings",)),
    "withEnv": Signature({"overrides": "variables"}, "overrides", ("overrides",)),
}  # fmt: skip


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


def check_separators(tokens: list[Token]) -> list[str]:
    """Commas and colons stand between values, and in brackets values have a comma between them; in scripts too."""
    found: list[str] = []
    stack = [""]
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        if token.kind == "sign" and token.text in {",", ":"} and not _separates(before, token, after):
            found.append(f"line {token.line}: {token.text!r} stands between no two values")
        if before is not None and stack[-1] in {"(", "["} and _comma_missing(before, token, stack[-1]):
            found.append(f"line {token.line}: between {before.text} and {token.text} a comma is missing")
        if token.kind == "sign" and token.text in OPEN:
            stack.append(token.text)
        elif token.kind == "sign" and token.text in CLOSE:
            stack.pop()
    return found


def _is_end(token: Token | None) -> bool:
    """Whether a value may end in it."""
    return token is not None and (token.kind != "sign" or token.text in CLOSE)


def _separates(before: Token | None, token: Token, after: Token | None) -> bool:
    around = (before.text if before is not None else "", after.text if after is not None else "")
    if token.text == ":" and around in {("[", "]"), ("?", around[1])}:  # an empty map, or a choice
        return True
    ends = {"", ",", ":", ";", ")", "}", "]"} - ({"]"} if token.text == "," else set())
    return _is_end(before) and around[1] not in ends


def _comma_missing(before: Token, token: Token, bracket: str) -> bool:
    if not _is_end(before) or {before.text, token.text} & GROOVY:
        return False
    return token.kind != "sign" or (token.text == "[" == bracket and token.line > before.line)


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
        separators = check_separators(tokens)
        nodes = Parser(tokens).block()
    except JenkinsfileError as error:
        return [str(error)]
    if [node.name for node in nodes] != ["pipeline"]:
        return ["line 1: a declarative file is one `pipeline { }` block and nothing else"]
    found: list[str] = []
    _check_section(nodes[0], "pipeline", found)
    return separators + found + _check_rules(nodes[0], tokens)


def _check_section(node: Node, section: str, found: list[str]) -> None:
    """One section against the table, and everything in it."""
    if node.children is None:
        found.append(f"line {node.line}: `{node.name}` needs a block")
        return
    allowed = ALLOWED[section]
    if allowed is None:
        if not node.raw:
            found.append(f"line {node.line}: `{node.name}` is empty")
        found += _check_variables(node.raw) if section == "environment" else _check_script(node.raw)
        return
    names = [child.name for child in node.children]
    missing = REQUIRED.get(section, set()) - set(names)
    found += [f"line {node.line}: `{section}` needs `{need}`" for need in sorted(missing)]
    if not names:
        found.append(f"line {node.line}: `{section}` needs something in it")
    if section == "axis" and not {"values", "notValues"} & set(names):
        found.append(f"line {node.line}: `axis` needs `values` or `notValues`")
    if section == "when" and not set(names) - WHEN_SETTINGS:
        found.append(f"line {node.line}: `when` needs a condition")
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
        if not _stage_name(child):
            found.append(f"line {child.line}: `stage` needs a name, such as stage('unit')")
        _check_stage(child, found)
    if section in CALLS and child.words()[:1] != ["("]:
        found.append(f"line {child.line}: `{child.name}` in `{section}` is a call: write `{child.name}(...)`")
    elif child.children is None and not child.arguments and section in LEAVES | {"when", "post"}:
        found.append(f"line {child.line}: `{child.name}` in `{section}` needs an argument")
    found += _check_arguments(child)
    if section in LEAVES and child.name in SIGNATURES and (child.arguments or child.children is None):
        found += _check_call(child)
    if section == "when" and child.name in WHEN_BLOCKS and child.children is None:
        found.append(f"line {child.line}: `{child.name}` in `when` needs a block")
        return
    if child.name == "agent" and child.children is None:
        if child.words() not in (["any"], ["none"]):
            found.append(f"line {child.line}: `agent` is `any`, `none` or a block")
        return
    inner = _inner_section(child, section)
    if inner is not None:
        _check_section(child, inner, found)


def _check_arguments(child: Node) -> list[str]:
    """What a statement is given are values with commas between them."""
    found, depth = [], 0
    if child.words()[:1] in ([","], [":"]):
        found.append(f"line {child.line}: {child.words()[0]!r} stands between no two values")
    for one, other in zip(child.arguments, child.arguments[1:], strict=False):
        depth += (one.text in OPEN) - (one.text in CLOSE) if one.kind == "sign" else 0
        if not depth and (one.kind != "sign" or one.text in CLOSE) and other.kind != "sign":
            found.append(f"line {other.line}: between {one.text} and {other.text} a comma or a new line is missing")
    return found


# -- what calls are given --------------------------------------------------------------------------------------------


def _split(tokens: list[Token]) -> list[list[Token]]:
    """Between the commas that are in no bracket."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "sign":
            depth += (token.text in OPEN) - (token.text in CLOSE)
        if token.text == "," and not depth:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def _inside(tokens: list[Token]) -> list[Token]:
    """Without the brackets around all of it."""
    return tokens[1:-1] if tokens and tokens[0].text in {"(", "["} else tokens


def _given(child: Node) -> tuple[list[list[Token]], dict[str, list[Token]], list[str]]:
    """Values without and with a name, and names that are given twice."""
    plain, named, twice = [], dict[str, list[Token]](), []
    bracketed = child.words()[:1] == ["("]
    for part in _split(_inside(child.arguments) if bracketed else child.arguments):
        if part[0].kind == "word" and [token.text for token in part[1:2]] == [":"]:
            twice += [part[0].text] * (part[0].text in named)
            named[part[0].text] = part[2:]
        else:
            plain.append(part)
    return plain, named, twice


def _check_call(child: Node) -> list[str]:
    """A call against its signature."""
    plain, named, twice = _given(child)
    signature, call = SIGNATURES[child.name], f"line {child.line}: `{child.name}`"
    found = [f"{call} is given `{name}` twice" for name in twice]
    if len(plain) > bool(signature.first):
        found.append(f"{call} takes {'one value' if signature.first else 'nothing'} without a name, not {len(plain)}")
    elif plain:
        found += [f"{call} is given `{signature.first}` twice"] * (signature.first in named)
        named = {**named, signature.first: plain[0]}
    takes = ", ".join(signature.named) or "nothing"
    for name, value in named.items():
        if name not in signature.named:
            found.append(f"{call} does not take `{name}`; it takes {takes}")
        else:
            found += [f"{call}: {problem}" for problem in _check_value(name, signature.named[name], value)]
    found += [f"{call} needs `{name}`" for name in signature.needs if name not in named]
    if child.name == "lock" and not {"resource", "label"} & set(named):
        found.append(f"{call} needs `resource` or `label`")
    if child.name == "timeout" and not _is_limit(named):
        found.append(f"line {child.line}: write `timeout(time: <number>, unit: '<one of {', '.join(sorted(UNITS))}>')`")
    return found


def _is_limit(named: dict[str, list[Token]]) -> bool:
    """Whether there is some time, with its unit: a number alone may be read as seconds, and means minutes."""
    time, unit = ("".join(token.text for token in named.get(name, ())) for name in ("time", "unit"))
    return time not in {"", "0"} and _text(unit) in UNITS


def _check_value(name: str, kind: str, value: list[Token]) -> list[str]:
    if not value:
        return [f"`{name}` has no value"]
    reader = {"cron": _check_cron, "rotator": _check_rotator, "variables": _check_overrides}.get(kind)
    if reader is not None:
        return reader(value)
    if len(value) != 1 or kind == "any":
        return []
    (token,) = value
    literal = "string" if token.kind == "string" else "boolean" if token.text in {"true", "false"} else ""
    literal = literal or ("number" if token.text[0].isdigit() else kind)  # a variable may be anything
    if kind == "digits" and literal == "string" and _text(token.text).isdigit():
        return []
    return [] if literal == kind else [f"`{name}` is a {KINDS[kind]}, not {token.text}"]


def _check_rotator(value: list[Token]) -> list[str]:
    head = value[0]
    if head.text != "logRotator" or [token.text for token in value[1:2]] != ["("]:
        return ["write `buildDiscarder(logRotator(numToKeepStr: '<number>'))`"]
    plain, named, twice = _given(Node(head.text, head.line, value[1:]))
    takes = ", ".join(ROTATOR.named)
    found = [f"`logRotator` does not take `{name}`; it takes {takes}" for name in named if name not in ROTATOR.named]
    found += [f"`logRotator` is given `{name}` twice" for name in twice]
    if plain or not named:
        found.append(f"`logRotator` takes values with their names, one at least: {takes}")
    for name in named.keys() & ROTATOR.named.keys():
        found += _check_value(name, ROTATOR.named[name], named[name])
    return found


def _check_cron(value: list[Token]) -> list[str]:
    """Five fields, each a list of numbers, spans, ``*`` or ``H``, in its bounds."""
    fields = _text(value[0].text).split()
    if [token.kind for token in value] != ["string"] or len(fields) != len(CRON):
        return [f"it takes one string of {len(CRON)} fields, such as 'H 2 * * *'"]
    return [
        f"{item!r} is no {name}: write {least} to {most}, *, H, spans and steps of them"
        for given, (name, least, most) in zip(fields, CRON, strict=True)
        for item in given.split(",")
        if not _is_cron_item(item, least, most)
    ]


def _is_cron_item(item: str, least: int, most: int) -> bool:
    match = CRON_ITEM.fullmatch(item)
    if match is None:
        return False
    *bounds, step = match.groups()
    numbers = [int(bound) for bound in bounds if bound is not None]
    inside = all(least <= number <= most for number in numbers)
    return inside and numbers == sorted(numbers) and (step is None or int(step) <= most)


def _check_overrides(value: list[Token]) -> list[str]:
    """``['NAME=value', ...]``, the list of ``withEnv``."""
    wanted = "it takes a list of strings such as 'NAME=value'"
    if value[0].text != "[" or value[-1].text != "]":
        return [wanted]
    parts = _split(_inside(value))
    bad = [" ".join(token.text for token in part) for part in parts if not _is_override(part)]
    return [f"{wanted}, not {one}" for one in bad] or ([] if parts else [f"{wanted}, and is given none"])


def _is_override(part: list[Token]) -> bool:
    return part[0].kind == "string" and re.match(r"[A-Za-z_]\w*(\+\w+)?=", _text(part[0].text)) is not None


def _check_variables(tokens: list[Token]) -> list[str]:
    """``NAME = value`` lines of ``environment``."""
    found, names = [], list[str]()
    for line in _lines(tokens):
        head, where = line[0], f"line {line[0].line}: `environment`"
        if not re.fullmatch(r"[A-Za-z_]\w*", head.text) or [token.text for token in line[1:2]] != ["="]:
            found.append(f"{where} takes lines such as NAME = 'value', not {' '.join(token.text for token in line)}")
        elif not _is_variable_value(line[2:]):
            given = " ".join(token.text for token in line[2:]) or "nothing"
            found.append(f"{where}: {head.text} is a string, strings added up, or a call, not {given}")
        names.append(head.text)
    twice = [name for name, count in Counter(names).items() if count > 1]
    return found + [f"line {tokens[0].line}: `environment` sets {name} more than once" for name in twice]


def _lines(tokens: list[Token]) -> list[list[Token]]:
    """Statements of a block: a line goes on in brackets and beside an operator."""
    lines: list[list[Token]] = []
    depth, ended = 0, True
    for token in tokens:
        joined = bool(lines) and (lines[-1][-1].text in {"+", "="} or token.text == "+")
        if token.text == ";" and not depth:
            ended = True
            continue
        if ended or (not depth and not joined and token.line > lines[-1][-1].line):
            lines.append([])
        lines[-1].append(token)
        ended = False
        depth += (token.text in OPEN) - (token.text in CLOSE) if token.kind == "sign" else 0
    return lines


def _is_variable_value(tokens: list[Token]) -> bool:
    """Strings, calls and names, with ``+`` between them; a bare word or number is none to Jenkins."""
    depth, parts = 0, list[list[Token]]([[]])
    for token in tokens:
        depth += (token.text in OPEN) - (token.text in CLOSE) if token.kind == "sign" else 0
        if token.text == "+" and not depth:
            parts.append([])
        else:
            parts[-1].append(token)
    return all(
        part
        and (
            (len(part) == 1 and (part[0].kind == "string" or (len(parts) > 1 and part[0].kind == "word")))
            or (part[0].kind == "word" and len(part) > 1 and part[1].text == "(" and part[-1].text == ")")
        )
        for part in parts
    )


def _check_script(tokens: list[Token]) -> list[str]:
    """Calls in a script that are steps, where they are written with brackets; the rest of a script is Groovy."""
    found = []
    for place, token in enumerate(tokens):
        if token.kind == "word" and token.text in STEPS & set(SIGNATURES) and _at(tokens, place + 1) == "(":
            found += _check_call(Node(token.text, token.line, _bracketed(tokens[place + 1 :])))
    return found


def _at(tokens: list[Token], place: int) -> str:
    return tokens[place].text if place < len(tokens) else ""


def _bracketed(tokens: list[Token]) -> list[Token]:
    """From the bracket that ``tokens`` begin with to the one that closes it."""
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token.text in OPEN) - (token.text in CLOSE) if token.kind == "sign" else 0
        if not depth:
            return tokens[: place + 1]
    return tokens


def _text(literal: str) -> str:
    """What a string literal holds."""
    quotes = literal[:3] if literal[:3] in {"'''", '"""'} else literal[:1]
    return literal[len(quotes) : -len(quotes)] if quotes[:1] in {"'", '"'} else literal


def _stage_name(stage: Node) -> str:
    return next((_text(token.text).strip() for token in stage.arguments if token.kind == "string"), "")


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
    stages = Counter(_stage_name(node) for node in nodes if node.name == "stage")
    found += [f"rule: there is more than one stage {name!r}: reports tell them apart by their names"
              for name, count in stages.items() if count > 1 and name]  # fmt: skip
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
    if "skipMarkingBuildUnstable" in words and words[words.index("skipMarkingBuildUnstable") + 2 :][:1] == ["true"]:
        return [f"line {node.line}: rule: `skipMarkingBuildUnstable: true` hides a failure"]
    return []


def _axis_names(node: Node, section: str) -> list[str]:
    """Names of the axes that a matrix has, or that it excludes cells of."""
    wanted = [one for child in node.children or () if child.name == section for one in child.walk()]
    names = [one for axis in wanted if axis.name == "axis" for one in axis.children or () if one.name == "name"]
    return [_text(token.text) for name in names for token in name.arguments if token.kind == "string"]


def _check_matrix(node: Node) -> list[str]:
    axes = Counter(_axis_names(node, "axes"))
    found = [f"line {node.line}: there is more than one axis {name!r}" for name, count in axes.items() if count > 1]
    strangers = sorted({*_axis_names(node, "excludes")}.difference(axes))
    found += [f"line {node.line}: `excludes` names {name!r}, which is no axis of the matrix" for name in strangers]
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


# -- what shells are told --------------------------------------------------------------------------------------------


def _check_shell(tokens: list[Token]) -> list[str]:
    """Texts of ``sh``: nothing in them hides a failure, and nothing is ended by its name."""
    found = []
    for place, token in enumerate(tokens):
        if token.kind != "word" or token.text.rpartition(".")[2] != "sh":
            continue
        text = _shell_text(tokens, place)
        if text is None or text.lstrip().startswith("$"):
            found.append(f"line {token.line}: rule: `sh` is told what to run in a string, which can be read here")
        else:
            found += [f"line {token.line}: rule: {problem}" for problem in _shell_problems(text)]
    return found


def _shell_text(tokens: list[Token], place: int) -> str | None:
    """What the ``sh`` at ``place`` runs, or None where it is no string."""
    rest = _inside(_bracketed(tokens[place + 1 :])) if _at(tokens, place + 1) == "(" else tokens[place + 1 :]
    texts = [token.text for token in rest]
    if "script" in texts[:-2] and texts[texts.index("script") + 1] == ":":
        rest = rest[texts.index("script") + 2 :]
    if not rest or rest[0].kind != "string":
        return None
    return re.sub(r"\\(.)", lambda escaped: {"n": "\n", "t": "\t"}.get(escaped[1], escaped[1]), _text(rest[0].text))


def _shell_problems(text: str) -> list[str]:
    found = []
    if re.search(r"\b(pkill|killall|pgrep|pidof)\b|kill -9 -1", text):
        found.append("end recorded processes (ci/guarded_run.py --end), never by name")
    if re.search(r"guarded_run\.py(?!.*--(end|minutes))", text):
        found.append("`guarded_run.py` needs --minutes or --end")
    return found + [f"`{part}` hides a failure" for part in _hidden(text)]


def _hidden(text: str) -> Iterator[str]:
    """Parts of a shell's text that turn a failed command into a good one."""
    parts = _commands(text)
    piped = any(re.search(r"\bset\s.*\bpipefail\b", command) for _, command in parts)
    for place, (sign, command) in enumerate(parts):
        before = parts[place - 1][1] if place else ""
        lost = sign in {"|", "|&"} and not piped and before.split()[:1] not in (["echo"], ["printf"])
        caught = sign == "||" and not _told_on(before, command, parts[place + 1 :])
        over = sign in {";", "\n"} and place == len(parts) - 1 and command in GOOD_ENDS
        if lost or caught or over:
            yield f"{sign.strip() or ';'} {command}".strip()
        if sign == "&":
            yield f"{before} &"
        if re.match(r"set\s+\+(e|o\s+errexit)", command):
            yield command


def _told_on(before: str, command: str, rest: list[tuple[str, str]]) -> bool:
    """Whether what stands after ``||`` keeps the failure, or stands after a mere question."""
    if re.match(r"\{\s", command):  # { echo 'why'; exit 1; }
        inside = [command.lstrip("{ ")]
        for _, other in rest:
            if other.startswith("}"):
                break
            inside.append(other)
        command = next((one for one in reversed(inside) if one), "")
    if re.fullmatch(r"(exit|return) [1-9]\d*|false|exit", command):
        return True
    asked = re.match(r"(\[\[?|test|command -v|if|elif|while|until)\s", before) is not None
    return asked and command not in GOOD_ENDS and command.split()[:1] not in (["echo"], ["printf"])


def _commands(text: str) -> list[tuple[str, str]]:
    """Commands with the sign before each; signs in quotes and comments are none."""
    parts, sign, start, place = list[tuple[str, str]](), "", 0, 0
    for match in SHELL.finditer(text):
        if match.lastgroup != "sign":
            continue
        place = match.start()
        parts.append((sign, text[start:place].strip()))
        sign, start = match.group(), match.end()
    parts.append((sign, text[start:].strip()))
    # What ends in a sign has no command after it; only `&` means something there.
    return [(one, command) for one, command in parts if command or one == "&"]


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
