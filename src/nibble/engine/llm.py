"""LLM: the Python interface. Text in, text out, over one engine in this process.

Owns LLM. Everything it does is submit, step and collect; must not know how steps are made.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.plan import Plan
from nibble.cache import scales as kv_scales
from nibble.cache.offload.hot_buffer import HotBuffers
from nibble.cache.scales import KVScales
from nibble.config import SamplingParams, configured, sampling
from nibble.engine.build import build, measure_scales, run_prompt
from nibble.engine.engine import Engine, RequestHandle
from nibble.engine.error_monitor import ErrorMonitor
from nibble.engine.outputs import Completion, Delta, Logprob, Output
from nibble.engine.tokenizer import Tokenizer, required
from nibble.errors import NibbleError, RequestError
from nibble.hardware import Hardware

Prompt = str | Sequence[int]


class LLM:
    """A model that is being served in this process.

        llm = LLM("demo", kv_format="nvfp4")
        print(llm.generate("def fibonacci(n):", max_tokens=64).text)

    model: local folder, hub name, or `demo`. calibrate: texts to measure KV scales with. options: fields of Config.
    Raises ConfigError (Unsupported, ScaleError), WeightError or CapacityError before or while the weights load.
    """

    def __init__(self, model: str, *, calibrate: Sequence[str] | None = None, **options: Any) -> None:
        self.config = configured(model=model, **options)
        self.engine, self._made = build(self.config, None if calibrate is None else as_texts(calibrate))

    @property
    def plan(self) -> Plan:
        """The routes, page size and packing that were chosen."""
        return self._made.plan

    @property
    def hardware(self) -> Hardware:
        """The machine that it runs on."""
        return self._made.hardware

    @property
    def budget(self) -> MemoryPlan:
        """Where the memory goes."""
        return self._made.budget

    @property
    def tier(self) -> HotBuffers | None:
        """The host tier, where `hisparse` asked for one: what it has done (`words`), its counts."""
        return self.engine.runner.tier

    @property
    def error_monitor(self) -> ErrorMonitor | None:
        """The fidelity watch, where `watch_fidelity` asked for one: what it has found (`words`), by layer."""
        return self.engine.runner.error_monitor

    @property
    def startup(self) -> Mapping[str, float]:
        """Seconds that the parts of the start took, by name."""
        return self.engine.startup.seconds

    @property
    def tokenizer(self) -> Tokenizer:
        return required(self.engine.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        **options: Any,
    ) -> Any:
        """Answers one prompt (-> Output) or many (-> list of Output, in order).

        A prompt is text or token ids. params, or loose options of SamplingParams, hold for all. priority: of all, or of
        each; a lower one is served before. progress: show a bar; by default for many prompts on a terminal. A prompt
        that cannot be served raises RequestError or PromptTooLong before any is computed. Where the engine fails, an
        answer's `error` says so; where it fails for all of them, NibbleError is raised.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], str | Sequence))
        many: Sequence[Any] = [prompts] if single else prompts
        priorities = _priorities(priority, len(many))
        collectors: list[_Collector] = []
        try:
            for prompt, own in zip(many, priorities, strict=True):
                collectors.append(self._submit(prompt, _params(params, options), own))
            self._run(collectors, progress if progress is not None else len(many) > 1 and sys.stderr.isatty())
        except BaseException:
            for collector in collectors:
                self.engine.abort(collector.ticket)
            raise
        outputs = [collector.output() for collector in collectors]
        answers = [answer for output in outputs for answer in output.completions]
        if answers and all(answer.error for answer in answers):
            raise NibbleError(str(answers[0].error))
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """The pieces of an answer as they are made. Closing or dropping the iterator aborts the request."""
        ids, _ = self._encode(prompt)
        return Stream(self.engine, ids, _params(params, options))

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
        self.engine.check(ids, SamplingParams(), answer=False)
        with self.engine.exclusive():
            manager = self.engine.scheduler.manager
            return torch.cat(run_prompt(self.engine.runner, manager, ids, self.budget.step_tokens))

    def measure_scales(self, texts: Sequence[str], save: str | Path | None = None) -> KVScales:
        """KV scales for every scheme, measured on texts; written to a JSON file if `save` names one."""
        ids = [self.tokenizer.encode(text) for text in as_texts(texts)]
        with self.engine.exclusive():
            found = measure_scales(self._made, self.engine.runner.model, ids, self.budget.step_tokens)
        if save is not None:
            kv_scales.save(found, Path(save))
        return found

    def _encode(self, prompt: Prompt) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt), prompt
        try:
            return [operator.index(token) for token in prompt], None
        except TypeError as error:
            raise RequestError(f"a prompt is text or a list of token ids ({error})") from error

    def _submit(self, prompt: Prompt, params: SamplingParams, priority: int) -> _Collector:
        ids, text = self._encode(prompt)
        collector = _Collector(ids, text, params)
        collector.ticket = self.engine.submit(ids, params, collector.take, priority=priority, whole=True)
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


class Stream(Iterator[Delta]):
    """The pieces of the answers to one prompt. Raises NibbleError where the engine fails."""

    def __init__(self, engine: Engine, ids: Sequence[int], params: SamplingParams) -> None:
        self._engine = engine
        self._pieces: deque[Delta] = deque()
        self._open = 0  # nothing to abort, should submit() raise
        self._ticket = engine.submit(ids, params, self._pieces.append)
        self._open = params.n

    def __next__(self) -> Delta:
        if not self._open and not self._pieces:
            raise StopIteration
        while not self._pieces:
            self._engine.step()
        piece = self._pieces.popleft()
        self._open -= piece.finish_reason is not None
        if piece.error:
            self.close()
            raise NibbleError(piece.error)
        return piece

    def close(self) -> None:
        """Aborts what is unfinished; its pages are free at once."""
        self._open = 0
        self._engine.abort(self._ticket)
        self._pieces.clear()

    def __del__(self) -> None:
        if getattr(self, "_open", 0):
            self.close()


class _Collector:
    """Gathers the pieces of the answers to one prompt."""

    ticket: RequestHandle

    def __init__(self, ids: Sequence[int], text: str | None, params: SamplingParams) -> None:
        self.ids, self.prompt, self.params = ids, text, params
        self.open = params.n
        self._pieces: list[list[Delta]] = [[] for _ in range(params.n)]

    def take(self, piece: Delta) -> None:
        self._pieces[piece.index].append(piece)
        self.open -= piece.finish_reason is not None

    def output(self) -> Output:
        completions = tuple(self._completion(index, pieces) for index, pieces in enumerate(self._pieces))
        return Output(
            self.prompt, tuple(self.ids), completions, self.ticket.requests[0].num_prefix_hit_tokens
        )

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


def as_texts(texts: Sequence[str]) -> Sequence[str]:
    """A single text, given where several may be, is one text and not one for each of its characters."""
    return [texts] if isinstance(texts, str) else texts


def _priorities(given: int | Sequence[int], count: int) -> Sequence[int]:
    """One for each prompt; raises RequestError."""
    found = [given] * count if isinstance(given, int) else list(given)
    if len(found) != count or not all(isinstance(one, int) for one in found):
        raise RequestError(
            f"priority must be an integer, or one for each of the {count} prompts, not {given!r}"
        )
    return found


def _params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if params is not None and options:
        raise RequestError("give either params or loose sampling options, not both")
    return params or sampling(**options)
