# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.cpp_extensions).
# Import names from the submodules, never the submodule `gemm` itself: the package's attribute `gemm` is a function.
