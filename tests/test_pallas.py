"""The GPU kernels in Pallas' interpreter, against the plain code that runs elsewhere.

The tiled grouped matmul is among `KERNELS` of the other tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe
from eqx_moe import _grouping_pallas
from eqx_moe._activated_pallas import activation_backward_in_one_pass, can_fuse
from eqx_moe._activations import weighted_activation
from eqx_moe._select_pallas import top_k_in_one_pass

from .helpers import ACTIVATIONS, assert_close, assert_equal, normal

# Tokens, experts, k.
ROUTINGS = [(1, 1, 1), (1, 8, 2), (7, 5, 5), (33, 12, 3), (300, 128, 8), (65, 130, 6)]


@pytest.mark.parametrize("tokens, experts, k", ROUTINGS)
def test_top_k_is_that_of_lax(tokens, experts, k):
    """Whole numbers, so that there are many ties, and minus infinities, which groups leave behind."""
    scores = np.random.default_rng(0).integers(-3, 4, (tokens, experts)).astype(np.float32)
    scores[0, : experts - k] = -np.inf
    scores[-1] = -np.inf
    ids = top_k_in_one_pass(jnp.asarray(scores), k, interpret=True)
    assert_equal(ids, jax.lax.top_k(jnp.asarray(scores), k)[1])


@pytest.mark.parametrize("programs", [2, 1024])
@pytest.mark.parametrize("masked", ["none", "some", "all"])
@pytest.mark.parametrize("tokens, experts, k", ROUTINGS)
def test_counting_groups_as_sorting_does(monkeypatch, tokens, experts, k, masked, programs):
    monkeypatch.setattr(_grouping_pallas, "_PROGRAMS", programs)
    random = np.random.default_rng(0)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :k]
    ids[{"none": slice(0), "some": random.random(tokens) < 0.3, "all": slice(None)}[masked]] = experts
    ids = jnp.asarray(ids, jnp.int32)
    grouping = eqx_moe.group_by_expert(eqx_moe.Routing(ids, jnp.ones(ids.shape), experts))
    counted = _grouping_pallas.group_by_counting(ids, experts, interpret=True)
    assert_equal(counted, (grouping.order, grouping.position, grouping.sizes))


def test_a_token_may_choose_an_expert_twice():
    ids = jnp.array([[1, 1], [0, 1], [2, 2]], jnp.int32)
    grouping = eqx_moe.group_by_expert(eqx_moe.Routing(ids, jnp.ones(ids.shape), 3))
    counted = _grouping_pallas.group_by_counting(ids, 3, interpret=True)
    assert_equal(counted, (grouping.order, grouping.position, grouping.sizes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_pass_of_the_activation(activation, dtype):
    activation = ACTIVATIONS[activation]
    rows, d_ff = 37, 150
    h, weights = normal(rows, activation.gates, d_ff, dtype=dtype), normal(rows, seed=1)
    dact = normal(rows, d_ff, dtype=dtype, seed=2)
    act, pull_back = jax.vjp(lambda h, w: weighted_activation(h, w, activation), h, weights)
    actual = activation_backward_in_one_pass(h, weights, dact, activation=activation, interpret=True)
    assert [x.dtype for x in actual] == [h.dtype, h.dtype, weights.dtype]
    assert_close(actual, (act, *pull_back(dact)), dtype=dtype)


def test_activations_that_triton_does_not_know_are_not_fused():
    assert can_fuse(eqx_moe.SwiGLU(), jnp.dtype("bfloat16"))
    assert can_fuse(eqx_moe.ClampedSwiGLU(), jnp.dtype("float32"))
    assert not can_fuse(eqx_moe.GELU(), jnp.dtype("bfloat16"))  # erf
    assert not can_fuse(eqx_moe.SwiGLU(), jnp.dtype("float64"))
