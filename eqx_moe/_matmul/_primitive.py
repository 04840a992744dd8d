"""The grouped matmul as one linear JAX primitive; kernels are a static parameter of it.

Its operands are `(a, b, sizes)`, all over rows, or `(a, b, sizes, order, position)` where one side of the product is
over tokens instead: `a` or `b` is then gathered into rows, or the result is combined from them. The transposes of each
product are the other two, with the same side over tokens, so no kernel brings derivatives; its batching rule folds the
batch into the rows, so that `jax.vmap` costs one larger product and `jax.grad` of it one weight gradient.
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
    dispatch_on,
    dispatch_rows,
    evaluate_compiled,
    fold_order,
    invert,
    take_filled,
    token_index,
)
from .._vma import check_unsharded, match_varying, on_the_mesh, reshaped
from ._base import AbstractGroupedMatmul, Problem, Product, Side, group_of_row

grouped_matmul_p = Primitive("moe_grouped_matmul")


# For every product and side over tokens: what the transpose towards `a`, and the one towards `b`, are.
_TRANSPOSES = {
    (Product.NN, Side.NONE): ((Product.NT, Side.NONE), (Product.TN, Side.NONE)),
    (Product.NN, Side.A): ((Product.NT, Side.OUT), (Product.TN, Side.A)),
    (Product.NN, Side.OUT): ((Product.NT, Side.A), (Product.TN, Side.B)),
    (Product.NT, Side.NONE): ((Product.NN, Side.NONE), (Product.TN, Side.NONE)),
    (Product.NT, Side.A): ((Product.NN, Side.OUT), (Product.TN, Side.B)),
    (Product.NT, Side.OUT): ((Product.NN, Side.A), (Product.TN, Side.A)),
    (Product.TN, Side.NONE): ((Product.NT, Side.NONE), (Product.NN, Side.NONE)),
    (Product.TN, Side.A): ((Product.NT, Side.OUT), (Product.NN, Side.A)),
    (Product.TN, Side.B): ((Product.NT, Side.A), (Product.NN, Side.OUT)),
}


def bind_product(
    product: Product,
    matmul: AbstractGroupedMatmul,
    a: ArrayLike,
    b: ArrayLike,
    sizes: ArrayLike,
    gather: tuple[ArrayLike, ...] = (),
    side: Side = Side.NONE,
) -> Array:
    """Binds the primitive: `gather` is `(order, position)` if some side is over tokens, else empty."""
    check_unsharded(rows=a, weights=b, sizes=sizes)
    operands = match_varying(a, b, jnp.asarray(sizes).astype(jnp.int32), *gather)
    check_indexable(max(x.shape[0] for x in operands), "rows")
    return grouped_matmul_p.bind(*operands, product=product, matmul=matmul, side=side)


def product_shape(product: Product, side: Side, a, b, sizes, *gather) -> tuple[int, ...]:
    """The shape of the result."""
    if product is Product.TN:
        return (sizes.shape[0], a.shape[1], b.shape[1])
    rows = gather[1].shape[0] if side is Side.OUT else gather[0].shape[0] if gather else a.shape[0]
    return (rows, b.shape[2] if product is Product.NN else b.shape[1])


@grouped_matmul_p.def_abstract_eval
def _abstract(a, b, sizes, *gather, product, matmul, side):
    return reshaped(a, product_shape(product, side, a, b, sizes, *gather))


evaluate_compiled(grouped_matmul_p, static_argnames=("product", "matmul", "side"))


def _run(a, b, sizes, *gather, product, matmul, side, platform):
    shape = product_shape(product, side, a, b, sizes, *gather)
    rows = gather[0].shape[0] if gather else a.shape[0]
    if 0 in (*a.shape, *b.shape, *shape, rows):
        return match_varying(jnp.zeros(shape, a.dtype), a, b, sizes)[0]
    d_in, d_out = shape[1:] if product is Product.TN else b.shape[1:]
    kernel = matmul.resolve(platform, Problem(rows, d_in, d_out, sizes.shape[0], a.dtype, product, side))
    out = _call(kernel, product, side, a, b, sizes, gather, platform)
    expected = (rows, shape[1]) if side is Side.OUT else shape
    if (out.shape, out.dtype) != (expected, a.dtype):
        told = f"{out.dtype}{list(out.shape)}, and must return {a.dtype}{list(expected)}"
        raise ValueError(f"{kernel}.{product.name.lower()} returned {told}")
    return combine_rows(out, *gather) if side is Side.OUT else out


def _call(kernel, product, side, a, b, sizes, gather, platform):
    """The kernel's method, with rows gathered here if it has none that gathers."""
    plain = product.name.lower()
    method = {Side.A: "gathered_", Side.B: "right_gathered_"}.get(side, "") + plain
    if method == plain:
        return getattr(kernel, plain)(a, b, sizes)
    if getattr(type(kernel), method) is getattr(AbstractGroupedMatmul, method):
        gathered = dispatch_on(platform, b if side is Side.B else a, *gather)
        return getattr(kernel, plain)(*((a, gathered) if side is Side.B else (gathered, b)), sizes)
    index = token_index(*gather)
    return getattr(kernel, method)(*((a, b, index) if side is Side.B else (a, index, b)), sizes)


