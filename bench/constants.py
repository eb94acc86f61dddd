#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows how sensitive plans are to private constants of the headers: loss and planning time with half and twice each value.

    python3 bench/constants.py [NAME...] [--compiler g++] [--budgets .65 .8] [--time-limit 20]

NAME is a constant of CONSTANTS; the default is all of them. Each value is compiled into its own program, with a copy of the headers in
a temporary folder. This takes a minute or more per value. Prints a table in Markdown: mean loss (%) and mean planning time (s) over
three instances and the budgets. The loss is the extra time over store-all. For `smallest budget` the loss is the budget in % of
store-all's peak. For `moments` the number is the bound in % above store-all's time, and larger is better. A constant such as 1.02
stands for 2 %, so half of it is 1.01. "-": a budget has no plan, or the program does not compile.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
INSTANCES = [ROOT / f"bench/instances/{name}.json" for name in ("gpt2-layers-2-seq-256", "resnet18", "unet-depth-4")]

# Measure: (headers, body of `loss` in C++). The body returns the loss for the problem `p`, `budget` and limits `l`; {} if there is no plan.
PLAN = ("const auto r = remat::solve({0}, budget, {1}, l); if (!r.found()) return {{}};"
        "return 100 * (r.seconds / p.total_seconds() - 1);")
MEASURES = {
    "rotor": ("solver/rotor.hpp", PLAN.format("p", "remat::rotor()")),
    "rotor, no table": ("solver/rotor.hpp", PLAN.format("p", "remat::rotor({.table_links = 1})")),
    "twremat": ("solver/twremat.hpp", PLAN.format("p", "remat::twremat()")),
    "hierarchical": ("solver/hierarchical.hpp", PLAN.format("p", "remat::hierarchical<>()")),
    "improved": ("solver/improved.hpp>\n#include <remat/solver/min_cut.hpp", PLAN.format("p", "remat::improved<remat::min_cut>()")),
    "offmate": ("solver/offmate.hpp", PLAN.format("p.with_copies(remat::copy_rates{6e9, 6e9})", "remat::offmate<>()")),
    "moments": ("solver/moments.hpp>\n#include <remat/highs/backend.hpp",
                "const auto r = remat::solve(p, budget, remat::moments<remat::highs::backend>(), l);"
                "return 100 * (r.bound / p.total_seconds() - 1);"),
    "smallest budget": ("solver/min_cut.hpp>\n#include <remat/core/smallest_budget.hpp",
                        "const auto r = remat::smallest_budget(p, remat::min_cut(), l); if (!r.found()) return {};"
                        "return 100.0 * double(r.peak) / double(remat::measure_store_all(p).peak);"),
}

# Name, header, measure.
CONSTANTS = [
    ("first_rows", "bound/multi_cut_bound.hpp", "moments"),
    ("least_tries", "bound/multi_cut_bound.hpp", "moments"),
    ("light_in_long", "bound/multi_cut_model.hpp", "moments"),
    ("narrowest", "chain/fastest_persistent.hpp", "rotor, no table"),
    ("chunk", "chain/persistent_table.hpp", "rotor"),
    ("prices", "chain/lagrangian_bounds.hpp", "rotor, no table"),
    ("tighten_within", "copies/copy_search.hpp", "offmate"),
    ("max_repaired", "hierarchy/join_by_chain.hpp", "hierarchical"),
    ("reach", "hierarchy/part_chain.hpp", "hierarchical"),
    ("max_operations", "order/destroy_repair.hpp", "improved"),
    ("block", "order/slot_memory.hpp", "improved"),
    ("near", "solver/hierarchical.hpp", "hierarchical"),
    ("max_sets", "solver/lower_peak.hpp", "smallest budget"),
    ("mixtures", "solver/lower_peak.hpp", "smallest budget"),
    ("max_parts", "solver/rotor.hpp", "rotor"),
    ("min_look_back", "structure/nested_cuts.hpp", "rotor"),
    ("tries", "structure/partition.hpp", "rotor"),
    ("min_ratio", "structure/separator_tree.hpp", "twremat"),
]

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/json.hpp>
#include <remat/%s>
std::optional<double> loss(const remat::problem& p, remat::bytes_t budget, const remat::limits& l) { %s }
int main(int, char** given) {
  const auto p = remat::read_problem(given[1]);
  const auto room = double(remat::measure_store_all(p).peak - p.held_bytes());
  const remat::limits l{.seconds = std::atof(given[3])};
  const remat::monitor clock(l);
  const auto lost = loss(p, p.held_bytes() + remat::bytes_t(std::atof(given[2]) * room), l);
  if (!lost) return 1;
  std::printf("%%.17g %%.17g", *lost, clock.elapsed());
}
"""


def scaled(text, factor):
    value = float(text)
    if "." in text:
        return repr(1 + (value - 1) * factor if 1 < value < 1.1 else value * factor)
    return str(int(value * factor))


def measure(given, header, text, what):
    """[mean loss, mean seconds] with `text` as the content of `header`. None if the program does not compile, or a budget has no plan."""
    headers, loss = MEASURES[what]
    with tempfile.TemporaryDirectory() as folder:
        include = pathlib.Path(folder, "include")
        shutil.copytree(ROOT / "include", include)
        pathlib.Path(include, "remat", header).write_text(text)
        source, program = pathlib.Path(folder, "main.cpp"), pathlib.Path(folder, "main")
        source.write_text(PROGRAM % (headers, loss))
        command = [given.compiler, "-std=c++20", "-O2", f"-I{include}", f"-I{ROOT / 'adapters/highs/include'}",
                   "-isystem", given.eigen, str(source), "-o", str(program), "-ldl", "-pthread"]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0:
            return None
        rows = []
        for instance in INSTANCES:
            for budget in given.budgets:
                done = subprocess.run([program, instance, budget, str(given.time_limit)], capture_output=True, text=True)
                if done.returncode != 0:
                    return None
                rows.append([float(x) for x in done.stdout.split()])
        return [sum(column) / len(rows) for column in zip(*rows)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--eigen", default="/usr/include/eigen3")
    parser.add_argument("--budgets", nargs="+", default=[".65", ".8"])
    parser.add_argument("--time-limit", type=float, default=20)
    given = parser.parse_args()
    print("| header | constant | value | measured by | half | as it is | twice |\n|---|---|---|---|---|---|---|")
    as_it_is = {}
    for name, header, what in CONSTANTS:
        if given.names and name not in given.names:
            continue
        path = ROOT / "include/remat" / header
        number = re.compile(rf"(constexpr[^;]*\b{name} =\s+)([\d'.]+)")
        found = number.search(path.read_text())
        if found is None:
            parser.error(f"{header} has no constant {name}")
        value = found[2].replace("'", "")
        if what not in as_it_is:
            as_it_is[what] = measure(given, header, path.read_text(), what)
        texts = [number.sub(rf"\g<1>{scaled(value, factor)}", path.read_text(), count=1) for factor in (0.5, 2)]
        half, twice = (measure(given, header, text, what) for text in texts)
        cells = " | ".join(f"{m[0]:.2f}, {m[1]:.1f} s" if m else "-" for m in (half, as_it_is[what], twice))
        print(f"| `{header}` | `{name}` | {value} | {what} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
