"""Exchanges by themselves, on 8 virtual CPU devices."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import eqx_moe
from eqx_moe._exchange._ragged import ragged_all_to_all

from .helpers import assert_close, assert_equal, normal

SHARDS, TOKENS, EXPERTS, K = 4, 6, 8, 2
EXCHANGES = {
    "padded": eqx_moe.PaddedAllToAll(),
    "ragged": eqx_moe.RaggedAllToAll(),
    "gather": eqx_moe.AllGatherReduceScatter(),
}
SPEC = jax.P("expert")
each_exchange = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)


def on_shards(f, shards=SHARDS):
    mesh = jax.make_mesh((shards,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=SPEC, out_specs=SPEC))


def draw(load: str, tokens=SHARDS * TOKENS) -> np.ndarray:
    """Distinct experts for every token."""
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(EXPERTS)[:K] for _ in range(tokens)])
    if load == "all to one shard":
        ids = np.broadcast_to([5, 4], ids.shape)
    if load == "to two shards":
        ids = np.stack([random.permutation([0, 1, 6])[:K] for _ in range(tokens)])
    if load == "from one shard":
        ids = np.where(np.arange(tokens)[:, None] // TOKENS == 2, ids, EXPERTS)
    if load == "nothing":
        ids = np.full_like(ids, EXPERTS)
    return ids.astype(np.int32)


LOADS = ["random", "all to one shard", "to two shards", "from one shard", "nothing"]


@ft.cache  # compiled once for all loads
def all_rounds(exchange, factor):
    """Experts that multiply by `1 + id`, over as many rounds as could be needed."""

    def run(args):
        x, ids, weights = args
        routing = eqx_moe.Routing(ids, weights, EXPERTS)
        first = jax.lax.axis_index("expert") * (EXPERTS // SHARDS)
        most = exchange.rows(TOKENS, K, EXPERTS, SHARDS, None)
        rounds = -(-most // exchange.rows(TOKENS, K, EXPERTS, SHARDS, factor))

        def serve(round):
            plan = exchange.plan(routing, axis_name="expert", capacity_factor=factor, round=round)
            arrived, arrived_weights = exchange.send(x, weights, plan)
            rows = eqx_moe.dispatch(arrived, plan.grouping)
            ends = jnp.cumsum(plan.grouping.sizes)
            expert = first + jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
            scale = arrived_weights * (1 + expert).astype(jnp.float32)
            y = exchange.receive(eqx_moe.combine(rows * scale[:, None], plan.grouping), plan)
            return y, plan.grouping.sizes, plan.rounds

        y, served, needed = jax.lax.map(serve, jnp.arange(rounds))
        return y.sum(axis=0), served.sum(axis=0), needed[:1], jnp.full(1, rounds)

    return on_shards(run)


@ft.cache
def counts(exchange):
    def run(ids):
        routing = eqx_moe.Routing(ids, jnp.ones(ids.shape), EXPERTS)
        plan = lambda round: exchange.plan(routing, axis_name="expert", capacity_factor=0.5, round=round)
        sizes = jax.lax.map(lambda round: plan(round).grouping.sizes, jnp.arange(16))
        first = plan(0)
        return first.rounds[None], first.overflow[None], sizes.sum(axis=1, dtype=jnp.int32)[None]

    return on_shards(run)


class TestSendAndReceive:
    @each_exchange
    @pytest.mark.parametrize("load", LOADS)
    @pytest.mark.parametrize("factor", [None, 0.4, 1.0])
    def test_every_round_together_serve_each_assignment_once(self, exchange, load, factor):
        ids, x = draw(load), normal(SHARDS * TOKENS, 3)
        weights = normal(*ids.shape, seed=1)

        y, served, rounds, most = all_rounds(exchange, factor)((x, jnp.asarray(ids), weights))
        known = ids < EXPERTS
        factors = np.where(known, np.asarray(weights) * (1 + ids), 0).sum(axis=1)
        assert_close(y, np.asarray(x) * factors[:, None])
        assert_equal(served, np.bincount(ids[known], minlength=EXPERTS))
        assert len(set(np.asarray(rounds))) == 1  # the same everywhere, or collectives would wait for ever
        assert 1 <= rounds[0] <= most[0]

    @each_exchange
    @pytest.mark.parametrize("load", LOADS)
    def test_rounds_are_as_many_as_needed(self, exchange, load):
        ids = draw(load)
        rounds, overflow, served = counts(exchange)(jnp.asarray(ids))
        rounds, served = int(rounds[0]), np.asarray(served).sum(axis=0)
        assert served.sum() == (ids < EXPERTS).sum()
        assert overflow.sum() == served[1:].sum()
        assert not served[rounds:].any()
        assert rounds == 1 or served[rounds - 1]

    @each_exchange
    @pytest.mark.parametrize("factor", [None, 0.6])
    def test_receive_is_the_adjoint_of_send(self, exchange, factor):
        ids, x = draw("random"), normal(SHARDS * TOKENS, 3)

        def products(x, ids):
            routing = eqx_moe.Routing(ids, jnp.ones(ids.shape), EXPERTS)
            plan = exchange.plan(routing, axis_name="expert", capacity_factor=factor)
            send = lambda x: exchange.send(x, routing.weights, plan)[0]
            sent, transpose = jax.vjp(send, x)
            rows = jnp.cos(jnp.arange(sent.size, dtype=jnp.float32)).reshape(sent.shape)
            rows = jax.lax.pcast(rows, "expert", to="varying")
            back, transpose_back = jax.vjp(lambda rows: exchange.receive(rows, plan), rows)
            jvp = jax.jvp(send, (x,), (2 * x,))[1]
            return (transpose(rows)[0], transpose_back(x)[0], jvp), (back, sent, 2 * sent)

        actual, expected = on_shards(lambda args: products(*args))((x, jnp.asarray(ids)))
        assert_close(actual[:1], expected[:1])
        assert_close(actual[2:], expected[2:])
        if not isinstance(exchange, eqx_moe.AllGatherReduceScatter):
            assert_close(actual[1], expected[1])

    @each_exchange
    def test_nothing_is_written_out_of_bounds_nor_read_from_other_tokens(self, exchange):
        """Tokens that are routed nowhere are NaN, and so is every row of the buffer that belongs to none."""
        ids = np.where(np.arange(SHARDS * TOKENS)[:, None] % 3 == 0, EXPERTS, draw("to two shards"))
        x = jnp.where(np.any(ids < EXPERTS, axis=1, keepdims=True), normal(SHARDS * TOKENS, 3), jnp.nan)

        def run(x, ids):
            routing = eqx_moe.Routing(ids, jnp.ones(ids.shape), EXPERTS)
            plan = exchange.plan(routing, axis_name="expert", capacity_factor=0.5)
            arrived = exchange.send(x, routing.weights, plan)[0]
            used = (plan.grouping.position < plan.grouping.order.shape[0]).any(axis=1)
            rows = eqx_moe.combine(eqx_moe.dispatch(arrived, plan.grouping), plan.grouping)
            return arrived, used, rows

        arrived, used, rows = on_shards(lambda args: run(*args))((x, jnp.asarray(ids)))
        assert np.isfinite(np.asarray(arrived)[np.asarray(used)]).all()
        assert np.isfinite(np.asarray(rows)).all()


@each_exchange
def test_one_shard_is_the_local_layer(exchange):
    routing = eqx_moe.Routing(jnp.asarray(draw("random")), normal(SHARDS * TOKENS, K), EXPERTS)
    x = normal(SHARDS * TOKENS, 3)

    def run(x, routing):
        plan = exchange.plan(routing, axis_name="expert")
        return exchange.send(x, routing.weights, plan)[1], plan.grouping.sizes

    weights, sizes = on_shards(lambda args: run(*args), shards=1)((x, routing))
    grouping = eqx_moe.group_by_expert(routing)
    assert_equal(sizes, grouping.sizes)
    assert_equal(weights[: int(sizes.sum())], eqx_moe.row_weights(routing, grouping))


@each_exchange
def test_experts_that_cannot_be_divided(exchange):
    routing = eqx_moe.Routing(jnp.zeros((SHARDS, 1), jnp.int32), jnp.ones((SHARDS, 1)), 6)
    plan = on_shards(lambda routing: exchange.plan(routing, axis_name="expert").grouping.sizes)
    with pytest.raises(ValueError, match="experts=6 cannot be divided among the 4 shards of the mesh axis 'expert'"):
        plan(routing)


class TestRows:
    @each_exchange
    def test_the_worst_case_holds_everything(self, exchange):
        worst = exchange.rows(TOKENS, K, EXPERTS, SHARDS, None)
        assert worst == SHARDS * TOKENS * K
        assert exchange.rows(TOKENS, 4, EXPERTS, SHARDS, None) == SHARDS * TOKENS * 2  # two experts are all it has
        assert exchange.rows(TOKENS, K, EXPERTS, SHARDS, 1e9) == worst

    @each_exchange
    def test_a_factor_bounds_them(self, exchange):
        assert exchange.rows(16, K, EXPERTS, SHARDS, 1.5) == 48
        assert exchange.rows(16, K, EXPERTS, SHARDS, 1e-9) >= 1


class TestRaggedAllToAll:
    def test_the_example_of_jax(self):
        """That of `jax.lax.ragged_all_to_all`'s documentation: output offsets are the sender's."""
        operand = jnp.array([1, 2, 2, 3, 4, 0])
        output = jnp.zeros(8, jnp.int32)
        rest = [jnp.array(x, jnp.int32) for x in ([0, 1, 0, 1], [1, 2, 1, 1], [0, 0, 1, 2], [1, 1, 2, 1])]
        run = on_shards(lambda args: ragged_all_to_all(*args, axis_name="expert"), shards=2)
        assert_equal(run((operand, output, *rest)), jnp.array([1, 3, 0, 0, 2, 2, 4, 0]))

    def test_other_rows_keep_the_output(self):
        """All that is sent goes to shard 0, to odd places; shard 1 receives nothing."""
        operand, output = normal(6, 2), 100 + normal(10, 2, seed=1)
        rest = [jnp.array(x, jnp.int32) for x in ([1, 3, 0, 3], [2, 0, 1, 0], [1, 0, 4, 0], [2, 1, 0, 0])]
        run = on_shards(lambda args: ragged_all_to_all(*args, axis_name="expert"), shards=2)
        expected = np.array(output)
        expected[1:3], expected[4] = operand[1:3], operand[3]
        assert_equal(run((operand, output, *rest)), expected)

    @pytest.mark.parametrize("platform", ["cuda", "tpu"])
    def test_is_native_on_accelerators(self, platform):
        """The layer and its gradient lower to XLA's collective, on devices that are not here."""
        exchange, ids, x = eqx_moe.RaggedAllToAll(), jnp.asarray(draw("random")), normal(SHARDS * TOKENS, 3)

        def loss(args):
            x, ids = args
            routing = eqx_moe.Routing(ids, jnp.ones(ids.shape), EXPERTS)
            plan = exchange.plan(routing, axis_name="expert")
            arrived = exchange.send(x, routing.weights, plan)[0]
            return jnp.sin(exchange.receive(jnp.cos(arrived), plan))

        run = on_shards(lambda args: jax.vjp(lambda x: loss((x, args[1])), args[0])[1](args[0])[0])
        text = run.trace((x, ids)).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("ragged_all_to_all") == 4  # ids, send, and the transposes of receive and send


def test_factors_that_make_no_sense():
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"capacity_factor=.* must be positive and finite, or None"):
            eqx_moe.ExpertParallel(capacity_factor=factor)


def test_exchanges_have_no_leaves_and_compare_by_value():
    for exchange in EXCHANGES.values():
        assert not jax.tree.leaves(exchange)
        assert exchange == type(exchange)()
        assert eqx.tree_equal(exchange, type(exchange)())
