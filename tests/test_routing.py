"""Routing rules and selection, against NumPy in float64."""

import functools as ft
import itertools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqx_moe
from eqx_moe._select import _top_k_by_passes

from .helpers import assert_close, assert_equal

TOKENS, EXPERTS, K = 9, 12, 3

KINDS = {
    "softmax": ft.partial(eqx_moe.SoftmaxTopK),
    "softmax_plain": ft.partial(eqx_moe.SoftmaxTopK, renormalize=False),
    "softmax_on_logits": ft.partial(eqx_moe.SoftmaxTopK, select_on_logits=True),
    "sigmoid": ft.partial(eqx_moe.SigmoidTopK),
    "sigmoid_plain": ft.partial(eqx_moe.SigmoidTopK, renormalize=False),
    "sqrt_softplus": ft.partial(eqx_moe.SqrtSoftplusTopK),
    "sqrt_softplus_plain": ft.partial(eqx_moe.SqrtSoftplusTopK, renormalize=False),
}
GROUPS = {
    "no_groups": None,
    "best_of_group": eqx_moe.GroupLimit(4, 2, best=1),  # DeepSeek-V2
    "two_best_of_group": eqx_moe.GroupLimit(4, 2),  # DeepSeek-V3
}

settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
ODD = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 88.0, -104.0, 3.4028235e38, -3.4028235e38, 1.1754944e-38, 1e-45, -1e-45]


def odd_floats(shape):
    """Arrays of anything a float32 can be, with many ties."""
    odd = st.sampled_from([float(np.float32(x)) for x in ODD])
    return hnp.arrays(np.float32, shape, elements=st.one_of(odd, st.floats(width=32)))


def operands(seed=0):
    """Logits, a selection bias and a cotangent for the weights."""
    generator = np.random.default_rng(seed)
    shapes = (TOKENS, EXPERTS), (EXPERTS,), (TOKENS, K)
    logits, bias, cotangent = (jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes)
    return 2 * logits, 0.3 * bias, cotangent


def reference_scores(rule, logits):
    """What the rule's docstring says its scores are."""
    if isinstance(rule, eqx_moe.SoftmaxTopK):
        return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if isinstance(rule, eqx_moe.SigmoidTopK):
        return 1 / (1 + np.exp(-logits))
    return np.sqrt(np.log1p(np.exp(logits)))


