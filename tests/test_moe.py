"""The layer against the dense oracle, its options, masks, edge cases and statistics."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe

from .helpers import ACTIVATIONS, ALL, KERNELS, OPTIONS, assert_close, assert_equal, make_moe, normal, oracle_moe

RULES = {
    "softmax": eqx_moe.SoftmaxTopK(k=3),
    "softmax_probabilities": eqx_moe.SoftmaxTopK(k=2, renormalize=False, scale=1.5),
    "softmax_on_logits": eqx_moe.SoftmaxTopK(k=2, select_on_logits=True),
    "sigmoid": eqx_moe.SigmoidTopK(k=3, renormalize=False),
    "sigmoid_groups": eqx_moe.SigmoidTopK(k=2, scale=2.5, groups=eqx_moe.GroupLimit(3, 2)),
    "sqrt_softplus": eqx_moe.SqrtSoftplusTopK(k=2),
}

# Sizes at the edge; k = 2 unless said otherwise.
EDGES = {
    "no_tokens": (0, {}),
    "one_token": (1, {}),
    "one_expert": (6, {"num_experts": 1, "k": 1}),
    "k_is_experts": (6, {"num_experts": 4, "k": 4}),
    "more_experts_than_rows": (2, {"num_experts": 9}),
    "d_ff_1": (6, {"d_ff": 1}),
    "d_model_1": (6, {"d_model": 1}),
}


def oracle_in_float32(moe, x, mask):
    moe, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (moe, x))
    return oracle_moe(moe, x, mask)


def compare_with_oracle(moe, x, *, mask=None, dtype="float32"):
    """Values and all gradients of the layer and of the oracle, in one program; returns the layer's."""

    @jax.jit
    def both(moe, x, mask, cotangent):
        ours, pull_back, stats = jax.vjp(lambda moe, x: moe(x, mask=mask), moe, x, has_aux=True)
        oracle, pull_oracle_back = jax.vjp(lambda moe, x: oracle_in_float32(moe, x, mask), moe, x)
        expected = oracle, *pull_oracle_back(cotangent.astype(oracle.dtype))
        return (ours, *pull_back(cotangent)), expected, stats

    ours, expected, stats = both(moe, x, mask, normal(*x.shape, dtype=x.dtype, seed=9))
    assert ours[0].dtype == x.dtype
    assert jax.tree.map(lambda leaf: leaf.dtype, ours[1:]) == jax.tree.map(lambda leaf: leaf.dtype, (moe, x))
    assert_close(ours, expected, dtype=dtype)
    return (*ours, stats)


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
    _, gradient, _, _ = compare_with_oracle(make_moe(**OPTIONS[options]), normal(13, 8))
    if gradient.selection_bias is not None:
        assert_equal(gradient.selection_bias.value, jnp.zeros(5))
        gradient = eqx.tree_at(lambda g: g.selection_bias, gradient, None)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient))  # every option is at work


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    moe = make_moe(activation=ACTIVATIONS[activation], matmul=eqx_moe.RaggedDot(), d_shared=7)
    compare_with_oracle(moe, normal(13, 8))


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    moe = make_moe(num_experts=6, rule=RULES[rule], matmul=eqx_moe.RaggedDot(), selection_bias=True)
    compare_with_oracle(moe, normal(13, 8))


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_with_everything(kernel):
    compare_with_oracle(make_moe(matmul=KERNELS[kernel], **ALL), normal(13, 8))


