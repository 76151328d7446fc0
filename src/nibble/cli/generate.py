"""`nibble generate`: answers to prompts, as they are written; or from several caches, side by side.

`nibble chat`: a conversation in the terminal, by the model's chat template.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nibble.attention.planner.explain import baseline_bytes
from nibble.cli import terminal
from nibble.cli.command import JsonOption, Options, takes
from nibble.cli.terminal import MODEL_HELP, ModelArgument, err, print_json
from nibble.config import Config, SamplingParams, sampling
from nibble.errors import CapacityError, ConfigError, NibbleError, RequestError
from nibble.evals.report import YARDSTICK, Entry
from nibble.garbage import pause_gc

if TYPE_CHECKING:
    from nibble.engine.llm import LLM
    from nibble.engine.request import Output

STDIN = "-"
PromptsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; `-` reads one from standard input.")
]
ModelOption = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
FilesOption = Annotated[list[Path] | None, typer.Option("--prompt-file", help="Read a prompt from a file.")]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Answer from a BF16 cache too, and show the answers side by side.")
]
AlsoOption = Annotated[
    list[str] | None, typer.Option(help="Answer from this cache scheme too, side by side.")
]


@dataclass(frozen=True, slots=True)
class Run:
    """All answers from one cache."""

    scheme: str
    bytes_per_token: int
    outputs: Sequence[Output]
    summary: str
    """What they cost, in words."""
    facts: dict[str, Any]
    """All of it, ready for JSON."""

    @property
    def texts(self) -> list[list[str]]:
        """Return the answers to each prompt."""
        return [[answer.text for answer in output.completions] for output in self.outputs]


@takes("params", SamplingParams, "Sampling", unset=True)
@takes("config", Config, "Model and cache", without=("model", "seed"))
def generate(
    prompts: PromptsArgument = None,
    model: ModelOption = "demo",
    prompt_file: FilesOption = None,
    compare: CompareOption = False,
    also: AlsoOption = None,
    as_json: JsonOption = False,
    *,
    config: Options,
    params: Options,
) -> None:
    """Answer prompts from a paged, quantised KV cache.

    One prompt is answered as it is written; several are served together, as one batch. The cost of the cache
    follows on standard error. Sampling options that are left out are the model's own, by its generation_config.json;
    several caches are compared greedily unless a temperature is given.

    Examples:
        nibble generate "def fibonacci(n):" --kv-format nvfp4
        nibble generate "def fibonacci(n):" --compare --kv-format nvfp4 --also k8v4
        nibble generate "import os" "class Stack:" --max-tokens 64 --json
        nibble generate "import re" --kv-format nvfp4 --kv-layers 0,-1=fp8_e4m3
        cat prompt.txt | nibble generate - --model ./my-model
    """
    texts = _read_prompts(prompts or [], prompt_file or [])
    sampling(**params)  # refused before anything is imported
    base = Config(model=model, **config)
    entries = _cache_entries(base, compare, also or ())
    # Options of the cache are those of --kv-format's.
    caches = [base if entry == Entry.of(base) else entry.alone(base) for entry in entries]
    terminal.quiet_libraries(model)
    with pause_gc():
        from nibble.engine.build import preflight

    # Answers that are drawn differ by chance too, which would hide what the caches do.
    params = params if len(caches) == 1 else {"temperature": 0.0, **params}
    # A refusal of the last cache must not come after the answers of the first.
    sampling_params = preflight(caches, texts, params)
    if len(caches) == 1 and len(texts) == sampling_params.n == 1 and not as_json:
        _print_stream(_load(caches[0]), texts[0], sampling_params)
        return
    # One engine after the other: the weights are not in memory twice.
    runs = [
        _generate_batch(entry.name, cache, texts, sampling_params)
        for entry, cache in zip(entries, caches, strict=True)
    ]
    if as_json:
        print_json({"model": model, "runs": [run.facts for run in runs]})
    elif len(runs) > 1:
        _print_side_by_side(runs)
    else:
        _print_list(runs[0])


def _cache_entries(base: Config, compare: bool, also: Sequence[str]) -> list[Entry]:
    """Return the caches to answer from, each once: BF16 first where it is compared with."""
    entries = [*([Entry(YARDSTICK)] if compare else []), Entry.of(base), *map(Entry.parse, also)]
    if compare and set(entries) == {Entry(YARDSTICK)}:
        raise ConfigError(f"--compare needs another cache than {YARDSTICK}; name it with --kv-format")
    return list(dict.fromkeys(entries))


def _read_prompts(arguments: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Return the prompts in order, those of files last; raise RequestError where there is none."""
    if arguments.count(STDIN) > 1:
        raise RequestError("standard input, `-`, can be one prompt only")
    prompts = []
    for text in arguments:
        read, what = (sys.stdin.read, "standard input") if text == STDIN else (text.__str__, "a prompt")
        prompts.append(terminal.read_utf8(read, what))
    prompts += [terminal.read_text(path, "prompt file") for path in files]
    if not prompts:
        raise RequestError('no prompt was given; write it as in: nibble generate "def fibonacci(n):"')
    return prompts


