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
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include <remat/pytorch/memory.hpp>

#include "../program/views.hpp"
#include "allocator.hpp"
#include "backend.hpp"
#include "tier.hpp"

namespace remat::pytorch {
namespace {

/// The first line of what PyTorch says; the rest is a stack trace.
std::string reason_of(const std::exception& e) {
  const auto* const error = dynamic_cast<const c10::Error*>(&e);
  const std::string text = error != nullptr ? error->what_without_backtrace() : e.what();
  return text.substr(0, text.find('\n'));
}

/// Events that are used again, so that a step creates none.
class event_pool {
 public:
  event_pool(c10::DeviceType kind, c10::EventFlag flag) : kind_(kind), flag_(flag) {}

  c10::Event take() {
    std::lock_guard lock(mutex_);
    if (idle_.empty() || process_ != getpid()) return c10::Event(kind_, flag_);
    auto e = std::move(idle_.back());
    idle_.pop_back();
    return e;
  }
  void give_back(c10::Event e) {
    std::lock_guard lock(mutex_);
    idle_.push_back(std::move(e));
  }

 private:
  c10::DeviceType kind_;
  c10::EventFlag flag_;
  std::mutex mutex_;
  std::vector<c10::Event> idle_;
  pid_t process_ = getpid();  ///< a fork cannot use events of its parent
};

/// A moment in a stream.
class stream_event final : public event {
 public:
  /// @throws copy_failed
  stream_event(std::shared_ptr<event_pool> pool, c10::Stream stream, const std::string& what)
      : pool_(std::move(pool)), what_(what), event_(pool_->take()) {
    checked([&] { event_.record(stream); });
  }
  ~stream_event() override { pool_->give_back(std::move(event_)); }
  bool reached() const override {
    try {
      return event_.query();
    } catch (const std::exception&) {  // `wait` reports it
      return true;
    }
  }
  void wait() const override {
    checked([&] { event_.synchronize(); });
  }
  /// Later work in `stream` runs after this moment.
  /// @throws copy_failed
  void block(c10::Stream stream) const {
    checked([&] { event_.block(stream); });
  }
  c10::DeviceType kind() const { return event_.device_type(); }
  double seconds_until(const stream_event& later) const { return event_.elapsedTime(later.event_) / 1e3; }

 private:
  template <class F>
  void checked(F f) const {
    try {
      f();
    } catch (const std::exception& e) {
      throw copy_failed(what_ + ": " + reason_of(e));
    }
  }
  std::shared_ptr<event_pool> pool_;
  std::string what_;
  c10::Event event_;
};

/// A copy that was not made.
class failure final : public event {
 public:
  explicit failure(std::string what) : what_(std::move(what)) {}
  bool reached() const override { return true; }
  void wait() const override { throw copy_failed(what_); }

 private:
  std::string what_;
};

/// Later work in `stream` runs after `t`. Events of another kind of device hold the calling thread.
void continue_after(const ticket& t, c10::Stream stream) {
  if (!t) return;
  if (const auto* e = dynamic_cast<const stream_event*>(t.get()); e != nullptr && e->kind() == stream.device_type())
    e->block(stream);
  else
    t->wait();
}

/// What the regions, the links and the device itself share.
struct shared {
  shared(c10::Device d, pytorch::backend& b)
      : on(d), of(b), impl(d.type()), events(std::make_shared<event_pool>(d.type(), c10::EventFlag::PYTORCH_DEFAULT)) {}
  c10::Device on;
  pytorch::backend& of;
  c10::impl::VirtualGuardImpl impl;
  std::shared_ptr<event_pool> events;

  c10::Stream kernels() const { return impl.getStream(on); }
  bool capturing() const { return impl.isStreamCapturing(kernels()); }
  /// PyTorch gives out the same few streams in turns. Those of captures are from its other pool: a copy of another thread on such
  /// a stream would become part of the graph.
  c10::Stream new_stream(bool for_captures = false) const { return impl.getStreamFromGlobalPool(on, for_captures); }

  /// Copies on `stream` between the host and the device, or within it.
  void copy(void* to, c10::Device to_device, const void* from, c10::Device from_device, bytes_t bytes, c10::Stream stream) const {
    const c10::StreamGuard guard(stream);
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    view(to, to_device, bytes).copy_(view(const_cast<void*>(from), from_device, bytes), true);
  }
  static at::Tensor view(void* data, c10::Device device, bytes_t bytes) {
    const c10::Storage s(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(bytes), c10::DataPtr(data, device), nullptr,
                         false);
    return tensor_of({none, {bytes}, {1}, 0, at::kByte}, s);
  }

