"""The router, its jitter and soft cap, and masks."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe

from .helpers import assert_close, assert_equal

TOKENS, EXPERTS, K = 9, 12, 3


def operands(seed=0):
    """Logits, a selection bias and a cotangent for the weights."""
    generator = np.random.default_rng(seed)
    shapes = (TOKENS, EXPERTS), (EXPERTS,), (TOKENS, K)
    logits, bias, cotangent = (jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes)
    return 2 * logits, 0.3 * bias, cotangent


class TestMaskRouting:
    mask = jnp.arange(TOKENS) % 3 > 0
    route = staticmethod(jax.jit(eqx_moe.SoftmaxTopK(k=K)))

    def test_masked_tokens_go_nowhere_and_others_stay(self):
        routing = self.route(operands()[0])
        masked = eqx_moe.mask_routing(routing, self.mask)
        assert_equal(masked.experts[self.mask], routing.experts[self.mask])
        assert_equal(masked.weights[self.mask], routing.weights[self.mask])
        assert (masked.experts[~self.mask] == EXPERTS).all() and (masked.weights[~self.mask] == 0).all()
        assert masked.num_experts == EXPERTS

    def test_masked_weights_are_zero_even_where_they_were_nan(self):
        logits = jnp.where(self.mask[:, None], operands()[0], jnp.nan)
        masked = eqx_moe.mask_routing(self.route(logits), self.mask)
        assert (masked.weights[~self.mask] == 0).all() and jnp.isfinite(masked.weights).all()

    def test_masked_tokens_get_no_gradient(self):
        logits, _, cotangent = operands()
        loss = lambda z: (eqx_moe.mask_routing(self.route(z), self.mask).weights * cotangent).sum()
        gradient = jax.jit(jax.grad(loss))(logits)
        assert (gradient[~self.mask] == 0).all() and (gradient[self.mask] != 0).any(axis=1).all()


class TestRouterLogits:
    def operands(self, dtype="float32"):
        generator = np.random.default_rng(0)
        shapes = (TOKENS, 64), (64, EXPERTS), (EXPERTS,)
        return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]

    def reference(self, x, weight, bias=None, soft_cap=None):
        x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
        logits = x @ weight + (0 if bias is None else np.asarray(bias, np.float64))
        return logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("soft_cap, use_bias", [(None, False), (None, True), (5.0, False)])
    def test_is_computed_in_float32(self, dtype, soft_cap, use_bias):
        x, weight, bias = self.operands(dtype)
        bias = bias if use_bias else None
        logits = jax.jit(ft.partial(eqx_moe.router_logits, soft_cap=soft_cap))(x, weight, bias)
        assert logits.dtype == jnp.float32
        assert_close(logits, self.reference(x, weight, bias, soft_cap))

    def test_dtypes_may_differ(self):
        x, weight, bias = self.operands()
        mixed = eqx_moe.router_logits(x.astype(jnp.bfloat16), weight, bias.astype(jnp.float16))
        assert_close(mixed, self.reference(x.astype(jnp.bfloat16), weight, bias.astype(jnp.float16)))

    def test_soft_cap_bounds(self):
        x, weight, _ = self.operands()
        assert jnp.abs(eqx_moe.router_logits(100 * x, weight, soft_cap=5.0)).max() <= 5

    @pytest.mark.parametrize("soft_cap", [0.0, -1.0])
    def test_refuses_caps_that_are_not_positive(self, soft_cap):
        x, weight, _ = self.operands()
        with pytest.raises(ValueError, match=f"soft_cap={soft_cap}"):
            eqx_moe.router_logits(x, weight, soft_cap=soft_cap)


class TestJitter:
    @pytest.mark.parametrize("shape", [(1000, 3), (2, 500, 3)])
    def test_noise_is_bounded_centred_and_independent(self, shape):
        noise = np.asarray(eqx_moe.jitter(jnp.ones(shape), 0.1, key=jax.random.key(0)), np.float64)
        # Half a unit in the last place of float32 for the two ends.
        assert noise.min() >= 0.9 - 1e-7 and noise.max() <= 1.1 + 1e-7
        assert noise.min() < 0.901 and noise.max() > 1.099
        # The mean of 3000 uniform numbers on an interval of 0.2: five standard errors.
        assert abs(noise.mean() - 1) < 5 * 0.2 / np.sqrt(12 * noise.size)
        assert len(np.unique(noise)) > 0.99 * noise.size

    def test_same_key_same_noise(self):
        x = operands()[0]
        first, again, other = (eqx_moe.jitter(x, 0.1, key=jax.random.key(seed)) for seed in (0, 0, 1))
        assert_equal(first, again)
        assert (first != other).any()

    def test_keeps_the_dtype(self):
        assert eqx_moe.jitter(jnp.ones((2, 3), jnp.bfloat16), 0.1, key=jax.random.key(0)).dtype == jnp.bfloat16

    @pytest.mark.parametrize("amount", [-0.1, 1.0])
    def test_refuses_amounts_outside_its_range(self, amount):
        with pytest.raises(ValueError, match=f"{amount}"):
            eqx_moe.jitter(jnp.ones((2, 3)), amount, key=jax.random.key(0))


class TestRouter:
    def test_has_the_stated_shapes_and_scale(self):
        router = eqx_moe.Router(400, EXPERTS, use_bias=True, key=jax.random.key(0))
        assert router.bias is not None
        assert router.weight.shape == (400, EXPERTS)
        assert_equal(router.bias, jnp.zeros(EXPERTS))
        # Variance 1 / d_model, from 4800 samples: five standard errors of a variance.
        assert abs(float(np.var(router.weight)) * 400 - 1) < 5 * np.sqrt(2 / 4800)
        assert eqx_moe.Router(4, EXPERTS, key=jax.random.key(0)).bias is None

    def test_call_is_router_logits(self):
        router = eqx_moe.Router(4, EXPERTS, use_bias=True, soft_cap=3.0, dtype=jnp.bfloat16, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (TOKENS, 4), jnp.bfloat16)
        assert_equal(router(x), eqx_moe.router_logits(x, router.weight, router.bias, soft_cap=3.0))
        assert router(x).dtype == jnp.float32 and router.weight.dtype == jnp.bfloat16

    def test_jitter_needs_a_key_and_an_amount(self):
        x, key = jnp.ones((TOKENS, 4)), jax.random.key(1)
        noisy, still = (eqx_moe.Router(4, EXPERTS, jitter=a, key=jax.random.key(0)) for a in (0.1, 0.0))
        assert_equal((noisy(x), still(x, key=key)), (still(x), still(x)))
        assert_equal(noisy(x, key=key), still(eqx_moe.jitter(x, 0.1, key=key)))
        assert (noisy(x, key=key) != noisy(x)).all()

    @pytest.mark.parametrize("amount", [0.001, 0.01])
    def test_jitter_is_not_rounded_away_in_bfloat16(self, amount):
        """The router computes in float32 whatever its input, its noise too."""
        router = eqx_moe.Router(1, 1, jitter=amount, key=jax.random.key(0))
        x = jnp.ones((1000, 1), jnp.bfloat16)
        noise = np.asarray(router(x, key=jax.random.key(1)) / router(x), np.float64)
        # A few roundings of float32 at each end.
        assert noise.min() >= 1 - amount - 1e-6 and noise.max() <= 1 + amount + 1e-6
        assert noise.min() < 1 - 0.9 * amount and noise.max() > 1 + 0.9 * amount
