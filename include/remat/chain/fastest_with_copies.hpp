// SPDX-License-Identifier: Apache-2.0
/// @file
/// The dynamic program over chains that combines recomputation with copies to the host: what pofo is made of.
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

/// What `fastest_with_copies` found.
struct copied_chain {
  std::vector<chain_step> steps;                             ///< empty if nothing was found
  std::vector<bool> moved;                                   ///< per link: does its input go to the host and come back?
  double seconds = std::numeric_limits<double>::infinity();  ///< as the recurrence counts, s; infinity: nothing was found
  bool exact = false;                                        ///< by that count no schedule of the class is faster

  bool found() const { return seconds < std::numeric_limits<double>::infinity(); }
};

/// How `fastest_with_copies` searches.
struct fastest_with_copies_options {
  std::size_t most_labels = 20'000;  ///< kept per link, >= 1; if there are more, the answer is not exact
  std::function<bool()> stop = {};   ///< polled; true ends the search with what there is
};

namespace detail {

/// The search behind `fastest_with_copies`.
class copied_chain_search {
 public:
  copied_chain_search(const heterogeneous_chain& c, bytes_t budget, const copy_rates& rates, const persistent_table& table,
                      const fastest_with_copies_options& o)
      : chain_(c), budget_(budget), up_(rates.to_host), down_(rates.to_device), table_(table), options_(o) {
    rest_.assign(size() + 1, 0);
    for (auto i = size(); i-- > 0;) {
      double least = never;
      for (const auto& k : chain_.link(i).options) least = std::min(least, k.forward + k.backward);
      rest_[i] = rest_[i + 1] + least;
    }
    fronts_.resize(size() * (size() + 1) / 2);
  }

