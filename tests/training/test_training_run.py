"""A run of a small model on the CPU: the loss falls, resuming changes nothing, what is written is what was trained."""

import collections
import csv
import dataclasses
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import nano, nano_levers, nano_scores, nano_speed
from k3lib import Batch, Engine, EngineConfig, KimiK3ForConditionalGeneration
from k3lib.layers import Experts
from k3lib.ops import experts, use_backend
from k3lib.spec import SpecConfig
from k3lib.spec.draft_files import load_draft
from training import card, data, ops, release
from training.draft import DraftTrainer, block, draw_anchors, targets_of
from training.export import export_draft, export_model
from training.model import LIMIT, nano_config, new_model, size_table, small_config
from training.muon import Muon, orthogonal, split_parameters
from training.train import Settings, Trainer, embed, held_out

SETTINGS = Settings(
    tokens=34_000, batch_tokens=800, longest=700, pool=32, warmup=5, lr=1e-2, qat_from=0.1, precision="fp32"
)


@pytest.fixture
def our_ops():
    with ops.training_ops():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer after some steps, and the folder that it saved to."""
    out = tmp_path_factory.mktemp("run")
    trainer = Trainer(SETTINGS, small_config())
    with ops.training_ops():
        trainer.run(steps=32, every=8, out=out)
    return trainer, out


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("checkpoint")
    export_model(trained[0].model, out)
    return out


def test_the_loss_falls_and_the_curve_is_kept(trained, our_ops):
    trainer, out = trained
    losses = [record.loss for record in trainer.curve]
    assert losses[0] > 4
    assert losses[-1] < 0.4 * losses[0]
    with (out / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == losses
    assert trainer.progress > SETTINGS.qat_from  # part of it ran with rounded experts
    assert held_out(trainer, items=12, longest=700)["held_out_loss"] < losses[0] / 2
    biases = [m.e_score_correction_bias for m in trainer.model.modules() if hasattr(m, "e_score_correction_bias")]
    assert all(bias.abs().max() > 0 for bias in biases)


def test_resuming_is_the_same_as_going_on(tmp_path, our_ops):
    whole = Trainer(SETTINGS, small_config())
    whole.run(steps=6)
    first = Trainer(SETTINGS, small_config())
    first.run(steps=3, out=tmp_path)
    second = Trainer(SETTINGS, small_config())
    second.load(tmp_path)
    second.run(steps=3)
    assert (second.position, second.step, second.tokens) == (whole.position, whole.step, whole.tokens)
    for (name, mine), its in zip(second.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(mine, its), name
    other = Trainer(Settings(seed=1), small_config())
    with pytest.raises(ValueError, match="another run"):
        other.load(tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: nothing is captured elsewhere")
def test_captured_steps_are_the_eager_ones(our_ops):
    changes = {"precision": "bf16", "tokens": 60_000, "batch_tokens": 4096, "qat_from": 0.5}
    curves = []
    for capture in (True, False):
        trainer = Trainer(dataclasses.replace(SETTINGS, **changes, capture=capture), small_config(), device="cuda")
        trainer.run(steps=14, every=1)
        curves.append(torch.tensor([(record.loss, record.norm, record.most_load) for record in trainer.curve]))
        assert bool(trainer.graphs) == capture
    # sums in bf16 come in another order every time, which grows from step to step
    torch.testing.assert_close(*(curve[:, 0] for curve in curves), rtol=0.03, atol=1e-3)
    torch.testing.assert_close(*(curve[:4] for curve in curves), rtol=0.05, atol=1e-3)


def test_the_exported_checkpoint_gives_the_logits_that_were_trained(trained, exported, our_ops):
    trainer, _ = trained
    rows = next(r for r in data.pool(3, 0, 1600, size=48, longest=700) if r.patches)
    loaded = KimiK3ForConditionalGeneration.from_pretrained(exported, dtype=torch.float32, progress=False)
    count, length = rows.ids.shape
    batch = Batch.lengths([length] * count)
    batch.input_ids = rows.ids.flatten()
    # what was trained, with its other weights rounded as they are stored
    model = new_model(small_config(), 0)
    model.load_state_dict(trainer.model.state_dict())
    experts = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    wide = {id(m._parameters[name]) for m in model.modules() for name in getattr(m, "wide", ())}
    with torch.no_grad():
        for value in model.parameters():
            if id(value) not in experts | wide:
                value.copy_(value.to(torch.bfloat16))
        embeds = embed(model, rows)
        with ops.step(length, qat=True):
            want = model.language_model(batch, inputs_embeds=embeds)
        with use_backend("reference"):
            torch.testing.assert_close(loaded.language_model(batch, inputs_embeds=embeds), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(embed(loaded, rows), embeds, rtol=1e-4, atol=1e-4)


def test_answers_are_scored_through_the_engine(exported):
    config = EngineConfig(max_running_requests=4, context_length=2048)
    engine = Engine.from_pretrained(exported, config, vision=True, dtype=torch.float32, progress=False)
    items = [nano_scores.held_out_items(kind, 1)[0] for kind in ("arithmetic", "image")]
    score = nano_scores.Score(engine, items, 8)
    assert score.tokens <= 16
    assert len(score.right) == 2
    assert "arithmetic" in score.row("arithmetic")


def test_rows_of_padding_are_not_answers(our_ops):
    made = data.pool(1, 0, 1600, size=12, split="held_out", longest=700)
    assert any(len(rows.places.div(rows.ids.shape[1], rounding_mode="floor").unique()) < len(rows.ids) for rows in made)
    trainer = Trainer(dataclasses.replace(SETTINGS, batch_tokens=1600), small_config())
    assert held_out(trainer, items=12, longest=700)["held_out_exact"] == 0  # it knows nothing yet


def tiny_items():
    return {kind: nano_scores.held_out_items(kind, 1) for kind in ("arithmetic", "image")}


def test_levers_are_compared_with_their_base(exported, capsys):
    chosen = [0, 4, 6, -2, -1]  # base, NVFP4, MXFP8 activations, prefix reuse, speculation
    listed = nano_levers.levers(exported, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano_levers, "levers", lambda *_, **__: [listed[i] for i in chosen])
        lines = nano_levers.run_levers(exported, tiny_items(), tokens=6, running=2)
    assert [line["exact"] for line in lines] == [False] * 3 + [True] * 2
    assert lines[0]["same"] == 2
    assert lines[3]["reused_tokens"] > 300
    assert lines[4]["accept_length"] >= 1
    nano_levers.check_exact(lines)
    assert all(line["name"] in capsys.readouterr().out for line in lines[:1])
    with pytest.raises(AssertionError, match="changed 1 of 2 answers"):
        nano_levers.check_exact([{**lines[3], "same": 1}])
    with pytest.raises(AssertionError, match="had nothing to do"):
        nano_levers.check_exact([{**lines[3], "reused_tokens": 0}])
    assert {"e4m3_token", "mxfp8"}.isdisjoint(impl.name for impl in experts.implementations())


def test_simulated_rounding_is_all_that_differs():
    torch.manual_seed(0)
    layer = new_model(small_config(), seed=0).language_model.model.layers[1].block_sparse_moe.experts
    x, weights = torch.randn(9, 32), torch.rand(9, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)]).int()
    rounded = {"exact": lambda x: x, "token": nano_levers.by_token, "mx": nano_levers.by_32}
    with torch.no_grad(), nano_levers.rounded_activations(**rounded):
        outs = {}
        for name in ("reference", *rounded):
            with use_backend(experts=name):
                outs[name] = experts(x, ids, weights, layer.weights, act_fn=layer.config.act)
        with use_backend(experts="reference"):
            outs["nvfp4"] = experts(x, ids, weights, nano_levers.stored_as_nvfp4(0, layer), act_fn=layer.config.act)
    torch.testing.assert_close(outs["exact"], outs["reference"])
    size = outs["reference"].norm()
    assert 1e-4 < (outs["token"] - outs["reference"]).norm() / size < 0.05
    assert 1e-4 < (outs["mx"] - outs["reference"]).norm() / size < 0.05
    assert 1e-3 < (outs["nvfp4"] - outs["reference"]).norm() / size < 0.3
    wide = torch.randn(5, 64).mul_(torch.tensor([1e-4, 1e-2, 1, 1e2, 1e4])[:, None])
    for rule, worst in ((nano_levers.by_token, 1 / 16), (nano_levers.by_32, 1 / 8)):  # MXFP8 saturates 512 to 448
        assert ((rule(wide) - wide).abs().amax(-1) <= wide.abs().amax(-1) * worst).all()
        torch.testing.assert_close(rule(rule(wide)), rule(wide))


def test_one_command_measures_and_writes_the_card(trained, exported, monkeypatch):
    monkeypatch.setattr(nano_speed, "load_seconds", lambda *_: 1.25)
    monkeypatch.setattr(release.export, "main", lambda argv: None)  # is there already
    monkeypatch.setattr(nano, "run_levers", lambda *_, **__: [
        {"name": "base", "exact": False, "right": {"image": 1}, "items": {"image": 2}, "same": 2}
    ])  # fmt: skip
    short = {"batches": (1, 2), "steps": 2}
    monkeypatch.setattr(nano, "run_speed", lambda *args, **options: nano_speed.run_speed(*args, **options, **short))
    asked = ["--items", "1", "--long", "0", "--kinds", "arithmetic", "--tokens", "4", "--speed", "1", "--device", "cpu"]
    release.main(["--run", str(trained[1]), "--out", str(exported), *asked])
    figures = trained[1] / "figures_cpu.json"
    found = json.loads(figures.read_text())
    assert "Below 95 %: arithmetic." in (exported / "README.md").read_text()
    assert [line["requests"] for line in found["speed"]["rates"]] == [1, 2]
    assert all(line["plain"] > 0 for line in found["speed"]["rates"])
    assert found["speed"]["acceptance"]["tokens_per_step"] >= 1
    found["abilities"] += [{**found["abilities"][0], "name": "json", "items": 200, "right": 191}]
    figures.write_text(json.dumps(found))
    card.main(["--run", str(trained[1]), "--model", str(exported), "--figures", str(figures)])
    text = (exported / "README.md").read_text()
    for said in (
        "license: apache-2.0", "95.5 (91.7 to 97.6)", "Below 95 %: arithmetic.", "Import and load: 1.2 s",
        "| base | 1 of 2 |", f"{trained[0].step} steps", "seed 0", "## Limits",
    ):  # fmt: skip
        assert said in text, said
    assert "### " not in card.card(torch.load(trained[1] / "state.pt"), [], nbytes=1)  # nothing that was not measured


# ---- the draft ----------------------------------------------------------------------------------


def test_blocks_of_training_are_those_of_the_library(trained, our_ops):
    drafts = DraftTrainer(trained[0].model, precision="fp32")
    draft, model = drafts.draft, trained[0].model
    rows = data.pool(4, 0, 1400, size=6, longest=700)[0]
    with torch.no_grad():
        told = targets_of(model, draft, embed(model, rows), rows.ids.shape[1])
        anchors = draw_anchors(rows, 3, torch.Generator().manual_seed(0))
        got = block(model, draft, rows.ids, anchors, told.features)
        length = rows.ids.shape[1]
        for i in range(len(rows.ids)):
            pool = draft.new_pool(-(-length // 16), 16)
            context = draft.context(told.features[i * length : (i + 1) * length])
            pool.store(draft.rows(context, torch.arange(length)), torch.arange(length) + 16)
            table = torch.arange(1, pool.pages.shape[2])[None]
            for a, anchor in enumerate(anchors[i]):
                ids = torch.tensor([int(rows.ids[i, anchor]), *[draft.config.mask_token_id] * 6])
                embedded = model.language_model.model.embed_tokens(ids)[None]
                want = draft.block(embedded, anchor[None], pool, table)[0]
                torch.testing.assert_close(got[i, a], want, rtol=1e-4, atol=1e-4)


def test_the_draft_learns_and_the_engine_takes_it(trained, exported, tmp_path):
    drafts = DraftTrainer(
        trained[0].model, tokens=30_000, batch_tokens=1000, longest=700, anchors=8, lr=1e-2, warmup=3, precision="fp32"
    )
    with ops.training_ops():
        before = drafts.held_out(items=8)["loss"]
        drafts.run(steps=14)
        after = drafts.held_out(items=8)
    assert after["loss"] < 0.8 * before
    assert 0 <= after["accepted_6"] <= after["accepted_0"] <= 1
    drafts.save(tmp_path / "draft.pt")
    again = DraftTrainer(trained[0].model, precision="fp32")
    again.load(tmp_path / "draft.pt")
    assert again.step == 14
    export_draft(again.draft, trained[0].model.config, exported / "dspark")
    kept = load_draft(exported)
    assert kept.config.family == "radixark"
    torch.testing.assert_close(kept.fc.weight, drafts.draft.fc.weight.detach().to(torch.bfloat16))
    config = EngineConfig(max_running_requests=2, context_length=2048, spec=SpecConfig(draft=str(exported)))
    engine = Engine.from_pretrained(exported, config, vision=True, progress=False)
    score = nano_scores.Score(engine, nano_scores.held_out_items("arithmetic", 1), 12)
    assert score.accepted
    assert score.accepted[0] >= 1


def test_anchors_of_padding_do_not_count(trained, our_ops):
    drafts = DraftTrainer(trained[0].model, precision="fp32")
    rows = max(data.pool(2, 0, 2048, size=24, longest=700), key=lambda r: len(r.ids))
    last = int(rows.places[-1]) // rows.ids.shape[1]
    real = last + 1
    more = dataclasses.replace(rows, ids=torch.cat([rows.ids, torch.full_like(rows.ids[:2], 511)]))
    anchors = draw_anchors(more, 4, torch.Generator().manual_seed(0))
    told = drafts.loss_of(more, anchors)
    assert int(told.tried[0]) == 4 * real
    less = dataclasses.replace(rows, ids=rows.ids[:real])
    torch.testing.assert_close(drafts.loss_of(less, anchors[:real]).loss, told.loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: nothing is captured elsewhere")
def test_captured_draft_steps_are_the_eager_ones(our_ops):
    model = new_model(small_config(), 0, device="cuda")
    curves = []
    for capture in (True, False):
        drafts = DraftTrainer(model, tokens=60_000, batch_tokens=4096, longest=700, anchors=8, capture=capture)
        stream = data.batches(1, (0, 0), 4096, size=32, longest=700)
        told = [drafts.train_step(rows) for _, (_, rows) in zip(range(14), stream, strict=False)]
        curves.append(torch.stack([each.loss.detach() for each in told]))
        assert bool(drafts.graphs) == capture
        assert all(each.tried[0] > 0 for each in told)
    torch.testing.assert_close(*curves, rtol=0.02, atol=1e-3)


class Watched(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.waits = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount", "aminmax"):
            self.waits[name] += 1
        if name in ("index", "index_put_"):
            self.waits["index"] += sum(x is not None and x.dtype == torch.bool for x in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.again), "bf16"])
def test_what_is_captured_reads_no_values(precision, our_ops):
    trainer = Trainer(dataclasses.replace(SETTINGS, precision=precision), small_config())
    drafts = DraftTrainer(trainer.model, precision=precision, anchors=4)
    trainer.model.requires_grad_()
    rows = data.pool(2, 0, 1024, size=12, longest=700)[0]
    count, length = rows.ids.shape
    embeds, labels = embed(trainer.model, rows).detach(), torch.full((count * length,), 7)
    given = drafts._read(rows, drafts.draw(rows, 0))
    for run in (lambda: trainer._layers(embeds, labels, count, length), lambda: drafts._backward(*given)):
        run()  # tables are made
        with Watched() as watched:
            run()
        waits = {**watched.waits}
        # on a CPU embeddings look at the range of their ids
        assert waits.pop("_local_scalar_dense", 0) == 2 * waits.pop("aminmax", 0)
        assert not any(waits.values()), waits


# ---- parts --------------------------------------------------------------------------------------


def test_updates_are_orthogonal_for_each_head():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 16, 40)))
    assert values.min() > 0.5
    assert values.max() < 1.3
    weight = torch.nn.Parameter(torch.zeros(4 * 8, 24))  # four heads
    optimiser = Muon([(weight, (4, 0))], lr=1.0)
    weight.grad = torch.randn(4, 8, 24).mul_(torch.tensor([1.0, 10, 100, 0.1])[:, None, None]).flatten(0, 1)
    optimiser.step()
    sizes = torch.linalg.matrix_norm(weight.detach().view(4, 8, 24))
    assert sizes.max() / sizes.min() < 1.2  # whatever the size of a head's gradient


def test_every_parameter_has_one_optimiser():
    model = new_model(small_config(), 0)
    matrices, others = split_parameters(model, model.config.text)
    listed = [id(value) for value, _ in matrices] + [id(value) for value in others]
    routers = [name for name, _ in model.named_parameters() if "e_score_correction_bias" in name]
    assert len(set(listed)) == len(listed) == len(list(model.parameters())) - len(routers)


def test_the_packed_checkpoint_fits_its_limit():
    *parts, (_, parameters, nbytes) = size_table(nano_config())
    assert nbytes < LIMIT - 300_000  # names and offsets take room as well
    assert parameters == sum(row[1] for row in parts)
    assert 10e6 < parameters < 12e6
