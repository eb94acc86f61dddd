// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include <remat/io/file.hpp>
#include <remat/layout/layout.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/profile.hpp>

#include "../capture/known_results.hpp"
#include "../capture/meta_kernels.hpp"
#include "../capture/operators.hpp"
#include "../clock.hpp"
#include "../program/signature.hpp"
#include "../program/views.hpp"
#include "../trim.hpp"
#include "environment.hpp"
#include "json.hpp"

namespace remat::pytorch {
namespace {

constexpr bytes_t little = bytes_t{64} << 10;

/// Runs a node on operands of its own.
class bench {
 public:
  bench(const program& step, const node& n) : step_(step), node_(n), on_(device_of(device_of_step(step))) {
    for (const auto& c : n.calls) {
      for (const auto& o : c.operands) touch(o.view);
      for (const auto& r : c.results) made_.push_back(step.views[r.view].value);
    }
    keep_written();
  }

  /// Other numbers, for operators that refuse the first.
  void make_plausible() {
    for (const auto& c : node_.calls)
      for (const auto& o : c.operands) {
        const auto value = step_.views[o.view].value;
        if (is_number(step_, o.view) || !storage_.count(value) || std::find(made_.begin(), made_.end(), value) != made_.end())
          continue;
        fill_plausibly(operand_of(o.view));
      }
    keep_written();
  }

  /// A first run, in which kernels set themselves up, on numbers that they take.
  /// @throws cannot_capture if they take none
  void warm_up(const std::function<void()>& run) {
    try {
      run();
      return;
    } catch (const c10::Error&) {
      make_plausible();
    }
    try {
      run();
    } catch (const c10::Error& e) {
      throw cannot_capture(
          node_.name + " cannot be measured, as it takes no other numbers than those of the step: " + e.what_without_backtrace());
    }
  }

  /// Operands as they were, where a run has written them: numbers that drift to infinity or denormals take other times.
  void refresh() {
    for (auto& [to, from] : written_) to.copy_(from);
  }

  /// One run, with `scope` (a recording, planned allocations) active during the calls.
  /// @return s
  template <class Scope>
  double run(bool again, Scope* scope) {
    clear();
    refresh();
    double seconds = 0;
    for (const auto& c : node_.calls) {
      auto stack = stack_of(c, again, [&](index_t v) { return operand_of(v); });
      at::AutoGradMode grad_mode(c.grad_mode);
      wait_for_kernels();
      if (scope) scope->start();
      const stopwatch watch;
      c.op.callBoxed(stack);
      wait_for_kernels();
      seconds += watch.seconds();
      undisturbed_ = undisturbed_ && watch.undisturbed();
      if (scope) scope->stop();
      take_results(c, stack);
    }
    return seconds;
  }

  /// Shortest of some runs whose allocations lie in an arena, as they will when the program is executed.
  /// @param elsewhere gets what other threads allocated: half of the runs need no more, or it is little, as other work of the
  ///                  process may be among it
  /// @param undisturbed was the shortest?
  double seconds(const allocation_script& s, double limit, bytes_t& elsewhere, bool& undisturbed) {
    clear();
    std::vector<allocation> list;
    for (const auto& b : s.blocks) list.push_back({b.born, b.freed < 0 ? s.events + 1 : b.freed, b.bytes});
    const bool on_host = on_.which().is_cpu();
    const auto places = lay_out(list, {.alignment = on_host ? layout_options().alignment : accelerator_alignment, .tries = 0});
    const auto memory = on_.memory().reserve(places.arena);
    std::vector<planned_block> plan;
    for (std::size_t i = 0; i < s.blocks.size(); ++i) {
      const auto& b = s.blocks[i];
      const bool kept_by_operator = b.result == none && b.freed < 0;
      plan.push_back({b.bytes, b.deaths, kept_by_operator ? nullptr : memory->data() + places.offsets[i], b.freed >= 0});
    }
    const auto planned = on_.place();
    if (!on_host) return seconds_on_device(*planned, plan);
    double shortest = std::numeric_limits<double>::infinity();
    std::vector<bytes_t> seen;
    const meter counting;
    auto once = [&] {
      planned->plan(plan);
      undisturbed_ = true;
      const auto before = meter::live();
      meter::reset_peak();
      const auto time = run(false, planned.get());
      seen.push_back(meter::peak() - before);
      if (time < shortest) shortest = time, undisturbed = undisturbed_;
    };
    once();  // touches the memory
    shortest = std::numeric_limits<double>::infinity();
    once();
    const auto begin = clock::now();
    for (int k = 0; k < 2 || (k < 8 && since(begin) < limit); ++k) once();
    clear();
    std::sort(seen.begin(), seen.end());
    elsewhere = seen[seen.size() / 2];
    for (auto bytes : seen)
      if (bytes <= little) elsewhere = std::max(elsewhere, bytes);
    return shortest;
  }

