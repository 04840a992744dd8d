"""The mixture-of-experts layer."""

import functools as ft
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from ._activations import AbstractActivation, SwiGLU, weighted_activation
from ._experts import PRE_ACTIVATION, Experts
from ._grouping import Grouping, group_by_expert, row_weights
from ._init import check_positive, float_dtype, scaled_normal
from ._matmul._auto import AutoGroupedMatmul
from ._matmul._base import AbstractGroupedMatmul
from ._parallel import ExpertParallel
from ._router import Router, SelectionBias
from ._routing import AbstractRoutingRule, Routing, mask_routing, router_logits
from ._select import EXPERT_IDS, EXPERT_LOGITS
from ._stats import MoEStats, expert_load, routing_stats
from ._vma import match_varying

_T = TypeVar("_T")
# What sorts the assignments, or merely counts them: its result, and the load.
_Group: TypeAlias = Callable[[Routing], tuple[_T, Int[Array, " experts"]]]


class LatentProjection(eqx.Module):
    """Projections to a narrower width in which the experts work, and back.

    - `down`: `[d_model, d_latent]`.
    - `up`: `[d_latent, d_model]`.
    """

    down: Float[Array, "d_model d_latent"]
    up: Float[Array, "d_latent d_model"]


class SharedExperts(eqx.Module):
    """A dense MLP that every token passes, beside the routed experts.

    - `w_gate_up`: `[d_model, gates, d_shared]`.
    - `w_down`: `[d_shared, d_model]`.
    - `w_gate`: `[d_model, 1]`, of a sigmoid that scales the result per token, or `None`.
    """

    w_gate_up: Float[Array, "d_model gates d_shared"]
    w_down: Float[Array, "d_shared d_model"]
    w_gate: Float[Array, "d_model 1"] | None
    activation: AbstractActivation

    def __call__(self, x: Float[Array, "tokens d_model"]) -> Float[Array, "tokens d_model"]:
        """The MLP of every token; parameters are cast to the dtype of `x`."""
        policy = jax.checkpoint_policies.save_only_these_names(PRE_ACTIVATION)
        run = jax.checkpoint(ft.partial(_shared_mlp, activation=self.activation), policy=policy)
        return run(x, self.w_gate_up, self.w_down, self.w_gate)


