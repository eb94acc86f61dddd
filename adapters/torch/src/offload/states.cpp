// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/library.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <iterator>
#include <map>
#include <mutex>
#include <span>
#include <typeinfo>

#include <remat/pytorch/free_memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/session.hpp>

#include "../base/trim.hpp"
#include "arrival.hpp"

namespace remat::pytorch {

namespace optim = ::torch::optim;

namespace {

at::Tensor without_memory(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()).device(at::kMeta));
}

not_supported refusal(const std::string& reason, const std::string& advice = "use stepping::after") {
  return not_supported(reason + ": with stepping::overlap parameters step as soon as their gradients are there; " + advice);
}

/// The one key of tensors that PyTorch gives neither kernels nor a fallback, whatever the device.
constexpr auto spent_key = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

void refuse_to_read(const c10::OperatorHandle& op, ::torch::jit::Stack* /*arguments*/) {
  throw refusal(op.schema().name() + " uses a gradient that is freed already, as clipping and accumulation do");
}

/// Stands for a gradient that has been taken until the step ends: all operators refuse it.
at::Tensor spent(const at::Tensor& p) {
  static const auto library = [] {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(spent_key))
      throw not_available("stepping::overlap needs the dispatch key TESTING_ONLY_GenericWrapper, but it has a fallback already");
    auto lib = std::make_unique<::torch::Library>(::torch::Library::IMPL, "_", spent_key, __FILE__, __LINE__);
    lib->fallback(::torch::CppFunction::makeFromBoxedFunction<&refuse_to_read>());
    return lib;
  }();
  auto made = at::detail::make_tensor<c10::TensorImpl>(p.key_set().add(spent_key), p.dtype(), p.device());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(p.sizes(), p.strides());
  return made;
}

/// Do these options make the same steps?
template <class... Kinds>
bool same_settings(const optim::OptimizerOptions& a, const optim::OptimizerOptions& b) {
  const auto as = [&]<class Kind>() {
    const auto *first = dynamic_cast<const Kind*>(&a), *second = dynamic_cast<const Kind*>(&b);
    return first == nullptr || (second != nullptr && *first == *second);
  };
  return (as.template operator()<Kinds>() && ...);
}
bool unchanged_settings(const optim::OptimizerOptions& a, const optim::OptimizerOptions& b) {
  return same_settings<optim::AdamWOptions, optim::AdamOptions, optim::SGDOptions, optim::RMSpropOptions, optim::AdagradOptions>(
             a, b) &&
         a.get_lr() == b.get_lr();
}

}  // namespace

class states_on_disk::stepper final : public early_stepper, public std::enable_shared_from_this<stepper> {
 public:
  stepper(std::shared_ptr<disk> to, optimizer whose) : disk_(std::move(to)), whose_(std::move(whose)) {}
  ~stepper() override {
    for (const auto& p : told_) arrival::tidy(p);
  }

  // --- all parameters after each other -----------------------------------------------------------------------------------------

  /// A step of all that have gradients.
  void step_all();
  void loaded();

  // --- within the backward -----------------------------------------------------------------------------------------------------

  /// Has all trainable parameters tell of their gradients.
  void attach();
  void arrived(const at::Tensor& p) override;
  bool at_once() const override { return tried_; }
  /// Ends a step.
  void finish();
  /// @throws not_supported between a backward and its step
  void check_idle(const std::string& what) const {
    if (!taken_.empty()) throw refusal(what + " came between backward and step()");
  }

 private:
  /// A parameter that steps.
  struct todo {
    at::Tensor p;
    const optim::OptimizerParamGroup* of;
    void* key() const { return p.unsafeGetTensorImpl(); }
  };
  using some = std::span<const todo>;

  void look_around();
  void check() const {
    if (failure_) throw copy_failed(*failure_);
  }
  copy_failed failed(const copy_failed& e, const std::string& what) {
    failure_ = std::string(e.what()) + "; " + what + ". Load a checkpoint";
    return copy_failed(*failure_);
  }
  void drain(disk_traffic& traffic);
  void settle(some all);
  std::vector<at::Tensor> rehearse(const todo& t) const;
  some parcel(some rest) const;
  std::vector<at::Tensor> homes(const todo& t) const;
  std::vector<at::Tensor> held(some of) const;
  std::vector<at::Tensor> unneeded(some of) const;
  void apply(some to);
  void bring_home(const todo& t, const std::vector<at::Tensor>& places);
  void step_now(const todo& t);
  void clear();

  std::shared_ptr<disk> disk_;  ///< null: states stay in memory
  optimizer whose_;
  std::map<const void*, std::vector<at::Tensor>> rooms_;  ///< by parameter, for states that are not made yet
  std::optional<std::string> failure_;                    ///< no step can follow
  bool short_ = false;                                    ///< of memory