def _load(config: Config) -> LLM:
    from nibble.engine.llm import LLM

    what = f"loading {config.model} with a {Entry.of(config).name} cache"
    with err().status(what) as status, terminal.start_parts(lambda part: status.update(f"{what}: {part}")):
        llm = LLM(**asdict(config))
    terminal.print_startup(llm)
    return llm


def _print_stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Print prompt and answer as they come; then what it cost."""
    started, tokens = time.perf_counter(), 0
    pieces = llm.stream(prompt, params)  # what cannot be served raises here, before anything is written
    sys.stdout.write(prompt)
    for piece in pieces:
        tokens += len(piece.token_ids)
        print(piece.text, end="", flush=True)
    print()
    err().print(_format_cost(llm, tokens, time.perf_counter() - started), style="dim")


def _format_cost(llm: LLM, tokens: int, seconds: float) -> str:
    """Return what answers cost, and what the host tier and the fidelity watch say, where there are any."""
    rate = tokens / seconds if seconds else 0.0
    size = terminal.summary_of_bytes(Entry.of(llm.config).name, llm.plan.layout)
    notes = (part.summary for part in (llm.tier, llm.error_monitor, llm.speculation) if part)
    return "\n".join((f"{size}; {tokens} tokens, {rate:.1f} tokens/s", *notes))


def _generate_batch(scheme: str, config: Config, texts: Sequence[str], params: SamplingParams) -> Run:
    # The next cache needs this one's memory.
    with _load(config) as llm:
        started = time.perf_counter()
        outputs = llm.generate(texts, params)
        return _run_of(scheme, llm, outputs, time.perf_counter() - started)


def _run_of(scheme: str, llm: LLM, outputs: Sequence[Output], seconds: float) -> Run:
    answers = [answer for output in outputs for answer in output.completions]
    if failed := next((answer.error for answer in answers if answer.error), None):
        raise NibbleError(failed)
    tokens, layout = sum(len(answer.token_ids) for answer in answers), llm.plan.layout
    facts = {
        "scheme": scheme,
        "bytes_per_token": layout.bytes_per_token,
        "bytes_per_token_16bit": baseline_bytes(layout),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "hisparse": llm.tier.summary if llm.tier else None,
        "fidelity": llm.error_monitor.summary if llm.error_monitor else None,
        "drafts": llm.speculation.summary if llm.speculation else None,
        "startup": {part: round(duration, 3) for part, duration in llm.startup.items()},
        "answers": [asdict(output) for output in outputs],
    }
    return Run(scheme, layout.bytes_per_token, outputs, _format_cost(llm, tokens, seconds), facts)


def _print_list(run: Run) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for number, output in enumerate(run.outputs, 1):
        for answer in output.completions:
            console.rule(f"prompt {number}, answer {answer.index + 1}", style="dim")
            print(f"{output.prompt}{answer.text}")
    err().print(run.summary, style="dim")


def _print_side_by_side(runs: Sequence[Run]) -> None:
    """Print a table with a column a cache and a row an answer."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for run in runs:
        title = f"{run.scheme}\n{run.bytes_per_token:,} bytes/token"
        table.add_column(title, ratio=1, overflow="fold")
    for outputs in zip(*(run.outputs for run in runs), strict=True):
        prompt = Text(outputs[0].prompt or "", "dim")
        for answers in zip(*(output.completions for output in outputs), strict=True):
            table.add_row(*(prompt.copy().append(answer.text.rstrip(), "default") for answer in answers))
    Console(highlight=False).print(table)
    for run in runs:
        err().print(run.summary, style="dim")
    first, *other_runs = runs
    for run in other_runs:
        same = sum(one == other for one, other in zip(first.texts, run.texts, strict=True))
        line = f"{run.scheme} gave the same answer as {first.scheme} to {same} of {len(run.texts)} prompts"
        err().print(line, style="dim")


