#!/usr/bin/env python3
"""Draws one training iteration from a profile: what the optimizer does while backward runs.

  torchrun --standalone --nproc-per-node 2 examples/overlap_chart.py overlap.png
  examples/overlap_chart.py overlap.png --trace trace.json    from a trace of your own program

The first form trains a stack of linear layers with stage 2, profiles one iteration on rank 0, and
draws it. The second reads what torch.profiler's export_chrome_trace() wrote.
"""

import argparse
import json
import os
import tempfile

LANES = {
    "forward": "#9db4c0",
    "backward": "#5c6b73",
    "shardstep::post": "#e07a5f",
    "shardstep::reduce": "#f2cc8f",
    "shardstep::compare": "#b8b8b8",
    "shardstep::update": "#81b29a",
    "shardstep::gather": "#3d5a80",
    "shardstep::arrive": "#98c1d9",
}


def record(path: str, layers: int, width: int, overlap_forward: bool) -> bool:
    """Trains, and writes the trace of an iteration on rank 0. Whether this is rank 0."""
    import shardstep
    import torch
    import torch.distributed as dist
    from torch.profiler import profile, record_function

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = shardstep.ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        stage=2,
        sharding="element",
        module=model,
        overlap_forward=overlap_forward,
        bucket_cap_mb=4,
        lr=1e-3,
        fused=True,
    )
    inputs = torch.randn(64, width)

    def iterate() -> None:
        optimizer.zero_grad()
        with record_function("forward"):
            loss = model(inputs).square().mean()
        with record_function("backward"):
            loss.backward()
        optimizer.step()

    for _ in range(3):
        iterate()
    dist.barrier()
    with profile() as trace:
        iterate()
        optimizer.wait()
    rank = dist.get_rank()
    if rank == 0:
        trace.export_chrome_trace(path)
    dist.destroy_process_group()
    return rank == 0


def spans(path: str) -> dict[str, list[tuple[float, float]]]:
    """By lane: start and duration in milliseconds, from the first event on."""
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    found: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANES}
    for event in events:
        if event.get("ph") == "X" and event.get("name") in found:
            found[event["name"]].append((event["ts"] / 1e3, event["dur"] / 1e3))
    if not any(found.values()):
        raise SystemExit(f"{path} has no events called {', '.join(LANES)}")
    began = min(start for lane in found.values() for start, _ in lane)
    return {name: [(s - began, d) for s, d in lane] for name, lane in found.items() if lane}


def draw(lanes: dict[str, list[tuple[float, float]]], picture: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 0.5 * len(lanes) + 1.2), layout="constrained")
    for row, (name, lane) in enumerate(lanes.items()):
        axes.broken_barh(lane, (row - 0.35, 0.7), facecolor=LANES[name])
        total = sum(duration for _, duration in lane)
        end = max(start + duration for start, duration in lane)
        axes.text(end, row, f" {total:.1f} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(lanes)), [name.removeprefix("shardstep::") for name in lanes])
    axes.invert_yaxis()
    axes.set_xlim(
        0, 1.08 * max(start + length for lane in lanes.values() for start, length in lane)
    )
    axes.set(xlabel="milliseconds", title="One iteration on rank 0")
    axes.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", help="file to write: png, pdf or svg")
    parser.add_argument("--trace", help="draw this trace instead of training")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--overlap-forward", action="store_true")
    arguments = parser.parse_args()
    if arguments.trace:
        draw(spans(arguments.trace), arguments.picture)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            if not record(path, arguments.layers, arguments.width, arguments.overlap_forward):
                return
            draw(spans(path), arguments.picture)
    print(f"{arguments.picture}: one iteration")


if __name__ == "__main__":
    main()
