"""`nibble chat`: a conversation in the terminal, by the model's chat template."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nibble.cli.exits import JsonOption
from nibble.cli.options import Options, takes
from nibble.cli.terminal import ModelArgument, err, quiet, say_ready, summary_of_bytes
from nibble.config import Config, SamplingParams, sampling
from nibble.errors import CapacityError, NibbleError

if TYPE_CHECKING:
    from nibble.engine.llm import LLM

Messages = list[dict[str, str]]
RESET, QUIT = "/reset", "/quit"


@takes("params", SamplingParams, "Sampling", without=("n", "logprobs"))
@takes("config", Config, "Model and cache", without=("model", "seed"))
def chat(
    model: ModelArgument = "demo", as_json: JsonOption = False, *, config: Options, params: Options
) -> None:
    """Talk with a model.

    The conversation so far stays in the KV cache, so a turn computes its own tokens only. `/reset` begins
    anew, `/quit` (or end of input) ends. Ctrl-C stops an answer that is being written. With --json, every
    line of standard input is a message, and every answer a line of JSON.
    """
    from nibble.engine.llm import LLM

    # Both sets of options are checked before the weights load.
    sampling_params = sampling(**params)
    served = Config(model=model, **config)
    quiet(model)
    with err().status(f"loading {model} with a {served.kv_format} cache"):
        llm = LLM(**{name: getattr(served, name) for name in Config.__slots__})
        llm.tokenizer.chat(
            [{"role": "user", "content": "hello"}]
        )  # a model without a template is told at once
    say_ready(llm)
    if not as_json:
        err().print(
            f"{summary_of_bytes(served.kv_format, llm.plan.layout)}; {RESET} begins anew, {QUIT} ends",
            style="dim",
        )
    _converse(llm, sampling_params, as_json)


EXAMPLES = """
nibble chat
nibble chat demo --kv-format nvfp4 --temperature 0.7
printf 'hello\\nwho are you?\\n' | nibble chat --json
"""


def _converse(llm: LLM, params: SamplingParams, as_json: bool) -> None:
    messages: Messages = []
    for line in _lines(as_json):
        if line == RESET:
            messages.clear()
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _json_turn(llm, messages, params) if as_json else _turn(llm, messages, params)
        except CapacityError as error:
            err().print(f"{error}\n{RESET} begins a new conversation", style="red", markup=False)
            # The question did not fit, and must not stand in the way of a shorter one.
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _lines(as_json: bool) -> Iterator[str]:
    """Messages until /quit or the end of input; empty lines are no messages."""
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


def _turn(llm: LLM, messages: Messages, params: SamplingParams) -> str:
    """Streams one answer; Ctrl-C ends it and keeps what there is."""
    pieces, text = llm.stream(llm.tokenizer.chat(messages), params), ""
    try:
        for piece in pieces:
            text += piece.text
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        # Closing frees the request's pages; what was written stays in the conversation.
        pieces.close()
        sys.stdout.write(" (stopped)")
    sys.stdout.write("\n")
    return text


def _json_turn(llm: LLM, messages: Messages, params: SamplingParams) -> str:
    import json

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
