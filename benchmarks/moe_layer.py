"""The whole layer on a GPU (router, top-k, grouping, experts, combine), beside the same arithmetic as dense matmuls.

python benchmarks/moe_layer.py --out benchmarks/results/moe_layer_h200

Forward is 6 * T * n * d * K floating-point operations, backward twice that; backward time is that of forward and
backward together less that of forward. Everything is bfloat16, tokens are 0.2 * normal, weights have deviation 0.02.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_moe
from eqx_moe import Problem, Product, Side
from gpu_profile import profile
from timing import machine


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    d_model: int
    d_ff: int
    experts: int
    k: int
    load: str = "balanced"
    kernel: str = "auto"

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.d_ff * self.d_model * self.k


TWELVE = [
    Shape(f"shape {i}", *numbers)
    for i, numbers in enumerate(
        [
            (40960, 768, 256, 128, 8),
            (40960, 768, 512, 64, 4),
            (40960, 768, 1024, 32, 2),
            (24576, 1536, 256, 128, 8),
            (24576, 1536, 512, 64, 4),
            (24576, 1536, 1024, 32, 2),
            (32768, 4096, 256, 256, 16),
            (32768, 4096, 512, 128, 8),
            (32768, 4096, 1024, 64, 4),
            (32768, 4096, 512, 256, 16),
            (32768, 4096, 1024, 128, 8),
            (32768, 4096, 2048, 64, 4),
        ]
    )
]
MODELS = [
    Shape("OLMoE-1B-7B", 16384, 2048, 1024, 64, 8),
    Shape("Qwen3-30B-A3B", 16384, 2048, 768, 128, 8),
    Shape("Qwen3-235B-A22B", 16384, 4096, 1536, 128, 8),
    Shape("gpt-oss-20b", 16384, 2880, 2880, 32, 4),
    Shape("DeepSeek-V3, one of 8 shards", 16384, 7168, 2048, 32, 1),
    Shape("Mixtral-8x7B", 8192, 4096, 14336, 8, 2),
]
LOADS = [dataclasses.replace(TWELVE[i], load=load) for i in (3, 8) for load in ("zipf", "half empty")]
TILED = [dataclasses.replace(TWELVE[i], kernel="tiled") for i in (0, 3, 5, 8)]
SMALL = [
    dataclasses.replace(model, tokens=tokens)
    for tokens in (1024, 128, 16, 1)
    for model in (MODELS[1], MODELS[3], MODELS[0])
]
SUITES = {"twelve": TWELVE, "models": MODELS, "loads": LOADS, "tiled": TILED, "small": SMALL}


def make(shape: Shape) -> tuple[eqx_moe.MoE, jax.Array, jax.Array]:
    """A layer whose router's bias makes the load, its tokens, and a cotangent."""
    matmul = {"auto": eqx_moe.AutoGroupedMatmul(), "tiled": eqx_moe.TiledDot()}[shape.kernel]
    moe = jax.eval_shape(
        lambda key: eqx_moe.MoE(
            shape.d_model,
            shape.d_ff,
            shape.experts,
            rule=eqx_moe.SoftmaxTopK(k=shape.k),
            matmul=matmul,
            router_bias=shape.load != "balanced",
            dtype=jnp.bfloat16,
            key=key,
        ),
        jax.random.key(0),
    )
    leaves, structure = jax.tree.flatten(moe)
    keys = jax.random.split(jax.random.key(0), len(leaves) + 2)
    draw = jax.jit(lambda key, like: 0.02 * jax.random.normal(key, like.shape, like.dtype), static_argnums=1)
    moe = jax.tree.unflatten(structure, [draw(key, leaf) for key, leaf in zip(keys, leaves, strict=False)])
    if moe.router.bias is not None:
        bias = -np.log1p(np.arange(shape.experts)) if shape.load == "zipf" else -1e4 * (np.arange(shape.experts) % 2)
        moe = eqx.tree_at(lambda moe: moe.router.bias, moe, jnp.asarray(bias, jnp.bfloat16))
    x, cotangent = (0.2 * jax.random.normal(key, (shape.tokens, shape.d_model), jnp.bfloat16) for key in keys[-2:])
    return moe, x, cotangent


