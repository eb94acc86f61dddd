// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/bytes.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/paged_memory.hpp>
#include <remat/pytorch/session.hpp>

#include "../clock.hpp"
#include "../device/home.hpp"
#include "../key.hpp"
#include "../plan/planned.hpp"
#include "../plan/search.hpp"
#include "../program/views.hpp"
#include "../run/step_node.hpp"
#include "../second_run.hpp"
#include "../solver.hpp"
#include "accounts.hpp"
#include "background.hpp"
#include "kinds.hpp"

namespace remat::pytorch {
namespace {

/// Each tensor once, by its name.
std::vector<named_tensor> distinct(std::vector<named_tensor> named) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(named, [&](const auto& n) { return !n.tensor.defined() || !seen.insert(n.tensor.unsafeGetTensorImpl()).second; });
  return named;
}

}  // namespace

plan_solver default_solver() { return solve_by_default; }

struct session::state : std::enable_shared_from_this<state> {
  state(std::shared_ptr<model> m, wrap_options o) : trained(std::move(m)), options(std::move(o)) {
    if (options.most < 0) throw bad_option("wrap_options.most must be >= 0, got " + std::to_string(options.most));
    if (options.optimizer < 0) throw bad_option("wrap_options.optimizer must be >= 0, got " + std::to_string(options.optimizer));
    if (!options.solver) throw bad_option("wrap_options.solver is empty");
    if (options.most_shapes < 1) throw bad_option("wrap_options.most_shapes must be >= 1, got 0");
    if (!options.watch) options.watch = [](const progress&) { return control::go_on; };
    options.limits.validate();
    const auto& far = options.far;
    if (far.memory && (!far.out || !far.in)) throw bad_option("wrap_options.far has a memory without links");
    if (far.memory && options.device) throw bad_option("wrap_options.far: costs of an estimated device, and copies of this one");
    if (options.fetched && options.device)
      throw bad_option("wrap_options.fetched: costs of an estimated device, and copies of this one");
    if (options.device) options.cache = plan_cache("");  // whose plans are for measured costs
    rates_of_weights_ = far.rates;
    placing_allocator::install();
  }

  /// Those of all sessions.
  struct everybody {
    std::mutex mutex;
    std::vector<std::weak_ptr<state>> states;
  };
  static everybody& all() {
    static everybody found;
    return found;
  }

  void log(const std::string& text) const {
    if (options.log) options.log(text);
  }

  // --- kinds of inputs -------------------------------------------------------------------------------------------------------

  const std::string& key_of(const invocation& call, const std::vector<at::Tensor>& inputs) {
    return keys_.of(call, inputs, signature, parameters, buffers);
  }

  /// What losses have made of the outputs of such calls.
  std::shared_ptr<usage> usage_of(const std::string& k) {
    if (last_used_ == nullptr || last_used_->first != k) {
      last_used_ = &*used.try_emplace(k).first;
      if (!last_used_->second) last_used_->second = std::make_shared<usage>(used.size(), options.gradients_leave);
    }
    return last_used_->second;
  }

  static std::string text(const usage& outputs) {
    key k;
    k << outputs.number;
    for (const auto& u : outputs.now()) k << u.used << at::IntArrayRef(u.strides);
    return k.bytes();
  }

  /// Of one key, programs for several answers to what the forward asks; the result is that of the one for `inputs`.
  std::string path_of(const std::string& base, const std::vector<at::Tensor>& inputs) const {
    constexpr int most = 8;
    auto path = base;
    for (int other = 1;; ++other) {
      const auto found = setups.find(path);
      if (found == setups.end()) return path;
      const auto& s = *found->second;
      if (!s.asked || s.asked->same_answers(*s.tensors, inputs)) return path;
      if (other == most)
        throw cannot_capture(s.asked->last() + " gives the forward a number that its inputs tell; it was another one in " +
                             std::to_string(most) + " captures. Compute it outside of the module and pass it as an argument");
      path = base + ";other answers " + std::to_string(other);
    }
  }

