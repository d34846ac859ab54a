"""Measured ranks, the second task of which fills the disk: run by ``full_disk.py`` with a folder on a small disk."""

import contextlib
import json
import os
import sys
from pathlib import Path

import coverage

from hyper_parallel.transport.real.launched_processes import close_launched_teams, run_launched
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE

sys.path.append(str(Path(__file__).parents[2] / "ci"))

from workshop.coverage.gates import check_ranks
from workshop.coverage.store import Store

LINES = "".join(f"    x = {number} if x != {number} else x\n" for number in range(4000))


def work(folder, fills):
    """Run many lines for the first time, and let the first rank fill the disk; no rank ends before it is full."""
    import torch.distributed as dist

    if fills:
        sys.path.insert(0, str(folder))
        import manylines

        manylines.run()
        if dist.get_rank() == 0:
            with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 512):
                    pass
        dist.barrier()
    return dist.get_rank() + 7


def run(folder, *, fills):
    """The results of two ranks, the failure of the world, and what the ranks printed."""
    done = run_launched(pack((work, (folder, fills)), work), 2, "torch", 120.0)
    return done.results, str(done.failure), done.outputs


def main(folder):
    """What the ranks returned before, with and after the full disk, and what the gate says of their data."""
    (folder / "manylines.py").write_text(f"def run():\n    x = 1\n{LINES}")
    store = Store(folder)
    store.ledger("torch").mkdir(parents=True)
    os.environ[LEDGER_VARIABLE] = str(store.ledger("torch"))
    measuring = coverage.Coverage(
        config_file=False, data_file=str(store.data("torch") / ".coverage"), data_suffix=True, branch=True,
        source=[str(folder), str(Path(__file__).parent)],
    )  # fmt: skip
    measuring.start()
    results = [run(folder, fills=False)]
    before = store.measured("torch")
    results.append(run(folder, fills=True))
    (folder / "filler").unlink()
    results.append(run(folder, fills=False))
    close_launched_teams()
    measuring.stop()
    launched = store.launched("torch")
    json.dump(
        {
            "results": results,
            "before": len(before[0]),
            "launched": sorted(launched),
            "gate": check_ranks(launched, *store.measured("torch")),
            "files": sorted(path.name for path in store.data("torch").glob(".coverage*")),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
