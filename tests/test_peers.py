"""What the benchmarks compare this library with computes the same, and their tables say what was measured."""

import dataclasses
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe

from .helpers import TOLERANCE, assert_close, make_moe, normal
from .meshes import ALONE, make_mesh

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TOKENS, D_MODEL, D_FF, EXPERTS, K = SIZE = (24, 16, 8, 4, 2)
SHAPE = dict(zip(("tokens", "d_model", "d_ff", "experts", "k"), SIZE, strict=True))


@pytest.fixture(scope="module")
def peers():
    return benchmark("peers")


@pytest.fixture(scope="module")
def comparison():
    return benchmark("comparison")


def benchmark(name):
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_ragged_dot_equals_the_layer_in_values_and_gradients(peers, k):
    moe, x, cotangent = make_moe(D_MODEL, D_FF, EXPERTS, k=k), normal(TOKENS, D_MODEL), normal(TOKENS, D_MODEL, seed=1)
    params = peers.parameters(moe)
    found, wanted = (
        jax.jit(peers.forward_and_backward)(peers.as_module(layer, params), x, cotangent)
        for layer in (peers.with_ragged_dot(k), peers.library(moe))
    )
    assert_close(found, wanted)
    assert_close(wanted[0], moe(x)[0])


class Stand:
    """In place of Transformer Engine and Tokamax: their public functions' signatures, in plain JAX."""

    @staticmethod
    def fused_topk_with_score_function(logits, topk):
        best, experts = jax.lax.top_k(logits, topk)
        tokens = jnp.arange(logits.shape[0])[:, None]
        weights = jnp.zeros_like(logits).at[tokens, experts].set(jax.nn.softmax(best))
        return weights, jnp.zeros(logits.shape, bool).at[tokens, experts].set(True)

    @staticmethod
    def token_dispatch(inp, routing_map, num_out_tokens):
        experts, tokens = jnp.nonzero(routing_map.T, size=num_out_tokens)
        return inp[tokens], None, (experts, tokens), None, routing_map.sum(axis=0, dtype=jnp.int32)

    @staticmethod
    def token_combine(inp, row_id_map, merging_probs):
        experts, tokens = row_id_map
        rows = inp * merging_probs[tokens, experts][:, None]
        return jnp.zeros((merging_probs.shape[0], inp.shape[1]), inp.dtype).at[tokens].add(rows)

    @staticmethod
    def grouped_dense(x, kernel, group_sizes):
        return jax.lax.ragged_dot(x, kernel, group_sizes)

    @staticmethod
    def ragged_dot(lhs, rhs, group_sizes):
        return jax.lax.ragged_dot(lhs, rhs, group_sizes)


@pytest.mark.parametrize("name", ["te", "te_gemm", "tokamax"])
def test_the_others_are_put_together_rightly(peers, monkeypatch, name):
    for module in ("dense", "permutation", "router"):
        monkeypatch.setitem(sys.modules, f"transformer_engine.jax.{module}", Stand)
    monkeypatch.setitem(sys.modules, "tokamax", Stand)
    moe, x = make_moe(D_MODEL, D_FF, EXPERTS, k=K), normal(TOKENS, D_MODEL)
    assert_close(jax.jit(peers.PEERS[name](K))(peers.parameters(moe), x), moe(x)[0])


def run(peers, monkeypatch, contestants, *, until=float("inf"), clock=(1.0, 0.5, 3.5, 2.0)):
    """`compare` on a tiny shape, with times as if they had been measured."""
    profiles = importlib.import_module("gpu_profile")
    seen = []

    def profile(run, *args, repeats):
        run(*args)
        seen.append(repeats)
        ms, gpu_ms = clock[:2] if len(args) == 2 else clock[2:]
        return profiles.Profile(ms, gpu_ms, 0.0, {f"kernel {i}": 0.1 for i in range(99)})

    monkeypatch.setattr(peers, "PEERS", contestants)
    monkeypatch.setattr(peers, "profile", profile)
    monkeypatch.setattr(
        peers, "dense_ceiling", lambda shape: {"dense_forward_gpu_ms": 0.25, "dense_backward_gpu_ms": 1}
    )
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests in this process still want them
    row: dict[str, Any] = {"index": 0}
    saved: list[str] = []
    shape = peers.Shape("tiny", *SIZE)
    peers.compare(shape, contestants, lambda: saved.append(json.dumps(row)), row, until)
    return row, saved, seen


