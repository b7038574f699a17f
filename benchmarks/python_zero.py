"""One training iteration in Python, side by side: plain DDP, torch's ZeRO, and ours in stage 1.

Every contestant is compared with torch's ZeRO. Both run in their own processes, forked from one
that has torch loaded, on Gloo, one thread per rank, and alternate iterations, so that other load
affects both. Columns:

  iteration    milliseconds of zero_grad, forward, backward and step, on the slowest rank
  x torch      the iteration of torch's ZeRO divided by this one's: the median of the turns' ratios
  step         milliseconds of step() alone, on the slowest rank, and torch's divided by it
  CPU          milliseconds of processor time per iteration, all ranks and their threads
  PSS          peak proportional set size of a rank, read after each iteration
  sent         MB that a rank's TCP sockets sent per iteration, gradients included
  consolidate  milliseconds of consolidate_state_dict(to=0), once, and torch's divided by it
  extra        MB by which the resident set of the other ranks grew meanwhile, at its peak

Medians over the turns; PSS is the largest. MB are 10^6 bytes.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_processes import Ranks, fork_context, slowest
from table import Table, draw_iterations, markdown
from workload import ExtraMemory, make_model, proc_bytes, tcp_bytes_sent

TORCH = "torch's ZeRO"
OURS = {
    "ours, by parameter": {"sharding": "parameter"},
    "ours, by element": {"sharding": "element"},
    "ours, by element, pairwise": {"sharding": "element", "exchange": "pairwise"},
    "ours, by parameter, bucket view": {
        "sharding": "parameter",
        "parameters_as_bucket_view": True,
    },
    "ours, by element, bucket view": {"sharding": "element", "parameters_as_bucket_view": True},
}
ROWS = ("plain DDP", TORCH, *OURS)
MODELS = ("linear", "transformer")
OPTIMIZERS = {"adam": {}, "fused": {"fused": True}}
WARM_UP = 2  # DDP rebuilds its buckets after the first backward pass


@dataclasses.dataclass(frozen=True)
class Case:
    """A table."""

    optimizer: str
    model: str
    ranks: int

    def __str__(self) -> str:
        names = {"linear": "20 x Linear(2000)", "transformer": "12-layer transformer"}
        optimizer = {"adam": "Adam", "fused": "Adam(fused=True)"}[self.optimizer]
        return f"{names[self.model]}, {optimizer}, {self.ranks} ranks"


# -- on a rank -------------------------------------------------------------------------------------


def make_optimizer(row: str, parameters, defaults: dict[str, Any]):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    adam = torch.optim.Adam
    if row == "plain DDP":
        return adam(parameters, lr=1e-4, **defaults)
    if row == TORCH:
        return TorchZero(parameters, adam, lr=1e-4, **defaults)
    from shardstep import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, adam, lr=1e-4, **OURS[row], **defaults)


class Contestant:
    """What one rank of a contestant does when it is told to. Times are the slowest rank's."""

    def __init__(self, row: str, case: Case):
        from torch.nn.parallel import DistributedDataParallel

        model, self.loss_of = make_model(case.model)
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = make_optimizer(row, model.parameters(), OPTIMIZERS[case.optimizer])

    def iterate(self) -> dict[str, float]:
        import torch.distributed as dist

        dist.barrier()
        sent, cpu = tcp_bytes_sent(), time.process_time()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss_of(self.ddp).backward()
        stepping = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        sent, cpu = tcp_bytes_sent() - sent, time.process_time() - cpu
        iteration, step = slowest(end - begin, end - stepping)
        pss = proc_bytes("smaps_rollup", "Pss")
        return {"iteration": iteration, "step": step, "cpu": cpu * 1e3, "sent": sent, "pss": pss}

    def consolidate(self) -> dict[str, float]:
        import torch.distributed as dist

        if not hasattr(self.optimizer, "consolidate_state_dict"):
            return {}
        dist.barrier()
        memory = ExtraMemory()
        begin = time.perf_counter()
        self.optimizer.consolidate_state_dict(to=0)
        [milliseconds] = slowest(time.perf_counter() - begin)
        return {"consolidate": milliseconds, "extra": memory.bytes()}


# -- the parent ------------------------------------------------------------------------------------


def ranks_of(context, row: str, case: Case) -> Ranks:
    return Ranks(context, case.ranks, Contestant, (row, case))


def iterate(ranks: Ranks) -> dict[str, float]:
    """Times, all ranks' processor time, and the largest rank's sizes."""
    results = ranks.order("iterate")
    largest = {key: max(result[key] for result in results) for key in ("pss", "sent")}
    return results[0] | largest | {"cpu": sum(result["cpu"] for result in results)}


def consolidate(ranks: Ranks) -> dict[str, float]:
    """Rank 0 is where the state goes."""
    results = ranks.order("consolidate")
    if not results[0]:
        return {}
    extra = max(result["extra"] for result in results[1:])
    return results[0] | {"extra": extra, "target extra": results[0]["extra"]}


Turns = list[dict[str, float]]