def forward(moe, x):
    return moe(x)[0]


def forward_and_backward(moe, x, cotangent):
    y, pull_back = jax.vjp(forward, moe, x)
    return y, pull_back(cotangent)


def dense_forward(x, w_up, act, w_down):
    return x @ w_up, act @ w_down


def dense_backward(x, w_up, act, w_down, h):
    return x @ w_down.T, act.T @ x, h @ w_up.T, x.T @ h


def measure(shape: Shape, *, backward: bool = True) -> dict:
    """One row of the results."""
    moe, x, cotangent = make(shape)
    start = time.perf_counter()
    compiled = jax.jit(forward).lower(moe, x).compile()
    row = dataclasses.asdict(shape) | {"compile_s": time.perf_counter() - start}
    ahead = profile(compiled, moe, x)
    load = np.asarray(jax.jit(lambda moe, x: moe(x)[1].load)(moe, x))
    row |= {
        "forward": dataclasses.asdict(ahead),
        "active_experts": int((load > 0).sum()),
        "most_loaded": int(load.max()),
    }
    row |= {"kernels": kernels(moe, shape), "forward_tflops": shape.flops / ahead.ms * 1e-9}
    if backward:
        both = jax.jit(forward_and_backward).lower(moe, x, cotangent).compile()
        whole = profile(both, moe, x, cotangent)
        analysis = both.memory_analysis()
        row |= {
            "both": dataclasses.asdict(whole),
            "backward_tflops": 2 * shape.flops / (whole.ms - ahead.ms) * 1e-9,
            "kept_bytes": kept_bytes(moe, x),
            "kept_limit": shape.tokens * shape.k * (4 * shape.d_ff + 48),
            "scratch_bytes": analysis.temp_size_in_bytes if analysis else None,
        }
        del moe, both
        row |= dense_ceiling(shape)
    return row


def dense_ceiling(shape: Shape) -> dict[str, float]:
    """TFLOP/s of the same products with one matrix for all rows, nothing between them."""
    rows, d_model, d_ff = shape.tokens * shape.k, shape.d_model, shape.d_ff
    sizes = [(rows, d_model), (d_model, 2 * d_ff), (rows, d_ff), (d_ff, d_model), (rows, 2 * d_ff)]
    draw = jax.jit(lambda key, size: jax.random.normal(key, size, jnp.bfloat16), static_argnums=1)
    x, w_up, act, w_down, h = (draw(jax.random.key(i), size) for i, size in enumerate(sizes))
    ahead = profile(jax.jit(dense_forward), x, w_up, act, w_down)
    back = profile(jax.jit(dense_backward), x, w_up, act, w_down, h)
    return {
        "dense_forward_tflops": shape.flops / ahead.ms * 1e-9,
        "dense_backward_tflops": 2 * shape.flops / back.ms * 1e-9,
        "dense_forward_gpu_ms": ahead.gpu_ms,
        "dense_backward_gpu_ms": back.gpu_ms,
    }


def kept_bytes(moe: eqx_moe.MoE, x: jax.Array) -> int:
    """What lives between forward and backward beyond the layer's input, output and parameters."""
    kept = jax.eval_shape(lambda moe, x: jax.vjp(forward, moe, x)[1], moe, x)
    given = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((moe, x))]
    size = 0
    for leaf in jax.tree.leaves(kept):
        if (leaf.shape, leaf.dtype) in given:
            given.remove((leaf.shape, leaf.dtype))
        else:
            size += leaf.size * leaf.dtype.itemsize
    return size


