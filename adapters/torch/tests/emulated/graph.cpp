// SPDX-License-Identifier: Apache-2.0
/// @file
/// Captures, and the graphs made from them.
#include <algorithm>
#include <utility>

#include "state.hpp"

namespace emulated {

using why = capture_error::why;

namespace {

/// Sorts ranges, and joins adjacent ranges.
std::vector<range> joined(std::vector<range> all) {
  const auto end = [](const range& r) { return static_cast<const char*>(r.begin) + r.bytes; };
  std::sort(all.begin(), all.end(), [](const range& a, const range& b) { return std::less<>()(a.begin, b.begin); });
  std::vector<range> result;
  for (const auto& r : all) {
    if (result.empty() || std::less<>()(end(result.back()), static_cast<const char*>(r.begin))) {
      result.push_back(r);
    } else {
      auto& last = result.back();
      last.bytes = static_cast<std::size_t>(std::max(end(last), end(r)) - static_cast<const char*>(last.begin));
    }
  }
  return result;
}

/// A stream with jobs that the origin does not wait for; null if there is none.
const stream* unjoined(const capture& c) {
  for (const auto* s : c.joined)
    if (c.origin == nullptr || s->captured_now.of(s->id) > c.origin->captured_now.of(s->id)) return s;
  return nullptr;
}

}  // namespace

std::vector<std::shared_ptr<capture>>& captures() {
  static auto* const all = new std::vector<std::shared_ptr<capture>>;
  return *all;
}

void break_capture(capture& c, const std::string& text, why reason) {
  if (c.ended) throw capture_error("emulated: " + text + ", and the capture has ended", reason);
  if (c.broken.empty()) c.broken = text;
  throw capture_error("emulated: not allowed in a capture: " + text, reason);
}

void join_capture(stream& s, const std::shared_ptr<capture>& c, const vector_clock& seen) {
  if (c->ended) throw capture_error("emulated: a wait for an event of a capture that has ended", why::captured_event);
  if (s.captured && s.captured != c) {
    s.captured->broken = "it waits for another capture";
    break_capture(*c, "another capture waits for it", why::other_capture);
  }
  if (s.is_default) break_capture(*c, "the default stream waits for it", why::default_stream);
  if (!s.captured) {
    s.captured = c;
    s.captured_now = {};
    c->joined.push_back(&s);
  }
  s.captured_now.merge(seen);
}

void begin_capture(stream& s) {
  static unsigned long long made = 0;
  check_alive();
  const std::lock_guard guard(world_lock());
  if (s.captured) break_capture(*s.captured, "a capture inside of it begins");
  if (s.is_default) throw capture_error("emulated: a default stream cannot be captured", why::default_stream);
  auto c = std::make_shared<capture>();
  c->id = ++made;
  c->origin = &s;
  c->joined = {&s};
  c->made = std::make_shared<graph>();
  s.captured = c;
  s.captured_now = {};
  captures().push_back(std::move(c));
}

std::shared_ptr<graph> end_capture(stream& s) {
  check_alive();
  const std::lock_guard guard(world_lock());
  const auto c = s.captured;
  if (!c) throw capture_error("emulated: the stream is not captured");
  if (c->origin != nullptr && c->origin != &s) break_capture(*c, "it ends on another stream than it began");
  const auto* const lost = unjoined(*c);
  for (auto* const member : c->joined) member->captured = nullptr;
  c->ended = true;
  std::erase(captures(), c);
  if (!c->broken.empty()) throw capture_error("emulated: the capture is invalid: " + c->broken, why::invalid);
  if (lost != nullptr)
    throw capture_error("emulated: stream " + std::to_string(lost->id) + " was captured and not joined back", why::unjoined);
  auto& g = *c->made;
  for (const auto& j : g.jobs) {
    g.reads.insert(g.reads.end(), j.reads.begin(), j.reads.end());
    g.writes.insert(g.writes.end(), j.writes.begin(), j.writes.end());
  }
  g.reads = joined(std::move(g.reads));
  g.writes = joined(std::move(g.writes));
  return c->made;
}

bool capturing(const stream& s) { return capture_id(s) != 0; }

bool capturing_device(int device) {
  const std::lock_guard guard(world_lock());
  const auto on_device = [&](const stream* s) { return s->device == device; };
  return std::any_of(captures().begin(), captures().end(),
                     [&](const auto& c) { return std::any_of(c->joined.begin(), c->joined.end(), on_device); });
}

unsigned long long capture_id(const stream& s) {
  const std::lock_guard guard(world_lock());
  return s.captured ? s.captured->id : 0;
}

bool capture_valid(const stream& s) {
  const std::lock_guard guard(world_lock());
  return s.captured && s.captured->broken.empty();
}

std::shared_ptr<graph> graph_of(const stream& s) {
  const std::lock_guard guard(world_lock());
  return s.captured ? s.captured->made : nullptr;
}

void forbid_in_captures(const char* call, const std::function<bool(unsigned long long)>& exempt) {
  const std::lock_guard guard(world_lock());
  capture* forbidding = nullptr;
  for (const auto& c : captures()) {
    if (exempt && exempt(c->id)) continue;
    if (c->broken.empty()) c->broken = call;
    forbidding = c.get();
  }
  if (forbidding != nullptr) break_capture(*forbidding, call);
}

void launch(const std::shared_ptr<graph>& g, stream& s) {
  job whole;
  whole.name = "graph";
  whole.reads = g->reads;
  whole.writes = g->writes;
  whole.run = [g] {
    for (const auto& j : g->jobs) perform_job(j);
  };
  enqueue(s, std::move(whole));
  for (const auto& j : g->jobs)
    if (j.copies) ++counting().copies;
}

std::size_t size(const graph& g) { return g.jobs.size(); }

}  // namespace emulated