  struct copy_in_flight {
    const link* by;
    std::shared_ptr<region> to, from;
    ticket done;
  };
  std::mutex copies_mutex;
  std::vector<copy_in_flight> copies;

  /// Drops the regions of copies that are done.
  /// @param wait for all copies of `by` first, or of all links if that is null
  void drop_finished(bool wait = false, const link* by = nullptr) {
    std::vector<copy_in_flight> ended;  // freed without the mutex
    std::lock_guard lock(copies_mutex);
    for (auto& c : copies) {
      if (wait && (by == nullptr || c.by == by)) try {
          c.done->wait();
        } catch (const copy_failed&) {  // nobody needs the copy any more
        }
      if (c.done->reached()) ended.push_back(std::move(c));
    }
    std::erase_if(copies, [](const auto& c) { return c.done == nullptr; });
  }
};

class device_region;
/// The regions on accelerators by their first address, so that `record_stream` finds the one it means.
struct region_index {
  std::mutex mutex;
  std::map<const char*, device_region*> by_address;
  static region_index& instance() {
    static auto* const only = new region_index;  // tensors die after static objects
    return *only;
  }
};

/// Memory of a device or pinned memory of the host, in one piece from the backend's allocator.
class device_region final : public region {
 public:
  /// @throws out_of_memory
  device_region(std::shared_ptr<shared> s, bool pinned, const std::string& tier, bytes_t bytes)
      : shared_(std::move(s)), pinned_(pinned), bytes_(bytes) {
    if (bytes == 0) return;
    const c10::DeviceGuard guard(shared_->on);
    shared_->drop_finished();
    try {
      memory_ = allocate();
    } catch (const std::exception&) {
      shared_->drop_finished(true);
      if (!pinned_) detail::return_idle_arenas(shared_->on);
      shared_->of.own().emptyCache();
      memory_ = allocate_or_tell(tier);
    }
    if (!pinned_) given_ = std::make_shared<stream_event>(shared_->events, shared_->kernels(), "kernels on " + shared_->on.str());
    detail::add_arena(data(), bytes_);
    if (pinned_) detail::count(bytes_);
    auto& index = region_index::instance();
    std::lock_guard lock(index.mutex);
    index.by_address[data()] = this;
  }
  ~device_region() override {
    if (bytes_ == 0) return;
    {
      auto& index = region_index::instance();
      std::lock_guard lock(index.mutex);
      index.by_address.erase(data());
    }
    detail::remove_arena(data());
    if (pinned_) detail::count(-bytes_);
    if (process_ != getpid()) memory_.release_context();  // a fork cannot give back what is its parent's
  }
  device_region(const device_region&) = delete;
  device_region& operator=(const device_region&) = delete;

  char* data() const override { return static_cast<char*>(memory_.get()); }
  c10::Device on() const override { return pinned_ ? c10::Device(c10::kCPU) : shared_->on; }
  bytes_t bytes() const override { return bytes_; }
  bytes_t resident() const override { return bytes_; }
  void discard_except(std::vector<std::pair<bytes_t, bytes_t>>) override {}
  void read(char* to, bytes_t offset, bytes_t bytes) const override { copy_now(to, c10::kCPU, data() + offset, on(), bytes); }
  void write(const char* from, bytes_t offset, bytes_t bytes) override {
    copy_now(data() + offset, on(), from, c10::kCPU, bytes);
  }

  /// Work on `s` reads it, beside the stream of its step.
  void used_in(c10::Stream s) {
    if (pinned_) return;
    shared_->of.own().recordStream(memory_, s);  // in case that the arena itself goes
    std::lock_guard lock(mutex_);
    if (std::find(others_.begin(), others_.end(), s) == others_.end()) others_.push_back(s);
  }
  /// Kernels of the stream that it was allocated on may still use the memory as somebody else's: copies wait for this moment.
  /// Null from the first step on, whose kernels come later on that stream or wait for it.
  ticket given() const {
    std::lock_guard lock(mutex_);
    return given_;
  }
  /// A step begins in it on the current stream.
  void enter() {
    if (bytes_ == 0) return;
    const auto now = shared_->kernels();
    std::lock_guard lock(mutex_);
    continue_after(std::exchange(given_, nullptr), now);
    for (const auto& s : others_)
      if (s != now) stream_event(shared_->events, s, "work that reads gradients on " + shared_->on.str()).block(now);
    others_.clear();
    if (std::find(steps_.begin(), steps_.end(), now) != steps_.end()) return;
    steps_.push_back(now);
    shared_->of.own().recordStream(memory_, now);  // it goes back to the allocator once work on that stream is done, too
  }

