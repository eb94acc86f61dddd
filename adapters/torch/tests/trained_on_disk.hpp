// SPDX-License-Identifier: Apache-2.0
/// @file
/// Trainings with tensors on a disk, compared with plain trainings.
#pragma once

#include <torch/torch.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/free_memory.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/paged_memory.hpp>
#include <sstream>

#include "../src/device/file.hpp"
#include "../src/device/free_memory.hpp"
#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"

namespace offload_tests {

namespace rt = remat::pytorch;
namespace optim = torch::optim;
using at::Tensor;

inline std::string scratch() { return std::filesystem::temp_directory_path().string(); }
inline std::shared_ptr<rt::disk> new_disk(remat::bytes_t limit = remat::max_bytes) {
  return std::make_shared<rt::disk>(scratch(), limit);
}

/// Restores the system calls at the end of the scope.
struct system_restored {
  ~system_restored() { rt::files_of_system() = before; }
  rt::file_calls before = rt::files_of_system();
};

/// A system that reads its state from files in a folder.
struct emulated_system {
  emulated_system() { rt::root_of_system() = folder.string(); }
  ~emulated_system() {
    rt::root_of_system() = before;
    std::filesystem::remove_all(folder);
  }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((folder / file).parent_path());
    std::ofstream(folder / file) << text;
  }
  /// @param bytes free memory, of 1 GiB
  void machine(remat::bytes_t bytes) const {
    write("proc/meminfo", "MemTotal:  1048576 kB\nMemFree: 17 kB\nMemAvailable:  " + std::to_string(bytes / 1024) + " kB\n");
  }
  std::string before = rt::root_of_system();
  std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("remat-told-" + std::to_string(static_cast<long>(getpid())));
};

/// Gives each parameter except `but` a gradient.
template <class Optimizer>
inline void give_gradients(Optimizer& of, double scale = 1, std::optional<Tensor> but = {}) {
  Tensor loss = at::zeros({});
  for (const auto& group : of.param_groups())
    for (const auto& p : group.params())
      if (!but || !p.is_same(*but)) loss = loss + (p * p * scale).sin().sum();
  loss.backward();
}

inline models::sample model_of(std::size_t which) {
  ::torch::manual_seed(17);
  return models::all().at(which);
}

inline std::vector<Tensor> gradients(const models::sample& of) {
  std::vector<Tensor> all;
  for (const auto& p : of.module->parameters()) all.push_back(p.grad());
  return all;
}

/// A large layer and small layers with random gradients: some tensors go to the disk, others stay in memory.
struct layers {
  layers() {
    ::torch::manual_seed(3);
    for (const auto width : {64, 1, 40}) weights.push_back(at::randn({width, 64}).requires_grad_());
    weights.push_back(at::randn({32, 48}).t().requires_grad_());  // dense, with permuted dimensions
  }
  void draw_gradients(int step) {
    for (std::size_t i = 0; i < weights.size(); ++i)
      if ((step + static_cast<int>(i)) % 3 != 0 || step == 1)
        weights[i].mutable_grad() = at::randn_like(weights[i].detach());
      else
        weights[i].mutable_grad().reset();
  }
  std::vector<Tensor> part(std::size_t begin, std::size_t end) const {
    return {weights.begin() + static_cast<std::ptrdiff_t>(begin), weights.begin() + static_cast<std::ptrdiff_t>(end)};
  }
  std::vector<Tensor> weights;
};

template <class Optimizer>
inline std::vector<Tensor> states_of(Optimizer& of, const std::vector<Tensor>& params) {
  std::vector<Tensor> all;
  for (const auto& p : params)
    if (const auto found = of.state().find(p.unsafeGetTensorImpl()); found != of.state().end())
      for (auto& t : rt::tensors_of(*found->second)) all.push_back(t);
  return all;
}

/// Two optimizers with equal starts and several groups of options, one of them on a disk.
template <class Plain, class Options>
inline void compare_with_plain(const Options& first, const Options& second, bool stateless = false,
                               rt::stepping when = rt::stepping::after) {
  layers mine, theirs;
  const auto groups = [&](const layers& of) {
    std::vector<optim::OptimizerParamGroup> made;
    made.emplace_back(of.part(0, 2), std::make_unique<Options>(first));
    made.emplace_back(of.part(2, 4), std::make_unique<Options>(second));
    return made;
  };
  const auto disk = new_disk();
  Plain plain(groups(theirs), first);
  rt::offloaded<Plain> ours(disk, when, groups(mine), first);
  const auto exchange = [&] {  // a checkpoint, from one optimizer to the other and back
    std::stringstream of_plain, of_ours;
    ::torch::save(plain, of_plain);
    ::torch::save(ours, of_ours);
    ::torch::load(plain, of_ours);
    ::torch::load(ours, of_plain);
  };
  for (int step = 0; step < 7; ++step) {
    INFO("step " << step);
    if (when == rt::stepping::overlap && step % 3 != 2) {
      const auto absent = static_cast<std::size_t>(step % 4);
      plain.zero_grad();
      give_gradients(plain, 1, theirs.weights[absent]);
      give_gradients(ours, 1, mine.weights[absent]);
      for (const auto& w : mine.weights) CHECK((!w.grad().defined() || !w.grad().has_storage()));
    } else {  // set by hand
      for (auto* l : {&mine, &theirs}) {
        ::torch::manual_seed(100 + step);
        l->draw_gradients(step);
      }
    }
    if (step == 4 && when == rt::stepping::after) {  // a schedule of learning rates
      plain.param_groups()[1].options().set_lr(0.003);
      ours.param_groups()[1].options().set_lr(0.003);
    }
    if (step == 5 && when == rt::stepping::after) exchange();
    plain.step();
    ours.step();
    REQUIRE(same_bits(mine.weights, theirs.weights));
    REQUIRE(same_bits(states_of(ours, mine.weights), states_of(plain, theirs.weights)));
    REQUIRE(ours.param_groups().size() == 2);
    REQUIRE(ours.param_groups()[1].params().size() == 2);
    if (when == rt::stepping::after) continue;
    for (const auto& w : mine.weights) CHECK_FALSE(w.grad().defined());
    for (auto* of : {static_cast<optim::Optimizer*>(&plain), static_cast<optim::Optimizer*>(&ours)})
      of->param_groups()[0].options().set_lr(0.01 / (step + 2));
    if (step == 3) exchange();
  }
  for (const auto& t : states_of(ours, mine.weights)) CHECK(disk->holds(t) == rt::movable(t));
  CHECK((disk->reserved() > 0) == !stateless);
  CHECK((disk->evicted() > 0) == !stateless);
}

}  // namespace offload_tests
