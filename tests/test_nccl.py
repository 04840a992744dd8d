"""NCCL's exchange: its emulation on 8 virtual CPU devices, and what is lowered for GPUs. Its kernels run nowhere."""

import contextlib
import ctypes
import itertools
import re
import sys
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_moe
from eqx_moe import ExpertParallel
from eqx_moe._exchange import _nccl
from eqx_moe._exchange._nccl_emulated import rows_of_slots, slots_for
from eqx_moe._te_ep import ALIGNMENT, why_no_te_ep

from .helpers import SEVERAL, assert_close, assert_equal, make_moe, normal, value_and_gradients
from .meshes import COMPOSITIONS, DATA, MASK, WIDTH, X, check, make_mesh, sharded
from .test_exchange import EXPERTS, LOADS, SHARDS, TOKENS, K, all_rounds, counts, draw, on_shards


def exchange(d_model=3, shards=SHARDS, tokens=64, k=4, experts=EXPERTS):
    return eqx_moe.NCCLExchange(eqx_moe.NCCLGroup(experts, d_model, tokens, k, shards))


class TestSendAndReceive:
    @pytest.mark.parametrize("load", LOADS)
    @pytest.mark.parametrize("factor", [None, 0.4, 1.0])
    def test_every_round_together_serve_each_assignment_once(self, load, factor):
        ids, x = draw(load), normal(SHARDS * TOKENS, 3)
        weights = normal(*ids.shape, seed=1)
        y, served, rounds, most = all_rounds(exchange(), factor)((x, jnp.asarray(ids), weights))
        known = ids < EXPERTS
        factors = np.where(known, np.asarray(weights) * (1 + ids), 0).sum(axis=1)
        assert_close(y, np.asarray(x) * factors[:, None])
        assert_equal(served, np.bincount(ids[known], minlength=EXPERTS))
        assert len(set(np.asarray(rounds))) == 1 and 1 <= rounds[0] <= most[0]

    @pytest.mark.parametrize("load", LOADS)
    def test_rounds_and_overflow(self, load):
        ids = draw(load)
        rounds, overflow, served = counts(exchange())(jnp.asarray(ids))
        rounds, served = int(rounds[0]), np.asarray(served).sum(axis=0)
        assert served.sum() == (ids < EXPERTS).sum() and overflow.sum() == served[1:].sum()
        assert not served[rounds:].any() and (rounds == 1 or served[rounds - 1])

    @pytest.mark.parametrize("factor", [None, 0.6])
    def test_transposes_are_adjoint(self, factor):
        """Of both maps, and of either value alone: <send(x, w), (a, b)> is <(x, w), transpose(a, b)>."""

        def run(x, ids, weights):
            plan = exchange().plan(eqx_moe.Routing(ids, weights, EXPERTS), axis_name="expert", capacity_factor=factor)
            vary = lambda a: jax.lax.pcast(a, "expert", to="varying")
            like = lambda a: vary(jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape))
            dot = lambda a, b: jax.lax.psum(sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b))), "expert")
            send = lambda x, w: exchange().send(x, w, plan)
            receive = lambda rows: exchange().receive(rows, plan)
            pairs = []
            for f, args in (
                (send, (x, weights)),
                (lambda x: send(x, jax.lax.stop_gradient(weights)), (x,)),
                (lambda w: send(x, w), (weights,)),
                (receive, (like(send(x, weights)[0]),)),
            ):
                out, pull_back = jax.vjp(f, *args)
                _, along = jax.jvp(f, args, args)
                cotangent = jax.tree.map(like, out)
                pairs.append((dot(along, cotangent), dot(args, pull_back(cotangent))))
            return jax.tree.map(vary, jnp.asarray(pairs)[None])

        operands = normal(SHARDS * TOKENS, 3), jnp.asarray(draw("to two shards")), normal(SHARDS * TOKENS, K, seed=1)
        pairs = on_shards(lambda args: run(*args))(operands)[0]
        assert (jnp.abs(pairs) > 0.1).all()
        assert_close(pairs[:, 0], pairs[:, 1])

    def test_nothing_is_read_from_other_tokens_nor_from_padding(self):
        ids = np.where(np.arange(SHARDS * TOKENS)[:, None] % 3 == 0, EXPERTS, draw("to two shards"))
        x = jnp.where(np.any(ids < EXPERTS, axis=1, keepdims=True), normal(SHARDS * TOKENS, 3), jnp.nan)

        def run(x, ids):
            plan = exchange().plan(eqx_moe.Routing(ids, jnp.ones(ids.shape), EXPERTS), axis_name="expert")
            arrived = exchange().send(x, jnp.ones(ids.shape), plan)[0]
            used = (plan.grouping.position < plan.grouping.order.shape[0]).any(axis=1)
            arrived = jnp.where(used[:, None], arrived, jnp.nan)
            rows = eqx_moe.combine(eqx_moe.dispatch(arrived, plan.grouping), plan.grouping)
            return rows, exchange().receive(rows, plan)

        for result in on_shards(lambda args: run(*args))((x, jnp.asarray(ids))):
            assert np.isfinite(result).all()


