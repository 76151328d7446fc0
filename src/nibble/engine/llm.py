"""LLM: the Python interface. Text in, text out, over one engine in this process."""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

import torch

from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.plan import Plan
from nibble.cache import scales as kv_scales
from nibble.cache.hot_buffer import HotBuffers
from nibble.cache.scales import KVScales
from nibble.config import SamplingParams, configured
from nibble.engine.answers import Collector, Encoded, encode, priorities_of, sampling_params_of
from nibble.engine.build import build, run_prompt
from nibble.engine.calibration import CALIBRATION_TOKENS, measure, require_enough
from nibble.engine.certificate import Certificate
from nibble.engine.engine import Engine
from nibble.engine.error_monitor import ErrorMonitor
from nibble.engine.plan import PrintablePlan
from nibble.engine.prompts import (
    Message,
    ParsedPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    parse_conversations,
    parse_prompt,
    parse_prompts,
)
from nibble.engine.ranks import all_ranks
from nibble.engine.request import Delta, Output
from nibble.engine.scoring import Score, ScoringPrompt, encode_pair, score_of, scoring_prompt
from nibble.engine.speculative import Speculation
from nibble.engine.tokenizer import Tokenizer, require_tokenizer
from nibble.errors import NibbleError, RequestError, ScaleError
from nibble.files import check_writable
from nibble.hardware import Hardware
from nibble.options import ConfigOptions, SamplingOptions


