"""The console script `draftsmith`: one verb, then Hydra overrides."""

from __future__ import annotations

import importlib
import sys

VERBS = {
    "preview": "show the plan, and rendered documents with what is supervised in them",
    "cache": "run the target over the data and keep its states on disk",
    "evaluate": "measure a drafter by real speculative decoding",
    "ablate": "train several drafters alike, and compare them by real speculative decoding",
    "report": "show the figures of an evaluation again",
    "export": "write a checkpoint's drafter as a folder that loads by itself",
}

USAGE = """usage: draftsmith VERB [hydra overrides]

{verbs}

Training has its own launchers:
  deepspeed --module draftsmith.train [hydra overrides]
  torchrun -m draftsmith.train [hydra overrides]
  python -m draftsmith.train [hydra overrides]

`draftsmith VERB --help` lists the groups and options of a verb."""


def main() -> None:
    """Runs the verb named by the first argument."""
    usage = USAGE.format(verbs="\n".join(f"  {verb:<10}{what}" for verb, what in VERBS.items()))
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("--help", "-h"):
        print(usage)
        return
    if verb not in VERBS:
        print(usage, file=sys.stderr)
        sys.exit(f"error: {verb!r} is not a verb of draftsmith; choose from {', '.join(VERBS)}")
    sys.argv = [f"draftsmith {verb}", *sys.argv[2:]]
    importlib.import_module(f"draftsmith.scripts.{verb}").main()


if __name__ == "__main__":
    main()
