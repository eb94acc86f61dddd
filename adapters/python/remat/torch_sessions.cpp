// SPDX-License-Identifier: Apache-2.0
/// @file
/// Bindings of sessions. The GIL is released, except for code of the model (its forward, and the functions of
/// `remat._planned_model.Source`) and for logs.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/pareto_curve.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/curve.hpp>
#include <remat/io/plan_document.hpp>
#include <remat/pytorch/device.hpp>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/paged_memory.hpp>
#include <remat/pytorch/session.hpp>
#include <remat/registry/registry.hpp>
#include <remat/report/modules.hpp>

#include "bindings.hpp"
#include "search_watch.hpp"
#include "shared_object.hpp"
#include "translated.hpp"

namespace remat::python {
namespace {

/// A module of Python as a model, through `remat._planned_model.Source`.
class python_model final : public rp::model {
 public:
  python_model(std::string name, py::object source) : name_(std::move(name)), source_(shared(std::move(source))) {}
  std::string name() const override { return name_; }
  std::vector<rp::named_tensor> parameters() override { return tensors("parameters"); }
  std::vector<rp::named_tensor> buffers() override { return tensors("buffers"); }
  std::string signature() override {
    py::gil_scoped_acquire hold;
    return source_->attr("signature")().cast<std::string>();
  }
  bool changed() override {
    py::gil_scoped_acquire hold;
    return source_->attr("changed")().cast<bool>();
  }
  void put_back() override {
    py::gil_scoped_acquire hold;
    source_->attr("put_back")();
  }

 private:
  std::vector<rp::named_tensor> tensors(const char* what) {
    py::gil_scoped_acquire hold;
    std::vector<rp::named_tensor> list;
    for (const auto& item : source_->attr(what)().cast<py::list>()) {
      const auto pair = item.cast<py::tuple>();
      list.push_back({pair[0].cast<std::string>(), pair[1].cast<at::Tensor>()});
    }
    return list;
  }

  std::string name_;
  std::shared_ptr<py::object> source_;
};

rp::budget budget_of(const std::string& text, bool activations) {
  if (text.empty()) return rp::budget(remat::max_bytes);
  if (!activations || text.ends_with('%')) return rp::budget(text);
  return rp::budget::activations(remat::parse_bytes(text));
}

/// Parts of a `remat.Roofline`: operations per second by type and for other types, bytes per second, seconds per call.
using roofline_parts = std::tuple<std::vector<std::pair<at::ScalarType, double>>, double, double, double>;

rp::device_rates rates_of(const std::optional<roofline_parts>& parts) {
  if (!parts) return {};
  const auto& [rates, others, bytes, overhead] = *parts;
  return [known = std::map<at::ScalarType, double>(rates.begin(), rates.end()), others = others, bytes = bytes,
          overhead = overhead](at::ScalarType type) {
    const auto found = known.find(type);
    return remat::roofline{found == known.end() ? others : found->second, bytes, overhead};
  };
}

/// A plan and its problem as a document.
/// @param sources per path of a module: file, line and name of its `forward`
std::string document(const rp::step_plan& p, const std::map<std::string, std::string>& sources) {
  const auto& r = p.report;
  remat::result found;
  found.status = r.status;
  found.solver = r.solver;
  found.schedule = p.schedule;
  const auto e = remat::evaluate(p.problem, p.schedule);
  found.peak = e.peak;
  found.seconds = e.seconds;
  found.bound = std::min(r.bound, e.seconds);
  const auto beside = r.held() - p.problem.held_bytes();  // held bytes outside the problem: not in its budget
  found.budget = r.budget == remat::max_bytes ? e.peak : std::max(e.peak, r.budget - beside);
  std::ostringstream out;
  remat::write_plan(out, found, p.problem, remat::labelled(p.problem, sources, p.lines));
  return out.str();
}

class python_session {
 private:
  static rp::invocation invocation(py::object call, std::string signature, py::object note) {
    return {.forward =
                [call = shared(std::move(call))](const std::vector<at::Tensor>& tensors) {
                  py::gil_scoped_acquire hold;
                  return (*call)(tensors).cast<std::vector<at::Tensor>>();
                },
            .signature = std::move(signature),
            .note = shared(std::move(note))};
  }

