"""One training iteration in Python, side by side: plain DDP, torch's ZeRO, and ours in stage 1.

Every contestant runs in processes of its own, forked from one that has torch loaded, on Gloo, one
thread a rank. Rounds are interleaved: in each, all contestants run once. Columns:

  iteration    milliseconds of zero_grad, forward, backward and step, on the slowest rank
  x torch      torch's ZeRO's iteration to this one's: the median of each round's ratio
  step         milliseconds of step() alone, on the slowest rank
  CPU          milliseconds of processor time of an iteration, all ranks and their threads
  PSS          peak proportional set size of a rank, looked at after each iteration
  sent         MB that a rank's TCP sockets sent in an iteration, gradients included
  consolidate  milliseconds of consolidate_state_dict(to=0), and torch's to it; in the first round
  extra        MB by which the resident set of the other ranks grew meanwhile, at its peak

Medians over iterations and rounds; PSS is the largest. MB are 10^6 bytes.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import make_model, proc_bytes, tcp_bytes_sent

TORCH = "torch's ZeRO"
OURS = {
    "ours, by parameter": {"sharding": "parameter"},
    "ours, by element": {"sharding": "element"},
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
TIMEOUT = 600


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


def measure(row: str, case: Case, iterations: int, consolidate: bool) -> dict[str, list[float]]:
    """What this rank saw. Times are the slowest rank's."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, loss_of = make_model(case.model)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(row, model.parameters(), OPTIMIZERS[case.optimizer])
    keys = ("iteration", "step", "cpu", "pss", "sent")
    result: dict[str, list[float]] = {key: [] for key in keys}

    def slowest(*seconds: float) -> list[float]:
        milliseconds = torch.tensor(seconds, dtype=torch.float64) * 1e3
        dist.all_reduce(milliseconds, dist.ReduceOp.MAX)
        return milliseconds.tolist()

    for i in range(WARM_UP + iterations):
        dist.barrier()
        sent, cpu = tcp_bytes_sent(), time.process_time()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(ddp).backward()
        stepping = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        sent, cpu = tcp_bytes_sent() - sent, time.process_time() - cpu
        iteration, step = slowest(end - begin, end - stepping)
        if i >= WARM_UP:
            result["iteration"].append(iteration)
            result["step"].append(step)
            result["cpu"].append(cpu * 1e3)
            result["sent"].append(sent)
            result["pss"].append(proc_bytes("smaps_rollup", "Pss"))

    if consolidate and hasattr(optimizer, "consolidate_state_dict"):
        gc.collect()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        resident = proc_bytes("status", "VmRSS")
        begin = time.perf_counter()
        optimizer.consolidate_state_dict(to=0)
        result["consolidate"] = slowest(time.perf_counter() - begin)
        result["extra"] = [proc_bytes("status", "VmHWM") - resident]
    return result


