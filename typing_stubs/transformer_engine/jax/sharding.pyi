# Mirrors Transformer Engine 2.20.2 (transformer_engine.jax.sharding).
from contextlib import AbstractContextManager
from dataclasses import dataclass

@dataclass
class MeshResource:
    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None

def global_shard_guard(resource: MeshResource) -> AbstractContextManager[None]: ...
