"""Images of requests: which parts are taken, which files are refused and how, and their place in the prompt."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import sys
import threading
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3lib.cache.prefix import token_keys
from k3lib.errors import ConfigError, RequestError
from k3lib.server import image_input
from k3lib.server.chat import encode_segments, render_chat
from k3lib.server.image_input import ImageLimits, ImageReader, expand_images
from k3lib.server.image_parts import ImagePart, has_images, image_part, image_parts, refuse_images
from k3lib.server.images import ImageConfig, preprocess_image
from k3lib.server.tokenizer import load_tokenizer

pytest.importorskip("PIL", reason="needs Pillow (pip install k3lib[server])")

from PIL import Image

TINY = load_tokenizer()
PAD = TINY.special["<|media_pad|>"]
PLACE = "messages[2].content[1]"


@pytest.fixture(scope="module")
def reader():
    reader = ImageReader()
    yield reader
    reader.close()


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def opened(reader, url, place=PLACE):
    return reader.open([ImagePart(place, url)])[0]


def refusal(call, *args):
    with pytest.raises(RequestError) as caught:
        call(*args)
    assert len(str(caught.value)) < 400
    return caught.value


def bomb(width, height):
    """A PNG of a few kilobytes that unpacks to gigabytes."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    body = zlib.compress(b"\0" * (8 << 20), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


# ---- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "high"}},
        {"type": "image_url", "image_url": "data:x"},
        {"type": "input_image", "image_url": "data:x", "detail": "auto"},
        {"type": "image", "image": "data:x"},
        {"type": "image_url", "image_url": {"url": "data:x"}, "place": "elsewhere"},
    ],
)
def test_every_spelling_of_an_image_is_one(part):
    taken = image_part(part, PLACE)
    assert taken == {"type": "image_url", "image_url": {"url": "data:x"}, "place": PLACE}
    messages = [{"role": "user", "content": "hi"}, {"role": "user"}, {"content": [{"type": "text"}, taken]}]
    assert image_parts(messages) == [(PLACE, "data:x")]
    assert has_images([{"role": "user", "content": [{"type": "text"}, part]}])


def test_video_and_audio_are_refused_by_name(golden):
    for case in json.loads((golden / "protocol/image.json").read_text(encoding="utf-8"))["rejects"]:
        error = refusal(image_part, case["part"], PLACE)
        assert PLACE in str(error)
        assert repr(case["part"]["type"]) in str(error)
        assert error.param == "messages"


@pytest.mark.parametrize("part", [None, 3, "x", [], {}, {"type": None}, {"type": "x" * 10_000}, {"type": ["text"]}])
def test_what_is_no_part_is_refused(part):
    assert "unsupported content type" in str(refusal(image_part, part, PLACE))
    assert not has_images([{"content": [part]}, {"content": part}, {}])


@pytest.mark.parametrize("holder", [None, 3, {}, {"url": None}, {"url": ["x"]}, ["x"]])
def test_an_image_without_url_is_refused(holder):
    error = refusal(image_part, {"type": "image_url", "image_url": holder}, PLACE)
    assert error.param == PLACE


def test_without_a_vision_tower_images_are_refused_clearly():
    error = refusal(refuse_images, [ImagePart(PLACE, "data:x"), ImagePart("elsewhere", "data:x")])
    assert error.param == PLACE
    assert "does not accept images: it runs without a vision tower" in str(error)


def test_the_placeholder_of_other_encoders_is_text():
    text = "<|kimi_image_placeholder|><|media_begin|><|media_pad|><|media_end|>"
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    assert image_parts(messages) == []
    ids = encode_segments(TINY, render_chat(messages, image_prompts=[]))
    assert expand_images(ids, [], PAD) == (ids, [])


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF"])
def test_known_formats_are_read(reader, kind):
    image = opened(reader, data_url(encode(noise(30, 45), kind), "image/whatever"))
    assert (image.width, image.height, image.plan.grid_thw) == (45, 30, (1, 4, 4))
    assert image.prompt == "<|media_begin|>image 45x30<|media_content|><|media_pad|><|media_end|>"
    (loaded,) = reader.load([image], [7])
    assert loaded.key == (7, 4, image.digest)
    assert (loaded.patches.shape, loaded.patches.dtype) == ((16, 3, 14, 14), torch.float32)


def test_patches_are_those_of_the_decoded_image(reader):
    data = encode(noise(60, 50))
    (loaded,) = reader.load([reader.open_bytes(data, PLACE)], [0])
    want, grid = preprocess_image(Image.open(io.BytesIO(data)))
    assert torch.equal(loaded.patches, want)
    assert loaded.grid_thw == grid


def test_one_pixel_is_one_token(reader):
    image = opened(reader, data_url(encode(Image.new("1", (1, 1)))))
    assert image.plan.num_tokens == 1
    assert reader.load([image], [0])[0].patches.shape == (4, 3, 14, 14)


