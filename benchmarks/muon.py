"""step() of Muon over GPT-2's hidden matrices, divided among the ranks by their operations.

    .venv/bin/python benchmarks/muon.py [--ranks 4] [--width 384] [--layers 12]

Each rank is a process with one thread. Columns:

  ms     step() on the slowest rank, the median: the update and, if it is divided, the exchange
  flops  the most operations that a rank has, as a multiple of an even share
"""

import argparse
import statistics
import time

from rank_processes import Ranks, fork_context, slowest
from table import markdown

STEPS = 4


class Contestant:
    def __init__(self, name: str, width: int, layers: int) -> None:
        import shardstep
        import torch

        torch.manual_seed(0)
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape)) for _ in range(layers) for shape in shapes
        ]
        if name == "replicated":
            self.optimizer = torch.optim.Muon(self.parameters, lr=0.02)
            return
        cost = {"cost": torch.numel} if name == "by elements" else {}
        self.optimizer = shardstep.ZeroRedundancyOptimizer(
            self.parameters, torch.optim.Muon, lr=0.02, **cost
        )

    def measure(self) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        times = []
        for step in range(STEPS):
            torch.manual_seed(step)
            for parameter in self.parameters:
                parameter.grad = torch.randn_like(parameter)
            dist.barrier()
            begin = time.perf_counter()
            self.optimizer.step()
            times.append(slowest(time.perf_counter() - begin)[0])
        return {"ms": statistics.median(times[1:]), "flops": self.flops()}

    def flops(self) -> float:
        import torch.distributed as dist
        from shardstep._C import muon_cost

        ranks = dist.get_world_size()
        costs = [muon_cost(parameter.detach()) for parameter in self.parameters]
        if not hasattr(self.optimizer, "_param_to_rank"):
            return float(ranks)
        own = [0.0] * ranks
        for parameter, cost in zip(self.parameters, costs, strict=True):
            own[self.optimizer._param_to_rank[parameter]] += cost
        return max(own) / (sum(costs) / ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    context = fork_context()
    table = {}
    for name in ("replicated", "by elements", "by operations"):
        arguments = (name, options.width, options.layers)
        with Ranks(context, options.ranks, Contestant, arguments) as processes:
            table[name] = processes.order("measure")[0]
    columns = {
        "ms": lambda summary: f"{summary['ms']:.0f}",
        "flops": lambda summary: f"{summary['flops']:.2f}x",
    }
    print(markdown(f"{options.ranks} ranks", columns, table))


if __name__ == "__main__":
    main()
