"""The house as docs/architecture.md draws it: imports run one way, torch stays out of the books, names stay in place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nibble
from nibble import formats

ROOT = Path(nibble.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
LAYERS = (
    "ray", "cli", "server", "evals", "transformers", "routing", "engine", "models", "attention", "cache", "kernels", "spec", "formats", "base",
)  # fmt: skip
BASE = {
    "model_spec",
    "hardware",
    "config",
    "drafts",
    "quality",
    "options",
    "files",
    "garbage",
    "bytecode",
    "threads",
    "processes",
    "errors",
}
TORCH_FREE = (
    "errors", "files", "config", "options", "spec", "model_spec", "cache/radix_cache", "cache/manager",
    "cache/lease", "cache/snapshots", "cache/events", "engine/kv_events", "routing/router", "routing/subscriber", "ray/options", "ray/choice", "ray/client", "ray/engine", "ray/front", "ray/app", "ray/router", "cache/exact_window", "cache/residency", "attention/planner/support", "attention/planner/plan", "attention/planner/resolve",
    "attention/planner/options", "attention/planner/refusal", "attention/planner/explain", "attention/planner/memory",
    "attention/planner/evidence", "attention/planner/suggestion", "models/quantization", "kernels/weight_formats", "kernels/state_formats", "models/varying", "engine/plan", "engine/request", "engine/scheduler", "engine/speculative", "engine/speculation_plan", "engine/drafters/base", "engine/drafters/lookup", "models/observations", "cli/plan",
)  # fmt: skip
BOOKS = (
    "nibble.attention.planner.resolve",
    "nibble.attention.planner.explain",
    "nibble.cli.docs",
    "nibble.cli.docs_peers",
    "nibble.engine.plan",
    "nibble.models.observations",
    "nibble.spec",
    "nibble.cache.layout",
    "nibble.kernels",
    "nibble.kernels.state_formats",
    "nibble.cache.manager",
    "nibble.routing.subscriber",
    "nibble.routing.router",
    "nibble.ray.options",
    "nibble.ray.choice",
    "nibble.ray.client",
    "nibble.ray.engine",
    "nibble.engine.scheduler",
    "nibble.engine.request",
    "nibble.config",
    "nibble.model_spec",
)
FOREIGN = {
    "transformers": {"models", "engine/tokenizer", "transformers/cache"},
    "flashinfer": {"attention/backends/flashinfer"},
    "flash_mla": {"attention/backends/flashmla"},
    "flash_attn_interface": {"attention/backends/flash_attention"},
    "humming": {"kernels/quantized_linear/humming"},
    "vllm": set(),
    "sgl_kernel": set(),
    "typer": {"cli"},
    "matplotlib": {"evals"},
    "opentelemetry": {"server/tracing"},
    "guidellm": {"cli/bench"},
    "lm_eval": {"evals/tasks", "evals/lm_eval_model"},
    "ray": {"ray/app", "ray/router"},
}
FORMATS_NAMED_IN = (
    "formats/", "attention/backends/", "config", "kernels/codecs/", "models/quantization", "models/online",
    "kernels/quantized_linear/quantize",  # formats of weights
    "kernels/state_formats",  # formats of recurrent states
    "evals/thresholds",  # what is asked of models with them
)  # fmt: skip
LONGEST_FILE = 600


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at the top, inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "nibble" or len(parts) == 1:
        return None
    return (
        LAYERS.index("base") if parts[1] in BASE else LAYERS.index(parts[1]) if parts[1] in LAYERS else None
    )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    own = layer_of(f"nibble.{name_of(path).replace('/', '.')}")
    for module in imports(path):
        other = layer_of(module)
        if own is not None and other is not None:
            assert other >= own, f"{name_of(path)} imports {module}, which stands to its left"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_no_torch_in_the_books(name: str) -> None:
    assert not {module.split(".")[0] for module in imports(ROOT / f"{name}.py")} & {
        "torch",
        "transformers",
        "numpy",
    }


@pytest.mark.parametrize("module", BOOKS)
def test_books_load_without_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


def test_foreign_packages_stay_in_their_files() -> None:
    for path in FILES:
        used = {module.split(".")[0] for module in imports(path)}
        for package, homes in FOREIGN.items():
            if package in used:
                assert any(name_of(path).startswith(home) for home in homes), (
                    f"{name_of(path)} imports {package}"
                )


def test_format_names_stay_in_formats_rows_and_config() -> None:
    names = {name for name in formats.names() if name not in {"fp32", "fp16"}}
    for path in FILES:
        place = name_of(path)
        if place.startswith(FORMATS_NAMED_IN):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in names:
                pytest.fail(f"{place}:{node.lineno} names the format {node.value!r}")


def test_files_are_short_and_say_what_they_own() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST_FILE, f"{name_of(path)} is too long"
        assert ast.get_docstring(ast.parse(text)), f"{name_of(path)} has no docstring"


def test_exported_names() -> None:
    assert nibble.__all__ == sorted(nibble.__all__, key=lambda name: (not name.isupper(), name))
    for name in nibble.__all__:
        assert getattr(nibble, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = nibble.nonsense


def test_importing_nibble_is_light() -> None:
    code = "import nibble, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0