def rank_main(pipe, store: str, rank: int, world_size: int, turn: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    pipe.send(measure(*turn))
    dist.destroy_process_group()


# -- the parent ------------------------------------------------------------------------------------


def run(
    context, row: str, case: Case, iterations: int, consolidate: bool
) -> dict[str, list[float]]:
    """One contestant's turn: times, and the largest rank's sizes."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(case.ranks):
            ours, theirs = context.Pipe()
            turn = (row, case, iterations, consolidate)
            arguments = (theirs, f"{folder}/store", rank, case.ranks, turn)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ranks.append((ours, process))
        try:
            results = [pipe.recv() if pipe.poll(TIMEOUT) else None for pipe, _ in ranks]
        except EOFError:
            results = [None]
        finally:
            for _, process in ranks:
                process.join(10)
                process.kill()
        if None in results:
            raise SystemExit(f"python_zero.py: {row} failed ({case})")
    merged = {key: results[0][key] for key in results[0]}
    for key in ("pss", "sent"):
        merged[key] = [max(values) for values in zip(*(r[key] for r in results), strict=True)]
    merged["cpu"] = [sum(values) for values in zip(*(r["cpu"] for r in results), strict=True)]
    if "extra" in merged:  # rank 0 is where the state goes
        merged["extra"] = [max(r["extra"][0] for r in results[1:])]
        merged["target_extra"] = results[0]["extra"]
    return merged


Rounds = list[dict[str, dict[str, list[float]]]]


def summarize(rounds: Rounds, row: str) -> dict[str, float]:
    middle = statistics.median

    def median(key: str) -> float:
        return middle(value for turn in rounds for value in turn[row].get(key, ()))

    def against_torch(key: str) -> float:
        turns = [turn for turn in rounds if key in turn[row]]
        return middle(middle(turn[TORCH][key]) / middle(turn[row][key]) for turn in turns)

    summary = {key: median(key) for key in ("iteration", "step", "cpu", "sent")}
    summary["pss"] = max(value for turn in rounds for value in turn[row]["pss"])
    summary["x torch"] = against_torch("iteration")
    if "consolidate" in rounds[0][row]:
        for key in ("consolidate", "extra", "target_extra"):
            summary[key] = median(key)
        summary["consolidate x torch"] = against_torch("consolidate")
    return summary


COLUMNS: dict[str, Callable[[dict[str, float]], str]] = {
    "iteration, ms": lambda s: f"{s['iteration']:.0f}",
    "x torch": lambda s: f"{s['x torch']:.2f}x",
    "step, ms": lambda s: f"{s['step']:.0f}",
    "CPU, ms": lambda s: f"{s['cpu']:.0f}",
    "PSS, MB": lambda s: f"{s['pss'] / 1e6:.0f}",
    "sent, MB": lambda s: f"{s['sent'] / 1e6:.0f}",
    "consolidate, ms": lambda s: f"{s['consolidate']:.0f}" if "extra" in s else "",
    "x torch's": lambda s: f"{s['consolidate x torch']:.1f}x" if "extra" in s else "",
    "extra, MB": lambda s: f"{s['extra'] / 1e6:.0f}" if "extra" in s else "",
}


def markdown(case: Case, table: dict[str, dict[str, float]]) -> str:
    lines = [f"| {case} | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for row, summary in table.items():
        cells = " | ".join(cell(summary) for cell in COLUMNS.values())
        lines.append(f"| {row} | {cells} |")
    return "\n".join(lines)


def plot(tables: dict[Case, dict[str, dict[str, float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    size = (11, 0.6 + 2.3 * len(tables))
    figure, axes = pyplot.subplots(
        len(tables), 2, figsize=size, squeeze=False, layout="constrained", sharey="row"
    )
    for (left, right), (case, table) in zip(axes, tables.items(), strict=True):
        rows = list(reversed(table))
        step = [table[row]["step"] for row in rows]
        rest = [table[row]["iteration"] - table[row]["step"] for row in rows]
        left.barh(rows, rest, color="lightgray", label="forward and backward")
        left.barh(rows, step, left=rest, color="tab:blue", label="step()")
        left.set_title(str(case), fontsize=10)
        left.set_xlabel("ms an iteration")
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
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="torch's ZeRO always runs")
    add("--rounds", type=int, default=3)
    add("--iterations", type=int, default=5, help="timed iterations a round (default 5)")
    add("--json", type=Path, metavar="FILE", help="write every reading to this file")
    add("--plot", type=Path, metavar="FILE", help="draw the tables (png, pdf or svg)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.optim", "shardstep"])

    cases = [
        Case(optimizer, model, ranks)
        for optimizer in arguments.optimizers
        for model in arguments.models
        for ranks in arguments.ranks
    ]
    rows = [row for row in ROWS if row in {*arguments.rows, TORCH}]
    total, done = len(cases) * arguments.rounds * len(rows), 0
    readings: dict[Case, Rounds] = {}
    for case in cases:
        readings[case] = []
        for number in range(arguments.rounds):
            turn = {}
            # Each round starts with another contestant, so that none always follows the same one.
            for row in rows[number % len(rows) :] + rows[: number % len(rows)]:
                turn[row] = run(context, row, case, arguments.iterations, consolidate=number == 0)
                done += 1
                milliseconds = statistics.median(turn[row]["iteration"])
                print(
                    f"[{done}/{total}] round {number + 1}, {case}, {row}: {milliseconds:.0f} ms",
                    file=sys.stderr,
                    flush=True,
                )
            readings[case].append(turn)

    tables = {
        case: {row: summarize(rounds, row) for row in rows} for case, rounds in readings.items()
    }
    for case, table in tables.items():
        print(f"\n{markdown(case, table)}", flush=True)
    if arguments.json:
        report = [
            {**dataclasses.asdict(case), "rounds": readings[case], "summary": table}
            for case, table in tables.items()
        ]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(tables, arguments.plot)


if __name__ == "__main__":
    main()
