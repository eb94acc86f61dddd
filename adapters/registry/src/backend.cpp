// SPDX-License-Identifier: Apache-2.0
#include "backend.hpp"

#include <vector>

#include <remat/core/error.hpp>
#include <remat/registry/registry.hpp>
#ifdef REMAT_WITH_HIGHS
#include <remat/highs/backend.hpp>
#endif
#ifdef REMAT_WITH_GLPK
#include <remat/glpk/backend.hpp>
#endif

namespace remat::registry {

namespace {

const char* const to_install = "; for HiGHS: pip install highspy; for GLPK: install libglpk-dev and build again";

[[noreturn]] void refuse(const std::string& what) { throw not_available(what + to_install); }

#if defined(REMAT_WITH_HIGHS) || defined(REMAT_WITH_GLPK)
/// Tries to make a backend. @return its state
template <class B>
backend_state ask(const char* name) {
  try {
    const B b;
    if constexpr (requires { b.version() + b.library(); })
      return {name, true, b.version() + ", " + b.library()};
    else
      return {name, true, ""};
  } catch (const not_available& why) {
    const std::string what = why.what();
    return {name, false, what.substr(0, what.find('\n'))};
  }
}
#endif

}  // namespace

milp::any_backend make_backend(const std::string& name) {
#ifdef REMAT_WITH_HIGHS
  if (name == "highs" || (name == "auto" && highs::backend::available())) return highs::backend();
#endif
#ifdef REMAT_WITH_GLPK
  if (name == "glpk" || name == "auto") return glpk::backend();
#endif
  refuse((name == "auto" ? "no MILP library is" : name + " is not") + " available to this build of remat");
}

bool without_milp(const std::string& name) {
  if (name != "auto") return false;
  try {
    make_backend(name);
    return false;
  } catch (const not_available&) {
    return true;
  }
}

std::vector<backend_state> backends() {
  [[maybe_unused]] const auto missing = [](const char* name) { return backend_state{name, false, "not part of this build"}; };
  std::vector<backend_state> all;
#ifdef REMAT_WITH_HIGHS
  all.push_back(ask<highs::backend>("highs"));
#else
  all.push_back(missing("highs"));
#endif
#ifdef REMAT_WITH_GLPK
  all.push_back(ask<glpk::backend>("glpk"));
#else
  all.push_back(missing("glpk"));
#endif
  return all;
}

}  // namespace remat::registry
