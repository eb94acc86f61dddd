// SPDX-License-Identifier: Apache-2.0
#include "gradient_hooks.hpp"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <remat/pytorch/memory.hpp>

#include "views.hpp"

namespace remat::pytorch {
namespace {

using ::torch::autograd::variable_list;

thread_local gradient_hooks::active* hooks_of_thread = nullptr;

/// The defined gradients of a list, and their positions.
struct defined_gradients {
  explicit defined_gradients(const variable_list& all) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!all[i].defined()) continue;
      gradients.push_back(all[i]);
      positions.push_back(static_cast<int64_t>(i));
    }
  }
  std::vector<at::Tensor> gradients;
  std::vector<int64_t> positions;
};

/// The list of `size` gradients in which `some` are at `positions`.
variable_list spread(std::size_t size, const std::vector<at::Tensor>& some, at::IntArrayRef positions) {
  variable_list all(size);
  for (std::size_t i = 0; i < some.size(); ++i) all[static_cast<std::size_t>(positions[i])] = some[i];
  return all;
}

void write_all(const at::Tensor& to, const at::Tensor& from) {
  first_of_expanded(to, to.strides()).copy_(first_of_expanded(from, to.strides()));
}

/// Why later kernels cannot read `now` in place of `planned`; null: they can.
const char* differs(const at::Tensor& now, const at::Tensor& planned) {
  if (!now.defined()) return "a hook inside of the model that returns no gradient";
  if (now.is_sparse() || now.sizes() != planned.sizes() || now.dtype() != planned.dtype() || now.device() != planned.device() ||
      !same_strides(now.sizes(), now.strides(), planned.strides()))
    return "a hook inside of the model that returns a gradient with another memory layout";
  return nullptr;
}

/// Kernel of `remat::call_hooks_`: calls the hooks of a place, and writes their results over the gradients. Does nothing outside
/// of a planned step.
/// @param gradients the defined gradients at this place
/// @param seen      behind a node: the defined gradients of its outputs
/// @param sizes     number of all gradients at the place, and of all gradients of outputs
/// @param positions of `gradients` among all
/// @param seen_at   the same for `seen`
void call_hooks_(at::TensorList gradients, at::TensorList seen, int64_t place, at::IntArrayRef sizes, at::IntArrayRef positions,
                 at::IntArrayRef seen_at) {
  if (hooks_of_thread != nullptr && !hooks_of_thread->calling())
    hooks_of_thread->call(hook_place::of(place), gradients, seen, sizes, positions, seen_at);
}
/// Kernel of `remat::call_hooks`: the same, with new tensors for the results.
std::vector<at::Tensor> call_hooks(at::TensorList gradients, at::TensorList seen, int64_t place, at::IntArrayRef sizes,
                                   at::IntArrayRef positions, at::IntArrayRef seen_at) {
  std::vector<at::Tensor> results;
  for (const auto& g : gradients) {
    results.push_back(at::empty_strided(g.sizes(), g.strides(), g.options()));
    write_all(results.back(), g);
  }
  call_hooks_(results, seen, place, sizes, positions, seen_at);
  return results;
}

