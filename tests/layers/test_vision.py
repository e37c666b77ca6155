"""The vision tower and the projector against a second formulation: one image, one head, one patch at a time."""

import math

import pytest
import torch
from seeded import draw, seed_weights
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from k3lib import KimiK3Config
from k3lib.config import VisionConfig
from k3lib.errors import ConfigError
from k3lib.export import vision_layout
from k3lib.layers import VisionProjector, VisionTower
from k3lib.layers.vision import TOWER_EPS, Grid, read_grids, vision_flops
from k3lib.testing import assert_close

GRIDS = [(1, 6, 4), (1, 2, 2), (3, 4, 2), (1, 5 * 2, 8), (1, 4, 6)]


def config_of(**changes):
    sizes = {
        "patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 6, "pos_emb_time": 4, "num_heads": 3, "num_layers": 2,
        "hidden_size": 20, "intermediate_size": 28, "qkv_hidden_size": 24, "merge_kernel_size": (2, 2),
        "text_hidden_size": 36,
    }  # fmt: skip
    return VisionConfig(**{**sizes, **changes})


def make(config=None, dtype=torch.float64):
    config = config or config_of()
    modules = VisionTower(config, dtype=dtype), VisionProjector(config, dtype=dtype)
    return [
        seed_weights(module, seed).eval().requires_grad_(requires_grad=False) for seed, module in enumerate(modules)
    ]


def pixels(config, grids, dtype=torch.float64, seed=0):
    count = sum(math.prod(grid) for grid in grids)
    return draw(count, 3, config.patch_size, config.patch_size, dtype=dtype, seed=seed).clamp(-1, 1)


# ---- a second formulation -----------------------------------------------------------------------


def norm(x, weight, eps=TOWER_EPS):
    return x / (x.square().mean() + eps).sqrt() * weight


