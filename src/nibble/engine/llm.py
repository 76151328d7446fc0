"""LLM: the Python interface. Text in, text out, over one engine in this process.

Owns LLM. Everything it does is submit, step and collect; must not know how steps are made.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nibble.attention.budget import Budget
from nibble.attention.plan import Plan
from nibble.cache import scales as kv_scales
from nibble.cache.scales import KVScales
from nibble.config import Config, SamplingParams, sampling
from nibble.engine.build import build, measure, run_prompt
from nibble.engine.engine import Ticket
from nibble.engine.outputs import Completion, Delta, Logprob, Output
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import NibbleError, RequestError

Prompt = str | Sequence[int]


class LLM:
    """A model that is being served in this process.

        llm = LLM("demo", kv_format="nvfp4")
        print(llm.generate("def fibonacci(n):", max_tokens=64).text)

    model: local folder, hub name, or `demo`. calibrate: texts to measure KV scales with. options: fields of Config.
    Raises ConfigError (Unsupported, ScaleError), WeightError or CapacityError before or while the weights load.
    """

    def __init__(self, model: str, *, calibrate: Sequence[str] | None = None, **options: Any) -> None:
        self.config = Config(model=model, **options)
        self.engine, self._made = build(self.config, calibrate)

    @property
    def plan(self) -> Plan:
        """The routes, page size and packing that were chosen."""
        return self._made.plan

    @property
    def budget(self) -> Budget:
        """Where the memory goes."""
        return self._made.budget

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer: give token ids instead of text")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **options: Any,
    ) -> Any:
        """Answers one prompt (-> Output) or many (-> list of Output, in order).

        A prompt is text or token ids. params, or loose options of SamplingParams, hold for all. progress: show a
        bar; by default for many prompts on a terminal. A prompt that cannot be served raises RequestError or
        PromptTooLong before any is computed.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        many: Sequence[Any] = [prompts] if single else prompts
        collectors: list[_Collector] = []
        try:
            for prompt in many:
                collectors.append(self._submit(prompt, _params(params, options)))
            self._run(collectors, progress if progress is not None else len(many) > 1 and sys.stderr.isatty())
        except BaseException:
            for collector in collectors:
                self.engine.abort(collector.ticket)
            raise
        outputs = [collector.output() for collector in collectors]
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        """The pieces of an answer as they are made. Closing the iterator aborts the request."""
        pieces: deque[Delta] = deque()
        ids, _ = self._encode(prompt)
        chosen = _params(params, options)
        ticket = self.engine.submit(ids, chosen, pieces.append)
        return self._pieces(ticket, pieces, chosen.n)

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None, **options: Any
    ) -> Output:
        """Answers a conversation: messages with `role` and `content`, by the model's chat template."""
        found = self.generate(self.tokenizer.chat(messages), params, **options)
        assert isinstance(found, Output)
        return found

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Teacher-forced logits [T, V] of a prompt, through the quantised cache, chunk by chunk."""
        ids, _ = self._encode(prompt)
        if self.engine.busy:
            raise RequestError("logits() needs the engine idle: it uses the whole cache")
        self.engine.scheduler.manager.clear()
        return torch.cat(run_prompt(self.engine.runner, ids, self.config.token_budget))

    def measure_scales(self, texts: Sequence[str], save: str | Path | None = None) -> KVScales:
        """KV scales for every scheme, measured on texts; written to a JSON file if `save` names one."""
        ids = [self.tokenizer.encode(text) for text in texts]
        found = measure(self._made, self.engine.runner.model, ids)
        if save is not None:
            kv_scales.save(found, Path(save))
        return found

    def _encode(self, prompt: Prompt) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt), prompt
        return list(prompt), None

    def _submit(self, prompt: Prompt, params: SamplingParams) -> _Collector:
        ids, text = self._encode(prompt)
        collector = _Collector(ids, text, params)
        collector.ticket = self.engine.submit(ids, params, collector.take)
        return collector

    def _run(self, collectors: Sequence[_Collector], progress: bool) -> None:
        if not progress:
            while any(collector.open for collector in collectors):
                self.engine.step()
            return
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task("generating", total=len(collectors))
            while left := sum(collector.open > 0 for collector in collectors):
                self.engine.step()
                bar.update(task, completed=len(collectors) - left)

    def _pieces(self, ticket: Ticket, pieces: deque[Delta], answers: int) -> Iterator[Delta]:
        try:
            while answers:
                while not pieces:
                    self.engine.step()
                piece = pieces.popleft()
                answers -= piece.finish_reason is not None
                if piece.error:
                    raise NibbleError(piece.error)
                yield piece
        finally:
            self.engine.abort(ticket)


class _Collector:
    """Gathers the pieces of the answers to one prompt."""

    ticket: Ticket

    def __init__(self, ids: Sequence[int], text: str | None, params: SamplingParams) -> None:
        self.ids, self.prompt, self.params = ids, text, params
        self.open = params.n
        self._pieces: list[list[Delta]] = [[] for _ in range(params.n)]

    def take(self, piece: Delta) -> None:
        self._pieces[piece.index].append(piece)
        self.open -= piece.finish_reason is not None

    def output(self) -> Output:
        completions = tuple(self._completion(index, pieces) for index, pieces in enumerate(self._pieces))
        return Output(self.prompt, tuple(self.ids), completions, self.ticket.requests[0].cached)

    def _completion(self, index: int, pieces: Sequence[Delta]) -> Completion:
        last = pieces[-1]
        logprobs: tuple[Logprob, ...] = tuple(entry for piece in pieces for entry in piece.logprobs)
        return Completion(
            index=index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            finish_reason=last.finish_reason,
            logprobs=logprobs if self.params.logprobs is not None else None,
            error=last.error,
        )


def _params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if params is not None and options:
        raise RequestError("give either params or loose sampling options, not both")
    return params or sampling(**options)
