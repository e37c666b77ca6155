"""The command `k3lib`."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3lib import Engine, KimiK3ForCausalLM, SamplingParams, nano
from k3lib.cache import CacheConfig, HybridCache, plan_memory
from k3lib.checkpoint import Folder, read_header
from k3lib.config import KimiK3Config
from k3lib.server.chat import encode_segments, render_chat
from k3lib.server.cli import main
from k3lib.server.tiny import make_tiny, make_tiny_draft
from k3lib.server.tokenizer import load_tokenizer
from k3lib.spec import DSpark

SIZE_LIMIT = 10_000_000


@pytest.fixture
def k3lib(monkeypatch, capsys):
    """Run a command in this process; returns exit status, standard output and standard error."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["k3lib", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


@pytest.fixture
def tiny(k3lib, tmp_path):
    status, _, _ = k3lib("make-tiny", tmp_path / "tiny")
    assert status == 0
    return tmp_path / "tiny"


def test_make_tiny_writes_equal_bytes_for_equal_arguments_in_under_10_mb(k3lib, tmp_path, tiny):
    k3lib("make-tiny", tmp_path / "again")
    k3lib("make-tiny", tmp_path / "other", "--seed", "1")
    files = {file.name for file in tiny.iterdir()}
    assert files == {"config.json", "model.safetensors"}
    assert all((tiny / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)
    assert (tiny / "model.safetensors").read_bytes() != (tmp_path / "other" / "model.safetensors").read_bytes()
    assert sum(file.stat().st_size for file in tiny.iterdir()) < SIZE_LIMIT


def test_make_tiny_has_the_parts_of_the_release(tiny):
    stored = Folder(tiny).tensors()
    decay = stored["language_model.model.layers.0.self_attn.A_log"]
    assert (decay.dtype, decay.shape) == ("F32", (32,))  # 4 heads, padded
    assert stored["language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"].dtype == "U8"
    assert "vision_tower.patch_embed.proj.weight" in stored
    config = KimiK3Config.from_hf(Folder(tiny).config())
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 258, 511)
    assert config.media_placeholder_token_id == 277


@pytest.mark.parametrize("packed", [False, True])
def test_the_tiny_model_says_what_it_always_said(packed, tmp_path):
    """Stored greedy tokens of seed 0: an end-to-end oracle without a file."""
    make_tiny(tmp_path, mxfp4=packed, vision=False)
    engine = Engine.from_pretrained(tmp_path, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    (plain, text) = engine.generate([[1, 2, 3, 4, 5], list(b"hello")], params)
    if packed:  # four bits are another model
        assert plain.token_ids == [298, 370, 150, 335, 428, 331, 163, 185, 224, 385, 453, 159]
    else:
        assert plain.token_ids == [283, 447, 222, 163, 458, 468, 138, 483, 136, 103, 341, 285]
        assert text.token_ids == [445, 239, 335, 35, 59, 162, 308, 185, 349, 212, 50, 367]


def test_make_tiny_without_packing_or_vision(k3lib, tmp_path):
    status, _, _ = k3lib("make-tiny", tmp_path / "plain", "--no-mxfp4", "--no-vision")
    stored = Folder(tmp_path / "plain").tensors()
    assert status == 0
    assert not any("packed" in name or name.startswith("vision") for name in stored)
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["vision_config"] is None


@pytest.mark.parametrize("family", ["inferact", "radixark"])
def test_make_tiny_writes_a_draft_that_fits_its_target(k3lib, tmp_path, family):
    folder = tmp_path / "one"
    k3lib("make-tiny", str(folder), "--no-mxfp4", "--no-vision", "--draft", family)
    again = make_tiny_draft(tmp_path / "again", family)
    for file in ("config.json", "model.safetensors"):
        assert (folder / "dspark" / file).read_bytes() == (again / file).read_bytes()
    model = KimiK3ForCausalLM.from_pretrained(folder, progress=False)
    for path in (folder, folder / "dspark"):  # a target may bring its draft along
        spark = DSpark.from_pretrained(path, dtype=model.dtype, device=model.device)
        pools = CacheConfig(num_pages=4, num_slots=2)
        spark.bind(model, HybridCache.allocate(model.config, pools, dtype=model.dtype))
        assert spark.draft.config.family == family


def test_generate_from_ids_is_the_engines_greedy_output(k3lib, tiny):
    engine = Engine.from_pretrained(tiny)
    (want,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_new_tokens=6))
    status, out, _ = k3lib(
        "generate", "--model-path", tiny, "--ids", 1, 2, 3, "--max-new-tokens", 6, "--temperature", 0
    )
    assert status == 0
    assert [int(i) for i in out.split()] == want.token_ids


