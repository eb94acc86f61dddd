// SPDX-License-Identifier: Apache-2.0
/// @file
/// One call of an operator: it uses the bytes of the device now, late, or when a captured graph is launched.
#include "kernels.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "host_side.hpp"
#include "operators.hpp"
#include "state.hpp"  // stream::drain, which the detector of races does not see

namespace emulated {
namespace {

constexpr int poison = 0xEE;

c10::Device device_of_call(const torch::jit::Stack& arguments, const backend& on) {
  std::optional<c10::Device> argument;
  for (const auto& v : arguments) {
    for (const auto& t : tensors_in(v))
      if (t.defined() && t.device().type() == on.type()) return t.device();
    if (v.isDevice() && v.toDevice().type() == on.type()) argument = v.toDevice();
  }
  const auto current = c10::impl::VirtualGuardImpl(on.type()).getDevice();
  return argument && argument->has_index() ? *argument : current;
}

/// Under deterministic algorithms even `empty` writes to new memory, in the order of its stream.
bool fills_new_memory() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

bool overlap(const range& a, const range& b) {
  const auto* const x = static_cast<const char*>(a.begin);
  const auto* const y = static_cast<const char*>(b.begin);
  return x < y + b.bytes && y < x + a.bytes;
}

/// A copy of bytes of the device.
struct snapshot {
  explicit snapshot(const range& r) : at(r), bytes(kernel_address(r.begin), r.bytes) {}
  bool holds() const { return std::memcmp(kernel_address(at.begin), bytes.data(), bytes.size()) == 0; }
  range at;
  std::string bytes;
};

/// Allocates a workspace, as cuBLAS does.
void take_workspace(const backend& on, c10::Device device) {
  thread_local std::map<c10::DeviceIndex, c10::DataPtr*> kept;  // never freed: the thread may end after the allocator
  const long bytes = options().workspace;
  if (bytes <= 0 || kept[device.index()] != nullptr) return;
  kept[device.index()] = new c10::DataPtr(c10::GetAllocator(on.type())->allocate(static_cast<std::size_t>(bytes)));
}

/// Imitates a kernel for another alignment, which rounds differently.
void change_last_bit(const at::Tensor& t) {
  if (t.numel() > 0 && t.is_floating_point()) *static_cast<unsigned char*>(t.mutable_data_ptr()) ^= 1u;
}

/// The parts of a captured call that its replays need.
struct recorded {
  c10::OperatorHandle op;
  traits of;
  torch::jit::Stack arguments;
  std::vector<at::Tensor> outputs;  ///< undefined: the kernel writes the output itself
  std::function<philox()> draw;
  bool misaligned;
  int threads;

  void replay() const {
    if (at::get_num_threads() != threads) at::set_num_threads(threads);
    const auto from = draw ? draw() : philox{};
    auto stack = arguments;
    run_on_host(op, of, stack, &from);
    const at::AutoDispatchBelowADInplaceOrView below;
    std::size_t k = 0;
    for (const auto& v : stack)
      for (const auto& t : tensors_in(v)) {
        if (misaligned && k == 0) change_last_bit(t);
        if (outputs[k].defined()) outputs[k].copy_(t);
        ++k;
      }
  }
};

class call {
 public:
  call(const c10::OperatorHandle& op, torch::jit::Stack& stack, const backend& on)
      : op_(op),
        of_(traits_of(op)),
        stack_(stack),
        on_(on),
        given_(stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()), stack.end()),
        device_(device_of_call(given_, on)) {}

  void run() {
    const c10::DeviceGuard guard(device_);
    if (of_.view || (of_.untouched && !(of_.allocates && fills_new_memory()))) {
      host_side side(device_, on_, false);
      compute(side, nullptr);
      return give_back();
    }
    check_alive();
    auto& s = on_.current_stream(device_.index());
    const std::lock_guard one(s.giving);
    if (looks_at_data(of_, given_)) {
      synchronize(s);
    } else if (capturing(s)) {
      return capture(s);
    } else {
      s.drain();
    }
    if (const auto message = s.failed(); !message.empty()) throw failure(message);
    issue(s);
  }

 private:
  struct used {
    at::Tensor device, host;
    bool written;
  };

