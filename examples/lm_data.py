"""Text as bytes: read from files and folders, with a part set aside for evaluation."""

import sysconfig
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

MAX_BYTES = 32_000_000
# Tests, tables and foreign packages would crowd out the library proper.
NOT_PROPER = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class InputError(Exception):
    """What the user asked for cannot work; the message is the one sentence they see."""


def standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in sorted(root.rglob("*.py")) if NOT_PROPER.isdisjoint(file.relative_to(root).parts)]


def find_files(path: Path) -> list[Path]:
    """The file itself, or those in the folder except hidden ones."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"{path} is neither a file nor a folder")
    return [f for f in sorted(path.rglob("*")) if f.is_file() and "/." not in f"/{f.relative_to(path).as_posix()}"]


def read_text(paths: list[Path], context: int) -> tuple[UInt8[np.ndarray, " train"], UInt8[np.ndarray, " held_out"]]:
    """Joins the files in an order that looks random and is always the same, and cuts off a tenth for evaluation."""
    files = [file for path in paths for file in find_files(path)] if paths else standard_library()
    order = [files[index] for index in np.random.default_rng(0).permutation(len(files))]
    enough = np.searchsorted(np.cumsum([file.stat().st_size for file in order]), MAX_BYTES) + 1
    # Each content once: a copy could be held out and yet known by heart.
    contents = dict.fromkeys(file.read_bytes() for file in order[:enough])
    text = np.frombuffer(b"".join(content for content in contents if b"\0" not in content), np.uint8)[:MAX_BYTES]
    if not len(text):
        raise InputError(f"there is no text in {', '.join(map(str, paths)) or 'the standard library'}")
    train, held_out = np.split(text, [len(text) - len(text) // 10])
    if len(held_out) <= context:
        raise InputError(f"of {len(text)} bytes a tenth is held out, which has to be more than one --context {context}")
    return train, held_out
