"""A run of a small model on the CPU: the loss falls, resuming changes nothing, what is written is what was trained."""

import csv
import dataclasses

import pytest
import torch

from benchmarks import nano
from k3lib import Batch, Engine, EngineConfig, KimiK3ForConditionalGeneration
from k3lib.layers import Experts
from k3lib.ops import use_backend
from k3lib.spec import SpecConfig
from k3lib.spec.draft_files import load_draft
from training import data, ops
from training.draft import DraftTrainer, block, draw_anchors, targets_of
from training.export import export_draft, export_model
from training.model import LIMIT, nano_config, new_model, size_table, small_config
from training.muon import Muon, orthogonal, split_parameters
from training.train import Settings, Trainer, embed, held_out

SETTINGS = Settings(
    tokens=45_000, batch_tokens=800, longest=700, pool=32, warmup=5, lr=1e-2, qat_from=0.1, precision="fp32"
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
        trainer.run(steps=45, every=9, out=out)
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
        curves.append(torch.tensor([(record.loss, record.norm) for record in trainer.curve]))
        assert bool(trainer.graphs) == capture
    torch.testing.assert_close(*curves, rtol=0.02, atol=1e-3)


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
    items = [nano.held_out_items(kind, 1)[0] for kind in ("arithmetic", "image")]
    score = nano.Score(engine, items, 8)
    assert score.tokens <= 16
    assert len(score.right) == 2
    assert "arithmetic" in score.row("arithmetic")


# ---- the draft ----------------------------------------------------------------------------------


def test_blocks_of_training_are_those_of_the_library(trained, our_ops):
    drafts = DraftTrainer(trained[0].model, precision="fp32")
    draft, model = drafts.draft, trained[0].model
    rows = data.pool(4, 0, 1400, size=6, longest=700)[0]
    with torch.no_grad():
        told = targets_of(model, draft, rows)
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
    score = nano.Score(engine, nano.held_out_items("arithmetic", 1), 12)
    assert score.accepted
    assert score.accepted[0] >= 1


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
