"""Images in the engine: encoded once, spliced into any chunk, cached by content, let go at every end of a request."""

import asyncio
import math
import random
from collections import OrderedDict

import pytest
import torch
from engines import drained, greedy, make_engine, one_thread, run_all
from seeded import draw, seed_weights

from k3lib import Batch, KimiK3Config, KimiK3ForConditionalGeneration
from k3lib.engine import AsyncEngine, Engine, EngineConfig, Request
from k3lib.engine.media import FeatureCache, MediaStore, PromptImage
from k3lib.engine.vision_graphs import VisionGraphs
from k3lib.errors import ConfigError, RequestError
from k3lib.layers.vision import Grid
from k3lib.multimodal import MediaSpan, expand_placeholders
from k3lib.spec import SpecConfig

PAD = 505
SMALL, WIDE, TALL = (1, 4, 6), (1, 4, 8), (1, 10, 2)


@pytest.fixture(autouse=True)
def quick():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    sizes = {
        "num_hidden_layers": 3, "kda_layers": [1, 2], "full_attn_layers": [3], "attn_res_block_size": 2,
        "num_experts": 6, "num_experts_per_token": 2, "hidden_size": 48, "intermediate_size": 64, "num_heads": 2,
        "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vt_num_hidden_layers": 1,
    }  # fmt: skip
    made = KimiK3ForConditionalGeneration(KimiK3Config.tiny(**sizes), dtype=torch.float32)
    return seed_weights(made).eval().requires_grad_(requires_grad=False)


def picture(grid=SMALL, seed=0):
    """Patches and a digest, without a place."""
    return draw(math.prod(grid), 3, 14, 14, seed=seed).clamp(-1, 1), grid, f"{grid} {seed}"


def prompt(*parts, seed=0):
    """Ids and images of a prompt: numbers are lengths of random text, others pictures."""
    rng = random.Random(seed)
    ids, counts, pictures = [], [], []
    for part in parts:
        if isinstance(part, int):
            ids += [rng.randrange(500) for _ in range(part)]
        else:
            ids.append(PAD)
            counts.append(part[1][1] * part[1][2] // 4)
            pictures.append(part)
    expanded, positions = expand_placeholders(ids, PAD, counts)
    media = [
        PromptImage(position, count, digest, patches, grid)
        for position, count, (patches, grid, digest) in zip(positions, counts, pictures, strict=True)
    ]
    return expanded, media


def run(engine, *prompts, tokens=6, **fields):
    """Run prompts together to their ends; their tokens."""
    names = [engine.add(Request(list(ids), greedy(tokens), media=media, **fields)) for ids, media in prompts]
    found, ends = run_all(engine)
    assert set(ends.values()) == {"length"}
    engine.media.features.check()
    return [found[name] for name in names]


_said = {}


def cold(model, ids, media, tokens=6):
    """What the model says without an engine: the whole sequence anew for every token. Computed once."""
    key = (id(model), tuple(ids), *(image.digest for image in media))
    known = _said.get(key, (model, []))[1]
    if len(known) < tokens:
        _said[key] = (model, known := _say(model, ids, media, tokens))
    return known[:tokens]


def _say(model, ids, media, tokens):
    made = []
    features = [model.encode(image.patches, [image.grid_thw])[0] for image in media]
    for _ in range(tokens):
        whole = [*ids, *made]
        from_ids = model.language_model.model.embed_tokens(torch.tensor(whole))
        for image, rows in zip(media, features, strict=True):
            from_ids[image.position : image.position + image.length] = rows
        logits = model.language_model(Batch.pack([whole]), inputs_embeds=from_ids, logits="last")
        made.append(int(logits.argmax()))
    return made


def encoded(engine):
    return engine.stats()["media"]["images_encoded"]


# ---- the same tokens, whatever happens around them ------------------------------------------------


PROMPTS = {
    "one": (5, picture(), 4),
    "two of a message": (3, picture(), 1, picture(TALL, 1), 6),
    "the same twice": (2, picture(WIDE), 3, picture(WIDE), 2),
    "side by side": (1, picture(), picture(SMALL, 7), 2),
    "at both ends": (picture(TALL), 9, picture(SMALL, 3)),
}
PROMPTS = {name: prompt(*parts, seed=i) for i, (name, parts) in enumerate(PROMPTS.items())}


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_do_not_depend_on_chunks(model, name):
    ids, media = PROMPTS[name]
    want = cold(model, ids, media)
    for size in (3, 7, 64):
        engine = make_engine(model, chunked_prefill_size=size)
        assert run(engine, (ids, media)) == [want]
        assert encoded(engine) == len({image.digest for image in media})
        assert drained(engine)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"chunked_prefill_size": 10},
        {"mix_decode": True},
        {"deterministic": True},
        {"spec": SpecConfig(draft="ngram")},
    ],
    ids=["", "chunks", "mixed", "deterministic", "speculating"],
)
def test_tokens_do_not_depend_on_company(model, rules):
    prompts = [*PROMPTS.values(), prompt(20)]
    want = [cold(model, *one) for one in prompts]
    engine = make_engine(model, pages=200, **rules)
    assert run(engine, *prompts) == want
    assert drained(engine)


