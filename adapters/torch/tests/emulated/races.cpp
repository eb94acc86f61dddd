// SPDX-License-Identifier: Apache-2.0
#include "races.hpp"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <set>
#include <utility>

namespace emulated {

// --- clocks ------------------------------------------------------------------------------------------------------------------

void vector_clock::merge(const vector_clock& other) {
  if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
  for (std::size_t k = 0; k < other.counts_.size(); ++k) counts_[k] = std::max(counts_[k], other.counts_[k]);
}

std::uint64_t vector_clock::of(int stream) const {
  const auto k = static_cast<std::size_t>(stream);
  return k < counts_.size() ? counts_[k] : 0;
}

std::uint64_t vector_clock::tick(int stream) {
  const auto k = static_cast<std::size_t>(stream);
  if (counts_.size() <= k) counts_.resize(k + 1);
  return ++counts_[k];
}

// --- history -----------------------------------------------------------------------------------------------------------------

namespace {

std::string describe(const char* kind, const epoch& who, const char* earlier_kind, const epoch& earlier, std::uintptr_t begin,
                     std::uintptr_t end) {
  char bytes[64];
  std::snprintf(bytes, sizeof bytes, "%zu bytes at %#zx", static_cast<std::size_t>(end - begin), static_cast<std::size_t>(begin));
  return *who.name + " (stream " + std::to_string(who.stream) + ") " + kind + " " + bytes + " that " + *earlier.name +
         " (stream " + std::to_string(earlier.stream) + ") " + earlier_kind + ", and nothing orders the two";
}

/// Reports each earlier job at most once per access.
class once {
 public:
  once(const history::report& race, const char* kind, const epoch& who) : race_(race), kind_(kind), who_(who) {}
  void operator()(const char* earlier_kind, const epoch& earlier, std::uintptr_t begin, std::uintptr_t end) {
    if (reported_.emplace(earlier.stream, earlier.count).second) race_(describe(kind_, who_, earlier_kind, earlier, begin, end));
  }

 private:
  const history::report& race_;
  const char* kind_;
  const epoch& who_;
  std::set<std::pair<int, std::uint64_t>> reported_;
};

}  // namespace

void history::split(address at) {
  auto next = segments_.upper_bound(at);
  if (next == segments_.begin()) return;
  auto s = std::prev(next);
  if (s->first == at || s->second.end <= at) return;
  segment rest = s->second;
  s->second.end = at;
  segments_.emplace_hint(next, at, std::move(rest));
}

void history::join_with_previous(segments::iterator s) {
  if (s == segments_.begin() || s == segments_.end()) return;
  auto p = std::prev(s);
  if (p->second.end != s->first || !(p->second.writer == s->second.writer) || p->second.readers != s->second.readers) return;
  p->second.end = s->second.end;
  segments_.erase(s);
}

void history::read(const void* begin, std::size_t bytes, const epoch& who, const vector_clock& now, const report& race) {
  if (bytes == 0) return;
  const auto from = reinterpret_cast<address>(begin), to = from + bytes;
  split(from);
  split(to);
  once tell(race, "reads", who);
  auto s = segments_.lower_bound(from);
  for (address at = from; at < to;) {
    if (s == segments_.end() || s->first > at) {  // these bytes have not been used so far
      const address end = s == segments_.end() ? to : std::min(to, s->first);
      s = segments_.emplace_hint(s, at, segment{end, {}, {}});
    }
    auto& known = s->second;
    if (!known.writer.before(now)) tell("writes", known.writer, s->first, known.end);
    const auto mine =
        std::find_if(known.readers.begin(), known.readers.end(), [&](const epoch& r) { return r.stream == who.stream; });
    if (mine == known.readers.end()) {
      known.readers.push_back(who);
    } else {
      *mine = who;
    }
    at = known.end;
    const auto next = std::next(s);
    join_with_previous(s);
    s = next;
  }
  join_with_previous(s);
}

void history::write(const void* begin, std::size_t bytes, const epoch& who, const vector_clock& now, const report& race) {
  if (bytes == 0) return;
  const auto from = reinterpret_cast<address>(begin), to = from + bytes;
  split(from);
  split(to);
  once tell(race, "writes", who);
  const auto first = segments_.lower_bound(from);
  auto last = first;
  for (; last != segments_.end() && last->first < to; ++last) {
    const auto& known = last->second;
    if (!known.writer.before(now)) tell("writes", known.writer, last->first, known.end);
    for (const auto& reader : known.readers)
      if (!reader.before(now)) tell("reads", reader, last->first, known.end);
  }
  segments_.erase(first, last);
  segments_.emplace(from, segment{to, who, {}});
}

void history::forget(const void* begin, std::size_t bytes) {
  if (bytes == 0) return;
  const auto from = reinterpret_cast<address>(begin), to = from + bytes;
  split(from);
  split(to);
  segments_.erase(segments_.lower_bound(from), segments_.lower_bound(to));
}

}  // namespace emulated
