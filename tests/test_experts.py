"""Activations, the grouped and the gathered MLP, and the experts' parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import eqx_moe

from .helpers import ACTIVATIONS, KERNELS, SIZES, assert_close, assert_equal, normal

D_MODEL, D_FF = 6, 5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped(gate, up, limit, alpha, offset):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + offset)


# Closed forms of the same names as in ACTIVATIONS, in NumPy.
CLOSED_FORMS = {
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "geglu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "reglu": lambda gate, up: np.maximum(gate, 0) * up,
    "clamped": lambda gate, up: clamped(gate, up, 7.0, 1.702, 1.0),
    "clamped_low": lambda gate, up: clamped(gate, up, 0.6, 1.3, 0.25),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "squared_relu": lambda up: np.maximum(up, 0) ** 2,
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_its_closed_form(name, dtype, float64):
    activation = ACTIVATIONS[name]
    h = 6 * normal(4, 3, activation.gates, D_FF, dtype=dtype)  # far enough to be clamped at 7, too
    out = activation(h)
    assert out.dtype == dtype
    assert out.shape == (4, 3, D_FF)
    assert_close(out, CLOSED_FORMS[name](*np.moveaxis(np.asarray(h, np.float64), -2, 0)), dtype=dtype)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_zero_is_zero(name):
    """What makes masked tokens and padding rows cost nothing: a zero token stays zero."""
    assert_equal(ACTIVATIONS[name](jnp.zeros((1, ACTIVATIONS[name].gates, 3))), jnp.zeros((1, 3)))


def test_clamped_swiglu_has_no_slope_beyond_its_limit():
    slope = jax.grad(lambda h: eqx_moe.ClampedSwiGLU(limit=2.0)(h).sum())
    beyond = slope(jnp.array([[[3.0, 1.0, 1.0], [1.0, 3.0, -3.0]]]))[0]
    assert_equal(beyond == 0, jnp.array([[True, False, False], [False, True, True]]))


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_clamped_swiglu_refuses_an_impossible_limit(limit):
    with pytest.raises(ValueError, match=f"limit={limit} must be positive"):
        eqx_moe.ClampedSwiGLU(limit=limit)


def operands(pattern, gates, dtype="float32", *, poison=True):
    """Sizes, the operands of `grouped_mlp` and a cotangent; with `poison` everything past the groups is NaN."""
    rows, sizes = SIZES[pattern]
    experts, total = len(sizes), sum(sizes)
    tail = jnp.nan if poison else 0
    args = {
        "rows": normal(rows, D_MODEL, dtype=dtype, seed=1).at[total:].set(tail),
        "w_gate_up": normal(experts, D_MODEL, gates, D_FF, dtype=dtype, seed=2) / 2,
        "w_down": normal(experts, D_FF, D_MODEL, dtype=dtype, seed=3) / 2,
        "weights": normal(rows, seed=4).at[total:].set(tail),
        "b_gate_up": normal(experts, gates, D_FF, seed=5),
        "b_down": normal(experts, D_MODEL, seed=6),
    }
    return sizes, args, normal(rows, D_MODEL, dtype=dtype, seed=7).at[total:].set(tail)


def reference_mlp(sizes, activation, args, tail):
    """One dense MLP after the other, bfloat16 computed in float32; `tail` rows of zeros behind them."""
    args = {name: x.astype("float32") if x.dtype == "bfloat16" else x for name, x in args.items()}
    ends, each = np.cumsum(sizes), []
    for expert, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows, weights = args["rows"][start:end], args.get("weights", jnp.ones_like(args["rows"][:, 0]))[start:end]
        h = jnp.einsum("rd,dgf->rgf", rows, args["w_gate_up"][expert])
        h = h + args["b_gate_up"][expert][None] if "b_gate_up" in args else h
        out = activation(h) @ args["w_down"][expert]
        out = out + args["b_down"][expert][None] if "b_down" in args else out
        each.append(out * weights[:, None])
    return jnp.concatenate([*each, jnp.zeros((tail, D_MODEL), each[0].dtype)])


def compare_with_reference(pattern, activation, matmul, dtype="float32", leave_out=()):
    """Values and gradients of `grouped_mlp` and of the reference, in one program."""
    sizes, args, cotangent = operands(pattern, activation.gates, dtype)
    args = {name: x for name, x in args.items() if name not in leave_out}
    total = sum(sizes)

    @jax.jit
    def both(sizes_array, args, cotangent):
        ours, pull_back = jax.vjp(
            lambda args: eqx_moe.grouped_mlp(sizes=sizes_array, activation=activation, matmul=matmul, **args), args
        )
        expected, pull_reference_back = jax.vjp(
            lambda args: reference_mlp(sizes, activation, args, cotangent.shape[0] - total), args
        )
        zeroed = cotangent.at[total:].set(0).astype(expected.dtype)
        return (ours, pull_back(cotangent)[0]), (expected, pull_reference_back(zeroed)[0])

    (out, gradients), expected = both(jnp.array(sizes, jnp.int32), args, cotangent)
    assert out.dtype == dtype
    assert jax.tree.map(lambda x: x.dtype, gradients) == jax.tree.map(lambda x: x.dtype, args)
    assert_close((out, gradients), expected, dtype=dtype)
    assert_equal(out[total:], jnp.zeros_like(out[total:]))
    assert_equal(gradients["rows"][total:], jnp.zeros_like(out[total:]))
    return gradients


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_grouped_mlp_equals_a_dense_mlp_per_expert(name):
    gradients = compare_with_reference("tail_and_empty", ACTIVATIONS[name], eqx_moe.RaggedDot())
    for weight in ("w_gate_up", "w_down", "b_gate_up", "b_down"):  # experts 0 and 2 have no rows
        assert_equal(gradients[weight][jnp.array([0, 2])], jnp.zeros_like(gradients[weight][:2]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_grouped_mlp_with_every_kernel(kernel):
    compare_with_reference("tail", eqx_moe.SwiGLU(), KERNELS[kernel])


@pytest.mark.parametrize("pattern", ["empty_all", "one_row", "one_expert_tail"])
def test_grouped_mlp_with_odd_sizes(pattern):
    compare_with_reference(pattern, eqx_moe.SwiGLU(), eqx_moe.RaggedDot())


@pytest.mark.parametrize("leave_out", [("weights",), ("b_gate_up",), ("b_down",), ("weights", "b_gate_up", "b_down")])
def test_grouped_mlp_without_some_options(leave_out):
    compare_with_reference("tail", eqx_moe.SwiGLU(), eqx_moe.RaggedDot(), leave_out=leave_out)


@pytest.mark.parametrize("name", ["swiglu", "clamped", "squared_relu"])
def test_grouped_mlp_in_bfloat16(name):
    """Rows and matrices in bfloat16, weights and biases in float32; so are their gradients."""
    compare_with_reference("tail", ACTIVATIONS[name], eqx_moe.RaggedDot(), "bfloat16")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_computed_in_float32_and_rounded_once(name):
    """With identities for matrices the result is the weighted activation itself."""
    activation, n = ACTIVATIONS[name], 8
    identity = jnp.eye(n, dtype="bfloat16")
    w_gate_up = jnp.stack([identity, identity[::-1]][: activation.gates], 1)[None]
    rows, weights = normal(32, n, dtype="bfloat16", seed=1), normal(32, seed=2)
    out = eqx_moe.grouped_mlp(rows, jnp.array([32]), w_gate_up, identity[None], weights=weights, activation=activation)
    h = jnp.stack([rows, rows[:, ::-1]][: activation.gates], 1).astype("float32")
    assert_equal(out, (activation(h) * weights[:, None]).astype("bfloat16"))


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_check_grads_in_both_modes(name, float64):
    sizes, args, _ = operands("one_expert_tail", ACTIVATIONS[name].gates, "float64", poison=False)
    args = {key: x.astype("float64") for key, x in args.items()}

    sizes = jnp.array(sizes, jnp.int32)
    mlp = jax.jit(
        lambda args: eqx_moe.grouped_mlp(sizes=sizes, activation=ACTIVATIONS[name], matmul=eqx_moe.RaggedDot(), **args)
    )

    check_grads(mlp, (args,), order=1, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)


def test_second_derivatives(float64):
    """Forward over reverse, through the rematerialised part, against a finite difference of the gradient."""
    sizes, args, _ = operands("tail", 2, "float64", poison=False)
    sizes = jnp.array(sizes, jnp.int32)
    args = {key: x.astype("float64") for key, x in args.items()}
    direction = {key: normal(*x.shape, dtype="float64", seed=9) for key, x in args.items()}

    @jax.jit
    def gradient(args):
        return jax.grad(
            lambda args: jnp.sin(eqx_moe.grouped_mlp(sizes=sizes, matmul=eqx_moe.RaggedDot(), **args)).sum()
        )(args)

    product = jax.jit(lambda args: jax.jvp(gradient, (args,), (direction,))[1])(args)
    step = 1e-5
    ahead, behind = (gradient(jax.tree.map(lambda x, d: x + s * step * d, args, direction)) for s in (1, -1))  # noqa: B023
    difference = jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)
    # Central differences of a step of 1e-5 leave errors of about 1e-10 in float64, far below float32's tolerance.
    assert_close(product, difference, dtype="float32")


def a_grouping(tokens=13, experts=4, k=2):
    """Some tokens are masked, so that there is a tail."""
    routing = eqx_moe.SoftmaxTopK(k=k)(normal(tokens, experts, seed=8))
    routing = eqx_moe.mask_routing(routing, jnp.arange(tokens) % 3 > 0)
    return routing, eqx_moe.group_by_expert(routing)


@pytest.mark.parametrize("kernel", KERNELS)
def test_routed_mlp_equals_dispatch_grouped_mlp_combine(kernel):
    routing, grouping = a_grouping()
    _, args, _ = operands("tail", 2)
    args |= {"x": normal(13, D_MODEL, seed=1), "weights": eqx_moe.row_weights(routing, grouping)}
    del args["rows"]
    cotangent = normal(13, D_MODEL, seed=7)

    def routed(x, **options):
        return eqx_moe.routed_mlp(x, grouping, matmul=KERNELS[kernel], **options)

    def grouped(x, **options):
        rows = eqx_moe.dispatch(x, grouping)
        rows = eqx_moe.grouped_mlp(rows, grouping.sizes, matmul=KERNELS[kernel], **options)
        return eqx_moe.combine(rows, grouping)

    @jax.jit
    def both(args):
        results = []
        for f in (routed, grouped):
            out, pull_back = jax.vjp(lambda args: f(**args), args)  # noqa: B023
            results.append((out, pull_back(cotangent)[0]))
        return results

    assert_close(*both(args))


def test_routed_mlp_never_reads_masked_tokens():
    routing, grouping = a_grouping()
    _, args, _ = operands("tail", 2)
    del args["rows"]
    args["weights"] = eqx_moe.row_weights(routing, grouping)
    masked = jnp.arange(13) % 3 == 0
    x = jnp.where(masked[:, None], jnp.nan, normal(13, D_MODEL, seed=1))
    run = jax.jit(jax.value_and_grad(lambda x, args: eqx_moe.routed_mlp(x, grouping, **args).sum(), (0, 1)))
    value, (d_x, d_args) = run(x, args)
    clean = run(jnp.where(masked[:, None], 0, x), args)
    assert_equal((value, (d_x, d_args)), clean)
    assert_equal(d_x[masked], jnp.zeros_like(d_x[masked]))


class TestErrors:
    """What the shapes' names cannot tell: the activation's gates and the dtypes."""

    def call(self, function, gates, activation, dtype="float32"):
        _, grouping = a_grouping()
        _, args, _ = operands("tail", gates, poison=False)
        rows, up, down = args["rows"].astype(dtype), args["w_gate_up"], args["w_down"]
        if function == "grouped":
            return eqx_moe.grouped_mlp(rows, grouping.sizes, up, down, activation=activation)
        return eqx_moe.routed_mlp(rows[:13], grouping, up, down, activation=activation)

    @pytest.mark.parametrize("function", ["grouped", "routed"])
    @pytest.mark.parametrize("gates, activation", [(1, eqx_moe.SwiGLU()), (2, eqx_moe.GELU())])
    def test_gates(self, function, gates, activation):
        with pytest.raises(ValueError, match=f"gates: .* needs {activation.gates}, got {gates}"):
            self.call(function, gates, activation)

    @pytest.mark.parametrize("function", ["grouped", "routed"])
    def test_dtypes(self, function):
        with pytest.raises(ValueError, match="bfloat16 and float32"):
            self.call(function, 2, eqx_moe.SwiGLU(), "bfloat16")

    @pytest.mark.parametrize("sizes", [(0, 4, 2), (4, 0, 2), (4, 4, 0), (-1, 4, 2)])
    def test_sizes_of_experts(self, sizes):
        name = ("d_model", "d_ff", "num_experts")[[size < 1 for size in sizes].index(True)]
        with pytest.raises(ValueError, match=f"{name}={min(sizes)} must be at least 1"):
            eqx_moe.Experts(*sizes, key=jax.random.key(0))


class TestExperts:
    @pytest.mark.parametrize("name", ["swiglu", "gelu"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_parameters(self, name, dtype):
        activation = ACTIVATIONS[name]
        experts = jax.eval_shape(
            lambda key: eqx_moe.Experts(6, 5, 4, activation=activation, use_bias=True, dtype=jnp.dtype(dtype), key=key),
            jax.random.key(0),
        )
        shapes = [(4, 6, activation.gates, 5), (4, 5, 6), (4, activation.gates, 5), (4, 6)]
        leaves = [experts.w_gate_up, experts.w_down, experts.b_gate_up, experts.b_down]
        assert [leaf.shape for leaf in leaves] == shapes
        assert all(leaf.dtype == dtype for leaf in leaves)
        assert jax.tree.leaves(experts) == leaves

    def test_initial_scale(self):
        experts = eqx_moe.Experts(64, 16, 32, use_bias=True, key=jax.random.key(0))
        # 65,536 and 32,768 numbers: their standard deviation is known to 0.4%.
        assert jnp.std(experts.w_gate_up) == pytest.approx(64**-0.5, rel=0.02)
        assert jnp.std(experts.w_down) == pytest.approx(16**-0.5, rel=0.02)
        assert abs(jnp.mean(experts.w_gate_up)) < 0.01 * 64**-0.5
        assert not any(jnp.any(bias != 0) for bias in jax.tree.leaves((experts.b_gate_up, experts.b_down)))
        # The two projections, and gate and up, are drawn independently.
        pairs = [
            (experts.w_gate_up[:, :, 0], experts.w_gate_up[:, :, 1]),
            (experts.w_gate_up[:, :16, 0], experts.w_down[:, :, :16]),
        ]
        for a, b in pairs:
            assert abs(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]) < 0.05

    def test_no_biases_by_default(self):
        experts = jax.eval_shape(lambda key: eqx_moe.Experts(3, 2, 1, key=key), jax.random.key(0))
        assert (experts.b_gate_up, experts.b_down) == (None, None)

    def test_call_casts_to_the_tokens_dtype(self):
        routing, grouping = a_grouping()
        weights = eqx_moe.row_weights(routing, grouping)
        experts = eqx_moe.Experts(D_MODEL, D_FF, 4, use_bias=True, key=jax.random.key(0))
        x = normal(13, D_MODEL, dtype="bfloat16")
        low = experts(x, grouping, weights)
        assert low.dtype == jnp.bfloat16
        assert_close(low, experts(x.astype("float32"), grouping, weights), dtype="bfloat16")

    def test_call_is_routed_mlp(self):
        routing, grouping = a_grouping()
        weights, x = eqx_moe.row_weights(routing, grouping), normal(13, D_MODEL)
        experts = eqx_moe.Experts(
            D_MODEL,
            D_FF,
            4,
            activation=eqx_moe.GELU(),
            matmul=eqx_moe.RaggedDot(),
            use_bias=True,
            key=jax.random.key(0),
        )
        by_hand = eqx_moe.routed_mlp(
            x,
            grouping,
            experts.w_gate_up,
            experts.w_down,
            weights=weights,
            b_gate_up=experts.b_gate_up,
            b_down=experts.b_down,
            activation=eqx_moe.GELU(),
            matmul=eqx_moe.RaggedDot(),
        )
        assert_close(experts(x, grouping, weights), by_hand)
        assert not np.allclose(experts(x, grouping), by_hand)  # without weights every row counts fully


@pytest.mark.parametrize("frozen", [("w_down",), ("w_gate_up", "w_down"), ("rows", "weights"), ("rows", "w_gate_up")])
def test_frozen_arguments_change_nothing_and_keep_nothing(frozen):
    """The others' gradients are the same, and no zeros stand in for the frozen ones."""
    _, args, _ = operands("tail", 2, poison=False)
    args["weights"] = normal(args["rows"].shape[0], seed=6)
    sizes = jnp.array([5, 2, 7, 3], jnp.int32)
    run = lambda args: jnp.sin(eqx_moe.grouped_mlp(args.pop("rows"), sizes, **args)).sum()
    fixed = {name: args[name] for name in frozen}
    free = {name: value for name, value in args.items() if name not in frozen}
    partial = lambda free: run(free | fixed)
    everything = jax.grad(lambda args: run(dict(args)))(args)
    assert_close(jax.grad(partial)(free), {name: everything[name] for name in free})
    _, tangent = jax.jvp(partial, (free,), (free,))
    expected = sum(jnp.vdot(everything[name], free[name]) for name in free)
    assert float(tangent) == pytest.approx(float(expected), rel=1e-4)
    residuals = jax.tree.leaves(jax.vjp(partial, free)[1])
    assert not any(leaf.size > 1 and not leaf.any() for leaf in residuals)
