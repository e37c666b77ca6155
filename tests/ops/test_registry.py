"""Choosing an implementation: the order of choice, forcing, reasons, registration, isolation, compilation."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import warnings
from importlib.metadata import EntryPoint

import pytest
import torch

import k3lib.backends
from k3lib.config import KimiK3Config
from k3lib.errors import BackendUnavailable, ConfigError, SlowPathWarning
from k3lib.ops import (
    BLACKWELL,
    HOPPER,
    KDASpec,
    NormSpec,
    Package,
    Target,
    attn_res,
    explain,
    gated_rms_norm,
    implementations,
    kda_chunk,
    kda_mixer,
    kda_recurrent,
    merge_partials,
    observe,
    ops,
    register,
    rms_norm,
    situ_and_mul,
    use_backend,
    use_options,
)

CPU, HERE = Target.of("cpu"), {"cpu"}
H100 = Target.of("cuda", "sm90")
SPEC = NormSpec(width=8, dtype=torch.float32, weight_dtype=torch.float32)
X, WEIGHT = torch.ones(2, 8), torch.ones(8)


@pytest.fixture
def add(only_references):
    """Register implementations that are taken away after the test. Each returns a tensor filled with `value`."""
    added = []

    def make(name, *, op=rms_norm, value=0.0, platforms=HERE, **facts):
        if op is gated_rms_norm:

            def run(x, gate, weight, *, eps):
                return torch.full_like(x, value)
        else:

            def run(x, weight, *, eps):
                return torch.full_like(x, value)

        register(op, name=name, platforms=platforms, **facts)(run)
        added.append((op, name))
        return run

    yield make
    for op, name in added:
        with contextlib.suppress(ConfigError):
            op.remove(name)


@pytest.fixture(autouse=True)
def only_references():
    """Take our own kernels away, so that a test sees the defaults and what it registers itself."""
    taken = [(op, impl) for op in ops().values() for impl in implementations(op) if impl.name != op.default]
    for op, impl in taken:
        op.remove(impl.name)
    yield
    for op, impl in taken:
        op.add(impl)


def chosen(op=rms_norm, spec=SPEC, target=CPU):
    return op.resolve(spec, target=target).name


def call():
    return rms_norm(X, WEIGHT, eps=0.0)


# ---- the order of choice ------------------------------------------------------------------------


def test_reference_serves_when_nothing_else_can():
    assert chosen() == "reference"


def test_highest_priority_of_the_able_wins(add):
    add("low", priority=1)
    add("high", priority=2)
    add("elsewhere", priority=3, platforms={"npu"})
    assert chosen() == "high"


def test_equal_priorities_go_by_name(add):
    add("beta", priority=5)
    add("alpha", priority=5)
    assert chosen() == "alpha"


def test_any_kernel_precedes_the_reference(add):
    add("slow", priority=-999_999)
    assert chosen() == "slow"


def test_a_family_precedes_priority(add):
    add("fast", priority=10)
    add("mine", priority=1)
    with use_backend("mine"):
        assert chosen() == "mine"
    assert chosen() == "fast"


def test_a_family_that_is_not_able_is_passed_over(add):
    add("fast", priority=10)
    add("mine", platforms={"npu"})
    with use_backend("mine"):
        assert chosen() == "fast"
        decision = explain(rms_norm, SPEC, target=CPU)
    assert decision.forced_by is None
    assert dict(decision.rejected)["mine"] == "needs platform npu, this is cpu"


def test_a_family_leaves_ops_alone_that_do_not_offer_it(add):
    add("mine")
    with use_backend("mine"):
        assert chosen(gated_rms_norm) == "reference"


def test_a_forced_op_precedes_a_family(add):
    add("family")
    add("family", op=gated_rms_norm)
    add("single")
    with use_backend("family", rms_norm="single"):
        assert chosen() == "single"
        assert chosen(gated_rms_norm) == "family"


def test_a_forced_op_that_is_not_able_raises(add):
    add("fast")
    add("mine", platforms={"npu"})
    with use_backend(rms_norm="mine"), pytest.raises(BackendUnavailable) as caught:
        rms_norm.resolve(SPEC, target=CPU)
    assert caught.value.decision.chosen is None
    text = str(caught.value)
    assert "rms_norm: 'mine' was forced and cannot run" in text
    assert "needs platform npu, this is cpu" in text
    assert "fast" in text


def test_the_reference_may_be_forced(add):
    add("fast")
    with use_backend(rms_norm="reference"):
        assert chosen() == "reference"


def test_pinning_one_op_leaves_the_others(add):
    for op in (rms_norm, gated_rms_norm):
        add("fast", op=op, priority=2)
        add("slow", op=op, priority=1)
    before = {name: explain(op, target=CPU).chosen.name for name, op in ops().items()}
    with use_backend(rms_norm="slow"):
        after = {name: explain(op, target=CPU).chosen.name for name, op in ops().items()}
    assert after == {**before, "rms_norm": "slow"}


def test_an_experimental_kernel_stands_between_the_proven_and_the_reference(add):
    add("trial", priority=100, experimental=True)
    add("proven", priority=-5)
    assert chosen() == "proven"
    rms_norm.remove("proven")
    with pytest.warns(SlowPathWarning, match="experimental trial"):
        assert chosen() == "trial"


def test_an_experimental_kernel_warns_once(add):
    add("warns_once", experimental=True)
    with pytest.warns(SlowPathWarning) as caught:
        assert {chosen() for _ in range(3)} == {"warns_once"}
    assert len(caught) == 1


def test_a_forced_experimental_kernel_does_not_warn(add):
    add("asked_for", experimental=True)
    with warnings.catch_warnings(), use_backend(rms_norm="asked_for"):
        warnings.simplefilter("error")
        assert chosen() == "asked_for"


def test_deterministic_admits_only_such_kernels(add):
    add("racy", priority=2)
    add("steady", priority=1, deterministic=True)
    assert chosen() == "racy"
    with use_options(deterministic=True):
        assert chosen() == "steady"
        reasons = dict(explain(rms_norm, SPEC, target=CPU).rejected)
    assert (
        reasons["racy"]
        == "needs deterministic=False: it is not bitwise repeatable, or takes other paths in other batches"
    )


def test_deterministic_reaches_calls(add):
    add("racy", value=7.0)
    assert call().eq(7).all()
    with use_options(deterministic=True):
        assert call().eq(1).all()
    assert call().eq(7).all()


@pytest.mark.parametrize("name", sorted(ops()))
def test_references_are_deterministic_everywhere(name):
    default = next(i for i in implementations(ops()[name]) if i.name == ops()[name].default)
    assert default.deterministic
    assert default.platforms == {"cuda", "rocm", "npu", "cpu"}


# ---- the slow path ------------------------------------------------------------------------------


def test_the_reference_on_an_accelerator_warns_once():
    target = Target.of("cuda", "sm70")
    with pytest.warns(SlowPathWarning, match="rms_norm runs its slow reference on cuda/sm70") as caught:
        assert {chosen(target=target) for _ in range(3)} == {"reference"}
    assert len(caught) == 1


def test_strict_refuses_the_reference_on_an_accelerator(add):
    add("trial", platforms={"cuda"}, archs=BLACKWELL)
    with use_options(strict=True), pytest.raises(BackendUnavailable, match="only the reference is able") as caught:
        rms_norm.resolve(SPEC, target=H100)
    assert "needs sm100 or sm103, this is sm90" in str(caught.value)


def test_strict_lets_the_reference_run_on_a_cpu():
    with use_options(strict=True):
        assert chosen() == "reference"


def test_strict_lets_the_reference_run_that_was_asked_for():
    with warnings.catch_warnings(), use_options(strict=True), use_backend(rms_norm="reference"):
        warnings.simplefilter("error")
        assert chosen(target=H100) == "reference"


def test_a_composed_op_is_not_a_slow_path():
    spec = KDASpec(
        heads=96, key_dim=128, value_dim=128, dtype=torch.bfloat16, state_dtype=torch.float32, tokens_per_request="1"
    )
    with warnings.catch_warnings(), use_options(strict=True):
        warnings.simplefilter("error")
        assert kda_mixer.resolve(spec, target=H100).name == "composed"


def test_nothing_able_says_why():
    spec = KDASpec(
        heads=1, key_dim=8, value_dim=8, dtype=torch.float32, state_dtype=None, tokens_per_request="1", verify="replay"
    )
    with pytest.raises(BackendUnavailable, match="nothing can run") as caught:
        kda_chunk.resolve(spec, target=CPU)
    assert "needs verify=none, got verify=replay" in str(caught.value)


# ---- explain ------------------------------------------------------------------------------------


def test_explain_gives_every_reason(add):
    add("other_chip", platforms={"cuda"}, archs=BLACKWELL)
    add("other_platform", platforms={"rocm"})
    add("no_package", platforms={"cuda"}, requires=(Package("flash_mla", at_least="1.0"),))
    add("old_package", platforms={"cuda"}, requires=(Package("fla", at_least="0.7"),))
    add("other_shape", platforms={"cuda"}, supports=lambda spec: f"needs width 16, got {spec.width}")
    add("able", platforms={"cuda"}, archs=HOPPER)
    decision = explain(rms_norm, SPEC, target=Target.of("cuda", "sm90", fla="0.6.0"))
    assert decision.chosen.name == "able"
    assert dict(decision.rejected) == {
        "other_chip": "needs sm100 or sm103, this is sm90",
        "other_platform": "needs platform rocm, this is cuda",
        "no_package": "needs the package flash_mla (install flash_mla), which is not here",
        "old_package": "needs fla >= 0.7, got 0.6.0",
        "other_shape": "needs width 16, got 8",
    }


def test_explain_sees_the_packages_of_a_target(add):
    add("mla", platforms={"cuda"}, requires=(Package("flash_mla"),), priority=1)
    assert explain(rms_norm, SPEC, target=Target.of("cuda", "sm90", flash_mla="1.0")).chosen.name == "mla"
    assert explain(rms_norm, SPEC, target=Target.of("cuda", "sm90")).chosen.name == "reference"


def test_explain_without_a_spec_asks_only_about_chip_and_packages(add):
    add("picky", supports=lambda _spec: "needs something else")
    assert explain(rms_norm, target=CPU).chosen.name == "picky"
    assert explain(rms_norm, SPEC, target=CPU).chosen.name == "reference"


def test_explain_reads_as_a_table(add):
    add("mine", priority=10, platforms={"cuda"})
    add("triton", priority=20, platforms={"cuda"})
    add("trial", experimental=True, platforms={"cuda"})
    add("aiter", platforms={"rocm"})
    with use_backend(rms_norm="mine"):
        decision = explain(rms_norm, SPEC, target=H100)
    assert decision.forced_by == "use_backend"
    assert str(decision).splitlines() == [
        "rms_norm on cuda/sm90",
        "  chosen    mine       forced by use_backend",
        "  able      triton     priority 20",
        "  able      trial      priority 0, experimental",
        "  able      reference  the readable reference",
        "  rejected  aiter      needs platform rocm, this is cuda",
    ]


def test_explain_neither_warns_nor_raises(add):
    add("trial", experimental=True)
    with warnings.catch_warnings(), use_options(strict=True):
        warnings.simplefilter("error")
        assert explain(rms_norm, SPEC, target=H100).chosen.name == "reference"
        assert explain(rms_norm, SPEC, target=CPU).chosen.name == "trial"


# ---- use_backend --------------------------------------------------------------------------------


def test_use_backend_reaches_calls(add):
    add("fast", value=5.0, priority=1)
    assert call().eq(5).all()
    with use_backend(rms_norm="reference"):
        assert call().eq(1).all()
    assert call().eq(5).all()


def test_inner_use_backend_adds_to_the_outer(add):
    for name in ("one", "two"):
        add(name)
        add(name, op=gated_rms_norm)
    with use_backend("one"):
        with use_backend(rms_norm="two"):
            assert (chosen(), chosen(gated_rms_norm)) == ("two", "one")
            with use_backend("two", rms_norm="one"):
                assert (chosen(), chosen(gated_rms_norm)) == ("one", "two")
            assert (chosen(), chosen(gated_rms_norm)) == ("two", "one")
        assert chosen() == "one"


def test_use_backend_ends_after_an_exception(add):
    add("mine", priority=-1)
    add("fast")
    with pytest.raises(ZeroDivisionError), use_backend("mine"):
        raise ZeroDivisionError
    assert chosen() == "fast"


def test_an_unknown_op_is_refused():
    with (
        pytest.raises(ConfigError, match=r"no op named 'rms_nrom'; ops are .*rms_norm"),
        use_backend(rms_nrom="triton"),
    ):
        pass


def test_an_unknown_implementation_is_refused():
    with (
        pytest.raises(
            BackendUnavailable, match="rms_norm has no implementation named 'tritn'; registered are reference"
        ),
        use_backend(rms_norm="tritn"),
    ):
        pass


def test_an_unknown_family_is_refused():
    with (
        pytest.raises(BackendUnavailable, match=r"no op has an implementation named 'flashinfr'"),
        use_backend("flashinfr"),
    ):
        pass


def test_use_backend_takes_the_family_by_position_only():
    with pytest.raises(ConfigError, match="no op named 'name'"), use_backend(name="reference"):
        pass


def test_threads_do_not_see_each_other(add):
    add("mine", value=3.0, priority=-1)
    add("fast", value=5.0)
    inside, seen = threading.Barrier(2, timeout=10), {}

    def work(name):
        with use_backend(rms_norm=name):
            inside.wait()
            seen[name] = float(call()[0, 0])
            inside.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("mine", "reference")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"mine": 3.0, "reference": 1.0}
    assert call().eq(5).all()


def test_tasks_do_not_see_each_other(add):
    add("mine", value=3.0, priority=-1)
    add("fast", value=5.0)

    async def work(name, ours, theirs):
        with use_backend(rms_norm=name):
            ours.set()
            await theirs.wait()
            return float(call()[0, 0])

    async def both():
        a, b = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(work("mine", a, b), work("reference", b, a))

    assert asyncio.run(both()) == [3.0, 1.0]
    assert call().eq(5).all()


# ---- registration -------------------------------------------------------------------------------


def test_register_returns_the_function_unchanged(add):
    run = add("mine")
    impl = next(i for i in implementations(rms_norm) if i.name == "mine")
    assert impl.run is run
    assert str(impl) == "mine"


def test_implementations_come_best_first(add):
    add("low", priority=1)
    add("trial", priority=99, experimental=True)
    add("high", priority=2)
    names = [impl.name for impl in implementations(rms_norm)]
    assert names[-1] == "reference"
    assert [name for name in names if name in ("low", "high", "trial")] == ["high", "low", "trial"]


def test_a_taken_name_is_refused(add):
    add("mine")
    with pytest.raises(ConfigError, match="rms_norm has an implementation named 'mine' already"):
        add("mine")


def test_an_unknown_platform_is_refused(add):
    with pytest.raises(ConfigError, match=r"rms_norm/mine: unknown platforms \['tpu'\]"):
        add("mine", platforms={"tpu", "cpu"})


@pytest.mark.parametrize(
    "run",
    [
        lambda x, weight: x,
        lambda x, weight, *, epsilon: x,
        lambda x, weight, eps: x,
        lambda x, weight, *, eps, extra=None: x,
        lambda weight, x, *, eps: x,
        lambda x, weight, **kwargs: x,
        lambda *args, eps: args[0],
    ],
    ids=["missing", "renamed", "positional", "additional", "swapped", "swallowed keywords", "swallowed tensors"],
)
def test_other_parameters_than_the_ops_are_refused(run):
    with pytest.raises(ConfigError, match=r"rms_norm/wrong: its parameters are .*; the op has"):
        register(rms_norm, name="wrong", platforms=HERE)(run)
    assert "wrong" not in [impl.name for impl in implementations(rms_norm)]


def test_keywords_may_come_in_any_order():
    def run(x, *, linear_beta, beta):
        return x

    register(situ_and_mul, name="any_order", platforms=HERE)(run)
    situ_and_mul.remove("any_order")


def test_a_new_kernel_is_used_at_once(add):
    assert call().eq(1).all()
    add("late", value=4.0)
    assert call().eq(4).all()


def test_a_removed_kernel_is_used_no_more(add):
    add("brief", value=4.0)
    assert call().eq(4).all()
    rms_norm.remove("brief")
    assert call().eq(1).all()


def test_removing_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="rms_norm has no implementation named 'nothing'"):
        rms_norm.remove("nothing")


@pytest.mark.parametrize(("op", "name"), [(rms_norm, "reference"), (kda_mixer, "composed")], ids=str)
def test_the_default_cannot_be_removed(op, name):
    with pytest.raises(ConfigError, match=f"the {name} implementation cannot be removed"):
        op.remove(name)
    assert name in [impl.name for impl in implementations(op)]


def test_an_op_keeps_the_name_and_text_of_its_reference():
    assert kda_chunk.name == kda_chunk.__name__ == "kda_chunk"
    assert kda_chunk.__doc__ == kda_chunk.reference.__doc__
    assert repr(kda_chunk) == "<op kda_chunk>"


# ---- observe ------------------------------------------------------------------------------------


def test_observers_see_what_ran(add):
    add("fast")
    events = []
    with observe(lambda *event: events.append(event)):
        call()
        with use_backend(rms_norm="reference"):
            call()
    call()
    assert events == [("rms_norm", SPEC, "fast"), ("rms_norm", SPEC, "reference")]


def test_nested_observers_all_see():
    outer, inner = [], []
    with observe(lambda *event: outer.append(event)):
        call()
        with observe(lambda *event: inner.append(event)):
            call()
    assert (len(outer), len(inner)) == (2, 1)


# ---- entry points -------------------------------------------------------------------------------


def test_entry_points_register_kernels_and_a_broken_one_is_reported(monkeypatch, tmp_path):
    (tmp_path / "good_kernels.py").write_text(
        "from k3lib.ops import register, rms_norm\n"
        "def add():\n"
        "    @register(rms_norm, name='from_outside', platforms={'cpu'})\n"
        "    def run(x, weight, *, eps): return x\n"
    )
    (tmp_path / "bad_kernels.py").write_text("raise OSError('libcuda.so.1 is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    group = k3lib.backends.GROUP
    found = [EntryPoint("bad", "bad_kernels", group), EntryPoint("good", "good_kernels:add", group)]
    monkeypatch.setattr(k3lib.backends, "entry_points", lambda group: found)
    monkeypatch.setattr(k3lib.backends, "ADAPTERS", ())
    monkeypatch.setattr(k3lib.backends, "FAILED", {})
    k3lib.backends.load_all()
    try:
        assert "from_outside" in [impl.name for impl in implementations(rms_norm)]
        assert k3lib.backends.FAILED == {"bad": "OSError: libcuda.so.1 is missing"}
    finally:
        rms_norm.remove("from_outside")


# ---- a fresh process: import cost and compilation -----------------------------------------------

FRESH = """
import json, sys, torch
from k3lib.ops import explain, ops, rms_norm, situ_and_mul
before = set(sys.modules)
for op in ops().values():
    explain(op)
