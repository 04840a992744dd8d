"""The layer beside its peers, as a Markdown table and a plot, from the JSON that the benchmarks wrote.

python benchmarks/comparison.py --out benchmarks/results/comparison_h200 --sonic benchmarks/results/sonic_h200.json

Files that are missing are left out. The library's own numbers come from the peers' run where it has the shape, else
from that of `moe_layer.py`. Two clocks: `host` is that of calls in a row, `gpu` leaves the host's launches out. On the
GPU's clock the gaps between SonicMoE's kernels count, those between the others' do not.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
# Key in the JSON, name and colour; in the order of columns and bars.
CONTESTANTS = {
    "eqx_moe": ("eqx_moe", "#1f4e9c"),
    "sonic": ("SonicMoE (PyTorch)", "#e08214"),
    "te": ("Transformer Engine, plainly", "#5aae61"),
    "te_gemm": ("TE's grouped GEMM in plain JAX", "#a6dba0"),
    "tokamax": ("tokamax.ragged_dot", "#9970ab"),
    "ragged_dot": ("jax.lax.ragged_dot", "#b2182b"),
}
PLOTTED = ("eqx_moe", "sonic", "te", "tokamax", "ragged_dot")
DENSE = "dense"
SIZES = ("tokens", "d_model", "d_ff", "experts", "k")
# Relative norm; bfloat16 gives less than 0.01.
TOLERANCE = 0.05
# Tokens, d_model, d_ff, experts, k.
Size = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Milliseconds by the chosen clock, `None` if not measured, and why not."""

    forward: float | None = None
    backward: float | None = None
    error: str | None = None


Table = dict[Size, dict[str, Entry]]


def size_of(row: dict[str, Any], names: tuple[str, ...] = SIZES) -> Size:
    tokens, d_model, d_ff, experts, k = (int(row[name]) for name in names)
    return tokens, d_model, d_ff, experts, k


def flops(size: Size) -> float:
    """Floating-point operations of the forward pass; the backward pass has twice as many."""
    tokens, d_model, d_ff, _, k = size
    return 6.0 * tokens * d_ff * d_model * k


def of_profiles(row: dict[str, Any], clock: str) -> Entry:
    """From a row with the profiles of the forward pass and of both passes."""
    key = "ms" if clock == "host" else "gpu_ms"
    ahead = row["forward"][key] if "forward" in row else None
    backward = row["both"][key] - ahead if "both" in row and ahead is not None else None
    return Entry(ahead, backward, row.get("error", differences(row)))


def differences(row: dict[str, Any]) -> str | None:
    """Which results of a contestant are not the library's; fast and wrong is not measured."""
    wrong = [f"{name} {error:.1e}" for name, error in row.get("errors", {}).items() if not error <= TOLERANCE]
    return f"differs from eqx_moe, relative norms: {', '.join(wrong)}" if wrong else None


def of_dense(row: dict[str, Any], clock: str) -> Entry | None:
    """The ceiling. Older results have it by the host's clock only: they give none by the other."""
    if "error" in row:
        return Entry(error=row["error"])
    if clock == "gpu":
        keys = ("dense_forward_gpu_ms", "dense_backward_gpu_ms")
        return Entry(*(row[key] for key in keys)) if keys[0] in row else None
    if "dense_forward_tflops" not in row:
        return None
    amount = 1e-9 * flops(size_of(row))
    return Entry(amount / row["dense_forward_tflops"], 2 * amount / row["dense_backward_tflops"])


def add(table: Table, size: Size, name: str, entry: Entry | None) -> None:
    if entry is not None and entry != Entry():
        table.setdefault(size, {})[name] = entry


def add_layer(table: Table, results: dict[str, Any], clock: str) -> None:
    for row in results["rows"].get("twelve", []):
        add(table, size_of(row), "eqx_moe", of_profiles(row, clock))
        add(table, size_of(row), DENSE, of_dense(row, clock))


def add_peers(table: Table, results: dict[str, Any], clock: str) -> None:
    for row in results["rows"]:
        if "tokens" in row:
            for name, found in row["contestants"].items():
                add(table, size_of(row), name, of_profiles(found, clock))
            add(table, size_of(row), DENSE, of_dense(row, clock))


def add_sonic(table: Table, results: dict[str, Any], clock: str) -> None:
    prefix = "gpu_" if clock == "gpu" else ""
    for row in results["rows"]:
        if "T" in row:
            entry = Entry(row.get(f"{prefix}forward_ms"), row.get(f"{prefix}backward_ms"), row.get("error"))
            add(table, size_of(row, ("T", "d", "n", "E", "K")), "sonic", entry)


def collect(layer: dict | None, peers: list[dict], sonic: dict | None, clock: str) -> Table:
    """Everything, by size; what comes from one run of all contestants replaces what comes from a run alone."""
    table: Table = {}
    if layer is not None:
        add_layer(table, layer, clock)
    for results in peers:
        add_peers(table, results, clock)
    if sonic is not None:
        add_sonic(table, sonic, clock)
    return table