@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge):
    tokens, sizes = EDGES[edge]
    moe = make_moe(**sizes, expert_bias=True)
    compare_with_oracle(moe, normal(tokens, moe.router.weight.shape[0]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_tokens_on_one_expert(kernel):
    moe = make_moe(k=1, matmul=KERNELS[kernel], router_bias=True)
    moe = eqx.tree_at(lambda m: m.router.bias, moe, jnp.zeros(5).at[3].set(100.0))
    *_, gradient, _, stats = compare_with_oracle(moe, normal(13, 8))
    assert_equal(stats.load, jnp.array([0, 0, 0, 13, 0]))
    others = jnp.array([0, 1, 2, 4])
    assert_equal(gradient.experts.w_gate_up[others], jnp.zeros((4, 8, 2, 6)))
    assert_equal(gradient.experts.w_down[others], jnp.zeros((4, 6, 8)))


@pytest.mark.parametrize("options", ["plain", "all"])
def test_bfloat16_tokens_with_float32_parameters(options):
    compare_with_oracle(make_moe(**OPTIONS[options]), normal(13, 8, dtype="bfloat16"), dtype="bfloat16")


def test_bfloat16_parameters():
    compare_with_oracle(make_moe(dtype=jnp.bfloat16), normal(13, 8, dtype="bfloat16"), dtype="bfloat16")


class TestMask:
    mask = np.arange(13) % 3 > 0

    @pytest.mark.parametrize("options", ["plain", "all"])
    @pytest.mark.parametrize("kernel", ["masked", "ragged", "blocked"])
    def test_masked_tokens_hold_nan(self, options, kernel):
        x = jnp.where(self.mask[:, None], normal(13, 8), jnp.nan)
        moe = make_moe(matmul=KERNELS[kernel], **OPTIONS[options])
        y, _, d_x, stats = compare_with_oracle(moe, x, mask=jnp.asarray(self.mask))
        assert_equal(y[~self.mask], jnp.zeros((5, 8)))
        assert_equal(d_x[~self.mask], jnp.zeros((5, 8)))
        counts = (stats.tokens, stats.masked, stats.nonfinite, stats.overflow, stats.load.sum())
        assert_equal(counts, (8, 5, 0, 0, 16))

    def test_masked_tokens_do_not_exist(self):
        """All statistics, and the losses' gradients, are those of the other tokens alone."""
        moe, x = make_moe(**ALL), normal(13, 8)
        cotangent = normal(13, 8, seed=9)

        @jax.jit
        def run(moe, x, mask, cotangent):
            def loss(moe):
                y, stats = moe(x, mask=mask)
                balance = eqx_moe.load_balance_loss(stats) + eqx_moe.router_z_loss(stats)
                return jnp.vdot(y, cotangent) + balance, stats

            return jax.grad(loss, has_aux=True)(moe)

        poisoned = jnp.where(self.mask[:, None], x, jnp.inf)
        gradient, stats = run(moe, poisoned, jnp.asarray(self.mask), cotangent)
        expected, expected_stats = run(moe, x[self.mask], None, cotangent[self.mask])
        assert_close(gradient, expected)
        assert_close(eqx.tree_at(lambda s: s.masked, stats, jnp.array(0)), expected_stats)

    def test_all_tokens_masked(self):
        x, mask = jnp.full((13, 8), jnp.nan), jnp.zeros(13, bool)
        moe = make_moe(**ALL)

        @jax.jit
        def run(moe, x):
            y, pull_back, stats = jax.vjp(lambda moe, x: moe(x, mask=mask), moe, x, has_aux=True)
            losses = eqx_moe.load_balance_loss(stats), eqx_moe.router_z_loss(stats)
            return y, pull_back(jnp.ones_like(y)), stats.probability, losses, stats

        *zeros, stats = run(moe, x)
        assert_equal(zeros, jax.tree.map(jnp.zeros_like, zeros))
        assert_equal((stats.tokens, stats.masked, stats.load), (0, 13, np.zeros(5)))

    def test_mask_of_all_true_is_no_mask(self):
        moe, x = make_moe(**ALL), normal(13, 8)
        run = jax.jit(lambda moe, x, mask: moe(x, mask=mask))
        assert_close(run(moe, x, jnp.ones(13, bool)), run(moe, x, None))

    def test_masked_output_is_zero_for_an_activation_that_is_not_at_zero(self):
        """The promise is "exactly zero, whatever it holds", also beside shared experts."""
        x, mask = normal(13, 8), jnp.asarray(self.mask)
        y, _ = make_moe(activation=Logistic(), d_shared=7)(x, mask=mask)
        assert_equal(y[~mask], jnp.zeros((5, 8)))

    def test_route_has_finite_gradients_for_masked_nan(self):
        """`route` is public: its losses must not poison the router either."""
        moe = make_moe()
        x = jnp.where(self.mask[:, None], normal(13, 8), jnp.nan)

        @jax.jit
        def loss(moe):
            routing, _, stats = moe.route(x, mask=jnp.asarray(self.mask))
            losses = eqx_moe.load_balance_loss(stats) + eqx_moe.router_z_loss(stats)
            return losses + jnp.sin(routing.weights).sum()

        assert jnp.isfinite(loss(moe))
        assert jnp.isfinite(jax.grad(loss)(moe).router.weight).all()


class Logistic(eqx_moe.AbstractActivation):
    """A user's activation, one half at zero."""

    gates: ClassVar[int] = 1

    def of_parts(self, up):
        return jax.nn.sigmoid(up)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_bad_token_does_not_disturb_the_others(kernel, poison):
    moe, x, bad = make_moe(matmul=KERNELS[kernel], **ALL), normal(13, 8), 6
    run = jax.jit(lambda moe, x: moe(x))
    y, stats = run(moe, x.at[bad].set(poison))
    clean, _ = run(moe, x)
    others = jnp.arange(13) != bad
    assert_close(y[others], clean[others])
    assert not jnp.isfinite(y[bad]).any()
    assert_equal((stats.nonfinite, stats.tokens, stats.load.sum()), (1, 13, 26))


@pytest.mark.parametrize("shape", [(), (12,), (3, 4), (2, 3, 2)])
def test_leading_axes(shape):
    moe = make_moe(matmul=eqx_moe.RaggedDot(), d_shared=7)
    x = normal(12, 8)[: int(np.prod(shape))].reshape(*shape, 8)
    mask = jnp.arange(x.size // 8).reshape(shape) % 3 > 0

    @jax.jit
    def run(moe, x, mask):
        y, pull_back, stats = jax.vjp(lambda moe, x: moe(x, mask=mask), moe, x, has_aux=True)
        return y, *pull_back(y), stats

    y, d_moe, d_x, stats = run(moe, x, mask)
    flat = run(moe, x.reshape(-1, 8), mask.reshape(-1))
    assert_equal((y, d_x), (flat[0].reshape(x.shape), flat[2].reshape(x.shape)))
    assert_equal((d_moe, stats), (flat[1], flat[3]))
    assert stats.tokens.shape == ()


def test_statistics():
    moe, x = make_moe(**ALL), normal(13, 8)
    assert moe.selection_bias is not None
    _, stats = jax.jit(lambda moe, x: moe(x))(moe, x)
    logits = np.asarray(x, np.float64) @ np.asarray(moe.router.weight) + np.asarray(moe.router.bias)
    logits = 2 * np.tanh(logits / 2)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = np.argsort(-(probabilities + np.asarray(moe.selection_bias.value)), axis=1)[:, :2]
    assert_equal(stats.load, np.bincount(chosen.reshape(-1), minlength=5))
    assert_close(stats.probability, probabilities.sum(0))
    assert_close(stats.squared_lse, (np.log(np.exp(logits).sum(1)) ** 2).sum())
    assert_equal((stats.tokens, stats.masked, stats.nonfinite, stats.overflow), (13, 0, 0, 0))


def test_selection_bias_selects_and_never_weighs():
    moe, x = make_moe(selection_bias=True), normal(13, 8)
    bias = jnp.array([0.0, 9.0, 0.0, 9.0, 0.0])
    moe = eqx.tree_at(lambda m: m.selection_bias.value, moe, bias)
    routing, grouping, _ = moe.route(x)
    assert_equal(grouping.sizes, jnp.array([0, 13, 0, 13, 0]))
    assert_equal(jnp.sort(routing.experts, axis=1), jnp.tile(jnp.array([1, 3]), (13, 1)))
    logits = np.take_along_axis(np.asarray(moe.router(x)), np.asarray(routing.experts), 1)
    assert_close(routing.weights, np.exp(logits) / np.exp(logits).sum(1, keepdims=True))


class TestJitter:
    def test_only_with_a_key(self):
        moe, x = make_moe(jitter=0.9), normal(64, 8)
        still = make_moe()
        run = jax.jit(lambda moe, x, key: moe(x, key=key)[0])
        keys = jax.random.split(jax.random.key(0))
        assert_equal(run(moe, x, None), run(still, x, None))
        assert_equal(run(still, x, keys[0]), run(still, x, None))
        assert_equal(run(moe, x, keys[0]), run(moe, x, keys[0]))
        assert not np.allclose(run(moe, x, keys[0]), run(moe, x, None))
        assert not np.allclose(run(moe, x, keys[0]), run(moe, x, keys[1]))

    def test_reaches_the_router_alone(self):
        """With one expert the router has no say, so that noise on its input changes nothing."""
        moe, x = make_moe(num_experts=1, k=1, jitter=0.5, d_shared=7), normal(13, 8)
        run = jax.jit(lambda moe, x, key: moe(x, key=key)[0])
        assert_equal(run(moe, x, jax.random.key(0)), run(moe, x, None))

    def test_masked_tokens_stay_zero(self):
        moe, mask = make_moe(jitter=0.5), jnp.arange(13) > 3
        y, stats = moe(jnp.full((13, 8), jnp.nan).at[4:].set(1), mask=mask, key=jax.random.key(0))
        assert_equal(y[:4], jnp.zeros((4, 8)))
        assert jnp.isfinite(stats.squared_lse)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"d_model": 0}, "d_model=0 must be at least 1"),
        ({"d_ff": 0}, "d_ff=0 must be at least 1"),
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"d_shared": 0}, "d_shared=0 must be at least 1"),
        ({"d_latent": 0}, "d_latent=0 must be at least 1"),
        ({"d_latent": -3}, "d_latent=-3 must be at least 1"),
        ({"k": 6}, "k=6 experts per token cannot be chosen from num_experts=5"),
        ({"shared_gate": True}, "shared_gate=True needs shared experts: give d_shared"),
        ({"jitter": 1.0}, r"jitter=1.0 must lie in \[0, 1\)"),
        ({"jitter": -0.1}, r"jitter=-0.1 must lie in \[0, 1\)"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be positive"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_moe(**options)


TOKENS_OF = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "x, options, message",
    [
        (TOKENS_OF(13, 7), {}, "d_model=8 is what the layer was made for, and x has width 7"),
        (TOKENS_OF(8, 13), ALL, "d_model=8 is what the layer was made for, and x has width 13"),
        (TOKENS_OF(13, 8, dtype=jnp.float8_e4m3fn), {}, "the dtype of x=float8_e4m3fn must be float32"),
    ],
)
def test_wrong_tokens_are_refused(x, options, message):
    moe = make_moe(**options)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(moe, x)
    if x.ndim == 2:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(moe.route, x)


