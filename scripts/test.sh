#!/usr/bin/env bash
# Set up .venv and run every linter and test. Usage: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE # both workers, and all processes that tests start, read what was compiled once
[ -x .venv/bin/python ] || python3 -m venv .venv
export PATH="$PWD/.venv/bin:$PATH"

packages=(--quiet --constraint constraints.txt --editable '.[dev]')
with_uv() { # a fraction of pip's time; of pip's configuration it gets to know the wheels at hand
    pip install --quiet 'uv>=0.8' || return
    local links="${PIP_FIND_LINKS:-$(pip config get global.find-links 2>/dev/null || true)}"
    UV_FIND_LINKS="${UV_FIND_LINKS:-${links//[[:space:]]/,}}" uv pip install --python .venv/bin/python "${packages[@]}"
}
with_uv || pip install "${packages[@]}"

ruff check .
ruff format --check .
lint-imports --no-cache
python -m pytest --collect-only -qq >/dev/null & # compiles all modules while mypy keeps one core busy
mypy
wait $! || true # pytest says below what cannot be collected
python -m pytest -n "${PYTEST_WORKERS:-2}" --dist worksteal "$@"