 private:
  c10::DataPtr allocate() const {
    const auto n = static_cast<std::size_t>(bytes_);
    return pinned_ ? shared_->of.pinned(shared_->on, n) : shared_->of.own().allocate(n);
  }
  c10::DataPtr allocate_or_tell(const std::string& tier) const {
    try {
      return allocate();
    } catch (const std::exception& e) {
      rlimit most{};
      if (pinned_ && getrlimit(RLIMIT_MEMLOCK, &most) == 0 && most.rlim_cur < static_cast<rlim_t>(bytes_))
        throw out_of_memory(tier, bytes_, static_cast<bytes_t>(most.rlim_cur), reason_of(e) + " (RLIMIT_MEMLOCK, see ulimit -l)");
      const auto left = pinned_ ? 0 : static_cast<bytes_t>(shared_->of.own().getMemoryInfo(shared_->on.index()).first);
      throw out_of_memory(tier, bytes_, left, reason_of(e));
    }
  }
  /// Copies on a stream of its own, and waits for that.
  void copy_now(void* to, c10::Device to_device, const void* from, c10::Device from_device, bytes_t bytes) const {
    if (bytes == 0) return;
    const auto what = "copy of " + std::to_string(bytes) + " bytes on " + shared_->on.str();
    try {
      const auto stream = shared_->new_stream();
      continue_after(given(), stream);
      shared_->copy(to, to_device, from, from_device, bytes, stream);
      stream_event(shared_->events, stream, what).wait();
    } catch (const copy_failed&) {
      throw;
    } catch (const std::exception& e) {
      throw copy_failed(what + ": " + reason_of(e));
    }
  }

  std::shared_ptr<shared> shared_;
  bool pinned_;
  bytes_t bytes_;
  c10::DataPtr memory_;
  mutable std::mutex mutex_;
  ticket given_;
  std::vector<c10::Stream> others_;  ///< that the next step waits for
  std::vector<c10::Stream> steps_;   ///< that steps have run on
  pid_t process_ = getpid();
};

class accelerator_tier final : public limited_tier {
 public:
  accelerator_tier(std::shared_ptr<shared> s, bool pinned, std::string name, bytes_t limit)
      : limited_tier(std::move(name), limit), shared_(std::move(s)), pinned_(pinned) {}

 private:
  std::unique_ptr<region> make(bytes_t bytes) override {
    return std::make_unique<device_region>(shared_, pinned_, name(), bytes);
  }
  void let_go() override { shared_->drop_finished(true); }
  std::shared_ptr<shared> shared_;
  bool pinned_;
};

/// Copies on a stream of its own.
class stream_link final : public link {
 public:
  explicit stream_link(std::shared_ptr<shared> s) : shared_(std::move(s)) {}
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
    if (!captured) shared_->drop_finished();  // a capture forbids to ask events
    try {
      auto& stream = captured ? stream_of_captures_ : stream_;
      if (!stream) stream = shared_->new_stream(captured);
      for (const auto& t : after) continue_after(t, *stream);
      for (const auto* r : {to.in.get(), from.in.get()})
        if (const auto* own = dynamic_cast<const device_region*>(r)) continue_after(own->given(), *stream);
      if (to.bytes > 0)
        shared_->copy(to.in->data() + to.offset, to.in->on(), from.in->data() + from.offset, from.in->on(), to.bytes, *stream);
      const auto done = std::make_shared<stream_event>(shared_->events, *stream, what);
      if (captured) return done;  // whoever replays it holds the blocks
      std::lock_guard more(shared_->copies_mutex);
      shared_->copies.push_back({this, to.in, from.in, done});
      return done;
    } catch (const copy_failed& e) {
      return std::make_shared<failure>(e.what());
    } catch (const std::exception& e) {
      return std::make_shared<failure>(what + ": " + reason_of(e));
    }
  }

  bool joins_graphs_of(c10::Device d) const override { return d == shared_->on; }

