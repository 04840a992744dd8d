"""The layer on several devices, inside `jax.shard_map` and outside."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqx_moe

from .helpers import FAST, KERNELS, SEVERAL, assert_close, make_moe, normal, value_and_gradients


class TestShardMap:
    @pytest.mark.parametrize(
        "kernel, check_vma, axis_type",
        [
            ("blocked", True, AxisType.Auto),
            ("blocked", False, AxisType.Auto),
            ("ragged", True, AxisType.Explicit),
            ("masked", True, AxisType.Auto),
        ],
    )
    def test_equals_one_device(self, kernel, check_vma, axis_type):
        """Tokens sharded over 8 devices, weights replicated; the gradient is taken outside."""
        moe, x, mask = make_moe(matmul=KERNELS[kernel], **SEVERAL), normal(24, 8), jnp.arange(24) % 5 > 0
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
        whole, split = PartitionSpec(), PartitionSpec("data")

        def body(moe, x, mask):
            y, stats = moe(x, mask=mask)
            return y, eqx_moe.total_stats(stats, axis_name="data")

        sharded = jax.shard_map(
            body, mesh=mesh, in_specs=(whole, split, split), out_specs=(split, whole), check_vma=check_vma
        )
        expected = jax.jit(lambda *args: value_and_gradients(lambda moe, x, mask: moe(x, mask=mask), *args))(
            moe, x, mask
        )
        place = lambda tree, spec: jax.device_put(tree, jax.NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            run = jax.jit(lambda *args: value_and_gradients(sharded, *args))
            actual = run(place(moe, whole), place(x, split), place(mask, split))
        assert_close(actual, expected)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_gradient_inside(self, check_vma):
        """Taken inside, it is summed over devices by JAX with `check_vma`, and by hand without."""
        moe, x = make_moe(matmul=FAST, expert_bias=True), normal(16, 8)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

        def loss(moe, x):
            return jnp.sin(moe(x)[0]).sum()

        def body(moe, x):
            gradient = jax.grad(loss)(moe, x)
            return gradient if check_vma else jax.lax.psum(gradient, "data")

        specs = (PartitionSpec(), PartitionSpec("data"))
        sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)
        assert_close(jax.jit(sharded)(moe, x), jax.jit(jax.grad(loss))(moe, x))

    def test_vmap_inside(self):
        moe, x = make_moe(matmul=FAST), normal(16, 3, 8)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        body = lambda moe, x: jax.vmap(moe)(x)[0]
        specs = (PartitionSpec(), PartitionSpec("data"))
        sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1])
        assert_close(jax.jit(sharded)(moe, x), jax.jit(body)(moe, x))

    def test_tokens_sharded_without_shard_map(self):
        """On a mesh of `Auto` axes the compiler divides the layer as it divides any other."""
        moe, x = make_moe(matmul=FAST), normal(16, 8)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        run = jax.jit(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))
        sharded = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("data")))
        replicated = jax.device_put(moe, jax.NamedSharding(mesh, PartitionSpec()))
        assert_close(run(replicated, sharded), run(moe, x))


class TestExplicitAxes:
    """Outside `jax.shard_map`, on a mesh whose axes are explicit."""

    mesh = staticmethod(lambda: jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2))

    # jax 0.10 to 0.12 has no rule for `lax.ragged_dot` here ("Explicit sharding inference ... is not implemented"), and
    # Pallas' interpreter makes its blocks outside of the mesh.
    @pytest.mark.parametrize("kernel", sorted(set(KERNELS) - {"ragged", "tiled"}))
    def test_replicated_tokens(self, kernel):
        moe, x = make_moe(matmul=KERNELS[kernel], **SEVERAL), normal(3, 8, 8)
        expected = jax.jit(lambda moe, x: value_and_gradients(lambda moe, x: moe(x), moe, x))(moe, x)
        mesh = self.mesh()
        moe, x = jax.device_put((moe, x), jax.NamedSharding(mesh, PartitionSpec()))
        with jax.set_mesh(mesh):
            assert_close(jax.jit(lambda *args: value_and_gradients(lambda moe, x: moe(x), *args))(moe, x), expected)
            batched = jax.jit(lambda moe, x: jnp.sin(jax.vmap(moe)(x)[0]).sum())
            assert_close(batched(moe, x), jnp.sin(expected[0][0]).sum())

    def test_sharded_tokens_are_refused(self):
        moe, x = make_moe(matmul=FAST), normal(16, 8)
        x = jax.device_put(x, jax.NamedSharding(self.mesh(), PartitionSpec("data")))
        with (
            jax.set_mesh(self.mesh()),
            pytest.raises(ValueError, match=r"tokens is sharded as .*'data'.*inside `jax.shard_map`"),
        ):
            moe(x)

    def test_sharded_weights_are_refused(self):
        w = jax.device_put(normal(2, 8, 8), jax.NamedSharding(self.mesh(), PartitionSpec("model")))
        with (
            jax.set_mesh(self.mesh()),
            pytest.raises(ValueError, match=r"weights is sharded as .*'model'.*inside `jax.shard_map`"),
        ):
            eqx_moe.grouped_matmul(jnp.ones((4, 8)), w, jnp.array([2, 2]))