def test_a_warm_prefix_gives_the_same_and_is_not_encoded_again(model):
    ids, media = prompt(9, picture(WIDE), 20)
    other, its_media = prompt(9, picture(WIDE, 5), 20)  # of equal size
    assert other == ids
    want, its = cold(model, ids, media), cold(model, other, its_media)
    assert want != its
    engine = make_engine(model, grid=8, image_cache_bytes=0)
    assert run(engine, (ids, media)) == [want]
    assert run(engine, (other, its_media)) == [its]  # reuse stops before the image
    before = encoded(engine)
    assert before == 2
    (again,) = engine_outputs(engine, ids, media)
    assert again.token_ids == want
    assert again.cached_tokens >= 17  # behind the image
    assert encoded(engine) == before
    assert drained(engine)


def engine_outputs(engine, ids, media, **fields):
    """The outputs of one request."""
    name = engine.add(Request(list(ids), greedy(6), media=media, **fields))
    steps = []
    while engine.has_work:
        steps += [out for out in engine.step() if out.request_id == name]
    joined = steps[-1]._replace(token_ids=[token for out in steps for token in out.token_ids])
    return [joined]


def test_reuse_of_another_image_stops_in_front_of_it(model):
    engine = make_engine(model, grid=4)
    ids, media = prompt(9, picture(WIDE), 20)
    run(engine, (ids, media))
    (out,) = engine_outputs(engine, *prompt(9, picture(WIDE, 5), 20))
    assert out.cached_tokens <= 9
    # the same pixels after other options have another digest
    (out,) = engine_outputs(engine, ids, [media[0]._replace(digest="other options")])
    assert out.cached_tokens <= 9
    (out,) = engine_outputs(engine, ids, media)
    assert out.cached_tokens > 17


def test_namespaces_share_features_but_no_prefix(model):
    engine = make_engine(model, grid=4)
    ids, media = prompt(9, picture(), 12)
    (first,) = engine_outputs(engine, ids, media, namespace="a")
    (second,) = engine_outputs(engine, ids, media, namespace="b")
    assert second.cached_tokens == 0
    assert second.token_ids == first.token_ids
    assert encoded(engine) == 1


def test_features_that_were_computed_elsewhere_are_taken(model):
    ids, media = prompt(5, picture(), 4, picture(TALL, 1), 2)
    want = cold(model, ids, media)
    spans = [MediaSpan(i.position, model.encode(i.patches, [i.grid_thw])[0], i.digest) for i in media]
    for whole in (model, model.language_model):  # which needs no tower
        engine = make_engine(whole, chunked_prefill_size=4)
        assert run(engine, (ids, spans)) == [want]
        assert encoded(engine) == 0
        assert drained(engine)


def test_generate_and_stream_take_images(model):
    prompts = [PROMPTS["one"], prompt(7), PROMPTS["the same twice"]]
    engine = make_engine(model)
    outs = engine.generate([ids for ids, _ in prompts], greedy(6), media=[media for _, media in prompts])
    assert [out.token_ids for out in outs] == [cold(model, *one) for one in prompts]
    ids, media = prompts[0]
    assert list(engine.stream(ids, greedy(6), media=media)) == cold(model, ids, media)
    with pytest.raises(ConfigError, match="media for 1 of 2 prompts"):
        engine.generate([[1], [2]], greedy(), media=[()])
    with pytest.raises(RequestError, match="5 rows of features, the prompt has 6"):
        engine.stream(ids, media=[MediaSpan(5, torch.zeros(5, 48), "x")])
    assert drained(engine)