  /// A gradient that is no longer its parameter's.
  struct taken {
    at::Tensor p, stand_in;
    at::Tensor gradient;  ///< of a step that is not tried yet; otherwise it has been used
  };
  std::mutex mutex_;      ///< hooks may be on several threads
  bool tried_ = false;    ///< a whole step has shown that nobody needs the gradients
  bool dropped_ = false;  ///< gradients that no step has used
  std::map<const void*, taken> taken_;
  std::map<const void*, std::size_t> group_of_;                               ///< of a parameter, when the first gradient came
  std::map<std::size_t, std::unique_ptr<optim::OptimizerOptions>> settings_;  ///< of groups, when their first gradient came
  std::map<const void*, at::Tensor> next_;                                    ///< in the last step: what came behind it
  at::Tensor last_;
  std::unique_ptr<disk_traffic> traffic_;
  std::vector<at::Tensor> told_;
};

// --- all parameters after each other -------------------------------------------------------------------------------------------

void states_on_disk::stepper::step_all() {
  check();
  std::vector<todo> list;
  for (const auto& group : whose_.all)
    for (const auto& p : group.params())
      if (p.grad().defined()) list.push_back({p, &group});
  look_around();
  settle(list);
  disk_traffic traffic;
  const auto all = list.size();
  some rest(list);
  try {
    while (!rest.empty()) {
      const auto now = parcel(rest);
      traffic.ready(now[0].key(), held(now));
      if (const auto following = parcel(rest.subspan(now.size())); !following.empty()) {
        std::vector<at::Tensor> beside;
        for (const auto& t : following) beside.insert(beside.end(), {t.p, t.p.grad()});
        traffic.ahead(following[0].key(), held(following), std::move(beside));
      }
      apply(now);
      traffic.done(unneeded(now));
      rest = rest.subspan(now.size());
    }
  } catch (const copy_failed& e) {
    throw failed(e, std::to_string(all - rest.size()) + " of " + std::to_string(all) + " parameters have made the step");
  }
  drain(traffic);
}

void states_on_disk::stepper::drain(disk_traffic& traffic) {
  try {
    traffic.drain();
  } catch (const copy_failed& e) {
    throw failed(e, "all parameters have made the step, but their states may be lost");
  }
}

/// Is memory short: is there no room for the weights once more? Then sessions give back what they keep for their next steps.
void states_on_disk::stepper::look_around() {
  if (!disk_) return;
  bytes_t weights = 0;
  for (const auto& group : whose_.all)
    for (const auto& p : group.params())
      if (p.is_cpu()) weights += static_cast<bytes_t>(p.nbytes());
  short_ = host_free() < weights;
  if (short_) session::release_all();
}

/// Neighbours of one group, as many as may be in memory together.
states_on_disk::stepper::some states_on_disk::stepper::parcel(some rest) const {
  constexpr bytes_t most = 8 << 20;
  bytes_t bytes = 0;
  std::size_t end = 0;
  for (; end < rest.size() && rest[end].of == rest[0].of; ++end) {
    for (const auto& t : homes(rest[end])) bytes += static_cast<bytes_t>(t.defined() ? t.nbytes() : 0);
    if (end > 0 && bytes > most) break;
  }
  return rest.first(end);
}

/// Where the states of a parameter are, or are to be.
std::vector<at::Tensor> states_on_disk::stepper::homes(const todo& t) const {
  if (const auto state = whose_.of.find(t.key()); state != whose_.of.end()) return whose_.tensors(*state->second);
  const auto room = rooms_.find(t.key());
  return room == rooms_.end() ? std::vector<at::Tensor>() : room->second;
}

/// States that are on the disk.
std::vector<at::Tensor> states_on_disk::stepper::held(some of) const {
  std::vector<at::Tensor> found;
  if (!disk_) return found;
  for (const auto& t : of)
    if (const auto state = whose_.of.find(t.key()); state != whose_.of.end())
      for (auto& made : whose_.tensors(*state->second))
        if (disk_->holds(made)) found.push_back(std::move(made));
  return found;
}

/// What need not be in memory once these have stepped: states, gradients, and if memory is short the parameters, which the system
/// could not let go of before they are written.
std::vector<at::Tensor> states_on_disk::stepper::unneeded(some of) const {
  auto found = held(of);
  for (const auto& t : of) {
    found.push_back(t.p.grad());
    if (short_) found.push_back(t.p);
  }
  std::erase_if(found, [](const auto& t) { return !on_a_disk(t); });
  return found;
}

/// Steps them; their states are at home afterwards.
void states_on_disk::stepper::apply(some to) {
  std::vector<at::Tensor> params;
  std::vector<std::vector<at::Tensor>> places;
  for (const auto& t : to) {
    params.push_back(t.p);
    places.push_back(homes(t));
  }
  whose_.apply(std::move(params), *to[0].of);
  for (std::size_t i = 0; i < to.size(); ++i) bring_home(to[i], places[i]);
}

