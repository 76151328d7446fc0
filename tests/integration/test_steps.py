"""The parts of a step: parcels, page tables, draws on the device, what a start checks and what a budget foresees."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nibble import LLM, CapacityError
from nibble.attention.planner.memory import MIN_RESERVE_LEFT, MemoryPlan
from nibble.attention.planner.plan import graph_sizes
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.step_memory import CPU_STEP_TOKENS, GPU_STEP_TOKENS
from nibble.cache.manager import CacheManager
from nibble.config import Config, SamplingParams
from nibble.engine.memory_check import check_memory, explain_out_of_memory
from nibble.engine.model_runner import ModelRunner, most_prompts
from nibble.engine.page_tables import PackedInts, PageTables
from nibble.engine.plan import plan_engine
from nibble.engine.request import Request
from nibble.engine.sampler import Sampler, uniforms
from nibble.engine.startup_report import StartupReport
from nibble.engine.warmup_steps import longest_prompts
from nibble.hardware import GIB, lookup_gpu
from nibble.kernels import ALIGNED, MIN_REQUESTS
from nibble.kernels.types import AttentionMetadata
from nibble.model_spec import Phase
from planning import QWEN3_8B, memory_plan
from sampling import sample, uniform

CPU = torch.device("cpu")


def test_parts_of_a_parcel_begin_on_a_grid() -> None:
    parcel = PackedInts()
    lists = [[7], [1, 2, 3, 4, 5], [], [9, 9]]
    places = [parcel.add(values) for values in lists]
    sent = PageTables(1, 1, CPU).send(parcel)
    assert [sent[place].tolist() for place in places] == lists
    assert all(place.start % ALIGNED == 0 for place in places)


def test_a_table_is_told_of_new_pages_once() -> None:
    manager, tables = CacheManager(20, 4), PageTables(2, 8, CPU)
    leases = [manager.open([1, 2, 3], "") for _ in range(2)]
    for lease, upto in zip(leases, (9, 5), strict=True):
        manager.reserve(lease, upto)
    rows = [tables.row(lease) for lease in leases]

    def tell() -> int:
        places, pages = tables.take_updates()
        tables.apply(torch.tensor(places, dtype=torch.int64), torch.tensor(pages, dtype=torch.int32))
        return len(pages)

    assert (tell(), tell()) == (5, 0)
    manager.reserve(leases[1], 13)
    assert [tables.row(lease) for lease in leases] == rows and tell() == 2
    for row, lease in zip(rows, leases, strict=True):
        assert tables.table_RN[row, : len(lease.pages)].tolist() == lease.pages

    manager.release(leases[0])
    third = manager.open([5], "")
    manager.reserve(third, 1)
    assert tables.row(third) == rows[0], "the row of a released lease serves the next"
    assert tell() == 1 and tables.table_RN[rows[0], 0] == third.pages[0]
    assert not tables.table_RN[tables.padding_row].any()


def test_many_prompts_are_attended_to_in_parts(tiny: Path) -> None:
    """As kernels want it that are compiled for some number of requests."""
    prefix, steps = [i % 50 for i in range(40)], list[list[tuple[Phase, int, int, int]]]()
    prompts = [[*prefix, *[1 + number] * (1 + number % 5)] for number in range(2 * MIN_REQUESTS + 3)]
    metadata = ModelRunner._metadata

    def note(self: ModelRunner, *arguments: Any) -> AttentionMetadata:
        meta = metadata(self, *arguments)
        steps.append([(b.phase, len(b.query_lens), b.start, b.stop) for b in meta.batches])
        return meta

    params = SamplingParams(max_tokens=3, temperature=0, logprobs=0)
    usual = {
        "kv_format": "nvfp4",
        "kv_memory": "64MiB",
        "max_running": len(prompts),
        "max_context": 64,
        "token_budget": 1024,
    }
    with LLM(str(tiny), **usual) as llm:
        assert llm.engine.runner.most_prompts is None
        llm.engine.runner.most_prompts = MIN_REQUESTS
        llm.generate([[*prefix, 7]], params)
        with mock.patch.object(ModelRunner, "_metadata", note):
            answers = llm.generate(prompts, params)
    with LLM(str(tiny), prefix_cache=False, **usual) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert [(Phase.EXTEND, count) for count in (32, 32, 3)] in [
        [batch[:2] for batch in step] for step in steps
    ]
    for step in steps:
        assert [start for _, _, start, _ in step] == [0, *[stop for _, _, _, stop in step[:-1]]]
    for answer, expected in zip(answers, alone, strict=True):
        assert answer.completions[0].token_ids == expected.completions[0].token_ids


def test_random_numbers_are_the_same_on_the_device() -> None:
    dice = random.Random(0)
    seeds = [0, 1, -1, (1 << 64) - 1, 1 << 63, *(dice.randrange(-(1 << 63), 1 << 64) for _ in range(200))]
    positions = [dice.randrange(1 << 20) for _ in seeds]
    as_signed = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
    found = uniforms(torch.tensor(as_signed), torch.tensor(positions)).tolist()
    assert found == [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_a_pick_knows_how_many_there_will_be() -> None:
    """Steps that run ahead sample a token before the one before it is in the request's list."""
    request = Request("r", [1, 2], SamplingParams(temperature=1.0, seed=4))
    logits, sampler = torch.zeros(1, 1000), Sampler()
    early = [sampler.launch(logits, [request], [made]).read()[0] for made in range(3)]
    late = []
    for _ in range(3):
        late += sample(sampler, logits, [request])
        request.token_ids.append(0)
    assert early == late and len({pick.token for pick in early if pick}) == 3


