"""Where parameters and optimiser states lie on a mesh, and layers made in place on 8 virtual CPU devices."""

import functools as ft
import itertools
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import eqx_moe
from eqx_moe import ExpertParallel, Width

from .helpers import ALL, OPTIONS, assert_close, assert_equal, index, make_moe, normal

# Annotated so because optax's own annotations do not know that it takes Equinox modules.
ADAMW: Any = optax.adamw(1e-3)
FACTORED: Any = optax.adafactor(1e-3, min_dim_size_to_factor=2)
AXES = {"data": 2, "expert": 2, "tensor": 2}
BOTH = ("tensor", "data")
# How a layer is divided, and the specs of w_gate_up, w_down, b_gate_up and b_down.
LAYOUTS = {
    "experts": (
        ExpertParallel(),
        [("expert", None, None, None), ("expert", None, None), ("expert", None, None), ("expert", None)],
    ),
    "fsdp along d_ff": (
        ExpertParallel(fsdp_axis="data"),
        [("expert", None, None, "data"), ("expert", "data", None), ("expert", None, "data"), ("expert", None)],
    ),
    "fsdp along d_model": (
        ExpertParallel(fsdp_axis="data", fsdp_width=Width.D_MODEL),
        [("expert", "data", None, None), ("expert", None, "data"), ("expert", None, None), ("expert", "data")],
    ),
    "tensor": (
        ExpertParallel(tensor_axis="tensor"),
        [("expert", None, None, "tensor"), ("expert", "tensor", None), ("expert", None, "tensor"), ("expert", None)],
    ),
    "tensor and fsdp along d_ff": (
        ExpertParallel(tensor_axis="tensor", fsdp_axis="data"),
        [("expert", None, None, BOTH), ("expert", BOTH, None), ("expert", None, BOTH), ("expert", None)],
    ),
    "tensor and fsdp along d_model": (
        ExpertParallel(tensor_axis="tensor", fsdp_axis="data", fsdp_width=Width.D_MODEL),
        [
            ("expert", "data", None, "tensor"),
            ("expert", "tensor", "data"),
            ("expert", None, "tensor"),
            ("expert", "data"),
        ],
    ),
    "fsdp alone": (
        ExpertParallel(axis=None, fsdp_axis="data"),
        [(None, None, None, "data"), (None, "data", None), (None, None, "data"), (None, None)],
    ),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def make_mesh(axes=AXES, axis_type=AxisType.Auto):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))


def arrays(experts):
    return [experts.w_gate_up, experts.w_down, experts.b_gate_up, experts.b_down]


def without_experts(moe):
    return eqx.tree_at(lambda moe: moe.experts, moe, None)


def stacked(make, *counts):
    """`make(key)` for as many layers, with their axes in front."""
    for _ in counts:
        make = eqx.filter_vmap(make)
    return lambda key: make(jax.random.split(key, counts))


class TestPartitionSpecs:
    @each_layout
    def test_of_a_layer(self, layout):
        parallel, expected = LAYOUTS[layout]
        moe = make_moe(num_experts=4, parallel=parallel, **ALL)
        specs = eqx_moe.partition_specs(moe)
        assert arrays(specs.experts) == [jax.P(*spec) for spec in expected]
        assert set(jax.tree.leaves(without_experts(specs))) == {jax.P()}
        assert jax.tree.structure(specs) == jax.tree.structure(moe)

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_with_each_option(self, options):
        moe = make_moe(num_experts=4, parallel=ExpertParallel(fsdp_axis="data"), **options)
        specs = eqx_moe.partition_specs(moe)
        assert jax.tree.structure(specs) == jax.tree.structure(moe)
        for leaf, spec in zip(jax.tree.leaves(moe.experts), jax.tree.leaves(specs.experts), strict=True):
            assert len(spec) == leaf.ndim
            assert spec[0] == "expert"
        assert set(jax.tree.leaves(without_experts(specs))) == {jax.P()}

    def test_without_parallel_everything_is_whole(self):
        specs = eqx_moe.partition_specs({"moe": make_moe(**ALL), "other": jnp.ones(3)})
        assert set(jax.tree.leaves(specs)) == {jax.P()}

    def test_of_a_model_that_holds_several(self):
        """Divided each in its own way, and other parameters between them."""
        several = [make_moe(num_experts=4, parallel=parallel) for parallel, _ in LAYOUTS.values()]
        model = {"embedding": jnp.ones((5, 8)), "layers": several, "last": (eqx.nn.LayerNorm(8), make_moe())}
        specs = eqx_moe.partition_specs(eqx.filter(model, eqx.is_array))
        assert specs["embedding"] == jax.P()
        assert set(jax.tree.leaves(specs["last"])) == {jax.P()}
        for layer, (_, expected) in zip(specs["layers"], LAYOUTS.values(), strict=True):
            assert arrays(layer.experts) == [*(jax.P(*spec) for spec in expected[:2]), None, None]

    @each_layout
    @pytest.mark.parametrize("counts", [(3,), (2, 3)])
    def test_of_stacked_layers(self, layout, counts):
        parallel, expected = LAYOUTS[layout]
        make = lambda key: eqx_moe.MoE(8, 6, 4, rule=eqx_moe.SoftmaxTopK(k=2), parallel=parallel, key=key, **ALL)
        specs = eqx_moe.partition_specs(jax.eval_shape(stacked(make, *counts), jax.random.key(0)))
        front = (None,) * len(counts)
        assert arrays(specs.experts) == [jax.P(*front, *spec) for spec in expected]
        assert set(jax.tree.leaves(without_experts(specs))) == {jax.P()}

    def test_stacked_layers_run_with_them(self):
        parallel = ExpertParallel(fsdp_axis="data", exchange=eqx_moe.PaddedAllToAll())
        make = lambda parallel: stacked(
            lambda key: eqx_moe.MoE(8, 6, 4, rule=eqx_moe.SoftmaxTopK(k=2), parallel=parallel, key=key), 3
        )(jax.random.key(0))
        scan = lambda layers, x: jax.lax.scan(lambda x, moe: (x + moe(x)[0], None), x, layers)[0]
        layers, tokens = make(parallel), jax.P(("data", "expert", "tensor"))
        specs = (eqx_moe.partition_specs(layers), tokens)
        run = jax.shard_map(scan, mesh=make_mesh(), in_specs=specs, out_specs=tokens)
        x = normal(16, 8)
        assert_close(jax.jit(run)(layers, x), jax.jit(scan)(make(None), x))


