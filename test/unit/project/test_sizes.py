"""House style, said by a test: no module over 500 lines, no function over 80, most far shorter.

Run alone: ``pytest test/unit/project/test_sizes.py``. An exception is named, with its reason.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [ROOT / "python" / "sglang", ROOT / "sgl-kernel" / "python", ROOT / "benchmark", ROOT / "scripts"]

MODULE_LIMIT = 500
FUNCTION_LIMIT = 80
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def _files() -> list[Path]:
    return [path for root in SOURCES if root.exists() for path in sorted(root.rglob("*.py"))]


def _functions(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


def test_no_module_is_too_long() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in _files()}
    assert {m: n for m, n in lengths.items() if n > MODULE_LIMIT and m not in LONG_MODULES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {name: n for p in _files() for name, n in _functions(p)}
    assert {f: n for f, n in lengths.items() if n > FUNCTION_LIMIT and f not in LONG_FUNCTIONS} == {}


def test_functions_are_short_as_a_rule() -> None:
    lengths = sorted(n for p in _files() for _, n in _functions(p))
    ninetieth = lengths[int(len(lengths) * 0.9)]
    assert ninetieth <= 30, f"90 % of functions should have at most 30 lines; now {ninetieth}"
    mean = statistics.mean(len(p.read_text().splitlines()) for p in _files())
    assert mean <= 200, f"mean module length {mean:.0f} lines"


def test_allow_lists_name_what_exists() -> None:
    names = {name for p in _files() for name, _ in _functions(p)}
    assert set(LONG_FUNCTIONS) <= names
    assert {ROOT / name for name in LONG_MODULES} <= set(_files())


def test_no_unfinished_work_is_left() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    found = [f"{p.relative_to(ROOT)}: {m}" for p in _files() for m in marks if m in p.read_text()]
    assert found == []