/// Calls the operator through the dispatcher, as a kernel of the backward.
variable_list call_operator(hook_place place, const variable_list& gradients, const variable_list& seen) {
  using function =
      std::vector<at::Tensor>(at::TensorList, at::TensorList, int64_t, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(call_hooks_name, "").typed<function>();
  const defined_gradients some(gradients), before(seen);
  if (some.gradients.empty()) return gradients;
  const std::vector<int64_t> sizes{static_cast<int64_t>(gradients.size()), static_cast<int64_t>(seen.size())};
  const auto results = op.call(some.gradients, before.gradients, place.number(), sizes, some.positions, before.positions);
  return spread(gradients.size(), results, some.positions);
}

/// Calls the operator in place of the hooks of a place.
struct call_before final : ::torch::autograd::FunctionPreHook {
  explicit call_before(hook_place p) : place(p) {}
  variable_list operator()(const variable_list& gradients) override { return call_operator(place, gradients, {}); }
  hook_place place;
};
struct call_behind final : ::torch::autograd::FunctionPostHook {
  explicit call_behind(hook_place p) : place(p) {}
  variable_list operator()(const variable_list& gradients, const variable_list& seen) override {
    return call_operator(place, gradients, seen);
  }
  hook_place place;
};

/// Gives the results of hooks that have been called.
struct known_results final : ::torch::autograd::FunctionPreHook, ::torch::autograd::FunctionPostHook {
  explicit known_results(std::vector<std::optional<at::Tensor>> k) : known(std::move(k)) {}
  variable_list operator()(const variable_list& gradients) override {
    auto results = gradients;
    for (std::size_t i = 0; i < results.size(); ++i)
      if (known[i]) results[i] = *known[i];
    return results;
  }
  variable_list operator()(const variable_list& gradients, const variable_list&) override { return (*this)(gradients); }
  std::vector<std::optional<at::Tensor>> known;  ///< nothing: the hook has changed nothing
};

TORCH_LIBRARY_FRAGMENT(remat, m) {
  m.def("call_hooks(Tensor[] gradients, Tensor[] seen, int place, int[] sizes, int[] positions, int[] seen_at) -> Tensor[]");
  m.def("call_hooks_(Tensor(a!)[] gradients, Tensor[] seen, int place, int[] sizes, int[] positions, int[] seen_at) -> ()");
}
TORCH_LIBRARY_IMPL(remat, CompositeExplicitAutograd, m) {
  m.impl("call_hooks", call_hooks);
  m.impl("call_hooks_", call_hooks_);
}

}  // namespace

void replaced_hooks::swap(hooks_before& h) {
  h.node->tensor_pre_hooks().swap(h.of_tensors);
  h.node->retains_grad_hooks().swap(h.retain);
  h.node->pre_hooks().swap(h.of_node);
}

replaced_hooks::replaced_hooks(const std::vector<::torch::autograd::Node*>& nodes) {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (has_hooks_before(*nodes[i])) before(*nodes[i], std::make_unique<call_before>(hook_place{i, false}));
    if (has_hooks_behind(*nodes[i])) behind(*nodes[i], std::make_unique<call_behind>(hook_place{i, true}));
  }
}

replaced_hooks::~replaced_hooks() {
  for (auto& h : before_) swap(h);
  for (auto& h : behind_) swap(h);
}

void replaced_hooks::before(::torch::autograd::Node& node, std::unique_ptr<::torch::autograd::FunctionPreHook> by) {
  auto& h = before_.emplace_back(hooks_before{node.getptr(), {}, {}, {}});
  h.of_node.push_back(std::move(by));
  swap(h);
}

void replaced_hooks::behind(::torch::autograd::Node& node, std::unique_ptr<::torch::autograd::FunctionPostHook> by) {
  auto& h = behind_.emplace_back(hooks_behind{node.getptr(), {}});
  h.of_node.push_back(std::move(by));
  swap(h);
}

variable_list gradient_hooks::call(hook_place place, const variable_list& given, const variable_list& seen) {
  auto& node = *nodes_.at(place.node);
  std::vector<int64_t> versions;
  for (const auto& g : given) versions.push_back(g.defined() ? g._version() : 0);
  auto gradients = given;
  if (!place.behind) {  // in the order of autograd. A hook may add hooks
    for (std::size_t i = 0; i < node.tensor_pre_hooks().size(); ++i) gradients = (*node.tensor_pre_hooks()[i])(gradients);
    for (const auto& [output, hook] : node.retains_grad_hooks()) gradients = (*hook)(gradients);
    for (std::size_t i = 0; i < node.pre_hooks().size(); ++i) gradients = (*node.pre_hooks()[i])(gradients);
  } else {
    for (std::size_t i = 0; i < node.post_hooks().size(); ++i) gradients = (*node.post_hooks()[i])(gradients, seen);
  }
  if (!keeps_) return gradients;
  auto& known = called_[place];
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto &before = given[i], &now = gradients.at(i);
    known.emplace_back();
    if (!before.defined() || !now.is_same(before) || now._version() != versions[i])
      known.back() = now.defined() && before.defined() && now.is_alias_of(before) ? now.clone() : now;
  }
  return gradients;
}

