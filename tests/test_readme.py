"""The README is true: its commands exist, its code runs, its tables and figures come from where it says."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {"__name__": "readme"})


@pytest.mark.parametrize("name", ["masks.md", "lab.md"])
def test_blocks_of_a_page_run(name):
    page = (ROOT / "docs" / name).read_text()
    q = k = v = torch.randn(2, 40, 2, 8)
    given = {"q": q, "k": k, "v": v, "ids": torch.arange(80).reshape(2, 40) // 7, "padding": q[..., 0, 0] > 0}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, given | {"Sq": 40, "Sk": 40})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_explain_commands_run(page):
    from typer.testing import CliRunner

    from tilewise.cli.main import app

    for command in re.findall(r"`tilewise (explain .*?)`", page.read_text()):
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_commands_exist():
    from tilewise.cli.main import COMMANDS

    named = set(re.findall(r"`tilewise (\w+)", README))
    assert named == set(COMMANDS) - {"demo"} or named == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:tests|docs|benchmarks|src)/[\w./]+\.\w+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    ("page", "mark", "function"),
    [
        ("README.md", "figures", "markdown"),
        ("README.md", "grid", "grid"),
        ("docs/lab.md", "lab", "lab"),
        ("docs/performance.md", "gpu", "gpus"),
    ],
)
def test_figures_are_what_the_stored_results_say(page, mark, function):
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    assert spec and spec.loader
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    text, begin, end = (ROOT / page).read_text(), f"<!-- {mark}:begin -->\n", f"<!-- {mark}:end -->"
    written = text[text.index(begin) + len(begin) : text.index(end)]
    stored = getattr(figures, function)()
    assert written.strip() == stored.strip(), "run `python benchmarks/figures.py` and paste its output"


def test_stored_results_name_their_circumstances():
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        machine = json.loads(path.read_text())["machine"]
        assert (machine.get("gpu") or machine["cpu"]) and machine["torch"] and machine["date"], path


def test_help_lists_every_command():
    page = subprocess.run(
        [sys.executable, "-m", "tilewise.cli.main", "--help"], capture_output=True, text=True, check=True
    )
    from tilewise.cli.main import COMMANDS

    assert all(name in page.stdout for name in COMMANDS)