  /// Shortest of some batches, timed by the device. A batch has several runs, so that the time in which the host starts a kernel
  /// is hidden behind the kernel before it, as in a step.
  double seconds_on_device(placement& planned, const std::vector<planned_block>& plan) {
    constexpr int batches = 3, runs = 5;
    double shortest = std::numeric_limits<double>::infinity();
    for (int batch = 0; batch < batches; ++batch) {
      refresh();
      const auto begin = on_.mark_time();
      for (int k = 0; k < runs; ++k) {
        clear();
        planned.plan(plan);
        call_all(planned);
      }
      shortest = std::min(shortest, on_.seconds(begin, on_.mark_time()) / runs);
    }
    clear();
    return shortest;
  }

  allocation_script script(bool again, bytes_t* workspace) {
    recording record(on_.which());
    run(again, &record);
    allocation_script s;
    s.events = record.events();
    std::vector<bytes_t> change(static_cast<std::size_t>(s.events) + 1, 0);
    bytes_t kept = 0, live = 0, peak = 0;
    for (const auto& b : record.blocks()) {
      scripted_block block{b.bytes, b.born, b.freed, 0, none};
      for (const auto& other : record.blocks()) block.deaths += other.freed >= 0 && other.freed < b.born;
      for (std::size_t i = 0; i < node_.outputs.size() && b.freed < 0; ++i)
        if (const auto found = storage_.find(node_.outputs[i]); found != storage_.end() && found->second.data() == b.data)
          block.result = static_cast<index_t>(i);
      if (block.result != none) kept += b.bytes;
      change[static_cast<std::size_t>(b.born)] += b.bytes;
      if (b.freed >= 0) change[static_cast<std::size_t>(b.freed)] -= b.bytes;
      s.blocks.push_back(block);
    }
    for (auto c : change) peak = std::max(peak, live += c);
    if (workspace != nullptr) *workspace = std::max<bytes_t>(0, peak - kept);
    return s;
  }

