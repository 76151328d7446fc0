"""Thresholds: the least accuracy of public models with a KV cache, and who asks for it. No torch.

`nibble check` holds a model against them, and docs/thresholds.md is this table. How the questions are asked is in
gsm8k.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.errors import ConfigError
from nibble.evals.report import YARDSTICK, markdown_table
from nibble.formats import scheme as schemes
from nibble.models.hub import local_folder, read_json

TASK = "GSM8K"
MAX_DROP = 0.01
"""How far accuracy may lie below that of the same model with an unquantised cache: of any model and scheme."""
SGLANG = "https://github.com/sgl-project/sglang/blob"


@dataclass(frozen=True, slots=True)
class Threshold:
    """The least accuracy of a model with a cache."""

    model: str
    """On the hub."""
    architecture: str
    """In its config.json."""
    weights: str
    """How its checkpoint stores them."""
    scheme: str
    """Of the cache; encoders and transforms are free."""
    num_fewshot: int
    limit: int | None
    """Questions that are asked; None: all."""
    least: float
    source: str
    """Who asks for it."""
    note: str = ""


THRESHOLDS = (
    Threshold(
        "nvidia/Llama-3.1-8B-Instruct-NVFP4", "LlamaForCausalLM", "nvfp4", "nvfp4", 5, None, 0.617,
        f"{SGLANG}/3a000c0e04f79bd6541f35dea30b733dfd516e11/test/registered/quant/"
        "test_llama8b_nvfp4_kv_cache_sm120.py",
        "0.015 below the 0.632 that its authors measured; an FP8 cache gave 0.646. Later versions of this test report "
        "30 runs on an RTX 5090, mean 0.620, standard deviation 0.007, lowest 0.607, and ask for 0.60: so about one "
        "run in three ends below 0.617",
    ),
    Threshold(
        "Qwen/Qwen3.5-9B", "Qwen3_5ForConditionalGeneration", "bf16", "nvfp4", 8, 200, 0.70,
        f"{SGLANG}/96e41330dd44629f2de40e195e2d80f7b0fe54f6/test/registered/quant/"
        "test_qwen35_9b_nvfp4_kv_cache_sm100.py",
        "with NVFP4 and with FP8 prompts, with and without drafts",
    ),
    Threshold(
        "neuralmagic/Meta-Llama-3-8B-Instruct-FP8-KV", "LlamaForCausalLM", "fp8_e4m3", "fp8_e4m3", 5, 200, 0.70,
        f"{SGLANG}/02567fecf2099a2994bfd4150dd2ec9122cb271f/test/registered/quant/test_fp8kv_triton.py",
    ),
    Threshold(
        "nvidia/DeepSeek-V3-0324-FP4", "DeepseekV3ForCausalLM", "nvfp4", "fp8_e4m3", 8, None, 0.93,
        f"{SGLANG}/0465eebc1445c537526cb6e16215c0d3791e8f8f/test/registered/quant/test_deepseek_v3_fp4_4gpu.py",
    ),
    Threshold(
        "Qwen/Qwen3-8B", "Qwen3ForCausalLM", "bf16", "bf16", 5, None, 0.89,
        f"{SGLANG}/008b79d2358b08adf9b6c879625030f890c8c4e2/test/registered/attention/test_flash_attention_4.py",
        "an unquantised cache: what others start from",
    ),
    Threshold(
        "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3MoeForCausalLM", "bf16", "bf16", 5, None, 0.89,
        f"{SGLANG}/008b79d2358b08adf9b6c879625030f890c8c4e2/test/registered/attention/test_flash_attention_4.py",
        "an unquantised cache, with drafts of EAGLE-3",
    ),
)  # fmt: skip


def find(model: str, scheme: str) -> Threshold | None:
    """Return the least accuracy that is asked of a model with a cache, None where nobody is known to.

    A model is known by its name on the hub: as it was named, by the folder of the hub's cache, or by a folder of the
    same last name, which must have the architecture too. What config.json says a model was made of does not count: a
    fine-tune is another model.

    Args:
        model: hub name or local folder.
        scheme: as --kv-format takes it.
    """
    base = _base(scheme)
    rows = [row for row in THRESHOLDS if row.scheme == base]
    folder = local_folder(model)
    config = read_json(folder / "config.json") if folder else {}
    names = {name.lower() for name in _names(model, folder)}
    return next(
        (row for row in rows if names & _spellings(row.model) and _has_architecture(row, config)), None
    )


def _base(scheme: str) -> str:
    """Return a scheme's name without encoder and transforms; that of a file of schemes is empty."""
    with suppress(ConfigError):
        return schemes.parse(scheme).base
    return ""


