// SPDX-License-Identifier: Apache-2.0
/// @file
/// Plan files: a remat-schedule that contains its remat-problem, so that one file is enough to check a plan or to report it.
/// Needs nlohmann/json; not part of the umbrella header.
#pragma once

#include <filesystem>
#include <istream>
#include <optional>
#include <ostream>

#include <nlohmann/json.hpp>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/io/document.hpp>
#include <remat/io/file.hpp>
#include <remat/io/problem_document.hpp>
#include <remat/io/schedule_document.hpp>

namespace remat {

/// A plan as read, with its problem.
struct plan_document {
  problem_document problem;  ///< as read
  remat::result result;      ///< claims of the document; call `evaluate` to check them
};

/// Reads a plan.
/// @param in a remat-schedule; its member `problem_document` is the problem
/// @param p  the problem, if the document does not contain it; takes precedence over the document
/// @param l  limits on the document
/// @throws bad_document if the text is no remat-schedule, or if neither the document nor the caller gives the problem; any
///         exception of `read_problem_document` and `read_schedule`
/// Complexity: O(length of the text).
inline plan_document read_plan(std::istream& in, const std::optional<problem_document>& p = std::nullopt,
                               const document_limits& l = {}) {
  const auto root = detail::parse(read_text(in, l.bytes), l);
  const detail::members document(root, "");
  document.version("remat-schedule", 2);
  plan_document d;
  if (p) {
    d.problem = *p;
  } else if (!document.has("problem_document")) {
    throw bad_document(
        "holds no problem (member problem_document): give the problem as well, by remat report --problem FILE or "
        "remat.report(plan, problem)");
  } else {
    d.problem = detail::problem_from(document.at("problem_document"));
  }
  d.result = detail::schedule_from(root, {d.problem.problem.tiers(), {}}).result;
  return d;
}

/// As above, from a file. Messages begin with the name of the file.
inline plan_document read_plan(const std::filesystem::path& path, const std::optional<problem_document>& p = std::nullopt,
                               const document_limits& l = {}) {
  return detail::read_named(path, l, [&](std::istream& in, const document_limits& bounds) { return read_plan(in, p, bounds); });
}

/// Writes a plan with its problem.
/// @param out     the stream
/// @param r       result of a solver
/// @param p       the problem
/// @param unknown more members of the problem, from `read_problem_document`
/// @throws bad_document if a name is not valid UTF-8
inline void write_plan(std::ostream& out, const result& r, const problem& p, const unknown_problem_members& unknown = {}) {
  std::ostringstream text;
  write_problem(text, p, unknown);
  write_schedule(out, r, p, {{"problem_document", nlohmann::ordered_json::parse(text.str())}});
}

/// As above, to a file, which is replaced atomically.
/// @throws error if the file cannot be written
inline void write_plan(const std::filesystem::path& path, const result& r, const problem& p,
                       const unknown_problem_members& unknown = {}) {
  write_file(path, [&](std::ostream& out) { write_plan(out, r, p, unknown); });
}

}  // namespace remat
