"""A package imports only from rows with a smaller number (docs/architecture.md, section 'Layers').

Run alone: ``pytest test/unit/project/test_layering.py``. Imports inside functions count too.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "python" / "sglang"

# Module or package below ``sglang`` -> row. The longest matching entry decides.
ROWS = {
    "srt.utils": 0,
    "version": 0,
    "srt.configs": 1,
    "srt.server_args": 1,
    "srt.server_args_checks": 1,
    "srt.distributed": 1,
    "embedded": 1,
    "srt.managers.io_struct": 1,
    "srt.sampling.sampling_params": 1,
    "srt.model_executor.step_plan": 1,
    "srt.function_call": 2,
    "srt.mem_cache": 2,
    "srt.constrained": 2,
    "srt.parser": 3,
    "srt.layers": 3,
    "srt.sampling": 3,
    "srt.models": 4,
    "srt.model_loader": 4,
    "srt.model_executor": 5,
    "srt.speculative": 6,
    "srt.managers": 7,
    "srt.entrypoints": 8,
    "": 9,  # launch_server.py, bench_*.py and the package itself
}

# Packages of one row that are one unit and may import each other (one way only is checked by eye).
SAME_ROW_ALLOWED = {
    ("srt.models", "srt.model_loader"),  # a model takes its tensors from a WeightSource
    ("srt.managers.io_struct", "srt.sampling.sampling_params"),  # a request carries its parameters
    ("srt.managers.io_struct", "srt.model_executor.step_plan"),  # an output carries what rows have told
    ("srt.server_args", "srt.configs"),
    ("srt.server_args", "srt.server_args_checks"),
    ("srt.server_args_checks", "srt.server_args"),  # its type alone
    ("srt.server_args_checks", "srt.configs"),
    ("srt.server_args", "embedded"),
}

TEXT_MODULES = (
    "tokenizer_manager",
    "detokenizer_manager",
    "incremental_decoder",
    "templates",
    "managers.text_",
)


def _package(module: str) -> str:
    """The entry of ROWS that a module (dotted, without ``sglang.``) belongs to."""
    parts = module.split(".") if module else []
    for size in range(len(parts), 0, -1):
        name = ".".join(parts[:size])
        if name in ROWS:
            return name
    return ""


def _modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        dotted = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found.append((dotted.removesuffix(".__init__").removesuffix("__init__"), path))
    return found


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {n.removeprefix("sglang").removeprefix(".") for n in names if n.split(".")[0] == "sglang"}


def _violations(module: str, path: Path) -> list[str]:
    own = _package(module)
    bad = []
    for target in _imports(path):
        theirs = _package(target)
        if target == "" or theirs == own:
            continue
        if ROWS[theirs] < ROWS[own] or (own, theirs) in SAME_ROW_ALLOWED:
            continue
        bad.append(f"{module} (row {ROWS[own]}) imports {target} (row {ROWS[theirs]})")
    return bad


@pytest.mark.parametrize("module,path", _modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_only_from_lower_rows(module: str, path: Path) -> None:
    assert _violations(module, path) == []


def test_the_rule_can_fail(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from sglang.srt.managers import scheduler\n    return scheduler\n")
    assert _violations("srt.layers.wrong", wrong)
    right = tmp_path / "right.py"
    right.write_text("from sglang.srt.mem_cache import kv_pool\n")
    assert _violations("srt.layers.right", right) == []


def test_package_inits_are_empty() -> None:
    filled = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("__init__.py")
        if path.read_text().strip() and path.parent != SOURCE
    ]
    assert filled == []


def test_engine_side_and_text_side_do_not_import_each_other() -> None:
    for module, path in _modules():
        if not module.startswith("srt.managers."):
            continue
        is_text = any(name in module for name in TEXT_MODULES)
        for target in _imports(path):
            if not target.startswith("srt.managers.") or _package(target) != "srt.managers":
                continue
            other_is_text = any(name in target for name in TEXT_MODULES)
            assert is_text == other_is_text, f"{module} imports {target}"


def test_only_one_package_imports_kernels_directly() -> None:
    """flashinfer and triton are reached through sgl_kernel alone."""
    for module, path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {n.split(".")[0] for n in names} & {"flashinfer", "triton"}, module


def test_scheduler_side_needs_no_torch() -> None:
    """The scheduler, the policy and the plan are CPU logic: importing them must not need torch."""
    free = ("srt.speculative.toggle", "srt.model_executor.step_plan", "srt.managers.io_struct")
    for module, path in _modules():
        if module in free or module.startswith("srt.managers.") and "executor_build" not in module:
            tops = {n.split(".")[0] for n in _all_imports(path)}
            assert "torch" not in tops, module


def _all_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names
