"""Two hosts on this machine: network namespaces with a router between them, whose link can be cut and slowed.

A namespace lives as long as the process that holds it, so nothing is left once those have ended. It needs root, or
permission to make network namespaces, and the commands ``unshare``, ``nsenter`` and ``ip``.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess

ADDRESSES = ("10.71.1.1", "10.71.2.1")
"""The addresses of the hosts, each of whose network device is called ``eth0``."""

_FORWARDING = "/proc/sys/net/ipv4/ip_forward"


class NotPermittedError(Exception):
    """This machine cannot make hosts; the message says why."""


class TwoHosts:
    """The hosts 0 and 1 and the router between them; see :func:`two_hosts`.

    Args:
        holders: the processes that hold the namespaces of host 0, host 1 and the router.
    """

    def __init__(self, holders):
        self._holders = holders
        self._slowing = None

    def command(self, host, *command):
        """A command line that runs on a host; 2 is the router."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--", *command]

    def connect(self):
        """Give both hosts a device, an address and a way to each other.

        Raises:
            NotPermittedError: a step is not permitted here.
        """
        for host, address in enumerate(ADDRESSES):
            router = address.rpartition(".")[0] + ".254"
            self._do(2, "ip", "link", "add", f"to{host}", "type", "veth", "peer", "name", "eth0", "netns",
                     str(self._holders[host].pid))  # fmt: skip
            self._do(2, "ip", "address", "add", f"{router}/24", "dev", f"to{host}")
            self._do(2, "ip", "link", "set", f"to{host}", "up")
            self._do(host, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            self._do(host, "ip", "link", "set", "lo", "up")
            self._do(host, "ip", "link", "set", "eth0", "up")
            self._do(host, "ip", "route", "add", "10.71.0.0/16", "via", router)
        self._do(2, "sh", "-c", f"echo 1 > {_FORWARDING}")

    def cut(self):
        """Cut the link: from now on whatever the hosts send to each other is lost, and nobody is reported."""
        self._do(2, "sh", "-c", f"echo 0 > {_FORWARDING}")

    def slow(self):
        """Let the link lose whatever is sent in a third of the time: 0.05 of 0.15 seconds.

        TCP doubles its wait after each loss: were two thirds lost, a packet would be lost ten times in a row in one run
        of fifty, which takes minutes.
        """
        lose, carry = f"echo 0 > {_FORWARDING}; sleep 0.05", f"echo 1 > {_FORWARDING}; sleep 0.1"
        turns = f"echo here; while kill -0 $0; do {lose}; {carry}; done"  # as long as the router's holder lives
        self._slowing = subprocess.Popen(
            self.command(2, "sh", "-c", turns, str(self._holders[2].pid)),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._slowing.stdout.readline()

    def end(self):
        """End what slows the link; the holders end by themselves."""
        if self._slowing is not None:
            self._slowing.kill()
            self._slowing.communicate()

    def _do(self, host, *command):
        if shutil.which(command[0]) is None:
            msg = f"there is no command {command[0]}"
            raise NotPermittedError(msg)
        done = subprocess.run(self.command(host, *command), capture_output=True, text=True, check=False)
        if done.returncode:
            msg = f"{' '.join(command)}: {done.stderr.strip()}"
            raise NotPermittedError(msg)


@contextlib.contextmanager
def two_hosts():
    """Make two connected hosts, which end with this context.

    Raises:
        NotPermittedError: this machine does not permit it.
    """
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        msg = f"there is no command {missing[0]}"
        raise NotPermittedError(msg)
    holders = []
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            # It says so once it is in its namespace, and ends when its input closes, even if this process is killed.
            holder = subprocess.Popen(
                [shutil.which("unshare"), "--net", "sh", "-c", "echo here; read line"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            holders.append(holder)
            stack.callback(holder.communicate)
            if holder.stdout.readline() != "here\n":
                msg = f"network namespaces: {holder.stderr.read().strip()}"
                raise NotPermittedError(msg)
        hosts = TwoHosts(holders)
        stack.callback(hosts.end)
        hosts.connect()
        yield hosts
