"""The command `k3lib`."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3lib import Engine, SamplingParams
from k3lib.checkpoint import Folder, read_header
from k3lib.config import KimiK3Config
from k3lib.server.cli import main
from k3lib.server.tiny import make_tiny

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


def test_generate_from_ids_is_the_engines_greedy_output(k3lib, tiny):
    engine = Engine.from_pretrained(tiny)
    (want,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_new_tokens=6))
    status, out, _ = k3lib(
        "generate", "--model-path", tiny, "--ids", 1, 2, 3, "--max-new-tokens", 6, "--temperature", 0
    )
    assert status == 0
    assert [int(i) for i in out.split()] == want.token_ids


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