def reference_selection(scores, k, groups=None):
    """The best `k` of every row, one row at a time; equal scores in the order of their ids."""
    ids = []
    for row in scores:
        allowed = np.ones(len(row), bool)
        if groups is not None:
            split = row.reshape(groups.num_groups, -1)
            totals = np.sort(split, axis=1)[:, -groups.best :].sum(1)
            top = np.argsort(-totals, kind="stable")[: groups.top_groups]
            allowed = np.isin(np.arange(len(row)) // split.shape[1], top)
        ids.append(np.argsort(-np.where(allowed, row, -np.inf), kind="stable")[:k])
    return np.stack(ids)


def reference_weights(rule, logits, ids):
    weights = np.take_along_axis(reference_scores(rule, logits), ids, 1)
    return rule.scale * (weights / weights.sum(1, keepdims=True) if rule.renormalize else weights)


def reference_gradient(rule, logits, ids, cotangent, step=1e-6):
    """Central differences; every token's weights depend on its own logits only, so all tokens move at once."""
    columns = []
    for column in np.eye(logits.shape[1]):
        high, low = (reference_weights(rule, logits + sign * step * column, ids) for sign in (1, -1))
        columns.append(((high - low) * cotangent).sum(1) / (2 * step))
    return np.stack(columns, 1)


@pytest.mark.parametrize("use_bias, groups", [(False, "no_groups"), *((True, groups) for groups in GROUPS)])
@pytest.mark.parametrize("kind", KINDS)
def test_rule_equals_the_reference_in_ids_weights_and_gradients(kind, use_bias, groups):
    rule = KINDS[kind](k=K, scale=2.5, groups=GROUPS[groups])
    logits, bias, cotangent = operands()

    @jax.jit
    def run(logits, bias):
        def loss(logits, bias):
            routing = rule(logits, bias=bias if use_bias else None)
            return (routing.weights * cotangent).sum(), routing

        return jax.grad(loss, (0, 1), has_aux=True)(logits, bias)

    (d_logits, d_bias), routing = run(logits, bias)
    wide, wide_bias = np.asarray(logits, np.float64), np.asarray(bias, np.float64)
    scores = wide if kind == "softmax_on_logits" else reference_scores(rule, wide)
    ids = reference_selection(scores + (wide_bias if use_bias else 0), K, rule.groups)
    assert_equal(routing.experts, ids)
    assert routing.num_experts == EXPERTS
    assert_close(routing.weights, reference_weights(rule, wide, ids))
    assert_close(d_logits, reference_gradient(rule, wide, ids, np.asarray(cotangent, np.float64)))
    assert_equal(d_bias, jnp.zeros(EXPERTS))


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_the_scores_as_shares(kind):
    rule, logits = KINDS[kind](k=K), operands()[0]
    scores = reference_scores(rule, np.asarray(logits, np.float64))
    assert_close(rule.probabilities(logits), scores / scores.sum(1, keepdims=True))


@pytest.mark.parametrize("kind", KINDS)
def test_bias_that_changes_no_selection_changes_no_bit(kind):
    rule = KINDS[kind](k=K)
    logits, _, cotangent = operands()

    @jax.jit
    def run(logits, bias):
        return jax.vjp(lambda z: rule(z, bias=bias).weights, logits)[1](cotangent), rule(logits, bias=bias)

    assert_equal(run(logits, jnp.full(EXPERTS, 0.25)), run(logits, jnp.zeros(EXPERTS)))


def test_select_on_logits_lets_bias_compete_with_logits():
    logits, bias = jnp.array([[5.0, 0.0, -5.0]]), jnp.array([0.0, 0.0, 6.0])
    on_logits, on_probabilities = (
        eqx_moe.SoftmaxTopK(k=1, select_on_logits=flag)(logits, bias=0.5 * bias).experts for flag in (True, False)
    )
    assert (on_logits.item(), on_probabilities.item()) == (0, 2)


def test_softmax_selects_the_same_on_logits_and_on_probabilities_without_bias():
    """Also where the probabilities underflow, as the docstring promises."""
    logits = jnp.array([[0.0, 200.0, -5.0, 10.0, 150.0]])
    ids = [eqx_moe.SoftmaxTopK(k=3, select_on_logits=flag)(logits).experts for flag in (False, True)]
    assert_equal(*ids)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_very_negative_logits_give_finite_weights_and_gradients(kind, k):
    """From where a float32 holds the scores' sum to where it holds no score at all."""
    rule = KINDS[kind](k=k)
    levels = jnp.array([-20.0, -40.0, -44.0, -50.0, -60.0, -87.0, -90.0, -110.0, -1e4, -1e30])
    logits = levels[:, None] + jnp.array([[0.0, -0.5, -1.0, -2.0]])

    @jax.jit
    def run(logits):
        functions = (lambda z: rule(z).weights[:, 0].sum(), lambda z: rule.probabilities(z)[:, 0].sum())
        return [jax.value_and_grad(function)(logits) for function in functions]

    for value, d_logits in run(logits):
        finite = jnp.isfinite(d_logits).all(axis=1)
        assert jnp.isfinite(value) and finite.all(), f"not finite for logits around {levels[~finite]}"


VALIDITY = [
    *((kind, k, None) for kind, k in itertools.product(["softmax", "softmax_on_logits"], [1, 2, 3, 8])),
    *((kind, 3, None) for kind in ["softmax_plain", "sigmoid", "sqrt_softplus"]),
    *(("softmax_on_logits", k, eqx_moe.GroupLimit(4, 2, best=b)) for k, b in [(2, 1), (2, 2), (4, 1), (4, 5)]),
    ("sigmoid", 8, eqx_moe.GroupLimit(4, 4)),
]


@pytest.mark.parametrize("kind, k, groups", VALIDITY)
def test_ids_are_valid_and_distinct_for_any_logits(kind, k, groups):
    rule = KINDS[kind](k=k, groups=groups)
    run = jax.jit(lambda logits, bias: (rule(logits).experts, rule(logits, bias=bias).experts))

    @settings
    @hypothesis.given(odd_floats((4, 8)), odd_floats(8))
    @hypothesis.example(np.full((4, 8), np.nan, np.float32), np.full(8, np.nan, np.float32))
    @hypothesis.example(np.full((4, 8), np.inf, np.float32), np.full(8, -np.inf, np.float32))
    @hypothesis.example(np.full((4, 8), -np.inf, np.float32), np.zeros(8, np.float32))
    @hypothesis.example(np.full((4, 8), 3.4e38, np.float32), np.full(8, 3.4e38, np.float32))
    def check(logits, bias):
        for ids in map(np.asarray, run(logits, bias)):
            assert ids.dtype == np.int32
            assert ((ids >= 0) & (ids < 8)).all(), ids
            assert all(len(set(row)) == k for row in ids.tolist()), ids
            if groups is not None:
                assert all(len({i // 2 for i in row}) <= groups.top_groups for row in ids.tolist()), ids

    check()


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_selection_is_a_stable_sort_with_nan_as_the_worst(k):
    """Subnormal numbers are left out: CPUs flush them to zero or not as they like."""
    run = jax.jit(lambda scores: eqx_moe.select_experts(scores, k))
    normal = [x for x in ODD if not 0 < abs(x) < 1e-38]
    few = st.sampled_from([float(np.float32(x)) for x in normal])
    elements = st.one_of(few, st.floats(width=32, allow_subnormal=False))

    @settings
    @hypothesis.given(hnp.arrays(np.float32, (4, 8), elements=elements))
    def check(scores):
        finite = np.clip(np.where(np.isnan(scores), -np.inf, scores), np.finfo("f4").min, np.finfo("f4").max)
        assert_equal(run(scores), reference_selection(finite, k))

    check()


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_zeros_of_both_signs_tie(k):
    scores = jnp.array([[-0.0, 0.0, -0.0, 0.0, 0.0, -0.0, -0.0, 0.0]])
    assert_equal(eqx_moe.select_experts(scores, k)[0], jnp.arange(k))


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_both_algorithms_select_the_same(k):
    both = jax.jit(lambda scores: (_top_k_by_passes(scores, k), lax.top_k(scores, k)[1]))
    elements = st.one_of(st.integers(-2, 2).map(float), st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False))

    @settings
    @hypothesis.given(hnp.arrays(np.float32, (4, 8), elements=elements.map(lambda x: x or 0.0)))
    def check(scores):
        assert_equal(*both(scores))

    check()


def test_both_algorithms_leave_excluded_groups_out():
    scores = jnp.array([[-jnp.inf, 3.0, -jnp.inf, -jnp.finfo(jnp.float32).max]])
    assert_equal(_top_k_by_passes(scores, 2), jnp.array([[1, 3]]))
    assert_equal(lax.top_k(scores, 2)[1], jnp.array([[1, 3]]))


def test_selection_under_vmap_equals_a_loop():
    scores = np.random.default_rng(0).normal(size=(3, TOKENS, EXPERTS)).astype(np.float32)
    for k in (2, 3):
        select = jax.jit(ft.partial(eqx_moe.select_experts, k=k, groups=GROUPS["two_best_of_group"]))
        assert_equal(jax.vmap(select)(scores), np.stack([select(s) for s in scores]))


@pytest.mark.parametrize("k", [2, 3])
def test_no_tokens_select_nothing(k):
    select = jax.jit(ft.partial(eqx_moe.select_experts, k=k, groups=GROUPS["two_best_of_group"]))
    assert select(jnp.zeros((0, EXPERTS))).shape == (0, k)


def test_groups_wider_in_best_than_they_are_sum_all_they_have():
    scores = operands(1)[0]
    ids = eqx_moe.select_experts(scores, K, groups=eqx_moe.GroupLimit(4, 2, best=9))
    assert_equal(ids, reference_selection(np.asarray(scores, np.float64), K, eqx_moe.GroupLimit(4, 2, best=3)))


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_stay_when_x64_is_enabled(kind, float64):
    rule = KINDS[kind](k=K, groups=GROUPS["two_best_of_group"])
    shapes = jax.ShapeDtypeStruct((TOKENS, EXPERTS), jnp.float32), jax.ShapeDtypeStruct((EXPERTS,), jnp.float32)
    routing = jax.eval_shape(lambda logits, bias: rule(logits, bias=bias), *shapes)
    masked = jax.eval_shape(lambda z: eqx_moe.mask_routing(rule(z), jnp.arange(TOKENS) > 2), shapes[0])
    for result in (routing, masked):
        assert (result.experts.dtype, result.weights.dtype) == (jnp.int32, jnp.float32)
    wide = jnp.ones((TOKENS, 4), jnp.float64), jnp.ones((4, EXPERTS), jnp.float64)
    assert eqx_moe.router_logits(*wide).dtype == jnp.float32


@pytest.mark.parametrize("k", [2, 3])
def test_selection_takes_float64_scores(k, float64):
    """They differ only beyond what float32 holds."""
    scores = jnp.asarray(1 + np.arange(4)[None] * 1e-12)
    ids = eqx_moe.select_experts(scores, k)
    assert_equal(ids, jnp.arange(3, 3 - k, -1, dtype=jnp.int32)[None])


def test_rules_are_values_without_leaves():
    for kind in KINDS.values():
        rule = kind(k=K, groups=GROUPS["two_best_of_group"])
        assert jax.tree.leaves(rule) == []
        assert rule == kind(k=K, groups=eqx_moe.GroupLimit(4, 2)) and rule != kind(k=K)
        assert hash(rule) == hash(kind(k=K, groups=eqx_moe.GroupLimit(4, 2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: eqx_moe.SoftmaxTopK(k=2, scale=2),
        lambda: eqx_moe.SigmoidTopK(k=2, scale=2),
        lambda: eqx_moe.SqrtSoftplusTopK(k=2, scale=2),
        lambda: eqx_moe.Router(4, 4, jitter=0, soft_cap=30, key=jax.random.key(0)),
        lambda: eqx_moe.router_logits(jnp.ones((2, 3)), jnp.ones((3, 4)), soft_cap=30),
        lambda: eqx_moe.ClampedSwiGLU(limit=7, offset=1),
        lambda: eqx_moe.sign_bias_update(jnp.zeros(3), jnp.zeros(3, jnp.int32), rate=1),
    ],
    ids=["softmax", "sigmoid", "sqrt_softplus", "router", "router_logits", "clamped_swiglu", "bias_update"],
)
def test_whole_numbers_do_for_real_options(make):
    """An `int` is a `float` to every type checker; it must be one at run time too."""
    make()


LOGITS = jnp.zeros((TOKENS, EXPERTS))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: eqx_moe.SoftmaxTopK(k=0), "k=0 must be a whole number of at least 1"),
        (lambda: eqx_moe.SigmoidTopK(k=-1), "k=-1 must be a whole number"),
        (lambda: eqx_moe.SqrtSoftplusTopK(k=0), "k=0 must be a whole number of at least 1"),
        (lambda: eqx_moe.SoftmaxTopK(k=True), "k=True must be a whole number"),
        (lambda: eqx_moe.SigmoidTopK(k=1, scale=float("nan")), "scale=nan must be finite"),
        (lambda: eqx_moe.SoftmaxTopK(k=1, renormalize=False, select_on_logits=True), "renormalize=False contradicts"),
        (lambda: eqx_moe.GroupLimit(4, 0), "top_groups=0 must lie between 1 and num_groups=4"),
        (lambda: eqx_moe.GroupLimit(4, 5), "top_groups=5 must lie between 1 and num_groups=4"),
        (lambda: eqx_moe.GroupLimit(4, 2, best=0), "best=0 must be at least 1"),
        (lambda: eqx_moe.SoftmaxTopK(k=13)(LOGITS), "k=13 must lie between 1 and experts=12"),
        (lambda: eqx_moe.select_experts(LOGITS, 0), "k=0 must lie between 1 and experts=12"),
        (lambda: eqx_moe.SigmoidTopK(k=1, groups=eqx_moe.GroupLimit(5, 2))(LOGITS), "experts=12 .* num_groups=5"),
        (
            lambda: eqx_moe.SqrtSoftplusTopK(k=7, groups=eqx_moe.GroupLimit(4, 2))(LOGITS),
            "k=7 experts cannot be chosen from top_groups=2 of 3",
        ),
        (lambda: eqx_moe.Router(0, 4, key=jax.random.key(0)), "d_model=0 must be at least 1"),
        (lambda: eqx_moe.Router(4, 0, key=jax.random.key(0)), "num_experts=0 must be at least 1"),
        (lambda: eqx_moe.Router(4, 4, jitter=1.0, key=jax.random.key(0)), r"jitter=1.0 must lie in \[0, 1\)"),
        (lambda: eqx_moe.Router(4, 4, jitter=-0.1, key=jax.random.key(0)), r"jitter=-0.1 must lie in \[0, 1\)"),
        (lambda: eqx_moe.Router(4, 4, soft_cap=0.0, key=jax.random.key(0)), "soft_cap=0.0 must be positive"),
        (lambda: eqx_moe.Router(4, 4, soft_cap=-2.0, key=jax.random.key(0)), "soft_cap=-2.0 must be positive"),
    ],
)
def test_impossible_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
