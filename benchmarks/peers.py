"""The whole layer beside what a user would plainly compose from other libraries, in turn in one process, on a GPU.

python benchmarks/peers.py --out benchmarks/results/peers_h200

All contestants get the same parameters, tokens and cotangent as in `moe_layer.py` and are measured as it does. Their
outputs and gradients are held against this library's. One that fails is recorded with its error; `ragged_dot` spreads
the rows over all experts, which may not fit, and takes seconds where others take milliseconds.
"""

import argparse
import dataclasses
import gc
import importlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

import eqx_moe
from gpu_profile import profile
from moe_layer import TWELVE, Shape, dense_ceiling, forward, forward_and_backward, kept_bytes, make
from timing import machine

LIBRARY = "eqx_moe"
KERNELS_KEPT = 12
# The others are measured three times over.
SLOW = ("ragged_dot",)
GRADIENTS = ("d_router", "d_gate_up", "d_down", "d_x")


class Parameters(NamedTuple):
    """`[d_model, experts]`, `[experts, d_model, 2, d_ff]` and `[experts, d_ff, d_model]`."""

    w_router: jax.Array
    w_gate_up: jax.Array
    w_down: jax.Array


Layer = Callable[[Parameters, jax.Array], jax.Array]
# (rows, w, sizes) -> rows, as `jax.lax.ragged_dot`
Dot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def router_logits(params: Parameters, x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) @ params.w_router.astype(jnp.float32)


def swiglu_mlp(rows: jax.Array, sizes: jax.Array, params: Parameters, dot: Dot) -> jax.Array:
    experts, d_model, _, d_ff = params.w_gate_up.shape
    gate, up = jnp.split(dot(rows, params.w_gate_up.reshape(experts, d_model, 2 * d_ff), sizes), 2, axis=-1)
    return dot(jax.nn.silu(gate) * up, params.w_down, sizes)


def permute(rows: jax.Array, order: jax.Array) -> jax.Array:
    # Without the hint the gradient is a scatter with atomics, several times slower.
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


def compose(dot: Dot, k: int) -> Layer:
    """The layer in plain JAX around a grouped matmul."""

    def layer(params: Parameters, x: jax.Array) -> jax.Array:
        best, experts = lax.top_k(router_logits(params, x), k)
        weights = jax.nn.softmax(best, axis=-1)
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=params.w_router.shape[1]).astype(jnp.int32)
        rows = permute(jnp.repeat(x, k, axis=0), order)
        rows = permute(swiglu_mlp(rows, sizes, params, dot), jnp.argsort(order))
        y = rows.reshape(*experts.shape, x.shape[1]).astype(jnp.float32) * weights[:, :, None]
        return y.sum(axis=1).astype(x.dtype)

    return layer


def with_ragged_dot(k: int) -> Layer:
    return compose(lax.ragged_dot, k)


def with_tokamax(k: int) -> Layer:
    """Tokamax's grouped matmul, with the kernel and the tiles that it chooses by itself, without autotuning."""
    tokamax = importlib.import_module("tokamax")
    return compose(lambda rows, w, sizes: tokamax.ragged_dot(rows, w, group_sizes=sizes), k)


def with_te_gemm(k: int) -> Layer:
    """Transformer Engine's grouped matmul alone."""
    dense = importlib.import_module("transformer_engine.jax.dense")
    return compose(lambda rows, w, sizes: dense.grouped_dense(rows, w, sizes), k)


def with_te(k: int) -> Layer:
    """All of it from Transformer Engine's public functions: router, permutation and grouped matmul."""
    dense = importlib.import_module("transformer_engine.jax.dense")
    permutation = importlib.import_module("transformer_engine.jax.permutation")
    router = importlib.import_module("transformer_engine.jax.router")

    def layer(params: Parameters, x: jax.Array) -> jax.Array:
        weights, chosen = router.fused_topk_with_score_function(router_logits(params, x), k)
        rows, _, row_ids, _, sizes = permutation.token_dispatch(x, chosen, x.shape[0] * k)
        rows = swiglu_mlp(rows, sizes, params, lambda rows, w, sizes: dense.grouped_dense(rows, w, sizes))
        return permutation.token_combine(rows, row_ids, weights)

    return layer


PEERS = {"te": with_te, "te_gemm": with_te_gemm, "tokamax": with_tokamax, "ragged_dot": with_ragged_dot}


def parameters(moe: eqx_moe.MoE) -> Parameters:
    return Parameters(moe.router.weight, moe.experts.w_gate_up, moe.experts.w_down)


def library(moe: eqx_moe.MoE) -> Layer:
    """The library's layer as a function of its parameters; those in `moe` are not used."""
    return lambda params, x: eqx.tree_at(parameters, moe, params)(x)[0]