/// Moves what a step has made anew to where it was before, or to the room that is set aside for it.
void states_on_disk::stepper::bring_home(const todo& t, const std::vector<at::Tensor>& places) {
  const auto state = whose_.of.find(t.key());
  if (!disk_ || state == whose_.of.end()) return;
  rooms_.erase(t.key());
  auto made = whose_.tensors(*state->second);
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (!movable(made[i]) || disk_->holds(made[i])) continue;
    const bool fits = i < places.size() && disk_->holds(places[i]) && alike(places[i], made[i]);
    const auto home = fits ? places[i] : disk_->reserve({made[i]}).front();
    disk_->write(home, made[i]);
    note_freed(static_cast<bytes_t>(made[i].nbytes()));
    made[i].set_data(home);
  }
}

/// Sees to it that all states are on the disk or have room there.
void states_on_disk::stepper::settle(some all) {
  if (!disk_) return;
  std::vector<at::Tensor> elsewhere, wanted;
  for (const auto& t : all)
    if (const auto state = whose_.of.find(t.key()); state != whose_.of.end())
      for (auto& made : whose_.tensors(*state->second))
        if (movable(made) && !disk_->holds(made)) elsewhere.push_back(std::move(made));
  std::map<const void*, std::vector<at::Tensor>> rooms;
  for (const auto& t : all)
    if (whose_.of.find(t.key()) == whose_.of.end() && rooms_.find(t.key()) == rooms_.end()) rooms[t.key()] = rehearse(t);
  wanted = elsewhere;
  for (const auto& [key, like] : rooms)
    for (const auto& t : like)
      if (t.defined()) wanted.push_back(t);
  auto homes = disk_->reserve(wanted);
  auto next = homes.begin();
  for (auto& t : elsewhere) {
    disk_->write(*next, t);
    t.set_data(*next);
    disk::evict({*next++});
  }
  for (auto& [key, like] : rooms) {
    for (auto& t : like)
      if (t.defined()) t = *next++;
    rooms_[key] = std::move(like);
  }
}

/// Steps a parameter like this one, to see what the class does.
/// @return tensors without memory, like the states that can be on a disk; undefined ones for others
std::vector<at::Tensor> states_on_disk::stepper::rehearse(const todo& t) const {
  auto twin = at::zeros_like(t.p.detach());
  twin.requires_grad_();
  twin.mutable_grad() = at::zeros_like(t.p.detach());
  whose_.apply({twin}, *t.of);
  const auto state = whose_.of.find(twin.unsafeGetTensorImpl());
  if (state == whose_.of.end()) return {};
  auto like = whose_.tensors(*state->second);
  whose_.of.erase(state);
  for (auto& made : like) {
    note_freed(static_cast<bytes_t>(made.defined() ? made.nbytes() : 0));
    made = movable(made) ? without_memory(made) : at::Tensor();
  }
  return like;
}

// --- within the backward -------------------------------------------------------------------------------------------------------

void states_on_disk::stepper::attach() {
  for (const auto& group : whose_.all)
    for (const auto& p : group.params())
      if (p.requires_grad() && p.is_leaf()) {
        auto& steps = arrival::of(p).steps;
        if (steps.lock().get() == this) continue;
        steps = weak_from_this();
        told_.push_back(p);
      }
}

void states_on_disk::stepper::arrived(const at::Tensor& p) {
  const std::lock_guard lock(mutex_);
  const auto* const key = p.unsafeGetTensorImpl();
  if (taken_.empty()) {
    group_of_.clear();
    for (std::size_t i = 0; i < whose_.all.size(); ++i)
      for (const auto& member : whose_.all[i].params()) group_of_[member.unsafeGetTensorImpl()] = i;
  }
  const auto group = group_of_.find(key);
  if (group == group_of_.end() || !p.grad().defined()) return;
  if (const auto found = taken_.find(key); found != taken_.end()) {
    if (p.grad().is_same(found->second.stand_in)) return;  // told twice: somebody has put a hook of his around ours
    throw refusal("a second gradient of a parameter came before step(): gradients are accumulated, or the backward is run twice");
  }
  dropped_ = false;
  const auto& of = whose_.all.at(group->second);
  if (auto& known = settings_[group->second]; !known) known = of.options().clone();
  taken t{p, spent(p), tried_ ? at::Tensor() : p.grad()};
  if (tried_) {
    step_now({p, &of});
    note_freed(static_cast<bytes_t>(p.grad().nbytes()));
  }
  p.mutable_grad() = t.stand_in;
  taken_.emplace(key, std::move(t));
}

