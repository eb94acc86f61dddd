// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include <remat/core/evaluate.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/io/bytes.hpp>
#include <remat/torch/executor.hpp>
#include <remat/torch/memory.hpp>
#include <remat/torch/module.hpp>

#include "clock.hpp"
#include "hooks.hpp"
#include "solver.hpp"

namespace remat::torch {
namespace {

/// A `plan_solver` where a solver is asked for.
struct as_solver {
  const plan_solver& call;
  std::string name() const { return "the solver of the wrapped module"; }
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    auto l = m.limits();
    l.seconds = m.remaining();
    return call(p, budget, l);
  }
};

/// Bytes of the storages of `tensors`, each counted once in all calls with the same `seen`.
bytes_t storage_bytes(const std::vector<at::Tensor>& tensors, std::set<const void*>& seen) {
  bytes_t sum = 0;
  for (const auto& t : tensors)
    if (t.defined() && t.has_storage() && seen.insert(t.storage().unsafeGetStorageImpl()).second)
      sum += static_cast<bytes_t>(t.storage().nbytes());
  return sum;
}

/// What was planned for one budget.
struct plan {
  std::shared_ptr<const execution_plan> run;
  schedule steps;
  result found;
  double plan_seconds = 0;
};

/// What the last loss made of the outputs: the next one is expected to do the same.
class usage {
 public:
  std::vector<output_use> now() const {
    std::lock_guard lock(mutex_);
    return uses_;
  }
  /// @param seen what this loss makes of them
  /// @return is `step` the program for that?
  bool learn(const program& step, std::vector<output_use> seen) {
    std::lock_guard lock(mutex_);
    bool same = true;
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const bool planned = step.output_grads[i] != none;
      const auto before = i < uses_.size() ? uses_[i].strides : std::vector<int64_t>();
      same = same && (!step.differentiable[i] || (planned == seen[i].used && seen[i].strides.empty()));
      if (planned && seen[i].used && seen[i].strides.empty()) seen[i].strides = before;  // as planned
    }
    settled_ = settled_ || same;
    if (same || all_) return true;
    uses_ = std::move(seen);
    return false;
  }
  /// A loss has done as expected.
  bool settled() const {
    std::lock_guard lock(mutex_);
    return settled_;
  }
  /// Expects all outputs from now on.
  void expect_all() {
    std::lock_guard lock(mutex_);
    uses_.clear();
    all_ = true;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<output_use> uses_;
  bool all_ = false, settled_ = false;
};

/// Everything known of one kind of inputs.
struct setup {
  std::shared_ptr<usage> outputs;
  std::shared_ptr<const program> step;
  program_profile profiles;
  problem p;
  plan store_all;
  bytes_t constants = 0;
  double capture_seconds = 0;
  std::map<bytes_t, std::shared_ptr<const plan>> plans;  ///< by bytes available
  std::atomic<bool> broken = false;                      ///< an operator did not do as it did when it was measured
};

/// An executor, and what it was made for.
struct runner {
  std::shared_ptr<setup> kind;
  std::shared_ptr<const plan> what;
  std::unique_ptr<executor> run;
};

/// What a step reads again in its backward, and the version it had.
struct watched {
  at::Tensor tensor;
  int64_t version;
  std::string what;
};

/// The module has put something else in the place of a tensor that the capture came upon.
bool out_of_date(const program& step) {
  return std::any_of(step.values.begin(), step.values.end(), [](const auto& v) {
    if (!v.original) return false;
    const auto now = v.original->lock();
    return !now || now->storage().unsafeGetStorageImpl() != v.tensor.storage().unsafeGetStorageImpl() ||
           now->storage_offset() != v.tensor.storage_offset();
  });
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto x = a.detach().contiguous().resolve_conj().resolve_neg(), y = b.detach().contiguous().resolve_conj().resolve_neg();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

/// Each tensor once, by its name.
std::vector<std::pair<std::string, at::Tensor>> distinct(const ::torch::OrderedDict<std::string, at::Tensor>& named) {
  std::vector<std::pair<std::string, at::Tensor>> list;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& n : named)
    if (n.value().defined() && seen.insert(n.value().unsafeGetTensorImpl()).second) list.emplace_back(n.key(), n.value());
  return list;
}
std::vector<at::Tensor> tensors(const std::vector<std::pair<std::string, at::Tensor>>& named) {
  std::vector<at::Tensor> list;
  for (const auto& n : named) list.push_back(n.second);
  return list;
}

/// What shows whether a step still is what was captured: settings of PyTorch that choose kernels.
std::string settings() {
  std::ostringstream out;
  const auto& c = at::globalContext();
  out << at::get_num_threads() << c.deterministicAlgorithms() << c.deterministicFillUninitializedMemory() << c.userEnabledMkldnn()
      << c.userEnabledFlashSDP() << c.userEnabledMemEfficientSDP() << c.userEnabledMathSDP()
      << static_cast<int>(c.float32MatmulPrecision()) << c10::typeMetaToScalarType(c10::get_default_dtype());
  for (const auto device : {at::kCPU, at::kCUDA})
    if (at::autocast::is_autocast_enabled(device)) out << device << at::autocast::get_autocast_dtype(device);
  return out.str();
}

}  // namespace

