// SPDX-License-Identifier: Apache-2.0
/// @file
/// The recorder: a boxed fallback below autograd, and hollow execution.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "trace.hpp"

namespace remat::torch::detail {
namespace {

/// The one functionality key below autograd that PyTorch gives neither kernels nor a fallback.
constexpr auto record_key = c10::DispatchKey::Fake;

/// Constants (results of operators without any other input) keep their values up to this size, so that masks can be asked.
constexpr std::size_t constant_limit = std::size_t{1} << 20;

/// Arguments that operators write although their schema does not say so.
struct hidden_write {
  const char* op;
  std::vector<const char*> arguments;
  const char* only_if;  ///< boolean argument that switches the write on, or nullptr
  bool statistics;      ///< results do not depend on the old contents: a recomputation can do without them
};
const std::vector<hidden_write>& hidden_writes() {
  static const std::vector<hidden_write> list = {
      {"aten::native_batch_norm", {"running_mean", "running_var"}, "training", true},
      {"aten::cudnn_batch_norm", {"running_mean", "running_var"}, "training", true},
      {"aten::miopen_batch_norm", {"running_mean", "running_var"}, "training", true},
      {"aten::batch_norm_update_stats", {"running_mean", "running_var"}, nullptr, true},
      {"aten::batch_norm_gather_stats", {"running_mean", "running_var"}, nullptr, true},
      {"aten::batch_norm_gather_stats_with_counts", {"running_mean", "running_var"}, nullptr, true},
      {"aten::mkldnn_rnn_layer_backward", {"workspace"}, nullptr, false},
      {"aten::_cudnn_rnn_backward", {"reserve"}, nullptr, false},
      {"aten::miopen_rnn_backward", {"reserve"}, nullptr, false}};
  return list;
}

/// Calls `f(tensor, element)` for each defined tensor of an argument or result.
template <class F>
void each_tensor(const c10::IValue& v, F f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor(), -1);
  } else if (v.isList()) {
    const auto list = v.toListRef();
    for (std::size_t i = 0; i < list.size(); ++i)
      if (list[i].isTensor() && list[i].toTensor().defined()) f(list[i].toTensor(), static_cast<int>(i));
  }
}

/// An argument with undefined tensors in place of its tensors.
c10::IValue without_tensors(const c10::IValue& v) {
  if (v.isTensor()) return c10::IValue(at::Tensor());
  if (!v.isList()) return v;
  auto list = v.toList().copy();
  for (std::size_t i = 0; i < list.size(); ++i)
    if (list.get(i).isTensor()) list.set(i, c10::IValue(at::Tensor()));
  return c10::IValue(list);
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

/// A tensor of the given geometry whose storage owns no memory.
at::Tensor hollow_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, options.dtype().itemsize());
  const auto device = options.device();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), nullptr, false);
  return at::empty({0}, options).set_(storage, 0, sizes, strides);
}

/// What is known of the contents of a storage while recording.
enum class contents {
  outside,   ///< parameters, buffers and other tensors that were there before
  constant,  ///< made during the capture, the same in every step
  kept,      ///< small integers that other operators may index with: valid values, but not constants
  hollow     ///< no memory
};

