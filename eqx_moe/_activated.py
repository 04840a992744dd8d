"""The weighted activation and the down-projection as one operation, which keeps only what it is given.

Left to automatic differentiation, the activation would live until the backward pass, and that pass would read the
pre-activation three times: for the activation, for its derivative, and for the gradient of the weights. Here two
primitives have one rule each: `activated_matmul_p` has a derivative, which is the linear `tangent_p`, and that has a
transpose, which makes all three in one pass where there is a kernel for it. (Under `jax.vmap` they fall into their
parts, which each fold the batch in their own way, and this pass is not used.)
"""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int

from ._activated_pallas import activation_backward_in_one_pass, can_fuse
from ._activations import AbstractActivation, weighted_activation
from ._matmul._base import AbstractGroupedMatmul, Product, Side
from ._matmul._primitive import bind_product, product_shape
from ._pallas import why_no_pallas
from ._permute import evaluate_compiled
from ._vma import check_unsharded, match_varying, on_the_mesh, reshaped

activated_matmul_p = Primitive("moe_activated_matmul")
tangent_p = Primitive("moe_activated_matmul_tangent")


def activated_matmul(
    h: Float[Array, "rows gates d_ff"],
    weights: Float[Array, " rows"],
    w: Float[Array, "experts d_ff d_model"],
    sizes: Int[Array, " experts"],
    gather: tuple[Array, ...],
    *,
    activation: AbstractActivation,
    matmul: AbstractGroupedMatmul,
) -> Float[Array, "n d_model"]:
    """Every row's activation times its weight, through the row's matrix: `[rows, d_model]`, or combined into
    `[tokens, d_model]` if `gather` is `(order, position)` instead of `()`."""
    check_unsharded(rows=h, weights=w, sizes=sizes)
    operands = match_varying(h, weights, w, sizes.astype(jnp.int32), *gather)
    return activated_matmul_p.bind(*operands, activation=activation, matmul=matmul)


def _project(act, w, sizes, gather, matmul):
    return bind_product(Product.NN, matmul, act, w, sizes, gather, Side.OUT if gather else Side.NONE)


def _apply(h, weights, w, sizes, *gather, activation, matmul):
    return _project(weighted_activation(h, weights, activation), w, sizes, gather, matmul)


def _apply_tangent(h, weights, w, sizes, *rest, directions, activation, matmul):
    """The derivative of `_apply` in those of the directions `h`, `weights`, `w` that are true, the last of `rest`."""
    gather, given = _split(rest, directions)
    dh, dweights, dw = given
    act = weighted_activation(h, weights, activation)
    terms = []
    if dh is not None or dweights is not None:
        zeros = (jnp.zeros_like(x) if d is None else d for x, d in ((h, dh), (weights, dweights)))
        _, dact = jax.jvp(lambda h, weights: weighted_activation(h, weights, activation), (h, weights), tuple(zeros))
        terms.append(_project(dact, w, sizes, gather, matmul))
    if dw is not None:
        terms.append(_project(act, dw, sizes, gather, matmul))
    return ft.reduce(jnp.add, terms)


def _split(rest, directions):
    """`gather`, and the three directions with `None` for those that are not given."""
    count = sum(directions)
    given = iter(rest[len(rest) - count :])
    return tuple(rest[: len(rest) - count]), [next(given) if d else None for d in directions]


def _jvp(primals, tangents, *, activation, matmul):
    out = activated_matmul_p.bind(*primals, activation=activation, matmul=matmul)
    directions = tuple(type(d) is not ad.Zero for d in tangents[:3])
    given = [d for d in tangents[:3] if type(d) is not ad.Zero]
    operands = match_varying(*primals, *given)
    return out, tangent_p.bind(*operands, directions=directions, activation=activation, matmul=matmul)


def _transpose(cotangent, h, weights, w, sizes, *rest, directions, activation, matmul):
    gather, given = _split(rest, directions)
    gather = tuple(jnp.asarray(x) for x in gather)
    wanted = [x is not None and ad.is_undefined_primal(x) for x in given]
    found: list[Array | None] = [None, None, None]
    # Behind a barrier, or the compiler would keep the activation of the forward pass instead.
    h, weights = lax.optimization_barrier((h, weights))
    if wanted[0] or wanted[1]:
        dact = bind_product(Product.NT, matmul, cotangent, w, sizes, gather, Side.A if gather else Side.NONE)
        act, found[0], found[1] = _activation_backward(h, weights, dact, activation)
    else:
        act = weighted_activation(h, weights, activation)
    if wanted[2]:
        found[2] = bind_product(Product.TN, matmul, act, cotangent, sizes, gather, Side.B if gather else Side.NONE)
    kept = [ct if want else None for ct, want, d in zip(found, wanted, directions, strict=True) if d]
    return [None] * (4 + len(gather)) + kept


def _activation_backward(h: Array, weights: Array, dact: Array, activation: AbstractActivation):
    """The weighted activation once more, and the cotangents of the pre-activation and of the weights."""

    @jax.custom_jvp
    def fused(h, weights, dact):
        kernel = ft.partial(activation_backward_in_one_pass, activation=activation)
        return lax.platform_dependent(h, weights, dact, cuda=kernel, default=plain)

    def plain(h, weights, dact):
        act, pull_back = jax.vjp(lambda h, weights: weighted_activation(h, weights, activation), h, weights)
        return act, *pull_back(dact)

    fused.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    fusible = why_no_pallas("cuda") is None and h.size and can_fuse(activation, h.dtype)
    return (fused if fusible else plain)(h, weights, dact)


def _register(primitive: Primitive, apply) -> None:
    @primitive.def_abstract_eval
    def _(h, weights, w, sizes, *rest, activation, matmul, directions=()):
        gather = rest[: len(rest) - sum(directions)]
        rows = jax.ShapeDtypeStruct((h.shape[0], h.shape[2]), h.dtype)
        side = Side.OUT if gather else Side.NONE
        return reshaped(h, product_shape(Product.NN, side, rows, w, sizes, *gather))

    evaluate_compiled(primitive, static_argnames=("activation", "matmul", "directions"))
    mlir.register_lowering(primitive, mlir.lower_fun(on_the_mesh(apply), multiple_results=False))

    def batch(args, dims, **parameters):
        # Its parts fold the batch, each in its own way; rematerialised, so that the activation is not kept either.
        return jax.vmap(jax.checkpoint(ft.partial(apply, **parameters)), in_axes=dims)(*args), 0

    batching.primitive_batchers[primitive] = batch


_register(activated_matmul_p, _apply)
_register(tangent_p, _apply_tangent)
ad.primitive_jvps[activated_matmul_p] = _jvp
ad.primitive_jvps[tangent_p] = lambda primals, tangents, **parameters: jax.jvp(
    ft.partial(_apply_tangent, **parameters),
    tuple(primals),
    tuple(ad.instantiate_zeros(t) for t in tangents),
)
ad.primitive_transposes[tangent_p] = _transpose
