"""The table of an ablation: cells by domains, as JSON, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table as RichTable

from draftsmith.decode.acceptance import pool

SHOWN_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text in rows, the first column the cell's name."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def rich(self) -> RichTable:
        """For the terminal."""
        shown = RichTable(*self.header, title=self.title, title_justify="left")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        """For a document."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join([f"{self.title}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def summarise(
    cells: Mapping[str, Sequence[str]], domains: Sequence[str], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """For each cell its finished seeds and, for each domain, the figures of `Acceptance` over all of them.

    A prompt's rounds with all seeds are pooled, and whole prompts are what the interval resamples.

    Args:
        cells: the overrides of each.
        results: contents of result.json.
    """
    summary = {}
    for name, changes in cells.items():
        own = [result for result in results if result["cell"] == name]
        num_draft_tokens = own[0]["num_draft_tokens"] if own else 0
        records = [record for result in own for record in result["prompts"]]
        summary[name] = {
            "changes": list(changes),
            "seeds": [result["seed"] for result in own],
            "num_draft_tokens": num_draft_tokens,
            "outputs": len(records),
            "outputs_identical_to_target": sum(record["divergence"] is None for record in records),
            "domains": {d: asdict(pool(_rounds_by_prompt(records, d), num_draft_tokens)) for d in domains},
        }
    return summary


def _rounds_by_prompt(records: Sequence[Mapping[str, Any]], domain: str) -> list[list[int]]:
    rounds: dict[str, list[int]] = {}
    for record in records:
        if record["domain"] == domain:
            rounds.setdefault(record["hash"], []).extend(record["accepted"])
    return list(rounds.values())


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Acceptance lengths, and cumulative acceptance by step, of what is finished."""
    progress = f"{report['finished']} of {report['planned']} runs finished"
    return [
        _table(report, f"acceptance length with bonus [95 % interval over prompts], {progress}", _length),
        _table(report, f"share of rounds that accept 1, 2, {SHOWN_STEPS} drafts or more, {progress}", _cumulative),
    ]


def _table(report: Mapping[str, Any], title: str, show: Callable[[Mapping[str, Any]], str]) -> Table:
    cells = report["cells"]
    domains = list(next(iter(cells.values()))["domains"])
    rows = [
        [
            name,
            str(len(cell["seeds"])),
            str(cell["num_draft_tokens"]) if cell["seeds"] else "-",
            *(show(figures) if figures["num_rounds"] else "-" for figures in cell["domains"].values()),
        ]
        for name, cell in cells.items()
    ]
    return Table(title=title, header=["cell", "seeds", "drafts", *domains], rows=rows)


def _length(figures: Mapping[str, Any]) -> str:
    low, high = figures["acceptance_length_interval"]
    return f"{figures['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"


def _cumulative(figures: Mapping[str, Any]) -> str:
    return " ".join(f"{share:.2f}" for share in figures["cumulative"][:SHOWN_STEPS])


def markdown(report: Mapping[str, Any]) -> str:
    """The tables, what each cell changes, and the circumstances."""
    changes = [
        f"- {name}: `{' '.join(cell['changes'])}`" if cell["changes"] else f"- {name}: as shared"
        for name, cell in report["cells"].items()
    ]
    parts = [*(table.markdown() for table in tables(report)), "\n".join(changes), report["circumstances"]]
    return "\n\n".join(parts) + "\n"