class recorder {
 public:
  recorder(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
           const std::vector<std::string>& names, c10::Device device)
      : generator_(at::globalContext().defaultGenerator(device)), device_(device) {
    start_ = expected_ = state();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      add_outside(parameters[i], parameters[i].requires_grad() ? role::parameter : role::buffer,
                  i < names.size() ? names[i] : "parameter " + std::to_string(i));
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const auto at = parameters.size() + i;
      add_outside(buffers[i], role::buffer, at < names.size() ? names[at] : "buffer " + std::to_string(i));
    }
  }
  recorder(const recorder&) = delete;
  recorder& operator=(const recorder&) = delete;

  /// Puts back what the operators wrote.
  ~recorder() {
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [tensor, saved] : saved_) tensor.copy_(saved);
    std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(start_);
  }

  /// A tensor of the step that owns no memory: an input or the gradient of an output.
  at::Tensor stand_in(const at::Tensor& like, at::IntArrayRef strides, role from, std::size_t position) {
    const bool keep = from == role::input && at::isIntegralType(like.scalar_type(), true) && like.nbytes() <= constant_limit;
    auto t = hollow_tensor(like.sizes(), strides, like.options());
    const auto s = add(t, keep ? contents::kept : contents::hollow);
    if (keep) {
      fill(t);
      filled_.clear();
      t.copy_(like);
    }
    auto& origin = trace_.storages[s];
    origin.from = from;
    origin.position = position;
    origin.name = (from == role::input ? "input " : "gradient of output ") + std::to_string(position);
    if (from == role::input) whole_.emplace(t.unsafeGetTensorImpl(), t);
    return t;
  }

  void start_backward() { trace_.backward = trace_.calls.size(); }
  const std::vector<traced_call>& calls() const { return trace_.calls; }
  bool knows(const at::Tensor& t) const { return t.has_storage() && index_.count(impl(t)); }
  bool outside(const at::Tensor& t) const { return trace_.storages[index_.at(impl(t))].from != role::internal; }

  tensor_view view_of(const at::Tensor& t) const {
    return {index_.at(impl(t)), t.sizes().vec(), t.strides().vec(), t.storage_offset(),
            t.scalar_type(),    t.is_conj(),     t.is_neg(),        whole_.count(t.unsafeGetTensorImpl()) > 0};
  }

  trace finish() {
    if (!same_bytes(state(), expected_))
      throw cannot_capture("the module leaves the generator in a state that none of its operators produced");
    for (std::size_t s = 0; s < trace_.storages.size(); ++s) freeze_if_temporary(static_cast<index_t>(s));
    return std::move(trace_);
  }

  [[noreturn]] void refuse(const std::string& op, const std::string& why) const {
    const auto& calls = trace_.calls;
    std::string where = "call " + std::to_string(calls.size()) + ", " + (trace_.backward ? "backward" : "forward");
    if (!calls.empty()) where += ", after " + calls.back().op.schema().name();
    throw cannot_capture(op + " (" + where + ") " + why);
  }

  /// Runs and records one call.
  void run(const c10::OperatorHandle& op, ::torch::jit::Stack& stack) {
    const auto& schema = op.schema();
    const auto& name = schema.name();
    const auto n = schema.arguments().size();
    const auto first = stack.size() - n;
    traced_call c{op, {}, {}, {}, at::GradMode::is_enabled(), {}, draw::none, 0, {}};
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < n; ++i) {
      const auto& argument = stack[first + i];
      if (argument.isGenerator() && argument.toGenerator().defined() && argument.toGenerator() != generator_)
        refuse(name, "draws from a generator other than the default one of " + device_.str());
      const auto* alias = schema.arguments()[i].alias_info();
      each_tensor(argument, [&](const at::Tensor& t, int element) {
        check(name, t);
        if (!index_.count(impl(t))) add_unknown(name, t);
        c.operands.push_back({static_cast<int>(i), element, view_of(t), alias && alias->isWrite()});
        tensors.push_back(t);
      });
      c.arguments.push_back(without_tensors(argument));
    }
    mark_hidden_writes(c);
    refuse_dynamic(c, tensors);
    freeze_raw_filled(c, tensors);
    const bool constant = std::all_of(c.operands.begin(), c.operands.end(),
                                      [&](const auto& o) { return contents_[o.view.value] == contents::constant; });
    std::vector<std::size_t> bytes;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (c.operands[i].written && contents_[c.operands[i].view.value] == contents::outside) save(tensors[i]);
      bytes.push_back(impl(tensors[i])->nbytes());
    }

    const bool seeded = op.hasTag(at::Tag::nondeterministic_seeded);
    at::Tensor before;
    if (seeded) before = state();
    {
      struct emptied {
        recorder& r;
        ~emptied() { r.drain(); }
      } at_exit{*this};
      for (const auto& t : tensors) fill(t);
      op.callBoxed(&stack);
    }
    if (seeded) note_draw(c, before);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (impl(tensors[i])->nbytes() != bytes[i] || index_.at(impl(tensors[i])) != c.operands[i].view.value)
        refuse(name, "resizes or replaces the storage of a tensor");

    std::vector<c10::StorageImpl*> touched;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (c.operands[i].written || impl(tensors[i])->nbytes() > constant_limit) touched.push_back(impl(tensors[i]));
    const auto results = schema.returns().size();
    for (std::size_t i = 0; i < results; ++i)
      each_tensor(stack[stack.size() - results + i], [&](const at::Tensor& t, int element) {
        check(name, t);
        if (!index_.count(impl(t))) {
          const bool indices = !constant && at::isIntegralType(t.scalar_type(), true) && impl(t)->nbytes() <= constant_limit;
          const auto s = add(t, c.random == draw::none && constant ? contents::constant
                                : indices                          ? contents::kept
                                                                   : contents::hollow);
          trace_.storages[s].name = name;
          raw_[s] = name.rfind("aten::empty", 0) == 0 && c.operands.empty();
          if (contents_[s] == contents::hollow) release(impl(t));
        }
        c.results.push_back({static_cast<int>(i), element, view_of(t), false});
      });
    for (auto* s : touched) settle(s, constant && c.random == draw::none);
    trace_.calls.push_back(std::move(c));
  }

 private:
  static c10::StorageImpl* impl(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

  at::Tensor state() {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    return generator_.get_state();
  }

  index_t add(const at::Tensor& t, contents known) {
    const auto s = static_cast<index_t>(trace_.storages.size());
    index_.emplace(impl(t), s);
    alive_.push_back(t.storage().getWeakStorageImpl());
    storage_value origin;
    origin.bytes = static_cast<bytes_t>(impl(t)->nbytes());
    origin.device = t.device();
    trace_.storages.push_back(std::move(origin));
    contents_.push_back(known);
    raw_.push_back(false);
    return s;
  }

  void add_outside(const at::Tensor& t, role from, const std::string& name) {
    check(name, t);
    whole_.emplace(t.unsafeGetTensorImpl(), t);
    if (index_.count(impl(t))) return;
    auto& origin = trace_.storages[add(t, contents::outside)];
    origin.from = from;
    origin.name = name;
    origin.tensor = t;
  }

  /// A tensor that nobody announced: kept by the module in another place, or made outside the dispatcher during forward.
  void add_unknown(const std::string& op, const at::Tensor& t) {
    if (t.requires_grad()) refuse(op, "reads a tensor that requires a gradient and is not among the parameters");
    add_outside(t, role::buffer, "tensor of " + op);
    if (impl(t)->nbytes() > constant_limit) return;
    auto copy = t.detach().clone();
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    unknown_.emplace(index_.at(impl(t)), std::move(copy));
  }

  /// After the step: an unknown tensor that only the recorder still holds was made for this step; its contents are a constant.
  void freeze_if_temporary(index_t s) {
    auto& origin = trace_.storages[s];
    const auto copy = unknown_.find(s);
    if (copy == unknown_.end()) return;
    whole_.erase(origin.tensor.unsafeGetTensorImpl());
    if (origin.tensor.use_count() > 1 || origin.tensor.storage().use_count() > 1) return;
    origin.from = role::constant;
    origin.tensor = copy->second;
  }

  /// `empty` whose first use is a read was filled by hand (`torch::tensor`, `data_ptr`): its contents are a constant.
  void freeze_raw_filled(const traced_call& c, const std::vector<at::Tensor>& tensors) {
    const auto& name = c.op.schema().name();
    const bool overwrites = c.op.hasTag(at::Tag::nondeterministic_seeded) || name == "aten::copy_" || name == "aten::fill_" ||
                            name == "aten::zero_" || name.find("_out") != std::string::npos ||
                            c.op.schema().overload_name().find("out") != std::string::npos;
    const bool view = std::none_of(c.operands.begin(), c.operands.end(), [](const auto& o) { return o.written; }) &&
                      c.op.schema().returns().size() > 0 && c.op.schema().returns()[0].alias_info() && name != "aten::lift_fresh";
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto s = c.operands[i].view.value;
      if (!raw_[s] || view) continue;
      raw_[s] = false;
      if (c.operands[i].written && overwrites) continue;
      const auto& t = tensors[i];
      if (impl(t)->nbytes() == 0) continue;
      auto whole =
          at::empty({0}, t.options()).set_(t.storage(), 0, {static_cast<int64_t>(impl(t)->nbytes() / t.itemsize())}, {1});
      trace_.storages[s].from = role::constant;
      trace_.storages[s].tensor = whole.clone();
      trace_.storages[s].name = "constant";
    }
  }

  void check(const std::string& op, const at::Tensor& t) const {
    if (t.layout() != c10::kStrided || !t.has_storage() || t.is_quantized() || t.is_nested())
      refuse(op, "takes or gives a tensor that is sparse, quantized, nested or otherwise without a plain storage");
    if (t.device() != device_ && !(t.is_cpu() && (t.dim() == 0 || t.nbytes() <= constant_limit)))
      refuse(op, "meets a tensor on " + t.device().str() + ", the step runs on " + device_.str());
  }

  void mark_hidden_writes(traced_call& c) const {
    const auto& arguments = c.op.schema().arguments();
    auto position = [&](const std::string& name) {
      for (std::size_t i = 0; i < arguments.size(); ++i)
        if (arguments[i].name() == name) return static_cast<int>(i);
      return -1;
    };
    for (const auto& h : hidden_writes()) {
      if (c.op.schema().name() != h.op) continue;
      if (h.only_if && !c.arguments[static_cast<std::size_t>(position(h.only_if))].toBool()) continue;
      for (const auto* name : h.arguments)
        for (auto& o : c.operands)
          if (o.at == position(name)) {
            o.written = true;
            if (h.statistics) c.statistics.push_back(o.at);
          }
    }
  }

  void refuse_dynamic(const traced_call& c, const std::vector<at::Tensor>& tensors) const {
    const auto& name = c.op.schema().name();
    if (name == "aten::set_" || name == "aten::resize_" || name == "aten::resize_as_")
      refuse(name, "resizes or replaces the storage of a tensor");
    bool dynamic = c.op.hasTag(at::Tag::data_dependent_output) || c.op.hasTag(at::Tag::dynamic_output_shape);
    if (name == "aten::index") {
      dynamic = false;
      for (std::size_t i = 0; i < tensors.size(); ++i)
        dynamic |= c.operands[i].at == 1 && (tensors[i].scalar_type() == at::kBool || tensors[i].scalar_type() == at::kByte);
    }
    if (!dynamic) return;
    for (const auto& o : c.operands)
      if (contents_[o.view.value] != contents::constant)
        refuse(name, "depends on the values of an activation, an input, a parameter or a buffer; a plan needs a fixed graph");
  }

  void note_draw(traced_call& c, const at::Tensor& before) {
    const auto after = state();
    if (same_bytes(before, after)) return;
    auto same = [&](const auto& d) { return same_bytes(d.first, before); };
    if (const auto earlier = std::find_if(draws_.begin(), draws_.end(), same); earlier != draws_.end()) {
      c.random = draw::repeat;
      c.repeats = earlier->second;
      return;
    }
    if (same_bytes(before, expected_)) {
      c.random = draw::next;
    } else {
      for (const auto& past : ends_)
        if (same_bytes(past, before)) refuse(c.op.schema().name(), "draws after the generator was put back by hand");
      c.random = draw::reseed;
      c.state = before;
    }
    draws_.emplace_back(before, trace_.calls.size());
    ends_.push_back(after);
    expected_ = after;
  }

  void save(const at::Tensor& t) {
    if (!saved_storages_.insert(impl(t)).second) return;
    auto whole = at::empty({0}, t.options()).set_(t.storage(), 0, {static_cast<int64_t>(impl(t)->nbytes() / t.itemsize())}, {1});
    saved_.emplace_back(whole, whole.clone());
  }

  /// Lends memory to the storage of a hollow tensor until `drain`.
  void fill(const at::Tensor& t) {
    auto* s = impl(t);
    if (contents_[index_.at(s)] != contents::hollow && s->data() != nullptr) return;
    if (s->nbytes() == 0 || s->data() != nullptr) return;
    s->set_data_ptr_noswap(c10::GetAllocator(s->device_type())->allocate(s->nbytes()));
    filled_.push_back(t.storage());
    at::empty({0}, t.options().dtype(at::kByte)).set_(t.storage(), 0, {static_cast<int64_t>(s->nbytes())}, {1}).zero_();
  }
  void drain() {
    for (const auto& s : filled_) release(s.unsafeGetStorageImpl());
    filled_.clear();
  }
  static void release(c10::StorageImpl* s) { s->set_data_ptr_noswap(c10::DataPtr(nullptr, s->device())); }

  /// After a call touched a storage of the step: constants stay only if small and written from constants.
  void settle(c10::StorageImpl* s, bool constant) {
    auto& known = contents_[index_.at(s)];
    if (known == contents::outside || known == contents::hollow) return;
    if (known == contents::constant && constant && s->nbytes() <= constant_limit) return;
    if (known == contents::kept && s->nbytes() <= constant_limit) return;
    known = contents::hollow;
    release(s);
  }

  trace trace_;
  std::unordered_map<c10::StorageImpl*, index_t> index_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_;  ///< keeps addresses from being used again, not the memory
  std::vector<contents> contents_;
  std::vector<bool> raw_;                                   ///< made by `empty`, not yet written by an operator
  std::unordered_map<c10::TensorImpl*, at::Tensor> whole_;  ///< tensors from outside
  std::map<index_t, at::Tensor> unknown_;                   ///< storages nobody announced, with their contents
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;    ///< storages from outside that were written, with their contents
  std::set<c10::StorageImpl*> saved_storages_;
  std::vector<c10::Storage> filled_;
  at::Generator generator_;
  c10::Device device_;
  at::Tensor start_, expected_;  ///< state of the generator at the start, after the last draw
  std::vector<std::pair<at::Tensor, std::size_t>> draws_;
  std::vector<at::Tensor> ends_;
};