def test_generate_with_few_resident_experts_says_the_same(k3lib, tiny):
    args = ("generate", "--model-path", tiny, "--ids", 1, 2, 3, "--max-new-tokens", 6, "--temperature", 0)
    assert k3lib(*args, "--resident-experts", 4)[:2] == k3lib(*args)[:2]


def test_generate_without_a_model_runs_nano_whole_or_in_part(k3lib):
    args = ("generate", "--prompt", "Hi", "--max-new-tokens", 4, "--temperature", 0, "--ignore-eos")
    whole = k3lib(*args)
    assert whole[0] == 0
    assert k3lib(*args, "--model-path", nano.NAME, "--resident-experts", 4)[:2] == whole[:2]
    assert k3lib(*args, "--layers", 1)[1] != whole[1]


def test_generate_asks_like_a_user(k3lib, tiny):
    args = ("generate", "--model-path", tiny, "--max-new-tokens", 4, "--temperature", 0)
    asked = encode_segments(load_tokenizer(), render_chat([{"role": "user", "content": "Hi"}]))
    _, plain, _ = k3lib(*args, "--prompt", load_tokenizer().decode(asked))
    assert k3lib(*args, "--prompt", "Hi", "--chat") == (0, plain, "")
    assert k3lib(*args, "--prompt", "Hi")[1] != plain
    assert k3lib("generate", "--ids", 1, "--chat")[2] == "error: generate: --chat needs --prompt TEXT\n"


def test_generate_from_text_uses_the_bytes_tokenizer(k3lib, tiny):
    args = ("generate", "--model-path", tiny, "--prompt", "hello", "--max-new-tokens", 12, "--seed", 3)
    first, second = k3lib(*args), k3lib(*args)
    assert first[0] == 0
    assert first[1] == second[1] != "\n"


def test_generate_needs_exactly_one_prompt(k3lib, tiny):
    status, _, err = k3lib("generate", "--model-path", tiny)
    assert status == 2
    assert "either --prompt TEXT or --ids" in err


def test_explain_names_every_op_and_foreign_chips(k3lib, tiny):
    status, out, _ = k3lib("explain", "--model-path", tiny, "--arch", "sm90")
    assert status == 0
    for op in ("kda_mixer", "kda_chunk", "mla_decode", "attention_varlen", "experts", "attn_res", "route"):
        assert f"{op} on cuda/sm90" in out
    assert "needs platform cpu, this is cuda" in out
    status, _, err = k3lib("explain", "--arch", "sm12")
    assert status == 2
    assert "sm12" in err
    assert "sm90" in err


def test_inspect_says_what_a_sound_checkpoint_holds(k3lib, tiny):
    status, out, _ = k3lib("inspect", tiny)
    assert status == 0
    assert "nothing is wrong with it" in out
    assert "routed experts" in out
    assert "8 modules mxfp4" in out


def test_inspect_says_in_plain_words_what_is_wrong(k3lib, tiny):
    tensors = load_file(tiny / "model.safetensors")
    tensors["language_model.model.layers.1.self_attn.o_proj.surplus"] = tensors.pop("language_model.model.norm.weight")
    save_file(tensors, tiny / "model.safetensors")
    status, out, _ = k3lib("inspect", tiny)
    assert status == 1
    assert "missing: model.norm.weight" in out
    assert "unexpected: language_model.model.layers.1.self_attn.o_proj.surplus" in out


def test_inspect_reads_headers_only(k3lib, tiny):
    file = tiny / "model.safetensors"
    before = k3lib("inspect", tiny)[1]
    data = bytearray(file.read_bytes())
    start = len(data) - sum(info.nbytes for info in read_header(file).values())
    data[start:] = bytes(len(data) - start)
    file.write_bytes(data)
    assert k3lib("inspect", tiny)[1] == before


def test_inspect_of_nothing_is_an_error_message(k3lib, tmp_path):
    status, _, err = k3lib("inspect", tmp_path)
    assert status == 2
    assert "there is no config.json" in err


