"""What does not fit into bounded buffers: further rounds, counts, errors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe
from eqx_moe import ExpertParallel, Overflow

from .helpers import assert_close, make_moe, normal, value_and_gradients
from .meshes import DATA, EXPERTS, MASK, THREE, TOKENS, WIDTH, X, make_mesh, sharded, without
from .test_exchange import EXCHANGES

# NCCL's takes one size of layers.
ALL = {**EXCHANGES, "nccl": eqx_moe.NCCLExchange(eqx_moe.NCCLGroup(EXPERTS, WIDTH, TOKENS, k=2, shards=DATA["expert"]))}


class Twice(eqx_moe.AbstractRoutingRule):
    """Sends every token to expert 0 as often as there are choices."""

    k: int = eqx.field(static=True)

    def __call__(self, logits, *, bias=None):
        weights = jax.nn.softmax(logits)[:, : self.k]
        return eqx_moe.Routing(jnp.zeros(weights.shape, jnp.int32), weights, logits.shape[1])


class TestOverflow:
    """All tokens to experts 0 and 1, which one of 4 shards holds, with room for a quarter of them."""

    rule = eqx_moe.SoftmaxTopK(k=2)
    tokens = ("data", "expert")

    def layer(self, exchange, overflow):
        parallel = ExpertParallel(exchange=ALL[exchange], capacity_factor=1, overflow=overflow)
        moe = make_moe(WIDTH, 8, EXPERTS, rule=self.rule, parallel=parallel, router_bias=True)
        bias = jnp.array([1e3, 1e3] + [0.0] * (EXPERTS - 2))
        return eqx.tree_at(lambda moe: moe.router.bias, moe, bias)

    @pytest.mark.parametrize("exchange", ALL)
    def test_exact_drops_nothing(self, exchange):
        moe = self.layer(exchange, Overflow.EXACT)
        run = lambda run, moe: jax.jit(lambda *args: value_and_gradients(run, *args))(moe, X, MASK)
        actual = run(sharded(moe, make_mesh(DATA), self.tokens), moe)
        assert_close(actual, run(lambda moe, x, mask: moe(x, mask=mask), without(moe)))
        assert actual[0][1].overflow == 0

    def test_rounds_keep_nothing_for_the_backward_pass(self):
        """But what the first needs: as much as with a buffer that suffices, however many rounds there could be."""
        mesh = make_mesh(DATA)

        def kept(factor):
            parallel = ExpertParallel(capacity_factor=factor, overflow=Overflow.EXACT)
            moe = make_moe(WIDTH, 64, EXPERTS, parallel=parallel)
            run = sharded(moe, mesh, self.tokens)
            residuals = jax.eval_shape(lambda moe, x: jax.vjp(lambda moe: run(moe, x, MASK)[0], moe)[1], moe, X)
            return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))

        assert kept(0.25) <= kept(1.0) <= kept(None)

    @pytest.mark.parametrize("exchange", ALL)
    @pytest.mark.parametrize("overflow", [Overflow.COUNT, Overflow.RAISE])
    def test_counted(self, exchange, overflow):
        moe, everywhere = self.layer(exchange, overflow), jnp.ones(TOKENS, bool)
        y, stats = jax.jit(sharded(moe, make_mesh(DATA), self.tokens))(moe, X, everywhere)
        assert stats.load.sum() == 2 * TOKENS
        assert stats.overflow == 2 * TOKENS * 3 // 4
        with pytest.raises(OverflowError, match="96 of 128 assignments did not fit into the receive buffers"):
            eqx_moe.check_overflow(stats)
        expected = np.asarray(without(moe)(X)[0])
        if overflow is Overflow.RAISE:
            assert np.isnan(y).all()
        else:  # the first assignments are served as if there were no others
            served = (np.abs(np.asarray(y) - expected) < 1e-5).all(axis=1)
            assert served.sum() == TOKENS // 4
            assert (served | (np.asarray(y) == 0).all(axis=1)).all()

    def test_counted_once_along_tensor(self):
        moe = self.layer("gather", Overflow.COUNT)
        parallel = ExpertParallel(exchange=EXCHANGES["gather"], capacity_factor=1, tensor_axis="tensor")
        moe = eqx_moe.with_parallel(moe, parallel)
        run = sharded(moe, make_mesh(THREE), ("data", "expert", "tensor"))
        stats = jax.jit(run)(moe, X, jnp.ones(TOKENS, bool))[1]
        assert stats.load.sum() == 2 * TOKENS and stats.overflow == TOKENS

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_experts_chosen_twice(self, exchange):
        """By a rule of one's own: more may arrive at a shard than there are distinct experts."""
        parallel = ExpertParallel(exchange=EXCHANGES[exchange], capacity_factor=1, overflow=Overflow.EXACT)
        moe = make_moe(WIDTH, 8, 4, rule=Twice(k=2), parallel=parallel)
        y, stats = jax.jit(sharded(moe, make_mesh(DATA), self.tokens))(moe, X, MASK)
        expected = without(moe)(X, mask=MASK)
        assert_close((y, stats.load), (expected[0], expected[1].load))
        assert stats.overflow == 0

    def test_not_inside_jit(self):
        with pytest.raises(ValueError, match=r"there are none inside `jax\.jit`: return `stats`"):
            jax.jit(lambda moe, x: eqx_moe.check_overflow(moe(x)[1]))(make_moe(), normal(3, 8))

    def test_nothing_to_raise(self):
        eqx_moe.check_overflow(make_moe()(normal(3, 8))[1])
