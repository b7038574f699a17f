"""What a rank holds per parameter of a bfloat16 model that Adam trains with float32 masters.

    .venv/bin/python benchmarks/masters.py [--ranks 2] [--layers 25]
    .venv/bin/python benchmarks/masters.py --gbit 1 --layers 8

With --gbit, every rank is a host of its own behind a link of that rate (namespaces), and the rows
are iterations beside the same model in float32.

The model is 2000 x 2000 matrices in bfloat16, 100 M parameters with 25 layers; a layer casts its
weight to float32 to compute, since this kind of machine has no instructions for bfloat16. Columns:

  bytes     proportional set size per parameter after some steps, without what the process needed
            before the model was made and with gradients dropped: parameters, sums, masters, moments
  expected  2 + (4 + 12) / ranks for ours: narrow parameters; float32 sums, masters, two moments
  ms        an iteration on the slowest rank, the median of the last ones
  faster    ours beside the row, by these times
  sent      megabytes that a rank has sent per iteration
"""

import argparse
import ctypes
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peers.link import INTERFACE, linked_hosts
from rank_processes import Ranks, fork_context, slowest
from table import markdown
from workload import proc_bytes

WIDTH = 2000
STEPS = 5


def make_model(layers: int, dtype):
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
            self.weight = torch.nn.Parameter(weight.to(dtype))

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
        dtype = torch.float32 if name.endswith("float32") else torch.bfloat16
        self.model = make_model(layers, dtype)
        self.parameters = list(self.model.parameters())
        self.count = sum(p.numel() for p in self.parameters)
        self.backward = torch.Tensor.backward
        self.forward, self.step = getattr(self, name)()
        self.before = before

    def ours(self, **options):
        import shardstep
        import torch

        zero = shardstep.ZeroRedundancyOptimizer(
            self.parameters,
            torch.optim.Adam,
            lr=1e-3,
            fused=True,
            stage=2,
            sharding="element",
            **{"master_dtype": torch.float32, **options},
        )

        def step():
            zero.step()
            zero.zero_grad()

        return self.model, step

    def ours_on_link(self):
        return self.ours(exchange="pairwise")

    def ours_float32(self):
        return self.ours(exchange="pairwise", master_dtype=None)

    def ddp_float32(self):
        import torch

        ddp = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(self.parameters, lr=1e-3, fused=True)

        def step():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return ddp, step

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

    def deepspeed(self):
        import deepspeed
        import torch
        import torch.distributed as dist

        os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as its launcher does
        batch = self.inputs.shape[0]
        config = {
            "train_batch_size": batch * dist.get_world_size(),
            "train_micro_batch_size_per_gpu": batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
        }
        optimizer = torch.optim.Adam(self.parameters, lr=1e-3, fused=True)
        engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        self.backward = engine.backward  # step() forgets the gradients
        return engine, engine.step

    def measure(self) -> dict[str, float]:
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            self.backward(self.forward(self.inputs).float().square().mean())
            self.step()
            times.append(slowest(time.perf_counter() - begin)[0])
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        held = proc_bytes("smaps_rollup", "Pss") - self.before
        return {"bytes": held / self.count, "ms": statistics.median(times[1:])}


LINKED = {
    "ours_on_link": "shardstep, stage 2, bfloat16, masters",
    "ours_float32": "shardstep, stage 2, float32",
    "ddp_float32": "DDP, float32",
}


def on_links(context, layers: int, gbit: float) -> None:
    """Each contestant twice, in turns, because the machine drifts; the faster time counts."""
    table: dict[str, dict[str, float]] = {}
    for name in [*LINKED, *LINKED]:
        with linked_hosts(2, gbit) as hosts:
            networks = [(host.network(), INTERFACE) for host in hosts]
            with Ranks(context, 2, Contestant, (name, layers), networks) as processes:
                before = hosts[0].bytes_sent()
                ms = max(result["ms"] for result in processes.order("measure"))
                sent = (hosts[0].bytes_sent() - before) / STEPS / 1e6
        best = table.setdefault(LINKED[name], {"ms": ms, "sent": sent})
        best["ms"] = min(best["ms"], ms)
    ours = table[LINKED["ours_on_link"]]["ms"]
    columns = {
        "ms": lambda summary: f"{summary['ms']:.0f}",
        "ours is faster": lambda summary: f"{summary['ms'] / ours:.2f}x",
        "sent": lambda summary: f"{summary['sent']:.0f}",
    }
    print(markdown(f"2 ranks, {gbit:g} Gbit/s", columns, table))


def measure(name: str, ranks: int, layers: int) -> dict[str, float]:
    with Ranks(fork_context(), ranks, Contestant, (name, layers)) as processes:
        results = processes.order("measure")
    return {key: max(result[key] for result in results) for key in results[0]}


def measure_deepspeed(ranks: int, layers: int) -> dict[str, float] | None:
    """In its own environment, which benchmarks/peers has too; None, with the reason said."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
    import deepspeed_environment

    try:
        environment = deepspeed_environment.prepare()
    except deepspeed_environment.NotInstalled as error:
        print(f"DeepSpeed is skipped: {error}", file=sys.stderr)
        return None
    size = ["--ranks", str(ranks), "--layers", str(layers)]
    done = subprocess.run(
        [str(environment.python), __file__, "--only", "deepspeed", "--json", *size],
        env={**os.environ, **environment.variables},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    if done.returncode != 0:
        print(f"DeepSpeed is skipped: it ended with {done.returncode}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--only", choices=["ours", "ddp", "torch_zero", "deepspeed"])
    parser.add_argument("--gbit", type=float, help="the rate of a link between two hosts")
    parser.add_argument("--json", action="store_true", help="the readings of --only, as one line")
    options = parser.parse_args()
    if options.gbit is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces go too
        on_links(fork_context(), options.layers, options.gbit)
        return
    ranks, layers = options.ranks, options.layers
    if options.json:
        print(json.dumps(measure(options.only, ranks, layers)))
        return
    contestants = {
        "ours": ("shardstep, stage 2, masters", 2 + 16 / ranks),
        "ddp": ("DDP, masters by hand", 2 + 2 + 4 + 8),
        "torch_zero": ("DDP, torch's ZeRO over masters by hand", 2 + 2 + 4 + 8 / ranks),
        "deepspeed": ("DeepSpeed, ZeRO-2, bf16", 2 + 16 / ranks),
    }
    table: dict[str, dict[str, float]] = {}
    for name, (row, expected) in contestants.items():
        if options.only not in (None, name):
            continue
        alone = name == "deepspeed"
        found = measure_deepspeed(ranks, layers) if alone else measure(name, ranks, layers)
        if found is not None:
            table[row] = {**found, "expected": expected}
    ours = table.get(contestants["ours"][0])
    columns = {
        "bytes": lambda summary: f"{summary['bytes']:.2f}",
        "expected": lambda summary: f"{summary['expected']:.2f}",
        "ms": lambda summary: f"{summary['ms']:.0f}",
        "faster": lambda summary: f"{summary['ms'] / ours['ms']:.2f}x" if ours else "",
    }
    print(markdown(f"{ranks} ranks", columns, table))


if __name__ == "__main__":
    main()
