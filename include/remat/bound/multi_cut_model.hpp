// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule within a budget, from a MILP over several of its moments. Needs Boost.Graph and
/// Eigen.
/// One class, because the rows of the model share its columns: longer than 400 lines.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/cut_network.hpp>
#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/milp/model.hpp>

namespace remat::bound {

/// Per operation: is it a descendant of a given operation (`below`), an ancestor of it (`above`)?
struct relatives {
  std::vector<bool> below, above;
};

/// @return descendants and ancestors of `o`; `o` is among both
/// Complexity: O(operations + edges).
inline relatives relatives_of(const problem& p, operation_id o) {
  const auto& ops = p.operations();
  relatives found{std::vector<bool>(ops.size(), false), std::vector<bool>(ops.size(), false)};
  auto& [below, above] = found;
  below[o] = above[o] = true;
  for (auto c = o + 1; c < ops.size(); ++c)
    for (auto u : ops[c].inputs) below[c] = below[c] || (!p.is_source(u) && below[p.producer(u)]);
  for (auto c = o + 1; c-- > 0;)
    if (above[c])
      for (auto u : ops[c].inputs)
        if (!p.is_source(u)) above[p.producer(u)] = true;
  return found;
}

/// Simplifications of a model of several moments, and how hard `multi_cut_bound` tries.
struct multi_cut_options {
  std::size_t moments = 24;  ///< most moments in a model, >= 1
  bool integer = true;       ///< branch and bound after the linear relaxations
  double negligible = 1e-4;  ///< smaller values cost no memory; a part of the budget without held bytes, in [0, 1)
  double light = 0.02;       ///< operations that need fewer bytes have no memory row; a part as above, in [0, 1)
  std::size_t reach = 4;     ///< most short windows that a long window joins, except windows to the end; >= 1

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    if (moments < 1) throw bad_option("multi_cut_options.moments must be >= 1, got 0");
    if (reach < 1) throw bad_option("multi_cut_options.reach must be >= 1, got 0");
    const auto part = [](const char* member, double x) {
      if (!(x >= 0 && x < 1))
        throw bad_option(std::string("multi_cut_options.") + member + " must be in [0, 1), got " + std::to_string(x));
    };
    part("negligible", negligible);
    part("light", light);
  }
};

/// A MILP that every schedule within a budget satisfies, staged or not. It is a relaxation: its optimum is a lower bound on the
/// time of these schedules.
///
/// `moments` are operations tau_1 .. tau_K. The model describes the schedules in which their first runs are at t_1 < .. < t_K.
/// These are all schedules if each moment is an ancestor of the next. A *window* [a, b) lasts from right after t_a to just before
/// t_b; t_0 is the start, t_(K + 1) the end. Short windows are [j, j + 1). Long windows are [a, b) with b - a up to a reach, and
/// [a, K + 1). A value is *live* if it is on the device and is read, or wanted at the end, before it is computed again.
///
/// Columns, for window w = [a, b), moment j, operation o, value v:
/// - run[o,w] in {0,1}: o runs in w (several runs count once); continuous for long windows, where the short ones determine it;
/// - k[v,j] in {0,1}: v is live just before t_j;
/// - stay[v,w] in [0,1], continuous: v is live at t_b and has been on the device since t_a.
///
/// Rows, with u an operand of o and p the producer of v; the outputs of tau_a count as live at t_a in windows [a, b):
/// - run[o,w] <= k[u,a] + run[producer of u,w]; k[v,b] <= stay[v,w] + run[p,w]; stay[v,w] <= k[v,a];
/// - an ancestor of tau_j runs before t_j; tau_j and its descendants do not; each needed operation runs, a once-only one once;
/// - k[v,j] = 0 if v does not fit beside tau_j; stay[v,w] = 0 if v does not fit beside an operation that runs in w in any case;
/// - memory at t_j: bytes of all k[v,j], outputs and workspace of tau_j <= budget;
/// - memory while o runs in w: bytes of all stay[v,w] and, if o does run, its operands, outputs and workspace <= budget.
///
/// The long windows are redundant for integers. Without them, the relaxation runs an operation a little in every window and
/// retains equally little of its operands. Windows to the end make the model at least as strong as the single cut of
/// `retention_cut` at each moment. The other long windows make it at least as strong as a model with fewer moments.
///
/// Values of negligible size cost nothing once they are made. An operation that makes only such values has no
/// columns and runs once.
///
/// If the problem allows copies, windows have seconds, and the objective is the sum of these seconds. A window is at least as
/// long as its computations, its copies to the host, and its copies to the device. A value is live also if it is being sent, or
/// is sent later. There are more columns for values that may move:
/// - send[v,j], come[v,w] in {0,1}: the first copy of v to the host, or a copy of v to the device, begins in the window;
/// - back[v,w] in [0,1]: v comes, is not live at t_a, and its first copy to the host began before.
///
/// Rows that change, and more rows:
/// - run[o,w] <= k[u,a] + run[producer of u,w] + back[u,w]; k[v,b] <= stay[v,w] + run[p,w] + come[v,w];
/// - send[v,j] <= k[v,j] + run[p,j]; come[v,w] <= sends before t_b; back[v,w] <= come[v,w], sends before t_a;
/// - in each direction at most one copy is in flight at a moment; its rest counts in the window after the moment;
/// - a value that comes back after t_j was sent before: the copies of these values to the host fit into the time until t_j.
class multi_cut_model {
 public:
  static constexpr std::size_t max_operations = 20'000;  ///< needed operations; for more, models take gigabytes

