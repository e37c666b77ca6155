"""What a layout costs: the table of the docs, the parts of a model, and the command."""

import functools
import json
import pathlib
import re
from dataclasses import replace

import pytest
import torch
import tyro
from worlds import World

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM, Mesh, ParallelConfig
from k3lib.checkpoint import Folder
from k3lib.engine.recipes import kimi_k3
from k3lib.errors import ConfigError
from k3lib.ops import KDAParams
from k3lib.parallel.kcp import kda_mixer_context_parallel
from k3lib.server.cli import Plan
from k3lib.server.layouts import explain_layout, layout_costs, split_prompt_bytes
from k3lib.testing import tiny_config

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "parallel.md"
ROW = re.compile(r"^\| ([^|]+) \| `(--[^`]+)` \| ([\d, ]+) \| ([\d. |]+) \|$", re.MULTILINE)
PROMPT_ROW = re.compile(r"^\| [^|]+ \| `([^`]*--prompt-ranks \d+)` \| ([\d.]+) \|$", re.MULTILINE)
LAYOUTS = 17
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def k3_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k3")
    (folder / "config.json").write_text(json.dumps(kimi_k3().to_hf()))
    return folder


@pytest.fixture
def explained(k3_folder, capsys):
    """Function from flags to what the command prints for the released model, and the layout."""

    def run(flags):
        words = [*flags.split(), "--explain-layout", "--language-only", "--model-path", str(k3_folder)]
        plan = tyro.cli(Plan, args=words)
        assert plan.run() == 0
        return capsys.readouterr().out, plan._parallel()

    return run


def sizes(text, start):
    """Numbers in bytes of the lines that begin so."""
    found = re.findall(rf"^ *{start} +([\d.e+]+) (B|KiB|MiB|GiB)", text, re.MULTILINE)
    return [float(number) * UNITS[unit] for number, unit in found]


@pytest.mark.parametrize("number", range(LAYOUTS))
def test_the_table_of_the_page_is_what_the_command_prints(page, explained, number):
    name, flags, cut, cells = ROW.findall(page)[number]
    text, _ = explained(flags)
    weights, decode, prefill = sizes(text, "all")
    names = ("KDA state of a request", "latent KV of a token", "residual stream of a token")
    memory = [sizes(text, start)[0] for start in names]
    units, digits = (2**30, 2**20, 2**10, 2**10, 2**20, 2**20), (1, 1, 2, 1, 2, 2)
    printed = [size / unit for size, unit in zip([weights, *memory, decode, prefill], units, strict=True)]
    for shown, exact, places in zip(cells.split("|"), printed, digits, strict=True):
        assert len(shown.strip().partition(".")[2]) == places, name
        assert abs(float(shown) - exact) <= 0.5 * 10**-places + 5e-4 * exact, name  # four digits are printed
    parts = re.search(r"^cut into KV (\d+), states (\d+), experts (\d+), activations (\d+)$", text, re.MULTILINE)
    assert cut == ", ".join(parts.groups())


def test_the_table_names_every_kind_of_layout(page):
    rows = ROW.findall(page)
    assert len(rows) == LAYOUTS
    used = " ".join(flags for _, flags, *_ in rows)
    for flag in (
        "--tp-size", "--dp-size", "--dcp-size", "--ep-size", "--pp-size", "--shard-latent-projections",
        "--dcp-comm-backend ag_rs", "--dcp-replicate-q-proj", "--moe-exchange all_to_all", "--shared-experts-tp-size",
        "--redundant-experts",
    ):  # fmt: skip
        assert flag in used, flag


def test_a_split_prompt_costs_what_the_page_says(page, explained):
    rows = PROMPT_ROW.findall(page)
    assert len(rows) == 3
    for flags, shown in rows:
        text, layout = explained(flags)
        ranks = int(flags.split()[-1])
        exact = split_prompt_bytes(kimi_k3().text, ranks, tp_size=layout.attention_size)
        assert float(shown) == round(exact / 2**30, 2)
        assert sizes(text, "states and windows")[0] == pytest.approx(exact, rel=1e-3)
    with pytest.raises(ConfigError, match="ranks=0 must be >= 1, and tp_size=1 must divide the 96 KDA heads"):
        split_prompt_bytes(kimi_k3().text, 0)
    with pytest.raises(ConfigError, match="tp_size=5 must divide the 96 KDA heads"):
        split_prompt_bytes(kimi_k3().text, 2, tp_size=5)


