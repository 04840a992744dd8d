"""The experts: two grouped matmuls with a weighted activation between them."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ._activated import activated_matmul
from ._activations import AbstractActivation, SwiGLU, check_gates
from ._grouping import Grouping
from ._init import check_positive, float_dtype, scaled_normal
from ._matmul._auto import AutoGroupedMatmul
from ._matmul._base import AbstractGroupedMatmul, Product, Side
from ._matmul._functions import check_dtypes, gathered_matmul, grouped_matmul
from ._matmul._primitive import bind_product
from ._vma import match_varying

# The name under which the experts' pre-activation is known to `jax.checkpoint` policies.
PRE_ACTIVATION = "moe_pre_activation"


def grouped_mlp(
    rows: Float[Array, "rows d_model"],
    sizes: Int[Array, " experts"],
    w_gate_up: Float[Array, "experts d_model gates d_ff"],
    w_down: Float[Array, "experts d_ff d_model"],
    *,
    weights: Float[Array, " rows"] | None = None,
    b_gate_up: Float[Array, "experts gates d_ff"] | None = None,
    b_down: Float[Array, "experts d_model"] | None = None,
    activation: AbstractActivation = SwiGLU(),
    matmul: AbstractGroupedMatmul = AutoGroupedMatmul(),
) -> Float[Array, "rows d_model"]:
    """Every group of rows through its own MLP.

    For the backward pass it keeps `rows`, the pre-activation (named `eqx_moe.PRE_ACTIVATION` for `jax.checkpoint`
    policies) and `weights`; the activation is computed again. (Outside `jax.jit` a copy of `w_gate_up` in the shape of
    the grouped matmul is kept too; [`eqx_moe.Experts`][] keeps none anywhere.)

    **Arguments:**

    - `rows`: `[rows, d_model]`, sorted by expert.
    - `sizes`: int, `[experts]`; rows of every expert.
    - `w_gate_up`: `[experts, d_model, gates, d_ff]`; `gates` is 2 (gate, then up) for gated activations, else 1.
    - `w_down`: `[experts, d_ff, d_model]`.
    - `weights`: `[rows]`; if given, every row of the result is multiplied by its weight. This happens before the
      down-projection, so that the gradient of the weights needs no expert's output.
    - `b_gate_up`, `b_down`: biases, `[experts, gates, d_ff]` and `[experts, d_model]`; cast to the dtype of the rows.
    - `activation`: an [`eqx_moe.AbstractActivation`][].
    - `matmul`: the kernel, an [`eqx_moe.AbstractGroupedMatmul`][].

    **Returns:** `[rows, d_model]`, of the dtype of `rows`; rows past `sum(sizes)` are exactly zero.

    **Raises:** `ValueError` if the dtypes of `rows` and of the matrices differ, or `gates` does not fit the activation.
    """
    check_gates(activation, w_gate_up.shape[2])
    up = grouped_matmul(rows, w_gate_up.reshape(*w_gate_up.shape[:2], -1), sizes, matmul=matmul)
    check_dtypes(rows, w_down)
    return _from_pre_activation(up, sizes, (), w_gate_up, w_down, weights, b_gate_up, b_down, activation, matmul)


def routed_mlp(
    x: Float[Array, "tokens d_model"],
    grouping: Grouping,
    w_gate_up: Float[Array, "experts d_model gates d_ff"],
    w_down: Float[Array, "experts d_ff d_model"],
    *,
    weights: Float[Array, " rows"] | None = None,
    b_gate_up: Float[Array, "experts gates d_ff"] | None = None,
    b_down: Float[Array, "experts d_model"] | None = None,
    activation: AbstractActivation = SwiGLU(),
    matmul: AbstractGroupedMatmul = AutoGroupedMatmul(),
) -> Float[Array, "tokens d_model"]:
    """Every token through the MLPs of its experts: `combine(grouped_mlp(dispatch(x, grouping), ...), grouping)`.

    For the backward pass it keeps `x` instead of its `rows` copies, and kernels that gather while they load never write
    these, nor those of the cotangent.

    **Arguments:**

    - `x`: `[tokens, d_model]`.
    - `grouping`: an [`eqx_moe.Grouping`][] of the same tokens and experts.
    - The rest are those of [`eqx_moe.grouped_mlp`][].

    **Returns:** `[tokens, d_model]`, of the dtype of `x`; zero for tokens that are routed nowhere.

    **Raises:** `ValueError` if the dtypes of `x` and of the matrices differ, or `gates` does not fit the activation.
    """
    check_gates(activation, w_gate_up.shape[2])
    up = gathered_matmul(x, w_gate_up.reshape(*w_gate_up.shape[:2], -1), grouping, matmul=matmul)
    check_dtypes(x, w_down)
    sizes, gather = grouping.sizes, (grouping.order, grouping.position)
    return _from_pre_activation(up, sizes, gather, w_gate_up, w_down, weights, b_gate_up, b_down, activation, matmul)


class Experts(eqx.Module):
    """The experts' parameters.

    - `w_gate_up`: `[experts, d_model, gates, d_ff]`, with `gates` 2 or 1 as the activation needs.
    - `w_down`: `[experts, d_ff, d_model]`.
    - `b_gate_up`, `b_down`: biases, or `None`.
    - `d_ff`: the width of the whole, where `jax.shard_map` has divided the arrays.
    """

    w_gate_up: Float[Array, "experts d_model gates d_ff"]
    w_down: Float[Array, "experts d_ff d_model"]
    b_gate_up: Float[Array, "experts gates d_ff"] | None
    b_down: Float[Array, "experts d_model"] | None
    activation: AbstractActivation
    matmul: AbstractGroupedMatmul
    d_ff: int = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        activation: AbstractActivation = SwiGLU(),
        matmul: AbstractGroupedMatmul = AutoGroupedMatmul(),
        use_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        key: Array,
    ):
        """**Arguments:**

        - `d_model`, `d_ff`, `num_experts`: sizes.
        - `activation`: an [`eqx_moe.AbstractActivation`][].
        - `matmul`: the kernel, an [`eqx_moe.AbstractGroupedMatmul`][].
        - `use_bias`: whether both projections have a bias; biases start at zero.
        - `dtype`: of the parameters.
        - `key`: for the initialisation, normal with variance `1 / fan_in`.
        """
        check_positive(d_model=d_model, d_ff=d_ff, num_experts=num_experts)
        dtype = float_dtype("dtype", dtype)
        up_key, down_key = jax.random.split(key)
        gates = activation.gates
        self.w_gate_up = scaled_normal(up_key, (num_experts, d_model, gates, d_ff), d_model, dtype)
        self.w_down = scaled_normal(down_key, (num_experts, d_ff, d_model), d_ff, dtype)
        self.b_gate_up = jnp.zeros((num_experts, gates, d_ff), dtype) if use_bias else None
        self.b_down = jnp.zeros((num_experts, d_model), dtype) if use_bias else None
        self.activation = activation
        self.matmul = matmul
        self.d_ff = d_ff

    def __call__(
        self,
        x: Float[Array, "tokens d_model"],
        grouping: Grouping,
        weights: Float[Array, " rows"] | None = None,
    ) -> Float[Array, "tokens d_model"]:
        """[`eqx_moe.routed_mlp`][] with these parameters, cast to the dtype of `x`."""
        # Rematerialised around the casts, so that casted copies of the weights do not live until the backward pass.
        policy = jax.checkpoint_policies.save_only_these_names(PRE_ACTIVATION)
        return jax.checkpoint(_cast_and_run, policy=policy)(self, x, grouping, weights)


def _cast_and_run(
    experts: Experts, x: Float[Array, "tokens d_model"], grouping: Grouping, weights: Float[Array, " rows"] | None
) -> Float[Array, "tokens d_model"]:
    # Matched first, so that gradients are summed over devices in the parameters' dtype.
    experts = jax.tree.map(lambda leaf: match_varying(leaf, x)[0], experts)
    return routed_mlp(
        x,
        grouping,
        experts.w_gate_up.astype(x.dtype),
        experts.w_down.astype(x.dtype),
        weights=weights,
        b_gate_up=experts.b_gate_up,
        b_down=experts.b_down,
        activation=experts.activation,
        matmul=experts.matmul,
    )


def _from_pre_activation(
    up: Float[Array, "rows up"],
    sizes: Int[Array, " experts"],
    gather: tuple[Array, ...],
    w_gate_up: Float[Array, "experts d_model gates d_ff"],
    w_down: Float[Array, "experts d_ff d_model"],
    weights: Float[Array, " rows"] | None,
    b_gate_up: Float[Array, "experts gates d_ff"] | None,
    b_down: Float[Array, "experts d_model"] | None,
    activation: AbstractActivation,
    matmul: AbstractGroupedMatmul,
) -> Float[Array, "n d_model"]:
    """`n` are the tokens if `gather` is `(order, position)`, and the rows if it is `()`."""
    weights = jnp.ones(up.shape[0], up.dtype) if weights is None else weights
    if b_gate_up is not None:
        bias = b_gate_up.reshape(b_gate_up.shape[0], up.shape[1])
        up = up + _row_bias(jnp.ones(up.shape[0], up.dtype), bias, sizes, (), matmul)
    h = checkpoint_name(up.reshape(up.shape[0], *w_gate_up.shape[2:]), PRE_ACTIVATION)
    out = activated_matmul(h, weights, w_down, sizes, gather, activation=activation, matmul=matmul)
    if b_down is not None:
        out = out + _row_bias(weights.astype(up.dtype), b_down, sizes, gather, matmul)
    return out


def _row_bias(
    share: Float[Array, " rows"],
    bias: Float[Array, "experts d_out"],
    sizes: Int[Array, " experts"],
    gather: tuple[Array, ...],
    matmul: AbstractGroupedMatmul,
) -> Float[Array, "n d_out"]:
    """`share` times the bias of the row's expert: a grouped matmul of inner width 1, so that its gradient is the same
    deterministic sum per group, and rows of no group get none."""
    bias, side = bias.astype(share.dtype)[:, None, :], Side.OUT if gather else Side.NONE
    return bind_product(Product.NN, matmul, share[:, None], bias, sizes, gather, side)
