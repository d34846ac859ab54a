#!/usr/bin/env python3
"""Run the library, or its tests, from a fresh checkout: one command that needs Python 3.10 or newer and pip only.

    python3 ci/bootstrap.py verify model     # any `hyper-parallel` command, with both frameworks
    python3 ci/bootstrap.py workshop trend   # any command of ci/workshop
    python3 ci/bootstrap.py test [tox args]  # the tests: lint, typing, both frameworks, real processes, demo

Python 3.10 to 3.12 run both frameworks; newer ones, for which MindSpore has no wheels, run PyTorch's half. Libraries
for accelerators, of several GB, are fetched only with HP_ACCELERATOR=1 in the environment.

What is needed is installed once under `.venv/` in the checkout; a second run starts at once, unless a file that
decides what gets installed has changed. The exit status is that of the command. Nothing outside the checkout is
written, so it works where the system's Python is marked externally managed, and without `ensurepip`.
"""

# Runs under any Python 3.6 or later, as far as the message that says which Python is needed: hence the quoted
# annotations and the plain way of calling tools.
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
OLDEST, NEWEST = (3, 10), (3, 12)  # for which both frameworks publish wheels

# Name of the environment -> what pip installs into it. The checkout itself is editable: new code needs no reinstall.
REQUIREMENTS = {
    "run": ["--editable", f"{ROOT}[torch,mindspore]"],
    "torch": ["--editable", f"{ROOT}[torch]"],
    "coverage": ["--editable", f"{ROOT}[test]"],
    "tox": ["tox", "uv"],
}
WHAT = {
    "run": "both frameworks, a download of about 1 GB the first time",
    "torch": "PyTorch, a download of about 300 MB the first time",
    "coverage": "the tools of the tests, without a framework",
    "tox": "tox",
}
# Blocking launches are 20 times faster on few cores, and report an error where it happened; 4 silences the C++ log.
ACCELERATOR = "HP_ACCELERATOR"
LIBRARIES = ("nvidia-", "cuda-", "triton", "pytorch-triton")  # what PyTorch's builds for accelerators need
FRAMEWORK_ENV = {"MS_DEV_LAUNCH_BLOCKING": "1", "GLOG_v": "4"}
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
PIP_ENV = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}


class SetupError(Exception):
    """The machine lacks something; the message says what to do."""


def say(text: str) -> None:
    """Print one line of progress, to stderr so that the command's own output stays clean."""
    print(f"[bootstrap] {text}", file=sys.stderr, flush=True)


def usable(version: "tuple[int, int]") -> bool:
    """Return whether both frameworks publish wheels for this Python."""
    return OLDEST <= version <= NEWEST


def succeeds(command: "list[str]") -> bool:
    """Run a command silently and return whether it succeeded."""
    null = subprocess.DEVNULL
    return subprocess.run(command, check=False, stdout=null, stderr=null).returncode == 0


def other_python() -> "str | None":
    """Find a usable interpreter on PATH, newest first; it is started, since its name may be wrong."""
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        interpreter = shutil.which(f"python3.{minor}")
        if interpreter and succeeds(
            [interpreter, "-c", f"import sys, pip; sys.exit(sys.version_info[:2] != (3, {minor}))"]
        ):
            return interpreter
    return None


def require_python(name: str) -> str:
    """Return the environment to use: PyTorch's alone under a Python that MindSpore has no wheels for.

    Where another usable Python is on PATH, the script continues under that one. The tests need both frameworks.
    """
    version = sys.version_info[:2]
    if usable(version):
        return name
    here = ".".join(map(str, sys.version_info[:3]))
    interpreter = other_python()
    if interpreter is not None:
        say(f"this is Python {here}; continuing with {interpreter}")
        os.execv(interpreter, [interpreter, *sys.argv])  # noqa: S606 - replaces this process by the same script
    if version < OLDEST or name == "tox":
        raise SetupError(
            f"this is Python {here}, and no Python 3.10, 3.11 or 3.12 with pip is on PATH. PyTorch and MindSpore "
            "share these three versions only. Install one and run:  python3.11 ci/bootstrap.py "
            + " ".join(sys.argv[1:])
        )
    if name == "run":
        say(f"this is Python {here}, and MindSpore has wheels for 3.10 to 3.12 only: PyTorch's half runs")
        return "torch"
    return name


def accelerator_libraries(python: "str | Path") -> "list[str]":
    """Return the packages for accelerators that PyTorch's wheel on the package index asks for; none in a CPU build."""
    report = resolved(python, "--no-deps")
    wanted = report[0]["metadata"].get("requires_dist", []) if report else []
    return [line for line in wanted if line.startswith(LIBRARIES)]


