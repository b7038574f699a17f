"""Hosts made of namespaces, with a link of a given rate each, joined by a switch.

Ranks of one host share a PID namespace, so they can open each other's memory; those of two hosts
have neither that nor a network but the link in common.
"""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "shardstep0"


class NotPermitted(Exception):
    """Why there is no link."""


def ip(*arguments: str) -> None:
    run(["ip", *arguments])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        raise NotPermitted(f"{' '.join(command)}: {why}")


class Host:
    """A network and a PID namespace; both go away with this context, and so do its processes."""

    def __init__(self, name: str, number: int, switch: str, gbit: float | None) -> None:
        self._name = name
        ip("netns", "add", name)
        ip(
            *("link", "add", INTERFACE, "netns", name, "type", "veth"),
            *("peer", "name", f"host{number}", "netns", switch),
        )
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", INTERFACE, "addrgenmode", "none")  # IPv4 only
        ip("-n", name, "address", "add", f"10.99.0.{number + 1}/24", "dev", INTERFACE)
        ip("-n", name, "link", "set", INTERFACE, "up")
        ip("-n", switch, "link", "set", f"host{number}", "addrgenmode", "none")
        ip("-n", switch, "link", "set", f"host{number}", "master", "switch", "up")
        self._ends = ((name, INTERFACE), (switch, f"host{number}"))
        if gbit is not None:
            # The burst holds a few of the 64 kB pieces that the kernel cuts into packets late.
            self._shape(f"{gbit}gbit", f"{max(256, int(256 * gbit))}kb")
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", name, *unshare, "sh", "-c", "echo ready; exec sleep infinity"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._init.stdout.readline().strip() != "ready":
            raise NotPermitted(f"unshare --pid: {self._init.stderr.read().strip()}")

    def network(self) -> str:
        """A file that stands for its network, for setns()."""
        return f"/run/netns/{self._name}"

    def prefix(self) -> list[str]:
        """What to put before a command so that it runs on this host."""
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text()
        first = children.split()[0]
        return ["nsenter", "--target", first, "--net", "--pid", "--mount", "--"]

    def bytes_sent(self) -> int:
        """Over its link, since it was made."""
        command = ["ip", "netns", "exec", self._name, "cat", "/proc/net/dev"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        line = next(line for line in done.stdout.splitlines() if INTERFACE in line)
        return int(line.split(":")[1].split()[8])

    def _shape(self, rate: str, burst: str, latency: str = "20ms") -> None:
        shape = ["tbf", "rate", rate, "burst", burst, "latency", latency]
        for namespace, device in self._ends:
            inside = ["ip", "netns", "exec", namespace]
            run([*inside, "tc", "qdisc", "replace", "dev", device, "root", *shape])

    def slow_link(self, mbit: float) -> None:
        # A queue that loses no packets: the link is slow, not bad.
        self._shape(f"{int(mbit * 1000)}kbit", "128kb", "5s")

    def cut_link(self) -> None:
        ip("-n", self._name, "link", "set", INTERFACE, "down")

    def end(self) -> None:
        self._init.kill()
        self._init.wait()
        self._init.stdout.close()
        self._init.stderr.close()


@contextlib.contextmanager
def linked_hosts(count: int, gbit: float | None = 1) -> Iterator[list[Host]]:
    """Hosts with a link of `gbit` Gbit/s in each direction, unshaped if None."""
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            package = "iproute2" if tool in ("ip", "tc") else "util-linux"
            raise NotPermitted(f"no {tool} on this machine (Debian: apt-get install {package})")
    tag = f"shardstep-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    switch = f"{tag}-switch"
    with contextlib.ExitStack() as stack:
        # Before it is made: a run that is stopped in between must not leave it behind.
        stack.callback(remove, switch)
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "addrgenmode", "none")
        ip("-n", switch, "link", "set", "switch", "up")
        hosts = []
        for number in range(count):
            name = f"{tag}-{number}"
            stack.callback(remove, name)
            hosts.append(Host(name, number, switch, gbit))
            stack.callback(hosts[-1].end)
        yield hosts


def remove(name: str) -> None:
    """With a namespace go its processes' network and both ends of the link."""
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)
