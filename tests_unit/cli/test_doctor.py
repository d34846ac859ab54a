"""``hyper-parallel doctor``: conflicts and their fixes."""

import importlib
import json
from types import SimpleNamespace

import pytest

from hyper_parallel.cli import doctor, main


@pytest.fixture
def versions(monkeypatch):
    """Pretend that exactly these versions are installed."""
    installed = {"torch": "2.13.0", "mindspore": "2.10.0", "numpy": "1.26.4", "cloudpickle": "3.1"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    monkeypatch.setattr(doctor, "_start", lambda _: (True, ""))
    return installed


def wrong():
    """Return the problems that doctor reports, each with its fix."""
    return {finding.what: (finding.text, finding.fix) for finding in doctor.findings() if finding.state == "wrong"}


def test_nothing_wrong(versions, capsys):
    """A valid environment gives status 0, and lists every framework, version and way of launching."""
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok      torch                2.13.0" in lines
    assert "ok      mindspore processes  PyTorch's gloo, in the same process" in lines
    assert wrong() == {}


@pytest.mark.parametrize(
    "device, installed, expected",
    [
        ("cuda", {"torch": "2.13.0+cpu"}, [(
            "torch on cuda", "PyTorch 2.13.0+cpu was built without CUDA, so --device cuda is refused",
            "install PyTorch's CUDA build",
        )]),
        ("cuda", {"torch": "2.13.0"}, []),
        ("npu", {"torch": "2.13.0"}, [(
            "torch on npu", "torch_npu is not installed, so --device npu is refused",
            "install the torch_npu for PyTorch 2.13.0",
        )]),
        ("npu", {"torch": "2.13.0", "torch_npu": "2.13.0"}, []),
        ("cuda", {"mindspore": "2.10.0"}, [(
            "mindspore on cuda", "this library uses MindSpore on cpu and npu, so --device cuda is refused",
            "take --platform torch",
        )]),
        ("npu", {"mindspore": "2.10.0"}, [(
            "mindspore on npu", "MindSpore 2.10.0 is the CPU build, so --device npu is refused",
            "install the one for Ascend",
        )]),
    ],
)  # fmt: skip
def test_frameworks_that_cannot_use_the_devices_are_told(device, installed, expected, tmp_path, monkeypatch):
    """Where there are devices, a build without them is shown as absent, with what to install; that is not an error."""
    (tmp_path / {"cuda": "nvidia0", "npu": "davinci0"}[device]).touch()
    monkeypatch.setattr(doctor, "_version", installed.get)
    _install_mindspore(monkeypatch, tmp_path)
    found = doctor.device_findings({"ASCEND_HOME_PATH": "/here"}, tmp_path)
    assert [(each.what, each.text, each.fix) for each in found[1:]] == expected
    assert {each.state for each in found[1:]} <= {"absent"}


def _install_mindspore(monkeypatch, folder):
    """Let doctor find MindSpore's package in ``folder``."""
    found = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: found)


@pytest.mark.parametrize(
    "level, state, text, fix",
    [
        ("", "ok",
         "MindSpore 2.10.0 has its plugin for Ascend, which loads with CANN's libraries; each rank needs a device", ""),
        ("1", "wrong", "MS_SIMULATION_LEVEL=1: MindSpore makes a dry run, without values and without HCCL",
         "unset MS_SIMULATION_LEVEL"),
    ],
)  # fmt: skip
def test_mindspores_build_for_ascend_is_told(level, state, text, fix, tmp_path, monkeypatch):
    """The plugin is looked for, not loaded; a dry run would compute nothing."""
    (tmp_path / "davinci0").touch()
    (tmp_path / "lib" / "plugin").mkdir(parents=True)
    (tmp_path / "lib" / "plugin" / "libmindspore_ascend.so.2").touch()
    monkeypatch.setattr(doctor, "_version", {"mindspore": "2.10.0"}.get)
    _install_mindspore(monkeypatch, tmp_path)
    found = doctor.device_findings({"ASCEND_HOME_PATH": "/here", "MS_SIMULATION_LEVEL": level}, tmp_path)
    assert [(each.what, each.state, each.text, each.fix) for each in found[1:]] == [
        ("mindspore on npu", state, text, fix)
    ]


def test_numpy_2_beside_mindspore_is_said(versions):
    """NumPy 2 beside MindSpore works but for bfloat16, which is said with the fix; alone with PyTorch there is none."""
    versions["numpy"] = "2.4.6"
    text = "2.4.6; MindSpore 2.10.0 is built against NumPy 1 and refuses bfloat16 on 2"
    (found,) = [finding for finding in doctor.findings() if finding.what == "numpy"]
    assert (found.state, found.text, found.fix) == ("ok", text, "for bfloat16 on MindSpore: pip install 'numpy<2'")
    del versions["mindspore"]
    (found,) = [finding for finding in doctor.findings() if finding.what == "numpy"]
    assert (found.text, found.fix, wrong()) == ("2.4.6", "", {})


