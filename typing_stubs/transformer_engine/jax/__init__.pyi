# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax).
