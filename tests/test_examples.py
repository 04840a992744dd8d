"""The short examples run; the training example has tests of its own."""

import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compose_learns(default_promotion):
    losses = load("compose").main(steps=60)
    assert losses[-1] < losses[0] / 10


def test_custom_router_is_told_the_axis_and_both_sizes(default_promotion):
    message = load("custom_router").main()
    assert "'tokens k'" in message
    assert "f32[1,2]" in message
    assert "k=3" in message


def test_expert_parallel_equals_one_device(default_promotion):
    differences = load("expert_parallel").main()
    assert set(differences) == {"loss", "output", "router", "experts"}
    assert max(differences.values()) < 1e-5
