# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.quantize.quantizer).
from abc import ABC
from dataclasses import dataclass
from typing import Any

from jax.typing import DTypeLike

from .misc import QuantizeLayout
from .scaling_modes import ScalingMode

# q_dtype must be a scalar type such as jnp.float8_e4m3fn: a np.dtype fails TE's check of the allowed types.
@dataclass
class Quantizer(ABC):
    q_dtype: DTypeLike
    scaling_mode: ScalingMode
    q_layout: QuantizeLayout
    data_layout: str
    checkpoint_name: str | None = None

@dataclass
class QuantizerSet:
    x: Quantizer | None
    kernel: Quantizer | None
    dgrad: Quantizer | None

@dataclass
class GroupedQuantizer(Quantizer):
    n_groups: int = 1
    quantizers: tuple[Quantizer, ...] = ...
    def __init__(
        self,
        q_dtype: DTypeLike,
        scaling_mode: ScalingMode,
        q_layout: QuantizeLayout,
        data_layout: str | None = None,
        checkpoint_name: str | None = None,
        n_groups: int = 1,
        quantizers: tuple[Quantizer, ...] = ...,
    ) -> None: ...

# The return types are wider than TE's own annotations: NO_SCALING makes None, and more than one makes a tuple.
@dataclass
class QuantizerFactory:
    @staticmethod
    def create(
        n_quantizers: int = 1,
        scaling_mode: ScalingMode | None = None,
        q_dtype: DTypeLike | None = None,
        q_layout: QuantizeLayout | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        **kwargs: Any,
    ) -> Quantizer | tuple[Quantizer | None, ...] | None: ...
    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: ScalingMode | None = None,
        fwd_dtype: DTypeLike | None = None,
        bwd_dtype: DTypeLike | None = None,
        is_2x2x: bool | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        fp8_recipe: Any = None,
        **kwargs: Any,
    ) -> QuantizerSet | tuple[QuantizerSet, ...]: ...

noop_quantizer_set: QuantizerSet