class TestOptimiserState:
    moe = make_moe(num_experts=4, parallel=LAYOUTS["tensor and fsdp along d_model"][0], **ALL)

    def test_of_adamw(self):
        specs = eqx_moe.partition_specs(jax.eval_shape(ADAMW.init, self.moe))
        model_specs = eqx_moe.partition_specs(self.moe)
        assert eqx.tree_equal(specs[0].mu, model_specs)
        assert eqx.tree_equal(specs[0].nu, model_specs)
        assert specs[0].count == jax.P()

    def test_of_an_optimiser_that_leaves_arrays_alone(self):
        """The places of those hold no array, and no spec."""
        mask = eqx.tree_at(lambda moe: moe.experts.w_down, eqx_moe.trainable(self.moe), False)
        masked: Any = optax.masked(ADAMW, mask)
        state = jax.eval_shape(masked.init, self.moe)
        specs = eqx_moe.partition_specs(state)
        assert jax.tree.structure(specs) == jax.tree.structure(state)
        mu = specs.inner_state[0].mu
        assert mu.experts.w_gate_up == jax.P("expert", "data", None, "tensor")
        assert mu.experts.w_down == optax.MaskedNode()

    def test_factored_state_is_whole(self):
        state = jax.eval_shape(FACTORED.init, self.moe)
        assert set(jax.tree.leaves(eqx_moe.partition_specs(state)[0].v_row)) == {jax.P()}

    def test_factored_state_of_stacked_layers_is_whole(self):
        layers = jax.eval_shape(lambda moe: jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), moe), self.moe)
        specs = eqx_moe.partition_specs(jax.eval_shape(FACTORED.init, layers))[0]
        assert set(jax.tree.leaves((specs.v_row, specs.v_col))) == {jax.P()}
        assert eqx_moe.partition_specs(layers).experts.w_down[:2] == (None, "expert")


