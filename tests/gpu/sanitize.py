"""Run the GPU kernels under NVIDIA's compute-sanitizer, which watches every access to memory.

    python tests/gpu/sanitize.py --json benchmarks/results/tests-h200.json --tool memcheck --jobs 16

Every case of tests/cases.py (or those named), forward and backward, once to compile and once watched; what it complains of
goes into the report of report.py, and is the exit status. A kernel that writes out of bounds on purpose must be found first.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import report as reports

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
#: Small, and together every kernel, every kind of mask and every modifier.
SMALL = (
    "causal_rows_without_keys", "all_masks", "mix_local", "mix_everything", "mix_blocks", "varlen_seqused", "varlen_mix",
    "varlen_empty_sequences", "blocks_per_head", "dense_key_padding", "chunk_negative_positions", "bias_per_row",
    "bias_scalar", "sliced", "d256",
)  # fmt: skip
PLANTED = "planted_fault"
ABSENT, FAULTY, FOUND = 3, 2, 1  # exit codes


def sanitizer() -> str | None:
    """Where compute-sanitizer is, if it is."""
    return shutil.which("compute-sanitizer") or next((p for p in PLACES if Path(p).exists()), None)


def complaints(text: str) -> dict[str, list[str]]:
    """What the sanitizer said during each case: its lines, the first of each complaint."""
    found: dict[str, list[str]] = {}
    case = "start"
    for line in text.splitlines():
        if started := re.match(r"case (\S+)$", line):
            case = started[1]
        # "========= Invalid __global__ write of size 4 bytes", and its details indented by more
        elif (said := re.match(r"={9} (?! )(.+)", line)) and not re.match(
            r"COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK) SUMMARY|Target application|Program hit|No attachable|$", said[1]
        ):
            found.setdefault(case, []).append(said[1])
    return found


def total_errors(text: str) -> int | None:
    """The number in the sanitizer's last line; None where it never got there."""
    found = re.findall(r"={9} (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    return sum(int(a or b) for a, b in found) if found else None


def run_cases(names: list[str], dtype: str, backend: str) -> None:
    """The program that is watched."""
    import torch
    from cases import CASES

    from tilewise.testing import make_inputs, run, why_not

    for case in CASES:
        if case.name in names:
            inputs = make_inputs(case, getattr(torch, dtype)).on("cuda")
            if not why_not(inputs, backend):
                torch.cuda.synchronize()
                print(f"case {case.name}", flush=True)
                run(inputs, backend)
                torch.cuda.synchronize()
    if PLANTED in names:
        from planted import write_out_of_bounds

        print(f"case {PLANTED}", flush=True)
        write_out_of_bounds()


def _watched(tool: str | None, names: list[str], dtype: str, backend: str, timeout: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--target", ",".join(names), "--dtype", dtype, "--backend", backend]
    if tool is not None:
        command = [str(sanitizer()), "--tool", tool, "--print-limit", "20", *command]
    # Freed memory goes back to the driver, so that a late access to it is seen.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text, code = (error.stdout or b"").decode(errors="replace"), -1
    return {"text": text, "code": code, "errors": total_errors(text), "complaints": complaints(text)}


def check(tool: str, names: list[str], dtype: str, backend: str, jobs: int, timeout: float) -> dict[str, Any]:
    """Run the cases in several watched processes."""
    began = time.perf_counter()
    parts = [part for part in (names[i::jobs] for i in range(jobs)) if part]
    with ThreadPoolExecutor(jobs) as pool:
        unwatched = list(pool.map(lambda part: _watched(None, part, dtype, backend, timeout), parts))
        broken = [part["text"][-500:] for part in unwatched if part["code"]]
        compiled = time.perf_counter()
        found = [] if broken else list(pool.map(lambda part: _watched(tool, part, dtype, backend, timeout), parts))
    unfinished = [part["text"][-500:] for part in found if part["errors"] is None]
    ran = [name for part in found for name in re.findall(r"^case (\S+)$", part["text"], re.MULTILINE)]
    said = {case: lines[:10] for part in found for case, lines in part["complaints"].items()}
    return {
        "cases": sorted(ran),
        "dtype": dtype,
        "errors": sum(part["errors"] or 0 for part in found),
        "complaints": said,
        "unfinished": broken + unfinished,
        "seconds": {"compiling": round(compiled - began), "watched": round(time.perf_counter() - compiled)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="the report to add to")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default memcheck and racecheck")
    parser.add_argument("--cases", default="small", help="all, small, or names separated by commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--jobs", type=int, default=8, help="watched processes at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one process")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        run_cases(options.target.split(","), options.dtype, options.backend)
        return 0
    results = _results(options)
    if options.json:
        report = reports.read(options.json, reports.source_hash())
        report["sanitizers"] |= results
        reports.write(options.json, report)
    for name, result in results.items():
        print(
            name, {key: value for key, value in result.items() if key != "cases"}, len(result.get("cases", ())), "cases"
        )
    if "absent" in results:
        return ABSENT
    return FOUND if any(r["errors"] or r["unfinished"] for name, r in results.items() if name != PLANTED) else 0


def _results(options: argparse.Namespace) -> dict[str, Any]:
    from cases import CASES

    if sanitizer() is None:
        return {"absent": {"why": "compute-sanitizer is not on the PATH and not in " + " or ".join(PLACES)}}
    planted = _watched("memcheck", [PLANTED], options.dtype, options.backend, options.timeout)
    if not planted["errors"]:
        return {
            "absent": {"why": "compute-sanitizer does not see a planted fault here", "said": planted["text"][-800:]}
        }
    names = {"all": [case.name for case in CASES], "small": list(SMALL)}.get(options.cases) or options.cases.split(",")
    found: dict[str, Any] = {PLANTED: {"errors": planted["errors"], "complaints": planted["complaints"]}}
    for tool in options.tool or ("memcheck", "racecheck"):
        key = f"{tool} {options.backend} {options.dtype}"
        found[key] = check(tool, names, options.dtype, options.backend, options.jobs, options.timeout)
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    sys.exit(main())