@pytest.mark.parametrize("composition", ["experts alone", "data x experts", "exact rounds", "all at once"])
def test_the_layer_equals_one_device(composition):
    axes, options, tokens = COMPOSITIONS[composition]
    parallel = ExpertParallel(exchange=exchange(WIDTH, axes["expert"]), **options)
    check(make_moe(WIDTH, 8, EXPERTS, parallel=parallel, **SEVERAL), make_mesh(axes), tokens)


def test_slots():
    sizes = np.array([3, 0, ALIGNMENT, ALIGNMENT + 1], np.int32)
    slots = slots_for(int(sizes.sum()), len(sizes))
    row = np.asarray(rows_of_slots(jnp.asarray(sizes), slots, fill=-1))
    assert_equal(row[row >= 0], np.arange(sizes.sum()))
    starts = np.flatnonzero(row >= 0)[np.cumsum(sizes) - sizes][sizes > 0]
    assert_equal(starts, ALIGNMENT * np.array([0, 1, 2]))
    for rows, experts in itertools.product((1, 127, 128, 129, 1000), (1, 3, 64)):
        worst = max(rows // experts, 1)  # one row more than a multiple, for as many experts as there can be
        assert slots_for(rows, experts) >= min(experts, rows) * -(-worst // ALIGNMENT) * ALIGNMENT


@pytest.fixture
def on_gpus(monkeypatch):
    """As if there were GPUs, with what is called of Transformer Engine written down instead of done."""
    called = []
    modules = {
        "transformer_engine_jax": {"ep_handle_mem_size": lambda k, alignment: 1000 * k + alignment},
        "transformer_engine": {},
        "transformer_engine.jax": {},
        "transformer_engine.jax.ep": {
            "ep_bootstrap": lambda *args: called.append(("bootstrap", *args)),
            "ep_finalize": lambda: called.append(("finalize",)),
        },
        "transformer_engine.jax.sharding": {
            "MeshResource": lambda **axes: axes,
            "global_shard_guard": lambda axes: contextlib.nullcontext(called.append(("axes", axes))),
        },
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_nccl, "default_platform", lambda: "cuda")
    monkeypatch.setattr(_nccl._te_ep, "why_no_te_ep", lambda: None)
    monkeypatch.setattr(_nccl, "_started", None)
    return called


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_is_lowered_for_gpus(on_gpus, check_vma):
    each = exchange(WIDTH)
    each.group.bootstrap(mesh := make_mesh(DATA))
    moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(exchange=each), **SEVERAL)
    moe = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), moe)
    run = jax.jit(lambda *args: value_and_gradients(sharded(moe, mesh, ("data", "expert"), check_vma), *args))
    text = run.trace(moe, X.astype("bfloat16"), MASK).lower(lowering_platforms=("cuda",)).as_text()
    calls = Counter(re.findall(r"custom_call @te_ep_(\w+)_ffi", text))
    assert calls == {"prepare": 1, "dispatch": 1, "combine": 1, "combine_bwd": 1, "dispatch_bwd": 1}
    k = moe.rule.k
    assert text.count(f"dispatch_output_per_expert_alignment = {ALIGNMENT} : i64, top_k = {k} : i64") == 5
    assert f"tensor<1x{1000 * k + ALIGNMENT}xui8>" in text  # the handle
    if jax.__version_info__ >= (0, 11, 1):
        on_stream = r'func\.call @compute_on\w*\(.*_xla_stream_annotation = "collective"'
        assert len(re.findall(on_stream, text)) == 5


