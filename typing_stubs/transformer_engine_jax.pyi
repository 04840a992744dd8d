# Mirrors Transformer Engine 2.20.2 (transformer_engine_jax, the compiled extension module).
from typing import ClassVar

def get_cublasLt_version() -> int: ...
def get_cuda_version() -> int: ...
def get_cudnn_version() -> int: ...
def get_device_compute_capability(arg0: int, /) -> int: ...

# The two enumerations are pybind11's, not Python's: their members are neither int nor enum.Enum.
class JAXX_Scaling_Mode:
    NO_SCALING: ClassVar[JAXX_Scaling_Mode]
    DELAYED_TENSOR_SCALING: ClassVar[JAXX_Scaling_Mode]
    MXFP8_1D_SCALING: ClassVar[JAXX_Scaling_Mode]
    CURRENT_TENSOR_SCALING: ClassVar[JAXX_Scaling_Mode]
    NVFP4_1D_SCALING: ClassVar[JAXX_Scaling_Mode]
    NVFP4_2D_SCALING: ClassVar[JAXX_Scaling_Mode]

class JAXX_Quantize_Layout:
    ROWWISE: ClassVar[JAXX_Quantize_Layout]
    COLWISE: ClassVar[JAXX_Quantize_Layout]
    ROWWISE_COLWISE: ClassVar[JAXX_Quantize_Layout]
