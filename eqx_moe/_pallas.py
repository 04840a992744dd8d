"""What the kernels written in Pallas share."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int


def why_no_pallas(platform: str) -> str | None:
    """Why the library's Pallas kernels cannot be used on `platform` here; `None` if they can."""
    if platform != "cuda":
        return f"the Pallas kernels do not run on {platform}"
    device = jax.devices()[0]
    if gpu_platform(device) != "cuda":
        return "there is no NVIDIA GPU here to compile Pallas kernels for"
    capability = float(device.compute_capability)
    if not 9 <= capability < 12:
        return f"its tiles need the shared memory of a Hopper or Blackwell GPU: this one has capability {capability}"
    return None


def gpu_platform(device: Any) -> str | None:
    """`"cuda"` or `"rocm"`; `None` for other devices."""
    if device.platform != "gpu":
        return None
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def iota(size: int) -> Int[Array, " size"]:
    """0, 1, 2, ... in 32 bits, whether or not `jax_enable_x64` is on."""
    return jnp.arange(size, dtype=jnp.int32)


def power_of_two(size: int) -> int:
    """The lowest power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def out_struct(shape: tuple[int, ...], dtype, like: Array) -> jax.ShapeDtypeStruct:
    """A kernel's result, which varies over the same manual mesh axes as its operand `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def zero_tail(out: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]) -> Float[Array, "rows d_out"]:
    """`out` with zeros in the rows past `sum(sizes)`, in place: only these rows are written."""
    rows, d_out = out.shape
    height, width = 64, min(256, power_of_two(d_out))
    return pl.pallas_call(
        ft.partial(_zero_tail, height=height, width=width),
        grid=(pl.cdiv(rows, height),),
        out_shape=out_struct(out.shape, out.dtype, out),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name="moe_zero_tail",
    )(out, sizes.sum(dtype=jnp.int32, keepdims=True))


def _zero_tail(_, total_ref, out_ref, *, height: int, width: int):
    rows, d_out = out_ref.shape
    start, total = pl.program_id(0) * height, total_ref[0]

    @pl.when(start + height > total)
    def _():
        row = start + iota(height)
        empty = (row >= total) & (row < rows)

        def step(i, _):
            column = i * width + iota(width)
            mask = empty[:, None] & (column < d_out)[None, :]
            plt.store(out_ref.at[row[:, None], column[None, :]], jnp.zeros((height, width), out_ref.dtype), mask=mask)

        jax.lax.fori_loop(0, pl.cdiv(d_out, width), step, None)
