"""The layer under every transformation of JAX: equal to what it means without it, and as cheap."""

import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqx_moe

from .helpers import ACTIVATIONS, KERNELS, assert_close, assert_equal, equations, make_moe, normal, oracle_moe

# A kernel that compiles fast; which kernel runs makes no difference to what is tested here.
FAST = eqx_moe.RaggedDot()
SEVERAL = {"expert_bias": True, "selection_bias": True, "d_shared": 7, "shared_gate": True}

COLLECTIVES = {"psum", "psum2", "psum_invariant", "all_gather", "all_to_all", "ppermute", "ragged_all_to_all", "pmax"}


def value_and_gradients(apply, moe, *arguments):
    """Output, statistics, and the gradients of a loss of both, for the layer and the tokens."""

    def loss(moe, x, *rest):
        y, stats = apply(moe, x, *rest)
        losses = 0.1 * eqx_moe.load_balance_loss(stats) + 0.1 * eqx_moe.router_z_loss(stats)
        return jnp.sin(y).sum().astype(jnp.float32) + losses, (y, stats)

    (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(moe, *arguments)
    return out, gradients


def count(program, name):
    return sum(eqn.primitive.name == name for eqn in equations(program))


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def index(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


class TestVmap:
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_equals_folding(self, kernel):
        """Values, statistics, and the gradient of the vmapped layer."""
        moe = make_moe(matmul=KERNELS[kernel], **SEVERAL)
        x, mask = normal(3, 7, 8), jnp.arange(21).reshape(3, 7) % 4 > 0

        @jax.jit
        def both(moe, x, mask):
            batched = lambda moe, x, mask: jax.vmap(lambda x, mask: moe(x, mask=mask))(x, mask)
            folded = lambda moe, x, mask: moe(x, mask=mask)
            return value_and_gradients(batched, moe, x, mask), value_and_gradients(folded, moe, x, mask)

        ((y, stats), gradients), ((expected, total), expected_gradients) = both(moe, x, mask)
        assert_close((y, gradients), (expected, expected_gradients))
        assert_close(eqx_moe.total_stats(stats), total)
        assert_equal(stats.tokens, mask.sum(1))

    def test_of_gradient_equals_a_loop(self):
        """One gradient per example."""
        moe, x, mask = make_moe(matmul=FAST, **SEVERAL), normal(3, 7, 8), jnp.arange(21).reshape(3, 7) % 4 > 0

        def one(moe, x, mask):
            return value_and_gradients(lambda moe, x, mask: moe(x, mask=mask), moe, x, mask)

        together = jax.jit(jax.vmap(one, (None, 0, 0)))(moe, x, mask)
        loop = jax.jit(one)
        assert_close(together, stack([loop(moe, x[i], mask[i]) for i in range(3)]))

    @pytest.mark.parametrize("weights", ["own", "own_and_shared_tokens"])
    def test_over_stacked_layers_equals_a_loop(self, weights):
        """An ensemble: every member has its own parameters."""
        build = lambda key: eqx_moe.MoE(
            8, 6, 5, rule=eqx_moe.SigmoidTopK(k=2), matmul=FAST, expert_bias=True, d_shared=3, key=key
        )
        ensemble = eqx.filter_vmap(build)(jax.random.split(jax.random.key(0), 3))
        x = normal(3, 7, 8) if weights == "own" else normal(7, 8)

        def one(moe, x):
            return value_and_gradients(lambda moe, x: moe(x), moe, x)

        axes = (0, 0 if weights == "own" else None)
        together = eqx.filter_jit(eqx.filter_vmap(one, in_axes=axes))(ensemble, x)
        loop = jax.jit(one)
        assert_close(together, stack([loop(index(ensemble, i), x[i] if weights == "own" else x) for i in range(3)]))

    def test_gradient_of_an_ensemble(self):
        """The gradient of a sum over members, whose parameters are batched, is the members' gradients."""
        ensemble, x = stack([make_moe(matmul=FAST, seed=i) for i in range(3)]), normal(7, 8)

        def loss(moe, x):
            return jnp.sin(moe(x)[0]).sum()

        together = jax.jit(jax.grad(lambda ensemble: jax.vmap(loss, (0, None))(ensemble, x).sum()))(ensemble)
        loop = jax.jit(jax.grad(loss))
        assert_close(together, stack([loop(index(ensemble, i), x) for i in range(3)]))

    def test_nested_equals_folding(self):
        moe, x = make_moe(matmul=FAST, **SEVERAL), normal(2, 3, 4, 8)

        @jax.jit
        def both(moe, x):
            nested = lambda moe, x: jax.vmap(jax.vmap(moe))(x)
            return value_and_gradients(nested, moe, x), value_and_gradients(lambda moe, x: moe(x), moe, x)

        ((y, stats), gradients), ((expected, total), expected_gradients) = both(moe, x)
        assert_close((y, gradients), (expected, expected_gradients))
        assert_close(eqx_moe.total_stats(stats), total)
        assert stats.load.shape == (2, 3, 5)

    def test_ensemble_of_batches(self):
        """Parameters batched outside, tokens inside."""
        ensemble, x = stack([make_moe(matmul=FAST, seed=i) for i in range(2)]), normal(3, 4, 8)
        y = jax.jit(jax.vmap(lambda moe, x: jax.vmap(moe)(x)[0], (0, None)))(ensemble, x)
        loop = jax.jit(lambda moe, x: moe(x)[0])
        assert_close(y, jnp.stack([loop(index(ensemble, i), x) for i in range(2)]))

    @pytest.mark.parametrize("in_axis, out_axis", [(1, 2), (2, 1), (-1, -1)])
    def test_other_axes(self, in_axis, out_axis):
        moe, x = make_moe(matmul=FAST), normal(3, 4, 8)
        run = jax.jit(jax.vmap(moe, in_axes=in_axis, out_axes=(out_axis, -1)))
        y, stats = run(jnp.moveaxis(x, 0, in_axis))
        expected, expected_stats = jax.jit(jax.vmap(moe))(x)
        assert_close(y, jnp.moveaxis(expected, 0, out_axis))
        assert_equal(stats.load, expected_stats.load.T)

    def test_of_single_tokens(self):
        """How a user's per-example model calls it: `x` is one token, `[d_model]`."""
        moe, x = make_moe(matmul=FAST), normal(13, 8)
        y, stats = jax.jit(jax.vmap(moe))(x)
        expected, total = eqx.filter_jit(moe)(x)
        assert_close(y, expected)
        assert_close(eqx_moe.total_stats(stats), total)

    def test_of_keys(self):
        """Every example has its own noise."""
        moe, x, keys = make_moe(matmul=FAST, jitter=0.5), normal(3, 4, 8), jax.random.split(jax.random.key(0), 3)
        run = jax.jit(lambda x, key: moe(x, key=key)[0])
        assert_close(jax.jit(jax.vmap(run))(x, keys), jnp.stack([run(x[i], keys[i]) for i in range(3)]))

    @pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8)])
    def test_without_examples_or_tokens(self, shape):
        moe = make_moe(matmul=FAST)
        run = jax.jit(jax.value_and_grad(lambda moe, x: jax.vmap(moe)(x)[0].sum()))
        assert_equal(run(moe, jnp.zeros(shape)), (0, jax.tree.map(jnp.zeros_like, moe)))

    def test_is_as_many_products_as_folding(self):
        moe, x = make_moe(**SEVERAL), normal(16, 7, 8)
        folded = jax.make_jaxpr(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))(moe, x)
        batched = jax.make_jaxpr(lambda moe, x: value_and_gradients(lambda moe, x: jax.vmap(moe)(x), moe, x))(moe, x)
        assert count(folded, "moe_grouped_matmul") == count(batched, "moe_grouped_matmul") > 5
        # Binary searches are short scans; none walks over the examples.
        lengths = [eqn.params["length"] for eqn in equations(batched) if eqn.primitive.name == "scan"]
        assert all(length < 16 for length in lengths)
        assert count(batched, "while") == 0

    def test_gradient_of_it_makes_no_weight_gradient_per_example(self):
        """Nothing in the program is as large as one weight per example, while the other order has just that."""
        examples = 16
        moe, x = make_moe(num_experts=9, expert_bias=True), jnp.ones((examples, 2, 8))

        def largest(f):
            return max(var.aval.size for eqn in equations(jax.make_jaxpr(f)(moe, x)) for var in eqn.outvars)

        def loss(moe, x):
            return jnp.sin(moe(x)[0]).sum()

        smaller_weight = moe.experts.w_down.size
        assert largest(jax.grad(lambda moe, x: jax.vmap(loss, (None, 0))(moe, x).sum())) < examples * smaller_weight
        assert largest(jax.vmap(jax.grad(loss), (None, 0))) == examples * moe.experts.w_gate_up.size


