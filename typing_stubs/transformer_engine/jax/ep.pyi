# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.ep).
import jax.numpy as jnp
from jax.typing import DTypeLike

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
