// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <system_error>
#include <unordered_map>

#include <remat/io/file.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/profile.hpp>

#include "../base/clock.hpp"
#include "../base/trim.hpp"
#include "../base/views.hpp"
#include "../capture/known_results.hpp"
#include "../program/signature.hpp"
#include "environment.hpp"
#include "json.hpp"
#include "node_bench.hpp"

namespace remat::pytorch {
namespace {

bool equal(const allocation_script& a, const allocation_script& b) {
  auto same = [](const scripted_block& x, const scripted_block& y) {
    return x.bytes == y.bytes && x.born == y.born && x.freed == y.freed && x.result == y.result;
  };
  return a.events == b.events && std::equal(a.blocks.begin(), a.blocks.end(), b.blocks.begin(), b.blocks.end(), same);
}

/// True if the recomputation of the node differs from its first run.
bool is_twofold(const node& n) {
  return std::any_of(n.calls.begin(), n.calls.end(), [](const auto& c) { return !c.first_run_only.empty(); });
}

node_profile measure(const program& step, const node& n, double seconds) {
  node_profile p;
  if (n.calls.empty()) return p;
  node_bench b(step, n);
  allocation_recording* const no_scope = nullptr;
  b.warm_up([&] { b.run(false, no_scope); });
  const auto record = [&](bool again) {
    const auto earlier = b.script(again, p.workspace);
    auto s = b.script(again, p.workspace);
    s.stable = equal(earlier, s);
    return s;
  };
  p.first = record(false);
  if (is_twofold(n)) b.run(true, no_scope);
  p.again = is_twofold(n) ? record(true) : p.first;
  p.seconds = b.seconds(p.first, seconds, p.other_threads_bytes, p.undisturbed);
  // Threads may overlap in ways that the measurement did not show.
  p.other_threads_bytes =
      std::min<bytes_t>(p.other_threads_bytes * at::get_num_threads(), p.other_threads_bytes + node_bench::other_work_bytes);
  return p;
}

/// Bytes that a node reads and writes, plus 1.
double touched(const program& step, const node& n) {
  double sum = 1;
  for (const auto* list : {&n.inputs, &n.outputs})
    for (auto v : *list) sum += static_cast<double>(step.values[v].bytes);
  return sum;
}

/// True if the layouts agree up to sizes: the same order of dimensions, with gaps or repetitions in the same dimensions.
bool lie_alike(const byte_view& a, const byte_view& b) {
  if (a.sizes.size() != b.sizes.size() || a.dtype != b.dtype || a.conj != b.conj || a.neg != b.neg) return false;
  const auto order = [](const byte_view& v) {  // dimensions by stride; 0: expanded, 1: dense, 2: with a gap
    std::vector<std::pair<std::size_t, int>> list;
    for (std::size_t d = 0; d < v.sizes.size(); ++d)
      if (v.sizes[d] != 1) list.emplace_back(d, 0);
    std::stable_sort(list.begin(), list.end(),
                     [&](const auto& x, const auto& y) { return v.strides[x.first] < v.strides[y.first]; });
    int64_t dense = 1;
    for (auto& [d, kind] : list) {
      kind = v.strides[d] == 0 ? 0 : v.strides[d] == dense ? 1 : 2;
      dense = std::max<int64_t>(1, v.strides[d] * v.sizes[d]);
    }
    return list;
  };
  return order(a) == order(b);
}

/// Kernels copy operands of another layout, which takes memory. So scripts are only reused for operands of the same layout.
bool operands_lie_alike(const program& step, const node& n, const program& other, const node& like) {
  return std::equal(n.calls.begin(), n.calls.end(), like.calls.begin(), like.calls.end(), [&](const call& x, const call& y) {
    return std::equal(x.operands.begin(), x.operands.end(), y.operands.begin(), y.operands.end(),
                      [&](const operand& a, const operand& b) { return lie_alike(step.views[a.view], other.views[b.view]); });
  });
}

/// True if sizes decide which kernel runs: PyTorch's own convolutions and those of libraries allocate in different ways.
bool has_kernel_by_size(const node& n) {
  return std::any_of(n.calls.begin(), n.calls.end(), [](const call& c) {
    const auto& name = c.op.schema().name();
    return name == "aten::convolution" || name == "aten::convolution_backward";
  });
}

/// The script for other sizes, if the kernels allocate only their results.
/// @return nothing if they allocate more, not the same in each run, or not the same for all sizes
std::optional<allocation_script> resized(const allocation_script& s, const program& step, const node& n, const program& other,
                                         const node& like) {
  if (!s.stable || has_kernel_by_size(n) || !operands_lie_alike(step, n, other, like)) return std::nullopt;
  auto found = s;
  for (auto& b : found.blocks) {
    if (b.result == none || b.freed >= 0 || b.bytes != other.values[like.outputs[b.result]].bytes) return std::nullopt;
    b.bytes = step.values[n.outputs[b.result]].bytes;
    if (b.bytes <= 0) return std::nullopt;
  }
  return found;
}

/// Scales the times by the bytes that the nodes touch. Takes allocations from a run if the script cannot be scaled.
node_profile profile_like(const program& step, const node& n, const program& other, const node& of, const node_profile& like) {
  node_profile p;
  if (n.calls.empty()) return p;
  const auto growth = touched(step, n) / touched(other, of);
  p.seconds = like.seconds * growth;
  p.other_threads_bytes = static_cast<bytes_t>(static_cast<double>(like.other_threads_bytes) * std::max(1.0, growth));
  auto first = resized(like.first, step, n, other, of), second = resized(like.again, step, n, other, of);
  if (first && second && like.workspace == 0) {
    p.first = std::move(*first);
    p.again = std::move(*second);
    return p;
  }
  node_bench b(step, n);
  const auto record = [&](bool again) {
    bytes_t of_first_run = 0;
    b.warm_up([&] { b.script(again, of_first_run); });
    return b.script(again, p.workspace);
  };
  p.first = record(false);
  p.again = is_twofold(n) ? record(true) : p.first;
  p.first.stable = like.first.stable;
  p.again.stable = like.again.stable;
  return p;
}

/// Nodes with known costs, by operators and types, regardless of sizes and numbers.
class known_nodes {
 public:
  explicit known_nodes(const std::vector<profiled_program>& programs) {
    std::set<const node_profile*> met;
    for (const auto& p : programs)
      for (std::size_t i = 0; i < p.step->nodes.size(); ++i)
        if (const auto& n = p.step->nodes[i]; met.insert(p.costs->nodes[i].get()).second)
          nodes_[kind_of(*p.step, n)].push_back({p.step, &n, p.costs->nodes[i].get(), touched(*p.step, n)});
  }
  /// Profile from the known node next in size; nothing if there is none.
  std::optional<node_profile> profile_of(const program& step, const node& n) const {
    const auto found = nodes_.find(kind_of(step, n));
    if (found == nodes_.end()) return std::nullopt;
    const auto own = touched(step, n);
    const auto distance = [&](const entry& e) { return std::abs(std::log(e.bytes / own)); };
    const auto& next = *std::min_element(found->second.begin(), found->second.end(),
                                         [&](const entry& a, const entry& b) { return distance(a) < distance(b); });
    return profile_like(step, n, *next.step, *next.what, *next.costs);
  }

