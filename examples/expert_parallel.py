"""Expert parallelism, step by step: a layer whose experts lie on several devices, and the same layer on one.

    python examples/expert_parallel.py

It takes the GPUs there are, or else makes eight virtual CPU devices.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_moe

D_MODEL, D_FF, NUM_EXPERTS, K = 32, 64, 16, 2
TOKENS_PER_DEVICE = 16
AXES = ("data", "expert")
TOKENS = jax.P(AXES)  # tokens are divided among all devices, along both axes


def make_mesh() -> jax.sharding.Mesh:
    """Two groups of devices; within a group every device has other experts."""
    count = 2 ** (min(jax.device_count(), NUM_EXPERTS).bit_length() - 1)  # a power of two divides the experts
    groups = min(2, count)
    types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((groups, count // groups), AXES, axis_types=types, devices=jax.devices()[:count])


def make_layer(key: jax.Array, parallel: eqx_moe.ExpertParallel | None = None) -> eqx_moe.MoE:
    """The sizes are those of the whole layer, whatever a device will hold of it."""
    rule = eqx_moe.SoftmaxTopK(k=K)
    return eqx_moe.MoE(D_MODEL, D_FF, NUM_EXPERTS, rule=rule, parallel=parallel, key=key)


def mean_square(moe: eqx_moe.MoE, x: jax.Array, axis_name: tuple[str, ...] | None = None):
    """A loss, and the output. On a mesh `x` is what one device has: means have to be taken over the others too."""
    y, stats = moe(x)
    loss = (y**2).mean()
    loss = loss if axis_name is None else jax.lax.pmean(loss, axis_name)
    return loss + 0.01 * eqx_moe.load_balance_loss(stats, axis_name=axis_name), y


def train_step(loss_function, moe: eqx_moe.MoE, x: jax.Array):
    """Gradient descent. The gradient of an expert is complete on the device that has it, those of the router are
    summed over devices: JAX sees to both, because `shard_map` knows what is the same everywhere."""
    (loss, y), gradients = jax.value_and_grad(loss_function, has_aux=True)(moe, x)
    return eqx.apply_updates(moe, jax.tree.map(lambda g: -g, gradients)), loss, y


def difference(actual, expected) -> float:
    """The relative norm of what differs between all arrays of two pytrees."""
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))])
    return float(np.linalg.norm(flat(actual) - flat(expected)) / np.linalg.norm(flat(expected)))


def step_on_mesh(mesh: jax.sharding.Mesh, key: jax.Array, x: jax.Array):
    # The layer is made in place: no device ever holds all experts.
    parallel = eqx_moe.ExpertParallel(axis="expert")
    moe = eqx_moe.initialise_sharded(lambda key: make_layer(key, parallel), mesh, key)
    print(f"w_down is {moe.experts.w_down.shape}; a device holds {moe.experts.w_down.addressable_data(0).shape} of it")

    # One `shard_map` over all axes. The specs say where every parameter lies.
    in_specs = (eqx_moe.partition_specs(moe), TOKENS)
    body = ft.partial(mean_square, axis_name=AXES)
    loss_function = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=(jax.P(), TOKENS))
    x = jax.device_put(x, jax.NamedSharding(mesh, TOKENS))
    return jax.jit(ft.partial(train_step, loss_function))(moe, x)


def main() -> dict[str, float]:
    """Takes one step both ways; returns by how much they differ."""
    mesh = make_mesh()
    shards = mesh.shape["expert"]
    print(f"{mesh.size} {jax.devices()[0].platform} devices: {dict(mesh.shape)}, {NUM_EXPERTS // shards} experts each")

    # What travels between devices, and what it takes, is known before anything runs.
    sizes = {"tokens": TOKENS_PER_DEVICE, "k": K, "experts": NUM_EXPERTS, "shards": shards}
    widths = {"d_model": D_MODEL, "d_ff": D_FF, "dtype": jnp.float32}
    print(f"\n{eqx_moe.AutoExchange().select(**sizes, **widths)}\n\n{eqx_moe.plan_memory(**sizes, **widths)}\n")

    key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (TOKENS_PER_DEVICE * mesh.size, D_MODEL))
    moe, loss, y = step_on_mesh(mesh, key, x)
    one_moe, one_loss, one_y = jax.jit(ft.partial(train_step, mean_square))(make_layer(key), x)

    print(f"loss {float(loss):.6f} on all devices, {float(one_loss):.6f} on one")
    differences = {
        "loss": difference(loss, one_loss),
        "output": difference(y, one_y),
        "router": difference(moe.router, one_moe.router),
        "experts": difference(moe.experts, one_moe.experts),
    }
    print("relative differences: " + ", ".join(f"{name} {value:.1e}" for name, value in differences.items()))
    return differences


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts; GPUs are left as they are
    main()