void states_on_disk::stepper::step_now(const todo& t) {
  check();
  settle({&t, 1});
  if (!disk_) {
    apply({&t, 1});
  } else {
    if (!traffic_) {
      look_around();
      traffic_ = std::make_unique<disk_traffic>();
      last_.reset();
    }
    try {
      traffic_->ready(t.key(), held({&t, 1}));
      if (const auto found = next_.find(t.key()); found != next_.end()) {
        const todo following{found->second, nullptr};
        traffic_->ahead(following.key(), held({&following, 1}));
      }
      apply({&t, 1});
    } catch (const copy_failed& e) {
      throw failed(e, std::to_string(taken_.size()) + " parameters have made the step");
    }
    traffic_->done(unneeded({&t, 1}));
    if (last_.defined()) next_[last_.unsafeGetTensorImpl()] = t.p;
    last_ = t.p;
  }
  t.p.unsafeGetTensorImpl()->bump_version();  // not all classes do: what still needs the old values must know
}

void states_on_disk::stepper::finish() {
  const std::lock_guard lock(mutex_);
  if (dropped_) throw refusal("load() came between backward and step(), and dropped the gradients");
  for (const auto& [key, t] : taken_)
    if (!t.p.grad().is_same(t.stand_in)) throw refusal("a gradient was replaced or removed between backward and step()");
  for (const auto& [group, were] : settings_)
    if (group >= whose_.all.size() || !unchanged_settings(whose_.all[group].options(), *were))
      throw refusal("options of a parameter group were changed between backward and step()", "change them after step()");
  if (!tried_) {  // all space is taken before a weight changes
    std::vector<todo> all;
    for (const auto& group : whose_.all)
      for (const auto& p : group.params())
        if (p.requires_grad()) all.push_back({p, &group});
    settle(all);
  }
  for (const auto& [key, t] : taken_) t.p.mutable_grad() = t.gradient;
  const auto traffic = std::exchange(traffic_, nullptr);
  if (traffic) traffic->wait();
  step_all();  // what has not stepped yet: gradients of the first step, or set by hand
  tried_ = tried_ || !taken_.empty();
  clear();
  attach();  // what has become trainable
  if (traffic) drain(*traffic);
}

void states_on_disk::stepper::loaded() {
  const std::lock_guard lock(mutex_);
  failure_.reset();
  if (taken_.empty()) return;
  dropped_ = true;
  clear();
}

void states_on_disk::stepper::clear() {
  for (const auto& group : whose_.all)
    for (const auto& p : group.params()) p.mutable_grad().reset();
  taken_.clear();
  settings_.clear();
  traffic_.reset();
}

// -------------------------------------------------------------------------------------------------------------------------------

states_on_disk::states_on_disk(std::shared_ptr<disk> to, stepping when, optimizer whose) : when_(when) {
  if (!to && when == stepping::after) throw bad_option("offloaded: there is no disk");
  for (const auto& group : whose.all)
    for (const auto& p : group.params())
      if (auto* const hook = arrival::find(p)) {  // it steps for one optimizer
        hook->steps.reset();
        arrival::tidy(p);
      }
  stepper_ = std::make_shared<stepper>(std::move(to), std::move(whose));
  if (when == stepping::overlap) stepper_->attach();
}

states_on_disk::~states_on_disk() = default;

at::Tensor states_on_disk::step(const optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (when_ == stepping::overlap) {
    if (closure) throw refusal("step(closure) computes the loss when all parameters are as they were");
    stepper_->finish();
    return loss;
  }
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  stepper_->step_all();
  return loss;
}

void states_on_disk::loaded() { stepper_->loaded(); }

void states_on_disk::check_idle(const std::string& what) const { stepper_->check_idle(what); }

std::vector<at::Tensor> tensors_of(optim::OptimizerParamState& state) {
  const auto* of = &state;
  if (const auto* s = dynamic_cast<const optim::AdamWParamState*>(of))
    return {s->exp_avg(), s->exp_avg_sq(), s->max_exp_avg_sq()};
  if (const auto* s = dynamic_cast<const optim::AdamParamState*>(of)) return {s->exp_avg(), s->exp_avg_sq(), s->max_exp_avg_sq()};
  if (const auto* s = dynamic_cast<const optim::SGDParamState*>(of)) return {s->momentum_buffer()};
  if (const auto* s = dynamic_cast<const optim::RMSpropParamState*>(of))
    return {s->square_avg(), s->momentum_buffer(), s->grad_avg()};
  if (const auto* s = dynamic_cast<const optim::AdagradParamState*>(of)) return {s->sum()};
  throw bad_option(std::string("offloaded: it is not known which tensors are in a ") + typeid(state).name() +
                   "; override `tensors` to tell");
}

}  // namespace remat::pytorch
