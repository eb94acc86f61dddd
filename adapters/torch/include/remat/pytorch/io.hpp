// SPDX-License-Identifier: Apache-2.0
/// @file
/// Programs and plans as documents: the formats remat-program and remat-plan, version 1. Needs nlohmann/json.
///
/// Reading trusts nothing: what is read is checked as a whole (`verify`), and what is wrong ends in an exception that names it. A
/// program is code, however: running one from a stranger runs the operators it names.
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

/// What is written of a program.
struct program_parts {
  bool names = true;     ///< of slots, values and nodes
  bool contents = true;  ///< bytes of constants and fixed states of the generator; without them it cannot be read again
};

/// @param out where to
/// @throws cannot_write; bad_document if a name is not valid UTF-8
/// Complexity: linear in the text.
void write_program(std::ostream& out, const program& step, const program_parts& parts = {});

/// @param in the text
/// @param l  bounds on what is accepted
/// @return a program that passes `verify`
/// @throws bad_document for a text that is no remat-program or names an operator that this PyTorch lacks; bad_program for one
///         that breaks a rule
/// Complexity: linear in the text.
program read_program(std::istream& in, const document_limits& l = {});

/// A program, what its nodes cost, and how it is to run: all that an `execution_plan` is made of.
struct plan_document {
  std::shared_ptr<const program> step;
  program_profile profiles;
  result found;
};

/// As `write_program`.
void write_plan(std::ostream& out, const plan_document& plan);

/// As `read_program`. Whether the schedule is valid is for `execution_plan` to tell.
/// @throws also bad_schedule as `read_schedule`
plan_document read_plan(std::istream& in, const document_limits& l = {});

}  // namespace remat::pytorch
