"""Where replicas go: integer programming over devices, islands and what is running already.

Four questions, one answer. `place_missing(problem)` places what has no place, `replan(problem)` also moves what must
move, `plan_fleet(problem)` places everything anew as far as moving pays, `rebalance(problem, n)` does so in few moves.
All are pure and give the same `Plan` for the same `Problem` in every process. `explain(problem, plan, model)` says why
here and why not elsewhere, device by device.
The records are in `model`; `sla_weight` turns a priority and tags into the weight of a demand.
"""

from scheduler.solver.constraints import tier_conflict
from scheduler.solver.explain import explain
from scheduler.solver.objective import evaluate, sla_weight
from scheduler.solver.solve import Limits, place_missing, plan_fleet, rebalance, replan

__all__ = [
    "Limits",
    "evaluate",
    "explain",
    "place_missing",
    "plan_fleet",
    "rebalance",
    "replan",
    "sla_weight",
    "tier_conflict",
]