  std::shared_ptr<setup> setup_for(const invocation& call, const std::vector<at::Tensor>& inputs) {
    const auto outputs = usage_of(key_of(call, inputs));
    if (outputs->without_gradient) throw no_gradient();
    const auto uses = outputs->now();
    const auto k = path_of(text(*outputs), inputs);
    if (const auto found = setups.find(k); found != setups.end()) {
      const auto s = found->second;
      if (!s->broken && !s->tensors->out_of_date()) {
        replaced = 0;
        s->last_used = ++clock_;
        return s;
      }
      forget(s);
      setups.erase(found);
      if (s->broken) {
        forget_profiles();
        options.profile.cache.clear();
      } else if (++replaced > 3) {
        throw cannot_capture(
            "the module puts a new tensor in the place of one of its members in every forward; register it as a "
            "buffer and write into it");
      }
      log(s->broken ? "an operator uses memory in another way than it did: measured again"
                    : "a tensor of the module that is no parameter and no buffer has been replaced: captured again");
    }
    std::shared_ptr<setup> s;
    try {
      s = make_setup(call, inputs, uses);
    } catch (const no_gradient&) {
      outputs->without_gradient = true;
      throw;
    }
    s->outputs = outputs;
    s->last_used = ++clock_;
    setups.emplace(k, s);
    while (setups.size() > options.most_shapes) {
      const auto oldest = std::min_element(
          setups.begin(), setups.end(), [](const auto& a, const auto& b) { return a.second->last_used < b.second->last_used; });
      forget(oldest->second);
      setups.erase(oldest);
    }
    return s;
  }

  /// The kind of step for such inputs and the gradients there are.
  /// @param graphs of this step that lead to the parameters already: one in its backward
  std::shared_ptr<setup> kind_for(const invocation& call, const std::vector<at::Tensor>& inputs, std::size_t graphs = 0) {
    const auto s = setup_for(call, inputs);
    const auto variant = [&](std::shared_ptr<setup>& v, program (*of)(const program&), const char* what) {
      if (!v || v->broken) v = make_variant(*s, of(*s->step), what);
      v->last_used = s->last_used;
      return v;
    };
    if (all_only_add(s->trained)) return variant(s->adding, accumulating, ", gradients accumulate");
    if (s->outputs->gradients_leave() && may_be_given(s->trained, graphs)) {
      const auto v = variant(s->giving, pytorch::giving, ", gradients leave");
      v->given_early = true;
      return v;
    }
    return s;
  }

  std::shared_ptr<setup> make_variant(const setup& s, program step, const char* what) {
    release();
    auto a = std::make_shared<setup>();
    a->outputs = s.outputs;
    a->parameters = s.parameters;
    a->buffers = s.buffers;
    a->trained = s.trained;
    a->place = s.place;
    a->note = s.note;
    a->inputs = s.inputs + what;
    a->step = std::make_shared<const program>(std::move(step));
    a->tensors = std::make_unique<bindings>(s.tensors->followed_by(a->step));
    complete(*a);
    return a;
  }

  std::shared_ptr<setup> make_setup(const invocation& call, const std::vector<at::Tensor>& inputs,
                                    const std::vector<output_use>& uses) {
    release();  // capture and measurements take memory of their own
    auto s = std::make_shared<setup>();
    const auto begin = clock::now();
    std::vector<std::string> names;
    for (const auto* list : {&parameters, &buffers})
      for (const auto& n : *list) names.push_back(n.name);
    s->inputs = describe(inputs);
    s->parameters = tensors_of(parameters);
    s->buffers = tensors_of(buffers);
    auto captured = capture(call.forward, inputs, s->parameters, s->buffers, names, uses);
    s->step = captured.step;
    for (auto i : captured.reached) s->trained.push_back(s->parameters[i]);
    s->tensors = std::make_unique<bindings>(std::move(captured.tensors));
    s->asked = std::move(captured.asked);
    s->note = call.note;
    for (auto slot : s->step->parameters)
      s->place.push_back(static_cast<std::size_t>(
          std::find_if(s->trained.begin(), s->trained.end(),
                       [&](const auto& t) { return t.is_same(s->parameters[s->step->slots[slot].position]); }) -
          s->trained.begin()));
    s->capture_seconds = since(begin);
    complete(*s);
    return s;
  }