def test_what_is_no_number_has_a_token_that_a_step_may_run_on() -> None:
    logits = torch.randn(3, 50)
    logits[1] = float("nan")
    requests = [Request(str(i), [1], SamplingParams(temperature=t)) for i, t in enumerate((0.0, 1.0, 1.0))]
    for order in (requests, requests[::-1]):
        picks = Sampler().launch(logits, order, [0, 0, 0])
        assert picks.read()[1] is None and all(pick for i, pick in enumerate(picks.read()) if i != 1)
        assert ((picks.tokens_S >= 0) & (picks.tokens_S < 50)).all()


@pytest.mark.parametrize("params", [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_draws_in_parts_are_the_same(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 200, generator=torch.Generator().manual_seed(1))
    requests = [Request(str(i), [1], SamplingParams(temperature=1.0, seed=i, **params)) for i in range(9)]
    whole = sample(Sampler(), logits, requests)
    monkeypatch.setattr("nibble.engine.sampler.LOGITS_PER_DRAW", 500)
    assert sample(Sampler(), logits, requests) == whole


# Starting


def gpu_budget(**options: Any) -> MemoryPlan:
    config = Config(model="m", **options)
    return memory_plan(config, QWEN3_8B, lookup_gpu("h200"), resolve(config, QWEN3_8B, lookup_gpu("h200")))


def test_a_budget_foresees_recorded_steps_and_libraries() -> None:
    plain, recorded = (gpu_budget(attention_backend="triton", graphs=graphs) for graphs in (False, True))
    assert recorded.runtime > plain.runtime >= GIB
    logits = graph_sizes(256)[-1] * QWEN3_8B.vocab_size * 2
    assert recorded.runtime - plain.runtime > logits
    assert recorded.pool < plain.pool
    assert gpu_budget(attention_backend="torch_ref").runtime == plain.runtime, "it cannot be recorded"


def test_steps_are_larger_on_a_gpu(tiny: Path) -> None:
    assert gpu_budget().step_tokens == GPU_STEP_TOKENS
    assert plan_engine(Config(model=str(tiny), device="cpu")).budget.step_tokens == CPU_STEP_TOKENS
    assert gpu_budget(token_budget=100).step_tokens == 100


def test_only_kernels_that_are_compiled_for_requests_have_few_of_them() -> None:
    def most(backend: str, machine: str) -> int | None:
        config = Config(model="m", attention_backend=backend)
        return most_prompts(resolve(config, QWEN3_8B, lookup_gpu(machine)))

    assert most("triton", "h200") == most("triton", "a100") == most("cuda", "h200") == MIN_REQUESTS
    assert most("torch_ref", "h200") is None


def test_a_plan_that_cannot_be_recorded_says_so(tiny: Path) -> None:
    config = Config(model=str(tiny), attention_backend="torch_ref")
    note = "decode steps run without CUDA graphs: torch_ref of group full cannot be recorded"
    assert note in plan_engine(config, lookup_gpu("h200")).plan.notes
    assert note not in plan_engine(replace(config, graphs=False), lookup_gpu("h200")).plan.notes
    assert note not in plan_engine(config, lookup_gpu("cpu")).plan.notes


def test_a_start_that_uses_up_the_reserve_is_refused() -> None:
    made = gpu_budget()
    check_memory(made, int(MIN_RESERVE_LEFT * made.reserve) + 1)
    with pytest.raises(
        CapacityError, match=r"in use beside the cache, where 8\.00 GiB .* --kv-memory \d+MiB"
    ):
        check_memory(made, int(MIN_RESERVE_LEFT * made.reserve) - 1)


def test_running_out_of_memory_says_what_would_help() -> None:
    made = gpu_budget()
    with (
        pytest.raises(CapacityError, match=r"does not suffice for the plan .* --token-budget"),
        explain_out_of_memory(made),
    ):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(("tokens", "longest"), [(10, 1000), (500, 100), (5000, 1000), (7, 3)])
def test_the_largest_step_is_filled_as_far_as_there_is_room(tokens: int, longest: int, tiny: Path) -> None:
    runner = LLM(str(tiny), kv_format="bf16", kv_memory="1MiB", max_running=4, max_context=512).engine.runner
    lengths = longest_prompts(runner, tokens, longest)
    pages = sum(-(-length // runner.plan.page_size) for length in lengths)
    assert max(lengths) <= longest and len(lengths) <= 5 and pages <= runner.pool.pages
    assert sum(lengths) == tokens or len(lengths) == 5 or pages == runner.pool.pages


def test_a_start_is_timed_part_by_part(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="bf16", kv_memory="1MiB")
    assert list(llm.startup) == ["plan", "weights", "preparation", "self-test"] and all(
        s >= 0 for s in llm.startup.values()
    )
    assert StartupReport({"weights": 1.25, "compile": 20.0}).summary == "21.2 s: weights 1.2, compile 20.0"
