"""Images end to end: the app over the real engine with a small random model, and the flags about them."""

import asyncio
import base64
import dataclasses
import io
import json
import logging
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
import torch
from folders import read, write
from seeded import seed_weights

pytest.importorskip("PIL", reason="needs Pillow (pip install k3lib[server])")

from PIL import Image

from k3lib import KimiK3Config, KimiK3ForCausalLM, KimiK3ForConditionalGeneration
from k3lib.cache import CacheConfig
from k3lib.engine import AsyncEngine, Engine, EngineConfig
from k3lib.errors import ConfigError
from k3lib.server import serve
from k3lib.server.app import create_app
from k3lib.server.image_input import ImageLimits
from k3lib.server.images import DEFAULT
from k3lib.server.loading import load_model
from k3lib.server.tiny import add_vision, make_tiny, tiny_model
from k3lib.server.tokenizer import load_tokenizer
from k3lib.server.vision import LOW_MEMORY_RUNNING, image_reader, low_memory_profile

TOK = load_tokenizer()
LIMITS = ImageLimits(max_image_pixels=1 << 20, max_image_bytes=1 << 20, max_images=4)


def picture(height=40, width=60, seed=0, mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def url_of(image, kind="PNG", **options):
    data = image if isinstance(image, bytes) else encode(image, kind, **options)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(image, **options):
    return {"type": "image_url", "image_url": {"url": url_of(image, **options), "detail": "auto"}}


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def model():
    """Three layers, and the token ids of the `bytes` tokenizer."""
    sizes = {
        "num_hidden_layers": 3, "kda_layers": [1, 2], "full_attn_layers": [3], "attn_res_block_size": 2,
        "num_experts": 6, "num_experts_per_token": 2, "bos_token_id": 256, "eos_token_id": 258,
        "media_placeholder_token_id": 277,
    }  # fmt: skip
    made = KimiK3ForConditionalGeneration(KimiK3Config.tiny(**sizes), dtype=torch.float32)
    return seed_weights(made).eval().requires_grad_(requires_grad=False)


class Asking:
    """A server in this process, and how to ask it."""

    def __init__(self, model, limits=LIMITS, **rules):
        rules = {"chunked_prefill_size": 64, **rules}
        pools = CacheConfig(num_pages=120, num_slots=8, page_size=16, checkpoint_grid=32)
        self.engine = Engine(model, EngineConfig(cache=pools, **rules), tokenizer=TOK)
        self.running = AsyncEngine(self.engine)
        self.reader = image_reader(model, TOK, limits)
        self.app = create_app(
            self.running, TOK, model_name="tiny", max_model_len=self.engine.context_length, images=self.reader
        )

    def close(self):
        self.running.close()
        if self.reader is not None:
            self.reader.close()

    def client(self):
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://k3")

    def post(self, path, body):
        async def send():
            async with self.client() as client:
                return await client.post(path, json=body, timeout=60)

        return asyncio.run(send())

    def chat(self, *parts, **more):
        body = {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6}
        return self.post("/v1/chat/completions", {**body, "temperature": 0, "reasoning_effort": "none", **more})

    def says(self, *parts, **more):
        answer = self.chat(*parts, logprobs=True, **more)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        said = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
        return said, body["usage"]


@pytest.fixture(scope="module")
def server(model):
    asking = Asking(model)
    yield asking
    asking.close()
    state = asking.engine
    assert not state.has_work
    assert state.media.features.num_held == 0
    assert state.cache.free_pages + state.cache.cached_pages == 120


# ---- answers ------------------------------------------------------------------------------------


def test_an_image_changes_the_answer_and_is_counted(server):
    dots, other, none = (server.says(*parts) for parts in (
        (text("what?"), part(picture())), (text("what?"), part(picture(seed=1))), (text("what?"),)
    ))  # fmt: skip
    assert dots[0] != other[0]
    assert dots[1]["prompt_tokens"] == other[1]["prompt_tokens"]
    # 56 x 84 pixels are 2 x 3 tokens; the block around them says the size
    block = TOK.encode("<|media_begin|>image 60x40<|media_content|><|media_end|>", True)
    assert dots[1]["prompt_tokens"] - none[1]["prompt_tokens"] == 6 + len(block)


def test_an_image_again_is_reused_and_another_is_not(server):
    parts = text("x" * 60), part(picture(80, 90, seed=3)), text("y" * 60)
    first, usage = server.says(*parts)
    encoded = server.engine.media.num_encoded
    again, reused = server.says(*parts)
    assert again == first
    # behind the image: its 3 x 4 tokens and the text in front of it
    assert reused["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens_details"]["cached_tokens"] + 80
    assert server.engine.media.num_encoded == encoded
    _, other = server.says(text("x" * 60), part(picture(80, 90, seed=4)), text("y" * 60))
    assert other["prompt_tokens_details"]["cached_tokens"] < 110


def test_streams_cold_servers_and_chunks_say_the_same(server, model):
    parts = text("a"), part(picture(seed=5)), part(picture(100, 30, seed=6)), text("b"), part(picture(seed=5))
    want, _ = server.says(*parts)
    fresh = Asking(model, chunked_prefill_size=7, image_cache_bytes=0)
    try:
        assert fresh.says(*parts)[0] == want
        streamed = fresh.chat(*parts, stream=True, logprobs=True).text.split("\n\n")[:-2]
        events = [json.loads(line.removeprefix("data: ")) for line in streamed]
        found = [e["token"] for x in events for c in x["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
        assert found == want
    finally:
        fresh.close()


def test_an_image_is_fetched_where_that_is_allowed(server, model, tmp_path):
    picture(seed=12).save(tmp_path / "a.png")
    want, usage = server.says(text("?"), part((tmp_path / "a.png").read_bytes()))
    files = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path))
    threading.Thread(target=files.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{files.server_port}"
    asking = Asking(model, limits=dataclasses.replace(LIMITS, image_hosts=(host,), image_private_hosts=True))
    try:
        fetched = {"type": "image_url", "image_url": {"url": f"http://{host}/a.png"}}
        tokens, found = asking.says(text("?"), fetched)
        assert (tokens, found["prompt_tokens"]) == (want, usage["prompt_tokens"])
        fetched["image_url"]["url"] = f"http://{host}/b.png"
        answer = asking.chat(text("?"), fetched)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, PLACE)
    finally:
        asking.close()
        files.shutdown()
        files.server_close()


def test_a_conversation_keeps_its_images(server):
    first = {"role": "user", "content": [text("look"), part(picture(seed=8))]}
    turns = [first, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and now?"}]
    body = {"model": "tiny", "messages": turns, "max_tokens": 4, "temperature": 0}
    tool = {"role": "tool", "tool_call_id": "f:0", "content": [part(picture(seed=9))]}
    call = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with_tool = [first, {"role": "assistant", "content": "", "tool_calls": [call]}, tool]
    for messages in (turns, with_tool):
        answer = server.post("/v1/chat/completions", {**body, "messages": messages})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("image", "options"),
    [
        (picture(1, 1), {}),
        (picture(mode="CMYK"), {"kind": "JPEG"}),
        (picture(mode="P"), {}),
        (picture(mode="LA"), {}),
        (picture(mode="RGBA"), {}),
        (picture(mode="1"), {}),
        (Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50), {}),
        (picture(), {"kind": "GIF", "save_all": True, "append_images": [picture(seed=1)]}),
        (picture(), {"kind": "WEBP"}),
    ],
    ids=["1x1", "CMYK", "palette", "gray-alpha", "transparent", "bilevel", "16-bit", "animated", "webp"],
)
def test_unusual_images_are_answered(server, image, options):
    tokens, _ = server.says(text("?"), part(image, **options))
    assert tokens