def test_a_framework_that_is_newer_than_tested_is_said(versions, capsys):
    """A nightly build or a newer release is named once, with the newest tested version; the status stays 0."""
    versions["torch"] = "2.99.0.dev20261120+cpu"
    text = "newer   torch                2.99.0.dev20261120+cpu\n"
    fix = "torch 2.99.0.dev20261120+cpu is newer than 2.14, the newest that this version of hyper_parallel was tested"
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert (out.count(text), out.count(fix)) == (1, 1)


def test_a_framework_that_is_too_old_is_wrong(versions, capsys):
    """A version below the supported ones is named with the oldest supported one and the command that installs it."""
    versions["torch"] = "2.8.0+cu128"
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "torch simulated" not in out
    assert "mindspore simulated" in out
    assert wrong() == {
        "torch": (
            "torch 2.8.0+cu128 is older than 2.10, the oldest that this version of hyper_parallel supports",
            "pip install 'torch>=2.10' 'safetensors>=0.8'",
        )
    }


def test_a_python_without_wheels_of_a_framework_gets_no_command(versions, monkeypatch):
    """What cannot be installed is not advised: the Pythons that have wheels are named."""
    del versions["mindspore"]
    monkeypatch.setattr(doctor, "_unusable", lambda _: None)
    for python, fix in (
        ((3, 12, 1), "to verify on it: pip install 'mindspore>=2.8' 'safetensors>=0.8'"),
        ((3, 13, 0), "it has wheels for Python 3.10 to 3.12"),
    ):
        monkeypatch.setattr(doctor.sys, "version_info", python)
        (found,) = [finding for finding in doctor.findings() if finding.what == "mindspore"]
        assert (found.state, found.text, found.fix) == ("absent", "not installed", fix)


RECORD = "mindspore/__init__.py,,\nmindspore/lib/libcore.so,,\nmindspore/lib/libops.so.2,,\n"
AGAIN = "pip install --force-reinstall 'mindspore==2.9.0'"


def write_metadata(folder):
    """Write what pip leaves of an installed MindSpore in a folder of packages."""
    info = folder / "mindspore-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mindspore\nVersion: 2.9.0\n")
    (info / "RECORD").write_text(RECORD)


