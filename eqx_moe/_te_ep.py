"""Transformer Engine's expert parallelism over NCCL: its state, which is one for the process, and its five operations.

Never run so far: it takes several GPUs. What is known of it is written beside what relies on it.
"""

import ctypes
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8

from ._te import why_no_te

# Rows of every expert are padded to a multiple of this many: the least that the throughput kernels of NCCL take.
ALIGNMENT = 128
_NCCL_NEEDED = (2, 30, 4)


def why_no_te_ep() -> str | None:
    """Why it cannot be used here, and the remedy; `None` if it can."""
    if (reason := why_no_te()) is not None:
        return reason
    if jax.device_count() < 2:
        return "NCCL's expert parallelism needs at least two GPUs, and JAX sees one: use another exchange"
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return f"NCCL cannot be loaded ({error}): pip install 'nvidia-nccl-cu13>=2.30.4'"
    found = (version.value // 10000, version.value // 100 % 100, version.value % 100)
    if found < _NCCL_NEEDED:
        needed, found = (".".join(map(str, v)) for v in (_NCCL_NEEDED, found))
        remedy = f"pip install 'nvidia-nccl-cu13>={needed}'"
        return f"NCCL's expert parallelism needs NCCL {needed}, and {found} is loaded: {remedy}"
    return None


def bootstrap(mesh: jax.sharding.Mesh, axis: str, *, experts: int, d_model: int, tokens: int, slots: int) -> None:
    """Starts it in this process, together with all others."""
    from transformer_engine.jax.ep import ep_bootstrap
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    with warnings.catch_warnings(), global_shard_guard(MeshResource(ep_resource=axis)):
        # It asks for the mesh's devices, which `jax.set_mesh` does not tell it. JAX prefers that one.
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            ep_bootstrap(None, None, experts, tokens, slots, d_model)


def finalize() -> None:
    """Ends it, so that another can be started; JAX forgets all that it has compiled."""
    from transformer_engine.jax.ep import ep_finalize

    ep_finalize()


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The five operations of one layer: rows arrive in `slots` places, those of every expert from a multiple of
    `ALIGNMENT` on; `dispatch` and `combine` are linear, and their transposes are kernels too."""

    local_experts: int
    k: int
    slots: int

    def prepare(self, ids: Int32[Array, "tokens k"]) -> UInt8[Array, " handle"]:
        """The routing state, which is a value: layers share nothing. Ids of -1 stand for "nowhere"."""
        from transformer_engine_jax import ep_handle_mem_size

        size = ep_handle_mem_size(self.k, ALIGNMENT)
        shapes = ((1, self.local_experts), jnp.int32), ((1, 1), jnp.int32), ((1, size), jnp.uint8)
        return self._call("prepare", shapes, ids)[2][0]

    def dispatch(
        self,
        handle: UInt8[Array, " handle"],
        ids: Int32[Array, "tokens k"],
        x: Float[Array, "tokens d_model"],
        weights: Float32[Array, "tokens k"],
    ) -> tuple[Float[Array, "slots d_model"], Float32[Array, " slots"]]:
        shapes = ((1, self.slots, x.shape[1]), x.dtype), ((1, self.slots), jnp.float32)
        rows, row_weights = self._call("dispatch", shapes, handle[None], ids, x, weights)
        return rows[0], row_weights[0]

    def dispatch_transposed(
        self,
        handle: UInt8[Array, " handle"],
        rows: Float[Array, "slots d_model"],
        row_weights: Float32[Array, " slots"],
        tokens: int,
    ) -> tuple[Float[Array, "tokens d_model"], Float32[Array, "tokens k"]]:
        shapes = ((tokens, rows.shape[1]), rows.dtype), ((tokens, self.k), jnp.float32)
        x, weights = self._call("dispatch_bwd", shapes, handle[None], rows[None], row_weights[None])
        return x, weights

    def combine(
        self, handle: UInt8[Array, " handle"], rows: Float[Array, "slots d_model"], tokens: int
    ) -> Float[Array, "tokens d_model"]:
        return self._call("combine", (((tokens, rows.shape[1]), rows.dtype),), handle[None], rows[None])[0]

    def combine_transposed(
        self, handle: UInt8[Array, " handle"], y: Float[Array, "tokens d_model"]
    ) -> Float[Array, "slots d_model"]:
        return self._call("combine_bwd", (((1, self.slots, y.shape[1]), y.dtype),), handle[None], y)[0][0]

    def _call(self, name: str, results: tuple[tuple[tuple[int, ...], Any], ...], *operands: Array) -> Sequence[Array]:
        """One of the foreign functions that the import of Transformer Engine registers. They are called without its
        primitives because those divide themselves among devices, which `jax.shard_map` has done already."""
        run = jax.ffi.ffi_call(f"te_ep_{name}_ffi", [jax.ShapeDtypeStruct(*each) for each in results])
        attributes = {"top_k": self.k, "dispatch_output_per_expert_alignment": ALIGNMENT}
        return _among_collectives(lambda: run(*operands, **attributes))


def _among_collectives(run: Callable[[], Sequence[Array]]) -> Sequence[Array]:
    """On the stream of XLA's own collectives, where JAX can say so (0.11.1): two communicators that overlap in another
    order on every device could wait for each other for ever."""
    from jax.experimental.compute_on import compute_on

    if jax.__version_info__ < (0, 11, 1):
        return run()
    place: Any = compute_on  # another signature in JAX 0.10
    return place(compute_type="gpu_stream:collective", out_memory_spaces=jax.memory.Space.Device)(run)()
