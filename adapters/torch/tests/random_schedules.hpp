// SPDX-License-Identifier: Apache-2.0
/// @file
/// Random schedules of captured steps, and the results of their execution.
#pragma once

#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <random>
#include <remat/copies/schedule_copies.hpp>
#include <remat/core/evaluate_tiers.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <thread>

#include "compare.hpp"
#include "models.hpp"

namespace executor_tests {

using namespace remat;
using namespace remat::pytorch;

struct prepared {
  std::shared_ptr<const program> step;
  std::optional<bindings> tensors;
  program_profile profiles;
  problem p;
};

inline prepared prepare(const models::sample& s) {
  prepared x;
  const auto c = capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers());
  x.step = c.step;
  x.tensors = c.tensors;
  x.profiles = profile(*x.step, {.cache = {}, .seconds = 0});
  x.p = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name);
  return x;
}

/// The layout of the heuristics, for tests that need no better one.
constexpr layout_options first_layout = {.tries = 0};

/// First computations in order. Before each node, some random nodes run again, together with everything they need.
inline schedule random_schedule(const problem& p, unsigned seed, double share) {
  std::mt19937 random(seed);
  std::vector<operation_id> order;
  std::vector<bool> fresh(p.values().size());
  for (index_t n = 0; n < p.operations().size(); ++n) {
    if (n > 0 && random() % 1000 < 1000 * share) {
      const auto again = static_cast<index_t>(random() % n);
      if (!p.operations()[again].once) order.push_back(again);
    }
    order.push_back(n);
  }
  return with_drops(p, order);
}

/// Drops all values of the forward that the backward needs, and recomputes each before its first use there.
inline schedule recompute_all(const problem& p, index_t loss) {
  std::vector<operation_id> order;
  std::vector<bool> there(p.values().size(), false);
  auto compute = [&](auto& self, index_t n) -> void {
    for (auto v : p.operations()[n].inputs)
      if (!p.is_source(v) && !there[v]) self(self, p.producer(v));
    order.push_back(n);
    for (auto v : p.operations()[n].outputs) there[v] = true;
  };
  for (index_t n = 0; n < p.operations().size(); ++n) {
    compute(compute, n);
    if (n != loss) continue;
    for (index_t v = 0; v < p.values().size(); ++v)
      if (!p.is_source(v) && p.producer(v) < loss && !p.operations()[p.producer(v)].once && !p.is_target(v)) there[v] = false;
  }
  return with_drops(p, order);
}

/// The same computations. Values go to far memory and come back at random, and values that start there are fetched.
inline schedule with_random_copies(const problem& p, const schedule& s, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<bool> here(p.values().size()), far(p.values().size()), wanted(p.values().size());
  for (value_id v = 0; v < here.size(); ++v) {
    far[v] = p.values()[v].starts != device_tier;
    here[v] = p.is_source(v) && !far[v];
    wanted[v] = p.is_source(v);
  }
  schedule made;
  const auto bring = [&](value_id v) {
    if (here[v]) return;
    made.prefetch(v);
    here[v] = true;
  };
  for (const auto& x : s.steps) {
    if (x.what == action::drop) {
      if (here[x.value()]) made.drop(x.value());
      here[x.value()] = wanted[x.value()] = false;
      continue;
    }
    const auto& op = p.operations()[x.operation()];
    for (auto v : op.inputs) bring(v);
    made.compute(x.operation());
    for (auto v : op.outputs) here[v] = wanted[v] = true;
    for (value_id v = 0; v < here.size(); ++v) {
      if (!wanted[v] || !p.values()[v].movable || p.values()[v].bytes == 0 || random() % 4 != 0) continue;
      if (!here[v]) {
        bring(v);
        continue;
      }
      if (!far[v] || (p.plain() && random() % 4 == 0)) made.offload(v);
      far[v] = true;
      if (random() % 2 == 0) continue;
      made.drop(v);
      here[v] = false;
    }
  }
  for (auto v : p.targets()) bring(v);
  return made;
}