def test_an_engine_is_loaded_with_its_tower(model, tmp_path):
    model.save_pretrained(tmp_path)
    ids, media = PROMPTS["one"]
    config = EngineConfig(context_length=64)
    engine = Engine.from_pretrained(tmp_path, config, vision=True, progress=False)
    assert engine.generate([ids], greedy(6), media=[media])[0].token_ids == cold(model, ids, media)
    assert not Engine.from_pretrained(tmp_path, config, progress=False).stats()["media"]["has_vision"]


def test_an_image_may_be_known_by_its_pixels():
    patches, grid, _ = picture()
    one, same = (PromptImage.of(3, patches.clone(), grid) for _ in range(2))
    assert one.key == same.key
    assert (one.position, one.length) == (3, 6)
    assert PromptImage.of(3, patches + 1e-6, grid).digest != one.digest
    assert PromptImage.of(3, patches, (1, 6, 4)).digest != one.digest
    assert PromptImage.of(3, patches.bfloat16(), grid).digest != one.digest


def test_log_probabilities_of_a_prompt_with_images(model):
    ids, media = prompt(5, picture(), 4)
    params = greedy(2, logprobs=True, prompt_logprobs=True)
    found = []
    for size in (64, 4):
        engine = make_engine(model, chunked_prefill_size=size)
        engine.add(Request(ids, params, media=media))
        found.append([entry.logprob for entry in steps_of(engine)[0].prompt_logprobs[1:]])
    assert len(found[0]) == len(ids) - 1
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def steps_of(engine):
    out = []
    while engine.has_work:
        out += engine.step()
    return out


# ---- ends ---------------------------------------------------------------------------------------


def test_features_are_held_until_the_last_chunk_has_used_them(model):
    engine = make_engine(model, chunked_prefill_size=4, image_cache_bytes=0)
    ids, media = prompt(2, picture(WIDE), 9)  # tokens 2 to 9
    engine.add(Request(ids, greedy(2), media=media))
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.media.features.num_held)
        engine.media.features.check()
    assert held[:4] == [1, 1, 0, 0]
    assert encoded(engine) == 1
    assert len(engine.media.features) == 0
    assert drained(engine)


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_at_any_point_lets_go(model, steps):
    engine = make_engine(model, chunked_prefill_size=4, image_cache_bytes=0)
    ids, media = prompt(2, picture(WIDE), 5)
    name = engine.add(Request(ids, greedy(4), media=media))
    for _ in range(steps):
        engine.step()
    assert engine.abort(name)
    assert engine.media.features.num_held == len(engine.media.features) == engine.media.features.num_bytes == 0
    assert drained(engine)


def test_a_preempted_request_encodes_again_and_says_the_same(model):
    one, two = prompt(2, picture(WIDE), 3, seed=1), prompt(2, picture(WIDE, 1), 3, seed=2)
    want = [cold(model, *one, tokens=20), cold(model, *two, tokens=20)]
    rules = {"disable_radix_cache": True, "image_cache_bytes": 0, "schedule_conservativeness": 0}
    engine = make_engine(model, pages=12, chunked_prefill_size=5, **rules)
    assert run(engine, one, two, tokens=20) == want
    assert engine.stats()["preempted"]
    assert encoded(engine) > 2
    assert drained(engine)


def test_preemption_in_the_middle_of_an_image_lets_go(model):
    engine = make_engine(model, chunked_prefill_size=4, image_cache_bytes=0)
    ids, media = prompt(2, picture(WIDE), 5)
    engine.add(Request(ids, greedy(3), media=media))
    engine.step()
    assert engine.media.features.num_held == 1
    engine.scheduler.preempt_all(donate=False)
    engine.media.settle(engine.scheduler.running)
    assert len(engine.media.features) == 0
    (tokens,) = run_all(engine)[0].values()
    assert tokens == cold(model, ids, media, 3)
    assert drained(engine)


def test_a_request_that_expires_lets_go(model):
    engine = make_engine(model, chunked_prefill_size=4, image_cache_bytes=0)
    ids, media = prompt(2, picture(WIDE), 5)
    engine.add(Request(ids, greedy(4), media=media, timeout=1e-9))
    assert [out.finish for out in steps_of(engine)] == ["abort"]
    assert drained(engine)


