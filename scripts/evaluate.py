"""draftsmith evaluate: measures a drafter by real speculative decoding."""

from __future__ import annotations

from rich.console import Console

from draftsmith.configs.schema import command, register
from draftsmith.decode.evaluate import EvaluateConfig, evaluate

register("evaluate_schema", EvaluateConfig)


@command("evaluate", EvaluateConfig)
def main(config: EvaluateConfig) -> None:
    """Evaluates and writes evaluation.json."""
    evaluate(config, Console())


if __name__ == "__main__":
    main()