def resolved(python: "str | Path", *options: str) -> "list[dict[str, Any]]":
    """Return what pip would install for PyTorch, as its report says; an empty list if pip cannot say."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--only-binary", ":all:", *options, "-c", str(CONSTRAINTS), "torch"]
    done = subprocess.run(
        command, check=False, env={**os.environ, **PIP_ENV}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    packages: list[dict[str, Any]] = json.loads(done.stdout.decode())["install"] if done.returncode == 0 else []
    return packages


def size_of(url: str) -> int:
    """Return the size of a file of a package index in bytes; 0 if it does not say."""
    try:
        with urlopen(Request(url, method="HEAD"), timeout=10) as answer:  # noqa: S310 - pip's own address
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0


def refuse_accelerator_libraries(python: "str | Path") -> None:
    """Raise before pip fetches libraries for accelerators that nobody has asked for."""
    if os.environ.get(ACCELERATOR) == "1":
        return
    if not accelerator_libraries(python):
        return
    packages = [entry for entry in resolved(python) if entry["metadata"]["name"].lower().startswith(LIBRARIES)]
    size = sum(size_of(entry["download_info"]["url"]) for entry in packages)
    of_size = f" of {size / 1e9:.1f} GB" if size else ", several GB"
    raise SetupError(
        f"PyTorch's wheel on the package index is the build for accelerators: it brings {len(packages)} packages"
        f"{of_size}, which verification on a CPU does not need. Take PyTorch's CPU build: "
        "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; or fetch them with "
        f"{ACCELERATOR}=1"
    )


def python_of(env: Path) -> Path:
    """Path of the interpreter in a virtual environment."""
    return env / "bin" / "python"


def works(env: Path) -> bool:
    """Return whether an environment is there, complete, and of a usable Python, whichever one created it."""
    newest = (4, 0) if env.name == "torch" else NEWEST
    code = f"import sys, pip; sys.exit(not {OLDEST!r} <= sys.version_info[:2] <= {newest!r})"
    return python_of(env).exists() and succeeds([str(python_of(env)), "-c", code])


def run_pip(python: "str | Path", *args: str, wheels: "dict[str, str] | None" = None) -> None:
    """Run pip with its output streamed to stderr; a failure names the usual causes."""
    command, env = [str(python), "-m", "pip", *args], {**os.environ, **PIP_ENV, **(wheels or {})}
    sys.stderr.flush()
    done = subprocess.run(command, check=False, env=env, stdout=2)  # stdout is the command's: --json writes there
    if done.returncode:
        raise SetupError(
            "pip failed (its message is above). Usual causes: no network or package index (point pip at one with "
            "PIP_INDEX_URL, or at a folder of wheels with PIP_FIND_LINKS and PIP_NO_INDEX=1), a full disk (both "
            "frameworks take about 4 GB), or a platform without wheels (Linux on x86-64 or aarch64 has them)."
        )


def checked_wheels(python: "str | Path") -> "dict[str, str]":
    """Fetch all pinned packages, check their hashes, and return the variables that make pip install from there only.

    Python is the one whose wheels are needed. The folder is named after the pins: other pins have another one.
    """
    pins = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:12]
    version = subprocess.run([str(python), "-c", VERSION], check=True, stdout=subprocess.PIPE).stdout.decode().strip()
    folder = HOME / "wheels" / f"{version}-{pins}"
    if not (folder / "complete").exists():
        say("fetching all pinned packages once, about 1 GB with both frameworks")
        for older in HOME.glob(f"wheels/{version}-*"):
            if older != folder:
                shutil.rmtree(older)
    command = [str(python), str(ROOT / "ci" / "wheelhouse.py"), str(folder)]
    if subprocess.run(command, check=False, env={**os.environ, **PIP_ENV}, stdout=2).returncode:
        raise SetupError("the pinned packages could not be fetched and checked (the message is above)")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "HP_WHEELHOUSE": str(folder)}


def create_with_venv(env: Path) -> bool:
    """Create the environment with the standard library, where that is complete."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return False
    return succeeds([sys.executable, "-m", "venv", "--clear", str(env)]) and works(env)


