# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.router).
import jax

from .cpp_extensions.router import RoutingMapFormat as RoutingMapFormat
from .cpp_extensions.router import ScoreFunction as ScoreFunction

def fused_topk_with_score_function(
    logits: jax.Array,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: str | ScoreFunction = ScoreFunction.SOFTMAX,
    expert_bias: jax.Array | None = None,
    compute_aux_scores: bool = False,
    routing_map_format: str | RoutingMapFormat | int = RoutingMapFormat.BYTEMAP,
) -> tuple[jax.Array, jax.Array]: ...
def fused_moe_aux_loss(probs: jax.Array, tokens_per_expert: jax.Array, topk: int, coeff: float) -> jax.Array: ...
