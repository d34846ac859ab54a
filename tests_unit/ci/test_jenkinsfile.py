"""`ci/Jenkinsfile` holds against the table of sections and the project's own rules, and the checker fires."""

from pathlib import Path

import pytest

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
                            script { lock(label: 'npu', quantity: 2, variable: 'CARDS') { sh 'echo ${CARDS}' } }
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
    "a section mistyped": ("    stages {\n        stage('CPU')", "    stags {\n        stage('CPU')", "`stags` is not allowed"),
    "a brace missing": ("agent none", "agent none {", "is never closed"),
    "a brace too many": ("agent none", "agent none }", "closes nothing"),
    "a string without end": ("'H 2 * * *'", "'H 2 * * *", "cannot read"),
    "a bracket closed by another": ("[agent(), nonresumable()]", "[agent(), nonresumable())", "closes nothing"),
    "no agent": ("    agent none\n", "", "`pipeline` needs `agent`"),
    "an agent that is a word": ("agent none", "agent cpu", "`agent` is `any`, `none` or a block"),
    "a scripted file": ("pipeline {", "node {", "one `pipeline { }` block and nothing else"),
    "something beside the pipeline": ("pipeline {", "def x = 1\npipeline {", "and nothing else"),
    "two triggers": ("    agent none\n", "    agent none\n    triggers { cron('x') }\n", "`triggers` stands more than once"),
    "a stage without a name": ("stage('unit')", "stage()", "`stage` needs a name"),
    "a stage with two bodies": ("steps { echo 'x' }", "steps { echo 'x' }\nstages { stage('y') { steps { echo 'y' } } }",
                                "this one has steps and stages"),
    "a stage without a body": ("steps { echo 'x' }", "", "this one has none"),
    "steps without a step": ("steps { echo 'x' }", "steps { }", "`steps` needs something in it"),
    "a step that no plugin has": ("checkout scm", "checkuot scm", "`checkuot` is not allowed in `steps`"),
    "a condition that post does not know": ("cleanup {", "finally {", "`finally` is not allowed in `post`"),
    "a matrix without axes": ("axes {\n                    axis {", "excludes {\n                    exclude {",
                              "`matrix` needs `axes`"),
    "an axis without a name": ("                        name 'FRAMEWORK'\n", "", "`axis` needs `name`"),
    "an option that no stage has": ("timeout(time: 9, unit: 'MINUTES')", "buildDiscarder(x)",
                                    "`buildDiscarder` is not allowed in `options`"),
    "an option that is no call": ("timeout(time: 1, unit: 'HOURS')", "timeout 1", "write `timeout(...)`"),
    "a condition that when does not know": ("branch 'main'", "branches 'main'", "`branches` is not allowed in `when`"),
    "not nightly": ("cron('H 2 * * *')", "pollSCM('x')", "rule: the run is nightly"),
    "no end": ("timeout(time: 1, unit: 'HOURS')", "timestamps()", "rule: the whole run has an end"),
    "a cell without end": ("                    timeout(time: 9, unit: 'MINUTES')\n", "", "each cell of a matrix has its own"),
    "failed tests run again": (", conditions: [agent(), nonresumable()]", "", "runs failed tests again until they pass"),
    "failed scripts run again": ("nonresumable()", "always()", "rule: `retry` on `always`"),
    "no test results": ("junit testResults: 'reports/*.xml'", "echo 'x'", "rule: `junit` publishes test results"),
    "no tests are fine": ("'reports/*.xml'", "'reports/*.xml', allowEmptyResults: true", "makes a run without tests green"),
    "no HTML": ("publishHTML(target: [reportDir: 'coverage_reports'])", "", "rule: `publishHTML` publishes"),
    "coverage without gates": (", qualityGates: [[threshold: 80.0]]", "", "without `qualityGates` checks nothing"),
    "no logs": ("archiveArtifacts artifacts: 'reports/**'", "echo 'x'", "rule: `archiveArtifacts` publishes the logs"),
    "clean-up by name": ("python3 ci/guarded_run.py --end", "pkill -f torch", "end recorded processes"),
    "no clean-up": ("                    cleanup { sh 'python3 ci/guarded_run.py --end' }\n", "", "ends its ranks in `cleanup`"),
    "a failure hidden": ("tox -e ${FRAMEWORK}", "tox -e ${FRAMEWORK} || true", "`|| true` hides a failure"),
    "cards that nobody uses": ("sh 'echo ${CARDS}'", "sh 'npu-smi info'", "what `lock` gave is in its `variable`"),
    "cards that nobody knows": (", variable: 'CARDS'", "", "what `lock` gave is in its `variable`"),
    "a step without an argument": ("steps { echo 'x' }", "steps { echo }", "`echo` in `steps` needs an argument"),
    "a label without a name": ("agent { label 'cpu' }\n            steps", "agent { label }\n            steps",
                               "`label` in `agent` needs an argument"),
    "an agent without anything": ("agent { label 'cpu' }\n            steps", "agent { }\n            steps",
                                  "`agent` needs something in it"),
    "a condition without anything": ("anyOf { branch 'main' }", "anyOf { }", "`when` needs something in it"),
    "steps on no agent": ("            agent { label 'cpu' }\n            steps", "            steps",
                          "this stage has steps and no agent"),
    "two stages of one name": ("stage('Coverage')", "stage('CPU')", "there is more than one stage 'CPU'"),
    "a stage of no name": ("stage('Coverage')", "stage(' ')", "`stage` needs a name"),
    "an axis without values": ("                        values 'torch', 'mindspore'\n", "",
                               "`axis` needs `values` or `notValues`"),
    "a night of four fields": ("cron('H 2 * * *')", "cron('H 2 * *')", "`cron`: it takes one string of 5 fields"),
    "a unit that time does not have": ("unit: 'HOURS'", "unit: 'HOUR'", "write `timeout(time: <number>, unit: "),
    "a limit of no time": ("timeout(time: 9, unit", "timeout(unit", "write `timeout(time: <number>, unit: "),
    "a comma missing in a call": ("time: 9, unit", "time: 9 unit", "between 9 and unit a comma is missing"),
    "a comma missing in a list": ("[agent(), ", "[agent() ", "between ) and nonresumable a comma is missing"),
    "two steps on a line": ("steps { echo 'x' }", "steps { echo 'x' echo 'y' }", "between 'x' and echo a comma or"),
    "a failure caught": ("sh 'echo ${CARDS}'", "try { sh 'echo ${CARDS}' } catch (e) { }", "rule: `catch` hides a failure"),
    "a failure in a warning": ("steps { echo 'x' }", "steps { warnError('x') { echo 'x' } }",
                               "rule: `warnError` hides a failure"),
    "a status thrown away": ("sh 'echo ${CARDS}'", "sh(script: 'echo ${CARDS}', returnStatus: true)",
                             "rule: `returnStatus` hides a failure"),
    "a failure told and forgotten": ("tox -e ${FRAMEWORK}", "tox -e ${FRAMEWORK} || echo failed",
                                     "rule: `|| echo failed` hides a failure"),
    "a status overwritten": ("tox -e ${FRAMEWORK}", "tox -e ${FRAMEWORK}; exit 0", "rule: `; exit 0` hides a failure"),
    "a status lost in a pipe": ("tox -e ${FRAMEWORK}", "tox -e ${FRAMEWORK} | tee log", "rule: `| tee log` hides a failure"),
    "a script that tries again": ("sh 'echo ${CARDS}'", "retry(3) { sh 'echo ${CARDS}' }",
                                  "`retry` stands in a stage's options, not in a script"),
    "coverage with no gate": ("qualityGates: [[threshold: 80.0]]", "qualityGates: []",
                              "without `qualityGates` checks nothing"),
    "clean-up that ends nothing": ("cleanup { sh 'python3 ci/guarded_run.py --end' }", "cleanup { echo 'x' }",
                                   "rule: `cleanup` ends recorded processes"),
    "clean-up by a look-up": ("python3 ci/guarded_run.py --end", "kill -9 $(pgrep torch)", "end recorded processes"),
    "cards without a word": ("variable: 'CARDS')", "variable)", "what `lock` gave is in its `variable`"),
    "an option that nobody has": ("timeout(time: 1, unit: 'HOURS')", "timeout(time: 1, unit: 'HOURS')\nnonsense()",
                                  "`nonsense` is not allowed in `pipeline options`"),
    "builds kept by nonsense": ("timeout(time: 1, unit: 'HOURS')",
                                "timeout(time: 1, unit: 'HOURS')\nbuildDiscarder(logRotator(nonsense: 3))",
                                "`logRotator` does not take `nonsense`; it takes numToKeepStr, "),
    "builds kept by nothing": ("timeout(time: 1, unit: 'HOURS')",
                               "timeout(time: 1, unit: 'HOURS')\nbuildDiscarder(logRotator())",
                               "`logRotator` takes values with their names, one at least"),
    "builds kept by another": ("timeout(time: 1, unit: 'HOURS')",
                               "timeout(time: 1, unit: 'HOURS')\nbuildDiscarder('30')",
                               "write `buildDiscarder(logRotator(numToKeepStr: "),
    "builds kept in no string": ("timeout(time: 1, unit: 'HOURS')",
                                 "timeout(time: 1, unit: 'HOURS')\nbuildDiscarder(logRotator(numToKeepStr: 3))",
                                 "`numToKeepStr` is a number in a string, not 3"),
    "builds kept twice": ("options { timeout(time: 1",
                          "options { buildDiscarder(logRotator(numToKeepStr: '3', numToKeepStr: '4'))\ntimeout(time: 1",
                          "`logRotator` is given `numToKeepStr` twice"),
    "an argument that an option does not have": ("time: 1, unit: 'HOURS'", "time: 1, unit: 'HOURS', units: 'x'",
                                                 "`timeout` does not take `units`; it takes time, unit, activity"),
    "an option with a value too many": ("options { timeout", "options { timestamps(true)\ntimeout",
                                        "`timestamps` takes nothing without a name, not 1"),
    "an argument given twice": ("retry(count: 2,", "retry(count: 2, count: 3,", "`retry` is given `count` twice"),
    "an argument without a value": ("retry(count: 2,", "retry(count: ,", "`retry`: `count` has no value"),
    "a count in words": ("retry(count: 2,", "retry(count: 'two',", "`retry`: `count` is a number, not 'two'"),
    "a choice in quotes": ("'reports/*.xml'", "'reports/*.xml', keepLongStdio: 'true'",
                           "`junit`: `keepLongStdio` is a boolean, not 'true'"),
    "a limit without a unit": ("timeout(time: 9, unit: 'MINUTES')", "timeout(time: 9)", "write `timeout(time: <number>, "),
    "a limit that is a number": ("timeout(time: 9, unit: 'MINUTES')", "timeout(9)", "write `timeout(time: <number>, "),
    "a limit of zero": ("timeout(time: 9,", "timeout(time: 0,", "write `timeout(time: <number>, "),
    "a limit without a unit in a script": ("script { lock", "script { timeout(time: 5) { echo('x') }\nlock",
                                           "write `timeout(time: <number>, "),
    "a night without a time": ("cron('H 2 * * *')", "cron(spec: )", "`cron`: `spec` has no value"),
    "a name without a value": ("qualityGates: [[threshold: 80.0]]", "qualityGates: [[threshold: ]]",
                               "':' stands between no two values"),
    "a value without a name": ("qualityGates: [[threshold: 80.0]]", "qualityGates: [[: 80.0]]",
                               "':' stands between no two values"),
    "a step whose value has no name": ("junit testResults: ", "junit : ", "':' stands between no two values"),
    "an axis that begins with a comma": ("values 'torch', ", "values , ", "',' stands between no two values"),
    "an axis that ends in a comma": ("'torch', 'mindspore'", "'torch',", "',' stands between no two values"),
    "a comma too many": ("'torch', 'mindspore'", "'torch',, 'mindspore'", "',' stands between no two values"),
    "a comma missing between lists": ("[[threshold: 80.0]]", "[[threshold: 80.0]\n[threshold: 70.0]]",
                                      "between ] and [ a comma is missing"),
    "a comma missing in a script": ("label: 'npu', quantity", "label: 'npu' quantity",
                                    "between 'npu' and quantity a comma is missing"),
    "an argument with and without its name": ("retry(count: 2,", "retry(2, count: 2,", "`retry` is given `count` twice"),
    "minute 99": ("cron('H 2 * * *')", "cron('99 2 * * *')", "`cron`: '99' is no minute: write 0 to 59, *, H, "),
    "hour 24": ("cron('H 2 * * *')", "cron('H 24 * * *')", "`cron`: '24' is no hour: write 0 to 23"),
    "day 0": ("cron('H 2 * * *')", "cron('H 2 0 * *')", "`cron`: '0' is no day: write 1 to 31"),
    "month 13": ("cron('H 2 * * *')", "cron('H 2 * 1,13 *')", "`cron`: '13' is no month: write 1 to 12"),
    "weekday 8": ("cron('H 2 * * *')", "cron('H 2 * * 1-8')", "`cron`: '1-8' is no weekday: write 0 to 7"),
    "a span backwards": ("cron('H 2 * * *')", "cron('H(30-10) 2 * * *')", "`cron`: 'H(30-10)' is no minute"),
    "a step that is none": ("cron('H 2 * * *')", "cron('H/0 2 * * *')", "`cron`: 'H/0' is no minute"),
    "a step too long": ("cron('H 2 * * *')", "cron('H H/30 * * *')", "`cron`: 'H/30' is no hour"),
    "a time in words": ("cron('H 2 * * *')", "cron('H noon * * *')", "`cron`: 'noon' is no hour"),
    "test results from nowhere": ("junit testResults: 'reports/*.xml'", "junit()", "`junit` needs `testResults`"),
    "test results of a mistyped name": ("junit testResults:", "junit testResult:", "`junit` does not take `testResult`"),
    "failed tests that are fine": ("'reports/*.xml'", "'reports/*.xml', skipMarkingBuildUnstable: true",
                                   "rule: `skipMarkingBuildUnstable: true` hides a failure"),
    "a lock on nothing": ("label: 'npu', quantity", "quantity", "`lock` needs `resource` or `label`"),
    "an empty environment": ("stages {\n        stage('CPU')", "environment { }\nstages {\n        stage('CPU')",
                             "`environment` is empty"),
    "a variable without a value": ("stages {\n        stage('CPU')", "environment { A =\n}\nstages {\n        stage('CPU')",
                                   "`environment`: A is a string, strings added up, or a call, not nothing"),
    "a variable that is a number": ("stages {\n        stage('CPU')",
                                    "environment { A = 'a'; B = 3 }\nstages {\n        stage('CPU')",
                                    "`environment`: B is a string, strings added up, or a call, not 3"),
    "a variable with a colon": ("stages {\n        stage('CPU')",
                                "environment { A: 'a' }\nstages {\n        stage('CPU')",
                                "`environment` takes lines such as NAME = 'value', not A : 'a'"),
    "a variable of no name": ("stages {\n        stage('CPU')",
                              "environment { a.b = 'a' }\nstages {\n        stage('CPU')",
                              "`environment` takes lines such as NAME = 'value', not a.b = 'a'"),
    "a variable set twice": ("stages {\n        stage('CPU')",
                             "environment {\nA = 'a'\nA = 'b'\n}\nstages {\n        stage('CPU')",
                             "`environment` sets A more than once"),
    "variables that are no list": ("steps { echo 'x' }", "steps { withEnv('A=b') { echo 'x' } }",
                                   "`withEnv`: it takes a list of strings such as 'NAME=value'"),
    "variables without a sign": ("steps { echo 'x' }", "steps { withEnv(['A=b', 'C']) { echo 'x' } }",
                                 "`withEnv`: it takes a list of strings such as 'NAME=value', not 'C'"),
    "no variables": ("steps { echo 'x' }", "steps { withEnv([]) { echo 'x' } }", "and is given none"),
    "variables of a script": ("sh 'echo ${CARDS}'", "withEnv(['=b']) { sh 'echo ${CARDS}' }",
                              "`withEnv`: it takes a list of strings such as 'NAME=value', not '=b'"),
    "two axes of one name": ("axes {", "axes {\naxis {\nname 'FRAMEWORK'\nvalues 'x'\n}",
                             "there is more than one axis 'FRAMEWORK'"),
    "cells of no axis left out": ("                options {\n                    retry",
                                  "excludes { exclude { axis {\nname 'CARDS'\nvalues '8'\n} } }\noptions {\nretry",
                                  "`excludes` names 'CARDS', which is no axis of the matrix"),
    "two stages of one name, one inside": ("stage('unit')", 'stage("Coverage")', "there is more than one stage 'Coverage'"),
    "a condition about nothing": ("anyOf { branch 'main' }", "beforeAgent true", "`when` needs a condition"),
    "a condition in quotes": ("anyOf { branch 'main' }", "expression 'true'", "`expression` in `when` needs a block"),
    "a condition unknown inside": ("branch 'main'", "not { brunch 'main' }", "`brunch` is not allowed in `when`"),
    "a status lost in a tight pipe": ("tox -e ${FRAMEWORK}", "tox 2>&1|tee log", "rule: `| tee log` hides a failure"),
    "a status lost behind quotes": ("tox -e ${FRAMEWORK}", 'tox "-e|x" |& tee log', "rule: `|& tee log` hides a failure"),
    "a status lost on the next line": ("sh 'echo ${CARDS}'", "sh '''\necho ${CARDS}\ntox | tee log\n'''",
                                       "rule: `| tee log` hides a failure"),
    "a failure in a group": ("tox -e ${FRAMEWORK}", "tox || { echo failed; date; }", "rule: `|| { echo failed` hides a failure"),
    "a check forgotten": (GUARDED, "[ -s log ] || echo empty", "rule: `|| echo empty` hides a failure"),
    "a shell that goes on": (GUARDED, "set +e; tox", "rule: `set +e` hides a failure"),
    "a command that nobody waits for": ("tox -e ${FRAMEWORK}", "tox &", "-- tox &` hides a failure"),
    "a command from elsewhere": ("sh 'echo ${CARDS}'", "sh(script: CARDS)", "rule: `sh` is told what to run in a string"),
    "a command from a variable": ("sh 'echo ${CARDS}'", 'sh "${CARDS} x"', "rule: `sh` is told what to run in a string"),
    "a guard without a limit": ("--minutes 8 -- tox", "tox", "needs --minutes or --end"),
}  # fmt: skip


