"""The doctor's report, and its exit status."""

import jax
import pytest

import eqx_moe
from eqx_moe import _te, doctor


@pytest.fixture(autouse=True)
def forget():
    _te.why_no_te.cache_clear()
    yield
    _te.why_no_te.cache_clear()


def test_report(capsys):
    status = doctor.main()
    said = capsys.readouterr().out
    assert f"JAX                  {jax.__version__}" in said
    assert "chosen: " in said and "rejected: " in said
    assert (status == 0) == ("nothing is wrong" in said)


@pytest.mark.parametrize(
    "backend, driver, expected", [("cpu", "not found", 0), ("cpu", "580.1", 1), ("gpu", "580.1", 1)]
)
def test_status_is_zero_only_for_the_best_kernels(monkeypatch, capsys, backend, driver, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    monkeypatch.setattr(doctor, "why_no_te", lambda: "Transformer Engine is not installed for JAX: pip install it")
    assert doctor.main() == expected
    assert ("pip install" in capsys.readouterr().out.split("\n\n")[-1]) == (expected == 1)


def test_transformer_engine_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(_te, "_is_installed", lambda: False)
    with pytest.raises(ImportError, match=r"not installed for JAX: pip install 'eqx_moe\[te\]'"):
        eqx_moe.TEGroupedGemm()


def test_transformer_engine_imported_too_late_is_told(monkeypatch):
    jax.devices()
    monkeypatch.setattr(_te, "_is_installed", lambda: True)
    with pytest.raises(ImportError, match="import eqx_moe before the first use of JAX"):
        eqx_moe.TEGroupedGemm()