  /// @param p           the problem, plain; must outlive the model
  /// @param budget      bytes, >= the budget of `bounds_without_search`
  /// @param moments     needed operations in the order of their first runs; none before an operation that it depends on
  /// @param o           simplifications
  /// @param longest_row longer sums are split into partial sums
  /// @param stop        polled while the model is built
  /// @throws interrupted if `stop` returns true
  /// Complexity: O(moments (values + operations + edges)) columns and rows of few entries.
  multi_cut_model(const problem& p, bytes_t budget, std::vector<operation_id> moments, const multi_cut_options& o = {},
                  std::size_t longest_row = std::numeric_limits<std::size_t>::max(), std::function<bool()> stop = {})
      : p_(p), options_(o), moments_(std::move(moments)), longest_row_(longest_row), stop_(std::move(stop)) {
    const auto room = static_cast<double>(budget - p.held_bytes());
    if (room > 0) byte_ = room / room_units;
    second_ = milp::unit_of(p.total_seconds(), 10000);
    room_ = room / byte_ * (1 + 1e-6);  // tolerance of backends
    index();
    make_columns();
    if (p.copies()) make_copies();
    for (std::size_t j = 1; j <= moments_.size(); ++j) add_moment_row(j);
    for (const auto& w : windows_) add_rows(w);
    model_ = builder_.build(p.copies() ? 0 : base_seconds_ / second_);
  }

  const milp::model& model() const { return model_; }
  /// The linear relaxation. Its optimum is a lower bound as well.
  milp::model relaxation() const {
    auto m = model_;
    m.integer.assign(m.integer.size(), false);
    return m;
  }
  /// Seconds per unit of the objective.
  double unit() const { return second_; }
  const std::vector<operation_id>& moments() const { return moments_; }

  /// Has the model no columns for `v`, because it is too small, held or not needed?
  bool negligible(value_id v) const { return !modelled_[v]; }
  /// The part of `v` that is live just before the first run of moment `j`, counted from 0, in the solution `x`.
  /// @pre `v` is not negligible
  double retained(const Eigen::VectorXd& x, std::size_t j, value_id v) const { return k_[j + 1][v].at(x); }

