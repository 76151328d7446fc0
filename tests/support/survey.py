"""What becomes of every type of causal language model in the installed Transformers, and of every multimodal class.

    python tests/support/survey.py [--out FOLDER] [--page] [--jobs N] [NAME ...]

Each is a tiny random model (families.py, towers.py), saved, served in fp32 and compared with the unmodified model: over a prompt
beyond its windows and top-k, in chunks of 7, of 1 and whole, and answering beside other requests. Without names all
types and variants are examined, a few at a time in processes of their own, so that a crash costs one of them. The result
is printed, and written to FOLDER as survey.json and survey.md. --page writes docs/families.md; with names, the rows of these.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import logging as transformers_logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import towers
from families import DEFAULTS, NOT_BUILT, TOLERANCE, VARIANTS, VOCAB, WINDOW, tiny_model
from nibble import LLM
from nibble.cache.pool import PagedPool
from nibble.config import Config
from nibble.engine.build import run_prompt
from nibble.engine.plan import plan_engine
from nibble.errors import NibbleError
from nibble.models import observations
from nibble.models.hub import first_line, quiet

BATCH = 12
"""Types of one process."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
OPTIONS: dict[str, Any] = {
    "kv_format": "fp32", "max_context": 96, "max_running": 4, "token_budget": 7, "kv_memory": "8MiB",
}  # fmt: skip
CHUNKS = (7, 1, 40)
TYPES = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS)
WHY_NOT_BUILT = {**NOT_BUILT, **towers.NOT_BUILT}


@dataclass
class Result:
    """What became of a type. Differences are the largest of a logit."""

    name: str
    outcome: str = "crashed"
    """served, wrong, refused, not built, or crashed: an error that is no refusal."""
    reason: str = ""
    error: float | None = None
    """Over all chunk sizes."""
    by_chunk: dict[str, float] | None = None
    is_invariant: bool | None = None
    """Whether logits are the same to the last bit, however the prompt is cut."""
    planted: float | None = None
    """With keys stored off by a thousandth, which must show."""
    own: float | None = None
    """Between the unmodified model whole, and token by token over its own cache."""
    to_cached: float | None = None
    """Between what is served and the unmodified model over its own cache."""
    answers: str = ""
    """Empty if greedy answers beside other requests are the unmodified model's."""
    largest: float | None = None
    """Largest logit."""
    kinds: str = ""
    """Kinds of attention that were observed."""
    seconds: float = 0.0


