// SPDX-License-Identifier: Apache-2.0
// A bench for one node of a program, on scratch operands: its time and its allocations.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <remat/layout/layout.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/profile.hpp>

#include "../base/clock.hpp"
#include "../base/views.hpp"
#include "../capture/known_results.hpp"
#include "../program/fold.hpp"
#include "../program/operators.hpp"

namespace remat::pytorch {

/// Runs a node on scratch operands. Values that determine sizes of its results are those of the step.
class node_bench {
 public:
  /// Bytes of allocations by other threads that may belong to other work.
  static constexpr bytes_t other_work_bytes = bytes_t{64} << 10;

  node_bench(const program& step, const node& n) : step_(step), node_(n), on_(device_of(device_of_step(step))) {
    if (has_dynamic_call(step, n)) storage_ = constant_inputs(step, n);  // other values give results of other sizes
    for (const auto& c : n.calls) {
      for (const auto& o : c.operands) add_operand(o.view);
      for (const auto& r : c.results) made_.push_back(step.views[r.view].value);
    }
    keep_written();
  }

  /// Fills the operands with other numbers, for operators that refuse the first ones.
  void make_plausible() {
    for (const auto& c : node_.calls)
      for (const auto& o : c.operands) {
        const auto value = step_.views[o.view].value;
        if (is_number(step_, o.view) || !storage_.count(value) || std::find(made_.begin(), made_.end(), value) != made_.end())
          continue;
        fill_with_safe_values(operand_of(o.view));
      }
    keep_written();
  }

  /// Runs the node once so that kernels initialise. If it refuses the numbers, tries `make_plausible`.
  /// @throws cannot_capture if the node refuses these numbers, too
  void warm_up(const std::function<void()>& run) {
    try {
      run();
      return;
    } catch (const c10::Error&) {
      make_plausible();
    }
    try {
      run();
    } catch (const c10::Error& e) {
      throw cannot_capture(
          node_.name + " cannot be measured, as it takes no other numbers than those of the step: " + e.what_without_backtrace());
    }
  }

  /// Restores operands that a run has written: numbers that drift to infinity or to denormals would change the time.
  void refresh() {
    for (auto& [to, from] : written_) to.copy_(from);
  }

  /// Runs the node once, with `scope` (a recording or planned allocations) active during the calls.
  /// @return time of the calls, s
  template <class Scope>
  double run(bool again, Scope* scope) {
    clear();
    refresh();
    double seconds = 0;
    for (const auto& c : node_.calls)
      call_within(c, again, scope, [&](auto& stack) {
        wait_for_kernels();
        const stopwatch watch;
        c.op.callBoxed(stack);
        wait_for_kernels();
        seconds += watch.seconds();
        undisturbed_ = undisturbed_ && watch.undisturbed();
      });
    return seconds;
  }

