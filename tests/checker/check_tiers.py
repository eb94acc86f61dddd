# SPDX-License-Identifier: Apache-2.0
"""An independent implementation of the execution model on several tiers (version 2 of the formats). It shares no code with the
library.

A value on a tier is a `Copy`, which knows when it is complete and when its readers end. Each tier knows the moments at which
memory is freed. `judge` gives the verdict that `evaluate` must give.
"""
import collections

from check_schedule import Wrong

TURNS, MEAN = 16, 12


class Copy:
    """A value on one tier: when it is complete, and when its readers end."""

    def __init__(self, at=0.0):
        self.complete = at
        self.readers = []

    def quiet(self):
        return max([self.complete] + self.readers)


class Tiers:
    def __init__(self, problem, schedule):
        self.values, self.operations = problem["values"], problem["operations"]
        self.targets, self.next = problem["targets"], [tuple(x) for x in problem.get("next", [])]
        self.tiers = problem.get("tiers", [{"name": "device"}, {"name": "host"}])
        self.names = [t["name"] for t in self.tiers]
        self.device = self.names[0]
        self.budgets = {t["name"]: t["budget"] for t in self.tiers if t.get("budget") is not None}
        self.links = {}
        for x in problem.get("links", []):
            self.links[x["from"], x["to"]] = (x["rate"], x.get("latency", 0.0), x.get("stream", f"{x['from']}>{x['to']}"))
        if "offload" in problem:
            c = problem["offload"]
            self.links[self.device, "host"] = (c["to_host"], c.get("latency", 0.0), "up")
            self.links["host", self.device] = (c["to_device"], c.get("latency", 0.0), "down")
        self.sources = set(range(len(self.values))) - {v for o in self.operations for v in o["outputs"]}
        self.steps = schedule["steps"]
        self.clock, self.streams = 0.0, collections.Counter()
        self.given_up = {name: [0.0] for name in self.names}  # moments at which memory was freed on a tier
        self.there = {name: {} for name in self.names}
        self.home = {}
        chosen = collections.defaultdict(list)
        for v, name in schedule.get("starts", []):
            chosen[v].append(name)
        for v in self.sources:
            where = self.values[v].get("starts", self.device)
            places = chosen.pop(v, []) if where == "any" else [where]
            if len(places) != 1:
                raise Wrong(0, f"value {v} starts in {len(places)} places")
            self.home[v] = places[0]
            self.there[places[0]][v] = Copy()
        if chosen:
            raise Wrong(0, "starts of other values")
        self.high = {name: self.used(name) for name in self.names}
        self.check_budgets(0)

    def size(self, v):
        return self.values[v]["bytes"]

    def used(self, name):
        return sum(map(self.size, self.there[name]))

    def high_water(self, name, extra=0):
        self.high[name] = max(self.high[name], self.used(name) + extra)

    def check_budgets(self, step):
        for name, budget in self.budgets.items():
            if self.high[name] > budget:
                raise Wrong(step, f"{name} is over its budget")

    def demand(self, holds, why):
        if not holds:
            raise ValueError(why)

    def compute(self, i):
        self.demand(i < len(self.operations), "no such operation")
        o = self.operations[i]
        name, over = o.get("on", self.device), dict(map(tuple, o.get("overwrites", [])))
        self.ran[i] += 1
        self.demand(self.ran[i] == 1 or not (o.get("once") or over), "once only")
        here = self.there[name]
        self.demand(all(v in here for v in o["inputs"]), "an input is missing")
        moments = [self.clock] + [here[v].complete for v in o["inputs"]] + [here[v].quiet() for v in over.values()]
        if name != self.device:
            moments += self.given_up[name] + [self.streams["computations", name]]
        end = max(moments) + o["seconds"]
        fresh = [v for v in o["outputs"] if v not in over]
        self.high_water(name, sum(map(self.size, fresh)) + o.get("workspace", 0))
        if name == self.device:
            self.clock = end
        else:
            self.streams["computations", name] = end
            for v in o["inputs"]:
                here[v].readers.append(end)
            if o.get("workspace", 0) or any(v in here for v in fresh):
                self.given_up[name].append(end)
        for v in over.values():
            del here[v]
        for v in o["outputs"]:
            if v in here:
                here[v].complete = end
            else:
                here[v] = Copy(end)

    def copy(self, v, a, b):
        self.demand(v < len(self.values), "no such value")
        self.demand((a, b) in self.links and self.values[v].get("movable", True), "no link, or not movable")
        self.demand(v in self.there[a] and v not in self.there[b], "not there, or there already")
        rate, latency, stream = self.links[a, b]
        begin = max(self.clock, self.streams["link", stream], self.there[a][v].complete, *(self.given_up[b] if b != self.device else [0.0]))
        end = begin + latency + self.size(v) / rate
        self.streams["link", stream] = end
        self.there[a][v].readers.append(end)
        self.there[b][v] = Copy(end)
        self.high_water(b)

    def drop(self, v, name=None):
        name = name or self.device
        self.demand(v < len(self.values) and v in self.there[name], "not there")
        self.demand(not (self.values[v].get("held") and self.home.get(v) == name), "held")
        quiet = self.there[name].pop(v).quiet()
        if name == self.device:
            self.clock = max(self.clock, quiet)
        else:
            self.given_up[name].append(quiet)

    def step(self, what, i, *where):
        if what == "offload":
            what, where = "copy", (self.device, "host")
        elif what == "prefetch":
            what, where = "copy", ("host", self.device)
        self.demand(i >= 0, "no such thing")
        {"compute": self.compute, "copy": self.copy, "drop": self.drop}[what](i, *where)

    def turn(self):
        self.ran = collections.Counter()
        for at, step in enumerate(self.steps):
            try:
                self.step(*step)
            except (KeyError, ValueError) as why:
                raise Wrong(at, why) from None
            self.check_budgets(at)
        for v in self.targets:
            ends = self.values[v].get("ends", self.device)
            if not self.copies(v, ends):
                raise Wrong(len(self.steps), f"target {v} is missing")

    def copies(self, v, ends):
        return [here[v] for name, here in self.there.items() if v in here and ends in ("any", name)]

    def become_next(self):
        """Targets that are carried to the next step take the places of their sources. All other values leave."""
        carried, replaced = dict(self.next), {old for _, old in self.next}
        after = {name: {} for name in self.names}
        for name in self.names:
            for v in sorted(self.there[name]):
                if v in carried:
                    after[name][carried[v]] = self.there[name][v]
                elif v in self.sources and v not in replaced:
                    after[name][v] = self.there[name][v]
                elif v in self.targets and v not in self.sources:
                    self.drop(v, name)
                else:
                    raise Wrong(len(self.steps), f"value {v} is left on {name}")
        if any(set(after[name]) != {v for v in self.home if self.home[v] == name} for name in self.names):
            raise Wrong(len(self.steps), "the step ends unlike it begins")
        self.there = after

    def ahead(self):
        """The ends of everything in flight, relative to the clock of the device."""
        late = {key: end for key, end in self.streams.items()}
        for name in self.names:
            self.given_up[name] = [max(self.given_up[name])]
            late["room", name] = self.given_up[name][0]
            for v, c in self.there[name].items():
                c.readers = [max(c.readers, default=0.0)]
                late["complete", name, v], late["read", name, v] = c.complete, c.readers[0]
        return {key: end - self.clock for key, end in late.items() if end > self.clock}