  /// Estimates how far the solution `x` is over the budget before the first run of `o`. Another moment helps where this is large.
  /// @param x      a solution
  /// @param o      a needed operation, assumed to run as early as it can
  /// @param beside `o` is on no path through the moments: values that are made again for it and stay count, too
  /// @return excess bytes, as a part of the budget without held bytes; negative if there is room
  /// Complexity: O(values + edges).
  double excess(const Eigen::VectorXd& x, operation_id o, bool beside = false) const {
    const auto& ops = p_.operations();
    const auto j = first_window_[o];
    const auto& w = windows_[j];
    const auto [below, above] = relatives_of(p_, o);
    double sum = own_bytes(o) - room_;
    for (value_id v = 0; v < p_.values().size(); ++v) {
      if (!modelled_[v] || contains(ops[o].inputs, v)) continue;
      const auto producer = p_.producer(v);
      double present = w.stay[v].at(x);
      if (producer == none || !below[producer]) {
        const double made = (producer == none ? 0 : w.run[producer].at(x)) + w.come[v].at(x);
        double use = 0;
        for (auto c : p_.consumers(v))
          if (below[c]) use = std::max(use, w.run[c].at(x));
        const bool before = producer != none && above[producer];
        if (before && first_window_[producer] == j && last_moment_[producer] == j + 1 && made < 1 + 1e-3)
          present = std::max({present, use, k_[j + 1][v].at(x)});
        else
          present = std::max({present, use - made, beside && before ? std::min(made, k_[j + 1][v].at(x)) : 0});
      }
      sum += size(v) * present;
    }
    for (auto u : ops[o].inputs)
      if (modelled_[u]) sum += size(u);
    return sum / room_units;
  }

 private:
  using expression = milp::expression;
  struct window {
    std::size_t a, b;
    std::vector<expression> run;   // per operation
    std::vector<expression> stay;  // per value
    std::vector<expression> come;  // per value: a copy to the device begins
    std::vector<expression> back;  // per value: such a copy begins, and the first copy to the host began before the window
  };

  using copies_per_window = std::vector<std::vector<expression>>;  // per short window and value: a copy begins

  static constexpr double light_in_long = 0.2;  // replaces `light` in long windows, where rows of large operations suffice
  static constexpr double room_units = 1000;    // the budget without held bytes, in the units of the rows

  template <class List>
  static bool contains(const List& ascending, index_t i) {
    return std::binary_search(ascending.begin(), ascending.end(), i);
  }
  double size(value_id v) const { return static_cast<double>(p_.values()[v].bytes) / byte_; }
  /// Outputs and workspace of `o`, in the units of the rows.
  double own_bytes(operation_id o) const {
    const auto& op = p_.operations()[o];
    double sum = static_cast<double>(op.workspace) / byte_;
    for (auto v : op.outputs) sum += size(v);
    return sum;
  }
  /// Is `v` on the device at the start of a window [a, b), whatever was live before: a source if a = 0, an output of tau_a?
  bool present_at_start(value_id v, std::size_t a) const {
    return p_.is_source(v) ? a == 0 : a > 0 && moment_of_[p_.producer(v)] == a;
  }

  void index() {
    const auto& ops = p_.operations();
    const auto end = moments_.size() + 1;
    needed_ = needed_operations(p_);
    moment_of_.assign(ops.size(), 0);
    for (std::size_t j = 1; j < end; ++j) moment_of_[moments_[j - 1]] = j;
    modelled_.assign(p_.values().size(), false);
    makes_modelled_.assign(ops.size(), false);
    const auto matters = [&](value_id v) {
      return !p_.values()[v].held && p_.values()[v].bytes > 0 && size(v) >= options_.negligible * room_units;
    };
    for (value_id v = 0; v < p_.values().size(); ++v) modelled_[v] = p_.is_source(v) && matters(v);
    for (auto o : needed_)
      for (auto v : ops[o].outputs)
        if (matters(v)) modelled_[v] = makes_modelled_[o] = true;
    room_beside_.assign(ops.size(), 0);
    for (auto o : needed_) {
      room_beside_[o] = room_ - own_bytes(o);
      for (auto u : ops[o].inputs)
        if (modelled_[u]) room_beside_[o] -= size(u);
    }
    first_window_.assign(ops.size(), 0);
    last_moment_.assign(ops.size(), end);
    for (auto o : needed_) {
      for (auto u : ops[o].inputs)
        if (!p_.is_source(u)) first_window_[o] = std::max(first_window_[o], first_window_[p_.producer(u)]);
      if (moment_of_[o] > 0) first_window_[o] = moment_of_[o];
    }
    for (std::size_t i = needed_.size(); i-- > 0;) {
      const auto o = needed_[i];
      const auto by = moment_of_[o] > 0 ? moment_of_[o] : last_moment_[o];
      for (auto u : ops[o].inputs)
        if (!p_.is_source(u)) last_moment_[p_.producer(u)] = std::min(last_moment_[p_.producer(u)], by);
    }
  }

