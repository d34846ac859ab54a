"""``hyper-parallel verify model``: its checks, reports and refusals."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.engine.checks import TensorCheck
from hyper_parallel.verify.model_report import REQUIRED, ModelReport
from hyper_parallel.verify.scenarios import SCENARIOS

USER = Path(__file__).parent.parent / "verify" / "user"


def report_that_held(scenario, *, platform="torch", launch="simulated", **_):
    """Return a report of a run in which everything is equal."""
    checks = [TensorCheck(kind, "a", "a.x", 0, 0, 3, 0.0, 1e-9) for kind in REQUIRED]
    return ModelReport(scenario.name, platform, launch, "tp=2", 1, checks)


@pytest.fixture
def runs(monkeypatch):
    """Replace scenarios by instant ones; the list records which were run."""
    asked = []

    def verify(scenario, **options):
        asked.append((scenario.name, options["platform"], options["launch"]))
        return report_that_held(scenario, **options)

    monkeypatch.setattr("hyper_parallel.verify.model.run.verify_scenario", verify)
    monkeypatch.setattr("hyper_parallel.cli.verify_model.require_framework", lambda _: None)
    monkeypatch.setattr("hyper_parallel.cli.verify_model.installed_frameworks", lambda: ("torch", "mindspore"))
    return asked


def spec(platform_name, name):
    """Return SPEC of a function in the user's file for this framework."""
    return f"{USER / platform_name}_case.py:{name}"


# -- the user's own model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["case", "as_triple", "as_mapping"])
@pytest.mark.parametrize("mesh", ["3", "2x2"])
def test_own_model_and_plan(platform_name, name, mesh, capsys):
    """A user's own model, data and plan are compared on the framework that their file imports."""
    status = main([
        "verify", "model", spec(platform_name, name), "--plan", spec(platform_name, "plan"), "--mesh", mesh,
        "--platform", platform_name, "--steps", "2", "--json",
    ])  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    (run,) = document["runs"]
    assert status == 0, run
    assert run["ok"]
    ranks, steps, modules, parameters = (3 if mesh == "3" else 4), 2, 3, 4
    states = parameters * (3 if name == "as_mapping" else 1)
    assert run["compared"] == {
        "output": ranks * steps * modules, "loss": ranks * steps,
        "gradient": ranks * steps * parameters, "weight": ranks * (1 + steps) * parameters,
        "state": ranks * steps * states, "rate": ranks * steps,
    }  # fmt: skip
    assert {"module": "fc2", "phase": "forward", "collective": "all_reduce", "axes": ["tp"]}.items() <= next(
        item for item in run["collectives"] if item["module"] == "fc2"
    ).items()


def test_the_framework_is_that_of_the_users_file(platform_name, monkeypatch, capsys):
    """Without --platform the framework is the one that the file imports, also if it was imported before."""
    monkeypatch.setattr("hyper_parallel.cli.verify_model.installed_frameworks", lambda: ("torch", "mindspore"))
    words = ["explain", spec(platform_name, "case"), "--plan", spec(platform_name, "plan"), "--mesh", "4", "--json"]
    assert main(words) == 0
    assert f'"{platform_name}"' in capsys.readouterr().out


