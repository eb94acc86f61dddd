// SPDX-License-Identifier: Apache-2.0
// Declarations that the examples in public comments leave out: a network, its costs, a problem, a solver. The first example of
// <remat/graph/dag.hpp> precedes this file; it defines `network`.
#include <cstdint>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <boost/graph/adjacency_list.hpp>

struct measured {
  const network* of;
  double seconds(int v) const;
  std::int64_t bytes(int v) const;
  std::int64_t workspace(int v) const;
  bool held(int v) const;
};
struct op {
  double seconds;
  std::int64_t bytes;
};
struct executing {
  void compute(int v);
  void drop(int v, std::size_t result);
  template <class... T>
  void operator()(const T&...) const;
};
struct my_backend : remat::highs::backend {};
struct my_solver : remat::store_all {};

extern const network net;
extern boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, op> g;
extern executing device, run, show, fits;
extern const remat::problem p;
extern const remat::bytes_t budget;
extern const remat::schedule s;
extern const remat::result r, plan;
extern remat::monitor m;
extern const std::vector<remat::operation_id> order, forward;
extern std::vector<remat::bytes_t> memory, bytes;
extern const std::vector<double> times, flops, moved, sizes, elements;
extern const std::vector<bool> is_weight;
extern const std::vector<remat::result> curve;
extern const std::vector<remat::allocation> list;
extern const remat::chain::heterogeneous_chain c;
extern const std::string name;
extern const bool prefer_glpk;
extern const remat::any_solver method;
