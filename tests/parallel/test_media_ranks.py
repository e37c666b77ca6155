"""Images in an engine on many ranks: the tokens of one rank, whole images spread over ranks, features on all."""

import asyncio
import base64
import dataclasses
import io
import logging
import math
import pickle
import random
import signal
from collections import Counter

import httpx
import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs Pillow (pip install k3lib[server])")

from engines import greedy
from folders import read, write
from PIL import Image
from seeded import draw, seed_weights
from test_serve_ranks import Ranks
from worlds import World

from k3lib import (
    Batch,
    Engine,
    EngineConfig,
    KimiK3Config,
    KimiK3ForCausalLM,
    KimiK3ForConditionalGeneration,
    Mesh,
    ParallelConfig,
)
from k3lib.cache import CacheConfig
from k3lib.engine import AsyncEngine, ReplicatedEngine, Request, follow, ranks
from k3lib.engine.media import MediaMirror, PromptImage
from k3lib.errors import CheckpointError, ConfigError, RequestError
from k3lib.multimodal import MediaSpan, expand_placeholders
from k3lib.server import serve
from k3lib.server.app import create_app
from k3lib.server.config import ModelConfig, ServeConfig, VisionFlags
from k3lib.server.image_input import ImageLimits
from k3lib.server.tokenizer import load_tokenizer
from k3lib.server.vision import image_reader
from k3lib.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

PAD = 505
SMALL, WIDE, TALL = (1, 4, 6), (1, 4, 8), (1, 10, 2)
# small pages and a fine grid: prefixes are reused, pages shared by ranks end in the middle
POOLS = CacheConfig(num_pages=80, num_slots=8, page_size=4, checkpoint_grid=8)
RULES = EngineConfig(cache=POOLS, chunked_prefill_size=13, max_running_requests=4)
LAYOUTS = {
    "pp2": {"pp_size": 2},
    "tp2-ep2-a2a": {"tp_size": 2, "ep_size": 2, "moe_exchange": "all_to_all"},
    "dcp2-cut": {"tp_size": 2, "dcp_size": 2, "shard_latent_projections": True},
    "pp2-tp2": {"tp_size": 2, "pp_size": 2},
}