def test_a_tower_that_fails_ends_its_requests_and_nothing_else(model, monkeypatch):
    engine = make_engine(model)
    ids, media = prompt(2, picture(), 5)
    monkeypatch.setattr(model.mm_projector, "forward", lambda _: 1 / 0)
    engine.add(Request(ids, greedy(4), media=media))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert [out.finish for out in engine.step()] == ["error"]
    monkeypatch.undo()
    assert len(engine.media.features) == 0
    assert run(engine, (ids, media)) == [cold(model, ids, media)]
    assert drained(engine)


def test_new_weights_forget_the_features_of_the_old_ones(model, tmp_path):
    ids, media = prompt(5, picture(), 4)
    other = seed_weights(KimiK3ForConditionalGeneration(model.config, dtype=torch.float32), 9)
    names = {f"{root}.{k}": v for root, part in other.vision_parts.items() for k, v in part.named_parameters()}
    mine = seed_weights(KimiK3ForConditionalGeneration(model.config, dtype=torch.float32), 0).eval()
    engine = make_engine(mine, grid=4)
    before = run(engine, (ids, media))
    assert len(engine.media.features) == 1
    engine.update_weights(names, partial=True)
    assert len(engine.media.features) == 0
    (out,) = engine_outputs(engine, ids, media)
    assert out.cached_tokens == 0
    assert [out.token_ids] == [cold(mine, ids, media)] != before
    engine.update_weights(names, partial=True, keep_cache=True)
    assert len(engine.media.features) == 1


def test_images_pass_through_the_async_engine(model):
    ids, media = prompt(5, picture(), 4)

    async def ask(running):
        return [t async for out in running.generate(ids, greedy(6), media=media) for t in out.token_ids]

    running = AsyncEngine(make_engine(model))
    try:
        assert asyncio.run(ask(running)) == cold(model, ids, media)
    finally:
        running.close()


# ---- features -----------------------------------------------------------------------------------


def test_an_image_of_several_requests_is_encoded_once(model):
    engine = make_engine(model, disable_radix_cache=True)
    prompts = [prompt(n, picture(), 3, seed=n) for n in (1, 4, 6)]
    run(engine, *prompts)
    assert encoded(engine) == 1
    run(engine, prompt(3, picture(), 2, seed=9))
    assert (encoded(engine), engine.stats()["media"]["feature_hits"]) == (1, 1)


def test_the_cache_of_features_is_bounded_by_bytes(model):
    rows = 6 * 48 * 4
    engine = make_engine(model, image_cache_bytes=2 * rows, disable_radix_cache=True)
    for seed in (0, 1, 2, 1, 0):
        run(engine, prompt(2, picture(SMALL, seed), 2))
        assert engine.media.features.num_bytes <= 2 * rows
    assert encoded(engine) == 4  # 0 had to leave
    assert engine.stats()["media"]["feature_evictions"] == 2


def test_what_is_held_may_exceed_the_limit():
    left = []
    cache = FeatureCache(100, on_drop=left.append)
    cache.put("a", torch.zeros(20), {1})
    cache.put("b", torch.zeros(20), {2})
    assert cache.num_bytes == 160
    assert cache.hold("a", 2) is not None
    cache.let_go("a", 1)
    cache.shrink()
    assert len(cache) == 2
    cache.keep_only({1})
    assert len(cache) == 1
    assert cache.hold("b", 3) is None  # it was used less recently
    assert cache.hold("a", 3) is not None
    cache.check()
    cache.put("a", torch.zeros(5), {3})  # replaced, not gone
    assert (left, cache.num_bytes, cache.held_bytes) == (["b"], 20, 20)
    cache.clear()
    assert cache.num_bytes == len(cache) == 0
    assert left == ["b", "a"]
    with pytest.raises(ConfigError, match="max_bytes must be >= 0, got -1"):
        FeatureCache(-1)


