"""Dropless mixture-of-experts layers for JAX and Equinox."""

from jaxtyping import install_import_hook as _install_import_hook

# Axis sizes of every call are checked while tracing; compiled code is unchanged.
with _install_import_hook("eqx_moe", "beartype.beartype"):
    from ._activations import GELU as GELU
    from ._activations import AbstractActivation as AbstractActivation
    from ._activations import ClampedSwiGLU as ClampedSwiGLU
    from ._activations import GeGLU as GeGLU
    from ._activations import ReGLU as ReGLU
    from ._activations import SquaredReLU as SquaredReLU
    from ._activations import SwiGLU as SwiGLU
    from ._exchange._auto import AutoExchange as AutoExchange
    from ._exchange._auto import ExchangeSelection as ExchangeSelection
    from ._exchange._base import AbstractExchange as AbstractExchange
    from ._exchange._base import ExchangePlan as ExchangePlan
    from ._exchange._gather import AllGatherReduceScatter as AllGatherReduceScatter
    from ._exchange._nccl import NCCLExchange as NCCLExchange
    from ._exchange._nccl import NCCLGroup as NCCLGroup
    from ._exchange._padded import PaddedAllToAll as PaddedAllToAll
    from ._exchange._ragged import RaggedAllToAll as RaggedAllToAll
    from ._experts import PRE_ACTIVATION as PRE_ACTIVATION
    from ._experts import Experts as Experts
    from ._experts import grouped_mlp as grouped_mlp
    from ._experts import routed_mlp as routed_mlp
    from ._explain import Explanation as Explanation
    from ._explain import explain as explain
    from ._grouping import Grouping as Grouping
    from ._grouping import combine as combine
    from ._grouping import dispatch as dispatch
    from ._grouping import group_by_expert as group_by_expert
    from ._grouping import row_weights as row_weights
    from ._losses import load_balance_loss as load_balance_loss
    from ._losses import proportional_bias_update as proportional_bias_update
    from ._losses import router_z_loss as router_z_loss
    from ._losses import sequence_balance_loss as sequence_balance_loss
    from ._losses import sign_bias_update as sign_bias_update
    from ._matmul._auto import AutoGroupedMatmul as AutoGroupedMatmul
    from ._matmul._auto import Selection as Selection
    from ._matmul._base import AbstractGroupedMatmul as AbstractGroupedMatmul
    from ._matmul._base import Problem as Problem
    from ._matmul._base import Product as Product
    from ._matmul._base import Side as Side
    from ._matmul._blocked import BlockedDot as BlockedDot
    from ._matmul._functions import combined_matmul as combined_matmul
    from ._matmul._functions import gathered_matmul as gathered_matmul
    from ._matmul._functions import grouped_matmul as grouped_matmul
    from ._matmul._masked import MaskedDense as MaskedDense
    from ._matmul._mxfp8 import EmulatedMXFP8 as EmulatedMXFP8
    from ._matmul._mxfp8 import round_to_mxfp8 as round_to_mxfp8
    from ._matmul._ragged import RaggedDot as RaggedDot
    from ._matmul._te_gemm import TEGroupedGemm as TEGroupedGemm
    from ._matmul._tiled import TiledDot as TiledDot
    from ._moe import LatentProjection as LatentProjection
    from ._moe import MoE as MoE
    from ._moe import SharedExperts as SharedExperts
    from ._parallel import ExpertParallel as ExpertParallel
    from ._parallel import Overflow as Overflow
    from ._parallel import Width as Width
    from ._plan_memory import MemoryPlan as MemoryPlan
    from ._plan_memory import plan_memory as plan_memory
    from ._plot import plot_load as plot_load
    from ._router import Router as Router
    from ._router import SelectionBias as SelectionBias
    from ._router import trainable as trainable
    from ._routing import AbstractRoutingRule as AbstractRoutingRule
    from ._routing import Routing as Routing
    from ._routing import jitter as jitter
    from ._routing import mask_routing as mask_routing
    from ._routing import router_logits as router_logits
    from ._rules import SigmoidTopK as SigmoidTopK
    from ._rules import SoftmaxTopK as SoftmaxTopK
    from ._rules import SqrtSoftplusTopK as SqrtSoftplusTopK
    from ._select import EXPERT_IDS as EXPERT_IDS
    from ._select import EXPERT_LOGITS as EXPERT_LOGITS
    from ._select import GroupLimit as GroupLimit
    from ._select import select_experts as select_experts
    from ._specs import initialise_sharded as initialise_sharded
    from ._specs import partition_specs as partition_specs
    from ._specs import with_parallel as with_parallel
    from ._stats import MoEStats as MoEStats
    from ._stats import check_overflow as check_overflow
    from ._stats import dead_experts as dead_experts
    from ._stats import expert_load as expert_load
    from ._stats import load_entropy as load_entropy
    from ._stats import max_violation as max_violation
    from ._stats import padding_waste as padding_waste
    from ._stats import routing_stats as routing_stats
    from ._stats import total_stats as total_stats
    from ._te import import_early as _import_early

_import_early()

__version__ = "0.1.0"