def create_with_virtualenv(env: Path, held: bool) -> None:
    """Create the environment with virtualenv, which brings its own pip, from a folder inside the checkout.

    Some distributions package `venv` or `ensurepip` apart, and refuse `pip install` into their own Python; a
    target folder is allowed everywhere. If ``held``, virtualenv itself comes from the checked wheels.
    """
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            "this Python has neither a complete `venv` module nor pip. Install either one with the system's package "
            "manager (on Debian and Ubuntu: apt install python3-venv, or python3-pip) and run this again."
        )
    tool = HOME / "virtualenv"
    shutil.rmtree(tool, ignore_errors=True)
    say("no complete `venv` module here; fetching virtualenv")
    wheels = checked_wheels(sys.executable) if held else None
    install = ["install", "--quiet", "--target", str(tool), "-c", str(CONSTRAINTS), "virtualenv"]
    run_pip(sys.executable, *install, wheels=wheels)
    path = os.pathsep.join([str(tool), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--no-download", str(env)]
    done = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": path}, stdout=2)
    if done.returncode or not works(env):
        raise SetupError(f"could not create a virtual environment in {env} (the message is above)")


def fingerprint(name: str) -> str:
    """Hash what decides the content of an environment; an edit to the library's code does not."""
    facts = hashlib.sha256(repr((str(ROOT), REQUIREMENTS[name])).encode())
    facts.update(CONSTRAINTS.read_bytes())
    if name != "tox":
        facts.update((ROOT / "pyproject.toml").read_bytes())
    return facts.hexdigest()


def ensure(name: str) -> "tuple[Path, dict[str, str]]":
    """Return the folder with an environment's scripts, created and filled if it is not up to date, and its variables.

    What tests install is compared with its hashes, each time: the variables name the folder of checked wheels. A
    command that a user runs is not: another platform's files have no hashes here.

    The stamp is written last: an interrupted install is taken up again by the next run.
    """
    ready = works(HOME / name)
    if not ready:
        asked, name = name, require_python(name)
        ready = name != asked and works(HOME / name)
    env, stamp = HOME / name, HOME / name / "installed"
    if ready and stamp.exists() and stamp.read_text() == fingerprint(name):
        return env / "bin", checked_wheels(python_of(env)) if name == "tox" else {}
    if stamp.exists():
        stamp.unlink()
    started = time.monotonic()
    if not ready:
        say(f"creating {env.relative_to(ROOT)} with Python {'.'.join(map(str, sys.version_info[:3]))}")
        HOME.mkdir(exist_ok=True)
        if not create_with_venv(env):
            create_with_virtualenv(env, held=name == "tox")
    wheels = checked_wheels(python_of(env)) if name == "tox" else {}
    if name in {"run", "torch"}:
        refuse_accelerator_libraries(python_of(env))
    say("installing " + WHAT[name])
    run_pip(python_of(env), "install", "--no-compile", "-c", str(CONSTRAINTS), *REQUIREMENTS[name], wheels=wheels)
    stamp.write_text(fingerprint(name))
    say(f"installed in {time.monotonic() - started:.0f} s; the next run starts at once")
    return env / "bin", wheels


def command_for(args: "list[str]") -> "tuple[str, list[str]]":
    """Translate the arguments: name of the environment, and the command inside it."""
    if args[0] == "test":
        return "tox", ["tox", "run", "--workdir", str(ROOT / ".tox"), "-c", str(ROOT / "tox.ini"), *args[1:]]
    if args[0] == "workshop":
        return "coverage" if args[1:2] == ["coverage"] else "run", ["python", str(ROOT / "ci" / "workshop"), *args[1:]]
    return "run", ["hyper-parallel", *args]


def child_env(scripts: Path, wheels: "dict[str, str]") -> "dict[str, str]":
    """Environment of the command: its scripts first on PATH, so that the ranks it starts find the same Python."""
    path = os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)])
    env = {**FRAMEWORK_ENV, **os.environ, **wheels, "PATH": path, "VIRTUAL_ENV": str(scripts.parent)}
    env.pop("PYTHONHOME", None)
    return env


def main(args: "list[str]") -> int:
    """Set up what the command needs, run it, and return its exit status."""
    if not args or args[0] in {"-h", "--help"}:
        print(__doc__)
        return 0 if args else 2
    try:
        name, command = command_for(args)
        scripts, wheels = ensure(name)
    except (SetupError, subprocess.SubprocessError, OSError) as error:
        say(f"error: {error}")
        if "--json" in args:
            print(json.dumps({"ok": False, "error": str(error)}))
        return 1
    try:
        done = subprocess.run([str(scripts / command[0]), *command[1:]], check=False, env=child_env(scripts, wheels))
    except KeyboardInterrupt:  # the child got the signal too, and has printed its own message
        return 130
    # A negative status is the number of the signal that ended the child; shells write it as 128 + number.
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
