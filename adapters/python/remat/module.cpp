// SPDX-License-Identifier: Apache-2.0
/// @file
/// The planner for Python: documents of the exchange formats in and out, as text; `remat/__init__.py` makes them dictionaries.
#include <malloc.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/json.hpp>
#include <remat/registry/registry.hpp>

namespace py = pybind11;

namespace {

remat::problem problem_of(const std::string& text) {
  std::istringstream in(text);
  return remat::read_problem(in);
}

std::string solve(const std::string& problem, const std::string& budget, const std::string& solver, const std::string& backend,
                  double seconds, unsigned threads, std::uint64_t seed, double gap, const py::object& observer,
                  const std::string& start) {
  const auto p = problem_of(problem);
  const auto method = remat::registry::find(solver).make(backend);
  const auto bytes = remat::parse_budget(budget, p);
  remat::result r;
  {
    py::gil_scoped_release free;
    const remat::limits l{.seconds = seconds, .threads = threads, .seed = seed, .gap = gap};
    const auto watch = [&](const remat::progress& now) {
      py::gil_scoped_acquire hold;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (observer.is_none()) return remat::control::go_on;
      const auto answer = observer(now.stage, now.elapsed, now.best, now.bound);
      return py::isinstance<py::bool_>(answer) && !answer.cast<bool>() ? remat::control::stop : remat::control::go_on;
    };
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
  m.def("parse_bytes", [](const std::string& text) { return remat::parse_bytes(text); });
  m.def("trim", [] {  // gives memory that has been freed back to the system, where the C library can do that
#ifdef __GLIBC__
    const py::gil_scoped_release free;
    malloc_trim(0);
#endif
  });
}
