"""The check of `ci/Jenkinsfile` accepts the project's file and rejects each single mistake."""

import shutil
from pathlib import Path

import pytest

from hyper_parallel.pytest_plugin.capability import SkipReason, skip_without

pytest.importorskip("tree_sitter_groovy", reason="[no-tool] the Groovy grammar comes with the extra `test`")

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.fixture(scope="module")
def checker(script):
    """The script as a module."""
    return script("jenkinsfile")


GOOD = """\
pipeline {
    agent none
    triggers { cron('H 2 * * *') }
    options { timeout(time: 1, unit: 'HOURS') }
    stages {
        stage('CPU') {
            matrix {
                agent { label 'cpu' }
                axes {
                    axis {
                        name 'FRAMEWORK'
                        values 'torch', 'mindspore'
                    }
                }
                options {
                    retry(count: 2, conditions: [agent(), nonresumable()])
                    timeout(time: 9, unit: 'MINUTES')
                }
                stages {
                    stage('unit') {
                        when { anyOf { branch 'main' } }
                        steps {
                            checkout scm
                            script { lock(label: 'npu', quantity: 2, variable: 'DEVICES') { sh 'echo ${DEVICES}' } }
                            sh 'python3 ci/guarded_run.py --minutes 8 -- tox -e ${FRAMEWORK}'
                        }
                    }
                }
                post {
                    always {
                        junit testResults: 'reports/*.xml'
                        archiveArtifacts artifacts: 'reports/**'
                    }
                    cleanup { sh 'python3 ci/guarded_run.py --end' }
                }
            }
        }
        stage('Coverage') {
            agent { label 'cpu' }
            steps { echo 'x' }
            post {
                always {
                    recordCoverage(tools: [[parser: 'COBERTURA']], qualityGates: [[threshold: 80.0]])
                    publishHTML(target: [reportDir: 'coverage_reports'])
                }
            }
        }
    }
}
"""

GUARDED = "python3 ci/guarded_run.py --minutes 8 -- tox -e ${FRAMEWORK}"