def kernels(moe: eqx_moe.MoE, shape: Shape) -> dict[str, str]:
    """Which kernel each of the six products got."""
    rows, up, down = shape.tokens * shape.k, (shape.d_model, 2 * shape.d_ff), (shape.d_ff, shape.d_model)
    products = {
        "up": (up, Product.NN, Side.A),
        "down": (down, Product.NN, Side.OUT),
        "d_activation": (down, Product.NT, Side.A),
        "d_w_down": (down, Product.TN, Side.B),
        "d_w_up": (up, Product.TN, Side.A),
        "d_x": (up, Product.NT, Side.OUT),
    }
    dtype = jnp.dtype(jnp.bfloat16)
    return {
        name: str(moe.experts.matmul.resolve("cuda", Problem(rows, *widths, shape.experts, dtype, product, side)))
        for name, (widths, product, side) in products.items()
    }


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    x = jnp.ones((2**30,), jnp.bfloat16)
    return 2 * x.nbytes / (1e-3 * profile(jax.jit(lambda x: x + 1), x).gpu_ms)


def table(rows: list[dict]) -> list[str]:
    """Times by the host's clock, those in which the GPU ran something in brackets."""
    lines = [
        "| layer | T, d, n, E, K | load | kernel | forward ms | TFLOP/s | of dense | backward ms | TFLOP/s | of dense "
        "| kept MiB (limit) | scratch MiB | host copies | compile s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = ", ".join(str(row[name]) for name in ("tokens", "d_model", "d_ff", "experts", "k"))
        ahead, both = row["forward"], row["both"]
        cells = [
            row["name"],
            sizes,
            row["load"],
            row["kernel"],
            f"{ahead['ms']:.2f} ({ahead['gpu_ms']:.2f})",
            f"{row['forward_tflops']:.0f}",
            f"{row['forward_tflops'] / row['dense_forward_tflops']:.0%}",
            f"{both['ms'] - ahead['ms']:.2f} ({both['gpu_ms'] - ahead['gpu_ms']:.2f})",
            f"{row['backward_tflops']:.0f}",
            f"{row['backward_tflops'] / row['dense_backward_tflops']:.0%}",
            f"{row['kept_bytes'] / 2**20:.0f} ({row['kept_limit'] / 2**20:.0f})",
            f"{row['scratch_bytes'] / 2**20:.0f}",
            f"{both['host_copies']:.0f}",
            f"{row['compile_s']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def small_table(rows: list[dict], bandwidth: float) -> list[str]:
    lines = [
        f"Reading the active experts' weights once, at a large copy's {bandwidth / 1e12:.2f} TB/s, against the layer:",
        "",
        "| layer | tokens | active experts | read us | GPU us | host us | GPU / read | host / read |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        read = row["active_experts"] * 3 * row["d_model"] * row["d_ff"] * 2 / bandwidth
        gpu, wall = 1e3 * row["forward"]["gpu_ms"], 1e3 * row["forward"]["ms"]
        cells = [row["name"], row["tokens"], row["active_experts"], f"{1e6 * read:.0f}", f"{gpu:.0f}", f"{wall:.0f}"]
        cells += [f"{gpu / (1e6 * read):.2f}x", f"{wall / (1e6 * read):.2f}x"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--out", type=Path, required=True, help="path without ending of the .json and .md to write")
    given = parser.parse_args()
    bandwidth = copy_bandwidth()
    results: dict = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "copy_bytes_per_s": bandwidth, "rows": {}}
    for suite in given.suites:
        rows = results["rows"][suite] = []
        for shape in SUITES[suite]:
            rows.append(measure(shape, backward=suite != "small"))
            jax.clear_caches()
            lines = small_table(rows, bandwidth) if suite == "small" else table(rows)
            print(lines[-1], flush=True)
            given.out.with_suffix(".json").write_text(json.dumps(results, indent=1))
    given.out.with_suffix(".md").write_text("\n".join(report(results)) + "\n")


def report(results: dict) -> list[str]:
    """The results as Markdown."""
    rows = results["rows"]
    large = [row for suite in rows if suite != "small" for row in rows[suite]]
    about = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    small = small_table(rows["small"], results["copy_bytes_per_s"]) if "small" in rows else []
    notes = results.get("notes", [])
    return [
        f"{results['date']}: {about}.",
        "",
        *(table(large) if large else []),
        "",
        *small,
        *([""] if notes else []),
        *notes,
    ]


if __name__ == "__main__":
    main()
