"""aiperf, NVIDIA's load generator. It would download its built-in tokenizer, so it gets one of bytes."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("aiperf", reason="aiperf is not installed")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Folder of a tokenizer with a token for each byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "</s>"])}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>", bos_token="</s>").save_pretrained(folder)
    return folder


def profile(server, tokenizer, folder, kind, *flags):
    command = [str(pathlib.Path(sys.executable).parent / "aiperf"), "profile"]
    command += ["--model", server.model, "--url", server.root, "--endpoint-type", kind, "--tokenizer", str(tokenizer)]
    command += ["--request-count", "6", "--concurrency", "2", "--ui", "none", "--output-artifact-dir", str(folder)]
    command += ["--synthetic-input-tokens-mean", "20", "--synthetic-input-tokens-stddev", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(next(folder.glob("**/profile_export_aiperf.json")).read_text())


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_streamed(tiny, tokenizer, tmp_path, kind):
    wanted = ("--output-tokens-mean", "8", "--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true")
    found = profile(tiny, tokenizer, tmp_path, kind, "--streaming", "--use-server-token-count", *wanted)
    assert found["request_count"]["avg"] == 6
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0
    assert found["output_sequence_length"]["avg"] == 8
    assert not found.get("error_summary")


def test_whole(tiny, tokenizer, tmp_path):
    found = profile(tiny, tokenizer, tmp_path, "chat", "--output-tokens-mean", "8")
    assert found["request_count"]["avg"] == 6
    assert found["request_latency"]["avg"] > 0