def test_the_projects_own_file_holds(checker, capsys):
    """The nightly run has every section and keeps every rule."""
    assert checker.main([str(CI / "Jenkinsfile")]) == 0
    assert "hold" in capsys.readouterr().out


def test_the_good_file_holds(checker):
    """The file that the faults below are injected into is itself right."""
    assert checker.problems(GOOD) == []


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_rejected(checker, fault):
    """Each single fault is found, by its line and in words."""
    old, new, message = BAD[fault]
    assert GOOD.count(old) == 1
    found = checker.problems(GOOD.replace(old, new))
    assert any(message in one for one in found), found


# old, new: each is the good file written in another way that is good as well.
GOOD_TOO = {
    "quoted signs": ("sh 'echo ${CARDS}'", """sh 'grep -E "a | b || true" ${CARDS}'"""),
    "escaped quotes": ("sh 'echo ${CARDS}'", r"sh 'echo \'a | b\' ${CARDS}'"),
    "signs in a comment": ("sh 'echo ${CARDS}'", "sh '''\necho ${CARDS} # a | b\n'''"),
    "signs in what is told": ("echo 'x'", "echo 'a | b || true; pkill ; exit 0'"),
    "a pipe that fails": ("tox -e ${FRAMEWORK}", "bash -c x; set -o pipefail; tox | tee log"),
    "text into a command": (GUARDED, "printf yes | tox"),
    "a failure that is told": ("tox -e ${FRAMEWORK}", "tox || { echo failed; exit 1; }"),
    "a failure that is kept": ("tox -e ${FRAMEWORK}", "tox || exit 3"),
    "what is not there is made": (GUARDED, "[ -d log ] || mkdir log"),
    "errors beside output": ("tox -e ${FRAMEWORK}", "tox > log 2>&1 && tox &> log"),
    "hours and spans": ("cron('H 2 * * *')", "cron('H(0-29)/10 1-5 1,15 */2 1-5')"),
    "builds that are kept": ("timeout(time: 1, unit: 'HOURS')",
                             "timeout(time: 1, unit: 'HOURS')\nbuildDiscarder(logRotator(numToKeepStr: '30'))"),
    "a choice, an empty map and a cast": (
        "script { lock", "script { def a = b ? c : d; def e = [:]; def f = g ?: h; i(j as K, l instanceof M)\nlock"),
    "variables": ("stages {\n        stage('CPU')",
                  "environment {\nA = 'a' +\n'b' + C\nD = credentials('d'); E = \"e\"\n}\nstages {\n        stage('CPU')"),
    "variables of a step": ("steps { echo 'x' }", "steps { withEnv(['A=b', \"PATH+C=${D}\"]) { echo 'x' } }"),
    "test results by their place": ("junit testResults: 'reports/*.xml'", "junit 'reports/*.xml'"),
}  # fmt: skip


@pytest.mark.parametrize("way", GOOD_TOO)
def test_a_good_file_is_not_rejected(checker, way):
    """What only looks like a fault is none."""
    old, new = GOOD_TOO[way]
    assert GOOD.count(old) == 1
    assert checker.problems(GOOD.replace(old, new)) == []


def test_there_are_enough_bad_files():
    """At least twenty bad files are rejected."""
    assert len(BAD) >= 20


def test_exit_statuses(checker, tmp_path, capsys):
    """0 for a good file, 1 for a bad one, 2 for none."""
    path = tmp_path / "Jenkinsfile"
    path.write_text(GOOD.replace("steps {", "stops {"))
    assert checker.main([str(path)]) == 1
    assert checker.main([str(tmp_path / "nothing")]) == 2
    assert checker.main([]) == 2
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert checker.main([str(tmp_path / "bytes")]) == 2
    told = capsys.readouterr().err
    assert "`stops` is not allowed in `stage`" in told
    assert f"{tmp_path / 'bytes'}: is no UTF-8 text" in told
