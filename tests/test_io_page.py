"""docs/io-model.md says what stored results say, and these what the model says today."""

import json
from pathlib import Path

import pytest

from tilewise.io_model.gpus import markdown_table
from tilewise.io_model.systems import SYSTEMS, plain_problem, report, tiles_for

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "io-model.md").read_text()


def part(name):
    return PAGE.split(f"<!-- {name}:begin -->\n")[1].split(f"<!-- {name}:end -->")[0].strip()


def stored(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_the_page_has_the_gpus():
    assert part("gpus") == markdown_table()


def test_the_page_has_the_papers_shape_as_stored():
    systems = stored("io-a100-1k-dropout")["systems"]
    rows = part("paper").splitlines()[2:]
    assert [row.split()[1] for row in rows] == ["standard", "flash1", "flash2", "triton"]
    for row in rows:
        passes = [systems[row.split()[1]][which] for which in ("forward", "backward")]
        moved = sum(p["bytes_read"] + p["bytes_written"] for p in passes) / 1e9
        behind = sum(p["predicted"]["memory_bytes"] for p in passes) / 1e9
        seconds = sum(p["predicted"]["seconds"] for p in passes)
        assert row == f"| {row.split()[1]} | {moved:.1f} GB | {behind:.1f} GB | {seconds * 1e3:.1f} ms |"


def test_stored_counts_are_what_the_model_says_today():
    for name, dropout in (("io-h200-1k", 0.0), ("io-a100-1k-dropout", 0.1)):
        data = stored(name)
        problem, bound = plain_problem(64, 16, 1024, 64, dropout_p=dropout)
        tiles = tiles_for(data["sram"] // 2, 64)
        for system, found in data["systems"].items():
            now = report(SYSTEMS[system], problem, bound, tiles)
            assert [found[w]["bytes_read"] for w in ("forward", "backward")] == [
                now.forward.account.bytes_read,
                now.backward.account.bytes_read,
            ]


def counted_rows():
    """The table of counters in the page, from stored results."""
    rows = []
    for name in ("io-h200-measured-hopper", "io-h200-measured-dropout"):
        data = stored(name)
        for row in data["measured"]:
            counted, predicted = row["counted"], row["predicted"]
            tiles, dram = (
                f"{counted[what] / 1e9:.2f} GB ({counted[what] / predicted[what]:.2f})"
                for what in ("tile_bytes", "dram_bytes")
            )
            title = f"{row['system']}{', dropout' if row['dropout'] else ''}"
            rows.append(f"| {title} | {row['pass']} | {tiles} | {dram} | {counted['seconds'] * 1e3:.2f} ms |")
    return rows


def dram_ratio(name, system, passes=("forward", "backward")):
    """DRAM bytes of standard attention over those of a system."""
    total = dict.fromkeys(("standard", system), 0.0)
    for row in stored(name)["measured"]:
        if row["pass"] in passes:
            total[row["system"]] += row["counted"]["dram_bytes"]
    return total["standard"] / total[system]


def test_the_page_has_the_counters_as_stored():
    assert part("counted").splitlines()[2:] == counted_rows()


def test_counters_say_what_the_paper_says():
    """Standard attention moves at least 9 times the DRAM bytes; loads of the tiled forward and backward are as predicted."""
    assert dram_ratio("io-h200-measured-hopper", "flash3") > 9
    assert dram_ratio("io-h200-measured-dropout", "triton") > 9
    rows = {(row["system"], row["pass"]): row for row in stored("io-h200-measured-hopper")["measured"]}
    for which in ("forward", "backward"):
        counted, predicted = (rows["flash3", which][of]["l2_to_sm"] for of in ("counted", "predicted"))
        assert abs(counted / predicted - 1) < 0.15


@pytest.mark.parametrize("name", ["io-h200-measured-hopper", "io-h200-measured-dropout"])
def test_predictions_beside_counters_are_what_the_model_says_today(name):
    data = stored(name)
    for row in data["measured"]:
        problem, bound = plain_problem(64, 16, 1024, 64, dropout_p=row["dropout"])
        block = tuple(data["systems"][row["system"]][row["pass"]]["block"])
        now = getattr(report(SYSTEMS[row["system"]], problem, bound, lambda _, block=block: block), row["pass"]).account
        assert (row["predicted"]["l2_to_sm"], row["predicted"]["sm_to_l2"]) == (now.bytes_read, now.bytes_written)


def test_the_page_has_what_fits_as_stored():
    rows = [
        f"| `{p['model']}` | {p['parameters'] / 1e6:,.0f}M | {p['largest_context']['standard']:,} | "
        f"{p['largest_context']['tilewise']:,} |"
        for p in stored("io-fit-h200")["points"]
    ]
    assert part("fit").splitlines()[2:] == rows
