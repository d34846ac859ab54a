"""`ci/bootstrap.py`: the first command that a user runs sets itself up, or names what is missing."""

import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path, monkeypatch, script):
    """Return the script as a module that works in a temporary folder and calls no tool."""
    module = script("bootstrap")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "HOME", tmp_path / ".venv")
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))  # on a newer Python the script replaces its process
    (tmp_path / "pyproject.toml").write_text("one")
    return module


@pytest.fixture
def calls(bootstrap, monkeypatch):
    """What would have been created and installed, in order; creation leaves the folder behind, as in reality."""
    done = []

    def create(env):
        done.append("venv")
        (env / "bin").mkdir(parents=True, exist_ok=True)
        return True

    monkeypatch.setattr(bootstrap, "create_with_venv", create)
    monkeypatch.setattr(bootstrap, "run_pip", lambda _python, *args, **_wheels: done.append(args[0]))
    monkeypatch.setattr(bootstrap, "works", lambda env: (env / "bin").exists())
    monkeypatch.setattr(bootstrap, "resolved", lambda _python, *_options: [])
    return done


def test_the_second_run_installs_nothing(bootstrap, calls):
    """A second run installs nothing."""
    bootstrap.ensure("run")
    bootstrap.ensure("run")
    assert calls == ["venv", "install"]


def test_changed_requirements_are_installed_into_the_same_environment(bootstrap, calls, tmp_path):
    """When the requirements change, pip runs again; the environment is kept."""
    bootstrap.ensure("run")
    (tmp_path / "pyproject.toml").write_text("two")
    bootstrap.ensure("run")
    assert calls == ["venv", "install", "install"]


def test_an_interrupted_install_is_taken_up_again(bootstrap, calls, monkeypatch):
    """The stamp is written last: an interrupted installation is repeated."""

    def fails(*_args, **_wheels):
        raise bootstrap.SetupError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "run_pip", fails)
        with pytest.raises(bootstrap.SetupError, match="no network"):
            bootstrap.ensure("run")
    bootstrap.ensure("run")
    assert calls == ["venv", "install"]


@pytest.mark.parametrize(
    "version, args",
    [((3, 8), ["verify", "model"]), ((3, 9), ["verify", "model"]), ((3, 13), ["test"]), ((3, 14), ["test"])],
)
def test_a_python_without_wheels_says_which_is_needed(bootstrap, monkeypatch, capsys, version, args):
    """Before Python 3.10, and for the tests after 3.12, the message names the versions, and the exit status is 1."""
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    monkeypatch.setattr(bootstrap, "other_python", lambda: None)
    assert bootstrap.main(args) == 1
    assert "no Python 3.10, 3.11 or 3.12" in capsys.readouterr().err


@pytest.mark.parametrize("version", [(3, 13), (3, 14)])
def test_a_python_without_wheels_of_mindspore_runs_the_half_of_pytorch(bootstrap, calls, monkeypatch, capsys, version):
    """After Python 3.12, a command gets an environment with PyTorch alone, and a line says why."""
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    monkeypatch.setattr(bootstrap, "other_python", lambda: None)
    scripts, wheels = bootstrap.ensure("run")
    assert (scripts, wheels, calls) == (bootstrap.HOME / "torch" / "bin", {}, ["venv", "install"])
    assert "MindSpore has wheels for 3.10 to 3.12 only: PyTorch's half runs" in capsys.readouterr().err
    assert bootstrap.ensure("run")[0] == scripts
    assert calls == ["venv", "install"]


def package(name, size, requires=()):
    """One package of pip's report."""
    return {"metadata": {"name": name, "requires_dist": list(requires)}, "download_info": {"url": f"{name}:{size}"}}


@pytest.mark.parametrize("size, words", [(3_400_000_000, " of 3.5 GB"), (0, ", several GB")])
def test_libraries_for_accelerators_are_not_fetched_unasked(bootstrap, calls, monkeypatch, size, words):
    """Where PyTorch's wheel asks for them, nothing is installed, and the message says their size and what to do."""
    torch = package("torch", 1, ["sympy", "nvidia-cublas==13.1; platform_system == 'Linux'", "triton==3.7"])
    rest = [package("sympy", 9e12), package("nvidia-cublas", size), package("triton", size / 34)]
    monkeypatch.setattr(
        bootstrap, "resolved", lambda _python, *options: [torch] if "--no-deps" in options else [torch, *rest]
    )
    monkeypatch.setattr(bootstrap, "size_of", lambda url: int(float(url.partition(":")[2])))
    monkeypatch.delenv("HP_ACCELERATOR", raising=False)
    with pytest.raises(bootstrap.SetupError) as raised:
        bootstrap.ensure("run")
    assert str(raised.value) == (
        f"PyTorch's wheel on the package index is the build for accelerators: it brings 2 packages{words}, which "
        "verification on a CPU does not need. Take PyTorch's CPU build: "
        "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; or fetch them with HP_ACCELERATOR=1"
    )
    assert calls == ["venv"]
    monkeypatch.setenv("HP_ACCELERATOR", "1")
    bootstrap.ensure("run")
    assert calls == ["venv", "install"]


