# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.permutation).
import jax

def token_dispatch(
    inp: jax.Array,
    routing_map: jax.Array,
    num_out_tokens: int,
    probs: jax.Array | None = None,
    align_size: int | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array | None, jax.Array]: ...
def token_combine(
    inp: jax.Array,
    row_id_map: jax.Array,
    merging_probs: jax.Array | None = None,
    pad_offsets: jax.Array | None = None,
) -> jax.Array: ...
def sort_chunks_by_index(
    inp: jax.Array, split_sizes: jax.Array, sorted_indices: jax.Array
) -> tuple[jax.Array, jax.Array]: ...
