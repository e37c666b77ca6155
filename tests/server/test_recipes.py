"""Published deployments: layouts, flags, ratios and caps as published; pools that follow from weights and memory."""

import json
import re
from dataclasses import replace

import pytest
import tyro

from k3lib.cache.sizing import GIB
from k3lib.config import KimiK3Config
from k3lib.engine import config as engine_config
from k3lib.engine.recipes import kimi_k3, recipe_names, resolve_recipe
from k3lib.errors import ConfigError
from k3lib.parallel import ParallelConfig
from k3lib.server import cli, planning
from k3lib.server.cli import Plan
from k3lib.server.config import ServeConfig
from k3lib.server.foreign import read_env, read_option, translate
from k3lib.server.layouts import layout_costs

NAMES = recipe_names()
LARGE = [name for name in NAMES if "peak-" in name]
CELLS = [name for name in NAMES if name not in LARGE]
DTYPES = {"bfloat16": 2, "float32": 4, "fp8_e4m3": 1}

# Kernels of the other server that its publisher does not state.
UNKNOWN_KERNELS = {("dflash", "attn_verify"), ("dflash", "draft_attention")}

# Published figures that no arithmetic on the model gives, and what is missing for it.
NOT_DERIVED = {
    "deep-pp-gb200": "times of another server",
    "deep-pp-low-concurrency": "times of another server",
    "amd-a4w4-vs-a8w4": "times of another server",
    "amd-fused-kda-decode": "times of another server",
    "peak-capacity-vs-throughput": "+72 % of the requests at once: their length is not said (7,700 tokens fit)",
    "full-dp-64": "times of another server",
    "kda-decode-triton-vs-recurrent": "times of another server",
    "ar-fusion-crossover": "times of another server",
    "vllm-dcp-gsm8k": "accuracy of the released weights",
    "vllm-dcp8-dspark-gsm8k": "accuracy of the released weights",
    "dspark-acceptance-gsm8k": "acceptance of released weights",
    "dspark-acceptance-random": "acceptance of released weights",
    "simulated-acceptance-check": "times of another server",
}


@pytest.fixture(scope="module")
def spec_folder(golden):
    folder = golden.parent / "spec"
    if not (folder / "recipes.json").is_file():
        pytest.skip(f"needs the published deployments: {folder / 'recipes.json'} does not exist")
    return folder


@pytest.fixture(scope="module")
def published(spec_folder):
    return json.loads((spec_folder / "recipes.json").read_text())


WEIGHED = {}


@pytest.fixture(autouse=True)
def weigh_once(monkeypatch):
    """Layouts recur: build each part of the model once. Formats of experts differ in them alone, DCP in no weight."""

    def costs(config, layout, *, vision):
        key = replace(layout, dcp_size=1, dcp_comm_backend=None), vision
        if key not in WEIGHED:
            WEIGHED[key] = layout_costs(kimi_k3(), key[0], vision=vision)
        parts = dict(WEIGHED[key].weights)
        if config.quantization.expert_format == "nvfp4":
            parts["routed experts"] = round(parts["routed experts"] / (4 + 8 / 32) * (4 + 8 / 16))
        return replace(WEIGHED[key], weights=parts)

    monkeypatch.setattr(planning, "layout_costs", costs)


@pytest.fixture
def plan(capsys):
    """Function from flags to what `k3lib plan` says: text, and its limits by name."""

    def run(**flags):
        assert Plan(**flags).run() == 0
        text = capsys.readouterr().out
        limits = dict(re.findall(r"^(\w+) +([\d.,]+)  (?:given|derived|default)", text, re.MULTILINE))
        return text, {name: float(value.replace(",", "")) for name, value in limits.items()}

    return run


def entries(published, name):
    return [one for one in published["resolved"] if name == f"{one['hardware']}/{one['pd_mode']}/{one['strategy']}"]


def resolved(one):
    names = one["hardware"], one["pd_mode"], one["strategy"]
    return resolve_recipe(*names, quantization=one["quantization"], spec=one["spec"])


