"""The README's figures, written from the stored results: `python benchmarks/figures.py` prints them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

RESULTS = Path(__file__).parent / "results"


def stored(name: str) -> dict[str, Any]:
    """One stored result of this folder."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def circumstances(data: dict[str, Any]) -> str:
    """Where and when a result was measured."""
    m = data["machine"]
    return f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, numba {m['numba']}, {m['date'][:10]}"


def speed(name: str) -> str:
    """GFLOP/s against SDPA, one thread."""
    data = stored(name)
    lines = [
        "Speed against PyTorch's `scaled_dot_product_attention`, one thread, CPU time, interleaved in one run, after a "
        f"conformance check of each shape ({circumstances(data)}; `tilewise bench`, `benchmarks/results/{name}.json`):",
        "",
        "| batch x heads x seqlen x head dim | dtype | forward | backward |",
        "|---|---|---|---|",
    ]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for r in data["results"]:
        cell = f"{r['ratio']:.2f}x ({r['tilewise']['gflops']:.0f} against {r['sdpa']['gflops']:.0f} GFLOP/s)"
        rows.setdefault((r["shape"], r["dtype"]), {})[r["pass"]] = cell
    lines += [f"| {shape} | {dtype} | {c['forward']} | {c['backward']} |" for (shape, dtype), c in rows.items()]
    means = data["geometric_means"]
    for dtype in dict.fromkeys(r["dtype"] for r in data["results"]):
        forward, backward = (f"{means[f'{dtype} {name}']:.2f}x" for name in ("forward", "backward"))
        lines.append(f"| geometric mean | {dtype} | {forward} | {backward} |")
    return "\n".join(lines)


def memory() -> str:
    """Saved and peak bytes against N."""
    data = stored("memory-cpu")
    p = data["problem"]
    lines = [
        f"Memory of one training step of attention, B{p['B']} H{p['H']} D{p['D']} {p['dtype']} causal, measured "
        f"(computed in italics) ({circumstances(data)}; `tilewise memory`, `benchmarks/results/memory-cpu.json`):",
        "",
        "| N | saved for backward: tilewise | standard | peak beyond inputs, outputs, gradients: tilewise | standard |",
        "|---|---|---|---|---|",
    ]
    for point in data["points"]:
        cells = [_megabytes(point, who, what) for what in ("saved", "peak") for who in ("tilewise", "standard")]
        lines.append(f"| {point['N']:,} | " + " | ".join(cells) + " |")
    limit, total = data["out_of_memory_at"], data["memory_bytes"] / 2**30
    lines += [
        "",
        f"In {total:.1f} GiB of memory standard attention ends at N = {limit['standard']:,} (computed), tilewise at "
        f"N = {limit['tilewise']:,}.",
    ]
    return "\n".join(lines)


def _megabytes(point: dict[str, Any], who: str, what: str) -> str:
    measured = point["measured"].get(who)
    value = (measured or point["computed"][who])[what] / 1e6
    text = f"{value:,.1f} MB"
    return text if measured else f"*{text}*"


def lab(name: str = "lab-compare-cpu-zen3", sparse: str = "lab-sparsity-cpu-zen3") -> str:
    """The tables of docs/lab.md."""
    data, p = stored(name), stored(name)["problem"]
    where = f"{circumstances(data)}; `tilewise lab compare`, `benchmarks/results/{name}.json`"
    lines = [
        f"N = {p['N']:,}, D = {p['D']}, one head, {p['dtype']}, CPU time of one thread, medians of {data['rounds']} "
        f"({where}):",
        "",
        "| system | kept | peak beyond inputs, outputs, gradients | forward | backward | largest error of o |",
        "|---|---|---|---|---|---|",
    ]
    for r in data["results"]:
        times = (f"{r[which]['seconds'] * 1e3:.0f} ms" for which in ("forward", "backward"))
        cells = f"{r['saved_bytes'] / 1e6:.2f} MB | {r['peak_bytes'] / 1e6:.1f} MB | {' | '.join(times)}"
        lines.append(f"| `{r['system']}` | {cells} | {r['errors']['o']:.1e} |")
    lines += ["", " ".join(data["claims"].values()), "", "`recompute-tiles` by tile:", ""]
    sides = data["sweep"]
    lines += ["| | " + " | ".join(f"{s['tile']}²" for s in sides) + " |", "|---" * (len(sides) + 1) + "|"]
    lines += [
        f"| {which} | " + " | ".join(f"{s[which]['seconds'] * 1e3:.0f} ms" for s in sides) + " |"
        for which in ("forward", "backward")
    ]
    data, p = stored(sparse), stored(sparse)["problem"]
    fits = ", ".join(f"{what} {line['r2']:.4f}" for what, line in data["fits"].items())
    lines += [
        "",
        f"Block-sparse, N = {p['N']:,}, D = {p['D']}, tiles of {p['block']}, {len(data['points'])} patterns from "
        f"{min(x['density'] for x in data['points']):.0%} to all tiles: r² of a straight line through time (and counted "
        f"bytes) against the share of tiles kept: {fits} (`tilewise lab sparsity`, `benchmarks/results/{sparse}.json`).",
    ]
    return "\n".join(lines)


GPU_PASSES = ("forward", "backward")


def over_best(which: str, data: dict[str, Any]) -> tuple[float, float, float]:
    """The geometric mean, least and largest of tilewise's speed over the faster of two peers, by problem."""
    rates = [r["tflops"] for r in data["results"] if r["pass"] == which]
    over = [t["tilewise"] / max(t["flash"], t["cudnn"]) for t in rates]
    return geometric_mean(over), min(over), max(over)


