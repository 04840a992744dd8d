"""A byte-level, decoder-only transformer whose feed-forward layers are mixtures of experts."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray, UInt8

import eqx_moe

Hidden = Float[Array, "batch tokens d_model"]
Stats = eqx_moe.MoEStats | None
Parallel = eqx_moe.ExpertParallel | None  # if given, the model works inside `jax.shard_map` only


def option(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": f"{meaning} (default: {default})"})


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = option(2, "transformer layers")
    d_model: int = option(64, "width of the model")
    d_ff: int = option(128, "width of one expert")
    heads: int = option(2, "attention heads")
    experts: int = option(16, "experts in every layer")
    top_k: int = option(2, "experts chosen for every byte")
    dense: bool = option(False, "instead of experts, one SwiGLU layer as wide as those chosen for a byte")
    bf16: bool = option(False, "compute in bfloat16; parameters and optimiser state stay in float32")


def normal(key: PRNGKeyArray, *shape: int, fan_in: int) -> Float32[Array, "..."]:
    return jax.random.normal(key, shape) / fan_in**0.5


def rms_norm(x: Hidden, scale: Float32[Array, " d_model"]) -> Hidden:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rotate(x: Float[Array, "batch tokens heads d_head"]) -> Float[Array, "batch tokens heads d_head"]:
    """Rotary position embedding ([arXiv:2104.09864](https://arxiv.org/abs/2104.09864))."""
    tokens, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(tokens)[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


class Attention(eqx.Module):
    query_key_value: Float32[Array, "d_model 3 heads d_head"]
    out: Float32[Array, "heads d_head d_model"]

    def __init__(self, d_model: int, heads: int, *, key: PRNGKeyArray):
        inner, outer = jax.random.split(key)
        self.query_key_value = normal(inner, d_model, 3, heads, d_model // heads, fan_in=d_model)
        self.out = normal(outer, heads, d_model // heads, d_model, fan_in=d_model)

    def __call__(self, x: Hidden) -> Hidden:
        query, key, value = jnp.einsum("btd,dchn->cbthn", x, self.query_key_value.astype(x.dtype))
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return jnp.einsum("bthn,hnd->btd", mixed, self.out.astype(x.dtype))


class SwiGLU(eqx.Module):
    """The dense layer to compare with: a pair like an MoE's, without statistics."""

    gate_up: Float32[Array, "d_model 2 d_ff"]
    down: Float32[Array, "d_ff d_model"]

    def __init__(self, d_model: int, d_ff: int, *, key: PRNGKeyArray):
        inner, outer = jax.random.split(key)
        self.gate_up = normal(inner, d_model, 2, d_ff, fan_in=d_model)
        self.down = normal(outer, d_ff, d_model, fan_in=d_ff)

    def __call__(self, x: Hidden) -> tuple[Hidden, None]:
        gate, up = jnp.einsum("btd,dgf->gbtf", x, self.gate_up.astype(x.dtype))
        return (jax.nn.silu(gate) * up) @ self.down.astype(x.dtype), None


class Block(eqx.Module):
    attention_scale: Float32[Array, " d_model"]
    attention: Attention
    feed_forward_scale: Float32[Array, " d_model"]
    feed_forward: eqx_moe.MoE | SwiGLU

    def __init__(self, shape: Shape, *, parallel: Parallel = None, key: PRNGKeyArray):
        attention_key, key = jax.random.split(key)
        self.attention_scale = jnp.ones(shape.d_model)
        self.attention = Attention(shape.d_model, shape.heads, key=attention_key)
        self.feed_forward_scale = jnp.ones(shape.d_model)
        if shape.dense:
            self.feed_forward = SwiGLU(shape.d_model, shape.d_ff * shape.top_k, key=key)
        else:
            rule = eqx_moe.SoftmaxTopK(k=shape.top_k)
            sizes = shape.d_model, shape.d_ff, shape.experts
            self.feed_forward = eqx_moe.MoE(*sizes, rule=rule, parallel=parallel, key=key)

    def __call__(self, x: Hidden) -> tuple[Hidden, Stats]:
        x = x + self.attention(rms_norm(x, self.attention_scale))
        update, stats = self.feed_forward(rms_norm(x, self.feed_forward_scale))
        return x + update, stats


class LanguageModel(eqx.Module):
    embedding: Float32[Array, "bytes d_model"]
    blocks: Block  # of all layers, stacked: every array has them on its first axis
    scale: Float32[Array, " d_model"]
    head: Float32[Array, "d_model bytes"]
    bf16: bool = eqx.field(static=True)

    def __init__(self, shape: Shape, *, parallel: Parallel = None, key: PRNGKeyArray):
        embedding_key, blocks_key, head_key = jax.random.split(key, 3)
        self.embedding = normal(embedding_key, 256, shape.d_model, fan_in=1)
        make = lambda key: Block(shape, parallel=parallel, key=key)
        self.blocks = eqx.filter_vmap(make)(jax.random.split(blocks_key, shape.layers))
        self.scale = jnp.ones(shape.d_model)
        self.head = normal(head_key, shape.d_model, 256, fan_in=shape.d_model**2)  # small: starts from even odds
        self.bf16 = shape.bf16

    def __call__(self, text: UInt8[Array, "batch tokens"]) -> tuple[Float32[Array, "batch tokens bytes"], Stats]:
        """Logits for the byte after each byte, and the statistics of the layers, stacked like them."""
        x = self.embedding[text.astype(jnp.int32)].astype(jnp.bfloat16 if self.bf16 else jnp.float32)
        x, stats = jax.lax.scan(lambda x, block: block(x), x, self.blocks)
        return (rms_norm(x, self.scale) @ self.head.astype(x.dtype)).astype(jnp.float32), stats
