"""Check a declarative Jenkinsfile without Jenkins: `python ci/jenkinsfile.py ci/Jenkinsfile`.

tree-sitter's Groovy grammar parses the file. To Groovy, `stags { }` is a call like any other, so the names of sections
are compared with a table. The rest are this project's rules: only lost agents are retried, nothing hides a failure,
reports are published whatever happens, clean-up ends recorded processes only.

Where `groovyc` is on the path (Debian: `apt install groovy`; version 2.4 as in Jenkins), it compiles the file, too;
`.ci/run` installs it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tree_sitter
import tree_sitter_groovy

GROOVY = tree_sitter.Language(tree_sitter_groovy.language())

_COMPILER_SECONDS = 300

BODIES = {"steps", "stages", "parallel", "matrix"}
# Section -> what may stand in it (https://www.jenkins.io/doc/book/pipeline/syntax). Other blocks may hold anything.
SECTIONS = {
    "pipeline": {"agent", "environment", "options", "parameters", "post", "stages", "tools", "triggers"},
    "stages": {"stage"},
    "parallel": {"stage"},
    "stage": {"agent", "environment", "failFast", "input", "options", "post", "tools", "when"} | BODIES,
    "matrix": {"agent", "axes", "environment", "excludes", "options", "post", "stages", "tools", "when"},
    "axes": {"axis"},
    "axis": {"name", "values", "notValues"},
    "post": {
        "aborted", "always", "changed", "cleanup", "failure", "fixed", "regression", "success", "unstable",
        "unsuccessful",
    },
    "steps": {
        "archiveArtifacts", "checkout", "copyArtifacts", "dir", "echo", "error", "junit", "lock", "publishHTML",
        "recordCoverage", "script", "sh", "stash", "timeout", "unstash", "withCredentials", "withEnv",
    },
    "options": {
        "buildDiscarder", "disableConcurrentBuilds", "lock", "retry", "skipDefaultCheckout", "timeout", "timestamps",
    },
    "triggers": {"cron", "pollSCM", "upstream"},
}  # fmt: skip
CONDITIONS = {
    "allOf", "anyOf", "beforeAgent", "branch", "changeRequest", "environment", "equals", "expression", "not", "tag",
}  # fmt: skip
SECTIONS |= dict.fromkeys(("when", "allOf", "anyOf", "not"), CONDITIONS)
NEEDS = {"pipeline": {"agent", "stages"}, "matrix": {"axes", "stages"}, "axis": {"name", "values"}, "stages": {"stage"}}
MANY = {
    "stages",
    "parallel",
    "axes",
    "steps",
    "triggers",
    "options",
    "when",
    "allOf",
    "anyOf",
}  # sections in which a name may stand twice
NEED_ARGUMENTS = {"echo", "label", "sh", "junit", "stash", "unstash", "archiveArtifacts", "name", "values", "lock"}
HIDING = {"catchError", "warnError", "returnStatus", "allowEmptyResults", "skipMarkingBuildUnstable"}
LOST_AGENT = {"agent", "kubernetesAgent", "nonresumable"}
UNITS = {"SECONDS", "MINUTES", "HOURS", "DAYS"}
REPORTS = {
    "junit": "the test results",
    "recordCoverage": "coverage with quality gates",
    "publishHTML": "the HTML reports",
    "archiveArtifacts": "the logs of the ranks",
}


@dataclass
class Call:
    """One statement of the file: a section, a step or an option.

    Attributes:
        name: what is called, such as ``stage``.
        line: where, counted from 1.
        values: texts of the positional arguments, strings without their quotes.
        named: texts of the named arguments.
        children: statements of the block, or None without a block.
    """

    name: str
    line: int
    values: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    children: list[Call] | None = None

    def walk(self) -> Iterator[Call]:
        """Yield this call and all calls in its block."""
        yield self
        for child in self.children or ():
            yield from child.walk()

    def calls(self, name: str) -> list[Call]:
        """List the direct children of that name."""
        return [child for child in self.children or () if child.name == name]


def text_of(node: tree_sitter.Node) -> str:
    """Return the source text of a node, a string without its quotes."""
    text = (node.text or b"").decode()
    if node.type not in {"character_literal", "string_literal"}:
        return text
    quotes = 3 if text[:3] in {"'''", '"""'} else 1
    return text[quotes:-quotes]


def read(node: tree_sitter.Node) -> Iterator[Call]:
    """Yield the calls of a syntax tree, each with its arguments and the calls in its block."""
    for child in node.named_children:
        if child.type in {"method_invocation", "juxt_function_call"}:
            yield read_call(child)
        elif child.type == "local_variable_declaration" and "=" not in text_of(child):
            name, *value = text_of(
                child
            ).split()  # `agent none`, `checkout scm` and a bare `echo` parse as declarations
            yield Call(name, child.start_point[0] + 1, value)
        elif child.type not in {"argument_list", "line_comment", "block_comment"}:
            yield from read(child)


