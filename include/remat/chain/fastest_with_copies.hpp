// SPDX-License-Identifier: Apache-2.0
/// @file
/// The dynamic program over chains that combines recomputation with copies to the host: the core of pofo.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include <remat/chain/chain.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::chain {

/// Result of `fastest_with_copies`.
struct offloaded_chain {
  std::vector<chain_step> steps;                             ///< empty if nothing was found
  std::vector<bool> moved;                                   ///< per link: is its input copied to the host and back?
  double seconds = std::numeric_limits<double>::infinity();  ///< time by the recurrence, s; infinity if nothing was found
  bool exact = false;                                        ///< no schedule of the class is faster by the recurrence

  bool found() const { return seconds < std::numeric_limits<double>::infinity(); }
};

/// How `fastest_with_copies` searches.
struct fastest_with_copies_options {
  std::size_t max_labels = 20'000;  ///< labels per link, >= 1; if more are needed, the answer is not exact
  std::function<bool()> stop = {};  ///< polled; true ends the search with the best answer so far
};

namespace detail {

/// The search behind `fastest_with_copies`.
class offloaded_chain_search {
 public:
  offloaded_chain_search(const heterogeneous_chain& c, bytes_t budget, const copy_rates& rates, const persistent_table& table,
                         const fastest_with_copies_options& o)
      : chain_(c), budget_(budget), to_host_rate_(rates.to_host), to_device_rate_(rates.to_device), table_(table), options_(o) {
    min_remaining_seconds_.assign(size() + 1, 0);
    for (auto i = size(); i-- > 0;) {
      double least = never;
      for (const auto& k : chain_.link(i).options) least = std::min(least, k.forward + k.backward);
      min_remaining_seconds_[i] = min_remaining_seconds_[i + 1] + least;
    }
    fronts_.resize(size() * (size() + 1) / 2);
  }

