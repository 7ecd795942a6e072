"""OR-Tools CP-SAT, and the only file that knows it.

One worker, a fixed seed, and a limit in the solver's deterministic time, which counts work and not seconds: the same
program gives the same answer in every process. `interleave` and other parallel searches stay off.
"""

from __future__ import annotations

import math

import ortools
from ortools.sat.python import cp_model_helper as cp_sat

from scheduler.solver.program import Answer, Program

MODEL_VERSION = 4
"""Raised when the programs that are built change, since then the same log may give other decisions."""
SOLVER = f"cp-sat {ortools.__version__}, model {MODEL_VERSION}"
SEED = 20_240_607
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
WORK = 1_000_000
"""Parts of one unit of deterministic time."""


def minimise(program: Program, work: int) -> Answer:
    """The best values found within `work` millionths of deterministic time (about microseconds), and the bound."""
    solver = cp_sat.SolveWrapper()
    solver.set_parameters(_parameters(work))
    response = solver.solve(_model(program))
    found = response.status in (cp_sat.CpSolverStatus.OPTIMAL, cp_sat.CpSolverStatus.FEASIBLE)
    # An objective bound is a float; rounding up towards the next integer is safe up to its rounding error.
    return Answer(
        values=tuple(response.solution) if found else None,
        bound=math.ceil(response.best_objective_bound - 1e-6),
        proven=response.status == cp_sat.CpSolverStatus.OPTIMAL,
        work=round(response.deterministic_time * WORK),
    )


def _model(program: Program) -> cp_sat.CpModelProto:
    """The program as CP-SAT's own record. (Its comfortable builder imports pandas, which takes two seconds.)"""
    model = cp_sat.CpModelProto()
    for low, high in zip(program.lower, program.upper, strict=True):
        model.variables.add().domain.extend([low, high])
    for row in program.rows:
        linear = model.constraints.add().linear
        linear.vars.extend([variable for variable, _ in row.terms])
        linear.coeffs.extend([coefficient for _, coefficient in row.terms])
        linear.domain.extend([INT64_MIN if row.low is None else row.low, INT64_MAX if row.high is None else row.high])
    model.solution_hint.vars.extend(list(range(len(program.hint))))
    model.solution_hint.values.extend(list(program.hint))
    priced = [(variable, cost) for variable, cost in enumerate(program.costs) if cost]
    model.objective.vars.extend([variable for variable, _ in priced])
    model.objective.coeffs.extend([cost for _, cost in priced])
    return model


def _parameters(work: int) -> cp_sat.SatParameters:
    parameters = cp_sat.SatParameters()
    parameters.num_workers = 1
    parameters.random_seed = SEED
    parameters.max_deterministic_time = work / WORK
    # These programs are small and tight as they are built. Presolve rewrites their knapsack rows for longer than the
    # search takes, and leaves the bound of a relaxation far below where the search alone finds it.
    parameters.cp_model_presolve = False
    return parameters
