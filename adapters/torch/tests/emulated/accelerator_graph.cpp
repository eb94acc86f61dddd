// SPDX-License-Identifier: Apache-2.0
/// @file
/// Captured graphs of the accelerator, for `torch.accelerator.Graph`.
#include <ATen/core/GraphImplInterface.h>

#include <atomic>
#include <fstream>
#include <optional>

#include "accelerator.hpp"

namespace emulated::accelerator {
namespace {

c10::MempoolId_t new_pool() {
  static std::atomic<c10::CaptureId_t> made{0};
  return {++made, 0};
}

class graph_impl final : public at::GraphImplInterface {
 public:
  explicit graph_impl(const at::GraphImplArgs&) {}
  ~graph_impl() override { reset(); }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(!captured_ && capture_ == 0, "emulated: this graph has been captured; reset it first");
    auto& s = here();
    emulated::begin_capture(s);
    capture_ = capture_id(s);
    pool_ = pool == c10::MempoolId_t{0, 0} ? new_pool() : pool;
    use_pool(capture_, *pool_);
  }

  void capture_end() override {
    TORCH_CHECK(capture_ != 0, "emulated: no capture has begun");
    const auto ended = std::exchange(capture_, 0);
    leave_pool(ended);
    draws_ = draws_of_capture(ended);
    captured_ = emulated::end_capture(here());
  }

  void instantiate() override { TORCH_CHECK(captured_, "emulated: nothing has been captured"); }

  void replay() override {
    instantiate();
    auto& s = here();
    for (const auto& d : draws_) enqueue(s, {"state of the generator", {}, {}, d.advance()});
    launch(captured_, s);
  }

  void reset() override {
    captured_.reset();
    draws_.clear();
    if (pool_) release_pool(*pool_);
    pool_.reset();
  }

  c10::MempoolId_t pool() const override {
    TORCH_CHECK(pool_, "emulated: a graph has a pool from its capture on");
    return *pool_;
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& path) override {
    instantiate();
    std::ofstream(path) << "jobs: " << size(*captured_) << '\n';
  }

 private:
  static stream& here() { return stream_of(current_stream(current_device())); }

  unsigned long long capture_ = 0;
  std::optional<c10::MempoolId_t> pool_;
  std::shared_ptr<graph> captured_;
  std::vector<captured_draws> draws_;
};

}  // namespace
}  // namespace emulated::accelerator

namespace at {
using emulated_graph = emulated::accelerator::graph_impl;
REGISTER_GRAPH_IMPL(EMULATED, emulated_graph)  // the name of the backend in capitals
}  // namespace at
