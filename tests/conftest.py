"""Every test runs with 8 virtual CPU devices, strict promotion and warnings as errors."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
if not os.path.exists("/dev/nvidiactl"):
    # Nearly all of the tests' time is compilation of tiny programs, which LLVM need not optimise.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def eight_cpu_devices():
    assert len(jax.devices("cpu")) == 8, "the tests need 8 virtual CPU devices: XLA was started before conftest.py ran"


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def default_promotion():
    """JAX as users have it: the tests' strict promotion is switched off."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