/// The recorder of the capture that runs; threads of the autograd engine inherit the dispatch key, not thread-local data.
recorder* active = nullptr;

void fallback(const c10::OperatorHandle& op, ::torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(record_key);
  if (active)
    active->run(op, *stack);
  else
    op.callBoxed(stack);
}

/// Registers the fallback on first use.
void claim_key() {
  static const auto library = [] {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(record_key))
      throw not_available("capture needs the dispatch key Fake, but a fallback is registered for it already");
    auto lib = std::make_unique<::torch::Library>(::torch::Library::IMPL, "_", record_key, __FILE__, __LINE__);
    lib->fallback(::torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return lib;
  }();
}

struct recording {
  explicit recording(recorder& r) { active = &r; }
  ~recording() { active = nullptr; }
  recording(const recording&) = delete;
  recording& operator=(const recording&) = delete;
};

/// What AccumulateGrad makes of a first gradient: laid out like the parameter, and a tensor of its own.
at::Tensor settled(const at::Tensor& grad, const at::Tensor& variable, bool shared) {
  at::NoGradGuard no_grad;
  if (!shared && ::torch::autograd::utils::obeys_layout_contract(grad, variable)) return grad;
  return ::torch::autograd::utils::clone_obey_contract(grad, variable);
}

}  // namespace

