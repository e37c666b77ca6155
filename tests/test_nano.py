"""The model that comes with the package: where it is, what it is called, and that everything loads it."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from k3lib import Engine, KimiK3ForCausalLM, KimiK3ForConditionalGeneration, SamplingParams, nano
from k3lib.errors import CheckpointError, ConfigError
from k3lib.server.loading import default_device, load_model, tokenizer_for
from k3lib.server.reports import inspect_checkpoint
from k3lib.spec.draft_files import load_draft

LIMIT = 14_000_000  # bytes of the whole folder, with draft and tower


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the folder, taken for the one of the package."""
    shutil.copytree(nano.folder(), tmp_path / "nano")
    monkeypatch.setattr(nano, "__file__", str(tmp_path / "nano" / "__init__.py"))
    return tmp_path / "nano"


def test_the_folder_is_sound_and_small():
    files = [file for file in nano.folder().rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert inspect_checkpoint(str(nano.folder()))[1] == []


def test_asking_for_the_folder_imports_nothing_heavy():
    code = "import sys, k3lib.nano; k3lib.nano.folder(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "dspark/config.json", "dspark/model.safetensors"])
def test_a_copy_without_a_file_says_which(copy, name):
    assert nano.folder() == copy
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=f"k3lib-nano: {copy / name} is missing"):
        nano.folder()


def test_a_pointer_is_not_taken_for_weights(copy):
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="is a git-lfs pointer"):
        nano.folder()


def test_no_name_and_its_name_mean_it_unless_a_folder_has_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nano.find(None) == nano.find("k3lib-nano") == str(nano.folder())
    assert nano.find("somebody/k3lib-nano") == "somebody/k3lib-nano"
    pathlib.Path("k3lib-nano").mkdir()
    assert nano.find("k3lib-nano") == "k3lib-nano"
    assert [nano.is_meant(path) for path in (None, "k3lib-nano", "x")] == [True, False, False]


def test_everything_loads_it_like_any_checkpoint():
    text = KimiK3ForCausalLM.from_pretrained(nano.folder(), progress=False)
    whole = KimiK3ForConditionalGeneration.from_pretrained(nano.folder(), progress=False)
    assert text.dtype == whole.dtype == torch.bfloat16
    assert whole.config.vision is not None
    config = json.loads((nano.folder() / "config.json").read_text())
    assert text.config.text.vocab_size == config["text_config"]["vocab_size"] == 512
    (out,) = Engine.from_pretrained(nano.folder(), progress=False).generate(
        [[1, 2, 3]], SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    )
    assert len(out.token_ids) == 2
    named = KimiK3ForCausalLM.from_pretrained("k3lib-nano", progress=False)
    assert torch.equal(named.lm_head.weight, text.lm_head.weight)
    assert load_draft(nano.folder()).config.block_size >= 4


def test_commands_load_it_in_float32_with_its_tower_and_the_tokenizer_of_bytes():
    model = load_model(None, vision=True)
    assert isinstance(model, KimiK3ForConditionalGeneration)
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert tokenizer_for(None, None, model).vocab_size == 512
    assert load_model("k3lib-nano", dtype="bfloat16", layers=1).dtype == torch.bfloat16
    assert default_device(None, None) == "cpu"
    with pytest.raises(ConfigError, match="--revision needs --model-path"):
        load_model(None, revision="main")
