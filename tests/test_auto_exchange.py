"""The choice of an exchange: what it depends on, that it says why, and that what it counts is what the code moves."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import eqx_moe
from eqx_moe._exchange._cost import Sizes, exchange_cost, traffic_of, weight_gathering_cost

from .helpers import assert_close, equations, make_moe, normal

GATHER, RAGGED, PADDED = eqx_moe.AllGatherReduceScatter(), eqx_moe.RaggedAllToAll(), eqx_moe.PaddedAllToAll()
EXCHANGES = [GATHER, RAGGED, PADDED]
AUTO = eqx_moe.AutoExchange()
SHARDS = 8


def select(**changes):
    sizes = {"tokens": 4096, "k": 8, "experts": 256, "shards": 8, "platform": "cuda"}
    return AUTO.select(**(sizes | changes))


class TestChoice:
    @pytest.mark.parametrize(
        "changes, chosen",
        [
            ({}, GATHER),
            ({"capacity_factor": 1.25}, GATHER),
            ({"k": 2, "capacity_factor": 1.25}, RAGGED),
            ({"k": 1}, RAGGED),
            ({"shards": 64, "capacity_factor": 1.25}, RAGGED),
            ({"shards": 64, "capacity_factor": 1.25, "platform": "tpu"}, RAGGED),
            ({"shards": 256}, RAGGED),
            ({"platform": "cpu"}, GATHER),
            ({"platform": "cpu", "k": 2, "capacity_factor": 1.25}, PADDED),
            ({"platform": "cpu", "k": 2, "capacity_factor": 8}, GATHER),
            ({"shards": 1}, GATHER),
            ({"tokens": 0}, GATHER),
        ],
    )
    def test_of_sizes(self, changes, chosen):
        assert select(**changes).exchange == chosen

    def test_is_supported_and_the_best_of_those(self):
        sizes = itertools.product((1, 64, 8192), (1, 2, 8), (1, 2, 8, 64), (None, 0.5, 1, 1.25, 4.0))
        for (tokens, k, shards, factor), platform in itertools.product(sizes, ("cpu", "cuda", "rocm", "tpu", "other")):
            selection = select(tokens=tokens, k=k, shards=shards, capacity_factor=factor, platform=platform)
            native = platform in ("cuda", "rocm", "tpu")
            assert native or selection.exchange != RAGGED
            others = [cost for name, cost in selection.costs if native or name != str(RAGGED)]
            assert selection.cost.seconds == min(cost.seconds for cost in others)
            assert {name for name, _ in selection.rejected} == {str(e) for e in EXCHANGES if e != selection.exchange}

    def test_does_not_depend_on_widths(self):
        for d_model, dtype in ((8, jnp.float32), (7168, jnp.bfloat16), (65536, jnp.float32)):
            for k in range(1, 9):
                assert select(k=k, d_model=d_model, dtype=dtype).exchange == select(k=k).exchange

    @pytest.mark.parametrize("factor", [None, 1.25])
    def test_is_the_one_that_runs(self, factor):
        sizes = {"tokens": 64, "k": 2, "experts": 16, "shards": SHARDS, "capacity_factor": factor}
        assert AUTO.rows(*sizes.values()) == AUTO.select(**sizes).exchange.rows(*sizes.values())

    def test_in_the_worst_case_all_have_as_many_rows(self):
        """So that the number of rounds can be counted with another exchange than the one that is chosen with bounds."""
        for tokens, k, shards in itertools.product((1, 24), (1, 4, 16), (1, 2, 8, 16)):
            assert len({each.rows(tokens, k, 16, shards, None) for each in EXCHANGES}) == 1


class TestExplanation:
    def test_names_all_exchanges_with_reasons(self):
        text = str(select(platform="cpu", k=2, capacity_factor=1.25))
        assert text.splitlines()[0].startswith("chosen: PaddedAllToAll(): moves ")
        assert "rejected: RaggedAllToAll(): XLA has no ragged all-to-all on cpu" in text
        assert "rejected: AllGatherReduceScatter(): moves " in text
        assert "FSDP" not in text

    def test_says_when_to_gather_weights_instead(self):
        small = select(tokens=65536, experts=8, k=2, capacity_factor=1.25, d_model=1024, d_ff=256)
        assert small.gather_instead
        assert str(small).endswith(": fewer bytes, less time: do that instead")
        large = select(d_model=7168, d_ff=2048)
        assert large.gather_instead is False
        assert str(large).endswith(": not fewer bytes, no less time: expert parallelism pays")
        assert select(d_model=7168).gather_instead is None

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"platform": "gpu"}, "platform='gpu' must be one of cpu, cuda"),
            ({"shards": 3}, "experts=256 cannot be divided among the 3 shards"),
            ({"k": 0}, "k=0 must be at least 1"),
            ({"k": 257}, "k=257 cannot be larger than experts=256"),
            ({"tokens": -1}, "tokens=-1 must be at least 0"),
            ({"capacity_factor": -1}, "capacity_factor=-1 must be positive"),
            ({"d_ff": 8}, "d_ff=8 was given without d_model"),
        ],
    )
    def test_refuses(self, changes, message):
        with pytest.raises(ValueError, match=message):
            select(**changes)

    def test_unknown_exchange_has_no_cost(self):
        with pytest.raises(ValueError, match="no cost model for AutoExchange"):
            traffic_of(AUTO, Sizes(8, 2, 16, 8, None))


def bytes_arriving(program) -> float:
    """Bytes of arrays of two axes, and of int32 ids, that arrive from other devices in the collectives of a jaxpr."""
    total = 0
    for eqn in equations(program):
        size = lambda v: v.aval.size * v.aval.dtype.itemsize
        if eqn.primitive.name == "all_to_all":
            total += size(eqn.invars[0]) * (SHARDS - 1) / SHARDS
        elif eqn.primitive.name == "all_gather":
            total += size(eqn.invars[0]) * (SHARDS - 1)
        elif eqn.primitive.name == "reduce_scatter":
            total += size(eqn.outvars[0]) * (SHARDS - 1)
    return total


class TestCost:
    @pytest.mark.parametrize("exchange", [PADDED, GATHER], ids=str)
    @pytest.mark.parametrize("factor", [None, 1.25])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_moves_what_the_collectives_move(self, exchange, factor, dtype):
        tokens, k, experts, d_model = 16, 2, 16, 24
        mesh = jax.make_mesh((SHARDS,), ("expert",), axis_types=(AxisType.Auto,))

        def body(x, ids, weights):
            def apply(x, weights):
                routing = eqx_moe.Routing(ids, weights, experts)
                plan = exchange.plan(routing, axis_name="expert", capacity_factor=factor)
                there, arrived = exchange.send(x, weights, plan)
                share = arrived.sum().astype(x.dtype)
                return exchange.receive(jnp.sin(there) * share, plan)

            y, pull_back = jax.vjp(apply, x, weights)
            return y, pull_back(y)

        shard = jax.P("expert")
        run = jax.shard_map(body, mesh=mesh, in_specs=shard, out_specs=shard)
        shapes = ((d_model, dtype), (k, "int32"), (k, "float32"))
        program = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct((SHARDS * tokens, n), jnp.dtype(d)) for n, d in shapes))
        traffic = traffic_of(exchange, Sizes(tokens, k, experts, SHARDS, factor))
        predicted = exchange_cost(traffic, SHARDS, d_model * jnp.dtype(dtype).itemsize)
        assert bytes_arriving(program) == pytest.approx(predicted.bytes_moved)

    def test_ragged_moves_what_a_balanced_routing_sends(self):
        tokens, k, experts = 16, 2, 16
        ids = np.arange(SHARDS * tokens * k).reshape(-1, tokens, k) % experts
        away = (ids // (experts // SHARDS) != np.arange(SHARDS)[:, None, None]).sum() / SHARDS
        assert traffic_of(RAGGED, Sizes(tokens, k, experts, SHARDS, None)).scattered == away

    def test_weights(self):
        sizes = {"experts": 16, "d_model": 32, "d_ff": 8, "gates": 2, "itemsize": 2}
        cost = weight_gathering_cost(shards=4, **sizes)
        assert cost.bytes_allocated == 3 * 16 * 32 * 8 * 2
        assert cost.bytes_moved == 3 * cost.bytes_allocated * 3 / 4
        assert weight_gathering_cost(shards=1, **sizes).bytes_moved == 0

    def test_one_shard_moves_nothing(self):
        for exchange in EXCHANGES:
            assert exchange_cost(traffic_of(exchange, Sizes(64, 2, 16, 1, None)), 1, 64).bytes_moved == 0

    def test_grows_with_every_size(self):
        for exchange, factor in itertools.product(EXCHANGES, (None, 1.5)):
            seconds = lambda sizes, e=exchange: exchange_cost(traffic_of(e, sizes), sizes.shards, 64).seconds
            base = Sizes(64, 2, 16, 8, factor)
            for change in ({"tokens": 128}, {"k": 4}, {"shards": 16}):
                assert seconds(dataclasses.replace(base, **change)) > seconds(base)


@pytest.mark.parametrize("factor", [None, 1.25])
def test_gives_the_numbers_of_the_exchange_it_chose(factor):
    mesh, x = jax.make_mesh((SHARDS,), ("expert",), axis_types=(AxisType.Auto,)), normal(64, 8)
    sizes = {"tokens": 8, "k": 2, "experts": 16, "shards": SHARDS, "capacity_factor": factor}
    results = []
    for exchange in (AUTO, AUTO.select(**sizes).exchange):
        parallel = eqx_moe.ExpertParallel(exchange=exchange, capacity_factor=factor)
        moe = make_moe(num_experts=16, matmul=eqx_moe.RaggedDot(), parallel=parallel)
        specs = eqx_moe.partition_specs(moe)
        body = lambda moe, x: moe(x)[0]
        run = jax.shard_map(body, mesh=mesh, in_specs=(specs, jax.P("expert")), out_specs=jax.P("expert"))
        loss = lambda moe, x, run=run: jnp.sin(run(moe, x)).sum()
        results.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(moe, x))
    assert_close(results[0], results[1])