budget::budget(const std::string& text) {
  if (text.empty() || text.back() != '%') {
    total = parse_bytes(text);
    return;
  }
  double percent = 0;
  const char* const end = text.data() + text.size() - 1;
  const auto [rest, failed] = std::from_chars(text.data(), end, percent, std::chars_format::fixed);
  if (failed != std::errc{} || rest != end || !std::isfinite(percent) || std::signbit(percent) || percent > 1e6)
    throw bad_option("\"" + text + "\" is not a budget: no percentage >= 0");
  share = percent / 100;
}

budget::budget(bytes_t bytes) : total(bytes) {
  if (bytes < 0) throw bad_option("budget must be >= 0 bytes, got " + std::to_string(bytes));
}

budget budget::activations(bytes_t bytes) {
  if (bytes < 0) throw bad_option("budget must be >= 0 bytes, got " + std::to_string(bytes));
  budget b;
  b.for_the_step = bytes;
  return b;
}

plan_solver default_solver() { return solve_by_default; }

struct plan_runner::state : std::enable_shared_from_this<state> {
  state(std::shared_ptr<::torch::nn::Module> m, forward_function f, wrap_options o)
      : module(std::move(m)), plain(std::move(f)), options(std::move(o)) {
    if (options.optimizer < 0) throw bad_option("wrap_options.optimizer must be >= 0, got " + std::to_string(options.optimizer));
    if (!options.solver) throw bad_option("wrap_options.solver is empty");
    options.limits.validate();
    meter::install();
  }

  void log(const std::string& text) const {
    if (options.log) options.log(text);
  }

  // --- kinds of inputs -------------------------------------------------------------------------------------------------------