for _platform in ("cpu", "cuda", "rocm", "tpu", None):
    _lowering = mlir.lower_fun(ft.partial(on_the_mesh(_run), platform=_platform or "other"), multiple_results=False)
    mlir.register_lowering(grouped_matmul_p, _lowering, platform=_platform)


def _jvp(primals, tangents, *, product, matmul, side):
    (a, b, sizes, *gather), (da, db, *_) = primals, tangents
    bind = ft.partial(bind_product, product, matmul, sizes=sizes, gather=tuple(gather), side=side)
    out = bind(a, b)
    terms = [] if type(da) is ad.Zero else [bind(da, b)]
    terms += [] if type(db) is ad.Zero else [bind(a, db)]
    return out, ft.reduce(jnp.add, terms)


def _transpose(cotangent, a, b, sizes, *gather, product, matmul, side):
    to_a, to_b = _TRANSPOSES[product, side]
    bind = lambda to, a, b: bind_product(to[0], matmul, a, b, sizes, tuple(gather), to[1])
    rest = [None] * (1 + len(gather))
    if ad.is_undefined_primal(a):
        # Towards `a` of `x.T @ y`, the other operand takes the rows' place, and the cotangent that of the weights.
        return [bind(to_a, b, cotangent) if product is Product.TN else bind(to_a, cotangent, b), None, *rest]
    db = bind(to_b, cotangent, a) if product is Product.NT else bind(to_b, a, cotangent)
    return [None, db, *rest]


def _batch(args, dims, *, product, matmul, side):
    # Examples that share their weights are joined by expert, others as so many more experts, example after example.
    shared = product is not Product.TN and dims[1] is None
    a, b, sizes, *gather = batch_first(args, dims)
    n, experts = sizes.shape
    rows = gather[0].shape[1] if gather else a.shape[1]
    order, position = _fold_groups(sizes, rows, by_expert=shared)

    def fold(x, over_tokens):
        joined = x.reshape(n * x.shape[1], x.shape[2])
        return joined if over_tokens else dispatch_rows(joined, order, position)

    tokens = gather[1].shape[1] if gather else 0
    gather = _fold_gather(*gather, order, position) if gather else ()
    sizes = sizes.sum(0, dtype=sizes.dtype) if shared else sizes.reshape(n * experts)
    a = fold(a, side is Side.A)
    if product is Product.TN:
        out = bind_product(product, matmul, a, fold(b, side is Side.B), sizes, gather, side)
        return out.reshape(n, experts, *out.shape[1:]), 0
    b = args[1] if shared else b.reshape(n * experts, *b.shape[2:])
    out = bind_product(product, matmul, a, b, sizes, gather, side)
    if side is Side.OUT:
        return out.reshape(n, tokens, out.shape[1]), 0
    return combine_rows(out, order, position).reshape(n, rows, out.shape[1]), 0


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
