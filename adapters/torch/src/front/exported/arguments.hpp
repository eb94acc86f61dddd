// SPDX-License-Identifier: Apache-2.0
/// @file
/// The graph of an archive, turned into calls whose arguments lie in numbered slots. All types are checked here, once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "field.hpp"

namespace remat::pytorch::exported {

/// Type of the value in a slot.
enum class slot_kind : char { tensor, integer, real, boolean };

/// How the value of a slot becomes an argument.
enum class passing : char { as_is, as_double, as_number_tensor };

/// A literal, a slot, or a list that contains slots.
struct operand {
  at::IValue literal;
  int slot = -1;
  passing how = passing::as_is;
  at::TypePtr element = nullptr;  ///< element type, for a list
  std::vector<operand> items = {};
};

/// Python's arithmetic on sizes: takes int64_t, double or bool, and returns one of these.
struct function_of_sizes {
  std::size_t arguments;
  at::IValue (*run)(const std::vector<at::IValue>&);
};
/// The function `target`, or nullptr if there is none.
const function_of_sizes* find_symbolic(const std::string& target);

struct graph;

struct operator_call {
  c10::OperatorHandle op;
};
struct symbolic_call {
  const function_of_sizes* function;
};
struct grad_region {
  bool enabled;
  std::unique_ptr<graph> body;
};
struct autocast_region {
  c10::DeviceType device;
  std::optional<at::ScalarType> type;
  bool enabled;
  std::optional<bool> cache;
  std::unique_ptr<graph> body;
};

/// Destination of a result: one slot or none, or a slot per tensor of a list.
struct result_slots {
  bool list = false;
  std::vector<int> slots;  ///< -1: dropped
};

struct node {
  std::string name, target, source;  ///< `source`: line of the user's code
  std::variant<std::monostate, operator_call, symbolic_call, grad_region, autocast_region> what;
  std::vector<operand> operands;
  std::vector<result_slots> results;
  std::vector<int> last_used;  ///< slots that no later node reads
};

struct graph {
  std::vector<slot_kind> slots;
  std::vector<int> inputs;  ///< -1: a constant of the export, never read
  std::vector<std::string> input_names;
  std::vector<node> nodes;
  std::vector<operand> outputs;

  /// Type of the value of an operand; nothing if the operand has no slot.
  std::optional<slot_kind> kind(const operand& o) const {
    return o.slot < 0 ? std::nullopt : std::optional(slots[static_cast<std::size_t>(o.slot)]);
  }
};

/// @param device        replaces every device in the program
/// @param unsupported   gets a line per part that cannot be run; a graph with such parts must not be run
/// @param in_eval_mode  gets a line per operator that was exported in eval mode
/// @throws bad_document for content that no export writes
graph compile(const field& f, std::optional<at::Device> device, std::vector<std::string>& unsupported,
              std::vector<std::string>& in_eval_mode);

}  // namespace remat::pytorch::exported
