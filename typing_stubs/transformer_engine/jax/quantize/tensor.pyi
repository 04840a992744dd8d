# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.quantize.tensor).
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from .scaling_modes import ScalingMode, TensorUsage

@dataclass
class AbstractBaseTensor(ABC):
    @abstractmethod
    def get_tensor(self, usage: TensorUsage) -> AbstractBaseTensor: ...

@dataclass
class AbstractBaseTensor1x(AbstractBaseTensor):
    data: jax.Array
    amax: jax.Array | None

class ScaledTensor(ABC): ...

@dataclass
class ScaledTensor1x(AbstractBaseTensor1x, ScaledTensor):
    scale_inv: jax.Array
    scaling_mode: ScalingMode
    dq_dtype: np.dtype[Any]
    _dq_func: Callable[..., jax.Array]
    is_colwise: bool
    data_layout: str
    flatten_axis: int
    has_rht_applied: bool
    def get_tensor(self, usage: TensorUsage) -> Self: ...

@dataclass
class GroupedScaledTensor1x(ScaledTensor1x):
    first_dims: jax.Array | None
    last_dims: jax.Array | None
    original_shape: tuple[int, ...]
    pre_swizzled: bool = False
    def __init__(
        self,
        data: jax.Array,
        scale_inv: jax.Array,
        amax: jax.Array | None,
        first_dims: jax.Array | None,
        last_dims: jax.Array | None,
        scaling_mode: ScalingMode,
        dq_dtype: np.dtype[Any],
        _dq_func: Callable[..., jax.Array],
        is_colwise: bool,
        data_layout: str,
        flatten_axis: int,
        original_shape: tuple[int, ...],
        pre_swizzled: bool = False,
    ) -> None: ...
    @property
    def group_sizes(self) -> jax.Array: ...

@dataclass
class GroupedNoScaleTensor(AbstractBaseTensor1x):
    first_dims: jax.Array | None
    last_dims: jax.Array | None
    original_shape: tuple[int, ...]
    def get_tensor(self, usage: TensorUsage) -> Self: ...

@dataclass
class ScaledTensor2x(AbstractBaseTensor, ScaledTensor):
    rowwise_tensor: ScaledTensor1x
    colwise_tensor: ScaledTensor1x
    def get_tensor(self, usage: TensorUsage) -> ScaledTensor1x: ...
