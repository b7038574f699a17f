"""One training iteration, side by side: Python's DDP, ours in C++, and the overlapped update.

The model is 20 x Linear(2000), Adam, batch 20, one thread per rank, on Gloo. Python and C++ take
turns in every round; the table shows each contestant's median over the rounds and its ratio to
C++ DDP followed by step() by parameter, in wall-clock time and in processor time (all ranks
together), which other load distorts less.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BASE = "C++ DDP, ZeRO step() by parameter"


def worker(layers: int, iterations: int) -> None:
    """Times Python's DDP on this rank; rank 0 prints name, milliseconds, processor milliseconds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = torch.randn(20, 2000)

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(2000, 2000) for _ in range(layers)))
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def measure(name: str, make_optimizer) -> None:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        times = []
        processors = torch.zeros(1, dtype=torch.float64)
        for i in range(3 + iterations):
            dist.barrier()
            begin, processors_before = time.perf_counter(), time.process_time()
            model.zero_grad()
            model(batch).square().mean().backward()
            if optimizer is not None:
                optimizer.step()
            slowest = torch.tensor([(time.perf_counter() - begin) * 1e3], dtype=torch.float64)
            used = (time.process_time() - processors_before) * 1e3
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if i >= 3:
                times.append(slowest.item())
                processors += used / iterations
        dist.all_reduce(processors)
        if dist.get_rank() == 0:
            print(f"{name}\t{statistics.median(times):.2f}\t{processors.item():.2f}", flush=True)

    adam = torch.optim.Adam
    measure("Python DDP alone", lambda params: None)
    measure("Python DDP, fused Adam", lambda params: adam(params, lr=1e-4, fused=True))
    measure(
        "Python DDP, torch's ZeRO, fused Adam",
        lambda params: ZeroRedundancyOptimizer(params, adam, lr=1e-4, fused=True),
    )
    dist.destroy_process_group()


class Cost(NamedTuple):
    milliseconds: float
    processors: float


def launch(ranks: int, command: list[str]) -> dict[str, Cost]:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*torchrun, "--nproc-per-node", str(ranks), *command],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    if result.returncode != 0:
        raise SystemExit(f"ddp.py: {' '.join(command)} failed with {result.returncode}")
    rows = (line.split("\t") for line in result.stdout.splitlines() if "\t" in line)
    return {name: Cost(float(milliseconds), float(used)) for name, milliseconds, used in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=7, help="timed iterations a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    numbers = [str(arguments.layers), str(arguments.iterations)]
    if arguments.worker:
        worker(arguments.layers, arguments.iterations)
        return

    program = str(arguments.build / "benchmarks" / "ddp_iteration")
    script = [__file__, "--worker", "--layers", numbers[0], "--iterations", numbers[1]]
    costs: dict[str, list[Cost]] = {}
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
        for command in (script, ["--no-python", "--", program, *numbers]):
            for name, cost in launch(arguments.ranks, command).items():
                costs.setdefault(name, []).append(cost)

    medians = {name: statistics.median(c.milliseconds for c in all) for name, all in costs.items()}
    processors = {name: statistics.median(c.processors for c in all) for name, all in costs.items()}
    print(f"{arguments.ranks} ranks, {arguments.layers} x Linear(2000), Adam, batch 20")
    print(f"{'':62} {'ms':>8} {'to step()':>10} {'processors':>11} {'to step()':>10}")
    for name, median in medians.items():
        clock, used = medians[BASE] / median, processors[BASE] / processors[name]
        print(f"{name:62} {median:8.1f} {clock:9.2f}x {processors[name]:11.1f} {used:9.2f}x")
    ratio = medians["Python DDP alone"] / medians["C++ DDP alone"]
    print(f"C++ DDP against Python's: {ratio:.2f}x as fast")
    alone = medians["C++ DDP alone"]
    for by in ("by parameter", "by element"):
        whole = medians[f"C++ DDP, ZeRO step() {by}"] - alone
        for way in ("", ", to owners", ", to owners, shared memory"):
            exposed = medians[f"C++ DDP, interleaved {by}{way}"] - alone
            print(f"hidden of the update {by}{way}: {1 - exposed / whole:.0%}")


if __name__ == "__main__":
    main()
