"""Dispatch and combine as an adjoint pair of linear JAX primitives: gathers in both directions, also when batched.

Automatic differentiation of a gather is a scatter-add, which is slow and, on GPUs, not deterministic. The two maps here
are each other's transpose and both know the permutation *and* its inverse, so neither direction scatters.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from ._dtypes import accumulator
from ._permute_pallas import dispatch_by_token, pays
from ._vma import check_unsharded, match_varying, on_the_mesh, reshaped


def take_rows(x: Float[Array, "tokens d_in"], index: Int[Array, "*n"]) -> Float[Array, "*n d_in"]:
    """`x[index]`, with zeros where `index` is out of range."""
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def take_filled(x: Int[Array, " n"], index: Int[Array, "..."], fill: int) -> Int[Array, "..."]:
    """`x[index]`, with `fill` where `index` is out of range."""
    return x.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def invert(position: Int[Array, " n"], size: int) -> Int[Array, "{size}"]:
    """The inverse of an injective map into `range(size)`: `size` stands for "none", in the argument and the result."""
    index = jnp.arange(position.shape[0], dtype=position.dtype)
    # Places past the end are dropped; they differ from each other because the scatter is promised unique places.
    place = jnp.where(position < size, position, size + index)
    none = jnp.full(size, size, position.dtype)
    return none.at[place].set(index, mode="drop", unique_indices=True, wrap_negative_indices=False)


def check_indexable(count: int, what: str) -> None:
    """Raises `ValueError` if `count` things cannot be numbered by int32."""
    if count >= 2**31:
        raise ValueError(f"{what} = {count} does not fit into 32-bit indices (at most {2**31 - 1}): pass fewer at once")


def token_index(order: Int[Array, " rows"], position: Int[Array, "tokens k"]) -> Int[Array, " rows"]:
    """The token each row was made from; `tokens`, which is out of range, for rows that belong to none."""
    return order // max(position.shape[1], 1)


def dispatch_on(
    platform: str, x: Float[Array, "tokens d_in"], order: Int[Array, " rows"], position: Int[Array, "tokens k"]
) -> Float[Array, "rows d_in"]:
    """What [`dispatch_rows`][] computes, as it is lowered for `platform`."""
    if platform == "cuda" and x.size and order.size and pays(x, position):
        return dispatch_by_token(x, order, position)
    return take_rows(x, token_index(order, position))


def _combine(
    platform: str, rows: Float[Array, "rows d_in"], order: Int[Array, " rows"], position: Int[Array, "tokens k"]
) -> Float[Array, "tokens d_in"]:
    del platform, order
    if position.shape[1] == 1:
        return take_rows(rows, position[:, 0])
    # One gather per choice, added as they come: a `tokens k d_in` array never exists.
    wide = accumulator(rows.dtype)
    total = jnp.zeros((position.shape[0], rows.shape[1]), wide)
    for choice in range(position.shape[1]):
        total = total + take_rows(rows, position[:, choice]).astype(wide)
    return total.astype(rows.dtype)


dispatch_p = Primitive("moe_dispatch")
combine_p = Primitive("moe_combine")


def dispatch_rows(
    x: Float[Array, "tokens d_in"], order: Int[Array, " rows"], position: Int[Array, "tokens k"]
) -> Float[Array, "rows d_in"]:
    """Row `r` of the result is token `order[r] // k` of `x`, or zero where `order[r]` is `tokens * k`."""
    return _bind(dispatch_p, x, order, position)


def combine_rows(
    rows: Float[Array, "rows d_in"], order: Int[Array, " rows"], position: Int[Array, "tokens k"]
) -> Float[Array, "tokens d_in"]:
    """Token `t` of the result is the sum of `rows[position[t, j]]` over `j`; a position of `rows` adds nothing."""
    return _bind(combine_p, rows, order, position)


def _bind(primitive: Primitive, values: ArrayLike, order: ArrayLike, position: ArrayLike) -> Array:
    check_unsharded(values=values, order=order, position=position)
    return primitive.bind(*match_varying(values, order, position))


def fold_order(order: Int[Array, "n rows"], position: Int[Array, "n tokens k"]) -> tuple[Array, Array]:
    """Joins `n` permutations into one over all their tokens and rows, example after example."""
    n, rows = order.shape
    assignments = position.shape[1] * position.shape[2]
    check_indexable(n * max(rows, assignments), "rows of the batch")
    example = jnp.arange(n, dtype=order.dtype)
    joined = jnp.where(order >= assignments, n * assignments, order + (example * assignments)[:, None])
    places = jnp.where(position >= rows, n * rows, position + (example * rows)[:, None, None])
    return joined.reshape(n * rows), places.reshape(n * position.shape[1], position.shape[2])


def batch_first(args, dims) -> list[Array]:
    """Every argument with the batch axis in front, repeated where an argument had none."""
    n = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return [
        jnp.broadcast_to(x, (n, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]


def evaluate_compiled(primitive: Primitive, static_argnames: tuple[str, ...] = ()) -> None:
    """Lets eager calls go through `jax.jit`: they compile once per shape and run on their operands' devices."""
    compiled = jax.jit(primitive.bind, static_argnames=static_argnames)

    def evaluate(*operands, **parameters):
        with jax.disable_jit(False):  # or `jax.disable_jit()` would come back here for ever
            return compiled(*operands, **parameters)

    primitive.def_impl(evaluate)


def _register(primitive: Primitive, adjoint: Primitive, apply, shape_of) -> None:
    """Gives one of the pair its evaluation, shape, derivative, transpose and batching rules."""

    def abstract(values, order, position):
        return reshaped(values, shape_of(values, order, position))

    def jvp(primals, tangents):
        (values, order, position), (tangent, *_) = primals, tangents
        return _bind(primitive, values, order, position), _bind(primitive, tangent, order, position)

    def transpose(cotangent, values, order, position):
        assert ad.is_undefined_primal(values)
        return _bind(adjoint, cotangent, order, position), None, None

    def batch(args, dims):
        values, order, position = batch_first(args, dims)
        shape = shape_of(*(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (values, order, position)))
        joined = values.reshape(values.shape[0] * values.shape[1], values.shape[2])
        folded = _bind(primitive, joined, *fold_order(order, position))
        return folded.reshape(order.shape[0], *shape), 0

    primitive.def_abstract_eval(abstract)
    evaluate_compiled(primitive)
    for platform in ("cuda", None):
        lower = on_the_mesh(ft.partial(apply, platform or "other"))
        mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=False), platform=platform)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch


_register(dispatch_p, combine_p, dispatch_on, lambda x, order, position: (order.shape[0], x.shape[1]))
_register(combine_p, dispatch_p, _combine, lambda rows, order, position: (position.shape[0], rows.shape[1]))
