"""Exchanges among several devices: dispatch and combine alone, and whole layers, beside a plain all-to-all.

python benchmarks/exchange.py --out benchmarks/results/exchange_h200
XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/exchange.py --layers tiny --out /tmp/exchange

All devices of the process hold the experts of one layer. "Useful" bytes are those of every token once to each other
device that has an expert of it, and of a result back; those of the busiest device. GB/s are useful bytes by the
time, so that exchanges that move more than that show it. The plain all-to-all moves the busiest device's for all of
them.
"""

import argparse
import contextlib
import dataclasses
import functools as ft
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

import eqx_moe
from moe_layer import Shape
from timing import machine, side_by_side

AXIS = "expert"
DTYPE = jnp.bfloat16


# Their tokens are those of one device.
LAYERS = {
    "deepseek": Shape("DeepSeek-V3", 4096, 7168, 2048, 256, 8),
    "qwen": Shape("Qwen3-235B-A22B", 4096, 4096, 1536, 128, 8),
    "olmoe": Shape("OLMoE-1B-7B", 4096, 2048, 1024, 64, 8),
    "tiny": Shape("tiny", 64, 64, 32, 16, 2),
}
LOADS = ("balanced", "zipf")


def group(layer: Shape, shards: int) -> eqx_moe.NCCLGroup:
    return eqx_moe.NCCLGroup(layer.experts, layer.d_model, layer.tokens, layer.k, shards)


EXCHANGES: dict[str, Callable[[Shape, int], eqx_moe.AbstractExchange]] = {
    "padded": lambda layer, shards: eqx_moe.PaddedAllToAll(),
    "ragged": lambda layer, shards: eqx_moe.RaggedAllToAll(),
    "gather": lambda layer, shards: eqx_moe.AllGatherReduceScatter(),
    "nccl": lambda layer, shards: eqx_moe.NCCLExchange(group(layer, shards)),
}


@contextlib.contextmanager
def started(name: str, layer: Shape, mesh: jax.sharding.Mesh) -> Iterator[None]:
    """NCCL's group, if it is needed."""
    if name != "nccl":
        yield
        return
    mine = group(layer, mesh.size)
    mine.bootstrap(mesh, AXIS)
    try:
        yield
    finally:
        mine.finalize()


def make(layer: Shape, mesh: jax.sharding.Mesh) -> tuple[eqx_moe.MoE, jax.Array]:
    """A layer with its experts on their devices, and tokens for all."""

    def build(key: jax.Array) -> eqx_moe.MoE:
        sizes, rule = (layer.d_model, layer.d_ff, layer.experts), eqx_moe.SoftmaxTopK(k=layer.k)
        parallel = eqx_moe.ExpertParallel(axis=AXIS)
        moe = eqx_moe.MoE(*sizes, rule=rule, router_bias=True, parallel=parallel, dtype=DTYPE, key=key)
        popularity = {"balanced": 0.0, "zipf": 1.0}[layer.load]
        bias = -popularity * jnp.log1p(jnp.arange(layer.experts, dtype=jnp.float32))
        return eqx.tree_at(lambda moe: moe.router.bias, moe, bias.astype(DTYPE))

    moe = eqx_moe.initialise_sharded(build, mesh, jax.random.key(0))
    shape = (mesh.size * layer.tokens, layer.d_model)
    draw = jax.jit(
        lambda key: 0.2 * jax.random.normal(key, shape, DTYPE), out_shardings=jax.NamedSharding(mesh, jax.P(AXIS))
    )
    return moe, draw(jax.random.key(1))


def useful_rows(ids: np.ndarray, experts: int, shards: int) -> float:
    """Rows that the busiest device must get from others or send to them in one direction: tokens, counted once for each
    other device that has an expert of theirs."""
    tokens = ids.shape[0] // shards
    known = np.repeat(np.arange(ids.shape[0]), ids.shape[1]), ids.reshape(-1) // (experts // shards)
    wanted = np.zeros((ids.shape[0], shards), bool)
    wanted[known] = True
    pairs = wanted.reshape(shards, tokens, shards).sum(axis=1) * (1 - np.eye(shards, dtype=int))
    return float(max(pairs.sum(axis=0).max(), pairs.sum(axis=1).max()))


def there_and_back(exchange: eqx_moe.AbstractExchange, routing: eqx_moe.Routing, x: jax.Array) -> jax.Array:
    """Dispatch and combine, with nothing in between but a weight, so that weights are sent too."""
    plan = exchange.plan(routing, axis_name=AXIS)
    rows, weights = exchange.send(x, routing.weights, plan)
    return exchange.receive(rows, plan) + weights.sum().astype(x.dtype)


def plain(rows: jax.Array) -> jax.Array:
    """The same bytes twice over `lax.all_to_all`."""
    swap = ft.partial(lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True)
    return swap(lax.optimization_barrier(swap(rows)))


