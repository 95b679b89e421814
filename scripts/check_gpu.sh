#!/usr/bin/env bash
# What only a machine with CUDA can check: the tests marked gpu, a step of every drafter in bfloat16, the CUDA benchmarks.
# Sets up everything first. The tables are also written to outputs/check_gpu/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: no CUDA device: torch.cuda.is_available() is False in $PWD/.venv" >&2
    exit 1
}
pytest -m gpu
pytest tests/train/test_every_drafter.py
for suite in dfly mtp; do
    python -m draftsmith.scripts.benchmark "$suite" device=cuda json="outputs/check_gpu/$suite.json"
done