def gpu(name: str = "bench-h200") -> str:
    """TFLOP/s of docs/performance.md: a row for each problem and pass."""
    data = stored(name)
    m = data["machine"]
    who = list(dict.fromkeys(one for r in data["results"] for one in r["tflops"]))
    lines = [
        f"TFLOP/s on one {m['gpu']} ({data['rounds']} round(s) in turns, torch {m['torch']}, {m['date'][:10]}; "
        f"`tilewise bench --device cuda`, `benchmarks/results/{name}.json`):",
        "",
        f"| batch x heads x seqlen x head dim | dtype | pass | {' | '.join(who)} |",
        "|---|---|---|" + "---|" * len(who),
    ]
    for r in data["results"]:
        rates = (f"{r['tflops'][one]:.0f}" if one in r["tflops"] else "-" for one in who)
        lines.append(f"| {r['shape']} | {r['dtype']} | {r['pass']} | {' | '.join(rates)} |")
    means = (f"{what} {mean:.2f}x" for what, mean in data["geometric_means"].items())
    lines += ["", f"Geometric means of speed: {', '.join(means)}."]
    over = ", ".join("{} {:.2f}x ({:.2f}x to {:.2f}x)".format(which, *over_best(which, data)) for which in GPU_PASSES)
    lines += ["", f"tilewise over the faster of flash and cudnn at each point: {over}."]
    if data.get("note"):
        lines += ["", data["note"]]
    return "\n".join(lines)


def gpus() -> str:
    """All of docs/performance.md: the grid, then beside FlashAttention-3."""
    return "\n\n".join([gpu(), peers("peers-h200")])


def peers(name: str) -> str:
    """TFLOP/s beside FlashAttention-3, a row for each problem and pass of docs/performance.md."""
    data = stored(name)
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for r in data["rows"]:
        mask = f"window {r['window']}" if r["window"] else "causal" if r["causal"] else "full"
        heads = f" {r['heads']}/{r['heads_kv']} heads" if r["heads_kv"] != r["heads"] else ""
        rows.setdefault((f"D{r['d']} {r['seqlen']} {mask}{heads}", r["pass"]), {})[r["peer"]] = r["tflops"]
    who = list(dict.fromkeys(peer for rates in rows.values() for peer in rates))
    lines = [
        f"The same with FlashAttention-3 in the run (`benchmarks/results/{name}.json`; torch {data['meta']['torch']}):",
        "",
        f"| problem | pass | {' | '.join(who)} | tilewise over the best |",
        "|---|---|" + "---|" * (len(who) + 1),
    ]
    for (problem, which), rates in rows.items():
        cells = (f"{rates[one]:.0f}" if one in rates else "-" for one in who)
        lines.append(f"| {problem} | {which} | {' | '.join(cells)} | {_over_others(rates):.2f}x |")
    means = ", ".join(
        "{} {:.2f}x ({:.2f}x to {:.2f}x)".format(which, *over_peers(name, which)) for which in ("fwd", "bwd")
    )
    return "\n".join([*lines, "", f"Geometric means over the grid: {means}. {data['note']}"])


def _over_others(rates: dict[str, float]) -> float:
    return rates["tilewise"] / max(rate for peer, rate in rates.items() if peer != "tilewise")


def over_peers(name: str, which: str) -> tuple[float, float, float]:
    """The geometric mean, least and largest of tilewise's speed over the fastest peer, FlashAttention-3 among them."""
    rows: dict[tuple, dict[str, float]] = {}
    for r in stored(name)["rows"]:
        if r["pass"] == which and r["tag"] == "grid":
            rows.setdefault((r["d"], r["seqlen"], r["causal"]), {})[r["peer"]] = r["tflops"]
    over = [_over_others(rates) for rates in rows.values()]
    return geometric_mean(over), min(over), max(over)


def grid(tests: str = "tests-h200") -> str:
    """What the README says of Hopper: named cases that obeyed the rule, and speed over the peers."""
    found, data = stored(tests), stored("bench-h200")
    ran, failed = ([test for test in found[key] if "test_matches_reference" in test] for key in ("passed", "failures"))
    obeyed = ", ".join(f"{sum(backend in test for test in ran)} on {backend}" for backend in ("triton", "gluon"))
    cudnn, triton = (
        " and ".join(f"{data['geometric_means'][f'{x} {over}']:.2f}x {x}" for x in GPU_PASSES)
        for over in ("over cudnn", "of triton over flash")
    )
    peers = " and ".join(
        "{1:.2f}x {0} ({2:.2f}x to {3:.2f}x by problem)".format(name, *over_peers("peers-h200", which))
        for name, which in zip(GPU_PASSES, ("fwd", "bwd"), strict=True)
    )
    return (
        "Named cases in fp32, fp16 and bf16 that obeyed the fp64 rule on one NVIDIA H200, forward and every gradient: "
        f"{obeyed}; {len(failed)} did not (`benchmarks/results/{tests}.json`). Over a grid of {len(data['results']) // 2} "
        "problems (bf16, 16,384 tokens, D 64 to 256, 512 to 16K), in geometric means, GPU time over the faster of cuDNN and "
        f"FlashAttention-3 is {peers}; over cuDNN alone, host time included, it is {cudnn}, and that of the portable Triton "
        f"kernels over FlashAttention-2 {triton} ([docs/performance.md](docs/performance.md))."
    )


def markdown() -> str:
    """All figures of the README."""
    return "\n\n".join([speed("bench-cpu-zen3"), speed("bench-cpu-emerald-rapids"), memory()])


if __name__ == "__main__":
    print(markdown())
    print("\n---- README.md, grid ----\n")
    print(grid())
    print("\n---- docs/lab.md ----\n")
    print(lab())
    print("\n---- docs/performance.md ----\n")
    print(gpus())