class MoE(eqx.Module):
    """A dropless mixture-of-experts layer.

    ```python
    moe = eqx_moe.MoE(512, 1024, 16, rule=eqx_moe.SoftmaxTopK(k=2), key=key)
    y, stats = moe(x)  # x: [..., 512]
    ```

    Every leaf is an array, so that `jax.jit`, `jax.grad`, `jax.lax.scan` over stacked layers and optax take it as it
    is. `jax.vmap(moe)` equals passing all its tokens at once, in values, gradients and, nearly, in speed.
    """

    router: Router
    experts: Experts
    shared: SharedExperts | None
    latent: LatentProjection | None
    selection_bias: SelectionBias | None
    rule: AbstractRoutingRule
    parallel: ExpertParallel | None

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        rule: AbstractRoutingRule,
        activation: AbstractActivation = SwiGLU(),
        matmul: AbstractGroupedMatmul = AutoGroupedMatmul(),
        parallel: ExpertParallel | None = None,
        expert_bias: bool = False,
        router_bias: bool = False,
        selection_bias: bool = False,
        d_shared: int | None = None,
        shared_gate: bool = False,
        d_latent: int | None = None,
        jitter: float | int = 0.0,
        soft_cap: float | int | None = None,
        dtype: DTypeLike = jnp.float32,
        key: Array,
    ):
        """**Arguments:**

        - `d_model`: width of the tokens.
        - `d_ff`: width of one expert.
        - `num_experts`: how many there are; `rule.k` of them serve each token.
        - `rule`: from logits to experts and weights, such as [`eqx_moe.SoftmaxTopK`][].
        - `activation`: of the experts, the shared ones too.
        - `matmul`: the grouped-matmul kernel.
        - `parallel`: how the layer is divided among the devices of a mesh, an [`eqx_moe.ExpertParallel`][]; the layer
          then has to be called inside `jax.shard_map`. `num_experts` and `d_ff` are those of all devices together.
        - `expert_bias`: whether the experts' projections have biases.
        - `router_bias`: whether the logits have a learned bias.
        - `selection_bias`: whether there is a [`eqx_moe.SelectionBias`][], which starts at zero.
        - `d_shared`: width of the shared experts, all together, or `None` for none.
        - `shared_gate`: whether the shared experts' output is scaled by a sigmoid of the token.
        - `d_latent`: if given, tokens are projected to this width for the routed experts, and back.
        - `jitter`: amount of noise on the router's input, for calls with a key.
        - `soft_cap`: bound of the router's logits, or `None`.
        - `dtype`: of the parameters.
        - `key`: for the initialisation.

        **Raises:** `ValueError` for sizes or options that do not fit each other.
        """
        check_positive(d_model=d_model, d_ff=d_ff, num_experts=num_experts)
        check_positive(d_latent=1 if d_latent is None else d_latent, d_shared=1 if d_shared is None else d_shared)
        if rule.k > num_experts:
            raise ValueError(f"k={rule.k} experts per token cannot be chosen from num_experts={num_experts}")
        if shared_gate and d_shared is None:
            raise ValueError("shared_gate=True needs shared experts: give d_shared")
        dtype = float_dtype("dtype", dtype)
        _check_rule(rule, num_experts)
        keys = jax.random.split(key, 7)
        self.router = Router(
            d_model, num_experts, use_bias=router_bias, jitter=jitter, soft_cap=soft_cap, dtype=dtype, key=keys[0]
        )
        self.experts = Experts(
            d_latent or d_model,
            d_ff,
            num_experts,
            activation=activation,
            matmul=matmul,
            use_bias=expert_bias,
            dtype=dtype,
            key=keys[1],
        )
        self.latent = None
        if d_latent is not None:
            down = scaled_normal(keys[2], (d_model, d_latent), d_model, dtype)
            self.latent = LatentProjection(down, scaled_normal(keys[3], (d_latent, d_model), d_latent, dtype))
        self.shared = None
        if d_shared is not None:
            self.shared = SharedExperts(
                scaled_normal(keys[4], (d_model, activation.gates, d_shared), d_model, dtype),
                scaled_normal(keys[5], (d_shared, d_model), d_shared, dtype),
                scaled_normal(keys[6], (d_model, 1), d_model, dtype) if shared_gate else None,
                activation,
            )
        self.selection_bias = SelectionBias(jnp.zeros(num_experts, jnp.float32)) if selection_bias else None
        self.rule = rule
        self.parallel = parallel

    def __call__(
        self, x: Float[Array, "*batch d_model"], *, mask: Bool[Array, "*batch"] | None = None, key: Array | None = None
    ) -> tuple[Float[Array, "*batch d_model"], MoEStats]:
        """**Arguments:**

        - `x`: `[..., d_model]`. The parameters are cast to its dtype; the router computes in float32.
        - `mask`: bool, `[...]`; where it is false the token is routed nowhere, costs no expert any work, counts in no
          statistic, and its output is exactly zero, whatever it holds.
        - `key`: turns the router's jitter on.

        **Returns:** the output, of the shape and dtype of `x`, and an [`eqx_moe.MoEStats`][].
        """
        tokens = x.reshape(-1, x.shape[-1])
        mask = None if mask is None else mask.reshape(-1)
        if mask is not None:
            tokens = jnp.where(mask[:, None], tokens, 0)
        group = _group if self.parallel is None else _count
        routing, grouping, stats = self._route(tokens, mask, key, group)
        inner = tokens if self.latent is None else _project(tokens, self.latent.down)
        if grouping is not None:
            y = self.experts(inner, grouping, row_weights(routing, grouping))
        else:
            assert self.parallel is not None
            y, overflow = self.parallel(self.experts, inner, routing)
            stats = eqx.tree_at(lambda stats: stats.overflow, stats, overflow)
        y = y if self.latent is None else _project(y, self.latent.up)
        y = y if self.shared is None else y + self.shared(tokens)
        y = y if mask is None else jnp.where(mask[:, None], y, 0)
        return y.reshape(x.shape), stats

    def route(
        self, x: Float[Array, "tokens d_model"], *, mask: Bool[Array, " tokens"] | None = None, key: Array | None = None
    ) -> tuple[Routing, Grouping, MoEStats]:
        """Where the tokens go. The backward pass never chooses experts again, and computes the logits again only for
        losses that need all of them."""
        return self._route(x, mask, key, _group)

    def _route(
        self,
        x: Float[Array, "tokens d_model"],
        mask: Bool[Array, " tokens"] | None,
        key: Array | None,
        group: _Group[_T],
    ) -> tuple[Routing, _T, MoEStats]:
        self._check_sizes(x)
        policy = jax.checkpoint_policies.save_only_these_names(EXPERT_IDS, EXPERT_LOGITS)
        bias = None if self.selection_bias is None else self.selection_bias.value.astype(jnp.float32)
        route = jax.checkpoint(ft.partial(_route, rule=self.rule, group=group), policy=policy)
        return route(self.router, x, bias, mask, key)

    def _check_sizes(self, x: Float[Array, "tokens width"]) -> None:
        """Raises `ValueError` for tokens or arrays that the layer was not made for."""
        float_dtype("the dtype of x", x.dtype)
        weight, experts = self.router.weight, self.experts
        if weight.ndim > 2:
            raise ValueError(
                f"the router's weight has shape {weight.shape}, so this is a stack of layers: call each of them inside "
                "`jax.lax.scan`, or all with `equinox.filter_vmap`"
            )
        d_model, num_experts = weight.shape
        if x.shape[-1] != d_model:
            raise ValueError(f"d_model={d_model} is what the layer was made for, and x has width {x.shape[-1]}")
        held, d_in, _, d_ff = experts.w_gate_up.shape
        inner = d_model if self.latent is None else self.latent.down.shape[1]
        if self.parallel is None and (held, d_in, d_ff) != (num_experts, inner, experts.d_ff):
            raise ValueError(
                f"the layer has experts={num_experts} of d_model={inner} and d_ff={experts.d_ff}, and its arrays hold "
                f"{held} of {d_in} and {d_ff}: experts divided among devices need `parallel`, an ExpertParallel"
            )


