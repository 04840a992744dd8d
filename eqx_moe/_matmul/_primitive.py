"""The grouped matmul as one linear JAX primitive; kernels are a static parameter of it.

Its operands are `(a, b, sizes)`, or `(a, b, sizes, order, position)` when the rows of `a` are gathered from tokens.
The transposes of each product are the other two products, so no kernel brings derivatives, and its batching rule
folds the batch into the rows, so that `jax.vmap` costs one larger product and `jax.grad` of it one weight gradient.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from .._permute import (
    batch_first,
    check_indexable,
    combine_rows,
    dispatch_rows,
    evaluate_compiled,
    fold_order,
    invert,
    take_filled,
    token_index,
)
from .._vma import check_unsharded, match_varying, on_the_mesh, reshaped
from ._base import AbstractGroupedMatmul, Problem, Product, group_of_row

grouped_matmul_p = Primitive("moe_grouped_matmul")


def bind_product(
    product: Product,
    matmul: AbstractGroupedMatmul,
    a: ArrayLike,
    b: ArrayLike,
    sizes: ArrayLike,
    gather: tuple[ArrayLike, ...] = (),
) -> Array:
    """Binds the primitive: `gather` is empty or `(order, position)`."""
    check_unsharded(rows=a, weights=b, sizes=sizes)
    operands = match_varying(a, b, jnp.asarray(sizes).astype(jnp.int32), *gather)
    check_indexable(max(x.shape[0] for x in operands), "rows")
    return grouped_matmul_p.bind(*operands, product=product, matmul=matmul)


def _shape(product: Product, a, b, sizes, *gather) -> tuple[int, ...]:
    rows = gather[0].shape[0] if gather else a.shape[0]
    if product is Product.TN:
        return (sizes.shape[0], a.shape[1], b.shape[1])
    return (rows, b.shape[2] if product is Product.NN else b.shape[1])


@grouped_matmul_p.def_abstract_eval
def _abstract(a, b, sizes, *gather, product, matmul):
    return reshaped(a, _shape(product, a, b, sizes, *gather))


evaluate_compiled(grouped_matmul_p, static_argnames=("product", "matmul"))


def _run(a, b, sizes, *gather, product, matmul, platform):
    shape = _shape(product, a, b, sizes, *gather)
    if 0 in (*a.shape, *b.shape, *shape, *(gather[0].shape if gather else ())):
        return match_varying(jnp.zeros(shape, a.dtype), a, b, sizes)[0]
    d_in, d_out = shape[1:] if product is Product.TN else b.shape[1:]
    rows = gather[0].shape[0] if gather else a.shape[0]
    kernel = matmul.resolve(platform, Problem(rows, d_in, d_out, sizes.shape[0], a.dtype))
    index = [token_index(*gather)] if gather else []
    method = ("gathered_" if gather else "") + product.name.lower()
    out = getattr(kernel, method)(a, *index, b, sizes)
    if (out.shape, out.dtype) != (shape, a.dtype):
        told = f"{out.dtype}{list(out.shape)}, and must return {a.dtype}{list(shape)}"
        raise ValueError(f"{kernel}.{method} returned {told}")
    return out


for _platform in ("cpu", "cuda", "rocm", "tpu", None):
    _lowering = mlir.lower_fun(ft.partial(on_the_mesh(_run), platform=_platform or "other"), multiple_results=False)
    mlir.register_lowering(grouped_matmul_p, _lowering, platform=_platform)


def _jvp(primals, tangents, *, product, matmul):
    (a, b, sizes, *gather), (da, db, *_) = primals, tangents
    gather = tuple(gather)
    bind = ft.partial(bind_product, product, matmul, sizes=sizes, gather=gather)
    out = bind(a, b)
    terms = [] if type(da) is ad.Zero else [bind(da, b)]
    terms += [] if type(db) is ad.Zero else [bind(a, db)]
    return out, ft.reduce(jnp.add, terms)


def _transpose(cotangent, a, b, sizes, *gather, product, matmul):
    bind = ft.partial(bind_product, matmul=matmul, sizes=sizes)
    rest = [None] * (1 + len(gather))
    if ad.is_undefined_primal(a):
        if product is Product.TN:
            da = bind(Product.NT, a=b, b=cotangent)
        else:
            da = bind(Product.NT if product is Product.NN else Product.NN, a=cotangent, b=b)
        return [combine_rows(da, *map(jnp.asarray, gather)) if gather else da, None, *rest]
    if product is Product.NT:
        db = bind(Product.TN, a=cotangent, b=a)
    else:
        db = bind(Product.TN if product is Product.NN else Product.NN, a=a, b=cotangent, gather=gather)
    return [None, db, *rest]


def _batch(args, dims, *, product, matmul):
    # Examples that share their weights are joined by expert, others as so many more experts, example after example.
    shared = product is not Product.TN and dims[1] is None
    a, b, sizes, *gather = batch_first(args, dims)
    gather = tuple(gather)
    n, experts = sizes.shape
    rows = gather[0].shape[1] if gather else a.shape[1]
    order, position = _fold_groups(sizes, rows, by_expert=shared)

    def fold(x):
        return dispatch_rows(x.reshape(n * rows, x.shape[2]), order, position)

    if gather:
        a, gather = a.reshape(n * a.shape[1], a.shape[2]), _fold_gather(gather[0], gather[1], order, position)
    else:
        a = fold(a)
    sizes = sizes.sum(0, dtype=sizes.dtype) if shared else sizes.reshape(n * experts)
    if product is Product.TN:
        out = bind_product(product, matmul, a, fold(b), sizes, gather)
        return out.reshape(n, experts, *out.shape[1:]), 0
    b = args[1] if shared else b.reshape(n * experts, *b.shape[2:])
    out = combine_rows(bind_product(product, matmul, a, b, sizes, gather), order, position)
    return out.reshape(n, rows, out.shape[1]), 0


def _fold_gather(
    order: Int[Array, "n rows"],
    position: Int[Array, "n tokens k"],
    folded_order: Int[Array, " folded_rows"],
    folded_position: Int[Array, "folded_rows 1"],
) -> tuple[Array, Array]:
    """The gather of all examples' tokens into rows, followed by the permutation that folds these rows."""
    order, position = fold_order(order, position)
    return (
        take_filled(order, folded_order, fill=position.size),
        take_filled(folded_position[:, 0], position, fill=folded_order.shape[0]),
    )