  static std::string describe(const std::vector<at::Tensor>& inputs) {
    std::ostringstream out;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto& t = inputs[i];
      out << (i ? ", " : "");
      if (!t.defined()) {
        out << "undefined";
        continue;
      }
      out << c10::toString(t.scalar_type()) << t.sizes();
      if (!t.is_contiguous()) out << " strides " << t.strides();
      if (t.requires_grad()) out << " with gradient";
      for (std::size_t j = 0; j < i; ++j)
        if (inputs[j].defined() && inputs[j].is_alias_of(t)) {
          out << " sharing memory with " << j << " at " << t.storage_offset() - inputs[j].storage_offset();
          break;
        }
    }
    return out.str();
  }

  /// All that a capture depends on.
  std::string key_of(const std::vector<at::Tensor>& inputs) const {
    std::ostringstream out;
    out << describe(inputs) << ";" << settings() << ";";
    for (const auto& m : module->modules()) out << (m->is_training() ? "t" : "e");
    std::map<const void*, at::Tensor> storages;
    for (const auto& list : {module->named_parameters(), module->named_buffers()})
      for (const auto& [name, t] : distinct(list)) {
        out << ";" << t.unsafeGetTensorImpl() << static_cast<int>(t.scalar_type()) << t.requires_grad() << t.sizes()
            << t.strides();
        if (!t.has_storage()) continue;
        const auto& first = storages.emplace(t.storage().unsafeGetStorageImpl(), t).first->second;
        if (!first.is_same(t)) out << "=" << first.unsafeGetTensorImpl() << "+" << t.storage_offset() - first.storage_offset();
      }
    return out.str();
  }

  static std::string text(const std::vector<output_use>& uses) {
    std::ostringstream out;
    for (const auto& u : uses) out << ";" << u.used << at::IntArrayRef(u.strides);
    return out.str();
  }

  std::shared_ptr<setup> setup_for(const std::vector<at::Tensor>& inputs) {
    auto key = key_of(inputs);
    if (options.fixed_shapes && !used.empty() && !used.count(key))
      throw unexpected_inputs("wrapped for " + first_inputs + ", called with " + describe(inputs) +
                              " (or in another mode); wrap_options::fixed_shapes forbids a new plan");
    auto& outputs = used[key];
    if (!outputs) outputs = std::make_shared<usage>();
    const auto uses = outputs->now();
    key += text(uses);
    if (const auto found = setups.find(key); found != setups.end()) {
      const bool broken = found->second->broken;
      if (!broken && !out_of_date(*found->second->step)) {
        replaced = 0;
        return found->second;
      }
      forget(found->second);
      setups.erase(found);
      if (broken) {
        forget_profiles();
        options.profile.cache.clear();
      } else if (++replaced > 3) {
        throw cannot_capture(
            "the module puts a new tensor in the place of one of its members in every forward; register it as a "
            "buffer and write into it");
      }
      log(broken ? "an operator uses memory in another way than it did: measured again"
                 : "a tensor of the module that is no parameter and no buffer has been replaced: captured again");
    }
    if (setups.empty()) first_inputs = describe(inputs);
    auto s = std::make_shared<setup>();
    s->outputs = outputs;
    const auto begin = clock::now();
    const auto parameters = distinct(module->named_parameters()), buffers = distinct(module->named_buffers());
    std::vector<std::string> names;
    for (const auto* list : {&parameters, &buffers})
      for (const auto& n : *list) names.push_back(n.first);
    s->step = std::make_shared<program>(capture(plain, inputs, tensors(parameters), tensors(buffers), names, uses));
    s->capture_seconds = since(begin);
    s->profiles = profile(*s->step, options.profile);
    s->p = to_problem(*s->step, s->profiles.seconds(), s->profiles.workspace(), module->name());
    std::set<const void*> seen;
    std::vector<at::Tensor> constants;
    for (const auto& v : s->step->values)
      if (v.from == role::constant) constants.push_back(v.tensor);
    s->constants = storage_bytes(constants, seen);
    s->store_all.steps = store_all_schedule(s->p);
    s->store_all.run = std::make_shared<execution_plan>(s->step, s->store_all.steps, s->profiles);
    s->store_all.found = judged(s->p, s->store_all.steps);
    s->store_all.found.bound = s->store_all.found.seconds;
    std::ostringstream text;
    text << "captured " << describe(inputs) << ": " << s->step->nodes.size() << " operations (" << s->profiles.distinct
         << " different, " << s->profiles.measured << " measured) in " << format_seconds(s->capture_seconds) << " + "
         << format_seconds(s->profiles.elapsed) << "; plain step needs " << format_bytes(s->store_all.run->needed_bytes());
    log(text.str());
    setups.emplace(key, s);
    return s;
  }

  /// Lets go of the executors for `s` that are idle.
  void forget(const std::shared_ptr<setup>& s) {
    std::erase_if(runners, [&](const auto& r) { return r->kind == s && !r->run->in_flight() && !r->run->arena_in_use(); });
  }

  static result judged(const problem& p, const schedule& steps) {
    const auto e = evaluate(p, steps);
    result r;
    r.status = status::feasible;
    r.schedule = steps;
    r.peak = e.peak;
    r.seconds = e.seconds;
    r.recomputed = e.recomputed;
    r.solver = "store_all";
    return r;
  }

  // --- memory ----------------------------------------------------------------------------------------------------------------

  /// Bytes that are there whatever the plan.
  torch::report held(const setup& s, const std::vector<at::Tensor>& inputs) const {
    torch::report r;
    std::set<const void*> seen;
    r.parameters = storage_bytes(module->parameters(), seen);
    r.buffers = storage_bytes(module->buffers(), seen);
    r.inputs = storage_bytes(inputs, seen);
    r.constants = s.constants;
    r.optimizer = options.optimizer;
    return r;
  }

  /// Gradients that exist, apart from those in an arena that is counted as a whole.
  bytes_t gradient_bytes(const executor* in) const {
    bytes_t sum = 0;
    std::set<const void*> seen;
    for (const auto& p : module->parameters()) {
      const auto& g = p.grad();
      if (!g.defined() || !g.has_storage()) continue;
      const bool counted = (in != nullptr && in->owns(g)) ||
                           std::any_of(retired.begin(), retired.end(), [&](const auto& a) { return contains(a.lock(), g); });
      if (!counted) sum += storage_bytes({g}, seen);
    }
    return sum;
  }
  static bool contains(const std::shared_ptr<arena>& a, const at::Tensor& t) {
    const auto* data = static_cast<const char*>(t.storage().data());
    return a && a->data() <= data && data < a->data() + a->bytes();
  }

  /// Arenas of other steps, and what these handed out.
  bytes_t other_bytes(const runner* but) const {
    bytes_t sum = 0;
    for (const auto& r : runners)
      if (r.get() != but) sum += r->what->run->needed_bytes();
    for (const auto& a : retired)
      if (const auto memory = a.lock()) sum += memory->resident();
    return sum;
  }

  /// The budget in bytes; relative ones leave out what is held and the gradients there are.
  bytes_t budget_bytes(const setup& s, bytes_t held_bytes, bytes_t gradients) const {
    const auto& b = options.budget;
    if (b.total) return *b.total;
    if (b.for_the_step) return held_bytes + gradients + *b.for_the_step;
    return held_bytes + gradients +
           static_cast<bytes_t>(std::ceil(b.share * static_cast<double>(s.store_all.run->needed_bytes())));
  }

  /// Moves the gradients of parameters out of the arena of `r`.
  void evacuate(const executor& r) {
    at::NoGradGuard no_grad;
    for (const auto& p : module->parameters()) {
      auto& g = p.mutable_grad();
      if (g.defined() && r.owns(g)) g.set_data(g.clone());
    }
  }

  // --- plans -----------------------------------------------------------------------------------------------------------------

  /// A plan that needs at most `available` bytes.
  std::shared_ptr<const plan> plan_for(setup& s, bytes_t available, bytes_t held_bytes) {
    if (const auto found = s.plans.find(available); found != s.plans.end()) return found->second;
    auto best = std::make_shared<plan>();
    const auto begin = clock::now();
    if (s.store_all.run->needed_bytes() <= available)
      *best = s.store_all;
    else
      search(s, available, held_bytes, *best);
    best->plan_seconds = since(begin);
    std::ostringstream text;
    text << "planned for " << format_bytes(available) << " in " << format_seconds(best->plan_seconds) << ": "
         << best->found.recomputed << " recomputations, arena " << format_bytes(best->run->arena_bytes()) << ", outputs "
         << format_bytes(best->run->outside_bytes());
    log(text.str());
    s.plans[available] = best;
    return best;
  }

  /// The planner's memory model is cautious where operators work in place, and knows nothing of fragmentation; so several
  /// budgets are tried, each corrected by what the layout of the answer took.
  void search(const setup& s, bytes_t available, bytes_t held_bytes, plan& best) {
    const auto begin = clock::now();
    auto within = s.p.held_bytes() + available;
    constexpr int rounds = 4;
    for (int round = 0; round < rounds; ++round) {
      auto l = options.limits;
      l.seconds = std::max(0.1, (l.seconds - since(begin)) / (rounds - round));
      auto r = options.solver(s.p, within, l);
      if (!r.found()) {
        log("no schedule within " + format_bytes(within) + " (" + std::string(to_string(r.status)) + ")");
        if (best.run || within >= s.p.held_bytes() + 2 * available) break;
        within += available / 4;  // the layout may need less than the model says
        continue;
      }
      auto run = std::make_shared<execution_plan>(s.step, r.schedule, s.profiles);
      const auto need = run->needed_bytes();
      const auto excess = need - available;
      log("schedule of " + format_seconds(r.seconds) + " with " + std::to_string(r.recomputed) + " recomputations needs " +
          format_bytes(need) + " of " + format_bytes(available));
      if (excess <= 0 && (!best.run || r.seconds < best.found.seconds)) {
        best.run = run;
        best.steps = r.schedule;
        best.found = r;
      }
      if (excess <= 0 && (-excess < available / 50 || r.recomputed == 0)) break;
      within -= excess + (excess > 0 ? available / 200 : 0);
    }
    if (best.run) return;
    const auto least = leanest(s);
    if (least.run->needed_bytes() > available) fail_over_budget(s, least, held_bytes + available, held_bytes);
    best = least;
  }

  /// The plan of the smallest budget that bisection finds.
  plan leanest(const setup& s) const {
    plan least;
    least.found = smallest_budget(s.p, as_solver{options.solver}, options.limits);
    least.steps = least.found.schedule;
    least.run = std::make_shared<execution_plan>(s.step, least.steps, s.profiles);
    return least;
  }

  /// @throws over_budget always
  [[noreturn]] static void fail_over_budget(const setup& s, const plan& least, bytes_t asked, bytes_t held_bytes) {
    const auto store_all = s.store_all.run->needed_bytes();
    const auto smallest =
        held_bytes + std::min(store_all, std::max(least.run->needed_bytes(), least.found.peak - s.p.held_bytes()));
    const auto bound = std::min(smallest, held_bytes + least.found.budget_bound - s.p.held_bytes());
    std::ostringstream text;
    text << "budget of " << asked << " bytes (" << format_bytes(std::max<bytes_t>(0, asked))
         << "): no schedule fits. Smallest budget known to do: " << smallest << " bytes (" << format_bytes(smallest)
         << "); every budget is at least " << bound << " bytes; " << held_bytes
         << " bytes are held before the step begins; the plain step takes " << store_all << " bytes beyond that";
    throw over_budget(text.str(), asked, smallest, bound);
  }

  /// An executor for the use of the outputs that is expected.
  std::shared_ptr<runner> expected(const std::vector<at::Tensor>& inputs) {
    const auto s = setup_for(inputs);
    try {
      return acquire(s, inputs);
    } catch (const over_budget&) {  // what this loss uses may take more than all outputs, whose gradients lie outside the arena
      if (s->outputs->now().empty()) throw;
      s->outputs->expect_all();
      return acquire(setup_for(inputs), inputs);
    }
  }

  /// What is idle makes room.
  void release() {
    for (const auto& r : runners)
      if (!r->run->in_flight() && r->run->arena_in_use()) {
        r->run->leave_gradients_only();
        retired.push_back(r->run->memory());
      }
    std::erase_if(runners, [](const auto& r) { return !r->run->in_flight(); });
    std::erase_if(retired, [](const auto& a) { return a.expired(); });
  }

  /// An executor for a step that begins now.
  std::shared_ptr<runner> acquire(const std::shared_ptr<setup>& s, const std::vector<at::Tensor>& inputs) {
    std::erase_if(retired, [](const auto& a) { return a.expired(); });
    last_held = held(*s, inputs);
    const auto fixed = last_held.held();
    for (const auto& r : runners) {  // one that is ready
      if (r->kind != s || r->run->in_flight()) continue;
      const auto need = r->what->run->needed_bytes();
      const auto gradients = gradient_bytes(nullptr);
      if (fixed + gradients + need + other_bytes(r.get()) > budget_bytes(*s, fixed, gradients)) continue;
      if (r->run->arena_in_use()) evacuate(*r->run);
      if (r->run->arena_in_use()) continue;
      last_held.gradients = gradients;
      return r;
    }
    release();

    last_held.gradients = gradient_bytes(nullptr);
    const auto others = other_bytes(nullptr);
    // Gradients that stayed behind in an arena count there; a relative budget has them on top in any case.
    bytes_t behind = 0;
    for (const auto& a : retired)
      if (const auto memory = a.lock()) behind += memory->resident();
    const auto available = budget_bytes(*s, fixed, last_held.gradients + behind) - fixed - last_held.gradients - others;
    const auto held_bytes = fixed + last_held.gradients + others;
    if (available < 0) fail_over_budget(*s, leanest(*s), held_bytes + available, held_bytes);
    auto r = std::make_shared<runner>();
    r->kind = s;
    r->what = plan_for(*s, available, held_bytes);
    r->run = std::make_unique<executor>(r->what->run);
    runners.push_back(r);
    return r;
  }

  std::vector<at::Tensor> plain_or_planned(const std::vector<at::Tensor>& inputs);

  std::shared_ptr<::torch::nn::Module> module;
  forward_function plain;
  wrap_options options;
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<setup>> setups;  ///< by `key_of` and the use of the outputs
  std::map<std::string, std::shared_ptr<usage>> used;    ///< by `key_of`
  std::string first_inputs;
  std::vector<std::shared_ptr<runner>> runners;  ///< at most one of them idle
  std::vector<std::weak_ptr<arena>> retired;     ///< kept alive by gradients only
  std::shared_ptr<const setup> last_setup;
  std::shared_ptr<const plan> last_plan;
  torch::report last_held;
  int replaced = 0;          ///< captures in a row that a replaced tensor made out of date
  std::size_t verified = 0;  ///< steps that were compared
};

