"""What runs on an NVIDIA GPU, against the float32 oracle; run there with `pytest -m gpu`.

Transformer Engine's kernel is among the tests where it is installed.
"""

import functools as ft
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe
from eqx_moe._te import why_no_te

from .helpers import (
    OPTIONS,
    SIZES,
    assert_close,
    assert_equal,
    make_moe,
    normal,
    oracle_grouped_matmul,
    oracle_moe,
    relative_error,
)

HERE = jax.default_backend()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(HERE != "gpu", reason=f"JAX runs on {HERE} here, not on a GPU")]


def kernel(name: str) -> eqx_moe.AbstractGroupedMatmul:
    """The kernel, or a skip that says why it cannot be here."""
    if name == "te":
        if (reason := why_no_te()) is not None:
            pytest.skip(reason)
        return eqx_moe.TEGroupedGemm()
    return {"tiled": eqx_moe.TiledDot(), "auto": eqx_moe.AutoGroupedMatmul()}[name]


KERNELS = ["tiled", "te", "auto"]
# Every one with what it can do; the automatic choice is one of the others.
EACH = [("tiled", "bfloat16"), ("tiled", "float32"), ("te", "bfloat16")]
GATHERED = ["gathered_nn", "gathered_nt", "gathered_tn", "right_gathered_tn"]


@ft.cache
def products(matmul):
    return {name: jax.jit(getattr(matmul, name)) for name in ("nn", "nt", "tn", *GATHERED)}


@pytest.mark.parametrize("name, dtype", EACH)
@pytest.mark.parametrize("pattern", sorted(set(SIZES) - {"no_rows"}))  # without rows no kernel is called
def test_products_equal_the_oracle_with_poisoned_tails(pattern, name, dtype):
    rows, sizes = SIZES[pattern]
    run, total, d_in, d_out = products(kernel(name)), sum(sizes), 72, 136
    x, y = normal(rows, d_in, dtype=dtype), normal(rows, d_out, dtype=dtype, seed=1)
    w, counts = normal(len(sizes), d_in, d_out, dtype=dtype, seed=2), jnp.asarray(sizes, jnp.int32)
    poisoned_x, poisoned_y = x.at[total:].set(jnp.nan), y.at[total:].set(jnp.nan)
    plain = lambda array: np.asarray(array.astype("float32"))
    nn, nt = run["nn"](poisoned_x, w, counts), run["nt"](poisoned_y, w, counts)
    tn = run["tn"](poisoned_x, poisoned_y, counts)
    assert_close(plain(nn), oracle_grouped_matmul(plain(x), plain(w), sizes), dtype=dtype)
    assert_close(plain(nt), oracle_grouped_matmul(plain(y), plain(w).swapaxes(1, 2), sizes), dtype=dtype)
    assert not plain(nn)[total:].any() and not plain(nt)[total:].any()
    edges = np.cumsum([0, *sizes])
    gradient = np.stack([plain(x)[a:b].T @ plain(y)[a:b] for a, b in itertools.pairwise(edges)])
    assert_close(plain(tn), gradient, dtype=dtype)
    assert not plain(tn)[np.asarray(sizes) == 0].any()


@pytest.mark.parametrize("name, dtype", EACH)
def test_gathered_products_equal_gathering_first(name, dtype):
    matmul = kernel(name)
    run = products(matmul)
    tokens, rows, sizes = 150, 300, jnp.array([140, 0, 100, 20], jnp.int32)
    index = jnp.asarray(np.random.default_rng(0).integers(0, tokens + 1, rows), jnp.int32)
    x, y = normal(tokens, 72, dtype=dtype), normal(tokens, 136, dtype=dtype, seed=1)
    x_rows, y_rows = normal(rows, 72, dtype=dtype, seed=2), normal(rows, 136, dtype=dtype, seed=3)
    w = normal(4, 72, 136, dtype=dtype, seed=4)
    take = lambda array: array.at[index].get(mode="fill", fill_value=0)
    assert_close(run["gathered_nn"](x, index, w, sizes), run["nn"](take(x), w, sizes), dtype=dtype)
    assert_close(run["gathered_nt"](y, index, w, sizes), run["nt"](take(y), w, sizes), dtype=dtype)
    assert_close(run["gathered_tn"](x, index, y_rows, sizes), run["tn"](take(x), y_rows, sizes), dtype=dtype)
    assert_close(run["right_gathered_tn"](x_rows, y, index, sizes), run["tn"](x_rows, take(y), sizes), dtype=dtype)