def test_data_urls_may_be_wrapped_and_escaped(reader):
    data = encode(noise(20, 20))
    text = base64.encodebytes(data).decode()
    assert opened(reader, f" data:image/png;base64,{text} ").data == data
    assert opened(reader, "DATA:;charset=x;BASE64," + text.replace("+", "%2B").replace("=", "%3D")).data == data


def test_urls_are_fetched_under_the_limits_of_the_server(monkeypatch):
    asked = []
    monkeypatch.setattr(image_input, "download", lambda url, **rules: asked.append((url, rules)) or GOOD)
    limits = ImageLimits(
        image_hosts=("example.org",), image_private_hosts=True, image_timeout=3, max_image_bytes=10_000
    )
    parts = [ImagePart(f"place {i}", f"https://example.org/{i}") for i in range(2)]
    images = ImageReader(limits=limits).open(parts)
    assert [image.plan.num_tokens for image in images] == [4, 4]
    assert [url for url, _ in asked] == [part.url for part in parts]
    rules = {"hosts": ("example.org",), "max_bytes": 10_000, "timeout": 3, "allow_private": True}
    assert asked[0][1] == rules | {"param": "place 0", "deadline": asked[1][1]["deadline"]}


GOOD = encode(noise(40, 40))
JPEG = encode(noise(40, 40), "JPEG")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "must be a data: URL"),
        ("https://example.org/x.png", "this server fetches nothing"),
        ("http://example.org/x.png", "this server fetches nothing"),
        ("file:///etc/passwd", "must be a data: URL"),
        ("/etc/passwd", "must be a data: URL"),
        ("ftp://example.org/x", "must be a data: URL"),
        ("x" * 100_000, "must be a data: URL"),
        ("data:", "must look like"),
        ("data:image/png;base64", "must look like"),
        ("data:image/png,abc", "must look like"),
        ("data:image/png;base64,", "the 0 bytes are no image"),
        ("data:image/png;base64,A", "not base64"),
        ("data:image/png;base64,AAA", "not base64"),
        ("data:image/png;base64,AA=A", "not base64"),
        ("data:image/png;base64,A-_A", "not base64"),
        ("data:image/png;base64,äöü", "not base64"),
        ("data:video/mp4;base64,AAAA", "unsupported content type 'video/mp4'"),
        ("data:audio/wav;base64,AAAA", "unsupported content type 'audio/wav'"),
        (data_url(b"\0" * 5000), "the 5,000 bytes are no image of a known format (PNG, JPEG"),
        (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "no image of a known format"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "no image of a known format"),
        (data_url(GOOD)[:-3], "not base64"),
        (data_url(GOOD[:40]), "image"),
        (data_url(encode(Image.new("RGB", (20, 20)), "TIFF")), "no image of a known format"),
    ],
)
def test_urls_and_files_that_hold_no_image_are_refused(reader, url, why):
    error = refusal(opened, reader, url)
    assert why in str(error)
    assert str(error).startswith(PLACE)
    assert error.param == PLACE


