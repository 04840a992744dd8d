"""Top-k in one pass over the scores, for GPUs, in Pallas."""

import functools as ft

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Int32

from ._pallas import iota, out_struct, power_of_two

# Scores that a program holds in registers.
_SCORES = 2048


def top_k_in_one_pass(
    scores: Float32[Array, "tokens experts"], k: int, *, interpret: bool = False
) -> Int32[Array, "tokens k"]:
    """The ids of the `k` best scores of every token, best first, ties to the lowest id; for scores without NaN."""
    tokens, experts = scores.shape
    height = max(1, _SCORES // power_of_two(experts))
    return pl.pallas_call(
        ft.partial(_kernel, k=k, height=height),
        grid=(pl.cdiv(tokens, height),),
        out_shape=out_struct((tokens, k), jnp.int32, scores),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="moe_top_k",
    )(scores)


def _kernel(scores_ref, ids_ref, *, k: int, height: int):
    tokens, experts = scores_ref.shape
    token = pl.program_id(0) * height + iota(height)
    expert = iota(power_of_two(experts))
    choice = iota(power_of_two(k))
    known = (token < tokens)[:, None] & (expert < experts)[None, :]
    scores = plt.load(scores_ref.at[token[:, None], expert[None, :]], mask=known, other=-jnp.inf)
    ids = jnp.zeros((height, choice.shape[0]), jnp.int32)
    left = jnp.broadcast_to((expert < experts)[None, :], scores.shape)  # minus infinity is a score like any other
    for i in range(k):
        highest = jnp.max(jnp.where(left, scores, -jnp.inf), axis=1)[:, None]
        best = jnp.min(jnp.where(left & (scores == highest), expert[None, :], experts), axis=1)[:, None]
        ids = jnp.where(choice[None, :] == i, best, ids)
        left = left & (expert[None, :] != best)
    kept = (token < tokens)[:, None] & (choice < k)[None, :]
    plt.store(ids_ref.at[token[:, None], choice[None, :]], ids, mask=kept)