@pytest.mark.parametrize(
    "part", [(slice(2),), (slice(None), slice(4)), (..., slice(3))], ids=["experts", "d_model", "d_ff"]
)
def test_a_part_of_the_experts_needs_parallel(part):
    moe = make_moe()
    moe = eqx.tree_at(lambda moe: moe.experts.w_gate_up, moe, moe.experts.w_gate_up[part])
    with pytest.raises(ValueError, match="experts divided among devices need `parallel`"):
        moe(normal(13, 8))


def test_a_stack_of_layers_is_not_one():
    moe = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), make_moe())
    with pytest.raises(ValueError, match=r"shape \(2, 8, 5\), so this is a stack of layers: call each"):
        moe(normal(13, 8))
    y, _ = eqx.filter_vmap(lambda moe: moe(normal(13, 8)))(moe)
    assert_close(y[0], make_moe()(normal(13, 8))[0])


@pytest.mark.parametrize(
    "x, mask",
    [((13, 8), (12,)), ((13, 8), (13, 8)), ((13, 8), (13, 1)), ((2, 3, 8), (6,))],
)
def test_wrong_shapes_are_refused(x, mask):
    with pytest.raises(Exception, match="Type-check error"):
        jax.eval_shape(
            lambda moe, x, mask: moe(x, mask=mask),
            make_moe(),
            jax.ShapeDtypeStruct(x, jnp.float32),
            None if mask is None else jax.ShapeDtypeStruct(mask, bool),
        )