  copied_chain run() {
    copied_chain best;
    for (const auto width : {std::min<std::size_t>(64, options_.most_labels), options_.most_labels}) {
      if (!pass(width, best)) break;
      if (best.exact) break;
    }
    return best;
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();
  static constexpr auto nothing = std::numeric_limits<std::uint32_t>::max();

  /// What is done with the links from `link` on: run in `option`, or, if that is `nothing`, links up to `to` - 1 computed again
  /// with `memory`.
  struct choice {
    std::uint32_t link, option, to;
    bool moved;
    bytes_t memory;
  };
  /// The forward has come to a link, the backward has still to come from it.
  struct label {
    bytes_t kept;        ///< inputs that stay on the device
    double out, in;      ///< bytes that have not left yet; that have to be back when the backward is here, of inputs before
    double seconds;      ///< of all that is decided
    std::uint32_t kind;  ///< 1 + option of the link before, whose saved values are the input; 0: x_i alone
    std::uint32_t parent;
    choice how;
  };

  std::size_t size() const { return chain_.size(); }
  bool poll() { return stopped_ = stopped_ || (options_.stop && options_.stop()); }
  bytes_t input(std::size_t i, const label& x) const {
    return x.kind == 0 ? chain_.input(i) : chain_.link(i - 1).options[x.kind - 1].saved;
  }
  /// Seconds until no more than `room` of `bytes` are left; `never` if that is impossible.
  static double wait(double bytes, bytes_t room, double rate) {
    if (room < 0) return never;
    return std::max(0.0, (bytes - static_cast<double>(room)) / rate);
  }

  /// @return false if it was stopped
  bool pass(std::size_t width, copied_chain& best) {
    width_ = width;
    exact_ = table_.exact();
    all_.clear();
    open_.assign(size() + 1, {});
    add(0, {0, 0, 0, 0, 0, nothing, {}}, best);
    for (std::size_t i = 0; i < size(); ++i) {
      if (poll()) return false;
      exact_ = thin(open_[i]) && exact_;
      const auto first = all_.size();
      all_.insert(all_.end(), open_[i].begin(), open_[i].end());
      open_[i] = {};
      for (auto k = first; k < all_.size(); ++k) {
        if (k % 64 == 0 && poll()) return false;
        expand(i, static_cast<std::uint32_t>(k), best);
      }
    }
    std::uint32_t last = nothing;
    double least = best.seconds;
    for (const auto& x : open_[size()])
      if (const double seconds = finish(x); seconds < least) {
        least = seconds;
        last = static_cast<std::uint32_t>(all_.size());
        all_.push_back(x);
      }
    if (last != nothing) {
      best = read(last);
      best.seconds = least;
    }
    best.exact = exact_;
    return true;
  }
  double finish(const label& x) const { return x.seconds + x.out / up_ + x.in / down_; }

  void add(std::size_t i, const label& x, const copied_chain& best) {
    if (x.seconds + rest_[i] >= best.seconds) return;
    open_[i].push_back(x);
    if (open_[i].size() >= 4 * width_) exact_ = thin(open_[i]) && exact_;
  }
  void expand(std::size_t i, std::uint32_t at, const copied_chain& best) {
    const auto x = all_[at];
    const auto bytes = input(i, x);
    const auto& options = chain_.link(i).options;
    for (std::uint32_t k = 0; k < options.size(); ++k) {
      const auto& o = options[k];
      const auto forward_room = budget_ - x.kept - bytes - o.saved - o.forward_transient;
      const auto backward_room =
          budget_ - x.kept - bytes - chain_.kept(i + 1, size() - 1) - chain_.gradient(i + 1) - o.saved - o.backward_transient;
      const double before = wait(x.out, forward_room, up_), after = wait(x.in, backward_room, down_);
      if (before == never || after == never) continue;
      for (const bool moved : {false, true}) {
        if (moved && bytes == 0) continue;
        const auto go = static_cast<double>(moved ? bytes : 0);
        add(i + 1,
            {x.kept + (moved ? 0 : bytes),
             std::max(0.0, x.out + go - up_ * (o.forward + before)),
             std::max(0.0, x.in - down_ * (o.backward + after)) + go,
             x.seconds + o.forward + o.backward + before + after,
             k + 1,
             at,
             {static_cast<std::uint32_t>(i), k, 0, moved, 0}},
            best);
      }
    }
    for (const bool moved : {false, true})
      if (!moved || bytes > 0) recompute(i, at, moved, best);
  }

  /// Links i to s - 1 run without saving anything, for each s, and again in the backward.
  void recompute(std::size_t i, std::uint32_t at, bool moved, const copied_chain& best) {
    const auto x = all_[at];
    const auto bytes = input(i, x);
    const auto go = static_cast<double>(moved ? bytes : 0);
    double forward = 0, before = 0;
    for (auto s = i + 1; s < size(); ++s) {
      const auto& l = chain_.link(s - 1);
      const auto need = (s - 1 > i ? chain_.input(s - 1) : 0) + chain_.input(s) + l.checkpoint_transient;
      const bool leaving = moved && s - 1 > i;  // what has left of the input takes no room any more
      const auto room = budget_ - x.kept - (leaving ? 0 : bytes) - need;
      if (room < 0) return;
      before = std::max(before, (x.out + (leaving ? go : 0) - static_cast<double>(room)) / up_ - forward);
      forward += l.checkpoint_seconds;
      if (x.seconds + forward + before + rest_[i] >= best.seconds) return;
      const auto free = budget_ - x.kept - bytes - chain_.kept(s, size() - 1);
      const auto [backward, memory] = fastest_again(i, s - 1, free, x.in);
      if (backward == never) continue;
      add(s,
          {x.kept + (moved ? 0 : bytes),
           std::max(0.0, x.out + go - up_ * (forward + before)),
           std::max(0.0, x.in - down_ * backward) + go,
           x.seconds + forward + before + backward,
           0,
           at,
           {static_cast<std::uint32_t>(i), nothing, static_cast<std::uint32_t>(s), moved, memory}},
          best);
    }
  }
  /// The seconds of links i to j in the backward, the wait for what has to be back behind them included, and the memory that
  /// they get of `free`; what they do not get is there for `in` bytes that arrive.
  std::pair<double, bytes_t> fastest_again(std::size_t i, std::size_t j, bytes_t free, double in) {
    auto& front = fronts_[j * (j + 1) / 2 + i];
    if (front.empty()) {
      front = table_.front(i, j);
      front.insert(front.begin(), {0, never});
    }
    std::pair<double, bytes_t> best = {never, 0};
    auto point = std::upper_bound(front.begin(), front.end(), free, [](bytes_t b, const auto& f) { return b < f.first; });
    while (point != front.begin()) {
      --point;
      if (point->second >= best.first) break;  // less memory is slower still
      const auto [memory, seconds] = *point;
      best = std::min(best, {seconds + wait(in, free - memory, down_), memory});
    }
    return best;
  }

  /// Takes out labels that another is as good as: with no more bytes kept, and no later even if it waits until it has no more to
  /// copy. Of more than `width_`, those that are slowest among labels that keep about as much. @return false if it did the latter
  bool thin(std::vector<label>& labels) const {
    std::sort(labels.begin(), labels.end(), [&](const label& a, const label& b) { return finish(a) < finish(b); });
    std::vector<label> kept;
    for (const auto& x : labels) {
      const bool dominated = std::any_of(kept.begin(), kept.end(), [&](const label& a) {
        return a.kind == x.kind && a.kept <= x.kept &&
               a.seconds + std::max(0.0, a.out - x.out) / up_ + std::max(0.0, a.in - x.in) / down_ <= x.seconds;
      });
      if (!dominated) kept.push_back(x);
    }
    labels = std::move(kept);
    if (labels.size() <= width_) return true;
    std::vector<std::size_t> taken(width_ / 4 + 1, 0);
    const auto slot = [&](const label& x) {
      return static_cast<std::size_t>(static_cast<double>(x.kept) / static_cast<double>(budget_ + 1) *
                                      static_cast<double>(taken.size()));
    };
    std::erase_if(labels, [&](const label& x) { return taken[slot(x)]++ >= 4; });
    return false;
  }

  /// The schedule that ends with a label.
  copied_chain read(std::uint32_t at) const {
    std::vector<choice> choices;
    for (; all_[at].parent != nothing; at = all_[at].parent) choices.push_back(all_[at].how);
    std::reverse(choices.begin(), choices.end());
    copied_chain c;
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
      const auto again = table_.steps(x->link, x->to - 1, x->memory);
      c.steps.insert(c.steps.end(), again.begin(), again.end());
    }
    return c;
  }

