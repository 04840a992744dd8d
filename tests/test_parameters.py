"""The layer's parameters and its state: what they are, how they start, what the optimiser sees."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_moe

from .helpers import ALL, OPTIONS, assert_close, assert_equal, make_moe, normal


class TestParameters:
    @pytest.mark.parametrize("options", OPTIONS)
    def test_every_leaf_is_an_array_and_the_rest_is_hashable(self, options):
        # Built twice, so that equal strategies are not the same objects.
        moe, again = (
            eqx_moe.MoE(
                8,
                6,
                4,
                rule=eqx_moe.SigmoidTopK(k=2, groups=eqx_moe.GroupLimit(2, 1)),
                activation=eqx_moe.GeGLU(approximate=True),
                key=jax.random.key(0),
                **OPTIONS[options],
            )
            for _ in range(2)
        )
        leaves, structure = jax.tree.flatten(moe)
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        assert structure == jax.tree.structure(again)
        assert hash(structure) == hash(jax.tree.structure(again))
        assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)

    def test_number_of_parameters(self):
        moe = make_moe(**ALL)
        routed = 5 * (4 * 2 * 6 + 6 * 4 + 2 * 6 + 4)
        shared = 8 * 2 * 7 + 7 * 8 + 8
        router = 8 * 5 + 5
        latent = 2 * 8 * 4
        assert sum(leaf.size for leaf in jax.tree.leaves(moe)) == routed + shared + router + latent + 5

    def test_initial_scale(self):
        moe = eqx_moe.MoE(
            64,
            32,
            16,
            rule=eqx_moe.SoftmaxTopK(k=2),
            expert_bias=True,
            router_bias=True,
            selection_bias=True,
            d_shared=48,
            shared_gate=True,
            d_latent=16,
            key=jax.random.key(0),
        )
        assert moe.shared is not None and moe.latent is not None and moe.shared.w_gate is not None
        fan_in = [
            (moe.router.weight, 64),
            (moe.experts.w_gate_up, 16),
            (moe.experts.w_down, 32),
            (moe.shared.w_gate_up, 64),
            (moe.shared.w_down, 48),
            (moe.latent.down, 64),
            (moe.latent.up, 16),
        ]
        for weight, width in fan_in:  # at least 1,024 numbers each: the standard deviation is known to 2.2%
            assert jnp.std(weight) == pytest.approx(width**-0.5, rel=0.1)
        drawn = [np.asarray(weight).reshape(-1)[:1024] for weight, _ in fan_in]
        correlation = np.corrcoef(np.stack(drawn)) - np.eye(len(drawn))
        assert np.abs(correlation).max() < 0.15  # drawn independently: 1 / sqrt(1024), five times over
        assert jnp.any(moe.shared.w_gate != 0)
        zero = [moe.router.bias, moe.experts.b_gate_up, moe.experts.b_down, moe.selection_bias]
        assert not any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(zero))

    def test_output_has_about_the_scale_of_the_input(self):
        """SwiGLU of unit normals has a root mean square near 0.6; weighting two experts takes some more."""
        moe = eqx_moe.MoE(64, 64, 8, rule=eqx_moe.SoftmaxTopK(k=2), key=jax.random.key(0))
        y, _ = moe(normal(256, 64))
        assert 0.2 < jnp.sqrt((y * y).mean()) < 1

    def test_dtype(self):
        moe = jax.eval_shape(
            lambda key: eqx_moe.MoE(8, 6, 5, rule=eqx_moe.SoftmaxTopK(k=2), dtype=jnp.bfloat16, key=key, **ALL),
            jax.random.key(0),
        )
        assert moe.selection_bias.value.dtype == jnp.float32  # state keeps its precision
        moe = eqx.tree_at(lambda m: m.selection_bias, moe, None)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(moe)} == {"bfloat16"}

    def test_dtype_by_name(self):
        assert make_moe(dtype="bfloat16").experts.w_down.dtype == jnp.bfloat16

    @pytest.mark.parametrize(
        "dtype, message",
        [
            (jnp.int32, "dtype=int32 must be float32"),
            (jnp.float8_e5m2, "dtype=float8_e5m2 must be float32"),
            (complex, "dtype=complex128 must be float32"),
            ("bf16", "dtype='bf16' is no dtype: use one such as"),
        ],
    )
    def test_parameters_are_floats(self, dtype, message):
        layer = ft.partial(eqx_moe.MoE, 8, 6, 5, rule=eqx_moe.SoftmaxTopK(k=2))
        for make in (layer, ft.partial(eqx_moe.Experts, 8, 6, 5), ft.partial(eqx_moe.Router, 8, 5)):
            with pytest.raises(ValueError, match=message):
                make(dtype=dtype, key=jax.random.key(0))

    def test_different_keys_give_different_layers(self):
        one, two = (eqx_moe.MoE(8, 6, 5, rule=eqx_moe.SoftmaxTopK(k=2), key=jax.random.key(seed)) for seed in (0, 1))
        assert all(jnp.all(a != b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


class TestTrainable:
    def test_marks_the_selection_bias_alone(self):
        moe = make_moe(**ALL)
        marks = eqx_moe.trainable([moe, {"inner": moe, "x": jnp.ones(2)}])
        one = jax.tree.map(lambda _: True, moe)
        one = eqx.tree_at(lambda m: m.selection_bias.value, one, False)
        assert eqx.tree_equal(marks, [one, {"inner": one, "x": True}])

    def test_optimiser_never_sees_the_selection_bias(self):
        """No slot, no weight decay, no change; everything else moves."""
        moe, x = make_moe(**ALL), normal(13, 8)
        optimiser = optax.adamw(0.1, weight_decay=0.5)
        params, state = eqx.partition(moe, eqx_moe.trainable(moe))
        slots = optimiser.init(params)
        first = optax.tree.get(slots, "mu")
        assert jax.tree.leaves(first.selection_bias) == []
        assert len(jax.tree.leaves(first)) == len(jax.tree.leaves(moe)) - 1

        @jax.jit
        def step(params, state, slots, x):
            def loss(params):
                y, _ = eqx.combine(params, state)(x)
                return (y * y).mean()

            value, gradient = jax.value_and_grad(loss)(params)
            updates, slots = optimiser.update(gradient, slots, params)
            return value, optax.apply_updates(params, updates), slots

        losses, before = [], params
        with jax.numpy_dtype_promotion("standard"):  # optax mixes the step's number with floats
            for _ in range(3):
                value, params, slots = step(params, state, slots, x)
                losses.append(float(value))
        trained = eqx.combine(params, state)
        assert losses[2] < losses[0]
        assert_equal(trained.selection_bias, moe.selection_bias)
        assert all(jnp.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True))

    def test_the_bias_update_is_how_it_moves(self):
        moe, x = make_moe(selection_bias=True), normal(13, 8)
        _, stats = moe(x)
        assert moe.selection_bias is not None
        value = eqx_moe.sign_bias_update(moe.selection_bias.value, stats.load, rate=0.1)
        moved = eqx.tree_at(lambda m: m.selection_bias.value, moe, value)
        change = np.asarray(moved.selection_bias.value - moe.selection_bias.value)
        assert_close(change, 0.1 * np.sign(26 / 5 - np.asarray(stats.load)))