class WrongRule(eqx_moe.AbstractRoutingRule):
    """A rule that returns too few tokens, or claims another number of experts."""

    k: int = eqx.field(static=True)
    cut: int = eqx.field(static=True)
    more: int = eqx.field(static=True)

    def __call__(self, logits, *, bias=None):
        routing = eqx_moe.SoftmaxTopK(k=self.k)(logits[self.cut :], bias=bias)
        return eqx_moe.Routing(routing.experts, routing.weights, routing.num_experts + self.more)


@pytest.mark.parametrize(
    "cut, more, message",
    [
        (3, 0, "tokens: the logits have 13, the routing has 10"),
        (0, 2, "experts: the logits have 5, the routing says num_experts=7"),
    ],
)
def test_a_rule_that_does_not_fit_is_told_the_axis(cut, more, message):
    rule = WrongRule(k=2, cut=cut, more=more)
    moe = eqx.tree_at(lambda moe: moe.rule, make_moe(), rule)
    with pytest.raises(ValueError, match=message):
        moe(normal(13, 8))
    with pytest.raises(ValueError, match=message.split(":")[0]):  # also before there are any tokens
        make_moe(rule=rule)


def test_groups_that_do_not_fit_are_refused_at_construction():
    with pytest.raises(ValueError, match="experts=5 cannot be split into num_groups=2"):
        make_moe(rule=eqx_moe.SigmoidTopK(k=2, groups=eqx_moe.GroupLimit(2, 1)))