def as_module(layer: Layer, params: Parameters) -> jax.tree_util.Partial:
    """Called and differentiated as an `MoE`, so that the functions of `moe_layer.py` take it."""
    return jax.tree_util.Partial(lambda params, x: (layer(params, x), None), params)


@jax.jit
def relative_error(found: jax.Array, wanted: jax.Array) -> jax.Array:
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm((found - wanted).reshape(-1)) / jnp.linalg.norm(wanted.reshape(-1))


def errors(names: Iterable[str], found: Any, wanted: Any) -> dict[str, float]:
    pairs = zip(names, jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return {name: float(relative_error(ours, theirs)) for name, ours, theirs in pairs}


def summary(run: Callable, *args: Any, repeats: int) -> dict[str, Any]:
    found = dataclasses.asdict(profile(run, *args, repeats=repeats))
    return found | {"kernels": dict(list(found["kernels"].items())[:KERNELS_KEPT])}


def measure(name: str, layer: Layer, given: tuple[Parameters, jax.Array, jax.Array], wanted: Any, row: dict) -> None:
    """Writes one contestant's numbers into `row` as they come, so that those before a failure stay."""
    params, x, cotangent = given
    module, repeats = as_module(layer, params), 1 if name in SLOW else 3
    start = time.perf_counter()
    compiled = jax.jit(forward).lower(module, x).compile()
    row["compile_s"] = time.perf_counter() - start
    row["errors"] = errors(["y"], compiled(module, x), wanted[0])
    ahead = row["forward"] = summary(compiled, module, x, repeats=repeats)
    start = time.perf_counter()
    compiled = jax.jit(forward_and_backward).lower(module, x, cotangent).compile()
    row["both_compile_s"] = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    row["scratch_bytes"] = analysis.temp_size_in_bytes if analysis else None
    row["errors"] |= errors(GRADIENTS, compiled(module, x, cotangent)[1], wanted[1])
    whole = row["both"] = summary(compiled, module, x, cotangent, repeats=repeats)
    row |= {"backward_ms": whole["ms"] - ahead["ms"], "backward_gpu_ms": whole["gpu_ms"] - ahead["gpu_ms"]}
    row["kept_bytes"] = kept_bytes(module, x)  # pyright: ignore[reportArgumentType]  # it is only called


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


def attempt(name: str, action: Callable[[], None], row: dict) -> None:
    """Runs the action; a failure becomes a line in `row`."""
    try:
        action()
    except Exception as error:
        row["error"] = first_line(error)
    gc.collect()  # what a failed run holds, often through its traceback
    jax.clear_caches()
    print(f"{name}: {line(row)}", flush=True)


def line(row: dict) -> str:
    found = [f"{row['forward']['ms']:.2f} ms ({row['forward']['gpu_ms']:.2f})"] if "forward" in row else []
    found += [f"{row['backward_ms']:.2f} ms ({row['backward_gpu_ms']:.2f})"] if "backward_ms" in row else []
    found += [f"{name} {value:.1e}" for name, value in row.get("errors", {}).items()]
    return ", ".join([*found, *([row["error"]] if "error" in row else [])])


def compare(shape: Shape, peers: Iterable[str], save: Callable[[], None], row: dict, until: float) -> None:
    """All contestants in turn on one shape."""
    row |= dataclasses.asdict(shape) | {"contestants": {}}
    print(shape, flush=True)
    moe, x, cotangent = make(shape)
    given = (parameters(moe), x, cotangent)
    layers = {LIBRARY: lambda k: library(moe)} | {name: PEERS[name] for name in peers}
    wanted = jax.jit(forward_and_backward)(as_module(library(moe), given[0]), x, cotangent)
    for name, build in layers.items():
        found = row["contestants"][name] = {}
        if time.monotonic() > until:
            found["skipped"] = "the time was over"
            continue
        attempt(
            name, lambda name=name, build=build, found=found: measure(name, build(shape.k), given, wanted, found), found
        )
        save()
    del moe, x, cotangent, given, wanted
    row |= dense_ceiling(shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=int, choices=range(len(TWELVE)), default=[0, 3, 5, 8, 11])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--cap", type=float, default=float("inf"), help="seconds after which none is started any more")
    parser.add_argument("--out", type=Path, required=True, help="path without ending of the .json to write")
    given = parser.parse_args()
    until = time.monotonic() + given.cap
    results = {"machine": machine() | versions(), "date": time.strftime("%Y-%m-%d"), "rows": []}
    path = given.out.with_name(given.out.name + ".json")
    save = lambda: path.write_text(json.dumps(results, indent=1))
    for index in given.shapes:
        row = {"index": index}
        results["rows"].append(row)
        attempt("shape", lambda row=row, index=index: compare(TWELVE[index], given.peers, save, row, until), row)
        save()


def versions() -> dict[str, str]:
    found = {}
    for package in ("transformer_engine", "tokamax", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


if __name__ == "__main__":
    main()
