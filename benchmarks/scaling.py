"""The tables of docs/scaling.md, computed from `plan_memory` and the cost model; nothing in them was measured.

python benchmarks/scaling.py docs/scaling.md  # writes them into the page
"""

import dataclasses
import re
import sys
from pathlib import Path

import jax.numpy as jnp

import eqx_moe
from eqx_moe._exchange._cost import Cost, compute_seconds

TOKENS = 4096  # of one GPU: one sequence
SHARDS = (8, 16, 32, 64, 128, 256)
BUDGET = 8 * 2**30


@dataclasses.dataclass(frozen=True)
class Layer:
    """The routed experts of one layer of a model."""

    name: str
    d_model: int
    d_ff: int
    experts: int
    k: int


LAYERS = (Layer("DeepSeek-V3", 7168, 2048, 256, 8), Layer("Qwen3-235B-A22B", 4096, 1536, 128, 8))


def table(head: list[str], lines: list[list[str]]) -> str:
    """In Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def gib(size: float) -> str:
    return f"{size / 2**30:.3g}"


def told(cost: Cost) -> str:
    return f"{gib(cost.bytes_moved)} / {1e3 * cost.seconds:.1f}"


def select(layer: Layer, shards: int, factor: float | None, tokens: int = TOKENS) -> eqx_moe.ExchangeSelection:
    widths = {"d_model": layer.d_model, "d_ff": layer.d_ff, "dtype": jnp.bfloat16}
    sizes = {"tokens": tokens, "k": layer.k, "experts": layer.experts, "shards": shards, "capacity_factor": factor}
    return eqx_moe.AutoExchange().select(platform="cuda", **sizes, **widths)


def exchanges(layer: Layer, factor: float | None) -> str:
    """What every exchange moves, and how long it takes by the model."""
    lines = []
    names = ("AllGatherReduceScatter()", "RaggedAllToAll()", "PaddedAllToAll()")
    for shards in (shards for shards in SHARDS if shards <= layer.experts):
        selection = select(layer, shards, factor)
        costs, weights = dict(selection.costs), selection.gathered_weights
        assert weights is not None
        chosen = type(selection.exchange).__name__
        lines.append([str(shards), *(told(costs[name]) for name in names), told(weights), chosen])
    head = ["shards", "all-gather", "ragged", "padded", "weights gathered", "chosen"]
    return table(head, lines)


def memory(layer: Layer, shards: int) -> str:
    """What every exchange allocates."""
    plan = eqx_moe.plan_memory(
        tokens=TOKENS,
        d_model=layer.d_model,
        d_ff=layer.d_ff,
        experts=layer.experts,
        k=layer.k,
        shards=shards,
        budget=BUDGET,
    )
    return f"```text\n{plan}\n```"


def gpus(layer: Layer) -> str:
    """A job of so many GPUs, with as many shards as given and the rest of the GPUs an axis of FSDP."""
    lines = []
    for total in (64, 256, 1024):
        for shards in (shards for shards in (8, 64, 256) if shards <= min(total, layer.experts)):
            selection, fsdp = select(layer, shards, 1.25), total // shards
            weights = 3 * layer.d_model * layer.d_ff * layer.experts * 2 / shards
            gathered = 3 * weights * (fsdp - 1) / fsdp
            sizes = [gib(weights), gib(weights / fsdp), gib(gathered), gib(selection.cost.bytes_moved)]
            lines.append([str(total), str(shards), str(layer.experts // shards), *sizes])
    head = ["GPUs", "shards", "experts of a GPU", "their weights", "kept", "weights moved", "tokens moved"]
    return table(head, lines)


def break_even(layer: Layer) -> str:
    """The tokens of a GPU from which gathering weights moves fewer bytes than an exchange by all-to-all."""
    tokens = 9 * layer.experts * layer.d_ff / (4 * layer.k)
    products = 1e3 * compute_seconds(tokens=TOKENS, k=layer.k, d_model=layer.d_model, d_ff=layer.d_ff, gates=2)
    return f"{layer.name}: {tokens:,.0f} tokens; the experts' products of {TOKENS} tokens take {products:.1f} ms"


def document() -> dict[str, str]:
    """Every generated part of docs/scaling.md by its name."""
    parts = {}
    for layer in LAYERS:
        short = layer.name.split("-")[0].lower()
        parts[f"{short}-exchanges"] = exchanges(layer, 1.25)
        parts[f"{short}-worst"] = exchanges(layer, None)
        parts[f"{short}-memory"] = memory(layer, 64)
        parts[f"{short}-gpus"] = gpus(layer)
    parts["break-even"] = "\n".join(f"- {break_even(layer)}." for layer in LAYERS)
    return parts


def filled(page: str) -> str:
    """The page with every part between its two comments."""
    for name, part in document().items():
        between = re.compile(rf"(<!-- {name} -->\n\n).*?(\n?<!-- end -->)", flags=re.DOTALL)
        page, found = between.subn(lambda match, part=part: f"{match[1]}{part}\n\n<!-- end -->", page)
        if found != 1:
            raise ValueError(f"{found} places for {name!r} in the page: it needs one pair of comments")
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text()))
