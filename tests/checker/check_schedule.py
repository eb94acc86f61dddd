# SPDX-License-Identifier: Apache-2.0
"""An independent implementation of the execution model. It shares no code with the library.

Simulates a remat-schedule as three queues of timed events (the compute stream and one copy stream per direction) and a table of
values, each either absent, resident, arriving or leaving. `judge` gives the verdict that `evaluate` must give.
"""
from dataclasses import dataclass


class Wrong(Exception):
    """The schedule breaks a rule at `step` (the number of steps if the end state is wrong)."""

    def __init__(self, step, why):
        super().__init__(f"step {step}: {why}")
        self.step = step


@dataclass
class Cell:
    """One value: its place on the device and on the host, and the ends of the copies that use it."""

    size: int
    keep: bool
    movable: bool
    resident: bool
    usable_at: float = 0.0  # end of the copy to the device
    free_at: float = 0.0  # end of the copy to the host, which reads the value
    host_at: float | None = None  # when the copy on the host is complete; None: no copy


class Device:
    def __init__(self, problem):
        self.problem = problem
        produced = {v for o in problem["operations"] for v in o["outputs"]}
        self.cells = [Cell(v["bytes"], v.get("held", False), v.get("movable", True), i not in produced) for i, v in enumerate(problem["values"])]
        self.rates = problem.get("offload")
        self.clock = {"compute": 0.0, "out": 0.0, "in": 0.0}
        self.ran = set()
        self.recomputed = 0
        self.high = self.used()

    def used(self):
        return sum(c.size for c in self.cells if c.resident)

    def cell(self, i):
        if not 0 <= i < len(self.cells):
            raise ValueError("no such value")
        return self.cells[i]

    def transfer(self, stream, rate, size, earliest):
        begin = max(self.clock["compute"], self.clock[stream], earliest)
        self.clock[stream] = begin + self.rates.get("latency", 0.0) + size / self.rates[rate]
        return self.clock[stream]

    def compute(self, i):
        if not 0 <= i < len(self.problem["operations"]):
            raise ValueError("no such operation")
        operation = self.problem["operations"][i]
        if i in self.ran:
            if operation.get("once", False):
                raise ValueError("once only")
            self.recomputed += 1
        self.ran.add(i)
        inputs = [self.cells[v] for v in set(operation["inputs"])]
        if not all(c.resident for c in inputs):
            raise ValueError("an input is missing")
        outputs = [self.cells[v] for v in operation["outputs"]]
        self.high = max(self.high, self.used() + sum(c.size for c in outputs) + operation.get("workspace", 0))
        self.clock["compute"] = max([self.clock["compute"]] + [c.usable_at for c in inputs]) + operation["seconds"]
        for c in outputs:
            c.resident, c.usable_at = True, 0.0

    def drop(self, i):
        c = self.cell(i)
        if not c.resident or c.keep:
            raise ValueError("held" if c.keep else "not resident")
        self.clock["compute"] = max(self.clock["compute"], c.free_at, c.usable_at)
        c.resident, c.free_at, c.usable_at = False, 0.0, 0.0

    def offload(self, i):
        c = self.cell(i)
        if self.rates is None or not c.resident:
            raise ValueError("no copies" if self.rates is None else "not resident")
        if not c.movable:
            raise ValueError("not movable")
        c.host_at = c.free_at = self.transfer("out", "to_host", c.size, c.usable_at)

    def prefetch(self, i):
        c = self.cell(i)
        if c.host_at is None or c.resident:
            raise ValueError("resident" if c.resident else "not on the host")
        c.usable_at = self.transfer("in", "to_device", c.size, c.host_at)
        c.resident = True
        self.high = max(self.high, self.used())


def judge(problem, steps):
    """Returns {"peak", "seconds", "recomputed"}; raises Wrong at the first broken rule."""
    device = Device(problem)
    actions = {"compute": device.compute, "drop": device.drop, "offload": device.offload, "prefetch": device.prefetch}
    for at, (what, i) in enumerate(steps):
        try:
            actions[what](i)
        except (KeyError, ValueError) as why:
            raise Wrong(at, why) from None
    end = device.clock["compute"]
    for v in problem["targets"]:
        if not device.cells[v].resident:
            raise Wrong(len(steps), f"target {v} is missing")
        end = max(end, device.cells[v].usable_at)
    return {"peak": device.high, "seconds": end, "recomputed": device.recomputed}
