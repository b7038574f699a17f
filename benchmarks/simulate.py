"""What one iteration costs on many hosts: messages, bytes over a link, and time, by simulation.

For each exchange, a plan lists who sends how much to whom, in which stage; stages follow each other
except where they overlap with the backward pass. All hosts are alike, so that the plan of one host
stands for all, and a cluster of 1024 hosts takes no longer than one of two; for small clusters,
`transfers` lists every message, and tests compare the two.

A stage takes as long as the slowest of: a host's link, at its rate less the headers of TCP; the
messages of a rank, one after the other; and the chain of messages that wait for each other, at the
latency of the link. Compute is given: what one iteration takes without any communication.

    python benchmarks/simulate.py --check       against what was measured (docs/performance.md)
    python benchmarks/simulate.py --plot FILE   for 2 to 1024 hosts
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

TCP_EFFICIENCY = 1448 / 1514  # payload of an Ethernet frame


@dataclasses.dataclass(frozen=True)
class Cluster:
    hosts: int
    ranks_each: int
    gbit: float = 1.0
    latency: float = 50e-6  # seconds from one host to another
    message: float = 30e-6  # seconds of a rank's time for each message

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_each

    @property
    def rate(self) -> float:
        """Bytes per second and direction."""
        return self.gbit * 1e9 / 8 * TCP_EFFICIENCY


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, and what an iteration takes without communication, in seconds."""

    bytes: float = 20 * (2000 * 2000 + 2000) * 4
    bucket: float = 25 * 2**20
    forward: float = 0.15
    backward: float = 0.30
    update: float = 0.10  # of the whole model; a rank that owns a part of it takes less

    @property
    def buckets(self) -> int:
        return max(1, round(self.bytes / self.bucket))


@dataclasses.dataclass(frozen=True)
class Stage:
    """Communication whose messages may all be under way at the same time."""

    link: float  # bytes that a host sends over its link
    messages: float  # that a rank sends
    chain: float = 1  # messages between hosts that wait for each other
    busy: float = 1  # share of the links that work at the same time
    overlaps: bool = False  # with the backward pass

    def seconds(self, cluster: Cluster) -> float:
        slowest = max(self.link / cluster.rate / self.busy, self.messages * cluster.message)
        return slowest + self.chain * cluster.latency


@dataclasses.dataclass(frozen=True)
class Plan:
    stages: tuple[Stage, ...]
    update_share: float  # of the model, that a rank updates
    buckets: int

    def link_bytes(self) -> float:
        return sum(stage.link for stage in self.stages)

    def messages(self) -> float:
        return sum(stage.messages for stage in self.stages)

    def seconds(self, cluster: Cluster, work: Work) -> float:
        first = work.backward / self.buckets  # until a bucket is ready
        overlapped = sum(s.seconds(cluster) for s in self.stages if s.overlaps)
        after = sum(s.seconds(cluster) for s in self.stages if not s.overlaps)
        backward = first + max(work.backward - first, overlapped)
        return work.forward + backward + work.update * self.update_share + after


def all_reduce(cluster: Cluster, work: Work) -> Stage:
    """A ring, bucket by bucket: 2 (W - 1) steps, and each link is crossed once per step."""
    steps = 2 * (cluster.ranks - 1)
    return Stage(
        link=work.bytes * steps / cluster.ranks,
        messages=work.buckets * steps,
        chain=work.buckets * steps * cluster.hosts / cluster.ranks,
        overlaps=True,
    )


def ddp(cluster: Cluster, work: Work) -> Plan:
    return Plan((all_reduce(cluster, work),), 1, work.buckets)


def torch_zero(cluster: Cluster, work: Work) -> Plan:
    """An all-reduce, then each rank's shard by a broadcast; these follow each other. A tree is
    log2(hosts) links deep, each of which is crossed about log2(ranks of a host) + 1 times."""
    crossings, depth = cluster.ranks_each.bit_length(), (cluster.hosts - 1).bit_length()
    reached = (cluster.hosts - 1) / cluster.hosts
    broadcasts = Stage(
        link=work.bytes * reached * crossings,
        messages=cluster.ranks,
        chain=cluster.ranks * depth,
        busy=reached / depth,
    )
    return Plan((all_reduce(cluster, work), broadcasts), 1 / cluster.ranks, work.buckets)


def our_bucket(cluster: Cluster, work: Work) -> float:
    """default_bucket_cap_mb of src/shard/engine_options.cpp, in bytes."""
    return max(work.bucket, min(2**28, 2**18 * cluster.ranks))


def our_buckets(cluster: Cluster, work: Work) -> int:
    return max(1, round(work.bytes / our_bucket(cluster, work)))


def pairwise(cluster: Cluster, work: Work) -> Plan:
    """What each rank owns, between every two ranks: gradients there, parameters back."""
    link = work.bytes * cluster.ranks_each * (cluster.hosts - 1) / cluster.hosts
    buckets = our_buckets(cluster, work)
    gradients = Stage(link, buckets * (cluster.ranks - 1), overlaps=True)
    parameters = Stage(link, cluster.ranks - 1)
    return Plan((gradients, parameters), 1 / cluster.ranks, buckets)


