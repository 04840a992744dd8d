"""The README's Python blocks run, one after another, as a reader would run them."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_every_python_block_runs(capsys, default_promotion):
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "chosen: BlockedDot" in capsys.readouterr().out
    assert names["y"].shape == names["x"].shape


def test_its_routing_rule_is_that_of_the_example():
    rule = next(block for block in README.split("```") if "class ThresholdTopK" in block)
    body = rule[rule.index("    def __call__") : rule.index("\n\n\ny, stats")]
    assert body in (Path(__file__).parent.parent / "examples" / "custom_router.py").read_text()


def test_its_measurements_are_those_checked_in():
    results = (
        (Path(__file__).parent.parent / "benchmarks" / "results" / "grouped_matmul_cpu.md").read_text().splitlines()
    )
    shown = [line for line in README.splitlines() if "| balanced |" in line]
    assert len(shown) == 9
    assert set(shown) <= set(results)