def read_call(node: tree_sitter.Node) -> Call:
    """Read one call."""
    call = Call("", node.start_point[0] + 1)
    for child in node.named_children:
        if child.type == "argument_list":
            for argument in child.named_children:
                if argument.type == "map_item":
                    key, value = argument.named_children[0], argument.named_children[-1]
                    call.named[text_of(key)] = text_of(value)
                elif argument.type == "closure":
                    call.children = [*(call.children or []), *read(argument)]
                else:
                    call.values.append(text_of(argument))
        elif child.type == "closure":
            call.children = [*(call.children or []), *read(child)]
        elif not call.name:
            call.name = text_of(child)
    return call


def syntax_errors(node: tree_sitter.Node) -> Iterator[str]:
    """Yield what the grammar could not parse."""
    if node.is_error or node.is_missing:
        place = text_of(node).splitlines() or [node.type]
        yield f"line {node.start_point[0] + 1}: not Groovy near {place[0][:60]!r}"
    elif node.has_error:
        for child in node.children:
            yield from syntax_errors(child)


def structure_errors(section: Call) -> Iterator[str]:
    """Yield what Jenkins would not accept in a section."""
    children = section.children or []
    counts = Counter(child.name for child in children)
    allowed = SECTIONS.get(section.name)
    if section.children is None and section.name in SECTIONS and section.name != "stage":
        yield f"line {section.line}: `{section.name}` needs a block"
    elif not children and section.name in {*SECTIONS, "agent", "script"} and not section.values:
        yield f"line {section.line}: `{section.name}` is empty"
    for name in sorted(NEEDS.get(section.name, set()) - counts.keys()):
        yield f"line {section.line}: `{section.name}` needs `{name}`"
    for child in children:
        if allowed is not None and child.name not in allowed:
            yield f"line {child.line}: `{child.name}` is not allowed in `{section.name}`"
        elif child.name in NEED_ARGUMENTS and not (child.values or child.named):
            yield f"line {child.line}: `{child.name}` needs an argument"
        elif allowed is not None and section.name not in MANY and counts[child.name] > 1:
            yield f"line {child.line}: `{child.name}` stands more than once in `{section.name}`"
        yield from structure_errors(child)
    yield from header_errors(section, counts)


def header_errors(section: Call, counts: Counter[str]) -> Iterator[str]:
    """Yield the mistakes in the header of an agent or a stage."""
    if section.name == "agent" and section.children is None and section.values not in (["any"], ["none"]):
        yield f"line {section.line}: `agent` is `any`, `none` or a block"
    if section.name == "stage":
        if not "".join(section.values).strip():
            yield f"line {section.line}: `stage` needs a name, such as stage('unit')"
        bodies = sorted(BODIES & counts.keys())
        if len(bodies) != 1:
            has = " and ".join(bodies) or "none"
            yield f"line {section.line}: a stage has one of {', '.join(sorted(BODIES))}; this one has {has}"


def rule_errors(pipeline: Call, text: str) -> Iterator[str]:
    """Yield each of the project's rules that the file breaks."""
    calls = list(pipeline.walk())
    names = Counter(call.values[0] for call in calls if call.name == "stage" and call.values)
    yield from (f"there is more than one stage {name!r}" for name, count in names.items() if count > 1)
    if not any(call.name == "cron" and len("".join(call.values).split()) == 5 for call in calls):
        yield "rule: the run is nightly: `triggers { cron('H 2 * * *') }`, with five fields"
    if not any(option.name == "timeout" for options in pipeline.calls("options") for option in options.children or ()):
        yield "rule: the whole run has a time limit in the options of the pipeline"
    for matrix in (call for call in calls if call.name == "matrix"):
        if not any(
            option.name == "timeout" for options in matrix.calls("options") for option in options.children or ()
        ):
            yield f"line {matrix.line}: rule: each cell of a matrix has its own time limit"
        cleanups = [call for post in matrix.calls("post") for call in post.calls("cleanup")]
        if not any(
            "guarded_run.py --end" in value for call in cleanups for step in call.walk() for value in step.values
        ):
            yield f"line {matrix.line}: rule: `cleanup` ends the recorded ranks with `ci/guarded_run.py --end`"
    always = {step.name for call in calls if call.name == "always" for step in call.walk()}
    for name, what in REPORTS.items():
        if name not in always:
            yield f"rule: `{name}` publishes {what} in `post {{ always {{ }} }}`"
    if pipeline.calls("agent") and pipeline.calls("agent")[0].values == ["none"]:
        yield from without_agent(pipeline)
    for call in calls:
        yield from (f"line {call.line}: rule: {problem}" for problem in call_errors(call, text))


