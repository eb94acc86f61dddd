// SPDX-License-Identifier: Apache-2.0
/// @file
/// The module `remat._core`: the planner for Python. Documents of the exchange formats go in and out as text. `remat/_planner.py`
/// converts them to dictionaries.
#include <malloc.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/chrome_trace.hpp>
#include <remat/io/curve.hpp>
#include <remat/io/file.hpp>
#include <remat/io/json.hpp>
#include <remat/io/plan_document.hpp>
#include <remat/registry/registry.hpp>
#include <remat/report/html.hpp>
#include <remat/report/memory_snapshot.hpp>
#include <remat/report/report.hpp>

namespace py = pybind11;

namespace {

remat::problem problem_of(const std::string& text) {
  std::istringstream in(text);
  return remat::read_problem(in);
}

/// An observer that ends a search when Python's `observer` returns False. Ctrl-C raises KeyboardInterrupt.
auto watched_by(const py::object& observer) {
  return [&observer](const remat::progress& now) {
    py::gil_scoped_acquire hold;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (observer.is_none()) return remat::control::go_on;
    const auto answer = observer(now.stage, now.elapsed, now.best, now.bound);
    return py::isinstance<py::bool_>(answer) && !answer.cast<bool>() ? remat::control::stop : remat::control::go_on;
  };
}

std::string solve(const std::string& problem, const std::string& budget, const std::string& solver,
                  const remat::registry::option_values& options, const std::string& backend, double seconds, unsigned threads,
                  std::uint64_t seed, double gap, const py::object& observer, const std::string& start) {
  const auto p = problem_of(problem);
  const auto method = remat::registry::find(solver).make(backend, options);
  const auto bytes = remat::parse_budget(budget, p);
  remat::result r;
  {
    py::gil_scoped_release free;
    const remat::limits l{.seconds = seconds, .threads = threads, .seed = seed, .gap = gap};
    const auto watch = watched_by(observer);
    if (start.empty()) {
      r = remat::solve(p, bytes, method, l, watch);
    } else {
      std::istringstream in(start);
      r = remat::solve(p, bytes, method, remat::start_from(remat::read_schedule(in, p).result.schedule), l, watch);
    }
  }
  std::ostringstream out;
  remat::write_schedule(out, r, p);
  return out.str();
}

py::dict evaluate(const std::string& problem, const std::string& schedule) {
  std::istringstream in(schedule);
  const auto p = problem_of(problem);
  const auto e = remat::evaluate(p, remat::read_schedule(in, p).result.schedule);
  py::dict peaks;
  for (std::size_t t = 0; t < e.peaks.size(); ++t) peaks[py::str(p.tiers()[t].name)] = e.peaks[t];
  return py::dict(py::arg("peak") = e.peak, py::arg("peaks") = peaks, py::arg("seconds") = e.seconds,
                  py::arg("recomputed") = e.recomputed, py::arg("memory") = e.memory);
}

remat::plan_document plan_of(const std::string& text, const std::string& problem) {
  std::istringstream in(text);
  if (problem.empty()) return remat::read_plan(in);
  std::istringstream problem_text(problem);
  return remat::read_plan(in, remat::read_problem_document(problem_text));
}

/// Peak (bytes) and time (seconds) of a plan, as `evaluate` computes them.
std::pair<remat::bytes_t, double> plan_figures(const std::string& plan, const std::string& problem) {
  const auto d = plan_of(plan, problem);
  const auto e = remat::evaluate(d.problem.problem, d.result.schedule);
  return {e.peak, e.seconds};
}

std::string html_report(const std::string& plan, const std::string& problem, const std::string& solver, double seconds,
                        std::size_t points, const py::object& observer) {
  py::gil_scoped_release free;
  const auto method = remat::registry::find(solver).make("auto");
  const remat::limits l{.seconds = seconds, .gap = 1e-3};
  return remat::html_report(remat::compare_plan(plan_of(plan, problem), method, l, points, watched_by(observer)));
}

std::string chrome_trace(const std::string& plan, const std::string& problem) {
  const auto d = plan_of(plan, problem);
  return remat::chrome_trace(d.problem.problem, d.result.schedule);
}

py::bytes memory_snapshot(const std::string& plan, const std::string& problem) {
  const auto d = plan_of(plan, problem);
  return remat::memory_snapshot(d.problem.problem, d.result.schedule, remat::labels_of(d.problem));
}

/// Points of a curve: budget (bytes), peak (bytes; negative: no schedule), time (seconds), bound (seconds).
using curve_points = std::vector<std::tuple<remat::bytes_t, remat::bytes_t, double, double>>;

std::string curve_text(const curve_points& points, double base, const std::string& label) {
  remat::labelled_curve c{label, {}};
  for (const auto& [budget, peak, seconds, bound] : points) {
    auto& r = c.points.emplace_back();
    r.status = peak < 0 ? remat::status::infeasible : remat::status::feasible;
    r.budget = budget;
    r.peak = peak;
    r.seconds = seconds;
    r.bound = bound;
  }
  return remat::curve_text({c}, {.base = base});
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  py::register_exception<remat::error>(m, "Error", PyExc_ValueError);
  m.def("solve", &solve);
  m.def("evaluate", &evaluate);
  m.def("solvers", [] {
    std::vector<std::pair<std::string, std::string>> all;
    for (const auto& method : remat::registry::methods()) all.emplace_back(method.name, method.summary);
    return all;
  });
  m.def("solver_options", [](const std::string& solver) {
    std::vector<std::tuple<std::string, std::string, std::string, std::string>> all;
    for (const auto& o : remat::registry::find(solver).options()) all.emplace_back(o.name, o.standard, o.range, o.summary);
    return all;
  });
  m.def("check_solver", [](const std::string& solver, const remat::registry::option_values& options) {
    remat::registry::find(solver).make("auto", options);
  });
  m.def("plan_figures", &plan_figures);
  m.def("html_report", &html_report);
  m.def("chrome_trace", &chrome_trace);
  m.def("memory_snapshot", &memory_snapshot);
  m.def("curve_text", &curve_text);
  m.def("format_bytes", &remat::format_bytes);
  m.def("format_seconds", &remat::format_seconds);
  m.def("require_writable", [](const std::string& path) { remat::require_writable(path); });
  m.def("write_file", [](const std::string& path, const py::bytes& content) { remat::write_file(path, std::string(content)); });
  m.attr("__version__") = REMAT_VERSION;
  m.def("parse_bytes", [](const std::string& text) { return remat::parse_bytes(text); });
  m.def("trim", [] {  // returns freed memory to the system, where the C library supports it
#ifdef __GLIBC__
    const py::gil_scoped_release free;
    malloc_trim(0);
#endif
  });
}