def test_a_split_prompt_costs_what_is_sent():
    """Counted in the group of three ranks, the last without a token."""
    text = tiny_config().text
    kda = text.kda
    world = World(ParallelConfig(tp_size=3))

    def work(mesh, rank):
        tokens = (5, 3, 0)[rank]
        channels = kda.conv_channels
        mixer = functools.partial(
            kda_mixer_context_parallel,
            params=KDAParams(torch.zeros(kda.num_heads), torch.zeros(kda.num_heads, kda.key_dim), -5.0),
            conv_weight=torch.zeros(channels, kda.conv_width),
            norm_weight=torch.ones(kda.value_dim),
            norm_eps=1e-5,
            scale=1.0,
        )
        gate = torch.zeros(tokens, kda.num_heads, kda.key_dim)
        mixer(
            torch.randn(tokens, channels), gate, gate[..., 0], torch.zeros(tokens, kda.num_heads, kda.value_dim),
            cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32), group=mesh.tp,
        )  # fmt: skip

    world.run(work)
    sent = sum(sum(calls) for calls in world.traffic.values()) / 3
    counts = 2 * 8  # how many tokens each of the others has
    want = split_prompt_bytes(text, 3, itemsize=4) / len(text.layers_of("kda"))
    assert sent == pytest.approx(want + counts)


def test_stages_send_what_the_formula_says():
    """Counted at every cut; the formula is for the deepest."""
    config = tiny_config(num_hidden_layers=5, kda_layers=[1, 2, 4], full_attn_layers=[3, 5], attn_res_block_size=2)
    layout, tokens = ParallelConfig(pp_size=3), 7
    world = World(layout)

    def work(mesh, _):
        model = KimiK3ForCausalLM(config, mesh=mesh, dtype=torch.float32)
        with torch.no_grad():
            model(Batch.pack([torch.arange(tokens)]), logits="last")

    world.run(work)
    row = tokens * config.text.hidden_size * 4
    # in front of layers 1 and 3: the running sum with one block, and with two
    assert sorted(world.traffic["send"]) == [2 * row, 3 * row]
    (kind,) = layout_costs(replace(config, dtype="float32"), layout).decode
    assert (kind.name, kind.bytes_per_token * tokens) == ("stage payload", 3 * row)


def test_parts_of_all_ranks_are_the_whole():
    config = tiny_config()
    whole = layout_costs(config, ParallelConfig()).weights
    parts = layout_costs(config, ParallelConfig(tp_size=4, ep_size=2)).weights
    for name in ("routed experts", "shared experts", "dense layers", "embedding and head"):
        assert parts[name] * 4 == whole[name], name
    for name in ("latent projections", "routers", "norms and residual scores"):
        assert parts[name] == whole[name], name
    model = KimiK3ForCausalLM(config, mesh=Mesh.view(ParallelConfig(tp_size=4, ep_size=2), 0), device="meta")
    assert sum(parts.values()) < sum(p.nbytes for p in model.parameters())  # built in fp32 there


def test_the_command_explains_a_layout(capsys):
    text = explain_layout(KimiK3Config.tiny(), ParallelConfig(tp_size=4, dcp_size=2, ep_size=2))
    for line in (
        "4 ranks: tp_size=4, dcp_size=2, ep_size=2",
        "8 whole experts a rank, width over 2",
        "tokens over 2",
        "x all-to-all over 2",
    ):
        assert line in text, line
    with pytest.raises(ConfigError, match="KDA heads"):
        explain_layout(KimiK3Config.tiny(), ParallelConfig(tp_size=3))
    built_in = KimiK3Config.from_hf(Folder("k3lib-nano").config())
    text = explain_layout(built_in, ParallelConfig(tp_size=4, dcp_size=2, ep_size=2))
    assert Plan(explain_layout=True, language_only=True, tp_size=4, dcp_size=2, ep_size=2).run() == 0
    assert capsys.readouterr().out == text + "\n"
    assert Plan(explain_layout=True, tp_size=4, dcp_size=2, ep_size=2).run() == 0
    assert re.search(r"vision tower +463\.1 KiB  on every rank", capsys.readouterr().out)
