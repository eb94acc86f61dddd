// SPDX-License-Identifier: Apache-2.0
/// @file
/// Options and counts of the emulated hardware, for C++ and, through ctypes, for Python.
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <stdexcept>
#include <utility>

#include "state.hpp"

namespace emulated {
namespace {

struct named {
  const char* name;
  std::atomic<long> settings::*value;
};
constexpr named names[] = {{"late", &settings::late},
                           {"fail", &settings::fail},
                           {"hold", &settings::hold},
                           {"drop_waits", &settings::drop_waits},
                           {"wrong_stream", &settings::wrong_stream},
                           {"alignment", &settings::alignment},
                           {"workspace", &settings::workspace},
                           {"bytes", &settings::bytes},
                           {"pace", &settings::pace},
                           {"link", &settings::link},
                           {"interference", &settings::interference},
                           {"clock", &settings::clock},
                           {"handles", &settings::handles},
                           {"lost", &settings::lost}};

settings* from_environment() {
  auto* const s = new settings;
  for (const auto& n : names) {
    std::string variable = "EMULATED_";
    for (const char* c = n.name; *c != 0; ++c) variable += static_cast<char>(std::toupper(*c));
    if (const char* const text = std::getenv(variable.c_str())) s->*n.value = std::atol(text);
  }
  return s;
}

std::atomic<long>& value_of(const std::string& name) {
  for (const auto& n : names)
    if (name == n.name) return options().*n.value;
  throw std::invalid_argument("emulated: there is no option " + name);
}

/// The first races, as text. Guarded by the lock of the world.
std::vector<std::string>& reports() {
  static auto* const all = new std::vector<std::string>;
  return *all;
}

}  // namespace

settings& options() {
  static settings* const only = from_environment();
  return *only;
}

counters& counting() {
  static auto* const only = new counters;
  return *only;
}

namespace option {
void set(const std::string& name, long value) { value_of(name) = value; }
long get(const std::string& name) { return value_of(name); }
}  // namespace option

void report_race(std::string text) {
  constexpr std::size_t most = 100;
  ++counting().races;
  if (reports().size() < most) reports().push_back(std::move(text));
}

counts counted() {
  const auto& c = counting();
  return {c.jobs, c.copies, c.races, c.allocations};
}

void reset_counts() {
  const std::lock_guard guard(world_lock());
  auto& c = counting();
  c.jobs = c.copies = c.races = c.allocations = 0;
  reports().clear();
}

void clear_failures() {
  for (int d = 0; d < device_count; ++d)
    for (const auto& s : streams_of(d)) s->forget_failure();
}

std::vector<std::string> race_reports() {
  const std::lock_guard guard(world_lock());
  return reports();
}

}  // namespace emulated

// --- for Python --------------------------------------------------------------------------------------------------------------

extern "C" {

void emulated_set(const char* name, long value) { emulated::option::set(name, value); }
long emulated_get(const char* name) { return emulated::option::get(name); }
long emulated_jobs() { return emulated::counted().jobs; }
long emulated_copies() { return emulated::counted().copies; }
long emulated_races() { return emulated::counted().races; }
long emulated_allocations() { return emulated::counted().allocations; }

/// Sets the counts to zero, and makes failed streams work again.
void emulated_reset() {
  emulated::reset_counts();
  emulated::clear_failures();
}

/// The k-th race report; null if there are fewer. Valid until the next call on the same thread.
const char* emulated_race(int k) {
  thread_local std::string text;
  const auto all = emulated::race_reports();
  if (k < 0 || static_cast<std::size_t>(k) >= all.size()) return nullptr;
  text = all[static_cast<std::size_t>(k)];
  return text.c_str();
}

void emulated_take(int device, long bytes) { emulated::take_for_others(device, static_cast<std::size_t>(bytes)); }

}  // extern "C"