def test_a_peer_that_fails_stops_nothing(peers, monkeypatch):
    def broken(k):
        raise MemoryError("too much\nand more")

    def broken_backward(k):
        @jax.custom_vjp
        def layer(params, x):
            return peers.with_ragged_dot(k)(params, x)

        def backward(_, g):
            raise NotImplementedError("no gradient")

        layer.defvjp(lambda params, x: (layer(params, x), None), backward)
        return layer

    contestants = {"broken": broken, "half": broken_backward, "ragged_dot": peers.with_ragged_dot}
    row, saved, repeats = run(peers, monkeypatch, contestants)
    found = row["contestants"]
    assert list(found) == ["eqx_moe", *contestants]
    assert found["broken"] == {"error": "MemoryError: too much"}
    assert found["half"]["error"] == "NotImplementedError: no gradient" and found["half"]["forward"]["ms"] == 1.0
    assert found["eqx_moe"]["backward_ms"] == 2.5 and found["eqx_moe"]["kept_bytes"] > 0
    assert set(found["ragged_dot"]["errors"]) == {"y", *peers.GRADIENTS}
    assert all(error <= TOLERANCE["bfloat16"] for error in found["ragged_dot"]["errors"].values())
    assert len(found["eqx_moe"]["forward"]["kernels"]) == peers.KERNELS_KEPT
    assert repeats == [3, 3, 3, 1, 1]
    assert len(saved) == 4 and row["dense_forward_gpu_ms"] == 0.25


def test_none_is_started_when_the_time_is_over(peers, comparison, monkeypatch):
    row, *_ = run(peers, monkeypatch, {"ragged_dot": peers.with_ragged_dot}, until=0.0)
    assert all(found == {"skipped": "the time was over"} for found in row["contestants"].values())
    table = comparison.collect(None, [{"rows": [row]}], None, "gpu")
    assert list(table[SIZE]) == ["dense"]


def results():
    """Made-up files of `moe_layer.py`, `peers.py` and SonicMoE."""
    times = {"forward": {"ms": 2.0, "gpu_ms": 1.0}, "both": {"ms": 5.0, "gpu_ms": 3.0}}
    layer = {"rows": {"twelve": [SHAPE | times | {"dense_forward_tflops": 1e-6, "dense_backward_tflops": 1e-6}]}}
    contestants: dict[str, Any] = {"eqx_moe": {"forward": times["forward"], "both": {"ms": 6.0, "gpu_ms": 4.0}}}
    contestants["te"] = {"forward": times["forward"], "error": "RuntimeError: no backward"}
    contestants["ragged_dot"] = {"error": "RESOURCE_EXHAUSTED: out of memory"}
    peers = {"rows": [SHAPE | {"contestants": contestants, "dense_forward_gpu_ms": 0.5, "dense_backward_gpu_ms": 0.75}]}
    sizes = dict(zip("TdnEK", SIZE, strict=True))
    times = {"forward_ms": 1.5, "backward_ms": 2.5, "gpu_forward_ms": 1.25, "gpu_backward_ms": 2.25}
    return layer, peers, {"rows": [{"index": 0} | sizes | times, {"index": 1, "error": "skipped: time cap"}]}


def test_the_table_has_every_file(comparison):
    layer, peers, sonic = results()
    lines = comparison.markdown(comparison.collect(layer, [peers], sonic, "gpu"))
    assert lines[2] == "| 24, 16, 8, 4, 2 | 1.00 / 3.00 | 1.25 / 2.25 | 1.00 / failed | failed | 0.50 / 0.75 |"
    assert lines[-2:] == [
        "- Transformer Engine, plainly, 24, 16, 8, 4, 2: RuntimeError: no backward",
        "- jax.lax.ragged_dot, 24, 16, 8, 4, 2: RESOURCE_EXHAUSTED: out of memory",
    ]
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


def test_wrong_results_are_marked(comparison):
    row = {"forward": {"gpu_ms": 1.0}, "both": {"gpu_ms": 4.0}}
    entry = comparison.of_profiles(row | {"errors": {"y": 0.004, "d_x": float("nan"), "d_down": 0.2}}, "gpu")
    assert entry.error == "differs from eqx_moe, relative norms: d_x nan, d_down 2.0e-01"
    assert comparison.cell(entry) == "1.00 / 3.00 (wrong)"
    assert comparison.of_profiles(row | {"errors": {"y": 0.004}}, "gpu").error is None


def test_the_host_clock_and_missing_files(comparison):
    layer, peers, sonic = results()
    entry = comparison.Entry
    host = comparison.collect(layer, [peers], sonic, "host")[SIZE]
    assert host["eqx_moe"] == entry(2.0, 4.0) and host["sonic"] == entry(1.5, 2.5)
    assert comparison.collect(layer, [], None, "gpu") == {SIZE: {"eqx_moe": entry(1.0, 2.0)}}
    dense = comparison.collect(layer, [], None, "host")[SIZE]["dense"]
    assert dense.forward == pytest.approx(6e3 * 24 * 16 * 8 * 2 / 1e6)
    assert comparison.collect(None, [], None, "gpu") == {}
    assert comparison.collect(None, [], sonic, "gpu") == {SIZE: {"sonic": entry(1.25, 2.25)}}