def hierarchical(cluster: Cluster, work: Work) -> Plan:
    """What each host owns, between every two hosts; a rank speaks with one rank of each."""
    link = work.bytes * (cluster.hosts - 1) / cluster.hosts
    buckets = our_buckets(cluster, work)
    gradients = Stage(link, buckets * (cluster.hosts - 1), overlaps=True)
    parameters = Stage(link, cluster.hosts - 1)
    return Plan((gradients, parameters), 1 / cluster.ranks, buckets)


PLANS: dict[str, Callable[[Cluster, Work], Plan]] = {
    "DDP": ddp,
    "torch's ZeRO": torch_zero,
    "ours, pairwise": pairwise,
    "ours, hierarchical": hierarchical,
}


def transfers(name: str, cluster: Cluster, size: float) -> Iterator[tuple[int, int, float]]:
    """Source, target and bytes of each message that sums and gathers one bucket, between hosts."""
    each, ranks = cluster.ranks_each, range(cluster.ranks)
    share = size / cluster.ranks
    for a, b in itertools.permutations(ranks, 2):
        if a // each == b // each:
            continue
        if name == "ours, pairwise" or a % each == b % each:
            yield a, b, share  # gradients to the owner
            yield a, b, share  # parameters from the owner


# Milliseconds, on 2 cores: (cluster, compute alone, what was measured). Ranks share the cores.
MEASURED = (
    (Cluster(2, 1), 451, {"DDP": 3076, "torch's ZeRO": 5778, "ours, pairwise": 2948}),
    (Cluster(2, 2), 866, {"DDP": 4754, "torch's ZeRO": 10688, "ours, hierarchical": 3238}),
)


def check() -> list[tuple[str, Cluster, float, float]]:
    """Plan, cluster, simulated and measured seconds."""
    results = []
    for cluster, compute, measured in MEASURED:
        forward, update = compute / 3e3, 0.1 * cluster.ranks_each
        work = Work(forward=forward, backward=2 * forward, update=update)
        for name, milliseconds in measured.items():
            seconds = PLANS[name](cluster, work).seconds(cluster, work)
            results.append((name, cluster, seconds, milliseconds / 1e3))
    return results


def print_check() -> None:
    print("| | hosts x ranks | simulated, s | measured, s | off by |\n|---|---|---|---|---|")
    for name, cluster, simulated, measured in check():
        where = f"{cluster.hosts} x {cluster.ranks_each}"
        off = f"{simulated / measured - 1:+.0%}"
        print(f"| {name} | {where} | {simulated:.2f} | {measured:.2f} | {off} |")


def print_table(arguments: argparse.Namespace) -> None:
    work = Work(bytes=arguments.gigabytes * 1e9, forward=1, backward=2, update=1)
    print("| hosts x ranks | | MB over a link | messages of a rank | s |\n|---|---|---|---|---|")
    for hosts, ranks_each in itertools.product(arguments.hosts, arguments.ranks):
        cluster = Cluster(hosts, ranks_each, arguments.gbit, arguments.latency * 1e-6)
        for name, make in PLANS.items():
            plan = make(cluster, work)
            print(
                f"| {hosts} x {ranks_each} | {name} | {plan.link_bytes() / 1e6:.0f} "
                f"| {plan.messages():.0f} | {plan.seconds(cluster, work):.2f} |"
            )


def plot(arguments: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    work = Work(bytes=arguments.gigabytes * 1e9, forward=1, backward=2, update=1)
    hosts = [2**power for power in range(1, 11)]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharey=True)
    for axis, ranks_each in zip(axes, (1, 8, 64), strict=True):
        for name, make in PLANS.items():
            clusters = [
                Cluster(h, ranks_each, arguments.gbit, arguments.latency * 1e-6) for h in hosts
            ]
            axis.plot(hosts, [make(c, work).seconds(c, work) for c in clusters], label=name)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="hosts",
            title=f"{ranks_each} rank" + "s" * (ranks_each > 1) + " per host",
        )
    axes[0].set_ylabel(
        f"seconds per iteration\n{arguments.gigabytes:g} GB, {arguments.gbit:g} Gbit/s per host"
    )
    axes[0].legend(fontsize=8)
    figure.savefig(arguments.plot, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--check", action="store_true", help="only this")
    add("--hosts", type=int, nargs="+", default=[2, 8, 64, 1024])
    add("--ranks", type=int, nargs="+", default=[1, 8, 64], help="on each host")
    add("--gigabytes", type=float, default=4, help="of parameters (default 4)")
    add("--gbit", type=float, default=25, help="of a host's link (default 25)")
    add("--latency", type=float, default=50, help="microseconds (default 50)")
    add("--plot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.check:
        print_check()
    elif arguments.plot:
        plot(arguments)
    else:
        print_table(arguments)


if __name__ == "__main__":
    main()
