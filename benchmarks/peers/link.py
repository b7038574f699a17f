"""Two network namespaces with 1 Gbit/s between them: two hosts, as far as sockets can tell."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

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


@contextlib.contextmanager
def gigabit_link() -> Iterator[list[list[str]]]:
    """What to put before a command so that it runs on either side. Goes away with the context."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotPermitted(f"no {tool} on this machine (Debian: apt-get install iproute2)")
    tag = f"shardstep-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    names = [f"{tag}-{side}" for side in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            # Before it is made: a run that is stopped in between must not leave it behind.
            stack.callback(remove, name)
            ip("netns", "add", name)
        first, second = names
        # Interface names are a namespace's own, so that runs side by side do not meet.
        ip(
            *("link", "add", INTERFACE, "netns", first, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", second),
        )
        for side, name in enumerate(names):
            inside = ["ip", "netns", "exec", name]
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", INTERFACE, "addrgenmode", "none")  # IPv4 only
            ip("-n", name, "address", "add", f"10.99.0.{side + 1}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
            # The burst holds a few of the 64 kB pieces that the kernel cuts into packets late.
            shape = ["tbf", "rate", "1gbit", "burst", "256kb", "latency", "20ms"]
            run([*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape])
        yield [["ip", "netns", "exec", name] for name in names]


def remove(name: str) -> None:
    """With a namespace go its processes' network and both ends of the link."""
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)
