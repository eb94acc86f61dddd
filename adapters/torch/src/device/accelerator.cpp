// SPDX-License-Identifier: Apache-2.0
#include "accelerator.hpp"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <ATen/accelerator/Graph.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include <remat/pytorch/memory.hpp>

#include "../base/generators.hpp"
#include "../base/views.hpp"
#include "allocator.hpp"
#include "backend.hpp"
#include "device_region.hpp"
#include "stream_events.hpp"
#include "tier.hpp"

namespace remat::pytorch {
namespace {

/// A link with a stream for its copies.
class stream_link final : public link {
 public:
  explicit stream_link(std::shared_ptr<accelerator_state> s) : shared_(std::move(s)) {}
  ~stream_link() override {
    if (process_ == getpid()) shared_->drop_finished(true, this);
  }

  ticket copy(const block& to, const block& from, std::vector<ticket> after) override {
    check_copy(to, from);
    if (to.in->data() == nullptr || from.in->data() == nullptr)
      throw broken_contract("remat: a copy on a stream to or from a region that has no address");
    const auto what = "copy of " + std::to_string(to.bytes) + " bytes between the host and " + shared_->on.str();
    const c10::DeviceGuard guard(shared_->on);
    std::lock_guard lock(mutex_);
    const bool captured = shared_->capturing();
    if (!captured) shared_->drop_finished();  // events cannot be queried during a capture
    try {
      auto& stream = captured ? stream_of_captures_ : stream_;
      if (!stream) stream = shared_->new_stream(captured);
      for (const auto& t : after) continue_after(t, *stream);
      for (const auto* r : {to.in.get(), from.in.get()})
        if (const auto* own = dynamic_cast<const device_region*>(r)) continue_after(own->allocated(), *stream);
      if (to.bytes > 0)
        shared_->copy(to.in->data() + to.offset, to.in->on(), from.in->data() + from.offset, from.in->on(), to.bytes, *stream);
      const auto done = std::make_shared<stream_event>(shared_->events, *stream, what);
      if (captured) return done;  // the owner of the graph holds the blocks
      std::lock_guard more(shared_->copies_mutex);
      shared_->copies.push_back({this, to.in, from.in, done});
      return done;
    } catch (const copy_failed& e) {
      return std::make_shared<failed_event>(e.what());
    } catch (const std::exception& e) {
      return std::make_shared<failed_event>(what + ": " + reason_of(e));
    }
  }

  bool joins_graphs_of(c10::Device d) const override { return d == shared_->on; }

 private:
  std::shared_ptr<accelerator_state> shared_;
  std::mutex mutex_;
  std::optional<c10::Stream> stream_;              ///< taken at the first copy
  std::optional<c10::Stream> stream_of_captures_;  ///< separate, so that copies of other threads stay out of the graph
  pid_t process_ = getpid();
};

/// Places the allocations of a thread on the stream that was current at `start`.
class device_placement final : public planned_allocations {
 public:
  explicit device_placement(std::shared_ptr<accelerator_state> s) : planned_allocations(s->on), shared_(std::move(s)) {}
  bool in_front() const override { return shared_->of.in_front(); }
  void start() override {
    stream_ = shared_->kernels();
    planned_allocations::start();
  }
  bool follows(c10::Stream s) const override { return s == stream_; }

 private:
  std::shared_ptr<accelerator_state> shared_;
  std::optional<c10::Stream> stream_;
};

/// A captured graph of PyTorch.
class device_graph final : public replayable {
 public:
  /// Captures on the current stream.
  device_graph(const device& on, const std::function<void()>& work) {
    graph_.capture_begin({0, 0}, at::GraphCaptureMode::ThreadLocal);
    const auto before = on.use().reserved;
    try {
      work();
    } catch (...) {
      try {
        graph_.capture_end();
      } catch (const std::exception&) {  // the error of `work` is reported
      }
      throw;
    }
    extra_ = on.use().reserved - before;
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }
  bytes_t extra_bytes() const override { return extra_; }

 private:
  at::accelerator::Graph graph_;
  bytes_t extra_ = 0;
};

class accelerator final : public device {
 public:
  accelerator(c10::Device on, pytorch::backend& of)
      : shared_(std::make_shared<accelerator_state>(on, of)),
        timed_(std::make_shared<event_pool>(on.type(), c10::EventFlag::BACKEND_DEFAULT)),
        memory_(shared_, false, of.name(on), max_bytes) {}

