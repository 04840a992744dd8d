"""The routing rules in use."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float32, Int32

from ._routing import AbstractRoutingRule, Routing
from ._select import EXPERT_LOGITS, GroupLimit, select_experts


class SoftmaxTopK(AbstractRoutingRule):
    """The `k` experts of the highest softmax probability ([arXiv:2101.03961](https://arxiv.org/abs/2101.03961)).

    **Arguments:**

    - `k`: experts per token.
    - `renormalize`: whether the `k` weights of a token are divided by their sum. With `False` they are the
      probabilities among all experts, as the router needs at `k=1`: a single weight divided by itself has no gradient.
    - `select_on_logits`: whether the selection bias and the groups see the logits instead of the probabilities, and the
      softmax is taken over the chosen logits only (as in Mixtral and gpt-oss). It requires `renormalize=True`, and
      without bias and groups it makes no difference.
    - `scale`: multiplies every weight.
    - `groups`: an [`eqx_moe.GroupLimit`][], or `None` for none.
    """

    k: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True, default=True, kw_only=True)
    select_on_logits: bool = eqx.field(static=True, default=False, kw_only=True)
    scale: float | int = eqx.field(static=True, default=1.0, kw_only=True)
    groups: GroupLimit | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        _check_options(self.k, self.scale)
        if self.select_on_logits and not self.renormalize:
            raise ValueError(
                "select_on_logits=True takes the softmax over the chosen experts, whose weights always sum to 1: "
                "renormalize=False contradicts it"
            )

    def __call__(
        self, logits: Float32[Array, "tokens experts"], *, bias: Float32[Array, " experts"] | None = None
    ) -> Routing:
        # The softmax keeps the order, except where it underflows: only bias and groups need its values.
        on_logits = self.select_on_logits or (bias is None and self.groups is None)
        scores = logits if on_logits else self.probabilities(logits)
        experts = select_experts(scores, self.k, bias=bias, groups=self.groups)
        if self.renormalize:  # the same quotient as dividing the probabilities by their sum, without underflow
            weights = jax.nn.softmax(_chosen(logits, experts), axis=-1)
        else:
            weights = jnp.take_along_axis(self.probabilities(logits), experts, axis=-1)
        return Routing(experts, weights * self.scale, logits.shape[-1])


class SigmoidTopK(AbstractRoutingRule):
    """The `k` experts of the highest sigmoid score, as in DeepSeek-V3 ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437)).

    **Arguments:**

    - `k`: experts per token.
    - `renormalize`: whether the `k` weights of a token are divided by their sum (at `k=1` the router then learns from
      losses of its own only).
    - `scale`: multiplies every weight.
    - `groups`: an [`eqx_moe.GroupLimit`][], or `None` for none.
    """

    k: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True, default=True, kw_only=True)
    scale: float | int = eqx.field(static=True, default=1.0, kw_only=True)
    groups: GroupLimit | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        _check_options(self.k, self.scale)

    def __call__(
        self, logits: Float32[Array, "tokens experts"], *, bias: Float32[Array, " experts"] | None = None
    ) -> Routing:
        return _route_by_score(self, logits, bias, jax.nn.sigmoid, jax.nn.log_sigmoid)

    def probabilities(self, logits: Float32[Array, "tokens experts"]) -> Float32[Array, "tokens experts"]:
        return jax.nn.softmax(jax.nn.log_sigmoid(logits), axis=-1)


class SqrtSoftplusTopK(AbstractRoutingRule):
    """The `k` experts of the highest `sqrt(softplus(logit))`, a score that is smooth, positive and not bounded above.

    **Arguments:**

    - `k`: experts per token.
    - `renormalize`: whether the `k` weights of a token are divided by their sum (at `k=1` the router then learns from
      losses of its own only).
    - `scale`: multiplies every weight.
    - `groups`: an [`eqx_moe.GroupLimit`][], or `None` for none.
    """

    k: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True, default=True, kw_only=True)
    scale: float | int = eqx.field(static=True, default=1.0, kw_only=True)
    groups: GroupLimit | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        _check_options(self.k, self.scale)

    def __call__(
        self, logits: Float32[Array, "tokens experts"], *, bias: Float32[Array, " experts"] | None = None
    ) -> Routing:
        return _route_by_score(self, logits, bias, _sqrt_softplus, _log_sqrt_softplus)

    def probabilities(self, logits: Float32[Array, "tokens experts"]) -> Float32[Array, "tokens experts"]:
        return jax.nn.softmax(_log_sqrt_softplus(logits), axis=-1)


def _check_options(k: int, scale: float | int) -> None:
    if isinstance(k, bool) or k < 1:
        raise ValueError(f"k={k} must be a whole number of at least 1")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite")


def _chosen(logits: Float32[Array, "tokens experts"], experts: Int32[Array, "tokens k"]) -> Float32[Array, "tokens k"]:
    """The logits of the chosen experts, by a name: whoever keeps them need not compute all of them again."""
    return checkpoint_name(jnp.take_along_axis(logits, experts, axis=-1), EXPERT_LOGITS)


def _route_by_score(
    rule: SigmoidTopK | SqrtSoftplusTopK,
    logits: Float32[Array, "tokens experts"],
    bias: Float32[Array, " experts"] | None,
    score: Callable[[Array], Array],
    log_score: Callable[[Array], Array],
) -> Routing:
    """Weights are the chosen scores themselves, whatever bias chose them."""
    experts = select_experts(score(logits), rule.k, bias=bias, groups=rule.groups)
    chosen = _chosen(logits, experts)
    # The softmax of logarithms is the division by the sum, without its underflow at very negative logits.
    weights = jax.nn.softmax(log_score(chosen), axis=-1) if rule.renormalize else score(chosen)
    return Routing(experts, weights * rule.scale, logits.shape[-1])


def _sqrt_softplus(logits: Float32[Array, "tokens n"]) -> Float32[Array, "tokens n"]:
    return jnp.exp(_log_sqrt_softplus(logits))


def _log_sqrt_softplus(logits: Float32[Array, "tokens n"]) -> Float32[Array, "tokens n"]:
    """Half the logarithm of softplus, which is half the logit where softplus is an exponential to float32 precision."""
    small = logits < -20
    return jnp.where(small, logits / 2, jnp.log(jax.nn.softplus(jnp.where(small, 0.0, logits))) / 2)