  /// Shortest time of several runs with allocations in an arena, as in an executed plan. A slow node runs until a run
  /// takes about as long as the shortest before it.
  /// @param other_threads_bytes gets the bytes that other threads allocated. Half of the runs need no more. Larger figures
  ///                            count only up to `other_work_bytes`, since other work of the process may be among them
  /// @param undisturbed         gets whether the shortest run was undisturbed
  double seconds(const allocation_script& s, double limit, bytes_t& other_threads_bytes, bool& undisturbed) {
    clear();
    std::vector<allocation> list;
    for (const auto& b : s.blocks) list.push_back({b.born, b.freed < 0 ? s.events + 1 : b.freed, b.bytes});
    const bool on_host = on_.which().is_cpu();
    const auto places = lay_out(list, {.alignment = on_host ? layout_options().alignment : accelerator_alignment, .tries = 0});
    const auto memory = on_.memory().reserve(places.arena);
    std::vector<planned_block> plan;
    for (std::size_t i = 0; i < s.blocks.size(); ++i) {
      const auto& b = s.blocks[i];
      const bool kept_by_operator = b.result == none && b.freed < 0;
      plan.push_back({b.bytes, b.deaths, kept_by_operator ? nullptr : memory->data() + places.offsets[i], b.freed >= 0});
    }
    const auto planned = on_.place();
    if (!on_host) return seconds_on_device(*planned, plan);
    double shortest = std::numeric_limits<double>::infinity();
    std::vector<bytes_t> seen;
    const meter counting;
    const auto earlier_peak = c10::make_scope_exit([peak = meter::peak()] { meter::raise_peak(peak); });
    auto once = [&] {
      planned->plan(plan);
      undisturbed_ = true;
      const auto before = meter::live();
      meter::reset_peak();
      const auto time = run(false, planned.get());
      seen.push_back(meter::peak() - before);
      const bool confirms = std::abs(time - shortest) < 0.02 * shortest;
      if (time < shortest) shortest = time, undisturbed = undisturbed_;
      return confirms;
    };
    once();  // touches the memory
    shortest = std::numeric_limits<double>::infinity();
    once();
    const auto begin = clock::now();
    bool confirmed = false;
    for (int k = 0; k < 2 || (k < 8 && since(begin) < (confirmed ? limit / 10 : limit)); ++k) confirmed = once() || confirmed;
    clear();
    std::sort(seen.begin(), seen.end());
    other_threads_bytes = seen[seen.size() / 2];
    for (auto bytes : seen)
      if (bytes <= other_work_bytes) other_threads_bytes = std::max(other_threads_bytes, bytes);
    return shortest;
  }

  /// Shortest of several batches, timed by the device. A batch has several runs, so that the launch of a kernel is hidden behind
  /// the previous kernel, as in a step.
  double seconds_on_device(placement& planned, const std::vector<planned_block>& plan) {
    constexpr int batches = 3, runs = 5;
    double shortest = std::numeric_limits<double>::infinity();
    for (int batch = 0; batch < batches; ++batch) {
      refresh();
      const auto begin = on_.mark_time();
      for (int k = 0; k < runs; ++k) {
        clear();
        planned.plan(plan);
        for (const auto& c : node_.calls) call_within(c, false, &planned, [&](auto& stack) { c.op.callBoxed(stack); });
      }
      shortest = std::min(shortest, on_.seconds(begin, on_.mark_time()) / runs);
    }
    clear();
    return shortest;
  }

  /// Runs the calls once, and records their allocations.
  /// @param again     the run is a recomputation
  /// @param workspace raised to the peak of the memory that kernels take besides the results, bytes, if that is higher
  allocation_script script(bool again, bytes_t& workspace) {
    allocation_recording record(on_.which());
    const bool reports = on_.can_place();
    if (!reports) on_.reset_peak();
    run(again, &record);
    allocation_script s;
    if (!reports) {  // the allocator does not report allocations, so its peak has to do
      const auto use = on_.use();
      workspace = std::max(workspace, use.peak - use.live);
      return s;
    }
    s.events = record.events();
    std::vector<bytes_t> change(static_cast<std::size_t>(s.events) + 1, 0);
    bytes_t kept = 0, live = 0, peak = 0;
    for (const auto& b : record.blocks()) {
      scripted_block block{b.bytes, b.born, b.freed, 0, none};
      for (const auto& other : record.blocks()) block.deaths += other.freed >= 0 && other.freed < b.born;
      for (std::size_t i = 0; i < node_.outputs.size() && b.freed < 0; ++i)
        if (const auto found = storage_.find(node_.outputs[i]); found != storage_.end() && found->second.data() == b.data)
          block.result = static_cast<index_t>(i);
      if (block.result != none) kept += b.bytes;
      change[static_cast<std::size_t>(b.born)] += b.bytes;
      if (b.freed >= 0) change[static_cast<std::size_t>(b.freed)] -= b.bytes;
      s.blocks.push_back(block);
    }
    for (auto c : change) peak = std::max(peak, live += c);
    workspace = std::max(workspace, peak - kept);
    return s;
  }

