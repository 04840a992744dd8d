"""Pictures for people who train: matplotlib is imported when one is drawn."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ._stats import MoEStats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_load(load: Any, *, steps: Any = None) -> "Figure":
    """The load of every expert over time, one panel per layer.

    **Arguments:**

    - `load`: an array `[times, layers, experts]` or `[times, experts]` of counts, as [`eqx_moe.MoEStats`][] has them.
    - `steps`: the training step of every time, `[times]`; by default 0, 1, 2, ...

    **Returns:** a matplotlib figure; `figure.savefig("load.png")` writes it. The colour is an expert's share of its
    layer's load, as a multiple of the mean: 1 is balance, and 2 and all above it have one colour.

    **Raises:** `ImportError` without matplotlib; `ValueError` if the shapes do not fit.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_load needs matplotlib: pip install 'eqx_moe[plot]'") from error

    if isinstance(load, MoEStats):
        raise ValueError("plot_load takes the counts: pass stats.load")
    counts = np.asarray(load, dtype=np.float64)
    counts = counts[:, None, :] if counts.ndim == 2 else counts
    if counts.ndim != 3 or 0 in counts.shape:
        raise ValueError(f"load must be a non-empty [times, layers, experts]: got shape {np.shape(load)}")
    times, layers, experts = counts.shape
    steps = np.arange(times) if steps is None else np.asarray(steps)
    if steps.shape != (times,):
        raise ValueError(f"times: load has {times}, steps has shape {steps.shape}")
    relative = counts / np.maximum(counts.mean(axis=-1, keepdims=True), 1e-30)

    figure = Figure(figsize=(8, 1 + 1.2 * layers), layout="constrained")
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    width = max(float(steps[-1] - steps[0]) / max(times - 1, 1), 1.0)
    extent = (float(steps[0]) - width / 2, float(steps[-1]) + width / 2, experts - 0.5, -0.5)
    images = []
    for layer, panel in enumerate(panels):
        shown = relative[:, layer].T
        images += [
            panel.imshow(shown, aspect="auto", extent=extent, cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
        ]
        panel.set_ylabel(f"layer {layer}\nexpert")
    panels[-1].set_xlabel("step")
    figure.colorbar(images[0], ax=list(panels), label="load / mean load", extend="max")
    return figure
