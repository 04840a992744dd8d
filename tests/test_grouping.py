"""Grouping, dispatch, combine and the weights of rows: an exact permutation and its adjoint pair."""

import itertools
import re

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe

from .helpers import assert_close, assert_equal

TOKENS, K, EXPERTS, D_MODEL = 7, 3, 5, 4

settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
NOWHERE = (EXPERTS,) * K
CHOICES = [*itertools.permutations(range(EXPERTS), K), *[NOWHERE] * 15]
# The experts of every token, with one token in five routed nowhere.
ids_of_tokens = st.lists(st.sampled_from(CHOICES), min_size=TOKENS, max_size=TOKENS).map(
    lambda x: np.array(x, np.int32)
)


def make_routing(ids, num_experts=EXPERTS, seed=0):
    weights = np.random.default_rng(seed).uniform(size=ids.shape)
    weights = jnp.asarray(np.where(ids < num_experts, weights, 0), jnp.float32)
    return eqx_moe.Routing(jnp.asarray(ids, jnp.int32), weights, num_experts)


def random_ids(tokens=TOKENS, k=K, num_experts=EXPERTS, *, every=3, seed=0):
    """Distinct experts of every token; every third token is routed nowhere."""
    scores = np.random.default_rng(seed).normal(size=(tokens, num_experts))
    ids = np.argsort(scores, axis=1)[:, :k].astype(np.int32)
    return np.where((np.arange(tokens) % every == 0)[:, None], num_experts, ids).astype(np.int32)


group = jax.jit(eqx_moe.group_by_expert)


