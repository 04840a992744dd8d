"""The type stubs of Transformer Engine are exactly what the library imports, and say what it really takes."""

import ast
import importlib
import inspect
from pathlib import Path

import jax.numpy as jnp
import pytest

from eqx_moe._te import why_no_te

HERE = Path(__file__).parents[1]
STUBS = HERE / "typing_stubs"
PACKAGES = ("transformer_engine", "transformer_engine_jax")


def stubs():
    """Every definition of the stubs, by module and name."""
    found = {}
    for file in sorted(STUBS.rglob("*.pyi")):
        module = ".".join(file.relative_to(STUBS).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[module, node.name] = node
    return found


def imported():
    """What the library takes from Transformer Engine: names that are imported, and attributes of imported modules."""
    found = set()
    for file in (HERE / "eqx_moe").rglob("*.py"):
        tree, modules = ast.parse(file.read_text()), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                found |= {(node.module, alias.name) for alias in node.names}
            if isinstance(node, ast.Import):
                modules |= {alias.asname: alias.name for alias in node.names if alias.name.split(".")[0] in PACKAGES}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                found.add((modules[node.value.id], node.attr))
    return found


def parameters(node):
    """Names in order, each with whether it has a default."""
    args = node.args
    assert not args.kwonlyargs and args.vararg is None and args.kwarg is None
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    values = [eval(ast.unparse(default), {"jnp": jnp}) for default in args.defaults]
    return names, [None] * (len(names) - len(values)) + values


def assert_same_parameters(node, real):
    names, defaults = parameters(node)
    signature = inspect.signature(real)
    assert names == list(signature.parameters)
    empty = inspect.Parameter.empty
    assert defaults == [None if p.default is empty else p.default for p in signature.parameters.values()]


def test_they_are_exactly_what_is_imported():
    assert set(stubs()) == imported()
    assert imported()  # the reading above finds something


@pytest.mark.gpu
@pytest.mark.parametrize("module, name", sorted(stubs()))
def test_they_say_what_transformer_engine_really_takes(module, name):
    if (reason := why_no_te()) is not None:
        pytest.skip(reason)
    node, real = stubs()[module, name], getattr(importlib.import_module(module), name)
    if isinstance(node, ast.FunctionDef) and inspect.isfunction(real):
        assert_same_parameters(node, real)
        return
    if isinstance(node, ast.FunctionDef):
        # Compiled functions tell their parameters in the first line of their docstring only.
        told = (real.__doc__ or "").splitlines()[0].split("->")[0]
        names, _ = parameters(node)
        assert told.startswith(f"{name}(") and told.count(": ") == len(names), told
        return
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            assert_same_parameters(member, getattr(real, member.name))
        elif isinstance(member, ast.AnnAssign):
            assert hasattr(real, ast.unparse(member.target))