def test_speeds_count_the_backward_pass_twice(comparison):
    entry = comparison.Entry(2.0, 4.0)
    assert comparison.tflops(SIZE, entry, "forward") == comparison.tflops(SIZE, entry, "backward")
    assert comparison.tflops(SIZE, entry, "forward") == pytest.approx(6 * 24 * 16 * 8 * 2 / 2e-3 / 1e12)
    assert comparison.tflops(SIZE, None, "forward") == comparison.tflops(SIZE, comparison.Entry(), "forward") == 0


def test_the_plot_is_the_same_every_time(comparison, tmp_path):
    layer, peers, sonic = results()
    for name, files in {"a": ([peers], sonic), "b": ([peers], sonic), "empty": ([], None)}.items():
        comparison.write_svg(comparison.collect(layer if name != "empty" else None, *files, "gpu"), tmp_path / name)
    drawn = (tmp_path / "a").read_text()
    assert drawn == (tmp_path / "b").read_text()
    assert "SonicMoE (PyTorch)" in drawn and "dense matmuls" in drawn and len(drawn) < 60_000


def test_the_command_writes_both(comparison, monkeypatch, tmp_path):
    names = ("layer", "peers", "sonic")
    for name, made_up in zip(names, results(), strict=True):
        (tmp_path / name).write_text(json.dumps(made_up))
    given = [word for name in names for word in (f"--{name}", str(tmp_path / name))]
    monkeypatch.setattr(sys, "argv", ["comparison.py", *given, "--out", str(tmp_path / "found")])
    comparison.main()
    assert (tmp_path / "found.md").read_text().startswith("Milliseconds forward / backward, by the clock of the gpu.")
    assert (tmp_path / "found.svg").stat().st_size > 1000


def test_loss_curves_are_held_against_the_first(monkeypatch, tmp_path):
    curves = benchmark("curves")
    for name, shift in ("first", 0.0), ("second", 0.25):
        (tmp_path / name).mkdir()
        rows = [f"{step},{2 + shift},{1.5 + shift if step == 120 else 'nan'}" for step in range(1, 121)]
        (tmp_path / name / "loss.csv").write_text("\n".join(["step,training,held_out", *rows]))
    folders = [str(tmp_path / name) for name in ("first", "second")]
    monkeypatch.setattr(sys, "argv", ["curves.py", *folders, "--out", str(tmp_path / "found")])
    curves.main()
    told = (tmp_path / "found.md").read_text().splitlines()
    assert told[2:] == [
        "| first | 1.5000 | 2.0000 | 0.0000 | 0.0000 |",
        "| second | 1.7500 | 2.2500 | 0.2500 | 0.2500 |",
    ]
    assert "<svg" in (tmp_path / "found.svg").read_text()


def test_useful_rows_are_the_tokens_that_must_cross():
    ids = np.random.default_rng(0).integers(0, 8, (12, 3))
    shards, sent, got = 4, Counter(), Counter()
    for token, chosen in enumerate(ids):
        for to in {expert // 2 for expert in chosen} - {token // 3}:
            sent[token // 3] += 1
            got[to] += 1
    assert benchmark("exchange").useful_rows(ids, 8, shards) == max(*sent.values(), *got.values())


@pytest.mark.parametrize("load", ["balanced", "zipf"])
def test_exchanges_are_measured_on_any_devices(load):
    exchange = benchmark("exchange")
    mesh = make_mesh(ALONE)
    layer = dataclasses.replace(exchange.LAYERS["tiny"], load=load)
    row = exchange.measure(layer, list(exchange.EXCHANGES), mesh, 1)
    assert not row["not_measured"] and set(row["ms"]) == {"all_to_all", *exchange.EXCHANGES}
    assert len(row["differs"]) == len(exchange.EXCHANGES) and max(row["differs"].values()) < TOLERANCE["bfloat16"]
    assert len(exchange.table([row])) == 2 + 1 + len(exchange.EXCHANGES)


def test_an_exchange_that_cannot_run_is_named(monkeypatch):
    exchange = benchmark("exchange")
    monkeypatch.setattr(
        eqx_moe.NCCLGroup, "bootstrap", lambda *_: (_ for _ in ()).throw(RuntimeError("none here\n..."))
    )
    mesh = make_mesh(ALONE)
    row = exchange.measure(exchange.LAYERS["tiny"], ["nccl"], mesh, 1)
    assert row["not_measured"] == {"nccl": "none here"} and set(row["ms"]) == {"all_to_all"}
    assert exchange.table([row])[-1].endswith("| nccl | not measured: none here |")