def test_a_random_life_of_the_cache_of_features():
    rng, cache, held, order = random.Random(1), FeatureCache(500), {}, OrderedDict()
    for _ in range(2000):
        name, holder = rng.choice("abcdefgh"), rng.randrange(4)
        action = rng.randrange(4)
        if action == 0:
            cache.let_go(name, holder)
            held.get(name, set()).discard(holder)
            cache.shrink()
        elif action == 1:
            gone = {rng.randrange(4)}
            cache.keep_only(set(range(4)) - gone)
            for holders in held.values():
                holders -= gone
        else:
            if cache.hold(name, holder) is None:
                cache.put(name, torch.zeros(rng.randrange(1, 60)), {holder})
            held.setdefault(name, set()).add(holder)
            order[name] = None
            order.move_to_end(name)
        cache.check()
        assert cache.num_held == sum(bool(holders) for holders in held.values())


def test_images_of_a_step_are_encoded_in_groups_of_bounded_size(model, monkeypatch):
    monkeypatch.setattr("k3lib.engine.media._MOST_PATCHES", 60)
    calls = []
    monkeypatch.setattr(
        model,
        "encode_local",
        lambda patches, grids: calls.append(len(grids)) or type(model).encode_local(model, patches, grids),
    )
    prompts = [prompt(2, picture(SMALL, i), 2, seed=i) for i in range(3)] + [prompt(1, picture((1, 8, 8)), 1)]
    run(make_engine(model), *prompts)
    assert calls == [2, 1, 1]
    calls.clear()
    run(make_engine(model, deterministic=True), *prompts)
    assert calls == [1, 1, 1, 1]


# ---- what is refused ----------------------------------------------------------------------------


def test_images_without_a_tower_are_refused(model):
    ids, media = prompt(5, picture(), 4)
    engine = make_engine(model.language_model)
    with pytest.raises(RequestError, match="does not take images: its model has no vision tower"):
        engine.add(Request(ids, greedy(), media=media))
    assert drained(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 5}, r"media\[0\]: its grid \(1, 4, 6\) gives 6 rows of features, the prompt has 5 placeholders"),
        ({"grid_thw": (1, 4, 4)}, r"needs floats \[16, 3, 14, 14\], got float32 \[24, 3, 14, 14\]"),
        ({"grid_thw": (1, 3, 8)}, "rows be a multiple of 2"),
        ({"grid_thw": (1, 4)}, "three integers"),
        ({"patches": torch.zeros(24, 3, 14, 14, dtype=torch.uint8)}, "got uint8"),
        ({"position": 4}, "the image at token 4 has 6 rows of features, the prompt has 1 placeholders"),
        ({"position": 14}, "leaves the prompt of 15 tokens"),
        ({"position": -1}, "leaves the prompt of 15 tokens"),
        ({"digest": ""}, "needs a digest"),
    ],
)
def test_images_that_do_not_fit_are_refused_before_anything_runs(model, change, message):
    ids, media = prompt(5, picture(), 4)
    engine = make_engine(model)
    with pytest.raises(RequestError, match=message) as caught:
        engine.add(Request(ids, greedy(), media=[media[0]._replace(**change)]))
    assert caught.value.param == "media"
    assert not engine.has_work
    assert drained(engine)


