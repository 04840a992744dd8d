# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.cpp_extensions.quantization).
from typing import ClassVar

import jax
from jax.extend.core import Primitive
from jax.typing import DTypeLike
from transformer_engine_jax import JAXX_Scaling_Mode

from ..quantize import GroupedNoScaleTensor, GroupedQuantizer, GroupedScaledTensor1x, QuantizeLayout, ScaledTensor2x

def grouped_quantize(
    x: jax.Array,
    quantizer: GroupedQuantizer | None,
    group_sizes: jax.Array | None = None,
    flatten_axis: int = -1,
) -> GroupedNoScaleTensor | GroupedScaledTensor1x | ScaledTensor2x: ...

class GroupedQuantizePrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        x: jax.Array,
        scale: jax.Array,
        group_sizes: jax.Array,
        out_dtype: DTypeLike,
        scaling_mode: JAXX_Scaling_Mode,
        q_layout: QuantizeLayout,
        flatten_axis: int,
        scale_dtype: DTypeLike,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]: ...
