// SPDX-License-Identifier: Apache-2.0
/// @file
/// What capture must know of operators and their schemas do not tell. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace remat::pytorch {

/// An operator that reads only the geometry of a tensor, and what the new one is filled with.
enum class filled { as_called, with_nothing, with_zeros, with_ones, with_argument };

struct operator_facts {
  std::vector<std::string> writes = {};  ///< arguments written although the schema does not say so
  std::string writes_if = {};            ///< boolean argument that switches that on; empty: always
  bool statistics = false;               ///< results do not depend on what `writes` held: a recomputation can do without them
  bool writes_lists = false;             ///< puts other tensors into lists among its arguments
  bool resizes = false;                  ///< gives a storage another size, or a tensor another storage
  bool reads_files = false;              ///< nothing a file may ask for
  bool overwrites = false;               ///< writes the whole of its first argument without reading it
  std::optional<int> masks = {};         ///< sizes depend on values only if this argument holds masks
  bool lengths = false;                  ///< sizes depend on lengths, which are numbers but in the overload `Tensor`
  filled makes = filled::as_called;
  std::size_t fill_value = 0;  ///< position of that argument
};

/// The one table of them. @param name with namespace, without overload, such as "aten::copy_"
const operator_facts& facts(const std::string& name);
inline const operator_facts& facts(const c10::OperatorHandle& op) { return facts(op.schema().name()); }

/// The schema says that a call writes this argument.
inline bool is_written(const c10::Argument& a) { return a.alias_info() != nullptr && a.alias_info()->isWrite(); }
/// One of PyTorch's own.
bool is_native(const c10::OperatorHandle& op);
/// May draw from a generator.
bool may_draw(const c10::OperatorHandle& op);
/// Gives a view of its first argument, and does nothing else.
bool is_view(const c10::OperatorHandle& op);
/// Writes all of an argument without reading it: draws into it, an `out` variant, or by the table.
bool overwrites(const c10::OperatorHandle& op);
/// It takes a mask, or a list of tensors of positions or masks. @return that argument; -1: it takes none
int takes_masks(const c10::OperatorHandle& op);
/// A tensor that such operators take for a mask.
inline bool is_mask(const at::Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; }
/// Where a mask among the arguments of a call is set: per dimension, as the kernels for lists make it; or, where the operator
/// takes one mask, in the first argument as if that were flat.
std::vector<at::Tensor> positions_in(const at::Tensor& mask, const c10::OperatorHandle& op,
                                     const std::vector<c10::IValue>& arguments);
/// The same call with positions in the place of masks.
/// @param arguments get them
/// @param lists     per mask; null: the tensor stays
/// @return its operator; nothing: there is none for these sizes
std::optional<c10::OperatorHandle> put_positions(const c10::OperatorHandle& op, std::vector<c10::IValue>& arguments,
                                                 const std::function<const std::vector<at::Tensor>*(const at::Tensor&)>& lists);
/// Makes a tensor that nobody has written yet.
bool makes_raw(const c10::OperatorHandle& op);
/// The variant of an operator that writes its result over tensor argument `argument`, each element where the operator has read it
/// before: `add_` or `add.out` of `add`. Its last argument is the `out` one if it has one more. It gives the same bits if operand
/// and result have the same layout.
/// @param dtype of operand and result
/// @return nothing if there is none, or the operator is not known to allow it for that type
std::optional<c10::OperatorHandle> in_place_variant(const c10::OperatorHandle& op, int argument, c10::ScalarType dtype);
/// It computes each element of its one result from the elements at that place.
bool is_elementwise(const c10::OperatorHandle& op);
/// The results depend on the values of operands in more than their own values.
/// @param is_mask is the tensor in this argument a mask?
template <class F>
bool is_dynamic(const c10::OperatorHandle& op, F is_mask) {
  const auto& known = facts(op);
  if (known.masks) return is_mask(*known.masks);
  if (known.lengths && op.schema().overload_name().empty()) return false;
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

/// What an operator returns there is no tensor, and no list.
inline bool gives_number(const c10::Argument& result) {
  const auto kind = result.type()->kind();
  return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
}

/// Numbers for operators that refuse zeros: positive, well conditioned where they are a square matrix, one where they are
/// integers.
void fill_plausibly(const at::Tensor& t);
/// The operator has given results of another geometry than was known before it ran: from now on only its kernel is asked.
void distrust_results(const c10::OperatorHandle& op);
bool distrusts_results(const c10::OperatorHandle& op);

}  // namespace remat::pytorch
