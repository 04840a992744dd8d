"""What a layer will do on given tokens, told without running anything."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array, Float

from ._matmul._auto import AutoGroupedMatmul, Selection, default_platform
from ._matmul._base import Problem, Product, Side
from ._moe import MoE


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What [`eqx_moe.explain`][] found; `print` it.

    - `selections`: for every product of forward and backward pass (but those of biases) an [`eqx_moe.Selection`][].
    - `rows`: assignments, `tokens * k`.
    - `kept_bytes`: what lives between forward and backward pass beyond the tokens, the output and the parameters.
    - `forward_flops`, `backward_flops`: floating-point operations of the experts' products; nothing can be faster than
      these divided by the arithmetic rate of the device.
    - `weight_bytes`: the weights of the experts that can be active at most, as the products read them; nor faster than
      these divided by its memory bandwidth.
    - `padding_waste`: the share of rows that would be computed for nothing at a balanced load, by a kernel that works
      in blocks of 128 rows; see [`eqx_moe.padding_waste`][] for a real load.
    """

    selections: dict[str, Selection]
    rows: int
    kept_bytes: int
    forward_flops: float
    backward_flops: float
    weight_bytes: int
    padding_waste: float

    def __str__(self) -> str:
        lines = [
            f"rows: {self.rows}",
            f"kept for the backward pass: {self.kept_bytes / 2**20:.1f} MiB",
            f"arithmetic: {self.forward_flops / 1e9:.3g} GFLOP forward, {self.backward_flops / 1e9:.3g} backward",
            f"weights read: at most {self.weight_bytes / 2**20:.1f} MiB",
            f"padding at a balanced load, in blocks of 128 rows: {self.padding_waste:.0%}",
        ]
        products: dict[str, list[str]] = {}
        for name, selection in self.selections.items():
            products.setdefault(str(selection), []).append(name)
        for selection, names in products.items():
            lines += [f"{', '.join(names)}:", "  " + selection.replace("\n", "\n  ")]
        return "\n".join(lines)


def explain(
    moe: MoE, x: Float[Array, "*batch d_model"] | jax.ShapeDtypeStruct, *, platform: str | None = None
) -> Explanation:
    """Which kernels a layer will use on tokens of this shape and why not others, what it keeps and what it computes.

    **Arguments:**

    - `moe`: an [`eqx_moe.MoE`][].
    - `x`: `[..., d_model]`, or a `jax.ShapeDtypeStruct`; only shape and dtype matter.
    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`; by default the one JAX uses here.

    **Returns:** an [`eqx_moe.Explanation`][].

    **Raises:** `ValueError` for a layer with `parallel`; `ValueError` for another platform.
    """
    if moe.parallel is not None:
        raise ValueError(
            "explain tells of a layer on one device, and this one is divided among several: pass "
            "eqx_moe.with_parallel(moe, None); eqx_moe.plan_memory and AutoExchange.select tell of the exchange"
        )
    x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    experts, d_in, gates, d_ff = moe.experts.w_gate_up.shape
    rows = x.size // x.shape[-1] * moe.rule.k
    dtype, where = jnp.dtype(x.dtype), platform or default_platform()

    def choose(widths: tuple[int, int], product: Product, side: Side) -> Selection:
        return _choose(moe, Problem(rows, widths[0], widths[1], experts, dtype, product, side), where)

    up, down = (d_in, gates * d_ff), (d_ff, d_in)
    selections = {
        "up-projection": choose(up, Product.NN, Side.A),
        "down-projection": choose(down, Product.NN, Side.OUT),
        "gradient of the activation": choose(down, Product.NT, Side.A),
        "gradient of w_down": choose(down, Product.TN, Side.B),
        "gradient of w_gate_up": choose(up, Product.TN, Side.A),
        "gradient of the tokens": choose(up, Product.NT, Side.OUT),
    }
    flops = 2.0 * rows * d_in * d_ff * (gates + 1)
    parameters = d_in * d_ff * (gates + 1)
    active = min(experts, rows)
    padded = active * (-(-rows // (128 * active)) * 128) if active else 0
    return Explanation(
        selections,
        rows,
        _kept_bytes(moe, x),
        flops,
        2 * flops,
        active * parameters * dtype.itemsize,
        1 - rows / padded if padded else 0.0,
    )


def _choose(moe: MoE, problem: Problem, platform: str) -> Selection:
    if isinstance(moe.experts.matmul, AutoGroupedMatmul):
        return moe.experts.matmul.select(platform=platform, **vars(problem))
    return Selection(moe.experts.matmul.resolve(platform, problem), ())


def _kept_bytes(moe: MoE, x: jax.ShapeDtypeStruct) -> int:
    """The residuals of `jax.vjp` that are neither parameters nor tokens."""
    keep = lambda moe, x: jax.tree.leaves(jax.vjp(lambda moe, x: moe(x)[0], moe, x)[1])
    program = jax.make_jaxpr(keep)(moe, x).jaxpr
    kept = {v for v in program.outvars if not isinstance(v, Literal)} - {*program.invars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)