  /// Finds the columns that may be of use; all others are the constant 0.
  /// @param useful per short window j and operation: may a run in [j, j + 1) help?
  /// @param wanted per moment j and value: may it help to have the value live at t_j?
  void find_uses(std::vector<std::vector<bool>>& useful, std::vector<std::vector<bool>>& wanted) const {
    const auto& ops = p_.operations();
    const auto end = moments_.size() + 1;
    useful.assign(end, std::vector<bool>(ops.size(), false));
    wanted.assign(end + 1, std::vector<bool>(p_.values().size(), false));
    for (auto v : p_.targets()) wanted[end][v] = modelled_[v];
    for (std::size_t j = end; j-- > 0;) {
      for (std::size_t i = needed_.size(); i-- > 0;) {
        const auto o = needed_[i];
        const bool first_run = j < last_moment_[o] && moment_of_[o] == 0;
        if (!makes_modelled_[o] || j < first_window_[o] || (ops[o].once && !first_run)) continue;
        bool serves = first_run;
        for (auto v : ops[o].outputs) {
          if (!modelled_[v]) continue;
          const auto& readers = p_.consumers(v);
          serves = serves || p_.copies() || wanted[j + 1][v] ||
                   std::any_of(readers.begin(), readers.end(), [&](auto c) { return useful[j][c]; });
        }
        useful[j][o] = serves;
      }
      for (value_id v = 0; v < p_.values().size(); ++v) {
        const auto& readers = p_.consumers(v);
        const auto reads = [&](operation_id c) { return useful[j][c] || (j > 0 && moment_of_[c] == j); };
        wanted[j][v] = modelled_[v] && (p_.copies() || wanted[j + 1][v] || std::any_of(readers.begin(), readers.end(), reads));
      }
    }
  }

  /// Is there no room for `v` while `o` runs? False if `o` reads or makes `v`.
  bool excludes(operation_id o, value_id v) const {
    return size(v) > room_beside_[o] && !contains(p_.operations()[o].inputs, v) && p_.producer(v) != o;
  }

  void make_columns() {
    const auto& ops = p_.operations();
    const auto end = moments_.size() + 1;
    std::vector<std::vector<bool>> useful, wanted;
    find_uses(useful, wanted);
    k_.assign(end + 1, std::vector<expression>(p_.values().size()));
    for (std::size_t j = 1; j <= end; ++j)
      for (value_id v = 0; v < p_.values().size(); ++v) {
        if (!wanted[j][v] || (!p_.is_source(v) && first_window_[p_.producer(v)] >= j)) continue;
        if (j < end && excludes(moments_[j - 1], v)) continue;
        if (j == end || contains(ops[moments_[j - 1]].inputs, v))
          k_[j][v].constant = 1;
        else
          k_[j][v] = builder_.binary(0);
      }
    for (std::size_t j = 0; j < end; ++j) {
      auto& w = add_window(j, j + 1);
      for (auto o : needed_) {
        if (!useful[j][o]) continue;
        if (moment_of_[o] == 0 && first_window_[o] + 1 == last_moment_[o] && first_window_[o] == j) {
          w.run[o].constant = 1;
          base_seconds_ += ops[o].seconds;
        } else {
          w.run[o] = builder_.binary(p_.copies() ? 0 : ops[o].seconds / second_);
        }
      }
    }
    for (auto o : needed_) {
      if (!makes_modelled_[o] || moment_of_[o] > 0) base_seconds_ += ops[o].seconds;
      if (!makes_modelled_[o] || moment_of_[o] > 0 || first_window_[o] + 1 == last_moment_[o]) continue;
      builder_.row(1, builder_.split(runs(o, first_window_[o], last_moment_[o]), longest_row_), ops[o].once ? 1 : milp::infinity);
    }
    for (std::size_t a = 0; a + 1 < end; ++a)
      for (std::size_t b = a + 2; b <= end; ++b)
        if (b == end || b - a <= options_.reach) make_long_window(a, b);
  }

