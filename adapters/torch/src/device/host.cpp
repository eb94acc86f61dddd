// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>

#include <remat/pytorch/memory.hpp>

#include "../base/clock.hpp"
#include "../base/views.hpp"
#include "accelerator.hpp"
#include "home.hpp"
#include "tier.hpp"

namespace remat::pytorch {
namespace {

class memory_of_host final : public limited_tier {
 public:
  using limited_tier::limited_tier;

 private:
  std::unique_ptr<region> make(bytes_t bytes) override { return std::make_unique<arena>(bytes); }
};

class future_event final : public event {
 public:
  explicit future_event(std::shared_future<void> f) : done_(std::move(f)) {}
  bool reached() const override { return done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  void wait() const override { done_.get(); }

 private:
  std::shared_future<void> done_;
};

class copying_thread final : public link {
 public:
  ~copying_thread() override {
    auto* q = queue_.load();
    if (q == nullptr || q->process != getpid()) return;  // a forked child does not have the thread
    {
      std::lock_guard lock(q->mutex);
      q->ending = true;
    }
    q->changed.notify_one();
    if (q->thread.joinable()) q->thread.join();
    delete q;
  }

  ticket copy(const block& to, const block& from, std::vector<ticket> after) override {
    check_copy(to, from);
    if (to.in->data() == nullptr && from.in->data() == nullptr)
      throw broken_contract("remat: a copy between regions that have no address");
    job next{to, from, std::move(after), {}};
    const auto done = std::make_shared<future_event>(next.done.get_future().share());
    auto& q = of_process();
    if (q.push(next))
      q.changed.notify_one();
    else
      next.run();
    return done;
  }

 private:
  struct job {
    block to, from;
    std::vector<ticket> after;
    std::promise<void> done;

    void run() {
      std::exception_ptr failed;
      try {
        for (const auto& t : after)
          if (t) t->wait();
        if (on_host(*to.in))
          from.in->read(to.in->data() + to.offset, from.offset, from.bytes);
        else if (on_host(*from.in))
          to.in->write(from.in->data() + from.offset, to.offset, to.bytes);
        else
          by_way_of_host();
      } catch (...) {
        failed = std::current_exception();
      }
      to = from = {};  // frees the regions before the waiting thread continues
      failed ? done.set_exception(failed) : done.set_value();
    }

   private:
    static bool on_host(const region& r) { return r.data() != nullptr && r.on().is_cpu(); }
    void by_way_of_host() const {
      constexpr bytes_t most = 4 << 20;
      const arena between(std::min(most, to.bytes));
      for (bytes_t at = 0; at < to.bytes; at += most) {
        const auto bytes = std::min(most, to.bytes - at);
        from.in->read(between.data(), from.offset + at, bytes);
        to.in->write(between.data(), to.offset + at, bytes);
      }
    }
  };

  struct queue {
    const pid_t process = getpid();
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<job> jobs;
    bool ending = false;
    std::thread thread;

    /// @return false if the system has no thread left; `next` is unchanged. The caller may run it: no copy waits for a later one
    bool push(job& next) {
      std::lock_guard lock(mutex);
      try {
        if (!thread.joinable()) thread = std::thread([this] { run(); });
      } catch (const std::system_error&) {
        return false;
      }
      jobs.push_back(std::move(next));
      return true;
    }

    void run() {
      std::unique_lock lock(mutex);
      for (;;) {
        changed.wait(lock, [&] { return ending || !jobs.empty(); });
        if (jobs.empty()) return;
        auto next = std::move(jobs.front());
        jobs.pop_front();
        lock.unlock();
        next.run();
        lock.lock();
      }
    }
  };

  /// A forked child gets a queue of its own. It leaves the parent's alone, because the parent's thread may have held the mutex.
  queue& of_process() {
    auto* q = queue_.load();
    if (q != nullptr && q->process == getpid()) return *q;
    auto fresh = std::make_unique<queue>();
    return queue_.compare_exchange_strong(q, fresh.get()) ? *fresh.release() : *q;
  }

  std::atomic<queue*> queue_ = nullptr;
};

class host final : public device {
 public:
  c10::Device which() const override { return c10::kCPU; }
  tier& memory() override { return memory_; }
  std::unique_ptr<placement> place() override { return std::make_unique<planned_allocations>(); }
  std::shared_ptr<const random_state> random() const override { return std::make_shared<drawn>(); }
  void random(const random_state& state) override { dynamic_cast<const drawn&>(state).state.restore(); }
  ticket mark() override { return nullptr; }
  void wait(const ticket& t) override {
    if (t) t->wait();
  }
  memory_use use() const override { return {meter::live(), meter::peak(), 0}; }
  ticket mark_time() override { return std::make_shared<moment>(); }
  double seconds(const ticket& from, const ticket& to) override {
    return std::chrono::duration<double>(dynamic_cast<const moment&>(*to).when - dynamic_cast<const moment&>(*from).when).count();
  }
  void reset_peak() override { meter::reset_peak(); }
  bytes_t free_bytes() const override { return max_bytes; }
  bytes_t total_bytes() const override { return max_bytes; }