/// A link whose copies begin late.
class late_link final : public remat::pytorch::link {
 public:
  explicit late_link(unsigned seed) : random_(seed) {}
  ticket copy(const block& to, const block& from, std::vector<ticket> after) override {
    struct nap final : event {
      explicit nap(int us) : microseconds(us) {}
      bool reached() const override { return false; }
      void wait() const override { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }
      int microseconds;
    };
    after.push_back(std::make_shared<nap>(random_() % 8 == 0 ? 300 : 0));
    return inner_->copy(to, from, std::move(after));
  }

 private:
  std::mt19937 random_;
  std::unique_ptr<remat::pytorch::link> inner_ = host_link();
};

struct outcome {
  std::vector<at::Tensor> outputs, grads, input_grads, buffers;
  at::Tensor generator;
};

inline outcome eager(const models::sample& s) {
  outcome r;
  auto outputs = s.forward(s.inputs);
  r.outputs = copies_of(outputs);
  std::vector<at::Tensor> wanted = s.module->parameters();
  std::erase_if(wanted, [](const auto& t) { return !t.requires_grad(); });
  const auto n = wanted.size();
  for (const auto& t : s.inputs)
    if (t.requires_grad()) wanted.push_back(t);
  auto g = ::torch::autograd::grad({models::loss_of(outputs)}, wanted, {}, false, false, true);
  r.grads = copies_of({g.begin(), g.begin() + static_cast<std::ptrdiff_t>(n)});
  r.input_grads = copies_of({g.begin() + static_cast<std::ptrdiff_t>(n), g.end()});
  r.buffers = copies_of(s.module->buffers());
  r.generator = state_of_test_generator();
  return r;
}

/// Gradients of the parameters that require one; undefined if there is none.
/// @param given the gradients that `take` received
inline outcome finished(const models::sample& s, executor& e, const std::vector<at::Tensor>& outputs, const bindings& tensors,
                        const executor::taker& take = {}, const std::vector<at::Tensor>& taken = {}) {
  outcome r;
  r.outputs = copies_of(outputs);
  std::vector<at::Tensor> leaves, given;
  const auto& step = e.plan().step();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    leaves.push_back(outputs[i].detach());
    if (step.differentiable[i]) leaves.back().requires_grad_();
  }
  std::vector<at::Tensor> wanted;
  for (const auto& l : leaves)
    if (l.requires_grad()) wanted.push_back(l);
  const auto g = ::torch::autograd::grad({models::loss_of(leaves)}, wanted);
  std::size_t next = 0;
  for (const auto& l : leaves) given.push_back(l.requires_grad() ? g[next++] : at::Tensor());
  auto grads = e.backward(given, {}, take);
  for (std::size_t i = 0; i < taken.size(); ++i)
    if (!grads.parameters[i].defined()) grads.parameters[i] = taken[i];
  for (const auto& p : s.module->parameters()) {
    if (!p.requires_grad()) continue;
    r.grads.emplace_back();
    for (std::size_t i = 0; i < step.parameters.size(); ++i)
      if (tensors[step.parameters[i]].is_same(p)) r.grads.back() = grads.parameters[i].clone();
  }
  for (std::size_t i = 0; i < s.inputs.size(); ++i)
    if (s.inputs[i].requires_grad()) r.input_grads.push_back(grads.inputs[i].clone());
  r.buffers = copies_of(s.module->buffers());
  r.generator = state_of_test_generator();
  return r;
}

inline outcome planned(const models::sample& s, executor& e, const bindings& tensors, const executor::taker& take = {},
                       const std::vector<at::Tensor>& taken = {}) {
  return finished(s, e, e.forward(s.inputs), tensors, take, taken);
}

inline void compare(const outcome& a, const outcome& b) {
  auto lists = [](const auto& x, const auto& y) {
    REQUIRE(x.size() == y.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      INFO("tensor " << i);
      CHECK(same_layout(x[i], y[i]));
    }
  };
  lists(a.outputs, b.outputs);
  lists(a.grads, b.grads);
  lists(a.input_grads, b.input_grads);
  lists(a.buffers, b.buffers);
  CHECK(same_bits(a.generator, b.generator));
}

inline void restore(const models::sample& s, const std::vector<at::Tensor>& buffers) {
  at::NoGradGuard no_grad;
  auto now = s.module->buffers();
  for (std::size_t i = 0; i < now.size(); ++i) now[i].copy_(buffers[i]);
  ::torch::manual_seed(11);
}

}  // namespace executor_tests
