"""Statistics, what is read off them, and their picture."""

import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_moe

from .helpers import assert_close, assert_equal

TOKENS, EXPERTS = 10, 6
RULE = eqx_moe.SoftmaxTopK(k=2)


def operands():
    logits = np.random.default_rng(0).normal(size=(TOKENS, EXPERTS))
    return jnp.asarray(2 * logits, jnp.float32), jnp.arange(TOKENS) % 3 > 0


@jax.jit
def stats_of(logits, mask=None):
    routing = RULE(logits)
    routing = routing if mask is None else eqx_moe.mask_routing(routing, mask)
    return eqx_moe.routing_stats(logits, RULE.probabilities(logits), eqx_moe.expert_load(routing), mask=mask)


class TestRoutingStats:
    def test_equals_the_reference(self):
        logits, mask = operands()
        stats = stats_of(logits, mask)
        kept = np.asarray(logits, np.float64)[np.asarray(mask)]
        exponential = np.exp(kept)
        assert_close(stats.probability, (exponential / exponential.sum(1, keepdims=True)).sum(0))
        assert_close(stats.squared_lse, (np.log(exponential.sum(1)) ** 2).sum())
        assert_equal(stats.load, np.bincount(np.argsort(-kept, 1)[:, :2].reshape(-1), minlength=EXPERTS))
        counts = stats.tokens, stats.masked, stats.nonfinite, stats.overflow
        assert [x.item() for x in counts] == [6, 4, 0, 0]

    def test_a_full_mask_changes_nothing(self):
        logits, _ = operands()
        assert_close(stats_of(logits, jnp.ones(TOKENS, bool)), stats_of(logits))

    @pytest.mark.parametrize("odd", [jnp.nan, jnp.inf, -jnp.inf])
    def test_masked_tokens_count_nowhere_whatever_their_logits(self, odd):
        logits, mask = operands()
        assert_equal(stats_of(jnp.where(mask[:, None], logits, odd), mask), stats_of(logits, mask))

    def test_masked_tokens_get_no_gradient_whatever_their_logits(self):
        logits, mask = operands()
        load, probabilities = jnp.zeros(EXPERTS, jnp.int32), RULE.probabilities(logits)

        def total(logits, probabilities):
            stats = eqx_moe.routing_stats(logits, probabilities, load, mask=mask)
            return stats.squared_lse + stats.probability[0]

        poisoned = (jnp.where(mask[:, None], x, jnp.nan) for x in (logits, probabilities))
        for gradient in jax.jit(jax.grad(total, (0, 1)))(*poisoned):
            assert (gradient[~mask] == 0).all() and (gradient[mask, 0] != 0).all()

    def test_unmasked_tokens_with_odd_logits_are_counted(self):
        logits, mask = operands()
        logits = logits.at[1, 0].set(jnp.nan).at[2, 3].set(jnp.inf).at[4].set(-jnp.inf).at[0, 0].set(jnp.nan)
        assert stats_of(logits).nonfinite.item() == 4
        assert stats_of(logits, mask).nonfinite.item() == 3  # token 0 is masked
        assert_equal(stats_of(logits, mask).load.sum(), 12)  # they are routed all the same

    def test_dtypes_stay_when_x64_is_enabled(self, float64):
        logits = jax.ShapeDtypeStruct((TOKENS, EXPERTS), jnp.float32)
        stats = jax.eval_shape(stats_of, logits, jax.ShapeDtypeStruct((TOKENS,), jnp.bool_))
        total = jax.eval_shape(eqx_moe.total_stats, jax.eval_shape(jax.vmap(stats_of), stack(logits)))
        expected = [jnp.int32, jnp.float32, jnp.float32, *[jnp.int32] * 4]
        for result in (stats, total):
            assert [x.dtype for x in jax.tree.leaves(result)] == expected

    def test_no_tokens(self):
        assert_equal(stats_of(jnp.zeros((0, EXPERTS))), jax.tree.map(jnp.zeros_like, stats_of(operands()[0])))


def stack(shape):
    return jax.ShapeDtypeStruct((3, *shape.shape), shape.dtype)


def test_expert_load_is_the_sizes_of_the_groups():
    logits, mask = operands()
    routing = jax.jit(RULE)(logits)
    both = jax.jit(lambda routing: (eqx_moe.expert_load(routing), eqx_moe.group_by_expert(routing).sizes))
    for case in (routing, eqx_moe.mask_routing(routing, mask)):
        load, sizes = both(case)
        assert load.dtype == jnp.int32
        assert_equal(load, sizes)


class TestTotalStats:
    @pytest.mark.parametrize("leading", [(), (1,), (4,), (3, 2)], ids=str)
    def test_sums_over_leading_axes(self, leading):
        one = stats_of(*operands())
        batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (*leading, *x.shape)), one)
        expected = jax.tree.map(lambda x: x * jnp.asarray(math.prod(leading), x.dtype), one)
        total = eqx_moe.total_stats(batch)
        assert [x.dtype for x in jax.tree.leaves(total)] == [x.dtype for x in jax.tree.leaves(one)]
        assert_close(total, expected)

    def test_sums_over_devices_of_two_axes(self):
        logits = np.random.default_rng(0).normal(size=(16, TOKENS, EXPERTS)).astype(np.float32)
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

        def local(logits):
            stats = jax.vmap(stats_of)(logits)
            over_b = eqx_moe.total_stats(stats, axis_name="b")
            return eqx_moe.total_stats(stats, axis_name=("a", "b")), jax.tree.map(lambda x: x[None], over_b)

        run = jax.shard_map(local, mesh=mesh, in_specs=P(("a", "b")), out_specs=(P(), P("a")), check_vma=True)
        over_both, over_b = jax.jit(run)(logits)
        each = jax.vmap(stats_of)(logits)
        assert_close(over_both, jax.tree.map(lambda x: np.sum(x, axis=0), each))
        assert_close(over_b, jax.tree.map(lambda x: np.sum(np.reshape(x, (4, 4, *x.shape[1:])), axis=1), each))


