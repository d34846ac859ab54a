"""What the library executes, unpickles and listens on: nothing that came from a file or from another user."""

import ast
import contextlib
import functools
from collections import Counter
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.transport.processes import local_environment

PACKAGE = Path(hyper_parallel.__file__).parent
SCRIPTS = Path(__file__).parents[1] / "ci"

# Calls that can run what they are given, by the end of their name.
DANGEROUS = {
    "eval", "exec", "compile", "execfile", "system", "popen", "mktemp", "extractall", "unpack_archive", "Unpickler",
    "spec_from_file_location", "run_path", "run_module", "Listener", "urlopen", "__import__", "import_module",
    "load_module", "exec_module", "resolve_name", "HTTPServer", "ThreadingHTTPServer", "create_connection",
}  # fmt: skip
UNPICKLING = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "jsonpickle")

OWN = "a module of this package, by a name that this package made"
USER = "the user's own file, named on the command line to be run"
NAME = "PyTorch's function of this name, which returns a text and imports nothing"
RANK = "from a rank that this program started, through a pipe, a folder or a store of its own"
ALLOWED = {
    ("_lazy.py", "importlib.import_module"): (3, OWN),
    ("_versions.py", "importlib.import_module"): (2, "a module of a framework, by a name that this package made"),
    ("compat/paths.py", "importlib.import_module"): (2, OWN),
    ("core/shard/call_codegen.py", "eval"): (1, "numbers and the names of parameters to which a call was bound"),
    ("core/shard/rules/__init__.py", "importlib.import_module"): (1, OWN),
    ("platform/contract/collectives.py", "pickle.loads"): (1, RANK),
    ("platform/mindspore/ops/registry.py", "importlib.import_module"): (1, OWN),
    ("platform/select.py", "importlib.import_module"): (2, "modules of this package, and the framework itself"),
    ("platform/torch/platform.py", "importlib.import_module"): (1, OWN),
    ("platform/torch/region_graph.py", "compile"): (1, "a function that this package wrote"),
    ("platform/torch/region_graph.py", "exec"): (1, "a function that this package wrote"),
    ("platform/torch/ops/__init__.py", "importlib.import_module"): (1, OWN),
    ("transport/real/c10d/lost_peers.py", "socket.create_connection"): (1, "the world's store, at MASTER_ADDR"),
    ("transport/real/cluster.py", "importlib.import_module"): (1, OWN),
    ("transport/real/launched_rank.py", "importlib.import_module"): (8, OWN),
    ("transport/simulated/rank_process.py", "importlib.import_module"): (1, OWN),
    ("transport/serialization.py", "pickle.loads"): (1, RANK),
    ("transport/simulated/transport.py", "pickle.loads"): (1, RANK),
    ("transport/simulated/warm_packages.py", "__import__"): (2, "packages that the user's own script imports"),
    ("verify/bugs/registry.py", "importlib.import_module"): (1, OWN),
    ("verify/frameworks/__init__.py", "import_module"): (1, OWN),
    ("verify/frameworks/torch/programs.py", "resolve_name"): (1, NAME),
    ("verify/frameworks/torch/torch_dtensor_reproducer.py", "compile"): (1, "a program that this package wrote"),
    ("verify/frameworks/torch/torch_dtensor_reproducer.py", "exec"): (1, "a program that this package wrote"),
    ("verify/frameworks/torch/torch_dtensor_reproducer.py", "importlib.import_module"): (1, OWN),
    ("verify/frameworks/torch/torch_dtensor_reproducer.py", "resolve_name"): (1, NAME),
    ("verify/fuzz/language.py", "importlib.import_module"): (1, OWN),
    ("verify/ops/audit_operator.py", "importlib.import_module"): (2, OWN),
    ("verify/ops/fork_server.py", "importlib.import_module"): (1, "a module of PyTorch, by a fixed name"),
    ("verify/ops/reproduce.py", "compile"): (1, "a program that this package wrote"),
    ("verify/ops/reproduce.py", "exec"): (1, "a program that this package wrote"),
    ("verify/ops/tasks.py", "pkgutil.resolve_name"): (1, "a function of the process that started this worker"),
    ("verify/ops/user_operators.py", "importlib.util.spec_from_file_location"): (1, USER),
    ("verify/ops/user_operators.py", "spec.loader.exec_module"): (1, USER),
    ("verify/program/launches.py", "importlib.import_module"): (1, "modules of PyTorch, by the names in its table"),
    ("verify/program/program.py", "compile"): (2, USER),
    ("verify/program/program.py", "exec"): (1, USER),
    ("verify/program/program.py", "importlib.import_module"): (1, USER),
    ("verify/spec.py", "importlib.import_module"): (1, USER),
    ("verify/report_files.py", "importlib.import_module"): (1, "the standard library's parser of TOML"),
    ("verify/spec.py", "importlib.util.spec_from_file_location"): (1, USER),
    ("verify/spec.py", "module_spec.loader.exec_module"): (1, USER),
}  # fmt: skip
"""By file and call: how often, and why that is right."""
ALLOWED_IN_SCRIPTS = {
    ("bootstrap.py", "urlopen"): (1, "the size of a file that pip would fetch, from its address"),
    ("workshop/bench/command.py", "importlib.import_module"): (1, OWN),
    ("workshop/conformance/transport.py", "importlib.import_module"): (1, OWN),
    ("workshop/coverage/settings.py", "importlib.import_module"): (1, "the standard library's parser of TOML"),
    ("workshop/mutation/source_mutants.py", "compile"): (1, "this package's source, changed"),
    ("workshop/mutation/source_mutants.py", "exec"): (1, "this package's source, changed"),
    ("workshop/mutation/source_mutants.py", "importlib.import_module"): (2, OWN),
    ("workshop/program_costs/pretended_script.py", "runpy.run_path"): (1, "a program of tests_stacks"),
}