# old, new, message: each is the good file with one fault.
BAD = {
    "a section mistyped": ("    stages {\n        stage('CPU')", "    stags {\n        stage('CPU')", "`stags` is not allowed in `pipeline`"),
    "a brace missing": ("agent none", "agent none {", "not Groovy near 'pipeline {'"),
    "a brace too many": ("agent none", "agent none }", "not Groovy near '}'"),
    "a string without end": ("'H 2 * * *'", "'H 2 * * *", "not Groovy near 'pipeline {'"),
    "a bracket closed by another": ("[agent(), nonresumable()]", "[agent(), nonresumable())", "not Groovy near 'pipeline {'"),
    "no agent": ("    agent none\n", "", "`pipeline` needs `agent`"),
    "an agent that is a word": ("agent none", "agent cpu", "`agent` is `any`, `none` or a block"),
    "a scripted file": ("pipeline {", "node {", "a declarative file is one `pipeline { }` block and nothing else"),
    "something beside the pipeline": ("pipeline {", "def x = 1\npipeline {", "a declarative file is one `pipeline { }` block and nothing else"),
    "two triggers": ("    agent none\n", "    agent none\n    triggers { cron('x') }\n", "`triggers` stands more than once in `pipeline`"),
    "a stage without a name": ("stage('unit')", "stage()", "`stage` needs a name, such as stage('unit')"),
    "a stage with two bodies": ("steps { echo 'x' }", "steps { echo 'x' }\nstages { stage('y') { steps { echo 'y' } } }", "a stage has one of matrix, parallel, stages, steps; this one has stages and steps"),
    "a stage without a body": ("steps { echo 'x' }", "", "a stage has one of matrix, parallel, stages, steps; this one has none"),
    "steps without a step": ("steps { echo 'x' }", "steps { }", "`steps` is empty"),
    "a step that no plugin has": ("checkout scm", "checkuot scm", "`checkuot` is not allowed in `steps`"),
    "a condition that post does not know": ("cleanup {", "finally {", "`finally` is not allowed in `post`"),
    "a matrix without axes": ("axes {\n                    axis {", "excludes {\n                    exclude {", "`matrix` needs `axes`"),
    "an axis without a name": ("                        name 'FRAMEWORK'\n", "", "`axis` needs `name`"),
    "an option that no stage has": ("timeout(time: 9, unit: 'MINUTES')", "buildDiscarder(x)", "rule: each cell of a matrix has its own time limit"),
    "an option that is not a call": ("timeout(time: 1, unit: 'HOURS')", "timeout 1", "rule: write `timeout(time: <number>, unit: 'MINUTES')`"),
    "a condition that when does not know": ("branch 'main'", "branches 'main'", "`branches` is not allowed in `anyOf`"),
    "not nightly": ("cron('H 2 * * *')", "pollSCM('x')", "rule: the run is nightly: `triggers { cron('H 2 * * *') }`, with five fields"),
    "no end": ("timeout(time: 1, unit: 'HOURS')", "timestamps()", "rule: the whole run has a time limit in the options of the pipeline"),
    "a cell without end": ("                    timeout(time: 9, unit: 'MINUTES')\n", "", "rule: each cell of a matrix has its own time limit"),
    "failed tests run again": (", conditions: [agent(), nonresumable()]", "", "rule: `retry` is for lost agents: `conditions: [agent(), nonresumable()]`; else failed tests run again"),
    "failed scripts run again": ("nonresumable()", "always()", "rule: `retry` is for lost agents: `conditions: [agent(), nonresumable()]`; else failed tests run again"),
    "no test results": ("junit testResults: 'reports/*.xml'", "echo 'x'", "rule: `junit` publishes the test results in `post { always { } }`"),
    "no tests are fine": ("'reports/*.xml'", "'reports/*.xml', allowEmptyResults: true", "rule: `allowEmptyResults` hides a failure"),
    "no HTML": ("publishHTML(target: [reportDir: 'coverage_reports'])", "", "rule: `publishHTML` publishes the HTML reports in `post { always { } }`"),
    "coverage without gates": (", qualityGates: [[threshold: 80.0]]", "", "rule: `recordCoverage` without `qualityGates` checks nothing"),
    "no logs": ("archiveArtifacts artifacts: 'reports/**'", "echo 'x'", "rule: `archiveArtifacts` publishes the logs of the ranks in `post { always { } }`"),
    "clean-up by name": ("python3 ci/guarded_run.py --end", "pkill -f torch", "rule: `pkill`: only recorded processes are ended, with `ci/guarded_run.py --end`"),
    "no clean-up": ("                    cleanup { sh 'python3 ci/guarded_run.py --end' }\n", "", "rule: `cleanup` ends the recorded ranks with `ci/guarded_run.py --end`"),
    "a failure hidden": ("tox -e ${FRAMEWORK}", "tox -e ${FRAMEWORK} || true", "rule: `sh` runs one command, without '||': what needs more is a script under ci/"),
    "devices that nobody uses": ("sh 'echo ${DEVICES}'", "sh 'npu-smi info'", "rule: a cell uses the devices that it locked: `lock` gives them in its `variable`"),
    "devices that nobody knows": (", variable: 'DEVICES'", "", "rule: a cell uses the devices that it locked: `lock` gives them in its `variable`"),
    "a step without an argument": ("steps { echo 'x' }", "steps { echo }", "`steps` is empty"),
    "a label without a name": ("agent { label 'cpu' }\n            steps", "agent { label }\n            steps", "`agent` is empty"),
    "an agent without anything": ("agent { label 'cpu' }\n            steps", "agent { }\n            steps", "`agent` is empty"),
    "a condition without anything": ("anyOf { branch 'main' }", "anyOf { }", "`anyOf` is empty"),
    "steps on no agent": ("            agent { label 'cpu' }\n            steps", "            steps", "this stage has steps and no agent"),
    "two stages of one name": ("stage('Coverage')", "stage('CPU')", "there is more than one stage 'CPU'"),
    "a stage of no name": ("stage('Coverage')", "stage(' ')", "`stage` needs a name, such as stage('unit')"),
    "an axis without values": ("                        values 'torch', 'mindspore'\n", "", "`axis` needs `values`"),
    "a night of four fields": ("cron('H 2 * * *')", "cron('H 2 * *')", "rule: the run is nightly: `triggers { cron('H 2 * * *') }`, with five fields"),
    "a unit that time does not have": ("unit: 'HOURS'", "unit: 'HOUR'", "rule: write `timeout(time: <number>, unit: 'MINUTES')`"),
    "a limit of no time": ("timeout(time: 9, unit", "timeout(unit", "rule: write `timeout(time: <number>, unit: 'MINUTES')`"),
    "a comma missing in a call": ("time: 9, unit", "time: 9 unit", "not Groovy near ')'"),
    "a comma missing in a list": ("[agent(), ", "[agent() ", "not Groovy near 'agent()'"),
    "a failure caught": ("sh 'echo ${DEVICES}'", "try { sh 'echo ${DEVICES}' } catch (e) { }", "not Groovy near 'pipeline {'"),
    "a failure in a warning": ("steps { echo 'x' }", "steps { warnError('x') { echo 'x' } }", "rule: `warnError` hides a failure"),
    "a status thrown away": ("sh 'echo ${DEVICES}'", "sh(script: 'echo ${DEVICES}', returnStatus: true)", "rule: `returnStatus` hides a failure"),
    "a failure told and forgotten": ("tox -e ${FRAMEWORK}", "tox -e ${FRAMEWORK} || echo failed", "rule: `sh` runs one command, without '||': what needs more is a script under ci/"),
    "a status overwritten": ("tox -e ${FRAMEWORK}", "tox -e ${FRAMEWORK}; exit 0", "rule: `sh` runs one command, without ';': what needs more is a script under ci/"),
    "a status lost in a pipe": ("tox -e ${FRAMEWORK}", "tox -e ${FRAMEWORK} | tee log", "rule: `sh` runs one command, without '|': what needs more is a script under ci/"),
    "a script that tries again": ("sh 'echo ${DEVICES}'", "retry(3) { sh 'echo ${DEVICES}' }", "rule: `retry` is for lost agents: `conditions: [agent(), nonresumable()]`; else failed tests run again"),
    "coverage with no gate": ("qualityGates: [[threshold: 80.0]]", "qualityGates: []", "rule: `recordCoverage` without `qualityGates` checks nothing"),
    "clean-up that ends nothing": ("cleanup { sh 'python3 ci/guarded_run.py --end' }", "cleanup { echo 'x' }", "rule: `cleanup` ends the recorded ranks with `ci/guarded_run.py --end`"),
    "clean-up by a look-up": ("python3 ci/guarded_run.py --end", "kill -9 $(pgrep torch)", "rule: `kill`: only recorded processes are ended, with `ci/guarded_run.py --end`"),
    "devices without a word": ("variable: 'DEVICES')", "variable)", "rule: a cell uses the devices that it locked: `lock` gives them in its `variable`"),
    "an option that nobody has": ("timeout(time: 1, unit: 'HOURS')", "timeout(time: 1, unit: 'HOURS')\nnonsense()", "`nonsense` is not allowed in `options`"),
    "an argument without a value": ("retry(count: 2,", "retry(count: ,", "not Groovy near ':'"),
    "a limit without a unit": ("timeout(time: 9, unit: 'MINUTES')", "timeout(time: 9)", "rule: write `timeout(time: <number>, unit: 'MINUTES')`"),
    "a limit that is a number": ("timeout(time: 9, unit: 'MINUTES')", "timeout(9)", "rule: write `timeout(time: <number>, unit: 'MINUTES')`"),
    "a limit of zero": ("timeout(time: 9,", "timeout(time: 0,", "rule: write `timeout(time: <number>, unit: 'MINUTES')`"),
    "a limit without a unit in a script": ("script { lock", "script { timeout(time: 5) { echo('x') }\nlock", "rule: write `timeout(time: <number>, unit: 'MINUTES')`"),
    "a night without a time": ("cron('H 2 * * *')", "cron(spec: )", "not Groovy near ':'"),
    "a name without a value": ("qualityGates: [[threshold: 80.0]]", "qualityGates: [[threshold: ]]", "not Groovy near ':'"),
    "a value without a name": ("qualityGates: [[threshold: 80.0]]", "qualityGates: [[: 80.0]]", "not Groovy near ':'"),
    "a step whose value has no name": ("junit testResults: ", "junit : ", "rule: `junit` publishes the test results in `post { always { } }`"),
    "an axis that begins with a comma": ("values 'torch', ", "values , ", "not Groovy near 'values ,'"),
    "an axis that ends in a comma": ("'torch', 'mindspore'", "'torch',", "not Groovy near ','"),
    "a comma too many": ("'torch', 'mindspore'", "'torch',, 'mindspore'", "not Groovy near ','"),
    "a comma missing between lists": ("[[threshold: 80.0]]", "[[threshold: 80.0]\n[threshold: 70.0]]", "not Groovy near ': 70.0'"),
    "a comma missing in a script": ("label: 'npu', quantity", "label: 'npu' quantity", "not Groovy near ')'"),
    "test results from nowhere": ("junit testResults: 'reports/*.xml'", "junit()", "`junit` needs an argument"),
    "failed tests that are fine": ("'reports/*.xml'", "'reports/*.xml', skipMarkingBuildUnstable: true", "rule: `skipMarkingBuildUnstable` hides a failure"),
    "a variable without a value": ("stages {\n        stage('CPU')", "environment { A =\n}\nstages {\n        stage('CPU')", "not Groovy near '='"),
    "a variable with a colon": ("stages {\n        stage('CPU')", "environment { A: 'a' }\nstages {\n        stage('CPU')", "not Groovy near ';'"),
    "two stages of one name, one inside": ("stage('unit')", 'stage("Coverage")', "there is more than one stage 'Coverage'"),
    "a condition unknown inside": ("branch 'main'", "not { brunch 'main' }", "`brunch` is not allowed in `not`"),
    "a status lost in a tight pipe": ("tox -e ${FRAMEWORK}", "tox 2>&1|tee log", "rule: `sh` runs one command, without '>&': what needs more is a script under ci/"),
    "a status lost behind quotes": ("tox -e ${FRAMEWORK}", 'tox "-e|x" |& tee log', "rule: `sh` runs one command, without '|&': what needs more is a script under ci/"),
    "a status lost on the next line": ("sh 'echo ${DEVICES}'", "sh '''\necho ${DEVICES}\ntox | tee log\n'''", "rule: `sh` runs one command, without '|': what needs more is a script under ci/"),
    "a failure in a group": ("tox -e ${FRAMEWORK}", "tox || { echo failed; date; }", "rule: `sh` runs one command, without '||': what needs more is a script under ci/"),
    "a check forgotten": ("python3 ci/guarded_run.py --minutes 8 -- tox -e ${FRAMEWORK}", "[ -s log ] || echo empty", "rule: `sh` runs one command, without '||': what needs more is a script under ci/"),
    "a shell that goes on": ("python3 ci/guarded_run.py --minutes 8 -- tox -e ${FRAMEWORK}", "set +e; tox", "rule: `sh` runs one command, without ';': what needs more is a script under ci/"),
    "a command that nobody waits for": ("tox -e ${FRAMEWORK}", "tox &", "rule: `sh` runs one command, without '&': what needs more is a script under ci/"),
    "a command from a variable": ("sh 'echo ${DEVICES}'", 'sh "${DEVICES} x"', "rule: `sh ${DEVICES} x`: the command is written out, only its arguments may be variables"),
    "a guard without a limit": ("--minutes 8 -- tox", "tox", "rule: `guarded_run.py` needs --minutes or --end"),
}  # fmt: skip