def random_values(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_grouping(**options):
    return group(make_routing(random_ids(**options)))


def reference_grouping(ids, num_experts):
    """Assignments put into their expert's list one by one."""
    lists = [[] for _ in range(num_experts)]
    for assignment, expert in enumerate(np.asarray(ids).reshape(-1)):
        if expert < num_experts:
            lists[expert].append(assignment)
    rows = np.asarray(ids).size
    order, position = np.full(rows, rows), np.full(rows, rows)
    for row, assignment in enumerate(itertools.chain(*lists)):
        order[row], position[assignment] = assignment, row
    return order, position.reshape(np.shape(ids)), np.array([len(own) for own in lists])


def assert_grouping(grouping, ids, num_experts):
    actual = (grouping.order, grouping.position, grouping.sizes)
    assert [x.dtype for x in actual] == [jnp.int32] * 3
    assert_equal(actual, reference_grouping(ids, num_experts))


def test_grouping_is_a_stable_sort_and_its_inverse():
    @settings
    @hypothesis.given(ids_of_tokens)
    @hypothesis.example(np.array([NOWHERE] * TOKENS, np.int32))
    @hypothesis.example(np.array([(4, 0, 2)] * TOKENS, np.int32))
    def check(ids):
        assert_grouping(group(make_routing(ids)), ids, EXPERTS)

    check()


@pytest.mark.parametrize("num_experts", [2**20 - 2, 2**20 - 1], ids=["packed", "pairs"])
def test_both_sorts_are_right_where_one_gives_way_to_the_other(num_experts):
    """Expert and index of 4096 assignments just fit into 32 bits, or just do not."""
    ids = np.random.default_rng(0).choice(num_experts, (2048, 2), replace=False).astype(np.int32)
    ids[::5] = num_experts
    ids[1::5, 0], ids[2::5, 1] = num_experts - 1, 0
    routing = make_routing(ids, num_experts)
    sorts = re.findall(r"(?:\S+:\S+ )+(?== sort\[)", str(jax.make_jaxpr(eqx_moe.group_by_expert)(routing)))
    assert [len(arrays.split()) for arrays in sorts] == [1 if (num_experts + 1) * 4096 < 2**32 else 2]
    assert_grouping(group(routing), ids, num_experts)


EDGES = {
    "no_tokens": (0, 2, 3),
    "one_token": (1, 2, 3),
    "one_expert": (5, 1, 1),
    "all_experts": (5, 4, 4),
    "one_of_everything": (1, 1, 1),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge):
    tokens, k, num_experts = EDGES[edge]
    x = random_values((tokens, D_MODEL), 1)

    @jax.jit
    def run(routing, x):
        grouping = eqx_moe.group_by_expert(routing)
        weights = eqx_moe.row_weights(routing, grouping)
        y, pull_back = jax.vjp(lambda x: eqx_moe.combine(eqx_moe.dispatch(x, grouping), grouping), x)
        return grouping, weights, y, *pull_back(y)

    for every in (1, 2, tokens + 1):  # none, every other, all but the first of the tokens are routed
        ids = random_ids(tokens, k, num_experts, every=every)
        routing = make_routing(ids, num_experts)
        grouping, weights, y, d_x = run(routing, x)
        assert_grouping(grouping, ids, num_experts)
        count = (ids < num_experts).sum(1)[:, None]
        assert_close((y, d_x), (count * np.asarray(x), count**2 * np.asarray(x)))
        assert_close(weights.sum(), routing.weights.sum())


def test_dispatch_combine_and_row_weights_equal_the_reference():
    ids = random_ids()
    routing = make_routing(ids)
    grouping = group(routing)
    x = random_values((TOKENS, D_MODEL), 1)
    rows = random_values((TOKENS * K, D_MODEL), 2)
    order, position, _ = reference_grouping(ids, EXPERTS)
    dispatched, combined, weights = np.zeros_like(rows), np.zeros_like(x), np.zeros(TOKENS * K, np.float32)
    for row, assignment in enumerate(order):
        if assignment < TOKENS * K:
            dispatched[row] = x[assignment // K]
            weights[row] = routing.weights[assignment // K, assignment % K]
    for token, choice in np.ndindex(TOKENS, K):
        if position[token, choice] < TOKENS * K:
            combined[token] += rows[position[token, choice]]
    assert_equal(eqx_moe.dispatch(jnp.asarray(x), grouping), dispatched)
    assert_equal(eqx_moe.row_weights(routing, grouping), weights)
    # Bit-equal: the sum is taken choice by choice, whatever runs it.
    assert_equal(eqx_moe.combine(jnp.asarray(rows), grouping), combined)


def test_combine_sums_in_float32_and_rounds_once():
    ids = np.array([[0, 1, 2]], np.int32)
    grouping = eqx_moe.group_by_expert(make_routing(ids))
    rows = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)
    combined = eqx_moe.combine(rows, grouping)
    assert combined.dtype == jnp.bfloat16
    assert combined.item() == 258  # in bfloat16, 256 + 1 is 256


def test_combine_is_the_adjoint_of_dispatch():
    @jax.jit
    def run(routing, x, rows):
        grouping = eqx_moe.group_by_expert(routing)
        dispatched, to_x = jax.vjp(lambda x: eqx_moe.dispatch(x, grouping), x)
        combined, to_rows = jax.vjp(lambda rows: eqx_moe.combine(rows, grouping), rows)
        return dispatched, combined, to_x(rows)[0], to_rows(x)[0]

    # Whole numbers, so that both inner products are exact.
    whole = lambda shape: hnp.arrays(np.float32, shape, elements=st.integers(-8, 8).map(float))

    @settings
    @hypothesis.given(ids_of_tokens, whole((TOKENS, D_MODEL)), whole((TOKENS * K, D_MODEL)))
    def check(ids, x, rows):
        dispatched, combined, to_x, to_rows = run(make_routing(ids), x, rows)
        assert np.vdot(dispatched, rows) == np.vdot(x, combined)
        assert_equal((to_x, to_rows), (combined, dispatched))

    check()


def test_row_weights_pass_gradients_back_to_their_assignments():
    ids = random_ids()
    routing = make_routing(ids)
    grouping = group(routing)
    cotangent = jnp.arange(1.0, TOKENS * K + 1)
    gradient = jax.jit(jax.grad(lambda w: (weighted(w, grouping) * cotangent).sum()))(routing.weights)
    assert_equal(gradient, jnp.where(ids < EXPERTS, grouping.position + 1, 0).astype(jnp.float32))


def test_rows_of_no_assignment_are_zero_and_never_read():
    """NaN in them reaches neither the values nor the gradients, and NaN of unrouted tokens reaches no row."""
    grouping = make_grouping()
    total = int(grouping.sizes.sum())
    assert 0 < total < TOKENS * K
    nowhere = (grouping.position == TOKENS * K).all(1)
    rows = jnp.ones((TOKENS * K, D_MODEL)).at[total:].set(jnp.nan)
    x = jnp.where(nowhere[:, None], jnp.nan, jnp.ones((TOKENS, D_MODEL)))

    @jax.jit
    def run(rows, x):
        combined, to_rows = jax.vjp(lambda rows: eqx_moe.combine(rows, grouping), rows)
        dispatched, to_x = jax.vjp(lambda x: eqx_moe.dispatch(x, grouping), x)
        return combined, dispatched, to_x(rows)[0], to_rows(x)[0]

    combined, dispatched, d_x, d_rows = run(rows, x)
    expected_y = jnp.where(nowhere[:, None], 0.0, K) * jnp.ones((1, D_MODEL))
    expected_rows = jnp.ones_like(rows).at[total:].set(0)
    assert_equal((combined, d_x), (expected_y, expected_y))
    assert_equal((dispatched, d_rows), (expected_rows, expected_rows))


def weighted(values, grouping):
    """`row_weights` as a function of the weights alone."""
    experts = jnp.zeros(values.shape, jnp.int32)
    return eqx_moe.row_weights(eqx_moe.Routing(experts, values, EXPERTS), grouping)


LINEAR = {
    "dispatch": (eqx_moe.dispatch, (TOKENS, D_MODEL)),
    "combine": (eqx_moe.combine, (TOKENS * K, D_MODEL)),
    "row_weights": (weighted, (TOKENS, K)),
}


def sine_loss(function):
    return lambda values, grouping: jnp.sin(function(values, grouping)).sum()


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_scatter_nothing(name):
    function, shape = LINEAR[name]
    program = lambda loss: jax.jit(jax.grad(loss)).lower(jnp.ones(shape), make_grouping()).as_text()
    assert "stablehlo.scatter" not in program(sine_loss(function))
    plain = lambda values, grouping: values[grouping.order // K % shape[0]]
    assert "stablehlo.scatter" in program(sine_loss(plain))  # what the primitives are there to avoid


@pytest.mark.parametrize("name", LINEAR)
def test_batched_gradients_neither_scatter_nor_loop(name):
    function, shape = LINEAR[name]
    grouping = jax.tree.map(lambda x: jnp.stack([x, x]), make_grouping())
    program = jax.jit(jax.vmap(jax.grad(sine_loss(function)))).lower(jnp.ones((2, *shape)), grouping).as_text()
    assert "stablehlo.gather" in program
    assert not re.search(r"stablehlo\.(scatter|while)", program)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 0)], ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_vmap_in_both_orders_with_grad_equals_a_loop(name, axes):
    function, shape = LINEAR[name]
    groupings = [make_grouping(every=every, seed=every) for every in (2, 3, 4)]
    values = random_values((3, *shape), 3)
    each_values = [values[0 if axes[0] is None else i] for i in range(3)]
    each_grouping = [groupings[0 if axes[1] is None else i] for i in range(3)]
    loss = sine_loss(function)
    one = jax.jit(lambda v, g: (function(v, g), jax.grad(loss)(v, g)))
    loop = [one(v, g) for v, g in zip(each_values, each_grouping, strict=True)]
    outs, gradients = jax.tree.map(lambda *leaves: np.stack(leaves), *loop)

    batch_values = values[0] if axes[0] is None else np.moveaxis(values, 0, axes[0])
    batch_grouping = groupings[0] if axes[1] is None else jax.tree.map(lambda *x: np.stack(x), *groupings)

    @jax.jit
    def run(v, g):
        total = lambda v: jax.vmap(loss, axes)(v, g).sum()
        return jax.vmap(function, axes)(v, g), jax.vmap(jax.grad(loss), axes)(v, g), jax.grad(total)(v)

    out, per_example, summed = run(batch_values, batch_grouping)
    assert_close((out, per_example), (outs, gradients))
    assert_close(summed, gradients.sum(0) if axes[0] is None else np.moveaxis(gradients, 0, axes[0]))


def test_grouping_under_vmap_equals_a_loop():
    routings = [make_routing(random_ids(every=every, seed=every)) for every in (2, 3, 4)]
    together = jax.vmap(group)(jax.tree.map(lambda *x: np.stack(x), *routings))
    each = [group(routing) for routing in routings]
    assert_equal(together, jax.tree.map(lambda *x: np.stack(x), *each))


@pytest.mark.parametrize("name", LINEAR)
def test_forward_derivatives_and_second_ones(name):
    """With `f` linear, `sum(sin(f(v)))` has the gradient `f^T(cos(f(v)))`, which changes by `f^T(-sin(f(v)) f(t))`."""
    function, shape = LINEAR[name]
    grouping = make_grouping()
    values, tangent = (random_values(shape, seed=seed) for seed in (4, 5))

    @jax.jit
    def run(v, t):
        f = lambda v: function(v, grouping)
        pull_back = lambda y: jax.vjp(f, v)[1](y)[0]
        gradient = jax.grad(lambda v: sine_loss(function)(v, grouping))
        return (jax.jvp(f, (v,), (t,)), jax.jvp(gradient, (v,), (t,))[1]), (
            (f(v), f(t)),
            pull_back(-jnp.sin(f(v)) * f(t)),
        )

    (first, second), (expected_first, expected_second) = run(values, tangent)
    assert_equal(first, expected_first)
    assert_close(second, expected_second)


def test_indices_stay_32_bit_when_x64_is_enabled(float64):
    shape = jax.ShapeDtypeStruct((TOKENS, K), jnp.int32)
    grouping = jax.eval_shape(
        lambda ids: eqx_moe.group_by_expert(eqx_moe.Routing(ids, jnp.ones(ids.shape, jnp.float32), EXPERTS)), shape
    )
    assert [x.dtype for x in jax.tree.leaves(grouping)] == [jnp.int32] * 3


def test_one_trace_serves_all_routings():
    traces = []

    @jax.jit
    def run(routing, x):
        traces.append(None)
        return eqx_moe.dispatch(x, eqx_moe.group_by_expert(routing))

    for every in (1, 2, 100):
        run(make_routing(random_ids(every=every)), jnp.ones((TOKENS, D_MODEL)))
    assert len(traces) == 1


def shapes(*leading):
    assignments = (*leading, 2**28 if leading else 2**30, 2)
    return jax.ShapeDtypeStruct(assignments, jnp.int32), jax.ShapeDtypeStruct(assignments, jnp.float32)


def group_ids(experts, weights):
    return eqx_moe.group_by_expert(eqx_moe.Routing(experts, weights, 4))


def test_more_assignments_than_indices_are_refused():
    with pytest.raises(ValueError, match=f"tokens \\* k = {2**31} does not fit into 32-bit"):
        jax.eval_shape(group_ids, *shapes())


@pytest.mark.parametrize("function", [eqx_moe.dispatch, eqx_moe.combine])
def test_more_assignments_than_indices_are_refused_when_folded_by_vmap(function):
    """Every example has few enough assignments, all of them together do not."""
    values = jax.ShapeDtypeStruct((4, 2**28 if function is eqx_moe.dispatch else 2**29, 1), jnp.float32)
    with pytest.raises(ValueError, match=f"{2**31}.*32-bit"):
        jax.eval_shape(jax.vmap(lambda x, *routing: function(x, group_ids(*routing))), values, *shapes(4))


def test_ids_out_of_range_are_routed_nowhere():
    """A rule of one's own may write -1; it must not disturb other tokens."""
    experts = jnp.array([[0, 1], [-1, 2], [1, 0], [2, 1], [0, 7], [1, 2]], jnp.int32)
    routing = eqx_moe.Routing(experts, jnp.ones((6, 2)), 3)
    grouping = eqx_moe.group_by_expert(routing)
    assert_equal(grouping.sizes, jnp.array([3, 4, 3]))
    assert_equal(eqx_moe.expert_load(routing), grouping.sizes)
    x = jnp.arange(1.0, 7.0)[:, None]
    assert_equal(eqx_moe.combine(eqx_moe.dispatch(x, grouping), grouping) / x, jnp.array([[2.0, 1, 2, 2, 1, 2]]).T)
