"""Attention as two functions behind addresses: each is compiled once, whoever calls it.

Importing this module compiles or loads them.
"""

from kernels.cpu import simd
from kernels.cpu.attention import finish_split_unit, run_task
from kernels.cpu.compiling import called_by_address
from kernels.cpu.plan import unit_rows
from kernels.cpu.problem import read_problem, scratch_at, slot_pointers


@called_by_address(7)
def _attend(problem_at: int, unit: int, begin: int, end: int, scratch: int, slots: int, num_slots: int) -> None:
    """`run_task` with everything named by address; see `read_problem` and `scratch_at`."""
    problem = read_problem(problem_at)
    pointers = slot_pointers(slots, num_slots * unit_rows(problem.group_size))
    run_task(problem, simd.ints64(unit), begin, end, scratch_at(problem, scratch), pointers)


@called_by_address(7)
def _join(problem_at: int, unit: int, begin: int, end: int, scratch: int, slots: int, num_slots: int) -> None:
    """As `_attend`, for `finish_split_unit`."""
    problem = read_problem(problem_at)
    pointers = slot_pointers(slots, num_slots * unit_rows(problem.group_size))
    finish_split_unit(problem, simd.ints64(unit), scratch_at(problem, scratch), pointers)


ATTEND: int = _attend.address
JOIN: int = _join.address