 private:
  void call_all(placement& planned) {
    for (const auto& c : node_.calls) {
      auto stack = stack_of(c, false, [&](index_t v) { return operand_of(v); });
      const at::AutoGradMode grad_mode(c.grad_mode);
      planned.start();
      c.op.callBoxed(stack);
      planned.stop();
      take_results(c, stack);
    }
  }
  /// @throws cannot_capture if they do not lie as they were recorded
  void take_results(const call& c, const ::torch::jit::Stack& stack) {
    for (const auto& r : c.results) {
      const auto& view = step_.views[r.view];
      const auto t = result_of(stack, r);
      if (t.sizes() != at::IntArrayRef(view.sizes) || !same_strides(t.sizes(), t.strides(), view.strides)) {
        detail::distrust_meta_kernel(c.op);
        std::ostringstream text;
        text << c.op.schema().name() << " gives a tensor of sizes " << t.sizes() << " and strides " << t.strides() << " where "
             << at::IntArrayRef(view.sizes) << " and " << at::IntArrayRef(view.strides)
             << " were recorded. The next capture asks its kernel; please report this";
        throw cannot_capture(text.str());
      }
      storage_.insert_or_assign(view.value, t.storage());
    }
  }
  void wait_for_kernels() {
    if (const auto t = on_.mark()) t->wait();
  }
  void clear() {
    for (auto v : made_) storage_.erase(v);
  }
  void keep_written() {
    written_.clear();
    for (const auto& [old, fresh] : node_.overwrites) {
      if (!storage_.count(fresh)) continue;
      const auto bytes = static_cast<int64_t>(storage_.at(fresh).nbytes());
      const auto all = tensor_of({none, {bytes}, {1}, 0, at::kByte}, storage_.at(fresh));
      written_.emplace_back(all, all.clone());
    }
  }
  void touch(index_t v) {
    const auto value = step_.views[v].value;
    if (std::find(made_.begin(), made_.end(), value) != made_.end() || storage_.count(value) || is_number(step_, v)) return;
    const auto& view = step_.views[v];
    const auto bytes = step_.values[value].bytes;
    const auto scratch = at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(step_.values[value].device)).storage();
    const auto elements = bytes / static_cast<bytes_t>(c10::elementSize(view.dtype));
    if (at::isFloatingType(view.dtype)) tensor_of({none, {elements}, {1}, 0, view.dtype}, scratch).uniform_(0, 1);
    storage_.emplace(value, scratch);
  }
  at::Tensor operand_of(index_t v) {
    if (is_number(step_, v)) return constant_tensor(step_, step_.values[step_.views[v].value].slot);
    return tensor_of(step_.views[v], storage_.at(step_.views[v].value));
  }

