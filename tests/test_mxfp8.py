"""MXFP8 emulated: the rounding against one written in NumPy, and products, gradients and layers made of it."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqx_moe

from .helpers import KERNELS, SIZES, assert_close, assert_equal, make_moe, normal, relative_error

BLOCK = 32
OPTIONS = {"expert_bias": True, "selection_bias": True, "d_shared": 7}


def reference(x, axis):
    """Block by block in float64: a scale that is a power of two, and the nearest of the 256 numbers of E4M3."""
    x = np.moveaxis(np.asarray(x.astype("float32"), np.float64), axis, -1)
    out = np.empty_like(x)
    for at in itertools.product(*map(range, x.shape[:-1])):
        for start in range(0, x.shape[-1], BLOCK):
            block = x[at][start : start + BLOCK]
            largest = np.abs(block).max()
            scale = 2.0 ** np.ceil(np.log2(largest / 448)) if largest else 1.0
            rounded = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            out[at][start : start + BLOCK] = rounded * scale
    return np.moveaxis(out, -1, axis)


def rounded_groups(x, sizes):
    """Every group rounded by itself along its rows, in blocks from its first row on, as if zeros followed."""
    out = np.zeros(x.shape)
    start = 0
    for size in sizes:
        group = np.zeros((-(-size // BLOCK) * BLOCK, x.shape[1]))
        group[:size] = np.asarray(x[start : start + size].astype("float32"))
        out[start : start + size] = reference(group, 0)[:size]
        start += size
    return out


class TestRounding:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_it_is_the_nearest_number_that_can_be_held(self, axis, dtype):
        wild = normal(64, 32, 96, seed=1) * jnp.exp2(15 * normal(64, 32, 96, seed=2))  # many scales, small beside large
        for x in (normal(64, 32, 96, dtype=dtype), wild.astype(dtype)):
            found = eqx_moe.round_to_mxfp8(x, axis=axis)
            assert found.dtype == x.dtype and found.shape == x.shape
            assert_equal(np.asarray(found.astype("float32"), np.float64), reference(x, axis))

    def test_numbers_that_it_can_hold_stay(self):
        held = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        held = held[np.isfinite(held)]
        blocks = jnp.asarray(np.pad(held[:, None], ((0, 0), (0, BLOCK - 1)), constant_values=448.0))
        assert_equal(eqx_moe.round_to_mxfp8(blocks, axis=1), blocks)
        for power in (-60, 60):
            assert_equal(eqx_moe.round_to_mxfp8(blocks * 2.0**power, axis=1), blocks * 2.0**power)

    @pytest.mark.parametrize(
        "largest, scale", [(448.0, 1.0), (np.nextafter(np.float32(448), np.float32(1e3)), 2.0), (449.0, 2.0)]
    )
    def test_the_scale_is_rounded_up(self, largest, scale):
        step = 2.0**-9 * scale  # the least number beside the largest
        x = jnp.zeros(BLOCK).at[0].set(largest).at[1].set(step).at[2].set(0.49 * step)
        found = eqx_moe.round_to_mxfp8(x, axis=0)
        assert_equal(found, jnp.zeros(BLOCK).at[0].set(448.0).at[1].set(step))

    def test_blocks_of_zeros_and_of_almost_nothing_are_zero(self):
        assert not eqx_moe.round_to_mxfp8(jnp.zeros(BLOCK), axis=0).any()
        assert not eqx_moe.round_to_mxfp8(jnp.full(BLOCK, 1e-40), axis=0).any()

    def test_what_is_not_a_number_stays_in_its_block(self):
        x = jnp.ones((4, 2 * BLOCK)).at[0, 3].set(jnp.nan).at[1, 3].set(jnp.inf).at[2, 3].set(-jnp.inf)
        found = eqx_moe.round_to_mxfp8(x, axis=1)
        assert jnp.isnan(found[:3, 3]).all() and jnp.isnan(found).sum() == 3
        assert_equal(found[0, 4:], x[0, 4:])
        assert not found[1:3, 4:BLOCK].any()
        assert_equal(found[:, BLOCK:], x[:, BLOCK:])
        assert_equal(found[3], x[3])

    def test_empty_arrays(self):
        assert eqx_moe.round_to_mxfp8(jnp.zeros((0, BLOCK)), axis=1).shape == (0, BLOCK)
        assert eqx_moe.round_to_mxfp8(jnp.zeros((3, 0)), axis=1).shape == (3, 0)

    def test_other_lengths_are_refused(self):
        with pytest.raises(ValueError, match="axis 1=40 must be a multiple of 32"):
            eqx_moe.round_to_mxfp8(jnp.zeros((32, 40)), axis=1)


@pytest.mark.parametrize(
    "pattern, kernel, dtype",
    [(pattern, "masked", "float32") for pattern in sorted(SIZES)]
    + [("over_one_block", kernel, dtype) for kernel in ("blocked", "ragged") for dtype in ("float32", "bfloat16")],
)
def test_products_and_gradients_are_those_of_rounded_operands(pattern, kernel, dtype):
    rows, sizes = SIZES[pattern]
    total, d_in, d_out = sum(sizes), 64, 96
    x, y = normal(rows, d_in, dtype=dtype), normal(rows, d_out, dtype=dtype, seed=1)
    w, counts = normal(len(sizes), d_in, d_out, dtype=dtype, seed=2), jnp.asarray(sizes, jnp.int32)
    matmul = eqx_moe.EmulatedMXFP8(KERNELS[kernel])
    poison = lambda array: array.at[total:].set(jnp.nan)
    out, pull_back = jax.vjp(lambda x, w: eqx_moe.grouped_matmul(x, w, counts, matmul=matmul), poison(x), w)
    dx, dw = pull_back(poison(y))
    rounded_x, rounded_w = reference(x, 1), reference(w, 1)
    w_for_dx, y_for_dx = reference(w, 2), reference(y, 1)
    x_for_dw, y_for_dw = rounded_groups(x, sizes), rounded_groups(y, sizes)
    expected = np.zeros((rows, d_out)), np.zeros((rows, d_in)), np.zeros(w.shape)
    for expert, (a, b) in enumerate(itertools.pairwise(np.cumsum([0, *sizes]))):
        expected[0][a:b] = rounded_x[a:b] @ rounded_w[expert]
        expected[1][a:b] = y_for_dx[a:b] @ w_for_dx[expert].T
        expected[2][expert] = x_for_dw[a:b].T @ y_for_dw[a:b]
    # Only the order of the sums differs, and the result is rounded to the operands' dtype.
    for found, wanted in zip((out, dx, dw), expected, strict=True):
        assert found.dtype == dtype
        if wanted.any():
            assert relative_error(found, wanted) < {"float32": 1e-6, "bfloat16": 4e-3}[dtype]
        else:
            assert not found.astype("float32").any()


@pytest.mark.parametrize("function", [eqx_moe.gathered_matmul, eqx_moe.combined_matmul])
def test_gathering_and_rounding_change_places(function):
    routing = eqx_moe.SoftmaxTopK(k=2)(normal(40, 4))
    grouping = eqx_moe.group_by_expert(routing)
    x, w = normal(40 if function is eqx_moe.gathered_matmul else 80, 64), normal(4, 64, 32, seed=1)
    rounded = eqx_moe.round_to_mxfp8(x, axis=1), eqx_moe.round_to_mxfp8(w, axis=1)
    assert_close(function(x, w, grouping, matmul=eqx_moe.EmulatedMXFP8()), function(*rounded, grouping))


class TestLayer:
    def test_values_and_gradients_are_near_those_without_rounding(self):
        exact = make_moe(64, 32, 4, k=2, **OPTIONS)
        rounding = make_moe(64, 32, 4, k=2, matmul=eqx_moe.EmulatedMXFP8(), **OPTIONS)
        x, cotangent = normal(100, 64), normal(100, 64, seed=1)
        run = lambda moe: jax.jit(lambda moe, x: jax.vjp(lambda m, x: m(x)[0], moe, x)[1](cotangent))(moe, x)
        errors = jax.tree.map(relative_error, *(jax.tree.leaves(run(moe)) for moe in (rounding, exact)))
        assert 1e-3 < max(errors) < 0.1  # 3 bits: each factor is off by up to 1 in 16, and by a third of it on average

    def test_vmap_equals_all_tokens_at_once(self):
        moe, x = make_moe(64, 32, 4, k=2, matmul=eqx_moe.EmulatedMXFP8(), **OPTIONS), normal(3, 20, 64)
        assert_close(jax.vmap(lambda x: moe(x)[0])(x), moe(x)[0])

    def test_widths_that_do_not_fit_are_refused_in_one_sentence(self):
        moe = make_moe(48, 32, 4, k=2, matmul=eqx_moe.EmulatedMXFP8())
        with pytest.raises(ValueError, match="EmulatedMXFP8: d_in=48 must be a multiple of 32"):
            moe(normal(10, 48))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_explain_names_the_kernel_that_multiplies(self, dtype):
        moe = make_moe(64, 32, 4, k=2, matmul=eqx_moe.EmulatedMXFP8())
        told = str(eqx_moe.explain(moe, jnp.zeros((100, 64), dtype)))
        assert "EmulatedMXFP8(matmul=BlockedDot(" in told
