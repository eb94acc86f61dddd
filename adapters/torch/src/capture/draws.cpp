// SPDX-License-Identifier: Apache-2.0
#include "draws.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "../base/views.hpp"

namespace remat::pytorch::detail {

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

namespace {

at::Tensor seeded(const at::Generator& like, std::uint64_t seed) {
  auto g = like.clone();
  g.set_current_seed(seed);
  return g.get_state();
}

/// A state of the generator that no program meets by chance.
at::Tensor unlikely_state(const at::Generator& like) {
  std::random_device entropy;
  return seeded(like, std::uint64_t{entropy()} << 32 | entropy());
}

/// The engine of the host's generator in state `state`.
at::mt19937 engine_in(const at::Generator& like, const at::Tensor& state) {
  auto g = like.clone();
  g.set_state(state);
  return at::check_generator<at::CPUGeneratorImpl>(g)->engine();
}

}  // namespace

const std::string& unlikely_state(const at::Generator& like, std::size_t i) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceType, std::size_t>, std::string> states;
  const std::lock_guard lock(mutex);
  auto& state = states[{like.device().type(), i}];
  if (state.empty()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    state = text_of(unlikely_state(like));
  }
  return state;
}

namespace {

thread_local bool* draws_noted = nullptr;

std::unique_ptr<at::ObserverContext> note_draw(const at::RecordFunction& f) {
  const auto name = f.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (draws_noted != nullptr && op && op->hasTag(at::Tag::nondeterministic_seeded)) *draws_noted = true;
  return nullptr;
}

}  // namespace

noted_draws::noted_draws()
    : before_(std::exchange(draws_noted, &any_)),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&note_draw).scopes({at::RecordScope::FUNCTION}))) {}
noted_draws::~noted_draws() {
  at::removeCallback(handle_);
  draws_noted = before_;
}

draw_log::draw_log(c10::Device device) : generator_(at::globalContext().defaultGenerator(device)), device_(device) {
  start_ = state();
  begin_phase();
}

draw_log::~draw_log() {
  at::AutoDispatchBelowADInplaceOrView below;
  set_state(advanced(start_, foreign_));
}

bool draw_log::show() {
  if (!draws_.empty() || phases_.size() > 1 || !same_bytes(state(), phases_[0])) return false;
  phases_[0] = expected_ = start_;
  set_state(start_);
  return true;
}

void draw_log::begin_phase() {
  expected_ = unlikely_state(generator_);
  set_state(expected_);
  phases_.push_back(expected_);
}

draw_origin draw_log::note(std::size_t call, const at::Tensor& before, at::Tensor after) {
  auto origin = origin_of(before);
  draws_.push_back({call, before, after});
  expected_ = std::move(after);
  return origin;
}

at::Tensor draw_log::pass(const at::Tensor& before, const std::string& equal) {
  auto after = seeded(generator_, std::hash<std::string>()(equal + text_of(before)));
  set_state(after);
  return after;
}

draw_origin draw_log::origin_of(const at::Tensor& now) {
  if (same_bytes(now, expected_)) return {};
  if (phases_.size() > 1 && same_bytes(now, phases_[1])) return {generator_origin::backward, 0, {}};
  if (same_bytes(now, phases_[0])) return {generator_origin::forward, 0, {}};
  for (const auto& d : draws_) {
    if (same_bytes(now, d.before)) return {generator_origin::before, d.call, {}};
    if (same_bytes(now, d.after)) return {generator_origin::after, d.call, {}};
  }
  if (const auto drawn = draws_between(expected_, now)) {  // another thread has drawn, which does not concern the step
    foreign_ += *drawn;
    expected_ = now;
    return {};
  }
  return {generator_origin::fixed, 0, content_of(now.storage())};
}

std::optional<std::uint64_t> draw_log::draws_between(const at::Tensor& from, const at::Tensor& to) const {
  if (!device_.is_cpu()) return counted_draws(generator_, from, to);
  auto engine = engine_in(generator_, from);
  const auto goal = engine_in(generator_, to).data();
  constexpr std::uint64_t limit = 1 << 23;
  for (std::uint64_t n = 0; n < limit;) {
    const auto now = engine.data();
    if (now.state_ == goal.state_ && now.left_ >= goal.left_ &&
        static_cast<int64_t>(goal.next_) - now.next_ == now.left_ - goal.left_)
      return n + static_cast<std::uint64_t>(now.left_ - goal.left_);
    for (auto k = now.left_; k > 0; --k, ++n) engine();  // up to the first number of the next block
  }
  return std::nullopt;
}

at::Tensor draw_log::advanced(const at::Tensor& state, std::uint64_t draws) const {
  if (draws == 0) return state;
  if (!device_.is_cpu()) return after_counted_draws(generator_, state, draws);
  auto engine = engine_in(generator_, state);
  while (draws-- > 0) engine();
  auto g = generator_.clone();
  g.set_state(state);
  at::check_generator<at::CPUGeneratorImpl>(g)->set_engine(engine);
  return g.get_state();
}

}  // namespace remat::pytorch::detail
