"""One rank of one contestant. Run by `python benchmarks/peers`, also by DeepSpeed's own Python.

Reads orders from its input, one per line, and answers each with a line of JSON. The ranks of the
Gloo group find each other through a file, which also works across network namespaces.
"""

import argparse
import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workload import make_model, proc_bytes, tcp_bytes_sent

LEARNING_RATE = 1e-4
SAMPLED = 2  # iterations while a thread reads the memory
SAMPLE_EVERY = 0.01


class Contestant(NamedTuple):
    forward: Callable
    zero_grad: Callable[[], None]
    backward: Callable[[torch.Tensor], None]
    step: Callable[[], None]
    settle: Callable[[], None] = lambda: None  # returns when nothing that a step left travels


def with_optimizer(forward: Callable, optimizer: torch.optim.Optimizer) -> Contestant:
    return Contestant(forward, optimizer.zero_grad, torch.Tensor.backward, optimizer.step)


def make_compute(model: torch.nn.Module) -> Contestant:
    return Contestant(model, model.zero_grad, torch.Tensor.backward, lambda: None)


def make_ddp(model: torch.nn.Module, **defaults) -> Contestant:
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return with_optimizer(ddp, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, **defaults))


def make_zero(model: torch.nn.Module, ours: bool, ddp: bool, **options) -> Contestant:
    """Torch's class or ours, under DDP or (our stage 2) without."""
    if "gradient_dtype" in options:
        options["gradient_dtype"] = getattr(torch, options["gradient_dtype"])
    if options.get("overlap_forward"):
        options["overlap_forward"] = model
    from torch.nn.parallel import DistributedDataParallel

    if ours:
        from shardstep import ZeroRedundancyOptimizer
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

    forward = DistributedDataParallel(model, gradient_as_bucket_view=True) if ddp else model
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=LEARNING_RATE, **options
    )
    contestant = with_optimizer(forward, optimizer)
    return contestant._replace(settle=optimizer.wait) if ours else contestant


def make_fsdp2(model: torch.nn.Module) -> Contestant:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    return with_optimizer(model, optimizer)


def make_deepspeed(model: torch.nn.Module, stage: int) -> Contestant:
    import deepspeed

    batch = 20
    config = {
        "train_batch_size": batch * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return Contestant(engine, lambda: None, engine.backward, engine.step)  # step() zeroes


MAKERS = {
    "compute": make_compute,
    "ddp": make_ddp,
    "zero": make_zero,
    "fsdp2": make_fsdp2,
    "deepspeed": make_deepspeed,
}


@contextlib.contextmanager
def memory_sampler(samples: list[int]) -> Iterator[None]:
    """A thread that reads the proportional set size. It slows page faults: time nothing."""
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_EVERY):
            samples.append(proc_bytes("smaps_rollup", "Pss"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Rank:
    """The orders; each is collective."""

    def __init__(self, contestant: Contestant, loss_of: Callable):
        self.contestant = contestant
        self.loss_of = loss_of

    def iterate(self, count: int) -> dict[str, float]:
        """An iteration, on the average. Times are the slowest rank's, the loss the ranks' mean."""
        dist.barrier()
        begin, cpu, sent, stepped = time.perf_counter(), time.process_time(), tcp_bytes_sent(), 0.0
        for _ in range(count):
            self.contestant.zero_grad()
            loss = self.loss_of(self.contestant.forward)
            self.contestant.backward(loss)
            stepping = time.perf_counter()
            self.contestant.step()
            stepped += time.perf_counter() - stepping
        self.contestant.settle()
        end, cpu, sent = time.perf_counter(), time.process_time() - cpu, tcp_bytes_sent() - sent
        slowest = torch.tensor([end - begin, stepped], dtype=torch.float64) * 1e3 / count
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        mean = loss.detach().double() / dist.get_world_size()
        dist.all_reduce(mean)
        iteration, step = slowest.tolist()
        return {
            "iteration": iteration,
            "step": step,
            "cpu": cpu * 1e3 / count,
            "sent": sent / count,
            "loss": mean.item(),
        }

    def sample(self) -> dict[str, float]:
        samples: list[int] = []
        with memory_sampler(samples):
            self.iterate(SAMPLED)
        return {"pss": max(samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maker", choices=MAKERS, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--model", choices=("linear", "tiny"), default="linear")
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    # What contestants print goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    torch.set_num_threads(1)
    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(arguments.store, world_size),
        rank=number,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=arguments.timeout),
    )
    model, loss_of = make_model(arguments.model, number, arguments.layers)
    contestant = MAKERS[arguments.maker](model, **arguments.options)
    rank = Rank(contestant, loss_of)
    for line in sys.stdin:
        order, *values = json.loads(line)
        answers.write(json.dumps(getattr(rank, order)(*values)) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
