"""Transformer Engine: whether it can be used here, and its grouped product.

This file and `_te_ep.py` alone import it. It has to be imported before JAX starts its GPU client, so `eqx_moe` does it
where it is installed for JAX.
"""

import contextlib
import functools as ft
import importlib.metadata
import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

_INSTALL = "pip install 'eqx_moe[te]'"
# The first cuBLAS whose grouped product runs on Hopper; the answer of an older one is a crash inside XLA.
_CUBLAS_NEEDED = (13, 4)


def import_early() -> None:
    """Imports Transformer Engine if it is installed for JAX and JAX has not started yet; never raises."""
    with contextlib.suppress(Exception):  # whatever is wrong is told by `why_no_te`, to those who want to use it
        if _is_installed() and not _jax_has_started():
            import transformer_engine.jax  # noqa: F401


@ft.cache
def why_no_te() -> str | None:
    """Why Transformer Engine's grouped product cannot be used here, and the remedy; `None` if it can."""
    if not _is_installed():
        return f"Transformer Engine is not installed for JAX: {_INSTALL}"
    if "transformer_engine.jax" not in sys.modules and _jax_has_started():
        return "JAX had started before Transformer Engine was imported: import eqx_moe before the first use of JAX"
    try:
        import transformer_engine.jax  # noqa: F401
        import transformer_engine_jax as extension
    except Exception as error:
        return f"Transformer Engine cannot be imported ({type(error).__name__}: {error}): {_INSTALL}"
    if not any(device.platform == "gpu" for device in jax.devices()):
        return "Transformer Engine needs an NVIDIA GPU, and JAX sees none"
    capability = extension.get_device_compute_capability(0)
    if capability < 90:
        return f"Transformer Engine's grouped product needs compute capability 9.0 (Hopper), not {capability / 10}"
    version = cublas_version()
    if version < _CUBLAS_NEEDED:
        needed, found = (".".join(map(str, v)) for v in (_CUBLAS_NEEDED, version))
        return f"its grouped product needs cuBLAS {needed}, and {found} is loaded: pip install 'nvidia-cublas>=13.5'"
    return None


def cublas_version() -> tuple[int, int]:
    """Major and minor version of the cuBLAS that Transformer Engine uses."""
    import transformer_engine_jax as extension

    version = extension.get_cublasLt_version()
    return version // 10000, version // 100 % 100


def grouped_product(
    a: Array, b: Array, sizes: Int[Array, " experts"], *, a_is_ragged_inside: bool = False, transpose_b: bool = False
) -> Array:
    """`a @ b[e]`, `a @ b[e].T`, or, ragged inside, `a[group].T @ b[group]`; rows past the groups are *not written*.

    Binds Transformer Engine's inner primitive, because the outer one partitions itself over devices, which fails in the
    lowering of another primitive; everything sharded happens inside `jax.shard_map` anyway.
    """
    from transformer_engine.jax.cpp_extensions.gemm import GroupedGemmPrimitive
    from transformer_engine_jax import JAXX_Scaling_Mode, get_device_compute_capability

    none, unscaled = jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32)
    experts = sizes.shape[0]
    factors = experts if get_device_compute_capability(0) >= 100 else 1
    if a_is_ragged_inside:
        out_shape, first_dims = (experts, a.shape[1], b.shape[1]), (sizes, none, sizes, none, none, none)
        b_sizes = b.shape
        b_boundary = 1
    else:
        out_shape = (a.shape[0], b.shape[1] if transpose_b else b.shape[2])
        first_dims = (sizes, none, none, none, sizes, none)
        b_sizes = (b.shape[0] * b.shape[1], b.shape[2])
        b_boundary = 2
    out, *_ = GroupedGemmPrimitive.inner_primitive.bind(
        a,
        unscaled,
        b,
        unscaled,
        jnp.zeros((), jnp.float32),
        *first_dims,
        jnp.ones(factors, jnp.float32),
        jnp.zeros(factors, jnp.float32),
        lhs_is_trans=a_is_ragged_inside,
        rhs_is_trans=transpose_b,
        scaling_mode=JAXX_Scaling_Mode.NO_SCALING,
        out_dtype=a.dtype,
        has_bias=False,
        use_async_d2h_group_sizes=False,
        use_v2_ffi=True,
        lhs_axis_boundary=1,
        rhs_axis_boundary=b_boundary,
        out_shape=out_shape,
        lhs_left_size=a.shape[0],
        lhs_right_size=a.shape[1],
        rhs_left_size=b_sizes[0],
        rhs_right_size=b_sizes[1],
    )
    return out


def _is_installed() -> bool:
    try:
        importlib.metadata.distribution("transformer_engine_jax")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _jax_has_started() -> bool:
    from jax._src import xla_bridge  # there is no public way to ask without starting it

    return xla_bridge.backends_are_initialized()