namespace {

/// A forward that can be run once more: plain, to compare the planned step with it, or by another plan.
class second_run {
 public:
  /// Notes what a forward begins with.
  /// @param parameters of the module
  /// @param written    what it may change, other than the generator
  second_run(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& written)
      : before_(generator_state::now()) {
    for (const auto* list : {&inputs, &parameters})
      for (const auto& t : *list)
        if (t.defined() && !t.is_inference() &&
            std::none_of(written.begin(), written.end(), [&](const auto& w) { return w.is_alias_of(t); }))
          read_.emplace_back(t.detach(), t._version());
    for (const auto& t : inputs) inputs_.push_back(t.defined() ? t.detach().requires_grad_(t.requires_grad()) : t);
    for (const auto& t : written) written_.push_back({t, t.detach().clone(), {}, t._version()});
  }

  /// Runs `forward` from there, and leaves everything as it is now.
  /// @throws c10::Error if what it reads has changed
  void run(const std::function<void(const std::vector<at::Tensor>&)>& forward) {
    for (const auto& [t, version] : read_)
      TORCH_CHECK(
          t._version() == version,
          "remat: the loss uses other outputs of a wrapped module than the last one, for which the forward runs once more, but "
          "an input or a parameter was modified by an inplace operation after it");
    const auto now = generator_state::now();
    std::vector<std::pair<at::Tensor, int64_t>> present;
    for (auto& w : written_) {
      present.emplace_back(w.tensor.detach().clone(), w.tensor._version());
      set(w.tensor, w.before, w.version);
    }
    before_.restore();
    forward(inputs_);
    after_ = generator_state::now();
    for (std::size_t i = 0; i < written_.size(); ++i) {
      written_[i].after = written_[i].tensor.detach().clone();
      set(written_[i].tensor, present[i].first, present[i].second);
    }
    now.restore();
  }
  void run_plain(const forward_function& plain) {
    run([&](const auto& inputs) {
      at::AutoGradMode grad_mode(true);
      returned_ = plain(inputs);
    });
  }

