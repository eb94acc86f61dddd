// SPDX-License-Identifier: Apache-2.0
/// @file
/// Archetypes: for each concept, a type with the required members only. A template that compiles with them requires no more than
/// the concept.
#pragma once

#include <cstddef>
#include <iterator>
#include <string>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/graph/cost_model.hpp>
#include <remat/graph/dag.hpp>

namespace remat::testing {

/// A vertex that can be copied and compared for equality.
class vertex_archetype {
 public:
  explicit vertex_archetype(std::size_t i) : index_(i) {}
  friend bool operator==(const vertex_archetype& a, const vertex_archetype& b) { return a.index_ == b.index_; }

 private:
  friend struct dag_traits<struct dag_archetype>;
  std::size_t index_;
};

/// The vertices `first .. last - 1` as a single-pass range: an input range, and no forward range.
class vertex_range_archetype {
 public:
  struct sentinel {
    std::size_t last;
  };
  class iterator {
   public:
    using value_type = vertex_archetype;
    using difference_type = std::ptrdiff_t;
    using iterator_concept = std::input_iterator_tag;
    explicit iterator(std::size_t at) : at_(at) {}
    iterator(iterator&&) = default;
    iterator& operator=(iterator&&) = default;
    vertex_archetype operator*() const { return vertex_archetype(at_); }
    iterator& operator++() {
      ++at_;
      return *this;
    }
    void operator++(int) { ++at_; }
    friend bool operator==(const iterator& a, sentinel b) { return a.at_ == b.last; }

   private:
    std::size_t at_;
  };
  vertex_range_archetype(std::size_t first, std::size_t last) : first_(first), last_(last) {}
  iterator begin() const { return iterator(first_); }
  sentinel end() const { return {last_}; }

 private:
  std::size_t first_, last_;
};

/// A graph that cannot be copied: a chain of three vertices.
struct dag_archetype {
  dag_archetype() = default;
  dag_archetype(const dag_archetype&) = delete;
  dag_archetype& operator=(const dag_archetype&) = delete;
};

}  // namespace remat::testing

template <>
struct remat::dag_traits<remat::testing::dag_archetype> {
  using vertex = testing::vertex_archetype;
  static testing::vertex_range_archetype vertices(const testing::dag_archetype&) { return {0, 3}; }
  static testing::vertex_range_archetype inputs(const testing::dag_archetype&, const vertex& v) {
    return {v.index_ == 0 ? 0 : v.index_ - 1, v.index_};
  }
  static std::size_t index(const testing::dag_archetype&, const vertex& v) { return v.index_; }
};

namespace remat::testing {

/// Costs that convert to numbers, but are no numbers.
struct cost_model_archetype {
  struct seconds_archetype {
    operator double() const { return 1; }
  };
  struct bytes_archetype {
    operator bytes_t() const { return 8; }
  };
  cost_model_archetype() = default;
  cost_model_archetype(const cost_model_archetype&) = delete;
  seconds_archetype seconds(const vertex_archetype&) const { return {}; }
  bytes_archetype bytes(const vertex_archetype&) const { return {}; }
};

/// A solver that cannot be copied and finds nothing.
struct solver_archetype {
  solver_archetype() = default;
  solver_archetype(const solver_archetype&) = delete;
  const char* name() const { return "archetype"; }
  result solve(const problem&, bytes_t, monitor&) const { return {}; }
};

/// An observer that cannot be copied.
struct observer_archetype {
  observer_archetype() = default;
  observer_archetype(const observer_archetype&) = delete;
  void operator()(const progress&) {}
};

static_assert(dag<dag_archetype> && cost_model<cost_model_archetype, dag_archetype>);
static_assert(solver<solver_archetype> && observer<observer_archetype>);

}  // namespace remat::testing
