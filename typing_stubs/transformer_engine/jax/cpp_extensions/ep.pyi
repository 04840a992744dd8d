# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.cpp_extensions.ep).
from dataclasses import dataclass
from typing import ClassVar

import jax
from jax.extend.core import Primitive

@dataclass(frozen=True)
class EpLayerConfig:
    top_k: int
    dispatch_output_per_expert_alignment: int = 0

def ep_handle_mem_size(cfg: EpLayerConfig) -> int: ...
def ep_prepare(cfg: EpLayerConfig, topk_idx: jax.Array) -> list[jax.Array]: ...

class EpPreparePrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        topk_idx: jax.Array, top_k: int, dispatch_output_per_expert_alignment: int, is_outer: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...

class EpDispatchPrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        handle_mem: jax.Array,
        topk_idx: jax.Array,
        tokens: jax.Array,
        topk_weights: jax.Array,
        top_k: int,
        dispatch_output_per_expert_alignment: int,
        recv_capacity_per_rank: int,
        is_outer: bool,
    ) -> tuple[jax.Array, jax.Array]: ...

class EpCombinePrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        handle_mem: jax.Array,
        expert_out: jax.Array,
        top_k: int,
        dispatch_output_per_expert_alignment: int,
        out_leading_shape: tuple[int, ...],
        out_partition_spec: tuple[str | tuple[str, ...] | None, ...] | None,
    ) -> jax.Array: ...

class EpDispatchBwdPrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        handle_mem: jax.Array,
        grad: jax.Array,
        g_recv_topk_weights: jax.Array,
        top_k: int,
        dispatch_output_per_expert_alignment: int,
        out_leading_shape: tuple[int, ...],
        out_partition_spec: tuple[str | tuple[str, ...] | None, ...] | None,
    ) -> list[jax.Array]: ...

class EpCombineBwdPrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        handle_mem: jax.Array,
        grad: jax.Array,
        top_k: int,
        dispatch_output_per_expert_alignment: int,
        recv_capacity_per_rank: int,
        is_outer: bool,
    ) -> jax.Array: ...