  static pytorch::device& device_for(const setup& s) { return device_of(device_of_step(*s.step)); }

  /// Measures a captured step.
  void complete(setup& s) {
    auto& on = device_for(s);
    for (const auto& n : s.step->nodes)
      for (auto v : n.outputs)
        if (const auto made = s.step->values[v].device; made != on.which())
          throw cannot_capture(n.name + " makes a tensor on " + made.str() + " in a step on " + on.which().str() +
                               "; make it outside of the module, or on the device");
    s.graph = graph_hash(*s.step);
    const auto relative = sibling(s);
    s.profiles = options.device ? estimate(*s.step, options.device)
                 : relative     ? profile_like(*s.step, *relative->step, relative->profiles)
                                : profile(*s.step, options.profile);
    s.far = options.far;
    auto& rates = options.far.rates;
    constexpr bytes_t worth_it = 1 << 20;
    if (s.far.memory && !rates && s.far.memory->limit() >= worth_it) rates = measure_rates(on, s.far);
    s.in_place =
        to_problem(*s.step, s.profiles.seconds(), s.profiles.workspace(), trained->name(), s.far.memory ? rates : std::nullopt);
    const auto [fetched, weights] = fetched_by(s);
    s.p = weights.empty() ? s.in_place : fetching_problem(s, fetched, weights);
    s.parameter_bytes = unpaged_bytes(other_than(weights, s.parameters));
    s.buffer_bytes = unpaged_bytes(other_than(weights, s.buffers));
    for (const auto& c : s.step->constants) s.constants += static_cast<bytes_t>(c.size());
    // Copies, as long as the forward may have to run once more.
    for (const auto& b : s.buffers) s.buffer_bytes += static_cast<bytes_t>(b.nbytes());
    for (const auto& w : s.step->written)
      if (const auto& slot = s.step->slots[w.slot]; slot.from == role::input) s.buffer_bytes += s.step->values[slot.value].bytes;
    bytes_t in_place = 0;
    for (const auto& t : weights) in_place += static_cast<bytes_t>(t.storage().nbytes());
    const auto all = std::make_shared<plan>();
    all->steps = store_all_schedule(s.in_place);
    all->run = std::make_shared<execution_plan>(s.step, all->steps, s.profiles, layout_options(), in_place);
    all->found = as_result(s.in_place, all->steps);
    all->found.solver = "store_all";
    all->found.bound = all->found.seconds;
    s.store_all = all;
    std::ostringstream text;
    text << "captured " << s.inputs << ": " << s.step->nodes.size() << " operations (" << s.profiles.distinct << " different, "
         << s.profiles.measured << " measured) in " << format_seconds(s.capture_seconds) << " + "
         << format_seconds(s.profiles.elapsed) << "; plain step needs " << format_bytes(s.store_all->run->needed_bytes());
    log(text.str());
    memory.largest_plain = std::max(memory.largest_plain, s.store_all->run->needed_bytes());
  }