def prompt_of(count: int, seed: int) -> list[int]:
    """Random tokens; 0 is left out, which some types take for padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (count,), generator=generator).tolist()


PROMPT = prompt_of(40, seed=1)


def examine(name: str, folder: Path, *, with_own_cache: bool = False) -> Result:
    """Build, save, serve and compare one type.

    with_own_cache: also with the unmodified model over its own cache, which no outcome depends on.
    """
    result, start = Result(name), time.perf_counter()
    try:
        _examine(result, folder, with_own_cache)
    except NibbleError as error:
        result.outcome, result.reason = "refused", _one_line(error)
    except Exception as error:
        result.outcome, result.reason = "crashed", f"{type(error).__name__}: {_one_line(error)}"
    result.seconds = round(time.perf_counter() - start, 1)
    return result


def _examine(result: Result, folder: Path, with_own_cache: bool) -> None:
    if (reason := WHY_NOT_BUILT.get(result.name)) is not None:
        answer = refusal_by_config(result.name, folder) or "not compared"
        result.outcome, result.reason = "not built", f"{reason}; Nibble: {answer}"
        return
    model = (towers.tower_model if result.name in towers.NAMES else tiny_model)(result.name)
    with quiet():
        model.save_pretrained(folder)
    whole = logits_whole(model, PROMPT)
    result.largest = float(whole.abs().max())
    result.own, cached = _own_difference(model, whole) if with_own_cache else (None, None)
    llm = LLM(str(folder), **OPTIONS)
    result.kinds = " ".join(sorted({_kind(group) for group in llm.plan.groups}))
    served = {chunk: _served(llm, chunk) for chunk in CHUNKS}
    result.by_chunk = {str(chunk): _difference(logits, whole) for chunk, logits in served.items()}
    result.error = max(result.by_chunk.values())
    result.is_invariant = all(torch.equal(logits, served[CHUNKS[0]]) for logits in served.values())
    with error_in_keys():
        result.planted = _difference(_served(llm, CHUNKS[0]), whole)
    if cached is not None:
        result.to_cached = max(_difference(logits, cached) for logits in served.values())
    result.answers = answers_difference(model, llm)
    right = result.error < TOLERANCE and not result.answers
    result.outcome = "served" if right else "wrong"


def refusal_by_config(name: str, folder: Path) -> str:
    """What Nibble says of a type by its default config alone; empty if it would be served."""
    try:
        with quiet():
            kind = towers.TOWERS.get(name, name)
            CONFIG_MAPPING[kind](**DEFAULTS.get(name, {})).save_pretrained(folder)
        plan_engine(Config(model=str(folder), **OPTIONS))
    except NibbleError as error:
        return _one_line(error)
    return ""


def _kind(group: Any) -> str:
    facts = group.group
    asks = [name for name in ("window", "softcap", "sinks") if getattr(facts, name)]
    return "+".join([facts.kind, *asks])


def _served(llm: LLM, chunk: int) -> Tensor:
    runner, manager = llm.engine.runner, llm.engine.scheduler.manager
    return torch.cat(run_prompt(runner, manager, PROMPT, chunk))


def error_in_keys() -> AbstractContextManager[Any]:
    """Store keys, or latents, a thousandth too large."""
    write = PagedPool.write

    def write_wrong(self: PagedPool, layer: int, streams: dict[str, Tensor], *slots: Any) -> None:
        first = next(iter(streams))  # keys, or the latent
        write(self, layer, {**streams, first: streams[first] * 1.001}, *slots)

    return mock.patch.object(PagedPool, "write", write_wrong)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().nan_to_num(float("inf")).max())


def logits_whole(model: Any, ids: Sequence[int]) -> Tensor:
    """The unmodified model's logits [T, V], without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def _own_difference(model: Any, whole: Tensor) -> tuple[float | None, Tensor | None]:
    """Run the unmodified model token by token over its own cache; None where it cannot."""
    rows, past = [], None
    try:
        with torch.inference_mode():
            for token in PROMPT:
                more = {} if past is None else {"past_key_values": past}
                out = model(input_ids=torch.tensor([[token]]), use_cache=True, **more)
                past = out.past_key_values
                rows.append(out.logits[0].float())
    except Exception:  # types without a cache, or with one of their own
        return None, None
    cached = torch.cat(rows)
    return _difference(cached, whole), cached


def answers_difference(model: Any, llm: LLM) -> str:
    """Answer three prompts side by side; return where an answer is not the unmodified model's best token."""
    prompts = [prompt_of(count, seed) for seed, count in enumerate((5, 37, 18), 2)]
    for prompt, out in zip(
        prompts, llm.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True), strict=True
    ):
        answer = list(out.completions[0].token_ids)
        logits = logits_whole(model, [*prompt, *answer])[len(prompt) - 1 : -1]
        # Equal but for rounding: the best token of both, or one as good.
        gap = logits.max(-1).values - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        if float(gap.max()) > TOLERANCE:
            return f"token {int(gap.argmax())} of the answer to {len(prompt)} tokens is {float(gap.max()):.2g} worse"
    return ""


def _one_line(error: BaseException) -> str:
    return first_line(error).strip()


# All types, in processes


def _worker(names: Iterable[str]) -> None:
    """Examine types one by one; print each result as a line of JSON."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        observations.FOLDER = str(Path(root) / "observed")
        for i, name in enumerate(names):
            folder = Path(root) / str(i)
            print(json.dumps(asdict(examine(name, folder, with_own_cache=True))), flush=True)


def survey(names: Sequence[str], jobs: int = 1) -> list[Result]:
    """Examine types in processes of BATCH each, `jobs` of them at a time."""
    batches = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]
    with ThreadPoolExecutor(jobs) as pool:
        return [result for results in pool.map(_survey_batch, batches) for result in results]


def _survey_batch(names: Sequence[str]) -> list[Result]:
    """Examine types in a process; one that ends it is crashed, and the rest gets another."""
    results: list[Result] = []
    while len(results) < len(names):
        rest = names[len(results) :]
        command = [sys.executable, __file__, "--worker", *rest]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, **pipes) as process:
            output, errors = process.communicate()
        examined = [Result(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
        if len(examined) < len(rest):
            cause = (errors.strip().splitlines() or ["?"])[-1]
            examined.append(Result(rest[len(examined)], "crashed", cause))
        for result in examined:
            print(_line(result), flush=True)
        results += examined
    return results


def _line(result: Result) -> str:
    figures = "" if result.error is None else f"{result.error:.1e} "
    return f"{result.name:<28} {result.outcome:<9} {figures}{result.answers or result.reason}"


def table(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    counts = Counter(result.outcome for result in results)
    lines = [
        ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()),
        "",
        "| type | outcome | max abs. difference of a logit | attention, or reason |",
        "|---|---|---|---|",
    ]
    for result in results:
        error = "" if result.error is None else f"{result.error:.1e}"
        text = "; ".join(filter(None, [result.kinds, result.answers, result.reason])).replace("|", "\\|")
        lines.append(f"| {result.name} | {result.outcome} | {error} | {text} |")
    return "\n".join(lines) + "\n"


HEAD = """# Families

