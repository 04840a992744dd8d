"""The router's parameters, and the state that balances it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from ._init import check_positive, float_dtype, scaled_normal
from ._routing import check_jitter, check_soft_cap, jitter, router_logits


class Router(eqx.Module):
    """The linear map from tokens to logits.

    - `weight`: `[d_model, experts]`.
    - `bias`: `[experts]`, a learned bias of the logits, or `None`.
    """

    weight: Float[Array, "d_model experts"]
    bias: Float[Array, " experts"] | None
    jitter: float | int = eqx.field(static=True)
    soft_cap: float | int | None = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        use_bias: bool = False,
        jitter: float | int = 0.0,
        soft_cap: float | int | None = None,
        dtype: DTypeLike = jnp.float32,
        key: Array,
    ):
        """**Arguments:**

        - `d_model`, `num_experts`: sizes.
        - `use_bias`: whether the logits have a learned bias, which starts at zero.
        - `jitter`: amount of multiplicative noise on the input, applied when the router is called with a key.
        - `soft_cap`: bound of the logits, or `None`.
        - `dtype`: of the parameters; the product is computed in float32 whatever it is.
        - `key`: for the initialisation, normal with variance `1 / d_model`.
        """
        check_positive(d_model=d_model, num_experts=num_experts)
        dtype = float_dtype("dtype", dtype)
        check_jitter(jitter)
        check_soft_cap(soft_cap)
        self.weight = scaled_normal(key, (d_model, num_experts), d_model, dtype)
        self.bias = jnp.zeros(num_experts, dtype) if use_bias else None
        self.jitter = jitter
        self.soft_cap = soft_cap

    def __call__(
        self, x: Float[Array, "tokens d_model"], *, key: Array | None = None
    ) -> Float32[Array, "tokens experts"]:
        """Logits in float32. `key`: turns the jitter on."""
        if key is not None and self.jitter > 0:
            x = jitter(x.astype(jnp.float32), self.jitter, key=key)
        return router_logits(x, self.weight, self.bias, soft_cap=self.soft_cap)


class SelectionBias(eqx.Module):
    """The bias of aux-loss-free balancing: state, not a parameter. It changes which experts are selected, never the
    weights, and gets no gradient; keep it from the optimiser with [`eqx_moe.trainable`][].

    - `value`: float32, `[experts]`.
    """

    value: Float32[Array, " experts"]


def trainable(tree):
    """A pytree of booleans of the same structure: false for the leaves of every [`eqx_moe.SelectionBias`][], true else.

    ```python
    params, state = eqx.partition(model, eqx_moe.trainable(model))  # gradients and optimiser for `params` alone
    ```

    **Arguments:**

    - `tree`: any pytree, such as a model with layers in it.

    **Returns:** the booleans, in the structure of `tree`.
    """
    is_state = lambda node: isinstance(node, SelectionBias)
    mark = lambda node: jax.tree.map(lambda _: not is_state(node), node)
    return jax.tree.map(mark, tree, is_leaf=is_state)
