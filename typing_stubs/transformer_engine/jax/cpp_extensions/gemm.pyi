# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.cpp_extensions.gemm).
from typing import ClassVar

import jax
from jax.extend.core import Primitive
from jax.typing import DTypeLike
from transformer_engine_jax import JAXX_Scaling_Mode

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