  /// The values that steps fetch, and their tensors.
  std::pair<std::vector<bool>, std::vector<at::Tensor>> fetched_by(const setup& s) const {
    std::pair<std::vector<bool>, std::vector<at::Tensor>> found;
    if (!options.fetched) return found;
    auto& [values, weights] = found;
    values = fetchable(*s.step);
    for (index_t v = 0; v < values.size(); ++v) {
      if (!values[v]) continue;
      const auto& t = (*s.tensors)[s.step->values[v].slot];
      values[v] = options.fetched(t);
      if (values[v]) weights.push_back(t);
    }
    return found;
  }
  static std::vector<at::Tensor> other_than(const std::vector<at::Tensor>& weights, std::vector<at::Tensor> list) {
    std::erase_if(list, [&](const auto& t) {
      return std::any_of(weights.begin(), weights.end(), [&](const auto& w) { return w.is_alias_of(t); });
    });
    return list;
  }
  /// The problem in which weights are fetched.
  problem fetching_problem(setup& s, const std::vector<bool>& fetched, const std::vector<at::Tensor>& weights) {
    if (!options.far.in) options.far.in = host_link();
    s.far.in = options.far.in;
    if (!rates_of_weights_) rates_of_weights_ = measure_fetches(device_for(s), *s.far.in, weights);
    auto rates = *rates_of_weights_;
    const auto& others = s.in_place.copies();
    if (others) rates = {others->to_host, std::min(others->to_device, rates.to_device), std::max(others->latency, rates.latency)};
    auto p = to_problem(*s.step, s.profiles.seconds(), s.profiles.workspace(), trained->name(), rates, fetched);
    return others ? p : without_sends(p);
  }

  std::vector<std::shared_ptr<setup>> kinds() const {
    std::vector<std::shared_ptr<setup>> all;
    for (const auto& [k, s] : setups)
      for (const auto& x : {s, s->adding, s->giving})
        if (x) all.push_back(x);
    return all;
  }

  /// Of the steps of the same graph that have been planned, the one whose size is next.
  std::shared_ptr<const setup> sibling(const setup& s) const {
    std::shared_ptr<const setup> nearest;
    if (options.new_shapes != new_shape::nearest) return nearest;
    auto size = [](const setup& x) {
      double sum = 0;
      for (const auto& v : x.step->values) sum += static_cast<double>(v.bytes);
      return sum;
    };
    const auto own = size(s);
    double best = 0;
    for (const auto& other : kinds()) {
      if (other->graph != s.graph || other->plans.empty() || other->broken) continue;
      const auto theirs = size(*other);
      const auto distance = std::abs(std::log(theirs / own)) + (theirs < own ? 10 : 0);  // decisions for more suit less
      if (!nearest || distance < best) nearest = other, best = distance;
    }
    return nearest;
  }

  /// Looks at the model as it is now.
  void look() {
    if (looked_ && !trained->changed()) return;
    looked_ = false;
    signature = trained->signature();
    parameters = distinct(trained->parameters());
    buffers = distinct(trained->buffers());
    looked_ = true;
  }

  /// Lets go of the executors for `s` that are idle.
  void forget(const std::shared_ptr<setup>& s) {
    memory.let_go([&](const runner& r) {
      return (r.kind == s || r.kind == s->adding || r.kind == s->giving) && !r.run->in_flight() && !r.run->arena_in_use();
    });
  }

  // --- plans -----------------------------------------------------------------------------------------------------------------

  search_options searching() const {
    return {options.solver, options.solver_name, options.cache,
            options.limits, options.watch,       [this](const std::string& text) { log(text); }};
  }

  /// A plan that needs at most `available` bytes.
  std::shared_ptr<const plan> plan_for(const std::shared_ptr<setup>& s, bytes_t available, bytes_t held_bytes) {
    for (auto p = s->plans.lower_bound(available); p != s->plans.end(); ++p)  // made for no less, and fits
      if (p->second->run->needed_bytes() <= available) return p->second;
    std::shared_ptr<const plan> best;
    if (s->store_all->run->needed_bytes() <= available)
      best = s->store_all;
    else if (const auto relative = sibling(*s)) {
      best = take_over(*s, available, *relative);
      if (!best || best->run->needed_bytes() < available / 10 * 9)  // there is room for better decisions
        if (const auto other = glance(*s, available, searching()); other && (!best || other->found.seconds < best->found.seconds))
          best = other;
    }
    if (!best) best = search(*s, available, held_bytes, searching());
    announce(*best, available);
    s->plans[available] = best;
    return best;
  }
  void announce(const plan& p, bytes_t available) const {
    std::ostringstream text;
    text << "planned for " << format_bytes(available) << " in " << format_seconds(p.plan_seconds) << ": " << p.found.recomputed
         << " recomputations, arena " << format_bytes(p.run->arena_bytes()) << ", outputs "
         << format_bytes(p.run->outside_bytes());
    log(text.str());
  }

