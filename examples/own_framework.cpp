// SPDX-License-Identifier: Apache-2.0
// Your own framework, from tensors to gradients, trains in half of its memory. docs/own-framework.md walks through this program.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include <remat/graph/execute.hpp>
#include <remat/graph/freeze.hpp>
#include <remat/io/bytes.hpp>
#include <remat/solver/min_cut.hpp>

// 1. Tensors. Their allocator counts bytes.
template <class T>
struct counted : std::allocator<T> {
  static inline std::int64_t now = 0, peak = 0;
  T* allocate(std::size_t n) {
    now += static_cast<std::int64_t>(n * sizeof(T));
    peak = std::max(peak, now);
    return std::allocator<T>::allocate(n);
  }
  void deallocate(T* p, std::size_t n) {
    now -= static_cast<std::int64_t>(n * sizeof(T));
    std::allocator<T>::deallocate(p, n);
  }
};
using memory = counted<float>;

struct tensor {
  std::size_t rows = 0, columns = 0;
  std::vector<float, memory> data = {};
  tensor() = default;
  tensor(std::size_t r, std::size_t c) : rows(r), columns(c), data(r * c) {}
  float& at(std::size_t r, std::size_t c) { return data[r * columns + c]; }
  float at(std::size_t r, std::size_t c) const { return data[r * columns + c]; }
};
using tensors = std::vector<tensor>;

// 2. Operations and their graph. `activate` has two results: the values, and their slopes for the backward.
enum class kind { given, matmul, activate, loss, loss_gradient, activate_gradient };
struct operand {
  int vertex;
  std::size_t result = 0;
  bool transposed = false;
};
struct node {
  kind what;
  std::string name;
  std::vector<operand> operands;
  std::vector<std::pair<std::size_t, std::size_t>> shapes;  // of each result
  tensor content = {};                                      // data of a given tensor
  bool backward = false;
};
struct network {
  std::vector<node> nodes;
  int add(node n) {
    nodes.push_back(std::move(n));
    return static_cast<int>(nodes.size()) - 1;
  }
  const node& at(int v) const { return nodes[static_cast<std::size_t>(v)]; }
};

// 3. How to run an operation: takes its operands, returns its results.
tensors run(const node& n, const std::vector<const tensor*>& in) {
  tensors out;
  for (const auto& [rows, columns] : n.shapes) out.emplace_back(rows, columns);
  const auto each = [&](auto f) {
    for (std::size_t i = 0; i < out[0].data.size(); ++i) f(i);
  };
  switch (n.what) {
    case kind::given:
      out[0] = n.content;
      break;
    case kind::matmul: {
      const auto get = [&](std::size_t which, std::size_t r, std::size_t c) {
        return n.operands[which].transposed ? in[which]->at(c, r) : in[which]->at(r, c);
      };
      const auto inner = n.operands[0].transposed ? in[0]->rows : in[0]->columns;
      for (std::size_t r = 0; r < out[0].rows; ++r)
        for (std::size_t c = 0; c < out[0].columns; ++c)
          for (std::size_t k = 0; k < inner; ++k) out[0].at(r, c) += get(0, r, k) * get(1, k, c);
      break;
    }
    case kind::activate:
      each([&](std::size_t i) {
        out[0].data[i] = std::tanh(in[0]->data[i]);
        out[1].data[i] = 1 - out[0].data[i] * out[0].data[i];
      });
      break;
    case kind::loss:
      for (std::size_t i = 0; i < in[0]->data.size(); ++i) {
        const float off = in[0]->data[i] - in[1]->data[i];
        out[0].data[0] += off * off / 2;
      }
      break;
    case kind::loss_gradient:
      each([&](std::size_t i) { out[0].data[i] = in[0]->data[i] - in[1]->data[i]; });
      break;
    case kind::activate_gradient:
      each([&](std::size_t i) { out[0].data[i] = in[0]->data[i] * in[1]->data[i]; });
      break;
  }
  return out;
}

/// A training step: `layers` of matmul and activation, the loss, and the gradients of all weights.
network training_step(int layers, std::size_t batch, std::size_t width) {
  network n;
  unsigned state = 1;
  const auto given = [&](const std::string& name, std::size_t rows, std::size_t columns) {
    tensor t(rows, columns);
    for (auto& x : t.data) x = static_cast<float>((state = state * 1664525 + 1013904223) >> 16) / 65536 - 0.5f;
    return n.add({kind::given, name, {}, {{rows, columns}}, std::move(t)});
  };
  std::vector<int> weights, values = {given("input", batch, width)};
  const int wanted = given("wanted", batch, width);
  for (int i = 0; i < layers; ++i) {
    const auto number = std::to_string(i + 1);
    weights.push_back(given("weight " + number, width, width));
    const int sum = n.add({kind::matmul, "matmul " + number, {{values.back()}, {weights.back()}}, {{batch, width}}});
    values.push_back(n.add({kind::activate, "activate " + number, {{sum}}, {{batch, width}, {batch, width}}}));
  }
  n.add({kind::loss, "loss", {{values.back()}, {wanted}}, {{1, 1}}});
  int gradient = n.add({kind::loss_gradient, "loss gradient", {{values.back()}, {wanted}}, {{batch, width}}, {}, true});
  for (int i = layers; i-- > 0;) {
    const auto number = std::to_string(i + 1);
    const auto at = static_cast<std::size_t>(i);
    gradient = n.add(
        {kind::activate_gradient, "gradient of sum " + number, {{gradient}, {values[at + 1], 1}}, {{batch, width}}, {}, true});
    n.add({kind::matmul, "gradient of weight " + number, {{values[at], 0, true}, {gradient}}, {{width, width}}, {}, true});
    if (i > 0)
      gradient =
          n.add({kind::matmul, "gradient of value " + number, {{gradient}, {weights[at], 0, true}}, {{batch, width}}, {}, true});
  }
  return n;
}

