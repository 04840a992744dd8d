"""The grouped matmul as users call it."""

from jaxtyping import Array, Float, Int

from .._grouping import Grouping
from ._auto import AutoGroupedMatmul
from ._base import AbstractGroupedMatmul, Product, Side
from ._primitive import bind_product


def grouped_matmul(
    lhs: Float[Array, "rows d_in"],
    rhs: Float[Array, "experts d_in d_out"],
    sizes: Int[Array, " experts"],
    *,
    matmul: AbstractGroupedMatmul = AutoGroupedMatmul(),
) -> Float[Array, "rows d_out"]:
    """Multiplies every group of rows by its own matrix.

    ```python
    rows, weights = jnp.ones((5, 2)), jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
    eqx_moe.grouped_matmul(rows, weights, jnp.array([1, 3]))
    # row 0 times weights[0], rows 1 to 3 times weights[1], row 4 belongs to no group: zero
    ```

    Linear in `lhs` and in `rhs`, differentiable in both modes, and folded under `jax.vmap`.

    **Arguments:**

    - `lhs`: `[rows, d_in]`, the rows of group 0 first, then those of group 1, and so on.
    - `rhs`: `[experts, d_in, d_out]`, of the dtype of `lhs`.
    - `sizes`: int, `[experts]`, with `0 <= sizes` and `sum(sizes) <= rows` (not checked: traced).
    - `matmul`: the kernel, an [`eqx_moe.AbstractGroupedMatmul`][].

    **Returns:** `[rows, d_out]`, of the dtype of `lhs`, summed in at least float32. Rows past `sum(sizes)` are exactly
    zero and pass no gradient, whatever `lhs` holds there; the gradient of an empty group's matrix is exactly zero.

    **Raises:** `ValueError` if the dtypes differ.
    """
    check_dtypes(lhs, rhs)
    return bind_product(Product.NN, matmul, lhs, rhs, sizes)


def gathered_matmul(
    x: Float[Array, "tokens d_in"],
    rhs: Float[Array, "experts d_in d_out"],
    grouping: Grouping,
    *,
    matmul: AbstractGroupedMatmul = AutoGroupedMatmul(),
) -> Float[Array, "rows d_out"]:
    """`grouped_matmul(dispatch(x, grouping), rhs, grouping.sizes)`, keeping `x` instead of its `rows` copies for the
    backward pass, which gathers them again; a kernel that gathers while it loads never writes them.

    **Arguments:**

    - `x`: `[tokens, d_in]`.
    - `rhs`: `[experts, d_in, d_out]`, of the dtype of `x`.
    - `grouping`: an [`eqx_moe.Grouping`][] of the same tokens and experts.
    - `matmul`: the kernel, an [`eqx_moe.AbstractGroupedMatmul`][].

    **Returns:** `[rows, d_out]`, as [`eqx_moe.grouped_matmul`][] does.

    **Raises:** `ValueError` if the dtypes differ.
    """
    check_dtypes(x, rhs)
    return _gathered(x, rhs, grouping.order, grouping.position, grouping.sizes, matmul)


def _gathered(
    x: Float[Array, "tokens d_in"],
    rhs: Float[Array, "experts d_in d_out"],
    order: Int[Array, " rows"],
    position: Int[Array, "tokens k"],
    sizes: Int[Array, " experts"],
    matmul: AbstractGroupedMatmul,
) -> Float[Array, "rows d_out"]:
    return bind_product(Product.NN, matmul, x, rhs, sizes, (order, position), Side.A)


def combined_matmul(
    rows: Float[Array, "rows d_in"],
    rhs: Float[Array, "experts d_in d_out"],
    grouping: Grouping,
    *,
    matmul: AbstractGroupedMatmul = AutoGroupedMatmul(),
) -> Float[Array, "tokens d_out"]:
    """`combine(grouped_matmul(rows, rhs, grouping.sizes), grouping)`, whose backward pass gathers the tokens'
    cotangents inside the two products that need them; a kernel that gathers while it loads never writes their copies.

    **Arguments:**

    - `rows`: `[rows, d_in]`.
    - `rhs`: `[experts, d_in, d_out]`, of the dtype of `rows`.
    - `grouping`: an [`eqx_moe.Grouping`][] of the same rows and experts.
    - `matmul`: the kernel, an [`eqx_moe.AbstractGroupedMatmul`][].

    **Returns:** `[tokens, d_out]`, as [`eqx_moe.combine`][] does.

    **Raises:** `ValueError` if the dtypes differ.
    """
    check_dtypes(rows, rhs)
    return _combined(rows, rhs, grouping.order, grouping.position, grouping.sizes, matmul)


def _combined(
    rows: Float[Array, "rows d_in"],
    rhs: Float[Array, "experts d_in d_out"],
    order: Int[Array, " rows"],
    position: Int[Array, "tokens k"],
    sizes: Int[Array, " experts"],
    matmul: AbstractGroupedMatmul,
) -> Float[Array, "tokens d_out"]:
    return bind_product(Product.NN, matmul, rows, rhs, sizes, (order, position), Side.OUT)


def check_dtypes(lhs: Array, rhs: Array) -> None:
    """Raises `ValueError` unless both operands of a product have one dtype."""
    if lhs.dtype != rhs.dtype:
        raise ValueError(f"both operands must have one dtype: got {lhs.dtype} and {rhs.dtype}; cast one of them")