  /// An executor for the use of the outputs that is expected.
  std::shared_ptr<runner> expected(const invocation& call, const std::vector<at::Tensor>& inputs, std::size_t graphs = 0) {
    const auto s = kind_for(call, inputs, graphs);
    try {
      return acquire(s, inputs);
    } catch (const over_budget&) {  // what this loss uses may take more than all outputs, whose gradients lie outside the arena
      if (s->outputs->now().empty()) throw;
      s->outputs->expect_all();
      return acquire(kind_for(call, inputs, graphs), inputs);
    }
  }

  /// Looks for a better plan than one that was taken over, beside the steps.
  void refine(const runner& r, bytes_t held_bytes) {
    if (r.what->taken_from.empty() || r.what->superseded || r.steps < 2) return;
    worker.start([this, s = r.kind, old = r.what, available = r.available, held_bytes] {
      auto o = searching();
      o.watch = [this](const progress&) { return worker.ending() ? control::stop : control::go_on; };
      std::shared_ptr<const plan> found;
      try {
        found = search(*s, available, held_bytes, o);
      } catch (const std::exception& e) {
        log(std::string("no better plan beside the steps: ") + e.what());
      }
      std::lock_guard lock(mutex);
      if (!found || found->found.seconds >= old->found.seconds) found = settled(*old);
      announce(*found, available);
      s->plans[available] = found;
      old->superseded = true;
    });
  }
  /// The same plan, not to be looked at again.
  static std::shared_ptr<const plan> settled(const plan& p) {
    auto same = std::make_shared<plan>();
    same->run = p.run;
    same->steps = p.steps;
    same->found = p.found;
    same->plan_seconds = p.plan_seconds;
    return same;
  }

  /// What is idle makes room.
  void release() { memory.release(); }

  /// An executor for a step that begins now.
  std::shared_ptr<runner> acquire(const std::shared_ptr<setup>& s, const std::vector<at::Tensor>& inputs) {
    memory.sweep();
    last_held = memory.held(*s, inputs);
    const auto fixed = last_held.held();
    for (const auto& r : memory.runners) {  // one that is ready
      if (r->kind != s || r->run->in_flight() || r->what->superseded) continue;
      const auto need = r->what->run->needed_bytes();
      const auto gradients = memory.gradients();
      if (fixed + gradients + need + memory.others(r.get()) > memory.budget(fixed, gradients)) continue;
      if (r->run->arena_in_use()) memory.evacuate(*r->run);
      if (r->run->arena_in_use()) continue;
      last_held.gradients = gradients;
      return r;
    }
    release();
    const auto [available, held_bytes] = room(*s);
    auto r = std::make_shared<runner>();
    r->kind = s;
    r->available = available;
    r->what = plan_for(s, available, held_bytes);
    try {
      r->run = std::make_unique<executor>(r->what->run, *s->tensors, device_for(*s), s->far);
    } catch (const out_of_memory& e) {
      const bool shared =
          std::any_of(memory.runners.begin(), memory.runners.end(), [](const auto& x) { return x->what->run->far_bytes() > 0; });
      if (!shared || r->what->run->far_bytes() == 0 || e.tier != s->far.memory->name()) throw;
      r->what = without_copies(*s, available, held_bytes, e);
      r->run = std::make_unique<executor>(r->what->run, *s->tensors, device_for(*s), s->far);
    }
    memory.runners.push_back(r);
    return r;
  }
  /// A plan for a step beside others that have taken the far memory.
  /// @throws out_of_memory as it was, if there is none
  std::shared_ptr<const plan> without_copies(const setup& s, bytes_t available, bytes_t held_bytes, const out_of_memory& why) {
    auto& known = s.plans_without_copies[available];
    if (known) return known;
    log(why.what() + std::string(", as other steps are in flight; this one is planned without"));
    auto o = searching();
    o.copies = false;
    try {
      known = search(s, available, held_bytes, o);
    } catch (const over_budget&) {
      throw why;
    }
    announce(*known, available);
    return known;
  }

