// SPDX-License-Identifier: Apache-2.0
#include "streams.hpp"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include <remat/pytorch/memory.hpp>

#include "allocator.hpp"
#include "tier.hpp"

namespace remat::pytorch {
namespace {

/// Events that are used again, so that a step makes none.
class event_pool {
 public:
  explicit event_pool(const stream_calls& calls) : calls_(calls) {}
  ~event_pool() {
    if (process_ == getpid())
      for (auto* e : idle_) calls_.end_event(e);
  }
  event_pool(const event_pool&) = delete;
  event_pool& operator=(const event_pool&) = delete;

  /// @throws copy_failed
  void* take() {
    {
      std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto* e = idle_.back();
        idle_.pop_back();
        return e;
      }
    }
    void* made = nullptr;
    if (const auto failed = calls_.make_event(&made)) throw copy_failed("an event cannot be made: " + calls_.words(failed));
    return made;
  }
  void give_back(void* e) {
    std::lock_guard lock(mutex_);
    idle_.push_back(e);
  }
  const stream_calls& calls() const { return calls_; }

 private:
  const stream_calls& calls_;
  std::mutex mutex_;
  std::vector<void*> idle_;
  pid_t process_ = getpid();  ///< a fork cannot use what its parent made
};

/// A moment in a stream.
class stream_event final : public event {
 public:
  /// @throws copy_failed
  stream_event(std::shared_ptr<event_pool> pool, void* stream, const std::string& what)
      : pool_(std::move(pool)), what_(what), event_(pool_->take()) {
    if (const auto failed = calls().record(event_, stream)) {
      pool_->give_back(event_);
      throw copy_failed(what_ + ": " + calls().words(failed));
    }
  }
  ~stream_event() override { pool_->give_back(event_); }
  bool reached() const override { return calls().reached(event_) != calls().not_ready; }
  void wait() const override { check(calls().wait(event_)); }
  /// What comes later in `stream` runs after it.
  /// @throws copy_failed
  void wait_in(void* stream) const { check(calls().wait_in(stream, event_)); }
  const stream_calls& calls() const { return pool_->calls(); }

 private:
  void check(stream_calls::status failed) const {
    if (failed) throw copy_failed(what_ + ": " + calls().words(failed));
  }
  std::shared_ptr<event_pool> pool_;
  std::string what_;
  void* event_;
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

/// Work on `stream` goes on after `t`; what is of another system holds the calling thread.
void continue_after(const ticket& t, void* stream, const stream_calls& calls) {
  if (!t) return;
  if (const auto* e = dynamic_cast<const stream_event*>(t.get()); e != nullptr && &e->calls() == &calls)
    e->wait_in(stream);
  else
    t->wait();
}

/// A stream, made when it is first needed.
class own_stream {
 public:
  own_stream(c10::Device on, const stream_calls& calls) : on_(on), calls_(calls) {}
  ~own_stream() {
    if (stream_ != nullptr && process_ == getpid()) calls_.end_stream(stream_);
  }
  own_stream(const own_stream&) = delete;
  own_stream& operator=(const own_stream&) = delete;

  /// @throws copy_failed
  void* get() {
    if (stream_ != nullptr) return stream_;
    const c10::DeviceGuard guard(on_);
    if (const auto failed = calls_.make_stream(&stream_)) throw copy_failed("a stream cannot be made: " + calls_.words(failed));
    process_ = getpid();
    return stream_;
  }

 private:
  c10::Device on_;
  const stream_calls& calls_;
  void* stream_ = nullptr;
  pid_t process_ = 0;
};

/// What the regions, links and the device itself share.
struct system {
  system(c10::Device d, const stream_calls& c) : on(d), calls(c), events(std::make_shared<event_pool>(c)), aside(d, c) {}
  c10::Device on;
  const stream_calls& calls;
  std::shared_ptr<event_pool> events;
  std::mutex mutex;
  own_stream aside;  ///< for `region::read` and `write`, under the mutex

  /// Counts memory of the device in regions.
  void count(bytes_t change) {
    std::lock_guard lock(use_mutex);
    in_regions.live += change;
    in_regions.peak = std::max(in_regions.peak, in_regions.live);
  }
  mutable std::mutex use_mutex;
  memory_use in_regions;

