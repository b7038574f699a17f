#!/usr/bin/env python3
"""Trains train_gpt in several precisions, and with Muon, and draws the losses.

  .venv/bin/python examples/compare_precisions.py docs/precisions.png

Runs build/examples/train_gpt on 2 ranks, one run after the other.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from plot_run import running_mean

PROGRAM = Path(__file__).resolve().parents[1] / "build" / "examples" / "train_gpt"
RUNS = {
    "float32, AdamW": [],
    "bfloat16, AdamW": ["--dtype", "bf16"],
    "bfloat16, stochastic rounding": ["--dtype", "bf16", "--rounding", "stochastic"],
    "bfloat16, float32 masters": ["--dtype", "bf16", "--master", "fp32"],
    "float32, Muon and AdamW": ["--optimizer", "muon"],
}


def train(arguments: list[str], log: Path) -> list[float]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command = [*torchrun, "--nproc-per-node", "2", "--", str(PROGRAM), *arguments]
    subprocess.run([*command, "--log", str(log)], check=True, stdout=subprocess.DEVNULL)
    with open(log, newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def draw(losses: dict[str, list[float]], file: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, values in losses.items():
        window = max(1, len(values) // 20)
        style = "--" if name == "bfloat16, AdamW" else "-"
        axes.plot(range(1, len(values) + 1), running_mean(values, window), style, label=name)
    axes.set(title="Loss", xlabel="step", ylabel="nats per character")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", help="file to write: png, pdf or svg")
    parser.add_argument("arguments", nargs="*", default=["--steps", "300"], help="for all runs")
    options = parser.parse_args()
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in RUNS.items():
            losses[name] = train([*options.arguments, *arguments], Path(folder) / "loss.csv")
            last = losses[name][-20:]
            print(f"{name:32} last 20 steps: {sum(last) / len(last):.4f}", flush=True)
    draw(losses, options.picture)


if __name__ == "__main__":
    main()
