"""The backward pass of the weighted activation in one pass over its operands, for GPUs, in Pallas."""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array, Float

from ._activations import AbstractActivation
from ._pallas import iota, out_struct

# Rows and columns that a program holds in registers at a time.
_ROWS, _COLUMNS = 16, 128
# What has no translation to Triton, or none that was tried here, keeps an activation out of the kernel.
_KNOWN = {
    *(
        "abs",
        "add",
        "add_any",
        "and",
        "broadcast_in_dim",
        "clamp",
        "convert_element_type",
        "copy",
        "custom_jvp_call",
        "div",
        "eq",
    ),
    *("exp", "exp2", "ge", "gt", "integer_pow", "jit", "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg"),
    *("not", "or", "rsqrt", "select_n", "sign", "sqrt", "square", "sub", "tanh"),
}


def can_fuse(activation: AbstractActivation, dtype: jnp.dtype) -> bool:
    """Whether the kernel below can be compiled with this activation."""
    if dtype == jnp.float64:
        return False
    parts = [jax.ShapeDtypeStruct((_ROWS, _COLUMNS), jnp.float32)] * activation.gates
    program = jax.make_jaxpr(lambda *parts: jax.vjp(activation.of_parts, *parts)[1](parts[0]))(*parts)
    return _primitives(program) <= _KNOWN


def activation_backward_in_one_pass(
    h: Float[Array, "rows gates d_ff"],
    weights: Float[Array, " rows"],
    dact: Float[Array, "rows d_ff"],
    *,
    activation: AbstractActivation,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """The weighted activation, and the cotangents of `h` and `weights` for that of the weighted activation."""
    return pl.pallas_call(
        ft.partial(_kernel, activation=activation),
        grid=(pl.cdiv(h.shape[0], _ROWS),),
        out_shape=tuple(out_struct(x.shape, x.dtype, h) for x in (dact, h, weights)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="moe_activation_backward",
    )(h, weights, dact)


def _kernel(h_ref, weights_ref, dact_ref, act_ref, dh_ref, dweights_ref, *, activation: AbstractActivation):
    rows, gates, d_ff = h_ref.shape
    row = pl.program_id(0) * _ROWS + iota(_ROWS)
    weights = plt.load(weights_ref.at[row], mask=row < rows, other=0).astype(jnp.float32)[:, None]

    def step(i, dweights):
        column = i * _COLUMNS + iota(_COLUMNS)
        mask = (row < rows)[:, None] & (column < d_ff)[None, :]
        at = (row[:, None], column[None, :])
        parts = [
            plt.load(h_ref.at[row[:, None], gate, column[None, :]], mask=mask, other=0).astype(jnp.float32)
            for gate in range(gates)
        ]
        dact = plt.load(dact_ref.at[at], mask=mask, other=0).astype(jnp.float32)
        act, pull_back = jax.vjp(activation.of_parts, *parts)
        plt.store(act_ref.at[at], (act * weights).astype(act_ref.dtype), mask=mask)
        for gate, dpart in enumerate(pull_back(dact * weights)):
            plt.store(dh_ref.at[row[:, None], gate, column[None, :]], dpart.astype(dh_ref.dtype), mask=mask)
        return dweights + jnp.sum(jnp.where(mask, dact * act, 0), axis=1)

    dweights = lax.fori_loop(0, pl.cdiv(d_ff, _COLUMNS), step, jnp.zeros(_ROWS, jnp.float32))
    plt.store(dweights_ref.at[row], dweights.astype(dweights_ref.dtype), mask=row < rows)


def _primitives(program: ClosedJaxpr | Jaxpr) -> set[str]:
    """The names of all primitives in a program and in those that it calls; `"constant"` if any of them captures one."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    found = {eqn.primitive.name for eqn in jaxpr.eqns} | ({"constant"} if jaxpr.constvars else set())
    for eqn in jaxpr.eqns:
        for inner in eqn.params.values():
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                found |= _primitives(inner)
    return found