  /// Bytes that a step may take, and those that are held meanwhile.
  std::pair<bytes_t, bytes_t> room(const setup& s) {
    const auto fixed = last_held.held() - last_held.gradients;
    last_held.gradients = memory.gradients();
    const auto others = memory.others();
    // Gradients that stayed behind in an arena count there; a relative budget has them on top in any case.
    const auto most = memory.budget(fixed, last_held.gradients + memory.behind());
    const auto available = most - fixed - last_held.gradients - others;
    const auto held_bytes = fixed + last_held.gradients + others;
    if (available < 0) fail_over_budget(s, *leanest(s, searching()), held_bytes + available, held_bytes);
    return {available, held_bytes};
  }

  std::vector<at::Tensor> forward(const invocation& call, const std::vector<at::Tensor>& inputs, std::shared_ptr<void>* note);

  pytorch::report report(const setup& s, const plan& p) const;

  std::shared_ptr<model> trained;
  wrap_options options;
  std::mutex mutex;
  std::vector<named_tensor> parameters, buffers;  ///< of the model, each once, when `look` was called last
  std::string signature;                          ///< of the model, then
  bool looked_ = false;
  std::unordered_map<std::string, std::shared_ptr<setup>> setups;  ///< by the use of the outputs
  std::unordered_map<std::string, std::shared_ptr<usage>> used;    ///< by `key_of`
  decltype(used)::value_type* last_used_ = nullptr;
  call_keys keys_;
  std::uint64_t clock_ = 0;
  accounts memory{options, parameters};
  std::shared_ptr<const setup> last_setup;
  std::shared_ptr<const plan> last_plan;
  pytorch::report last_held;
  std::optional<copy_rates> rates_of_weights_;
  background worker;
  int replaced = 0;          ///< captures in a row that a replaced tensor made out of date
  std::size_t verified = 0;  ///< steps that were compared
};

