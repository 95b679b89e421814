"""draftsmith report: shows the figures of an evaluation again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from draftsmith.configs.schema import command, register
from draftsmith.decode.report import circumstances, read_report, table


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Which evaluation to show.

    Attributes:
        evaluation: the evaluation.json that `draftsmith evaluate` wrote.
    """

    evaluation: str = ""

    def __post_init__(self) -> None:
        if not self.evaluation:
            raise ValueError("which evaluation? add evaluation=outputs/NAME/export/evaluation.json")


register("report_schema", ReportConfig)


@command("report", ReportConfig)
def main(config: ReportConfig) -> None:
    """Prints the table that the evaluation printed."""
    report = read_report(Path(config.evaluation))
    console = Console()
    console.print(table(report))
    console.print(circumstances(report), highlight=False)
    for warning in report["warnings"]:
        console.print(f"WARNING: {warning}", style="yellow", soft_wrap=True)


if __name__ == "__main__":
    main()
