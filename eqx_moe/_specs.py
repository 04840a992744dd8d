"""Where the parameters of layers lie on a mesh."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ._moe import MoE
from ._parallel import expert_specs


def partition_specs(tree: Any) -> Any:
    """The `jax.sharding.PartitionSpec` of every leaf: the experts of every [`eqx_moe.MoE`][] as its `parallel` says,
    all else whole on every device.

    ```python
    specs = eqx_moe.partition_specs((model, optimiser_state))
    ```

    An optimiser's state holds trees like the model, so their specs are found the same way.

    **Arguments:**

    - `tree`: any pytree of arrays (or of their shapes) with layers in it.

    **Returns:** a pytree of the same structure; for `in_specs` and `out_specs` of `jax.shard_map`, or with
    `jax.sharding.NamedSharding` for `jax.device_put` and `jax.jit`.
    """

    def specs_of(node):
        whole = jax.tree.map(lambda _: jax.P(), node)
        if not isinstance(node, MoE) or node.parallel is None:
            return whole
        return eqx.tree_at(lambda moe: moe.experts, whole, expert_specs(node.parallel, node.experts))

    return jax.tree.map(specs_of, tree, is_leaf=lambda node: isinstance(node, MoE))


def initialise_sharded(make: Callable[..., Any], mesh: jax.sharding.Mesh, *arguments: Any) -> Any:
    """`make(*arguments)`, a model or anything else with layers in it, made in place: every device computes and holds
    its own part alone, so that no device ever has the whole.

    ```python
    model = eqx_moe.initialise_sharded(lambda key: Model(key=key), mesh, jax.random.key(0))
    ```

    **Arguments:**

    - `make`: a function whose result is a pytree of arrays.
    - `mesh`: with the axes that the layers' `parallel` names.
    - `arguments`: of `make`.

    **Returns:** what `make` returns, sharded as [`eqx_moe.partition_specs`][] says. The numbers are those that `make`
    would draw on one device.
    """
    specs = partition_specs(jax.eval_shape(make, *arguments))
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    return jax.jit(make, out_shardings=shardings)(*arguments)
