# Mirrors Transformer Engine 2.20.2 (transformer_engine_jax, the compiled extension module).
from typing import ClassVar

def ep_handle_mem_size(top_k: int, dispatch_output_per_expert_alignment: int = 0) -> int: ...
def get_cublasLt_version() -> int: ...
def get_device_compute_capability(arg0: int, /) -> int: ...

# pybind11's enumeration, not Python's: its members are neither int nor enum.Enum.
class JAXX_Scaling_Mode:
    NO_SCALING: ClassVar[JAXX_Scaling_Mode]