def make(seed=0, **changes):
    sizes = {
        "num_hidden_layers": 3, "kda_layers": [1, 2], "full_attn_layers": [3], "attn_res_block_size": 2,
        "num_experts": 6, "num_experts_per_token": 2, "hidden_size": 48, "intermediate_size": 64, "num_heads": 2,
        "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vt_num_hidden_layers": 1,
    }  # fmt: skip
    return seed_weights(
        KimiK3ForConditionalGeneration(KimiK3Config.tiny(**sizes, **changes), dtype=torch.float32), seed
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    make().save_pretrained(path, experts="bf16")
    return path


def load(folder, mesh):
    return KimiK3ForConditionalGeneration.from_pretrained(folder, mesh=mesh, dtype=torch.float32, progress=False)


def prompt(*parts, seed=0):
    """Ids and images of a prompt: numbers are lengths of random text, pairs are grids of pictures with their seeds."""
    rng = random.Random(seed)
    ids, counts, pictures = [], [], []
    for part in parts:
        if isinstance(part, int):
            ids += [rng.randrange(500) for _ in range(part)]
        else:
            grid, number = part
            ids.append(PAD)
            counts.append(grid[1] * grid[2] // 4)
            pictures.append((draw(math.prod(grid), 3, 14, 14, seed=number).clamp(-1, 1), grid))
    expanded, positions = expand_placeholders(ids, PAD, counts)
    return expanded, [PromptImage.of(at, *picture) for at, picture in zip(positions, pictures, strict=True)]


PROMPTS = [
    prompt(3, (SMALL, 0), 1, (TALL, 1), 9),  # two images in one message
    prompt(2, (WIDE, 2), 3, (WIDE, 2), 2, seed=1),  # the same one twice
    prompt(1, (WIDE, 3), 1, (WIDE, 4), (SMALL, 5), 2, (TALL, 6), 5, seed=2),  # more than ranks
    prompt(20, seed=3),  # and text beside them
]


def ask(engine, prompts, tokens=3, **fields):
    """Run requests together; what each was given."""
    names = [engine.add(Request(list(ids), greedy(tokens), media=media, **fields)) for ids, media in prompts]
    found = {name: ([], []) for name in names}
    while engine.has_work:
        for out in engine.step():
            found[out.request_id][0].extend(out.token_ids)
            found[out.request_id][1].append(out.cached_tokens)
    engine.cache.check()
    engine.scheduler.check()
    engine.media.features.check()
    assert engine.media.features.num_held == 0
    return [(tokens, cached[-1]) for tokens, cached in found.values()]


def converse(engine):
    """Cold, with warm prefixes, and where only features are known; then what was computed and is kept."""
    found = [ask(engine, PROMPTS), ask(engine, PROMPTS), ask(engine, PROMPTS, namespace="other")]
    counts = engine.stats()["media"]
    return found, [counts[name] for name in ("images_encoded", "patches_encoded", "feature_hits", "feature_bytes")]


def run(layout, folder, talk, rules=RULES, load=load, world=None):
    """What rank 0 gives."""

    def work(mesh, rank):
        model = load(folder, mesh)
        if rank:
            follow(model, rules)
            return None
        engine = Engine(model, rules)
        try:
            return talk(engine)
        finally:
            engine.close()

    first, *others = (world or World(ParallelConfig(**layout))).run(work)
    assert others == [None] * len(others)
    return first


@pytest.fixture(scope="module")
def whole(folder):
    return load(folder, Mesh.single())


@pytest.fixture(scope="module")
def want(whole):
    return converse(Engine(whole, RULES))


@pytest.fixture
def seen(monkeypatch):
    """What each rank of the TP group encodes, and what the others keep: `(calls, mirrors)`."""
    calls, mirrors = [], []

    class Mirror(MediaMirror):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            mirrors.append(self)

    encode = KimiK3ForConditionalGeneration.encode_local

    def counted(model, patches, grids):
        calls.append((model.mesh.tp.rank, [grid.num_patches for grid in grids]))
        return encode(model, patches, grids)

    monkeypatch.setattr(KimiK3ForConditionalGeneration, "encode_local", counted)
    monkeypatch.setattr("k3lib.engine.ranks.MediaMirror", Mirror)
    return calls, mirrors


def calls_of(calls, patches):
    """How often each rank encoded an image of so many patches."""
    return Counter(rank for rank, images in calls if images == [patches])


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_see_like_one(name, folder, want):
    assert run(LAYOUTS[name], folder, converse) == want


def test_images_are_sent_to_the_rank_that_encodes_them_and_never_again(folder, want, seen, monkeypatch):
    """In this layout nothing else is exchanged all to all, so what is are patches."""
    calls, mirrors = seen
    messages, send = [], ranks.send
    monkeypatch.setattr(
        ranks, "send", lambda channel, value: messages.append(len(pickle.dumps(value))) or send(channel, value)
    )
    world = World(ParallelConfig(tp_size=2))

    def sent():
        return [sum(world.traffic.get(kind, ())) for kind in ("all_to_all", "all_gather")]

    def talk(engine):
        found, totals = [], []
        for fields in ({}, {}, {"namespace": "other"}):
            found.append(ask(engine, PROMPTS, **fields))
            totals.append(sent())
        kept = {name: rows.clone() for name, rows in engine.media.features._features.items()}
        return found, engine.stats()["media"], [list(kind) for kind in zip(*totals, strict=True)], kept

    found, counts, (scattered, gathered), kept = run({}, folder, talk, world=world)
    assert found == want[0]
    by_rank = [sum(sum(patches) for rank, patches in calls if rank == r) for r in range(2)]
    assert sum(by_rank) == counts["patches_encoded"] == 2 * (24 + 20) + 3 * 32
    # in a step with one image or two, later ones of the same prompt come along for the rank without work
    assert calls_of(calls, 32) == {0: 2, 1: 1}
    assert calls_of(calls, 20) == {1: 2}
    assert sum(len(patches) for _, patches in calls) == counts["images_encoded"] == 7
    # patches of the other rank, once, in the dtype of the model
    assert scattered == [by_rank[1] * 3 * 14 * 14 * 4] * 3
    # the last round does the same steps as the first, without features of images
    assert gathered[0] - (gathered[2] - gathered[1]) >= counts["feature_bytes"]
    assert max(messages) < 4096
    (mirror,) = mirrors
    assert set(mirror.features) == set(kept)
    assert all(mirror.features[name].equal(rows) for name, rows in kept.items())
    assert sum(rows.untyped_storage().nbytes() for rows in mirror.features.values()) == counts["feature_bytes"]


def test_a_rank_without_an_image_runs_no_tower(folder, whole, seen):
    calls, _ = seen
    one = prompt(2, (SMALL, 9), 3)

    def talk(engine):
        return ask(engine, [one])

    expected = talk(Engine(whole, RULES))
    calls.clear()
    assert run({"tp_size": 2}, folder, talk) == expected
    assert calls == [(0, [24])]


def test_deterministic_engines_encode_one_by_one_on_every_rank(folder, whole, seen):
    calls, _ = seen
    rules = dataclasses.replace(RULES, deterministic=True, chunked_prefill_size=8)

    def talk(engine):
        return ask(engine, [PROMPTS[2]])

    expected = talk(Engine(whole, rules))
    calls.clear()
    assert run({"tp_size": 2}, folder, talk, dataclasses.replace(rules, chunked_prefill_size=40)) == expected
    assert {rank for rank, _ in calls} == {0, 1}
    assert all(len(patches) == 1 for _, patches in calls)


def test_an_abort_frees_the_features_of_all_ranks(folder, seen):
    rules = dataclasses.replace(RULES, image_cache_bytes=0, chunked_prefill_size=4)

    def talk(engine):
        for steps in range(1, 4):
            ids, media = prompt(2, (WIDE, steps), 5)
            name = engine.add(Request(ids, greedy(4), media=media))
            for _ in range(steps):
                engine.step()
            engine.abort(name)
            assert len(engine.media.features) == engine.media.features.num_held == 0
            ask(engine, [prompt(4, seed=steps)])
        assert engine.clear_cache() >= 0
        return engine.cache.free_pages, engine.cache.free_slots, engine.stats()["media"]["images_encoded"]

    assert run({"tp_size": 2, "dcp_size": 2}, folder, talk, rules) == (POOLS.num_pages, POOLS.num_slots, 3)
    (mirror,) = seen[1]
    assert not mirror.features


def test_preempted_requests_and_a_small_cache_of_features(folder, whole, seen):
    rules = dataclasses.replace(
        RULES,
        cache=dataclasses.replace(POOLS, num_pages=9),
        chunked_prefill_size=5,
        disable_radix_cache=True,
        schedule_conservativeness=0,
        image_cache_bytes=6 * 48 * 4,
    )
    pair = [prompt(2, (SMALL, 1), 3, seed=1), prompt(2, (WIDE, 0), 3, seed=2)]

    def talk(engine):
        found = ask(engine, pair, tokens=16)
        stats = engine.stats()
        return found, stats["preempted"], stats["media"]["images_encoded"], list(engine.media.features._features)

    expected = talk(Engine(whole, rules))
    assert expected[1] > 0
    assert expected[2] > 2
    rules = dataclasses.replace(rules, cache=dataclasses.replace(rules.cache, page_size=2))  # of two ranks
    assert run({"tp_size": 2, "dcp_size": 2}, folder, talk, rules) == expected
    (mirror,) = seen[1]
    assert list(mirror.features) == expected[3]


def text_only(folder, mesh):
    return KimiK3ForCausalLM.from_pretrained(folder, mesh=mesh, dtype=torch.float32, progress=False)


@pytest.mark.parametrize("load", [load, text_only])
def test_features_that_were_computed_elsewhere_reach_all_ranks(folder, whole, load):
    ids, media = PROMPTS[0]
    spans = [MediaSpan(i.position, whole.encode(i.patches, [i.grid_thw])[0].double(), i.digest) for i in media]

    def talk(engine):
        return ask(engine, [(ids, spans), PROMPTS[3]]), engine.stats()["media"]["images_encoded"]

    expected = talk(Engine(whole, RULES))
    assert expected[1] == 0
    assert run({"tp_size": 2, "pp_size": 2}, folder, talk, load=load) == expected


def test_new_weights_of_towers_and_refused_ones(folder, whole, tmp_path):
    make(9).save_pretrained(tmp_path / "other", experts="bf16")
    config, tensors = read(tmp_path / "other")
    del tensors["mm_projector.proj.0.weight"]
    write(tmp_path / "broken", config, tensors)

    def talk(engine):
        found = [ask(engine, PROMPTS[:1])]
        with pytest.raises(CheckpointError, match=r"missing: mm_projector\.proj\.0"):
            engine.update_weights(tmp_path / "broken", progress=False)  # no stage has changed
        found.append(ask(engine, PROMPTS[:1]))
        engine.update_weights(tmp_path / "other", progress=False)
        assert len(engine.media.features) == 0
        found.append(ask(engine, PROMPTS[:1]))
        return found

    expected = talk(Engine(load(folder, Mesh.single()), RULES))
    assert expected[1] != expected[2]
    assert run({"tp_size": 2, "pp_size": 2}, folder, talk) == expected

    def broken(mesh, rank):
        with pytest.raises(CheckpointError, match=r"missing: mm_projector\.proj\.0"):
            load(tmp_path / "broken", mesh)

    World(ParallelConfig(pp_size=2)).run(broken)


def test_bad_images_are_refused_before_any_rank_hears_of_them(folder):
    def talk(engine):
        ids, media = PROMPTS[0]
        with pytest.raises(RequestError, match="gives 6 rows of features, the prompt has 5 placeholders"):
            engine.add(Request(ids, media=[media[0]._replace(length=5)]))
        assert not engine.has_work
        return ask(engine, PROMPTS[3:])

    run({"pp_size": 2}, folder, talk)


def test_the_tower_is_counted_on_the_ranks_that_have_it(folder, whole):
    weights = sum(p.nbytes for part in whole.vision_parts.values() for p in part.parameters())

    def limits(engine):
        return {limit.name: (limit.value, limit.note) for limit in engine.limits}

    found = run({"tp_size": 2}, folder, limits)
    assert found["vision_weight_bytes"] == (weights, "vision tower and projector, whole, on each of 2 ranks")
    assert found["image_cache_bytes"][1].endswith("needs, on each of 2 ranks")

    def stages(mesh, rank):
        part = load(folder, mesh)
        return part.has_tower, sum(p.nbytes for p in part.parameters() if not p.is_meta and p.ndim == 4)

    (first, some), (later, none) = World(ParallelConfig(pp_size=2)).run(stages)
    assert (first, later) == (True, False)
    assert some > 0 == none


def test_replicas_see_like_one(folder, want):
    """Each encodes the images of its own requests, on its own ranks."""

    def talk(engine):
        ids, media = zip(*PROMPTS, strict=True)
        outs = [engine.generate(ids, greedy(3), media=media) for _ in range(2)]
        engine.check()
        return [[out.token_ids for out in each] for each in outs]

    def work(mesh, rank):
        model = load(folder, mesh)
        if rank:
            follow(model, RULES)
            return None
        engine = ReplicatedEngine(model, RULES)
        try:
            return talk(engine)
        finally:
            engine.close()

    found = World(ParallelConfig(tp_size=4, dp_size=2)).run(work)
    assert found[0] == [[tokens for tokens, _ in each] for each in want[0][:2]]


# ---- the model itself, and the server -----------------------------------------------------------


def test_stages_call_the_model_with_the_same_images(folder, whole):
    ids, media = PROMPTS[1]
    patches, grids = torch.cat([i.patches for i in media]), [i.grid_thw for i in media]

    def logits(model, mesh=None):
        features = model.encode(patches, grids)
        spans = [MediaSpan(i.position, rows, i.digest) for i, rows in zip(media, features, strict=True)]
        narrow = [MediaSpan(span.position, span.features[:, :40]) for span in spans]
        with pytest.raises(ConfigError, match=r"shape \[8, 40\], the embeddings a width of 48"):
            model(Batch.pack([ids]), media=narrow)  # on every stage, or one would wait for the other
        return model(Batch.pack([ids]), media=spans)

    for found in World(ParallelConfig(pp_size=2)).run(lambda mesh, rank: logits(load(folder, mesh))):
        assert_close("logits", logits(whole), found, 1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """With the token ids of the `bytes` tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    make(1, bos_token_id=256, eos_token_id=258, media_placeholder_token_id=277).save_pretrained(path, experts="bf16")
    return path


@pytest.mark.parametrize("flags", [{}, {"low_memory": True}, {"language_model_only": True}], ids=str)
def test_flags_of_the_server_hold_on_all_ranks(tiny, monkeypatch, caplog, flags):
    """What the server makes of its flags, with ranks that are threads; no request comes."""
    made = {}

    def remember(running, tok, **options):
        made.update(options, running=running)
        raise KeyboardInterrupt

    def follows(model, rules, tok):
        made[model.mesh.world.rank] = type(model), rules
        follow(model, rules, tokenizer=tok)
        return 0

    monkeypatch.setattr(serve, "create_app", remember)
    monkeypatch.setattr(serve, "follow_rank_0", follows)
    config = ServeConfig(
        model=ModelConfig(model_path=str(tiny), tokenizer_path="bytes", dtype="float32", device="cpu"),
        parallel=ParallelConfig(tp_size=2),
        vision=VisionFlags(**flags),
    )

    def work(mesh, rank):
        if rank:
            return serve._run(config, mesh)
        with pytest.raises(KeyboardInterrupt):
            serve._run(config, mesh)
        made["running"].close()
        made["running"].engine.close()
        return 0

    with caplog.at_level(logging.INFO):
        assert World(config.parallel).run(work) == [0, 0]
    sees = "language_model_only" not in flags
    kind, rules = made[1]
    assert issubclass(kind, KimiK3ForConditionalGeneration if sees else KimiK3ForCausalLM)
    assert (made["images"] is not None) == sees == made["running"].engine.stats()["media"]["has_vision"]
    assert (rules.image_cache_bytes == 0) == bool(flags.get("low_memory"))
    assert caplog.text.count("low memory: ") == (6 if flags.get("low_memory") else 0)


def question(*parts):
    """A chat request: texts, and seeds of pictures."""
    content: list = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        buffer = io.BytesIO()
        pixels = np.random.default_rng(part).integers(0, 256, (40 + 30 * part, 60, 3), np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    return {
        "model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0,
        "reasoning_effort": "none", "logprobs": True,
    }  # fmt: skip


def said(answer):
    """Tokens, their log-probabilities, and the length of the prompt."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    entries = body["choices"][0]["logprobs"]["content"]
    chances = [entry["logprob"] for entry in entries]
    return [entry["token"] for entry in entries], chances, body["usage"]["prompt_tokens"]


async def alone(model, questions):
    """The answers of one rank."""
    tok = load_tokenizer()
    running, reader = AsyncEngine(Engine(model, tokenizer=tok)), image_reader(model, tok, ImageLimits())
    app = create_app(running, tok, model_name="tiny", max_model_len=4096, images=reader)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://k3") as client:
            return [said(await client.post("/v1/chat/completions", json=q, timeout=60)) for q in questions]
    finally:
        running.close()
        reader.close()


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL exchanges there")


@pytest.mark.again
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_a_server_of_two_processes_sees(tiny, tmp_path, device):
    flags = ["--served-model-name", "tiny", "--low-memory", "--vision-graphs", "--device", device]
    started = Ranks(tiny, tmp_path, *flags)
    try:
        questions = [question("what?", 0, 1), question(1, 1, "?")]
        questions.append(questions[0])
        expected = asyncio.run(alone(load(tiny, Mesh.single()), questions))
        started.wait_until_up()
        answers = [started.http.post("/v1/chat/completions", json=q) for q in questions]
        for answer, (tokens, chances, length) in zip(answers, expected, strict=True):
            assert said(answer) == (tokens, pytest.approx(chances, abs=1e-3), length)
        assert expected[0][0] != expected[1][0]
        assert answers[2].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        state = started.http.get("/server_info").json()["internal_states"][0]
        assert state["media"]["images_encoded"] == 3  # the last time all of it is in the prefix cache
        assert state["media"]["features"] == 0
        started.processes[0].send_signal(signal.SIGTERM)
        assert started.ends() == [0, 0], "\n".join(log.read_text() for log in started.logs)
    finally:
        started.stop()
