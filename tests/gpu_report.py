"""Run the tests of the GPU backends and write what happened as one JSON report.

    python tests/gpu_report.py --json benchmarks/results/tests-h200.json [-n 16] [pytest arguments]

The report names the GPU and the versions; every failure stands in it with its text, every skip with its reason.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import triton

from tilewise.cli import output


class Report:
    """A pytest plugin that keeps one line per test, and writes them as they come: a run cut short leaves its part."""

    def __init__(self, path: Path):
        self.path, self.tests = path, {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            text = report.longrepr[2] if report.skipped else str(report.longrepr)[-2000:] if report.failed else ""
            self.tests[report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 2), "text": text}
            if len(self.tests) % 50 == 0:
                self.write()

    def pytest_sessionfinish(self):
        self.write()

    def write(self):
        outcomes = Counter(test["outcome"] for test in self.tests.values())
        told = {name: test for name, test in self.tests.items() if test["outcome"] == "failed"}
        skips = Counter(test["text"] for test in self.tests.values() if test["outcome"] == "skipped")
        machine = output.machine() | {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}
        about = {"command": " ".join(sys.argv), "machine": machine}
        passed = sorted(name for name, test in self.tests.items() if test["outcome"] == "passed")
        report = about | {"outcomes": outcomes, "failures": told, "skips": skips, "passed": passed}
        self.path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where the report goes")
    options, rest = parser.parse_known_args()
    report = Report(options.json)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *rest], plugins=[report]))


if __name__ == "__main__":
    sys.exit(main())