# ---- what is published --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_resolves_to_what_is_published(published, name):
    found = entries(published, name)
    assert len(found) in {3, 6}
    for one in found:
        got = resolved(one).as_dict()
        got["env"] = list(got["env"])
        kernels = one.pop("resolved_backends", {})
        mine = got.pop("resolved_backends") or {}
        assert {key: got[key] for key in one} == one
        assert set(mine) <= set(kernels)
        for use, kernel in kernels.items():
            if (one["spec"], use) not in UNKNOWN_KERNELS:  # remarks follow the names
                want = re.split(r"[ ,;]", kernel)[0] if isinstance(kernel, str) else kernel
                assert re.split(r"[ ,;]", str(mine[use]))[0] == str(want), (one["spec"], use)


def test_all_cells_and_presets_are_there(published):
    assert {f"{c['hardware']}/{c['pd_mode']}/{c['strategy']}" for c in published["base_cells"]} == set(CELLS)
    assert len(CELLS) == 50
    presets = {f"{hw}/{p['pd_mode']}/{p['id']}" for p in published["large_scale_presets"] for hw in p["hardware"]}
    assert presets == set(LARGE)
    assert engine_config.resolve_recipe is resolve_recipe


@pytest.mark.parametrize("name", LARGE)
def test_a_preset_for_many_devices_resolves_to_what_is_published(published, name):
    hardware, mode, preset = name.split("/")
    want = next(one for one in published["large_scale_presets"] if one["id"] == preset)
    options = dict(want["options"])
    plain, drafting = (resolve_recipe(hardware, mode, preset, spec=spec) for spec in ("none", "dspark"))
    for size in ("tp-size", "ep-size", "dp-size", "dcp-size", "mem-fraction-static"):
        assert getattr(plain, size.replace("-", "_")) == options.pop(size, 1)
    assert plain.options == options
    assert list(plain.env) == want["env"]
    assert (plain.world_size, plain.attn_tp_size, plain.dp_size) == (
        want["gpus"],
        want["attention_tp"],
        want["replicas"],
    )
    assert plain.nodes == next(count for names, count in want["nodes"].items() if hardware in names.split("/"))
    assert plain.mamba["ratio_at_L_11264"] == want["ratio_at_L_11264_nospec"]
    assert drafting.mamba["ratio_at_L_11264"] == want["ratio_at_L_11264_dspark_replayssm"]


def test_the_built_in_geometry_is_the_released_one(spec_folder):
    config = KimiK3Config.from_hf(json.loads((spec_folder / "configs" / "kimi_k3.json").read_text()))
    assert (kimi_k3().text, kimi_k3().vision, kimi_k3().dtype) == (config.text, config.vision, config.dtype)
    assert [kimi_k3(form).quantization.expert_format for form in ("mxfp4", "nvfp4")] == ["mxfp4", "nvfp4"]


def test_one_rank_weighs_what_the_files_weigh(spec_folder):
    inventory = json.loads((spec_folder / "kimi_k3_tensors.json").read_text())
    assert layout_costs(kimi_k3(), ParallelConfig(), vision=True).weight_bytes == inventory["payload_bytes"]
    for layout in (ParallelConfig(tp_size=8), ParallelConfig(tp_size=8, dcp_size=8)):
        for form in ("mxfp4", "nvfp4"):
            exact = layout_costs(kimi_k3(form), layout, vision=True).weight_bytes
            assert planning.layout_costs(kimi_k3(form), layout, vision=True).weight_bytes == exact
    # the NVFP4 files: 36,179,705,856 weights of attention are FP8 there and bf16 in memory, and scales of tensors and
    # tiles are not counted
    nvfp4 = layout_costs(kimi_k3("nvfp4"), ParallelConfig(), vision=True).weight_bytes
    assert nvfp4 - 36_179_705_856 == pytest.approx(1_609_777_087_808, rel=1e-5)


# ---- pools --------------------------------------------------------------------------------------


AUTO = "auto (KV estimate, then state-pool clamp)"


