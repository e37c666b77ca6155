"""Size, pixels and names of images against the published vectors, and what holds for every size."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3lib import KimiK3Config
from k3lib.errors import ConfigError, RequestError
from k3lib.server.images import (
    DEFAULT,
    ImageConfig,
    image_prompt,
    media_digest,
    plan_image,
    preprocess_image,
    read_image_config,
)

PIL = pytest.importorskip("PIL", reason="needs Pillow (pip install k3lib[server])")

from PIL import Image  # noqa: E402

SMALL = ImageConfig(in_patch_limit=64, patch_limit_on_one_side=16)
SIDES = st.integers(1, 60_000)
LIMITS = st.builds(ImageConfig, in_patch_limit=st.integers(1, 70_000), patch_limit_on_one_side=st.integers(1, 600))


@pytest.fixture
def vectors(golden):
    return json.loads((golden / "protocol/image.json").read_text(encoding="utf-8"))


def synthetic(kind, height, width):
    """The images of the vectors."""
    y, x = np.mgrid[:height, :width]
    ramp = x * 255 // max(1, width - 1)
    bands = {
        "rgb_gradient": [ramp, y * 255 // max(1, height - 1), (x + y) % 256],
        "rgba_alpha_ramp": [3 * x % 256, 5 * y % 256, x * y % 256, ramp],
        "gray": [(7 * x + 11 * y) % 256],
    }[kind]
    return Image.fromarray(np.dstack(bands).astype(np.uint8).squeeze(2 if len(bands) == 1 else ()))


def pixels(patches, plan):
    """`[rows, columns, 3]` in 0..255, border included."""
    _, rows, columns = plan.grid_thw
    size = patches.shape[-1]
    image = patches.reshape(rows, columns, 3, size, size).permute(0, 3, 1, 4, 2)
    return ((image + 1) * 127.5).round().to(torch.uint8).reshape(rows * size, columns * size, 3)


def shown(image, config=DEFAULT):
    """What the model sees of an image, without the border."""
    plan = plan_image(image.height, image.width, config)
    return pixels(preprocess_image(image, config)[0], plan)[: plan.new_height, : plan.new_width].numpy().astype(int)


# ---- size ---------------------------------------------------------------------------------------


def test_default_is_what_the_vectors_were_made_with(vectors):
    assert ImageConfig.from_dict(vectors["config"]) == DEFAULT
    assert ImageConfig.from_dict({"media_proc_cfg": vectors["config"]}) == DEFAULT


def test_plans_and_prompts_equal_the_vectors(vectors):
    for case in vectors["plans"] + vectors["small_limit_plans"]:
        limits = {name: case[name] for name in ("in_patch_limit", "patch_limit_on_one_side") if name in case}
        plan = plan_image(case["height"], case["width"], dataclasses.replace(DEFAULT, **limits))
        want = {name: case[name] for name in plan._fields} | {"grid_thw": tuple(case["grid_thw"])}
        assert plan._asdict() == want
        assert plan.num_patches == case["num_patches"]
        assert image_prompt(case["width"], case["height"]) == case["media_text"]
        assert plan_image(case["height"], case["width"], limits) == plan


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (1, 1, 1),
        (28, 28, 1),
        (29, 28, 2),
        (448, 448, 256),
        (448, 449, 272),
        (640, 480, 414),
        (1500, 500, 972),
        (1920, 1080, 2691),
        (2875, 1500, 5562),
        (3584, 3584, 16384),
    ],
)
def test_sides_are_filled_up_after_the_resize(width, height, tokens):
    plan = plan_image(height, width)
    assert plan.num_tokens == tokens
    assert plan.grid_thw == (1, (plan.new_height + plan.pad_height) // 14, (plan.new_width + plan.pad_width) // 14)


@given(SIDES, SIDES, LIMITS)
def test_every_plan_is_possible(height, width, config):
    plan = plan_image(height, width, config)
    most = config.patch_limit_on_one_side * 14
    for new, old, pad in ((plan.new_height, height, plan.pad_height), (plan.new_width, width, plan.pad_width)):
        assert 1 <= new <= min(old, most)
        assert 0 <= pad < 28
        assert (new + pad) % 28 == 0
    _, rows, columns = plan.grid_thw
    assert (rows * 14, columns * 14) == (plan.new_height + plan.pad_height, plan.new_width + plan.pad_width)
    assert plan.num_tokens * 4 == plan.num_patches == rows * columns
    assert max(rows, columns) <= config.patch_limit_on_one_side + 1  # the border may complete a token
    if max(height, width) <= most and max(1, height // 14) * max(1, width // 14) <= config.in_patch_limit:
        assert (plan.new_height, plan.new_width) == (height, width)


@given(SIDES, SIDES)
def test_no_image_has_more_tokens_than_the_budget_and_its_border(height, width):
    plan = plan_image(height, width)
    rows, columns = plan.grid_thw[1] // 2, plan.grid_thw[2] // 2
    assert (rows - 1) * (columns - 1) <= 16384 or min(rows, columns) == 1
    assert plan.num_tokens <= 16384 + rows + columns


@given(SIDES, SIDES, st.integers(1, 70_000), st.integers(1, 70_000), st.integers(1, 600))
def test_a_larger_budget_never_gives_fewer_tokens(height, width, one, other, side):
    low, high = sorted((one, other))
    few, many = (
        plan_image(height, width, ImageConfig(in_patch_limit=limit, patch_limit_on_one_side=side)).num_tokens
        for limit in (low, high)
    )
    assert few <= many


@given(st.integers(1, 3500), st.integers(1, 3500), st.integers(0, 84))
def test_below_the_limits_a_larger_image_never_has_fewer_tokens(height, width, more):
    tokens = plan_image(height, width).num_tokens
    assert tokens <= plan_image(height + more, width).num_tokens
    assert tokens <= plan_image(height, width + more).num_tokens
    assert tokens == plan_image(width, height).num_tokens


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5), (5, 2.0), (True, 5), (None, 5)], ids=str)
def test_sizes_that_no_image_has_are_refused_with_both_values(size):
    height, width = size
    with pytest.raises(RequestError, match=f"width={width} and height={height}"):
        plan_image(height, width)


def test_a_size_beyond_all_images_still_has_a_plan():
    assert plan_image(1, 10**300).new_width <= 7168


# ---- pixels -------------------------------------------------------------------------------------


def test_pixels_equal_the_vectors(vectors):
    is_same_pillow = vectors["pillow_version"] == PIL.__version__
    for case in vectors["pixel_cases"]:
        config = dataclasses.replace(DEFAULT, **case["limits"])
        plan = plan_image(case["height"], case["width"], config)
        patches, grid = preprocess_image(synthetic(case["image"], case["height"], case["width"]), config)
        assert {name: list(x) if isinstance(x, tuple) else x for name, x in plan._asdict().items()} == case["plan"]
        assert (patches.dtype, tuple(patches.shape), list(grid)) == (
            torch.float32,
            tuple(case["shape"]),
            [*plan.grid_thw],
        )
        assert patches.mean().item() == pytest.approx(case["mean"], abs=0.01)
        for *place, value in case["samples_patch_c_y_x_value"]:
            assert patches[tuple(place)].item() == pytest.approx(value, abs=1e-6 if is_same_pillow else 0.02)
        if is_same_pillow:
            digest = hashlib.sha256(pixels(patches, plan).numpy().tobytes()).hexdigest()
            assert digest == case["padded_uint8_sha256"]


def test_every_byte_is_normalised_in_single_precision():
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    patches, _ = preprocess_image(image, ImageConfig(patch_size=16, merge_kernel_size=1))
    want = ((np.arange(256) / 255).astype(np.float32) - np.float32(0.5)) * np.float32(2)
    assert np.array_equal(patches[0, 0].numpy().ravel(), want)


def test_channels_have_their_own_mean_and_deviation():
    config = ImageConfig(image_mean=(0.0, 0.5, 1.0), image_std=(1.0, 0.5, 0.25))
    patches, _ = preprocess_image(Image.new("RGB", (28, 28), (255, 255, 255)), config)
    assert patches[:, :, 0, 0].unique(dim=0).tolist() == [[1.0, 1.0, 0.0]]


def board(height, width, *, corner=255, other=180):
    y, x = np.mgrid[:height, :width]
    return np.where((y // 8 + x // 8) % 2 == 0, corner, other)[..., None]


@pytest.mark.parametrize("corner_is_white", [True, False])
def test_what_is_fully_transparent_shows_the_chessboard(corner_is_white):
    config = dataclasses.replace(DEFAULT, chessboard_square_on_top_left=corner_is_white)
    got = shown(Image.new("RGBA", (50, 30), (200, 10, 10, 0)), config)
    corner, other = (255, 180) if corner_is_white else (180, 255)
    assert np.array_equal(got, np.broadcast_to(board(30, 50, corner=corner, other=other), (30, 50, 3)))


def test_what_is_half_transparent_is_mixed_and_rounded_down():
    got = shown(Image.new("RGBA", (40, 40), (200, 100, 7, 128)))
    want = np.floor(128 / 255 * np.array([200, 100, 7]) + (1 - 128 / 255) * board(40, 40))
    assert np.abs(got - want).max() <= 1


@pytest.mark.parametrize("mode", ["RGBA", "PA", "LA", "RGBa", "La"])
def test_what_is_opaque_looks_like_the_image_without_alpha(mode):
    plain = synthetic("rgb_gradient", 200, 300)
    if mode[0] in "LP":
        plain = plain.convert("L").convert("RGB")
    alpha = plain.convert("RGBA") if mode[0] == "R" else plain.convert("L").convert("LA")
    image = alpha if mode in ("RGBA", "LA") else alpha.convert(mode)
    assert np.array_equal(shown(image, SMALL), shown(plain, SMALL))


def test_the_chessboard_comes_after_the_resize():
    got = shown(Image.new("RGBA", (1000, 1000), (0, 0, 0, 0)), SMALL)
    assert np.array_equal(got, np.broadcast_to(board(112, 112), (112, 112, 3)))


def test_the_border_is_black_behind_a_transparent_image_too():
    patches, _ = preprocess_image(Image.new("RGBA", (30, 30), (255, 255, 255, 0)))
    assert patches[3, :, 2:, 2:].unique().tolist() == [-1.0]


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Image.open(io.BytesIO(buffer.getvalue()))


def test_palettes_are_resolved_before_the_resize():
    image = Image.new("P", (300, 300))
    image.putpalette([0, 0, 0, 255, 255, 255])
    image.putdata([(x // 2 + y // 2) % 2 for y in range(300) for x in range(300)])
    assert np.array_equal(shown(image, SMALL), shown(image.convert("RGB"), SMALL))
    assert len(np.unique(shown(image, SMALL))) > 2


def test_bilevel_images_are_resized_in_gray():
    image = Image.fromarray(np.indices((300, 300)).sum(0) % 3 == 0).convert("1")
    assert np.array_equal(shown(image, SMALL), shown(image.convert("L"), SMALL))


def test_a_palette_with_a_transparent_entry_shows_the_chessboard():
    image = Image.new("P", (20, 20), 1)
    image.putpalette([9, 9, 9, 200, 0, 0])
    assert np.array_equal(shown(encoded(image, "GIF", transparency=1)), np.broadcast_to(board(20, 20), (20, 20, 3)))
    assert shown(encoded(image, "GIF"))[0, 0].tolist() == [200, 0, 0]


def test_a_transparent_colour_shows_the_chessboard():
    image = encoded(Image.new("RGB", (20, 20), (1, 2, 3)), transparency=(1, 2, 3))
    assert image.mode == "RGB"
    assert np.array_equal(shown(image), np.broadcast_to(board(20, 20), (20, 20, 3)))


def test_sixteen_bits_keep_their_high_byte():
    deep = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    image = encoded(Image.fromarray(deep))
    assert np.array_equal(shown(image)[..., 0], deep >> 8)
    keyed = encoded(Image.fromarray(deep), transparency=0x1000)
    got = shown(keyed)
    assert got[1, 0].tolist() == [255] * 3
    assert got[1, 1].tolist() == [0x11] * 3


def test_print_colours_become_light_colours():
    image = Image.new("CMYK", (20, 20), (0, 255, 255, 0))
    assert shown(image)[3, 3].tolist() == [255, 0, 0]
    assert shown(encoded(image, "JPEG")).shape == (20, 20, 3)


@pytest.mark.parametrize("mode", ["L", "F", "YCbCr", "HSV", "LAB", "RGBX", "I;16B", "I"])
def test_every_mode_gives_colours(mode):
    patches, grid = preprocess_image(Image.new(mode, (20, 20)))
    assert grid == (1, 2, 2)
    assert torch.isfinite(patches).all()


def test_animations_show_their_first_frame():
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        image = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert image.n_frames == 3
        assert np.abs(shown(image) - [255, 0, 0]).max() <= 1, kind


def test_orientation_marks_are_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = encoded(Image.new("RGB", (40, 20)), "JPEG", exif=exif)
    assert image.getexif()[0x0112] == 6
    assert preprocess_image(image)[1] == (1, 2, 4)


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(["L", "RGB", "RGBA", "P", "1", "I;16"]))
def test_patches_fill_the_grid_and_stay_in_range(height, width, mode):
    plan = plan_image(height, width, SMALL)
    patches, grid = preprocess_image(Image.new(mode, (width, height)), SMALL)
    assert tuple(patches.shape) == (plan.num_patches, 3, 14, 14)
    assert grid == plan.grid_thw
    assert patches.is_contiguous()
    assert -1 <= patches.min() <= patches.max() <= 1


def test_the_input_is_not_changed():
    image = synthetic("rgba_alpha_ramp", 40, 33)
    before = image.tobytes()
    preprocess_image(image)
    assert (image.mode, image.tobytes()) == ("RGBA", before)


# ---- names in the cache -------------------------------------------------------------------------


@given(st.binary(max_size=30), st.binary(max_size=30), LIMITS, LIMITS)
def test_digests_are_equal_for_equal_files_under_equal_options_only(one, other, config, changed):
    plan = plan_image(28, 28)
    first = media_digest(one, plan, config)
    assert media_digest(bytes(one), plan, dataclasses.replace(config)) == first
    assert (media_digest(other, plan, config) == first) == (one == other)
    assert (media_digest(one, plan, changed) == first) == (config == changed)
    assert media_digest(one, plan_image(28, 29), config) != first


# ---- configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens=64"),
        ({"transparent_bg_fill_stage": "before_resize"}, "before_resize"),
        ({"transparent_bg_config": {"pattern": "stripes"}}, "stripes"),
        ({"transparent_bg_config": [1]}, "objects"),
        ({"media_proc_cfg": 3}, "objects"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": "14"}, "patch_size"),
        ({"merge_kernel_size": [2, 3]}, "merge_kernel_size"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"transparent_bg_config": {"chessboard_gray_value": 256}}, "256"),
    ],
)
def test_options_that_are_not_implemented_are_refused(raw, named):
    with pytest.raises(ConfigError, match=named):
        ImageConfig.from_dict(raw)


def test_both_spellings_of_the_merge_size_are_read():
    assert ImageConfig.from_dict({"merge_kernel_size": [2, 2], "sample_fps": 8}) == DEFAULT


def test_the_file_of_a_checkpoint_is_read(tmp_path):
    path = tmp_path / "preprocessor_config.json"
    assert read_image_config(path) == DEFAULT
    path.write_text('{"media_proc_cfg": {"in_patch_limit": 64}}')
    assert read_image_config(path).in_patch_limit == 64
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
            read_image_config(path)


def test_a_file_that_does_not_fit_the_tower_is_refused(tmp_path, golden):
    raw = json.loads((golden / "tiny_k3_dev/config.json").read_text())
    vision = KimiK3Config.from_hf(raw).vision
    path = tmp_path / "preprocessor_config.json"
    assert read_image_config(path, vision) == DEFAULT
    path.write_text('{"patch_size": 16}')
    with pytest.raises(ConfigError, match=r"16.*14"):
        read_image_config(path, vision)