  /// @throws not_equal, with buffers and generator as the plain forward left them
  void compare(const program& step, const std::vector<at::Tensor>& outputs) const {
    for (std::size_t i = 0; i < step.results.size(); ++i)
      if (!same_bits(outputs[step.results[i]], returned_.at(i))) fail("output " + std::to_string(i));
    for (const auto& w : written_)
      if (!same_bits(w.tensor, w.after)) fail("a buffer");
    if (!(generator_state::now() == after_)) fail("the state of the generator");
  }

  /// Runs the plain backward, and puts the generator back.
  /// @return gradients of `parameters`, then of the inputs that require one
  ::torch::autograd::variable_list backward(const program& step, const std::vector<at::Tensor>& incoming,
                                            std::vector<at::Tensor> parameters) {
    std::vector<at::Tensor> roots, given;
    std::set<std::size_t> taken;
    for (std::size_t i = 0; i < step.results.size(); ++i) {
      const auto k = step.results[i];
      if (!incoming[k].defined() || !taken.insert(k).second) continue;
      roots.push_back(returned_[i]);
      given.push_back(incoming[k]);
    }
    const without_hooks hooks(parameters);
    for (const auto& t : inputs_)
      if (t.defined() && t.requires_grad()) parameters.push_back(t);
    const auto now = generator_state::now();
    auto gradients = ::torch::autograd::grad(roots, parameters, given, std::nullopt, false, true);
    after_ = generator_state::now();
    now.restore();
    returned_.clear();
    return gradients;
  }
  /// @throws not_equal
  void compare(const ::torch::autograd::variable_list& expected, const ::torch::autograd::variable_list& gradients) const {
    for (std::size_t i = 0; i < gradients.size(); ++i)
      if (!same_bits(gradients[i], expected[i])) fail("gradient " + std::to_string(i) + " (parameters, then inputs)");
    if (!(generator_state::now() == after_)) fail("the state of the generator after the backward");
  }