# load: max_violation, load_entropy, dead_experts, padding_waste for blocks of 4
CLOSED_FORMS = {
    (4, 4, 4, 4): (0, 1, 0, 0),
    (8, 8, 0, 0): (1, 0.5, 2, 0),
    (16, 0, 0, 0): (3, 0, 3, 0),
    (1, 1, 1, 1): (0, 1, 0, 0.75),
    (5, 0, 0, 0): (3, 0, 3, 3 / 8),
    (2, 1, 1, 0): (1, 0.75, 1, 2 / 3),
    (0, 0, 0, 0): (0, 0, 4, 0),
}


@jax.jit
def measure(load):
    padding = eqx_moe.padding_waste(load, 4)
    return eqx_moe.max_violation(load), eqx_moe.load_entropy(load), eqx_moe.dead_experts(load), padding


class TestLoad:
    @pytest.mark.parametrize("load", CLOSED_FORMS, ids=str)
    def test_closed_forms(self, load):
        values = measure(jnp.array(load))
        assert [x.dtype for x in values] == [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
        assert_close(values, CLOSED_FORMS[load])
        assert_equal(values[2], CLOSED_FORMS[load][2])

    def test_batches(self):
        values = np.array(list(CLOSED_FORMS.values())).T
        loads = np.array(list(CLOSED_FORMS))
        assert_close(measure(np.stack([loads, loads])), [np.stack([row, row]) for row in values])

    @pytest.mark.parametrize("load, values", [([7], (0, 1, 0, 1 / 8)), ([0], (0, 0, 1, 0))], ids=["some", "none"])
    def test_one_expert(self, load, values):
        assert_equal(measure(jnp.array(load)), values)

    @pytest.mark.parametrize("experts", [3, 7, 9, 14, 48, 60, 128])
    def test_perfect_balance_violates_nothing(self, experts):
        assert eqx_moe.max_violation(jnp.full(experts, 7)).item() == 0

    @pytest.mark.parametrize("experts", [3, 6, 18, 60, 97, 128])
    def test_entropy_is_at_most_one(self, experts):
        entropy = eqx_moe.load_entropy(jnp.full(experts, 7)).item()
        assert entropy <= 1
        assert_close(entropy, 1.0)

    @pytest.mark.parametrize("block", [0, -4])
    def test_impossible_blocks_are_refused(self, block):
        with pytest.raises(ValueError, match=f"block={block} must be at least 1"):
            eqx_moe.padding_waste(jnp.array([1, 2]), block)

    def test_entropy_of_a_skewed_load_equals_the_reference(self):
        load = jnp.array([5, 1, 30, 0, 2])
        share = np.array([5, 1, 30, 2]) / 38
        assert_close(eqx_moe.load_entropy(load), -(share * np.log(share)).sum() / math.log(5))


class TestPlotLoad:
    load = np.arange(3 * 2 * 4).reshape(3, 2, 4)

    def test_writes_a_picture(self, tmp_path):
        path = tmp_path / "load.png"
        eqx_moe.plot_load(jnp.asarray(self.load)).savefig(path)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_shows_the_load_of_every_layer_as_multiples_of_the_mean(self):
        panels = [panel for panel in eqx_moe.plot_load(self.load).axes if panel.images]
        assert len(panels) == 2
        for layer, panel in enumerate(panels):
            load = self.load[:, layer].astype(float)
            assert_close(panel.images[0].get_array(), (load / load.mean(1, keepdims=True)).T, dtype="float64")

    def test_one_layer_needs_no_axis(self):
        one, same = (eqx_moe.plot_load(load).axes for load in (self.load[:, 0], self.load[:, :1]))
        assert len(one) == len(same)
        assert_equal(one[0].images[0].get_array(), same[0].images[0].get_array())

    def test_steps_are_the_horizontal_axis(self):
        image = eqx_moe.plot_load(self.load, steps=[100, 200, 300]).axes[0].images[0]
        assert image.get_extent()[:2] == [50, 350]

    @pytest.mark.parametrize("shape", [(1, 4), (1, 1, 1), (3, 4)], ids=str)
    def test_small_and_idle_loads_are_drawn(self, shape, tmp_path):
        eqx_moe.plot_load(np.zeros(shape, int), steps=np.zeros(shape[0])).savefig(tmp_path / "load.png")

    @pytest.mark.parametrize("shape", [(), (4,), (1, 2, 3, 4), (0, 2, 4), (3, 0, 4), (3, 2, 0), (0, 4)], ids=str)
    def test_other_shapes_are_refused(self, shape):
        with pytest.raises(ValueError, match=re.escape(f"[times, layers, experts]: got shape {shape}")):
            eqx_moe.plot_load(np.ones(shape))

    @pytest.mark.parametrize("steps", [[1, 2], [[1, 2, 3]], 5])
    def test_steps_of_another_length_are_refused(self, steps):
        with pytest.raises(ValueError, match="times: load has 3"):
            eqx_moe.plot_load(self.load, steps=steps)

    def test_missing_matplotlib_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"eqx_moe\[plot\]"):
            eqx_moe.plot_load(self.load)
