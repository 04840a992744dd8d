"""Where the parameters of layers lie on a mesh."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ._experts import Experts
from ._moe import MoE
from ._parallel import ExpertParallel, expert_specs


def partition_specs(tree: Any) -> Any:
    """The `jax.sharding.PartitionSpec` of every leaf: the experts of every [`eqx_moe.MoE`][] as its `parallel` says,
    all else whole on every device.

    ```python
    specs = eqx_moe.partition_specs((model, optimiser_state))
    ```

    An optimiser's state holds trees like the model, so their specs are found the same way. Axes in front of an expert's
    own, such as that of layers stacked by `equinox.filter_vmap`, are not divided.

    **Arguments:**

    - `tree`: any pytree of arrays (or of their shapes) with layers in it.

    **Returns:** a pytree of the same structure; for `in_specs` and `out_specs` of `jax.shard_map`, or with
    `jax.sharding.NamedSharding` for `jax.device_put` and `jax.jit`.
    """

    def specs_of(node):
        whole = jax.tree.map(lambda _: jax.P(), node)
        if not isinstance(node, MoE) or node.parallel is None:
            return whole
        return eqx.tree_at(lambda moe: moe.experts, whole, _experts_on_mesh(node.parallel, node.experts))

    return jax.tree.map(specs_of, tree, is_leaf=lambda node: isinstance(node, MoE))


def initialise_sharded(make: Callable[..., Any], mesh: jax.sharding.Mesh, *arguments: Any) -> Any:
    """`make(*arguments)`, a model or anything else with layers in it, made in place: every device computes and holds
    its own part alone, so that no device ever has the whole.

    ```python
    model = eqx_moe.initialise_sharded(lambda key: Model(key=key), mesh, jax.random.key(0))
    state = eqx_moe.initialise_sharded(optimiser.init, mesh, model)
    ```

    **Arguments:**

    - `make`: a function whose result is a pytree of arrays.
    - `mesh`: with the axes that the layers' `parallel` names.
    - `arguments`: of `make`.

    **Returns:** what `make` returns, sharded as [`eqx_moe.partition_specs`][] says. The numbers are those that
    `jax.jit(make)` draws on one device; outside of `jax.jit` the last bit of some may differ.

    **Raises:** `ValueError` if the mesh lacks an axis, or an axis that it has does not divide the parameters.
    """
    call = lambda *arguments: make(*arguments)  # JAX hashes functions, and `equinox.filter_vmap` makes some it cannot
    shapes = jax.eval_shape(call, *arguments)
    specs = partition_specs(shapes)
    jax.tree_util.tree_map_with_path(lambda path, leaf, spec: _check_fits(path, leaf.shape, spec, mesh), shapes, specs)
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    return jax.jit(call, out_shardings=shardings)(*arguments)


def with_parallel(tree: Any, parallel: ExpertParallel | None) -> Any:
    """The same arrays in layers that are divided in another way, or not at all.

    ```python
    alone = eqx_moe.with_parallel(model, None)  # runs outside of `jax.shard_map`; its checkpoints fit any mesh
    ```

    **Arguments:**

    - `tree`: any pytree with layers in it, such as a model or the state of an optimiser.
    - `parallel`: for all of them, an [`eqx_moe.ExpertParallel`][] or `None`.

    **Returns:** `tree` with `parallel` in every [`eqx_moe.MoE`][]; no array moves.
    """
    is_layer = lambda node: isinstance(node, MoE)
    where = lambda moe: moe.parallel
    change = lambda moe: eqx.tree_at(where, moe, parallel, is_leaf=lambda node: node is moe.parallel)
    return jax.tree.map(lambda node: change(node) if is_layer(node) else node, tree, is_leaf=is_layer)


def _experts_on_mesh(parallel: ExpertParallel, experts: Experts) -> Experts:
    """Those of `expert_specs`, for arrays with further axes in front. Where an optimiser keeps other arrays in the
    parameters' places, such as the factors of Adafactor, they are whole; what is no array stays."""
    front = _axes_in_front(experts)

    def fit(field, spec):
        if not hasattr(field, "ndim"):
            return field
        more = field.ndim - len(spec)
        return jax.P(*[None] * more, *spec) if more == front >= 0 else jax.P()

    return jax.tree.map(fit, experts, expert_specs(parallel, experts), is_leaf=lambda node: node is not experts)


def _axes_in_front(experts: Experts) -> int:
    """How many axes the parameters have in front of their own; -1 if these cannot be parameters of experts."""
    up, down = experts.w_gate_up, experts.w_down
    if not (hasattr(up, "ndim") and hasattr(down, "ndim")):  # one of them was left out
        return up.ndim - 4 if hasattr(up, "ndim") else getattr(down, "ndim", 2) - 3
    if up.ndim < 4 or down.ndim != up.ndim - 1:
        return -1
    (experts_of_up, d_model, _, d_ff), front = up.shape[-4:], up.ndim - 4
    return front if down.shape[-3:] == (experts_of_up, d_ff, d_model) else -1


def _check_fits(path: tuple, shape: tuple[int, ...], spec: jax.P, mesh: jax.sharding.Mesh) -> None:
    name = jax.tree_util.keystr(path).removeprefix(".")
    for dimension, axes in enumerate(spec):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        for axis in axes:
            if axis not in mesh.shape:
                raise ValueError(
                    f"{name} is divided over the mesh axis {axis!r}, and the mesh has {', '.join(mesh.axis_names)}: "
                    "add the axis to the mesh, or make the layer with another `parallel`"
                )
        devices = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % devices:
            raise ValueError(
                f"{name}: axis {dimension} has size {shape[dimension]}, which cannot be divided among the {devices} "
                f"devices along {' and '.join(map(repr, axes))} of the mesh: choose a size that is a multiple of "
                f"{devices}, or a smaller mesh"
            )