def test_the_projects_own_file_holds(checker, capsys):
    """The nightly run's file has valid syntax and sections, and keeps every rule."""
    assert checker.main([str(CI / "Jenkinsfile")]) == 0
    assert "hold" in capsys.readouterr().out


def test_the_good_file_holds(checker):
    """The file that the mistakes below are made in is itself valid."""
    assert checker.problems(GOOD) == []


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_rejected(checker, fault):
    """Each mistake is rejected with its own message."""
    old, new, message = BAD[fault]
    assert GOOD.count(old) == 1
    errors = checker.problems(GOOD.replace(old, new))
    assert any(message in error for error in errors), errors


# old, new: each is the good file written in another valid way.
GOOD_TOO = {
    "quoted signs": ("sh 'echo ${DEVICES}'", "sh 'grep -E \"a | b || true\" ${DEVICES}'"),
    "signs in what is told": ("echo 'x'", "echo 'a | b || true; pkill ; exit 0'"),
    "hours and spans": ("cron('H 2 * * *')", "cron('H(0-29)/10 1-5 1,15 */2 1-5')"),
    "builds that are kept": ("timeout(time: 1, unit: 'HOURS')", "timeout(time: 1, unit: 'HOURS')\nbuildDiscarder(logRotator(numToKeepStr: '30'))"),
    "variables": ("stages {\n        stage('CPU')", "environment {\nA = 'a' +\n'b' + C\nD = credentials('d'); E = \"e\"\n}\nstages {\n        stage('CPU')"),
    "variables of a step": ("steps { echo 'x' }", "steps { withEnv(['A=b', \"PATH+C=${D}\"]) { echo 'x' } }"),
    "test results by their place": ("junit testResults: 'reports/*.xml'", "junit 'reports/*.xml'"),
}  # fmt: skip


