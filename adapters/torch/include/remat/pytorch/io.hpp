// SPDX-License-Identifier: Apache-2.0
/// @file
/// Programs and plans as documents: the formats remat-program and remat-plan, version 1. Needs nlohmann/json.
///
/// Readers do not trust their input. They check the whole program (`verify`), and throw an exception that names the first error.
/// A program is code, however: running a stranger's program runs the operators it names.
#pragma once

#include <iosfwd>
#include <memory>

#include <remat/core/error.hpp>
#include <remat/core/result.hpp>
#include <remat/io/json.hpp>
#include <remat/pytorch/profile.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// A program has an argument that a document cannot hold; `what()` names node, operator and argument.
struct cannot_write : error {
  using error::error;
};

/// Optional parts of a written program.
struct program_parts {
  bool names = true;     ///< names of slots, values and nodes
  bool contents = true;  ///< bytes of constants and fixed generator states; without them the document cannot be read again
};

/// Writes a program as remat-program.
/// @param out   receives the text
/// @param step  the program
/// @param parts parts to write
/// @throws cannot_write; bad_document if a name is not valid UTF-8
/// Complexity: linear in the text.
void write_program(std::ostream& out, const program& step, const program_parts& parts = {});

/// Reads a remat-program.
/// @param in the text
/// @param l  limits on the size of the document
/// @return a program that passes `verify`
/// @throws bad_document if the text is no remat-program, or names an operator that this PyTorch lacks; bad_program if the program
///         breaks a rule
/// Complexity: linear in the text.
program read_program(std::istream& in, const document_limits& l = {});

/// Everything an `execution_plan` is made of: a program, the profiles of its nodes, and a schedule.
struct planned_program {
  std::shared_ptr<const program> step;
  program_profile profiles;
  remat::result result;
};

/// Writes a planned program as remat-plan.
/// @throws cannot_write, bad_document as `write_program`
void write_planned_program(std::ostream& out, const planned_program& plan);

/// Reads a remat-plan. The schedule is not checked here; the constructor of `execution_plan` does that.
/// @throws bad_document, bad_program as `read_program`; bad_schedule as `read_schedule`
planned_program read_planned_program(std::istream& in, const document_limits& l = {});

}  // namespace remat::pytorch