@pytest.mark.parametrize("name", ["tiled", "te"])
def test_more_numbers_than_fit_into_32_bits(name):
    """Rows and weights both of more than 2**31 elements; checked at both ends."""
    matmul = kernel(name)
    rows, d_in, d_out, experts = 540_000, 4096, 8192, 70
    assert rows * d_in > 2**31 and experts * d_in * d_out > 2**31
    sizes = np.full(experts, rows // experts, np.int32)
    sizes[-1] -= 7  # a tail
    x = jax.jit(lambda: jax.random.normal(jax.random.key(0), (rows, d_in), jnp.bfloat16))()
    w = jax.jit(lambda: jax.random.normal(jax.random.key(1), (experts, d_in, d_out), jnp.bfloat16))()
    out = jax.jit(matmul.nn)(x, w, jnp.asarray(sizes))
    total = sizes.sum()
    for expert, part in ((0, slice(0, 50)), (experts - 1, slice(total - 50, total))):
        expected = np.asarray(x[part].astype("float32")) @ np.asarray(w[expert].astype("float32"))
        assert_close(out[part], expected, dtype="bfloat16")
    assert not out[total:].astype("float32").any()
    del w
    gradient = jax.jit(matmul.tn)(x, out, jnp.asarray(sizes))
    for expert, part in ((0, slice(0, sizes[0])), (experts - 1, slice(total - sizes[-1], total))):
        expected = np.asarray(x[part].astype("float32")).T @ np.asarray(out[part].astype("float32"))
        assert_close(gradient[expert], expected, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dispatch_of_wide_tokens(dtype):
    """Tokens are copied to their rows by one kernel, and rows of none become zeros; some tokens are masked."""
    random = np.random.default_rng(0)
    ids = jnp.asarray(np.argsort(random.random((3000, 64)), axis=1)[:, :4], jnp.int32)
    routing = eqx_moe.mask_routing(
        eqx_moe.Routing(ids, jnp.ones(ids.shape), 64), jnp.asarray(random.random(3000) < 0.9)
    )
    x, cotangent = normal(3000, 1030, dtype=dtype), normal(12000, 1030, dtype=dtype, seed=1)

    def run(x, routing, cotangent):
        rows, pull_back = jax.vjp(lambda x: eqx_moe.dispatch(x, eqx_moe.group_by_expert(routing)), x)
        return rows, pull_back(cotangent)[0]

    here = jax.jit(run)(x, routing, cotangent)
    with jax.default_device(jax.devices("cpu")[0]):
        there = jax.jit(run)(x, routing, cotangent)
    assert_equal(here[0], there[0])
    assert_close(here[1].astype("float32"), there[1].astype("float32"), dtype=dtype)


# No subnormal numbers, which the GPU's comparisons take for zero.
ODD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0, 88.0, -104.0, 3.4e38, 1.2e-38], np.float32)