trace record(const forward_function& forward, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set())
    throw cannot_capture("a dispatch mode is active in this thread; capture outside of it");
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  claim_key();

  const auto& any = !parameters.empty() ? parameters : inputs;
  recorder r(parameters, buffers, names, any.empty() ? c10::Device(c10::kCPU) : any[0].device());
  std::vector<at::Tensor> arguments, outputs, wanted, grads, roots, root_grads;
  std::vector<std::optional<at::Tensor>> output_grads;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    arguments.push_back(r.stand_in(inputs[i], inputs[i].strides(), role::input, i));
    arguments.back().requires_grad_(inputs[i].requires_grad());
  }
  for (const auto& p : parameters)
    if (p.requires_grad()) wanted.push_back(p);
  const auto trained = wanted.size();
  for (const auto& a : arguments)
    if (a.requires_grad()) wanted.push_back(a);
  {
    recording on(r);
    at::AutoGradMode grad_mode(true);
    {
      c10::impl::IncludeDispatchKeyGuard key(record_key);
      outputs = forward(arguments);
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const auto& o = outputs[i];
      if (!o.defined() || !r.knows(o))
        throw cannot_capture("output " + std::to_string(i) + " of the module was not made by a recorded operator of this thread");
      output_grads.emplace_back();
      if (!o.requires_grad()) continue;
      at::NoGradGuard no_grad;
      const bool dense = o.is_non_overlapping_and_dense();
      const auto strides = dense ? o.strides().vec() : at::detail::defaultStrides(o.sizes());
      output_grads.back() = r.stand_in(o.detach(), strides, role::output_grad, i);
      roots.push_back(o);
      root_grads.push_back(*output_grads.back());
    }
    if (roots.empty()) throw cannot_capture("the outputs of the module need no gradient");
    r.start_backward();
    c10::impl::IncludeDispatchKeyGuard key(record_key);
    grads = ::torch::autograd::grad(roots, wanted, root_grads, std::nullopt, false, true);
    std::set<c10::StorageImpl*> taken;
    for (const auto& o : outputs) taken.insert(o.storage().unsafeGetStorageImpl());
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      if (!r.knows(grads[i])) throw cannot_capture("a gradient was not made by a recorded operator");
      const bool shared = r.outside(grads[i]) || taken.count(grads[i].storage().unsafeGetStorageImpl());
      grads[i] = settled(grads[i], wanted[i], shared);
      taken.insert(grads[i].storage().unsafeGetStorageImpl());
    }
  }

  std::vector<at::Tensor> kept;
  std::vector<tensor_view> parameter_grads, output_views;
  std::vector<std::optional<tensor_view>> grad_views, input_grads;
  for (std::size_t i = 0; i < trained; ++i)
    if (grads[i].defined()) {
      kept.push_back(wanted[i]);
      parameter_grads.push_back(r.view_of(grads[i]));
    }
  auto next = trained;
  for (const auto& a : arguments) {
    input_grads.emplace_back();
    if (!a.requires_grad()) continue;
    if (grads[next].defined()) input_grads.back() = r.view_of(grads[next]);
    ++next;
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    output_views.push_back(r.view_of(outputs[i]));
    grad_views.emplace_back();
    if (output_grads[i]) grad_views.back() = r.view_of(*output_grads[i]);
  }
  auto t = r.finish();
  for (auto& origin : t.storages) {
    if (origin.from != role::parameter) continue;
    const auto found = std::find_if(kept.begin(), kept.end(), [&](const auto& p) { return p.is_alias_of(origin.tensor); });
    origin.position = static_cast<std::size_t>(found - kept.begin());
    if (found == kept.end()) origin.from = role::buffer, origin.position = 0;
  }
  t.parameters = std::move(kept);
  t.parameter_grads = std::move(parameter_grads);
  t.outputs = std::move(output_views);
  t.output_grads = std::move(grad_views);
  t.input_grads = std::move(input_grads);
  return t;
}

}  // namespace remat::torch::detail
