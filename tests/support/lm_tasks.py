"""Small tasks for lm-eval on local files, and plain Transformers in float32 as lm-eval sees models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoModelForCausalLM, AutoTokenizer

CHOICES = [
    {"question": f"def {name}(values):\n    return", "choices": [" sum(values)", " max(values)", " len(values) "], "label": label}
    for name, label in (("total", 0), ("largest", 1), ("count", 2), ("add", 0), ("top", 1), ("size", 2))
]  # fmt: skip
GENERATIONS = [
    {"text": f"for {name} in range(10):", "answer": "print"} for name in ("i", "j", "item", "x", "é")
]
ROLLING = [{"text": f"import {name}\n" * 3} for name in ("os", "sys")]
TASKS: dict[str, dict[str, Any]] = {
    "local_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "label", "doc_to_choice": "{{choices}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_generate": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n\n", "zz"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [{"name": "word", "filter": [{"function": "regex", "regex_pattern": "([a-z]+)"}, {"function": "take_first"}]}],
    },
    "local_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}  # fmt: skip
DOCUMENTS = {"local_choice": CHOICES, "local_generate": GENERATIONS, "local_rolling": ROLLING}


def save_tasks(folder: Path) -> Path:
    """Writes the tasks' files."""
    folder.mkdir()
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, DOCUMENTS[name])))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump({"task": name, "test_split": "test", **source, **task})
        )
    return folder


class PlainTransformers(TemplateLM):  # type: ignore[misc]
    """A model with nothing of Nibble in it: one forward pass for each text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        return "plain"

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: Any = None, **kwargs: Any) -> list[int]:
        return list(self.tokenizer.encode(string))

    def _logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        results = []
        for _, context, continuation in requests:
            rows = self._logprobs([*context, *continuation])[len(context) - 1 : -1]
            chosen = rows[range(len(continuation)), continuation]
            results.append((float(chosen.sum()), rows.argmax(-1).tolist() == list(continuation)))
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        sums = []
        for request in requests:
            pairs = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, 1000, 1)
            scores = self._loglikelihood_tokens([(None, *make_disjoint_window(pair)) for pair in pairs])
            sums.append(sum(value for value, _ in scores))
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, text: str, options: dict[str, Any]) -> str:
        ids = prompt = self.tok_encode(text)
        while len(ids) < len(prompt) + options["max_gen_toks"]:
            token = int(self._logprobs(ids)[-1].argmax())
            if token == self.eot_token_id:
                break
            ids = [*ids, token]
        answer = self.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        for stop in options["until"]:
            answer = answer.split(stop)[0]
        return answer
