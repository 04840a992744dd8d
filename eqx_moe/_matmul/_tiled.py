"""Grouped matmul as one program per tile of the result, for GPUs, in Pallas."""

import functools as ft

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._dtypes import accumulator
from .._pallas import iota, out_struct, power_of_two, why_no_pallas
from ._base import AbstractGroupedMatmul, Problem


class Tile(eqx.Module):
    """How much of the result one program computes: `rows x columns`, `inner` products at a time."""

    rows: int = eqx.field(static=True)
    columns: int = eqx.field(static=True)
    inner: int = eqx.field(static=True)
    warps: int = eqx.field(static=True)
    stages: int = eqx.field(static=True)


class TiledDot(AbstractGroupedMatmul):
    """A tile of the result per program, on GPUs.

    Every program finds its expert from the sizes, on the device. Tiles are as low as the groups are small, so that few
    rows per expert cost little more than reading the weights of the experts that have some. It needs nothing but JAX.

    **Arguments:**

    - `tile`: `(rows, columns, inner, warps, stages)` of every product; by default chosen by the problem's size.
    - `interpret`: whether to run in Pallas' interpreter, which works on any platform and is slow: for tests.
    """

    tile: tuple[int, int, int, int, int] | None = eqx.field(static=True, default=None)
    interpret: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        if self.tile is not None and any(side < 16 or side & (side - 1) for side in self.tile[:3]):
            raise ValueError(f"tile={self.tile}: rows, columns and inner must be powers of two of at least 16")

    def nn(
        self, x: Float[Array, "rows d_in"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_out"]:
        return self._rows(x, None, w, sizes, transpose=False)

    def nt(
        self, y: Float[Array, "rows d_out"], w: Float[Array, "experts d_in d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows d_in"]:
        return self._rows(y, None, w, sizes, transpose=True)

    def tn(
        self, x: Float[Array, "rows d_in"], y: Float[Array, "rows d_out"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "experts d_in d_out"]:
        return self._weights(x, None, y, sizes)

    def gathered_nn(
        self,
        x: Float[Array, "tokens d_in"],
        index: Int[Array, " rows"],
        w: Float[Array, "experts d_in d_out"],
        sizes: Int[Array, " experts"],
    ) -> Float[Array, "rows d_out"]:
        return self._rows(x, index, w, sizes, transpose=False)

    def gathered_nt(
        self,
        y: Float[Array, "tokens d_out"],
        index: Int[Array, " rows"],
        w: Float[Array, "experts d_in d_out"],
        sizes: Int[Array, " experts"],
    ) -> Float[Array, "rows d_in"]:
        return self._rows(y, index, w, sizes, transpose=True)

    def right_gathered_tn(
        self,
        x: Float[Array, "rows d_in"],
        y: Float[Array, "tokens d_out"],
        index: Int[Array, " rows"],
        sizes: Int[Array, " experts"],
    ) -> Float[Array, "experts d_in d_out"]:
        return self._weights(x, index, y, sizes, right=True)

    def gathered_tn(
        self,
        x: Float[Array, "tokens d_in"],
        index: Int[Array, " rows"],
        y: Float[Array, "rows d_out"],
        sizes: Int[Array, " experts"],
    ) -> Float[Array, "experts d_in d_out"]:
        return self._weights(x, index, y, sizes)

    def why_not(self, platform: str, problem: Problem) -> str | None:
        if self.interpret:
            return "the interpreter is for tests"
        if problem.dtype == jnp.float64:
            return "Triton's products are at most float32"
        return why_no_pallas(platform)

    def _rows(self, x: Array, index: Array | None, w: Array, sizes: Array, *, transpose: bool) -> Array:
        rows = x.shape[0] if index is None else index.shape[0]
        d_out = w.shape[1] if transpose else w.shape[2]
        tile = self._tile(rows, sizes.shape[0], d_out, x)
        starts, tiles = _schedule(sizes, rows, tile.rows)
        # Every group ends in at most one tile that is not full; the rows past the last group are one group more.
        most = rows // tile.rows + min(sizes.shape[0] + 1, rows)
        most = pl.cdiv(most, _ROW_TILES_TOGETHER) * _ROW_TILES_TOGETHER
        columns = pl.cdiv(d_out, tile.columns)
        kernel = ft.partial(_rows_kernel, tile=tile, transpose=transpose, experts=sizes.shape[0])
        operands = (x, w, starts, tiles) + (() if index is None else (index,))
        return self._call(kernel, (most * columns,), (rows, d_out), tile, operands, "moe_tiled_rows")

    def _weights(self, x: Array, index: Array | None, y: Array, sizes: Array, *, right: bool = False) -> Array:
        rows = y.shape[0] if index is None else index.shape[0]
        experts, d_in, d_out = sizes.shape[0], x.shape[1], y.shape[1]
        tile = self._tile_of_weights(rows, experts, d_in, d_out, x, gathered=index is not None)
        starts, _ = _schedule(sizes, rows, tile.rows)
        grid = (experts * pl.cdiv(d_in, tile.rows) * pl.cdiv(d_out, tile.columns),)
        operands = (x, y, starts) + (() if index is None else (index,))
        kernel = ft.partial(_weights_kernel, tile=tile, right=right)
        return self._call(kernel, grid, (experts, d_in, d_out), tile, operands, "moe_tiled_weights")

    def _call(self, kernel, grid, shape, tile: Tile, operands: tuple[Array, ...], name: str) -> Array:
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=out_struct(shape, operands[0].dtype, operands[0]),
            compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=self.interpret,
            name=name,
        )(*operands)

    def _tile(self, rows: int, experts: int, d_out: int, x: Array) -> Tile:
        if self.tile is not None:
            return Tile(*self.tile)
        per_expert = rows / experts
        columns = min(256, max(16, power_of_two(d_out)))
        inner = min(64 if x.dtype.itemsize <= 2 else 32, max(16, power_of_two(x.shape[1])))
        if per_expert > 64:
            return Tile(128, columns, inner, 8, 3)
        if per_expert > 16:
            return Tile(64, min(columns, 128), inner, 4, 4)
        inner = min(128 if x.dtype.itemsize <= 2 else 64, max(16, power_of_two(x.shape[1])))
        return Tile(16, min(columns, 32 if rows <= 64 else 64), inner, 4, 4)

    def _tile_of_weights(self, rows: int, experts: int, d_in: int, d_out: int, x: Array, *, gathered: bool) -> Tile:
        if self.tile is not None:
            return Tile(*self.tile)
        if gathered and x.dtype.itemsize <= 2:
            # Every step waits for its indices and then for its rows: many small steps are under way at a time.
            high, wide = (min(128, max(16, power_of_two(d))) for d in (d_in, d_out))
            return Tile(high, wide, 32, 4, 7)
        high, wide = (min(most, max(16, power_of_two(d))) for most, d in ((128, d_in), (256, d_out)))
        inner = 64 if x.dtype.itemsize <= 2 and rows / experts > 32 else 32
        return Tile(high, wide, inner, 8, 3)


def _schedule(sizes: Int[Array, " experts"], rows: int, height: int) -> tuple[Array, Array]:
    """Where the groups start, in rows and in tiles of `height` rows. Behind the experts come the rows that belong to
    none, then the end of all, then numbers that no tile reaches, so that the length is a power of two."""
    # Sizes that promise more rows than there are must not make a kernel write past the end.
    stops = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    sizes = jnp.diff(jnp.append(stops, rows), prepend=0).astype(jnp.int32)
    room = power_of_two(sizes.shape[0] + 2) - sizes.shape[0] - 1
    starts, tiles = (
        jnp.concatenate(
            [
                jnp.zeros(1, jnp.int32),
                jnp.cumsum(counts, dtype=jnp.int32),
                jnp.full(room, jnp.iinfo(jnp.int32).max, jnp.int32),
            ]
        )
        for counts in (sizes, (sizes + height - 1) // height)
    )
    return starts, tiles


def _rows_kernel(x_ref, w_ref, starts_ref, tiles_ref, *refs, tile: Tile, transpose: bool, experts: int):
    *index_refs, out_ref = refs
    d_in, d_out = x_ref.shape[1], out_ref.shape[1]
    row_tile, column_tile = _swizzled(pl.program_id(0), pl.cdiv(d_out, tile.columns), _ROW_TILES_TOGETHER)
    expert = jnp.sum((tiles_ref[...] <= row_tile).astype(jnp.int32), dtype=jnp.int32) - 1
    columns = column_tile * tile.columns + iota(tile.columns)
    rows = starts_ref[expert] + (row_tile - tiles_ref[expert]) * tile.rows + iota(tile.rows)
    inside = rows < starts_ref[expert + 1]
    kept = inside[:, None] & (columns < d_out)[None, :]

    @pl.when(expert < experts)
    def _():
        sources, known = _sources(index_refs, rows, inside, x_ref.shape[0])
        columns_exist = _exists(columns, d_out, tile.columns)

        def step(i, total):
            inner = i * tile.inner + iota(tile.inner)
            inner_exists = _exists(inner, d_in, tile.inner)
            a = _load(x_ref, sources, inner, known, inner_exists)
            if transpose:
                b = _load(w_ref, columns, inner, columns_exist, inner_exists, expert)
            else:
                b = _load(w_ref, inner, columns, inner_exists, columns_exist, expert)
            return total + _dot(a, b, trans_b=transpose)

        zero = jnp.zeros((tile.rows, tile.columns), accumulator(x_ref.dtype))
        total = lax.fori_loop(0, pl.cdiv(d_in, tile.inner), step, zero)
        plt.store(out_ref.at[rows[:, None], columns[None, :]], total.astype(out_ref.dtype), mask=kept)

    @pl.when(expert == experts)
    def _():
        zero = jnp.zeros((tile.rows, tile.columns), out_ref.dtype)
        plt.store(out_ref.at[rows[:, None], columns[None, :]], zero, mask=kept)


def _weights_kernel(x_ref, y_ref, starts_ref, *refs, tile: Tile, right: bool):
    *index_refs, out_ref = refs
    _, d_in, d_out = out_ref.shape
    high, wide = pl.cdiv(d_in, tile.rows), pl.cdiv(d_out, tile.columns)
    expert, within = pl.program_id(0) // (high * wide), pl.program_id(0) % (high * wide)
    left = within // wide * tile.rows + iota(tile.rows)
    across = within % wide * tile.columns + iota(tile.columns)
    start, stop = starts_ref[expert], starts_ref[expert + 1]

    def step(i, total):
        rows = start + i * tile.inner + iota(tile.inner)
        inside = rows < stop
        sources, known = _sources(index_refs, rows, inside, (y_ref if right else x_ref).shape[0])
        (x_rows, x_known), (y_rows, y_known) = ((rows, inside), (sources, known))[:: 1 if right else -1]
        a = _load(x_ref, x_rows, left, x_known, _exists(left, d_in, tile.rows))
        b = _load(y_ref, y_rows, across, y_known, _exists(across, d_out, tile.columns))
        return total + _dot(a, b, trans_a=True)

    zero = jnp.zeros((tile.rows, tile.columns), accumulator(x_ref.dtype))
    total = lax.fori_loop(0, (stop - start + tile.inner - 1) // tile.inner, step, zero)
    kept = (left < d_in)[:, None] & (across < d_out)[None, :]
    plt.store(out_ref.at[expert, left[:, None], across[None, :]], total.astype(out_ref.dtype), mask=kept)


# Programs that run at the same time read the same rows and the same weights, as long as both fit into the cache.
_ROW_TILES_TOGETHER = 8


def _swizzled(program, columns: int, together: int):
    """Row tile and column tile of a program: `together` row tiles of one column tile follow each other."""
    block, within = program // (together * columns), program % (together * columns)
    return block * together + within % together, within // together


def _sources(index_refs, rows, inside, tokens: int):
    """Which rows of `x` to read, and which of them exist."""
    if not index_refs:
        return rows, inside
    sources = plt.load(index_refs[0].at[rows], mask=inside, other=tokens)
    return sources, sources < tokens


def _exists(index, size: int, block: int):
    """Which of the indices exist, or `None` where all of them always do."""
    return None if size % block == 0 else index < size


def _load(ref, rows, columns, row_exists, column_exists, expert=None):
    """A tile of `ref`, of the expert's part of it if there is one, with zeros where a row or a column does not exist;
    `None` stands for "all exist"."""
    index = (rows[:, None], columns[None, :])
    ref = ref.at[index if expert is None else (expert, *index)]
    masks = [] if row_exists is None else [row_exists[:, None]]
    masks += [] if column_exists is None else [column_exists[None, :]]
    if not masks:
        return plt.load(ref)
    mask = jnp.broadcast_to(ft.reduce(jnp.logical_and, masks), (rows.shape[0], columns.shape[0]))
    return plt.load(ref, mask=mask, other=0)


def _dot(a, b, *, trans_a: bool = False, trans_b: bool = False):
    dimensions = (((0 if trans_a else 1,), (1 if trans_b else 0,)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=accumulator(a.dtype)
    )