def by_hand(recipe, rest):
    """State slots of a worker by the published ratio, written out from serving specification 1.1 and 1.2."""
    heads = 96 // recipe.attn_tp_size
    options = recipe.options
    state = heads * 128 * (128 * DTYPES[options.get("mamba-ssm-dtype", "float32")] + 3 * 3 * 2)
    ring = heads * 16 * (4 * 128 * 2 + 4 + 128 * 4) if options.get("enable-linear-replayssm-spec") else 0
    layers, begin = [], 0
    for stage in range(recipe.pp_size):
        count = 93 // recipe.pp_size + (stage >= recipe.pp_size - 93 % recipe.pp_size)
        layers.append(sum(i % 4 != 3 and i != 92 for i in range(begin, begin + count)))
        begin += count
    slot = max(layers) * (state + ring)
    ratio = recipe.mamba["ratio_at_L_11264"]
    return int((rest * ratio / (1 + ratio) - slot) // slot)


# Listed by the publisher's calculator, not by its table: the weights of eight ranks alone take 212 GiB.
TOO_SMALL = {
    f"{hardware}/unified/peak-{kind}-8" for hardware in ("b200", "gb200") for kind in ("throughput", "capacity")
}


@pytest.mark.parametrize("name", sorted(TOO_SMALL))
def test_presets_whose_weights_do_not_fit_are_refused(name):
    with pytest.raises(ConfigError, match=r"--weights-gib 211.* must lie between 0 and --gpu-memory-gib 1[67]"):
        Plan(recipe=name).run()


@pytest.mark.parametrize("name", [name for name in NAMES if name[:2] not in {"a3", "a5"} and name not in TOO_SMALL])
def test_a_preset_plans_with_its_published_ratio_and_caps(name, plan):
    for form in ("mxfp4", "nvfp4"):
        for spec in ("none", "dspark", "dflash"):
            recipe = resolve_recipe(*name.split("/"), quantization=form, spec=spec)
            if not recipe.available:
                continue
            text, limits = plan(recipe=name, quantization=form, spec=spec)
            workers = recipe.dp_size
            assert limits["slots_per_request"] == recipe.mamba["S"]
            assert recipe.max_running_requests_default == (48 if spec != "none" else AUTO)
            rest = float(re.search(r"([\d.]+) of [\d.]+ GiB for both pools", text)[1]) * GIB
            weights = float(re.search(r"weights of a rank ([\d.]+) GiB", text)[1]) * GIB
            assert weights + rest < recipe.mem_fraction_static * recipe.memory_gib * GIB
            if recipe.pd_mode == "decode" and spec != "none":  # no prefix cache: the 48 requests set the slots
                assert f"mamba_full_memory_ratio={recipe.mamba['ratio_at_L_11264']} is not used" in text
                assert limits["max_mamba_cache_size"] == limits["max_running_requests"] == 48 // workers
                continue
            assert limits["mamba_full_memory_ratio"] == recipe.mamba["ratio_at_L_11264"]
            slots = by_hand(recipe, rest)
            assert limits["max_mamba_cache_size"] == pytest.approx(slots, rel=0.01, abs=1)  # rest has two decimals
            estimate = min(max(2048, int(limits["max_total_num_tokens"] / 2**20 * 512)), 4096)
            wanted = estimate if spec == "none" else 48 // workers
            assert limits["max_running_requests"] == min(wanted, limits["max_mamba_cache_size"] // recipe.mamba["S"])


# GiB for both pools that give the published number of requests (serving specification, section 1.3)
CLAMPS = {
    ("mxfp4", "none"): (101, 30.1, 30.4), ("mxfp4", "dspark"): (68, 29.1, 29.5),
    ("nvfp4", "none"): (91, 27.2, 27.5), ("nvfp4", "dspark"): (60, 25.7, 26.1),
}  # fmt: skip
FP8_ATTENTION = 36_179_705_856 / 8 / GIB  # what the other server saves by keeping attention of NVFP4 files in FP8


@pytest.mark.parametrize(("form", "spec"), CLAMPS)
def test_published_requests_of_b300_balanced(published, plan, form, spec):
    """The clamps by the slots follow exactly from the memory for both pools, which is not published.

    Ours is 1.0 to 2.4 % of the device more than they need: the driver, buffers of collectives and kernels' workspaces
    of the other server are in it, and cannot be derived.
    """
    requests, least, most = CLAMPS[form, spec]
    figure = next(one for one in published["reference_figures"] if one["id"] == "admission-clamp-b300-balanced")
    assert figure["values"][f"{form}/{spec}"] == requests
    flags = {"recipe": "b300/unified/balanced", "quantization": form, "spec": spec, "max_running_requests": 256}
    # the interval is rounded to a tenth; a fifth of its ends may lie beyond
    _, limits = plan(**flags, rest_gib=least + 0.55 * (most - least))
    assert limits["max_running_requests"] == requests
    for end, off in ((least, -1), (most, 1)):
        _, limits = plan(**flags, rest_gib=end)
        assert limits["max_running_requests"] in {requests, requests + off}
    text, limits = plan(**flags)
    rest = float(re.search(r"([\d.]+) of ([\d.]+) GiB for both pools", text)[1])
    rest += FP8_ATTENTION if form == "nvfp4" else 0
    assert 0.01 < (rest - most) / 268.2 < (rest - least) / 268.2 < 0.024


def test_every_published_figure_is_derived_or_named(published):
    derived = {"admission-clamp-b300-balanced"}
    assert {one["id"] for one in published["reference_figures"]} == derived | set(NOT_DERIVED)


def test_the_profile_for_images_on_small_memory_fits(published, plan):
    profile = published["low_hbm_vlm_profile"]["options"]
    assert [read_option(name, value).verdict for name, value in profile.items()] == [
        "taken", "taken", "needless", "taken", "needless",
    ]  # fmt: skip
    flags = {"context_length": profile["context-length"], "mem_fraction_static": profile["mem-fraction-static"]}
    text, limits = plan(recipe="b300/unified/low-latency", **flags)
    assert "mem_fraction_static 0.820 (given)" in text
    assert limits["context_length"] == 65536
    assert limits["max_running_requests"] > 16


def test_what_is_published_for_ascend_sets_the_slots_itself(plan, capsys):
    """The published 64 requests of A3 do not follow from 64 slots over 4 workers with 5 slots a request."""
    text, _ = plan(recipe="a3/unified/balanced")
    assert text.endswith("is not published: give --gpu-memory-gib, or --rest-gib for both pools\n")
    text, limits = plan(recipe="a3/unified/balanced", rest_gib=10)
    assert (limits["max_mamba_cache_size"], limits["max_running_requests"]) == (16, 3)
    assert "max_running_requests=64, 16 for each of 4 workers, limited to 3 by 16 slots, 5 a request" in text
    _, limits = plan(recipe="a5/unified/balanced", rest_gib=30)
    assert (limits["slots_per_request"], limits["max_mamba_cache_size"], limits["max_running_requests"]) == (1, 32, 32)
    with pytest.raises(ConfigError, match="weights in modelslim are not a format of k3lib"):
        Plan(recipe="a3/unified/balanced", gpu_memory_gib=64).run()
    with pytest.raises(ConfigError, match="weights in modelslim are not a format of k3lib"):
        Plan(recipe="a3/unified/balanced", explain_layout=True).run()


def test_what_is_given_replaces_what_is_published(plan):
    text, limits = plan(recipe="h200/unified/balanced", tokens_per_request=4096, dcp_size=2, weights_gib=100)
    assert "dcp_size=2" in text
    assert limits["mamba_full_memory_ratio"] == 2.48
    assert "as published" not in text
    _, limits = plan(recipe="h200/unified/balanced", dcp_size=2)
    assert limits["mamba_full_memory_ratio"] == 0.9  # of the same request, with other sizes
    _, limits = plan(recipe="h200/unified/balanced", dcp_size=2, mamba_full_memory_ratio=0.5)
    assert limits["mamba_full_memory_ratio"] == 0.5
    text, limits = plan(recipe="h200/unified/balanced", max_mamba_cache_size=40, rest_gib=8)
    assert (limits["max_mamba_cache_size"], limits["max_running_requests"]) == (40, 8)
    text, _ = plan(recipe="h200/unified/balanced", explain_layout=True)
    assert "16 ranks: tp_size=16, ep_size=16" in text
    assert "vision tower                853.3 MiB  on every rank" in text


# ---- flags --------------------------------------------------------------------------------------

REFUSED = {
    "quantization", "disaggregation-mode", "disaggregation-transfer-backend", "disaggregation-bootstrap-port",
    "disaggregation-decode-extra-slots", "enable-hierarchical-cache", "hicache-storage-backend",
    "SGLANG_USE_MODELSCOPE", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH",
}  # fmt: skip


def test_every_flag_of_every_preset_is_understood_mapped_or_refused(published):
    refused = set()
    for name in NAMES:
        for spec in ("none", "dspark", "dflash"):
            for hicache in ("off", "l2", "l3"):
                recipe = resolve_recipe(*name.split("/"), spec=spec, hicache=hicache)
                for reading in planning.readings(recipe) if recipe.available else ():
                    assert reading.why or reading.verdict == "taken", reading
                    refused |= {reading.name} if reading.verdict == "refused" else set()
    assert refused == REFUSED
    for overlay in published["overlays"]["moe"].values():
        for flag, value in overlay.items():
            assert [read_env(entry) for entry in value] if flag == "env" else read_option(flag, value)


def test_the_commands_that_are_printed_are_commands_of_the_server():
    seen = set()
    for name in NAMES:
        for spec in ("none", "dspark", "dflash"):
            recipe = resolve_recipe(*name.split("/"), spec=spec)
            command = planning.serve_command(recipe) if recipe.available else None
            kinds = (recipe.spec, recipe.dcp_size > 1, *sorted(recipe.options or ()))
            if command is None or kinds in seen:  # parsing takes a while
                continue
            seen.add(kinds)
            config = tyro.cli(ServeConfig, args=command.split()[1:], config=cli.SERVE_OPTIONS)
            config.parallel.check(kimi_k3().text)
            assert config.parallel.world_size == recipe.world_size
            options = recipe.options
            assert config.engine.kv_cache_dtype == options.get("kv-cache-dtype")
            assert config.engine.mamba_full_memory_ratio == recipe.mamba.get("ratio_at_L_11264")
            assert (config.speculation.spec() is None) == (recipe.spec == "none")
            if recipe.spec != "none":
                assert config.speculation.block_size == 7
            assert (config.parallel.moe_exchange == "all_to_all") == ("moe-a2a-backend" in options)
    assert len(seen) > 12


def test_a_published_command_is_translated():
    given = "--model-path x --tp-size 16 --trust-remote-code --enable-symm-mem --kv-cache-dtype fp8_e4m3"
    kept, read = translate([*given.split(), "--moe-runner-backend", "marlin", "--dcp-comm-backend=fi_a2a"])
    assert " ".join(kept) == "--model-path x --tp-size 16 --kv-cache-dtype fp8_e4m3 --dcp-comm-backend a2a"
    assert [(reading.name, reading.verdict) for reading in read] == [
        ("trust-remote-code", "needless"), ("enable-symm-mem", "needless"), ("moe-runner-backend", "needless"),
        ("dcp-comm-backend", "as"),
    ]  # fmt: skip
    ours = ["--dcp-comm-backend", "a2a", "--port", "1", "--mem-fraction-static", "0.5", "--no-cuda-graphs"]
    assert translate(ours) == (ours, [])
    assert translate([]) == ([], [])


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("--tp-size=16 --moe-a2a-backend deepep", "--moe-exchange all_to_all --ep-size 16"),
        ("--tp-size 8 --ep-size 8 --moe-a2a-backend=megamoe", "--moe-exchange all_to_all"),
        ("--tp-size 8 --moe-a2a-backend none", ""),
        ("--tp-size 64 --dp-size 4 --enable-shared-experts-attn-tp", "--shared-experts-tp-size 16"),
        ("--tp-size 8 --shared-experts-tp-size 4 --enable-shared-experts-attn-tp", ""),
    ],
)
def test_flags_that_stand_for_others(given, added):
    kept, _ = translate(given.split())
    own = [word for word in given.split() if not word.startswith(("--moe-a2a", "--enable")) and word not in
           {"deepep", "none"}]  # fmt: skip
    assert kept == own + added.split()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--disaggregation-mode decode", "--disaggregation-mode no server sends its cache to another"),
        ("--enable-hierarchical-cache", "--enable-hierarchical-cache the cache has no tier"),
        ("--quantization modelslim", "--quantization weights in modelslim cannot be read"),
        ("--nnodes 2 --node-rank 0", "--nnodes torchrun has it: --nnodes; --node-rank torchrun has it"),
        ("--speculative-eagle-topk 4", "--speculative-eagle-topk drafts are chains: only 1"),
        ("--mm-feature-transport cuda_ipc", "--mm-feature-transport .*: only cpu"),
        ("--tp-size x --moe-a2a-backend deepep", "--tp-size must be an integer >= 1, got 'x'"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=message):
        translate(given.split())