vendors = {"triton", "flashinfer", "flash_attn", "flash_mla", "flash_kda", "fla", "deep_gemm", "humming", "aiter",
           "torch_npu"}
imported = sorted(vendors & {name.split(".")[0] for name in set(sys.modules) - before})

x, w = torch.randn(3, 8), torch.randn(8)
call = lambda x: situ_and_mul(rms_norm(x, w, eps=1e-5), beta=4.0, linear_beta=25.0)
compiled = torch.compile(call, fullgraph=True, backend="eager")
try:
    cold = compiled(x)
    outcome = "same" if cold.equal(call(x)) and compiled(x).equal(cold) else "different"
except Exception as error:
    outcome = f"{type(error).__name__}: {error}"
print(json.dumps({"imported": imported, "compiled": outcome}))
"""


@pytest.fixture(scope="module")
def fresh_process():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_probing_imports_no_vendor_module(fresh_process):
    assert fresh_process["imported"] == []


def test_a_cold_op_compiles_as_one_graph(fresh_process):
    assert fresh_process["compiled"] == "same"


def compiled_calls(device):
    bank, row = torch.randn(4, 3, 8, device=device), torch.randn(8, device=device)
    residual = {"score_weight": row, "out_norm_weight": row, "num_blocks": 2, "write_block": None, "eps": 1e-5}
    return {
        "rms_norm": lambda x: rms_norm(x, row, eps=1e-5),
        "gated_rms_norm": lambda x: gated_rms_norm(x, x + 1, row, eps=1e-5),
        "situ_and_mul": lambda x: situ_and_mul(x, beta=4.0, linear_beta=25.0),
        "attn_res": lambda x: attn_res(x, None, bank, out_eps=1e-5, **residual)[0],
        "merge_partials": lambda x: merge_partials(x.view(2, 2, 2, 4), x.view(2, 2, 2, 4).sum(-1))[0],
    }


COMPILED = [rms_norm, gated_rms_norm, situ_and_mul, attn_res, merge_partials]


@pytest.mark.parametrize(
    ("op", "impl"), [pytest.param(op, impl, id=f"{op.name}-{impl}") for op in COMPILED for impl in implementations(op)]
)
def test_a_warm_op_compiles_as_one_graph(op, impl, device):
    if impl.name != op.default:
        op.add(impl)
    try:
        torch.compiler.reset()
        function, x = compiled_calls(device)[op.name], torch.randn(4, 8, device=device)
        with use_backend(**{op.name: impl.name}):
            try:
                want = function(x)
            except BackendUnavailable as error:
                pytest.skip(str(error))
            got = torch.compile(function, fullgraph=True, backend="eager")(x)
        assert got.equal(want)
    finally:
        if impl.name != op.default:
            op.remove(impl.name)


def test_a_compiled_graph_keeps_the_choice_of_its_compilation(add):
    torch.compiler.reset()
    add("fast", value=5.0, priority=1)
    compiled = torch.compile(lambda x: rms_norm(x, WEIGHT, eps=0.0), fullgraph=True, backend="eager")
    with use_backend(rms_norm="reference"):
        assert compiled(X).eq(1).all()
    assert compiled(X).eq(1).all()
    assert call().eq(5).all()


def test_observers_are_not_called_from_compiled_code():
    torch.compiler.reset()
    events = []
    compiled = torch.compile(lambda x: rms_norm(x, WEIGHT, eps=0.0), fullgraph=True, backend="eager")
    with observe(lambda *event: events.append(event)):
        compiled(X)
    assert events == []


class CompilationError(Exception):
    """Named like the one of Triton, which need not be installed."""


@pytest.fixture
def put():
    """Register a function as the kernel `broken` of `rms_norm`."""
    yield lambda run: register(rms_norm, name="broken", platforms=HERE, priority=99)(run)
    rms_norm.remove("broken")


def fails_to_compile(calls, width):
    def run(x, weight, *, eps):
        calls.append(x.shape[-1])
        if x.shape[-1] == width:
            raise CompilationError("at 3:4:\n  y = tl.dot(a, b)\n  ^\nk must be at least 16")
        return rms_norm.reference(x, weight, eps=eps)

    return run


def test_a_kernel_that_does_not_compile_is_reported_and_the_next_one_runs(put):
    calls = []
    put(fails_to_compile(calls, 8))
    x, weight = torch.randn(3, 8), torch.ones(8)
    with pytest.warns(
        SlowPathWarning, match="rms_norm/broken could not be compiled .* k must be at least 16"
    ) as caught:
        out = rms_norm(x, weight, eps=1e-5)
    assert torch.equal(out, rms_norm.reference(x, weight, eps=1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rms_norm(x, weight, eps=1e-5)
    assert len(caught) == 1
    assert calls == [8]
    decision = explain(rms_norm, rms_norm.spec_of(x, weight, eps=1e-5), target=Target.cpu())
    assert dict(decision.rejected)["broken"] == "could not be compiled here: k must be at least 16"
    rms_norm(torch.randn(3, 4), torch.ones(4), eps=1e-5)  # another call compiles
    assert calls == [8, 4]


def test_a_forced_kernel_that_does_not_compile_raises(put):
    put(fails_to_compile([], 8))
    with use_backend(rms_norm="broken"), pytest.raises(CompilationError):
        rms_norm(torch.randn(3, 8), torch.ones(8), eps=1e-5)


def test_other_errors_of_a_kernel_pass(put):
    def run(x, weight, *, eps):
        raise RuntimeError("out of memory")

    put(run)
    with pytest.raises(RuntimeError, match="out of memory"):
        rms_norm(torch.randn(3, 8), torch.ones(8), eps=1e-5)


def test_a_kernel_that_says_nothing_is_not_asked_to_verify():
    @register(kda_recurrent, name="old", platforms={"cpu"}, priority=99)
    def old(q, k, v, gate, beta, *, params, state=None, slots=None, cu_seqlens, scale, saves=None, verify=None):
        raise AssertionError("a verify step would move the committed state")

    try:
        spec = KDASpec.from_config(KimiK3Config.tiny(), mode="verify", dtype=torch.float32)
        decision = explain(kda_recurrent, spec)
        assert decision.chosen.name != "old"
        assert "needs verify=none, got verify=replay" in dict(decision.rejected)["old"]
    finally:
        kda_recurrent.remove("old")
