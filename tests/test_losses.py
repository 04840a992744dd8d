"""Balance losses and bias updates: closed forms, gradients, and the same numbers on one device and on eight."""

import functools as ft
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eqx_moe

from .helpers import assert_close, assert_equal

SEQUENCES, LENGTH, EXPERTS = 16, 5, 6

LOSSES = {
    "load_balance": eqx_moe.load_balance_loss,
    "sequence_balance": eqx_moe.sequence_balance_loss,
    "router_z": eqx_moe.router_z_loss,
}
RULE = eqx_moe.SoftmaxTopK(k=2)


def stats_of(logits, mask=None, rule: eqx_moe.AbstractRoutingRule = RULE):
    routing = rule(logits)
    routing = routing if mask is None else eqx_moe.mask_routing(routing, mask)
    return eqx_moe.routing_stats(logits, rule.probabilities(logits), eqx_moe.expert_load(routing), mask=mask)


def make_stats(load, probability, tokens, squared_lse=0.0):
    """Statistics with the given load and summed probabilities."""
    load, probability = jnp.array(load, jnp.int32), jnp.array(probability, jnp.float32)
    batch = load.shape[:-1]
    zero = jnp.zeros(batch, jnp.int32)
    tokens = jnp.broadcast_to(jnp.array(tokens, jnp.int32), batch)
    return eqx_moe.MoEStats(load, probability, jnp.full(batch, squared_lse, jnp.float32), tokens, zero, zero, zero)