@pytest.mark.parametrize("way", GOOD_TOO)
def test_a_good_file_is_not_rejected(checker, way):
    """A valid file that only resembles a mistake passes."""
    old, new = GOOD_TOO[way]
    assert GOOD.count(old) == 1
    assert checker.problems(GOOD.replace(old, new)) == []


def test_exit_statuses(checker, tmp_path, capsys):
    """0 for a good file, 1 for a bad one, 2 for none."""
    path = tmp_path / "Jenkinsfile"
    path.write_text(GOOD.replace("steps {", "stops {"))
    assert checker.main([str(path)]) == 1
    assert checker.main([str(tmp_path / "nothing")]) == 2
    assert checker.main([]) == 2
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert checker.main([str(tmp_path / "bytes")]) == 2
    printed = capsys.readouterr().err
    assert "`stops` is not allowed in `stage`" in printed
    assert f"{tmp_path / 'bytes'}: cannot be read" in printed


def test_groovys_own_compiler_is_asked_where_it_is(checker, tmp_path, monkeypatch, capsys):
    """Its refusal is a mistake of the file; its absence is said, and is none."""
    path = tmp_path / "Jenkinsfile"
    path.write_text(GOOD)
    compiler = tmp_path / "groovyc"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checker.main([str(path)]) == 0
    assert capsys.readouterr().out.endswith("hold; not compiled: groovyc is not on the path (apt install groovy)\n")
    compiler.write_text('#!/bin/sh\n[ "$1" = -d ] && [ "${3##*/}" = Jenkinsfile.groovy ]\n')
    compiler.chmod(0o755)
    assert checker.main([str(path)]) == 0
    assert capsys.readouterr().out.endswith("hold; compiled by groovyc\n")
    compiler.write_text('#!/bin/sh\necho "$3: 4: unexpected token: }" >&2\nexit 1\n')
    assert checker.main([str(path)]) == 1
    assert capsys.readouterr().err == f"{path}: groovyc: line 4: unexpected token: }}\n"


