"""Meshes of 8 virtual CPU devices, layers divided among them, and how these are held against one device."""

import functools as ft

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import eqx_moe
from eqx_moe import Overflow, Width

from .helpers import SEVERAL, assert_close, make_moe, normal, value_and_gradients

ALONE, DATA, THREE = {"expert": 8}, {"data": 2, "expert": 4}, {"data": 2, "expert": 2, "tensor": 2}
TOKENS, WIDTH, EXPERTS = 64, 8, 8
EXACT = {"capacity_factor": 0.7, "overflow": Overflow.EXACT}
FULL = {"tensor_axis": "tensor", "fsdp_axis": "data"}
# The mesh, the layer's options, and the axes that tokens are sharded over.
COMPOSITIONS = {
    "experts alone": (ALONE, {}, ("expert",)),
    "data x experts": (DATA, {}, ("data", "expert")),
    "chunks": (DATA, {"chunks": 2}, ("data", "expert")),
    "exact rounds": (DATA, EXACT, ("data", "expert")),
    "weights sharded along d_ff": (DATA, {"fsdp_axis": "data"}, ("data", "expert")),
    "weights sharded along d_model": (DATA, {"fsdp_axis": "data", "fsdp_width": Width.D_MODEL}, ("data", "expert")),
    "sequences sharded over tensor": (THREE, {"tensor_axis": "tensor"}, ("data", "expert", "tensor")),
    "tokens whole along tensor": (
        THREE,
        {"tensor_axis": "tensor", "sequence_parallel": False},
        ("data", "expert"),
    ),
    "all at once": (THREE, {**FULL, **EXACT, "chunks": 2}, ("data", "expert", "tensor")),
}
NO_EXCHANGE = {
    "weights sharded alone": (DATA, {"axis": None, "fsdp_axis": "data"}, ("data", "expert")),
    "tensor alone": (THREE, {"axis": None, "tensor_axis": "tensor"}, ("data", "expert", "tensor")),
}


def make_mesh(axes, axis_type=AxisType.Auto):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))


def sharded(moe, mesh, tokens, check_vma=True, apply=lambda moe, x, mask: moe(x, mask=mask)):
    """The layer as a function of all tokens, whose statistics are those of all devices."""

    def body(moe, x, mask):
        y, stats = apply(moe, x, mask)
        return y, eqx_moe.total_stats(stats, axis_name=tokens)

    specs = (eqx_moe.partition_specs(moe), jax.P(tokens), jax.P(tokens))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(jax.P(tokens), jax.P()), check_vma=check_vma)


def without(moe):
    return eqx_moe.with_parallel(moe, None)


X, MASK = normal(TOKENS, WIDTH), jnp.arange(TOKENS) % 7 > 0


@ft.cache
def on_one_device():
    run = jax.jit(lambda *args: value_and_gradients(lambda moe, x, mask: moe(x, mask=mask), *args))
    return run(make_moe(WIDTH, 8, EXPERTS, **SEVERAL), X, MASK)


def check(moe, mesh, tokens, **options):
    run = jax.jit(lambda *args: value_and_gradients(sharded(moe, mesh, tokens, **options), *args))
    actual = run(moe, X, MASK)
    assert_close(actual, on_one_device())
    return actual
