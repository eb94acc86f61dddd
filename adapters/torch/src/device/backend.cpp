// SPDX-License-Identifier: Apache-2.0
/// @file
/// The generic backend, and the loader of plug-ins.
#include "backend.hpp"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>

#include <remat/pytorch/device.hpp>
#include <remat/pytorch/memory.hpp>

#include "accelerator.hpp"
#include "allocator.hpp"

namespace remat::pytorch {
namespace {

const front_calls& calls_of_remat() {
  static const front_calls calls = {
      .place = [](c10::Stream on, std::size_t bytes) -> void* {
        auto* const plan = detail::plan_on(on.device());
        if (plan == nullptr || !plan->follows(on)) return nullptr;
        return plan->place(static_cast<bytes_t>(bytes)).value_or(nullptr);
      },
      .watched = [](c10::Device on) { return detail::plan_on(on) != nullptr || detail::recording_on(on) != nullptr; },
      .born =
          [](c10::Device on, const void* data, std::size_t bytes) {
            if (auto* const record = detail::recording_on(on)) record->born(data, static_cast<bytes_t>(bytes));
            if (auto* const plan = detail::plan_on(on)) plan->born(data, static_cast<bytes_t>(bytes));
          },
      .died = [](c10::DeviceType on, const void* data) { detail::died_on(on, data); },
      .in_arena = [](const void* data) { return detail::in_arena(data); },
      .used_in = [](const void* data, c10::Stream s) { note_use(data, s); },
      .make_room = [](c10::Device on) { return detail::return_idle_arenas(on); }};
  return calls;
}

/// Front for a kind of device whose allocator c10 manages.
class generic_front final : public c10::DeviceAllocator {
 public:
  generic_front(c10::DeviceType kind, c10::DeviceAllocator& own) : kind_(kind), own_(own), front_(own, calls_of_remat()) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::impl::VirtualGuardImpl impl(kind_);
    return front_.allocate(impl.getStream(impl.getDevice()), bytes, raw_deleter());
  }
  c10::DeleterFnPtr raw_deleter() const override;
  void release(void* data) { front_.release(kind_, data); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { own_.copy_data(to, from, bytes); }
  bool initialized() override { return own_.initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { own_.emptyCache(pool); }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override { front_.record_stream(p, s, raw_deleter()); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override { return own_.getDeviceStats(d); }
  void resetAccumulatedStats(c10::DeviceIndex d) override { own_.resetAccumulatedStats(d); }
  void resetPeakStats(c10::DeviceIndex d) override { own_.resetPeakStats(d); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex d) override { return own_.getMemoryInfo(d); }

 private:
  c10::DeviceType kind_;
  c10::DeviceAllocator& own_;
  front front_;
};

/// The front per kind of device. Deleters of c10 are plain functions, so each kind has its own instance of `release_of`.
std::array<generic_front*, c10::COMPILE_TIME_MAX_DEVICE_TYPES> fronts{};
template <std::size_t kind>
void release_of(void* data) {
  fronts[kind]->release(data);
}
template <std::size_t... kinds>
c10::DeleterFnPtr deleter_of(std::size_t kind, std::index_sequence<kinds...>) {
  static constexpr std::array<c10::DeleterFnPtr, sizeof...(kinds)> all = {&release_of<kinds>...};
  return all[kind];
}
c10::DeleterFnPtr generic_front::raw_deleter() const {
  return deleter_of(static_cast<std::size_t>(kind_), std::make_index_sequence<c10::COMPILE_TIME_MAX_DEVICE_TYPES>());
}

/// An accelerator without a plug-in. It can place if c10 lets us replace its allocator, and if that allocator returns addresses.
class generic_backend final : public backend {
 public:
  explicit generic_backend(c10::DeviceType kind) : kind_(kind) {}

  bool can_place() const override { return front_ != nullptr; }
  void install(const front_calls&) override {
    if (own_ != nullptr) return;
    auto* const found = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(kind_));
    if (found == nullptr)
      throw not_available("the allocator of " + c10::DeviceTypeName(kind_, true) +
                          " is no c10::DeviceAllocator; planned steps need its statistics");
    own_ = found;
    // Tensors of CUDA (and ROCm) do not ask c10 for their allocator. The allocator of MPS returns handles.
    if (kind_ == c10::kCUDA || kind_ == c10::kMPS || own_->raw_deleter() == nullptr) return;
    front_ = fronts[static_cast<std::size_t>(kind_)] = new generic_front(kind_, *own_);  // tensors die after static objects
    constexpr std::uint8_t priority = 10;
    c10::SetAllocator(kind_, front_, priority);
  }
  bool in_front() const override { return !can_place() || c10::GetAllocator(kind_) == front_; }
  c10::DeviceAllocator& own() const override { return *own_; }
  std::string name(c10::Device on) const override { return on.str(); }
  c10::DataPtr pinned(c10::Device on, std::size_t bytes) const override {
    const c10::DeviceGuard guard(on);
    return at::globalContext().getAcceleratorHooksInterface(kind_).getPinnedMemoryAllocator()->allocate(bytes);
  }

 private:
  c10::DeviceType kind_;
  c10::DeviceAllocator* own_ = nullptr;
  generic_front* front_ = nullptr;
};

/// The folder of the library or extension that contains this function.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::absolute(info.dli_fname).parent_path();
}

/// Folder of plug-ins in place of `own_folder`; null: not set; an empty string: no plug-in is loaded.
const char* folder_of_plugins() { return std::getenv("REMAT_PLUGINS"); }

bool has_plugin(c10::DeviceType kind) {
  const char* const folder = folder_of_plugins();
  return kind == c10::kCUDA && !at::Context::hasROCM() && (folder == nullptr || *folder != 0);
}

/// @throws not_available
backend* load_plugin(const std::string& file, const std::string& kind) {
  const auto path = (folder_of_plugins() != nullptr ? std::filesystem::path(folder_of_plugins()) : own_folder()) / file;
  if (!std::filesystem::exists(path))
    throw not_available("steps on " + kind + " need the plug-in " + file + " of remat, which was not built: " + path.string());
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    throw not_available("the plug-in of remat for " + kind + " cannot be loaded; is this the PyTorch it was built for? " +
                        (why == nullptr ? "" : why));
  }
  const auto make = reinterpret_cast<make_backend>(dlsym(library, backend_symbol));
  auto* const made = make == nullptr ? nullptr : make(backend_interface);
  if (made == nullptr) throw not_available("the plug-in " + path.string() + " is of another version of remat");
  return made;
}

}  // namespace

backend& backend_of(c10::DeviceType kind) {
  static std::mutex mutex;
  static std::array<backend*, c10::COMPILE_TIME_MAX_DEVICE_TYPES> known{};
  std::lock_guard lock(mutex);
  auto& b = known[static_cast<std::size_t>(kind)];
  if (b == nullptr) {
    if (has_plugin(kind))
      b = load_plugin("libremat_torch_cuda.so", "CUDA devices");
    else
      b = new generic_backend(kind);
  }
  return *b;
}

void install(backend& b) { b.install(calls_of_remat()); }

}  // namespace remat::pytorch
