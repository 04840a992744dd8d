"""Layers divided among 8 virtual CPU devices, against the same layers on one."""

import functools as ft
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import eqx_moe
from eqx_moe import ExpertParallel, Overflow, Width

from .helpers import (
    SEVERAL,
    assert_close,
    assert_equal,
    count,
    equations,
    index,
    make_moe,
    normal,
    stack,
    value_and_gradients,
)
from .meshes import (
    COMPOSITIONS,
    DATA,
    EXACT,
    EXPERTS,
    MASK,
    NO_EXCHANGE,
    THREE,
    TOKENS,
    WIDTH,
    X,
    check,
    make_mesh,
    on_one_device,
    sharded,
    without,
)
from .test_exchange import EXCHANGES

# What an exchange does differs in the first four; the others only need one.
PAIRS = [(name, exchange) for name in list(COMPOSITIONS)[:4] for exchange in EXCHANGES]
PAIRS += list(zip(list(COMPOSITIONS)[4:-1], itertools.cycle(EXCHANGES)))
PAIRS += [("all at once", exchange) for exchange in ("padded", "ragged")]


@pytest.mark.parametrize("composition, exchange", PAIRS)
def test_equals_one_device(composition, exchange):
    """Outputs, statistics (the overflow, 0, too) and all gradients of a loss with balance losses in it."""
    axes, options, tokens = COMPOSITIONS[composition]
    parallel = ExpertParallel(exchange=EXCHANGES[exchange], **options)
    check(make_moe(WIDTH, 8, EXPERTS, parallel=parallel, **SEVERAL), make_mesh(axes), tokens)


@pytest.mark.parametrize("composition", NO_EXCHANGE)
def test_without_an_exchange(composition):
    axes, options, tokens = NO_EXCHANGE[composition]
    check(make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(**options), **SEVERAL), make_mesh(axes), tokens)


@pytest.mark.parametrize(
    "composition, exchange, check_vma, axis_type",
    [
        ("data x experts", "padded", True, AxisType.Explicit),
        ("data x experts", "ragged", False, AxisType.Auto),
        ("tokens whole along tensor", "gather", False, AxisType.Auto),
        ("all at once", "ragged", True, AxisType.Explicit),
        ("all at once", "padded", False, AxisType.Auto),
    ],
)
def test_other_meshes(composition, exchange, check_vma, axis_type):
    axes, options, tokens = COMPOSITIONS[composition]
    parallel = ExpertParallel(exchange=EXCHANGES[exchange], **options)
    moe = make_moe(WIDTH, 8, EXPERTS, parallel=parallel, **SEVERAL)
    mesh = make_mesh(axes, axis_type)
    place = lambda tree, specs: jax.device_put(tree, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *a: value_and_gradients(sharded(moe, mesh, tokens, check_vma), *a))
        actual = run(place(moe, eqx_moe.partition_specs(moe)), *place((X, MASK), (jax.P(tokens),) * 2))
    assert_close(actual, on_one_device())


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_vmap_inside(exchange):
    """A batch of sequences on every device: as many plans as sequences."""
    moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(exchange=EXCHANGES[exchange]), **SEVERAL)
    batch = lambda moe, x, mask: jax.vmap(lambda x, mask: moe(x, mask=mask))(x, mask)
    mesh = make_mesh(DATA)
    run = sharded(moe, mesh, ("data", "expert"), apply=batch)
    x, mask = X.reshape(16, 4, WIDTH), MASK.reshape(16, 4)
    (y, stats), gradients = jax.jit(lambda *args: value_and_gradients(run, *args))(moe, x, mask)
    actual = (y.reshape(X.shape), stats), (gradients[0], gradients[1].reshape(X.shape))
    assert_close(actual, on_one_device())