class TestForwardMode:
    def test_jvp_is_the_adjoint_of_vjp(self):
        """For the layer and the tokens at once, through routing weights and statistics."""
        moe, x = make_moe(matmul=FAST, **SEVERAL), normal(13, 8)
        tangents = make_moe(matmul=FAST, **SEVERAL, seed=1), normal(13, 8, seed=1)

        @jax.jit
        def run(primals, tangents):
            f = lambda moe, x: (lambda y, stats: (y, stats.probability, stats.squared_lse))(*moe(x))
            out, pushed = jax.jvp(f, primals, tangents)
            pulled = jax.vjp(f, *primals)[1](out)
            dot = lambda a, b: sum(map(jnp.vdot, jax.tree.leaves(a), jax.tree.leaves(b)))
            return dot(pushed, out), dot(tangents, pulled)

        pushed, pulled = run((moe, x), tangents)
        assert pushed != 0
        assert_close(pushed, pulled)

    def test_jacfwd_equals_jacrev(self):
        moe, x = make_moe(d_model=3, matmul=FAST, expert_bias=True), normal(4, 3)
        both = jax.jit(lambda moe, x: [jacobian(lambda x: moe(x)[0])(x) for jacobian in (jax.jacfwd, jax.jacrev)])
        assert_close(*both(moe, x))

    @pytest.mark.parametrize("order", ["forward_over_reverse", "reverse_over_reverse"])
    def test_hessian_vector_products_equal_the_oracles(self, order):
        moe, x = make_moe(matmul=FAST, activation=ACTIVATIONS["geglu"], expert_bias=True), normal(7, 8)
        tangents = (
            make_moe(matmul=FAST, activation=ACTIVATIONS["geglu"], expert_bias=True, seed=1),
            normal(7, 8, seed=1),
        )

        @jax.jit
        def both(primals, tangents):
            def product(f):
                gradient = jax.grad(lambda primals: jnp.sin(f(*primals)).sum())
                if order == "forward_over_reverse":
                    return jax.jvp(gradient, (primals,), (tangents,))[1]
                dot = lambda a, b: sum(map(jnp.vdot, jax.tree.leaves(a), jax.tree.leaves(b)))
                return jax.grad(lambda primals: dot(gradient(primals), tangents))(primals)

            return product(lambda moe, x: moe(x)[0]), product(oracle_moe)

        assert_close(*both((moe, x), tangents))


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
        assert count(jax.make_jaxpr(run)(moe, x), "moe_grouped_matmul") == products
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


