"""The contract of grouped matmul, for every kernel and size pattern."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import eqx_moe

from .helpers import KERNELS, SIZES, assert_close, assert_equal, normal, oracle_grouped_matmul, relative_error

D_IN, D_OUT = 6, 10


def operands(sizes, dtype="float32", *, poison=False, seed=0):
    """`lhs`, `rhs`, `sizes` and an output cotangent; with `poison` everything past the groups is NaN."""
    rows, counts = sizes
    keys = jax.random.split(jax.random.key(seed), 3)
    lhs = jax.random.normal(keys[0], (rows, D_IN), dtype)
    rhs = jax.random.normal(keys[1], (len(counts), D_IN, D_OUT), dtype)
    cotangent = jax.random.normal(keys[2], (rows, D_OUT), dtype)
    if poison:
        lhs, cotangent = (x.at[sum(counts) :].set(jnp.nan) for x in (lhs, cotangent))
    return lhs, rhs, jnp.array(counts, jnp.int32), cotangent


def oracle_gradients(lhs, rhs, sizes, cotangent):
    """Float64 gradients of `(oracle * cotangent).sum()`."""
    ends = np.cumsum(sizes)
    lhs, rhs, cotangent = (np.asarray(x, np.float64) for x in (lhs, rhs, cotangent))
    d_lhs, d_rhs = np.zeros(lhs.shape), np.zeros(rhs.shape)
    for expert, (start, end) in enumerate(zip(ends - np.asarray(sizes), ends, strict=True)):
        d_lhs[start:end] = cotangent[start:end] @ rhs[expert].T
        d_rhs[expert] = lhs[start:end].T @ cotangent[start:end]
    return d_lhs, d_rhs


@pytest.mark.parametrize("pattern", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_and_gradients_with_poisoned_tails(kernel, pattern):
    lhs, rhs, sizes, cotangent = operands(SIZES[pattern], poison=True)

    @jax.jit
    def run(lhs, rhs, cotangent):
        out, pull_back = jax.vjp(lambda a, b: eqx_moe.grouped_matmul(a, b, sizes, matmul=KERNELS[kernel]), lhs, rhs)
        return out, *pull_back(cotangent)

    out, d_lhs, d_rhs = run(lhs, rhs, cotangent)
    total = int(sizes.sum())
    assert_close(out, oracle_grouped_matmul(lhs, rhs, sizes))
    assert_close((d_lhs, d_rhs), oracle_gradients(lhs, rhs, sizes, cotangent))
    assert_equal((out[total:], d_lhs[total:]), (jnp.zeros_like(out[total:]), jnp.zeros_like(d_lhs[total:])))
    assert_equal(d_rhs[sizes == 0], jnp.zeros_like(d_rhs[sizes == 0]))


@pytest.mark.parametrize("pattern", ["uneven", "tail_and_empty", "over_one_block"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_sums_in_float32(kernel, pattern):
    lhs, rhs, sizes, cotangent = operands(SIZES[pattern], "bfloat16", poison=True)
    out, pull_back = jax.vjp(lambda a, b: eqx_moe.grouped_matmul(a, b, sizes, matmul=KERNELS[kernel]), lhs, rhs)
    assert out.dtype == jnp.bfloat16
    # One rounding of a float32 sum: half a unit in the last of 8 bits, far below summing in bfloat16.
    assert relative_error(out, oracle_grouped_matmul(lhs, rhs, sizes)) < 2**-8
    assert_close(pull_back(cotangent), oracle_gradients(lhs, rhs, sizes, cotangent), dtype="bfloat16")


@pytest.mark.parametrize("kernel", KERNELS)
def test_long_sums_do_not_lose_digits_in_bfloat16(kernel):
    rows = 4096
    ones = jnp.ones((rows, 1), jnp.bfloat16)
    weight_gradient = jax.grad(
        lambda w: eqx_moe.grouped_matmul(ones, w, jnp.array([rows]), matmul=KERNELS[kernel]).sum().astype(jnp.float32)
    )(jnp.ones((1, 1, 1), jnp.bfloat16))
    assert weight_gradient.item() == rows  # a running sum in bfloat16 stops at 256


@pytest.mark.parametrize("kernel", ["masked", "ragged", "blocked_3_4"])
def test_check_grads_in_both_modes_and_twice(kernel, float64):
    lhs, rhs, sizes, _ = operands(SIZES["tail_and_empty"], "float64")

    @jax.jit
    def product(lhs, rhs):
        return jnp.sin(eqx_moe.grouped_matmul(lhs, rhs, sizes, matmul=KERNELS[kernel]))

    check_grads(product, (lhs, rhs), order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_three_products_are_each_others_adjoints(kernel):
    """`<x @ w, y> = <x, y @ w.T> = <w, x.T @ y>`, for the kernel's own methods."""
    x, w, sizes, y = operands(SIZES["tail"])
    matmul = KERNELS[kernel]
    forward = jnp.vdot(matmul.nn(x, w, sizes), y)
    assert_close(jnp.vdot(x, matmul.nt(y, w, sizes)), forward)
    assert_close(jnp.vdot(w, matmul.tn(x, y, sizes)), forward)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "axes", [(0, None, 0), (0, None, None), (None, None, 0), (0, 0, 0), (None, 0, None), (1, 2, 1)]
)
def test_vmap_equals_a_loop(kernel, axes):
    cases = [
        operands((24, counts), seed=i)[:3] for i, counts in enumerate(([1, 13, 3, 7], [0, 9, 0, 4], [24, 0, 0, 0]))
    ]
    batch = [jnp.stack(column, 0) for column in zip(*cases, strict=True)]
    batch = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(batch, axes, strict=True)]

    def loss(lhs, rhs, sizes):
        out = eqx_moe.grouped_matmul(lhs, rhs, sizes, matmul=KERNELS[kernel])
        return (out * out).sum(), out

    def one(*args):
        (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(*args)
        return out, gradients

    together = jax.vmap(one, axes)(*batch)
    each = [
        one(*(x if axis is None else jnp.moveaxis(x, axis, 0)[i] for x, axis in zip(batch, axes, strict=True)))
        for i in range(3)
    ]
    assert_close(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))