def install_only(folder, monkeypatch):
    """Let Python find the packages of one folder alone, and forget MindSpore."""
    monkeypatch.setattr(doctor.sys, "path", [str(folder)])
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delitem(doctor.sys.modules, "mindspore", raising=False)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    "files, metadata, text, fix",
    [
        ([], True, "metadata of 2.9.0, but no package", AGAIN),
        (["mindspore/data/"], False, "{folder}/mindspore is not a package: it has no __init__.py",
         "delete this folder, then: pip install 'mindspore>=2.8' 'safetensors>=0.8'"),
        (["mindspore/data/"], True, "{folder}/mindspore is not a package: it has no __init__.py",
         f"delete this folder, then: {AGAIN}"),
        (["mindspore/__init__.py"], True, ("2 of its libraries are missing, such as mindspore/lib/libcore.so; "
         "import mindspore fails: ImportError: libcore.so: cannot open shared object file"), AGAIN),
        (["mindspore/__init__.py", "mindspore/lib/libcore.so", "mindspore/lib/libops.so.2"], True,
         "import mindspore fails: ImportError: libcore.so: cannot open shared object file", AGAIN),
        (["mindspore/__init__.py"], False, ("import mindspore fails: ImportError: libcore.so: cannot open shared "
         "object file"), "pip install 'mindspore>=2.8' 'safetensors>=0.8'"),
    ],
)  # fmt: skip
def test_a_framework_that_is_installed_in_parts_is_wrong(files, metadata, text, fix, tmp_path, monkeypatch):
    """Metadata without a package, a folder without modules, and libraries that are gone are named with the fix."""
    for file in files:
        path = tmp_path / file
        (path if file.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not file.endswith("/"):
            path.write_text("raise ImportError('libcore.so: cannot open shared object file')\n")
    if metadata:
        write_metadata(tmp_path)
    install_only(tmp_path, monkeypatch)
    expected = (text.format(folder=tmp_path), fix)
    assert doctor._unusable("mindspore") == expected
    found = doctor._framework("mindspore", {"mindspore": "2.9.0"})
    assert (found.state, (found.text, found.fix)) == ("wrong", expected)


PLATFORM = "hyper_parallel/platform/mindspore/platform.py"


def install_library(folder, platform):
    """Write a MindSpore that can be imported, and a library whose platform has this text."""
    for file in ("mindspore/__init__.py", "hyper_parallel/__init__.py", PLATFORM):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(platform if file == PLATFORM else "")


@pytest.mark.parametrize("record", [True, False])
def test_libraries_that_are_not_needed_are_no_problem(record, tmp_path, monkeypatch):
    """People remove libraries that they do not use: if the library starts on the framework, it is complete."""
    install_library(tmp_path, "def build(): pass")
    if record:
        write_metadata(tmp_path)
    install_only(tmp_path, monkeypatch)
    assert doctor._unusable("mindspore") is None


def test_a_framework_on_which_the_library_does_not_start_is_wrong(tmp_path, monkeypatch):
    """A folder of that name, or a build without what is needed, is named with its place and the error."""
    install_library(tmp_path, "from mindspore import ops")
    install_only(tmp_path, monkeypatch)
    place = f"{tmp_path}/mindspore/__init__.py"
    assert doctor._unusable("mindspore") == (
        f"{place}: this library does not start on it: ImportError: cannot import name 'ops' from 'mindspore' ({place})",
        "pip install --force-reinstall 'mindspore==2.10.*'",
    )


def test_the_framework_of_this_process_is_tried(tmp_path, monkeypatch):
    """What lies in the working folder is not taken for the framework unless this process takes it as well."""
    installed, here = tmp_path / "installed", tmp_path / "here"
    installed.mkdir()
    install_library(installed, "def build(): pass")
    (here / "mindspore").mkdir(parents=True)
    (here / "mindspore" / "__init__.py").write_text("raise ImportError('a clone of its sources')")
    install_only(installed, monkeypatch)
    monkeypatch.chdir(here)
    assert doctor._start("mindspore") == (True, "")


def test_an_import_that_does_not_end_is_wrong(tmp_path, monkeypatch):
    """A driver that waits for ever does not keep doctor waiting."""
    (tmp_path / "mindspore").mkdir()
    (tmp_path / "mindspore" / "__init__.py").write_text("import time; time.sleep(60)")
    install_only(tmp_path, monkeypatch)
    monkeypatch.setattr(doctor, "_LIMIT", 0.2)
    assert doctor._unusable("mindspore") == (
        "import mindspore fails: no end after 0.2 s",
        "pip install 'mindspore>=2.8' 'safetensors>=0.8'",
    )


@pytest.mark.platforms("torch")
def test_the_library_starts_on_pytorch():
    """A process imports the framework and the library on it."""
    assert doctor._start("torch") == (True, "")


def test_no_framework(versions, capsys):
    """Without a framework nothing can be verified: status 1, and the command that installs one."""
    del versions["torch"], versions["mindspore"]
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert {finding["what"]: finding["fix"] for finding in document["findings"] if finding["state"] == "wrong"} == {
        "frameworks": "one of them is needed: pip install 'torch>=2.10' 'safetensors>=0.8', or "
        "pip install 'mindspore>=2.8' 'safetensors>=0.8'"
    }


def test_mindspore_alone_has_no_real_processes(versions):
    """MindSpore's real processes on a CPU need PyTorch's gloo: absent, not wrong, with the reason."""
    del versions["torch"]
    findings = {finding.what: finding for finding in doctor.findings()}
    assert findings["mindspore processes"].state == "absent"
    assert wrong() == {}


def test_torch_npu_without_toolkit(versions):
    """torch_npu without the Ascend toolkit breaks import torch: it is wrong, with both fixes."""
    versions["torch_npu"] = "2.13.0"
    assert wrong() == {
        "torch_npu": (
            "torch_npu 2.13.0 without the Ascend toolkit: 'import torch' fails",
            "pip uninstall torch_npu, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        )
    }


@pytest.mark.parametrize(
    "python, fix",
    [
        ((3, 12, 9), ""),
        ((3, 14, 0), ""),
        ((3, 15, 0), "PyTorch publishes wheels for Python 3.10 to 3.14"),
    ],
)
def test_a_newer_python_is_said(python, fix, versions, monkeypatch):
    """A Python for which no framework publishes wheels is named with those that have some; nothing is wrong."""
    monkeypatch.setattr(doctor.sys, "version_info", python)
    found = doctor._python()
    assert (found.state, found.fix) == ("newer" if fix else "ok", fix)
    assert wrong() == {}


def test_problems_are_named(versions, monkeypatch, capsys):
    """Each problem has its fix on the line below it; the status is 1."""
    del versions["numpy"], versions["cloudpickle"]

    def taken(address):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(doctor.socket, "create_server", taken)
    assert wrong() == {
        "numpy": ("not installed", "pip install numpy"),
        "mindspore simulated": ("cloudpickle is missing", "pip install cloudpickle"),
        "ports": ("cannot listen on 127.0.0.1: [Errno 98] Address already in use", "real processes need it to meet"),
    }
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (at,) = [at for at, line in enumerate(lines) if line.startswith("wrong   numpy ")]
    assert lines[at].endswith("  not installed")
    assert lines[at + 1].strip() == "pip install numpy"


def test_torch_npu_with_toolkit(versions, monkeypatch):
    """With the Ascend toolkit, torch_npu is reported as ok."""
    versions["torch_npu"] = "2.13.0"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if name == "acl" else None)
    assert [(finding.what, finding.state, finding.text) for finding in doctor._npu(versions)] == [
        ("torch_npu", "ok", "2.13.0")
    ]


def test_a_version_that_nobody_wrote_down(monkeypatch):
    """A package without metadata counts as installed; a missing package has no version."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "absent" else object())
    assert (doctor._version("absent"), doctor._version("no-such-distribution")) == (None, "of unknown version")