class LLM:
    """A model that is being served in this process.

        with LLM("demo", kv_format="nvfp4") as llm:
            print(llm.generate("def fibonacci(n):", max_tokens=64).text)

    Outside of `with`, close() gives the memory back.

    Args:
        model: local folder, hub name, or `demo`.
        calibrate: texts to measure KV scales with, where those of the checkpoint or of a built-in text will not do.
        options: fields of Config.

    Raises:
        ConfigError: the options cannot be had (Unsupported), or KV scales are missing (ScaleError).
        WeightError: there is no such model, or its weights cannot be loaded.
        CapacityError: the memory does not suffice.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        calibrate: str | Sequence[str] | None = None,
        **options: Unpack[ConfigOptions],
    ) -> None:
        self._engine: Engine | None = None
        self.config = configured(model=model, **options)
        texts = None if calibrate is None else as_texts(calibrate)
        self._engine, self._engine_plan = build(self.config, texts)
        self._plan = PrintablePlan.of(self._engine_plan)

    def __repr__(self) -> str:
        config, plan = self.config, self._engine_plan
        state = f"{plan.budget.tokens:,} tokens of cache" if self._engine else "closed"
        return f"<LLM {config.model}: {config.kv_format} on {plan.hardware.name}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give all memory back, on the device too; open requests end with an error. Closing twice does no harm."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        engine.close()
        del engine
        # Modules and hooks refer to one another, and a cache of free blocks is of no use to other programs.
        gc.collect()
        if torch.cuda.is_initialized():
            # Matrix products keep a workspace for each stream that they ran on.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def __del__(self) -> None:
        # An object whose __init__ failed is deleted too. At the end of the process the system takes all back.
        engine = getattr(self, "_engine", None)
        # Modules may be gone by then.
        if engine is None or sys is None or sys.is_finalizing():
            return
        if engine.ranks or engine.runner.device.type == "cuda":
            with suppress(Exception):
                self.close()

    @property
    def is_closed(self) -> bool:
        """Return whether close() was called."""
        return self._engine is None

    @property
    def engine(self) -> Engine:
        """Return the engine; raise NibbleError once the LLM is closed."""
        if self._engine is None:
            raise NibbleError(f"this LLM is closed; make a new one: LLM({self.config.model!r}, ...)")
        return self._engine

    @property
    def plan(self) -> Plan:
        """Return the routes, page size and packing; printed, it is what `nibble plan` says."""
        return self._plan

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
    def speculation(self) -> Speculation | None:
        """Return who drafts, where `speculative` asked for it; its `summary` says how much was accepted."""
        return self.engine.speculation

    @property
    def certificate(self) -> Certificate | None:
        """Return what `nibble certify` measured of this very cache, if it did; its `line` is a summary."""
        return self.engine.startup.certificate

    @property
    def startup(self) -> Mapping[str, float]:
        """Return the seconds that the parts of the start took, by name."""
        return self.engine.startup.seconds

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise RequestError where the checkpoint has none."""
        return require_tokenizer(self.engine.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return how requests are sampled that say nothing: by the model's generation_config.json."""
        return self.engine.sampling_defaults.params()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is itself a sequence of texts, to type checkers
        self,
        prompts: str | Sequence[int] | TextPrompt | TokensPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Output: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Output]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Output | list[Output]:
        """Answer one prompt (-> Output) or many (-> list of Output, in order).

        Args:
            prompts: one or many; text or token ids, bare or as vLLM's `{"prompt": ...}`, `{"prompt_token_ids": ...}`.
            sampling_params: of all prompts, or of each.
            priority: of all prompts, or of each; a lower one is served first.
            progress: whether to show a bar; by default for many prompts on a terminal.
            options: fields of SamplingParams, in place of `sampling_params`; the model's defaults for the others.

        Raises:
            RequestError: a prompt or the options cannot be served; nothing is computed then.
            PromptTooLong: a prompt has too many tokens for the cache or the model.
            NibbleError: the engine failed in all answers; one answer's failure is its `error`.
        """
        parsed, single = parse_prompts(prompts)
        encoded = [encode(self.engine, prompt) for prompt in parsed]
        outputs = self._generate(encoded, self._params(sampling_params, options, encoded), priority, progress)
        return outputs[0] if single else outputs

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Output: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Output]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Output | list[Output]:
        """Answer a conversation (-> Output) or many (-> list of Output) by the model's chat template.

        Args:
            messages: of one conversation, or of each; with `role` and `content`.
            sampling_params: of all conversations, or of each.
            tools: functions that the model may call, in OpenAI's form; calls are in the answer's text.
            chat_template_kwargs: for the template.
            progress: whether to show a bar; by default for many conversations on a terminal.
            options: fields of SamplingParams, in place of `sampling_params`; the model's defaults for the others.

        Raises:
            RequestError: there is no template, or the messages or options cannot be served.
        """
        conversations, single = parse_conversations(messages)
        encoded: list[Encoded] = [
            (self.tokenizer.chat(conversation, tools, **chat_template_kwargs or {}), None)
            for conversation in conversations
        ]
        outputs = self._generate(encoded, self._params(sampling_params, options, encoded), 0, progress)
        return outputs[0] if single else outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Return the pieces of an answer as they come. Closing or dropping the iterator aborts the request."""
        encoded = encode(self.engine, parse_prompt(prompt))
        (params,) = self._params(sampling_params, options, [encoded])
        return Stream(self, encoded[0], params)

    @overload
    def score(  # type: ignore[overload-overlap]  # as of generate()
        self,
        prompts: str | Sequence[int] | TextPrompt | TokensPrompt,
        continuations: Prompt | None = None,
        *,
        progress: bool | None = None,
    ) -> Score: ...
    @overload
    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Prompt] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Score]: ...
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt] | None = None,
        *,
        progress: bool | None = None,
    ) -> Score | list[Score]:
        """Return how likely texts are: one (-> Score) or many (-> list of Score, in order). Nothing is generated.

        Prompts are read from the prefix cache, continuations never, so answers to one question cost little more than
        one. As texts, both are tokenised together.

        Args:
            prompts: one or many; text or token ids.
            continuations: what is scored after each prompt; without, prompts themselves are, but for their first token.
            progress: whether to show a bar; by default for many prompts on a terminal.

        Raises:
            RequestError: a prompt cannot be served, or there is nothing to score.
            PromptTooLong: prompt and continuation have too many tokens for the cache or the model.
            NibbleError: the engine failed.
        """
        parsed, single = parse_prompts(prompts)
        after: Sequence[ParsedPrompt | None] = [None] * len(parsed)
        if continuations is not None:
            after = [parse_prompt(continuations)] if single else parse_prompts(continuations)[0]
        if len(after) != len(parsed):
            raise RequestError(f"{len(parsed)} prompts need as many continuations, not {len(after)}")
        pairs = [self._scoring_prompt(*pair) for pair in zip(parsed, after, strict=True)]
        encoded: list[Encoded] = [(pair.token_ids, None) for pair in pairs]
        outputs = self._generate(encoded, [pair.params() for pair in pairs], 0, progress)
        if error := next((one.completions[0].error for one in outputs if one.completions[0].error), None):
            raise NibbleError(error)
        scores = [score_of(output, pair.start) for output, pair in zip(outputs, pairs, strict=True)]
        return scores[0] if single else scores

    def _scoring_prompt(self, prompt: ParsedPrompt, continuation: ParsedPrompt | None) -> ScoringPrompt:
        if continuation is None:
            return scoring_prompt(encode(self.engine, prompt)[0], None)
        if prompt.token_ids is None and continuation.token_ids is None:
            pair = encode_pair(self.tokenizer.encode, prompt.text or "", continuation.text or "")
            return scoring_prompt(*pair)
        return scoring_prompt(encode(self.engine, prompt)[0], encode(self.engine, continuation)[0])

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Requests that run keep their pages, which are free once they end."""
        self.engine.reset_prefix_cache()

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Return teacher-forced logits [T, V] of a prompt, through the quantised cache, chunk by chunk."""
        ids, _ = encode(self.engine, parse_prompt(prompt))
        self.engine.check(ids, SamplingParams(), answer=False)
        with self.engine.exclusive():
            # run_prompt() goes past the scheduler, so no request may be open meanwhile.
            manager = self.engine.scheduler.manager
            return torch.cat(run_prompt(self.engine.runner, manager, ids, self.budget.step_tokens))

    def measure_scales(
        self,
        texts: Sequence[str],
        save: str | Path | None = None,
        *,
        max_tokens: int = CALIBRATION_TOKENS,
    ) -> KVScales:
        """Measure KV scales for every scheme on texts.

        Args:
            texts: one or many.
            save: a JSON file to write them to.
            max_tokens: how many tokens of the texts are used at most.

        Raises:
            ScaleError: the texts are none, or too short.
            ConfigError: the file cannot be written; nothing was measured then.
        """
        if save is not None:
            save = check_writable(save, "KV scales", kv_scales.file_size(self.plan.layout))
        ids = [self.tokenizer.encode(text) for text in as_texts(texts)]
        # Before other ranks begin, which end with an error of theirs.
        require_enough(ids, max_tokens)
        engine, name = self.engine, "nibble.engine.calibration:measure"
        with engine.exclusive(), all_ranks(engine.ranks, name, ids, max_tokens) as rank:
            scales = measure(self._engine_plan, engine.runner.model, rank, ids, max_tokens)
        if save is not None:
            kv_scales.save(scales, Path(save))
        return scales

    def _params(
        self,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
        prompts: Sequence[Encoded],
    ) -> list[SamplingParams]:
        """Return the parameters of each prompt; raise RequestError."""
        return sampling_params_of(self.engine, sampling_params, options, len(prompts))

    def _generate(
        self,
        prompts: Sequence[Encoded],
        params: Sequence[SamplingParams],
        priority: int | Sequence[int],
        progress: bool | None,
    ) -> list[Output]:
        collectors: list[Collector] = []
        try:
            priorities = priorities_of(priority, len(prompts))
            for (ids, text), one, rank in zip(prompts, params, priorities, strict=True):
                collector = Collector(text, one)
                # The caller gets complete answers, so each is detokenized once, at its end.
                collector.requests = self.engine.submit(
                    ids, one, collector.add, priority=rank, final_only=True
                )
                collectors.append(collector)
            self._run(
                collectors, progress if progress is not None else len(prompts) > 1 and sys.stderr.isatty()
            )
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
        return outputs

    def _run(self, collectors: Sequence[Collector], progress: bool) -> None:
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

    def __init__(self, llm: LLM, ids: Sequence[int], params: SamplingParams) -> None:
        # And not its engine, which a stream that is left over would keep beyond close().
        self._llm = llm
        self._pieces: deque[Delta] = deque()
        self._num_open = 0  # nothing to abort, should submit() raise
        self._requests = llm.engine.submit(ids, params, self._pieces.append)
        self._num_open = params.n

    def __next__(self) -> Delta:
        if not self._num_open and not self._pieces:
            raise StopIteration
        while not self._pieces:
            self._llm.engine.step()
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
        if not self._llm.is_closed:
            self._llm.engine.abort(self._requests)
        self._pieces.clear()

    def __del__(self) -> None:
        # An object whose __init__ failed is deleted too, and has no attributes.
        if getattr(self, "_num_open", 0):
            self.close()


def as_texts(texts: str | Iterable[str]) -> Sequence[str]:
    """Return a list of texts, of one where a single text was given; raise ScaleError for what is no text."""
    # A text is itself a sequence of texts, of its characters, which is never meant.
    many = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
    for text in many:
        if not isinstance(text, str):
            raise ScaleError(f"scales are measured on a text or a list of texts, not on {text!r}")
    return many
