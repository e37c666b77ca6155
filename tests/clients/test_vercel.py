"""Vercel's AI SDK, run by node."""

import os
import pathlib
import shutil
import subprocess

import pytest

HERE = pathlib.Path(__file__).resolve().parent
MODULES = pathlib.Path(os.environ.get("K3LIB_NODE_MODULES", HERE / "node_modules"))

if shutil.which("node") is None:
    pytest.skip("node is not installed", allow_module_level=True)
if not (MODULES / "@ai-sdk" / "openai-compatible").is_dir():
    pytest.skip(
        "the AI SDK is not installed: npm install --no-package-lock --prefix tests/clients", allow_module_level=True
    )


def test_vercel(scripted, tmp_path):
    # modules are looked for next to the script
    shutil.copy(HERE / "vercel.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)
    env = {**os.environ, "K3LIB_URL": scripted.url, "K3LIB_MODEL": scripted.model}
    done = subprocess.run(
        ["node", "--test", "--test-reporter=tap", "vercel.mjs"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "# pass 11" in done.stdout