@pytest.mark.platforms("torch", "mindspore", together=True)
@pytest.mark.parametrize("platform, expected, fix", [
    ("mindspore", "mindspore.nn.Cell", "torch"), ("torch", "torch.nn.Module", "mindspore"),
])  # fmt: skip
def test_a_model_of_the_other_framework_is_one_line(platform, expected, fix, capsys):
    """A model that is not of --platform is refused in one line with the option to give."""
    words = [spec(fix, "case"), "--plan", spec(fix, "plan"), "--mesh", "2", "--platform", platform]
    assert main(["verify", "model", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"hyper-parallel: error: SPEC: the model is of type {fix}_case.py:Net, which is not a {expected}; "
        f"give --platform {fix}\n"
    )


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_a_file_that_imports_no_framework_is_told_so(tmp_path, capsys):
    """With both frameworks installed, a file from which neither can be determined is refused."""
    (tmp_path / "hidden.py").write_text("def case():\n    pass\n\n\nplan = case\n")
    file = tmp_path / "hidden.py"
    assert main(["explain", f"{file}:case", "--plan", f"{file}:plan", "--mesh", "4"]) == 2
    assert f"SPEC '{file}:case': unknown framework; add --platform" in capsys.readouterr().err


def test_own_model_with_a_fault(platform_name, capsys):
    """A fault injected into a module of the user's model is found, and the module and the cause are named."""
    status = main([
        "verify", "model", spec(platform_name, "case"), "--plan", spec(platform_name, "plan"), "--world-size", "3",
        "--platform", platform_name, "--inject", "drop-allreduce@fc2",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 1
    assert "DIVERGED first in module fc2: step 1, output of fc2, rank 0" in out
    assert "\n  cause: missing-reduction over tp: " in out
    assert out.splitlines()[-1].endswith(f"on {platform_name} (simulated): first divergence in fc2")


def test_a_parameter_without_gradient_is_reported(platform_name, capsys):
    """A parameter that the loss does not depend on is listed or compared, never silently left out."""
    status = main([
        "verify", "model", spec(platform_name, "with_unused_layer"), "--plan", spec(platform_name, "plan"),
        "--world-size", "2", "--platform", platform_name, "--json",
    ])  # fmt: skip
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert status == 0, run
    listed = any("spare.weight" in line for line in run["cannot_show"])
    compared = run["compared"]["gradient"] == 2 * 3 * 6
    assert listed or compared


@pytest.mark.parametrize(
    "options, text",
    [
        (["--mesh", "3"], "SPEC needs --plan PLAN, a function that returns the plan of parallelize_module"),
        (["--plan", "PLAN"], "the number of ranks is missing; give --mesh, such as --mesh 2x2, or --world-size"),
        (["--plan", "PLAN", "--mesh", "2x2", "--world-size", "3"], ("--mesh 2x2 has 4 ranks, but --world-size is "
         "3; leave out one of them")),
        (["--plan", "PLAN", "--mesh", "2by2"], "--mesh '2by2' must look like 3, 2x2 or dp=2,tp=3"),
        (["--plan", "PLAN", "--mesh", "0"], "--mesh '0' must look like 3, 2x2 or dp=2,tp=3"),
        (["--plan", "PLAN", "--mesh", "2x2x2"], "--mesh '2x2x2' has 3 axes; name them, such as pp=2,dp=2,tp=2"),
        (
            ["--plan", "PLAN", "--mesh", "3", "--launch", "real"],
            "--launch 'real' is not one of simulated, processes",
        ),
        (
            ["--plan", "PLAN", "--mesh", "3", "--inject", "gremlin"],
            "--inject 'gremlin' is not one of drop-allreduce, wrong-shard-dim, double-bias, unreduced-norm-grad",
        ),
        (
            ["--plan", "PLAN", "--mesh", "3", "--inject", "drop-allreduce"],
            (
                "--inject drop-allreduce: the model has no module 'layers.1.mlp.down'; children of the module: fc1, "
                "fc2; name a module, as in drop-allreduce@PATH"
            ),
        ),
        (
            ["--plan", "PLAN", "--mesh", "3", "--inject", "double-bias@fc3"],
            (
                "--inject double-bias: the model has no module 'fc3'; children of the module: fc1, fc2; name a "
                "module, as in double-bias@PATH"
            ),
        ),
        (
            ["--plan", "NO_PLAN", "--mesh", "3"],
            (
                "PLAN returned an object of type list; it must return a mapping of module patterns to styles, a "
                "function of model and "
                "mesh, or a hyper_parallel.verify.ParallelPlan"
            ),
        ),
        (
            ["--plan", "WRONG_KEY", "--mesh", "3"],
            (
                "the plan does not match the module (1 problem); no parameter was changed:\n  - 'fc3' "
                "(ColwiseParallel) matches no module; children of the module: fc1, fc2"
            ),
        ),
        (["--plan", "PLAN", "--mesh", "3", "--scenario", "3-rms-untied"],
            "--scenario names a bundled model, and SPEC names another model; leave out one of them"),
        (["--plan", "PLAN", "--mesh", "3", "--platform", "jax"], "--platform 'jax' is not one of torch, mindspore"),
    ],
)  # fmt: skip
def test_own_model_mistakes(platform_name, options, text, capsys):
    """Each mistake is one clear error on stderr, exit status 2, and nothing on stdout."""
    functions = {"PLAN": "plan", "NO_PLAN": "no_plan", "WRONG_KEY": "wrong_key"}
    filled = [spec(platform_name, functions[item]) if item in functions else item for item in options]
    if "--platform" not in filled:
        filled += ["--platform", platform_name]
    status = main(["verify", "model", spec(platform_name, "case"), *filled])
    captured = capsys.readouterr()
    assert (status, captured.err, captured.out) == (2, f"hyper-parallel: error: {text}\n", "")


def test_spec_that_makes_no_case(platform_name, capsys):
    """A SPEC that returns another type is an error with the accepted types, as text and as JSON."""
    status = main([
        "verify", "model", spec(platform_name, "nothing"), "--plan", spec(platform_name, "plan"), "--mesh", "3",
        "--platform", platform_name, "--json",
    ])  # fmt: skip
    text = (
        "SPEC returned an object of type int; it must return three items (model, batches, loss), a mapping with these "
        "keys, or a hyper_parallel.verify.ModelCase"
    )
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err == f"hyper-parallel: error: {text}\n"
    assert json.loads(captured.out) == {"ok": False, "error": text}


# -- the bundled scenarios, without running them ----------------------------------------------------------------------


def test_default_runs_every_scenario_on_both(runs, capsys):
    """Without options every bundled scenario runs, simulated, on every installed framework."""
    assert main(["verify", "model"]) == 0
    assert runs == [(item.name, name, "simulated") for name in ("torch", "mindspore") for item in SCENARIOS]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "10 of 10 runs equal to one device (40 tensors compared on all ranks)"


def test_choices(runs, capsys):
    """Scenario, mesh, platform and way of launching narrow and widen what runs."""
    assert main(["verify", "model", "--scenario", "3-layer-tied", "--launch", "simulated,processes"]) == 0
    assert len(runs) == 4
    runs.clear()
    assert main(["verify", "model", "--mesh", "2x2", "--platform", "mindspore"]) == 0
    assert runs == [("2x2-rms-tied", "mindspore", "simulated"), ("2x2-layer-untied", "mindspore", "simulated")]
    runs.clear()
    assert main(["verify", "model", "--world-size", "3", "--platform", "torch"]) == 0
    assert [name for name, _, _ in runs] == ["3-rms-untied", "3-layer-tied", "3-tutorial"]
    capsys.readouterr()


@pytest.mark.parametrize(
    "options, text",
    [
        (["--mesh", "5"], "no bundled model has the mesh 5; the bundled models have the meshes 2x2, 3"),
        (["--scenario", "4d"],
            f"scenario '4d' does not exist; scenarios: {', '.join(item.name for item in SCENARIOS)}"),
        (["--plan", "a:b"], ("--plan needs SPEC, which gives the model of the plan; the bundled models have "
         "plans of their own")),
    ],
)  # fmt: skip
def test_embedded_mistakes(runs, options, text, capsys):
    """Options that fit no bundled scenario are refused, and the existing ones are listed."""
    assert main(["verify", "model", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"hyper-parallel: error: {text}\n"
    assert not runs


def test_no_framework(monkeypatch, capsys):
    """Without a framework the command fails instead of verifying nothing."""
    monkeypatch.setattr("hyper_parallel.cli.verify_model.installed_frameworks", lambda: ())
    assert main(["verify", "model"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: neither PyTorch nor MindSpore is installed; hyper-parallel doctor says what to do\n"
    )


def test_one_bad_run_fails_the_command(runs, monkeypatch, capsys):
    """One run that compared nothing fails the whole command, and is named."""

    def verify(scenario, **options):
        if scenario.name == "3-layer-tied":
            return ModelReport(scenario.name, options["platform"], "simulated", "tp=3", 1)
        return report_that_held(scenario, **options)

    monkeypatch.setattr("hyper_parallel.verify.model.run.verify_scenario", verify)
    assert main(["verify", "model", "--platform", "torch"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED 3-layer-tied on torch (simulated)" in lines
    assert any("NOT VERIFIED: nothing compared" in line for line in lines)


@pytest.mark.parametrize("name", ["report.txt", "report.json"])
def test_report_file(runs, name, tmp_path, capsys):
    """--report writes the whole report, as text or as JSON by the file's name."""
    path = tmp_path / name
    assert main(["verify", "model", "--platform", "torch", "--report", str(path)]) == 0
    text = path.read_text()
    if name.endswith("json"):
        assert [run["name"] for run in json.loads(text)["runs"]] == [item.name for item in SCENARIOS]
    else:
        assert all(item.name in text for item in SCENARIOS)
        assert text.splitlines()[-1] == "5 of 5 runs equal to one device (20 tensors compared on all ranks)"
    capsys.readouterr()


@pytest.mark.parametrize("option", ["--report", "--html"])
def test_report_that_cannot_be_written(runs, option, tmp_path, capsys):
    """A report that cannot be written is an error before anything runs; missing folders are created."""
    (tmp_path / "file").write_text("")
    for path, problem in ((tmp_path / "file" / "report", "its folder is a file"), (tmp_path, "it is a folder")):
        assert main(["verify", "model", "--platform", "torch", option, str(path)]) == 2
        assert capsys.readouterr().err == f"hyper-parallel: error: {option} {path} cannot be written: {problem}\n"
    assert not runs
    assert main(["verify", "model", "--platform", "torch", option, str(tmp_path / "new" / "report")]) == 0
    assert (tmp_path / "new" / "report").read_text()


def test_html_page(runs, tmp_path, capsys):
    """--html writes one page over all runs, also when the command is interrupted."""
    path = tmp_path / "model.html"
    assert main(["verify", "model", "--platform", "torch", "--html", str(path)]) == 0
    page = path.read_text()
    assert "5 of 5 runs equal to one device" in page
    assert all(item.name in page for item in SCENARIOS)


@pytest.mark.parametrize("as_json", [True, False])
def test_interrupt_leaves_a_partial_report(runs, monkeypatch, as_json, tmp_path, capsys):
    """Ctrl-C gives status 130, one line with how much was verified, and a report that is not ok."""

    def verify(scenario, **options):
        if scenario is not SCENARIOS[0] and scenario.name != SCENARIOS[0].name:
            raise KeyboardInterrupt
        return report_that_held(scenario, **options)

    monkeypatch.setattr("hyper_parallel.verify.model.run.verify_scenario", verify)
    path = tmp_path / "report.json"
    options = ["--json"] if as_json else []
    assert main(["verify", "model", "--platform", "torch", "--report", str(path), *options]) == 130
    line = "partial report: 1 of 5 runs finished, 1 passed; the rest was not verified"
    captured = capsys.readouterr()
    assert captured.err == f"hyper-parallel: interrupted: {line}\n"
    if as_json:
        assert json.loads(captured.out) == {"ok": False, "interrupted": line}
    document = json.loads(path.read_text())
    assert (document["ok"], document["interrupted"], len(document["runs"])) == (False, line, 1)


ENDLESS = """
import os

from {file} import *


def endless():
    started = []

    def counted(output, batch):
        if not started:
            started.append(os.write(2, b"training\\n"))
        return loss(output, batch)

    return Net, batches(), counted
"""


@pytest.mark.platforms("torch")
def test_interrupt_of_a_real_run(tmp_path, interruptible):
    """SIGINT in the middle of training ends the command soon, with status 130 and one line."""
    (tmp_path / "torch_case.py").write_text((USER / "torch_case.py").read_text())
    (tmp_path / "endless_case.py").write_text(ENDLESS.format(file="torch_case"))
    command = [sys.executable, "-m", "hyper_parallel", "verify", "model", "endless_case:endless",
               "--plan", "endless_case:plan", "--mesh", "3", "--platform", "torch", "--steps", "1000000"]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, env=interruptible, stderr=subprocess.PIPE, text=True)
    while process.stderr.readline() not in ("training\n", ""):
        pass
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 130
    assert error.replace("training\n", "") == (
        "hyper-parallel: interrupted: partial report: 0 of 1 runs finished, 0 passed; the rest was not verified\n"
    )


@pytest.mark.platforms("torch")
def test_a_device_is_handed_on(runs, monkeypatch):
    """``--device`` reaches the run; without it the run is on cpu."""
    asked = []

    def verify(scenario, **options):
        asked.append(options.get("device"))
        return report_that_held(scenario, **options)

    from hyper_parallel.platform.select import platform_named

    monkeypatch.setattr("hyper_parallel.verify.model.run.verify_scenario", verify)
    monkeypatch.setattr(type(platform_named("torch")), "device_type", lambda _: "npu")
    command = ["verify", "model", "--platform", "torch", "--scenario", "3-rms-untied"]
    assert main([*command, "--device", "npu"]) == main(command) == 0
    assert asked == ["npu", "cpu"]
    assert runs == []


@pytest.mark.parametrize(
    "command",
    [("model", "--scenario", "3-rms-untied"), ("ops",), ("ops", str(__file__)), ("redistribute",)],
)
@pytest.mark.platforms("torch")
def test_a_device_that_is_not_there_has_exit_status_2(command, capsys, monkeypatch):
    """A device that the framework does not see is bad input: one line."""
    from hyper_parallel.platform.select import platform_named

    monkeypatch.setattr(type(platform_named("torch")), "device_type", lambda _: "cpu")
    assert main(["verify", *command, "--platform", "torch", "--device", "npu"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hyper-parallel: error: --device npu: torch sees no such device here, only cpu; torch")


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize("command", [("model",), ("ops",), ("redistribute",)])
def test_a_build_of_mindspore_without_devices_has_exit_status_2(command, capsys, monkeypatch):
    """What was found of MindSpore and what to install: said before anything runs, in one line."""
    found = "MindSpore 2.10.0 is the CPU build: install another"
    monkeypatch.setattr("hyper_parallel.verify.frameworks.mindspore.harness.missing_ascend", lambda: found)
    assert main(["verify", *command, "--platform", "mindspore", "--device", "npu"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: --device npu: mindspore sees no such device here, only cpu; MindSpore 2.10.0 is the "
        "CPU build: install another, or use --device cpu\n"
    )


@pytest.mark.platforms("mindspore")
def test_more_ranks_of_mindspore_than_devices_have_exit_status_2(capsys, monkeypatch):
    """A device takes one real rank; simulated ranks share a device, and need one."""
    from hyper_parallel.platform.select import platform_named
    from hyper_parallel.transport.real.mindspore import devices as mindspore_devices

    monkeypatch.setattr(type(platform_named("mindspore")), "device_type", lambda _: "npu")
    monkeypatch.setattr("hyper_parallel.verify.frameworks.mindspore.harness.exact_products", lambda: None)
    words = ["verify", "model", "--platform", "mindspore", "--device", "npu"]
    for launch, devices, says in (
        ("processes", 1, "3 ranks of MindSpore need"),
        ("simulated", 0, "MindSpore sees no"),
    ):
        monkeypatch.setattr(mindspore_devices.ascend, "device_count", lambda devices=devices: devices)
        assert main([*words, "--launch", launch]) == 2
        assert capsys.readouterr().err.startswith(f"hyper-parallel: error: --device npu: {says}")
