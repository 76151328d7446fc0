"""LLM: the Python interface. Text in, text out, over one engine in this process."""

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
from nibble.cache.hot_buffer import HotBuffers
from nibble.cache.scales import KVScales
from nibble.config import SamplingParams, configured, sampling
from nibble.engine.build import build, measure_scales, run_prompt
from nibble.engine.engine import Engine
from nibble.engine.error_monitor import ErrorMonitor
from nibble.engine.request import Completion, Delta, Output, Request
from nibble.engine.tokenizer import Tokenizer, require_tokenizer
from nibble.errors import NibbleError, RequestError
from nibble.hardware import Hardware

Prompt = str | Sequence[int]
"""Text or token ids."""


class LLM:
    """A model that is being served in this process.

        llm = LLM("demo", kv_format="nvfp4")
        print(llm.generate("def fibonacci(n):", max_tokens=64).text)

    Args:
        model: local folder, hub name, or `demo`.
        calibrate: texts to measure KV scales with.
        options: fields of Config.

    Raises:
        ConfigError: the options cannot be had (Unsupported), or KV scales are missing (ScaleError).
        WeightError: there is no such model, or its weights cannot be loaded.
        CapacityError: the memory does not suffice.
    """

    def __init__(self, model: str, *, calibrate: Sequence[str] | None = None, **options: Any) -> None:
        self.config = configured(model=model, **options)
        texts = None if calibrate is None else as_texts(calibrate)
        self.engine, self._engine_plan = build(self.config, texts)

    @property
    def plan(self) -> Plan:
        """Return the routes, page size and packing."""
        return self._engine_plan.plan

    @property
    def hardware(self) -> Hardware:
        """Return the machine that it runs on."""
        return self._engine_plan.hardware

    @property
    def budget(self) -> MemoryPlan:
        """Return where the memory goes."""
        return self._engine_plan.budget

    @property
    def tier(self) -> HotBuffers | None:
        """Return the host tier, where `hisparse` asked for one; its `summary` says what it has done."""
        return self.engine.runner.tier

    @property
    def error_monitor(self) -> ErrorMonitor | None:
        """Return the error monitor, where `watch_fidelity` asked for one; its `summary` says what it measured."""
        return self.engine.runner.error_monitor

    @property
    def startup(self) -> Mapping[str, float]:
        """Return the seconds that the parts of the start took, by name."""
        return self.engine.startup.seconds

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise RequestError where the checkpoint has none."""
        return require_tokenizer(self.engine.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        **options: Any,
    ) -> Any:
        """Answer one prompt (-> Output) or many (-> list of Output, in order).

        Args:
            prompts: one or many; text or token ids.
            params: of all prompts.
            priority: of all prompts, or of each; a lower one is served first.
            progress: whether to show a bar; by default for many prompts on a terminal.
            options: fields of SamplingParams, in place of `params`.

        Raises:
            RequestError: a prompt or the options cannot be served; nothing is computed then.
            PromptTooLong: a prompt has too many tokens for the cache or the model.
            NibbleError: the engine failed in all answers; one answer's failure is its `error`.
        """
        # A list of integers is one prompt, and an empty list is no prompts at all.
        single = isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], str | Sequence))
        many: Sequence[Any] = [prompts] if single else prompts
        collectors: list[_Collector] = []
        try:
            for prompt, rank in zip(many, _priorities(priority, len(many)), strict=True):
                collectors.append(self._submit(prompt, _params(params, options), rank))
            self._run(collectors, progress if progress is not None else len(many) > 1 and sys.stderr.isatty())
        except BaseException:
            # After Ctrl-C too: requests that nobody waits for would keep their pages.
            for collector in collectors:
                self.engine.abort(collector.requests)
            raise
        outputs = [collector.output() for collector in collectors]
        errors = [answer.error for output in outputs for answer in output.completions]
        # One answer's failure is its own; where all failed, the engine is at fault.
        if errors and all(errors):
            raise NibbleError(str(errors[0]))
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """Return the pieces of an answer as they come. Closing or dropping the iterator aborts the request."""
        ids, _ = self._encode(prompt)
        return Stream(self.engine, ids, _params(params, options))

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None, **options: Any
    ) -> Output:
        """Answer a conversation by the model's chat template.

        Args:
            messages: with `role` and `content`.
            params: of the request.
            options: fields of SamplingParams, in place of `params`.
        """
        output: Output = self.generate(self.tokenizer.chat(messages), params, **options)
        return output

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Return teacher-forced logits [T, V] of a prompt, through the quantised cache, chunk by chunk."""
        ids, _ = self._encode(prompt)
        self.engine.check(ids, SamplingParams(), answer=False)
        with self.engine.exclusive():
            # run_prompt() goes past the scheduler, so no request may be open meanwhile.
            manager = self.engine.scheduler.manager
            return torch.cat(run_prompt(self.engine.runner, manager, ids, self.budget.step_tokens))

    def measure_scales(self, texts: Sequence[str], save: str | Path | None = None) -> KVScales:
        """Measure KV scales for every scheme on texts, and write them to the JSON file `save`, if given."""
        ids = [self.tokenizer.encode(text) for text in as_texts(texts)]
        with self.engine.exclusive():
            scales = measure_scales(self._engine_plan, self.engine.runner.model, ids, self.budget.step_tokens)
        if save is not None:
            kv_scales.save(scales, Path(save))
        return scales

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
        # The caller gets complete answers, so each is detokenized once, at its end.
        collector.requests = self.engine.submit(
            ids, params, collector.add, priority=priority, final_only=True
        )
        return collector

    def _run(self, collectors: Sequence[_Collector], progress: bool) -> None:
        if not progress:
            while any(collector.num_open for collector in collectors):
                self.engine.step()
            return
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task("generating", total=len(collectors))
            while num_open := sum(collector.num_open > 0 for collector in collectors):
                self.engine.step()
                bar.update(task, completed=len(collectors) - num_open)