Every type that Transformers {version} has a causal language model for, and what becomes of it. A tiny random model of each is
served in fp32 on a CPU and compared with the unmodified model: a prompt of {tokens} tokens beyond every window ({window}) and
top-k, in chunks of 7, 1 and 40, and answers beside other requests. The figure is the largest difference of a logit;
above {tolerance:g} a type is wrong. What is refused is refused when a model is loaded, and by `nibble plan`, with this reason.

`python tests/support/survey.py --page` writes this page. `pytest tests/integration/test_all_families.py` holds it.

{counts}.

| type | outcome | difference | attention, or the reason |
|---|---|---|---|
"""
TOWERS_HEAD = """
## Text towers
Every class that Transformers generates text with from text and more: images, sound, video. A checkpoint of these is served
for text, with the weights of its language model alone, and compared with the unmodified class that is given tokens alone.

| class | outcome | difference | attention, or the reason |
|---|---|---|---|
"""
VARIANTS_HEAD = """
## Variants
Other models of the same types.

| variant | outcome | difference | attention, or the reason |
|---|---|---|---|
"""
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def page(results: Sequence[Result]) -> str:
    """The results as docs/families.md."""
    types = [result for result in results if result.name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    facts = {
        "version": transformers.__version__,
        "tokens": len(PROMPT),
        "window": WINDOW,
        "tolerance": TOLERANCE,
    }
    summary = _counts(result.outcome for result in types)
    rows = [_row(result) for result in types]
    variants = [_row(result) for result in results if result.name in VARIANTS]
    of_towers = [_row(result) for result in results if result.name in towers.NAMES]
    return "".join(
        [HEAD.format(counts=summary, **facts), *rows, VARIANTS_HEAD, *variants, TOWERS_HEAD, *of_towers]
    )


def page_with(text: str, results: Sequence[Result]) -> str:
    """docs/families.md with new rows for some of its types, and counted anew."""
    for result in results:
        row = re.compile(rf"^\| {re.escape(result.name)} \|.*\n", re.M)
        text = row.sub(_row(result).replace("\\", r"\\"), text, count=1)
    types = text.partition(VARIANTS_HEAD)[0]
    outcomes = re.findall(r"^\| \S+ \| (served|refused|wrong|not built) \|", types, re.M)
    return re.sub(r"^\d+ types .*\.$", _counts(outcomes) + ".", text, count=1, flags=re.M)


def _counts(outcomes: Iterable[str]) -> str:
    return ", ".join(f"{count} types {outcome}" for outcome, count in Counter(outcomes).most_common())


def _row(result: Result) -> str:
    error = "" if result.error is None else f"{result.error:.0e}"
    reason = re.sub(r"^\S+ cannot be served: ", "", result.reason)
    varies = "last bits vary with the chunks" if result.is_invariant is False else ""
    text = "; ".join(filter(None, [result.kinds, result.answers, varies, reason])).replace("|", "\\|")
    return f"| {result.name} | {result.outcome} | {error} | {text} |\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="types or variants; all of them without")
    parser.add_argument("--out", type=Path, help="folder of survey.json and survey.md")
    parser.add_argument("--page", action="store_true", help="write docs/families.md; with names, their rows")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or (*TYPES, *towers.NAMES)
    if options.worker:
        _worker(names)
        return
    results = survey(names, options.jobs)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "survey.json").write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
        (options.out / "survey.md").write_text(table(results))
    if options.page:
        PAGE.write_text(page_with(PAGE.read_text(), results) if options.names else page(results))
    print(Counter(result.outcome for result in results))


if __name__ == "__main__":
    main()
