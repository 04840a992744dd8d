"""Grouped-matmul kernels as multiples of one dense matmul of the same size, all three products, side by side.

taskset -c 0,1 python benchmarks/grouped_matmul.py --kernels blocked --out benchmarks/results/grouped_matmul_cpu
"""

import argparse
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp

import eqx_moe
from timing import machine, side_by_side

SHAPES = [(4096, 256, 1024, 8), (8192, 256, 512, 32), (8192, 128, 256, 64)]
LOADS = {"balanced": 0.0, "skewed": 1.0}
PRODUCTS = {"nn": "x @ w", "nt": "y @ w.T", "tn": "x.T @ y"}


def group_sizes(rows: int, experts: int, exponent: float, key: jax.Array) -> jax.Array:
    """Rows drawn at random for experts whose popularity falls as `rank ** -exponent`."""
    popularity = -exponent * jnp.log1p(jnp.arange(experts, dtype=jnp.float32))
    chosen = jax.random.categorical(key, popularity, shape=(rows,))
    return jnp.bincount(chosen, length=experts).astype(jnp.int32)


def contestants(shape: tuple[int, int, int, int], exponent: float, kernels: dict, dtype) -> dict:
    """`"product kernel"` to a function and its arguments."""
    rows, d_in, d_out, experts = shape
    keys = jax.random.split(jax.random.key(0), 4)
    x, y = jax.random.normal(keys[0], (rows, d_in), dtype), jax.random.normal(keys[1], (rows, d_out), dtype)
    w = jax.random.normal(keys[2], (experts, d_in, d_out), dtype)
    sizes = group_sizes(rows, experts, exponent, keys[3])
    functions = {
        "nn dense": (lambda x, w: x @ w, (x, w[0])),
        "nt dense": (lambda y, w: y @ w.T, (y, w[0])),
        "tn dense": (lambda x, y: x.T @ y, (x, y)),
    }
    for name, kernel in kernels.items():
        functions[f"nn {name}"] = (kernel.nn, (x, w, sizes))
        functions[f"nt {name}"] = (kernel.nt, (y, w, sizes))
        functions[f"tn {name}"] = (kernel.tn, (x, y, sizes))
    return functions


def measure(kernels: dict, dtype, repeats: int) -> list[dict]:
    """One row per shape, load and product."""
    results = []
    for shape, (load, exponent) in itertools.product(SHAPES, LOADS.items()):
        times = side_by_side(contestants(shape, exponent, kernels, dtype), repeats=repeats)
        for product in PRODUCTS:
            ms = {name.split()[1]: time for name, time in times.items() if name.startswith(product)}
            results.append({"shape": shape, "load": load, "product": product, "ms": ms})
            print(*markdown([results[-1]], kernels)[2:], sep="\n", flush=True)
    return results


def markdown(results: list[dict], kernels: dict) -> list[str]:
    """The lines of a table of multiples of the dense matmul."""
    lines = ["| rows, d_in -> d_out, experts | load | product | dense, ms | " + " | ".join(kernels) + " |"]
    lines.append("|---" * (4 + len(kernels)) + "|")
    for row in results:
        rows, d_in, d_out, experts = row["shape"]
        dense = row["ms"]["dense"]
        multiples = " | ".join(f"{row['ms'][name] / dense:.2f}x" for name in kernels)
        what = f"{rows}, {d_in} -> {d_out}, {experts} | {row['load']} | {PRODUCTS[row['product']]}"
        lines.append(f"| {what} | {dense:.1f} | {multiples} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each (default: 15)")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--kernels", nargs="+", choices=["blocked", "ragged"], default=["blocked", "ragged"])
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    every = {"blocked": eqx_moe.BlockedDot(), "ragged": eqx_moe.RaggedDot()}
    kernels = {name: every[name] for name in options.kernels}
    results = measure(kernels, jnp.dtype(options.dtype), options.repeats)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(), "dtype": options.dtype, "repeats": options.repeats, "results": results}
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        where = ", ".join(f"{key}: {value}" for key, value in report["machine"].items())
        options.out.with_suffix(".md").write_text("\n".join([where, "", *markdown(results, kernels)]) + "\n")


if __name__ == "__main__":
    main()
