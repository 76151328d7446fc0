"""Layers of a divided model, put together."""

from __future__ import annotations

import torch
from torch import nn

from nibble.models.parallel import Layout
from nibble.models.parallel_layers import SummedLinear, join
from nibble.models.shards import Shard
from thread_ranks import Meeting, ThreadCollectives


def test_shared_experts_that_others_compute_are_summed_with_them() -> None:
    """models/shared_experts.py leaves no module of a shared expert that it has joined."""
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"down_proj": nn.Linear(2, 2)})})
    rows = ("mlp.down_proj", "mlp.shared_expert.down_proj")
    group = ThreadCollectives(Meeting(1), 0)
    join(model, Layout({}, rows, (), (), False), Shard(0, 1), group, 0)
    assert isinstance(model.get_submodule("mlp.down_proj"), SummedLinear)
    assert torch.equal(model.get_submodule("mlp.down_proj").weight, model["mlp"]["down_proj"].layer.weight)
