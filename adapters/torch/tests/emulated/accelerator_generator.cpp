// SPDX-License-Identifier: Apache-2.0
/// @file
/// Random numbers of the accelerator. The state is a seed and an offset, 16 bytes, as with Philox on CUDA.
#include <ATen/EmptyTensor.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>

#include "accelerator.hpp"

namespace emulated::accelerator {
namespace {

constexpr std::int64_t state_bytes = 16;

class generator final : public c10::GeneratorImpl {
 public:
  explicit generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kind, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return kind; }
  void set_current_seed(std::uint64_t seed) override {
    refuse_in_capture();
    now_ = {seed, 0};
  }
  void set_offset(std::uint64_t offset) override {
    refuse_in_capture();
    TORCH_CHECK(offset % draws_per_call == 0, "emulated: the offset must be a multiple of ", draws_per_call);
    now_.offset = offset;
  }
  std::uint64_t get_offset() const override { return now_.offset; }
  std::uint64_t current_seed() const override { return now_.seed; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return now_.seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    refuse_in_capture();
    TORCH_CHECK(state.is_cpu() && state.dtype() == caffe2::TypeMeta::Make<std::uint8_t>() && state.is_contiguous() &&
                    state.numel() == state_bytes,
                "emulated: the state of a generator is ", state_bytes, " bytes on the host");
    std::memcpy(&now_, state.data(), state_bytes);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    refuse_in_capture();
    auto state =
        at::detail::empty_cpu({state_bytes}, at::TensorOptions(at::kByte).device(c10::kCPU));  // no operator, as in PyTorch
    std::memcpy(state.mutable_data_ptr(), &now_, state_bytes);
    return state.getIntrusivePtr();
  }

  /// The caller holds the lock of the generator.
  philox take(std::uint64_t outputs) {
    const auto from = now_;
    now_.offset += outputs;
    return from;
  }

 private:
  generator* clone_impl() const override {
    auto* const copy = new generator(device().index());
    copy->now_ = now_;
    return copy;
  }
  void refuse_in_capture() const {
    TORCH_CHECK(!capturing(stream_of(current_stream(device().index()))), "emulated: the state of a generator, during a capture");
  }

  philox now_{c10::default_rng_seed_val, 0};
};
static_assert(sizeof(philox) == state_bytes);

/// Draws of the captures in progress.
struct running {
  std::mutex lock;
  std::map<unsigned long long, std::vector<captured_draws>> by_capture;
};
running& captures() {
  static auto* const only = new running;
  return *only;
}

std::function<philox()> draw_in(unsigned long long capture, const at::Generator& g) {
  const std::lock_guard guard(captures().lock);
  auto& all = captures().by_capture[capture];
  auto known = all.begin();
  while (known != all.end() && known->from != g) ++known;
  if (known == all.end()) {
    captured_draws fresh;
    fresh.from = g;
    fresh.state = std::make_shared<captured_draws::base>();
    known = all.insert(known, std::move(fresh));
  }
  const auto offset = known->state->used;
  known->state->used += draws_per_call;
  return [state = known->state, offset] { return philox{state->now.seed, state->now.offset + offset}; };
}

}  // namespace

std::function<void()> captured_draws::advance() const {
  auto* const g = from.get<generator>();
  const std::lock_guard guard(g->mutex_);
  return [s = state, start = g->take(state->used)] { s->now = start; };
}

std::vector<captured_draws> draws_of_capture(unsigned long long capture) {
  const std::lock_guard guard(captures().lock);
  auto all = std::move(captures().by_capture[capture]);
  captures().by_capture.erase(capture);
  return all;
}

at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<generator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* const all = new std::array<at::Generator, device_count>{make_generator(0), make_generator(1)};
  return all->at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

std::function<philox()> draw(const at::Generator& given, c10::DeviceIndex device) {
  const auto& g = given.defined() ? given : default_generator(device);
  TORCH_CHECK(g.device().type() == kind, "Expected a generator of 'emulated', but found one of '", g.device(), "'");
  if (const auto capture = capture_id(stream_of(current_stream(device))); capture != 0) return draw_in(capture, g);
  auto* const own = g.get<generator>();
  const std::lock_guard guard(own->mutex_);
  return [from = own->take(draws_per_call)] { return from; };
}

}  // namespace emulated::accelerator
