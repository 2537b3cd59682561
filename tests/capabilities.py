"""Marks of tests that ask for what an older torch lacks: they skip there, and say what it is."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

from ddpstats._observe.groups import lacking, operators_name_reduce_op
from ddpstats._observe.torch_compat import kernel_at, next_node_number

needs_guard = pytest.mark.skipif(not operators_name_reduce_op, reason=f"the guard needs torch 2.10: {sorted(lacking)}")
flips_products = pytest.mark.skipif(kernel_at is None, reason=f"bits of products cannot be flipped: {sorted(lacking)}")
takes_kernels_away = pytest.mark.skipif(kernel_at is None, reason=f"kernels that were parked stay: {sorted(lacking)}")
shards_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch cannot shard modules on the CPU (FSDP2)"
)
numbers_nodes = pytest.mark.skipif(
    next_node_number() == -1, reason=f"a replay does not tell the module of a backward operation: {sorted(lacking)}"
)
orders_groups = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of all groups"
)
