#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exit statuses, messages and outputs of the command-line program. One script in the order of the commands: longer than 400 lines.

usage: run.py REMAT SOURCE_ROOT
"""
import csv
import json
import os
import pathlib
import pickle
import pty
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "checker"))
sys.dont_write_bytecode = True
from check_schedule import judge  # noqa: E402

program, root = sys.argv[1], pathlib.Path(sys.argv[2])
instance = root / "bench/instances/resnet18.json"
folder = pathlib.Path(tempfile.mkdtemp())
failures = 0

#  x (held, 40) -> a (20) -> b (40, reads a): store-all needs 100, nothing less does.
SMALL = {
    "format": "remat-problem", "version": 1, "name": "small",
    "values": [{"name": "x", "bytes": 40, "held": True}, {"name": "a", "bytes": 20}, {"name": "b", "bytes": 40}],
    "operations": [{"name": "a", "inputs": [0], "outputs": [1], "seconds": 1}, {"name": "b", "inputs": [1], "outputs": [2], "seconds": 1}],
    "targets": [2],
}
STEPS = [["compute", 0], ["compute", 1], ["drop", 1]]


def run(*arguments):
    done = subprocess.run([program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stdout, done.stderr


def expect(what, status, *arguments, says=(), prints=()):
    """Runs the program, and checks its exit status and parts of its messages and output."""
    global failures
    code, out, err = run(*arguments)
    missing = [s for s in says if s not in err] + [s for s in prints if s not in out]
    told = err.startswith("remat: ") and err.count("\n") == 1  # one sentence
    if code != status or missing or (status in (0, 3, 4) and err) or (status == 2 and not told):
        failures += 1
        print(f"FAILED: {what}\n  {arguments}\n  exit {code}, expected {status}; missing {missing}\n  stdout: {out}\n  stderr: {err}")
    return out


def fail(what, *details):
    global failures
    failures += 1
    print("FAILED:", what, *details)


def put(name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def remat_size(bytes_):
    number, units = bytes_, ["B", "KiB", "MiB", "GiB"]
    while number >= 999.5:
        number, units = number / 1024, units[1:]
    return f"{number:.3g} {units[0]}"


def changed(**members):
    return {**json.loads(json.dumps(SMALL)), **members}


def schedule(steps):
    return {"format": "remat-schedule", "version": 1, "steps": steps}


small = put("small.json", SMALL)
# A training chain whose operations have two outputs each: not a chain for `rotor`. Store-all needs 101 bytes; 100 are enough.
odd = put("odd.json", {
    "format": "remat-problem", "version": 1, "name": "odd", "targets": [15],
    "values": [{"name": "x", "bytes": 1, "held": True}] + [{"name": f"v{i}", "bytes": 10} for i in range(16)],
    "operations": [{"name": f"o{i}", "outputs": [2 * i + 1, 2 * i + 2], "seconds": 1,
                    "inputs": ([2 * i - 1, 2 * i] if i else [0]) + ([15 - 2 * i, 16 - 2 * i] if i > 4 else [])} for i in range(8)],
})
good = put("good.json", schedule(STEPS))

# report
embedded, bare, page = folder / "embedded.json", put("bare.json", schedule(STEPS)), folder / "page.html"
expect("solve can keep the problem with the plan", 0, "solve", instance, "-b", "80%", "--time-limit", 2, "--with-problem", "-o", embedded,
       "--memory", folder / "plan.pickle")
snapshot = pickle.loads((folder / "plan.pickle").read_bytes())
if snapshot["segments"][0]["total_size"] < json.loads(embedded.read_text())["peak"]:
    fail("the snapshot is smaller than the peak")
expect("a plan with its problem is enough", 0, "report", embedded, "--time-limit", 2, "--points", 3, "-o", page)
text = page.read_text()
for piece in ("<!doctype html>", "Time against budget", remat_size(json.loads(embedded.read_text())["peak"])):
    if piece not in text:
        fail("the page lacks", piece)
expect("a plan that holds its problem is a plan as others", 0, "check", instance, embedded, prints=["valid"])
page.unlink()
expect("a plan without its problem", 2, "report", bare, "-o", page, says=["bare.json", "holds no problem", "--problem"])
expect("a problem for a plan without one", 0, "report", bare, "--problem", small, "--time-limit", 1, "-o", page)
page.unlink()
for name, content, why in (("text.json", "hello", "not JSON"), ("problem.json", SMALL, "remat-schedule"), ("wrong.json", schedule([["compute", 1]]), "step 0"),
                           ("empty.json", schedule([]), "no steps")):
    expect("no plan: " + name, 2, "report", put(name, content), "--problem", small, "-o", page, says=[name, why])
nothing = put("nothing.json", {"format": "remat-problem", "version": 1, "name": "nothing", "values": [{"bytes": 1}], "operations": [], "targets": []})
expect("a problem without operations", 0, "report", put("drops.json", schedule([["drop", 0]])), "--problem", nothing, "--time-limit", 1, "-o", page)
page.unlink()
expect("no file", 2, "report", folder / "none.json", "-o", page, says=["none.json"])
expect("no output", 2, "report", embedded, says=["--output"])
if page.exists():
    fail("a report that fails leaves a file")

# solve
plan = folder / "plan.json"
out = expect("solve", 0, "solve", instance, "--budget", "80%", "--solver", "min_cut", "--time-limit", 20, "-o", plan, "--json")
result, problem = json.loads(out), json.loads(instance.read_text())
verdict = judge(problem, json.loads(plan.read_text())["steps"])
if verdict["peak"] > result["budget"] or any(verdict[k] != result[k] for k in ("peak", "recomputed")):
    failures += 1
    print("FAILED: the schedule written is not the one reported", verdict, result)
held = sum(v["bytes"] for v in problem["values"] if v.get("held"))
if result["budget"] != int(held + 0.8 * (result["store_all_peak"] - held)):
    failures += 1
    print("FAILED: 80% is not held + 0.8 (store-all - held)", result, held)
missing = {"status", "solver", "budget", "bound", "gap", "peak", "seconds", "recomputed", "budget_bound", "elapsed"} - result.keys()
if missing:
    failures += 1
    print("FAILED: --json lacks", missing)
expect("the version", 0, "--version", prints=["".join(re.findall(r'REMAT_VERSION "(.*)"', (root / "include/remat/version.hpp").read_text()))])
expect("check of what solve wrote", 0, "check", instance, plan, "--budget", "80%", prints=["valid"])
expect("100% is enough", 0, "solve", instance, "-b", "100%", prints=["optimal"])
expect("the default solver", 0, "solve", small, "-b", "100")
expect("a start", 0, "solve", instance, "-b", "80%", "-s", "store_all", "--start", plan, "--json", prints=[f'"peak": {result["peak"]}'])
expect("a start for another problem", 2, "solve", small, "-b", "100", "--start", plan, says=["step"])
trace = folder / "plan.trace.json"
expect("a trace", 0, "solve", small, "-b", "100", "--trace", trace)
if not any(e["ph"] == "X" for e in json.loads(trace.read_text())["traceEvents"]):
    fail("trace", trace.read_text())
svg = folder / "plan.svg"
expect("drawings", 0, "solve", small, "-b", "100", "--timeline", "--svg", svg, prints=["┤", "100 B"])
if not svg.read_text().startswith("<svg"):
    failures += 1
    print("FAILED: no SVG")

# infeasible
out = expect("infeasible", 3, "solve", small, "-b", "99", "-o", folder / "none.json", prints=["infeasible", "100 bytes"])
if json.loads((folder / "none.json").read_text())["status"] != "infeasible":
    failures += 1
    print("FAILED: status of the document")
expect("below the held bytes", 3, "solve", small, "-b", "10", prints=["infeasible"])
expect("no budget", 3, "solve", small, "-b", "0", "--json", prints=['"infeasible"'])

# nothing found within the limit
expect("no time", 4, "solve", instance, "-b", "70%", "--solver", "min_cut", "--time-limit", 0, prints=["time_limit"])
# nothing found by a method that has ended, or that is for other graphs
expect("one schedule only", 4, "solve", instance, "-b", "70%", "--solver", "store_all", prints=["not_found", "store-all needs"])
expect("no chain", 4, "solve", odd, "-b", 100, "--solver", "rotor", prints=["not_applicable", "no chain"])
expect("compare without a chain", 0, "compare", odd, "-b", 100, "-s", "rotor,min_cut", prints=["not_applicable", "rotor: the graph has no chain"])

# bad budgets and options
for text in ("plenty", "-5GB", "12 apples", "1e999", "-3%", "nan", "", "8EiB", "9223372036854775808"):
    expect(f"budget {text!r}", 2, "solve", small, f"--budget={text}", says=[text or "--budget"])
for budget in (2**53 + 1, 2**63 - 1):
    out = expect("a budget of 64 bits", 0, "solve", small, "-b", budget, "--json")
    if json.loads(out)["budget"] != budget:
        fail("another budget than the one given", out)
expect("no budget at all", 2, "solve", small, says=["--budget"])
expect("unknown solver", 2, "solve", small, "-b", "100", "--solver", "magic", says=["magic", "min_cut", "checkmate"])
expect("unknown backend", 2, "solve", small, "-b", "100", "--backend", "cplex", says=["cplex"])
expect("negative time limit", 2, "solve", small, "-b", "100", "--time-limit=-1", says=["limits.seconds"])
expect("no threads", 2, "solve", small, "-b", "100", "--threads", "0", says=["limits.threads"])
expect("too many threads", 2, "solve", small, "-b", "100", "--threads", "100000", says=["limits.threads", "1024"])
expect("a seed that is no number", 2, "solve", small, "-b", "100", "--seed", "x", says=["--seed"])
expect("no command", 2, says=["see remat --help"])
expect("unknown command", 2, "improve", small)
expect("unknown option", 2, "info", small, "--verbose", says=["--verbose"])
expect("report without a page", 2, "report", small, says=["--output", "see remat report --help"])
expect("help", 0, "--help", prints=["solve", "check", "info", "Exit status"])
expect("help of a command", 0, "solve", "--help", prints=["--budget", "min_cut"])

# the effect of a seed and a gap
def plan_of(*options):
    expect("a plan", 0, "solve", instance, "-b", "60%", "-s", "min_cut", "-o", plan, *options)
    return json.loads(plan.read_text())["steps"]


if plan_of("--seed", 3) != plan_of("--seed", 3):
    fail("equal seeds give different schedules")
expect("a generous gap", 0, "solve", instance, "-b", "80%", "-s", "min_cut", "--gap", "0.5", prints=["optimal"])
expect("a gap out of range", 2, "solve", small, "-b", "100", "--gap", "1", says=["limits.gap"])
for seed in ("-1", "18446744073709551616", "1.5"):
    expect("a seed out of range", 2, "solve", small, "-b", "100", f"--seed={seed}", says=["--seed", "2^64", seed])
expect("the largest seed", 0, "solve", small, "-b", "100", "--seed", 2**64 - 1)
for option in ("--output", "--svg", "--trace", "--memory"):
    expect("a file without a name", 2, "solve", small, "-b", "100", option, "", says=[option, "no name of a file"])
expect("no such time", 2, "solve", small, "-b", "100", "--time-limit", "soon", says=["--time-limit"])
expect("a problem that is not there comes before the search", 2, "solve", folder / "absent.json", "-b", "100", says=["absent.json"])

# on a terminal: progress on the error stream, erased at the end; an interrupt ends the search with the best schedule so far
def on_terminal(*arguments, interrupt=False):
    ours, theirs = pty.openpty()
    process = subprocess.Popen([program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
            if interrupt:  # the search runs, and handles signals
                process.send_signal(signal.SIGINT)
                interrupt = False
    except OSError:  # the end, on Linux
        pass
    os.close(ours)
    out = process.communicate()[0]
    return process.returncode, out, shown.decode(errors="replace")


code, out, shown = on_terminal("solve", instance, "-b", "50%", "-s", "min_cut")
if code != 0 or not all(word in shown for word in ("best", "bound", "gap", " s ")) or not shown.endswith("\r\033[K"):
    fail("progress on a terminal", code, repr(shown))
code, out, shown = on_terminal("curve", root / "bench/instances/resnet50.json", "-s", "min_cut", "-n", 200, "--time-limit", 600, interrupt=True)
if code not in (0, 4) or out.count("\n") < 100:
    fail("an interrupted curve", code, out)

# curve
points = folder / "points.csv"
drawing = folder / "curve.svg"
out = expect("curve", 0, "curve", instance, "-n", 5, "-s", "min_cut,chen", "--svg", drawing, "-o", points, "--json")
answer = json.loads(out)
if [c["solver"] for c in answer["curves"]] != ["min_cut", "chen"]:
    fail("curves of both solvers", answer)
for c in answer["curves"]:
    by_budget = c["points"]
    if len(by_budget) != 5 or any(a["budget"] <= b["budget"] or a["seconds"] > b["seconds"] or a["peak"] > a["budget"] for a, b in zip(by_budget, by_budget[1:])):
        fail("a curve that is not monotone", c)
    if by_budget[0]["seconds"] != answer["store_all_seconds"]:
        fail("the first point is not store-all", c)
with points.open() as lines:
    rows = list(csv.DictReader(lines))
if len(rows) != 10 or float(rows[1]["seconds"]) != answer["curves"][0]["points"][1]["seconds"] or rows[9]["solver"] != "chen":
    fail("the CSV file", rows)
if not drawing.read_text().startswith("<svg"):
    fail("no SVG of the curve")
expect("curve of given budgets", 0, "curve", small, "-b", "100,99,200%", "-s", "min_cut", prints=["optimal", "infeasible", "160"])
expect("plot", 0, "curve", small, "-b", "100,120", "-s", "store_all", "--plot", prints=["●", "100 B"])
expect("nothing fits", 3, "curve", small, "-b", "99,50", "-s", "min_cut", "--json", prints=['"infeasible"'])
expect("nothing found", 4, "curve", instance, "-b", "70%", "-s", "min_cut", "--time-limit", 0)
expect("the default solver of curve", 0, "curve", small, "-n", 1)
as_json = folder / "points.json"
expect("points as JSON", 0, "curve", small, "-b", "100", "-s", "chen", "-o", as_json)
if json.loads(as_json.read_text())["curves"][0]["points"][0]["peak"] != 100:
    fail("the JSON file", as_json.read_text())
expect("both kinds of budgets", 2, "curve", small, "-b", "100", "-n", "3", says=["--points", "--budgets"])
expect("no points", 2, "curve", small, "-n", "0", "-s", "chen", says=["evenly"])
expect("a bad budget of several", 2, "curve", small, "-b", "100,many", "-s", "chen", says=["many"])
expect("an unknown solver of several", 2, "curve", small, "-b", "100", "-s", "chen,magic", says=["magic"])
expect("curve into nowhere", 2, "curve", small, "-b", "100", "-s", "chen", "-o", folder / "no" / "points.csv", says=["no/points.csv"])
expect("drawing into nowhere", 2, "curve", small, "-b", "100", "-s", "chen", "--svg", folder / "no" / "c.svg", says=["no/c.svg"])

# compare
out = expect("compare --json", 0, "compare", instance, "-b", "60%", "-s", "min_cut,chen,store_all", "--json")
answer = json.loads(out)
if [s["name"] for s in answer["solvers"]] != ["min_cut", "chen", "store_all"] or answer["solvers"][2]["status"] != "not_found":
    fail("compare --json", answer)
if answer["bound"] != max(s["bound"] for s in answer["solvers"]):
    fail("the best bound", answer)
names = [s["name"] for s in json.loads(expect("list --json", 0, "list", "--json"))["solvers"]]
expect("compare", 0, "compare", small, "-b", "100", prints=names + ["gap", "elapsed"])
expect("compare below what is possible", 3, "compare", small, "-b", "99", "-s", "chen,min_cut", prints=["infeasible"])
expect("compare without time", 4, "compare", instance, "-b", "70%", "-s", "min_cut,store_all", "--time-limit", 0)
expect("compare with an unknown solver", 2, "compare", small, "-b", "100", "-s", "magic", says=["magic", "min_cut"])
expect("compare without a budget", 2, "compare", small, says=["--budget"])

# options of solvers
expect("solve with options", 0, "solve", small, "-b", "100", "-s", "min_cut", "--option", "cuts=4", "--option", "effort=0", prints=["min_cut (cuts=4, effort=0)"])
for text, why in (("cut=4", ['no option "cut"', "cuts"]), ("cuts=1", ["cuts must be", "from 2"]), ("cuts", ["name=value", '"cuts"']), ("=4", ["name=value"])):
    expect(f"solve with the option {text}", 2, "solve", small, "-b", "100", "-s", "min_cut", "--option", text, says=why)
expect("an option twice", 2, "solve", small, "-b", "100", "-s", "min_cut", "--option", "cuts=4", "--option", "cuts=5", says=["cuts is given twice"])
expect("list --options", 0, "list", "--options", prints=["cut.size=12", "from 1 to"])
if not any(o["name"] == "saved" and o["default"] == "6" for s in json.loads(expect("options as JSON", 0, "list", "--json"))["solvers"] for o in s["options"]):
    fail("options as JSON", "no saved=6")

# list
out = expect("list", 0, "list", prints=["min_cut", "highs", "glpk", "--backend"])
libraries = json.loads(expect("list --json", 0, "list", "--json"))["backends"]
if [b["name"] for b in libraries] != ["highs", "glpk"]:
    fail("list --json", libraries)
for b in libraries:
    if not b["available"]:
        expect(f"{b['name']} asked for, and not there", 2, "solve", instance, "-b", "60%", "-s", "checkmate", "--backend", b["name"], says=[b["name"]])
        continue
    expect(f"checkmate on {b['name']}", 0, "solve", small, "-b", "100", "-s", "checkmate", "--backend", b["name"], prints=[f"checkmate/{b['name']}"])

# every solver by its name
for name in names:
    wants_library = name.startswith(("checkmate", "moments")) and not any(b["available"] for b in libraries)
    expect(f"{name}, where all fits", 2 if wants_library else 0, "solve", small, "-b", "100", "-s", name, prints=[] if wants_library else ["optimal"])

# bad files: the message names the file and the place
text = instance.read_text()
bad = {
    "truncated": (text[:5000], "values["),
    "empty": ("", "not JSON"),
    "no json": ("hello", "not JSON"),
    "array": ([], "not an object"),
    "schedule instead": (schedule([]), "format"),
    "version": (changed(version=3), "version"),
    "dangling input": (changed(operations=[{"name": "a", "inputs": [9], "outputs": [1], "seconds": 1}]), "operations[0].inputs[0]: no value 9"),
    "dangling target": (changed(targets=[7]), "targets[0]: no value 7"),
    "cyclic": (changed(operations=[{"inputs": [2], "outputs": [1], "seconds": 1}, {"inputs": [1], "outputs": [2], "seconds": 1}]),
               "operations[0].inputs: value 2"),
    "two producers": (changed(operations=SMALL["operations"] + [{"inputs": [], "outputs": [1], "seconds": 1}]), "operations[2].outputs: value 1"),
    "negative bytes": (changed(values=[{"bytes": -1}] + SMALL["values"][1:]), "values[0].bytes"),
    "huge bytes": (changed(values=[{"bytes": 2**53 + 1}] + SMALL["values"][1:]), "values[0].bytes"),
    "NaN seconds": (json.dumps(SMALL).replace('"seconds": 1', '"seconds": NaN'), "operations[0].seconds"),
    "deep": ('{"format": ' + "[" * 100_000, "nested deeper"),
    "repeated member": (json.dumps(SMALL)[:-1] + ', "name": "again"}', "name: appears twice"),
}
for name, (content, place) in bad.items():
    path = put("bad.json", content)
    target = put("kept.json", "precious")
    expect(name, 2, "solve", path, "-b", "100", "-o", target, says=["bad.json", place])
    expect(name, 2, "info", path, says=["bad.json", place])
    expect(name, 2, "check", path, good, says=["bad.json", place])
    expect(name, 2, "curve", path, "-o", target, says=["bad.json", place])
    expect(name, 2, "compare", path, "-b", "100", says=["bad.json", place])
    if target.read_text() != "precious":
        failures += 1
        print(f"FAILED: {name}: a file was written over")
expect("a file that is not there", 2, "info", folder / "absent.json", says=["absent.json", "No such file"])
expect("an empty problem", 0, "solve", put("empty.json", changed(values=[], operations=[], targets=[])), "-b", "0", prints=["optimal"])
expect("no operations", 3, "solve", put("still.json", changed(operations=[], targets=[0])), "-b", "10", prints=["100 bytes"])
expect("a directory", 2, "info", folder, says=["is a directory"])
for option in ("-o", "--svg", "--trace"):
    out = expect("nowhere to write", 2, "solve", small, "-b", "100", option, folder / "no" / "plan.json", says=["cannot write", "no/plan.json"])
    if out:
        fail("nowhere to write: searched first", out)
if [p.name for p in folder.iterdir() if p.name.endswith(".part")]:
    failures += 1
    print("FAILED: temporary files are left")

# check
out = expect("check --json", 0, "check", small, good, "--json")
if json.loads(out) != {"valid": True, "peak": 100, "seconds": 2.0, "recomputed": 0}:
    failures += 1
    print("FAILED: check --json", out)
expect("within budget", 0, "check", small, good, "-b", "100")
expect("over budget", 1, "check", small, good, "-b", "99", "--json", says=["over budget by 1 bytes", "step 1"], prints=['"within_budget": false'])
expect("held bytes over budget", 1, "check", small, good, "-b", "10", says=["before the first step"])
for steps, message in (
    (STEPS[1:], "step 0 (compute 1): input 1 is not on the device"),
    (STEPS + [["drop", 2]], "target 2 is not on the device"),
    (STEPS + [["compute", 5]], "step 3 (compute 5): no such operation"),
    (STEPS + [["compute", -1]], "step 3 (compute -1): no such operation"),
    (STEPS + [["drop", 2**40]], "no such value"),
    (STEPS + [["swap", 1]], 'step 3 ("swap" 1): no such action'),
    (STEPS + [["offload", 2]], "step 3 (offload 2): the problem allows no copies"),
    ([["drop", 0]] + STEPS, "step 0 (drop 0): a held value is dropped"),
):
    out = expect(message, 1, "check", small, put("wrong.json", schedule(steps)), "--json", says=[message], prints=['"valid": false', '"step"'])
expect("a step that is no step", 2, "check", small, put("wrong.json", schedule([["drop"]])), says=["wrong.json", "steps[0]"])
expect("a problem instead of a schedule", 2, "check", small, small, says=["format"])
expect("bad budget of check", 2, "check", small, good, "-b", "much", says=["much"])

# On several tiers: the optimizer on the host, in place.
HOSTED = {
    "format": "remat-problem", "version": 2, "name": "hosted", "targets": [2], "next": [[2, 0]], "offload": {"to_host": 10, "to_device": 10},
    "tiers": [{"name": "device"}, {"name": "host", "budget": 20}],
    "values": [{"name": "w", "bytes": 10, "starts": "host"}, {"name": "g", "bytes": 10}, {"name": "w'", "bytes": 10, "ends": "host"}],
    "operations": [{"name": "gradient", "inputs": [0], "outputs": [1], "seconds": 4},
                   {"name": "adamw", "on": "host", "inputs": [0, 1], "outputs": [2], "seconds": 3, "overwrites": [[2, 0]]}],
}
hosted = put("hosted.json", HOSTED)
hosted_steps = [["prefetch", 0], ["compute", 0], ["drop", 0], ["copy", 1, "device", "host"], ["drop", 1], ["compute", 1], ["drop", 1, "host"]]
step_on_tiers = put("hosted-step.json", {"format": "remat-schedule", "version": 2, "steps": hosted_steps})
expect("check on tiers", 0, "check", hosted, step_on_tiers, "-b", "20", prints=["peak 20 B", "9 s", "host: peak 20 B (20 bytes) of 20 B"])
out = expect("check on tiers --json", 0, "check", hosted, step_on_tiers, "--json")
if json.loads(out)["peaks"] != {"device": 20, "host": 20}:
    fail("peaks of tiers", out)
expect("drawn on tiers", 0, "check", hosted, step_on_tiers, "--timeline", "--svg", folder / "hosted.svg", "--trace", folder / "hosted-trace.json", prints=["hosted", "━", "·", "      host  "])
if "host: 20 B of 20 B" not in (folder / "hosted.svg").read_text():
    fail("the memory of the host is drawn", (folder / "hosted.svg").read_text())
HOSTED["tiers"][1]["budget"] = 19
expect("a tier over its budget", 1, "check", put("tight.json", HOSTED), step_on_tiers, says=["step 3 (copy 1): the host needs 20 bytes, its budget is 19"])
expect("info on tiers", 0, "info", hosted, prints=["device host (20 B), 2 links", "1 targets are its sources"])
answer = folder / "hosted-answer.json"
expect("solve on tiers", 0, "solve", hosted, "-b", "20", "-o", answer, "--timeline", prints=["optimal", "20 B (20 bytes) on the host", "time        9 s", "gap 0.00 %"])
expect("check of that", 0, "check", hosted, answer, "-b", "20", prints=["9 s"])
if json.loads(answer.read_text())["peaks"] != {"device": 20, "host": 20}:
    fail("peaks of an answer on tiers", answer.read_text())
if json.loads(expect("solve on tiers --json", 0, "solve", hosted, "-b", "100%", "--json"))["peaks"]["host"] != 20:
    fail("peaks of solve --json")
expect("less than the device needs", 3, "solve", hosted, "-b", "19", prints=["infeasible"])
expect("less than the host needs", 4, "solve", folder / "tight.json", "-b", "20", "--time-limit", "1", prints=["not_found", "within the budget of the host, 19 bytes"])
expect("curve on tiers", 0, "curve", hosted, "--points", "3", prints=["optimal"])
expect("compare on tiers", 0, "compare", hosted, "-b", "20", prints=["optimal", "not_applicable", "revolve plans for a device and copies to a host"])

# Weights that start and end on a disk pass through the host in both directions.
HOSTED["tiers"] = [{"name": "device"}, {"name": "host", "budget": 20}, {"name": "disk"}]
HOSTED["links"] = [{"from": "host", "to": "disk", "rate": 5}, {"from": "disk", "to": "host", "rate": 5}]
HOSTED["values"][0]["starts"] = HOSTED["values"][2]["ends"] = "disk"
on_disk = put("on-disk.json", HOSTED)
expect("info on three tiers", 0, "info", on_disk, prints=["device host (20 B) disk, 4 links"])
expect("solve on three tiers", 0, "solve", on_disk, "-b", "20", "-o", answer, "--timeline", "--svg", folder / "on-disk.svg",
       prints=["20 B (20 bytes) on the host", "on the disk", "host>disk", "disk>host"])
if json.loads(answer.read_text())["peaks"]["host"] != 20 or "host: 20 B of 20 B" not in (folder / "on-disk.svg").read_text():
    fail("peaks of an answer on three tiers", answer.read_text())
expect("check on three tiers", 0, "check", on_disk, answer, "-b", "20", prints=["disk: peak"])
expect("curve on three tiers", 0, "curve", on_disk, "--points", "3", prints=["20 B"])
expect("compare on three tiers", 0, "compare", on_disk, "-b", "20", prints=["offload_only", "revolve plans for a device and copies to a host"])
HOSTED["tiers"][1]["budget"] = 19
expect("less than the host needs beside a disk", 4, "solve", put("tight-disk.json", HOSTED), "-b", "20", "--time-limit", "1", prints=["within the budget of the host, 19 bytes"])
HOSTED["links"][1] = {"from": "disk", "to": "device", "rate": 5}
expect("a disk on no chain", 4, "solve", put("no-chain.json", HOSTED), "-b", "20", "--solver", "offmate",
       prints=["values[0].starts: the disk is on no chain of tiers that are linked both ways (device, host)"])

# layout
hard, offsets = root / "bench/layout/A.csv", folder / "offsets.csv"
expect("layout", 0, "layout", hard, "--capacity", "1MiB", "-o", offsets, prints=["fits: 154 allocations in 1048576 of 1048576 bytes"])
rows = [{k: int(v) for k, v in row.items()} for row in csv.DictReader(offsets.open())]
given = [{k: int(v) for k, v in row.items()} for row in csv.DictReader(hard.open())]
if [{k: v for k, v in row.items() if k != "offset"} for row in rows] != given:
    fail("the rows of layout are not those that were given")
for i, a in enumerate(rows):
    if a["offset"] < 0 or a["offset"] + a["size"] > 1 << 20:
        fail("an allocation is not within the capacity", a)
    for b in rows[:i]:
        if a["lower"] < b["upper"] and b["lower"] < a["upper"] and a["offset"] < b["offset"] + b["size"] and b["offset"] < a["offset"] + a["size"]:
            fail("two allocations overlap", a, b)
refused = folder / "refused.csv"
expect("an overload", 3, "layout", hard, "--capacity", "1048575", "-o", refused, prints=["A.csv does not fit in 1048575 bytes", "at instant 966656, 1048576 bytes", "1 too many"])
# At most 7 bytes are alive at each instant, but every layout needs 8.
FRAGMENTED = "id,lower,upper,size\n0,0,1,3\n1,0,2,4\n2,1,4,2\n3,1,5,1\n4,2,3,4\n5,3,5,3\n6,3,4,1\n7,4,6,3\n8,5,6,4\n"
expect("an exhausted search", 3, "layout", put("fragmented.csv", FRAGMENTED), "--capacity", "7", "-o", refused, prints=["search exhausted"])
expect("one byte more", 0, "layout", put("fragmented.csv", FRAGMENTED), "--capacity", "8", prints=["fits"])
expect("no time", 4, "layout", hard, "--capacity", "1MiB", "--time-limit", "0", "-o", refused, prints=["no layout found", "no proof"])
for name, text, says in (("short", "id,lower,upper,size\n0,1,2\n", ["line 2", "3 fields"]), ("word", "id,lower,upper,size\n0,1,x,3\n", ["line 2", 'field "upper"']),
                         ("column", "id,lower,upper\n", ["line 1", 'field "size" is missing'])):
    expect("malformed: " + name, 2, "layout", put(name + ".csv", text), "--capacity", "9", "-o", refused, says=[name + ".csv", *says])
expect("no capacity", 2, "layout", hard, says=["--capacity"])
expect("a bad capacity", 2, "layout", hard, "--capacity", "-1", says=["-1"])
expect("no such file", 2, "layout", folder / "no.csv", "--capacity", "1", says=["no.csv"])
if refused.exists():
    fail("a file was written without a layout")

# info
out = json.loads(expect("info --json", 0, "info", small, "--json"))
if (out["held_bytes"], out["store_all_peak"], out["store_all_seconds"], out["budget_bound"]) != (40, 100, 2, 100):
    failures += 1
    print("FAILED: info --json", out)
expect("info", 0, "info", instance, prints=["resnet18", "165"])

# names with control characters: all commands show ESC, DEL and the 8-bit CSI as in JSON
wild = put("wild.json", {**SMALL, "name": "red\x1b[31m\x7f\x9bK name"})
shown = "red\\u001b[31m\\u007f\\u009bK name"
for what, status, *arguments in [("info", 0, "info", wild), ("solve", 0, "solve", wild, "-b", "100", "--timeline"), ("solve none", 3, "solve", wild, "-b", "50"),
                                 ("curve", 0, "curve", wild, "-n", "2", "--plot", "--time-limit", "1"), ("compare", 0, "compare", wild, "-b", "100", "-s", "min_cut")]:
    out = expect(f"{what} of a wild name", status, *arguments, prints=[shown] if what != "compare" else [])
    if any(c in out for c in "\x1b\x7f\x9b"):
        fail(f"{what} lets control characters through", repr(out))
if json.loads(expect("info --json of a wild name", 0, "info", wild, "--json"))["name"] != "red\x1b[31m\x7f\x9bK name":
    fail("JSON changes a name")

print("all as expected" if not failures else f"{failures} failures")
sys.exit(1 if failures else 0)
