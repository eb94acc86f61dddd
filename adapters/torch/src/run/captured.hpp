// SPDX-License-Identifier: Apache-2.0
/// @file
/// Graphs of the kernels of planned steps. Private to the adapter.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/device.hpp>

#include "../base/reason.hpp"

namespace remat::pytorch {

/// The graphs of one executor. Each half of the step runs once by ordinary launches. It is captured in the next step, and
/// replayed from then on. If a capture fails, all kernels are launched one by one from then on.
///
/// A half may consist of several graphs, because the host acts between them.
class step_graphs {
 public:
  /// @param slots tensors from outside that kernels may read
  step_graphs(device& on, std::size_t steps, std::size_t slots) : on_(on), graphs_(steps), read_at_(slots) {}

  /// Half 0 is the forward, half 1 the backward.
  void begin(std::size_t half) { captures_ = why_not_.empty() && std::exchange(warm_[half], true); }

  /// Issues the kernels of `work`: launches, captures or replays them. The same `first` must always mean the same kernels.
  template <class F>
  void run(std::size_t first, const F& work) {
    auto& g = graphs_[first];
    if (g) moved_ = 0;
    if (!g && captures_) g = captured(work);
    if (!g) return work();
    g->replay();
  }
  bool capturing() const { return capturing_; }
  /// Notes the operator that the capture has reached, for messages.
  void at(const std::string& name) { operator_ = &name; }

  /// Notes that kernels read slot `k` at `address`. If the address has changed, everything is captured again.
  void reads(std::size_t k, const void* address) {
    const auto* const before = std::exchange(read_at_[k], address);
    if (before == nullptr || before == address) return;
    forget();
    constexpr int most = 4;
    if (++moved_ == most) refuse("the address of a tensor that it reads changes in every step");
  }

  /// Why kernels are launched one by one; empty: graphs are used, or will be soon.
  const std::string& why_not() const { return why_not_; }
  void refuse(const std::string& why) {
    if (!why_not_.empty()) return;
    why_not_ = why;
    captures_ = false;
    forget();
    TORCH_WARN("remat: steps of this plan are not captured as graphs: ", why, ". Their kernels are launched one by one");
  }

 private:
  void forget() {
    for (auto& g : graphs_) g.reset();
  }
  template <class F>
  std::unique_ptr<replayable> captured(const F& work) {
    capturing_ = true;
    const auto ended = c10::make_scope_exit([&] { capturing_ = false; });
    operator_ = nullptr;
    try {
      auto made = on_.capture(work);
      if (made->extra_bytes() == 0) return made;
      refuse("its operators allocate " + std::to_string(made->extra_bytes()) + " bytes outside of the plan");
    } catch (const std::exception& e) {
      refuse((operator_ != nullptr ? *operator_ + ": " : "") + reason_of(e));
    }
    return nullptr;
  }

  device& on_;
  std::vector<std::unique_ptr<replayable>> graphs_;  ///< by first step
  std::vector<const void*> read_at_;                 ///< per slot
  std::array<bool, 2> warm_{};                       ///< whether the half has run
  bool captures_ = false, capturing_ = false;
  int moved_ = 0;  ///< address changes since the last replay
  const std::string* operator_ = nullptr;
  std::string why_not_;
};

}  // namespace remat::pytorch
