# SPDX-License-Identifier: Apache-2.0
"""Compares pages, traces and snapshots of plans with `evaluate`. Also tests plans and curves in Python."""

from __future__ import annotations

import html.parser
import importlib
import importlib.util
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from typing import Any

import remat

HOSTILE = "</script><script>alert(1)</script>&amp;\"'\u2028"
VOID = {"meta", "br", "img", "input", "hr", "link"}
needs_torch = unittest.skipUnless(importlib.util.find_spec("torch"), "no torch")


class Page(html.parser.HTMLParser):
    """The elements of a page. Parsing fails on tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> str:
        return "\n".join(self.texts.get(tag, []))


def size(bytes_: int) -> str:
    """Bytes as text, in the format of the page, from an independent implementation."""
    number, units = float(bytes_), ["B", "KiB", "MiB", "GiB"]
    while abs(number) >= 999.5 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.3g} {units[0]}"


def problem(name: str = "chain", copies: bool = False) -> dict[str, Any]:
    """A training step of ten layers, each with a parameter."""
    n = 10
    values = [{"name": f"layers.{i}.weight", "bytes": 1000, "held": True} for i in range(n)] + [{"name": "x", "bytes": 5000, "held": True}]
    values += [{"name": f"h{i}" if i else name, "bytes": 4000 + 1000 * i} for i in range(n)] + [{"name": f"g{i}", "bytes": 4000} for i in range(n)]
    h, g = lambda i: n + 1 + i, lambda i: 2 * n + 1 + i
    forward = [{"name": f"f{i}", "inputs": [i, h(i - 1) if i else n], "outputs": [h(i)], "seconds": 1e-3, "workspace": 10 * i,
                "kind": name} for i in range(n)]
    backward = [{"name": f"b{i}", "inputs": [i, h(i), h(i - 1) if i else n] + ([g(i + 1)] if i < n - 1 else []), "outputs": [g(i)], "seconds": 2e-3}
                for i in reversed(range(n))]
    step = {"format": "remat-problem", "version": 1, "name": name, "values": values, "operations": forward + backward, "targets": [g(0)],
            "backward_start": n}
    if copies:
        step["offload"] = {"to_host": 2e7, "to_device": 2e7, "latency": 1e-5}
    return step


class Pages(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def solved(self, step: dict[str, Any], budget: str = "60%", solver: str = "automatic") -> dict[str, Any]:
        plan = remat.solve(step, budget, solver=solver, time_limit=3)
        self.assertIn(plan["status"], ("optimal", "feasible"))
        return plan

    def test_figures(self) -> None:
        for copies in (False, True):
            step = problem(copies=copies)
            plan = self.solved(step)
            page = Page(remat.report(plan, step, time_limit=3, points=4).html())
            truth = remat.evaluate(step, plan)
            most = remat.evaluate(step, remat.solve(step, "100%", time_limit=1))
            self.assertIn(size(truth["peak"]), page.all("dd"))
            self.assertIn(f"{1e3 * truth['seconds']:.4g} ms", page.all("dd"))
            self.assertIn(str(truth["recomputed"]), page.texts["dd"])
            self.assertIn(size(most["peak"]), page.all("p"))
            extra = 100 * (truth["seconds"] / most["seconds"] - 1)
            self.assertIn(f"{extra:.3g} % extra time" if extra > 0 else "no extra time", page.all("p"))
            pieces = json.loads(page.texts["script"][0])["pieces"]
            shown = {piece[2] for piece in pieces if piece[3] != "waits for copies"}
            self.assertEqual(shown, {size(m) for m, s in zip(truth["memory"], plan["steps"]) if s[0] == "compute"})
            for heading in ("Time against budget", "Memory over time", "Kept, recomputed and moved, by module", "Largest tensors"):
                self.assertIn(heading, page.texts["h2"])

    def test_nothing_from_elsewhere(self) -> None:
        step = problem()
        text = remat.report(self.solved(step), step, time_limit=1, points=2).html()
        for tag, attributes in Page(text).tags:
            self.assertNotIn(tag, ("link", "img", "iframe", "object", "embed"))
            self.assertFalse({"src", "href"} & attributes.keys(), (tag, attributes))
        self.assertNotIn("url(", text)
        self.assertNotIn("@import", text)
        self.assertIn("prefers-color-scheme:dark", text)

    def test_names_are_escaped(self) -> None:
        step = problem(HOSTILE)
        text = remat.report(self.solved(step), step, time_limit=1, points=2).html()
        page = Page(text)
        self.assertEqual([tag for tag, _ in page.tags].count("script"), 2)
        self.assertNotIn("alert(1)", page.texts["script"][1])
        self.assertIn(HOSTILE, page.all("h1"))
        self.assertIn(HOSTILE, page.all("td"))

    def test_labels(self) -> None:
        step = problem()
        for i, operation in enumerate(step["operations"]):
            operation |= {"module": f"part.{i % 2}", "source": f"model.py:{7 + i % 2}"}
        page = Page(remat.report(self.solved(step), step, time_limit=1, points=2).html())
        cells = page.texts["td"]
        for told in ("part.0", "part.1", "model.py:7", "model.py:8"):
            self.assertIn(told, cells)

    def test_files(self) -> None:
        step = problem()
        plan = self.solved(step)
        file, page = self.folder / "plan.json", self.folder / "plan.html"
        file.write_text(json.dumps({**plan, "problem_document": step}))
        remat.report(str(file), time_limit=1, points=2).save(page)
        self.assertTrue(page.read_text().startswith("<!doctype html>"))
        file.write_text(json.dumps(plan))
        for content, why in ((json.dumps(plan), "holds no problem"), ("{", "not JSON"), (json.dumps(step), "remat-schedule"), ("", "not JSON")):
            file.write_text(content)
            with self.assertRaisesRegex(remat.Error, f"plan.json: .*{why}"):
                remat.report(file)
        with self.assertRaisesRegex(remat.Error, "nothing.json: No such file"):
            remat.report(self.folder / "nothing.json")
        with self.assertRaisesRegex(remat.Error, "cannot write"):
            remat.report(plan, step, time_limit=1, points=2).save(self.folder / "none" / "x.html")
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["plan.html", "plan.json"])

    def test_browser(self) -> None:
        chromium = shutil.which("chromium")
        if chromium is None:
            self.skipTest("no Chromium here: tools/setup browser installs it, and tools/test --full does")
        step = problem(HOSTILE)
        page = self.folder / "page.html"
        press = "<script>document.getElementById('memory').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))</script></body>"
        page.write_text(remat.report(self.solved(step), step, time_limit=1, points=2).html().replace("</body>", press))
        shown = subprocess.run([chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()], capture_output=True, text=True,
                               timeout=60, env={**os.environ, "HOME": str(self.folder)})
        self.assertRegex(shown.stdout, r'<output id="readout">[0-9.]+ (B|KiB) at 0 s: computes f0 in layers.0</output>')


class Exports(unittest.TestCase):
    def test_snapshot(self) -> None:
        for copies in (False, True):
            step = problem(copies=copies)
            plan = remat.solve(step, "60%", time_limit=3)
            snapshot = pickle.loads(remat._core.memory_snapshot(json.dumps(plan), json.dumps(step)))
            segment, = snapshot["segments"]
            begin, end = segment["address"], segment["address"] + segment["total_size"]
            live: dict[int, int] = {}
            most = 0
            for entry in snapshot["device_traces"][0][1:]:
                if entry["action"] == "alloc":
                    self.assertTrue(begin <= entry["addr"] and entry["addr"] + entry["size"] <= end)
                    for other, bytes_ in live.items():
                        self.assertTrue(other + bytes_ <= entry["addr"] or entry["addr"] + entry["size"] <= other)
                    live[entry["addr"]] = entry["size"]
                    most = max(most, sum(live.values()))
                elif entry["action"] == "free_completed":
                    self.assertEqual(live.pop(entry["addr"]), entry["size"])
            self.assertEqual(most, remat.evaluate(step, plan)["peak"])
            at, left = begin, {}
            for block in segment["blocks"]:
                self.assertEqual(block["address"], at)
                at += block["size"]
                if block["state"] == "active_allocated":
                    left[block["address"]] = block["size"]
            self.assertEqual((at, left), (end, live))
            self.assertIn("unknown", {entry.get("category") for entry in snapshot["device_traces"][0]})

    def test_viewer_of_torch(self) -> None:
        try:
            from torch.cuda import _memory_viz
        except ImportError:
            self.skipTest("no torch")
        step = problem(HOSTILE)
        plan = remat.solve(step, "60%", time_limit=3)
        snapshot = pickle.loads(remat._core.memory_snapshot(json.dumps(plan), json.dumps(step)))
        for draw in (_memory_viz.trace_plot, _memory_viz.segment_plot):
            self.assertIn("Memory", draw(snapshot))
        self.assertIn("cudaMalloc", _memory_viz.trace(snapshot))
        total = sum(size for segment in snapshot["segments"] for size in [segment["allocated_size"]])
        self.assertIn("segments: 1", _memory_viz.segsum(snapshot))
        self.assertEqual(total, sum(v["bytes"] for v in step["values"] if v.get("held")) + 4000)  # held values and the target

    def test_trace(self) -> None:
        step = problem(copies=True)
        plan = remat.solve(step, "55%", solver="offmate", time_limit=3)
        events = json.loads(remat._core.chrome_trace(json.dumps(plan), json.dumps(step)))["traceEvents"]
        copies = [e for e in events if e.get("cat") in ("offload", "prefetch")]
        self.assertGreater(len(copies), 0)
        starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
        self.assertEqual(starts.keys(), ends.keys())
        self.assertEqual(sum(e["cat"] == "prefetch" for e in copies), sum(any(s["tid"] == e["tid"] and e["ts"] <= s["ts"] <= e["ts"] + e["dur"]
                                                                             for s in starts.values()) for e in copies if e["cat"] == "prefetch"))
        for i, start in starts.items():
            self.assertLess(start["ts"], ends[i]["ts"])
        peak = max(e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "memory")
        self.assertEqual(peak, remat.evaluate(step, plan)["peak"])


class Values(unittest.TestCase):
    def plan(self, **members: Any) -> remat.Plan:
        told = {"status": "optimal", "inputs": "Float[2]", "solver": "automatic", "peak": 3 << 20, "seconds": 1.1, "plain_seconds": 1.0, "bound": 1.05,
                "gap": 0.01, "smallest": 1 << 20, "smallest_bound": 1 << 19, "operations": 12, "recomputed": 2, "moved": 0, "waited": 0.0}
        return remat.Plan.of({**told, **members})

    def test_plan(self) -> None:
        plan = self.plan(again={"aten::mm"})
        self.assertEqual(plan.peak, plan["peak"])
        self.assertEqual({**plan}["again"], {"aten::mm"})
        self.assertNotIn("_step", plan)
        with self.assertRaises(KeyError):
            plan["_step"]
        self.assertEqual(plan, self.plan(again={"aten::mm"}))
        self.assertNotEqual(plan, self.plan(peak=1))
        self.assertEqual(pickle.loads(pickle.dumps(plan)), plan)
        self.assertEqual(repr(plan), "<remat.Plan optimal: 3 MiB, 10 % extra time>")
        self.assertTrue(str(plan).startswith("A step takes 3 MiB and 10 % extra time; 2 of 12 operations run again.\n"))
        self.assertIn("3145728 bytes", str(plan))
        Page(plan._repr_html_())
        with self.assertRaisesRegex(remat.Error, "only figures"):
            plan.document()

    @needs_torch
    def test_wrapped_model(self) -> None:
        import torch
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        model, x = torch.nn.Sequential(*layers), torch.randn(256, 64)
        remat.wrap(model, budget="70%", cache=False, time_limit=3)
        model(x).sum().backward()
        session = remat.of(model)
        plan = session.plan
        self.assertGreater(plan.recomputed, 0)
        document = json.loads(plan.document())
        step = document["problem_document"]
        truth = remat.evaluate(step, document)
        self.assertEqual((truth["peak"], truth["recomputed"]), (document["peak"], plan.recomputed))
        self.assertLessEqual(truth["peak"], document["budget"])
        self.assertIn("2", {operation.get("module") for operation in step["operations"]})
        report = session.report(time_limit=2, points=3)
        self.assertIn("arena", report)  # a report is still a text
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "plan.json"
            plan.save(file)
            report.save(file.with_suffix(".html"))
            plan.trace(file.with_suffix(".trace.json"))
            plan.memory_snapshot(file.with_suffix(".pickle"))
            page = Page(file.with_suffix(".html").read_text())
            self.assertIn(size(truth["peak"]), page.all("dd"))
            self.assertEqual(pathlib.Path(folder, "plan.json").read_text(), plan.document())
            self.assertEqual(pickle.loads(file.with_suffix(".pickle").read_bytes())["segments"][0]["device"], 0)
            self.assertIn("traceEvents", json.loads(file.with_suffix(".trace.json").read_text()))
            self.assertIn(size(truth["peak"]), remat.report(file))
        curve = remat.curve(model, (x,), points=4, time_limit=4)
        self.assertIn("● extra time", str(curve))
        self.assertTrue(curve._repr_svg_().startswith("<svg"))

    @needs_torch
    def test_sources(self) -> None:
        import torch
        from remat._sources import sources

        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x)

        line = f"{Block.forward.__code__.co_firstlineno} "
        found = sources(torch.nn.Sequential(Block(), torch.nn.Linear(2, 2)))
        self.assertEqual(found[""], "")
        for path in ("0", "0.inner", "0.inner.0"):
            self.assertIn("report.py:" + line, found[path])
        self.assertEqual(found["1"], "")

    @needs_torch
    def test_lines_of_the_code_that_calls_operators(self) -> None:
        import torch

        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.inner(x)
                return torch.tanh(x)

        first = Block.forward.__code__.co_firstlineno
        model = torch.nn.Sequential(Block(), Block())
        plan = remat.plan(model, (torch.randn(4, 8),), device=remat.Roofline(1e11, 1e10))
        problem = json.loads(plan.document())["problem_document"]
        named = [(o["name"], o.get("source")) for o in problem["operations"]]
        for name, line in (("aten::addmm+aten::sigmoid", first + 1), ("aten::tanh", first + 2)):
            self.assertEqual([source for n, source in named if n == name], [f"report.py:{line}"] * 2)
        cells = Page(plan.report(time_limit=1, points=2).html()).texts["td"]
        self.assertIn(f"report.py:{first + 1}", cells)
        self.assertIn(f"report.py:{first + 2}", cells)

    def temporary(self) -> pathlib.Path:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return pathlib.Path(folder.name)

    @needs_torch
    def test_lines_in_a_package_are_relative_to_it(self) -> None:
        import torch
        part = self.temporary() / "package_of_a_model/part"
        part.mkdir(parents=True)
        (part / "model.py").write_text("import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x).tanh()\n")
        with unittest.mock.patch.object(sys, "path", [str(part.parent.parent), *sys.path]):
            model = importlib.import_module("package_of_a_model.part.model").Net(8, 8)
        plan = remat.plan(model, (torch.randn(4, 8),), device=remat.Roofline(1e11, 1e10))
        problem = json.loads(plan.document())["problem_document"]
        self.assertIn("package_of_a_model/part/model.py:6", {o.get("source") for o in problem["operations"]})

    def test_version(self) -> None:
        self.assertRegex(remat.__version__, r"^\d+\.\d+\.\d+$")


if __name__ == "__main__":
    unittest.main()