def without_agent(section: Call) -> Iterator[str]:
    """Yield the stages whose steps run on no agent, in a section that has none itself."""
    for child in section.children or ():
        if child.name in {"stages", "parallel", "matrix", "stage"} and not child.calls("agent"):
            if child.calls("steps"):
                yield f"line {child.line}: this stage has steps and no agent"
            yield from without_agent(child)


def call_errors(call: Call, text: str) -> Iterator[str]:
    """Yield the mistakes in one call."""
    arguments = {call.name, *(name for name, value in call.named.items() if value != "false")}
    for name in sorted(arguments & HIDING):
        yield f"`{name}` hides a failure"
    if call.name == "timeout" and not (call.named.get("time", "0") > "0" and call.named.get("unit") in UNITS):
        yield "write `timeout(time: <number>, unit: 'MINUTES')`"
    if call.name == "retry":
        conditions = set(re.findall(r"(\w+)\(\)", call.named.get("conditions", "")))
        if not conditions or conditions - LOST_AGENT:
            yield "`retry` is for lost agents: `conditions: [agent(), nonresumable()]`; else failed tests run again"
    if call.name == "recordCoverage" and call.named.get("qualityGates", "[]") == "[]":
        yield "`recordCoverage` without `qualityGates` checks nothing"
    if call.name == "lock":
        variable = call.named.get("variable", "")
        if not variable or len(re.findall(rf"\b{variable}\b", text)) < 2:
            yield "a cell uses the devices that it locked: `lock` gives them in its `variable`"
    if call.name == "sh":
        yield from shell_errors(call)


def shell_errors(call: Call) -> Iterator[str]:
    """Yield the mistakes in a shell step: it is one command, whose status is that of the step."""
    command = call.named.get("script", "".join(call.values[:1]))
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError as error:
        yield f"`sh {command}`: {error}"
        return
    operators = [word for word in words if set(word) <= set("|&;<>()")] + ["newline"] * ("\n" in command)
    if operators:
        yield f"`sh` runs one command, without {operators[0]!r}: what needs more is a script under ci/"
    if words and words[0].startswith("$"):
        yield f"`sh {command}`: the command is written out, only its arguments may be variables"
    if words and words[0] in {"kill", "pkill", "killall"}:
        yield f"`{words[0]}`: only recorded processes are ended, with `ci/guarded_run.py --end`"
    if any("guarded_run.py" in word for word in words) and not {"--minutes", "--end"} & set(words):
        yield "`guarded_run.py` needs --minutes or --end"


def problems(text: str) -> list[str]:
    """List every mistake in a Jenkinsfile."""
    root = tree_sitter.Parser(GROOVY).parse(text.encode()).root_node
    errors = list(syntax_errors(root))
    if errors:
        return errors
    calls = list(read(root))
    if [call.name for call in calls] != ["pipeline"] or len(root.named_children) - text_comments(root) != 1:
        return ["line 1: a declarative file is one `pipeline { }` block and nothing else"]
    return [*structure_errors(calls[0]), *rule_errors(calls[0], text)]


def text_comments(root: tree_sitter.Node) -> int:
    """Count the comments next to the pipeline."""
    return sum(child.type.endswith("comment") for child in root.named_children)


def compiled(source: str) -> tuple[str, str]:
    """Compile a Jenkinsfile with Groovy's own compiler; nothing of it runs.

    Returns:
        what was done, or why it was not, and what the compiler rejects, or nothing.
    """
    compiler = shutil.which("groovyc")
    if compiler is None:
        return "not compiled: groovyc is not on the path (apt install groovy)", ""
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "Jenkinsfile.groovy"
        script.write_text(source, encoding="utf-8")
        command = [compiler, "-d", str(Path(name) / "classes"), str(script)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILER_SECONDS, check=False, env=_with_java()
        )
        said = (done.stderr or done.stdout).strip()
        if done.returncode == 0:
            return "compiled by groovyc", ""
        if str(script) not in said:  # the compiler did not start: Java is missing, for example
            first = said.partition("\n")[0]
            return f"not compiled: {first or f'groovyc ended with status {done.returncode}'}", ""
        return "", "groovyc: " + said.replace(f"{script}: ", "line ")


def _with_java() -> dict[str, str]:
    """Return the environment with JAVA_HOME, which Debian's groovyc otherwise takes to be /usr/lib/jvm/default-java."""
    java = shutil.which("java")
    home = {"JAVA_HOME": str(Path(java).resolve().parents[1])} if java else {}
    return {**home, **os.environ}


def main(args: list[str]) -> int:
    """Check one file and print its mistakes."""
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        source = Path(args[0]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"{args[0]}: cannot be read: {error}", file=sys.stderr)
        return 2
    how, refused = compiled(source)
    errors = [*problems(source), *filter(None, [refused])]
    for text in errors:
        print(f"{args[0]}: {text}", file=sys.stderr)
    if not errors:
        print(f"{args[0]}: syntax, sections and rules hold; {how}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