@pytest.mark.parametrize("tokens, experts, k", [(1, 8, 2), (333, 128, 8), (4096, 60, 4), (257, 256, 16), (50, 7, 7)])
def test_routing_equals_that_of_the_cpu(tokens, experts, k):
    """Ids, order, position and sizes exactly, for ties and odd numbers, with some tokens masked."""
    random = np.random.default_rng(0)
    logits = np.where(random.random((tokens, experts)) < 0.5, random.choice(ODD, (tokens, experts)), 1.5)
    logits, mask = logits.astype(np.float32), random.random(tokens) < 0.8

    def route(logits, mask):
        ids = eqx_moe.select_experts(logits, k)
        routing = eqx_moe.Routing(ids, jnp.ones(ids.shape), experts)
        return ids, eqx_moe.group_by_expert(eqx_moe.mask_routing(routing, mask))

    here = jax.jit(route)(logits, mask)
    with jax.default_device(jax.devices("cpu")[0]):
        there = jax.jit(route)(logits, mask)
    assert_equal(here, there)
    batched = jax.jit(jax.vmap(route))(np.stack([logits, logits[::-1]]), np.stack([mask, mask]))
    assert_equal(jax.tree.map(lambda leaf: leaf[0], batched), there)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_router_of_bfloat16_tokens(dtype):
    """Logits as exact as float32's; gradients rounded no more than the dtype of what they belong to."""
    x, weight, cotangent = (
        normal(300, 256, dtype="bfloat16"),
        normal(256, 40, dtype=dtype, seed=1),
        normal(300, 40, seed=2),
    )
    wide = [np.asarray(array, np.float64) for array in (x, weight, cotangent)]
    logits, pull_back = jax.vjp(jax.jit(eqx_moe.router_logits), x, weight)
    assert logits.dtype == jnp.float32
    assert_close(logits, wide[0] @ wide[1])
    dx, dweight = jax.jit(pull_back)(cotangent)
    assert dx.dtype == x.dtype and dweight.dtype == weight.dtype
    assert relative_error(dx.astype("float32"), wide[2] @ wide[1].T) < 2**-8
    assert relative_error(dweight.astype("float32"), wide[0].T @ wide[2]) < (2**-8 if dtype == "bfloat16" else 1e-5)
    along = jax.jvp(jax.jit(eqx_moe.router_logits), (x, weight), (x, weight))[1]
    assert_close(along, 2 * wide[0] @ wide[1])


def value_and_gradients(f, moe, x):
    def loss(moe, x):
        y = f(moe, x).astype(jnp.float32)
        return jnp.vdot(y, normal(*y.shape, seed=5)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(moe, x)
    return y, gradients


@pytest.mark.parametrize("options", ["plain", "all"])
def test_layer_in_float32(options):
    moe, x = make_moe(16, 24, 8, k=3, **OPTIONS[options]), normal(100, 16)
    with jax.default_matmul_precision("highest"):
        actual = value_and_gradients(lambda moe, x: moe(x)[0], moe, x)
        batched = value_and_gradients(lambda moe, x: jax.vmap(moe)(x)[0], moe, x.reshape(4, 25, 16))
        expected = value_and_gradients(oracle_moe, moe, x)
    assert_close(actual, expected)
    assert_close(batched[0].reshape(100, 16), expected[0])
    assert_close(batched[1][0], expected[1][0])


def initialised(name: str, d_ff: int, experts: int, k: int = 2) -> eqx_moe.MoE:
    rule = eqx_moe.SoftmaxTopK(k=k)
    return eqx_moe.MoE(64, d_ff, experts, rule=rule, matmul=kernel(name), key=jax.random.key(d_ff))


@pytest.mark.parametrize("name", KERNELS)
def test_layer_in_bfloat16(name):
    """With bfloat16 tokens the router is computed in float32 as ever, so that the experts are the oracle's."""
    moe, x = initialised(name, 96, 8), normal(500, 64, dtype="bfloat16")
    actual = value_and_gradients(lambda moe, x: moe(x)[0], moe, x)
    with jax.default_matmul_precision("highest"):
        expected = value_and_gradients(oracle_moe, moe, x.astype("float32"))
    assert_close(actual[0], expected[0], dtype="bfloat16")
    assert_close(jax.tree.map(lambda a: a.astype("float32"), actual[1]), expected[1], dtype="bfloat16")


@pytest.mark.parametrize("name", KERNELS)
def test_a_batch_in_bfloat16_equals_folding_it(name):
    # All experts are chosen: a choice could turn out differently where rounding does.
    moe, x = initialised(name, 96, 8, k=8), normal(4, 125, 64, dtype="bfloat16")
    batched = value_and_gradients(lambda moe, x: jax.vmap(moe)(x)[0], moe, x)
    folded = value_and_gradients(lambda moe, x: moe(x)[0], moe, x)
    assert_close(batched, folded, dtype="bfloat16")


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("dtype, name", [("float32", "tiled"), ("bfloat16", "te"), ("bfloat16", "auto")])
def test_inside_shard_map(name, dtype, check_vma):
    """On a mesh of one device: what the kernels owe `check_vma`, which the lowering checks."""
    moe, x = initialised(name, 96, 8), normal(512, 64, dtype=dtype)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data"), "check_vma": check_vma}
    sharded = jax.shard_map(lambda moe, x: moe(x)[0], mesh=mesh, **specs)
    with jax.default_matmul_precision("highest"):
        inside = value_and_gradients(sharded, moe, x)
        outside = value_and_gradients(lambda moe, x: moe(x)[0], moe, x)
    assert_close(inside, outside, dtype=dtype)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["tiled", "te"])