class TestShardMap:
    @pytest.mark.parametrize(
        "kernel, check_vma, axis_type",
        [
            ("blocked", True, AxisType.Auto),
            ("blocked", False, AxisType.Auto),
            ("ragged", True, AxisType.Explicit),
            ("masked", True, AxisType.Auto),
        ],
    )
    def test_equals_one_device(self, kernel, check_vma, axis_type):
        """Tokens sharded over 8 devices, weights replicated; the gradient is taken outside."""
        moe, x, mask = make_moe(matmul=KERNELS[kernel], **SEVERAL), normal(24, 8), jnp.arange(24) % 5 > 0
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
        whole, split = PartitionSpec(), PartitionSpec("data")

        def body(moe, x, mask):
            y, stats = moe(x, mask=mask)
            return y, eqx_moe.total_stats(stats, axis_name="data")

        sharded = jax.shard_map(
            body, mesh=mesh, in_specs=(whole, split, split), out_specs=(split, whole), check_vma=check_vma
        )
        expected = jax.jit(lambda *args: value_and_gradients(lambda moe, x, mask: moe(x, mask=mask), *args))(
            moe, x, mask
        )
        place = lambda tree, spec: jax.device_put(tree, jax.NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            run = jax.jit(lambda *args: value_and_gradients(sharded, *args))
            actual = run(place(moe, whole), place(x, split), place(mask, split))
        assert_close(actual, expected)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_gradient_inside(self, check_vma):
        """Taken inside, it is summed over devices by JAX with `check_vma`, and by hand without."""
        moe, x = make_moe(matmul=FAST, expert_bias=True), normal(16, 8)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

        def loss(moe, x):
            return jnp.sin(moe(x)[0]).sum()

        def body(moe, x):
            gradient = jax.grad(loss)(moe, x)
            return gradient if check_vma else jax.lax.psum(gradient, "data")

        specs = (PartitionSpec(), PartitionSpec("data"))
        sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)
        assert_close(jax.jit(sharded)(moe, x), jax.jit(jax.grad(loss))(moe, x))

    def test_vmap_inside(self):
        moe, x = make_moe(matmul=FAST), normal(16, 3, 8)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        body = lambda moe, x: jax.vmap(moe)(x)[0]
        specs = (PartitionSpec(), PartitionSpec("data"))
        sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1])
        assert_close(jax.jit(sharded)(moe, x), jax.jit(body)(moe, x))

    def test_tokens_sharded_without_shard_map(self):
        """On a mesh of `Auto` axes the compiler divides the layer as it divides any other."""
        moe, x = make_moe(matmul=FAST), normal(16, 8)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        run = jax.jit(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))
        sharded = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("data")))
        replicated = jax.device_put(moe, jax.NamedSharding(mesh, PartitionSpec()))
        assert_close(run(replicated, sharded), run(moe, x))


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