  void issue(stream& s) {
    const auto draw = drawn();
    const auto from = draw ? draw() : philox{};
    host_side side(device_, on_, false);
    const bool late = options().late > 0 && !of_.looks;
    if (of_.workspace) take_workspace(on_, device_);
    perform_job({op_.schema().name(), {}, {}, [&] { compute(side, &from, late); }});
    job j{op_.schema().name(), reads_, writes_, [] {}};
    if (late) j.run = late_work();
    give_back();
    if (!j.reads.empty() || !j.writes.empty()) enqueue(s, std::move(j));
  }

  /// Runs nothing, as on a real device. The kernel runs on zeros, to get the shapes of the results.
  void capture(stream& s) {
    auto draw = drawn();
    if (of_.workspace) take_workspace(on_, device_);
    blank_memory results;  // keeps the bytes at the addresses of the results
    host_side blank(device_, on_, true);
    compute(blank, nullptr, false, &results);
    recorded r{op_, of_, {}, {}, std::move(draw), misaligned_, at::get_num_threads()};
    host_side real(device_, on_, false);
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& v : given_) r.arguments.push_back(of_now(real.to_host(v)));
    for (const auto& o : outputs_) r.outputs.push_back(o.defined() ? real.to_host(o) : o);
    auto shared = std::make_shared<const recorded>(std::move(r));
    enqueue(s, {op_.schema().name(), reads_, writes_, [shared] { shared->replay(); }});
    give_back();
  }

  /// Replays use copies of the current host tensors.
  c10::IValue of_now(const c10::IValue& v) const {
    const auto kept = [](const at::Tensor& t) {
      const bool changes = t.defined() && !is_kernel_address(t.const_data_ptr()) && !t.unsafeGetTensorImpl()->is_wrapped_number();
      return changes ? t.clone() : t;
    };
    if (v.isTensor()) return kept(v.toTensor());
    if (v.isGenerator()) return {};  // the kernel gets another generator
    if (!v.isTensorList()) return v;
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(kept(t));
    return list;
  }

  std::function<philox()> drawn() const {
    if (!of_.draws) return {};
    at::Generator given;
    if (of_.generator >= 0)
      if (const auto& g = given_[static_cast<std::size_t>(of_.generator)]; g.isGenerator()) given = g.toGenerator();
    return on_.draw(given, device_.index());
  }

  void check_device(const at::Tensor& t) const {
    const bool fits = t.device().type() == on_.type() ? t.device() == device_ : t.dim() == 0 || of_.mixes;
    TORCH_CHECK(fits, "Expected all tensors to be on the same device, but ", op_.schema().name(), " found at least two devices, ",
                device_, " and ", t.device());
  }

  torch::jit::Stack arguments_for(host_side& side) {
    const auto written = written_by(of_, given_);
    torch::jit::Stack arguments;
    for (std::size_t k = 0; k < given_.size(); ++k) {
      arguments.push_back(side.to_host(given_[k]));
      const auto devices = tensors_in(given_[k]), hosts = tensors_in(arguments.back());
      for (std::size_t i = 0; i < devices.size(); ++i) {
        if (!devices[i].defined()) continue;
        check_device(devices[i]);
        if (side.of_device(devices[i])) used_.push_back({devices[i], hosts[i], written[k]});
      }
    }
    return arguments;
  }

  void compute(host_side& side, const philox* from, bool late = false, blank_memory* results = nullptr) {
    torch::jit::Stack values;
    {
      const inside_kernel scope(on_, writes_, results);
      values = arguments_for(side);
      for (const auto& u : used_) {
        const auto r = extent(u.device);
        if (r.bytes == 0) continue;
        if (!u.written) reads_.push_back(r);
        if (late) before_.emplace_back(r);
      }
      run_on_host(op_, of_, values, from);
    }
    for (const auto& u : used_)
      if (u.written) side.follow(u.device, u.host);
    for (const auto& u : used_)
      if (const auto r = extent(u.device); u.written && r.bytes > 0) writes_.push_back(r);
    keep_results(side, values);
  }

