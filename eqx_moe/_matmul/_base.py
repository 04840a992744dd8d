"""The contract of a grouped-matmul kernel."""

import abc
import dataclasses
import enum

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._permute import take_rows


class Product(enum.Enum):
    """The three products of a grouped matmul; the transposes of each are the other two. Per group of rows:"""

    NN = "x @ w"
    NT = "y @ w.T"
    TN = "x.T @ y"


class Side(enum.Enum):
    """Which side of a product is over tokens instead of rows."""

    NONE = "none"
    A = "the first operand, which is gathered"
    B = "the second operand, which is gathered"
    OUT = "the result, which is combined"


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is asked to do, as far as it is known before running.

    - `rows`, `d_in`, `d_out`, `experts`: the axes' sizes; the weights are `[experts, d_in, d_out]`.
    - `dtype`: the operands' NumPy dtype.
    - `product`: which of the three it is.
    - `side`: which side of it is over tokens.
    """

    rows: int
    d_in: int
    d_out: int
    experts: int
    dtype: jnp.dtype
    product: Product = Product.NN
    side: Side = Side.NONE

    @property
    def kept_width(self) -> int:
        """Of the two widths, the one that the operand over tokens does not have."""
        right = self.side is Side.B if self.product is Product.TN else self.product is Product.NT
        return self.d_in if right else self.d_out


class AbstractGroupedMatmul(eqx.Module):
    """A kernel that multiplies every group of rows by its own matrix.

    The rows of group `e` are the `sizes[e]` rows after those of the groups before it. A kernel owes its callers, for
    `0 <= sizes` and `sum(sizes) <= rows`:

    - rows of `nn` and `nt` past `sum(sizes)` are exactly zero, whatever the inputs hold there, NaN included;
    - `tn` of an empty group is exactly zero, and nothing past `sum(sizes)` reaches `tn`;
    - products are summed in at least float32 and returned in the dtype of the first operand.

    Differentiation, batching and gathering are not a kernel's business: [`eqx_moe.grouped_matmul`][] does them from
    these three products. A kernel that can load rows through an index overrides the four `gathered_` methods.

    All fields of a kernel are static, so that it has no leaves, compares by value and never retraces.
    """

    @abc.abstractmethod
    def nn(
        self, x: Float[Array, "rows d_in"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_out"]:
        """`x @ w` per group."""

    @abc.abstractmethod
    def nt(
        self, y: Float[Array, "rows d_out"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_in"]:
        """`y @ w.T` per group."""

    @abc.abstractmethod
    def tn(
        self, x: Float[Array, "rows d_in"], y: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "experts d_in d_out"]:
        """`x.T @ y` per group."""

    def gathered_nn(
        self,
        x: Float[Array, "tokens d_in"],
        index: Int[Array, " rows"],
        w: Float[Array, "experts d_in d_out"],
        sizes: Int[Array, " experts"],
    ) -> Float[Array, "rows d_out"]:
        """`x[index] @ w` per group; an index of `tokens` reads zeros."""
        return self.nn(take_rows(x, index), w, sizes)

    def gathered_nt(
        self,
        y: Float[Array, "tokens d_out"],
        index: Int[Array, " rows"],
        w: Float[Array, "experts d_in d_out"],
        sizes: Int[Array, " experts"],
    ) -> Float[Array, "rows d_in"]:
        """`y[index] @ w.T` per group; an index of `tokens` reads zeros."""
        return self.nt(take_rows(y, index), w, sizes)

    def gathered_tn(
        self,
        x: Float[Array, "tokens d_in"],
        index: Int[Array, " rows"],
        y: Float[Array, "rows d_out"],
        sizes: Int[Array, " experts"],
    ) -> Float[Array, "experts d_in d_out"]:
        """`x[index].T @ y` per group; an index of `tokens` reads zeros."""
        return self.tn(take_rows(x, index), y, sizes)

    def right_gathered_tn(
        self,
        x: Float[Array, "rows d_in"],
        y: Float[Array, "tokens d_out"],
        index: Int[Array, " rows"],
        sizes: Int[Array, " experts"],
    ) -> Float[Array, "experts d_in d_out"]:
        """`x.T @ y[index]` per group; an index of `tokens` reads zeros."""
        return self.tn(x, take_rows(y, index), sizes)

    def why_not(self, platform: str, problem: Problem) -> str | None:
        """Why this kernel should not be chosen for `problem` on `platform`; `None` if nothing speaks against it.

        **Arguments:**

        - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
        - `problem`: sizes and dtype.
        """
        del platform, problem
        return None

    def resolve(self, platform: str, problem: Problem) -> "AbstractGroupedMatmul":
        """The kernel that will run: this one, unless it is a choice between others."""
        del platform, problem
        return self


def in_groups(rows: int, sizes: Int[Array, " experts"]) -> Bool[Array, "rows 1"]:
    """True for the rows that belong to some group."""
    return (jnp.arange(rows, dtype=sizes.dtype) < sizes.sum(dtype=sizes.dtype))[:, None]


def group_of_row(rows: int, sizes: Int[Array, " experts"]) -> Int[Array, " rows"]:
    """The group of every row; `experts` for the rows past the last group."""
    index = jnp.arange(rows, dtype=sizes.dtype)
    return jnp.searchsorted(jnp.cumsum(sizes, dtype=sizes.dtype), index, side="right").astype(jnp.int32)