def check_placed(tree, mesh):
    """Every device holds the part that the specs say, and nothing else."""
    specs = eqx_moe.partition_specs(tree)
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        axes = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
        parts = [math.prod(mesh.shape[axis] for axis in group) for group in axes]
        shape = tuple(size // part for size, part in itertools.zip_longest(leaf.shape, parts, fillvalue=1))
        assert len(leaf.addressable_shards) == mesh.size
        assert {shard.data.shape for shard in leaf.addressable_shards} == {shape}
        for shard in leaf.addressable_shards:
            assert_equal(shard.data, np.asarray(leaf)[shard.index])


def largest_array(program: str) -> int:
    """How many elements the largest array has that a compiled program names, temporaries too."""
    shapes = re.findall(r"\b(?:[fsu]\d+|bf16|pred)\[([\d,]*)\]", program)
    return max(math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes)


def make_layer(parallel, d_model=8, d_ff=12, experts=4, **options):
    rule = eqx_moe.SoftmaxTopK(k=2)
    return lambda key: eqx_moe.MoE(d_model, d_ff, experts, rule=rule, parallel=parallel, key=key, **options)


@ft.cache
def on_one_device(**options):
    """The leaves that one device draws; how a layer is divided does not matter."""
    return jax.tree.leaves(jax.jit(make_layer(None, **options))(jax.random.key(1)))


class TestInitialiseSharded:
    @each_layout
    def test_is_what_one_device_draws(self, layout):
        mesh = make_mesh()
        moe = eqx_moe.initialise_sharded(make_layer(LAYOUTS[layout][0], expert_bias=True), mesh, jax.random.key(1))
        assert_equal(jax.tree.leaves(moe), on_one_device(expert_bias=True))
        check_placed(moe, mesh)

    def test_with_every_option_and_explicit_axes(self):
        mesh, make = make_mesh(axis_type=AxisType.Explicit), make_layer(LAYOUTS["experts"][0], **ALL)
        moe = eqx_moe.initialise_sharded(make, mesh, jax.random.key(1))
        assert_equal(jax.tree.leaves(moe), on_one_device(**ALL))
        check_placed(moe, mesh)

    def test_stacked_layers(self):
        """Those that are made one by one; `equinox.filter_vmap` gives a function that JAX cannot hash."""
        make, mesh, keys = (
            make_layer(ExpertParallel(fsdp_axis="data")),
            make_mesh(),
            jax.random.split(jax.random.key(0)),
        )
        layers = eqx_moe.initialise_sharded(eqx.filter_vmap(make), mesh, keys)
        one = jax.jit(make)
        for i in range(2):
            assert_equal(jax.tree.leaves(index(layers, i)), jax.tree.leaves(one(keys[i])))
        check_placed(layers, mesh)

    def test_optimiser_state_lies_with_the_parameters(self, default_promotion):
        mesh = make_mesh()
        moe = eqx_moe.initialise_sharded(make_layer(ExpertParallel(fsdp_axis="data")), mesh, jax.random.key(0))
        check_placed(eqx_moe.initialise_sharded(ADAMW.init, mesh, moe), mesh)
        state = ADAMW.init(moe)[0]  # without jax.jit zeros lie where the parameters do
        assert state.mu.experts.w_down.sharding == moe.experts.w_down.sharding

        def step(moe, state):
            updates, state = ADAMW.update(moe, state, moe)
            return eqx.apply_updates(moe, updates), state

        moe, state = jax.jit(step)(moe, eqx_moe.initialise_sharded(ADAMW.init, mesh, moe))
        assert moe.experts.w_down.addressable_shards[0].data.shape == (2, 6, 8)
        assert state[0].nu.experts.w_down.addressable_shards[0].data.shape == (2, 6, 8)

    @pytest.mark.parametrize("counts", [(), (3,)], ids=["one", "stacked"])
    def test_no_device_ever_has_the_whole(self, counts):
        """Not even the random bits of it: XLA draws those of a device's part alone, without communication."""
        mesh, key = make_mesh({"data": 2, "expert": 4}), jax.random.key(0)
        make = stacked(make_layer(ExpertParallel(fsdp_axis="data"), 64, 128, 32), *counts)
        shapes = jax.eval_shape(make, key)
        placed = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), eqx_moe.partition_specs(shapes))
        compiled: Any = jax.jit(make, out_shardings=placed).lower(key).compile()
        program, memory = compiled.as_text(), compiled.memory_analysis()
        assert largest_array(program) == shapes.experts.w_gate_up.size // mesh.size
        assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", program)
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes.experts))
        assert memory.output_size_in_bytes < 1.1 * whole / mesh.size + 4 * shapes.router.weight.size
        assert memory.temp_size_in_bytes < 0.4 * whole  # random bits, several times a device's part


class TestMistakes:
    def initialise(self, axes, d_ff=12, experts=4, counts=(), **options):
        parallel, rule = ExpertParallel(**options), eqx_moe.SoftmaxTopK(k=2)
        make = lambda key: {"moe": eqx_moe.MoE(8, d_ff, experts, rule=rule, parallel=parallel, key=key)}
        eqx_moe.initialise_sharded(stacked(make, *counts), make_mesh(axes), jax.random.key(0))

    def test_an_axis_that_the_mesh_lacks(self):
        expected = (
            r"\['moe'\].experts.w_gate_up is divided over the mesh axis 'tensor', and the mesh has data, expert: "
            "add the axis to the mesh, or make the layer with another `parallel`"
        )
        with pytest.raises(ValueError, match=expected):
            self.initialise({"data": 2, "expert": 4}, tensor_axis="tensor")

    @pytest.mark.parametrize("counts", [(), (3,)])
    def test_experts_that_do_not_divide(self, counts):
        expected = (
            rf"\['moe'\].experts.w_gate_up: axis {len(counts)} has size 6, which cannot be divided among the 4 devices "
            "along 'expert' of the mesh: choose a size that is a multiple of 4, or a smaller mesh"
        )
        with pytest.raises(ValueError, match=expected):
            self.initialise({"data": 2, "expert": 4}, experts=6, counts=counts)

    def test_a_width_that_two_axes_do_not_divide(self):
        expected = r"w_gate_up: axis 3 has size 6, which .* among the 4 devices along 'tensor' and 'data' of the mesh"
        with pytest.raises(ValueError, match=expected):
            self.initialise(AXES, d_ff=6, tensor_axis="tensor", fsdp_axis="data")
