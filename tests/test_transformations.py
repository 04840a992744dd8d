"""The layer under `jax.lax.scan`, checkpointing, jit, other precisions, surgery and serialisation."""

import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe

from .helpers import (
    ACTIVATIONS,
    FAST,
    KERNELS,
    SEVERAL,
    assert_close,
    assert_equal,
    count,
    count_products,
    equations,
    index,
    make_moe,
    normal,
    oracle_moe,
    stack,
    value_and_gradients,
)

COLLECTIVES = {"psum", "psum2", "psum_invariant", "all_gather", "all_to_all", "ppermute", "ragged_all_to_all", "pmax"}


class TestScanAndCheckpoint:
    def layers(self):
        return stack([make_moe(matmul=FAST, seed=i, **SEVERAL) for i in range(2)])

    @staticmethod
    def apply(layer, x):
        y, stats = layer(x)
        return x + y, stats

    def test_scan_over_stacked_layers_equals_a_loop(self):
        def scanned(layers, x):
            return jax.lax.scan(lambda x, layer: self.apply(layer, x), x, layers)

        def looped(layers, x):
            stats = []
            for i in range(2):
                x, stat = self.apply(index(layers, i), x)
                stats.append(stat)
            return x, stack(stats)

        both = jax.jit(lambda *args: [value_and_gradients(f, *args) for f in (scanned, looped)])
        results = both(self.layers(), normal(7, 8))
        assert_close(*results)
        assert results[0][0][1].load.shape == (2, 5)

    @pytest.mark.parametrize(
        "policy, products",
        [
            # Forward: up and down. Backward: the gradients of both operands of both.
            ("none", 6),
            ("everything", 6),
            ("pre_activation", 6),
            ("nothing", 7),
        ],
    )
    def test_checkpoint(self, policy, products):
        """Values stay; the up-projection runs twice only if its result was not to be saved."""
        moe, x = make_moe(matmul=FAST, d_shared=7), normal(7, 8)
        policies = {
            "everything": jax.checkpoint_policies.everything_saveable,
            "pre_activation": jax.checkpoint_policies.save_only_these_names(eqx_moe.PRE_ACTIVATION),
            "nothing": jax.checkpoint_policies.nothing_saveable,
        }
        plain = lambda moe, x: moe(x)
        layer = plain if policy == "none" else jax.checkpoint(plain, policy=policies[policy])
        run = lambda moe, x: value_and_gradients(layer, moe, x)
        assert count_products(jax.make_jaxpr(run)(moe, x)) == products
        assert_close(jax.jit(run)(moe, x), jax.jit(lambda moe, x: value_and_gradients(plain, moe, x))(moe, x))

    def test_experts_are_not_chosen_again(self):
        """The choice is kept for the backward pass, so that it cannot come out differently there, nor cost twice."""
        moe, x = make_moe(k=3, matmul=FAST), normal(7, 8)
        program = jax.make_jaxpr(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))(moe, x)
        forward = jax.make_jaxpr(lambda moe, x: moe(x))(moe, x)
        for primitive in ("top_k", "sort"):
            assert count(program, primitive) == count(forward, primitive) > 0


