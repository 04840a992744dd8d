# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.quantize.scaling_modes).
from enum import Enum

from transformer_engine_jax import JAXX_Scaling_Mode

class TensorUsage(Enum):
    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3

class ScalingMode(Enum):
    NO_SCALING = JAXX_Scaling_Mode.NO_SCALING
    DELAYED_TENSOR_SCALING = JAXX_Scaling_Mode.DELAYED_TENSOR_SCALING
    MXFP8_1D_SCALING = JAXX_Scaling_Mode.MXFP8_1D_SCALING
    CURRENT_TENSOR_SCALING = JAXX_Scaling_Mode.CURRENT_TENSOR_SCALING
    NVFP4_1D_SCALING = JAXX_Scaling_Mode.NVFP4_1D_SCALING
    NVFP4_2D_SCALING = JAXX_Scaling_Mode.NVFP4_2D_SCALING
