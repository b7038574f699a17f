"""One rank of one contestant. Run by `python benchmarks/peers`, also by DeepSpeed's own Python.

The group is Gloo's, found through a file, so that ranks in other network namespaces meet too.
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
WARM_UP = 3  # DDP rebuilds its buckets after the first backward pass
SAMPLED = 2  # iterations after the timed ones, while a thread reads the memory
SAMPLE_EVERY = 0.01


class Contestant(NamedTuple):
    forward: Callable
    zero_grad: Callable[[], None]
    backward: Callable[[torch.Tensor], None]
    step: Callable[[], None]


def with_optimizer(forward: Callable, optimizer: torch.optim.Optimizer) -> Contestant:
    return Contestant(forward, optimizer.zero_grad, torch.Tensor.backward, optimizer.step)


def make_compute(model: torch.nn.Module) -> Contestant:
    return Contestant(model, model.zero_grad, torch.Tensor.backward, lambda: None)


def make_ddp(model: torch.nn.Module, bucket_view: bool = True, **defaults) -> Contestant:
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
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
    return with_optimizer(forward, optimizer)


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


def measure(contestant: Contestant, loss_of: Callable, iterations: int) -> dict[str, list[float]]:
    """What this rank saw; times are the slowest rank's, the loss is the ranks' mean."""
    readings: dict[str, list[float]] = {
        key: [] for key in ("iteration", "step", "cpu", "sent", "loss")
    }

    end, sent = time.perf_counter(), tcp_bytes_sent()

    def iterate() -> None:
        # From the end of one step to that of the next: what a step has left travelling must not
        # arrive while no clock runs.
        nonlocal end, sent
        begin, sent_before, cpu = end, sent, time.process_time()
        dist.barrier()
        contestant.zero_grad()
        loss = loss_of(contestant.forward)
        contestant.backward(loss)
        stepping = time.perf_counter()
        contestant.step()
        end = time.perf_counter()
        sent, cpu = tcp_bytes_sent(), time.process_time() - cpu
        slowest = torch.tensor([end - begin, end - stepping], dtype=torch.float64) * 1e3
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        mean = loss.detach().double() / dist.get_world_size()
        dist.all_reduce(mean)
        seen = (*slowest.tolist(), cpu * 1e3, sent - sent_before, mean.item())
        for values, value in zip(readings.values(), seen, strict=True):
            values.append(value)

    for _ in range(WARM_UP + iterations):
        iterate()
    result = {key: values[WARM_UP:] for key, values in readings.items()}
    result["pss"] = []
    with memory_sampler(result["pss"]):
        for _ in range(SAMPLED):
            iterate()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maker", choices=MAKERS, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(arguments.store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=arguments.timeout),
    )
    model, loss_of = make_model("linear", rank, arguments.layers)
    contestant = MAKERS[arguments.maker](model, **arguments.options)
    result = measure(contestant, loss_of, arguments.iterations)
    arguments.result.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