def test_gradient_of_vmap_makes_one_weight_gradient():
    """Under `grad(vmap)` no array of the program is as large as one weight gradient per example."""
    examples = 16
    lhs = jnp.ones((examples, 8, D_IN))
    rhs = jnp.ones((4, D_IN, D_OUT))
    sizes = jnp.full((examples, 4), 2, jnp.int32)
    fold = jax.vmap(eqx_moe.grouped_matmul, (0, None, 0))
    gradient = jax.make_jaxpr(jax.grad(lambda w: fold(lhs, w, sizes).sum()))(rhs)
    products = [eqn for eqn in gradient.eqns if eqn.primitive.name == "moe_grouped_matmul"]
    assert [eqn.outvars[0].aval.shape for eqn in products if eqn.params["product"].name == "TN"] == [rhs.shape]


def test_vmap_adds_no_loop_over_examples():
    lhs, rhs, sizes = jnp.ones((16, 8, D_IN)), jnp.ones((4, D_IN, D_OUT)), jnp.full((16, 4), 2, jnp.int32)
    program = str(jax.make_jaxpr(jax.vmap(eqx_moe.grouped_matmul, (0, None, 0)))(lhs, rhs, sizes))
    assert program.count("moe_grouped_matmul") == 1


def a_grouping():
    """Of 13 tokens to 2 of 4 experts each; some are masked, so that there is a tail."""
    routing = eqx_moe.SoftmaxTopK(k=2)(normal(13, 4, seed=2))
    return eqx_moe.group_by_expert(eqx_moe.mask_routing(routing, jnp.arange(13) % 3 > 0))


def gathered_in_two_steps(x, w, grouping, *, matmul):
    return eqx_moe.grouped_matmul(eqx_moe.dispatch(x, grouping), w, grouping.sizes, matmul=matmul)


