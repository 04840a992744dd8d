"""Every public function given one wrong axis fails while tracing, and its message names the axis and both sizes.

The table states each function's arguments by the names of their axes. From it follow all variants in which one axis of
one argument has another size than the same axis elsewhere.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import eqx_moe
from eqx_moe import Grouping, MoEStats, Routing

# All different, so that a size in a message can only be that of its own axis.
SIZES = {
    "tokens": 13,
    "k": 3,
    "experts": 8,
    "rows": 39,
    "d_model": 17,
    "d_ff": 11,
    "gates": 2,
    "d_in": 19,
    "d_out": 23,
    "d_latent": 7,
    "d_shared": 5,
    "batch": 37,
    "times": 31,
    "layers": 6,
}
WRONG = 29
KEY = jax.random.key(0)

GROUPING = {"order": "int rows", "position": "int tokens k", "sizes": "int experts"}
ROUTING = {"experts": "int tokens k", "weights": "tokens k"}
STATS = {"load": "int batch experts", "probability": "batch experts", "squared_lse": "batch"} | {
    name: "int batch" for name in ("tokens", "masked", "nonfinite", "overflow")
}
EXPERTS = {
    "w_gate_up": "experts d_model gates d_ff",
    "w_down": "experts d_ff d_model",
    "b_gate_up": "experts gates d_ff",
    "b_down": "experts d_model",
}


class Case(NamedTuple):
    """A call with arguments described by their axes; `fixed` are axes that the callable itself has a size for."""

    call: Callable
    arguments: dict[str, str]
    fixed: str = ""
    traced: bool = True


def rule_case(rule):
    return Case(lambda logits, bias: rule(logits, bias=bias), {"logits": "tokens experts", "bias": "experts"})


def kernel_cases(kernel):
    x, index, y = "rows d_in", "int rows", "rows d_out"
    w, sizes, tokens = "experts d_in d_out", "int experts", "tokens d_in"
    return {
        "nn": Case(kernel.nn, {"x": x, "w": w, "sizes": sizes}),
        "nt": Case(kernel.nt, {"y": y, "w": w, "sizes": sizes}),
        "tn": Case(kernel.tn, {"x": x, "y": y, "sizes": sizes}),
        "gathered_nn": Case(kernel.gathered_nn, {"x": tokens, "index": index, "w": w, "sizes": sizes}),
        "gathered_tn": Case(kernel.gathered_tn, {"x": tokens, "index": index, "y": y, "sizes": sizes}),
    }


def mlp_call(function, *, grouped):
    def call(x, order, position, sizes, w_gate_up, w_down, weights, b_gate_up, b_down):
        where = sizes if grouped else Grouping(order, position, sizes)
        options = {"weights": weights, "b_gate_up": b_gate_up, "b_down": b_down}
        return function(x, where, w_gate_up, w_down, **options)

    return call


def experts_call(x, order, position, sizes, weights):
    experts = eqx_moe.Experts(SIZES["d_model"], SIZES["d_ff"], SIZES["experts"], use_bias=True, key=KEY)
    return experts(x, Grouping(order, position, sizes), weights)


def replaced_experts_call(x, order, position, sizes, weights, **parameters):
    experts = eqx_moe.Experts(SIZES["d_model"], SIZES["d_ff"], SIZES["experts"], use_bias=True, key=KEY)
    where = lambda e: tuple(getattr(e, name) for name in parameters)
    return eqx.tree_at(where, experts, tuple(parameters.values()))(x, Grouping(order, position, sizes), weights)


def router_call(x, weight, bias):
    router = eqx_moe.Router(SIZES["d_model"], SIZES["experts"], use_bias=True, key=KEY)
    return eqx.tree_at(lambda r: (r.weight, r.bias), router, (weight, bias))(x)


def make_moe():
    sizes = (SIZES["d_model"], SIZES["d_ff"], SIZES["experts"])
    options = {"d_shared": SIZES["d_shared"], "d_latent": SIZES["d_latent"], "shared_gate": True}
    return eqx_moe.MoE(*sizes, rule=eqx_moe.SoftmaxTopK(k=3), selection_bias=True, **options, key=KEY)


def shared_call(x, w_gate_up, w_down, w_gate):
    return eqx_moe.SharedExperts(w_gate_up, w_down, w_gate, eqx_moe.SwiGLU())(x)


def selection_bias_call(value, x):
    return eqx.tree_at(lambda m: m.selection_bias, make_moe(), eqx_moe.SelectionBias(value))(x)


MLP = {"weights": "rows", **EXPERTS}
SHARED = {"w_gate_up": "d_model gates d_shared", "w_down": "d_shared d_model", "w_gate": "d_model 1"}

# By public name, with what is called after a dot where it is not the name itself.
CASES = {
    "Routing": Case(lambda experts, weights: Routing(experts, weights, 8), ROUTING),
    "expert_load": Case(lambda experts, weights: eqx_moe.expert_load(Routing(experts, weights, 8)), ROUTING),
    "group_by_expert": Case(lambda experts, weights: eqx_moe.group_by_expert(Routing(experts, weights, 8)), ROUTING),
    "mask_routing": Case(
        lambda experts, weights, mask: eqx_moe.mask_routing(Routing(experts, weights, 8), mask),
        ROUTING | {"mask": "bool tokens"},
    ),
    "SoftmaxTopK": rule_case(eqx_moe.SoftmaxTopK(k=3)),
    "SigmoidTopK": rule_case(eqx_moe.SigmoidTopK(k=3)),
    "SqrtSoftplusTopK": rule_case(eqx_moe.SqrtSoftplusTopK(k=3)),
    "select_experts": Case(
        lambda scores, bias: eqx_moe.select_experts(scores, 3, bias=bias),
        {"scores": "tokens experts", "bias": "experts"},
    ),
    "router_logits": Case(
        eqx_moe.router_logits, {"x": "tokens d_model", "weight": "d_model experts", "bias": "experts"}
    ),
    "Router": Case(router_call, {"x": "tokens d_model", "weight": "d_model experts", "bias": "experts"}),
    "dispatch": Case(
        lambda x, order, position, sizes: eqx_moe.dispatch(x, Grouping(order, position, sizes)),
        {"x": "tokens d_model", **GROUPING},
    ),
    "combine": Case(
        lambda rows, order, position, sizes: eqx_moe.combine(rows, Grouping(order, position, sizes)),
        {"rows": "rows d_model", **GROUPING},
    ),
    "row_weights": Case(
        lambda experts, weights, order, position, sizes: eqx_moe.row_weights(
            Routing(experts, weights, 8), Grouping(order, position, sizes)
        ),
        ROUTING | GROUPING,
    ),
    "grouped_matmul": Case(
        eqx_moe.grouped_matmul, {"lhs": "rows d_in", "rhs": "experts d_in d_out", "sizes": "int experts"}
    ),
    "gathered_matmul": Case(
        lambda x, rhs, order, position, sizes: eqx_moe.gathered_matmul(x, rhs, Grouping(order, position, sizes)),
        {"x": "tokens d_in", "rhs": "experts d_in d_out", **GROUPING},
    ),
    "combined_matmul": Case(
        lambda rows, rhs, order, position, sizes: eqx_moe.combined_matmul(rows, rhs, Grouping(order, position, sizes)),
        {"rows": "rows d_in", "rhs": "experts d_in d_out", **GROUPING},
    ),
    "grouped_mlp": Case(
        lambda **arguments: mlp_call(eqx_moe.grouped_mlp, grouped=True)(order=None, position=None, **arguments),
        {"x": "rows d_model", "sizes": "int experts", **MLP},
        "gates",
    ),
    "routed_mlp": Case(
        mlp_call(eqx_moe.routed_mlp, grouped=False), {"x": "tokens d_model", **GROUPING, **MLP}, "gates"
    ),
    "Experts": Case(experts_call, {"x": "tokens d_model", **GROUPING, "weights": "rows"}, "d_model experts"),
    "Experts.replaced": Case(replaced_experts_call, {"x": "tokens d_model", **GROUPING, **MLP}, "gates"),
    "MoE": Case(
        lambda x, mask: make_moe()(x, mask=mask), {"x": "batch d_model", "mask": "bool batch"}, fixed="d_model"
    ),
    "MoE.route": Case(
        lambda x, mask: make_moe().route(x, mask=mask), {"x": "tokens d_model", "mask": "bool tokens"}, fixed="d_model"
    ),
    "explain": Case(
        lambda x: eqx_moe.explain(make_moe(), jax.ShapeDtypeStruct(x.shape, jnp.float32)),
        {"x": "batch d_model"},
        fixed="d_model",
        traced=False,
    ),
    "SelectionBias": Case(selection_bias_call, {"value": "experts", "x": "tokens d_model"}, "experts"),
    "LatentProjection": Case(eqx_moe.LatentProjection, {"down": "d_model d_latent", "up": "d_latent d_model"}),
    "SharedExperts": Case(shared_call, {"x": "tokens d_model", **SHARED}, "gates"),
    "MoEStats": Case(MoEStats, STATS),
    "total_stats": Case(lambda **stats: eqx_moe.total_stats(MoEStats(**stats)), STATS),
    "load_balance_loss": Case(lambda **stats: eqx_moe.load_balance_loss(MoEStats(**stats)), STATS),
    "sequence_balance_loss": Case(lambda **stats: eqx_moe.sequence_balance_loss(MoEStats(**stats)), STATS),
    "router_z_loss": Case(lambda **stats: eqx_moe.router_z_loss(MoEStats(**stats)), STATS),
    "routing_stats": Case(
        eqx_moe.routing_stats,
        {"logits": "tokens experts", "probabilities": "tokens experts", "load": "int experts", "mask": "bool tokens"},
    ),
    "sign_bias_update": Case(
        lambda bias, load: eqx_moe.sign_bias_update(bias, load, rate=0.1), {"bias": "experts", "load": "int experts"}
    ),
    "proportional_bias_update": Case(
        lambda bias, load: eqx_moe.proportional_bias_update(bias, load, rate=0.1),
        {"bias": "experts", "load": "int experts"},
    ),
    "plot_load": Case(eqx_moe.plot_load, {"load": "times layers experts", "steps": "times"}, traced=False),
}
CASES |= {
    f"{name}": Case(getattr(eqx_moe, name)(), {"h": "rows gates d_ff"}, fixed="gates")
    for name in ("SwiGLU", "GeGLU", "ReGLU", "ClampedSwiGLU")
}
CASES |= {
    f"{name}.{method}": case
    for name in ("MaskedDense", "RaggedDot", "BlockedDot", "TiledDot", "AutoGroupedMatmul")
    for method, case in kernel_cases(getattr(eqx_moe, name)()).items()
}

# One array, or none, and no axis of a size of their own: there is nothing that could differ.
NOTHING_TO_DIFFER = {
    "AbstractActivation",
    "AbstractGroupedMatmul",
    "AbstractRoutingRule",
    "Explanation",
    "AbstractExchange",
    "AllGatherReduceScatter",
    "AutoExchange",
    "ExchangePlan",
    "ExchangeSelection",
    "EmulatedMXFP8",
    "ExpertParallel",  # works inside `jax.shard_map` only
    "GroupLimit",
    "Grouping",
    "MemoryPlan",
    "NCCLExchange",
    "NCCLGroup",
    "Overflow",
    "PaddedAllToAll",
    "RaggedAllToAll",
    "Width",
    "check_overflow",
    "initialise_sharded",
    "partition_specs",
    "plan_memory",
    "with_parallel",
    "Problem",
    "Product",
    "Selection",
    "Side",
    "TEGroupedGemm",  # cannot be made where the tests run
    "dead_experts",
    "jitter",
    "load_entropy",
    "max_violation",
    "padding_waste",
    "round_to_mxfp8",
    "trainable",
}
# Ungated activations: their gates axis has size 1.
UNGATED = {"GELU", "SquaredReLU"}


def arrays(case, wrong=None, axis=None):
    """The arguments of the case; in the one called `wrong` the given axis has the wrong size."""
    made = {}
    for name, described in case.arguments.items():
        words = described.split()
        dtype = {"int": jnp.int32, "bool": jnp.bool_}.get(words[0], jnp.float32)
        axes = words if dtype == jnp.float32 else words[1:]
        sizes = {"1": 1, **SIZES} | ({axis: WRONG} if name == wrong else {})
        shape = tuple(sizes[a] for a in axes)
        made[name] = jax.ShapeDtypeStruct(shape, dtype) if case.traced else np.ones(shape)
    return made


def run(case, arguments):
    if case.traced:
        # Not `eval_shape(case.call, ...)`, whose cache would remember the function.
        return jax.eval_shape(lambda kwargs: jax.tree.leaves(case.call(**kwargs)), arguments)
    return case.call(**arguments)


def variants():
    for name, case in CASES.items():
        axes = {argument: set(described.split()) & set(SIZES) for argument, described in case.arguments.items()}
        for argument, own in axes.items():
            elsewhere = set(case.fixed.split()).union(*(other for a, other in axes.items() if a != argument))
            for axis in sorted(own & elsewhere):
                yield pytest.param(case, argument, axis, id=f"{name}-{argument}-{axis}")


def test_every_public_name_is_in_the_table():
    public = {name for name in dir(eqx_moe) if not name.startswith("_") and callable(getattr(eqx_moe, name))}
    covered = {name.split(".")[0] for name in CASES}
    assert covered | NOTHING_TO_DIFFER | UNGATED == public
    assert not covered & (NOTHING_TO_DIFFER | UNGATED)


@pytest.mark.parametrize("name", CASES)
def test_right_axes_are_accepted(name):
    run(CASES[name], arrays(CASES[name]))


@pytest.mark.parametrize("case, argument, axis", list(variants()))
def test_wrong_axis_is_named_with_both_sizes(case, argument, axis):
    with pytest.raises((TypeCheckError, ValueError)) as caught:
        run(case, arrays(case, argument, axis))
    message = str(caught.value)
    missing = [word for word in (axis, SIZES[axis], WRONG) if not re.search(rf"\b{word}\b", message)]
    assert not missing, f"the message lacks {missing}:\n{message}"


@pytest.mark.parametrize("name", sorted(UNGATED))
def test_ungated_activations_name_their_gates(name):
    with pytest.raises((TypeCheckError, ValueError), match=r"\bgates\b") as caught:
        jax.eval_shape(getattr(eqx_moe, name)(), jax.ShapeDtypeStruct((13, 2, 11), jnp.float32))
    assert re.search(r"\b1\b.*\b2\b|\b2\b.*\b1\b", str(caught.value), re.DOTALL)


def test_wrong_rank_is_named():
    with pytest.raises(TypeCheckError, match="batch experts"):
        eqx_moe.max_violation(jnp.array(1))