@pytest.mark.parametrize("data", [GOOD[: len(GOOD) // 2], JPEG[: len(JPEG) // 2]], ids=["png", "jpeg"])
def test_truncated_pixels_are_refused(reader, data):
    image = reader.open_bytes(data, PLACE)
    error = refusal(reader.load, [image], [0])
    assert "truncated" in str(error)
    assert error.param == PLACE


def test_damaged_pixels_are_refused(reader):
    damaged = bytearray(GOOD)
    damaged[60:90] = b"\xff" * 30
    error = refusal(lambda: reader.load([reader.open_bytes(bytes(damaged), PLACE)], [0]))
    assert "cannot be decoded" in str(error)


@pytest.mark.parametrize("size", [(10_000, 10_000), (100_000, 100_000), (2**31 - 1, 2**31 - 1), (89_478_486, 1)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused_before_they_unpack(reader, size):
    data = bomb(*size)
    assert len(data) < 100_000
    error = refusal(reader.open_bytes, data, PLACE)
    assert error.param == PLACE
    assert "pixels" in str(error)


def test_the_limit_of_pixels_is_exact():
    reader = ImageReader(limits=ImageLimits(max_image_pixels=900))
    assert reader.open_bytes(encode(noise(30, 30)), PLACE).plan.num_tokens == 4
    error = refusal(reader.open_bytes, encode(noise(30, 31)), PLACE)
    assert "31 x 30 pixels" in str(error)
    assert "900" in str(error)


def test_the_limits_of_bytes_and_images_name_both_values():
    data = encode(noise(20, 20))
    reader = ImageReader(limits=ImageLimits(max_image_bytes=len(data) - 1, max_images=2))
    error = refusal(opened, reader, data_url(data))
    assert f"{len(data):,} bytes" in str(error)
    assert f"{len(data) - 1:,}" in str(error)
    error = refusal(reader.open, [ImagePart(PLACE, data_url(data))] * 3)
    assert "3 images" in str(error)
    assert "takes 2" in str(error)
    assert ImageReader(limits=ImageLimits(max_image_bytes=len(data))).open_bytes(data, PLACE).width == 20


def test_text_that_must_be_too_large_is_not_decoded(reader, monkeypatch):
    monkeypatch.setattr(base64, "b64decode", None)
    error = refusal(opened, reader, "data:image/png;base64," + "A" * (29 << 20))
    assert "the limit of this server is 20,971,520" in str(error)


def blamed(reader, file):
    """The field that is named if a file is refused."""
    try:
        image = reader.open_bytes(file, PLACE)
        if image.width * image.height < 1_000_000:
            reader.load([image], [0])
    except RequestError as error:
        return error.param
    return PLACE


@given(st.binary(max_size=300), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\x20\0\0\0WEBP", b"BM"]))
def test_random_bytes_never_do_more_than_be_refused(reader, data, magic):
    assert blamed(reader, magic + data) == PLACE


@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), st.data())
def test_changed_bytes_never_do_more_than_be_refused(reader, kind, data):
    file = bytearray(encode(noise(24, 24), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    assert blamed(reader, bytes(file)) == PLACE


@pytest.mark.parametrize(
    "limits",
    [
        {"max_images": 0},
        {"max_image_bytes": 0},
        {"max_image_pixels": 10**9},
        {"image_timeout": 0},
        {"image_timeout": float("nan")},
        {"image_hosts": ("",)},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        ImageLimits(**limits)


def test_without_pillow_the_reader_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install k3lib\[server\]"):
        ImageReader()


# ---- in the prompt ------------------------------------------------------------------------------


def prompt_of(reader, *images, text="compare"):
    content = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    content = [image_part(part, f"messages[0].content[{i}]") for i, part in enumerate(content)]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    read = reader.open(image_parts(messages))
    ids = encode_segments(TINY, render_chat(messages, image_prompts=[image.prompt for image in read]))
    ids, positions = expand_images(ids, read, PAD)
    return ids, reader.load(read, positions)


def test_a_block_names_the_size_before_the_resize(reader):
    ids, (image,) = prompt_of(reader, encode(Image.new("L", (1500, 500))))
    assert image.length == 972
    before = TINY.encode("<|media_begin|>image 1500x500<|media_content|>", allow_special=True)
    end = image.position + image.length
    assert ids[image.position - len(before) : image.position] == before
    assert ids[image.position : end] == [PAD] * 972
    assert ids[end] == TINY.special["<|media_end|>"]


def test_several_images_keep_their_order(reader):
    ids, images = prompt_of(reader, encode(noise(28, 28)), encode(noise(28, 56)), encode(noise(56, 56)))
    assert [image.length for image in images] == [1, 2, 4]
    assert ids.count(PAD) == 7
    assert all(ids[image.position :][: image.length] == [PAD] * image.length for image in images)
    assert all(ids[image.position - 1] == TINY.special["<|media_content|>"] for image in images)


def test_placeholders_and_images_must_be_equally_many(reader):
    image = reader.open_bytes(encode(noise(28, 28)), PLACE)
    for ids, images in (([1, PAD, 2], []), ([1, 2], [image]), ([PAD, PAD], [image])):
        error = refusal(expand_images, ids, images, PAD)
        assert f"{ids.count(PAD)} image placeholders for {len(images)} images" in str(error)


def common(one, other):
    return next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))  # noqa: B905


def test_prefix_reuse_stops_before_another_image_and_covers_an_equal_one(reader):
    a, b = encode(noise(60, 60, seed=1)), encode(noise(60, 60, seed=2))
    other = ImageReader(ImageConfig(chessboard_gray_value=179))
    keys = {}
    for name, file, source in (("a", a, reader), ("b", b, reader), ("again", a, reader), ("options", a, other)):
        ids, images = prompt_of(source, file)
        keys[name] = token_keys(ids, [image.key for image in images])
    assert keys["again"] == keys["a"]
    assert common(keys["a"], keys["b"]) == common(keys["a"], keys["options"]) == images[0].position


def test_many_threads_read_the_same(reader):
    files = [encode(noise(40 + i, 50, seed=i)) for i in range(4)]
    want = [reader.load([reader.open_bytes(file, PLACE)], [0])[0] for file in files]
    wrong = []

    def work():
        for file, expected in zip(files * 5, want * 5, strict=True):
            (got,) = reader.load([reader.open_bytes(file, PLACE)], [0])
            if got.digest != expected.digest or not torch.equal(got.patches, expected.patches):
                wrong.append(file)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_images_are_read_in_threads_of_their_own(reader):
    def where(*args):
        return threading.current_thread().name, args

    name, args = asyncio.run(reader.run(where, 1, 2))
    assert name.startswith("k3lib-images")
    assert args == (1, 2)
