// SPDX-License-Identifier: Apache-2.0
/// @file
/// MILP backend on HiGHS (https://highs.dev, MIT licence). Its C interface is loaded at run time, so there is nothing to link and
/// no header.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/milp/backend.hpp>
#include <remat/milp/supervised.hpp>

namespace remat::highs {

namespace detail {

/// `HighsInt` of the usual builds; `api` refuses others.
using highs_int = int;

/// Start of the struct that a callback writes to. Its first member has been `int user_interrupt` since HiGHS 1.6; the rest is
/// never touched here.
struct callback_input {
  int user_interrupt;
};
using callback_type = void (*)(int type, const char* message, const void* output, callback_input* input, void* data);

/// The functions of highs_c_api.h used here.
struct api {
  void* (*create)();
  void (*destroy)(void*);
  const char* (*version)();
  highs_int (*sizeof_int)(const void*);
  highs_int (*set_bool)(void*, const char*, highs_int);
  highs_int (*set_int)(void*, const char*, highs_int);
  highs_int (*set_double)(void*, const char*, double);
  highs_int (*set_string)(void*, const char*, const char*);
  highs_int (*pass_mip)(void*, highs_int columns, highs_int rows, highs_int nonzeros, highs_int format, highs_int sense,
                        double offset, const double* cost, const double* lower, const double* upper, const double* row_lower,
                        const double* row_upper, const highs_int* start, const highs_int* index, const double* value,
                        const highs_int* integrality);
  highs_int (*set_solution)(void*, const double* columns, const double* rows, const double* column_duals,
                            const double* row_duals);
  highs_int (*set_callback)(void*, callback_type, void*);
  highs_int (*start_callback)(void*, int type);
  const void* (*output_item)(const void* output, const char* name);
  highs_int (*run)(void*);
  highs_int (*model_status)(const void*);
  highs_int (*int_info)(const void*, const char*, highs_int*);
  highs_int (*double_info)(const void*, const char*, double*);
  highs_int (*get_solution)(const void*, double* columns, double* column_duals, double* rows, double* row_duals);
  std::string path;

  /// @throws not_available if `where` cannot be loaded, lacks a function or has 64-bit integers
  explicit api(const std::string& where) : path(where) {
    void* library = dlopen(where.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) throw not_available(dlerror());
    const auto load = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw not_available(where + " has no function " + name);
    };
    load(create, "Highs_create");
    load(destroy, "Highs_destroy");
    load(version, "Highs_version");
    load(sizeof_int, "Highs_getSizeofHighsInt");
    load(set_bool, "Highs_setBoolOptionValue");
    load(set_int, "Highs_setIntOptionValue");
    load(set_double, "Highs_setDoubleOptionValue");
    load(set_string, "Highs_setStringOptionValue");
    load(pass_mip, "Highs_passMip");
    load(set_solution, "Highs_setSolution");
    load(set_callback, "Highs_setCallback");
    load(start_callback, "Highs_startCallback");
    load(output_item, "Highs_getCallbackDataOutItem");
    load(run, "Highs_run");
    load(model_status, "Highs_getModelStatus");
    load(int_info, "Highs_getIntInfoValue");
    load(double_info, "Highs_getDoubleInfoValue");
    load(get_solution, "Highs_getSolution");
    const std::unique_ptr<void, void (*)(void*)> h(create(), destroy);
    if (sizeof_int(h.get()) != sizeof(highs_int)) throw not_available(where + " was built with 64-bit integers");
  }
};

/// Adds `folder`/lib/python3*/site-packages/highspy/libhighs.so.1, the library of the highspy wheel in a Python environment.
inline void add_wheels(const std::filesystem::path& folder, std::vector<std::string>& found) {
  std::error_code ignored;
  for (const auto& python : std::filesystem::directory_iterator(folder / "lib", ignored)) {
    if (python.path().filename().string().rfind("python3", 0) != 0) continue;
    const auto wheel = python.path() / "site-packages" / "highspy" / "libhighs.so.1";
    if (std::filesystem::exists(wheel, ignored)) found.push_back(wheel.string());
  }
}

/// Paths where HiGHS may be, the most specific first. If `asked` is not empty, it is the only one.
inline std::vector<std::string> candidates(const std::string& asked) {
  namespace fs = std::filesystem;
  if (!asked.empty()) return {asked};
  if (const char* variable = std::getenv("REMAT_HIGHS"); variable && *variable) return {variable};
  std::vector<std::string> found = {"libhighs.so", "libhighs.so.1"};
#ifdef REMAT_HIGHS_DIR
  found.push_back((fs::path(REMAT_HIGHS_DIR) / "libhighs.so").string());
  found.push_back((fs::path(REMAT_HIGHS_DIR) / "libhighs.so.1").string());
#endif
  std::error_code ignored;
  if (const char* environment = std::getenv("VIRTUAL_ENV")) add_wheels(environment, found);
  for (auto start : {fs::current_path(ignored), fs::read_symlink("/proc/self/exe", ignored).parent_path()})
    for (auto folder = start; !folder.empty(); folder = folder.parent_path()) {
      add_wheels(folder / ".venv", found);
      if (folder == folder.root_path()) break;
    }
  return found;
}

/// Loads the first candidate that works.
/// @throws not_available if none works; says what was tried and what to install
inline std::shared_ptr<const api> load(const std::string& asked) {
  std::string tried;
  for (const auto& where : candidates(asked)) try {
      return std::make_shared<const api>(where);
    } catch (const not_available& why) {
      tried += std::string("\n  ") + why.what();
    }
  throw not_available(
      "HiGHS is not available; install it with 'pip install highspy', or set REMAT_HIGHS to the path of libhighs.so. Searched: "
      "the "
      "system's libraries, $VIRTUAL_ENV, and .venv in the current folder, the program's folder and their parents. Tried:" +
      tried);
}

}  // namespace detail

