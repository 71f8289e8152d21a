"""What the house rules look at: the files of this repository, and what each Python file imports."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__"}


@dataclass(frozen=True)
class Import:
    """One imported module, whole: `kvasir_proto.ids` for `from kvasir_proto.ids import NodeId`."""

    importer: str
    module: str
    line: int
    for_types_only: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def is_in(self, package: str) -> bool:
        return self.module == package or self.module.startswith(package + ".")

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


@cache
def files() -> tuple[str, ...]:
    """Every file that is or will be committed, by its path from the root."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout.decode()
        paths = [path for path in listed.split("\0") if path]
    else:
        paths = [
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if not _NOT_OURS.intersection(path.relative_to(ROOT).parts) and not path.name.endswith(".so")
        ]
    return tuple(sorted(path for path in paths if (ROOT / path).is_file()))


def python_files(*folders: str) -> tuple[str, ...]:
    """The Python files under these folders."""
    return tuple(
        path
        for path in files()
        if path.endswith(".py") and any(path.startswith(folder + "/") for folder in folders)
    )


@cache
def text_of(path: str) -> str | None:
    """A file's text; None if it is not text."""
    data = (ROOT / path).read_bytes()
    try:
        return None if b"\0" in data[:8192] else data.decode()
    except UnicodeDecodeError:
        return None


@cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"), path)


def imports(*folders: str) -> Iterator[Import]:
    """Every import, wherever it stands, in the Python files under these folders."""
    for path in python_files(*folders):
        yield from _imports_of(path)


@cache
def _imports_of(path: str) -> tuple[Import, ...]:
    found: list[Import] = []

    def visit(node: ast.AST, for_types_only: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(path, name.name, node.lineno, for_types_only) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from kvasir_node import telemetry` may import a module as well as a name.
            found.extend(
                Import(path, f"{node.module}.{name.name}", node.lineno, for_types_only) for name in node.names
            )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for guarded in node.body:
                visit(guarded, True)
            for otherwise in node.orelse:
                visit(otherwise, for_types_only)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, for_types_only)

    visit(tree_of(path), False)
    return tuple(found)