 private:
  static void set(const at::Tensor& t, const at::Tensor& contents, int64_t version) {
    at::NoGradGuard no_grad;
    t.detach().copy_(contents);
    auto counter = t.unsafeGetTensorImpl()->version_counter();
    counter.set_version(version);
  }
  [[noreturn]] void fail(const std::string& what) const {
    for (const auto& w : written_) set(w.tensor, w.after, w.tensor._version());
    after_.restore();
    throw not_equal("remat: " + what +
                    " of the planned step differs from the plain one; the plan may be out of date: invalidate()");
  }

  struct entry {
    at::Tensor tensor, before, after;
    int64_t version;
  };
  std::vector<at::Tensor> inputs_, returned_;
  std::vector<std::pair<at::Tensor, int64_t>> read_;  ///< and its version
  std::vector<entry> written_;
  generator_state before_, after_;
};

/// The backward of one forward.
class plan_node final : public ::torch::autograd::Node {
 public:
  using replanner = std::function<std::shared_ptr<runner>(const std::vector<at::Tensor>&)>;

  /// @param parameters that may get a gradient
  /// @param beside     runs the forward again, if that may be needed
  /// @param verify     compares with the plain step, which has begun
  /// @param replan     gives an executor for what the loss has been seen to use
  plan_node(std::shared_ptr<runner> r, std::vector<watched> w, std::vector<at::Tensor> parameters,
            const std::vector<at::Tensor>& inputs, std::unique_ptr<second_run> beside, bool verify, replanner replan)
      : runner_(std::move(r)),
        watched_(std::move(w)),
        parameters_(std::move(parameters)),
        beside_(std::move(beside)),
        replan_(std::move(replan)),
        verify_(verify) {
    ::torch::autograd::edge_list edges;
    for (const auto& p : parameters_) edges.push_back(::torch::autograd::impl::gradient_edge(p));
    for (const auto& t : inputs)
      if (t.defined() && t.requires_grad()) edges.push_back(::torch::autograd::impl::gradient_edge(t));
    set_next_edges(std::move(edges));
  }
  ~plan_node() override { give_back(); }

  std::string name() const override { return "RematBackward"; }
  void release_variables() override { give_back(); }

 protected:
  ::torch::autograd::variable_list apply(::torch::autograd::variable_list&& incoming) override {
    if (!runner_) {
      if (ran_kept_) throw not_supported("remat: a wrapped module runs one backward per forward, also with retain_graph=true");
      TORCH_CHECK(false, ::torch::autograd::ERR_BACKWARD_TWICE);
    }
    if (at::GradMode::is_enabled())
      throw not_supported("remat: no graph of the gradients (create_graph=true) of a wrapped module");
    if (at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA))
      throw not_supported("remat: the backward of a wrapped module must not run under autocast; leave it after the forward");
    for (const auto& w : watched_)
      TORCH_CHECK(
          w.tensor._version() == w.version, "remat: ", w.what,
          " is needed by the backward of a wrapped module, but was modified by an inplace operation after the forward: it is "
          "at version ",
          w.tensor._version(), "; expected version ", w.version);
    ran_kept_ = ::torch::autograd::get_current_graph_task_keep_graph();
    const auto r = std::exchange(runner_, nullptr);
    const auto beside = std::exchange(beside_, nullptr);
    watched_.clear();
    const auto& step = *r->kind->step;
    std::vector<at::Tensor> given;
    std::vector<output_use> uses;
    std::size_t next = 0;
    for (std::size_t i = 0; i < step.differentiable.size(); ++i) {
      given.push_back(step.differentiable[i] ? std::move(incoming[next++]) : at::Tensor());
      uses.push_back({given[i].defined(), {}});
      if (!given[i].defined() || step.output_grads[i] == none) continue;
      const auto& planned = step.views[step.output_grads[i]].strides;
      if (given[i].strides() != at::IntArrayRef(planned) && given[i].is_non_overlapping_and_dense())
        uses[i].strides = given[i].strides().vec();
    }
    incoming.clear();
    ::torch::autograd::variable_list result;
    ::torch::autograd::variable_list expected;
    if (verify_) expected = beside->backward(step, given, parameters_);
    if (r->kind->outputs->learn(step, uses) || !beside) {
      result = planned(*r, given);
    } else {  // the forward once more, by a plan for this use of the outputs
      r->run->reset();
      std::shared_ptr<runner> other;
      beside->run([&](const auto& inputs) {
        other = replan_(inputs);
        other->run->forward(inputs);
      });
      result = planned(*other, given);
    }
    if (verify_) beside->compare(expected, result);
    for (std::size_t i = 0; i < result.size(); ++i)
      if (!task_should_compute_output(i))
        result[i].reset();
      else if (!result[i].defined())
        next_edges()[i] = {};  // as if it were not there: no hook is called with nothing
    return result;
  }

