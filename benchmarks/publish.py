"""How the programs here give their results: one line of JSON, and a file if --out names one."""

import json
from pathlib import Path
from typing import Any


def publish(report: dict[str, Any], out: Path | None) -> None:
    """Print a report as one line of JSON, and write it to `out` as well if that is given."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