class Stream(Iterator[Delta]):
    """The pieces of the answers to one prompt.

    Raises:
        NibbleError: from next(), where the engine fails.
    """

    def __init__(self, engine: Engine, ids: Sequence[int], params: SamplingParams) -> None:
        self._engine = engine
        self._pieces: deque[Delta] = deque()
        self._num_open = 0  # nothing to abort, should submit() raise
        self._requests = engine.submit(ids, params, self._pieces.append)
        self._num_open = params.n

    def __next__(self) -> Delta:
        if not self._num_open and not self._pieces:
            raise StopIteration
        while not self._pieces:
            self._engine.step()
        piece = self._pieces.popleft()
        self._num_open -= piece.finish_reason is not None
        # An exception ends the iterator, so the prompt's other answers have no taker any more.
        if piece.error:
            self.close()
            raise NibbleError(piece.error)
        return piece

    def close(self) -> None:
        """Abort what is unfinished; its pages are free at once."""
        self._num_open = 0
        self._engine.abort(self._requests)
        self._pieces.clear()

    def __del__(self) -> None:
        # An object whose __init__ failed is deleted too, and has no attributes.
        if getattr(self, "_num_open", 0):
            self.close()


class _Collector:
    """Gathers the pieces of the answers to one prompt."""

    requests: tuple[Request, ...]

    def __init__(self, ids: Sequence[int], text: str | None, params: SamplingParams) -> None:
        self.ids, self.prompt, self.params = ids, text, params
        self.num_open = params.n
        self._pieces: list[list[Delta]] = [[] for _ in range(params.n)]

    def add(self, piece: Delta) -> None:
        self._pieces[piece.index].append(piece)
        self.num_open -= piece.finish_reason is not None

    def output(self) -> Output:
        completions = tuple(self._completion(index, pieces) for index, pieces in enumerate(self._pieces))
        cached_tokens = self.requests[0].num_prefix_hit_tokens
        return Output(self.prompt, tuple(self.ids), completions, cached_tokens)

    def _completion(self, index: int, pieces: Sequence[Delta]) -> Completion:
        last = pieces[-1]
        logprobs = tuple(entry for piece in pieces for entry in piece.logprobs)
        return Completion(
            index=index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            finish_reason=last.finish_reason,
            logprobs=logprobs if self.params.logprobs is not None else None,
            error=last.error,
        )


def as_texts(texts: Sequence[str]) -> Sequence[str]:
    """Return a list of texts, of one where a single text was given."""
    # A text is itself a sequence of texts, of its characters, which is never meant.
    return [texts] if isinstance(texts, str) else texts


def _priorities(priority: int | Sequence[int], count: int) -> Sequence[int]:
    """Return one for each prompt, or raise RequestError."""
    priorities = [priority] * count if isinstance(priority, int) else list(priority)
    if len(priorities) != count or not all(isinstance(one, int) for one in priorities):
        raise RequestError(
            f"priority must be an integer, or one for each of the {count} prompts, not {priority!r}"
        )
    return priorities


def _params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if params is not None and options:
        raise RequestError("give either params or loose sampling options, not both")
    return params or sampling(**options)
