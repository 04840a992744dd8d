# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.quantize.misc).
from enum import Enum

from transformer_engine_jax import JAXX_Quantize_Layout

class QuantizeLayout(Enum):
    ROWWISE = JAXX_Quantize_Layout.ROWWISE
    COLWISE = JAXX_Quantize_Layout.COLWISE
    ROWWISE_COLWISE = JAXX_Quantize_Layout.ROWWISE_COLWISE