def test_features_that_do_not_fit_are_refused(model):
    engine = make_engine(model)
    ids, _ = prompt(5, picture(), 4)
    for span, message in (
        (MediaSpan(5, torch.zeros(6, 40), "x"), r"floats \[rows, 48\], got float32 \[6, 40\]"),
        (MediaSpan(5, torch.zeros(5, 48), "x"), "5 rows of features, the prompt has 6 placeholders"),
        (MediaSpan(5, torch.zeros(6, 48)), "needs a digest"),
        (MediaSpan(5, torch.zeros(6, 48), "x", request=1), "request=1"),
        ("image", "must be a PromptImage or a MediaSpan, got str"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add(Request(ids, greedy(), media=[span]))
    assert drained(engine)


# ---- graphs -------------------------------------------------------------------------------------


class Capture:
    """In place of a graph: remembers that it was made, and runs eagerly."""

    def __init__(self, failing=()):
        self.made, self.failing = [], failing

    def __call__(self, model, grids):
        if grids[0] in self.failing:
            raise RuntimeError("this op waits\nfor the device")
        self.made.append(tuple(grids))

        def graph(patches):
            return model.encode_local(patches, grids)

        graph.num_bytes = 1 << 20
        return graph


def ask(graphs, grid):
    grids = [Grid(*grid)]
    patches = draw(grids[0].num_patches, 3, 14, 14)
    assert graphs.run(patches, grids).equal(graphs.model.encode_local(patches, grids))


def test_a_graph_is_made_when_grids_come_again(model):
    graphs = VisionGraphs(model, capture=(capture := Capture()))
    for _ in range(4):
        ask(graphs, SMALL)
    assert capture.made == [(SMALL,)]
    assert graphs.stats() == {"graphs": 1, "captures": 1, "replays": 3, "failed": 0, "retained_bytes": 1 << 20}
    ask(graphs, WIDE)
    ask(graphs, WIDE)
    for _ in range(3):
        ask(graphs, TALL)  # there are as many graphs as may be
    assert capture.made == [(SMALL,), (WIDE,)]


def test_large_images_and_failed_captures_run_eagerly(model, caplog):
    graphs = VisionGraphs(model, capture=(capture := Capture({WIDE})), max_patches=31)
    for _ in range(3):
        ask(graphs, (1, 8, 4))
    assert not capture.made
    graphs.max_patches = 32
    for _ in range(4):
        ask(graphs, WIDE)
    assert graphs.stats()["failed"] == 1
    assert caplog.text.count("1x4x8 run without a graph: this op waits") == 1


def test_by_default_two_graphs_of_at_most_6144_patches_are_made_the_second_time(model, monkeypatch):
    monkeypatch.setattr(model, "encode_local", lambda patches, grids: torch.zeros(len(grids), 1))
    graphs = VisionGraphs(model, capture=(capture := Capture()))
    largest, larger, other, third = Grid(1, 64, 96), Grid(1, 64, 98), Grid(1, 2, 2), Grid(1, 2, 4)
    for grid in (largest, larger, larger, largest, other, third, other, third, third):
        graphs.run(torch.zeros(0), [grid])
    assert capture.made == [(largest,), (other,)]
    assert graphs.num_replays == 2


def test_grids_are_forgotten_after_many_others(model):
    graphs = VisionGraphs(model, capture=(capture := Capture()), capacity=1)
    ask(graphs, SMALL)
    for width in range(4, 20, 2):
        ask(graphs, (1, 2, width))
    ask(graphs, SMALL)
    assert not capture.made
    ask(graphs, SMALL)
    assert capture.made == [(SMALL,)]


def test_graphs_are_made_anew_when_weights_move(model):
    moved = KimiK3ForConditionalGeneration(model.config, dtype=torch.float32)
    graphs = VisionGraphs(moved, capture=(capture := Capture()))
    for _ in range(2):
        ask(graphs, SMALL)
    moved.vision_tower.patch_embed.proj.weight = torch.nn.Parameter(moved.vision_tower.weight * 2)
    for _ in range(2):
        ask(graphs, SMALL)
    assert capture.made == [(SMALL,), (SMALL,)]


def test_an_engine_encodes_through_graphs(model):
    engine = make_engine(model, disable_radix_cache=True, image_cache_bytes=0)
    engine.media.graphs = VisionGraphs(model, capture=Capture())
    ids, media = prompt(3, picture(), 2)
    for _ in range(3):
        assert run(engine, (ids, media)) == [cold(model, ids, media)]
    assert engine.stats()["media"]["graphs"]["replays"] == 2


def test_graphs_are_off_by_default_and_where_there_is_no_device(model):
    assert EngineConfig().vision_graphs is False
    assert make_engine(model, vision_graphs=True).media.graphs is None
    assert MediaStore(model).graphs is None
    assert Engine(model).stats()["limits"]["image_cache_bytes"] == {
        "value": 100 << 20, "reason": "default", "note": "features of images that no running request needs",
    }  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs are captured there")
def test_a_captured_tower_gives_what_the_tower_gives():
    seen = KimiK3ForConditionalGeneration(KimiK3Config.tiny(), dtype=torch.bfloat16, device="cuda").eval()
    seed_weights(seen).requires_grad_(requires_grad=False)
    graphs, grids = VisionGraphs(seen), [Grid(1, 8, 12), Grid(1, 2, 2)]
    for seed in range(3):
        patches = draw(100, 3, 14, 14, seed=seed).to(seen.device, seen.dtype)
        torch.testing.assert_close(graphs.run(patches, grids), seen.encode_local(patches, grids))
    found = graphs.stats()
    assert (found["captures"], found["replays"], found["failed"]) == (1, 2, 0)
    assert found["retained_bytes"] > patches.nbytes