  offloaded_chain run() {
    offloaded_chain best;
    for (const auto width : {std::min<std::size_t>(64, options_.max_labels), options_.max_labels}) {
      if (!pass(width, best)) break;
      if (best.exact) break;
    }
    return best;
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();
  static constexpr auto nothing = std::numeric_limits<std::uint32_t>::max();

  /// A decision on the links from `link` on. Link `link` runs in `option`; or, if `option` is `nothing`, links `link` to `to` - 1
  /// run without saving, and are recomputed in the backward with `memory` bytes.
  struct choice {
    std::uint32_t link, option, to;
    bool moved;
    bytes_t memory;
  };
  /// A state in which the forward has reached a link, and the backward will come back to it.
  struct label {
    bytes_t kept;                ///< bytes of inputs that stay on the device
    double to_offload;           ///< bytes yet to leave
    double to_prefetch;          ///< bytes of earlier inputs that must be back when the backward reaches this link
    double seconds;              ///< of all decisions so far, forward and backward
    std::uint32_t input_option;  ///< 1 + option of the link before, if its saved values are the input; 0: the input is x_i alone
    std::uint32_t parent;
    choice last_choice;
  };

  std::size_t size() const { return chain_.size(); }
  bool poll() { return stopped_ = stopped_ || (options_.stop && options_.stop()); }
  bytes_t input(std::size_t i, const label& x) const {
    return x.input_option == 0 ? chain_.input(i) : chain_.link(i - 1).options[x.input_option - 1].saved;
  }
  /// Seconds to copy all but `room` of `bytes`; `never` if `room` is negative.
  static double wait(double bytes, bytes_t room, double rate) {
    if (room < 0) return never;
    return std::max(0.0, (bytes - static_cast<double>(room)) / rate);
  }

  /// Searches with up to `width` labels per link.
  /// @return false if the search was stopped
  bool pass(std::size_t width, offloaded_chain& best) {
    width_ = width;
    exact_ = table_.exact();
    expanded_.clear();
    open_labels_.assign(size() + 1, {});
    add(0, {0, 0, 0, 0, 0, nothing, {}}, best);
    for (std::size_t i = 0; i < size(); ++i) {
      if (poll()) return false;
      exact_ = prune(open_labels_[i]) && exact_;
      const auto first = expanded_.size();
      expanded_.insert(expanded_.end(), open_labels_[i].begin(), open_labels_[i].end());
      open_labels_[i] = {};
      for (auto k = first; k < expanded_.size(); ++k) {
        if (stopped_ || (k % 64 == 0 && poll())) return false;
        expand(i, static_cast<std::uint32_t>(k), best);
      }
    }
    std::uint32_t last = nothing;
    double least = best.seconds;
    for (const auto& x : open_labels_[size()])
      if (const double seconds = finish(x); seconds < least) {
        least = seconds;
        last = static_cast<std::uint32_t>(expanded_.size());
        expanded_.push_back(x);
      }
    if (last != nothing) {
      best = schedule_of(last);
      best.seconds = least;
    }
    best.exact = exact_;
    return true;
  }
  double finish(const label& x) const { return x.seconds + x.to_offload / to_host_rate_ + x.to_prefetch / to_device_rate_; }

  void add(std::size_t i, const label& x, const offloaded_chain& best) {
    if (x.seconds + min_remaining_seconds_[i] >= best.seconds) return;
    open_labels_[i].push_back(x);
    if (open_labels_[i].size() >= 4 * width_) exact_ = prune(open_labels_[i]) && exact_;
  }
  void expand(std::size_t i, std::uint32_t label_index, const offloaded_chain& best) {
    const auto x = expanded_[label_index];
    const auto bytes = input(i, x);
    const auto& options = chain_.link(i).options;
    for (std::uint32_t k = 0; k < options.size(); ++k) {
      const auto& o = options[k];
      const auto forward_room = budget_ - x.kept - bytes - o.saved - o.forward_transient;
      const auto backward_room =
          budget_ - x.kept - bytes - chain_.kept(i + 1, size() - 1) - chain_.gradient(i + 1) - o.saved - o.backward_transient;
      const double before = wait(x.to_offload, forward_room, to_host_rate_),
                   after = wait(x.to_prefetch, backward_room, to_device_rate_);
      if (before == never || after == never) continue;
      for (const bool moved : {false, true}) {
        if (moved && bytes == 0) continue;
        const auto moved_bytes = static_cast<double>(moved ? bytes : 0);
        add(i + 1,
            {x.kept + (moved ? 0 : bytes),
             std::max(0.0, x.to_offload + moved_bytes - to_host_rate_ * (o.forward + before)),
             std::max(0.0, x.to_prefetch - to_device_rate_ * (o.backward + after)) + moved_bytes,
             x.seconds + o.forward + o.backward + before + after,
             k + 1,
             label_index,
             {static_cast<std::uint32_t>(i), k, 0, moved, 0}},
            best);
      }
    }
    for (const bool moved : {false, true})
      if (!moved || bytes > 0) recompute(i, label_index, moved, best);
  }

  /// For each s, runs links i to s - 1 without saving, and recomputes them in the backward.
  void recompute(std::size_t i, std::uint32_t label_index, bool moved, const offloaded_chain& best) {
    const auto x = expanded_[label_index];
    const auto bytes = input(i, x);
    const auto moved_bytes = static_cast<double>(moved ? bytes : 0);
    double forward = 0, before = 0;
    for (auto s = i + 1; s < size(); ++s) {
      const auto& l = chain_.link(s - 1);
      const auto need = (s - 1 > i ? chain_.input(s - 1) : 0) + chain_.input(s) + l.checkpoint_transient;
      const bool input_is_leaving = moved && s - 1 > i;  // the part of the input that has left takes no room
      const auto room = budget_ - x.kept - (input_is_leaving ? 0 : bytes) - need;
      if (room < 0) return;
      before = std::max(
          before, (x.to_offload + (input_is_leaving ? moved_bytes : 0) - static_cast<double>(room)) / to_host_rate_ - forward);
      forward += l.checkpoint_seconds;
      if (x.seconds + forward + before + min_remaining_seconds_[i] >= best.seconds) return;
      const auto free = budget_ - x.kept - bytes - chain_.kept(s, size() - 1);
      const auto [backward, memory] = fastest_recomputation(i, s - 1, free, x.to_prefetch);
      if (backward == never) continue;
      add(s,
          {x.kept + (moved ? 0 : bytes),
           std::max(0.0, x.to_offload + moved_bytes - to_host_rate_ * (forward + before)),
           std::max(0.0, x.to_prefetch - to_device_rate_ * backward) + moved_bytes,
           x.seconds + forward + before + backward,
           0,
           label_index,
           {static_cast<std::uint32_t>(i), nothing, static_cast<std::uint32_t>(s), moved, memory}},
          best);
    }
  }
  /// The fastest recomputation of links i to j in the backward.
  /// @param free bytes for the recomputation and for copies that arrive meanwhile
  /// @param to_prefetch bytes that must be back afterwards
  /// @return seconds, including the wait for the copies; and the bytes of `free` for the recomputation
  std::pair<double, bytes_t> fastest_recomputation(std::size_t i, std::size_t j, bytes_t free, double to_prefetch) {
    auto& front = fronts_[j * (j + 1) / 2 + i];
    if (front.empty()) {
      front = table_.front(i, j);
      front.insert(front.begin(), {0, never});
    }
    std::pair<double, bytes_t> best = {never, 0};
    auto point = std::upper_bound(front.begin(), front.end(), free, [](bytes_t b, const auto& f) { return b < f.first; });
    while (point != front.begin()) {
      --point;
      if (point->second >= best.first) break;  // with less memory it is slower still
      const auto [memory, seconds] = *point;
      best = std::min(best, {seconds + wait(to_prefetch, free - memory, to_device_rate_), memory});
    }
    return best;
  }

  /// Removes dominated labels. A label dominates another label with the same `input_option` if it keeps no more bytes and is no
  /// later, even if it waits until it has no more bytes to copy than the other label. If more than `width_` labels remain, only
  /// the fastest labels in each range of kept bytes stay.
  /// @return false if labels were removed that are not dominated, or if the search was stopped
  bool prune(std::vector<label>& labels) {
    if (stopped_) return false;
    std::sort(labels.begin(), labels.end(), [&](const label& a, const label& b) { return finish(a) < finish(b); });
    std::vector<label> kept;
    for (std::size_t i = 0; i < labels.size(); ++i) {
      if (i % 1024 == 1023 && poll()) return false;
      const auto& x = labels[i];
      const bool dominated = std::any_of(kept.begin(), kept.end(), [&](const label& a) {
        return a.input_option == x.input_option && a.kept <= x.kept &&
               a.seconds + std::max(0.0, a.to_offload - x.to_offload) / to_host_rate_ +
                       std::max(0.0, a.to_prefetch - x.to_prefetch) / to_device_rate_ <=
                   x.seconds;
      });
      if (!dominated) kept.push_back(x);
    }
    labels = std::move(kept);
    if (labels.size() <= width_) return true;
    std::vector<std::size_t> count_in_slot(width_ / 4 + 1, 0);
    const auto slot = [&](const label& x) {
      return static_cast<std::size_t>(static_cast<double>(x.kept) / static_cast<double>(budget_ + 1) *
                                      static_cast<double>(count_in_slot.size()));
    };
    std::erase_if(labels, [&](const label& x) { return count_in_slot[slot(x)]++ >= 4; });
    return false;
  }

  /// The schedule whose last label is `label_index`.
  offloaded_chain schedule_of(std::uint32_t label_index) const {
    std::vector<choice> choices;
    for (; expanded_[label_index].parent != nothing; label_index = expanded_[label_index].parent)
      choices.push_back(expanded_[label_index].last_choice);
    std::reverse(choices.begin(), choices.end());
    offloaded_chain c;
    c.moved.assign(size(), false);
    for (const auto& x : choices) {
      c.moved[x.link] = x.moved;
      if (x.option != nothing) c.steps.push_back({chain_step::kind::forward, x.link, x.option});
      for (auto t = x.link; x.option == nothing && t < x.to; ++t) c.steps.push_back({chain_step::kind::checkpoint, t, 0});
    }
    for (auto x = choices.rbegin(); x != choices.rend(); ++x) {
      if (x->option != nothing) {
        c.steps.push_back({chain_step::kind::backward, x->link, x->option});
        continue;
      }
      const auto recomputed = table_.steps(x->link, x->to - 1, x->memory);
      c.steps.insert(c.steps.end(), recomputed.begin(), recomputed.end());
    }
    return c;
  }

  recurrence chain_;
  bytes_t budget_;
  double to_host_rate_, to_device_rate_;
  const persistent_table& table_;
  fastest_with_copies_options options_;
  std::vector<double> min_remaining_seconds_;  // lower bound on the seconds of the links from i on
  std::vector<std::vector<std::pair<bytes_t, double>>> fronts_;
  std::vector<label> expanded_;  // labels that were expanded, and the last label
  std::vector<std::vector<label>> open_labels_;
  std::size_t width_ = 1;  // labels per link
  bool exact_ = true, stopped_ = false;
};

}  // namespace detail

/// The fastest schedule, within one budget, of a chain that combines recomputation with copies to the host.
///
/// The forward of each link runs once. Either it saves the values that its backward reads. Or the link belongs to a run of links
/// that save nothing; a persistent schedule recomputes them when the backward reaches them. The input of a link that saves, and
/// of a run, is kept on the device or moved: sent after it is made, and back before the backward that reads it. A state is
/// (i, A, f, b): A bytes of inputs stay, f bytes have yet to leave when the forward is at link i, and b bytes must be back when
/// the backward is at link i. If link i saves, the recurrence is
///
///     OC(i, A, f, b) = forward + backward + e_f + e_b + min(kept, moved)
///     kept  = OC(i + 1, A + x, (f - up (forward + e_f))+, (b - down (backward + e_b))+)
///     moved = OC(i + 1, A, (f + x - up (forward + e_f))+, (b - down (backward + e_b))+ + x)
///
/// x is the bytes of the input; up and down are the rates of the copies. e_f = (f + A + x + bytes of the forward - budget)+ / up
/// is the wait until the forward has room; e_b is the wait of the backward, likewise. A run of links has the same terms, with
/// forwards without saving, and the time of a `persistent_table`. The remaining copies take f / up + b / down at the end.
///
/// So the recurrence counts copies as streams of bytes: each byte makes room once it has left, and latencies are left out.
/// `evaluate` gives the time of the schedule.
///
/// Differences from the paper: The search is exact in bytes. It has labels instead of a table in units of A, f and b; a label
/// dominates another if it is no later after waiting for its copies. It chooses how much of the free memory a run of links gets;
/// the rest is for copies that arrive meanwhile. When the input of a run leaves, the part that has left makes room for the links
/// behind the first of the run.
///
/// @param c      the chain
/// @param budget bytes, including x_0
/// @param rates  of copies; the latency is not used
/// @param table  of `c`, for at least `budget` + x_0 bytes
/// @param o      how to search
/// @return the best schedule found; none if `table` is incomplete
/// @throws bad_option if a link has no option, or `o.max_labels` is 0
/// Complexity: O(L^2 labels) for L links. The number of labels per link grows with the variety of the links.
///
/// Reference: Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
/// NeurIPS 2021 (POFO).
inline offloaded_chain fastest_with_copies(const heterogeneous_chain& c, bytes_t budget, const copy_rates& rates,
                                           const persistent_table& table, const fastest_with_copies_options& o = {}) {
  if (o.max_labels < 1) throw bad_option("fastest_with_copies.max_labels must be >= 1, got 0");
  if (c.links.empty()) return {{}, {}, 0, true};
  if (!table.complete()) return {};
  return detail::offloaded_chain_search(c, budget, rates, table, o).run();
}

}  // namespace remat::chain
