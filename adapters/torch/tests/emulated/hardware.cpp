// SPDX-License-Identifier: Apache-2.0
/// @file
/// Streams, events and copies of the emulated hardware.
#include "hardware.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "state.hpp"

namespace emulated {
namespace {

struct world {
  std::mutex lock;
  vector_clock host;
  history accesses;
  std::map<const stream*, std::shared_ptr<stream>> streams;
  stream* defaults[device_count] = {};
  stream* elsewhere[device_count] = {};  ///< the stream on which the option `wrong_stream` records
  int made = 0;
};

std::atomic<bool> in_fork{false};

/// Waits for the streams at exit: jobs may use objects that destructors of other libraries end. The wait is bounded, because a
/// job may hang.
void quiet_at_exit() {
  if (in_fork) return;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (int d = 0; d < device_count; ++d)
    for (const auto& s : streams_of(d))
      while (!s->drained() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

world& all();

void before_fork() {
  all().lock.lock();
  memory_lock().lock();
}
void after_fork() {
  memory_lock().unlock();
  all().lock.unlock();
}
void in_child() {
  in_fork = true;
  after_fork();
}

/// Never destroyed: threads use it until the process ends.
world& all() {
  static world* const only = [] {
    std::atexit(quiet_at_exit);
    pthread_atfork(before_fork, after_fork, in_child);
    return new world;
  }();
  return *only;
}

stream& make(int device, bool is_default) {
  auto& w = all();
  auto s = std::make_shared<stream>(device, w.made++);
  s->is_default = is_default;
  w.streams[s.get()] = s;
  stream::start(s);
  return *s;
}

/// The stream that gets the events of `s` under the option `wrong_stream`.
stream& elsewhere(const stream& s) {
  auto*& other = all().elsewhere[s.device];
  if (other == nullptr) other = &make(s.device, false);
  return *other;
}

/// Whether the detector watches these bytes. It does not see accesses of the host, so it watches only memory that devices can
/// reach.
bool watched(const range& r) { return device_of(r.begin) >= 0 || is_kernel_address(r.begin) || is_pinned(r.begin); }

/// Whether this is the job that the option `fail` makes fail.
bool is_the_one_that_fails() {
  long left = options().fail;
  while (left > 0)
    if (options().fail.compare_exchange_weak(left, left - 1)) return left == 1;
  return false;
}

/// Whether the option `hold` makes this copy wait.
bool is_held() {
  for (long left = options().hold; left > 0;) {
    if (left == 1) return true;
    if (options().hold.compare_exchange_weak(left, left - 1)) return false;
  }
  return false;
}

void watch(const job& j, const epoch& who, const vector_clock& now, history& h) {
  for (const auto& r : j.reads)
    if (watched(r)) h.read(device_address(r.begin), r.bytes, who, now, report_race);
  for (const auto& r : j.writes)
    if (watched(r)) h.write(device_address(r.begin), r.bytes, who, now, report_race);
}

void refuse_in_capture(const stream& s, const char* what) {
  if (s.captured) break_capture(*s.captured, std::string(what) + " a stream that is captured");
}

}  // namespace

std::mutex& world_lock() { return all().lock; }
vector_clock& host_clock() { return all().host; }
history& accesses() { return all().accesses; }
bool forked() { return in_fork; }

void check_alive() {
  if (in_fork) throw failure("emulated: streams do not survive a fork");
  if (options().lost != 0) throw failure("emulated: the device is lost");
}

std::vector<std::shared_ptr<stream>> streams_of(int device) {
  const std::lock_guard guard(world_lock());
  std::vector<std::shared_ptr<stream>> found;
  for (const auto& [key, s] : all().streams)
    if (s->device == device) found.push_back(s);
  return found;
}

// --- streams -----------------------------------------------------------------------------------------------------------------

stream& default_stream(int device) {
  const std::lock_guard guard(world_lock());
  auto*& s = all().defaults[device];
  if (s == nullptr) s = &make(device, true);
  return *s;
}

stream& make_stream(int device) {
  check_alive();
  const std::lock_guard guard(world_lock());
  return make(device, false);
}

void destroy(stream& s) {
  if (forked()) return;
  s.drain();
  const std::lock_guard guard(world_lock());
  if (s.captured) {
    auto& c = *s.captured;
    c.broken = "a stream was destroyed";
    std::erase(c.joined, &s);
    if (c.origin == &s) c.origin = nullptr;
  }
  s.end();
  all().streams.erase(&s);
}

int device_of(const stream& s) { return s.device; }

void enqueue(stream& s, job j) {
  check_alive();
  const std::lock_guard one(s.giving);
  if (const auto message = s.failed(); !message.empty()) throw failure(message);
  const std::lock_guard guard(world_lock());
  if (s.captured) return add_to_capture(s, std::move(j));
  s.now.merge(host_clock());
  const epoch who{s.id, s.now.tick(s.id), std::make_shared<const std::string>(j.name)};
  watch(j, who, s.now, accesses());
  ++counting().jobs;
  if (j.copies) ++counting().copies;
  if (j.copies && is_held())
    s.push([] {
      while (options().hold != 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
  s.push_job(std::move(j), is_the_one_that_fails());
}

void add_to_capture(stream& s, job j) {
  auto& c = *s.captured;
  if (!c.broken.empty()) throw capture_error("emulated: the capture is invalid: " + c.broken, capture_error::why::invalid);
  const epoch who{s.id, s.captured_now.tick(s.id), std::make_shared<const std::string>(j.name)};
  watch(j, who, s.captured_now, c.accesses);
  c.made->jobs.push_back(std::move(j));
}

bool idle(const stream& s) {
  check_alive();
  const std::lock_guard guard(world_lock());
  refuse_in_capture(s, "a query of");
  if (!s.drained()) return false;
  host_clock().merge(s.now);
  return true;
}

void synchronize(stream& s) {
  check_alive();
  vector_clock done;
  std::uint64_t ticket = 0;
  {
    const std::lock_guard guard(world_lock());
    refuse_in_capture(s, "a wait of the host for");
    done = s.now;
    ticket = s.push([] {});
  }
  s.await(ticket);
  {
    const std::lock_guard guard(world_lock());
    host_clock().merge(done);
  }
  if (const auto message = s.failed(); !message.empty()) throw failure(message);
}

void synchronize_device(int device) {
  check_alive();
  for (const auto& s : streams_of(device)) synchronize(*s);
}

// --- events ------------------------------------------------------------------------------------------------------------------

std::shared_ptr<event> make_event() { return std::make_shared<event>(); }

void record(event& e, stream& asked) {
  check_alive();
  const std::lock_guard guard(world_lock());
  stream& s = options().wrong_stream == 0 ? asked : elsewhere(asked);
  auto m = std::make_shared<moment>();
  e.last = m;
  if (s.captured) {
    m->captured = s.captured;
    m->seen = s.captured_now;
    return;
  }
  s.now.merge(host_clock());
  m->seen = s.now;
  s.push([] {}, m);
}

void wait(stream& s, const event& e) {
  check_alive();
  const std::lock_guard one(s.giving);
  const std::lock_guard guard(world_lock());
  const auto m = e.last;
  if (!m || options().drop_waits != 0) return;
  if (m->captured) return join_capture(s, m->captured, m->seen);
  if (s.captured) break_capture(*s.captured, "it waits for an event that was recorded outside", capture_error::why::outside);
  s.now.merge(m->seen);
  s.push([m] { m->await(); });
}

namespace {

std::shared_ptr<moment> asked_by_host(const event& e, const char* what) {
  check_alive();
  const std::lock_guard guard(world_lock());
  if (e.last && e.last->captured)
    break_capture(*e.last->captured, std::string(what) + " an event that was captured", capture_error::why::captured_event);
  return e.last;
}

}  // namespace

bool reached(const event& e) {
  const auto m = asked_by_host(e, "a query of");
  if (!m) return true;
  if (!m->arrived()) return false;
  const std::lock_guard guard(world_lock());
  host_clock().merge(m->seen);
  return true;
}

void synchronize(const event& e) {
  const auto m = asked_by_host(e, "a wait of the host for");
  if (!m) return;
  m->await();
  {
    const std::lock_guard guard(world_lock());
    host_clock().merge(m->seen);
  }
  if (m->failed()) throw failure("emulated: a job before the event has failed");
}

double milliseconds(const event& from, const event& to) {
  const auto a = asked_by_host(from, "the time of"), b = asked_by_host(to, "the time of");
  if (!a || !b || !a->arrived() || !b->arrived()) throw failure("emulated: the time of an event that has not been reached");
  const double times = options().clock > 0 ? static_cast<double>(options().clock) : 1;
  return times * std::chrono::duration<double, std::milli>(b->time() - a->time()).count();
}

// --- copies ------------------------------------------------------------------------------------------------------------------

void copy(void* to, const void* from, std::size_t bytes, stream& s) {
  if (bytes == 0) return;
  const bool from_host = device_of(from) < 0, to_host = device_of(to) < 0;
  const bool read_now = from_host && !is_pinned(from), written_now = to_host && !is_pinned(to);
  if (read_now || written_now) {
    const std::lock_guard guard(world_lock());
    refuse_in_capture(s, "memory of the host that is not page-locked is copied in");
  }
  job j;
  j.name = from_host == to_host ? "copy" : from_host ? "copy to the device" : "copy to the host";
  j.copies = from_host != to_host;
  j.reads = {{from, bytes}};
  j.writes = {{to, bytes}};
  const char* source = kernel_address(from);
  std::shared_ptr<std::vector<char>> staged;
  if (read_now) {
    staged = std::make_shared<std::vector<char>>(source, source + bytes);
    source = staged->data();
  }
  j.run = [staged, source, target = kernel_address(to), bytes] { std::memmove(target, source, bytes); };
  enqueue(s, std::move(j));
  if (written_now) synchronize(s);
}

void fill(void* to, int value, std::size_t bytes, stream& s) {
  if (bytes == 0) return;
  const auto run = [target = kernel_address(to), value, bytes] { std::memset(target, value, bytes); };
  enqueue(s, {"fill", {}, {{to, bytes}}, run});
}

}  // namespace emulated