  const std::shared_ptr<accelerator_state>& parts() const { return shared_; }
  c10::Device which() const override { return shared_->on; }
  tier& memory() override { return memory_; }
  bool can_place() const override { return shared_->of.can_place(); }
  std::unique_ptr<placement> place() override { return std::make_unique<device_placement>(shared_); }
  std::shared_ptr<const random_state> random() const override { return std::make_shared<drawn>(state_of(generator())); }
  void random(const random_state& state) override { set_state(generator(), dynamic_cast<const drawn&>(state).state); }
  ticket mark() override {
    const c10::DeviceGuard guard(shared_->on);
    return std::make_shared<stream_event>(shared_->events, shared_->kernels(), "kernels on " + shared_->on.str());
  }
  void wait(const ticket& t) override {
    const c10::DeviceGuard guard(shared_->on);
    continue_after(t, shared_->kernels());
  }
  ticket mark_time() override {
    const c10::DeviceGuard guard(shared_->on);
    return std::make_shared<stream_event>(timed_, shared_->kernels(), "kernels on " + shared_->on.str());
  }
  double seconds(const ticket& from, const ticket& to) override {
    to->wait();
    return dynamic_cast<const stream_event&>(*from).seconds_until(dynamic_cast<const stream_event&>(*to));
  }
  std::string cannot_capture() const override {
    return at::has_graph_impl(shared_->on.type()) ? "" : "PyTorch has no graphs for " + shared_->on.str();
  }
  std::unique_ptr<replayable> capture(const std::function<void()>& work) override {
    if (const auto why = cannot_capture(); !why.empty()) throw not_available(why);
    const std::lock_guard lock(capture_mutex_);
    if (!stream_of_captures_) stream_of_captures_ = shared_->new_stream(true);
    const c10::StreamGuard guard(*stream_of_captures_);
    multiply();
    return std::make_unique<device_graph>(*this, work);
  }
  bool warm() const override { return multiplied().count(here()) > 0 && (in_backward() || warm_backwards().count(here()) > 0); }
  void warm_up() override {
    const c10::DeviceGuard guard(shared_->on);
    const auto before = use().live;
    multiply();
    if (in_backward()) {  // inside a backward: a nested one could wait for its own thread
      workspaces_ += std::max<bytes_t>(0, use().live - before);
      return;
    }
    const at::AutoGradMode grad_mode(true);
    const auto x = at::ones({1}, at::TensorOptions().device(shared_->on)).requires_grad_(), y = x * 1;
    y.register_hook([this](const at::Tensor&) { multiply(); });  // runs on the autograd thread of the device
    y.backward();
    warm_backwards().insert(here());
    constexpr auto alive = static_cast<bytes_t>(3 * accelerator_alignment);  // bytes of x, y and the gradient
    workspaces_ += std::max<bytes_t>(0, use().live - before - alive);
  }
  bytes_t workspaces() const override { return workspaces_; }
  void enter(region& r) override {
    const c10::DeviceGuard guard(shared_->on);
    refuse_foreign_capture(shared_->on);
    multiply();
    if (auto* const own = dynamic_cast<device_region*>(&r)) own->enter();
  }
  memory_use use() const override {
    const auto all = shared_->of.own().getDeviceStats(shared_->on.index());
    constexpr auto total = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return {all.allocated_bytes[total].current, all.allocated_bytes[total].peak, all.reserved_bytes[total].current};
  }
  void reset_peak() override { shared_->of.own().resetPeakStats(shared_->on.index()); }
  bytes_t free_bytes() const override {
    const auto held = use();
    return allowed_memory(shared_->of, shared_->on).second + held.reserved - held.live;
  }
  bytes_t total_bytes() const override { return allowed_memory(shared_->of, shared_->on).first; }
  void empty_cache() override {
    shared_->drop_finished();
    shared_->of.own().emptyCache();
  }
  std::string lost() const override { return shared_->lost(); }

 private:
  struct drawn final : random_state {
    explicit drawn(at::Tensor s) : state(std::move(s)) {}
    at::Tensor state;
  };
  at::Generator generator() const { return at::globalContext().defaultGenerator(shared_->on); }

