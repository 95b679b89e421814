"""draftsmith preview: the plan of a run, and what is supervised in its first documents."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.configs.schema import command
from draftsmith.data.batch import Document
from draftsmith.train.config import TrainConfig
from draftsmith.train.plan import prepare
from draftsmith.train.world import World

SHOWN_DOCUMENTS = 2


def highlight(document: Document, tokenizer: Any) -> Text:
    """The document's text: supervised tokens bold green between « and », all others dim."""
    text, was_supervised = Text(), False
    for token, supervised in zip(document.tokens.tolist(), document.supervised.tolist(), strict=True):
        if supervised != was_supervised:
            text.append("«" if supervised else "»", style="bold yellow")
        text.append(tokenizer.decode([token]), style="bold green" if supervised else "dim")
        was_supervised = supervised
    if was_supervised:
        text.append("»", style="bold yellow")
    return text


@command("preview", TrainConfig)
def main(config: TrainConfig) -> None:
    """Prints the data report, the plan, the loss schedule, and the first documents."""
    console = Console()
    world = World.join()
    try:
        prepared = prepare(config, world, console)
    finally:
        world.leave()
    for document in prepared.documents.documents[:SHOWN_DOCUMENTS]:
        supervised = int(document.supervised.sum())
        console.rule(f"{document.domain} {document.id}: {len(document)} tokens, the {supervised} in «» supervised")
        console.print(highlight(document, prepared.target.tokenizer), soft_wrap=True)


if __name__ == "__main__":
    main()
