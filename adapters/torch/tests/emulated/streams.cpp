// SPDX-License-Identifier: Apache-2.0
/// @file
/// The threads of the streams, and the time of their jobs.
#include <algorithm>
#include <thread>
#include <utility>

#include "state.hpp"

namespace emulated {
namespace {

using clock = std::chrono::steady_clock;

/// Sleeps, and spins at the end, because threads wake up late.
void pause(clock::duration time) {
  constexpr auto spun = std::chrono::microseconds(60);
  const auto until = clock::now() + time;
  if (time > spun) std::this_thread::sleep_until(until - spun);
  while (clock::now() < until) {
  }
}

/// @param rate bytes per second; 0: no time
clock::duration time_of(std::size_t bytes, long rate) {
  return std::chrono::nanoseconds(rate <= 0 ? 0
                                            : static_cast<long>(1e9 * static_cast<double>(bytes) / static_cast<double>(rate)));
}

std::size_t bytes_of(const std::vector<range>& ranges) {
  std::size_t all = 0;
  for (const auto& r : ranges) all += r.bytes;
  return all;
}

std::atomic<int> copies_running{0};
struct copying {
  copying() { ++copies_running; }
  ~copying() { --copies_running; }
};

/// Waits for the time of the link. Each device has one engine per direction, which runs one copy after another.
void take_link(const job& j) {
  static auto* const engines = new std::mutex[device_count][2];
  const long rate = options().link;
  if (rate <= 0 || j.reads.empty() || j.writes.empty()) return;
  const int reader = device_of(device_address(j.writes.front().begin)), source = device_of(device_address(j.reads.front().begin));
  const bool to_device = source < 0;
  const std::lock_guard engine(engines[std::max(to_device ? reader : source, 0)][to_device]);
  pause(time_of(j.reads.front().bytes, rate));
}

}  // namespace

void perform_job(const job& j) {
  if (j.copies) {
    const copying guard;
    take_link(j);
    j.run();
    return;
  }
  const auto start = clock::now();
  j.run();
  if (const auto least = time_of(bytes_of(j.reads) + bytes_of(j.writes), options().pace) - (clock::now() - start);
      least > clock::duration::zero())
    pause(least);
  const long slower = options().interference;
  if (slower > 0 && copies_running > 0) pause((clock::now() - start) * slower / 1000);
}

void stream::start(const std::shared_ptr<stream>& s) {
  std::thread([s] { s->serve(); }).detach();
}

void stream::serve() {
  for (std::unique_lock guard(lock_);;) {
    more_.wait(guard, [&] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto [work, mark] = std::move(queue_.front());
    queue_.pop_front();
    guard.unlock();
    work();
    work = nullptr;  // releases the objects of the job before it counts as done
    guard.lock();
    ++finished_;
    if (mark) mark->arrive(!failure_.empty());
    guard.unlock();
    done_.notify_all();
    guard.lock();
  }
}

std::uint64_t stream::push(std::function<void()> work, std::shared_ptr<moment> mark) {
  std::unique_lock guard(lock_);
  queue_.push_back({std::move(work), std::move(mark)});
  const auto ticket = ++given_;
  guard.unlock();  // unlocks first, or the woken thread would wait for the lock
  more_.notify_one();
  return ticket;
}

void stream::push_job(job j, bool fails) {
  if (fails) j.run = [] { throw failure("it was told to"); };
  push([this, j = std::move(j)] {
    if (!failed().empty()) return;
    try {
      perform(j);
    } catch (const std::exception& e) {
      const std::lock_guard guard(lock_);
      failure_ = "emulated: job " + j.name + " failed: " + e.what();
    }
  });
}

void stream::perform(const job& j) {
  if (const long late = options().late; late > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<long>(0, late)(chance_)));
  perform_job(j);
}

void stream::await(std::uint64_t ticket) {
  std::unique_lock guard(lock_);
  done_.wait(guard, [&] { return finished_ >= ticket; });
}

void stream::drain() {
  std::unique_lock guard(lock_);
  done_.wait(guard, [&, ticket = given_] { return finished_ >= ticket; });
}

bool stream::drained() const {
  const std::lock_guard guard(lock_);
  return finished_ == given_;
}

std::string stream::failed() const {
  const std::lock_guard guard(lock_);
  return failure_;
}

void stream::forget_failure() {
  const std::lock_guard guard(lock_);
  failure_.clear();
}

void stream::end() {
  const std::lock_guard guard(lock_);
  ending_ = true;
  more_.notify_one();
}

// --- moments -----------------------------------------------------------------------------------------------------------------

void moment::arrive(bool failed) {
  {
    const std::lock_guard guard(lock_);
    arrived_ = true;
    failed_ = failed;
    at_ = clock::now();
  }
  reached_.notify_all();
}

void moment::await() {
  std::unique_lock guard(lock_);
  reached_.wait(guard, [&] { return arrived_; });
}

bool moment::arrived() {
  const std::lock_guard guard(lock_);
  return arrived_;
}

bool moment::failed() {
  const std::lock_guard guard(lock_);
  return failed_;
}

clock::time_point moment::time() {
  const std::lock_guard guard(lock_);
  return at_;
}

}  // namespace emulated