std::vector<at::Tensor> session::state::forward(const invocation& call, const std::vector<at::Tensor>& inputs,
                                                std::shared_ptr<void>* note) {
  if (note != nullptr) *note = call.note;
  const bool recorded = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake);
  if (!at::GradMode::is_enabled() || recorded) return call.forward(inputs);

  if (options.device) throw not_supported("plans for a device that is estimated are not run");
  std::unique_lock lock(mutex);
  look();
  if (std::none_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.tensor.requires_grad(); }) &&
      std::none_of(inputs.begin(), inputs.end(), [](const auto& t) { return t.defined() && t.requires_grad(); })) {
    lock.unlock();
    return call.forward(inputs);
  }
  if ((options.new_shapes == new_shape::plain || options.new_shapes == new_shape::error) && !used.empty() &&
      !used.count(key_of(call, inputs))) {
    if (options.new_shapes == new_shape::error)
      throw unexpected_inputs("wrapped for " + setups.begin()->second->inputs + ", called with " + describe(inputs) +
                              " (or in another mode); wrap_options::new_shapes forbids a new plan");
    lock.unlock();
    return call.forward(inputs);
  }
  std::shared_ptr<runner> r;
  try {
    r = expected(call, inputs);
  } catch (const no_gradient&) {
    lock.unlock();
    return call.forward(inputs);
  }
  const auto s = r->kind;
  if (note != nullptr) *note = s->note;
  ++r->steps;
  refine(*r, last_held.held());
  last_setup = s;
  last_plan = r->what;
  const auto& step = *s->step;
  const bool verify = verified < options.verify;
  std::unique_ptr<second_run> beside;
  if (verify || !s->outputs->settled() || std::count(step.differentiable.begin(), step.differentiable.end(), true) > 1) {
    auto written = s->buffers;
    for (const auto& w : step.written) {
      const auto& slot = step.slots[w.slot];
      const auto& t = slot.from == role::input ? inputs[slot.position] : (*s->tensors)[w.slot];
      if (std::none_of(written.begin(), written.end(), [&](const auto& x) { return x.is_same(t); })) written.push_back(t);
    }
    beside = std::make_unique<second_run>(device_for(*s).which(), inputs, s->parameters, written);
  }
  if (verify) {
    ++verified;
    beside->run_plain(call.forward);
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
  const auto& read = r->what->run->read_in_backward();
  auto watch = s->tensors->watch(read.outside, inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& view = step.views[step.outputs[i]];
    const auto from = step.from(view.value);
    // An input that is returned is the input itself.
    if (view.whole && from == role::input && !step.differentiable[i])
      outputs[i] = inputs[step.slots[step.values[view.value].slot].position];
    // A write to memory that is shared would change the history of all who share it.
    const bool shared = from != role::internal || std::any_of(outputs.begin(), outputs.end(), [&](const auto& o) {
                          return !o.is_same(outputs[i]) && o.is_alias_of(outputs[i]);
                        });
    if (read.outputs[i] || (shared && step.differentiable[i]))
      watch.push_back({::torch::autograd::impl::version_counter(outputs[i]), outputs[i]._version(), none, i});
  }
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> given_out;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (step.from(step.views[step.outputs[i]].value) == role::internal)
      given_out.push_back(outputs[i].storage().getWeakStorageImpl());
  const auto once_more = [self = shared_from_this(), call, given_out](const std::vector<at::Tensor>& again) {
    std::lock_guard held(self->mutex);
    std::set<c10::StorageImpl*> alive;
    for (const auto& weak : given_out)
      if (const auto there = weak.lock(); there && alive.insert(there.get()).second)
        self->memory.outputs_of_before += static_cast<bytes_t>(there->nbytes());
    struct restored {
      bytes_t& bytes;
      ~restored() { bytes = 0; }
    } const later{self->memory.outputs_of_before};
    self->look();
    try {
      return self->acquire(self->kind_for(call, again, 1), again);
    } catch (const over_budget&) {  // a budget that is known to do does; what the caller still holds comes on top, this once
      self->log("outputs of before take " + format_bytes(self->memory.outputs_of_before) +
                " beyond the budget while the forward runs again");
      self->memory.outputs_of_before = 0;
      return self->expected(call, again, 1);
    }
  };
  const auto node = c10::make_intrusive<step_node>(r, std::move(watch), inputs, std::move(beside), verify, once_more);
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (step.differentiable[i]) ::torch::autograd::set_history(outputs[i], node);
  std::vector<at::Tensor> returned;
  for (auto i : step.results) returned.push_back(outputs[i]);
  return returned;
}

session::session(std::shared_ptr<model> trained, wrap_options options)
    : state_(std::make_shared<state>(std::move(trained), std::move(options))) {
  auto& all = state::all();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.states, [](const auto& s) { return s.expired(); });
  all.states.push_back(state_);
}
session::~session() = default;

std::vector<at::Tensor> session::forward(const invocation& call, const std::vector<at::Tensor>& inputs,
                                         std::shared_ptr<void>* note) {
  return state_->forward(call, inputs, note);
}

void session::prepare(const invocation& call, const std::vector<at::Tensor>& inputs) {
  std::lock_guard lock(state_->mutex);
  state_->look();
  const auto s = state_->kind_for(call, inputs);
  std::shared_ptr<const plan> made;
  if (state_->options.device) {
    state_->last_held = state_->memory.held(*s, inputs);
    const auto [available, held_bytes] = state_->room(*s);
    made = state_->plan_for(s, available, held_bytes);
  } else {
    made = state_->acquire(s, inputs)->what;
  }
  state_->last_setup = s;
  state_->last_plan = std::move(made);
}