// 4. The graph for the planner: which vertex reads which vertices.
template <>
struct remat::dag_traits<network> {
  using vertex = int;
  static auto vertices(const network& n) { return std::views::iota(0, static_cast<int>(n.nodes.size())); }
  static auto inputs(const network& n, int v) { return n.at(v).operands | std::views::transform(&operand::vertex); }
  static std::size_t index(const network&, int v) { return static_cast<std::size_t>(v); }
};

// The costs for the planner. A framework would measure times; here they are estimates from the shapes.
struct costs {
  const network& n;
  std::vector<std::int64_t> bytes(int v) const {
    std::vector<std::int64_t> all;
    for (const auto& [rows, columns] : n.at(v).shapes) all.push_back(static_cast<std::int64_t>(rows * columns * sizeof(float)));
    return all;
  }
  double seconds(int v) const {
    const auto [rows, columns] = n.at(v).shapes[0];
    return 1e-9 * static_cast<double>(rows * columns) * (n.at(v).what == kind::matmul ? 2.0 * static_cast<double>(columns) : 10);
  }
  bool held(int v) const { return n.at(v).what == kind::given; }
  bool backward(int v) const { return n.at(v).backward; }
  const std::string& name(int v) const { return n.at(v).name; }
  std::vector<std::size_t> reads(int u, int v) const {  // numbers of the results of u
    std::vector<std::size_t> results;
    for (const auto& x : n.at(v).operands)
      if (x.vertex == u) results.push_back(x.result);
    return results;
  }
};
using member = remat::cost_member;
static_assert(remat::cost_model_with<costs, network, member::held, member::backward, member::name, member::reads>);

// 5. The visitor that runs a schedule, with a buffer for each result.
struct device {
  const network& n;
  std::vector<tensors> buffers;

  explicit device(const network& net) : n(net), buffers(net.nodes.size()) {
    for (std::size_t v = 0; v < buffers.size(); ++v)
      if (n.nodes[v].what == kind::given) buffers[v] = run(n.nodes[v], {});
  }
  void compute(int v) {
    std::vector<const tensor*> in;
    for (const auto& x : n.at(v).operands) in.push_back(&buffers[static_cast<std::size_t>(x.vertex)][x.result]);
    buffers[static_cast<std::size_t>(v)] = run(n.at(v), in);
  }
  void drop(int v, std::size_t result) { buffers[static_cast<std::size_t>(v)][result] = {}; }
};

int main() {
  const auto n = training_step(12, 128, 24);
  const auto given = memory::now;  // given tensors in the graph; each device copies them

  device plain(n);
  for (int v = 0; v < static_cast<int>(n.nodes.size()); ++v)
    if (n.at(v).what != kind::given) plain.compute(v);

  const auto f = remat::freeze(n, costs{n});
  const auto store_all = remat::evaluate(f, remat::store_all_schedule(f));
  const auto r = remat::solve(f, store_all.peak / 2, remat::min_cut{}, {.seconds = 20});
  if (!r.found()) return 1;

  const auto before = memory::now;
  memory::peak = before;
  device frugal(n);
  remat::execute(f, r.schedule, frugal);
  const auto peak = memory::peak - before;

  bool equal = true;
  for (auto v : f.problem.targets()) {
    const auto& [vertex, result] = f.values[v];
    const auto at = static_cast<std::size_t>(vertex);
    const auto &a = frugal.buffers[at][result].data, &b = plain.buffers[at][result].data;
    equal = equal && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
  std::cout << n.nodes.size() << " vertices, " << remat::format_bytes(before - given) << " when everything is kept, "
            << remat::format_bytes(store_all.peak) << " when it is dropped after its last use\n"
            << "planned for " << remat::format_bytes(r.budget) << ": " << r.recomputed << " computations more, "
            << 100 * (r.seconds / store_all.seconds - 1) << " % more time, at most " << 100 * r.gap() << " % above the least\n"
            << "allocated " << remat::format_bytes(peak) << ", gradients " << (equal ? "equal" : "NOT EQUAL")
            << " to the last bit\n";
  return equal && peak <= r.budget && peak == r.peak && r.recomputed > 0 ? 0 : 1;
}
