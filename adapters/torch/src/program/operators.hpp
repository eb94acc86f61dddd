// SPDX-License-Identifier: Apache-2.0
/// @file
/// Facts about operators that their schemas do not tell. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace remat::pytorch {

/// How an operator that reads only the geometry of a tensor fills its result; `as_called`: it is no such operator.
enum class filled { as_called, with_nothing, with_zeros, with_ones, with_argument };

struct operator_facts {
  std::vector<std::string> writes = {};  ///< arguments written although the schema does not say so
  std::string writes_if = {};            ///< boolean argument that enables these writes; empty: always
  bool statistics = false;        ///< results do not depend on old contents of `writes`: a recomputation can omit these arguments
  bool writes_lists = false;      ///< replaces tensors in lists among its arguments
  bool resizes = false;           ///< changes the size of a storage, or the storage of a tensor
  bool reads_files = false;       ///< a document must not call it
  bool overwrites = false;        ///< writes its whole first argument without reading it
  std::optional<int> masks = {};  ///< argument that may hold masks: only then do sizes depend on values
  bool lengths = false;           ///< sizes depend on lengths; these are tensors only in the overload `Tensor`
  bool draws_by_values = false;   ///< values of its operands decide how many numbers it draws: none for zeros
  filled makes = filled::as_called;
  std::size_t fill_value = 0;  ///< position of the argument to fill with
};

/// The table of facts. @param name with namespace, without overload, such as "aten::copy_"
const operator_facts& facts(const std::string& name);
inline const operator_facts& facts(const c10::OperatorHandle& op) { return facts(op.schema().name()); }

/// True if the schema says that a call writes this argument.
inline bool is_written(const c10::Argument& a) { return a.alias_info() != nullptr && a.alias_info()->isWrite(); }
/// An operator of PyTorch itself.
bool is_native(const c10::OperatorHandle& op);
/// True if the kernel may raise an error for some values (an index out of range, a failure of LAPACK), and may run twice: it
/// writes no operand and does not draw. Custom operators count as such.
bool may_raise_by_values(const c10::OperatorHandle& op);
/// Indices, and the number of elements from which they choose.
struct index_list {
  at::Tensor indices;
  int64_t size = 0;
};
/// The indices of a call whose kernel raises no error while all of them are in [0, size).
/// @param arguments of the call
/// @return empty: it may raise other errors, or none is known
std::vector<index_list> indices_in(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);
/// May draw from a generator.
bool may_draw(const c10::OperatorHandle& op);
/// Reads no data of its operands, only sizes and types (`ones_like`, `new_zeros`).
bool reads_only_geometry(const c10::OperatorHandle& op);
/// Returns a view of its first argument, and does nothing else.
bool is_view(const c10::OperatorHandle& op);
/// Writes a whole argument without reading it: draws into it, is an `out` variant, or is listed in the table.
bool overwrites(const c10::OperatorHandle& op);
/// The argument that takes a mask, or a list of positions and masks; -1: none.
int takes_masks(const c10::OperatorHandle& op);
/// True if such an operator takes the tensor for a mask.
inline bool is_mask_type(at::ScalarType type) { return type == at::kBool || type == at::kByte; }
inline bool is_mask(const at::Tensor& t) { return is_mask_type(t.scalar_type()); }
/// Positions of the set elements of a mask in a call. For operators that take lists: one tensor per dimension, as their kernels
/// make them. For operators that take one mask: positions in the flattened first argument.
std::vector<at::Tensor> positions_in(const at::Tensor& mask, const c10::OperatorHandle& op,
                                     const std::vector<c10::IValue>& arguments);
/// Replaces masks by positions in a call.
/// @param arguments changed in place
/// @param lists     positions per mask; null: the tensor stays
/// @return the operator to call; nothing: there is none for these sizes
std::optional<c10::OperatorHandle> put_positions(const c10::OperatorHandle& op, std::vector<c10::IValue>& arguments,
                                                 const std::function<const std::vector<at::Tensor>*(const at::Tensor&)>& lists);
/// Makes a tensor without contents.
bool makes_uninitialized(const c10::OperatorHandle& op);
/// The variant of an operator that writes its result over tensor argument `argument`, and reads each element before it writes
/// there: `add_` or `add.out` for `add`. If it has one more argument, that last argument is `out`. It gives the same bits if
/// operand and result have the same layout.
/// @param dtype of operand and result
/// @return nothing if there is no variant, or it is not known to be safe for that type
std::optional<c10::OperatorHandle> in_place_variant(const c10::OperatorHandle& op, int argument, c10::ScalarType dtype);
/// True if each element of the only result depends on operand elements at the same place only.
bool is_elementwise(const c10::OperatorHandle& op);
/// True if operand values determine more than the values of the results, such as their sizes.
/// @param is_mask tells whether the tensor in an argument is a mask
template <class F>
bool is_dynamic(const c10::OperatorHandle& op, F is_mask) {
  const auto& known = facts(op);
  if (known.masks) return is_mask(*known.masks);
  if (known.lengths && op.schema().overload_name().empty()) return false;
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

/// True if the result is neither a tensor nor a list.
inline bool gives_number(const c10::Argument& result) {
  const auto kind = result.type()->kind();
  return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
}

/// Fills a tensor for operators that refuse zeros: positive numbers, a well-conditioned matrix if square, ones if integers.
void fill_with_safe_values(const at::Tensor& t);
/// Notes that an operator returned another geometry than predicted. From now on only its kernel tells the geometry.
void require_kernel_geometry(const c10::OperatorHandle& op);
bool distrusts_results(const c10::OperatorHandle& op);

}  // namespace remat::pytorch
