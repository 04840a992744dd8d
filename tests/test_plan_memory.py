"""The planned buffers against the shapes that the layer traces, and against what XLA allocates for it."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import eqx_moe

from .helpers import assert_close, equations, make_moe, normal

GATHER, RAGGED, PADDED = eqx_moe.AllGatherReduceScatter(), eqx_moe.RaggedAllToAll(), eqx_moe.PaddedAllToAll()
SHARDS = 8
SIZES = {"tokens": 64, "d_model": 48, "d_ff": 20, "experts": 16, "k": 2, "shards": SHARDS, "dtype": jnp.float32}
FACTOR = 1.25


def plan(**changes):
    return eqx_moe.plan_memory(**(SIZES | changes))


def row(exchange, factor, chunks, **changes):
    """The planned row; with the buffers of `chunks` chunks, which are those of fewer tokens."""
    smaller = plan(tokens=SIZES["tokens"] // chunks, **changes)
    return next(row for row in smaller.rows if row.exchange == exchange and row.capacity_factor == factor)


def layer(exchange, factor, chunks):
    """A layer, the specification of it, and a function of it and of all tokens on the mesh."""
    mesh = jax.make_mesh((SHARDS,), ("expert",), axis_types=(AxisType.Auto,))
    parallel = eqx_moe.ExpertParallel(exchange=exchange, capacity_factor=factor, chunks=chunks)
    moe = make_moe(SIZES["d_model"], SIZES["d_ff"], SIZES["experts"], matmul=eqx_moe.BlockedDot(), parallel=parallel)
    body = lambda moe, x: moe(x)[0]
    specs = (eqx_moe.partition_specs(moe), jax.P("expert"))
    return moe, jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P("expert"))


def gradients(exchange, factor, chunks):
    moe, run = layer(exchange, factor, chunks)
    return moe, jax.jit(jax.value_and_grad(lambda moe, x: jnp.sin(run(moe, x)).sum(), (0, 1)))


TOKENS = SHARDS * SIZES["tokens"]


@ft.cache
def compiled(exchange, factor, chunks):
    moe, run = gradients(exchange, factor, chunks)
    return run.lower(moe, jax.ShapeDtypeStruct((TOKENS, SIZES["d_model"]), jnp.float32)).compile()


def temporary_bytes(exchange, factor, chunks) -> int:
    analysis = compiled(exchange, factor, chunks).memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


class TestAgainstTheCode:
    @pytest.mark.parametrize("exchange", [GATHER, RAGGED, PADDED], ids=str)
    @pytest.mark.parametrize("factor, chunks", [(None, 1), (FACTOR, 1), (None, 4), (FACTOR, 4)])
    def test_the_layer_traces_arrays_of_these_shapes(self, exchange, factor, chunks):
        moe, run = layer(exchange, factor, chunks)
        x = jax.ShapeDtypeStruct((TOKENS, SIZES["d_model"]), jnp.float32)
        shapes = {v.aval.shape for eqn in equations(jax.make_jaxpr(run)(moe, x)) for v in eqn.outvars}
        planned, d_model, d_ff = row(exchange, factor, chunks), SIZES["d_model"], SIZES["d_ff"]
        rows = exchange.rows(SIZES["tokens"] // chunks, SIZES["k"], SIZES["experts"], SHARDS, factor)
        assert planned.pre_activation == 4 * rows * 2 * d_ff
        assert planned.activation == 4 * rows * d_ff
        assert planned.output == 4 * rows * d_model
        assert (rows, 2, d_ff) in shapes
        assert (planned.receive // (4 * d_model), d_model) in shapes
        assert planned.send == 0 or (planned.send // (4 * d_model), d_model) in shapes

    @pytest.mark.parametrize("exchange", [GATHER, PADDED], ids=str)
    @pytest.mark.parametrize("factor, chunks", [(None, 1), (FACTOR, 1), (None, 4)])
    def test_xla_allocates_about_that_much(self, exchange, factor, chunks):
        """For a forward and backward pass together at least half of it, and not more than twice as much and four times
        the tokens and weights of the device, which chunks do not divide."""
        planned, actual = row(exchange, factor, chunks).total, temporary_bytes(exchange, factor, chunks)
        tokens = 4 * SIZES["tokens"] * SIZES["d_model"]
        weights = 4 * 3 * SIZES["d_model"] * SIZES["d_ff"] * SIZES["experts"] // SHARDS
        assert planned / 2 <= actual <= 2 * planned + 4 * (tokens + weights)

    @pytest.mark.parametrize("exchange", [GATHER, PADDED], ids=str)
    @pytest.mark.parametrize("chunks, passes", [(1, 4), (4, 5)])
    def test_rows_are_moved_so_often(self, exchange, chunks, passes):
        moe, run = gradients(exchange, None, chunks)
        x = jax.ShapeDtypeStruct((TOKENS, SIZES["d_model"]), jnp.float32)
        names = {"all_to_all", "all_gather", "reduce_scatter"}
        moving = [e.outvars[0].aval.shape for e in equations(jax.make_jaxpr(run)(moe, x)) if e.primitive.name in names]
        assert sum(shape[-1] == SIZES["d_model"] for shape in moving) == passes

    @pytest.mark.parametrize("exchange", [GATHER, PADDED], ids=str)
    def test_chunks_take_less_and_give_the_same(self, exchange):
        assert temporary_bytes(exchange, None, 4) < 0.4 * temporary_bytes(exchange, None, 1)
        moe, _ = layer(exchange, None, 1)
        chunked, _ = layer(exchange, None, 4)
        x = normal(TOKENS, SIZES["d_model"])
        assert_close(compiled(exchange, None, 4)(chunked, x), compiled(exchange, None, 1)(moe, x))


class TestBudget:
    @pytest.mark.parametrize("share", [0.9, 0.3, 0.02])
    def test_chunks_are_as_few_as_fit(self, share):
        for exchange in (GATHER, RAGGED, PADDED):
            budget = int(share * row(exchange, None, 1).total)
            chosen = [r for r in plan(budget=budget).rows if r.exchange == exchange and r.capacity_factor is None][1]
            assert chosen.total <= budget
            assert SIZES["tokens"] % chosen.chunks == 0
            fewer = [n for n in range(1, chosen.chunks) if SIZES["tokens"] % n == 0]
            assert fewer
            assert all(row(exchange, None, n).total > budget for n in fewer)

    def test_what_fits_is_not_chunked(self):
        assert {row.chunks for row in plan(budget=2**40).rows} == {1}

    def test_says_so_where_one_token_is_too_many(self):
        found = plan(budget=100)
        assert found.too_large == (GATHER, RAGGED, PADDED)
        assert {row.chunks for row in found.rows} == {1}
        assert "PaddedAllToAll, worst case: one token at a time does not fit the budget" in str(found)


def test_table_is_aligned():
    found = plan(budget=2**18)
    title, head, *lines = str(found).splitlines()
    assert title == (
        "MiB per device in the forward pass of one layer: 64 tokens of 48, 16 experts of 20, k=2, 8 shards, float32, "
        "budget 0.25"
    )
    assert head.split() == "exchange buffers chunks send receive pre-act. activ. output returned total".split()
    assert len(lines) == len(found.rows) == 9
    assert len({len(line) for line in (head, *lines)}) == 1


def test_without_a_factor_no_buffer_is_bounded():
    assert plan(capacity_factor=None).rows == tuple(row for row in plan().rows if row.capacity_factor is None)
    assert len(plan(capacity_factor=None).rows) == 3


def test_ungated_experts_have_half_the_pre_activation():
    two, one = plan().rows[0], plan(gates=1).rows[0]
    assert one.pre_activation == two.pre_activation // 2 == one.activation
    assert two.total - one.total == one.pre_activation


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"budget": 0}, "budget=0 must be at least 1"),
        ({"shards": 3}, "experts=16 cannot be divided among the 3 shards"),
        ({"k": 17}, "k=17 cannot be larger than experts=16"),
        ({"capacity_factor": 0}, "capacity_factor=0 must be positive"),
        ({"dtype": jnp.int32}, "dtype=int32 must be float32"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)