  struct copy_in_flight {
    const link* by;
    std::shared_ptr<region> to, from;
    ticket done;
  };
  std::mutex copies_mutex;
  std::vector<copy_in_flight> copies;

  /// Copies, and waits for that.
  void copy(void* to, const void* from, bytes_t bytes) {
    if (bytes == 0) return;
    const c10::DeviceGuard guard(on);
    std::lock_guard lock(mutex);
    auto* const stream = aside.get();
    const auto what = "copy of " + std::to_string(bytes) + " bytes on " + on.str();
    if (const auto failed = calls.copy(to, from, static_cast<std::size_t>(bytes), stream))
      throw copy_failed(what + ": " + calls.words(failed));
    stream_event(events, stream, what).wait();
  }
  /// Lets go of the regions of copies that are done; `wait`: of all that `by` has begun, or anybody if that is null.
  void let_go(bool wait = false, const link* by = nullptr) {
    std::vector<copy_in_flight> ended;  // freed without the mutex
    std::lock_guard lock(copies_mutex);
    for (auto& c : copies) {
      if (wait && (by == nullptr || c.by == by)) try {
          c.done->wait();
        } catch (const copy_failed&) {  // nobody needs it any more
        }
      if (c.done->reached()) ended.push_back(std::move(c));
    }
    std::erase_if(copies, [](const auto& c) { return c.done == nullptr; });
  }
};

/// Memory that the system gives in one piece.
class system_region final : public region {
 public:
  /// @throws out_of_memory
  system_region(std::shared_ptr<system> s, bool locked, const std::string& tier, bytes_t bytes)
      : system_(std::move(s)), locked_(locked), bytes_(bytes) {
    if (bytes == 0) return;
    const c10::DeviceGuard guard(system_->on);
    const auto& calls = system_->calls;
    const auto allocate = [&] {
      return (locked_ ? calls.allocate_locked : calls.allocate)(&data_, static_cast<std::size_t>(bytes));
    };
    system_->let_go();
    auto failed = allocate();
    if (failed) {
      calls.words(failed);
      system_->let_go(true);
      calls.make_room();
      failed = allocate();
    }
    if (failed) {
      const auto reason = calls.words(failed);
      rlimit most{};
      if (locked_ && getrlimit(RLIMIT_MEMLOCK, &most) == 0 && most.rlim_cur < static_cast<rlim_t>(bytes))
        throw out_of_memory(tier, bytes, static_cast<bytes_t>(most.rlim_cur), reason + " (RLIMIT_MEMLOCK, see ulimit -l)");
      throw out_of_memory(tier, bytes, 0, reason);
    }
    detail::add_arena(data(), bytes_);
    count(bytes_);
  }
  ~system_region() override {
    if (data_ == nullptr) return;
    detail::remove_arena(data());
    count(-bytes_);
    if (process_ != getpid()) return;
    const c10::DeviceGuard guard(system_->on);
    (locked_ ? system_->calls.release_locked : system_->calls.release)(data_);
  }
  system_region(const system_region&) = delete;
  system_region& operator=(const system_region&) = delete;

  char* data() const override { return static_cast<char*>(data_); }
  c10::Device on() const override { return locked_ ? c10::Device(c10::kCPU) : system_->on; }
  bytes_t bytes() const override { return bytes_; }
  bytes_t resident() const override { return bytes_; }
  void discard_except(std::vector<std::pair<bytes_t, bytes_t>>) override {}
  void read(char* to, bytes_t offset, bytes_t bytes) const override { system_->copy(to, data() + offset, bytes); }
  void write(const char* from, bytes_t offset, bytes_t bytes) override { system_->copy(data() + offset, from, bytes); }

 private:
  void count(bytes_t change) { locked_ ? detail::count(change) : system_->count(change); }

  std::shared_ptr<system> system_;
  bool locked_;
  bytes_t bytes_;
  void* data_ = nullptr;
  pid_t process_ = getpid();
};

class system_memory final : public limited_tier {
 public:
  system_memory(std::shared_ptr<system> s, bool locked, std::string name, bytes_t limit)
      : limited_tier(std::move(name), limit), system_(std::move(s)), locked_(locked) {}

