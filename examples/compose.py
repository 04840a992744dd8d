"""An MoE inside a model of your own, which is written for one example and used under `jax.vmap`.

    python examples/compose.py

The model regresses one number from a set of points. Only the line that makes `self.feed_forward` knows of experts.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

import eqx_moe


class SetModel(eqx.Module):
    """One example in, one number out: `[points, 3]` to a scalar."""

    embed: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    feed_forward: eqx_moe.MoE
    readout: eqx.nn.Linear

    def __init__(self, d_model: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(3, d_model, key=keys[0])
        self.norm = eqx.nn.LayerNorm(d_model)
        # Was: eqx.nn.MLP(d_model, d_model, 4 * d_model, 1, key=keys[1])
        self.feed_forward = eqx_moe.MoE(d_model, 2 * d_model, 8, rule=eqx_moe.SoftmaxTopK(k=2), key=keys[1])
        self.readout = eqx.nn.Linear(d_model, "scalar", key=keys[2])

    def __call__(self, points: Float[Array, "points 3"]) -> tuple[Float[Array, ""], eqx_moe.MoEStats]:
        hidden = jax.vmap(self.embed)(points)
        y, stats = self.feed_forward(jax.vmap(self.norm)(hidden))
        return self.readout((hidden + y).mean(axis=0)), stats


def loss_function(model: SetModel, points: Float[Array, "batch points 3"], targets: Float[Array, " batch"]):
    """Squared error, plus a little of the balance loss of all examples together."""
    predictions, stats = jax.vmap(model)(points)  # one grouped matmul for the whole batch, not one per example
    return ((predictions - targets) ** 2).mean() + 0.01 * eqx_moe.load_balance_loss(stats)


def main(steps: int = 200) -> list[float]:
    """Trains, and returns the losses."""
    points_key, model_key = jax.random.split(jax.random.key(0))
    points = jax.random.normal(points_key, (64, 16, 3))
    targets = jnp.linalg.norm(points, axis=-1).max(axis=-1)
    model = SetModel(32, key=model_key)
    optimiser = optax.adam(3e-3)

    @jax.jit  # needs no filtering: every leaf of this model is an array
    def step(model, state):
        loss, gradients = jax.value_and_grad(loss_function)(model, points, targets)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    state = optimiser.init(eqx.filter(model, eqx.is_array))
    losses = []
    for _ in range(steps):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {steps} steps")
    return losses


if __name__ == "__main__":
    main()
