// SPDX-License-Identifier: Apache-2.0
/// @file
/// Trainings with fetched weights, compared with plain trainings.
#pragma once

#include <torch/torch.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>

#include "../src/device/file.hpp"
#include "../src/device/free_memory.hpp"
#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"

namespace weights_tests {

namespace rt = remat::pytorch;
using at::Tensor;
using remat::bytes_t;

inline std::shared_ptr<rt::disk> scratch_disk() {
  return std::make_shared<rt::disk>(std::filesystem::temp_directory_path().string());
}

/// Restores the system calls at the end of the scope.
struct system_kept {
  ~system_kept() {
    rt::files_of_system() = before;
    rt::root_of_system() = root;
  }
  rt::file_calls before = rt::files_of_system();
  std::string root = rt::root_of_system();
};

/// Counts the copied bytes.
class counted_link final : public rt::link {
 public:
  explicit counted_link(std::shared_ptr<std::atomic<bytes_t>> count) : count_(std::move(count)) {}
  rt::ticket copy(const rt::block& to, const rt::block& from, std::vector<rt::ticket> after) override {
    *count_ += to.bytes;
    return inner_->copy(to, from, std::move(after));
  }

 private:
  std::shared_ptr<std::atomic<bytes_t>> count_;
  std::unique_ptr<rt::link> inner_ = rt::host_link();
};

inline bool every(const Tensor&) { return true; }

/// A model that is trained plain, and a model that fetches its weights.
class pair_of_models {
 public:
  /// @param on_disk the weights of the second model are on a disk
  /// @param leave   its gradients leave to the disk as soon as they are complete
  pair_of_models(const std::function<models::sample()>& make, bool on_disk, bool leave = false,
                 rt::wrap_options o = options("100%")) {
    for (auto* s : {&plain, &ours}) {
      ::torch::manual_seed(17);
      *s = make();
    }
    if (on_disk) {
      disk = scratch_disk();
      rt::move_weights(*ours.module, *disk);
    }
    o.gradients_leave = leave;
    if (leave) gradients.emplace(*ours.module, scratch_disk());
    o.far.in = std::make_shared<counted_link>(copied);
    if (!o.far.rates) o.far.rates = remat::copy_rates{1e10, 1e10, 0};
    o.fetched = every;
    o.log = [this](const std::string& text) { logged += text + "\n"; };
    run = std::make_unique<testing::runner>(ours.module, ours.forward, std::move(o));
    for (auto [s, optimizer] : {std::pair(&plain, &of_plain), std::pair(&ours, &of_ours)})
      *optimizer = std::make_unique<::torch::optim::AdamW>(s->module->parameters(), ::torch::optim::AdamWOptions(0.01));
  }
  static rt::wrap_options options(const rt::budget& b) {
    auto o = testing::quick(b, 0.4);
    o.solver = rt::default_solver();
    return o;
  }

  std::vector<Tensor> forward() {
    ::torch::manual_seed(step);
    return run->forward(ours.inputs);
  }
  /// Compares one step of both models.
  void train(int micro_batches = 1) {
    ++step;
    INFO(plain.name << ", step " << step);
    const auto generator = [] { return state_of_test_generator(); };
    for (int i = 0; i < micro_batches; ++i) {
      ::torch::manual_seed(step);
      const auto expected = plain.forward(plain.inputs);
      models::loss_of(expected).backward();
      const auto drawn = generator();
      if (i == 0) run->release();
      const auto before = rt::meter::live();
      rt::meter::reset_peak();
      const auto found = forward();
      models::loss_of(found).backward();
      REQUIRE(same_bits(expected, found));
      REQUIRE(same_bits(drawn, generator()));
      const auto r = run->report();
      CHECK(r.total() <= r.budget);
      CHECK(r.waited >= waited);  // even though the executor of the previous step is gone
      waited = r.waited;
      if (i == 0 && settled) CHECK(rt::meter::peak() - before <= r.arena + r.outputs + slack);
    }
    settled = true;
    check();
    of_plain->step();
    of_ours->step();
    check();
    for (auto* o : {&of_plain, &of_ours}) (*o)->zero_grad();
  }
  void check() const {
    REQUIRE(same_bits(plain.module->buffers(), ours.module->buffers()));
    const auto a = plain.module->parameters(), b = ours.module->parameters();
    REQUIRE(same_bits(a, b));
    for (std::size_t i = 0; i < a.size(); ++i) REQUIRE(same_bits(a[i].grad(), b[i].grad()));
  }
  /// The smallest known budget.
  bytes_t smallest() {
    run->set_budget(rt::budget(bytes_t{1}));
    try {
      run->prepare(ours.inputs);
    } catch (const rt::over_budget& e) {
      return e.smallest.value();
    }
    FAIL("a byte is enough");
    return 0;
  }
  bytes_t weight_bytes() const {
    bytes_t sum = 0;
    for (const auto& p : ours.module->parameters()) sum += static_cast<bytes_t>(p.nbytes());
    return sum;
  }
  void set_budget(const rt::budget& b) {
    run->set_budget(b);
    settled = false;
  }

  models::sample plain, ours;
  std::shared_ptr<rt::disk> disk;
  std::optional<rt::gradients_on_disk> gradients;
  std::shared_ptr<std::atomic<bytes_t>> copied = std::make_shared<std::atomic<bytes_t>>(0);
  std::string logged;
  std::unique_ptr<testing::runner> run;
  std::unique_ptr<::torch::optim::Optimizer> of_plain, of_ours;
  std::uint64_t step = 0;
  bool settled = false;  ///< a step has run with the current plan
  double waited = 0;     ///< waiting time in the last report
  static constexpr bytes_t slack = 1 << 16;
};

models::sample wide_mlp() { return models::mlp(4, 150, 6); }  // weights of 90000 bytes, which are not whole pages
inline models::sample small_gpt() { return models::gpt(3, 2, 16, 64); }

}  // namespace weights_tests
