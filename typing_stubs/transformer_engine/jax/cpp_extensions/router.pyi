# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.cpp_extensions.router).
from enum import IntEnum
from typing import ClassVar

import jax
from jax.extend.core import Primitive

class ScoreFunction(IntEnum):
    SIGMOID = 0
    SOFTMAX = 1
    SQRTSOFTPLUS = 2

class RoutingMapFormat(IntEnum):
    BYTEMAP = 0
    BITMAP_U8 = 1

# The static arguments become attributes of the custom call as they are: pass flags as 0 or 1, not bool, and factors as
# float, not int, or the attribute has another type than the kernel's.
class FusedTopkWithScoreFunctionFwdPrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        logits: jax.Array,
        expert_bias: jax.Array,
        topk: int,
        use_pre_softmax: int,
        num_groups: int,
        group_topk: int,
        scaling_factor: float,
        score_function: int,
        compute_aux_scores: int,
        routing_map_format: int,
    ) -> list[jax.Array]: ...

class FusedTopkWithScoreFunctionBwdPrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        routing_map: jax.Array,
        intermediate: jax.Array,
        grad_probs: jax.Array,
        topk: int,
        use_pre_softmax: int,
        scaling_factor: float,
        score_function: int,
        compute_aux_scores: int,
        routing_map_format: int,
    ) -> jax.Array: ...

class FusedMoEAuxLossFwdPrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(probs: jax.Array, tokens_per_expert: jax.Array, topk: int, coeff: float) -> list[jax.Array]: ...

class FusedMoEAuxLossBwdPrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        const_buf: jax.Array, tokens_per_expert: jax.Array, grad_aux_loss: jax.Array, num_tokens: int
    ) -> jax.Array: ...