 private:
  std::shared_ptr<shared> shared_;
  std::mutex mutex_;
  std::optional<c10::Stream> stream_;              ///< taken at the first copy
  std::optional<c10::Stream> stream_of_captures_;  ///< apart from that of copies that other threads make meanwhile
  pid_t process_ = getpid();
};

/// Allocations of a thread follow a plan, on the stream that was current when it started.
class device_placement final : public planned_allocations {
 public:
  explicit device_placement(std::shared_ptr<shared> s) : planned_allocations(s->on), shared_(std::move(s)) {}
  bool in_front() const override { return shared_->of.in_front(); }
  void start() override {
    stream_ = shared_->kernels();
    planned_allocations::start();
  }
  bool follows(c10::Stream s) const override { return s == stream_; }

 private:
  std::shared_ptr<shared> shared_;
  std::optional<c10::Stream> stream_;
};

/// A graph of PyTorch.
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
      } catch (const std::exception&) {  // `work` has told why
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
      : shared_(std::make_shared<shared>(on, of)),
        timed_(std::make_shared<event_pool>(on.type(), c10::EventFlag::BACKEND_DEFAULT)),
        memory_(shared_, false, of.name(on), max_bytes) {}

  const std::shared_ptr<shared>& parts() const { return shared_; }
  c10::Device which() const override { return shared_->on; }
  tier& memory() override { return memory_; }
  std::unique_ptr<placement> place() override { return std::make_unique<device_placement>(shared_); }
  std::shared_ptr<const random_state> random() const override {
    auto g = generator();
    std::lock_guard lock(g.mutex());
    return std::make_shared<drawn>(g.get_state());
  }
  void random(const random_state& state) override {
    auto g = generator();
    std::lock_guard lock(g.mutex());
    g.set_state(dynamic_cast<const drawn&>(state).state);
  }
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
  void warm_up() override {
    const c10::DeviceGuard guard(shared_->on);
    const auto before = use().live;
    multiply();
    const at::AutoGradMode grad_mode(true);
    const auto x = at::ones({1}, at::TensorOptions().device(shared_->on)).requires_grad_(), y = x * 1;
    y.register_hook([this](const at::Tensor&) { multiply(); });  // on the thread of backwards
    y.backward();
    constexpr auto alive = static_cast<bytes_t>(3 * accelerator_alignment);  // x, y, the gradient
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
    return static_cast<bytes_t>(shared_->of.own().getMemoryInfo(shared_->on.index()).first) + held.reserved - held.live;
  }
  bytes_t total_bytes() const override {
    return static_cast<bytes_t>(shared_->of.own().getMemoryInfo(shared_->on.index()).second);
  }
  void empty_cache() override {
    shared_->drop_finished();
    shared_->of.own().emptyCache();
  }

 private:
  struct drawn final : random_state {
    explicit drawn(at::Tensor s) : state(std::move(s)) {}
    at::Tensor state;
  };
  at::Generator generator() const { return at::globalContext().defaultGenerator(shared_->on); }

  /// Matrix products, for which libraries set up a workspace per thread and stream, the first time on each.
  void multiply() {
    thread_local std::set<std::pair<c10::Device, c10::StreamId>, less> done;
    if (!done.emplace(shared_->on, shared_->kernels().id()).second) return;
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto x = at::ones({8, 8}, at::TensorOptions().device(shared_->on)), row = at::ones({8}, x.options());
    at::mm(x, x);
    at::addmm(row, x, x);
    at::bmm(x.unsqueeze(0), x.unsqueeze(0));
  }
  struct less {
    bool operator()(const auto& a, const auto& b) const {
      return std::tuple(a.first.type(), a.first.index(), a.second) < std::tuple(b.first.type(), b.first.index(), b.second);
    }
  };

  std::shared_ptr<shared> shared_;
  std::shared_ptr<event_pool> timed_;
  std::atomic<bytes_t> workspaces_ = 0;
  std::mutex capture_mutex_;
  std::optional<c10::Stream> stream_of_captures_;  ///< a default stream cannot be captured
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
  static auto* const made = new std::map<std::string, std::unique_ptr<accelerator>>;  // its memory may outlive static objects
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

far_memory pinned_memory(c10::Device on, bytes_t limit) {
  const auto& parts = dynamic_cast<const accelerator&>(accelerator_device(on)).parts();
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

void note_use(const void* data, c10::Stream s) {
  auto& index = region_index::instance();
  std::lock_guard lock(index.mutex);
  auto next = index.by_address.upper_bound(static_cast<const char*>(data));
  if (next != index.by_address.begin()) std::prev(next)->second->used_in(s);
}

}  // namespace remat::pytorch
