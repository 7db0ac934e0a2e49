"""Run GPU tests and write what happened into one JSON report, which several runs can fill.

    python tests/gpu/report.py --json benchmarks/results/tests-h200.json -n 16 tests/test_conformance.py -k triton

The report names the GPU, the versions and a hash of all source; every failure stands in it with its text, every skip with its
reason. A later run of the same source adds to it and leaves out what has passed; of other source it starts a new report.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many processes share the processor; read when torch starts

import pytest
from xdist.scheduler import LoadScopeScheduling

from tilewise.cli import output

ROOT = Path(__file__).parent.parent.parent
KEPT_TEXT = 2000  # characters of a failure
DIED = "crashed while running"  # what pytest-xdist says of the test in which a process ended


def source_hash(root: Path = ROOT) -> str:
    """SHA-256 over the package and the tests: results of equal hashes are results of one program."""
    found = hashlib.sha256()
    for path in sorted([*(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py")]):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def empty(source: str) -> dict[str, Any]:
    return {
        "source": source,
        "machine": {},
        "outcomes": {},
        "runs": [],
        "sanitizers": {},
        "failures": {},
        "skips": {},
        "passed": [],
    }


def read(path: Path, source: str) -> dict[str, Any]:
    """The report at `path` if it is of the same source, else an empty one."""
    if path.exists():
        found = json.loads(path.read_text())
        if found.get("source") == source:
            return found
    return empty(source)


def write(path: Path, report: dict[str, Any]) -> None:
    machine = output.machine() | {"triton": output.installed("triton")}
    skipped = sum(len(names) for names in report["skips"].values())
    outcomes = {"passed": len(report["passed"]), "failed": len(report["failures"]), "skipped": skipped}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")  # a run that is killed while it writes leaves what was there
    part.write_text(json.dumps(report | {"machine": machine, "outcomes": outcomes}, indent=1) + "\n")
    part.replace(path)


def add_test(report: dict[str, Any], name: str, outcome: str, text: str) -> None:
    """Record how a test ended; what an earlier run said of it no longer counts."""
    report["failures"].pop(name, None)
    for names in report["skips"].values():
        if name in names:
            names.remove(name)
    report["passed"] = sorted({*report["passed"]} - {name} | ({name} if outcome == "passed" else set()))
    if outcome == "failed":
        report["failures"][name] = text[-KEPT_TEXT:]
    elif outcome == "skipped":
        report["skips"].setdefault(text, []).append(name)
    report["skips"] = {reason: names for reason, names in report["skips"].items() if names}


def group_of(name: str) -> str:
    """Tests of one group run in one process: those of one problem share kernels, those of large sizes the memory."""
    path, _, test = name.partition("::")
    if path.endswith("test_sizes.py"):
        return path
    parameters = re.fullmatch(r".*\[(.+)\]", test)
    if path.endswith("test_conformance.py") and parameters:
        case, dtype = re.fullmatch(r"(.+?)(?:-(b?float\d+))?-\w+", parameters[1]).groups()
        return f"{path} {case} {dtype or 'float32'}"
    if path.endswith("test_streams_and_graphs.py") and parameters and "-" in parameters[1]:
        return f"{path} {parameters[1]}"
    return name


class Groups(LoadScopeScheduling):
    """Gives groups of tests to processes, and when a process dies goes on without the test that it died in."""

    def _split_scope(self, nodeid):
        return group_of(nodeid)

    def remove_node(self, node):
        workload = self.assigned_work.pop(node)
        waiting = [(group, name) for group, tests in workload.items() for name, done in tests.items() if not done]
        if not waiting:
            return None
        group, died = waiting[0]
        workload[group][died] = True
        for group, tests in workload.items():
            if rest := {name: done for name, done in tests.items() if not done}:
                self.workqueue[group] = rest
        for other in self.assigned_work:
            self._reschedule(other)
        return died

    def _reschedule(self, node):
        """A process starts a test when it knows the next one, or that there is none; more would keep them from others."""
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()


class Recorder:
    """A pytest plugin that adds each test to a report, and writes it as they come: a run cut short leaves its part."""

    def __init__(self, path: Path, report: dict[str, Any]):
        self.path, self.report, self.seconds = path, report, Counter()
        self.run = {"command": " ".join(sys.argv), "seconds": 0, "slowest": {}}
        self.began = self.written = time.perf_counter()
        report["runs"].append(self.run)

    def pytest_xdist_make_scheduler(self, config, log):
        """Workers take groups of tests, so that one process compiles a kernel, not several at once."""
        return Groups(config, log)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            text = report.longrepr[2] if report.skipped else str(report.longrepr) if report.failed else ""
            if not (DIED in text and report.nodeid in self.report["failures"]):  # what it died of is told already
                add_test(self.report, report.nodeid, report.outcome, text)
            if time.perf_counter() - self.written > 2:
                self.write()

    def pytest_sessionfinish(self):
        self.write()

    def write(self):
        self.written = time.perf_counter()
        slowest = {name: round(seconds, 1) for name, seconds in self.seconds.most_common(5)}
        self.run |= {"seconds": round(self.written - self.began), "slowest": slowest}
        write(self.path, self.report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the report; one of the same source is continued")
    parser.add_argument("--again", action="store_true", help="also run what has passed")
    options, rest = parser.parse_known_args()
    report = read(options.json, source_hash())
    done = [] if options.again else [f"--deselect={name}" for name in report["passed"]]
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "fresh", "--rootdir", str(ROOT), *done, *rest]
    return int(pytest.main(arguments, plugins=[Recorder(options.json, report)]))


if __name__ == "__main__":
    sys.exit(main())
