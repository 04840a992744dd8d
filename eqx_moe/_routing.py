"""Routing: from router logits to the experts of every token and their weights."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

# The name under which the chosen experts are known to `jax.checkpoint` policies.
EXPERT_IDS = "moe_expert_ids"


class Routing(eqx.Module):
    """Which experts every token goes to, and with what weight.

    - `experts`: int32, `[tokens, k]`; the ids of a token are distinct and in `range(num_experts)`, or all of them are
      `num_experts` if the token is routed nowhere.
    - `weights`: float32, `[tokens, k]`; what each expert's output is multiplied by.
    - `num_experts`: a Python integer.
    """

    experts: Int32[Array, "tokens k"]
    weights: Float32[Array, "tokens k"]
    num_experts: int = eqx.field(static=True)


class GroupLimit(eqx.Module):
    """Group-limited selection: only the experts of the best groups can be chosen.

    With one group of experts per node, this bounds the nodes a token is sent to. DeepSeek-V3 scores a group by the
    sum of its two best experts (`best=2`, [arXiv:2412.19437](https://arxiv.org/abs/2412.19437)), DeepSeek-V2 by its
    best one (`best=1`, [arXiv:2405.04434](https://arxiv.org/abs/2405.04434)).

    **Arguments:**

    - `num_groups`: the experts are split into this many groups of consecutive ids.
    - `top_groups`: groups chosen per token.
    - `best`: how many of a group's best scores are added up to score it.
    """

    num_groups: int = eqx.field(static=True)
    top_groups: int = eqx.field(static=True)
    best: int = eqx.field(static=True, default=2)

    def __check_init__(self):
        if not 0 < self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups={self.top_groups} must lie between 1 and num_groups={self.num_groups}")
        if self.best < 1:
            raise ValueError(f"best={self.best} must be at least 1")


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


def select_experts(
    scores: Float[Array, "tokens experts"],
    k: int,
    *,
    bias: Float[Array, " experts"] | None = None,
    groups: GroupLimit | None = None,
) -> Int32[Array, "tokens k"]:
    """The ids of the `k` best scores of every token, best first; ties go to the lowest id.

    The ids are valid and distinct whatever the scores: NaN counts as the worst. They carry no gradient, and their name
    for `jax.checkpoint` policies is `eqx_moe.EXPERT_IDS`.

    **Arguments:**

    - `scores`: `[tokens, experts]`.
    - `k`: a Python integer.
    - `bias`: `[experts]`, added to the scores.
    - `groups`: an [`eqx_moe.GroupLimit`][], or `None` for none.

    **Returns:** int32, `[tokens, k]`.

    **Raises:** `ValueError` if `k` or the groups do not fit the number of experts.
    """
    experts = scores.shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k={k} must lie between 1 and experts={experts}")
    scores = lax.stop_gradient(scores if bias is None else scores + bias[None])
    # Finite, so that the minus infinities below stand for "not to be chosen" alone.
    limit = jnp.finfo(scores.dtype).max
    scores = jnp.clip(jnp.where(jnp.isnan(scores), -limit, scores), -limit, limit)
    if groups is not None:
        scores = _keep_best_groups(scores, k, groups)
    return checkpoint_name(lax.platform_dependent(scores, **_top_k_by_platform(k)), EXPERT_IDS)


def mask_routing(routing: Routing, mask: Bool[Array, " tokens"]) -> Routing:
    """Routes the tokens where `mask` is false nowhere: their ids become `num_experts` and their weights 0.

    **Arguments:**

    - `routing`: an [`eqx_moe.Routing`][].
    - `mask`: bool, `[tokens]`; true for the tokens to keep.
    """
    return _mask(mask[:, None], routing.experts, routing.weights, routing.num_experts)


def router_logits(
    x: Float[Array, "tokens d_model"],
    weight: Float[Array, "d_model experts"],
    bias: Float[Array, " experts"] | None = None,
    *,
    soft_cap: float | None = None,
) -> Float32[Array, "tokens experts"]:
    """`x @ weight + bias`, in float32 whatever the dtypes.

    **Arguments:**

    - `x`: `[tokens, d_model]`.
    - `weight`: `[d_model, experts]`.
    - `bias`: `[experts]`, a learned bias of the logits (not the selection bias).
    - `soft_cap`: if given, the logits become `soft_cap * tanh(logits / soft_cap)`
      ([arXiv:2408.00118](https://arxiv.org/abs/2408.00118)).

    **Returns:** float32, `[tokens, experts]`.
    """
    wide = jnp.float32
    logits = jnp.matmul(x.astype(wide), weight.astype(wide), precision=lax.Precision.HIGHEST)
    if bias is not None:
        logits = logits + bias.astype(wide)[None]
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def jitter(x: Float[Array, "*batch d_model"], amount: float, *, key: Array) -> Float[Array, "*batch d_model"]:
    """Multiplies `x` by independent uniform noise in `[1 - amount, 1 + amount]`, as Switch Transformers does to the
    router's input while training ([arXiv:2101.03961](https://arxiv.org/abs/2101.03961))."""
    return x * jax.random.uniform(key, x.shape, x.dtype, 1 - amount, 1 + amount)


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")


def _mask(
    mask: Bool[Array, "tokens 1"], experts: Int[Array, "tokens k"], weights: Float[Array, "tokens k"], num_experts: int
) -> Routing:
    return Routing(jnp.where(mask, experts, num_experts), jnp.where(mask, weights, 0), num_experts)


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


def _keep_best_groups(scores: Array, k: int, groups: GroupLimit) -> Array:
    """Minus infinity for the experts outside the best groups."""
    tokens, experts = scores.shape
    if experts % groups.num_groups:
        raise ValueError(f"experts={experts} cannot be split into num_groups={groups.num_groups} equal groups")
    width = experts // groups.num_groups
    if k > groups.top_groups * width:
        raise ValueError(f"k={k} experts cannot be chosen from top_groups={groups.top_groups} of {width} experts each")
    grouped = scores.reshape(tokens, groups.num_groups, width)
    best = lax.top_k(grouped, min(groups.best, width))[0] if groups.best > 1 else grouped.max(-1, keepdims=True)
    chosen = lax.top_k(best.sum(-1), groups.top_groups)[1]
    allowed = jax.nn.one_hot(chosen, groups.num_groups, dtype=bool).any(axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)


def _top_k_by_platform(k: int) -> dict[str, Callable[[Array], Array]]:
    """What to run where, as measured: for 16384 tokens and 128 experts `lax.top_k` / `k` passes took, for k of 1, 2, 4
    and 8, 7.5/4.5, 11/9, 16/19, 28/37 ms on two CPU cores and 0.15/0.07, 0.17/0.08, 0.16/0.11, 0.19/0.15 on an H200."""
    passes = lambda scores: _top_k_by_passes(scores, k)
    whole = lambda scores: lax.top_k(scores, k)[1].astype(jnp.int32)
    few = {"cpu": 2, "cuda": 8}
    return {platform: passes if k <= most else whole for platform, most in few.items()} | {"default": whole}


def _top_k_by_passes(scores: Array, k: int) -> Array:
    """`k` passes, each of which takes the best expert and strikes it out."""
    ids = []
    for _ in range(k):
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        ids.append(best)
        scores = jnp.where(jnp.arange(scores.shape[-1], dtype=jnp.int32)[None] == best[:, None], -jnp.inf, scores)
    return jnp.stack(ids, axis=-1)
