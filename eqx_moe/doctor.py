"""What this machine offers to `eqx_moe`, what is wrong, and the command that mends it: `python -m eqx_moe.doctor`.

The exit status is 0 only if the best kernels for the machine can be used.
"""

import importlib.metadata
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp

import eqx_moe
from eqx_moe._te import cublas_version, why_no_te

_PACKAGES = {
    "eqx_moe": "eqx_moe",
    "JAX": "jax",
    "Transformer Engine": "transformer_engine_jax",
    "cuBLAS": "nvidia-cublas",
    "cuDNN": "nvidia-cudnn-cu13",
    "NCCL": "nvidia-nccl-cu13",
    "CUDA runtime": "nvidia-cuda-runtime",
}
# Rows, d_in, d_out, experts: a layer in training, and the same with one token to decode.
_PROBLEMS = {"many rows": (131072, 2048, 1536, 128), "few rows": (8, 2048, 1536, 128)}


def versions() -> dict[str, str]:
    """The version of every part; `"not found"` for those that are not installed as Python packages."""
    found = {"Python": sys.version.split()[0]}
    for name, package in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[name] = eqx_moe.__version__ if package == "eqx_moe" else "not found"
    if why_no_te() is None:
        found["cuBLAS"] = ".".join(map(str, cublas_version())) + " (as loaded)"
    found["NVIDIA driver"] = _driver()
    return found


def choices() -> dict[str, eqx_moe.Selection]:
    """What [`eqx_moe.AutoGroupedMatmul`][] chooses here in bfloat16, and why not the others."""
    choice = eqx_moe.AutoGroupedMatmul()
    return {
        name: choice.select(rows=rows, d_in=d_in, d_out=d_out, experts=experts, dtype=jnp.bfloat16)
        for name, (rows, d_in, d_out, experts) in _PROBLEMS.items()
    }


def complaints() -> list[str]:
    """What keeps the best kernels away, each with its remedy."""
    if jax.default_backend() == "gpu":
        reason = why_no_te()
        return [] if reason is None or "compute capability" in reason else [reason]
    if _driver() != "not found" and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        return ["there is an NVIDIA GPU, and JAX does not use it: pip install 'jax[cuda13]'"]
    return []


def main() -> int:
    for name, version in versions().items():
        print(f"{name:20} {version}")
    print(f"{'devices':20} {', '.join(device.device_kind for device in jax.devices())}")
    for name, selection in choices().items():
        print(f"\n{name}: {'rows {}, {} -> {}, {} experts'.format(*_PROBLEMS[name])}")
        print("  " + str(selection).replace("\n", "\n  "))
    found = complaints()
    print("\n" + ("\n".join(f"wrong: {complaint}" for complaint in found) if found else "nothing is wrong"))
    return 1 if found else 0


def _driver() -> str:
    try:
        told = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "not found"
    version = re.search(r"Driver Version: (\S+)", told)
    return version.group(1) if version else "not found"


if __name__ == "__main__":
    sys.exit(main())