 private:
  std::unique_ptr<region> make(bytes_t bytes) override {
    return std::make_unique<system_region>(system_, locked_, name(), bytes);
  }
  void let_go() override { system_->let_go(true); }
  std::shared_ptr<system> system_;
  bool locked_;
};

/// Copies on a stream of its own.
class stream_link final : public link {
 public:
  explicit stream_link(std::shared_ptr<system> s) : system_(std::move(s)), stream_(system_->on, system_->calls) {}
  ~stream_link() override {
    if (process_ == getpid()) system_->let_go(true, this);
  }

  ticket copy(const block& to, const block& from, std::vector<ticket> after) override {
    check_copy(to, from);
    if (to.in->data() == nullptr || from.in->data() == nullptr)
      throw broken_contract("remat: a copy on a stream to or from a region that has no address");
    const auto what = "copy of " + std::to_string(to.bytes) + " bytes between the host and " + system_->on.str();
    const c10::DeviceGuard guard(system_->on);
    std::lock_guard lock(mutex_);
    system_->let_go();
    try {
      auto* const stream = stream_.get();
      for (const auto& t : after) continue_after(t, stream, system_->calls);
      const auto bytes = static_cast<std::size_t>(to.bytes);
      if (bytes > 0)
        if (const auto failed = system_->calls.copy(to.in->data() + to.offset, from.in->data() + from.offset, bytes, stream))
          throw copy_failed(what + ": " + system_->calls.words(failed));
      const auto done = std::make_shared<stream_event>(system_->events, stream, what);
      std::lock_guard more(system_->copies_mutex);
      system_->copies.push_back({this, to.in, from.in, done});
      return done;
    } catch (const copy_failed& e) {
      return std::make_shared<failure>(e.what());
    }
  }

 private:
  std::shared_ptr<system> system_;
  std::mutex mutex_;
  own_stream stream_;
  pid_t process_ = getpid();
};

class streaming_device final : public device {
 public:
  streaming_device(c10::Device on, std::string name, const stream_calls& calls, std::function<std::unique_ptr<placement>()> place)
      : system_(std::make_shared<system>(on, calls)),
        place_(std::move(place)),
        memory_(system_, false, std::move(name), max_bytes) {}

  const std::shared_ptr<system>& shared() const { return system_; }
  c10::Device which() const override { return system_->on; }
  tier& memory() override { return memory_; }
  std::unique_ptr<placement> place() override { return place_(); }
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
    const c10::DeviceGuard guard(system_->on);
    return std::make_shared<stream_event>(system_->events, kernels(), "kernels on " + system_->on.str());
  }
  void wait(const ticket& t) override {
    const c10::DeviceGuard guard(system_->on);
    continue_after(t, kernels(), system_->calls);
  }
  memory_use use() const override {
    const auto others = system_->calls.allocated(system_->on);
    std::lock_guard lock(system_->use_mutex);
    return {others.live + system_->in_regions.live, others.peak + system_->in_regions.peak};
  }
  void reset_peak() override {
    system_->calls.reset_peak(system_->on);
    std::lock_guard lock(system_->use_mutex);
    system_->in_regions.peak = system_->in_regions.live;
  }

 private:
  struct drawn final : random_state {
    explicit drawn(at::Tensor s) : state(std::move(s)) {}
    at::Tensor state;
  };
  at::Generator generator() const { return at::globalContext().defaultGenerator(system_->on); }
  void* kernels() const { return system_->calls.kernels(system_->on); }

  std::shared_ptr<system> system_;
  std::function<std::unique_ptr<placement>()> place_;
  system_memory memory_;
};

}  // namespace

std::unique_ptr<device> make_streaming_device(c10::Device on, std::string name, const stream_calls& calls,
                                              std::function<std::unique_ptr<placement>()> place) {
  return std::make_unique<streaming_device>(on, std::move(name), calls, std::move(place));
}

far_memory locked_memory(device& on, bytes_t limit) {
  const auto& s = dynamic_cast<const streaming_device&>(on).shared();
  return {std::make_shared<system_memory>(s, true, "page-locked memory of the host", limit),
          std::make_unique<stream_link>(s),
          std::make_unique<stream_link>(s),
          {}};
}

}  // namespace remat::pytorch