def combined_in_two_steps(rows, w, grouping, *, matmul):
    return eqx_moe.combine(eqx_moe.grouped_matmul(rows, w, grouping.sizes, matmul=matmul), grouping)


TOKENS_ON_A_SIDE = {
    "gathered": (eqx_moe.gathered_matmul, gathered_in_two_steps, 13),
    "combined": (eqx_moe.combined_matmul, combined_in_two_steps, 26),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("side", TOKENS_ON_A_SIDE)
def test_products_with_tokens_on_a_side_equal_two_steps(side, kernel):
    """In values, tangents, gradients, and gradients of gradients, in which every product has every side over tokens."""
    one_step, two_steps, length = TOKENS_ON_A_SIDE[side]
    x, w, grouping = normal(length, D_IN), normal(4, D_IN, D_OUT, seed=1), a_grouping()
    second = 0.1 * normal(length, D_IN, seed=3)

    def everything(f):
        f = lambda x, w, f=f: jnp.sin(f(x, w, grouping, matmul=KERNELS[kernel])).sum()
        slope = lambda x, w: jnp.vdot(jax.grad(f)(x, w), second) + jax.grad(f, 1)(x, w).sum()
        tangent = jax.jvp(f, (x, w), (x[::-1], w[::-1]))[1]
        return jax.value_and_grad(f, (0, 1))(x, w), tangent, jax.grad(slope, (0, 1))(x, w)

    assert_close(jax.jit(lambda: everything(one_step))(), jax.jit(lambda: everything(two_steps))())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("side", TOKENS_ON_A_SIDE)
def test_products_with_tokens_on_a_side_under_vmap(side, shared):
    """Of values and of gradients, with weights that the examples share, and with weights of their own."""
    one_step, _, length = TOKENS_ON_A_SIDE[side]
    x, w = normal(3, length, D_IN), normal(*(() if shared else (3,)), 4, D_IN, D_OUT, seed=1)
    routing = jax.vmap(eqx_moe.SoftmaxTopK(k=2))(normal(3, 13, 4, seed=2))
    groupings = jax.vmap(eqx_moe.group_by_expert)(routing)
    f = lambda x, w, grouping: one_step(x, w, grouping, matmul=eqx_moe.RaggedDot())
    slopes = lambda *args: jax.grad(lambda x, w, g: jnp.sin(f(x, w, g)).sum(), (0, 1))(*args)
    for g in (f, slopes):
        batched = jax.jit(jax.vmap(g, (0, None if shared else 0, 0)))(x, w, groupings)
        for i in range(3):
            one = g(x[i], w if shared else w[i], jax.tree.map(lambda leaf: leaf[i], groupings))  # noqa: B023
            assert_close(jax.tree.map(lambda leaf: leaf[i], batched), one)  # noqa: B023


def test_differing_dtypes_are_refused():
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        eqx_moe.grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 4), jnp.bfloat16), jnp.array([2]))


@pytest.mark.parametrize("blocks", [(), (0, 4), (4, 4), (8, 4), (-1,)])
def test_impossible_blocks_are_refused(blocks):
    with pytest.raises(ValueError, match="must be positive and growing"):
        eqx_moe.BlockedDot(blocks=blocks)


def test_sizes_are_data_not_shapes():
    traces = []

    @jax.jit
    def run(lhs, rhs, sizes):
        traces.append(None)
        return eqx_moe.grouped_matmul(lhs, rhs, sizes)

    lhs, rhs, _, _ = operands(SIZES["uniform"])
    for counts in ([6, 6, 6, 6], [24, 0, 0, 0], [0, 0, 0, 0]):
        run(lhs, rhs, jnp.array(counts))
    assert len(traces) == 1


