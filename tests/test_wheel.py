"""A wheel builds, holds presets, worlds, the model in the box, the templates of a report and the page, and works
away from the source tree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_wheel_works_on_its_own(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)], check=True)
    code = (
        "import json, pathlib, sys, loopformer as l, loopformer.config as c, loopformer.analysis.report as r;"
        "measured = json.loads(pathlib.Path(sys.argv[1]).read_text());"
        "html, markdown, *_ = r.write_report(measured, pathlib.Path('report'));"
        "print(json.dumps([l.__file__, c.preset_names(), html.read_text(), markdown.read_text()]))"
    )
    stored = ROOT / "tests" / "fixtures" / "v1" / "report" / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(stored)],
        env={"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    file, presets, html, markdown = json.loads(done.stdout)
    assert file.startswith(str(target))
    for name in ("serving/page", "box", "data/worlds"):
        folder = Path("loopformer", name)
        assert {file.name: file.stat().st_size for file in (ROOT / "src" / folder).iterdir() if file.is_file()} == {
            file.name: file.stat().st_size for file in (target / folder).iterdir() if file.is_file()
        }
    assert {"demo", "paper/loopformer-3x8", "small/tmlt"} <= set(presets)
    assert "<h1>Report: run</h1>" in html
    assert markdown.startswith("# Report: run\n\n")
