"""Divides a batch's attention into tasks. A plan decides who computes what, never how it is rounded.

A unit is a run of query positions of one sequence with one KV head (and the query heads that share it). A unit that
is a large part of the whole is split into one task per partition of the context.
"""

from typing import Any

import numpy as np

from kernels.cpu.compiling import compiled

TILE = 64
"""Context positions whose keys and values are widened at once. Part of the arithmetic, as PARTITION is."""
PARTITION = 256
"""Context positions whose softmax is accumulated from a fresh start, at fixed absolute multiples."""
_MAX_UNIT_ROWS = 192
_TASKS_PER_WORKER = 4

# columns of a unit
SEQUENCE, KV_HEAD, FIRST_QUERY, NUM_QUERIES, FIRST_PARTITION, END_PARTITION, SLOT = range(7)
UNIT_COLUMNS = 7
NOT_SPLIT = -1
# columns of a task
TASK_UNIT, TASK_BEGIN, TASK_END = range(3)
TASK_COLUMNS = 3


@compiled
def _unit_queries(group_size: int) -> int:
    return max(1, _MAX_UNIT_ROWS // group_size)


@compiled
def unit_rows(group_size: int) -> int:
    """Most query rows of one unit, which share a widened tile."""
    return _unit_queries(group_size) * group_size


@compiled
def visible(query_start: Any, context_lens: Any, window: int, sequence: int, query: int) -> tuple[int, int]:
    """Positions begin .. end that the sequence's `query`-th new position attends to."""
    end = context_lens[sequence] - (query_start[sequence + 1] - query_start[sequence]) + query + 1
    return (max(0, end - window) if window > 0 else 0), end


@compiled
def plan_units(
    query_start: Any, context_lens: Any, num_sequences: int, num_kv_heads: int, group_size: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Units [num_units, UNIT_COLUMNS] int64, none split yet, and the work of each: query rows x positions."""
    step, num_units = _unit_queries(group_size), 0
    for s in range(num_sequences):
        num_units += num_kv_heads * -(-(query_start[s + 1] - query_start[s]) // step)
    units, work = np.empty((num_units, UNIT_COLUMNS), np.int64), np.empty(num_units, np.int64)
    i = 0
    for s in range(num_sequences):
        num_queries = query_start[s + 1] - query_start[s]
        for first in range(0, num_queries, step):
            count = min(step, num_queries - first)
            begin, _ = visible(query_start, context_lens, window, s, first)
            _, end = visible(query_start, context_lens, window, s, first + count - 1)
            for head in range(num_kv_heads):
                units[i, SEQUENCE], units[i, KV_HEAD] = s, head
                units[i, FIRST_QUERY], units[i, NUM_QUERIES] = first, count
                units[i, FIRST_PARTITION], units[i, END_PARTITION] = begin // PARTITION, -(-end // PARTITION)
                units[i, SLOT] = NOT_SPLIT
                work[i] = count * group_size * (end - begin)
                i += 1
    return units, work


@compiled
def split_units(units: np.ndarray, work: np.ndarray, num_workers: int) -> int:
    """Gives units that would keep one worker too long a run of slots, one per partition; returns how many slots."""
    total, num_slots = work.sum(), 0
    for i in range(units.shape[0]):
        num_partitions = units[i, END_PARTITION] - units[i, FIRST_PARTITION]
        if num_workers > 1 and num_partitions > 1 and work[i] * num_workers * _TASKS_PER_WORKER > total:
            units[i, SLOT] = num_slots
            num_slots += num_partitions
    return num_slots


@compiled
def plan_tasks(units: np.ndarray) -> np.ndarray:
    """Tasks [num_tasks, TASK_COLUMNS] int64: a whole unit, or one partition of a split one."""
    num_tasks = 0
    for i in range(units.shape[0]):
        num_tasks += 1 if units[i, SLOT] == NOT_SPLIT else units[i, END_PARTITION] - units[i, FIRST_PARTITION]
    tasks = np.empty((num_tasks, TASK_COLUMNS), np.int64)
    t = 0
    for i in range(units.shape[0]):
        begin, end = units[i, FIRST_PARTITION], units[i, END_PARTITION]
        for partition in range(begin, begin + 1 if units[i, SLOT] == NOT_SPLIT else end):
            tasks[t, TASK_UNIT], tasks[t, TASK_BEGIN] = i, partition
            tasks[t, TASK_END] = end if units[i, SLOT] == NOT_SPLIT else partition + 1
            t += 1
    return tasks