  /// Runs matrix products once per thread and stream, so that libraries set up their workspaces.
  void multiply() {
    if (!multiplied().insert(here()).second) return;
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto x = at::ones({8, 8}, at::TensorOptions().device(shared_->on)), row = at::ones({8}, x.options());
    at::mm(x, x);
    at::addmm(row, x, x);
    at::bmm(x.unsqueeze(0), x.unsqueeze(0));
  }
  using device_stream = std::tuple<c10::DeviceType, c10::DeviceIndex, c10::StreamId>;
  device_stream here() const { return {shared_->on.type(), shared_->on.index(), shared_->kernels().id()}; }
  /// Devices and streams on which this thread has run `multiply`.
  static std::set<device_stream>& multiplied() {
    thread_local std::set<device_stream> all;
    return all;
  }
  /// Devices and streams for which this thread has warmed up the autograd thread.
  static std::set<device_stream>& warm_backwards() {
    thread_local std::set<device_stream> all;
    return all;
  }
  static bool in_backward() { return ::torch::autograd::get_current_graph_task_id() != -1; }

  std::shared_ptr<accelerator_state> shared_;
  std::shared_ptr<event_pool> timed_;
  std::atomic<bytes_t> workspaces_ = 0;
  std::mutex capture_mutex_;
  std::optional<c10::Stream> stream_of_captures_;  ///< the default stream cannot be captured
  accelerator_tier memory_;
};

/// @throws not_available
c10::Device with_index(c10::Device which) {
  if (!at::accelerator::isAccelerator(which.type()))
    throw not_available("steps run on the host or on an accelerator, not on " + which.str());
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(which.type());
  if (!hooks.isBuilt()) throw not_available("this PyTorch was built without support for " + which.str());
  if (!hooks.isAvailable()) {
    const auto why = backend_of(which.type()).problem();
    throw not_available(why.empty() ? "PyTorch finds no usable device for " + which.str() : why);
  }
  const c10::impl::VirtualGuardImpl impl(which.type());
  const auto count = impl.deviceCount();
  const auto index = which.has_index() ? which.index() : impl.getDevice().index();
  if (index >= count) throw not_available("there is no device " + which.str() + "; PyTorch finds " + std::to_string(count));
  return {which.type(), index};
}

}  // namespace

device& accelerator_device(c10::Device which) {
  const auto on = with_index(which);
  static std::mutex mutex;
  static auto* const made = new std::map<std::string, std::unique_ptr<accelerator>>;  // memory outlives static objects
  std::lock_guard lock(mutex);
  auto& d = (*made)[on.str()];
  if (!d) {
    at::globalContext().lazyInitDevice(on.type());  // before the allocator is wrapped
    placing_allocator::install();
    auto& of = backend_of(on.type());
    install(of);
    d = std::make_unique<accelerator>(on, of);
  }
  return *d;
}

void require_moves(const device& on) {
  if (!on.can_place())
    throw not_available("values cannot be moved off " + on.which().str() + " and back: plans cannot choose addresses there");
}

far_memory pinned_memory(c10::Device on, bytes_t limit) {
  const auto& there = dynamic_cast<const accelerator&>(accelerator_device(on));
  require_moves(there);
  const auto& parts = there.parts();
  return {std::make_shared<accelerator_tier>(parts, true, "pinned memory of the host", limit),
          std::make_unique<stream_link>(parts),
          std::make_unique<stream_link>(parts),
          {}};
}

void refuse_foreign_capture(c10::Device on) {
  const c10::impl::VirtualGuardImpl impl(on.type());
  if (impl.isStreamCapturing(impl.getStream(on)))
    throw not_available("a graph is being captured on " + on.str() +
                        "; a planned step cannot be part of a foreign graph, see graph=True");
}

void throw_if_lost(c10::Device on) {
  if (on.is_cpu()) return;
  if (const auto why = device_of(on).lost(); !why.empty()) throw device_lost(text_of_lost(on, why));
}

void note_use(const void* data, c10::Stream s) {
  auto& index = region_index::instance();
  std::lock_guard lock(index.mutex);
  auto next = index.by_address.upper_bound(static_cast<const char*>(data));
  if (next != index.by_address.begin()) std::prev(next)->second->used_in(s);
}

}  // namespace remat::pytorch