@pytest.fixture
def k3_folder(tmp_path):
    """A folder with the `config.json` of K3's cache geometry and nothing else."""
    config = KimiK3Config.tiny(
        num_hidden_layers=93,
        hidden_size=7168,
        full_attn_layers=[*range(4, 93, 4), 93],
        kda_layers=[n for n in range(1, 93) if n % 4],
        num_heads=96,
        num_attention_heads=96,
        num_key_value_heads=96,
        head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        max_position_embeddings=1 << 20,
    )
    (tmp_path / "k3").mkdir()
    (tmp_path / "k3" / "config.json").write_text(json.dumps(config.to_hf()))
    return tmp_path / "k3"


def test_plan_prints_the_plan_of_the_library(k3lib):
    status, out, err = k3lib("plan", "--rest-gib", 0.5, "--tp-size", 2, "--max-running-requests", 7, "--page-size", 16)
    config = KimiK3Config.from_hf(Folder(nano.folder()).config())  # what is planned for if nothing else is named
    want = plan_memory(config, rest_bytes=1 << 29, tp_size=2, max_running_requests=7, page_size=16)
    assert (status, out, err) == (0, f"{want}\n", "")


def test_plan_takes_every_flag(k3lib, k3_folder):
    status, out, _ = k3lib(
        *("plan", "--model-path", k3_folder, "--rest-gib", 90, "--tp-size", 32, "--dp-size", 4, "--dcp-size", 2),
        *("--pp-size", 1, "--kv-cache-dtype", "fp8_e4m3", "--mamba-ssm-dtype", "bfloat16", "--disable-radix-cache"),
        *("--mamba-radix-cache-strategy", "extra_buffer_lazy", "--disable-overlap-schedule", "--skip-decode-lock"),
        *("--disaggregation-mode", "decode", "--mamba-full-memory-ratio", 0.8, "--max-running-requests", 512),
        *("--max-total-tokens", 64000, "--page-size", 32, "--context-length", 9000),
        *("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", 3),
        *("--enable-linear-replayssm-spec", "--linear-replayssm-cache-len", 8),
    )
    want = plan_memory(
        KimiK3Config.from_hf(Folder(k3_folder).config()), rest_bytes=90 << 30, tp_size=32, dp_size=4, dcp_size=2,
        kv_cache_dtype="fp8_e4m3", mamba_ssm_dtype="bfloat16", mamba_radix_cache_strategy="extra_buffer_lazy",
        disable_radix_cache=True, role="decode", mamba_full_memory_ratio=0.8, max_running_requests=512,
        max_total_tokens=64000, page_size=32, context_length=9000, speculative=True, replayssm_spec=True,
        verify_window=4, replayssm_cache_len=8,
    )  # fmt: skip
    assert status == 0
    assert out == "\n".join([str(want), *(f"warning: {text}" for text in want.warnings), ""])
    assert "mamba_full_memory_ratio=0.8 is not used" in out


def test_plan_computes_the_ratio_of_a_mean_request(k3lib, k3_folder):
    k3 = ("plan", "--model-path", k3_folder, "--rest-gib", 60, "--tp-size", 8, "--dcp-size", 8)
    _, out, _ = k3lib(*k3, "--tokens-per-request", 11264)
    first, plan = out.split("\n", 1)
    assert first.startswith("--mamba-full-memory-ratio 7.21: 5 states of 56,171,520 bytes for 11264 tokens of 3,456")
    assert plan == k3lib(*k3, "--mamba-full-memory-ratio", 7.21)[1]
    _, out, _ = k3lib(*k3, "--tokens-per-request", 11264, "--mamba-full-memory-ratio", 0.5)
    assert "warning: --mamba-full-memory-ratio 0.5 was given and is used instead" in out
    assert out.endswith(k3lib(*k3, "--mamba-full-memory-ratio", 0.5)[1])


def test_plan_reads_the_draft(k3lib, k3_folder, golden):
    draft = golden.parent / "spec" / "configs" / "dspark_radixark_k3.json"
    if not draft.exists():
        pytest.skip(f"needs {draft}")
    (k3_folder / "draft").mkdir()
    (k3_folder / "draft" / "config.json").write_text(draft.read_text())
    k3 = ("plan", "--model-path", k3_folder, "--rest-gib", 60, "--tp-size", 8, "--speculative-algorithm", "DSPARK")
    _, out, _ = k3lib(*k3, "--speculative-draft-model-path", k3_folder / "draft", "--kv-cache-dtype", "fp8_e4m3")
    assert "draft_cell_bytes                   1,280  given" in out
    assert "verify_window                          8  given" in out
    _, out, _ = k3lib(*k3)
    assert "draft_cell_bytes                   1,400  default" in out
    assert "verify_window                          8  default" in out
    assert "warning: max_running_requests is not given and speculation is on: reset to 48" in out