void session::invalidate() {
  std::lock_guard lock(state_->mutex);
  state_->release();
  state_->setups.clear();
  state_->memory.largest_plain = 0;
  state_->used.clear();
  state_->last_used_ = nullptr;
  state_->looked_ = false;
}

void session::set_budget(const budget& b) {
  std::lock_guard lock(state_->mutex);
  state_->options.budget = b;
  state_->release();
}

void session::release() {
  std::lock_guard lock(state_->mutex);
  state_->release();
}

void session::release_all() {
  std::vector<std::weak_ptr<state>> states;
  {
    std::lock_guard lock(state::all().mutex);
    states = state::all().states;
  }
  for (const auto& weak : states)
    if (const auto s = weak.lock())
      if (std::unique_lock lock(s->mutex, std::try_to_lock); lock) s->release();
}

pytorch::report session::report() const {
  std::lock_guard lock(state_->mutex);
  const auto& x = *state_;
  if (!x.last_plan) throw error("no step has been planned yet");
  return x.report(*x.last_setup, *x.last_plan);
}

std::vector<pytorch::report> session::reports() const {
  std::lock_guard lock(state_->mutex);
  const auto& x = *state_;
  auto kinds = x.kinds();
  std::sort(kinds.begin(), kinds.end(), [](const auto& a, const auto& b) { return a->last_used > b->last_used; });
  std::vector<pytorch::report> list;
  for (const auto& s : kinds)
    for (const auto& [available, plan] : s->plans) list.push_back(x.report(*s, *plan));
  return list;
}

pytorch::report session::state::report(const setup& s, const plan& p) const {
  auto r = last_held;
  const auto& run = *p.run;
  const auto fixed = r.held() - r.gradients;
  r.budget = memory.budget(fixed, r.gradients);
  r.left = r.budget - r.held();
  r.arena = run.arena_bytes();
  r.live_peak = run.live_peak();
  r.outputs = run.outside_bytes();
  r.in_place = run.in_place_bytes();
  r.fetched = run.fetched_bytes();
  r.store_all = s.store_all->run->needed_bytes();
  r.planned_peak = p.found.peak;
  r.step_seconds = p.found.seconds;
  r.store_all_seconds = s.store_all->found.seconds;
  r.bound = p.found.bound;
  r.gap = p.found.gap();
  r.capture_seconds = s.capture_seconds;
  r.profile_seconds = s.profiles.elapsed;
  r.plan_seconds = p.plan_seconds;
  r.operations = run.operations();
  r.recomputed = run.recomputed();
  r.far = run.far_bytes();
  std::tie(r.moved_out, r.moved_in) = run.moved_bytes();
  r.unplanned = memory.unplanned;
  r.waited = memory.waited;
  for (const auto& a : memory.runners) {
    r.unplanned += a->run->unplanned();
    r.waited += a->run->waited_seconds();
  }
  r.solver = p.found.solver + (p.taken_from.empty() ? "" : " (taken over from " + p.taken_from + ")");
  r.planned_for = s.inputs;
  r.status = p.found.status;
  auto least = run.needed_bytes();
  for (const auto& [available, other] : s.plans) least = std::min(least, other->run->needed_bytes());
  r.smallest = r.held() + least;
  r.smallest_bound = std::min(r.smallest, r.held() + bounds_without_search(s.p).budget - s.p.held_bytes());
  return r;
}

const problem& session::planning_problem() const {
  if (!state_->last_setup) throw error("no step has been planned yet");
  const auto& s = *state_->last_setup;
  return state_->last_plan == s.store_all ? s.in_place : s.p;
}
const schedule& session::planned_schedule() const {
  if (!state_->last_plan) throw error("no step has been planned yet");
  return state_->last_plan->steps;
}

}  // namespace remat::pytorch
