"""The dense float32 oracle, the tables of kernels and sizes, and the tolerances; named once for all tests."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

import eqx_moe

# Relative norm of the difference to the oracle.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}

KERNELS = {
    "masked": eqx_moe.MaskedDense(),
    "ragged": eqx_moe.RaggedDot(),
    "blocked": eqx_moe.BlockedDot(),
    "blocked_3_4": eqx_moe.BlockedDot(blocks=(3, 4)),
    "tiled": eqx_moe.TiledDot(interpret=True),
}

ACTIVATIONS = {
    "swiglu": eqx_moe.SwiGLU(),
    "geglu": eqx_moe.GeGLU(),
    "geglu_tanh": eqx_moe.GeGLU(approximate=True),
    "reglu": eqx_moe.ReGLU(),
    "clamped": eqx_moe.ClampedSwiGLU(),
    "clamped_low": eqx_moe.ClampedSwiGLU(limit=0.6, alpha=1.3, offset=0.25),
    "gelu": eqx_moe.GELU(),
    "gelu_tanh": eqx_moe.GELU(approximate=True),
    "squared_relu": eqx_moe.SquaredReLU(),
}

# Options of a layer.
ALL = {
    "expert_bias": True,
    "router_bias": True,
    "selection_bias": True,
    "d_shared": 7,
    "shared_gate": True,
    "d_latent": 4,
    "soft_cap": 2.0,
}

OPTIONS = {
    "plain": {},
    "expert_bias": {"expert_bias": True},
    "router_bias": {"router_bias": True},
    "selection_bias": {"selection_bias": True},
    "soft_cap": {"soft_cap": 0.5},
    "shared": {"d_shared": 7},
    "shared_gate": {"d_shared": 7, "shared_gate": True},
    "latent": {"d_latent": 4},
    "all": ALL,
}

# Rows, and the sizes of the groups among them.
SIZES = {
    "uniform": (24, [6, 6, 6, 6]),
    "uneven": (24, [1, 13, 3, 7]),
    "all_to_first": (24, [24, 0, 0, 0]),
    "all_to_last": (24, [0, 0, 0, 24]),
    "empty_first": (24, [0, 10, 6, 8]),
    "empty_last": (24, [10, 6, 8, 0]),
    "empty_all": (24, [0, 0, 0, 0]),
    "tail": (24, [5, 2, 7, 3]),
    "tail_of_one": (24, [6, 6, 6, 5]),
    "tail_and_empty": (24, [0, 9, 0, 4]),
    "one_row": (1, [0, 0, 1, 0]),
    "one_row_in_none": (1, [0, 0, 0, 0]),
    "no_rows": (0, [0, 0, 0, 0]),
    "one_expert": (9, [9]),
    "one_expert_tail": (9, [4]),
    "over_one_block": (300, [140, 0, 129, 20]),
}
SIZES |= {  # every pattern of empty and non-empty groups of three experts
    "pattern_" + "".join(map(str, bits)): (15, [5 * bit for bit in bits])
    for bits in itertools.product((0, 1), repeat=3)
}


def normal(*shape, dtype="float32", seed=0):
    """Normal numbers, drawn by NumPy so that no shape costs a compilation."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def make_moe(d_model=8, d_ff=6, num_experts=5, *, k=2, rule=None, seed=0, **options) -> eqx_moe.MoE:
    """A layer whose parameters are all random, the biases too, which the constructor starts at zero."""
    rule = eqx_moe.SoftmaxTopK(k=k) if rule is None else rule
    shapes = eqx.filter_eval_shape(
        lambda key: eqx_moe.MoE(d_model, d_ff, num_experts, rule=rule, key=key, **options), jax.random.key(0)
    )
    leaves, structure = jax.tree.flatten(shapes)
    random = np.random.default_rng(seed)
    values = [jnp.asarray(0.4 * random.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, values)


def equations(jaxpr):
    """All equations of a jaxpr, those of its inner jaxprs (of `jit`, `checkpoint`, `scan`, ...) too."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield from equations(inner)


def relative_error(actual, expected) -> float:
    """The norm of the difference over the norm of `expected`; the plain norm where `expected` is all zero."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (norm if norm > 0 else 1.0))


def assert_close(actual, expected, *, dtype="float32") -> None:
    """Every leaf within the dtype's relative norm of `expected`; NaN never passes."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    errors = [relative_error(a, b) for a, b in zip(actual, expected, strict=True)]
    assert all(error <= TOLERANCE[str(jnp.dtype(dtype))] for error in errors), errors


def assert_equal(actual, expected) -> None:
    """Every leaf exactly equal."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def oracle_grouped_matmul(lhs, rhs, sizes):
    """One NumPy matmul per group, in float64."""
    lhs, rhs, sizes = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64), np.asarray(sizes)
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    start = 0
    for expert, size in enumerate(sizes):
        out[start : start + size] = lhs[start : start + size] @ rhs[expert]
        start += size
    return out


def oracle_moe(moe: eqx_moe.MoE, x, mask=None):
    """The layer as a sum over all experts of every token, in plain differentiable jnp: no grouping, no kernels.

    Returns `[tokens, d_model]` for `x` of shape `[tokens, d_model]`.
    """
    x = x if mask is None else jnp.where(mask[:, None], x, 0)
    bias = None if moe.selection_bias is None else moe.selection_bias.value
    routing = moe.rule(moe.router(x), bias=bias)
    weights = routing.weights if mask is None else jnp.where(mask[:, None], routing.weights, 0)
    dense = (
        jnp.zeros((x.shape[0], routing.num_experts), weights.dtype)
        .at[jnp.arange(x.shape[0])[:, None], routing.experts]
        .add(weights)
    )
    inner = x if moe.latent is None else x @ moe.latent.down
    experts = moe.experts
    up = jnp.einsum("td,edgf->tegf", inner, experts.w_gate_up)
    up = up if experts.b_gate_up is None else up + experts.b_gate_up[None]
    each = jnp.einsum("tef,efd->ted", experts.activation(up), experts.w_down)
    each = each if experts.b_down is None else each + experts.b_down[None]
    y = jnp.einsum("te,ted->td", dense, each)
    y = y if moe.latent is None else y @ moe.latent.up
    if moe.shared is not None:
        shared = moe.shared.activation(jnp.einsum("td,dgf->tgf", x, moe.shared.w_gate_up)) @ moe.shared.w_down
        y = y + (shared if moe.shared.w_gate is None else shared * jax.nn.sigmoid(x @ moe.shared.w_gate))
    return y


# A kernel that compiles fast, for tests in which it makes no difference which one runs.
FAST = eqx_moe.RaggedDot()
SEVERAL = {"expert_bias": True, "selection_bias": True, "d_shared": 7, "shared_gate": True}


def value_and_gradients(apply, moe, *arguments):
    """Output, statistics, and the gradients of a loss of both, for the layer and the tokens."""

    def loss(moe, x, *rest):
        y, stats = apply(moe, x, *rest)
        losses = 0.1 * eqx_moe.load_balance_loss(stats) + 0.1 * eqx_moe.router_z_loss(stats)
        return jnp.sin(y).sum().astype(jnp.float32) + losses, (y, stats)

    (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(moe, *arguments)
    return out, gradients


def count(program, name):
    """How many equations of a jaxpr bind the primitive of this name."""
    return sum(eqn.primitive.name == name for eqn in equations(program))


def count_products(program):
    """How many grouped matmuls a jaxpr has, those of which an activation is a part too."""
    products = {"moe_grouped_matmul", "moe_activated_matmul"}
    return sum(eqn.primitive.name in products for eqn in equations(program))


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def index(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)