class TestJit:
    def test_layer_is_an_argument(self):
        """Plain `jax.jit`, `eqx.filter_jit` and no jit at all are one; so are their gradients."""
        moe, x = make_moe(matmul=FAST), normal(7, 8)

        def loss(moe, x):
            return jnp.sin(moe(x)[0]).sum()

        expected = jax.jit(jax.value_and_grad(loss))(moe, x)
        assert_equal(eqx.filter_jit(eqx.filter_value_and_grad(loss))(moe, x), expected)
        assert_close(jax.value_and_grad(loss)(moe, x), expected)
        assert_close(eqx.filter_jit(moe)(x)[0], jax.jit(lambda x: moe(x)[0])(x))

    def test_one_trace_for_all_routings_and_for_equal_layers(self):
        """Neither data nor newly made, equal strategy objects retrace; another kernel does."""
        traces = []

        @jax.jit
        def run(moe, x, mask):
            traces.append(None)
            return moe(x, mask=mask)

        def build(seed, matmul):
            rule = eqx_moe.SigmoidTopK(k=2, scale=2.0, groups=eqx_moe.GroupLimit(2, 1))
            activation = eqx_moe.ClampedSwiGLU(limit=3.0)
            return make_moe(num_experts=4, seed=seed, rule=rule, activation=activation, matmul=matmul)

        x = normal(7, 8)
        for i, tokens in enumerate((x, -x, jnp.zeros_like(x), jnp.full_like(x, jnp.nan))):
            run(build(i, eqx_moe.BlockedDot()), tokens, jnp.arange(7) > i)
        assert len(traces) == 1
        run(build(0, FAST), x, jnp.arange(7) > 0)
        assert len(traces) == 2

    def test_donated_buffers(self):
        """A training step that takes the layer's buffers and gives them back updated."""

        def step(moe, x):
            gradient = jax.grad(lambda moe: jnp.sin(moe(x)[0]).sum())(moe)
            return jax.tree.map(lambda p, g: p - 0.1 * g, moe, gradient)

        moe, x = make_moe(matmul=FAST, **SEVERAL), normal(7, 8)
        expected = jax.jit(step)(moe, x)
        updated = jax.jit(step, donate_argnums=0)(moe, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(moe))
        assert_close(updated, expected)

    def test_freshly_built_layer_can_be_donated(self):
        """No two leaves share one buffer, zeros included."""
        moe = eqx_moe.MoE(
            8, 6, 8, rule=eqx_moe.SoftmaxTopK(k=2), router_bias=True, selection_bias=True, key=jax.random.key(0)
        )
        jax.block_until_ready(jax.jit(lambda moe: jax.tree.map(lambda p: p + 1, moe), donate_argnums=0)(moe))

    def test_runs_are_bit_equal(self):
        moe, x = make_moe(**SEVERAL), normal(64, 8)
        run = jax.jit(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))
        first = run(moe, x)
        for _ in range(3):
            assert_equal(run(moe, x), first)

    @pytest.mark.parametrize("debug", ["debug_nans", "debug_infs"])
    def test_ordinary_input_makes_no_nan_or_infinity_inside(self, debug):
        moe, x, mask = make_moe(**SEVERAL), normal(7, 8), jnp.arange(7) > 1
        run = jax.jit(lambda moe, x: value_and_gradients(lambda moe, x: moe(x, mask=mask), moe, x))
        expected = run(moe, x)
        with getattr(jax, debug)(True):
            assert_close(run(moe, x), expected)

    def test_without_jit(self):
        """`jax.disable_jit` is how users step through a model."""
        moe, x = make_moe(matmul=FAST), normal(7, 8)
        with jax.disable_jit():
            y, _ = moe(x)
        assert_close(y, moe(x)[0])

    def test_no_collectives_on_one_device(self):
        moe, x = make_moe(**SEVERAL), normal(7, 8)
        program = jax.make_jaxpr(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))(moe, x)
        assert not COLLECTIVES & {eqn.primitive.name for eqn in equations(program)}

    def test_no_scatter_of_rows(self):
        """Gathers in both directions: the only scatters write single integers, or one weight of a token."""
        moe, x = make_moe(**SEVERAL), normal(7, 8)
        program = jax.make_jaxpr(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))(moe, x)
        scatters = [eqn for eqn in equations(program) if eqn.primitive.name.startswith("scatter")]
        assert scatters
        assert all(eqn.invars[2].aval.ndim <= 2 and eqn.invars[2].aval.size <= 7 * 2 for eqn in scatters)


# Operands that are constants of an inner `jit`, which reach JAX's rules as NumPy arrays.
CONSTANTS = {
    "grouped_matmul": lambda x: eqx_moe.grouped_matmul(x, jnp.ones((2, 8, 3)), jnp.array([2, 1], jnp.int32)),
    "dispatch": lambda x: eqx_moe.dispatch(x, constant_grouping()),
    "combine": lambda x: eqx_moe.combine(x, constant_grouping()),
    "gathered_matmul": lambda x: eqx_moe.gathered_matmul(x, jnp.ones((2, 8, 3)), constant_grouping()),
}


def constant_grouping():
    order, position = jnp.array([2, 0, 1], jnp.int32), jnp.array([[1], [2], [0]], jnp.int32)
    return eqx_moe.Grouping(order, position, jnp.array([1, 2], jnp.int32))


@pytest.mark.parametrize("function", CONSTANTS)
def test_constant_operands_inside_jit(function):
    f, x = CONSTANTS[function], normal(3, 8)
    loss = lambda f: lambda x: jnp.sin(f(x)).sum()
    expected = jax.grad(loss(f))(x)
    assert_close(jax.grad(loss(jax.jit(f)))(x), expected)
    assert_close(jax.vmap(jax.grad(loss(jax.jit(f))))(x[None])[0], expected)
    assert_close(jax.jvp(jax.jit(f), (x,), (x,)), jax.jvp(f, (x,), (x,)))


class TestPrecisionModes:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_x64(self, dtype, float64):
        """The router stays in float32, so that float64 tokens are right to float32's tolerance."""
        moe, x = make_moe(**SEVERAL, dtype=jnp.dtype(dtype)), normal(7, 8, dtype=dtype)
        mask = jnp.arange(7) > 1

        @jax.jit
        def both(moe, x):
            ours = value_and_gradients(lambda moe, x: moe(x, mask=mask), moe, x)
            low = jax.tree.map(lambda leaf: leaf.astype("float32"), (moe, x))
            return ours, value_and_gradients(lambda moe, x: (oracle_moe(moe, x, mask), moe(x, mask=mask)[1]), *low)

        ((y, stats), gradients), expected = both(moe, x)
        assert_close(((y, stats), gradients), expected)
        assert y.dtype == dtype
        assert jax.tree.map(lambda leaf: leaf.dtype, gradients) == jax.tree.map(lambda leaf: leaf.dtype, (moe, x))
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(stats)} == {"int32", "float32"}

    def test_default_promotion(self):
        """The other tests run with strict promotion of dtypes and ranks; users mostly do not."""
        moe, x = make_moe(matmul=FAST, **SEVERAL), normal(7, 8, dtype="bfloat16")
        run = lambda: jax.jit(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))(moe, x)
        strict = run()
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            relaxed = run()
        assert_equal(relaxed, strict)
        assert jax.tree.map(lambda leaf: leaf.dtype, relaxed) == jax.tree.map(lambda leaf: leaf.dtype, strict)