  void poll() const {
    if (stop_ && stop_()) throw interrupted();
  }
  /// Does the first run of `o` lie within [a, b) in all schedules of the model?
  bool always_runs(operation_id o, std::size_t a, std::size_t b) const {
    return moment_of_[o] > 0 ? moment_of_[o] > a && moment_of_[o] < b : first_window_[o] >= a && last_moment_[o] <= b;
  }
  window& add_window(std::size_t a, std::size_t b) {
    poll();
    const std::vector<expression> per_value(p_.values().size());
    windows_.push_back({a, b, std::vector<expression>(p_.operations().size()), per_value, per_value, per_value});
    auto& w = windows_.back();
    std::vector<bool> stays(p_.values().size());
    double largest = 0;
    for (value_id v = 0; v < stays.size(); ++v) {
      stays[v] = !k_[b][v].is_zero() && (present_at_start(v, a) || !k_[a][v].is_zero());
      if (stays[v]) largest = std::max(largest, size(v));
    }
    for (auto o : needed_) {
      if (!always_runs(o, a, b) || room_beside_[o] >= largest) continue;
      for (value_id v = 0; v < stays.size(); ++v) stays[v] = stays[v] && !excludes(o, v);
    }
    for (value_id v = 0; v < stays.size(); ++v)
      if (stays[v]) w.stay[v] = builder_.column(0, 0, 1);
    return w;
  }

  /// The number of the windows [a, a + 1) .. [b - 1, b) in which `o` runs. Its first run at a moment does not count.
  expression runs(operation_id o, std::size_t a, std::size_t b) const {
    expression sum;
    for (auto j = a; j < b; ++j) sum.add(windows_[j].run[o]);
    return sum;
  }

  void make_long_window(std::size_t a, std::size_t b) {
    auto& w = add_window(a, b);
    for (auto o : needed_) {
      if (!makes_modelled_[o]) continue;
      if (always_runs(o, a, b)) {
        w.run[o].constant = 1;
        continue;
      }
      const auto sum = builder_.split(runs(o, a, b), longest_row_);
      if (sum.is_zero()) continue;
      w.run[o] = builder_.column(0, 0, 1);
      builder_.at_most(w.run[o], sum);
      for (auto j = a; j < b; ++j) builder_.at_most(windows_[j].run[o], w.run[o]);
      if (moment_of_[o] == 0 && a < last_moment_[o] && first_window_[o] < b)
        builder_.at_least(builder_.split(runs(o, first_window_[o], a) + runs(o, b, last_moment_[o]), longest_row_) + w.run[o], 1);
    }
  }

  /// May `v` be copied, and could it have been made before t_a?
  bool may_move(value_id v, std::size_t a) const {
    return modelled_[v] && p_.values()[v].movable && (p_.is_source(v) ? a > 0 : first_window_[p_.producer(v)] < a);
  }
  expression made(const window& w, value_id v) const { return p_.is_source(v) ? expression{} : w.run[p_.producer(v)]; }
  /// The number of copies of `v` that begin in the windows [a, a + 1) .. [b - 1, b).
  expression begun(const copies_per_window& copies, value_id v, std::size_t a, std::size_t b) {
    expression sum;
    for (auto j = a; j < b; ++j) sum.add(copies[j][v]);
    return builder_.split(std::move(sum), longest_row_);
  }