  /// Calls `f`. Ctrl-C ends its searches, and `f` continues with their best schedules. If there is no schedule, the exception of
  /// the signal is raised.
  template <class F>
  void uninterrupted(F f) {
    interrupted_->forget();
    const std::shared_ptr<void> after(nullptr, [line = line_](void*) { line->clear(); });
    translated([&] {
      try {
        f();
        interrupted_->raise_if_pressed();
      } catch (const rp::over_budget&) {
        if (interrupted_->pressed()) interrupted_->raise();
        throw;
      }
    });
  }

 public:
  python_session(std::string name, py::object source, const std::string& budget, bool activations, const std::string& solver,
                 const remat::registry::option_values& solver_options, double seconds, double gap, std::uint64_t seed,
                 std::size_t verify, const std::string& on_new_shape, const std::optional<std::string>& cache, py::object log,
                 const std::optional<roofline_parts>& device, const std::optional<std::string>& disk,
                 const std::string& disk_budget, bool gradients_leave, bool plan_weights, remat::bytes_t max_budget,
                 remat::bytes_t on_host, bool graph, const std::string& steps_on, bool follow, bool strict,
                 remat::bytes_t optimizer, double first_seconds)
      : interrupted_(std::make_shared<interruption>()), line_(std::make_shared<terminal_line>()) {
    auto trained = std::make_shared<python_model>(std::move(name), std::move(source));
    const auto tell = shared(std::move(log));
    const auto new_shapes = on_new_shape == "nearest" ? rp::new_shape::nearest
                            : on_new_shape == "plan"  ? rp::new_shape::plan
                            : on_new_shape == "plain" ? rp::new_shape::plain
                                                      : rp::new_shape::error;
    translated([&] {
      rp::meter::install();
      model_ = trained;
      host_before_ = rp::meter::live() - model_bytes_on(c10::kCPU);
      if (!steps_on.empty()) steps_on_ = c10::Device(steps_on);
      settle_device();
      rp::wrap_options o;
      o.steps_on = steps_on_;
      o.budget = budget_of(budget, activations);
      o.limits = {.seconds = seconds, .seed = seed, .gap = gap};
      o.solver = [method = remat::registry::find(solver).make("auto", solver_options)](
                     const remat::problem& p, remat::bytes_t b, const remat::limits& l, const rp::plan_observer& watch) {
        return remat::solve(p, b, method, l, watch);
      };
      o.watch = [stop = interrupted_, line = line_](const remat::progress& now) {
        line->show(now);
        return stop->look();
      };
      o.solver_name = solver + (solver_options.empty() ? "" : " " + remat::registry::to_string(solver_options));
      if (cache) o.cache = rp::plan_cache(*cache);
      if (cache && cache->empty()) o.profile.cache.clear();
      o.device = rates_of(device);
      if (disk) o.far = rp::on_disk(*disk, disk_budget.empty() ? remat::max_bytes : remat::parse_bytes(disk_budget));
      if (on_host >= 0) o.host_budget = on_host;
      o.gradients_leave = gradients_leave;
      o.graph = graph;
      o.follow = follow;
      o.strict = strict;
      o.optimizer = optimizer;
      o.first_seconds = first_seconds;
      if (plan_weights) o.fetched = rp::worth_fetching;
      if (max_budget >= 0) o.max_budget = max_budget;
      o.new_shapes = new_shapes;
      o.verify = verify;
      o.log = [tell, line = line_](const std::string& text) {
        line->clear();
        py::gil_scoped_acquire hold;
        (*tell)(text);
      };
      o.warn = [tell, line = line_](const std::string& text) {
        line->clear();
        py::gil_scoped_acquire hold;
        (*tell)(text, true);
      };
      run_ = {new rp::session(std::move(trained), std::move(o)), [](rp::session* held) {
                py::gil_scoped_release free;  // the destructor waits for a thread that may need the GIL to log
                delete held;
              }};
    });
  }

  std::pair<std::vector<at::Tensor>, py::object> forward(py::object call, std::string signature,
                                                         const std::vector<at::Tensor>& inputs, py::object note) {
    const auto c = invocation(std::move(call), std::move(signature), std::move(note));
    std::shared_ptr<void> used;
    if (!stepped_) translated([&] { settle_device(); });
    stepped_ = true;
    std::vector<at::Tensor> outputs;
    uninterrupted([&] { outputs = run_->forward(c, inputs, &used); });
    return {std::move(outputs), *std::static_pointer_cast<py::object>(used)};
  }
  void prepare(py::object call, std::string signature, const std::vector<at::Tensor>& inputs, py::object note) {
    const auto c = invocation(std::move(call), std::move(signature), std::move(note));
    uninterrupted([&] { run_->prepare(c, inputs); });
  }