def test_the_server_says_what_it_cannot_follow(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["k3lib-serve", "--model-path", "x", "--hicache-storage-backend", "mooncake"])
    with pytest.raises(SystemExit) as stop:
        cli.serve()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said == (
        "error: k3lib-serve cannot follow --hicache-storage-backend the cache has no tier behind the device\n"
    )


def test_block_sizes_of_both_drafts_mean_the_same_window(plan):
    base = {"recipe": "b300/unified/balanced", "rest_gib": 60, "max_running_requests": 16}
    for block in (3, 7):
        flags = {"speculative_algorithm": "DSPARK", "speculative_dspark_block_size": block}
        _, dspark = plan(**base, **flags)
        flags = {"speculative_algorithm": "DFLASH", "speculative_dflash_block_size": block + 1}
        _, dflash = plan(**base, **flags)
        assert dspark == dflash
        assert dspark["verify_window"] == block + 1


# ---- what is not published ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"recipe": "h200"}, "--recipe h200 is not HARDWARE/PD_MODE/STRATEGY"),
        ({"recipe": "v100/unified/balanced"}, "hardware is one of b300, gb300, b200"),
        ({"recipe": "h100/prefill/default"}, "'h100/prefill/default' is not published: h100 has h100/unified/low-lat"),
        ({"recipe": "b300/unified/peak-capacity-24"}, "is not published: b300 has .*peak-capacity-16"),
        ({"recipe": "h200/unified/balanced", "spec": "dflash"}, "K3 DFLASH not validated on this hardware"),
        ({"recipe": "b300/prefill/long-context", "spec": "dspark"}, "DSPARK requires pp_size == 1"),
        (
            {"recipe": "h200/unified/balanced", "quantization": "nvfp4"},
            "quantization nvfp4 is not published .*; mxfp4 is",
        ),
        ({"recipe": "a5/unified/balanced", "hicache": "l2"}, "HiCache does not keep recurrent states on NPU"),
        ({"spec": "dspark"}, "--spec dspark needs --recipe"),
        ({"hicache": "l2"}, "--hicache l2 needs --recipe"),
        ({"recipe": "h200/unified/balanced", "tp_size": 24}, "ep_size=16 must divide tp_size=24"),
        ({"recipe": "h200/unified/balanced", "tp_size": 64}, "does not cut KDA heads"),
        ({"recipe": "h200/unified/balanced", "gpu_memory_gib": 110}, "give a fraction above 0.9"),
        ({"speculative_dflash_block_size": 8}, "--speculative-dflash-block-size 8 needs .* DFLASH"),
        ({"speculative_algorithm": "DFLASH", "speculative_dspark_block_size": 7}, "dspark-block-size 7 needs"),
    ],
    ids=str,
)
def test_what_is_not_published_or_does_not_fit_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        Plan(**flags).run()