  void make_copies() {
    const auto end = moments_.size() + 1;
    const auto values = p_.values().size();
    copies_per_window send(end, std::vector<expression>(values)), come = send;
    for (std::size_t j = 0; j < end; ++j)
      for (value_id v = 0; v < values; ++v) {
        if (!may_move(v, j + 1)) continue;
        send[j][v] = builder_.binary(0);
        windows_[j].come[v] = come[j][v] = builder_.binary(0);
        if (!present_at_start(v, j)) builder_.at_most(send[j][v], k_[j][v] + made(windows_[j], v));
      }
    for (auto& w : windows_)
      for (value_id v = 0; v < values; ++v) {
        if (!may_move(v, w.b)) continue;
        if (w.b > w.a + 1) {
          w.come[v] = builder_.column(0, 0, 1);
          builder_.at_most(w.come[v], begun(come, v, w.a, w.b));
          for (auto j = w.a; j < w.b; ++j) builder_.at_most(come[j][v], w.come[v]);
        }
        builder_.at_most(w.come[v], begun(send, v, 0, w.b));
        if (!may_move(v, w.a)) continue;
        w.back[v] = builder_.column(0, 0, 1);
        builder_.at_most(w.back[v], w.come[v]);
        builder_.at_most(w.back[v], begun(send, v, 0, w.a));
      }
    std::vector<expression> seconds(end);
    for (auto& s : seconds) s = builder_.column(1, 0, milp::infinity);
    add_computations(seconds);
    add_copies(seconds, send, p_.copies()->to_host);
    add_copies(seconds, come, p_.copies()->to_device);
    for (const auto& w : windows_) {  // copies to the host of values that are absent at t_a and come back lie before t_a
      if (w.b != end || w.a == 0) continue;
      expression before, sent;
      for (std::size_t j = 0; j < w.a; ++j) before.add(seconds[j]);
      for (value_id v = 0; v < values; ++v) sent.add(w.back[v], copy_time(v, p_.copies()->to_host));
      builder_.at_least(before - builder_.split(std::move(sent), longest_row_), 0);
    }
  }
  /// Seconds of a copy of `v`, in units of the objective.
  double copy_time(value_id v, double rate) const {
    return milp::in_units(p_.copies()->latency + static_cast<double>(p_.values()[v].bytes) / rate, second_);
  }
  /// Each short window takes at least as long as its computations.
  void add_computations(const std::vector<expression>& seconds) {
    std::vector<expression> computed(seconds.size());
    for (auto o : needed_) {
      const double c = milp::in_units(p_.operations()[o].seconds, second_);
      if (moment_of_[o] > 0) computed[moment_of_[o]].constant += c;
      if (makes_modelled_[o]) {
        for (std::size_t j = 0; j < seconds.size(); ++j) computed[j].add(windows_[j].run[o], c);
      } else if (moment_of_[o] == 0 && c > 0) {  // runs once, in one of the windows
        expression once;
        for (auto j = first_window_[o]; j < last_moment_[o]; ++j) {
          const auto here = first_window_[o] + 1 == last_moment_[o] ? expression{{}, 1} : builder_.column(0, 0, 1);
          once.add(here);
          computed[j].add(here, c);
        }
        if (!once.is_constant()) builder_.equal(builder_.split(std::move(once), longest_row_), 1);
      }
    }
    for (std::size_t j = 0; j < seconds.size(); ++j)
      builder_.at_least(seconds[j] - builder_.split(std::move(computed[j]), longest_row_), 0);
  }
  /// Each short window takes at least as long as its copies of one direction: the copies that begin in the window, plus the rest
  /// of the copy in flight at its begin, minus the rest of the copy in flight at its end.
  void add_copies(const std::vector<expression>& seconds, const copies_per_window& copies, double rate) {
    std::vector<expression> left(seconds.size() + 1);
    for (std::size_t j = 1; j < seconds.size(); ++j) {
      expression in_flight, rest;
      for (value_id v = 0; v < p_.values().size(); ++v) {
        if (k_[j][v].is_zero() || !may_move(v, j)) continue;
        const auto under_way = builder_.column(0, 0, 1);
        builder_.at_most(under_way, k_[j][v]);
        builder_.at_most(under_way, begun(copies, v, 0, j));
        in_flight.add(under_way);
        rest.add(under_way, copy_time(v, rate));
      }
      if (in_flight.is_constant()) continue;
      left[j] = builder_.column(0, 0, milp::infinity);
      builder_.at_most(builder_.split(std::move(in_flight), longest_row_), 1);
      builder_.at_least(builder_.split(std::move(rest), longest_row_) - left[j], 0);
    }
    for (std::size_t j = 0; j < seconds.size(); ++j) {
      expression all;
      for (value_id v = 0; v < p_.values().size(); ++v) all.add(copies[j][v], copy_time(v, rate));
      builder_.at_least(seconds[j] + left[j + 1] - left[j] - builder_.split(std::move(all), longest_row_), 0);
    }
  }