class TestGroup:
    def test_is_started_once_in_a_process(self, on_gpus):
        first, mesh = exchange(WIDTH).group, make_mesh(DATA)
        first.bootstrap(mesh)
        first.bootstrap(mesh)
        slots = slots_for(SHARDS * 64 * 2, 2)
        assert on_gpus == [("axes", {"ep_resource": "expert"}), ("bootstrap", None, None, EXPERTS, 64, slots, WIDTH)]
        with pytest.raises(RuntimeError, match=r"NCCLGroup\(.*d_model=8.*was started .* before NCCLGroup\(.*d_model=9"):
            exchange(9).group.bootstrap(mesh)
        exchange(9).group.finalize()  # was not started: nothing to end
        first.finalize()
        exchange(9).group.bootstrap(mesh)
        assert [name for name, *_ in on_gpus] == ["axes", "bootstrap", "finalize", "axes", "bootstrap"]

    def test_mistakes_on_gpus(self, on_gpus, monkeypatch):
        moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(exchange=exchange(WIDTH)), **SEVERAL)
        run = jax.jit(sharded(moe, make_mesh(DATA), ("data", "expert")))
        with pytest.raises(RuntimeError, match=r"was not started in this process .none was.: call its `bootstrap`"):
            run(moe, X, MASK)
        exchange(WIDTH).group.bootstrap(make_mesh(DATA))
        with pytest.raises(ValueError, match="NCCL's kernels move bfloat16, and tokens are float32: cast them"):
            run(moe, X, MASK)
        exchange(WIDTH).group.finalize()
        monkeypatch.setattr(_nccl._te_ep, "why_no_te_ep", lambda: "not here")
        with pytest.raises(RuntimeError, match="not here"):
            exchange(WIDTH).group.bootstrap(make_mesh(DATA))

    def test_a_layer_that_does_not_fit(self):
        moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(exchange=exchange(9, tokens=7)), **SEVERAL)
        with pytest.raises(
            ValueError, match=r"tokens=8, and the group has at most 7\. There is one group in a process"
        ):
            sharded(moe, make_mesh(DATA), ("data", "expert"))(moe, X, MASK)
        for group, wrong in (
            (exchange(WIDTH, experts=16), "experts=8, and the group has 16"),
            (exchange(WIDTH, shards=2), "shards=4, and the group has 2"),
            (exchange(9), "d_model=8, and the group that NCCLExchange was made with has 9"),
        ):
            moe = make_moe(WIDTH, 8, EXPERTS, parallel=ExpertParallel(exchange=group), **SEVERAL)
            with pytest.raises(ValueError, match=wrong):
                sharded(moe, make_mesh(DATA), ("data", "expert"))(moe, X, MASK)

    def test_sizes_that_make_no_sense(self):
        with pytest.raises(ValueError, match="tokens=0 must be at least 1"):
            exchange(tokens=0)
        with pytest.raises(ValueError, match="experts=8 cannot be divided among shards=3"):
            exchange(shards=3)
        with pytest.raises(ValueError, match="k=9 cannot be larger than experts=8"):
            exchange(k=9)
        with pytest.raises(
            ValueError, match=r"shards=4, and the mesh has .*along 'expert' it must have as many devices"
        ):
            exchange().group.bootstrap(make_mesh({"expert": 8}))
        exchange().group.bootstrap(make_mesh(DATA))  # without GPUs there is nothing to start

    @pytest.mark.parametrize(
        "devices, nccl, why",
        [
            (1, 23004, "needs at least two GPUs, and JAX sees one"),
            (2, None, "NCCL cannot be loaded .not found.: pip install"),
            (2, 22809, r"needs NCCL 2\.30\.4, and 2\.28\.9 is loaded: pip install 'nvidia-nccl-cu13>=2\.30\.4'"),
            (2, 23004, None),
        ],
    )
    def test_what_it_needs(self, monkeypatch, devices, nccl, why):
        class Library:
            def __init__(self, name):
                if nccl is None:
                    raise OSError("not found")

            def ncclGetVersion(self, version):  # noqa: N802  # NCCL's name
                version._obj.value = nccl

        monkeypatch.setattr(_nccl._te_ep, "why_no_te", lambda: None)
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        monkeypatch.setattr(ctypes, "CDLL", Library)
        found = why_no_te_ep()
        assert found is None if why is None else re.search(why, str(found))

    def test_it_needs_transformer_engine(self, monkeypatch):
        monkeypatch.setattr(_nccl._te_ep, "why_no_te", lambda: "there is none")
        assert why_no_te_ep() == "there is none"
