"""The walk through everything works from the first line to the last."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "first_hour.sh"


def test_the_first_hour(tmp_path: Path) -> None:
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": commands, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = tmp_path / "first-hour"
    for file in (
        "report/report.html",
        "analysis/cka.png",
        "exported/config.json",
        "run/schedules.json",
        "permutations.png",
    ):
        assert (made / file).is_file()
    (engine,) = re.findall(r"engine process (\d+)", (made / "server.txt").read_text())
    with pytest.raises(ProcessLookupError):  # nothing is left running
        os.kill(int(engine), 0)
    lines = done.stdout.splitlines()
    (answer,) = [json.loads(line) for line in lines if line.startswith('{"id"')]
    assert answer["loopformer"]["budget"] == 2
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["text"].strip()
    header = next(n for n, line in enumerate(lines) if line.split()[:3] == ["budget", "schedule", "perplexity"])
    perplexity = {int(row[0]): float(row[2]) for row in map(str.split, lines[header + 1 : header + 4])}
    assert perplexity[1] > 1.05 * perplexity[4], "budgets differ visibly on text, too"
    assert "$ loopformer eval text first-hour/run --budgets 1,2,4 --max-tokens 2000" in done.stderr
    assert "No such file" not in done.stderr
    table = [line.split() for line in lines[lines.index(next(x for x in lines if x.startswith("products over"))) :]]
    accuracy = {int(row[0]): float(row[4]) for row in table if row[1:2] == ["uniform"]}  # positions 3 and 4
    assert accuracy[4] > accuracy[1] + 10, "budgets differ visibly"