class TestAutoGroupedMatmul:
    def select(self, platform):
        choice = eqx_moe.AutoGroupedMatmul()
        return choice.select(rows=64, d_in=8, d_out=16, experts=4, dtype=jnp.float32, platform=platform)

    @pytest.mark.parametrize(
        "platform, kernel",
        [("cpu", eqx_moe.BlockedDot()), ("tpu", eqx_moe.RaggedDot()), ("cuda", eqx_moe.BlockedDot((256, 1024)))],
    )
    def test_chooses_per_platform(self, platform, kernel):
        assert self.select(platform).matmul == kernel

    @pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda", "rocm"])
    def test_gives_a_reason_against_every_other(self, platform):
        selection = self.select(platform)
        kernels = [str(selection.matmul), *(kernel for kernel, _ in selection.rejected)]
        unavailable = ["TEGroupedGemm()"] if platform == "cuda" else []
        assert sorted(kernels) == sorted([*unavailable, *map(str, eqx_moe.AutoGroupedMatmul().candidates(platform))])
        assert all(len(reason) > 10 for _, reason in selection.rejected)
        assert str(selection).count("\n") == len(selection.rejected)

    def test_chooses_when_compiled_for_a_platform(self):
        """The choice follows the platform compiled for, not the one that happens to be here."""
        arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (4, 8, 16))]
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        for platform, loop in (("cpu", True), ("tpu", False)):
            exported = jax.export.export(jax.jit(eqx_moe.grouped_matmul), platforms=[platform])(*arguments, sizes)
            assert ("stablehlo.while" in exported.mlir_module()) == loop


def test_more_rows_than_indices_are_refused():
    rows = jax.ShapeDtypeStruct((2**31, 1), jnp.float32)
    with pytest.raises(ValueError, match=f"rows = {2**31} does not fit into 32-bit"):
        jax.eval_shape(eqx_moe.grouped_matmul, rows, jnp.ones((1, 1, 1)), jnp.array([1]))


def test_narrow_sizes_do_not_wrap():
    out = eqx_moe.BlockedDot().nn(jnp.ones((300, 2)), jnp.ones((2, 2, 3)), jnp.array([100, 100], jnp.int8))
    assert_equal(out[:, 0], jnp.where(jnp.arange(300) < 200, 2.0, 0.0))


def test_vmap_of_width_zero():
    out = jax.vmap(eqx_moe.grouped_matmul, (0, None, 0))(jnp.ones((2, 4, 0)), jnp.ones((1, 0, 3)), jnp.full((2, 1), 4))
    assert_equal(out, jnp.zeros((2, 4, 3)))


class Careless(eqx_moe.AbstractGroupedMatmul):
    """A kernel that forgets to return the dtype it was given, and to transpose."""

    def nn(self, x, w, sizes):
        return eqx_moe.MaskedDense().nn(x, w, sizes).astype(jnp.bfloat16)

    def nt(self, y, w, sizes):
        return eqx_moe.MaskedDense().nn(y, w, sizes)

    def tn(self, x, y, sizes):
        return eqx_moe.MaskedDense().tn(x, y, sizes)


def test_what_a_kernel_returns_is_checked():
    x, w, sizes = normal(6, 4), normal(2, 4, 4), jnp.array([3, 3], jnp.int32)
    with pytest.raises(ValueError, match=r"Careless\(\).nn returned bfloat16\[6, 4\], and must return float32\[6, 4\]"):
        eqx_moe.grouped_matmul(x, w, sizes, matmul=Careless())


def test_select_refuses_unknown_platforms():
    with pytest.raises(ValueError, match="platform='gpu' must be one of cpu, cuda"):
        eqx_moe.AutoGroupedMatmul().select(rows=1, d_in=1, d_out=1, experts=1, dtype=jnp.float32, platform="gpu")


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_past_the_groups_are_zero_for_bad_weights_too(kernel):
    x, w, sizes = jnp.ones((5, 3)), jnp.ones((2, 3, 4)).at[0].set(jnp.nan), jnp.array([2, 2], jnp.int32)
    assert not eqx_moe.grouped_matmul(x, w, sizes, matmul=KERNELS[kernel])[4].any()
