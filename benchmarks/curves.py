"""Losses of `examples/train_lm.py` on different machines, from the `loss.csv` that it wrote, as a table and a plot.

python examples/train_lm.py --data eqx_moe tests examples --out runs/cpu_float32
python examples/train_lm.py --data eqx_moe tests examples --out runs/h200_bfloat16 --bf16
python benchmarks/curves.py runs/cpu_float32 runs/h200_bfloat16 --out benchmarks/results/curves

The first run is the one that the others are held against; the names of the folders become those of the curves.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

# Steps over which training losses are averaged.
WINDOW = 50
HEAD = "| run | held-out loss | training loss | apart from the first, mean | most |"


def read(folder: Path) -> np.ndarray:
    """`[steps, 3]`: step, training loss, held-out loss (NaN where it was not taken)."""
    return np.loadtxt(folder / "loss.csv", delimiter=",", skiprows=1, ndmin=2)


def smooth(losses: np.ndarray) -> np.ndarray:
    """Means over windows of steps."""
    whole = len(losses) // WINDOW * WINDOW
    return losses[:whole].reshape(-1, WINDOW).mean(1)


def table(runs: dict[str, np.ndarray]) -> list[str]:
    """Final losses, and how far the smoothed training curves are from the first one."""
    first = smooth(next(iter(runs.values()))[:, 1])
    lines = [HEAD, "|---|---|---|---|---|"]
    for name, run in runs.items():
        apart = np.abs(smooth(run[:, 1]) - first)
        lines.append(
            f"| {name} | {run[-1, 2]:.4f} | {smooth(run[:, 1])[-1]:.4f} | {apart.mean():.4f} | {apart.max():.4f} |"
        )
    return lines


def plot(runs: dict[str, np.ndarray]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss, nats per byte")
    for name, run in runs.items():
        axes.plot(smooth(run[:, 0]), smooth(run[:, 1]), linewidth=1, label=name)
    axes.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=Path, nargs="+", help="folders that train_lm.py wrote, the one to compare with first"
    )
    parser.add_argument("--out", type=Path, required=True, help="path without ending of the .md and .svg to write")
    given = parser.parse_args()
    runs = {folder.name: read(folder) for folder in given.runs}
    if len({len(run) for run in runs.values()}) > 1:
        parser.error(f"the runs have different numbers of steps: { {name: len(run) for name, run in runs.items()} }")
    given.out.with_suffix(".md").write_text("\n".join(table(runs)) + "\n")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "eqx_moe"}):
        plot(runs).savefig(given.out.with_suffix(".svg"), format="svg", metadata={"Date": None})
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