def test_two_layers_in_one_step_scanned_checkpointed_and_accumulated():
    """Of other sizes and exchanges; the gradients of two micro-batches are added up in a scan around that of layers."""
    kinds = [
        {"d_ff": 8, "num_experts": 8, "k": 2, "parallel": ExpertParallel(exchange=EXCHANGES["padded"])},
        {"d_ff": 6, "num_experts": 4, "k": 1, "parallel": ExpertParallel(exchange=EXCHANGES["gather"])},
    ]
    layers = stack([tuple(make_moe(WIDTH, **kind, seed=seed) for kind in kinds) for seed in range(2)])
    mesh, tokens = make_mesh(DATA), ("data", "expert")

    def loss(layers, x):
        @jax.checkpoint
        def block(x, two):
            for layer in two:
                x = x + 0.2 * layer(x)[0]  # or rounding errors would grow from layer to layer
            return x, None

        return jnp.sin(jax.lax.scan(block, x, layers)[0]).sum()

    def accumulate(gradient_of, layers, x):
        add = lambda total, x: (jax.tree.map(jnp.add, total, gradient_of(layers, x)), None)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, layers), x)[0]

    stacked_specs = jax.tree.map(lambda spec: jax.P(None, *spec), eqx_moe.partition_specs(index(layers, 0)))
    global_loss = jax.shard_map(
        lambda layers, x: jax.lax.psum(loss(layers, x), tokens),
        mesh=mesh,
        in_specs=(stacked_specs, jax.P(tokens)),
        out_specs=jax.P(),
    )
    x = X.reshape(2, TOKENS // 2, WIDTH)
    actual = jax.jit(ft.partial(accumulate, jax.grad(global_loss)))(layers, x)
    locally = jax.tree.map(without, layers, is_leaf=lambda node: isinstance(node, eqx_moe.MoE))
    assert_close(actual, jax.jit(ft.partial(accumulate, jax.grad(loss)))(locally, x))


@pytest.mark.parametrize(
    "composition, options",
    [
        ("data x experts", {"exchange": EXCHANGES["ragged"]}),
        ("weights sharded along d_ff", {"exchange": EXCHANGES["padded"], "chunks": 8}),
        ("all at once", {"exchange": EXCHANGES["gather"]}),
    ],
)
def test_bfloat16_tokens(composition, options):
    """With parameters in float32, in which their gradients are summed over chunks and devices. All experts are chosen:
    a choice could turn out differently where rounding does."""
    axes, more, tokens = COMPOSITIONS[composition]
    moe = make_moe(WIDTH, 8, EXPERTS, k=EXPERTS, parallel=ExpertParallel(**{**more, **options}), d_shared=7, d_latent=8)
    loss = lambda run, moe, x: run(moe, x, jnp.ones(TOKENS, bool))[0].astype(jnp.float32).sum()
    run = sharded(moe, make_mesh(axes), tokens)
    gradient = jax.jit(jax.grad(ft.partial(loss, run)))
    with jax.default_matmul_precision("highest"):
        expected = jax.grad(ft.partial(loss, lambda moe, x, mask: moe(x, mask=mask)))(without(moe), X)
    assert_close(gradient(moe, X.astype(jnp.bfloat16)), expected, dtype="bfloat16")
    moved = [
        (eqn.primitive.name, eqn.invars[0].aval)
        for eqn in equations(jax.make_jaxpr(gradient)(moe, X.astype(jnp.bfloat16)))
        if eqn.invars
    ]
    summed = [value.dtype for name, value in moved if name in ("psum", "psum_invariant") and value.ndim > 1]
    scattered = [value.dtype for name, value in moved if name == "reduce_scatter" and value.ndim > 2]  # of weights
    gathered = [value.dtype for name, value in moved if name == "all_gather" and value.ndim > 2]
    assert summed and set(summed) == {jnp.dtype("float32")}
    assert set(scattered) == ({jnp.dtype("float32")} if "fsdp_axis" in more else set())
    assert set(gathered) == ({jnp.dtype("bfloat16")} if "fsdp_axis" in more else set())


@pytest.mark.parametrize("options", [{}, EXACT, {"chunks": 2}, {"fsdp_axis": "data"}])
def test_scanned_layers_keep_no_copies_of_their_weights(options):
    """A program that differentiates a scan over layers carries no array of the size of all layers' weights but the
    weights and their gradients."""
    layers, d_ff = 3, 40
    moe = stack([make_moe(WIDTH, d_ff, EXPERTS, parallel=ExpertParallel(**options), seed=i) for i in range(layers)])
    specs, tokens = eqx_moe.partition_specs(moe), jax.P(("data", "expert"))

    def body(moe, x):
        return jax.lax.scan(lambda x, layer: (x + layer(x)[0], None), x, moe)[0]

    run = jax.shard_map(body, mesh=make_mesh(DATA), in_specs=(specs, tokens), out_specs=tokens)
    program = jax.make_jaxpr(lambda moe, x, cotangent: jax.vjp(run, moe, x)[1](cotangent))(moe, X, X)
    scans = [eqn for eqn in equations(program) if eqn.primitive.name == "scan" and eqn.params["length"] == layers]
    assert len(scans) >= 2
    for shape in ((layers, EXPERTS // 4, WIDTH, 2), (layers, EXPERTS // 4)):
        forward = [out.aval.shape for out in scans[0].outvars]
        assert not any(out[: len(shape)] == shape and d_ff in out for out in forward), forward


def test_no_tokens():
    moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(tensor_axis="tensor"))
    run = sharded(moe, make_mesh(THREE), ("data", "expert", "tensor"))
    y, stats = jax.jit(run)(moe, X[:0], MASK[:0])
    assert y.shape == (0, WIDTH) and stats.tokens == 0 and stats.overflow == 0


def test_forward_mode():
    moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(exchange=EXCHANGES["ragged"], **EXACT))
    run = sharded(moe, make_mesh(DATA), ("data", "expert"))
    tangent = normal(*X.shape, seed=1)
    push = lambda run, moe: jax.jit(lambda moe: jax.jvp(lambda x: run(moe, x, MASK)[0], (X,), (tangent,)))(moe)
    assert_close(push(run, moe), push(lambda moe, x, mask: moe(x, mask=mask), without(moe)))


def collectives(run, *args) -> Counter:
    """How often each collective operation stands in the compiled program."""
    text = jax.jit(run).lower(*args).compile().as_text() or ""
    names = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)(?:-start)?\("
    return Counter(re.findall(rf" = \S+ (?:\([^)]*\) )?{names}", text)) + Counter(
        re.findall(rf" = \([^=]*\) {names}", text)
    )


class TestCollectives:
    """What docs/parallel.md promises."""

    def programs(self, exchange, **options):
        moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(exchange=EXCHANGES[exchange], **options))
        specs, tokens = eqx_moe.partition_specs(moe), jax.P(("data", "expert"))
        body = lambda moe, x: moe(x)[0]
        run = jax.shard_map(body, mesh=make_mesh(DATA), in_specs=(specs, tokens), out_specs=tokens)
        return run, lambda moe, x, cotangent: jax.vjp(run, moe, x)[1](cotangent), moe

    def compiled(self, exchange):
        run, gradient, moe = self.programs(exchange)
        return collectives(run, moe, X), collectives(gradient, moe, X, X)

    def test_padded(self):
        forward, backward = self.compiled("padded")
        assert forward == {"all-to-all": 4}  # ids, tokens, weights, results
        assert backward["all-to-all"] == 6  # ids, tokens, weights, and the cotangents of all but the ids
        assert set(backward) == {"all-to-all", "all-reduce"}  # replicated weights' gradients are summed

    def test_gather(self):
        forward, backward = self.compiled("gather")
        assert forward == {"all-gather": 3, "reduce-scatter": 1}
        assert backward["all-gather"] == 4
        assert backward["reduce-scatter"] == 2
        assert set(backward) == {"all-gather", "reduce-scatter", "all-reduce"}

    def test_sharded_weights_are_gathered_again_in_the_backward_pass(self):
        """In the program as it is traced; XLA on CPU joins the first gather and its repetition."""
        run, gradient, moe = self.programs("padded", fsdp_axis="data")
        forward, backward = jax.make_jaxpr(run)(moe, X), jax.make_jaxpr(gradient)(moe, X, X)
        assert (count(forward, "all_gather"), count(forward, "reduce_scatter")) == (2, 0)
        assert (count(backward, "all_gather"), count(backward, "reduce_scatter")) == (4, 2)


