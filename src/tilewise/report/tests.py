"""What was tested on a GPU: reports of `make test-gpu`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tilewise.report.pieces import Section, Table

SHOWN = 160  # characters of a failure


def tests(data: dict[str, Any]) -> Section:
    """Passed, failed and skipped tests, the reasons, and what the sanitizers said."""
    passed, failures, skips = data["passed"], data["failures"], data.get("skips", {})
    skipped = {reason: len(names) if isinstance(names, list) else names for reason, names in skips.items()}
    groups: dict[str, Counter[str]] = {}
    for outcome, names in (("passed", passed), ("failed", failures)):
        for name in names:
            groups.setdefault(name.partition("[")[0].partition("::")[0], Counter())[outcome] += 1
    by_file = [(name, f"{found['passed']:,}", f"{found['failed']:,}") for name, found in sorted(groups.items())]
    reasons = sorted(skipped.items(), key=lambda item: -item[1])
    tables = [
        Table("By file", ("tests", "passed", "failed"), by_file),
        Table("Failures", ("test", "its last words"), [(name, _end(text)) for name, text in failures.items()], left=2),
        Table("Skipped", ("reason", "tests"), [(reason, f"{count:,}") for reason, count in reasons]),
        Table("Memory checkers", ("tool", "what it said"), _sanitizers(data.get("sanitizers", {})), left=2),
    ]
    says = f"{len(passed):,} passed, {len(failures):,} failed, {sum(skipped.values()):,} skipped."
    return Section(
        "Tests on a GPU",
        f"source {data.get('source', 'not named')}, {len(data.get('runs', []))} run(s)",
        [says],
        [],
        [table for table in tables if table.rows],
        [f"{len(failures):,} tests failed"] if failures else [],
    )


def _end(text: str) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E ")]
    return (errors or lines or ["no text"])[-1].removeprefix("E ").strip()[-SHOWN:]


def _sanitizers(found: Any) -> list[tuple[str, str]]:
    """One line for each tool; what it holds is the tool's own."""
    rows = []
    for tool, said in found.items():
        words = (
            ", ".join(f"{key} {_short(value)}" for key, value in said.items()) if isinstance(said, dict) else str(said)
        )
        rows.append((tool, words))
    return rows


def _short(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, (list, dict)) else str(value)