def test_two_layers_of_different_sizes_scanned_and_unrolled(name, checkpoint):
    # All experts are chosen: a choice could turn out differently where rounding does.
    wide, narrow = initialised(name, 96, 8, k=8), initialised(name, 32, 4, k=4)
    x = normal(256, 64, dtype="bfloat16")

    def block(x, layers):
        for layer in layers:  # normalised, because without it rounding errors would grow with the tokens
            x = x + layer(jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype))[0]
        return x

    block = jax.checkpoint(block) if checkpoint else block
    layers = [(jax.tree.map(lambda leaf, i=i: (1 + 0.1 * i) * leaf, wide), narrow) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    loss = lambda x: jnp.square(x.astype(jnp.float32)).mean()
    scanned = jax.jit(jax.value_and_grad(lambda s: loss(jax.lax.scan(lambda x, two: (block(x, two), None), x, s)[0])))
    unrolled = jax.jit(jax.value_and_grad(lambda s: loss(ft.reduce(block, s, x))))
    value, gradients = scanned(stacked)
    other_value, other = unrolled(layers)
    assert_close(value, other_value, dtype="bfloat16")
    assert_close(gradients, jax.tree.map(lambda *leaves: jnp.stack(leaves), *other), dtype="bfloat16")


@pytest.mark.parametrize("name", KERNELS[:3])
def test_nothing_waits_for_the_host(name):
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from gpu_profile import profile

    moe, x = make_moe(64, 96, 8, k=2, matmul=kernel(name), dtype=jnp.bfloat16), normal(2048, 64, dtype="bfloat16")
    step = jax.jit(jax.grad(lambda moe, x: jnp.sin(moe(x)[0].astype(jnp.float32)).sum())).lower(moe, x).compile()
    seen = profile(step, moe, x)
    assert seen.kernels
    assert seen.host_copies == 0


class TestTransformerEngine:
    @pytest.fixture(autouse=True)
    def te(self):
        return kernel("te")

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_refuses_other_dtypes(self, te, dtype):
        with pytest.raises(ValueError, match=f"takes bfloat16, not {dtype}"):
            eqx_moe.grouped_matmul(jnp.ones((4, 8), dtype), jnp.ones((1, 8, 8), dtype), jnp.array([4]), matmul=te)

    def test_refuses_widths_that_would_crash(self, te):
        x, w = jnp.ones((4, 70), jnp.bfloat16), jnp.ones((1, 70, 8), jnp.bfloat16)
        with pytest.raises(ValueError, match="widths 70 and 8 must be multiples of 8"):
            eqx_moe.grouped_matmul(x, w, jnp.array([4]), matmul=te)

    def test_is_chosen_for_many_rows_and_not_for_few(self):
        choice = eqx_moe.AutoGroupedMatmul()
        sizes = {"d_in": 256, "d_out": 512, "experts": 8, "dtype": jnp.bfloat16}
        assert choice.select(rows=8192, **sizes).matmul == eqx_moe.TEGroupedGemm()
        few = choice.select(rows=64, **sizes)
        assert few.matmul == eqx_moe.TiledDot()
        assert "slow below 512 rows per expert" in str(few)
