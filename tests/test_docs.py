"""The Python blocks of the README and of every page in docs/ run, one after another, as a reader would run them."""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import eqx_moe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
GUIDE = [page for page in PAGES if not page.startswith("docs/api/")]


def run_blocks(page: str) -> tuple[int, dict]:
    """How many blocks ran, and the names they left."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return len(blocks), names


def test_every_python_block_runs(capsys, default_promotion):
    blocks, names = run_blocks("README.md")
    assert blocks >= 5
    assert "chosen: BlockedDot" in capsys.readouterr().out
    assert names["y"].shape == names["x"].shape


@pytest.mark.parametrize("page", GUIDE)
def test_every_python_block_of_the_page_runs(page, default_promotion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one writes a picture
    blocks, _ = run_blocks(page)
    assert blocks >= 1


def test_every_public_name_has_one_place_in_the_api():
    entries = [
        name for page in PAGES for name in re.findall(r"^::: eqx_moe\.(.*)$", (ROOT / page).read_text(), re.MULTILINE)
    ]
    public = {name for name, thing in vars(eqx_moe).items() if not name.startswith("_") and not inspect.ismodule(thing)}
    assert Counter(entries) == Counter(public)


def test_its_routing_rule_is_that_of_the_example():
    rule = next(block for block in README.split("```") if "class ThresholdTopK" in block)
    body = rule[rule.index("    def __call__") : rule.index("\n\n\ny, stats")]
    assert body in (ROOT / "examples" / "custom_router.py").read_text()


def test_its_measurements_are_those_checked_in():
    results = (ROOT / "benchmarks" / "results" / "grouped_matmul_cpu.md").read_text().splitlines()
    shown = [line for line in README.splitlines() if "| balanced |" in line]
    assert len(shown) == 9
    assert set(shown) <= set(results)