def _names(model: str, folder: Path | None) -> Iterator[str]:
    """Yield what a model may be called: whole names of the hub, and a folder's own behind a slash."""
    yield model
    if folder:
        folder = folder.resolve()
        yield f"/{folder.name}"
        cached = re.search(r"/models--([^/]+)--([^/]+)/snapshots/", f"{folder.as_posix()}/")
        yield from (f"{cached[1]}/{cached[2]}",) if cached else ()


def _spellings(name: str) -> set[str]:
    return {name.lower(), f"/{name.lower().rpartition('/')[2]}"}


def _has_architecture(row: Threshold, config: dict[str, Any]) -> bool:
    """Return whether a config.json is of the row's model, as far as it says."""
    return row.architecture in (config.get("architectures") or (row.architecture,))


# --- the page ---------------------------------------------------------------------------------------------------------

HEAD = f"""\
# Thresholds: the least accuracy with a cache

Generated by `nibble docs` from `src/nibble/evals/thresholds.py`. One command holds a model against them, and exits
with 1 where it falls short:

```sh
nibble check nvidia/Llama-3.1-8B-Instruct-NVFP4 nvfp4
nibble check ./my-model nvfp4 --data test.jsonl
```

## Any model, any scheme
{TASK} within **{MAX_DROP * 100:.1f} point** of the same model and weights with a cache in {YARDSTICK.upper()}, over
the same questions. It is what counts for a model that is not in the table below or whose weights are quantised as they
load (`--weights`), and with `--relative` for the others too; the model runs twice. Stricter advice for single schemes,
and what {TASK} does not see, is in [evaluation.md](evaluation.md#what-drop-is-acceptable).

## Public models
What others ask of a model with a cache in their tests. These are their figures and not ours: which models have been
served here is in [families.md](families.md), and a model that Nibble refuses is refused by `check` too.
"""

TAIL = """
Left out: tests whose cache is of a kind that the test does not name, and those that ask otherwise: gpt-oss (GPQA, by
reasoning effort), Qwen3.5-35B-A3B-FP8 and Qwen3.5-397B-A17B-NVFP4 (with thinking, sampled).

## How it is asked
As in SGLang's tests: the first 5 (or 8) questions of the [test set](https://github.com/openai/grade-school-math) are
the examples before each of the others, as `Question: ...` and `Answer: ...` with the answer's own words. The model
goes on with the text, greedily, for 512 tokens at most, up to the next `Question`. Its last number counts, commas
left out. `--apply-chat-template` asks in a chat instead, for models that need one; thresholds of single models were
set without it.

Questions come from the hub (`openai/gsm8k`, MIT licence; reading that file takes `pyarrow`), or from `--data FILE`:
JSON lines, or Parquet, with `question` and `answer`.

## What so many questions can tell
The verdict goes by the accuracy itself. What is noise is said beside it:

- An accuracy of p over n questions has a standard error of sqrt(p (1 - p) / n): 1.3 points for p = 0.62 and all 1,314
  questions, 3.2 points for p = 0.70 and 200. Where a threshold is closer than two of these, another run may end on
  its other side, and `check` says so.
- A drop is taken question by question, which is more exact ([how](evaluation.md#how-big-a-difference-is-noise)). It
  must have a standard error below half a point before 1.0 point can be told; `check` says how many questions that
  would take. Where no answer changed, three in all questions might have (the rule of three):
  347 questions at least.
"""


def page() -> str:
    """Return the text of docs/thresholds.md."""
    header = ("model", "weights", "cache", "examples", "questions", "at least", "source")
    notes = (f"- `{row.model}`, {row.scheme}: {row.note}." for row in THRESHOLDS if row.note)
    return "\n".join((HEAD, *markdown_table(header, _rows(), texts=2), "", *notes, TAIL))


def _rows() -> Iterator[tuple[str, ...]]:
    for row in THRESHOLDS:
        limit = "all" if row.limit is None else str(row.limit)
        test = row.source.rpartition("/")[2]
        yield (
            f"`{row.model}`", row.weights, row.scheme, str(row.num_fewshot), limit, f"{row.least:.3f}",
            f"[SGLang, {test}]({row.source})",
        )  # fmt: skip