 private:
  struct entry {
    const program* step;
    const node* what;
    const node_profile* costs;
    double bytes;
  };
  static std::string kind_of(const program& step, const node& n) {
    std::ostringstream out;
    out << n.inputs.size() << "," << n.outputs.size() << "," << n.overwrites.size();
    for (const auto& c : n.calls) {
      out << c.op.operator_name();
      for (const auto& a : c.arguments) out << (a.isBool() ? "b" + std::to_string(a.toBool()) : a.tagKind()) << " ";
      for (const auto* list : {&c.operands, &c.results})
        for (const auto& o : *list)
          out << o.at << "." << o.element << ":" << step.views[o.view].sizes.size() << c10::toString(step.views[o.view].dtype);
      for (std::size_t k = 0; k < c.operands.size(); ++k) out << "@" << first_with_view(c, k);
    }
    return out.str();
  }

  std::unordered_map<std::string, std::vector<entry>> nodes_;
};

/// A file of measured costs. It is read and written as a whole; a large file is left alone for a few entries.
class cache_file {
 public:
  explicit cache_file(std::filesystem::path path) : path_(std::move(path)) {}

  /// Reads the file, if worth the time.
  void open() {
    read_ = is_worth_while();
    if (read_) document_ = contents();
  }
  std::shared_ptr<const node_profile> find(const std::string& machine, const std::string& key, std::size_t outputs) {
    if (read_) try {
        return std::make_shared<node_profile>(profile_from(document_["machines"][machine].at(key), outputs));
      } catch (const std::exception&) {  // missing or damaged
      }
    return nullptr;
  }
  void add(const std::string& machine, const std::string& key, std::shared_ptr<const node_profile> entry) {
    unwritten_[{machine, key}] = std::move(entry);
  }
  /// Writes the added entries, if worth the time, and forgets those it has read.
  void close() {
    if (!unwritten_.empty() && is_worth_while()) try {
        if (!read_) document_ = contents();
        for (const auto& [where, entry] : unwritten_) document_["machines"][where.first][where.second] = to_json(*entry);
        std::filesystem::create_directories(path_.parent_path());
        write_file(path_, document_.dump());
        unwritten_.clear();
      } catch (const std::exception&) {  // a cache that cannot be written costs time only
      }
    document_ = nullptr;
    read_ = false;
    met_ = true;
  }
  void forget() { unwritten_.clear(); }