 private:
  ::torch::autograd::variable_list planned(runner& r, const std::vector<at::Tensor>& given) {
    const auto& step = *r.kind->step;
    executor::gradients g;
    try {
      g = r.run->backward(given);
    } catch (const plan_broken&) {
      r.kind->broken = true;
      throw;
    }
    // What no used output leads to has no gradient, as in eager mode.
    const auto reached = [&](const std::vector<bool>& sources) {
      for (std::size_t i = 0; i < sources.size(); ++i)
        if (sources[i] && given[i].defined()) return true;
      return false;
    };
    ::torch::autograd::variable_list result(num_outputs());
    std::map<const c10::TensorImpl*, std::size_t> place;
    for (std::size_t i = 0; i < parameters_.size(); ++i) place[parameters_[i].unsafeGetTensorImpl()] = i;
    for (std::size_t i = 0; i < step.parameters.size(); ++i)
      if (reached(step.parameter_sources[i]))
        result[place.at(step.parameters[i].unsafeGetTensorImpl())] = std::move(g.parameters[i]);
    auto at = parameters_.size();
    for (std::size_t i = 0; i < step.input_grads.size(); ++i)
      if (!step.input_sources[i].empty()) {
        if (step.input_grads[i] != none && reached(step.input_sources[i])) result[at] = std::move(g.inputs[i]);
        ++at;
      }
    return result;
  }
  void give_back() {
    if (runner_) std::exchange(runner_, nullptr)->run->reset();
    watched_.clear();
    beside_.reset();
  }

  std::shared_ptr<runner> runner_;  ///< empty once it ran
  std::vector<watched> watched_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<second_run> beside_;
  replanner replan_;
  bool verify_ = false, ran_kept_ = false;
};

}  // namespace

std::vector<at::Tensor> plan_runner::state::plain_or_planned(const std::vector<at::Tensor>& inputs) {
  const bool recorded = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake);
  auto wants = [](const auto& list) {
    return std::any_of(list.begin(), list.end(), [](const auto& t) { return t.defined() && t.requires_grad(); });
  };
  if (!at::GradMode::is_enabled() || recorded || (!wants(module->parameters()) && !wants(inputs))) return plain(inputs);

  std::lock_guard lock(mutex);
  const auto r = expected(inputs);
  const auto s = r->kind;
  last_setup = s;
  last_plan = r->what;
  const auto& step = *s->step;
  const bool verify = verified < options.verify;
  std::unique_ptr<second_run> beside;
  if (verify || !s->outputs->settled() || std::count(step.differentiable.begin(), step.differentiable.end(), true) > 1) {
    auto written = tensors(distinct(module->named_buffers()));
    for (const auto& w : step.written) {
      const auto& t = w.tensor.defined() ? w.tensor : inputs[w.input];
      if (std::none_of(written.begin(), written.end(), [&](const auto& x) { return x.is_same(t); })) written.push_back(t);
    }
    beside = std::make_unique<second_run>(inputs, tensors(distinct(module->named_parameters())), written);
  }
  if (verify) {
    ++verified;
    beside->run_plain(plain);
  }
  std::vector<at::Tensor> outputs;
  try {
    outputs = r->run->forward(inputs);
    if (verify) beside->compare(step, outputs);
  } catch (const plan_broken&) {
    s->broken = true;
    throw;
  } catch (const not_equal&) {
    r->run->reset();
    throw;
  }
  std::vector<watched> watch;
  const auto& read = r->what->run->read_in_backward();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& view = step.views[step.outputs[i]];
    const auto& value = step.values[view.value];
    // An input that is returned is the input itself.
    if (view.whole && value.from == role::input && !step.differentiable[i]) outputs[i] = inputs[value.position];
    // A write to memory that is shared would change the history of all who share it.
    const bool shared = value.from != role::internal || std::any_of(outputs.begin(), outputs.end(), [&](const auto& o) {
                          return !o.is_same(outputs[i]) && o.is_alias_of(outputs[i]);
                        });
    if (read.outputs[i] || (shared && step.differentiable[i]))
      watch.push_back({outputs[i].detach(), outputs[i]._version(), "output " + std::to_string(i)});
  }
  for (auto v : read.outside) {
    const auto& value = step.values[v];
    const auto& t = value.from == role::input ? inputs[value.position] : value.tensor;
    if (value.from == role::constant || !t.defined() || t.is_inference()) continue;
    const char* what = value.from == role::parameter ? "parameter " : value.from == role::buffer ? "buffer " : "";
    watch.push_back({t.detach(), t._version(), what + value.name});
  }
  auto leaves = tensors(distinct(module->named_parameters()));
  std::erase_if(leaves, [](const auto& p) { return !p.requires_grad(); });
  const auto node = c10::make_intrusive<plan_node>(r, std::move(watch), std::move(leaves), inputs, std::move(beside), verify,
                                                   [self = shared_from_this()](const std::vector<at::Tensor>& again) {
                                                     std::lock_guard held(self->mutex);
                                                     return self->expected(again);
                                                   });
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (step.differentiable[i]) ::torch::autograd::set_history(outputs[i], node);
  std::vector<at::Tensor> returned;
  for (auto i : step.results) returned.push_back(outputs[i]);
  return returned;
}