def position(table, grid, t, y, x):
    """What a patch knows of its place: four neighbours in the table, weighted by hand, and sines of the frame."""
    rows, columns, width = table.shape

    def place(i, count, size):
        at = max(0.0, (i + 0.5) * size / count - 0.5)
        low = min(int(at), size - 1)
        return low, min(low + 1, size - 1), at - int(at)

    y0, y1, dy = place(y, grid[1], rows)
    x0, x1, dx = place(x, grid[2], columns)
    top = table[y0, x0] * (1 - dx) + table[y0, x1] * dx
    bottom = table[y1, x0] * (1 - dx) + table[y1, x1] * dx
    out = top * (1 - dy) + bottom * dy
    if grid[0] > 1:
        speed = [10000 ** (-i / (width // 2)) for i in range(width // 2)]
        out = out + torch.tensor([math.sin(t * s) for s in speed] + [math.cos(t * s) for s in speed], dtype=out.dtype)
    return out


def turned(vector, y, x):
    out = vector.clone()
    size = len(vector)
    for m in range(size // 4):
        angle = 10000 ** (-4 * m / size)
        for pair, place in ((2 * m, x), (2 * m + 1, y)):
            a, b = vector[2 * pair], vector[2 * pair + 1]
            c, s = math.cos(place * angle), math.sin(place * angle)
            out[2 * pair], out[2 * pair + 1] = a * c - b * s, a * s + b * c
    return out


def tower_by_hand(tower, patches, grid):
    """One image: a list of patches, each with its coordinates."""
    c = tower.config
    places = [(t, y, x) for t in range(grid[0]) for y in range(grid[1]) for x in range(grid[2])]
    w = dict(tower.named_parameters())
    kernel, table = w["patch_embed.proj.weight"], w["patch_embed.pos_emb.weight"]
    hidden = F.conv2d(patches, kernel, stride=c.patch_size).reshape(len(patches), -1)
    states = [h + position(table, grid, *place) for h, place in zip(hidden, places, strict=True)]
    for i in range(c.num_layers):
        name = f"encoder.blocks.{i}"
        normed = [norm(s, w[f"{name}.norm0.weight"]) for s in states]
        q, k, v = torch.stack([w[f"{name}.wqkv.weight"] @ s for s in normed]).chunk(3, dim=-1)
        heads = []
        for h in range(c.num_heads):
            own = slice(h * c.head_dim, (h + 1) * c.head_dim)
            qs, ks = (torch.stack([turned(x, y, z) for x, (_, y, z) in zip(part[:, own], places, strict=True)])
                      for part in (q, k))  # fmt: skip
            heads.append((qs @ ks.T / math.sqrt(c.head_dim)).softmax(-1) @ v[:, own])
        states = [s + w[f"{name}.wo.weight"] @ o for s, o in zip(states, torch.cat(heads, dim=-1), strict=True)]
        for j, s in enumerate(states):
            x = w[f"{name}.mlp.fc0.weight"] @ norm(s, w[f"{name}.norm1.weight"])
            gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
            states[j] = s + w[f"{name}.mlp.fc1.weight"] @ gelu
    states = [norm(s, w["encoder.final_layernorm.weight"]) for s in states]
    by_place = dict(zip(places, states, strict=True))
    rows, columns = c.merge_kernel_size
    return torch.stack([
        torch.stack([
            sum(by_place[t, y + dy, x + dx] for t in range(grid[0])) / grid[0]
            for dy in range(rows) for dx in range(columns)
        ])
        for y in range(0, grid[1], rows) for x in range(0, grid[2], columns)
    ])  # fmt: skip


def project_by_hand(projector, rows):
    w = dict(projector.named_parameters())
    x = rows.flatten(1) @ w["proj.0.weight"].T
    x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return torch.stack([norm(y, w["post_norm.weight"], 1e-5) for y in x @ w["proj.2.weight"].T])


@pytest.mark.parametrize("scale", [1, 3e-4], ids=["", "small enough for eps to matter"])
def test_packed_images_equal_the_formula_image_by_image(scale):
    tower, projector = make()
    patches = pixels(tower.config, GRIDS) * scale
    if scale != 1:
        tower.patch_embed.pos_emb.weight.mul_(scale)
    got = tower(patches, torch.tensor(GRIDS))
    parts = patches.split([math.prod(grid) for grid in GRIDS])
    want = torch.cat([tower_by_hand(tower, part, grid) for part, grid in zip(parts, GRIDS, strict=True)])
    assert_close("tower", want, got, 1e-9)
    assert_close("projected", project_by_hand(projector, want), projector(got), 1e-9)


def test_an_image_does_not_see_its_neighbours():
    tower, _ = make(dtype=torch.float32)
    patches = pixels(tower.config, GRIDS, torch.float32)
    before = tower(patches, GRIDS)
    changed = patches.clone()
    changed[: math.prod(GRIDS[0])] += 1
    after, first = tower(changed, GRIDS), Grid(*GRIDS[0]).num_rows((2, 2))
    assert after[first:].equal(before[first:])
    assert not after[:first].isclose(before[:first]).any(-1).all()


def test_other_merges_and_one_row_tables():
    config = config_of(merge_kernel_size=(1, 3), pos_emb_height=1, pos_emb_width=1, pos_emb_time=1)
    tower, projector = make(config)
    grid, patches = (1, 3, 6), pixels(config, [(1, 3, 6)])
    got = tower(patches, [grid])
    assert got.shape == (6, 3, 20)
    assert_close("tower", tower_by_hand(tower, patches, grid), got, 1e-9)
    assert projector(got).shape == (6, 36)


def test_bfloat16_is_near_the_same_weights_in_double():
    tower, projector = make(dtype=torch.bfloat16)
    exact_tower, exact_projector = make()
    for narrow, exact in ((tower, exact_tower), (projector, exact_projector)):
        exact.load_state_dict(narrow.state_dict())
    patches = pixels(tower.config, GRIDS, torch.bfloat16)
    got, want = projector(tower(patches, GRIDS)), exact_projector(exact_tower(patches, GRIDS))
    assert got.dtype == torch.bfloat16
    assert_close("projected", want, got, 2e-2)
    assert tower(patches.float(), GRIDS).equal(tower(patches, GRIDS))  # pixels are rounded to the weights


def test_no_matrix_of_all_patches_by_all_patches_is_made():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.numel = max(self.numel, x.numel())
            return out

    tower, _ = make(config_of(num_heads=1, qkv_hidden_size=4, num_layers=1), torch.float32)
    grid = (1, 48, 48)
    with Largest() as largest:
        tower(pixels(tower.config, [grid], torch.float32), [grid])
    assert 0 < largest.numel < 2304 * 2304 // 4


def test_the_operations_of_an_image_are_counted():
    for grid in (Grid(1, 6, 4), Grid(2, 4, 8)):
        tower, projector = make(dtype=torch.float32)
        with FlopCounterMode(display=False) as counter:
            projector(tower(pixels(tower.config, [grid], torch.float32), [grid]))
        assert vision_flops(grid, tower.config) == counter.get_total_flops()


def test_no_images_give_no_rows():
    tower, projector = make(dtype=torch.float32)
    out = tower(torch.zeros(0, 3, 2, 2), [])
    assert out.shape == (0, 4, 20)
    assert projector(out).shape == (0, 36)


def test_names_and_shapes_are_those_of_the_released_files():
    hf = KimiK3Config.tiny().to_hf()
    hf["vision_config"] |= {
        "vt_hidden_size": 1024, "mm_hidden_size": 1024, "qkv_hidden_size": 1536, "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12, "vt_num_hidden_layers": 27, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
    }  # fmt: skip
    config = KimiK3Config.from_hf(hf).vision
    parts = {"vision_tower": VisionTower(config, device="meta"), "mm_projector": VisionProjector(config, device="meta")}
    found = {f"{root}.{k}": tuple(x.shape) for root, part in parts.items() for k, x in part.named_parameters()}
    assert found == vision_layout(config)


def test_gradients_reach_every_weight():
    tower, projector = make(dtype=torch.float32)
    for part in (tower, projector):
        part.requires_grad_()
    projector(tower(pixels(tower.config, GRIDS, torch.float32), GRIDS)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for part in (tower, projector) for p in part.parameters())


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([(1, 3, 4)], r"grid_thws\[0\]=\(1, 3, 4\): .* rows be a multiple of 2"),
        ([(1, 2, 2), (1, 2, 5)], r"grid_thws\[1\]=\(1, 2, 5\)"),
        ([(5, 2, 2)], r"frames must lie in 1..4"),
        ([(1, 0, 2)], r"grid_thws\[0\]=\(1, 0, 2\)"),
        ([(1, 2)], "must be three integers"),
        ([(1, 2.5, 2)], "must be three integers"),
        (["abc"], "must be three integers"),
        (torch.zeros(2, 2, dtype=torch.int64), r"integers \[N, 3\], got int64 \[2, 2\]"),
        (torch.ones(1, 3), r"got float32 \[1, 3\]"),
    ],
)
def test_grids_that_no_image_has_are_refused(grids, message):
    with pytest.raises(ConfigError, match=message):
        read_grids(grids, config_of())


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((23, 3, 2, 2), torch.float32, "has 23 patches, the grids describe 24"),
        ((24, 3, 2, 3), torch.float32, r"floats \[patches, 3, 2, 2\], got float32 \[24, 3, 2, 3\]"),
        ((24, 12), torch.float32, r"got float32 \[24, 12\]"),
        ((24, 3, 2, 2), torch.uint8, "got uint8"),
    ],
)
def test_patches_that_do_not_fit_the_grids_are_refused(shape, dtype, message):
    tower, _ = make(dtype=torch.float32)
    with pytest.raises(ConfigError, match=message):
        tower(torch.zeros(shape, dtype=dtype), [(1, 6, 4)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 must divide qkv_hidden_size=24"),
        ({"num_heads": 4}, "= 6 channels must be a multiple of 4"),
        ({"hidden_size": 21}, "hidden_size=21 must be even"),
        ({"num_layers": 0}, "num_layers must be an integer >= 1, got 0"),
        ({"merge_kernel_size": (2,)}, "merge_kernel_size must be two integers"),
        ({"merge_kernel_size": (2, 0)}, "merge_columns must be an integer >= 1, got 0"),
    ],
)
def test_configurations_without_meaning_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)
