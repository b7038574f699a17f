"""Saving the optimizer's state, side by side: ours, torch's ZeRO, torch.distributed.checkpoint.

20 x Linear(2000), 80 million parameters, Adam: 640 MB of state. Processes on Gloo, one thread per
rank; in every round each contestant saves once into its own folder. Ours and
torch.distributed.checkpoint sync their files to the disk, torch.save does not. Columns:

  blocked   milliseconds until training could continue, on the slowest rank
  total     milliseconds until the checkpoint is complete, on the slowest rank
  x torch   the blocked time of torch's ZeRO divided by this one's
  extra     MB by which the resident set grew meanwhile, at its peak: rank 0 / the largest other
  files     MB on the disk

Medians over the rounds; extra is the largest. MB are 10^6 bytes.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_processes import Ranks, fork_context, slowest
from table import markdown
from workload import ROOT, ExtraMemory, make_model

Result = dict[str, float]
TORCH = "torch's ZeRO, consolidate + torch.save"

# -- on a rank -------------------------------------------------------------------------------------


def make_state(optimizer, model) -> None:
    """Gives every element a state of its own; gradients are gone afterwards."""
    import torch

    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def measure(save: Callable[[], Any], finish: Callable[[], Any] = lambda: None) -> Result:
    """Collective. `finish` returns when the checkpoint is complete."""
    import torch.distributed as dist

    dist.barrier()
    memory = ExtraMemory()
    begin = time.perf_counter()
    save()
    returned = time.perf_counter()
    finish()
    end = time.perf_counter()
    extra = memory.bytes()
    blocked, total = slowest(returned - begin, end - begin)
    return {"blocked": blocked, "total": total, "extra": extra}


def save_consolidated(optimizer, folder: str) -> None:
    import torch

    optimizer.consolidate_state_dict(to=0)
    if optimizer.rank == 0:
        torch.save(optimizer.state_dict(), Path(folder, "optimizer.pt"))


class Ours:
    def __init__(self, layers: int):
        import torch
        from shardstep import ZeroRedundancyOptimizer

        model, _ = make_model("linear", layers=layers)
        self.optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, sharding="element"
        )
        make_state(self.optimizer, model)

    def sharded(self, folder: str) -> Result:
        return measure(lambda: self.optimizer.save_checkpoint(folder))

    def asynchronous(self, folder: str) -> Result:
        optimizer = self.optimizer
        return measure(
            lambda: optimizer.save_checkpoint(folder, asynchronous=True), optimizer.wait_checkpoint
        )

    def consolidated(self, folder: str) -> Result:
        return measure(lambda: save_consolidated(self.optimizer, folder))

    def dcp(self, folder: str) -> Result:
        import torch.distributed.checkpoint as dcp

        return measure(lambda: dcp.save(self.optimizer.sharded_state_dict(), checkpoint_id=folder))


class Torchs:
    def __init__(self, layers: int):
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model, _ = make_model("linear", layers=layers)
        self.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        make_state(self.optimizer, model)

    def consolidated(self, folder: str) -> Result:
        return measure(lambda: save_consolidated(self.optimizer, folder))


ROWS: dict[str, tuple[type, str]] = {
    TORCH: (Torchs, "consolidated"),
    "ours, sharded": (Ours, "sharded"),
    "ours, asynchronous": (Ours, "asynchronous"),
    "ours, consolidate + torch.save": (Ours, "consolidated"),
    "torch.distributed.checkpoint of ours": (Ours, "dcp"),
}

# -- the parent ------------------------------------------------------------------------------------


def save_once(ranks: Ranks, method: str, folder: Path) -> Result:
    """Into a folder of its own, which is removed."""
    with tempfile.TemporaryDirectory(dir=folder) as target:
        results = ranks.order(method, target)
        files = sum(file.stat().st_size for file in Path(target).rglob("*") if file.is_file())
    others = max((result["extra"] for result in results[1:]), default=0)
    return results[0] | {"others": others, "files": files}


def compare(context, world_size: int, arguments: argparse.Namespace) -> dict[str, list[Result]]:
    """What each contestant did, round by round. Those of one class share their processes."""
    rounds: dict[str, list[Result]] = {row: [] for row in ROWS}
    for contestant in dict.fromkeys(contestant for contestant, _ in ROWS.values()):
        with Ranks(context, world_size, contestant, (arguments.layers,)) as ranks:
            for number in range(arguments.rounds):
                for row, (owner, method) in ROWS.items():
                    if owner is contestant and (row != TORCH or number < arguments.torch_rounds):
                        rounds[row].append(save_once(ranks, method, arguments.folder))
                        report = f"{rounds[row][-1]['blocked']:.0f} ms blocked"
                        print(f"{world_size} ranks: {row}: {report}", file=sys.stderr, flush=True)
    return rounds


def summarize(rounds: dict[str, list[Result]]) -> dict[str, Result]:
    summary = {}
    for row, results in rounds.items():
        summary[row] = {key: statistics.median(r[key] for r in results) for key in results[0]}
        for key in ("extra", "others"):
            summary[row][key] = max(result[key] for result in results)
    for result in summary.values():
        for key in ("blocked", "total"):
            result[f"x {key}"] = summary[TORCH][key] / result[key]
    return summary


COLUMNS: dict[str, Callable[[Result], str]] = {
    "blocked, ms": lambda s: f"{s['blocked']:.0f}",
    "x torch": lambda s: f"{s['x blocked']:.1f}x",
    "total, ms": lambda s: f"{s['total']:.0f}",
    "x torch's total": lambda s: f"{s['x total']:.1f}x",
    "extra, MB": lambda s: f"{s['extra'] / 1e6:.0f} / {s['others'] / 1e6:.0f}",
    "files, MB": lambda s: f"{s['files'] / 1e6:.0f}",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4])
    add("--layers", type=int, default=20, help="of 4 million parameters each (default 20)")
    add("--rounds", type=int, default=5, help="saves of each contestant (default 5)")
    add("--torch-rounds", type=int, default=1, help="of torch's ZeRO, which is slow (default 1)")
    add("--folder", type=Path, default=ROOT / "build", help="where to save (default build/)")
    add("--quick", action="store_true", help="a tenth of the model, 2 ranks, 2 rounds")
    add("--json", type=Path, metavar="FILE", help="write every reading to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.layers, arguments.rounds = [2], 2, 2
    return arguments


def main() -> None:
    arguments = parse_arguments()
    arguments.folder.mkdir(exist_ok=True)
    context = fork_context()
    report = []
    for world_size in arguments.ranks:
        rounds = compare(context, world_size, arguments)
        title = f"{arguments.layers} x Linear(2000), Adam, {world_size} ranks"
        print(f"\n{markdown(title, COLUMNS, summarize(rounds))}", flush=True)
        report.append({"ranks": world_size, "layers": arguments.layers, "rounds": rounds})
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