def test_a_build_for_the_cpu_is_installed(bootstrap, calls, monkeypatch):
    """A wheel that asks for no library of an accelerator is installed without further questions."""
    monkeypatch.setattr(bootstrap, "resolved", lambda _python, *_options: [package("torch", 1, ["sympy", "networkx"])])
    bootstrap.ensure("run")
    assert calls == ["venv", "install"]


def test_what_pip_would_install_comes_from_its_report(bootstrap, monkeypatch, tmp_path):
    """The packages are those of pip's report; none if pip fails, which the installation then says."""
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho '{\"install\": [1, 2]}'\n")
    pip.chmod(0o755)
    assert bootstrap.resolved(pip) == [1, 2]
    pip.write_text("#!/bin/sh\nexit 1\n")
    assert bootstrap.resolved(pip) == []


def test_the_size_of_a_file_is_what_its_server_says(bootstrap, tmp_path):
    """The size comes without the file; what gives none counts as unknown."""
    path = tmp_path / "file.whl"
    path.write_bytes(bytes(321))
    assert bootstrap.size_of(path.as_uri()) == 321
    assert bootstrap.size_of((tmp_path / "missing.whl").as_uri()) == 0


def test_a_python_without_venv_and_pip_says_what_to_install(bootstrap, monkeypatch):
    """With neither a complete venv module nor pip, the message names the packages that bring them."""
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda _name: None)
    assert not bootstrap.create_with_venv(bootstrap.HOME / "run")
    with pytest.raises(bootstrap.SetupError, match="python3-venv, or python3-pip"):
        bootstrap.create_with_virtualenv(bootstrap.HOME / "run", held=False)


def test_failing_pip_names_the_usual_causes(bootstrap):
    """A failure of pip ends in one message with the usual causes."""
    with pytest.raises(bootstrap.SetupError, match="PIP_FIND_LINKS"):
        bootstrap.run_pip(sys.executable, "no-such-command")


def test_the_output_of_pip_is_not_that_of_the_command(bootstrap, capfd):
    """What pip prints while it installs goes to stderr: with --json, stdout has JSON only, in the first run too."""
    bootstrap.run_pip(sys.executable, "--version")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("pip ")


def test_a_set_up_that_fails_is_told_as_json(bootstrap, monkeypatch, capsys):
    """With --json, an error before the command starts is an object on stdout, as the command's own errors are."""

    def fail(_name):
        raise bootstrap.SetupError("no network")

    monkeypatch.setattr(bootstrap, "ensure", fail)
    assert bootstrap.main(["verify", "model", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "error": "no network"}


@pytest.mark.parametrize("body, status", [("exit 7", 7), ("kill -TERM $$", 143)])
def test_the_exit_status_is_that_of_the_command(bootstrap, monkeypatch, tmp_path, body, status):
    """The exit status passes through; a signal becomes 128 plus its number."""
    script = tmp_path / "hyper-parallel"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(bootstrap, "ensure", lambda _name: (tmp_path, {}))
    assert bootstrap.main(["verify", "model"]) == status


def test_test_runs_tox_and_everything_else_is_the_command(bootstrap):
    """`test` goes to tox with its arguments; `workshop` is the workshop, any other word a hyper-parallel command."""
    assert bootstrap.command_for(["test", "-e", "torch"])[0] == "tox"
    assert bootstrap.command_for(["test", "-e", "torch"])[1][-2:] == ["-e", "torch"]
    assert bootstrap.command_for(["verify", "model"]) == ("run", ["hyper-parallel", "verify", "model"])


def test_without_arguments_it_explains_itself(bootstrap, capsys):
    """Without arguments, the usage is printed and the status is an error."""
    assert bootstrap.main([]) == 2
    assert "ci/bootstrap.py test" in capsys.readouterr().out


def test_coverage_gets_the_tools_of_the_tests(bootstrap, calls, monkeypatch):
    """The workshop's ``coverage`` runs where the tools of the tests are installed; it needs no framework."""
    name, command = bootstrap.command_for(["workshop", "coverage", "html"])
    assert (name, command[0], command[2:]) == ("coverage", "python", ["coverage", "html"])
    assert Path(command[1]).parts[-2:] == ("ci", "workshop")
    assert bootstrap.command_for(["workshop", "trend", "nights.json"])[0] == "run"
    requirements = []
    monkeypatch.setattr(bootstrap, "run_pip", lambda _python, *args, **_wheels: requirements.extend(args))
    bootstrap.ensure(name)
    assert [text for text in requirements if text.endswith("[test]")]
    assert not [text for text in requirements if "torch" in text or "mindspore" in text]


def test_tests_install_from_checked_wheels_only(bootstrap, calls, monkeypatch, tmp_path):
    """The tests get the checked folder instead of an index, in a second run too; a refusal ends the command."""
    wheels = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/checked", "HP_WHEELHOUSE": "/checked"}
    given = []
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "checked_wheels", lambda _python: wheels)
        patch.setattr(bootstrap, "run_pip", lambda _python, *_args, wheels: given.append(wheels))
        assert bootstrap.ensure("tox")[1] == wheels
        assert bootstrap.ensure("tox")[1] == wheels
    assert given == [wheels]
    assert bootstrap.child_env(tmp_path, wheels).items() >= wheels.items()
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "wheelhouse.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(bootstrap, "python_of", lambda _env: sys.executable)
    with pytest.raises(bootstrap.SetupError, match="could not be fetched and checked"):
        bootstrap.ensure("tox")