@dataclasses.dataclass
class Duel:
    """What both did, turn by turn."""

    torch: Turns
    other: Turns
    consolidated: dict[str, float]

    def ratio(self, key: str) -> float:
        """How many times as fast the other is."""
        pairs = zip(self.torch, self.other, strict=True)
        return statistics.median(torch[key] / other[key] for torch, other in pairs)


def fight(context, row: str, case: Case, turns: int) -> Duel:
    with ranks_of(context, TORCH, case) as torch, ranks_of(context, row, case) as other:
        duel = Duel([], [], {})
        for turn in range(WARM_UP + turns):
            both = [(torch, duel.torch), (other, duel.other)]
            for ranks, results in both if turn % 2 else reversed(both):
                result = iterate(ranks)
                if turn >= WARM_UP:
                    results.append(result)
        duel.consolidated = consolidate(other)
        return duel


def consolidate_torch(context, case: Case) -> dict[str, float]:
    """Once a table: it takes as long as all else together."""
    with ranks_of(context, TORCH, case) as torch:
        for _ in range(WARM_UP):
            iterate(torch)
        return consolidate(torch)


def summarize(turns: Turns, consolidated: dict[str, float]) -> dict[str, float]:
    summary = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    summary["pss"] = max(turn["pss"] for turn in turns)
    return summary | consolidated


def make_table(duels: dict[str, Duel], consolidated: dict[str, float]):
    """Rows of figures; torch's own from all duels."""
    table = {"plain DDP": {}} if "plain DDP" in duels else {}
    turns = [turn for duel in duels.values() for turn in duel.torch]
    table[TORCH] = summarize(turns, consolidated) | {"x torch": 1.0, "step x torch": 1.0}
    for row, duel in duels.items():
        ratios = {"x torch": duel.ratio("iteration"), "step x torch": duel.ratio("step")}
        table[row] = summarize(duel.other, duel.consolidated) | ratios
    for summary in table.values():
        if "consolidate" in summary:
            summary["consolidate x torch"] = consolidated["consolidate"] / summary["consolidate"]
    return table


COLUMNS: dict[str, Callable[[dict[str, float]], str]] = {
    "iteration, ms": lambda s: f"{s['iteration']:.0f}",
    "x torch": lambda s: f"{s['x torch']:.2f}x",
    "step, ms": lambda s: f"{s['step']:.0f}",
    "x torch's step": lambda s: f"{s['step x torch']:.2f}x",
    "CPU, ms": lambda s: f"{s['cpu']:.0f}",
    "PSS, MB": lambda s: f"{s['pss'] / 1e6:.0f}",
    "sent, MB": lambda s: f"{s['sent'] / 1e6:.0f}",
    "consolidate, ms": lambda s: f"{s['consolidate']:.0f}" if "extra" in s else "",
    "x torch's consolidate": lambda s: f"{s['consolidate x torch']:.1f}x" if "extra" in s else "",
    "extra, MB": lambda s: f"{s['extra'] / 1e6:.0f}" if "extra" in s else "",
}


def plot(tables: dict[Case, Table], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    size = (11, 0.6 + 2.3 * len(tables))
    figure, axes = pyplot.subplots(
        len(tables), 2, figsize=size, squeeze=False, layout="constrained", sharey="row"
    )
    for (left, right), (case, table) in zip(axes, tables.items(), strict=True):
        rows = draw_iterations(left, str(case), table)
        consolidate = [table[row].get("consolidate", 0) for row in rows]
        right.barh(rows, consolidate, color="tab:orange")
        right.set_title("consolidate_state_dict()", fontsize=10)
        right.set_xlabel("ms")
    axes[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4])
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    rows = [row for row in ROWS if row != TORCH]
    add("--rows", nargs="+", choices=rows, default=rows, help="who meets torch's ZeRO")
    add("--turns", type=int, default=10, help="iterations of each in a duel (default 10)")
    add("--json", type=Path, metavar="FILE", help="write every reading to this file")
    add("--plot", type=Path, metavar="FILE", help="draw the tables (png, pdf or svg)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    context = fork_context()

    cases = [
        Case(optimizer, model, ranks)
        for optimizer in arguments.optimizers
        for model in arguments.models
        for ranks in arguments.ranks
    ]

    def say(done: int, text: str) -> None:
        total = len(cases) * (len(arguments.rows) + 1)
        print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

    done, report, tables = 0, [], {}
    for case in cases:
        duels = {}
        for row in arguments.rows:
            duels[row] = fight(context, row, case, arguments.turns)
            done += 1
            ratio = duels[row].ratio("iteration")
            say(done, f"{case}: {row} {ratio:.2f}x as fast as {TORCH}")
        consolidated = consolidate_torch(context, case)
        done += 1
        say(done, f"{case}: {TORCH} consolidated")
        tables[case] = make_table(duels, consolidated)
        print(f"\n{markdown(str(case), COLUMNS, tables[case])}", flush=True)
        turns = {row: dataclasses.asdict(duel) for row, duel in duels.items()}
        report.append({**dataclasses.asdict(case), "duels": turns, "table": tables[case]})
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(tables, arguments.plot)


if __name__ == "__main__":
    main()