  const program& step_;
  const node& node_;
  device& on_;
  std::vector<index_t> made_;
  std::map<index_t, c10::Storage> storage_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  ///< {operand that the node overwrites, as bytes; what it was}
  bool undisturbed_ = true;
};

bool equal(const allocation_script& a, const allocation_script& b) {
  auto same = [](const scripted_block& x, const scripted_block& y) {
    return x.bytes == y.bytes && x.born == y.born && x.freed == y.freed && x.result == y.result;
  };
  return a.events == b.events && std::equal(a.blocks.begin(), a.blocks.end(), b.blocks.begin(), b.blocks.end(), same);
}

node_profile measure(const program& step, const node& n, double seconds) {
  node_profile p;
  if (n.calls.empty()) return p;
  bench b(step, n);
  recording* const no_scope = nullptr;
  const bool twofold = std::any_of(n.calls.begin(), n.calls.end(), [](const auto& c) { return !c.first_run_only.empty(); });
  b.warm_up([&] { b.run(false, no_scope); });
  bytes_t workspace = 0;
  auto record = [&](bool again) {
    const auto earlier = b.script(again, &workspace);
    p.workspace = std::max(p.workspace, workspace);
    auto s = b.script(again, &workspace);
    p.workspace = std::max(p.workspace, workspace);
    s.stable = equal(earlier, s);
    return s;
  };
  p.first = record(false);
  if (twofold) b.run(true, no_scope);
  p.again = twofold ? record(true) : p.first;
  p.seconds = b.seconds(p.first, seconds, p.elsewhere, p.undisturbed);
  // Threads may meet in a way they did not here.
  p.elsewhere = std::min<bytes_t>(p.elsewhere * at::get_num_threads(), p.elsewhere + little);
  return p;
}

/// Bytes of what a node reads and writes.
double touched(const program& step, const node& n) {
  double sum = 1;
  for (const auto* list : {&n.inputs, &n.outputs})
    for (auto v : *list) sum += static_cast<double>(step.values[v].bytes);
  return sum;
}

/// The same allocations with other results, where the kernels allocate nothing but these.
/// @return nothing if they allocate more, or not always the same
std::optional<allocation_script> resized(const allocation_script& s, const program& step, const node& n, const program& other,
                                         const node& like) {
  if (!s.stable) return std::nullopt;
  auto found = s;
  for (auto& b : found.blocks) {
    if (b.result == none || b.freed >= 0 || b.bytes != other.values[like.outputs[b.result]].bytes) return std::nullopt;
    b.bytes = step.values[n.outputs[b.result]].bytes;
    if (b.bytes <= 0) return std::nullopt;
  }
  return found;
}

/// Times scaled by `growth`, and allocations from a run where they are not known.
node_profile profile_like(const program& step, const node& n, const program& other, const node& of, const node_profile& like) {
  node_profile p;
  if (n.calls.empty()) return p;
  const auto growth = touched(step, n) / touched(other, of);
  p.seconds = like.seconds * growth;
  p.elsewhere = static_cast<bytes_t>(static_cast<double>(like.elsewhere) * std::max(1.0, growth));
  auto first = resized(like.first, step, n, other, of), second = resized(like.again, step, n, other, of);
  if (first && second && like.workspace == 0) {
    p.first = std::move(*first);
    p.again = std::move(*second);
    return p;
  }
  bench b(step, n);
  bytes_t workspace = 0;
  auto record = [&](bool again) {
    b.warm_up([&] { b.script(again, nullptr); });
    auto s = b.script(again, &workspace);
    p.workspace = std::max(p.workspace, workspace);
    return s;
  };
  p.first = record(false);
  const bool twofold = std::any_of(n.calls.begin(), n.calls.end(), [](const auto& c) { return !c.first_run_only.empty(); });
  p.again = twofold ? record(true) : p.first;
  p.first.stable = like.first.stable;
  p.again.stable = like.again.stable;
  return p;
}

nlohmann::json to_json(const allocation_script& s) {
  nlohmann::json blocks = nlohmann::json::array();
  for (const auto& b : s.blocks)
    blocks.push_back({b.bytes, b.born, b.freed, b.deaths, b.result == none ? std::int64_t{-1} : std::int64_t{b.result}});
  return {{"events", s.events}, {"stable", s.stable}, {"blocks", blocks}};
}
}  // namespace

nlohmann::json to_json(const node_profile& p) {
  return {{"seconds", p.seconds},
          {"workspace", p.workspace},
          {"elsewhere", p.elsewhere},
          {"first", to_json(p.first)},
          {"again", to_json(p.again)}};
}

namespace {

allocation_script script_from(const nlohmann::json& j, std::size_t outputs) {
  allocation_script s;
  s.events = j.at("events").get<int>();
  s.stable = j.at("stable").get<bool>();
  if (s.events < 0 || s.events >= 1 << 20) throw bad_document("a script has too many events");
  for (const auto& b : j.at("blocks")) {
    const auto result = b.at(4).get<std::int64_t>();
    scripted_block block{b.at(0).get<bytes_t>(), b.at(1).get<int>(), b.at(2).get<int>(), b.at(3).get<int>(),
                         result < 0 ? none : static_cast<index_t>(result)};
    const bool in_range = block.bytes > 0 && block.bytes <= max_bytes && block.born >= 0 && block.born < s.events &&
                          block.freed < s.events && (block.freed < 0 || block.freed > block.born) &&
                          (result < 0 || static_cast<std::size_t>(result) < outputs);
    if (!in_range) throw bad_document("a block is out of range");
    s.blocks.push_back(block);
  }
  return s;
}

}  // namespace

node_profile profile_from(const nlohmann::json& j, std::size_t outputs) {
  node_profile p{j.at("seconds").get<double>(), j.at("workspace").get<bytes_t>(), j.at("elsewhere").get<bytes_t>(),
                 script_from(j.at("first"), outputs), script_from(j.at("again"), outputs)};
  if (!(p.seconds >= 0) || p.workspace < 0 || p.workspace > max_bytes || p.elsewhere < 0 || p.elsewhere > max_bytes)
    throw bad_document("a cost is out of range");
  return p;
}

