#!/usr/bin/env bash
# Set up .venv and run every linter and test. Usage: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
mypy
lint-imports --no-cache
python -m pytest -n "${PYTEST_WORKERS:-2}" "$@"