plan_runner::plan_runner(std::shared_ptr<::torch::nn::Module> module, forward_function forward, wrap_options options)
    : state_(std::make_shared<state>(std::move(module), std::move(forward), std::move(options))) {}
plan_runner::~plan_runner() = default;

std::vector<at::Tensor> plan_runner::forward(const std::vector<at::Tensor>& inputs) { return state_->plain_or_planned(inputs); }

void plan_runner::prepare(const std::vector<at::Tensor>& inputs) {
  std::lock_guard lock(state_->mutex);
  const auto s = state_->setup_for(inputs);
  const auto r = state_->acquire(s, inputs);
  state_->last_setup = s;
  state_->last_plan = r->what;
}

void plan_runner::invalidate() {
  std::lock_guard lock(state_->mutex);
  state_->release();
  state_->setups.clear();
  state_->used.clear();
}

void plan_runner::release() {
  std::lock_guard lock(state_->mutex);
  state_->release();
}

torch::report plan_runner::report() const {
  const auto& x = *state_;
  if (!x.last_plan) throw error("no step has been planned yet");
  auto r = x.last_held;
  const auto& run = *x.last_plan->run;
  const auto& found = x.last_plan->found;
  const auto fixed = r.held() - r.gradients;
  r.budget = x.budget_bytes(*x.last_setup, fixed, r.gradients);
  r.left = r.budget - r.held();
  r.arena = run.arena_bytes();
  r.live_peak = run.live_peak();
  r.outputs = run.outside_bytes();
  r.store_all = x.last_setup->store_all.run->needed_bytes();
  r.planned_peak = found.peak;
  r.step_seconds = found.seconds;
  r.store_all_seconds = x.last_setup->store_all.found.seconds;
  r.bound = found.bound;
  r.gap = found.gap();
  r.capture_seconds = x.last_setup->capture_seconds;
  r.profile_seconds = x.last_setup->profiles.elapsed;
  r.plan_seconds = x.last_plan->plan_seconds;
  r.operations = run.operations();
  r.recomputed = run.recomputed();
  for (const auto& a : x.runners) r.unplanned += a->run->unplanned();
  r.solver = found.solver;
  return r;
}

const problem& plan_runner::planning_problem() const {
  if (!state_->last_setup) throw error("no step has been planned yet");
  return state_->last_setup->p;
}
const schedule& plan_runner::planned_schedule() const {
  if (!state_->last_plan) throw error("no step has been planned yet");
  return state_->last_plan->steps;
}

std::string report::text() const {
  std::ostringstream out;
  auto row = [&](const char* name, const std::string& value) {
    out << name << std::string(28 - std::string(name).size(), ' ') << value << "\n";
  };
  row("budget", format_bytes(budget));
  row("  parameters", format_bytes(parameters));
  row("  buffers", format_bytes(buffers));
  row("  inputs", format_bytes(inputs));
  row("  constants", format_bytes(constants));
  row("  optimizer", format_bytes(optimizer));
  row("  gradients of before", format_bytes(gradients));
  row("  left for activations", format_bytes(left));
  row("arena", format_bytes(arena));
  row("  alive at most", format_bytes(live_peak));
  row("outputs", format_bytes(outputs));
  row("plain step: arena + outputs", format_bytes(store_all));
  row("operations", std::to_string(operations) + ", of these recomputed " + std::to_string(recomputed));
  row("predicted time",
      format_seconds(step_seconds) + ", plain " + format_seconds(store_all_seconds) + ", bound " + format_seconds(bound));
  row("solver", solver + " in " + format_seconds(plan_seconds));
  row("capture, profile", format_seconds(capture_seconds) + ", " + format_seconds(profile_seconds));
  return out.str();
}

}  // namespace remat::torch
