# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.ep).
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .cpp_extensions.ep import EpLayerConfig as EpLayerConfig
from .cpp_extensions.ep import ep_handle_mem_size as ep_handle_mem_size
from .cpp_extensions.ep import ep_prepare as ep_prepare

def ep_bootstrap(
    world_size: int | None,
    rank: int | None,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int,
    hidden_dim: int,
    max_token_dtype: DTypeLike = jnp.bfloat16,
    max_num_sms: int = 0,
    drop_on_overflow: bool = False,
) -> None: ...
def ep_finalize() -> None: ...
def ep_dispatch(
    cfg: EpLayerConfig,
    topk_idx: jax.Array,
    tokens: jax.Array,
    topk_weights: jax.Array,
    recv_capacity_per_rank: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]: ...

# out_sharding holds the entries of a PartitionSpec, such as (("dp", "ep"),); it is no Sharding.
def ep_combine(
    cfg: EpLayerConfig,
    handle_mem: jax.Array,
    token_counts: jax.Array,
    expert_out: jax.Array,
    num_local_tokens: int | tuple[int, ...],
    out_sharding: tuple[str | tuple[str, ...] | None, ...] | None = None,
) -> jax.Array: ...