  void add_moment_row(std::size_t j) {
    expression row{{}, own_bytes(moments_[j - 1])};
    for (value_id v = 0; v < p_.values().size(); ++v) row.add(k_[j][v], size(v));
    builder_.at_most(builder_.split(std::move(row), longest_row_), room_);
  }

  void add_rows(const window& w) {
    poll();
    const auto& before = k_[w.a];
    const auto& after = k_[w.b];
    expression lasting;
    for (value_id v = 0; v < p_.values().size(); ++v) {
      if (!modelled_[v]) continue;
      if (!w.stay[v].is_zero() && !present_at_start(v, w.a)) builder_.at_most(w.stay[v], before[v]);
      lasting.add(w.stay[v], size(v));
      if (!after[v].is_zero()) builder_.at_most(after[v], w.stay[v] + made(w, v) + w.come[v]);
    }
    lasting = builder_.split(std::move(lasting), longest_row_);
    for (auto o : needed_) {
      const auto& run = w.run[o];
      if (run.is_zero()) continue;
      double bytes = own_bytes(o);
      for (auto u : p_.operations()[o].inputs) {
        if (!modelled_[u]) continue;
        bytes += size(u);
        if (!present_at_start(u, w.a)) builder_.at_most(run, before[u] + made(w, u) + w.back[u]);
      }
      const double light = w.b == w.a + 1 || options_.light == 0 ? options_.light : std::max(options_.light, light_in_long);
      if (bytes < light * room_units) continue;
      auto row = lasting + bytes * run;
      for (auto u : p_.operations()[o].inputs) {
        if (!modelled_[u] || w.stay[u].is_zero()) continue;
        if (run.is_one()) {
          row.add(w.stay[u], -size(u));
          continue;
        }
        const auto both = builder_.column(0, 0, 1);  // an operand that stays through w counts once
        builder_.at_most(both, run);
        builder_.at_most(both, w.stay[u]);
        row.add(both, -size(u));
      }
      builder_.at_most(row, room_);
    }
  }

  const problem& p_;
  multi_cut_options options_;
  std::vector<operation_id> moments_;
  std::size_t longest_row_;
  std::function<bool()> stop_;
  std::vector<operation_id> needed_;             // operations that targets depend on
  std::vector<std::size_t> moment_of_;           // per operation: j if the operation is tau_j, else 0
  std::vector<std::size_t> first_window_;        // per operation: the first short window in which it can run
  std::vector<std::size_t> last_moment_;         // per operation: the moment before which it must have run
  std::vector<bool> modelled_, makes_modelled_;  // values that are not negligible; operations that make such a value
  std::vector<double> room_beside_;  // per operation: room left while it runs beside its operands, outputs and workspace
  double byte_ = 1, second_ = 1, room_ = 0, base_seconds_ = 0;
  milp::builder builder_;
  std::vector<std::vector<expression>> k_;  // per moment and value
  std::vector<window> windows_;             // the short window [j, j + 1) at position j, then the long windows
  milp::model model_;
};

}  // namespace remat::bound
