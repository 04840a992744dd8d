"""The automatic choice of a kernel, which can say why."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from .._pallas import gpu_platform
from .._te import why_no_te
from ._base import AbstractGroupedMatmul, Problem, Product, Side
from ._blocked import BlockedDot
from ._masked import MaskedDense
from ._ragged import RaggedDot
from ._te_gemm import TEGroupedGemm
from ._tiled import TiledDot

PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "other")


@dataclasses.dataclass(frozen=True)
class Selection:
    """What [`eqx_moe.AutoGroupedMatmul`][] chose, and why it rejected the rest; `print` it.

    - `matmul`: the kernel that will run.
    - `rejected`: pairs of a kernel's name and the reason against it.
    """

    matmul: AbstractGroupedMatmul
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"chosen: {self.matmul}"]
        return "\n".join(lines + [f"rejected: {kernel}: {reason}" for kernel, reason in self.rejected])


class AutoGroupedMatmul(AbstractGroupedMatmul):
    """Chooses a kernel for each product, for the platform it is compiled for, when it is compiled.

    [`eqx_moe.AutoGroupedMatmul.select`][] tells the choice and the reasons without running anything.
    """

    def candidates(self, platform: str) -> tuple[AbstractGroupedMatmul, ...]:
        """The kernels to choose from on `platform`, best first; nothing ever speaks against the last one."""
        # Large blocks fill a GPU: an H200 did 192 TFLOP/s with these and 84 with the CPU's (8 experts of 4096 x 4096).
        blocked = BlockedDot(blocks=(256, 1024)) if platform in ("cuda", "rocm") else BlockedDot()
        best = (TEGroupedGemm(),) if platform == "cuda" and why_no_te() is None else ()
        return (*best, TiledDot(), RaggedDot(), blocked, MaskedDense())

    def select(
        self,
        *,
        rows: int,
        d_in: int,
        d_out: int,
        experts: int,
        dtype,
        product: Product = Product.NN,
        side: Side = Side.NONE,
        platform: str | None = None,
    ) -> Selection:
        """Which kernel will run, and why not the others.

        **Arguments:**

        - `rows`, `d_in`, `d_out`, `experts`: the sizes of the product.
        - `dtype`: of its operands.
        - `product`, `side`: which [`eqx_moe.Product`][] it is, and which [`eqx_moe.Side`][] of it is over tokens.
        - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`; by default the one JAX uses here.

        **Returns:** an [`eqx_moe.Selection`][].

        **Raises:** `ValueError` for another platform.
        """
        platform = platform or default_platform()
        if platform not in PLATFORMS:
            raise ValueError(f"platform={platform!r} must be one of {', '.join(PLATFORMS)}")
        problem = Problem(rows, d_in, d_out, experts, jax.numpy.dtype(dtype), product, side)
        reasons = [(kernel, kernel.why_not(platform, problem)) for kernel in self.candidates(platform)]
        chosen = next(kernel for kernel, reason in reasons if reason is None)
        others = [
            (str(kernel), reason or f"slower than {chosen}") for kernel, reason in reasons if kernel is not chosen
        ]
        if platform == "cuda" and (reason := why_no_te()) is not None:
            others.insert(0, ("TEGroupedGemm()", reason))
        return Selection(chosen, tuple(others))

    def resolve(self, platform: str, problem: Problem) -> AbstractGroupedMatmul:
        return self.select(platform=platform, **vars(problem)).matmul

    def nn(
        self, x: Float[Array, "rows d_in"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_out"]:
        return self._here(x.shape[0], w, sizes, Product.NN).nn(x, w, sizes)

    def nt(
        self, y: Float[Array, "rows d_out"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_in"]:
        return self._here(y.shape[0], w, sizes, Product.NT).nt(y, w, sizes)

    def tn(
        self, x: Float[Array, "rows d_in"], y: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "experts d_in d_out"]:
        shape = jax.ShapeDtypeStruct((sizes.shape[0], x.shape[1], y.shape[1]), x.dtype)
        return self._here(x.shape[0], shape, sizes, Product.TN).tn(x, y, sizes)

    def _here(self, rows: int, w, sizes: Array, product: Product) -> AbstractGroupedMatmul:
        problem = Problem(rows, w.shape[1], w.shape[2], sizes.shape[0], w.dtype, product)
        return self.resolve(default_platform(), problem)


def default_platform() -> str:
    """The platform that JAX uses here, by the name kernels know it."""
    device = jax.devices()[0]
    return gpu_platform(device) or device.platform
