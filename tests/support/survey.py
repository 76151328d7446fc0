"""What becomes of every type of causal language model in the installed Transformers: served right, or refused.

    python tests/support/survey.py [--out FOLDER] [NAME ...]

Each is a tiny random model (families.py), saved, served in fp32 and compared with the unmodified model: over a prompt
beyond its windows and top-k, in chunks of 7, of 1 and whole, and answering beside other requests. Without names all
types and variants are examined, a few at a time in processes of their own, so that a crash costs one of them. The result
is printed, and written to FOLDER as survey.json and survey.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import logging as transformers_logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families import DEFAULTS, NOT_BUILT, TOLERANCE, VARIANTS, VOCAB, tiny_model
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


def examine(name: str, folder: Path) -> Result:
    """Build, save, serve and compare one type."""
    result, start = Result(name), time.perf_counter()
    try:
        _examine(result, folder)
    except NibbleError as error:
        result.outcome, result.reason = "refused", _one_line(error)
    except Exception as error:
        result.outcome, result.reason = "crashed", f"{type(error).__name__}: {_one_line(error)}"
    result.seconds = round(time.perf_counter() - start, 1)
    return result


def _examine(result: Result, folder: Path) -> None:
    if result.name in NOT_BUILT:
        answer = refusal_by_config(result.name, folder)
        result.outcome, result.reason = "not built", "; ".join([NOT_BUILT[result.name], f"Nibble: {answer}"])
        return
    model = tiny_model(result.name)
    with quiet():
        model.save_pretrained(folder)
    whole = logits_whole(model, PROMPT)
    result.largest = float(whole.abs().max())
    result.own, cached = _own_difference(model, whole)
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
            CONFIG_MAPPING[name](**DEFAULTS.get(name, {})).save_pretrained(folder)
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

    def write_wrong(self: PagedPool, layer: int, streams: dict[str, Tensor], slot_mapping_T: Tensor) -> None:
        first = next(iter(streams))  # keys, or the latent
        write(self, layer, {**streams, first: streams[first] * 1.001}, slot_mapping_T)

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
    for prompt, out in zip(prompts, llm.generate(prompts, max_tokens=12, ignore_eos=True), strict=True):
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
            print(json.dumps(asdict(examine(name, folder))), flush=True)


def survey(names: Sequence[str]) -> list[Result]:
    """Examine types in processes of BATCH each; a type that ends its process is crashed."""
    results: list[Result] = []
    while len(results) < len(names):
        batch = names[len(results) :][:BATCH]
        command = [sys.executable, __file__, "--worker", *batch]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, **pipes) as process:
            assert process.stdout and process.stderr
            lines = [line for line in process.stdout if line.startswith("{")]
            errors = process.stderr.read()
        found = [Result(**json.loads(line)) for line in lines]
        if len(found) < len(batch):
            found.append(Result(batch[len(found)], "crashed", (errors.strip().splitlines() or ["?"])[-1]))
        for result in found:
            print(_line(result), flush=True)
        results += found
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


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="types or variants; all of them without")
    parser.add_argument("--out", type=Path, help="folder of survey.json and survey.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or TYPES
    if options.worker:
        _worker(names)
        return
    results = survey(names)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "survey.json").write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
        (options.out / "survey.md").write_text(table(results))
    print(Counter(result.outcome for result in results))


if __name__ == "__main__":
    main()