/// Solves MILPs with HiGHS 1.7.1 or later.
class backend {
 public:
  struct options {
    std::string library = {};  ///< path of libhighs.so; empty: $REMAT_HIGHS, the system, Python environments nearby
  };

  static constexpr std::size_t longest_row = 20;  ///< see `milp::backend`

  /// @throws not_available if no usable library is found; says what was tried and what to install
  explicit backend(const options& o) : api_(detail::load(o.library)) {}
  backend() : backend(options{}) {}

  /// True if a backend can be made.
  static bool available(const options& o) {
    try {
      detail::load(o.library);
      return true;
    } catch (const not_available&) {
      return false;
    }
  }
  static bool available() { return available(options{}); }

  std::string name() const { return "highs"; }
  std::string version() const { return api_->version(); }
  /// Path of the library in use.
  const std::string& library() const { return api_->path; }

  /// Solves `m`. Each call runs on a thread of its own. One reason is that HiGHS ties its worker threads to the calling thread,
  /// and their number cannot change afterwards. Some steps of HiGHS check no limit for seconds: see `milp::supervised`.
  /// @param m a valid model
  /// @param o limits, cutoff, start
  /// @return status, solution and bound; `milp::status::failed` if the system has no thread left
  /// @throws any exception of `o.poll`
  milp::solution solve(const milp::model& m, const milp::options& o) const {
    return milp::supervise(std::make_shared<job>(m, o, api_));
  }

 private:
  /// Constants of highs_c_api.h.
  enum : int { column_wise = 1, minimise = 1, point_is_feasible = 2 };
  enum : int { simplex_interrupt = 1, ipm_interrupt = 2, mip_improvement = 4, mip_interrupt = 6 };
  enum : int { optimal = 7, infeasible = 8, unbounded_or_infeasible = 9, unbounded = 10, objective_bound = 11 };
  enum : int { time_limit = 13, iteration_limit = 14, solution_limit = 16, interrupted = 17 };

  /// One call.
  class job : public milp::supervised {
   public:
    job(const milp::model& m, const milp::options& o, std::shared_ptr<const detail::api> api)
        : supervised(m, o), api_(std::move(api)) {}

    milp::solution work();

   private:
    static void watch(int type, const char*, const void* output, detail::callback_input* input, void* data);
    milp::solution read(void* highs, int ended) const;

    std::shared_ptr<const detail::api> api_;
  };

  std::shared_ptr<const detail::api> api_;
};