def cell(entry: Entry | None) -> str:
    if entry is None:
        return ""
    if entry.forward is None:
        return "failed" if entry.error else ""
    if entry.backward is not None:
        return f"{digits(entry.forward)} / {digits(entry.backward)}" + (" (wrong)" if entry.error else "")
    return f"{digits(entry.forward)} / {'failed' if entry.error else ''}"


def digits(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def title(name: str) -> str:
    return "dense matmuls" if name == DENSE else CONTESTANTS[name][0]


def columns(table: Table) -> list[str]:
    present = {name for entries in table.values() for name in entries}
    return [name for name in CONTESTANTS if name in present]


def markdown(table: Table) -> list[str]:
    """Milliseconds forward / backward, and below it the errors of those that failed."""
    names = columns(table)
    heads = ["T, d, n, E, K", *map(title, (*names, DENSE))]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for size, entries in table.items():
        cells = [", ".join(map(str, size)), *(cell(entries.get(name)) for name in (*names, DENSE))]
        lines.append("| " + " | ".join(cells) + " |")
    failures = [
        f"- {title(name)}, {', '.join(map(str, size))}: {entries[name].error}"
        for size, entries in table.items()
        for name in (*names, DENSE)
        if name in entries and entries[name].error
    ]
    return [*lines, *(["", "Failed:", "", *failures] if failures else [])]


def tflops(size: Size, entry: Entry | None, direction: str) -> float:
    ms = None if entry is None else getattr(entry, direction)
    factor = {"forward": 1, "backward": 2}[direction]
    return 0.0 if ms is None else 1e-9 * factor * flops(size) / ms


def draw(panel: Axes, table: Table, direction: str) -> None:
    """One group of bars per shape, and a line at the speed of the same products with one matrix for all rows."""
    names = [name for name in PLOTTED if name in columns(table)]
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        heights = [tflops(size, entries.get(name), direction) for size, entries in table.items()]
        places = [shape - 0.4 + (i + 0.5) * width for shape in range(len(table))]
        panel.bar(places, heights, width, label=title(name), color=CONTESTANTS[name][1])
    ceiling = [tflops(size, entries.get(DENSE), direction) for size, entries in table.items()]
    known = [shape for shape, height in enumerate(ceiling) if height > 0]
    if known:
        heights, left, right = [ceiling[i] for i in known], [i - 0.45 for i in known], [i + 0.45 for i in known]
        panel.hlines(heights, left, right, colors="black", linewidth=1, label=title(DENSE))
    panel.set_ylabel(f"{direction}, TFLOP/s")
    panel.set_xlim(-0.6, max(len(table), 1) - 0.4)
    panel.spines[["top", "right"]].set_visible(False)


def plot(table: Table) -> Figure:
    figure = Figure(figsize=(max(6.0, 1.1 * len(table)), 6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, direction in zip(panels, ("forward", "backward"), strict=True):
        draw(panel, table, direction)
    labels = [f"{tokens}, {d_model}\n{d_ff}, {experts}, {k}" for tokens, d_model, d_ff, experts, k in table]
    panels[-1].set_xticks(range(len(table)), labels, fontsize=7)
    panels[-1].set_xlabel("tokens, d_model; d_ff, experts, k")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def write_svg(table: Table, path: Path) -> None:
    """The same bytes for the same numbers."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "eqx_moe"}):
        plot(table).savefig(path, format="svg", metadata={"Date": None})


def about(results: dict[str, Any]) -> str:
    """What one file was measured on."""
    if "machine" in results:
        return ", ".join([str(results.get("date")), *(f"{key} {value}" for key, value in results["machine"].items())])
    names = ("device", "sonicmoe", "quack", "torch", "triton")
    return ", ".join(f"{name} {results[name]}" for name in names if name in results)


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", type=Path, default=RESULTS / "moe_layer_h200.json")
    parser.add_argument(
        "--peers", type=Path, nargs="*", default=[RESULTS / "peers_h200.json"], help="the last one wins"
    )
    parser.add_argument("--sonic", type=Path, default=RESULTS / "sonic_h200.json")
    parser.add_argument("--clock", choices=["gpu", "host"], default="gpu")
    parser.add_argument("--out", type=Path, required=True, help="path without ending of the .md and .svg to write")
    given = parser.parse_args()
    layer, sonic = read(given.layer), read(given.sonic)
    peers = [results for path in given.peers if (results := read(path)) is not None]
    table = collect(layer, peers, sonic, given.clock)
    files = [(given.layer, layer), *zip(given.peers, map(read, given.peers), strict=True), (given.sonic, sonic)]
    lines = [f"Milliseconds forward / backward, by the clock of the {given.clock}.", "", *markdown(table), ""]
    lines += [f"- `{path.name}`: {about(results)}" for path, results in files if results is not None]
    given.out.with_name(given.out.name + ".md").write_text("\n".join(lines) + "\n")
    write_svg(table, given.out.with_name(given.out.name + ".svg"))


if __name__ == "__main__":
    main()
