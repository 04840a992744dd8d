"""A routing rule of your own, and what you are told when it returns the wrong thing.

python examples/custom_router.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import eqx_moe


class ThresholdTopK(eqx_moe.AbstractRoutingRule):
    """The `k` most probable experts, with weight zero for those below `threshold`."""

    k: int = eqx.field(static=True)
    threshold: float = eqx.field(static=True)

    def __call__(self, logits, *, bias=None):
        probabilities = jax.nn.softmax(logits)
        experts = eqx_moe.select_experts(probabilities, self.k, bias=bias)  # distinct and valid, also for NaN
        weights = jnp.take_along_axis(probabilities, experts, axis=-1)
        weights = jnp.where(weights < self.threshold, 0.0, weights)
        return eqx_moe.Routing(experts, weights, num_experts=logits.shape[-1])


class OneWeightTooFew(eqx_moe.AbstractRoutingRule):
    """The mistake: the weights are those of `k - 1` experts."""

    k: int = eqx.field(static=True)

    def __call__(self, logits, *, bias=None):
        routing = eqx_moe.SoftmaxTopK(self.k)(logits, bias=bias)
        return eqx_moe.Routing(routing.experts, routing.weights[:, 1:], num_experts=logits.shape[-1])


def main() -> str:
    """Runs a layer with either rule, and returns the message that the wrong one gave."""
    x = jax.random.normal(jax.random.key(0), (10, 16))
    moe = eqx_moe.MoE(16, 32, 8, rule=ThresholdTopK(k=3, threshold=0.1), key=jax.random.key(1))
    y, stats = moe(x)
    print(f"{y.shape} from experts with loads {stats.load}")

    try:
        eqx_moe.MoE(16, 32, 8, rule=OneWeightTooFew(k=3), key=jax.random.key(1))  # the rule is tried on one token
    except Exception as error:
        print(f"\n{error}")
        return str(error)
    raise AssertionError("the wrong rule was not noticed")


if __name__ == "__main__":
    main()
