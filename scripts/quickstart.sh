#!/usr/bin/env bash
# The main job on a real model and real conversations: SmolLM2-135M-Instruct, ShareGPT, a DFly drafter, and the
# acceptance length measured by real speculative decoding. A CPU is enough. A second run redoes nothing that is done.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

result=outputs/quickstart/evaluation.json
if [[ ! -f $result ]]; then
    run draftsmith preview experiment=quickstart
    run draftsmith cache experiment=quickstart
    run deepspeed --module draftsmith.train experiment=quickstart resume=auto
    run draftsmith export run=outputs/quickstart
    run draftsmith evaluate drafter_path=outputs/quickstart/export num_prompts=8 max_new_tokens=64 output=$result
fi
run draftsmith report evaluation=$result
