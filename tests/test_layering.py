"""kernels <- fasth3_core <- {nodes, cli}; only nodes may import ComfyUI. And the package list is the tree."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMFY = {"comfy", "comfy_api", "comfy_extras", "execution", "folder_paths", "node_helpers", "nodes", "server"}
FORBIDDEN = {
    "kernels": COMFY | {"fasth3_core", "cli"},
    "fasth3_core": COMFY | {"cli"},
}


def imported_roots(path: Path):
    """Yield the first name of every import, wherever in the file it is; ..pkg.x counts as pkg."""
    depth = len(path.relative_to(ROOT).parts) - 1
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node.module.split(".")[0]
            elif node.level == depth + 1:  # climbed to the package root
                yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_only_downwards(layer):
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files, f"no files under {layer}/: the check would pass on nothing"
    bad = {f"{p.relative_to(ROOT)}: {name}" for p in files for name in imported_roots(p) if name in FORBIDDEN[layer]}
    assert not bad, f"forbidden imports in {layer}: {sorted(bad)}"


def test_every_package_is_listed():
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    found = {"comfyui_fasth3"}
    for layer in ("kernels", "fasth3_core", "nodes", "cli"):
        for init in (ROOT / layer).rglob("__init__.py"):
            found.add(".".join(["comfyui_fasth3", *init.parent.relative_to(ROOT).parts]))
    assert listed == found


def test_importing_the_package_imports_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('p', r'{ROOT / '__init__.py'}')\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(sorted({'torch', 'triton', 'av', 'comfy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
