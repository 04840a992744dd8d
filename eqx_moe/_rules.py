"""The routing rules in use."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ._routing import AbstractRoutingRule, Routing
from ._select import GroupLimit, select_experts


class SoftmaxTopK(AbstractRoutingRule):
    """The `k` experts of the highest softmax probability ([arXiv:2101.03961](https://arxiv.org/abs/2101.03961)).

    **Arguments:**

    - `k`: experts per token.
    - `renormalize`: whether the `k` weights of a token are divided by their sum. With `False` they are the
      probabilities among all experts.
    - `select_on_logits`: whether the selection bias and the groups see the logits instead of the probabilities, and the
      softmax is taken over the chosen logits only (as in Mixtral and gpt-oss). Without bias and groups this is the same
      as `renormalize=True`, which it requires.
    - `scale`: multiplies every weight.
    - `groups`: an [`eqx_moe.GroupLimit`][], or `None` for none.
    """

    k: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True, default=True, kw_only=True)
    select_on_logits: bool = eqx.field(static=True, default=False, kw_only=True)
    scale: float = eqx.field(static=True, default=1.0, kw_only=True)
    groups: GroupLimit | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        _check_k(self.k)
        if self.select_on_logits and not self.renormalize:
            raise ValueError(
                "select_on_logits=True takes the softmax over the chosen experts, whose weights always sum to 1: "
                "renormalize=False contradicts it"
            )

    def __call__(
        self, logits: Float32[Array, "tokens experts"], *, bias: Float32[Array, " experts"] | None = None
    ) -> Routing:
        scores = logits if self.select_on_logits else self.probabilities(logits)
        experts = select_experts(scores, self.k, bias=bias, groups=self.groups)
        if self.renormalize:  # the same quotient as dividing the probabilities by their sum, without underflow
            weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
        else:
            weights = jnp.take_along_axis(self.probabilities(logits), experts, axis=-1)
        return Routing(experts, weights * self.scale, logits.shape[-1])


class SigmoidTopK(AbstractRoutingRule):
    """The `k` experts of the highest sigmoid score, as in DeepSeek-V3 ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437)).

    **Arguments:**

    - `k`: experts per token.
    - `renormalize`: whether the `k` weights of a token are divided by their sum.
    - `scale`: multiplies every weight.
    - `groups`: an [`eqx_moe.GroupLimit`][], or `None` for none.
    """

    k: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True, default=True, kw_only=True)
    scale: float = eqx.field(static=True, default=1.0, kw_only=True)
    groups: GroupLimit | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        _check_k(self.k)

    def __call__(
        self, logits: Float32[Array, "tokens experts"], *, bias: Float32[Array, " experts"] | None = None
    ) -> Routing:
        return _route_by_score(self, jax.nn.sigmoid(logits), bias)

    def probabilities(self, logits: Float32[Array, "tokens experts"]) -> Float32[Array, "tokens experts"]:
        return _divide_by_sum(jax.nn.sigmoid(logits))


class SqrtSoftplusTopK(AbstractRoutingRule):
    """The `k` experts of the highest `sqrt(softplus(logit))`, a score that is smooth, positive and not bounded above.

    **Arguments:**

    - `k`: experts per token.
    - `renormalize`: whether the `k` weights of a token are divided by their sum.
    - `scale`: multiplies every weight.
    - `groups`: an [`eqx_moe.GroupLimit`][], or `None` for none.
    """

    k: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True, default=True, kw_only=True)
    scale: float = eqx.field(static=True, default=1.0, kw_only=True)
    groups: GroupLimit | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        _check_k(self.k)

    def __call__(
        self, logits: Float32[Array, "tokens experts"], *, bias: Float32[Array, " experts"] | None = None
    ) -> Routing:
        return _route_by_score(self, _sqrt_softplus(logits), bias)

    def probabilities(self, logits: Float32[Array, "tokens experts"]) -> Float32[Array, "tokens experts"]:
        return _divide_by_sum(_sqrt_softplus(logits))


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")


def _route_by_score(rule: SigmoidTopK | SqrtSoftplusTopK, scores: Array, bias: Array | None) -> Routing:
    """Weights are the chosen scores themselves, whatever bias chose them."""
    experts = select_experts(scores, rule.k, bias=bias, groups=rule.groups)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    weights = _divide_by_sum(weights) if rule.renormalize else weights
    return Routing(experts, weights * rule.scale, scores.shape[-1])


def _divide_by_sum(scores: Float32[Array, "tokens n"]) -> Float32[Array, "tokens n"]:
    """Every row divided by its sum; all-zero rows, which very negative logits give, stay zero and without gradient."""
    return scores / jnp.maximum(scores.sum(axis=-1, keepdims=True), 1e-20)


def _sqrt_softplus(logits: Float32[Array, "tokens experts"]) -> Float32[Array, "tokens experts"]:
    """`sqrt(softplus(logits))` without the infinite slope that the square root has at an underflowing softplus."""
    tiny = jnp.finfo(logits.dtype).tiny
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), tiny))
