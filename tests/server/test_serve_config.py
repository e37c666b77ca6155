"""The flags of `k3lib-serve`, and the page that lists them."""

import dataclasses
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import tyro

from k3lib.engine import EngineConfig
from k3lib.errors import ConfigError
from k3lib.server import cli, serve
from k3lib.server.config import ApiConfig, NetworkConfig, ServeConfig
from k3lib.server.loading import load_model

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "serving.md"
SCRIPT = runpy.run_path(str(REPOSITORY / "scripts" / "serve_flags.py"))
flags, flag_table = SCRIPT["flags"], SCRIPT["flag_table"]

# Adding a flag is a decision: it is made here.
FLAGS = re.findall(
    r"--\S+",
    """
--model-path --revision --tokenizer-path --served-model-name --dtype --device --resident-experts
--host --port --drain-timeout --watchdog-timeout --rank-timeout --log-level --log-format
--api-key --admin-api-key --cors-origins --max-body-bytes --allow-auto-truncate --log-requests --require-grammar
--moonshot-params
--context-length --chunked-prefill-size --max-running-requests --max-queued-requests --queue-timeout --request-timeout
--disable-radix-cache --checkpoint-grid --mamba-track-interval --keep-turn-ends --page-size --kv-cache-dtype
--mamba-ssm-dtype --mamba-radix-cache-strategy --mamba-full-memory-ratio --max-mamba-cache-size --max-total-tokens
--mem-fraction-static --schedule-conservativeness --mix-decode --deterministic --strict-backends --cuda-graphs
--image-cache-bytes --vision-graphs --language-model-only --low-memory --max-images --max-image-bytes
--max-image-pixels --image-hosts --image-private-hosts --image-timeout
--speculative-algorithm --speculative-draft-model-path --speculative-dspark-block-size --speculative-dflash-block-size
--speculative-num-draft-tokens --speculative-accept --speculative-adaptive --speculative-max-batch
--speculative-rollback --speculative-simulate-accept-len --enable-linear-replayssm-spec
--tp-size --dp-size --dcp-size --ep-size --pp-size --shared-experts-tp-size --moe-exchange --redundant-experts
--dcp-comm-backend --dcp-replicate-q-proj --shard-latent-projections --overlap-shared-experts --pp-partition
--reasoning-parser --tool-call-parser --enable-metrics --enable-cache-report
    """,
)


def parse(*args):
    return tyro.cli(ServeConfig, args=[str(arg) for arg in args], config=cli.SERVE_OPTIONS)


def test_the_flags_are_these():
    assert [flag.name for flag in flags()] == FLAGS


def test_every_flag_has_a_sentence_of_help():
    assert not [flag.name for flag in flags() if not flag.help.endswith((".", "?"))]


def test_engine_flags_are_the_fields_of_the_engine():
    names = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(EngineConfig)} - {"--cache", "--spec"}
    assert names <= set(FLAGS)


def test_flags_reach_their_fields():
    network = ("--port", 1, "--api-key", "k", "--cors-origins", "http://a", "http://b", "--reasoning-parser", "kimi_k3")
    engine = ("--checkpoint-grid", 64, "--max-queued-requests", 5, "--deterministic", "--chunked-prefill-size", 32)
    config = parse(*network, *engine)
    assert (config.network.port, config.engine.checkpoint_grid, config.engine.max_queued_requests) == (1, 64, 5)
    assert config.engine.deterministic
    assert config.api.cors_origins == ("http://a", "http://b")
    assert parse() == ServeConfig()
    assert parse().engine == EngineConfig()


@pytest.mark.parametrize("args", [("--port", "x"), ("--nonsense",), ("--dtype", "x"), ("--reasoning-parser", "other")])
def test_unknown_flags_and_values_are_refused(args, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*args)
    assert stop.value.code == 2
    assert str(args[0]).lstrip("-") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NetworkConfig(port=70000), "port must be in 0..65535, got 70000"),
        (lambda: NetworkConfig(drain_timeout=-1), "drain_timeout must be >= 0"),
        (lambda: ApiConfig(max_body_bytes=0), "max_body_bytes must be >= 1"),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_resident_experts_reach_the_loader_only_when_given(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "k3lib.server.loading.KimiK3ForCausalLM.from_pretrained", lambda path, **options: seen.append(options)
    )
    load_model("x", device="cpu")
    load_model("x", device="cpu", resident_experts=3)
    assert "resident_experts" not in seen[0]
    assert seen[1]["resident_experts"] == 3


@pytest.mark.parametrize("name", ["kv_cache_dtype", "mamba_ssm_dtype"])
def test_auto_leaves_a_dtype_to_the_engine(name):
    for asked, expected in (("auto", None), ("bfloat16", "bfloat16")):
        config = serve._engine_config(EngineConfig(**{name: asked}), is_built_in=False)
        assert getattr(config, name) == expected


def test_the_built_in_model_keeps_states_often_unless_told_otherwise():
    def grid(**fields):
        return serve._engine_config(EngineConfig(**fields), is_built_in=True).checkpoint_grid

    assert grid() == serve.BUILT_IN_GRID
    assert grid(checkpoint_grid=128) == 128
    assert grid(deterministic=True) == 512
    assert serve._engine_config(EngineConfig(), is_built_in=False).checkpoint_grid == 512


def test_an_error_at_start_is_one_line(tmp_path):
    script = "from k3lib.server.cli import serve; serve()"
    command = [sys.executable, "-c", script, "--model-path", str(tmp_path), "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_the_page_lists_the_flags_as_they_are():
    page = PAGE.read_text(encoding="utf-8")
    assert flag_table() in page, "run: python scripts/serve_flags.py docs/serving.md"