Messages = list[dict[str, str]]
RESET, QUIT = "/reset", "/quit"


@takes(
    "params",
    SamplingParams,
    "Sampling",
    without=("n", "logprobs", "prompt_logprobs", "logprob_start_len"),
    unset=True,
)
@takes("config", Config, "Model and cache", without=("model", "seed"))
def chat(
    model: ModelArgument = "demo", as_json: JsonOption = False, *, config: Options, params: Options
) -> None:
    """Talk with a model.

    The conversation so far stays in the KV cache, so a turn computes its own tokens only. `/reset` begins
    anew, `/quit` (or end of input) ends. Ctrl-C stops an answer that is being written. With --json, every
    line of standard input is a message, and every answer a line of JSON. Sampling options that are left out are
    the model's own, by its generation_config.json.

    Examples:
        nibble chat
        nibble chat demo --kv-format nvfp4 --temperature 0.7
        printf 'hello\\nwho are you?\\n' | nibble chat --json
    """
    # Both sets of options are checked before the weights load.
    sampling(**params)
    served = Config(model=model, **config)
    terminal.quiet_libraries(model)
    llm = _load(served)
    # A model without a template is refused before the first message.
    llm.tokenizer.chat([{"role": "user", "content": "hello"}])
    if not as_json:
        cost = terminal.summary_of_bytes(served.kv_format, llm.plan.layout)
        err().print(f"{cost}; {RESET} begins anew, {QUIT} ends", style="dim")
    _converse(llm, llm.engine.sampling_defaults.params(**params), as_json)


def _converse(llm: LLM, params: SamplingParams, as_json: bool) -> None:
    messages: Messages = []
    turn = _print_json_turn if as_json else _print_turn
    for line in _read_messages(as_json):
        if line == RESET:
            messages.clear()
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = turn(llm, messages, params)
        except CapacityError as error:
            err().print(f"{error}\n{RESET} begins a new conversation", style="red", markup=False)
            # The question did not fit, and must not stand in the way of a shorter one.
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _read_messages(as_json: bool) -> Iterator[str]:
    """Yield messages until /quit or the end of input; empty lines are no messages."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 (importing it gives input() a history and editing)
    prompt = "> " if sys.stdin.isatty() and not as_json else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line == QUIT:
            return
        if line:
            yield line


def _print_turn(llm: LLM, messages: Messages, params: SamplingParams) -> str:
    """Print one answer as it comes; Ctrl-C ends it and keeps what there is."""
    pieces, text = llm.stream(llm.tokenizer.chat(messages), params), ""
    try:
        for piece in pieces:
            text += piece.text
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        # Closing frees the request's pages; what was written stays in the conversation.
        pieces.close()
        print(" (stopped)", end="")
    print()
    return text


def _print_json_turn(llm: LLM, messages: Messages, params: SamplingParams) -> str:
    output = llm.chat(messages, params)
    answer = output.completions[0]
    if answer.error:
        raise NibbleError(answer.error)
    message = {
        "message": {"role": "assistant", "content": answer.text},
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "answer_tokens": len(answer.token_ids),
    }
    # Flushed, because a program at the other end waits for the line before it goes on.
    print(json.dumps(message, ensure_ascii=False), flush=True)
    return answer.text