  std::string report() {
    return translated([&] { return run_->report().text(); });
  }
  py::dict memory() {
    const auto r = translated([&] { return run_->has_used_plan() ? run_->report() : rp::report{}; });
    // Memory that was in use before may have been freed since, so a difference can be negative.
    const auto beyond = [](remat::bytes_t peak, remat::bytes_t before) { return std::max<remat::bytes_t>(0, peak - before); };
    return py::dict(py::arg("budget") = r.budget, py::arg("peak") = beyond(on_->use().peak, before_),
                    py::arg("planned") = r.total(), py::arg("arena") = r.arena, py::arg("held") = r.held(),
                    py::arg("live") = on_->use().live, py::arg("host") = beyond(rp::meter::peak(), host_before_),
                    py::arg("disk") = r.far, py::arg("to_disk") = r.moved_out, py::arg("from_disk") = r.moved_in,
                    py::arg("fetched") = r.fetched, py::arg("unplanned") = r.unplanned_bytes,
                    py::arg("reserved") = on_->use().reserved, py::arg("workspaces") = r.workspaces);
  }
  py::dict plan() {
    auto step = translated([&] { return run_->planned(); });
    auto plan = as_dict(step.report);
    const auto& operations = step.problem.operations();
    std::set<remat::index_t> once;
    std::set<std::string> again;
    for (auto i : remat::compute_order(step.schedule))
      if (!once.insert(i).second) {
        std::istringstream names(operations[i].name);  // one operator, or several joined by '+'
        for (std::string name; std::getline(names, name, '+');) again.insert(name);
      }
    plan["again"] = again;
    plan["step"] = std::move(step);
    return plan;
  }
  static py::dict as_dict(const rp::report& r) {
    return py::dict(
        py::arg("status") = std::string(to_string(r.status)), py::arg("inputs") = r.planned_for, py::arg("solver") = r.solver,
        py::arg("fallback") = r.fallback, py::arg("peak") = r.total(), py::arg("seconds") = r.step_seconds,
        py::arg("plain_seconds") = r.store_all_seconds, py::arg("bound") = r.bound, py::arg("gap") = r.gap,
        py::arg("smallest") = r.smallest, py::arg("smallest_bound") = r.smallest_bound, py::arg("operations") = r.operations,
        py::arg("recomputed") = r.recomputed, py::arg("moved") = r.moved_out + r.moved_in, py::arg("waited") = r.waited);
  }
  std::vector<py::dict> plans() {
    std::vector<py::dict> list;
    for (const auto& r : translated([&] { return run_->reports(); })) list.push_back(as_dict(r));
    return list;
  }
  /// Memory of the plan used last by kind, in bytes.
  py::dict parts() {
    const auto p = translated([&] { return run_->planned(); });
    const auto& r = p.report;
    return py::dict(py::arg("parameters") = r.parameters, py::arg("buffers") = r.buffers, py::arg("inputs") = r.inputs,
                    py::arg("constants") = r.constants, py::arg("optimizer") = r.optimizer, py::arg("workspaces") = r.workspaces,
                    py::arg("workspace") = r.workspace, py::arg("held") = r.held(), py::arg("plain_peak") = r.plain_peak,
                    py::arg("problem_held") = p.problem.held_bytes());
  }
  /// Time against budget for the step planned last.
  /// @return {points, SVG document}
  py::tuple curve(const std::string& solver, const remat::registry::option_values& solver_options, double seconds, double gap,
                  std::uint64_t seed, std::size_t points) {
    std::vector<remat::result> found;
    const auto picture = translated([&] {
      const auto planned = run_->planned();
      const auto& p = planned.problem;
      interrupted_->forget();
      found = remat::pareto_curve(p, remat::evenly{points}, remat::registry::find(solver).make("auto", solver_options),
                                  remat::limits{.seconds = seconds, .seed = seed, .gap = gap},
                                  [&](const remat::progress&) { return interrupted_->look(); });
      remat::correct_bounds(p, found, planned.counted_twice, gap);
      interrupted_->raise_if_pressed();
      if (interrupted_->pressed() && std::none_of(found.begin(), found.end(), [](const auto& r) { return r.found(); }))
        interrupted_->raise();
      return remat::curve_svg({{solver, found}}, {.title = p.name(), .base = planned.report.store_all_seconds});
    });
    py::list list;
    for (const auto& r : found)
      list.append(py::dict(py::arg("budget") = r.budget, py::arg("status") = std::string(to_string(r.status)),
                           py::arg("peak") = r.found() ? py::object(py::int_(r.peak)) : py::none(),
                           py::arg("seconds") = r.found() ? py::object(py::float_(r.seconds)) : py::none(),
                           py::arg("bound") = r.bound));
    return py::make_tuple(list, picture);
  }
  void reset_peak() {
    rp::meter::reset_peak();
    on_->reset_peak();
  }
  void set_budget(const std::string& text, bool activations) {
    translated([&] { run_->set_budget(budget_of(text, activations)); });
  }
  void invalidate() {
    translated([&] { run_->invalidate(); });
  }
  void release() {
    translated([&] { run_->release(); });
  }
  /// From now on, Ctrl-C ends a call with KeyboardInterrupt, and not only its search. For functions that search many times.
  void end_when_interrupted() { interrupted_->always_raise(); }