  recurrence chain_;
  bytes_t budget_;
  double up_, down_;
  const persistent_table& table_;
  fastest_with_copies_options options_;
  std::vector<double> rest_;  // no less for the links from i on, s
  std::vector<std::vector<std::pair<bytes_t, double>>> fronts_;
  std::vector<label> all_;  // those that were expanded, and the last
  std::vector<std::vector<label>> open_;
  std::size_t width_ = 1;  // labels per link
  bool exact_ = true, stopped_ = false;
};

}  // namespace detail

/// The fastest schedule of a chain that combines recomputation with copies to the host, within one budget.
///
/// The forward of each link is run once and either saves what its backward reads, or is one of a run of links that save nothing
/// and are computed again, by a persistent schedule, when the backward comes to them. The input of each link that saves, and of
/// each run, is kept on the device or moved: sent after it was made, back before the backward that reads it. In a state (link i,
/// its input, A, f, b), A bytes stay, f are still to leave when the forward is at i, and b have to be back when the backward is.
/// To save and run on is
///
///     OC(i, A, f, b) = forward + backward + e_f + e_b + min( kept:  OC(i + 1, A + x, (f - up (forward + e_f))+, (b - down
///     (backward + e_b))+),
///                                                            moved: OC(i + 1, A, (f + x - up (forward + e_f))+, (b - down
///                                                            (backward + e_b))+ + x) )
///
/// with e_f = (f + A + x + bytes of the forward - budget)+ / up, the wait until its room is free, and e_b likewise; x = bytes of
/// the input. A run of links is alike, with the forwards without saving and the time of a `persistent_table`. At the end what is
/// still to copy is waited for: f / up + b / down. So copies are counted as streams of bytes, each of which makes room when it
/// has left, and latencies are not; `evaluate` says what a schedule takes.
///
/// Ours: exact in bytes, with labels in place of a table in units of A, f and b (a label that is no later when it has waited for
/// its copies dominates); what a run of links may take of the free memory is chosen, the rest of it is for what arrives
/// meanwhile; and of an input that leaves, what has left makes room for the links behind the first of a run.
///
/// @param c      the chain
/// @param budget bytes, x_0 included
/// @param rates  of copies; the latency is not used
/// @param table  of `c`, for at least `budget` + x_0 bytes
/// @param o      how to search
/// @throws bad_option if a link has no option, or `o.most_labels` is 0
/// Complexity: O(L^2 labels) for L links; the labels per link grow with what differs among the links.
///
/// Reference: Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
/// NeurIPS 2021 (POFO).
inline copied_chain fastest_with_copies(const heterogeneous_chain& c, bytes_t budget, const copy_rates& rates,
                                        const persistent_table& table, const fastest_with_copies_options& o = {}) {
  if (o.most_labels < 1) throw bad_option("fastest_with_copies.most_labels must be >= 1, got 0");
  if (c.links.empty()) return {{}, {}, 0, true};
  if (!table.complete()) return {};
  return detail::copied_chain_search(c, budget, rates, table, o).run();
}

}  // namespace remat::chain
