"""Sweep PyTorch's operator database over placements: ``python tests_unit/platform/torch/ops/op_db/sweep.py --help``.

Each entry runs in a child process, so that a native crash or a hang costs one entry. Results go to a file of JSON lines
as they come; the table at the end counts the worst outcome of each entry. Entries that PyTorch added or removed are in
``ledger.py``; others fail the sweep.
"""

import argparse
import fnmatch
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve()
OUTCOMES = ("ok", "rejects", "wrong", "plain", "crash", "unexercised", "no tensor")
VARIANTS = ("function", "method", "inplace", "out", "no_grad", "inference")
FAILED = frozenset({"wrong", "plain", "crash"})


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="entries or patterns, such as 'linalg.*'; all by default")
    parser.add_argument("--out", type=Path, default=Path("op_db.jsonl"), help="file of JSON lines")
    parser.add_argument("--jobs", type=int, default=2, help="child processes")
    parser.add_argument("--meshes", default="2,3", help="shapes, such as 2,3,2x2")
    parser.add_argument("--dtype", default="float64", help="of the samples; entries are those that take float32")
    parser.add_argument("--variant", default="function", choices=VARIANTS)
    parser.add_argument("--samples", type=int, default=4, help="per entry, at most")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds per entry")
    parser.add_argument("--all-messages", action="store_true", help="print what each entry says, not only failures")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- child -------------------------------------------------------------------------------------------------------------


def _child(options):
    sys.path.insert(0, str(HERE.parent))
    import torch

    torch.set_num_threads(1)
    import cases
    import checks
    import ledger

    names = cases.entries("float32")
    unexplained = ledger.unexplained(torch.__version__, sorted(names))
    print(json.dumps({"names": sorted(names), "unexplained": unexplained}), flush=True)
    meshes = [tuple(map(int, sizes.split("x"))) for sizes in options.meshes.split(",")]
    for line in sys.stdin:
        name = line.strip()
        op = names[name]
        dtype = options.dtype if cases.DTYPES[options.dtype] in op.dtypes else "float32"
        started = time.perf_counter()
        try:
            outcome = checks.check_entry(name, op, dtype, meshes, options.variant, options.samples)
        except Exception as error:  # noqa: BLE001 - the sweep goes on
            outcome = checks.Outcome(name, "crash", messages={"crash": f"the check: {type(error).__name__}: {error}"})
        print(json.dumps({**asdict(outcome), "seconds": round(time.perf_counter() - started, 2)}), flush=True)


# -- parent ------------------------------------------------------------------------------------------------------------


class _Worker:
    """A child process that is restarted when it dies."""

    def __init__(self, options):
        self.options = options
        self.process = None

    def start(self):
        """Start the child; return the names of all entries, and what the ledger does not explain of them."""
        command = [sys.executable, str(HERE), "--child", *sys.argv[1:]]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        return json.loads(self.process.stdout.readline())

    def check(self, name):
        """Return the outcome of an entry."""
        if self.process is None:
            self.start()
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        late = threading.Timer(self.options.timeout, self.process.kill)
        late.start()
        line = self.process.stdout.readline()
        late.cancel()
        if line:
            return json.loads(line)
        status = self.process.wait()
        self.process = None
        message = f"the process ended with status {status}, or did not finish in {self.options.timeout:.0f} s"
        return {"name": name, "outcome": "crash", "counts": {}, "backward": 0, "messages": {"crash": message}}

    def stop(self):
        """End the child."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def _sweep(options):
    first = _Worker(options)
    started = first.start()
    names = [
        name
        for name in started["names"]
        if not options.names or any(fnmatch.fnmatch(name, pattern) for pattern in options.names)
    ]
    todo = queue.SimpleQueue()
    for name in names:
        todo.put(name)
    results, lock = [], threading.Lock()

    def work(worker, out):
        while True:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                worker.stop()
                return
            result = worker.check(name)
            with lock:
                results.append(result)
                out.write(json.dumps(result) + "\n")
                out.flush()

    with options.out.open("w") as out:
        workers = [first, *(_Worker(options) for _ in range(min(options.jobs, len(names)) - 1))]
        threads = [threading.Thread(target=work, args=(worker, out)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results, started["unexplained"]


def _report(results, options):
    counts = Counter(result["outcome"] for result in results)
    checked = Counter()
    for result in results:
        checked.update(result["counts"])
    for result in sorted(results, key=lambda result: (result["outcome"], result["name"])):
        if result["outcome"] in FAILED or (options.all_messages and result["outcome"] != "ok"):
            message = result["messages"].get(result["outcome"], "")
            print(f"{result['outcome']:12} {result['name']:44} {result['counts']} {message}")
    print("entries: " + ", ".join(f"{name} {counts[name]}" for name in OUTCOMES))
    print("checks:  " + ", ".join(f"{name} {count}" for name, count in checked.most_common()))


def main():
    """Run the command; status 1 where anything is wrong, plain, crashed, or not in the ledger."""
    options = _arguments()
    if options.child:
        _child(options)
        return 0
    results, unexplained = _sweep(options)
    _report(results, options)
    print("".join(f"{line}\n" for line in unexplained), end="")
    return int(bool(unexplained) or any(result["outcome"] in FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