inline void backend::job::watch(int type, const char*, const void* output, detail::callback_input* input, void* data) {
  auto& w = *static_cast<job*>(data);
  const auto number = [&](const char* name, double otherwise) {
    const void* p = w.api_->output_item(output, name);
    return p ? *static_cast<const double*>(p) : otherwise;
  };
  if (type == mip_improvement)
    if (const auto* x = static_cast<const double*>(w.api_->output_item(output, "mip_solution")))
      if (const auto objective = number("mip_primal_bound", milp::infinity); w.improves(objective))
        w.report_solution(objective, Eigen::Map<const Eigen::VectorXd>(x, w.model_.columns()));
  const bool mip = type == mip_improvement || type == mip_interrupt;
  const bool stop = w.report_bound(mip ? number("mip_dual_bound", -milp::infinity) : -milp::infinity);
  if (stop && input) input->user_interrupt = 1;
}

inline milp::solution backend::job::work() {
  const auto& f = *api_;
  const std::unique_ptr<void, void (*)(void*)> handle(f.create(), f.destroy);
  auto* h = handle.get();
  const auto& m = model_;
  const auto& o = options_;
  f.set_bool(h, "output_flag", 0);
  f.set_int(h, "threads", static_cast<int>(o.threads));
  f.set_string(h, "parallel", o.threads > 1 ? "on" : "off");
  f.set_int(h, "random_seed", static_cast<int>(o.seed & 0x7fffffff));
  f.set_double(h, "mip_rel_gap", o.gap);
  if (o.seconds < milp::infinity) f.set_double(h, "time_limit", o.seconds);
  if (o.cutoff < milp::infinity) f.set_double(h, "objective_bound", o.cutoff);
  const std::vector<int> integrality(m.integer.begin(), m.integer.end());
  const bool passed =
      f.pass_mip(h, static_cast<int>(m.columns()), static_cast<int>(m.rows()), static_cast<int>(m.matrix.nonZeros()), column_wise,
                 minimise, m.offset, m.cost.data(), m.lower.data(), m.upper.data(), m.row_lower.data(), m.row_upper.data(),
                 m.matrix.outerIndexPtr(), m.matrix.innerIndexPtr(), m.matrix.valuePtr(), integrality.data()) >= 0;
  if (passed && o.start) f.set_solution(h, o.start->data(), nullptr, nullptr, nullptr);
  f.set_callback(h, watch, this);
  for (int type : {simplex_interrupt, ipm_interrupt, mip_improvement, mip_interrupt}) f.start_callback(h, type);
  int ended = 0;
  if (passed) {
    f.run(h);
    ended = f.model_status(h);
  }
  if (ended == unbounded_or_infeasible) {
    f.set_string(h, "presolve", "off");
    f.run(h);
    ended = f.model_status(h);
  }
  return read(h, ended);
}

/// Status, solution and bound at the end of a run.
inline milp::solution backend::job::read(void* h, int ended) const {
  const auto& f = *api_;
  const auto& m = model_;
  milp::solution s;
  const bool limited = ended == time_limit || ended == iteration_limit || ended == solution_limit || ended == interrupted;
  int point = 0;
  f.int_info(h, "primal_solution_status", &point);
  if ((ended == optimal || limited) && point == point_is_feasible) {
    std::vector<double> column_duals(m.columns()), row_values(m.rows()), row_duals(m.rows());
    s.x.resize(m.columns());
    f.get_solution(h, s.x.data(), column_duals.data(), row_values.data(), row_duals.data());
  }
  const bool mixed = std::find(m.integer.begin(), m.integer.end(), true) != m.integer.end();
  if (mixed && (ended == optimal || limited)) f.double_info(h, "mip_dual_bound", &s.bound);
  if (!mixed && ended == optimal) s.bound = m.objective(s.x);
  if (s.x.size() > 0)
    s.status = ended == optimal ? milp::status::optimal : milp::status::feasible;
  else if (limited)
    s.status = milp::status::limit;
  else if (ended == unbounded)
    s.status = milp::status::unbounded;
  else if (ended == infeasible || ended == objective_bound)
    s.status = options_.cutoff < milp::infinity ? milp::status::cutoff : milp::status::infeasible;
  return s;
}

static_assert(milp::backend<backend>);

}  // namespace remat::highs
