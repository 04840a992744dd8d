"""Selection: the ids of the best experts of every token."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from ._pallas import why_no_pallas
from ._select_pallas import top_k_in_one_pass

# The names under which the chosen experts and their logits are known to `jax.checkpoint` policies.
EXPERT_IDS = "moe_expert_ids"
EXPERT_LOGITS = "moe_expert_logits"

# Experts whose scores one program can hold.
_WIDEST = 2048


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
    scores = jnp.where(scores == 0, 0.0, scores)  # `lax.top_k` puts -0.0 below 0.0: no tie
    if groups is not None:
        scores = _keep_best_groups(scores, k, groups)
    return checkpoint_name(_top_k(scores, k), EXPERT_IDS)


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


def _top_k(scores: Array, k: int) -> Array:
    """What is fastest where. For 128 experts, 16384 tokens and k of 1, 2, 4, 8, `lax.top_k` / `k` passes took 7.5/4.5,
    11/9, 16/19, 28/37 ms on two CPU cores; for 24576 tokens and k of 8, `lax.top_k` / one pass took 90/16 us on an
    H200."""
    whole = lambda scores: lax.top_k(scores, k)[1].astype(jnp.int32)
    passes = lambda scores: _top_k_by_passes(scores, k)
    branches: dict[str, Callable[[Array], Array]] = {"cpu": passes} if k <= 2 else {}
    if why_no_pallas("cuda") is None and scores.dtype == jnp.float32 and scores.shape[1] <= _WIDEST and scores.size:
        branches["cuda"] = _folded_under_vmap(lambda scores: top_k_in_one_pass(scores, k))
    elif k <= 8:
        branches["cuda"] = passes
    return lax.platform_dependent(scores, **branches, default=whole)


def _folded_under_vmap(select: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Of all examples' tokens at once: Pallas would give every example a grid of its own."""
    select = jax.custom_batching.custom_vmap(select)

    @select.def_vmap
    def _(n: int, _, scores: Array) -> tuple[Array, bool]:
        ids = select(scores.reshape(n * scores.shape[1], scores.shape[2]))
        return ids.reshape(n, scores.shape[1], ids.shape[1]), True

    return select


def _top_k_by_passes(scores: Array, k: int) -> Array:
    """`k` passes, each of which takes the best expert and strikes it out."""
    ids = []
    for _ in range(k):
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        ids.append(best)
        scores = jnp.where(jnp.arange(scores.shape[-1], dtype=jnp.int32)[None] == best[:, None], -jnp.inf, scores)
    return jnp.stack(ids, axis=-1)