  void keep_results(host_side& side, const torch::jit::Stack& values) {
    const auto& returns = op_.schema().returns();
    bool first = true;
    for (std::size_t k = 0; k < values.size(); ++k) {
      const auto* const alias = k < returns.size() ? returns[k].alias_info() : nullptr;
      const bool is_given = alias != nullptr && alias->isWrite();
      results_.push_back(is_given ? argument_with(*alias) : side.to_device(values[k]));
      const auto hosts = tensors_in(values[k]), devices = tensors_in(results_.back());
      for (std::size_t i = 0; i < hosts.size(); ++i) {
        const bool fresh = !is_given && devices[i].defined() && !lies_in_argument(devices[i]);
        outputs_.push_back(fresh ? devices[i] : at::Tensor());
        if (std::exchange(first, false) && of_.product) notice_alignment(devices[i], hosts[i]);
      }
    }
  }

  void notice_alignment(const at::Tensor& result, const at::Tensor& of_host) {
    const long n = options().alignment;
    if (n <= 0) return;
    const auto off = [n](const at::Tensor& t) {
      return reinterpret_cast<std::uintptr_t>(extent(t).begin) % static_cast<std::uintptr_t>(n) != 0;
    };
    misaligned_ = off(result) || std::any_of(used_.begin(), used_.end(), [&](const used& u) { return off(u.device); });
    if (misaligned_) change_last_bit(of_host);
  }

  bool lies_in_argument(const at::Tensor& t) const {
    return std::any_of(used_.begin(), used_.end(), [&](const used& u) { return u.device.storage().is_alias_of(t.storage()); });
  }

  c10::IValue argument_with(const c10::AliasInfo& alias) const {
    const auto& arguments = op_.schema().arguments();
    for (std::size_t k = 0; k < arguments.size(); ++k) {
      const auto* const a = arguments[k].alias_info();
      if (a != nullptr && a->isWrite() && a->beforeSets() == alias.beforeSets()) return given_[k];
    }
    TORCH_CHECK(false, "emulated: no argument is what ", op_.schema().name(), " returns");
  }

  /// Makes written bytes appear late. Bytes that were read must not change until then.
  std::function<void()> late_work() {
    std::vector<range> targets;
    for (const auto& u : used_)
      if (u.written) targets.push_back(extent(u.device));
    for (const auto& o : outputs_) targets.push_back(extent(o));
    for (const auto& b : before_)
      if (!b.holds()) targets.push_back(b.at);  // the schema may not mark the argument as written
    std::vector<snapshot> written;
    for (const auto& r : targets)
      if (r.bytes > 0 && std::none_of(written.begin(), written.end(),
                                      [&](const snapshot& w) { return w.at.begin == r.begin && w.at.bytes == r.bytes; }))
        written.emplace_back(r);
    std::vector<snapshot> read;
    for (auto& b : before_)
      if (std::none_of(written.begin(), written.end(), [&](const snapshot& w) { return overlap(w.at, b.at); }))
        read.push_back(std::move(b));
    for (const auto& w : written) std::memset(kernel_address(w.at.begin), poison, w.at.bytes);
    return [read = std::move(read), written = std::move(written), name = op_.schema().name()] {
      for (const auto& r : read)
        if (!r.holds()) {
          const std::lock_guard guard(world_lock());
          report_race(name + ": an input changed before it was read");
        }
      for (const auto& w : written) std::memcpy(kernel_address(w.at.begin), w.bytes.data(), w.at.bytes);
    };
  }

  void give_back() {
    stack_.erase(stack_.end() - static_cast<std::ptrdiff_t>(given_.size()), stack_.end());
    for (auto& r : results_) stack_.push_back(std::move(r));
  }

  const c10::OperatorHandle& op_;
  const traits& of_;
  torch::jit::Stack& stack_;
  const backend& on_;
  torch::jit::Stack given_;
  c10::Device device_;
  std::vector<used> used_;
  std::vector<range> reads_, writes_;
  std::vector<snapshot> before_;
  torch::jit::Stack results_;
  std::vector<at::Tensor> outputs_;  ///< new outputs; undefined: the output is an argument, or lies in its memory
  bool misaligned_ = false;
};

}  // namespace

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, const backend& on) { call(op, *stack, on).run(); }

void run(const char* name, const char* overload, torch::jit::Stack* stack, const backend& on) {
  run(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), stack, on);
}

}  // namespace emulated