def operands():
    """Logits of all sequences, and a mask that leaves every device another number of tokens, two of them none."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(SEQUENCES, LENGTH, EXPERTS)) * 2, jnp.float32)
    lengths = np.array([5, 3, 0, 0, 1, 0, 2, 5, 4, 4, 0, 0, 5, 5, 0, 2])
    return logits, jnp.array(np.arange(LENGTH) < lengths[:, None])


def loss_of(name, logits, mask, **options):
    return LOSSES[name](jax.vmap(stats_of)(logits, mask), **options)


@ft.partial(jax.jit, static_argnames="name")
def loss_and_gradient(name, logits, mask):
    return jax.value_and_grad(lambda z: loss_of(name, z, mask))(logits)


def reference_balance(logits, mask):
    """`E sum_e f_e P_e` over the unmasked tokens, in float64."""
    logits = np.asarray(logits, np.float64)[np.asarray(mask)]
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : RULE.k]
    share = np.bincount(chosen.reshape(-1), minlength=EXPERTS) / chosen.size
    # The share is constant, so the gradient is that of the probabilities' softmax alone.
    gradient = probability * (share - probability @ share[:, None]) * EXPERTS / len(logits)
    return EXPERTS * (share * probability.mean(0)).sum(), gradient


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("layers", [(), (5,), (2, 3)], ids=str)
def test_balance_of_uniform_routing_is_exactly_one(k, layers):
    stats = make_stats(np.full((*layers, 8), 5 * k), np.full((*layers, 8), 5.0), 40)
    assert eqx_moe.load_balance_loss(stats).item() == 1
    if layers:
        assert eqx_moe.sequence_balance_loss(stats).item() == 1


@pytest.mark.parametrize("experts", [3, 7, 48])
def test_balance_of_uniform_routing_is_one_for_other_numbers_of_experts(experts):
    """The probabilities `1 / experts` are rounded there, and so is the loss."""
    stats = make_stats([2] * experts, [0.0] * experts, experts)
    probability = jnp.full((experts, experts), 1 / experts).sum(0)
    stats = eqx_moe.MoEStats(stats.load, probability, stats.squared_lse, stats.tokens, *[stats.masked] * 3)
    assert_close(eqx_moe.load_balance_loss(stats), 1.0)


def test_balance_of_real_uniform_routing_is_exactly_one():
    """A router that likes every expert as much as any other, over tokens that took turns."""
    load = eqx_moe.expert_load(
        eqx_moe.Routing(jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 8, jnp.full((8, 2), 0.5), 8)
    )
    stats = eqx_moe.routing_stats(jnp.zeros((8, 8)), jax.nn.softmax(jnp.zeros((8, 8))), load)
    assert eqx_moe.load_balance_loss(stats).item() == 1


@pytest.mark.parametrize("experts", [1, 2, 7, 8])
def test_balance_of_all_on_one_expert_is_the_number_of_experts(experts):
    logits = jnp.full((9, experts), -1e9).at[:, -1].set(0)
    stats = jax.jit(lambda z: stats_of(z, rule=eqx_moe.SoftmaxTopK(k=1)))(logits)
    assert eqx_moe.load_balance_loss(stats).item() == experts


@pytest.mark.parametrize("experts", [1, 2, 7, 128])
def test_z_loss_of_zero_logits_is_the_squared_logarithm(experts):
    stats = jax.jit(lambda z: stats_of(z, rule=eqx_moe.SoftmaxTopK(k=1)))(jnp.zeros((9, experts)))
    loss = eqx_moe.router_z_loss(stats)
    # A handful of float32 roundings of the logarithm, its square and the mean.
    assert loss.item() == pytest.approx(math.log(experts) ** 2, rel=1e-6, abs=0)


@pytest.mark.parametrize("name", LOSSES)
def test_without_tokens_it_is_zero_and_so_is_its_gradient(name):
    logits = operands()[0]
    mask = jnp.zeros((SEQUENCES, LENGTH), bool)
    loss, gradient = loss_and_gradient(name, logits, mask)
    assert_equal((loss, gradient), (jnp.zeros(()), jnp.zeros_like(logits)))


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_do_not_count_whatever_they_hold(name):
    logits, mask = operands()
    poisoned = jnp.where(mask[..., None], logits, jnp.nan)
    for actual, expected in zip(*(loss_and_gradient(name, z, mask) for z in (poisoned, logits)), strict=True):
        assert_equal(actual if actual.ndim == 0 else actual[mask], expected if expected.ndim == 0 else expected[mask])


@pytest.mark.parametrize("name", ["load_balance", "router_z"])
def test_masking_equals_leaving_out(name):
    logits, mask = operands()
    few = jax.jit(jax.value_and_grad(lambda z: LOSSES[name](stats_of(z))))(logits[mask])
    loss, gradient = loss_and_gradient(name, logits, mask)
    assert_close((loss, gradient[mask]), few)
    assert_equal(gradient[~mask], jnp.zeros_like(gradient[~mask]))


def test_load_balance_equals_the_reference_in_value_and_gradient():
    logits, mask = operands()
    loss, gradient = loss_and_gradient("load_balance", logits, mask)
    value, expected = reference_balance(logits, mask)
    assert_close((loss, gradient[mask]), (value, expected))


def test_sequence_balance_equals_the_mean_over_sequences_that_have_tokens():
    logits, mask = operands()
    loss, gradient = loss_and_gradient("sequence_balance", logits, mask)
    busy = [i for i in range(SEQUENCES) if mask[i].any()]
    assert 0 < len(busy) < SEQUENCES
    each = [reference_balance(logits[i], mask[i]) for i in busy]
    assert_close(loss, np.mean([value for value, _ in each]))
    assert_close(gradient[mask], np.concatenate([d_logits for _, d_logits in each]) / len(busy))


def test_z_loss_equals_the_reference_in_value_and_gradient():
    logits, mask = operands()
    loss, gradient = loss_and_gradient("router_z", logits, mask)
    kept = np.asarray(logits, np.float64)[np.asarray(mask)]
    lse = np.log(np.exp(kept).sum(-1, keepdims=True))
    assert_close(loss, (lse**2).mean())
    assert_close(gradient[mask], 2 * lse * np.exp(kept - lse) / len(kept))


@pytest.mark.parametrize("name", ["load_balance", "router_z"])
def test_layers_and_micro_batches_are_summed_before_the_loss(name):
    logits, mask = operands()
    micro_batches = logits.reshape(2, 8 * LENGTH, EXPERTS), mask.reshape(2, 8 * LENGTH)

    @jax.jit
    def run(micro_batches):
        _, stacked = jax.lax.scan(lambda _, args: (None, stats_of(*args)), None, micro_batches)
        return LOSSES[name](stacked), LOSSES[name](jax.tree.map(lambda x: x[0] + x[1], stacked))

    stacked, added = run(micro_batches)
    assert_close((stacked, added), [loss_and_gradient(name, logits, mask)[0]] * 2)


def test_sequence_balance_needs_sequences():
    with pytest.raises(ValueError, match="no leading axis"):
        eqx_moe.sequence_balance_loss(make_stats([1, 2], [1.0, 2.0], 3))


@pytest.mark.parametrize(
    "name, axis_type", [*((name, AxisType.Auto) for name in LOSSES), ("router_z", AxisType.Explicit)]
)
def test_eight_devices_equal_one_with_all_reduces_of_sums_alone(name, axis_type):
    logits, mask = operands()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))

    def local(logits, mask):
        return jax.value_and_grad(lambda z: loss_of(name, z, mask, axis_name="data"))(logits)

    body = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")), check_vma=True)
    placed = jax.device_put((logits, mask), jax.NamedSharding(mesh, P("data")))
    program = jax.jit(body).lower(*placed).compile()
    assert_close(program(*placed), loss_and_gradient(name, logits, mask))
    collectives = re.findall(
        r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
        program.as_text() or "",
    )
    assert {kind for _, kind in collectives} == {"all-reduce"}
    sizes = [math.prod(map(int, filter(None, shape.split(",")))) for s, _ in collectives for shape in arrays_in(s)]
    assert sizes and max(sizes) <= EXPERTS


def arrays_in(shapes):
    """The dimensions of every array in an HLO shape: `(s32[6]{0}, f32[])` gives `6` and nothing."""
    return re.findall(r"\w+\[([\d,]*)\]", shapes)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_taken_outside_of_the_devices_are_the_same(name):
    logits, mask = operands()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    local = lambda z, mask: loss_of(name, z, mask, axis_name=("data",))
    loss = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=True)
    assert_close(jax.jit(jax.grad(loss))(logits, mask), loss_and_gradient(name, logits, mask)[1])


UPDATES = [eqx_moe.sign_bias_update, eqx_moe.proportional_bias_update]
update_ids = ["sign", "proportional"]


class TestBiasUpdate:
    bias = jnp.array([0.5, -0.25, 0.0, 1.0])

    def test_sign(self):
        new = eqx_moe.sign_bias_update(self.bias, jnp.array([0, 10, 11, 19]), rate=0.125)
        assert_equal(new, self.bias + jnp.array([0.125, 0.0, -0.125, -0.125]))

    def test_proportional(self):
        new = eqx_moe.proportional_bias_update(self.bias, jnp.array([0, 8, 4, 20]), rate=0.125)
        assert_equal(new, self.bias + 0.125 * jnp.array([1.0, 0.0, 0.5, -1.5]))

    @pytest.mark.parametrize("update", UPDATES, ids=update_ids)
    @pytest.mark.parametrize("experts, load", [(4, 0), (4, 1), (3, 7), (3, 2**24 + 1), (3, 2**24 + 3), (4, 2**29)])
    def test_balance_changes_nothing(self, update, experts, load):
        """Also where float32 cannot hold the load, nor int32 the sum of the loads."""
        bias = self.bias[:experts]
        assert_equal(update(bias, jnp.full(experts, load, jnp.int32), rate=0.1), bias)

    @pytest.mark.parametrize("mean", [10, 2**24 + 8, 2**29])
    def test_one_assignment_off_the_mean_is_seen(self, mean):
        load = jnp.array([mean, mean + 1, mean - 1, mean], jnp.int32)
        new = eqx_moe.sign_bias_update(jnp.zeros(4), load, rate=0.5)
        assert_equal(new, jnp.array([0.0, -0.5, 0.5, 0.0]))

    @pytest.mark.parametrize("update", UPDATES, ids=update_ids)
    def test_no_load_changes_nothing(self, update):
        assert_equal(update(self.bias, jnp.zeros(4, jnp.int32), rate=0.1), self.bias)

    @pytest.mark.parametrize("update", UPDATES, ids=update_ids)
    def test_keeps_the_dtype(self, update):
        for dtype in (jnp.float32, jnp.bfloat16):
            assert update(self.bias.astype(dtype), jnp.array([1, 2, 3, 4]), rate=0.1).dtype == dtype

    def test_accumulated_loads_take_one_step(self):
        """The sign of the sum is not the sum of the signs: here they point in opposite directions."""
        micro_batches = jnp.array([[9, 11, 10, 10], [9, 11, 10, 10], [18, 2, 10, 10]])
        stats = make_stats(micro_batches, jnp.zeros((3, 4)), 20)
        once = eqx_moe.sign_bias_update(jnp.zeros(4), eqx_moe.total_stats(stats).load, rate=1.0)
        each = sum((eqx_moe.sign_bias_update(jnp.zeros(4), load, rate=1.0) for load in micro_batches), jnp.zeros(4))
        assert_equal((once, each), (jnp.array([-1.0, 1, 0, 0]), jnp.array([1.0, -1, 0, 0])))

    @pytest.mark.parametrize("update, rate", list(zip(UPDATES, [0.01, 0.02], strict=True)), ids=update_ids)
    def test_balances_a_skewed_router(self, update, rate):
        rule = eqx_moe.SigmoidTopK(k=2)
        skew = jnp.linspace(-1.5, 1.5, 8)

        def step(bias, key):
            load = eqx_moe.expert_load(rule(jax.random.normal(key, (512, 8)) + skew[None], bias=bias))
            return update(bias, load, rate=rate), eqx_moe.max_violation(load)

        keys = jax.random.split(jax.random.key(0), 200)
        _, violation = jax.jit(lambda: jax.lax.scan(step, jnp.zeros(8), keys))()
        assert violation[0] > 1
        assert violation[-50:].mean() < 0.2