class TestSurgeryAndSerialisation:
    def test_surgery(self):
        moe, x = make_moe(matmul=FAST), normal(7, 8)
        silent = eqx.tree_at(lambda m: m.experts.w_down, moe, replace_fn=jnp.zeros_like)
        assert_equal(silent(x)[0], jnp.zeros_like(x))
        other = eqx.tree_at(lambda m: m.experts.matmul, moe, eqx_moe.MaskedDense())
        assert other.experts.matmul == eqx_moe.MaskedDense()
        assert_close(other(x)[0], moe(x)[0])

    def test_leaves_round_trip(self):
        moe, like = make_moe(**SEVERAL), make_moe(seed=1, **SEVERAL)
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, moe)
        file.seek(0)
        assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, like), moe)

    @pytest.mark.parametrize(
        "strategy",
        [
            *ACTIVATIONS.values(),
            *KERNELS.values(),
            eqx_moe.AutoGroupedMatmul(),
            eqx_moe.SoftmaxTopK(k=2, renormalize=False, scale=0.5),
            eqx_moe.SigmoidTopK(k=2, groups=eqx_moe.GroupLimit(4, 2, 1)),
            eqx_moe.SqrtSoftplusTopK(k=2),
        ],
        ids=repr,
    )
    def test_strategies_are_values(self, strategy):
        """They survive pickling, compare and hash by value, and have no leaves."""
        again = pickle.loads(pickle.dumps(strategy))
        assert again is not strategy
        assert again == strategy
        assert hash(again) == hash(strategy)
        assert jax.tree.leaves(strategy) == []

    def test_different_strategies_differ(self):
        everything = [*ACTIVATIONS.values(), *KERNELS.values(), eqx_moe.AutoGroupedMatmul()]
        everything += [eqx_moe.SoftmaxTopK(k=2), eqx_moe.SigmoidTopK(k=2), eqx_moe.SoftmaxTopK(k=3)]
        assert len(set(everything)) == len(everything)

    def test_export_round_trip(self):
        """Serialised with its derivative, run again as bytes."""
        moe, x, mask = make_moe(matmul=FAST, **SEVERAL), normal(7, 8), jnp.arange(7) > 1
        leaves, structure = jax.tree.flatten(moe)

        @jax.jit
        def run(leaves, x, mask):
            y, stats = jax.tree.unflatten(structure, leaves)(x, mask=mask)
            return y, stats.load

        exported = jax.export.export(run)(leaves, x, mask)
        again = jax.export.deserialize(exported.serialize(vjp_order=1))
        assert_close(again.call(leaves, x, mask), run(leaves, x, mask))
        loss = lambda run: lambda leaves: jnp.sin(run(leaves, x, mask)[0]).sum()
        assert_close(jax.grad(loss(again.call))(leaves), jax.grad(loss(run))(leaves))

    def test_lowers_for_every_platform(self):
        """Also where this machine has none: with its gradient, each alone and all in one module."""
        moe, x = make_moe(**SEVERAL), normal(7, 8)
        run = jax.jit(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))
        platforms = ("cpu", "cuda", "rocm", "tpu")
        for some in (*((platform,) for platform in platforms), platforms):
            assert jax.export.export(run, platforms=some)(moe, x).platforms == some


def test_finite_differences_of_the_whole_layer():
    """An independent check of derivatives: the oracle is differentiated by JAX too, a difference is not."""
    moe, x = make_moe(matmul=FAST, **SEVERAL), normal(7, 8)
    # Experts are chosen as before: their choice has no derivative.
    direction = make_moe(matmul=FAST, seed=1, **SEVERAL)
    direction = eqx.tree_at(lambda m: m.selection_bias, direction, replace_fn=lambda b: jax.tree.map(jnp.zeros_like, b))
    run = jax.jit(lambda moe, d: jnp.sin(jax.tree.map(jnp.add, moe, d)(x)[0]))
    step = 3e-3
    ahead, behind = (run(moe, jax.tree.map(lambda d: d * length, direction)) for length in (step, -step))  # noqa: B023
    difference = (np.asarray(ahead, np.float64) - np.asarray(behind, np.float64)).sum() / (2 * step)
    gradient = jax.jit(jax.grad(lambda moe: jnp.sin(moe(x)[0]).sum()))(moe)
    slope = sum(map(jnp.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    # The third derivative leaves an error of the order of step**2, float32 one of 1e-6 / step.
    assert float(slope) == pytest.approx(difference, rel=1e-2)
