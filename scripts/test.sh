#!/usr/bin/env bash
# Sets up everything, then runs lint, types and the whole test suite. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ruff check .
ruff format --check .
mypy
pytest -m "not slow" "$@"
