"""What is written to a full disk: run by ``test_full_disk.py`` with a folder on a disk of two megabytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from hyper_parallel.transport.checks.flight_recorder import FlightRecorder
from hyper_parallel.transport.failures import WorldFailedError
from hyper_parallel.transport.real.launched_processes import close_launched_teams, run_launched
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE
from hyper_parallel.verify.report_files import write_text

BIG = 4 << 20


def error_of(call):
    """The type and text of the error that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - shown
        return f"{type(error).__name__}: {error}"
    return "none"


def files(folder):
    """The files below a folder and their sizes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def report(folder):
    """A report replaces an earlier one."""
    path = folder / "report.json"
    write_text(path, json.dumps({"run": 1}), "--json")
    error = error_of(lambda: write_text(path, "2" * BIG, "--json"))
    return error, files(folder), path.read_text()


def record(folder):
    """A flight record replaces an earlier one; one file of the new one would fit, and not the other."""
    texts = []
    for doing in ("first", "x" * (3 << 19)):
        failed = WorldFailedError("failed", {0: ValueError("boom")}, {0: doing, 1: doing})
        FlightRecorder(2, folder).write(failed)
        texts.append(str(failed))
    kept = [json.loads((folder / f"rank-{rank}.json").read_text())["doing"] for rank in (0, 1)]
    return texts[1], sorted(files(folder)), kept


def ledger(folder):
    """A started rank is recorded while nothing fits."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        error_of(lambda: [file.write(b"x" * 4096) for _ in range(BIG // 4096)])
    os.environ[LEDGER_VARIABLE] = str(folder)
    error = error_of(lambda: run_launched(pack((os.getpid, ()), os.getpid), 2, "torch", 120.0))
    del os.environ[LEDGER_VARIABLE]
    return error, sorted(files(folder))


def save(folder):
    """Two checkpoints of two ranks by PyTorch, of which the second does not fit on rank 1."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    (folder.parent / "pids" / str(os.getpid())).touch()
    for step, size in enumerate((5, BIG)):
        state = {f"weight of {dist.get_rank()}": torch.arange(5 if dist.get_rank() == 0 else size)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/{step}"))


def checkpoint(folder):
    """The error of the ranks, and the earlier checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    done = run_launched(pack((save, (folder,)), save), 2, "torch", 120.0)
    state = {f"weight of {rank}": torch.zeros(5, dtype=torch.long) for rank in range(2)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "0"), no_dist=True)
    loads = [state[f"weight of {rank}"].tolist() for rank in range(2)]
    pids = [int(path.name) for path in (folder.parent / "pids").iterdir()]
    return str(done.failure), loads, (folder / "1" / ".metadata").exists(), pids


def own_checkpoint(folder):
    """A checkpoint of this library replaces an earlier one."""
    import torch

    from hyper_parallel import get_platform

    platform, path = get_platform(), folder / "own"
    platform.save_checkpoint({"weight": torch.arange(5)}, str(path))
    before = files(folder)
    error = error_of(lambda: platform.save_checkpoint({"weight": torch.zeros(BIG)}, str(path)))
    return error, before == files(folder)


def coverage_data(folder):
    """Two ranks that a process of their own measures; nothing of what measures the test may reach it."""
    script = str(Path(__file__).with_name("covered_ranks.py"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    ran = subprocess.run(
        [sys.executable, script, str(folder)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    return json.loads(ran.stdout) if ran.returncode == 0 else ran.stderr


if __name__ == "__main__":
    disk = Path(sys.argv[1])
    (disk / "pids").mkdir()
    outcome = {}
    for case in (report, record, ledger, checkpoint, own_checkpoint, coverage_data):
        place = disk / case.__name__
        place.mkdir()
        outcome[case.__name__] = case(place)
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    close_launched_teams()
    sys.stdout.write(json.dumps(outcome))
