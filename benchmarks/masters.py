"""What a rank holds per parameter of a bfloat16 model that Adam trains with float32 masters.

    .venv/bin/python benchmarks/masters.py [--ranks 2] [--layers 25]

The model is 2000 x 2000 matrices in bfloat16, 100 M parameters with 25 layers; a layer casts its
weight to float32 to compute, since this kind of machine has no instructions for bfloat16. Columns:

  bytes     proportional set size per parameter after some steps, without what the process needed
            before the model was made and with gradients dropped: parameters, sums, masters, moments
  expected  2 + (4 + 12) / ranks for ours: narrow parameters; float32 sums, masters, two moments
  ms        an iteration on the slowest rank, the median of the last ones
"""

import argparse
import ctypes
import gc
import statistics
import time

from rank_processes import Ranks, fork_context, slowest
from table import markdown
from workload import proc_bytes

WIDTH = 2000
STEPS = 5


def make_model(layers: int):
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH**0.5
            self.weight = torch.nn.Parameter(weight)

        def forward(self, inputs):
            return torch.nn.functional.linear(inputs, self.weight.float())

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer() for _ in range(layers)))


class Contestant:
    def __init__(self, name: str, layers: int) -> None:
        import torch

        gc.collect()
        self.inputs = torch.randn(8, WIDTH)
        before = proc_bytes("smaps_rollup", "Pss")
        self.model = make_model(layers)
        self.parameters = list(self.model.parameters())
        self.count = sum(p.numel() for p in self.parameters)
        self.forward, self.step = getattr(self, name)()
        self.before = before

    def ours(self):
        import shardstep
        import torch

        zero = shardstep.ZeroRedundancyOptimizer(
            self.parameters,
            torch.optim.Adam,
            lr=1e-3,
            fused=True,
            stage=2,
            sharding="element",
            master_dtype=torch.float32,
        )

        def step():
            zero.step()
            zero.zero_grad()

        return self.model, step

    def by_hand(self, make):
        """DDP, float32 copies of all parameters, and the rounding of what was updated."""
        import torch

        ddp = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        optimizer = make(masters)

        def step():
            for parameter, master in zip(self.parameters, masters, strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter, master in zip(self.parameters, masters, strict=True):
                    parameter.copy_(master)

        return ddp, step

    def ddp(self):
        import torch

        return self.by_hand(lambda masters: torch.optim.Adam(masters, lr=1e-3, fused=True))

    def torch_zero(self):
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return self.by_hand(
            lambda masters: ZeroRedundancyOptimizer(masters, torch.optim.Adam, lr=1e-3, fused=True)
        )

    def measure(self) -> dict[str, float]:
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            self.forward(self.inputs).square().mean().backward()
            self.step()
            times.append(slowest(time.perf_counter() - begin)[0])
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        held = proc_bytes("smaps_rollup", "Pss") - self.before
        return {"bytes": held / self.count, "ms": statistics.median(times[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--only", choices=["ours", "ddp", "torch_zero"])
    options = parser.parse_args()
    context = fork_context()
    ranks = options.ranks
    contestants = {
        "ours": ("shardstep, stage 2, masters", 2 + 16 / ranks),
        "ddp": ("DDP, masters by hand", 2 + 2 + 4 + 8),
        "torch_zero": ("DDP, torch's ZeRO over masters by hand", 2 + 2 + 4 + 8 / ranks),
    }
    table = {}
    for name, (row, expected) in contestants.items():
        if options.only not in (None, name):
            continue
        with Ranks(context, ranks, Contestant, (name, options.layers)) as processes:
            results = processes.order("measure")
        table[row] = {
            "bytes": max(result["bytes"] for result in results),
            "expected": expected,
            "ms": max(result["ms"] for result in results),
        }
    columns = {
        "bytes": lambda summary: f"{summary['bytes']:.2f}",
        "expected": lambda summary: f"{summary['expected']:.2f}",
        "ms": lambda summary: f"{summary['ms']:.0f}",
    }
    print(markdown(f"{ranks} ranks", columns, table))


if __name__ == "__main__":
    main()
