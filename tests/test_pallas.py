"""The GPU kernels in Pallas' interpreter, against the plain code that runs elsewhere.

The tiled grouped matmul is among `KERNELS` of the other tests.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqx_moe
from eqx_moe import _grouping_pallas, _permute_pallas
from eqx_moe._activated_pallas import activation_backward_in_one_pass, can_fuse
from eqx_moe._activations import weighted_activation
from eqx_moe._permute import dispatch_rows
from eqx_moe._select_pallas import top_k_in_one_pass

from .helpers import ACTIVATIONS, assert_close, assert_equal, make_moe, normal

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


def test_routing_kernels_when_x64_is_enabled(float64):
    ids = jnp.asarray(np.argsort(np.random.default_rng(0).random((33, 12)), axis=1)[:, :3], jnp.int32)
    order, position, sizes = _grouping_pallas.group_by_counting(ids, 12, interpret=True)
    assert order.dtype == position.dtype == sizes.dtype == jnp.int32
    grouping = eqx_moe.group_by_expert(eqx_moe.Routing(ids, jnp.ones(ids.shape, jnp.float32), 12))
    assert_equal((order, position, sizes), (grouping.order, grouping.position, grouping.sizes))
    scores = jnp.asarray(np.random.default_rng(0).random((33, 12)), jnp.float32)
    assert_equal(top_k_in_one_pass(scores, 3, interpret=True), jax.lax.top_k(scores, 3)[1])


def test_a_token_may_choose_an_expert_twice():
    ids = jnp.array([[1, 1], [0, 1], [2, 2]], jnp.int32)
    grouping = eqx_moe.group_by_expert(eqx_moe.Routing(ids, jnp.ones(ids.shape), 3))
    counted = _grouping_pallas.group_by_counting(ids, 3, interpret=True)
    assert_equal(counted, (grouping.order, grouping.position, grouping.sizes))


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("tokens, experts, k", ROUTINGS)
def test_dispatch_by_token_is_a_gather_of_rows(tokens, experts, k, holes):
    """With tokens that are routed nowhere, and with empty rows anywhere, as cells of fixed size have them."""
    random = np.random.default_rng(0)
    rows = 2 * tokens * k + 3 if holes else tokens * k
    position = random.permutation(rows)[: tokens * k].reshape(tokens, k)
    position = np.where(random.random((tokens, k)) < 0.2, rows, position)
    order = np.full(rows, tokens * k)
    order[position[position < rows]] = np.arange(tokens * k).reshape(tokens, k)[position < rows]
    x, order, position = normal(tokens, 700), jnp.asarray(order, jnp.int32), jnp.asarray(position, jnp.int32)
    copied = _permute_pallas.dispatch_by_token(x, order, position, interpret=True)
    assert_equal(copied, dispatch_rows(x, order, position))


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
    assert not can_fuse(Captures(), jnp.dtype("bfloat16"))


SLOPE = jnp.asarray(1.702)


class Captures(eqx_moe.AbstractActivation):
    """An activation with an array from outside, which Pallas does not take."""

    gates: ClassVar[int] = 1

    def of_parts(self, up):
        return up * jax.nn.sigmoid(SLOPE * up)


class TestOnAGPUThatIsNotHere:
    """The layer lowered for an NVIDIA GPU, with the kernels, on a machine without one."""

    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch):
        if jax.__version_info__ >= (0, 12):
            pytest.skip("from jax 0.12 on, Pallas asks the GPU itself what it is when it lowers a kernel")
        for module in ("_select", "_grouping", "_activated", "_matmul._tiled"):
            monkeypatch.setattr(
                f"eqx_moe.{module}.why_no_pallas", lambda platform: None if platform == "cuda" else "no"
            )

    @staticmethod
    def lower(step, *args) -> str:
        return jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_inside_shard_map(self, check_vma):
        moe, x = make_moe(), normal(16, 8)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        whole, split = PartitionSpec(), PartitionSpec("data")
        run = jax.shard_map(
            lambda moe, x: moe(x)[0], mesh=mesh, in_specs=(whole, split), out_specs=split, check_vma=check_vma
        )
        program = self.lower(jax.grad(lambda moe, x: run(moe, x).sum()), moe, x)
        for kernel in ("moe_top_k", "moe_place", "moe_tiled_rows", "moe_tiled_weights", "moe_activation_backward"):
            assert kernel in program

    def test_when_x64_is_enabled(self, float64):
        program = self.lower(jax.grad(lambda moe, x: moe(x)[0].sum()), make_moe(), normal(16, 8))
        assert "moe_place" in program

    def test_is_chosen(self):
        choice = eqx_moe.AutoGroupedMatmul()
        sizes = {"rows": 64, "d_in": 8, "d_out": 16, "experts": 4, "dtype": jnp.bfloat16}
        assert choice.select(platform="cuda", **sizes).matmul == eqx_moe.TiledDot()
        assert choice.select(platform="rocm", **sizes).matmul == eqx_moe.BlockedDot((256, 1024))


def test_sizes_that_promise_too_many_rows_write_nothing_past_the_end():
    x, w = normal(4, 16), normal(2, 16, 16)
    out = eqx_moe.TiledDot(interpret=True).nn(x, w, jnp.array([3, 9], jnp.int32))
    assert_close(out, eqx_moe.TiledDot(interpret=True).nn(x, w, jnp.array([3, 1], jnp.int32)))


@pytest.mark.parametrize("tile", [(100, 64, 32, 4, 3), (64, 8, 32, 4, 3)])
def test_impossible_tiles_are_refused(tile):
    with pytest.raises(ValueError, match="must be powers of two of at least 16"):
        eqx_moe.TiledDot(tile=tile)