class TestMistakes:
    def run(self, moe, axes=DATA, tokens=("data", "expert")):
        return jax.eval_shape(sharded(moe, make_mesh(axes), tokens), moe, X, MASK)

    def test_chunks_that_do_not_divide(self):
        moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(chunks=3))
        with pytest.raises(ValueError, match="chunks=3: the next smaller number of chunks that divides them is 2"):
            self.run(moe)

    def test_experts_that_do_not_divide(self):
        moe = make_moe(WIDTH, 8, 6, parallel=ExpertParallel())
        with pytest.raises(ValueError, match="divisible"):
            self.run(moe)

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize(
        "mine, given, wrong",
        [
            ({}, {"axis": None}, "experts=8 .* among 4 devices, and this one holds 8"),
            ({"axis": None, "fsdp_axis": "data"}, {"axis": None}, "d_ff=8 .* among 2 devices, and this one holds 8"),
            ({"fsdp_axis": "data"}, {}, "d_ff=8 .* among 2 devices, and this one holds 8"),
            (
                {"fsdp_axis": "data", "fsdp_width": Width.D_MODEL},
                {},
                "d_model=8 .* among 2 devices, and this one holds 8",
            ),
            ({"fsdp_axis": "data"}, {"fsdp_axis": "data", "fsdp_width": Width.D_MODEL}, "d_model=8 .* among 1 devices"),
            ({"tensor_axis": "data"}, {}, "d_ff=8 .* among 2 devices, and this one holds 8"),
            ({}, {"tensor_axis": "data"}, "d_ff=8 .* among 1 devices, and this one holds 4"),
            ({}, {"fsdp_axis": "data"}, "d_ff=8 .* among 1 devices, and this one holds 4"),
        ],
    )
    def test_weights_divided_in_another_way(self, mine, given, wrong, check_vma):
        """As with specs of one's own, or of a layer with other options; it gave wrong numbers."""
        moe, other = (make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(**options)) for options in (mine, given))
        specs = jax.tree.unflatten(jax.tree.structure(moe), jax.tree.leaves(eqx_moe.partition_specs(other)))
        tokens = jax.P(("data", "expert"))
        run = jax.shard_map(
            lambda moe, x: moe(x)[0],
            mesh=make_mesh(DATA),
            in_specs=(specs, tokens),
            out_specs=tokens,
            check_vma=check_vma,
        )
        with pytest.raises(ValueError, match=wrong + ".*shard the layer as `eqx_moe.partition_specs` says"):
            jax.eval_shape(run, moe, X)

    def test_outside_of_shard_map(self):
        moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel())
        with pytest.raises(
            ValueError, match=r"mesh axis 'expert', which does not exist here: call it inside `jax.shard_map`"
        ):
            moe(X)

    def test_tokens_that_differ_along_tensor(self):
        parallel = ExpertParallel(tensor_axis="tensor", sequence_parallel=False)
        moe = make_moe(WIDTH, 8, EXPERTS, parallel=parallel)
        with pytest.raises(ValueError, match="tokens differ along the mesh axis 'tensor'"):
            self.run(moe, THREE, ("data", "expert", "tensor"))

    def test_buffers_that_there_are_not(self):
        with pytest.raises(ValueError, match="axis=None exchanges nothing"):
            ExpertParallel(axis=None, capacity_factor=1.0)

    @pytest.mark.parametrize("axes", [{"tensor_axis": "expert"}, {"tensor_axis": "x", "fsdp_axis": "x"}])
    def test_an_axis_used_twice(self, axes):
        with pytest.raises(ValueError, match="must be different mesh axes"):
            ExpertParallel(**axes)

    def test_exact_needs_nothing_without_a_bound(self):
        def size(overflow):
            moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(overflow=overflow))
            program = jax.make_jaxpr(sharded(moe, make_mesh(DATA), ("data", "expert")))(moe, X, MASK)
            return sum(1 for _ in equations(program))

        assert size(Overflow.EXACT) <= size(Overflow.COUNT) + 1  # the overflow, which is zero


def test_the_same_layer_anywhere():
    """`parallel` changes no parameter, so checkpoints of one layout serve another."""
    make = lambda parallel: eqx_moe.MoE(
        WIDTH, 8, EXPERTS, rule=eqx_moe.SoftmaxTopK(k=2), parallel=parallel, key=jax.random.key(0)
    )
    assert_equal(jax.tree.leaves(make(None)), jax.tree.leaves(make(ExpertParallel())))
