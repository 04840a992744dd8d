# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.moe).
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .quantize import QuantizerSet, noop_quantizer_set
from .router import ScoreFunction

def get_moe_recv_capacity_per_rank(
    *,
    num_experts: int,
    num_experts_per_tok: int,
    max_tokens_per_rank: int,
    ep_size: int,
    recv_capacity_factor: float | None = None,
    alignment: int = 128,
) -> int: ...
def moe(
    x: jax.Array,
    gate_kernel: jax.Array,
    wi: jax.Array,
    wo: jax.Array,
    wi_0_bias: jax.Array | None = None,
    wi_1_bias: jax.Array | None = None,
    wo_bias: jax.Array | None = None,
    expert_bias: jax.Array | None = None,
    *,
    num_experts: int,
    num_experts_per_tok: int,
    activation_type: str = "silu",
    score_function: str | ScoreFunction = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    aux_loss_coeff: float = 0.0,
    apply_topk_weights_early: bool = False,
    quantizer_sets: tuple[QuantizerSet, QuantizerSet] = (noop_quantizer_set, noop_quantizer_set),
    ep_axis: str,
    data_parallelism_axes: tuple[str, ...] = (),
    input_axes: tuple[str | None, ...] = (),
    gate_kernel_axes: tuple[str | None, ...] = (),
    wi_kernel_axes: tuple[str | None, ...] = ("exp", "embed", "mlp"),
    wo_kernel_axes: tuple[str | None, ...] = ("exp", "mlp", "embed"),
    dtype: DTypeLike = jnp.float32,
    recv_capacity_per_rank: int | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]: ...
