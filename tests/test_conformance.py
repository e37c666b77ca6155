"""Conformance and bench: what runs here is right, what is wrong is found, and tables say so."""

import dataclasses
import json

import pytest
import torch

from k3lib import bench, conformance
from k3lib.errors import ConfigError
from k3lib.ops import ops, register, rms_norm, store_rows
from k3lib.trials import make_trial, moved, widened

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_that_runs_here_conforms(dtype):
    results = conformance.run(device="cpu", dtypes=[dtype])
    assert [r for r in results if r.outcome == "FAILED"] == []
    assert {r.impl for r in results if r.outcome == "ok"} == {"cpu"}


@pytest.mark.again  # on an accelerator `k3lib conformance` goes through the same
@pytest.mark.parametrize("name", sorted(conformance.TRIALS))
def test_references_pass_their_own_trials_in_bfloat16(name):
    op = ops()[name]
    reference = op.implementations()[-1]
    for trial in conformance.trials_of(name):
        result = conformance.check(op, reference, trial, CPU, torch.bfloat16)
        assert result.outcome == "ok", result


def test_every_op_on_one_rank_has_trials():
    assert set(conformance.TRIALS) == set(ops()) - {"ep_experts"}


@pytest.fixture
def wrong():
    """Registers a bad rms_norm for one test."""

    def add(run, **options):
        register(rms_norm, name="wrong", platforms={"cpu"}, **options)(run)
        return conformance.run(["rms_norm"], device=CPU, dtypes=[torch.float32], impls=["wrong"])

    yield add
    rms_norm.remove("wrong")


def test_a_wrong_value_is_found(wrong):
    results = wrong(lambda x, weight, *, eps: rms_norm.reference(x, weight, eps=eps) * 1.0001)
    assert {r.outcome for r in results if "tokens 0" not in r.title} == {"FAILED"}
    assert "error ratio" in conformance.table(results)


def test_a_changed_input_is_found(wrong):
    def run(x, weight, *, eps):
        out = rms_norm.reference(x, weight, eps=eps)
        weight.add_(1)
        return out

    assert any("weight: an input was changed" in r.detail for r in wrong(run))


def test_other_bits_are_found(wrong):
    def run(x, weight, *, eps):
        return rms_norm.reference(x, weight, eps=eps) * (1 + 1e-6 * torch.rand(()))

    assert any("other bits" in r.detail for r in wrong(run, deterministic=True))


def test_what_raises_is_a_failure_and_what_declines_is_skipped(wrong):
    def run(x, weight, *, eps):
        raise RuntimeError("no such instruction")

    results = wrong(run, supports=lambda spec: "needs hidden 7168" if spec.width != 7168 else None)
    assert {r.outcome for r in results} == {"skip", "FAILED"}
    shown = conformance.table(results)
    assert "skip: needs hidden 7168" in shown
    assert "RuntimeError: no such instruction" in shown


def test_rows_of_nobody_are_guarded():
    trial = make_trial("kda_recurrent", dtype=torch.float32, data="poison", lengths=[1, 1], heads=1, key=4, value=4)
    assert trial.args["state"][-1].isnan().all()
    op = ops()["kda_recurrent"]

    def run(*args, **kwargs):
        out = op.reference(*args, **kwargs)
        kwargs["state"][-1] = 0
        return out

    reference = op.implementations()[-1]
    result = conformance.check(op, dataclasses.replace(reference, run=run), trial, CPU, torch.float32)
    assert "belongs to nobody" in result.detail


def test_a_verify_step_keeps_the_state_and_writes_its_tokens_alone():
    op = ops()["kda_recurrent"]
    reference = op.implementations()[-1]
    sizes = {"lengths": [2, 1], "heads": 1, "key": 4, "value": 4, "verify": "replay", "entries": 3}
    trial = make_trial("kda_recurrent", dtype=torch.float32, **sizes)

    def check(change):
        def run(*args, **kwargs):
            out = op.reference(*args, **kwargs)
            change(kwargs)
            return out

        return conformance.check(op, dataclasses.replace(reference, run=run), trial, CPU, torch.float32).detail

    assert "state: an input was changed" in check(lambda given: given["state"].add_(1))
    assert "verify.k: a row was written" in check(lambda given: given["verify"].k[1, 1:].zero_())
    assert "verify.log_decay: error ratio" in check(lambda given: given["verify"].log_decay[0, 0].mul_(1.1))


def test_trials_are_reproducible_and_copied():
    one, two = (make_trial("experts", seed=3, tokens=4, format="mxfp4") for _ in range(2))
    assert torch.equal(one.args["prepared"].w13, two.args["prepared"].w13)
    copy = moved(one, CPU)
    copy.args["x"].zero_()
    copy.args["prepared"].w13.zero_()
    assert one.args["x"].any()
    assert one.args["prepared"].w13.any()
    assert widened(one, torch.float32).args["x"].dtype == torch.float32
    with pytest.raises(ConfigError, match="no trials of 'nothing'"):
        make_trial("nothing")


def test_bench_times_what_it_checked(capsys):
    cases = [
        bench.Case(op="rms_norm", name="small", sizes={"tokens": 8, "hidden": 64}),
        bench.Case(op="store_rows", name="small", sizes={"tokens": 8, "width": 64}),
    ]
    found = bench.run(device=CPU, cases=cases, references=True)
    assert {(t.op, t.impl) for t in found} == {
        ("rms_norm", "cpu"), ("rms_norm", "reference"), ("store_rows", "cpu"), ("store_rows", "reference"),
    }  # fmt: skip
    assert all(t.us > 0 and t.floor_us > 0 and t.p10 <= t.us <= t.p90 for t in found)
    assert all(json.loads(line)["case"] == "small" for line in bench.lines(found).splitlines())
    assert "x floor" in bench.table(found)
    with pytest.raises(ConfigError, match="no case of nothing"):
        bench.run(["nothing"], device=CPU)


def test_calls_in_turn_share_experts_and_ask_for_others():
    trial = make_trial("experts", tokens=3, experts=8, top_k=2, width=64, intermediate=32)
    copies = [bench._copy(trial, i, CPU) for i in range(3)]
    assert all(copy["prepared"] is trial.args["prepared"] for copy in copies)
    assert copies[0]["ids"] is trial.args["ids"]
    assert not copies[1]["ids"].equal(copies[2]["ids"])
    assert 0 <= int(copies[2]["ids"].min()) <= int(copies[2]["ids"].max()) < 8
    other = make_trial("rms_norm", tokens=3)
    assert bench._copy(other, 1, CPU)["x"] is not other.args["x"]


def test_bench_does_not_time_what_is_wrong():
    register(store_rows, name="wrong", platforms={"cpu"})(lambda values, pages, rows: None)
    try:
        case = bench.Case(op="store_rows", name="small", sizes={"tokens": 8, "width": 64})
        (timing,) = bench.run(device=CPU, cases=[case], impls=["wrong"])
    finally:
        store_rows.remove("wrong")
    assert timing.us is None
    assert timing.note.startswith("FAILED: pages")
    assert "FAILED" in bench.table([timing])
