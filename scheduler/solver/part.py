"""The integer program of a part of the fleet: some replicas are free, the others stay where they are.

Replicas of one kind are interchangeable, so the program counts them: `on` says that a device holds one of a kind in one
option, `spans` how many tensor-parallel replicas of it an island holds. Its objective differs from `objective.evaluate`
only by a constant, which `decode` does not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.ledger import Ledger
from scheduler.solver.objective import cold_cost, device_cost, fragment_cost, pair_cost, seat_cost, server_cost
from scheduler.solver.program import Program, Term

On = tuple[int, int, int]
"""(kind, option, device), or with a group in place of the device."""


class Part:
    """Builds `program` at once; `decode` turns its values into seats."""

    def __init__(
        self,
        folded: Folded,
        fixed: Ledger,
        free: Sequence[int],
        devices: Sequence[int],
        start: Sequence[Seat | None],
    ) -> None:
        self.folded = folded
        self.fixed = fixed
        self.free = tuple(free)
        self.devices = tuple(devices)
        self.start = start
        self.program = Program()
        self.on: dict[On, int] = {}
        self.spans: dict[On, int] = {}
        self.stay: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.members: dict[int, list[int]] = {}
        for number in self.free:
            self.members.setdefault(folded.kind[number], []).append(number)
        self._seats()
        self._spans()
        self._stays()
        self._placed()
        self._devices()
        self._islands()
        self._limits()
        self._exchanges()

    # ------------------------------------------------------------ variables of seats

    def _seats(self) -> None:
        """`on`: one per kind, option and device where a replica may start or one may stay."""
        folded, fixed = self.folded, self.fixed
        hinted = self._hinted()
        for kind, members in self.members.items():
            table = folded.kinds[kind]
            stays = {
                (folded.current[number][1], device)  # type: ignore[index]
                for number in members
                if folded.may_stay[number]
                for device in folded.current[number][0]  # type: ignore[index]
            }
            for device in self.devices:
                for option in range(len(table.sizes)):
                    new = option in table.fits[folded.device_class[device]]
                    if not new and (option, device) not in stays:
                        continue
                    if folded.weight(kind, option, device) <= fixed.free[device] and fixed.admits(members[0], device):
                        cost = seat_cost(folded, kind, option, device) + cold_cost(folded, kind, device)
                        key = (kind, option, device)
                        self.on[key] = self.program.variable(1, cost, int(key in hinted))

    def _hinted(self) -> frozenset[On]:
        """What the start has where."""
        return frozenset(
            (self.folded.kind[number], seat[1], device)
            for number in self.free
            if (seat := self.start[number]) is not None and self.folded.placed(number, seat)
            for device in seat[0]
        )

    def _spans(self) -> None:
        """`spans`: replicas of one kind and option on a group; each takes as many devices as its size."""
        folded, program = self.folded, self.program
        for kind, members in self.members.items():
            size = folded.kinds[kind].demand.tensor_parallel_size
            if size == 1:
                continue
            by_group: dict[tuple[int, int], list[int]] = {}
            for (of_kind, option, device), variable in self.on.items():
                if of_kind == kind:
                    by_group.setdefault((option, folded.group_of(kind, device)), []).append(variable)
            for (option, group), variables in by_group.items():
                hint = sum(program.hint[variable] for variable in variables) // size
                span = program.variable(min(len(members), len(variables) // size), 0, hint)
                self.spans[kind, option, group] = span
                program.equal([*((variable, 1) for variable in variables), (span, -size)], 0)
                self._wide(kind, option, group, span)

    def _wide(self, kind: int, option: int, group: int, span: int) -> None:
        """Of one replica in a group that holds nearer ones: each of those it touches beyond the first costs.

        At most one replica of the version is on a worker, and so in the group (see `classes.check`).
        """
        folded, program, table = self.folded, self.program, self.folded.kinds[kind]
        for nearer in folded.group_at[: table.level]:
            touched: dict[int, list[int]] = {}
            for device in folded.groups[group]:
                if (variable := self.on.get((kind, option, device))) is not None:
                    touched.setdefault(nearer[device], []).append(variable)
            if len(touched) < 2:
                continue
            counted: list[Term] = []
            for variables in touched.values():
                here = program.variable(1, 0, int(any(program.hint[variable] for variable in variables)))
                counted.append((here, 1))
                for variable in variables:
                    program.at_most([(variable, 1), (here, -1)], 0)
            hint = sum(program.hint[here] for here, _ in counted) - program.hint[span]
            excess = program.variable(len(touched), table.span_cost, hint)
            program.at_most([*counted, (span, -1), (excess, -1)], 0)

    def _stays(self) -> None:
        """`stay`: this replica keeps its seat; `held`: it keeps one that it may not keep, and counts as unplaced."""
        folded, program = self.folded, self.program
        covering: dict[On, list[int]] = {}
        inside = frozenset(self.devices)
        for number in self.free:
            seat, kind = folded.current[number], folded.kind[number]
            if seat is None:
                continue
            kept = int(self.start[number] == seat)
            if not folded.may_stay[number]:
                if not all(device in inside for device in seat[0]):
                    continue
                self.held[number] = program.variable(1, 0, kept)
                continue
            variables = [self.on.get((kind, seat[1], device)) for device in seat[0]]
            if None in variables:
                continue
            gain = folded.move_cost[number] + sum(cold_cost(folded, kind, device) for device in seat[0])
            self.stay[number] = program.variable(1, -gain, kept)
            for device, variable in zip(seat[0], variables, strict=True):
                program.at_most([(self.stay[number], 1), (variable, -1)], 0)  # type: ignore[list-item]
                covering.setdefault((kind, seat[1], device), []).append(self.stay[number])
        for key, stays in covering.items():
            kind, option, device = key
            if option not in folded.kinds[kind].fits[folded.device_class[device]]:
                program.at_most([(self.on[key], 1), *((stay, -1) for stay in stays)], 0)

    # ------------------------------------------------------------ what it is for

    def _counted(self, kind: int) -> list[Term]:
        """Placed replicas of a kind."""
        found = self.on if self.folded.kinds[kind].demand.tensor_parallel_size == 1 else self.spans
        return [(variable, 1) for (of_kind, _, _), variable in found.items() if of_kind == kind]

    def _placed(self) -> None:
        """Every replica has a place or costs what leaving it out costs; a version without any costs more."""
        folded, program = self.folded, self.program
        serving: dict[int, list[Term]] = {}
        for kind, members in self.members.items():
            table, counted = folded.kinds[kind], self._counted(kind)
            hint = sum(not folded.placed(number, self.start[number]) for number in members)
            unplaced = program.variable(len(members), table.unplaced_cost, hint)
            program.equal([*counted, (unplaced, 1)], len(members))
            held = [(self.held[number], -1) for number in members if number in self.held]
            if held:
                program.at_least([*held, (unplaced, 1)], 0)
            self._stopped(kind, members, unplaced, held)
            if table.demand.purpose == "serve":
                serving.setdefault(table.version, []).extend(counted)
        for version, counted in serving.items():
            if folded.first_cost[version] and not self.fixed.serving[version]:
                hint = int(not any(program.hint[variable] for variable, _ in counted))
                none = program.variable(1, folded.first_cost[version], hint)
                program.at_least([*counted, (none, 1)], 1)

    def _stopped(self, kind: int, members: Sequence[int], unplaced: int, held: list[Term]) -> None:
        """Running replicas that lose their place for none: those that did not run yet are left out before them."""
        folded, program = self.folded, self.program
        running = [number for number in members if folded.current[number] is not None]
        if running:
            hint = sum(self.start[number] is None for number in running)
            stopped = program.variable(len(running), folded.kinds[kind].stop_cost, hint)
            program.at_most([(unplaced, 1), *held, (stopped, -1)], len(members) - len(running))

    # ------------------------------------------------------------ devices

    def _occupants(self) -> dict[int, list[tuple[int, int]]]:
        """By device: (variable, bytes) of everything free that may be on it."""
        occupants: dict[int, list[tuple[int, int]]] = {device: [] for device in self.devices}
        for (kind, option, device), variable in self.on.items():
            occupants[device].append((variable, self.folded.weight(kind, option, device)))
        for number, variable in self.held.items():
            devices, option = self.folded.current[number] or ((), 0)
            for device in devices:
                occupants[device].append((variable, self.folded.weight(self.folded.kind[number], option, device)))
        return occupants

    def _devices(self) -> None:
        """Memory, and what an opened or a shared device costs."""
        folded, fixed, program = self.folded, self.fixed, self.program
        self.used: dict[int, int] = {}
        for device, occupants in self._occupants().items():
            if not occupants:
                continue
            free = fixed.free[device]
            count = sum(program.hint[variable] for variable, _ in occupants)
            if fixed.count[device] == 0:
                fragment = fragment_cost(folded) if folded.island[device] >= 0 else 0
                used = program.variable(1, device_cost(folded, device) - fragment, int(count > 0))
                self.used[device] = used
                program.at_most([*occupants, (used, -free)], 0)
                for variable, _ in occupants:
                    program.at_most([(variable, 1), (used, -1)], 0)
                program.at_most([(used, 1), *((variable, -1) for variable, _ in occupants)], 0)
            else:
                program.at_most(occupants, free)
            if pair_cost(folded):
                self._pairs(fixed.count[device], count, [variable for variable, _ in occupants])
        self._load()

    def _load(self) -> None:
        """How busy each device is above what is free of cost, in addition to what is fixed there."""
        folded, program, weights = self.folded, self.program, self.folded.objective
        busy: dict[int, list[Term]] = {}
        for (kind, _, device), variable in self.on.items():
            if folded.kinds[kind].load:
                busy.setdefault(device, []).append((variable, folded.kinds[kind].load))
        for number, variable in self.held.items():
            load = folded.kinds[folded.kind[number]].load
            for device in (folded.current[number] or ((), 0))[0] if load else ():
                busy.setdefault(device, []).append((variable, load))
        for device, terms in busy.items():
            slack = max(0, weights.load_free - self.fixed.load[device])
            most, hint = sum(load for _, load in terms), sum(load * program.hint[variable] for variable, load in terms)
            if weights.load and most > slack:
                over = program.variable(most - slack, weights.load, max(0, hint - slack))
                program.at_most([*terms, (over, -1)], slack)

    def _pairs(self, fixed: int, hint: int, variables: Sequence[int]) -> None:
        """n replicas are n(n-1)/2 pairs: the highest of the lines q*n - q(q+1)/2, above what is fixed."""
        before, after = fixed * (fixed - 1) // 2, (fixed + hint) * (fixed + hint - 1) // 2
        most = fixed + len(variables)
        pairs = self.program.variable(most * most, pair_cost(self.folded), after - before)
        for slope in range(max(1, fixed), most):
            terms = [(pairs, 1), *((variable, -slope) for variable in variables)]
            self.program.at_least(terms, slope * fixed - slope * (slope + 1) // 2 - before)

    def _islands(self) -> None:
        """An island that is touched costs its free devices; one that is touched already costs none in addition."""
        folded, program, fragment = self.folded, self.program, fragment_cost(self.folded)
        touched: dict[int, list[int]] = {}
        for device, used in self.used.items():
            island = folded.island[device]
            if fragment and island >= 0 and not self.fixed.island_used[island]:
                touched.setdefault(island, []).append(used)
        for island, variables in touched.items():
            hint = int(any(program.hint[variable] for variable in variables))
            opened = program.variable(1, fragment * len(folded.islands[island]), hint)
            for variable in variables:
                program.at_most([(variable, 1), (opened, -1)], 0)

    # ------------------------------------------------------------ neighbours

    def _limits(self) -> None:
        """Replicas of a version on a worker, on a server, and on one device."""
        folded, fixed = self.folded, self.fixed
        on_worker: dict[tuple[int, int], list[int]] = {}
        on_server: dict[tuple[int, int], list[int]] = {}
        for version, device, variable in self._replicas():
            on_worker.setdefault((version, folded.worker[device]), []).append(variable)
            on_server.setdefault((version, folded.server[device]), []).append(variable)
        for key, variables in on_worker.items():
            self._limit(variables, folded.worker_limit[key[0]] - fixed.on_worker.get(key, 0))
        for key, variables in on_server.items():
            self._limit(variables, folded.server_limit[key[0]] - fixed.on_server.get(key, 0))
            self._together(variables, server_cost(folded, key[0]), fixed.on_server.get(key, 0))
        for variables in self._on_device().values():
            self._limit(variables, 1)

    def _together(self, variables: Sequence[int], cost: int, fixed: int) -> None:
        """Each replica of a version beyond the first on a server costs; the fixed ones have paid already."""
        program = self.program
        most = sum(program.upper[variable] for variable in variables)
        if not cost or most + fixed < 2:
            return
        allowed = 0 if fixed else 1
        hint = max(0, sum(program.hint[variable] for variable in variables) - allowed)
        excess = program.variable(most, cost, hint)
        program.at_most([*((variable, 1) for variable in variables), (excess, -1)], allowed)

    def _replicas(self) -> Iterator[tuple[int, int, int]]:
        """(version, a device of it, variable) of every variable that counts replicas."""
        folded = self.folded
        for (kind, _, device), variable in self.on.items():
            if folded.kinds[kind].demand.tensor_parallel_size == 1:
                yield folded.kinds[kind].version, device, variable
        for (kind, _, group), variable in self.spans.items():
            yield folded.kinds[kind].version, folded.groups[group][0], variable
        for number, variable in self.held.items():
            devices, _ = folded.current[number] or ((-1,), 0)
            yield folded.version[number], devices[0], variable

    def _on_device(self) -> dict[tuple[int, int], list[int]]:
        """By (version, device) what may be there, where the limit by worker does not say it all."""
        folded = self.folded
        found: dict[tuple[int, int], list[int]] = {}
        for (kind, _, device), variable in self.on.items():
            version = folded.kinds[kind].version
            if folded.worker_limit[version] > 1 or folded.kinds[kind].demand.tensor_parallel_size > 1:
                found.setdefault((version, device), []).append(variable)
        for number, variable in self.held.items():
            for device in (folded.current[number] or ((), 0))[0]:
                found.setdefault((folded.version[number], device), []).append(variable)
        return found

    def _limit(self, variables: Sequence[int], limit: int) -> None:
        if sum(self.program.upper[variable] for variable in variables) > limit:
            self.program.at_most([(variable, 1) for variable in variables], limit)

    def _exchanges(self) -> None:
        """Each domain beyond the first that the members of a KV exchange touch costs. The fixed ones have paid."""
        folded, program = self.folded, self.program
        by_domain: dict[int, dict[int, list[int]]] = {}
        for (kind, _, device), variable in self.on.items():
            exchange = folded.kv[self.members[kind][0]]
            if exchange >= 0 and folded.domain[device] not in (self.fixed.exchange.get(exchange) or {}):
                by_domain.setdefault(exchange, {}).setdefault(folded.domain[device], []).append(variable)
        for exchange, domains in by_domain.items():
            chosen: list[Term] = []
            for variables in domains.values():
                here = program.variable(1, 0, int(any(program.hint[variable] for variable in variables)))
                chosen.append((here, 1))
                for variable in variables:
                    program.at_most([(variable, 1), (here, -1)], 0)
            allowed = 0 if self.fixed.exchange.get(exchange) else 1
            if len(chosen) > allowed:
                hint = max(0, sum(program.hint[here] for here, _ in chosen) - allowed)
                excess = program.variable(len(chosen), folded.objective.kv_apart, hint)
                program.at_most([*chosen, (excess, -1)], allowed)

    # ------------------------------------------------------------ back

    def decode(self, values: Sequence[int]) -> list[Seat | None]:
        """The start with the free replicas where the values put them. Who stays stays; those that ran come next."""
        folded = self.folded
        seats = list(self.start)
        for kind, members in self.members.items():
            found = dict.fromkeys(
                sorted(key[1:] for key, variable in self.on.items() if key[0] == kind and values[variable])
            )
            waiting = dict.fromkeys(sorted(members, key=lambda number: self._turn(number, values)))
            for number in self._stayers(members, found):
                seats[number] = folded.current[number]
                del waiting[number]
            for number, seat in zip(tuple(waiting), self._whole(kind, found), strict=False):
                seats[number] = seat
                del waiting[number]
            for number in waiting:
                is_held = number in self.held and values[self.held[number]]
                seats[number] = folded.current[number] if is_held else None
        return seats

    def _turn(self, number: int, values: Sequence[int]) -> tuple[int, int]:
        """Who is seated first: replicas that run, then those that could also be held, then new ones."""
        if self.folded.current[number] is None:
            return 2, number
        return int(number in self.held and values[self.held[number]] > 0), number

    def _stayers(self, members: Sequence[int], found: dict[tuple[int, int], None]) -> list[int]:
        """Members whose whole seat was found again, whatever `stay` says; their devices leave `found`."""
        stayers: list[int] = []
        for number in members:
            seat = self.folded.current[number]
            if seat is None or number in self.held or any((seat[1], device) not in found for device in seat[0]):
                continue
            stayers.append(number)
            for device in seat[0]:
                del found[seat[1], device]
        return stayers

    def _whole(self, kind: int, found: Iterable[tuple[int, int]]) -> list[Seat]:
        """Devices of one option and group, cut into seats of the kind's size."""
        size = self.folded.kinds[kind].demand.tensor_parallel_size
        by_group: dict[tuple[int, int], list[int]] = {}
        for option, device in found:
            by_group.setdefault((option, self.folded.group_of(kind, device)), []).append(device)
        return [
            (tuple(devices[place : place + size]), option)
            for (option, _), devices in sorted(by_group.items())
            for place in range(0, len(devices), size)
        ]
