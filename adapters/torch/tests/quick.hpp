// SPDX-License-Identifier: Apache-2.0
/// @file
/// Modules that run by quickly made plans.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/pytorch/wrap.hpp>
#include <remat/registry/registry.hpp>

namespace testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double slower = 20;
#else
constexpr double slower = 1;
#endif

/// A solver from the compiled library. A solver compiled with the tests would take several times as long, because the tests are
/// hardly optimised.
inline remat::pytorch::plan_solver named(const char* method, const remat::registry::option_values& options = {}) {
  return [solver = remat::registry::find(method).make("auto", options)](
             const remat::problem& p, remat::bytes_t within, const remat::limits& l, const remat::pytorch::plan_observer& watch) {
    return remat::solve(p, within, solver, l, watch);
  };
}

/// @param seconds time limit of a search, in an ordinary build
inline remat::pytorch::wrap_options quick(const remat::pytorch::budget& b = "100%", double seconds = 5) {
  remat::pytorch::wrap_options o;
  o.budget = b;
  o.limits.seconds = o.first_seconds = slower * seconds;
  o.limits.gap = 0.5;
  o.solver = named("min_cut");
  o.profile = {.cache = {}, .seconds = 0.05};
  o.cache = remat::pytorch::plan_cache("");  // plans of earlier runs must not decide a test
  return o;
}

/// A C++ module with one way to call it.
class runner : public remat::pytorch::session {
 public:
  runner(std::shared_ptr<::torch::nn::Module> module, remat::pytorch::forward_function forward, remat::pytorch::wrap_options o)
      : session(std::make_shared<remat::pytorch::module_model>(std::move(module)), std::move(o)), call_{std::move(forward)} {}
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) { return session::forward(call_, inputs); }
  void prepare(const std::vector<at::Tensor>& inputs) { session::prepare(call_, inputs); }

 private:
  remat::pytorch::invocation call_;
};

}  // namespace testing
