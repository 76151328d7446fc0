"""The language and shape of the source: names, imports between files, sizes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nibble

ROOT = Path(nibble.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

NOT_NAMES = frozenset(
    [
        "found",
        "said",
        "told",
        "asked",
        "made",
        "words",
        "coming",
        "chosen",
        "known",
        "begun",
        "dealt",
        "kept",
        "leave",
        "news",
        "given",
        "wanted",
        "taken",
        "seen",
        "meant",
        "brought",
        "gone",
        "lost",
        "ahead",
        "beside",
        "aside",
        "worth",
        "lack",
        "trouble",
        "tell",
        "land",
        "obstacle",
        "remedy",
        "cites",
        "picks",
        "parcel",
        "ask",
        "look",
        "patience",
        "failures",
        "dialect",
        "exchange",
    ]
)
"""Participles, adverbs and private words. A name says what the thing is, in the field's terms (CONTRIBUTING.md)."""
LONGEST_FILE = 600
LONGEST_FUNCTION = 60
LONGEST_KERNEL = 200
"""Lines of a GPU kernel, which is one function; sections are marked by comments."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a file binds: variables, arguments, attributes, functions, classes, imported aliases."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno


def imported_modules(path: Path) -> Iterator[str]:
    """The modules of Nibble that a file imports, also under TYPE_CHECKING and in functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_say_what_things_are(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrong = [
        f"{name} (line {line})" for name, line in bound_names(tree) if name.strip("_").lower() in NOT_NAMES
    ]
    assert not wrong, f"{name_of(path)} binds {', '.join(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_stay_in_their_file(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nibble":
            private = [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]
            assert not private, f"{name_of(path)} imports {private} from {node.module}"


def test_no_circles_between_files() -> None:
    graph = {module_of(path): {m for m in imported_modules(path) if m in MODULES} for path in FILES}
    graph.pop("nibble", None)  # public names, loaded when first used
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            pytest.fail(" -> ".join([*trail[trail.index(module) :], module]))
        if module in done:
            return
        for other in sorted(graph.get(module, set()) - {module}):
            visit(other, [*trail, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE, f"{name_of(path)} is too long"
    limit = LONGEST_KERNEL if name_of(path).startswith("kernels/") else LONGEST_FUNCTION
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= limit, f"{name_of(path)}: {node.name} has {length} lines"
