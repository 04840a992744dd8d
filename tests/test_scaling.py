"""What docs/scaling.md says: its tables are those of the script, and XLA knows the flags that it names."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "scaling.md").read_text()


def test_tables_are_those_of_the_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling

    assert scaling.filled(PAGE) == PAGE


def test_xla_knows_the_flags():
    """XLA ends a process that sets a flag which it does not know."""
    (block,) = re.findall(r'export XLA_FLAGS="(.*?)"', PAGE, flags=re.DOTALL)
    assert len(block.split()) == 7
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    start = lambda flags: subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=environment | {"XLA_FLAGS": " ".join(flags)},
        capture_output=True,
        text=True,
    )
    assert start(block.split()).returncode == 0
    assert "Unknown flag" in start(["--xla_gpu_enable_no_such_thing=true"]).stderr
