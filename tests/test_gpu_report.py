"""What of the GPU tests' report and of its sanitizer part needs no GPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parent / "gpu"


def _load(name):
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = _load("report")
sanitize = _load("sanitize")  # imports report


def test_later_outcomes_replace_earlier_ones():
    found = report.empty("abc")
    for outcome, text in (("failed", "x" * 3000), ("skipped", "no GPU"), ("passed", "")):
        report.add_test(found, "test_a", outcome, text)
        report.add_test(found, "test_b", "passed", "")
        if outcome == "failed":
            assert len(found["failures"]["test_a"]) == report.KEPT_TEXT
        if outcome == "skipped":
            assert found["skips"] == {"no GPU": ["test_a"]}
    assert (found["passed"], found["failures"], found["skips"]) == (["test_a", "test_b"], {}, {})
    report.add_test(found, "test_b", "failed", "broken")
    assert found["passed"] == ["test_a"]


def test_only_reports_of_the_same_source_are_continued(tmp_path):
    path, found = tmp_path / "report.json", report.empty("abc")
    report.add_test(found, "test_a", "passed", "")
    report.write(path, found)
    assert report.read(path, "abc")["passed"] == ["test_a"]
    assert json.loads(path.read_text())["outcomes"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert report.read(path, "other") == report.empty("other")


def test_the_hash_is_of_names_and_contents(tmp_path):
    file = tmp_path / "src" / "a.py"
    file.parent.mkdir()
    seen = set()
    for text in ("1", "2"):
        file.write_text(text)
        seen.add(report.source_hash(tmp_path))
    file.rename(file.with_name("b.py"))
    assert len(seen | {report.source_hash(tmp_path)}) == 3


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (
            "tests/test_conformance.py::test_matches_reference[d8-float32-triton]",
            "tests/test_conformance.py d8 float32",
        ),
        ("tests/test_conformance.py::test_runs_are_bitwise_equal[d8-triton]", "tests/test_conformance.py d8 float32"),
        (
            "tests/test_conformance.py::test_matches_reference[mix_local-bfloat16-cpu]",
            "tests/test_conformance.py mix_local bfloat16",
        ),
        ("tests/gpu/test_sizes.py::test_B87[17476-triton]", "tests/gpu/test_sizes.py"),
        ("tests/gpu/test_tf32.py::test_a[x-triton]", "tests/gpu/test_tf32.py::test_a[x-triton]"),
    ],
)
def test_tests_of_one_case_stay_together(name, group):
    assert report.group_of(name) == group


BROKEN = """
import os, pytest
@pytest.mark.parametrize("n", range(4))
def test_of(n):
    assert os.environ.get("BROKEN") is None
    if n == 0:
        os.environ["BROKEN"] = "1"
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def _reported(folder):
    """What the report says of a file of tests."""
    command = [sys.executable, GPU / "report.py", "--json", folder / "r.json", "-n", "1", "--rootdir", folder]
    subprocess.run([*map(str, command), str(folder / "test_a.py")], check=False, capture_output=True, timeout=100)
    return json.loads((folder / "r.json").read_text())


def test_an_error_of_the_gpu_ends_its_process_only(tmp_path):
    (tmp_path / "test_a.py").write_text(BROKEN)
    found = _reported(tmp_path)
    assert found["outcomes"] == {"passed": 3, "failed": 1, "skipped": 0}
    assert "illegal memory access" in str(found["failures"])


@pytest.mark.parametrize("last", [0, 3])
def test_a_test_that_ends_its_process_fails_and_is_not_tried_again(last, tmp_path):
    (tmp_path / "test_a.py").write_text(BROKEN.replace("n == 0", f"n == {last}").replace("raise", "os._exit(7) #"))
    found = _reported(tmp_path)
    assert found["outcomes"] == {"passed": 3, "failed": 1, "skipped": 0}
    assert report.DIED in str(found["failures"])


WATCHED = """========= COMPUTE-SANITIZER
case plain
case planted_fault
========= Invalid __global__ write of size 4 bytes
=========     at out_of_bounds_kernel+0x50
=========     Access at 0x7f0001000000 is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719)
========= ERROR SUMMARY: 2 errors
"""


def test_complaints_belong_to_their_cases():
    assert sanitize.complaints(WATCHED) == {"planted_fault": ["Invalid __global__ write of size 4 bytes"]}
    assert sanitize.total_errors(WATCHED) == 2
    races = "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n"
    assert sanitize.total_errors("========= ERROR SUMMARY: 0 errors\n") == 0
    assert sanitize.total_errors(races) == 3
    assert sanitize.total_errors("Killed") is None


def test_without_the_tool_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--json", str(tmp_path / "r.json")])
    assert sanitize.main() == sanitize.ABSENT
    assert "not on the PATH" in capsys.readouterr().out
    assert "absent" in json.loads((tmp_path / "r.json").read_text())["sanitizers"]


def test_the_small_cases_exist():
    from cases import CASES

    assert {*sanitize.SMALL} <= {case.name for case in CASES}
