"""Balance: losses that encourage it and bias updates that enforce it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from ._stats import MoEStats, total_stats


def load_balance_loss(stats: MoEStats, *, axis_name: str | tuple[str, ...] | None = None) -> Float32[Array, ""]:
    r"""The load-balance loss of Switch Transformers ([arXiv:2101.03961](https://arxiv.org/abs/2101.03961), eq. 4).

    $E \sum_e f_e P_e$, with $f_e$ the share of all assignments that expert $e$ got and $P_e$ its mean probability over
    tokens. It is 1 for uniform routing, for any `k`, and at most `experts`. Multiply by a small number (0.01).

    **Arguments:**

    - `stats`: an [`eqx_moe.MoEStats`][]; leading axes are summed over first, so that the loss is that of all their
      tokens together. Layers stacked by `jax.lax.scan` have other experts each and should be balanced one by one:
      `jax.vmap(load_balance_loss)(stats).mean()`.
    - `axis_name`: mesh axes inside `jax.shard_map` over which to sum too; only the sums travel. (To differentiate
      inside, leave `check_vma=True`: without it JAX multiplies the gradient of any `psum` by the number of devices.)

    **Returns:** a float32 scalar; 0 without tokens.
    """
    total = total_stats(stats, axis_name=axis_name)
    return _balance(total)


def sequence_balance_loss(stats: MoEStats, *, axis_name: str | tuple[str, ...] | None = None) -> Float32[Array, ""]:
    r"""The load-balance loss of every sequence by itself, averaged ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437),
    eq. 17).

    It needs statistics per sequence, as `y, stats = jax.vmap(moe)(x)` gives them for `x` of shape
    `[sequences, length, d_model]`. Uniform routing within every sequence gives 1.

    **Arguments:**

    - `stats`: an [`eqx_moe.MoEStats`][] with at least one leading axis, each entry a sequence.
    - `axis_name`: mesh axes inside `jax.shard_map` over which other sequences lie, as in
      [`eqx_moe.load_balance_loss`][].

    **Returns:** a float32 scalar; sequences without tokens do not count, and without any it is 0.

    **Raises:** `ValueError` if `stats` has no leading axis.
    """
    if stats.tokens.ndim == 0:
        raise ValueError(
            "sequence_balance_loss needs statistics of every sequence, and these have no leading axis: "
            "call the layer under jax.vmap over the sequences"
        )
    total = _balance(stats).sum()
    sequences = (stats.tokens > 0).sum(dtype=jnp.int32)
    if axis_name is not None:
        total, sequences = lax.psum((total, sequences), axis_name)
    return total / jnp.maximum(sequences, 1).astype(jnp.float32)


def router_z_loss(stats: MoEStats, *, axis_name: str | tuple[str, ...] | None = None) -> Float32[Array, ""]:
    r"""The router z-loss of ST-MoE ([arXiv:2202.08906](https://arxiv.org/abs/2202.08906), eq. 5).

    The mean over tokens of the squared log-sum-exp of their logits; it keeps logits small. All-zero logits give
    $\log^2 E$. Multiply by a small number (0.001).

    **Arguments:**

    - `stats`: an [`eqx_moe.MoEStats`][]; leading axes are summed over first.
    - `axis_name`: mesh axes inside `jax.shard_map` over which to sum too, as in [`eqx_moe.load_balance_loss`][].

    **Returns:** a float32 scalar; 0 without tokens.
    """
    total = total_stats(stats, axis_name=axis_name)
    return total.squared_lse / jnp.maximum(total.tokens, 1).astype(jnp.float32)


def sign_bias_update(
    bias: Float[Array, " experts"], load: Int[Array, " experts"], *, rate: float | int | Float[Array, ""]
) -> Float[Array, " experts"]:
    """One step of aux-loss-free balancing ([arXiv:2408.15664](https://arxiv.org/abs/2408.15664)): the selection bias of
    every expert below the mean load rises by `rate`, that of every expert above it falls.

    Under gradient accumulation add up the loads of the micro-batches (and of the devices) and update once per optimiser
    step: the sign of a sum is not the sum of signs.

    **Arguments:**

    - `bias`: `[experts]`.
    - `load`: int, `[experts]`, of everything since the last update.
    - `rate`: a number or a scalar array; 0.001 is common; the scores it competes with lie between 0 and 1.

    **Returns:** the new bias, of the dtype of the old one.
    """
    return bias + rate * jnp.sign(_shortfall(load)).astype(bias.dtype)


def proportional_bias_update(
    bias: Float[Array, " experts"], load: Int[Array, " experts"], *, rate: float | int | Float[Array, ""]
) -> Float[Array, " experts"]:
    """Like [`eqx_moe.sign_bias_update`][], by `rate` times the shortfall as a share of the mean load.

    **Arguments:**

    - `bias`: `[experts]`.
    - `load`: int, `[experts]`, of everything since the last update.
    - `rate`: a number or a scalar array; the change for an expert without any load.

    **Returns:** the new bias, of the dtype of the old one.
    """
    return bias + rate * _shortfall(load).astype(bias.dtype)


def _balance(stats: MoEStats) -> Float32[Array, "*batch"]:
    experts = stats.load.shape[-1]
    load = stats.load.astype(jnp.float32)
    scale = load.sum(-1) * stats.tokens.astype(jnp.float32)
    return experts * (load * stats.probability).sum(-1) / jnp.maximum(scale, 1)


def _shortfall(load: Int[Array, " experts"]) -> Float32[Array, " experts"]:
    """How far every expert is below the mean load, as a share of the mean; exactly 0 where it is at the mean."""
    experts = load.shape[0]
    # The mean as a whole number and a rest, in integers: its sign is right for any load, and no sum overflows.
    rests = (load % experts).sum(dtype=load.dtype)
    whole = (load // experts).sum(dtype=load.dtype) + rests // experts
    rest = (rests % experts).astype(jnp.float32) / experts
    mean = whole.astype(jnp.float32) + rest
    return ((whole - load).astype(jnp.float32) + rest) / jnp.where(mean > 0, mean, 1)