def test_a_mark_of_rotation_changes_the_file_but_not_the_pixels(server):
    exif = Image.Exif()
    exif[274] = 6
    plain, marked = (part(picture(40, 60), kind="JPEG", quality=95, **o) for o in ({}, {"exif": exif}))
    (one, usage), (two, other) = server.says(plain), server.says(marked)
    assert one == two
    assert usage["prompt_tokens"] == other["prompt_tokens"]


# ---- refusals -----------------------------------------------------------------------------------


PLACE = "messages[0].content[1]"
HALF = encode(picture(200, 200))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (part(b"\x89PNG\r\n\x1a\n" + b"\0" * 60), "cannot be decoded|no image of a known format"),
        (part(HALF[: len(HALF) // 2]), "cannot be decoded"),
        (part(b"hello"), "no image of a known format"),
        (part(Image.new("RGB", (1000, 1100))), "1000 x 1100 pixels, the limit of this server is 1,048,576"),
        (part(np.random.default_rng(0).bytes((1 << 20) + 1)), "the limit of this server is 1,048,576"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "this server fetches nothing"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data: URL"),
        ({"type": "image_url", "image_url": {"url": "data:video/mp4;base64,AAAA"}}, "video/mp4"),
    ],
    ids=["corrupt", "truncated", "text", "huge", "many bytes", "http", "file", "video data"],
)
def test_bad_images_get_400_with_their_place_and_nothing_runs(server, bad, message):
    before = server.engine.media.num_encoded
    answer = server.chat(text("?"), bad)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, PLACE), error
    assert PLACE in error["message"]
    assert any(words in error["message"] for words in message.split("|")), error["message"]
    assert server.engine.media.num_encoded == before


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "video", "audio_url"])
def test_video_and_audio_are_refused_by_name(server, kind):
    error = server.chat(text("?"), {"type": kind, kind: {"url": "data:x"}}).json()["error"]
    assert f"unsupported content type '{kind}'" in error["message"]
    assert PLACE in error["message"]


