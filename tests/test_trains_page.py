"""docs/how-flashattention-trains.md: its code runs, its pictures exist and are the product's, its numbers are computed."""

import doctest
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-flashattention-trains.md"
#: What may hold digits without a formula behind it: names, citations, sizes that a sentence chooses.
NAMES = (
    r"FlashAttention-\d(?:, -\d| and -\d)?", r"\*\*-\d over -\d\*\*", r"-1\*\*:", r"figure \d",
    r"theorem \d and proposition\s+\d",
    r"\((?:\w+ et al\. |\w+ and \w+ )?\(?20\d\d[^)]*\)", r"eager attention of\s+2022", r"fp\d+|bf16|FP8|16\s+bits",
    r"H[12]00|A100|GPT-[23](?: 1\.3B)?|L2|Path-256", r"40 GB|60 MB", r"(?:\d+K|100 thousand) tokens|\d+K\b", r"d²",
    r"N = [\d,]+|d = \d+|batch \d+|[248]+ KiB|\d+ KiB", r"\d+ sequences, \d+ heads of \d+|\d+ heads|head of 128",
    r"2,048 tokens in tiles of 128|window of 256", r"-?\d over", r"around 100 thousand", r"times, about 2 backward",
    r"does 2 products forward and 4 backward|pass does 5|does 7 for 6",
)  # fmt: skip


def _load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page_numbers, pictures = _load("page_numbers"), _load("pictures")


@pytest.mark.parametrize(
    ("page", "count"), [(PAGE, 60), (ROOT / "docs" / "performance.md", 8)], ids=lambda x: str(x)[-14:]
)
def test_every_number_is_what_its_formula_gives(page, count):
    text = page.read_text()
    assert page_numbers.renewed(text) == text, f"run `python benchmarks/page_numbers.py {page.relative_to(ROOT)}`"
    assert len(page_numbers.NUMBER.findall(text)) >= count


def test_no_number_is_without_one():
    text = page_numbers.NUMBER.sub("", PAGE.read_text())
    for pattern in (r"```.*?```", r"<!--.*?-->", r"`[^`]*`", r"\]\([^)]*\)", r"<img[^>]*>", *NAMES):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    text = text[: text.index("The papers: Dao")]
    assert re.findall(r".*\d.*", text) == []


def test_a_wrong_number_is_found():
    wrong = '8.52<!-- kept("recompute-tiles") --> MB'
    assert page_numbers.renewed(wrong) == '8.42<!-- kept("recompute-tiles") --> MB'


def test_examples_run():
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.failed == 0 and results.attempted > 10


def test_pictures_are_the_products():
    text = PAGE.read_text()
    images = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    images += [(alt, link) for link, alt in re.findall(r'<img src="([^"]+)" alt="([^"]+)" width="\d+">', text)]
    assert len(images) == text.count("![") + text.count("<img")
    report = json.loads((ROOT / "benchmarks" / "results" / "report-cpu" / "report.json").read_text())
    drawn = {name for result in report["results"] for name in result["pictures"]}
    own = {f"mask-{name}.png" for name in pictures.MASKS} | {"walks.png"}
    assert own == {path.name for path in pictures.PICTURES.glob("*.png")}
    for alt, link in images:
        assert alt and (PAGE.parent / link).read_bytes().startswith(b"\x89PNG"), link
        assert Path(link).name in (own if link.startswith("pictures/") else drawn), link
    assert len(images) > 12


@pytest.mark.parametrize("generation", [1, 2])
def test_walks_are_those_of_the_algorithms(generation):
    tiles, counts = pictures.walk((pictures.FLASH1, pictures.FLASH2)[generation - 1])
    blocks = pictures.N // pictures.BLOCK
    visible = [(row, key) for row in range(blocks) for key in range(row + 1)]
    outer = (lambda tile: (tile[1], tile[0])) if generation == 1 else (lambda tile: tile)
    assert tiles == sorted(visible, key=outer)
    stored = counts["o"][1] // (pictures.BLOCK * pictures.D)
    assert stored == (len(visible) + blocks if generation == 1 else blocks)
