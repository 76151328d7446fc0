"""Throughput on a CPU: Nibble against Transformers' generate, same model, same dtype, same prompts, same process.

    python benchmarks/cpu_throughput.py [--model demo] [--report]

Eight requests at once against eight calls of generate one after the other, and one request against one call, for an
unquantised and for quantised caches. Runs are interleaved and repeated, the median counts. Gate before any timing:
teacher-forced logits over an exact cache agree with Transformers' to 1e-3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import markdown, write_report
from transformers import AutoModelForCausalLM

from nibble import LLM
from nibble.models.checkpoint import download

SCHEMES = ("bf16", "fp8_e4m3", "fp8_e5m2", "k8v4", "nvfp4", "nvfp4+kmean+rot", "fp4_mx16", "mxfp4")
REQUESTS, ANSWER = 8, 128


def prompts(llm: LLM, path: Path, length: int) -> list[list[int]]:
    """REQUESTS different prompts of about `length` tokens from the model's held-out text."""
    ids = llm.tokenizer.encode(path.read_text(encoding="utf-8")[: 12 * length * REQUESTS])
    return [ids[i * length : (i + 1) * length] for i in range(REQUESTS)]


def gate(llm: LLM, reference: torch.nn.Module, prompt: list[int]) -> float:
    """Largest difference of logits over an exact cache; raises SystemExit where it is too large."""
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    worst = float((llm.logits(prompt) - expected).abs().max())
    if worst > 1e-3:
        raise SystemExit(f"wrong logits ({worst:.1e}): no timing is worth anything")
    return worst


def peer(model: torch.nn.Module, asked: list[list[int]]) -> Callable[[], None]:
    def run() -> None:
        for prompt in asked:
            model.generate(  # type: ignore[operator]
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=0,
            )  # fmt: skip

    return run


def ours(llm: LLM, asked: list[list[int]]) -> Callable[[], None]:
    def run() -> None:
        llm.engine.scheduler.manager.clear()  # no prefix hits: the peer has none
        llm.generate(asked, max_tokens=ANSWER, ignore_eos=True, temperature=0, progress=False)

    return run


def tokens_per_second(runs: dict[str, Callable[[], None]], tokens: int, repeats: int) -> dict[str, float]:
    """Median tokens/s of each, interleaved, after one warm-up of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: tokens / statistics.median(found[1:]) for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--text", type=Path, help="text to take prompts from (default: the model's heldout.txt)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="write a dated report to benchmarks/reports")
    args = parser.parse_args()

    home = download(args.model)
    reference = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
    exact = LLM(args.model, kv_format="fp32", device="cpu")
    asked = prompts(exact, args.text or home / "heldout.txt", args.prompt_tokens)
    worst = gate(exact, reference, asked[0])
    engines = {
        scheme: LLM(args.model, kv_format=scheme, device="cpu", kv_transforms="none", kv_window=0)
        for scheme in SCHEMES
    }

    rows = []
    for count in (1, REQUESTS):
        runs = {"transformers": peer(reference, asked[:count])}
        runs |= {scheme: ours(llm, asked[:count]) for scheme, llm in engines.items()}
        speed = tokens_per_second(runs, count * ANSWER, args.repeats)
        base = speed["transformers"]
        rows += [(count, name, f"{found:.0f}", f"{found / base:.2f}x") for name, found in speed.items()]
    table = markdown(("requests", "cache", "tokens/s", "against Transformers"), rows)
    note = (
        f"{args.model}: prompts of {args.prompt_tokens} tokens, answers of {ANSWER}, greedy, float32, "
        f"{torch.get_num_threads()} threads, median of {args.repeats}; the peer answers requests one after the other. "
        f"Gate: logits within {worst:.1e} of Transformers'."
    )
    print(table, note, sep="\n\n")
    if args.report:
        print(
            write_report(
                "cpu_throughput", f"{table}\n\n{note}\n", "python benchmarks/cpu_throughput.py --report"
            )
        )


if __name__ == "__main__":
    main()
