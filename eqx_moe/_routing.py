"""Routing: from router logits to the experts of every token and their weights."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32


class Routing(eqx.Module):
    """Which experts every token goes to, and with what weight.

    - `experts`: int32, `[tokens, k]`; the ids of a token are distinct and in `range(num_experts)`, or all of them are
      `num_experts` if the token is routed nowhere. A rule of your own may do otherwise: an id out of range is routed
      nowhere, and one that is repeated is computed, weighted and counted each time. (Expert parallelism has buffers
      for distinct ids: what does not fit is counted as overflow, or served by the rounds of `Overflow.EXACT`.)
    - `weights`: float32, `[tokens, k]`; what each expert's output is multiplied by.
    - `num_experts`: a Python integer.
    """

    experts: Int32[Array, "tokens k"]
    weights: Float32[Array, "tokens k"]
    num_experts: int = eqx.field(static=True)


class AbstractRoutingRule(eqx.Module):
    """From the logits of the router to a [`eqx_moe.Routing`][].

    A rule of your own needs an integer field `k` and `__call__`; override `probabilities` if its scores are not a
    softmax. Keep all fields static, so that it has no leaves, compares by value and never retraces.
    """

    k: eqx.AbstractVar[int]

    @abc.abstractmethod
    def __call__(
        self, logits: Float32[Array, "tokens experts"], *, bias: Float32[Array, " experts"] | None = None
    ) -> Routing:
        """Chooses the experts.

        **Arguments:**

        - `logits`: float32, `[tokens, experts]`; may hold NaN and infinities.
        - `bias`: float32, `[experts]`; added to the scores for the selection, never to the weights, and without
          gradient.

        **Returns:** an [`eqx_moe.Routing`][] over all of the `experts`.
        """

    def probabilities(self, logits: Float32[Array, "tokens experts"]) -> Float32[Array, "tokens experts"]:
        """How likely each expert is for each token, as the balance losses need it; every row sums to 1."""
        return jax.nn.softmax(logits, axis=-1)


def mask_routing(routing: Routing, mask: Bool[Array, " tokens"]) -> Routing:
    """Routes the tokens where `mask` is false nowhere: their ids become `num_experts` and their weights 0.

    **Arguments:**

    - `routing`: an [`eqx_moe.Routing`][].
    - `mask`: bool, `[tokens]`; true for the tokens to keep.

    **Returns:** an [`eqx_moe.Routing`][] of the same sizes.
    """
    return _mask(mask[:, None], routing.experts, routing.weights, routing.num_experts)


def router_logits(
    x: Float[Array, "tokens d_model"],
    weight: Float[Array, "d_model experts"],
    bias: Float[Array, " experts"] | None = None,
    *,
    soft_cap: float | int | None = None,
) -> Float32[Array, "tokens experts"]:
    """`x @ weight + bias`, in float32 whatever the dtypes.

    **Arguments:**

    - `x`: `[tokens, d_model]`.
    - `weight`: `[d_model, experts]`.
    - `bias`: `[experts]`, a learned bias of the logits (not the selection bias).
    - `soft_cap`: if given, the logits become `soft_cap * tanh(logits / soft_cap)`
      ([arXiv:2408.00118](https://arxiv.org/abs/2408.00118)).

    **Returns:** float32, `[tokens, experts]`.

    **Raises:** `ValueError` if `soft_cap` is not positive.
    """
    check_soft_cap(soft_cap)
    wide = jnp.float32
    # On a CPU XLA refuses bfloat16 products of an inner width of 1, and they are no faster.
    if x.dtype == jnp.bfloat16 and jax.default_backend() == "gpu" and min(*x.shape, weight.shape[1]) >= 16:
        logits = _product_of_bfloat16(x, weight)
    else:
        logits = jnp.matmul(x.astype(wide), weight.astype(wide), precision=lax.Precision.HIGHEST)
    if bias is not None:
        logits = logits + bias.astype(wide)[None]
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


@jax.custom_jvp
def _product_of_bfloat16(
    x: Float[Array, "tokens d_model"], weight: Float[Array, "d_model experts"]
) -> Float32[Array, "tokens experts"]:
    """`x @ weight` for `x` in bfloat16, whose products with a bfloat16 weight are exact in float32. Another weight is
    the sum of two bfloat16 numbers to 2**-17, so that three such products are a float32 one to 3e-6."""
    if weight.dtype == jnp.bfloat16:
        return jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    wide = jnp.float32
    return jnp.matmul(x.astype(wide), weight.astype(wide), precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3)


@_product_of_bfloat16.defjvp
def _(primals, tangents):
    # Its transposes are the cotangents, each of which is rounded to the dtype of what it belongs to: so is that of the
    # logits before a product whose result is bfloat16.
    (x, weight), (dx, dweight) = primals, tangents
    along_x = jnp.matmul(dx, weight.astype(x.dtype)).astype(jnp.float32)
    if weight.dtype == jnp.bfloat16:
        along_weight = jnp.matmul(x, dweight).astype(jnp.float32)
    else:
        along_weight = _product_of_bfloat16(x, dweight)
    return _product_of_bfloat16(x, weight), along_x + along_weight


def jitter(x: Float[Array, "*batch d_model"], amount: float | int, *, key: Array) -> Float[Array, "*batch d_model"]:
    """Multiplies `x` by independent uniform noise in `[1 - amount, 1 + amount]`, as Switch Transformers does to the
    router's input while training ([arXiv:2101.03961](https://arxiv.org/abs/2101.03961)). Pass float32: in bfloat16 the
    noise is rounded to steps of 0.004.

    **Arguments:**

    - `x`: `[..., d_model]`.
    - `amount`: at least 0 and below 1.
    - `key`: for the noise.

    **Returns:** `[..., d_model]`, of the dtype of `x`.

    **Raises:** `ValueError` if `amount` does not lie in `[0, 1)`.
    """
    check_jitter(amount)
    return x * jax.random.uniform(key, x.shape, x.dtype, 1 - amount, 1 + amount)


def known_or_none(experts: Int32[Array, "tokens k"], num_experts: int) -> Int32[Array, "tokens k"]:
    """The ids, with `num_experts` for all that are out of range: a rule of one's own may write -1 for "nowhere"."""
    return jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)


def check_soft_cap(soft_cap: float | int | None) -> None:
    """Raises `ValueError` unless `soft_cap` is positive or `None`."""
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive")


def check_jitter(amount: float | int) -> None:
    """Raises `ValueError` unless `amount` keeps the sign of what it multiplies."""
    if not 0 <= amount < 1:
        raise ValueError(f"jitter={amount} must lie in [0, 1)")


def _mask(
    mask: Bool[Array, "tokens 1"], experts: Int[Array, "tokens k"], weights: Float[Array, "tokens k"], num_experts: int
) -> Routing:
    return Routing(jnp.where(mask, experts, num_experts), jnp.where(mask, weights, 0), num_experts)