def with_backward(forward: Callable[..., jax.Array]) -> Callable:
    """The output, and the gradients of every argument for a cotangent of ones."""

    def run(*args):
        y, pull_back = jax.vjp(forward, *args)
        return y, pull_back(jnp.ones_like(y))

    return run


def measure(layer: Shape, names: list[str], mesh: jax.sharding.Mesh, repeats: int) -> dict:
    """One row of the results: milliseconds, and why an exchange was not measured."""
    shards, tokens = mesh.size, jax.P(AXIS)
    moe, x = make(layer, mesh)
    on_mesh = lambda f, into: jax.shard_map(f, mesh=mesh, in_specs=into, out_specs=tokens)

    def choose(moe: eqx_moe.MoE, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        routing = moe.rule(moe.router(x))
        return routing.experts, routing.weights

    ids, weights = jax.jit(on_mesh(choose, (eqx_moe.partition_specs(moe), tokens)))(moe, x)
    everywhere = jax.jit(lambda ids: ids, out_shardings=jax.NamedSharding(mesh, jax.P()))
    useful = useful_rows(np.asarray(everywhere(ids)), layer.experts, shards)
    cells = -(-round(useful) // max(shards - 1, 1)) * shards
    rows = jax.device_put(jnp.ones((shards * cells, layer.d_model), DTYPE), jax.NamedSharding(mesh, tokens))
    row = dataclasses.asdict(layer) | {"shards": shards, "useful_bytes": 2 * useful * layer.d_model, "ms": {}}
    row["ms"]["all_to_all"] = side_by_side({"exchange": (on_mesh(plain, tokens), (rows,))}, repeats=repeats)
    row["not_measured"], outputs = {}, {}
    for name in names:
        exchange = EXCHANGES[name](layer, shards)
        divided = eqx_moe.with_parallel(moe, eqx_moe.ExpertParallel(axis=AXIS, exchange=exchange))
        move = on_mesh(
            lambda ids, w, x, exchange=exchange: there_and_back(exchange, eqx_moe.Routing(ids, w, layer.experts), x),
            (tokens, tokens, tokens),
        )
        apply = on_mesh(lambda moe, x: moe(x)[0], (eqx_moe.partition_specs(divided), tokens))
        contestants = {
            "exchange": (move, (ids, weights, x)),
            "exchange_both": (with_backward(lambda w, x, move=move: move(ids, w, x)), (weights, x)),
            "layer": (apply, (divided, x)),
            "layer_both": (with_backward(apply), (divided, x)),
        }
        try:
            with started(name, layer, mesh):
                y = np.asarray(everywhere(jax.jit(apply)(divided, x)), np.float32)
                row["ms"][name] = side_by_side(contestants, repeats=repeats)
                outputs[name] = y
        except (RuntimeError, NotImplementedError) as error:  # what it lacks here
            row["not_measured"][name] = str(error).splitlines()[0]
    row["differs"] = {}
    for name, y in outputs.items():
        first = next(iter(outputs.values()))
        row["differs"][name] = float(np.linalg.norm(y - first) / np.linalg.norm(first))
    return row


def table(rows: list[dict]) -> list[str]:
    lines = [
        "| layer | T, d, n, E, K | load | shards | exchange | dispatch + combine ms | GB/s | with backward ms "
        "| layer ms | with backward ms | differs from the first by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = ", ".join(str(row[name]) for name in ("tokens", "d_model", "d_ff", "experts", "k"))
        for name, ms in row["ms"].items():
            rate = 2 * row["useful_bytes"] / ms["exchange"] * 1e-6
            times = [f"{ms[what]:.2f}" if what in ms else "" for what in ("exchange_both", "layer", "layer_both")]
            differs = f"{row['differs'][name]:.1e}" if name in row["differs"] else ""
            cells = [row["name"], sizes, row["load"], row["shards"], name, f"{ms['exchange']:.2f}", f"{rate:.1f}"]
            lines.append("| " + " | ".join(map(str, [*cells, *times, differs])) + " |")
        for name, why in row["not_measured"].items():
            lines.append(
                f"| {row['name']} | {sizes} | {row['load']} | {row['shards']} | {name} | not measured: {why} |"
            )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=["deepseek", "qwen", "olmoe"])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--exchanges", nargs="+", choices=list(EXCHANGES), default=list(EXCHANGES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="path without ending of the .json and .md to write")
    given = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    results: dict = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rows": []}
    for name in given.layers:
        for load in given.loads:
            layer = dataclasses.replace(LAYERS[name], load=load)
            results["rows"].append(measure(layer, given.exchanges, mesh, given.repeats))
            print("\n".join(table(results["rows"][-1:])[2:]), flush=True)
            given.out.with_suffix(".json").write_text(json.dumps(results, indent=1))
    about = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    lines = [f"{results['date']}: {about}.", "", *table(results["rows"])]
    given.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