def alike(a, b, scale):
    return all(abs(a.get(key, 0.0) - b.get(key, 0.0)) <= 1e-12 * scale for key in a.keys() | b.keys())


def period(tiers):
    """The time of the first turn that ends in the state in which it began; without such a turn, the mean of the last turns."""
    done, before = [], {}
    for _ in range(TURNS):
        began = tiers.clock
        tiers.turn()
        tiers.become_next()
        after = tiers.ahead()
        if alike(before, after, tiers.clock):
            return tiers.clock - began, True
        before = after
        done.append(tiers.clock + max(after.values(), default=0.0))
    return (done[-1] - done[-1 - MEAN]) / MEAN, False


def judge(problem, schedule, turns=None):
    """Returns {"peak", "peaks", "seconds", "recomputed"}; raises Wrong at the first broken rule.

    With `turns`, also "later": the time of a turn after `turns` turns, or None if the period is a mean."""
    tiers = Tiers(problem, schedule)
    verdict = {}
    if tiers.next:
        seconds, exact = period(tiers)
        if turns:
            for _ in range(turns):
                began = tiers.clock
                tiers.turn()
                tiers.become_next()
            verdict["later"] = tiers.clock - began if exact else None
    else:
        tiers.turn()
        seconds = tiers.clock
        for v in tiers.targets:
            seconds = max(seconds, min(c.complete for c in tiers.copies(v, tiers.values[v].get("ends", tiers.device))))
    recomputed = sum(tiers.ran.values()) - len(tiers.ran)
    return {"peak": tiers.high[tiers.device], "peaks": tiers.high, "seconds": seconds, "recomputed": recomputed, **verdict}