 private:
  struct drawn final : random_state {
    generator_state state = generator_state::now();
  };
  struct moment final : event {
    bool reached() const override { return true; }
    void wait() const override {}
    clock::time_point when = clock::now();
  };
  memory_of_host memory_{"host", max_bytes};
};

at::CPUGeneratorImpl& default_generator() {
  return *at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
}

}  // namespace

void region::read(char* to, bytes_t offset, bytes_t bytes) const {
  std::memcpy(to, data() + offset, static_cast<std::size_t>(bytes));
}
void region::write(const char* from, bytes_t offset, bytes_t bytes) {
  std::memcpy(data() + offset, from, static_cast<std::size_t>(bytes));
}

copy_rates measure_rates(device& d, const far_memory& far, bytes_t sample) {
  if (!far.memory || !far.out || !far.in) throw bad_option("measure_rates: there is no far memory");
  if (sample <= 0) throw bad_option("measure_rates: the sample must be > 0 bytes, got " + std::to_string(sample));
  constexpr bytes_t pieces = 8;
  const auto unit = std::max<bytes_t>(4096, far.memory->alignment());
  const auto piece = std::max(unit, std::min(sample, far.memory->limit() / 2) / pieces / unit * unit);
  const auto near_by = d.memory().reserve(2 * pieces * piece), beyond = far.memory->reserve(2 * pieces * piece);
  const std::string contents(static_cast<std::size_t>(piece), 1);
  for (bytes_t k = 0; k < 2 * pieces; ++k) near_by->write(contents.data(), k * piece, piece);
  const auto send = [&](bytes_t at, bytes_t bytes) { return far.out->copy({beyond, at, bytes}, {near_by, at, bytes}); };
  const auto fetch = [&](bytes_t at, bytes_t bytes) { return far.in->copy({near_by, at, bytes}, {beyond, at, bytes}); };
  for (bytes_t k = 0; k < pieces; ++k) send(k * piece, piece)->wait();  // also starts the threads and touches the pages
  fetch(0, unit)->wait();
  const bool queued = far.in->joins_graphs_of(d.which());  // the next copy of a stream begins without the host
  auto begin = clock::now();
  for (bytes_t k = 1; queued && k < pieces; ++k) fetch(k * unit, unit);
  fetch(0, unit)->wait();
  const double latency = since(begin) / (queued ? pieces : 1);
  begin = clock::now();
  ticket sent, fetched;
  for (bytes_t k = 0; k < pieces; ++k) {
    fetched = fetch(k * piece, piece);
    sent = send((pieces + k) * piece, piece);
  }
  const auto bytes = static_cast<double>(pieces * piece);
  double to_host = 0, to_device = 0;
  while (to_host == 0 || to_device == 0) {
    if (to_host == 0 && sent->reached()) to_host = since(begin);
    if (to_device == 0 && fetched->reached()) to_device = since(begin);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  sent->wait();  // reports a failure
  fetched->wait();
  const double sure = reliable_share(d, *far.in);
  return {sure * bytes / to_host, sure * bytes / to_device, latency};
}

interference measure_interference(device& d, const far_memory& far, const copy_rates& rates, bytes_t sample) {
  constexpr int runs = 8;
  const c10::NoGradGuard no_grad;
  const auto near_by = d.memory().reserve(3 * sample), beyond = far.memory->reserve(2 * sample);
  const auto part = [&](bytes_t k) { return bytes_over(storage_in(near_by, k * sample, sample)); };
  const auto from = part(0).zero_();
  auto to = part(1);
  const auto seconds_of_kernel = [&] {
    const auto begin = d.mark_time();
    for (int k = 0; k < runs; ++k) at::bitwise_not_out(to, from);
    return d.seconds(begin, d.mark_time()) / runs;
  };
  seconds_of_kernel();  // warms up
  const auto alone = seconds_of_kernel();
  const auto begun = d.mark();
  std::vector<ticket> copies;  // outlast the kernels; read their input, write where no kernel does
  const auto copy_for = [&](link& by, const block& there, const block& here, double rate) {
    const auto number = 1 + static_cast<int>(2 * runs * alone * rate / static_cast<double>(sample));
    for (int k = 0; k < number; ++k) copies.push_back(by.copy(there, here, {begun}));
  };
  copy_for(*far.out, {beyond, 0, sample}, {near_by, 0, sample}, rates.to_host);
  copy_for(*far.in, {near_by, 2 * sample, sample}, {beyond, sample, sample}, rates.to_device);
  const auto beside = seconds_of_kernel();
  for (const auto& c : copies) c->wait();
  return {std::max(1.0, beside / alone), 2 * static_cast<double>(sample) / alone};
}

far_memory on_disk(const std::string& folder, bytes_t limit) {
  return {file_memory(folder, limit), host_link(), host_link(), {}};
}

far_memory on_host(c10::Device which, bytes_t limit) {
  if (!which.is_cpu()) return pinned_memory(which, limit);
  return {host_memory("memory of the host", limit), host_link(), host_link(), {}};
}

device& host_device() {
  static host only;
  return only;
}
device& device_of(c10::Device which) { return which.is_cpu() ? host_device() : accelerator_device(which); }
std::shared_ptr<tier> host_memory(std::string name, bytes_t limit) {
  return std::make_shared<memory_of_host>(std::move(name), limit);
}
std::unique_ptr<link> host_link() { return std::make_unique<copying_thread>(); }

generator_state generator_state::now() {
  auto& g = default_generator();
  std::lock_guard lock(g.mutex_);
  return {g.engine(), g.next_float_normal_sample(), g.next_double_normal_sample()};
}

void generator_state::restore() const {
  auto& g = default_generator();
  std::lock_guard lock(g.mutex_);
  g.set_engine(engine);
  g.set_next_float_normal_sample(normal_float);
  g.set_next_double_normal_sample(normal_double);
}

bool operator==(const generator_state& a, const generator_state& b) {
  const auto x = a.engine.data(), y = b.engine.data();
  return x.seed_ == y.seed_ && x.left_ == y.left_ && x.seeded_ == y.seeded_ && x.next_ == y.next_ && x.state_ == y.state_ &&
         a.normal_float == b.normal_float && a.normal_double == b.normal_double;
}

}  // namespace remat::pytorch