 private:
  std::shared_ptr<interruption> interrupted_;
  std::shared_ptr<terminal_line> line_;
  std::shared_ptr<rp::session> run_;
  remat::bytes_t model_bytes_on(c10::Device where) const {
    auto model = rp::tensors_of(model_->parameters());
    for (auto& t : rp::tensors_of(model_->buffers())) model.push_back(std::move(t));
    std::erase_if(model, [&](const auto& t) { return t.device() != where; });
    return rp::unpaged_bytes(model);
  }
  /// Finds the device of the model, which may move between `wrap` and the first step.
  void settle_device() {
    auto* on = &rp::host_device();
    if (steps_on_) on = &rp::device_of(*steps_on_);
    for (const auto& t : rp::tensors_of(model_->parameters()))
      if (!t.is_cpu() && !t.is_meta()) on = &rp::device_of(t.device());
    if (on == on_ && settled_) return;
    on_ = on;
    settled_ = true;
    before_ = on_->use().live - model_bytes_on(on_->which());
  }

  std::shared_ptr<python_model> model_;
  std::optional<c10::Device> steps_on_;
  bool settled_ = false, stepped_ = false;
  rp::device* on_ = &rp::host_device();          ///< device of the model
  remat::bytes_t before_ = 0, host_before_ = 0;  ///< bytes in use without the model before `wrap`: on `on_`, on the host
};

/// Wraps a member function for Python: translates exceptions of PyTorch as PyTorch's own functions do.
template <class F>
struct as_torch;
template <class R, class... A>
struct as_torch<R (python_session::*)(A...)> {
  template <R (python_session::*f)(A...)>
  static R call(python_session& s, A... arguments) {
    HANDLE_TH_ERRORS
    return (s.*f)(std::forward<A>(arguments)...);
    END_HANDLE_TH_ERRORS_PYBIND
  }
};
template <auto f>
constexpr auto bound = &as_torch<decltype(f)>::template call<f>;

}  // namespace

void bind_sessions(py::module_& m) {
  m.def("check_budget", [](const std::string& text, bool activations) { translated([&] { budget_of(text, activations); }); });
  py::class_<rp::step_plan>(m, "StepPlan")
      .def("document", [](const rp::step_plan& p, const std::map<std::string, std::string>& sources) {
        return translated([&] { return document(p, sources); });
      });
  py::class_<python_session>(m, "Session")
      .def(py::init<std::string, py::object, const std::string&, bool, const std::string&, const remat::registry::option_values&,
                    double, double, std::uint64_t, std::size_t, const std::string&, const std::optional<std::string>&, py::object,
                    const std::optional<roofline_parts>&, const std::optional<std::string>&, const std::string&, bool, bool,
                    remat::bytes_t, remat::bytes_t, bool, const std::string&, bool, bool, remat::bytes_t, double>())
      .def("forward", bound<&python_session::forward>)
      .def("prepare", bound<&python_session::prepare>)
      .def("report", bound<&python_session::report>)
      .def("memory", bound<&python_session::memory>)
      .def("plan", bound<&python_session::plan>)
      .def("plans", bound<&python_session::plans>)
      .def("reset_peak", bound<&python_session::reset_peak>)
      .def("invalidate", bound<&python_session::invalidate>)
      .def("parts", bound<&python_session::parts>)
      .def("curve", bound<&python_session::curve>)
      .def("set_budget", bound<&python_session::set_budget>)
      .def("release", bound<&python_session::release>)
      .def("end_when_interrupted", bound<&python_session::end_when_interrupted>);
}

}  // namespace remat::python
