"""The layer under `jax.vmap` and forward mode: equal to what they mean without it, and as cheap."""

import equinox as eqx
import jax
import jax.numpy as jnp
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
        assert count_products(folded) == count_products(batched) > 5
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