def test_tiers_behind_the_cache_may_give_up_context_parallelism(published):
    rules = published["overlays"]["hicache"]
    assert rules["l2"]["dcp"] == "kept with spec none or dspark, dropped otherwise"
    kept = {
        (hicache, spec): resolve_recipe("b200", "unified", "balanced", spec=spec, hicache=hicache)
        for hicache in ("off", "l2", "l3")
        for spec in ("none", "dspark")
    }
    sizes = {key: (one.tp_size, one.pp_size, one.ep_size, one.dcp_size) for key, one in kept.items()}
    assert sizes == {
        ("off", "none"): (8, 2, 8, 8), ("off", "dspark"): (16, 1, 16, 16), ("l2", "none"): (8, 2, 8, 8),
        ("l2", "dspark"): (16, 1, 16, 16), ("l3", "none"): (8, 2, 8, 1), ("l3", "dspark"): (16, 1, 16, 1),
    }  # fmt: skip
    dropped = resolve_recipe("b300", "unified", "balanced", spec="dflash", hicache="l2")
    assert (dropped.dcp_size, dropped.mamba["S"]) == (1, 5)
    amd = resolve_recipe("mi350x", "unified", "balanced", hicache="l3")
    assert "dcp-comm-backend" not in amd.options
    assert amd.env[-1] == "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH={CONFIG}"