def test_too_many_images_and_too_long_prompts_are_refused(server):
    answer = server.chat(*[part(picture())] * 5)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "5 images, this server takes 4" in answer.text
    encoded = server.engine.media.num_encoded
    answer = server.chat(*[part(Image.new("RGB", (1000, 1000)))] * 2)
    assert answer.status_code == 400
    assert "tokens, the context of 1920 tokens" in answer.text
    assert server.engine.media.num_encoded == encoded


def test_a_server_of_text_refuses_images(model):
    asking = Asking(model.language_model)
    try:
        assert asking.reader is None
        answer = asking.chat(text("?"), part(picture()))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, PLACE)
        assert "without a vision tower" in answer.text
        assert asking.chat(text("?")).status_code == 200
    finally:
        asking.close()


def test_the_placeholder_in_text_is_text(server):
    _, usage = server.says(text("<|media_pad|> <|kimi_image_placeholder|>"), part(picture()))
    assert usage["prompt_tokens"] > 40


def test_pixels_are_read_outside_the_event_loop(server, monkeypatch):
    seen = set()
    monkeypatch.setattr(
        server.reader, "_pixels", lambda *a, f=server.reader._pixels: seen.add(threading.current_thread().name) or f(*a)
    )
    server.says(part(picture(seed=20)), part(picture(seed=21)))
    assert len(seen) == 1
    assert all(name.startswith("k3lib-images") for name in seen)


def test_prompts_with_images_are_counted_by_tokenize_and_told_by_model_info(server):
    messages = [{"role": "user", "content": [part(picture())]}]
    answer = server.post("/tokenize", {"model": "tiny", "messages": messages}).json()
    ids = answer.get("tokens") or answer["input_ids"]
    assert ids.count(TOK.special["<|media_pad|>"]) == 6

    async def info():
        async with server.client() as client:
            return (await client.get("/model_info")).json(), (await client.get("/server_info")).json()

    model, state = asyncio.run(info())
    assert model["has_image_understanding"] is True
    assert state["internal_states"][0]["media"]["images_encoded"] > 0


# ---- weights and flags --------------------------------------------------------------------------


def test_a_checkpoint_is_served_with_its_tower(tmp_path, caplog):
    make_tiny(tmp_path / "seeing", mxfp4=False)
    loaded = load_model(str(tmp_path / "seeing"), device="cpu", dtype="float32", vision=True)
    assert isinstance(loaded, KimiK3ForConditionalGeneration)
    made = add_vision(tiny_model(dtype=torch.float32))
    for name, value in loaded.named_parameters():
        if not name.startswith("language_model."):
            assert value.equal(made.get_parameter(name)), name
    assert type(load_model(str(tmp_path / "seeing"), device="cpu")) is KimiK3ForCausalLM
    make_tiny(tmp_path / "text", mxfp4=False, vision=False)
    assert type(load_model(str(tmp_path / "text"), device="cpu", vision=True)) is KimiK3ForCausalLM
    config, tensors = read(tmp_path / "seeing")
    blind = {name: x for name, x in tensors.items() if name.startswith("language_model.")}
    write(tmp_path / "blind", config, blind)
    assert type(load_model(str(tmp_path / "blind"), device="cpu", vision=True)) is KimiK3ForCausalLM
    assert "has a vision_config but no vision tensors" in caplog.text
    assert image_reader(made, TOK, LIMITS, model_path=str(tmp_path / "seeing")).config == DEFAULT
    (tmp_path / "seeing" / "preprocessor_config.json").write_text('{"media_proc_cfg": {"patch_size": 16}}')
    with pytest.raises(ConfigError, match="differ from the vision tower's"):
        image_reader(made, TOK, LIMITS, model_path=str(tmp_path / "seeing"))


