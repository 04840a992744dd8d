# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.cpp_extensions.gemm).
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.typing import DTypeLike
from transformer_engine_jax import JAXX_Scaling_Mode

from ..quantize import GroupedNoScaleTensor, GroupedScaledTensor1x, QuantizerSet, ScalingMode, noop_quantizer_set

# dtype is compared with ==, so a string never equals jnp.bfloat16: pass a dtype object.
def is_v2_grouped_gemm_supported(
    scaling_mode: ScalingMode,
    dtype: np.dtype[Any],
    has_bias: bool,
    lhs_shape: Sequence[int] | None = None,
    rhs_shape: Sequence[int] | None = None,
    lhs_axis_boundary: int | None = None,
    rhs_axis_boundary: int | None = None,
) -> tuple[bool, str]: ...
def grouped_gemm(
    lhs: GroupedNoScaleTensor | GroupedScaledTensor1x,
    rhs: GroupedNoScaleTensor | GroupedScaledTensor1x,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (2,)),
    bias: jax.Array | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
    use_async_d2h_group_sizes: bool = False,
) -> jax.Array: ...

class GroupedGemmPrimitive:
    inner_primitive: ClassVar[Primitive]
    @staticmethod
    def impl(
        lhs_data: jax.Array,
        lhs_scale_inv: jax.Array,
        rhs_data: jax.Array,
        rhs_scale_inv: jax.Array,
        bias: jax.Array,
        lhs_first_dims: jax.Array,
        lhs_last_dims: jax.Array,
        rhs_first_dims: jax.Array,
        rhs_last_dims: jax.Array,
        out_first_dims: jax.Array,
        out_last_dims: jax.Array,
        additional_arg_0: jax.Array,
        additional_arg_1: jax.Array,
        lhs_is_trans: bool,
        rhs_is_trans: bool,
        scaling_mode: JAXX_Scaling_Mode,
        out_dtype: DTypeLike,
        has_bias: bool,
        use_async_d2h_group_sizes: bool,
        use_v2_ffi: bool,
        lhs_axis_boundary: int,
        rhs_axis_boundary: int,
        out_shape: tuple[int, ...],
        lhs_left_size: int,
        lhs_right_size: int,
        rhs_left_size: int,
        rhs_right_size: int,
    ) -> tuple[jax.Array]: ...
