"""Starts a script of tests/ once as several ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def run_ranks(script: str, count: int, folder: Path, *arguments: Path, timeout_seconds: int = 180) -> dict[str, Any]:
    """What rank 0 of `script FOLDER ARGUMENTS...` wrote to FOLDER/report.json, once all ranks are done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TESTS / script), str(folder), *map(str, arguments)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=timeout_seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(said)
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found