 private:
  static constexpr std::size_t max_file_bytes = 16 << 20;  ///< bytes; a larger file is started anew

  bool is_worth_while() const {
    constexpr std::size_t small = 256 << 10, per_entry = 4096;  // bytes
    std::error_code failed;
    const auto size = std::filesystem::file_size(path_, failed);
    return !met_ || failed || size <= std::max(small, per_entry * unwritten_.size());
  }
  nlohmann::json contents() const {
    try {
      auto document = nlohmann::json::parse(read_file(path_, max_file_bytes));
      if (document.at("format") == "remat-torch-profile" && document.at("version") == 3 && document.at("machines").is_object())
        return document;
    } catch (const std::exception&) {  // missing, damaged or too large: measure again
    }
    return {{"format", "remat-torch-profile"}, {"version", 3}, {"machines", nlohmann::json::object()}};
  }

  std::filesystem::path path_;
  nlohmann::json document_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<const node_profile>> unwritten_;  // environment, signature
  bool read_ = false, met_ = false;
};

std::mutex known_mutex;
std::map<std::string, std::map<std::string, std::shared_ptr<const node_profile>>> known;  // environment, signature
std::map<std::filesystem::path, cache_file> files;

}  // namespace

std::filesystem::path profile_options::default_cache() {
  const auto folder = cache_folder();
  return folder.empty() ? folder : folder / "torch-profile.json";
}

std::vector<double> program_profile::seconds() const {
  std::vector<double> list;
  for (const auto& n : nodes) list.push_back(n->seconds);
  return list;
}
std::vector<bytes_t> program_profile::workspace() const {
  std::vector<bytes_t> list;
  for (const auto& n : nodes) list.push_back(n->workspace);
  return list;
}

void forget_profiles() {
  detail::forget_results();
  std::lock_guard lock(known_mutex);
  known.clear();
  for (auto& [path, file] : files) file.forget();
}

namespace {

/// While it exists, operators run below autograd and autocast, one program at a time. If some of them draw, the destructor
/// restores the default generators. Draws of other threads in the meantime are then repeated.
class measuring {
 public:
  measuring(device& on, const program& step) : on_(on), guard_(on.which()) {
    if (std::none_of(step.nodes.begin(), step.nodes.end(), [](const node& n) { return n.random; })) return;
    generator_ = on.random();
    host_ = generator_state::now();
  }
  ~measuring() {
    if (generator_) on_.random(*generator_);
    if (host_) host_->restore();
  }
  measuring(const measuring&) = delete;
  measuring& operator=(const measuring&) = delete;

 private:
  std::lock_guard<std::mutex> lock_{known_mutex};
  at::NoGradGuard no_grad_;
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  device& on_;
  c10::DeviceGuard guard_;
  std::shared_ptr<const random_state> generator_;
  std::optional<generator_state> host_;  ///< operators on numbers draw from the host's generator
};

}  // namespace

program_profile profile(const program& step, const profile_options& o, const std::vector<profiled_program>& like) {
  const auto begin = clock::now();
  auto& on = device_of(device_of_step(step));
  const measuring alone(on, step);
  const auto machine = environment(on);
  auto& here = known[machine];
  auto* file = o.cache.empty() ? nullptr : &files.try_emplace(o.cache, o.cache).first->second;
  bool open = false;
  std::optional<known_nodes> others;  // made when needed

  program_profile result;
  std::map<std::string, std::shared_ptr<const node_profile>> used;
  for (const auto& n : step.nodes) {
    const auto key = signature(step, n);
    auto& entry = used[key];
    if (!entry) entry = here[key];
    if (!entry && file != nullptr) {
      if (!std::exchange(open, true)) file->open();
      entry = file->find(machine, key, n.outputs.size());
    }
    if (!entry && !like.empty()) {
      if (!others) others.emplace(like);
      if (auto p = others->profile_of(step, n)) {
        result.nodes.push_back(entry = std::make_shared<node_profile>(std::move(*p)));
        continue;
      }
    }
    if (!entry) {
      ++result.measured;
      const double left = std::max(0.0, o.seconds - since(begin));
      entry = std::make_shared<node_profile>(measure(step, n, std::min(0.05, left)));
      if (file != nullptr && entry->undisturbed) file->add(machine, key, entry);
      note_freed(static_cast<bytes_t>(touched(step, n)));
    }
    here[key] = entry;
    result.nodes.push_back(entry);
  }
  result.distinct = used.size();
  if (open) file->close();
  result.elapsed = since(begin);
  return result;
}

}  // namespace remat::pytorch
