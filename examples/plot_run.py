#!/usr/bin/env python3
"""Plots a run of train_gpt: its losses, and the memory per rank beside a replicated optimizer's.

  examples/plot_run.py loss.csv memory.csv run.png    from what --log and --memory wrote

Says so and draws nothing if matplotlib is not installed.
"""

import argparse
import csv
import importlib.util

PARTS = {"parameters": "#9db4c0", "gradients": "#5c6b73", "optimizer state": "#e07a5f"}


def running_mean(values: list[float], window: int) -> list[float]:
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        means.append(total / min(index + 1, window))
    return means


def draw_losses(axes, steps: list[int], losses: list[float]) -> None:
    window = max(1, len(losses) // 50)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(steps, running_mean(losses, window), color="tab:blue", label=f"mean of {window}")
    axes.set(title="Loss", xlabel="step", ylabel="nats per character")
    axes.grid(alpha=0.3)
    axes.legend()


def label(name: str, memory: dict[str, dict[str, int]]) -> str:
    """A run measures its own ranks, and is compared with the stages below its own."""
    if not name.startswith("rank"):
        return f"{name}\n(computed)"
    stage = 2 if "stage 1" in memory else 1
    return f"stage {stage},\n{name}" if "DDP" in memory else name


def draw_memory(axes, memory: dict[str, dict[str, int]]) -> None:
    """`memory`: for each bar its name, and the bytes of each of PARTS."""
    names = list(memory)
    left = [0.0] * len(names)
    for part, color in PARTS.items():
        sizes = [memory[name][part] / 2**20 for name in names]
        axes.barh(names, sizes, left=left, color=color, label=part, height=0.65)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    replicated = sum(memory["DDP"].values()) / 2**20 if "DDP" in memory else 0.0
    for name, total in zip(names, left, strict=True):
        share = f", {total / replicated:.0%} of DDP's" if replicated and name != "DDP" else ""
        axes.text(total, name, f" {total:.1f}{share}", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_yticks(names, [label(name, memory) for name in names])
    axes.set(title="Memory per rank", xlabel="MiB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=3, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot_run(
    steps: list[int],
    losses: list[float],
    memory: dict[str, dict[str, int]],
    file: str,
    title: str | None = None,
) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw_losses(left, steps, losses)
    draw_memory(right, memory)
    figure.suptitle(title)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("losses", help="CSV file with step,loss")
    parser.add_argument("memory", help="CSV file with bytes per rank")
    parser.add_argument("picture", help="file to write: png, pdf or svg")
    arguments = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        print("\nFor a picture to keep: .venv/bin/pip install matplotlib, and run it again.")
        return
    with open(arguments.losses, newline="") as file:
        rows = list(csv.DictReader(file))
    with open(arguments.memory, newline="") as file:
        memory = {
            row["who"]: {part: int(row[part.replace(" ", "_")]) for part in PARTS}
            for row in csv.DictReader(file)
        }
    steps, losses = [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]
    plot_run(steps, losses, memory, arguments.picture)
    print(f"\nThe same as a picture: {arguments.picture}")


if __name__ == "__main__":
    main()
