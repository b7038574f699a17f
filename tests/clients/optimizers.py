"""One rank that trains with a package's optimizers. torchrun starts it:
optimizers.py PACKAGE FOLDER.

A kind is plain (the optimizer under DDP), or a stage and a sharding of ours. For each of KINDS,
saves after half of the steps, and goes on from there in two further runs: from the optimizer's
state_dict() and from our checkpoint. Writes FOLDER/<rank>.pt: by kind and optimizer the parameters
and losses of the runs, or the refusal.
"""

import functools
import importlib
import itertools
import sys
import traceback
from pathlib import Path

import shardstep
import torch
import torch.distributed as dist
from common import HALF, RATE, STEPS, Loop, make_model
from torch.nn.parallel import DistributedDataParallel

KINDS = ("plain", "stage1-parameter", "stage1-element", "stage2-parameter", "stage2-element")
OPTIMIZERS = {
    "pytorch_optimizer": ("Lion", "Lamb", "Adan", "AdaFactor", "SOAP"),
    "timm": ("AdamWLegacy", "Lion", "Adan", "Lamb", "NvNovoGrad", "Adafactor"),
    "torchao": ("AdamW8bit", "AdamW4bit", "AdamWFp8"),
    "bitsandbytes": ("AdamW8bit", "Lion8bit", "AdamW32bit", "LAMB"),
}
# Whose update of an element depends on nothing but that element, so that a user may declare it.
ELEMENTWISE = {
    *("pytorch_optimizer.Lion", "pytorch_optimizer.Adan"),
    *("timm.AdamWLegacy", "timm.Lion", "timm.Adan"),
}


def load_package(package: str):
    if package == "pytorch_optimizer":
        return importlib.import_module(package)
    if package == "timm":
        sys.path.append(f"{sys.prefix}/timm")
        # The CUDA build of torchvision lacks its operators beside a CPU build of torch.
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    return importlib.import_module(f"{package}.optim")


class Run(Loop):
    def __init__(self, cls, kind: str, elementwise: bool) -> None:
        model = forward = make_model()
        self._is_ours = kind != "plain"
        options = {"lr": RATE / 10}
        if self._is_ours:
            stage, sharding = kind.split("-")
            cls = functools.partial(shardstep.ZeroRedundancyOptimizer, optimizer_class=cls)
            options |= {"stage": int(stage[-1]), "sharding": sharding, "elementwise": elementwise}
        optimizer = cls(model.parameters(), **options)
        if not kind.startswith("stage2"):
            forward = DistributedDataParallel(model)
        super().__init__(model, forward, optimizer)

    def save(self, file: Path) -> None:
        if self._is_ours:
            self.optimizer.consolidate_state_dict()
            more = {"module": self.model, "schedulers": [self.schedule]}
            self.optimizer.save_checkpoint(f"{file}.checkpoint", **more)
        if dist.get_rank() == 0:
            states = [part.state_dict() for part in (self.model, self.optimizer, self.schedule)]
            torch.save(states, file)
        dist.barrier()

    def load(self, file: Path) -> None:
        parts = self.model, self.optimizer, self.schedule
        for part, state in zip(parts, torch.load(file, weights_only=False), strict=True):
            part.load_state_dict(state)

    def load_checkpoint(self, file: Path) -> None:
        if not self._is_ours:
            return self.load(file)
        more = {"module": self.model, "schedulers": [self.schedule]}
        self.optimizer.load_checkpoint(f"{file}.checkpoint", **more)


def try_optimizer(cls, kind: str, elementwise: bool, file: Path) -> dict:
    run = Run(cls, kind, elementwise)
    run.train(range(HALF))
    run.save(file)
    run.train(range(HALF, STEPS))
    results = {"whole": run.result()}
    for name, load in (("state_dict", Run.load), ("checkpoint", Run.load_checkpoint)):
        resumed = Run(cls, kind, elementwise)
        load(resumed, file)
        resumed.train(range(HALF, STEPS))
        results[name] = resumed.result()
    return results


def main() -> None:
    package, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = load_package(package)
    results: dict = {kind: {} for kind in KINDS}
    for kind, name in itertools.product(KINDS, OPTIMIZERS[package]):
        elementwise = f"{package}.{name}" in ELEMENTWISE
        file = Path(folder) / f"{kind}.{name}.pt"
        try:
            found = try_optimizer(getattr(module, name), kind, elementwise, file)
        except Exception as error:
            traceback.print_exc()
            found = f"{type(error).__name__}: {error}"
        results[kind][name] = found
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
