"""What lives between the forward and the backward pass: the tokens, the pre-activation and the routing."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal

import eqx_moe

from .helpers import make_moe, normal

TOKENS, D_MODEL, D_FF = 64, 32, 16
D_SHARED, D_LATENT = 24, 8


def bytes_kept(moe, x, apply=None) -> int:
    """Bytes of the residuals of `jax.vjp` of the layer that are not its own parameters or `x`, each counted once."""
    apply = apply or (lambda moe, x: moe(x)[0])
    program = jax.make_jaxpr(lambda moe, x: jax.tree.leaves(jax.vjp(apply, moe, x)[1]))(moe, x).jaxpr
    residuals = {v for v in program.outvars if not isinstance(v, Literal)} - {*program.invars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in residuals)


def allowance(dtype, *, k, experts) -> int:
    """The pre-activation, at most twelve numbers of the routing per assignment, and the experts' sizes."""
    rows = TOKENS * k
    return rows * 2 * D_FF * jnp.dtype(dtype).itemsize + rows * 48 + 4 * experts


def build(experts=4, k=2, dtype="float32", **options):
    return make_moe(D_MODEL, D_FF, experts, k=k, dtype=jnp.dtype(dtype), matmul=eqx_moe.RaggedDot(), **options)


def tokens(dtype="float32"):
    return normal(TOKENS, D_MODEL, dtype=dtype)


DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]


@pytest.mark.parametrize("experts, k", [(4, 1), (4, 2), (16, 2), (64, 8)])
@pytest.mark.parametrize("parameters, dtype", DTYPES)
def test_layer_keeps_the_pre_activation_and_the_routing(parameters, dtype, experts, k):
    moe = build(experts, k, parameters)
    kept = bytes_kept(moe, tokens(dtype))
    assert kept >= TOKENS * k * 2 * D_FF * jnp.dtype(dtype).itemsize  # the pre-activation at least: it is measured
    assert kept <= allowance(dtype, k=k, experts=experts)


@pytest.mark.parametrize("parameters, dtype", DTYPES)
def test_what_is_kept_does_not_grow_with_the_experts(parameters, dtype):
    few, many = (bytes_kept(build(experts, 2, parameters), tokens(dtype)) for experts in (4, 64))
    assert many - few == 4 * (64 - 4)  # the sizes, int32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options, numbers",
    [
        ({"selection_bias": True, "router_bias": True}, 0),
        ({"expert_bias": True}, 0),
        ({"activation": eqx_moe.GELU()}, -2 * D_FF),  # no gate: half the pre-activation, for two experts
        ({"d_shared": D_SHARED}, 2 * D_SHARED),  # the shared experts' pre-activation
        ({"d_shared": D_SHARED, "shared_gate": True}, 2 * D_SHARED),
        ({"d_latent": D_LATENT}, 2 * D_LATENT),  # the tokens in the latent width, before and after the experts
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_options_keep_no_more_than_they_must(options, numbers, dtype):
    """`numbers` per token more than without options; no casted parameters, which are float32."""
    extra = bytes_kept(build(**options), tokens(dtype)) - bytes_kept(build(), tokens(dtype))
    assert extra <= TOKENS * numbers * jnp.dtype(dtype).itemsize


def keeps_rows(moe, x):
    """The layer from the library's own pieces, but with dispatched rows."""
    routing, grouping, _ = moe.route(x)
    weights, experts = eqx_moe.row_weights(routing, grouping), moe.experts
    rows = eqx_moe.dispatch(x, grouping)
    return eqx_moe.combine(
        eqx_moe.grouped_mlp(rows, grouping.sizes, experts.w_gate_up, experts.w_down, weights=weights), grouping
    )


def keeps_activation(moe, x):
    """The layer from the library's own pieces, but with the activation outside of any rematerialisation."""
    routing, grouping, _ = moe.route(x)
    weights, experts = eqx_moe.row_weights(routing, grouping), moe.experts
    w_gate_up = experts.w_gate_up.reshape(*experts.w_gate_up.shape[:2], -1)
    h = eqx_moe.gathered_matmul(x, w_gate_up, grouping).reshape(-1, 2, D_FF)
    rows = eqx_moe.grouped_matmul(experts.activation(h) * weights[:, None], experts.w_down, grouping.sizes)
    return eqx_moe.combine(rows, grouping)


def test_under_vmap_no_more_is_kept():
    apply = lambda moe, x: jax.vmap(lambda x: moe(x)[0])(x.reshape(4, -1, D_MODEL)).reshape(x.shape)
    kept = bytes_kept(build(), tokens(), apply)
    # Besides, the permutations that fold the examples: twelve numbers per assignment. The activation would be sixteen.
    assert kept <= allowance("float32", k=2, experts=4) + 4 * 12 * TOKENS * 2


@pytest.mark.parametrize("fat", [keeps_rows, keeps_activation])
def test_a_layer_that_keeps_more_is_caught(fat):
    """The proof that the tests above can fail."""
    assert bytes_kept(build(), tokens(), fat) > allowance("float32", k=2, experts=4)


def scratch_per_layer(apply, experts) -> float:
    """By how much the scratch memory of a compiled training step grows with each layer of a scan."""

    def loss(layers, x):
        y, _ = jax.lax.scan(lambda x, layer: (x + apply(layer, x), None), x, layers)
        return (y * y).sum()

    def scratch(depth):
        layers = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((depth, *leaf.shape), leaf.dtype), build(experts))
        analysis = jax.jit(jax.grad(loss, (0, 1))).lower(layers, tokens()).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    return (scratch(6) - scratch(2)) / 4


@pytest.mark.parametrize("experts, mask", [(4, None), (32, None), (4, jnp.arange(TOKENS) > 3)], ids=["4", "32", "mask"])
def test_compiled_scan_over_layers_grows_by_the_same(experts, mask):
    """By that and one copy of the tokens, masked or not.

    In float32, because on CPU the compiler may keep wider copies of bfloat16 arrays.
    """
    limit = allowance("float32", k=2, experts=experts) + TOKENS * D_MODEL * 4
    assert scratch_per_layer(lambda layer, x: layer(x, mask=mask)[0], experts) <= limit


def test_compiled_scan_over_layers_that_keep_more_is_caught():
    limit = allowance("float32", k=2, experts=4) + TOKENS * D_MODEL * 4
    assert scratch_per_layer(keeps_rows, 4) > limit