void gradient_hooks::give_results() {
  for (const auto& [place, known] : called_) {
    auto& node = *nodes_[place.node];
    if (!place.behind)
      replaced_.before(node, std::make_unique<known_results>(known));
    else
      replaced_.behind(node, std::make_unique<known_results>(known));
  }
}

gradient_hooks::active::active(gradient_hooks& hooks, std::function<void()> before)
    : hooks_(hooks),
      before_(std::move(before)),
      keys_(c10::impl::tls_local_dispatch_key_set()),
      outer_(std::exchange(hooks_of_thread, this)) {}
gradient_hooks::active::~active() { hooks_of_thread = outer_; }

void gradient_hooks::active::call(hook_place place, at::TensorList gradients, at::TensorList seen, at::IntArrayRef sizes,
                                  at::IntArrayRef positions, at::IntArrayRef seen_at) {
  const outside_of_plan memory_of_the_caller;
  before_();
  const auto lent = [this](at::TensorList list) {
    std::vector<at::Tensor> tensors;
    for (const auto& t : list) {
      if (t.is_conj() || t.is_neg()) {
        tensors.push_back(t.resolve_conj().resolve_neg());
        continue;
      }
      const c10::Storage over =
          storage_over(t.mutable_data_ptr(), at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()), t.device());
      lent_.push_back(over);
      tensors.push_back(at::empty({0}, t.options()).set_(over, 0, t.sizes(), t.strides()));
    }
    return tensors;
  };
  const auto call = [&] {
    auto given = spread(static_cast<std::size_t>(sizes[0]), lent(gradients), positions);
    auto results = [&] {
      const auto others = spread(static_cast<std::size_t>(sizes[1]), lent(seen), seen_at);
      const c10::impl::ForceDispatchKeyGuard as_the_caller(keys_);
      const auto ended = c10::make_scope_exit([this] { calling_ = false; });
      calling_ = true;  // plans that a hook makes or runs do not call hooks of this step
      return hooks_.call(place, given, others);
    }();
    if (defined_gradients(results).positions.size() > gradients.size())
      throw other_gradient("a hook inside of the model that returns a gradient where there was none");
    std::vector<bool> written(results.size());  // the result is the gradient, in its memory
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const auto k = static_cast<std::size_t>(positions[i]);
      if (const auto* why = differs(results[k], gradients[i])) throw other_gradient(why);
      written[i] = results[k].is_same(given[k]) && results[k].const_data_ptr() == gradients[i].const_data_ptr();
      if (written[i]) results[k].reset();
    }
    given.clear();
    take_back();  // before other results are written there
    for (std::size_t i = 0; i < gradients.size(); ++i)
      if (!written[i]) write_all(gradients[i], results[static_cast<std::size_t>(positions[i])]);
  };
  try {
    call();
  } catch (...) {  // the hooks may hold the gradients nevertheless
    take_back();
    throw;
  }
}

void gradient_hooks::active::take_back() {
  for (const auto& s : std::exchange(lent_, {}))
    if (s.use_count() > 1) move_to_own_memory(s);
}

void gradient_hooks::about_to_read(const at::Tensor& t) {
  if (hooks_of_thread == nullptr || !t.has_storage()) return;
  auto& lent = hooks_of_thread->lent_;
  const auto here = std::find_if(lent.begin(), lent.end(), [&](const auto& s) { return s.is_alias_of(t.storage()); });
  if (here == lent.end()) return;
  move_to_own_memory(*here);
  lent.erase(here);
}

}  // namespace remat::pytorch
