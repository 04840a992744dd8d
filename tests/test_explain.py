"""What a layer says of itself without running."""

import jax
import jax.numpy as jnp
import pytest

import eqx_moe

from .helpers import make_moe, normal


def test_tells_sizes_and_kernels_without_running():
    moe = make_moe(8, 6, 5, k=2)
    told = eqx_moe.explain(moe, jax.ShapeDtypeStruct((3, 7, 8), jnp.float32), platform="cpu")
    assert told.rows == 42
    assert told.forward_flops == 6 * 42 * 8 * 6 and told.backward_flops == 2 * told.forward_flops
    assert told.weight_bytes == 5 * 3 * 8 * 6 * 4
    assert all(selection.matmul == eqx_moe.BlockedDot() for selection in told.selections.values())
    assert len(told.selections) == 6
    assert 42 * 2 * 6 * 4 <= told.kept_bytes <= 42 * (2 * 6 * 4 + 48) + 4 * 5
    assert told.padding_waste == pytest.approx(1 - 42 / (5 * 128))
    assert "gradient of w_down, " in str(told) and "rejected: MaskedDense()" in str(told)


def test_ungated_experts_compute_less():
    x = normal(4, 8)
    gated, plain = (eqx_moe.explain(make_moe(activation=a), x) for a in (eqx_moe.SwiGLU(), eqx_moe.GELU()))
    assert plain.forward_flops == gated.forward_flops * 2 / 3


def test_a_kernel_that_was_given_is_told():
    told = eqx_moe.explain(make_moe(matmul=eqx_moe.RaggedDot()), normal(4, 8))
    assert all(selection == eqx_moe.Selection(eqx_moe.RaggedDot(), ()) for selection in told.selections.values())


def test_unknown_platforms_are_refused():
    with pytest.raises(ValueError, match="platform='gpu' must be one of"):
        eqx_moe.explain(make_moe(), normal(4, 8), platform="gpu")


def test_a_layer_divided_among_devices():
    moe = make_moe(parallel=eqx_moe.ExpertParallel())
    with pytest.raises(ValueError, match=r"pass eqx_moe.with_parallel\(moe, None\)"):
        eqx_moe.explain(moe, normal(4, 8))
    assert eqx_moe.explain(eqx_moe.with_parallel(moe, None), normal(4, 8)).rows == 8