@functools.cache
def calls(root):
    """Every call in the sources under a folder: the file, the called name, the node."""
    return [
        (path.relative_to(root).as_posix(), ast.unparse(node.func), node)
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def is_dangerous(name, node):
    """Whether a call runs, unpickles or imports what its arguments say."""
    module, _, last = name.rpartition(".")
    if last in {"load", "loads"} and module.split(".")[0].lstrip("_") in UNPICKLING:
        return True
    if last in {"load", "loads"} and module in {"np", "numpy"}:
        return any(keyword.arg == "allow_pickle" for keyword in node.keywords)
    if last in {"eval", "compile", "system"} and module not in {"", "os", "builtins"}:
        return False  # a module's mode, a pattern, the name of the platform
    return last in DANGEROUS


@pytest.mark.parametrize("root, allowed", [(PACKAGE, ALLOWED), (SCRIPTS, ALLOWED_IN_SCRIPTS)], ids=["package", "ci"])
def test_what_runs_or_unpickles_data_is_listed_with_its_reason(root, allowed):
    """No call runs, imports or unpickles what it is given, except those listed; none is listed in vain."""
    if not root.exists():
        pytest.skip("[no-tool] the scripts are not installed")
    found = Counter((path, name) for path, name, node in calls(root) if is_dangerous(name, node))
    assert found == {key: count for key, (count, _) in allowed.items()}


def test_checkpoints_are_loaded_as_tensors_alone():
    """Every ``torch.load`` says ``weights_only=True``, and no array is read with its pickled objects."""
    loads = [(path, node) for path, name, node in calls(PACKAGE) if name == "torch.load"]
    assert loads
    for path, node in loads:
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert said.get("weights_only") == "True", path
    assert [path for path, _, node in calls(PACKAGE) if any(word.arg == "allow_pickle" for word in node.keywords)] == []


def test_no_shell():
    """No command goes through a shell."""
    for root in (PACKAGE, SCRIPTS):
        assert [path for path, _, node in calls(root) if any(word.arg == "shell" for word in node.keywords)] == []


def test_sockets_are_local():
    """Sockets of this package are of the file system, or on loopback."""
    made = Counter(
        (path, name) for path, name, _ in calls(PACKAGE) if name in {"socket.socket", "socket.create_server"}
    )
    assert made == {
        ("cli/doctor.py", "socket.create_server"): 1,
        ("verify/frameworks/torch/torch_dtensor_reproducer.py", "socket.socket"): 1,
        ("transport/processes.py", "socket.create_server"): 1,
    }
    bound = [ast.unparse(node) for _, name, node in calls(PACKAGE) if name.endswith((".bind", "create_server"))]
    network = [text for text in bound if "signature" not in text and "(str(path))" not in text and "binder" not in text]
    assert [text for text in network if "socket" in text or "probe" in text] == [
        "socket.create_server(('127.0.0.1', 0))",
        "socket.create_server(('127.0.0.1', 0))",
        "probe.bind(('127.0.0.1', 0))",
    ]


def test_ranks_of_one_machine_meet_on_loopback(monkeypatch):
    """Ranks that are all here are told to listen on loopback, unless the user's environment says otherwise."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert local_environment()["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert local_environment()["GLOO_SOCKET_IFNAME"] == "eth7"


def _listening():
    """Return the TCP addresses on which this process listens."""
    from hyper_parallel.platform.select import current_platform

    current_platform().transport().all_gather_object(0, (0, 1))
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own descriptor is gone
            own.add(str(link.readlink()))
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    rows = [line.split() for line in lines]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


@pytest.mark.platforms("torch")
def test_real_ranks_listen_on_loopback():
    """Each of two real ranks listens, and on 127.0.0.1 alone."""
    from hyper_parallel.verify.launch import launch

    for addresses in launch(_listening, 2, "torch", timeout=120):
        assert set(addresses) == {"0100007F"}
