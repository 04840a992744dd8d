"""What a layer did with its tokens, as one pytree of sums, and what can be read off it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from ._routing import Routing, known_or_none


class MoEStats(eqx.Module):
    """Sums over the tokens of one call of a layer.

    All fields are sums, so statistics of several layers, micro-batches or devices are added up field by field
    ([`eqx_moe.total_stats`][]); `jax.lax.scan` and `jax.vmap` put axes in front. `probability` and `squared_lse` carry
    gradients: the balance losses are made from them.

    - `load`: int32, `[experts]`; assignments to every expert.
    - `probability`: float32, `[experts]`; the routing rule's probabilities, summed over tokens.
    - `squared_lse`: float32; the squared log-sum-exp of the logits, summed over tokens.
    - `tokens`: int32; tokens that were routed.
    - `masked`: int32; tokens that were masked out.
    - `nonfinite`: int32; routed tokens with a NaN or an infinity among their logits. They are not hidden: NaN logits
      make `probability`, `squared_lse` and the losses made from them NaN too.
    - `overflow`: int32; assignments that were dropped because a buffer of bounded size was full. Always 0 without
      expert parallelism.
    """

    load: Int32[Array, "*batch experts"]
    probability: Float32[Array, "*batch experts"]
    squared_lse: Float32[Array, "*batch"]
    tokens: Int32[Array, "*batch"]
    masked: Int32[Array, "*batch"]
    nonfinite: Int32[Array, "*batch"]
    overflow: Int32[Array, "*batch"]


def routing_stats(
    logits: Float[Array, "tokens experts"],
    probabilities: Float[Array, "tokens experts"],
    load: Int[Array, " experts"],
    *,
    mask: Bool[Array, " tokens"] | None = None,
) -> MoEStats:
    """The statistics of one routing.

    **Arguments:**

    - `logits`: `[tokens, experts]`, of the router.
    - `probabilities`: `[tokens, experts]`, as [`eqx_moe.AbstractRoutingRule`][]`.probabilities` gives them.
    - `load`: `[experts]`; a [`eqx_moe.Grouping`][] has it as `sizes`, and [`eqx_moe.expert_load`][] counts it.
    - `mask`: bool, `[tokens]`; false for tokens that count nowhere, whatever their logits are. (Where these may be NaN,
      zero the masked tokens before the router, as [`eqx_moe.MoE`][] does, to keep NaN out of gradients too.)

    **Returns:** an [`eqx_moe.MoEStats`][].
    """
    tokens = logits.shape[0]
    if mask is not None:
        logits = jnp.where(mask[:, None], logits, 0)
        probabilities = jnp.where(mask[:, None], probabilities, 0)
    squared_lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) ** 2
    if mask is not None:
        squared_lse = jnp.where(mask, squared_lse, 0)
    kept = jnp.asarray(tokens, jnp.int32) if mask is None else mask.sum(dtype=jnp.int32)
    return MoEStats(
        load=load.astype(jnp.int32),
        probability=probabilities.astype(jnp.float32).sum(axis=0),
        squared_lse=squared_lse.sum(),
        tokens=kept,
        masked=tokens - kept,
        nonfinite=(~jnp.isfinite(logits).all(axis=-1)).sum(dtype=jnp.int32),
        overflow=jnp.zeros((), jnp.int32),
    )


def expert_load(routing: Routing) -> Int32[Array, " experts"]:
    """How many assignments every expert has; tokens that are routed nowhere count for none.

    **Arguments:**

    - `routing`: an [`eqx_moe.Routing`][].

    **Returns:** int32, `[experts]`.
    """
    experts = known_or_none(routing.experts, routing.num_experts).reshape(-1)
    return jnp.zeros(routing.num_experts, jnp.int32).at[experts].add(1, mode="drop")


def total_stats(stats: MoEStats, *, axis_name: str | tuple[str, ...] | None = None) -> MoEStats:
    """Sums statistics over their leading axes, and over devices. (Those of two calls: `jax.tree.map(jnp.add, a, b)`.)

    **Arguments:**

    - `stats`: with any number of leading axes, as `jax.vmap` or `jax.lax.scan` leave them.
    - `axis_name`: mesh axes inside `jax.shard_map`; only these sums travel between devices.

    **Returns:** an [`eqx_moe.MoEStats`][] without leading axes.
    """
    leading = tuple(range(stats.tokens.ndim))
    total = jax.tree.map(lambda x: x.sum(axis=leading, dtype=x.dtype), stats)
    return total if axis_name is None else lax.psum(total, axis_name)


def check_overflow(stats: MoEStats) -> None:
    """Raises if any assignment was dropped; call it on the host, after the step, so that no device is left waiting in a
    collective operation.

    **Arguments:**

    - `stats`: with any number of leading axes; concrete, so outside of `jax.jit`.

    **Raises:** `OverflowError` with the number of dropped assignments, and the remedy; `ValueError` inside `jax.jit`.
    """
    if isinstance(stats.overflow, Tracer):
        raise ValueError(
            "check_overflow reads numbers, and there are none inside `jax.jit`: return `stats`, and check them outside"
        )
    dropped, served = (int(np.sum(np.asarray(x), dtype=np.int64)) for x in (stats.overflow, stats.load))
    if dropped:
        raise OverflowError(
            f"{dropped} of {served} assignments did not fit into the receive buffers and were dropped: raise "
            "capacity_factor, or use Overflow.EXACT or capacity_factor=None, which drop nothing"
        )


def max_violation(load: Int[Array, "*batch experts"]) -> Float32[Array, "*batch"]:
    """How far the most loaded expert is above the mean, as a share of the mean: MaxVio of
    [arXiv:2408.15664](https://arxiv.org/abs/2408.15664). 0 is perfect balance, `experts - 1` is all on one; 0
    without any load.

    **Arguments:**

    - `load`: int, `[..., experts]`, as [`eqx_moe.MoEStats`][] has it; leading axes are kept.

    **Returns:** float32, `[...]`.
    """
    load = load.astype(jnp.float32)
    total = load.sum(-1)
    return (load.max(-1) * load.shape[-1] - total) / jnp.maximum(total, 1)


def load_entropy(load: Int[Array, "*batch experts"]) -> Float32[Array, "*batch"]:
    """The entropy of the load in units of its maximum `log(experts)`: 1 is perfect balance, 0 is all on one expert.
    With one expert it is 1, without any load 0.

    **Arguments:**

    - `load`: int, `[..., experts]`, as [`eqx_moe.MoEStats`][] has it; leading axes are kept.

    **Returns:** float32, `[...]`.
    """
    share = _shares(load)
    experts = load.shape[-1]
    if experts == 1:
        return share[..., 0]
    return jnp.minimum(jax.scipy.special.entr(share).sum(-1) / np.float32(np.log(experts)), 1)


def dead_experts(load: Int[Array, "*batch experts"]) -> Int32[Array, "*batch"]:
    """How many experts got nothing.

    **Arguments:**

    - `load`: int, `[..., experts]`, as [`eqx_moe.MoEStats`][] has it; leading axes are kept.

    **Returns:** int32, `[...]`.
    """
    return (load == 0).sum(-1, dtype=jnp.int32)


def padding_waste(load: Int[Array, "*batch experts"], block: int) -> Float32[Array, "*batch"]:
    """The share of rows that a kernel working in whole blocks of `block` rows per expert would compute for nothing.

    **Arguments:**

    - `load`: int, `[..., experts]`, as [`eqx_moe.MoEStats`][] has it; leading axes are kept.
    - `block`: a Python integer.

    **Returns:** float32, `[...]`, at least 0 and below 1; 0 without any load.

    **Raises:** `ValueError` if `block` is less than 1.
    """
    if block < 1:
        raise ValueError(f"block={block} must be at least 1")
    computed = ((load + block - 1) // block * block).astype(jnp.float32).sum(-1)
    return jnp.where(computed > 0, 1 - load.astype(jnp.float32).sum(-1) / jnp.maximum(computed, 1), 0)


def _shares(load: Int[Array, "*batch experts"]) -> Float32[Array, "*batch experts"]:
    """Every expert's share of the load; all zero without any load."""
    load = load.astype(jnp.float32)
    return load / jnp.maximum(load.sum(-1, keepdims=True), 1)