def test_plan_takes_what_weights_and_activations_leave(k3lib, k3_folder):
    gpu = ("plan", "--model-path", k3_folder, "--gpu-memory-gib", 192, "--weights-gib", 100, "--tp-size", 8)
    _, out, _ = k3lib(*gpu, "--mem-fraction-static", 0.75, "--language-only")
    assert out.startswith("mem_fraction_static 0.750 (given): 44.00 of 192 GiB for both pools\n44 GiB: states")
    _, out, _ = k3lib(*gpu, "--mem-fraction-static", 0.75)
    assert "43.90 of 192 GiB" in out
    _, out, _ = k3lib(*gpu, "--language-only")
    assert out.startswith("mem_fraction_static 0.862 (default)")
    status, _, err = k3lib(*gpu, "--mem-fraction-static", 0.5, "--language-only")
    assert status == 2
    assert "mem_fraction_static=0.5 leaves nothing for the cache" in err
    assert "give a fraction above 0.521" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "give either --rest-gib or --gpu-memory-gib and --weights-gib"),
        ("--rest-gib 1 --weights-gib 1", "give either --rest-gib or --gpu-memory-gib"),
        ("--gpu-memory-gib 80", "and --weights-gib"),
        ("--gpu-memory-gib 80 --weights-gib 81", "--weights-gib 81.0 must lie between 0 and --gpu-memory-gib 80.0"),
        ("--rest-gib 1 --tp-size 3", "does not divide the 4 KDA heads"),
        ("--rest-gib 1 --dp-size 0", "dp_size must be an integer >= 1"),
        ("--rest-gib nan", "rest_bytes must be a finite number"),
        ("--rest-gib 0.0001", "One request needs 2,104,320 bytes of states"),
        ("--rest-gib 1 --speculative-dspark-block-size 3", "needs --speculative-algorithm DSPARK"),
        ("--rest-gib 1 --speculative-algorithm DSPARK --speculative-dspark-block-size 0", "verify_window must be"),
        ("--rest-gib 1 --tokens-per-request 0", "avg_request_length must be > 0"),
        ("--rest-gib 1 --tokens-per-request 9 --max-mamba-cache-size 9", "--max-mamba-cache-size replaces it"),
    ],
)
def test_plan_says_what_is_wrong_and_prints_no_plan(k3lib, args, message):
    status, out, err = k3lib("plan", *args.split())
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_doctor_names_packages_kernels_and_what_is_missing(k3lib):
    status, out, _ = k3lib("doctor")
    assert status == 0
    for word in ("fastapi", "flash_mla", "sgl-flash-mla", "kda_mixer/decode", "experts/all"):
        assert word in out


def test_doctor_imports_no_vendor_package():
    code = (
        "import sys; from k3lib.server.reports import doctor; import torch\n"
        "before = set(sys.modules); doctor()\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new & {'triton','flashinfer','fla','flash_mla','aiter','torch_npu','deep_gemm','humming'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"


def test_bench_prints_a_table_or_json(k3lib):
    only = ("--op", "route", "--case", "1 tokens")
    status, out, _ = k3lib("bench", *only)
    assert status == 0
    assert out.splitlines()[1].split()[:4] == ["route", "1", "tokens", "cpu"]
    status, out, _ = k3lib("bench", *only, "--json", "--references", "--no-check")
    assert status == 0
    assert {json.loads(line)["impl"] for line in out.splitlines()} == {"cpu", "reference"}
    status, out, err = k3lib("bench", "--op", "nothing")
    assert status == 2
    assert "bench has no case of nothing" in err


def test_conformance_prints_a_table(k3lib):
    status, out, _ = k3lib("conformance", "--op", "rms_norm", "--op", "route", "--dtype", "float32", "--device", "cpu")
    assert status == 0
    assert ["rms_norm", "cpu", "5", "0", "0"] in [line.split()[:5] for line in out.splitlines()]
