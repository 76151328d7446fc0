"""An LLM as lm-eval sees models: log-likelihoods and generations, tokenised as its `hf` model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nibble.config import SamplingParams, sampling
from nibble.errors import ConfigError

if TYPE_CHECKING:
    from nibble.engine.llm import LLM

BATCH = 512
"""Requests that the engine gets at a time: each costs memory by its length while it waits."""
MAX_GEN_TOKS = 256
"""Tokens of an answer whose task names no bound, as with lm-eval's other models."""
IGNORED = {"do_sample", "num_beams", "use_cache", "pad_token_id"}
"""Arguments of generate() in Transformers that tasks set, and that say nothing here."""


class NibbleLM(TemplateLM):  # type: ignore[misc]
    """The model.

    Args:
        llm: what answers.
        advance: is called with what is being done.
    """

    def __init__(self, llm: LLM, advance: Callable[[str], None] = lambda what: None) -> None:
        super().__init__()
        self._llm, self._advance = llm, advance
        self._max_length = llm.engine.scheduler.limit
        self._bos = llm.tokenizer.info()["bos_token"]

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text, or begins it where there is no such token."""
        token = self._llm.tokenizer.prefix_token
        if token is None:
            raise ConfigError("this task scores texts without a prompt, and the tokenizer has no first token")
        return token

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which lm-eval would keep requests."""
        return self._llm.config.model.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text.

        Args:
            string: the text.
            add_special_tokens: None: as the tokenizer does, but no second one where the text begins with it.
            kwargs: what other models take; nothing here.
        """
        if add_special_tokens is None:
            add_special_tokens = not (self._bos and string.startswith(self._bos))
        return self._llm.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation.

        Args:
            chat_history: its messages.
            add_generation_prompt: whether an answer follows; else the last message goes on.
        """
        return self._llm.tokenizer.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return, for pairs of texts, how likely the second is after the first, and whether greedy decoding gives it.

        Args:
            requests: lm-eval's instances.
            disable_tqdm: show no bar of lm-eval's.
        """
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Return how likely whole texts are; long ones in windows, each token once.

        Args:
            requests: lm-eval's instances.
            disable_tqdm: show no bar of lm-eval's.
        """
        windows: list[list[tuple[None, list[int], list[int]]]] = []
        for request in requests:
            # One less than the limit: a window's context is one token more.
            tokens, size = self.tok_encode(request.args[0]), self._max_length - 1
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, size, 1)
            windows.append([(None, *make_disjoint_window(pair)) for pair in pairs])
        values = iter(self._loglikelihood_tokens([pair for text in windows for pair in text]))
        return [sum(next(values)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return answers, each up to its stop strings.

        Args:
            requests: lm-eval's instances.
            disable_tqdm: show no bar of lm-eval's.
        """
        answers: list[str] = []
        for part in self._batches("answers", requests):
            params = [self._params(request.args[1]) for request in part]
            prompts = [
                self.tok_encode(request.args[0])[-(self._max_length - one.max_tokens) :]
                for request, one in zip(part, params, strict=True)
            ]
            outputs = self._llm.generate(prompts, params, progress=False)
            answers += [output.text for output in outputs]
        return answers

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        values = dict(normalize_gen_kwargs(dict(options), MAX_GEN_TOKS))
        max_tokens, stop = values.pop("max_gen_toks"), values.pop("until")
        if max_tokens >= self._max_length:
            raise ConfigError(
                f"this task's answers have up to {max_tokens} tokens, and there is room for {self._max_length}"
            )
        rest = {name: value for name, value in values.items() if name not in IGNORED}
        return sampling(max_tokens=max_tokens, stop=tuple(filter(None, stop)), **rest)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        for part in self._batches("log-likelihoods", requests):
            prompts, continuations = [], []
            for _, context, continuation in part:
                # From the left, as lm-eval does.
                excess = max(len(context) + len(continuation) - self._max_length, 0)
                prompts.append(context[excess:])
                continuations.append(continuation)
            scores = self._llm.score(prompts, continuations, progress=False)
            results += [(score.logprob, score.is_greedy) for score in scores]
        return results

    def _batches(self, what: str, requests: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Yield some requests at a time."""
        for start in range(0, len(requests), BATCH):
            self._advance(f"tasks: {what} {start:,} of {len(requests):,}")
            yield requests[start : start + BATCH]