 private:
  /// Makes one call.
  /// @param again the call is a recomputation
  /// @param scope a recording or planned allocations, active during `run` alone; null: none
  /// @param run   runs the operator on the stack of its arguments
  template <class Scope, class F>
  void call_within(const call& c, bool again, Scope* scope, F run) {
    auto stack = stack_of(c, again, [&](index_t v) { return operand_of(v); });
    const at::AutoGradMode grad_mode(c.grad_mode);
    if (scope) scope->start();
    run(stack);
    if (scope) scope->stop();
    take_results(c, stack);
  }
  /// @throws cannot_capture if the results have another geometry than recorded
  void take_results(const call& c, const ::torch::jit::Stack& stack) {
    for (const auto& r : c.results) {
      const auto& view = step_.views[r.view];
      const auto& t = tensor_at(stack, r);
      if (t.sizes() != at::IntArrayRef(view.sizes) || !same_strides(t.sizes(), t.strides(), view.strides)) {
        require_kernel_geometry(c.op);
        detail::forget_results();
        std::ostringstream text;
        text << c.op.schema().name() << " gives a tensor of sizes " << t.sizes() << " and strides " << t.strides() << " where "
             << at::IntArrayRef(view.sizes) << " and " << at::IntArrayRef(view.strides)
             << " were recorded. The next capture asks its kernel; please report this";
        throw cannot_capture(text.str());
      }
      storage_.insert_or_assign(view.value, t.storage());
    }
  }
  void wait_for_kernels() {
    if (const auto t = on_.mark()) t->wait();
  }
  void clear() {
    for (auto v : made_) storage_.erase(v);
  }
  void keep_written() {
    written_.clear();
    for (const auto& [old, fresh] : node_.overwrites) {
      if (!storage_.count(fresh)) continue;
      const auto all = bytes_over(storage_.at(fresh));
      written_.emplace_back(all, all.clone());
    }
  }
  void add_operand(index_t v) {
    const auto value = step_.views[v].value;
    if (std::find(made_.begin(), made_.end(), value) != made_.end() || storage_.count(value) || is_number(step_, v)) return;
    const auto& view = step_.views[v];
    const auto bytes = step_.values[value].bytes;
    const auto scratch = at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(step_.values[value].device)).storage();
    const auto elements = bytes / static_cast<bytes_t>(c10::elementSize(view.dtype));
    if (at::isFloatingType(view.dtype) && !at::isFloat8Type(view.dtype))  // which have no kernel that draws
      fill_at_random(tensor_of({none, {elements}, {1}, 0, view.dtype}, scratch));
    storage_.emplace(value, scratch);
  }
  /// Fills a flat tensor with numbers from 0 to 1. Large tensors repeat a sample, because draws take longer than most
  /// kernels.
  void fill_at_random(const at::Tensor& t) {
    constexpr int64_t sample = 1 << 16;
    const auto all = t.numel();
    auto filled = std::min(all, sample);
    t.narrow(0, 0, filled).uniform_(0, 1, generator_on(t.device()));
    for (int64_t more; filled < all; filled += more) {
      more = std::min(filled, all - filled);
      t.narrow(0, filled, more).copy_(t.narrow(0, 0, more));
    }
  }
  /// A generator of the bench, since other threads may draw from the default one.
  at::Generator generator_on(c10::Device d) {
    auto& own = generators_[d.type()];
    if (own.defined()) return own;
    if (d.is_cpu()) return own = at::detail::createCPUGenerator();
    auto shared = at::globalContext().defaultGenerator(d);
    std::lock_guard lock(shared.mutex());
    return own = shared.clone();
  }
  at::Tensor operand_of(index_t v) {
    if (is_number(step_, v)) return constant_tensor(step_, step_.values[step_.views[v].value].slot);
    return tensor_of(step_.views[v], storage_.at(step_.views[v].value));
  }

  const program& step_;
  const node& node_;
  device& on_;
  std::vector<index_t> made_;
  std::map<index_t, c10::Storage> storage_;
  std::map<c10::DeviceType, at::Generator> generators_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  ///< {overwritten operand, its first contents}, as bytes
  bool undisturbed_ = true;
};

}  // namespace remat::pytorch
