"""One rank of a loop of one's own: loops.py WAY FOLDER [bf16], started by torchrun, except for ray,
which starts its ranks itself. What is written is that of trainers.py.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import HALF, KINDS, STEPS, Loop, make_model, make_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_loop(kind: str, bf16: bool) -> Loop:
    model = forward = make_model()
    if kind != "stage2":
        forward = DistributedDataParallel(model)
    return Loop(model, forward, make_optimizer(kind, model.parameters()), bf16)


def dcp(kind: str, folder: Path, bf16: bool) -> dict:
    """Saves and loads with torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    def state_of(loop: Loop) -> dict:
        optimizer = loop.optimizer
        state = optimizer.state_dict() if kind == "plain" else optimizer.sharded_state_dict()
        return {
            "model": loop.model.state_dict(),
            "optimizer": state,
            "schedule": loop.schedule.state_dict(),
        }

    whole = make_loop(kind, bf16)
    whole.train(range(HALF))
    dcp.save(state_of(whole), checkpoint_id=folder / f"{kind}.dcp")
    whole.train(range(HALF, STEPS))

    resumed = make_loop(kind, bf16)
    if kind == "plain":  # DCP fills the tensors that it is given
        resumed.train(range(1))
        resumed.losses.clear()
    state = state_of(resumed)
    dcp.load(state, checkpoint_id=folder / f"{kind}.dcp")
    resumed.model.load_state_dict(state["model"])
    if kind == "plain":
        resumed.optimizer.load_state_dict(state["optimizer"])
    else:
        resumed.optimizer.load_sharded_state_dict(state["optimizer"])
    resumed.schedule.load_state_dict(state["schedule"])
    resumed.train(range(HALF, STEPS))
    return {"whole": whole.result(), "resumed": resumed.result()}


def join(kind: str, folder: Path, bf16: bool) -> dict:
    """torch's Join: rank 1 has two batches more than rank 0."""
    from torch.distributed.algorithms.join import Join

    def run(first: Path | None, counts: tuple[int, int]) -> tuple[Loop, dict]:
        loop = make_loop(kind, bf16)
        if first is not None:
            loop.model.load_state_dict(torch.load(first)["model"])
            loop.optimizer.load_state_dict(torch.load(first)["optimizer"])
        joinables = [part for part in (loop.forward, loop.optimizer) if hasattr(part, "join_hook")]
        generator = torch.Generator().manual_seed(dist.get_rank() + sum(counts))
        with Join(joinables):
            for _ in range(counts[dist.get_rank()]):
                inputs = torch.randn(4, 7, generator=generator)
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    outputs = loop.forward(inputs)
                nn.functional.mse_loss(outputs.float(), inputs[:, :3].sin()).backward()
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return loop, loop.model.state_dict()

    loop, whole = run(None, (4, 6))
    if kind == "plain":
        # The rank that went on has the state; DDP gave its parameters to the other.
        source = 1
    else:
        source = 0
        loop.optimizer.consolidate_state_dict(to=0)
    file = folder / f"{kind}.join.pt"
    if dist.get_rank() == source:
        torch.save({"model": whole, "optimizer": loop.optimizer.state_dict()}, file)
    dist.barrier()
    _, resumed = run(file, (5, 4))
    return {"whole": whole, "resumed": resumed}


def _ray_loop(kind: str, bf16: bool) -> Loop:
    from ray.train.torch import prepare_model

    model = make_model()
    options = {"parallel_strategy": None} if kind == "stage2" else {}
    forward = prepare_model(model, **options)
    assert isinstance(forward, DistributedDataParallel) == (kind != "stage2")
    return Loop(model, forward, make_optimizer(kind, model.parameters()), bf16)


def _ray_worker(config: dict) -> None:
    """Trains all kinds, from the beginning or from the checkpoint of all of them."""
    import ray.train

    checkpoint, folder = config["checkpoint"], Path(config["folder"])
    here = folder / f"{config['part']}.rank{dist.get_rank()}"
    here.mkdir()
    results = {}
    for kind in KINDS:
        loop = _ray_loop(kind, config["bf16"])
        parts = {"model": loop.model, "optimizer": loop.optimizer, "schedule": loop.schedule}
        if checkpoint is None:
            loop.train(range(HALF))
            if kind != "plain":
                loop.optimizer.consolidate_state_dict()
            if dist.get_rank() == 0:
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save(states, here / f"{kind}.pt")
        else:
            with checkpoint.as_directory() as saved:
                states = torch.load(Path(saved) / f"{kind}.pt", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(states[name])
        loop.train(range(HALF, STEPS))
        results[kind] = loop.result()
    saved = ray.train.Checkpoint.from_directory(str(here)) if dist.get_rank() == 0 else None
    ray.train.report({"steps": STEPS}, checkpoint=saved)
    torch.save(results, folder / f"{config['part']}.{dist.get_rank()}.pt")


def ray(folder: Path, bf16: bool) -> list[dict]:
    """Ray Train: it starts the ranks, joins them to a group, wraps the model, keeps checkpoints.

    Returns the result of each rank, by kind.
    """
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False)
    results: list[dict] = [{kind: {} for kind in KINDS} for _ in range(2)]
    checkpoint = None
    for part in ("whole", "resumed"):
        config = {"folder": str(folder), "bf16": bf16, "part": part, "checkpoint": checkpoint}
        trainer = TorchTrainer(
            _ray_worker,
            train_loop_config=config,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(name=part, storage_path=str(folder / "ray")),
        )
        checkpoint = trainer.fit().checkpoint
        for rank, result in enumerate(results):
            found = torch.load(folder / f"{part}.{rank}.pt", weights_only=True)
            for kind in KINDS:
                result[kind][part] = found[kind]
    ray.shutdown()
    return results


def main() -> None:
    way, folder, *options = sys.argv[1:]
    folder, bf16 = Path(folder), "bf16" in options
    torch.set_num_threads(1)
    if way == "ray":
        for rank, result in enumerate(ray(folder, bf16)):
            torch.save(result, folder / f"{rank}.pt")
        return
    dist.init_process_group("gloo")
    run = {"dcp": dcp, "join": join}[way]
    results = {kind: run(kind, folder, bf16) for kind in KINDS}
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