@jax.checkpoint  # so that the casted weights do not live until the backward pass
def _project(x: Float[Array, "tokens d_in"], w: Float[Array, "d_in d_out"]) -> Float[Array, "tokens d_out"]:
    return x @ match_varying(w, x)[0].astype(x.dtype)


def _shared_mlp(
    x: Float[Array, "tokens d_model"],
    w_gate_up: Float[Array, "d_model gates d_shared"],
    w_down: Float[Array, "d_shared d_model"],
    w_gate: Float[Array, "d_model 1"] | None,
    *,
    activation: AbstractActivation,
) -> Float[Array, "tokens d_model"]:
    # Matched first, so that gradients are summed over devices in the parameters' dtype.
    w_gate_up, w_down = (match_varying(w, x)[0].astype(x.dtype) for w in (w_gate_up, w_down))
    h = checkpoint_name(jnp.einsum("td,dgf->tgf", x, w_gate_up), PRE_ACTIVATION)
    gate = None if w_gate is None else jax.nn.sigmoid(router_logits(x, w_gate))[:, 0]
    return weighted_activation(h, gate, activation) @ w_down


def _route(
    router: Router,
    x: Float[Array, "tokens d_model"],
    bias: Float32[Array, " experts"] | None,
    mask: Bool[Array, " tokens"] | None,
    key: Array | None,
    *,
    rule: AbstractRoutingRule,
    group: _Group[_T],
) -> tuple[Routing, _T, MoEStats]:
    x = x if mask is None else jnp.where(mask[:, None], x, 0)  # also keeps NaN out of the router's gradient
    logits = router(x, key=key)
    routing = rule(logits, bias=None if bias is None else lax.stop_gradient(bias))
    _check_routing(logits, routing, rule.k)
    routing = routing if mask is None else mask_routing(routing, mask)
    grouping, load = group(routing)
    return routing, grouping, routing_stats(logits, rule.probabilities(logits), load, mask=mask)


def _group(routing: Routing) -> tuple[Grouping, Int[Array, " experts"]]:
    grouping = group_by_expert(routing)
    return grouping, grouping.sizes


def _count(routing: Routing) -> tuple[None, Int[Array, " experts"]]:
    return None, expert_load(routing)


def _check_rule(rule: AbstractRoutingRule, num_experts: int) -> None:
    """Lets the rule route one token, without computing anything, so that what does not fit is told before training."""
    run = lambda logits: _check_routing(logits, rule(logits, bias=None), rule.k)
    jax.eval_shape(run, jax.ShapeDtypeStruct((1, num_experts), jnp.float32))


def _check_routing(logits: Float[Array, "tokens experts"], routing: Routing, k: int) -> None:
    tokens, experts = logits.shape
    if routing.experts.shape[1] != k:
        raise ValueError(f"k: the rule says {k}, its routing has {routing.experts.shape[1]}")
    if routing.experts.shape[0] != tokens:
        raise ValueError(f"tokens: the logits have {tokens}, the routing has {routing.experts.shape[0]}")
    if routing.num_experts != experts:
        raise ValueError(f"experts: the logits have {experts}, the routing says num_experts={routing.num_experts}")
