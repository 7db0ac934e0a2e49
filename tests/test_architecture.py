"""The shape of the package: who imports whom, sizes, and what `import tilewise` costs."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "src" / "tilewise"
FILES = sorted(ROOT.rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))

#: Modules in order: each imports only from earlier rows.
LAYERS = (
    ("predicates", "tiles", "checks"),
    ("masks", "mods"),
    ("spec",),
    ("sequences", "block_mask", "reference"),
    ("problem",),
    ("backends.base",),
    ("dispatch",),
    ("plan",),
    ("traffic",),
    ("ops", "call", "cost", "merge"),
    ("again",),
    ("api",),
    (
        "lab",
        "explain",
        "page",
        "flash_attn",
        "sampling",
        "dense",
        "testing",
        "io_model",
        "cli",
        "report",
        "training",
        "__main__",
        "",
    ),
)
#: Rows whose modules may import each other (packages of the top row are whole programs).
TOP = len(LAYERS) - 1
LEAVES = ("predicates", "tiles", "checks", "masks", "mods", "spec", "sequences", "block_mask", "problem")


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _layer(module: str) -> int:
    """The row of a module, or of the package that holds it."""
    while True:
        for row, names in enumerate(LAYERS):
            if module in names:
                return row
        if not module:
            raise KeyError(module)
        module = module.rpartition(".")[0]


def _exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _imports(path: Path) -> set[str]:
    """Modules imported anywhere in a file, those of the package as "tilewise" or "tilewise.x.y"."""
    found = set()
    package = ["tilewise", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                inside = base.removeprefix("tilewise").lstrip(".")
                full = f"{inside}.{alias.name}" if inside else alias.name
                found.add(f"tilewise.{full}" if base.split(".")[0] == "tilewise" and _exists(full) else base)
    return found


def _inside(path: Path) -> set[str]:
    """Modules of the package that a file imports, by their names in LAYERS."""
    return {name.removeprefix("tilewise").lstrip(".") for name in _imports(path) if name.split(".")[0] == "tilewise"}


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_file = pytest.mark.parametrize("path", FILES, ids=_id)


def test_every_module_has_a_layer():
    unknown = [m for m in map(_module, FILES) if not m.startswith("backends") and _layer(m) == TOP and m]
    top = LAYERS[TOP]
    assert [m for m in unknown if m.split(".")[0] not in top] == []


@each_file
def test_imports_go_one_way(path):
    module = _module(path)
    if module in ("", "backends") or (module.startswith("backends.") and module != "backends.base"):
        pytest.skip("the package itself, and backends: rules of their own")
    row = _layer(module)
    for other in _inside(path):
        same_package = other.split(".")[0] == module.split(".")[0]
        is_backend = other.startswith("backends") and other != "backends.base"
        if is_backend:
            assert row == TOP or module == "dispatch", f"{module} imports the backend {other}"
        elif not (same_package or row == TOP):
            assert _layer(other) <= row, f"{module} imports {other} of a later layer"


@each_file
def test_backends_import_leaves_and_themselves_only(path):
    module = _module(path)
    if not module.startswith("backends.") or module == "backends.base":
        pytest.skip("not a backend")
    package = ".".join(module.split(".")[:2])
    allowed = {*LEAVES, "backends.base"}
    shared = (package, "backends.device")
    foreign = {other for other in _inside(path) if other not in allowed and not other.startswith(shared)}
    assert not foreign


@each_file
def test_compilers_are_imported_by_kernels_only(path):
    outside = {name.split(".")[0] for name in _imports(path)} & {"numba", "llvmlite", "triton"}
    assert not outside or _module(path).startswith(("backends.", "lab.flash1_kernels")), outside


@each_file
def test_autograd_lives_in_ops_only(path):
    defines = [
        base
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for base in map(ast.unparse, node.bases)
        if base.endswith("autograd.Function")
    ]
    assert not defines or _module(path) in ("ops", "training.attention", "training.baselines", "lab.system"), defines


def test_predicates_import_nothing():
    assert _imports(ROOT / "predicates.py") == set()
    assert _imports(ROOT / "tiles.py") <= {"typing"}


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 400


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code of a function: without its signature, its docstring and functions inside it."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    inner = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n is not node]
    return body[-1].end_lineno - body[0].lineno + 1 - sum(_body_lines(n) for n in inner)


@each_file
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            limit = 150 if node.name.endswith("_kernel") else 60
            assert _body_lines(node) <= limit, f"{node.name} has {_body_lines(node)} lines"


@each_file
def test_no_exception_is_swallowed(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(s, ast.Pass) for s in node.body)
            assert not silent, f"except: pass in line {node.lineno}"
            assert node.type is not None, f"bare except in line {node.lineno}"


@each_file
def test_files_say_what_they_are(path):
    assert path.read_text() == "" or ast.get_docstring(ast.parse(path.read_text()))


@each_file
def test_public_functions_are_documented(path):
    if _module(path) not in (
        "api",
        "merge",
        "flash_attn",
        "dispatch",
        "reference",
        "testing",
        "masks",
        "cost",
        "plan",
        "traffic",
    ):
        pytest.skip("not public")
    for node in ast.parse(path.read_text()).body:
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith("_")
            and node.name not in INTERNAL
        ):
            assert ast.get_docstring(node), node.name


PUBLIC = ("api", "merge", "flash_attn", "dispatch", "reference", "testing", "masks", "cost", "plan", "traffic")
INTERNAL = ("IntervalMask", "TileMask", "check_align", "names")  # of masks and dispatch, whose users read their base

PROBE = """
import sys, time, json
for name in ("triton", "numba"):
    sys.modules[name] = None
start = time.perf_counter()
import torch
middle = time.perf_counter()
before = set(sys.modules)
import tilewise
print(json.dumps([time.perf_counter() - middle, middle - start, sorted(set(sys.modules) - before)]))
"""


def _probe(code: str) -> str:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light(record_property):
    """With no GPU and neither numba nor triton to import: their absence would raise. The time is recorded, not judged."""
    runs = [json.loads(_probe(PROBE)) for _ in range(3)]
    seconds = min(run[0] for run in runs)
    record_property("seconds_beyond_torch", seconds)
    loaded = {name.split(".")[0] for name in runs[0][2]}
    assert loaded & {"numba", "llvmlite", "triton", "matplotlib", "typer", "rich", "transformers"} == set()
    ours = {name for name in runs[0][2] if name.startswith("tilewise")}
    assert not any(name.startswith(("tilewise.backends.cpu", "tilewise.cli", "tilewise.training")) for name in ours)


def test_without_numba_a_call_says_how_to_get_it():
    code = """
import importlib.util, torch
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "numba" else real(name, *a)
import tilewise
try:
    tilewise.attention(*torch.zeros(3, 1, 2, 1, 4))
except tilewise.NoBackendError as error:
    print(error)
"""
    assert "pip install numba" in _probe(code)
