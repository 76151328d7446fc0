"""Steps that verify drafts over buffers that stay where they are: which are recorded, and what the buffers take."""

from __future__ import annotations

from nibble.attention.planner.plan import Plan, cuda_graph_blocker, of_phase
from nibble.drafts import GPU_DRAFTS, GPU_VERIFY_TOKENS, recorded_lengths
from nibble.hardware import Hardware
from nibble.model_spec import Phase
from nibble.spec import CacheSpec

FULL_LENGTHS = 2
"""How many lengths have steps of few requests too."""
REQUEST_BYTES, TOKEN_BYTES = 3 * 8, 2 * 8
"""Of a request: table row, length, number of tokens; of each token its id, and a row of logits."""


def verify_sizes(most: int, tokens: int, step_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the sizes of recorded steps that verify drafts, each requests and tokens of a request; largest first.

    They are few, as each takes time at the start: sizes double, and requests with fewer tokens are padded. Short drafts
    of few requests are padded to half the longest ones: up to there a step takes the time of its weights.

    Args:
        most: requests that run at a time.
        tokens: most of a request in a step.
        step_tokens: most of a step that has drafts.
    """
    shapes, largest = set[tuple[int, int]](), 1
    for place, length in enumerate(recorded_lengths(tokens)):
        # The two longest have all sizes; shorter ones those that the longer have no room for.
        size = 2 if place < FULL_LENGTHS else 2 * largest
        while size * length <= step_tokens and size < 2 * max(most, 2):
            shapes.add((size, length))
            largest = max(largest, size)
            size *= 2
    return tuple(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape), reverse=True))


def sizes(
    plan: Plan, spec: CacheSpec, device: Hardware, most: int, step_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Return the sizes of a plan; none on a CPU, where nobody drafts, or where steps with drafts cannot be recorded.

    Args:
        plan: the routes.
        spec: what is requested.
        device: the machine.
        most: requests that run at a time.
        step_tokens: most tokens of a step.
    """
    if device.is_cpu or not spec.max_drafts or verify_graph_blocker(plan):
        return ()
    return verify_sizes(most, 1 + (spec.fixed_drafts or GPU_DRAFTS), min(GPU_VERIFY_TOKENS, step_tokens))


def buffer_bytes(requests: int, tokens: int) -> int:
    """Return the bytes of the inputs of a step that verifies so many tokens of so many requests."""
    return requests * (REQUEST_BYTES + tokens * TOKEN_BYTES)


def verify_graph_blocker(plan: Plan) -> str | None:
    """Return why steps of `plan` that verify drafts cannot be recorded; None if they can."""
    if reason := cuda_graph_blocker(plan):
        return reason
    effect = "steps with drafts run without CUDA graphs"
    if plan.tier:
        return f"{effect}: a hot buffer is for one new token"
    for group in plan.groups:
        if group.group.chunk is not None:
            return f"{effect}: a draft may lie in two chunks of group {group.group.name}"
        near = of_phase(group.near_routes, Phase.VERIFY)
        routes = [of_phase(group.routes, Phase.VERIFY), *([near] if near else [])]
        if any(route is None or not route.graphs for route in routes):
            route = next((route for route in routes if route and not route.graphs), None)
            return f"{effect}: {route or 'nothing'} of group {group.group.name} cannot be recorded"
    return None
