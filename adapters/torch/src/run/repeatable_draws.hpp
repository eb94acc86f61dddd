// SPDX-License-Identifier: Apache-2.0
/// @file
/// Repeated draws from a generator that other threads use, too. Private to the adapter.
#pragma once

#include <ATen/Context.h>
#include <c10/util/ScopeExit.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <remat/pytorch/executor.hpp>

#include "../base/generators.hpp"

namespace remat::pytorch {

/// Makes a recomputed draw take the numbers of its first run, although other threads may draw at the same time. The number of
/// draws reveals a foreign draw; the node then runs once more.
class repeatable_draws {
 public:
  repeatable_draws(c10::Device on, std::size_t nodes) : on_(on), seen_(nodes) {}

  /// True if draws can be counted. Draws of the host's generator cannot.
  bool possible() const { return !on_.is_cpu(); }
  /// True if the first run of the node was watched.
  bool knows(index_t which) const { return seen_[which].start.defined(); }

  /// @param start      puts the generator into the state in which the node starts to draw, and saves the state
  /// @param work       runs the node
  /// @param repeatable work may run more than once
  /// @throws not_available if another thread has drawn, and the node cannot run again
  template <class S, class F>
  void first(const node& n, index_t which, const S& start, const F& work, bool repeatable) {
    auto& s = seen_[which];
    for (int tries = 0;; ++tries) {
      start();
      s.start = state_of(generator());
      work();
      s.count = count(n, s.start);
      if (!s.alone || s.count <= *s.alone) break;
      give_up_unless(repeatable && tries < most, n);
    }
    s.alone = s.count;
  }
  /// Runs the node again. Afterwards the generator is as before, advanced by the draws of other threads.
  /// @param start puts the generator into the state in which the first run started
  template <class S, class F>
  void again(const node& n, index_t which, const S& start, const F& work, bool repeatable) {
    auto& s = seen_[which];
    std::uint64_t foreign = 0;
    const auto restored = c10::make_scope_exit(
        [&, before = state_of(generator())] { set_state(generator(), after_counted_draws(generator(), before, foreign)); });
    for (int tries = 0;; ++tries) {
      start();
      work();
      const auto drawn = count(n, s.start);
      if (drawn == s.count) return;
      if (drawn < s.count) {  // the foreign draw was in the first run
        s.alone = drawn;
        give_up_unless(false, n);
      }
      foreign += drawn - s.count;
      give_up_unless(repeatable && tries < most, n);
    }
  }

 private:
  static constexpr int most = 100;
  struct seen {
    at::Tensor start;
    std::uint64_t count = 0;             ///< draws of the last first run
    std::optional<std::uint64_t> alone;  ///< fewest draws of the node in any run
  };

  at::Generator generator() const { return at::globalContext().defaultGenerator(on_); }
  std::uint64_t count(const node& n, const at::Tensor& from) const {
    const auto drawn = counted_draws(generator(), from, state_of(generator()));
    give_up_unless(drawn.has_value(), n);
    return *drawn;
  }
  void give_up_unless(bool fine, const node& n) const {
    if (!fine)
      throw not_available("remat: another thread used the random generator of " + on_.str() + " while " + n.name +
                          " drew from it, which has to draw the same numbers when it is computed again. Give that thread a "
                          "torch.Generator of its own, and do this step again");
  }

  c10::Device on_;
  std::vector<seen> seen_;
};

}  // namespace remat::pytorch