def test_another_placeholder_in_the_configuration_is_only_a_warning(model, caplog):
    other = KimiK3ForConditionalGeneration(KimiK3Config.tiny(), device="meta")
    with caplog.at_level(logging.WARNING):
        image_reader(other, TOK, LIMITS).close()
        image_reader(model, TOK, LIMITS).close()
    assert caplog.text.count("media_placeholder_token_id=505 in config.json: the tokenizer counts") == 1
    assert len(caplog.records) == 1


def test_the_profile_for_little_memory_changes_what_was_not_asked_for():
    config, notes = low_memory_profile(EngineConfig(), 4096)
    assert (config.image_cache_bytes, config.context_length, config.max_running_requests) == (
        0,
        2048,
        LOW_MEMORY_RUNNING,
    )
    assert notes[1] == "context_length = 2048: half of the model's 4096 positions"
    config, notes = low_memory_profile(EngineConfig(context_length=300, max_running_requests=9), 4096)
    assert (config.image_cache_bytes, config.context_length, config.max_running_requests) == (0, 300, 9)
    assert notes[1:] == ["context_length stays 300, as given", "max_running_requests stays 9, as given"]


@pytest.mark.parametrize("low_memory", [False, True])
def test_flags_reach_engine_and_reader(monkeypatch, caplog, tiny_folder, low_memory):
    from k3lib.server.config import ModelConfig, ServeConfig, VisionFlags  # noqa: PLC0415

    made = {}

    def remember(engine, tok, **options):
        made.update(options, engine=engine)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "create_app", remember)
    tiny = ModelConfig(model_path=str(tiny_folder), device="cpu")
    config = ServeConfig(model=tiny, vision=VisionFlags(low_memory=low_memory), images=ImageLimits(max_images=3))
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.INFO):
        serve.run_server(config)
    made["engine"].close()
    made["images"].close()
    assert made["images"].limits.max_images == 3
    engine = made["engine"].engine
    limits = {name: x["value"] for name, x in engine.stats()["limits"].items()}
    wanted = (0, 2048, LOW_MEMORY_RUNNING) if low_memory else (100 << 20, 4096, 16)
    assert tuple(limits[n] for n in ("image_cache_bytes", "context_length", "max_running_requests")) == wanted
    assert caplog.text.count("low memory: ") == (3 if low_memory else 0)


# ---- /generate ----------------------------------------------------------------------------------


def test_generate_takes_images_where_the_prompt_says(server):
    body = {"text": "a <|media_pad|> b <|media_pad|>", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    one, other = (
        server.post("/generate", {**body, "image_data": [url_of(picture()), url_of(picture(seed=seed))]}).json()
        for seed in (1, 2)
    )
    assert one["output_ids"] != other["output_ids"]
    assert one["meta_info"]["prompt_tokens"] == len(TOK.encode("a  b ")) + 2 * 6
    single = {**body, "text": "<|media_pad|>", "image_data": url_of(picture())}
    assert server.post("/generate", single).json()["meta_info"]["prompt_tokens"] == 6


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"image_data": "data:image/png;base64,AAAA"}, "image_data[0]", "no image of a known format"),
        ({"image_data": [3]}, "image_data", "must be the URL of an image"),
        ({"image_data": []}, "image_data", "must be the URL of an image"),
        ({"text": "no place"}, "image_data", "0 image placeholders for 1 images"),
        ({"text": ["<|media_pad|>"] * 2}, "image_data", "goes with one prompt, got 2"),
    ],
)
def test_generate_refuses_images_without_a_place(server, change, param, message):
    answer = server.post("/generate", {"text": "<|media_pad|>", "image_data": url_of(picture()), **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