namespace {

/// Entries of the cache file for this machine, an empty object if there is none.
nlohmann::json read_cache(const std::filesystem::path& path) {
  try {
    auto document = nlohmann::json::parse(read_file(path, std::size_t{256} << 20));
    if (document.at("format") == "remat-torch-profile" && document.at("version") == 3 && document.at("machines").is_object())
      return document;
  } catch (const std::exception&) {  // missing or damaged: measured anew
  }
  return {{"format", "remat-torch-profile"}, {"version", 3}, {"machines", nlohmann::json::object()}};
}

std::mutex known_mutex;
std::map<std::string, std::map<std::string, std::shared_ptr<const node_profile>>> known;  // environment, signature

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
}

namespace {

/// Operators run below autograd and autocast while it is there, one program at a time; generators are as before after it.
class measuring {
 public:
  explicit measuring(device& on) : on_(on), guard_(on.which()) {}
  ~measuring() {
    on_.random(*generator_);
    host_.restore();
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
  std::shared_ptr<const random_state> generator_ = on_.random();
  generator_state host_ = generator_state::now();  ///< numbers among the operands are there
};

}  // namespace

program_profile profile(const program& step, const profile_options& o) {
  const auto begin = clock::now();
  auto& on = device_of(device_of_step(step));
  const measuring alone(on);
  const auto machine = environment(on);
  auto& here = known[machine];
  nlohmann::json document;
  bool read = false;

  program_profile result;
  std::map<std::string, std::shared_ptr<const node_profile>> used;
  for (const auto& n : step.nodes) {
    const auto key = signature(step, n);
    auto& entry = used[key];
    if (!entry) entry = here[key];
    if (!entry && !o.cache.empty()) {
      if (!std::exchange(read, true)) document = read_cache(o.cache);
      try {
        entry = std::make_shared<node_profile>(profile_from(document["machines"][machine].at(key), n.outputs.size()));
      } catch (const std::exception&) {  // not there, or damaged
      }
    }
    if (!entry) {
      ++result.measured;
      const double left = std::max(0.0, o.seconds - since(begin));
      entry = std::make_shared<node_profile>(measure(step, n, std::min(0.05, left)));
      if (read && entry->undisturbed) document["machines"][machine][key] = to_json(*entry);
      note_freed(static_cast<bytes_t>(touched(step, n)));
    }
    here[key] = entry;
    result.nodes.push_back(entry);
  }
  result.distinct = used.size();
  if (read && result.measured > 0) try {
      std::filesystem::create_directories(o.cache.parent_path());
      write_file(o.cache, document.dump());
    } catch (const std::exception&) {  // a cache that cannot be written costs time only
    }
  result.elapsed = since(begin);
  return result;
}

program_profile profile_like(const program& step, const program& other, const program_profile& costs) {
  TORCH_CHECK(step.nodes.size() == other.nodes.size() && costs.nodes.size() == other.nodes.size(), "costs of another program");
  const auto begin = clock::now();
  auto& on = device_of(device_of_step(step));
  const measuring alone(on);
  const auto& here = known[environment(on)];
  program_profile result;
  std::map<std::string, std::shared_ptr<const node_profile>> used;
  for (std::size_t i = 0; i < step.nodes.size(); ++i) {
    const auto& n = step.nodes[i];
    const auto key = signature(step, n);
    auto& entry = used[key];
    if (const auto found = here.find(key); !entry && found != here.end()) entry = found->second;
    if (!entry) {
      entry = std::make_shared<node_profile>(profile_like(step, n, other, other.nodes[i], *costs.nodes[i]));
    }
    result.nodes.push_back(entry);
  }
  result.distinct = used.size();
  result.elapsed = since(begin);
  return result;
}

}  // namespace remat::pytorch