def _fold_groups(sizes: Int[Array, "n experts"], rows: int, *, by_expert: bool) -> tuple[Array, Array]:
    """The permutation that joins `n` examples' groups of rows, by expert first or by example first, and its inverse.

    Counting is enough: a row's new place is where its group starts plus its place within the group.
    """
    n, experts = sizes.shape
    check_indexable(n * rows, "rows of the batch")
    flat = sizes.T.reshape(-1) if by_expert else sizes.reshape(-1)
    starts = jnp.cumsum(flat, dtype=flat.dtype) - flat
    starts = starts.reshape(experts, n).T if by_expert else starts.reshape(n, experts)
    shift = starts - (jnp.cumsum(sizes, axis=1, dtype=sizes.dtype) - sizes)
    group = jax.vmap(lambda s: group_of_row(rows, s))(sizes)
    moved = jnp.arange(rows, dtype=jnp.int32)[None] + jnp.take_along_axis(
        shift, jnp.minimum(group, experts - 1), axis=1
    )
    position = jnp.where(group < experts, moved, n * rows).astype(jnp.int32).reshape(-1)
    return invert(position, n * rows), position[:, None]


ad.primitive_jvps[grouped_matmul_p] = _jvp
ad.primitive_transposes[grouped_matmul_p] = _transpose
batching.primitive_batchers[grouped_matmul_p] = _batch
