// SPDX-License-Identifier: Apache-2.0
#include "in_flight.hpp"

#include <algorithm>
#include <vector>

#include <remat/io/bytes.hpp>

#include "../base/clock.hpp"

namespace remat::pytorch {
namespace {

/// The same problem with `bytes` of workspace at the end of the forward. A budget of `held + bytes` then bounds the values that
/// live across the end of the forward by `held` bytes.
problem with_room_after_forward(const problem& p, std::size_t loss, bytes_t bytes) {
  std::vector<bytes_t> workspace;
  std::vector<double> seconds;
  for (const auto& o : p.operations()) {
    workspace.push_back(o.workspace);
    seconds.push_back(o.seconds);
  }
  workspace[loss] = bytes / 64 * 64;
  return p.with_costs(seconds, workspace);
}

/// Searches schedules under a bound on the bytes that a step holds from its forward to its backward.
class bounded_search {
 public:
  bounded_search(const captured_step& s, const search_options& o, std::size_t steps)
      : step_(s),
        options_(o),
        steps_(steps),
        with_copies_(s.far.memory && o.copies),
        p_(with_copies_ ? s.problem : without_sends(s.problem)) {
    limits_ = o.limits;
    limits_.seconds = std::max(std::min(0.1, limits_.seconds), limits_.seconds / rounds);
  }

  /// @param held    bound on the bytes held between forward and backward
  /// @param working further bytes for computing
  /// @return null if no schedule is found
  std::shared_ptr<plan> find(bytes_t held, bytes_t working) {
    const auto p = with_room_after_forward(p_, step_.step->loss, working);
    const auto r = options_.solver(p, p.held_bytes() + held + working, limits_, options_.watch);
    if (!r.found()) return nullptr;
    auto made = lay_out_plan(step_, r.schedule, max_bytes, true);
    made->result.solver = r.solver;
    made->result.bound = step_.store_all->result.bound;
    if (!with_copies_ || made->execution->far_bytes() * static_cast<bytes_t>(steps_) <= step_.far.memory->limit()) return made;
    with_copies_ = false;
    p_ = without_sends(p_);
    return find(held, working);
  }

  static constexpr int rounds = 6;

 private:
  const captured_step& step_;
  const search_options& options_;
  const std::size_t steps_;
  bool with_copies_;
  problem p_;
  limits limits_;
};

}  // namespace

std::shared_ptr<const plan> plan_in_flight(const captured_step& s, bytes_t available, std::size_t steps,
                                           const search_options& o) {
  const auto begin = clock::now();
  const auto& all = s.all_in_flight;
  if (bytes_in_flight(*all->execution, steps) <= available) return all;
  const auto held = all->execution->held_bytes(), working = all->execution->needed_bytes() - held;
  bounded_search search(s, o, steps);
  std::shared_ptr<plan> best, least;
  const auto look = [&](bytes_t bound, bytes_t beside) {
    const auto made = search.find(bound, beside);
    if (!made) return max_bytes;
    const auto need = bytes_in_flight(*made->execution, steps);
    o.log(std::to_string(steps) + " steps in flight: schedule of " + std::to_string(made->result.recomputed) +
          " recomputations holds " + format_bytes(made->execution->held_bytes()) + ", needs " + format_bytes(need) + " of " +
          format_bytes(available));
    if (need <= available && (!best || made->result.seconds < best->result.seconds)) best = made;
    if (!least || made->execution->held_bytes() < least->execution->held_bytes()) least = made;
    return need;
  };
  // Recomputation needs working memory of its own. Try none beyond the plain step, then half of its held bytes, then all.
  for (int share = 0; share <= 2; ++share) {
    const auto beside = working + held * share / 2;
    auto each = (available - beside) / static_cast<bytes_t>(steps);
    for (int round = 0; round < 2 && each >= 0; ++round) {
      const auto need = look(each, beside);
      if (need <= available || need == max_bytes) break;
      each -= (need - available + static_cast<bytes_t>(steps) - 1) / static_cast<bytes_t>(steps);
    }
  }
  for (auto bound = held / 2; !best && bound > held / 64; bound /= 2)
    if (look(bound, working + held) == max_bytes) break;
  const auto found = best ? best : least;
  if (!found) return all;
  found->plan_seconds = since(begin);
  return found;
}

}  // namespace remat::pytorch