def test_a_compiler_that_does_not_start_says_nothing_of_the_file(checker, tmp_path, monkeypatch, capsys):
    """Without Java the file is not compiled, and the first line says why; JAVA_HOME follows `java` on the path."""
    path = tmp_path / "Jenkinsfile"
    path.write_text(GOOD)
    compiler = tmp_path / "groovyc"
    compiler.write_text('#!/bin/sh\necho "JAVA_HOME is ${JAVA_HOME:-unset}" >&2\necho more >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert checker.main([str(path)]) == 0
    assert capsys.readouterr().out.endswith("hold; not compiled: JAVA_HOME is unset\n")
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("")
    java.chmod(0o755)
    (tmp_path / "java").symlink_to(java)
    assert checker.main([str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"hold; not compiled: JAVA_HOME is {tmp_path / 'jdk'}\n")
    compiler.write_text("#!/bin/sh\nexit 3\n")
    assert checker.main([str(path)]) == 0
    assert capsys.readouterr().out.endswith("hold; not compiled: groovyc ended with status 3\n")


@pytest.mark.untraced
def test_groovy_compiles_the_projects_own_file(checker):
    """Groovy's own compiler accepts the file of the nightly run, and rejects one with a name declared twice."""
    if shutil.which("groovyc") is None:
        skip_without(SkipReason.NO_TOOL, "groovyc is not installed")
    assert checker.compiled((CI / "Jenkinsfile").read_text()) == ("compiled by groovyc", "")
    how, error = checker.compiled("def few = 1\ndef few = 2\n")
    assert how == ""
    assert "line 2: The current scope already contains a variable of the name few" in error
