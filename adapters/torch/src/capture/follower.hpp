// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs the module's own code in a planned step, on hollow tensors, and compares its calls with a recorded forward. Private to
/// the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/bindings.hpp>
#include <remat/pytorch/model.hpp>

#include "call_log.hpp"
#include "step_run.hpp"
#include "trace.hpp"

namespace remat::pytorch::detail {

/// A forward that can be followed: its calls, and which of them run at once.
struct recorded_forward {
  explicit recorded_forward(std::shared_ptr<const trace> t);
  std::shared_ptr<const trace> recorded;
  std::vector<bool> runs;  ///< per call: a later one asks for a number that comes from it (`item`), or it makes memory that the
                           ///< module fills by hand
  std::vector<bool> constants;  ///< per call: of constants, which run should the module look at one
  std::vector<index_t> writes;  ///< slots in whose memory a call writes, running statistics too
};

/// The numbers of a recorded forward that may be others in each step.
std::vector<double> numbers_in(const trace& t);
/// How many of the first `most` calls are the same, on the same tensors, of the same geometry.
std::size_t same_calls(const trace& a, const trace& b, std::size_t most);
/// Of two forwards that make the same calls: on the same tensors from outside, and constants of the same contents.
bool same_outside(const trace& a, const trace& b);
/// Of two forwards, the first call that differs.
inline std::size_t common_calls(const trace& a, const trace& b) { return same_calls(a, b, std::min(a.backward, b.backward)); }

/// A recorded forward, with the tensors of this model.
struct candidate {
  std::shared_ptr<const recorded_forward> what;
  std::shared_ptr<const bindings> tensors;
};

/// What is to be recorded of a step that is none of the recorded ones.
struct step_request {
  const std::vector<at::Tensor>&parameters, &buffers;  ///< as for `record`
  const std::vector<output_use>& uses;                 ///< of its outputs
  const std::vector<at::Tensor>& origins;              ///< of its inputs
  bool strict;                                         ///< what cannot be recorded is an error
  bool again;                                          ///< the forward will run once more, from its beginning
  bool elsewhere;                                      ///< so is what would have to run eagerly: weights are not on the device
  bool numbers;                                        ///< calls may have other numbers than the recorded ones
  std::function<void()> make_room;                     ///< calls are about to run ahead of the plan, with memory of their own
};

/// A step that was recorded while its forward ran.
struct recorded_run {
  step_run run;
  std::shared_ptr<trace> recorded;  ///< null: it cannot be recorded
  std::exception_ptr refusal;       ///< why
};

/// What came of following.
struct followed {
  std::optional<std::size_t> which;     ///< the candidate whose calls were made; nothing: none
  std::unique_ptr<recorded_run> fresh;  ///< if none: the step, recorded from the call that differs on; null: the forward has run
                                        ///< eagerly
  std::vector<at::Tensor> returned;     ///< by the forward; of a candidate they are hollow, but for those that no call made
  std::vector<at::Tensor> outputs;      ///< of the candidate, each tensor once, hollow
  std::vector<at::Tensor> tensors;      ///< of the candidate, by their numbers; undefined: none was met
  std::shared_ptr<call_log> log;        ///< of the calls of the candidate
  std::vector<double> numbers;          ///< of the candidate: those of this step that may be others
  std::string why;                      ///< nothing: the first call that no candidate makes, and how it differs
  std::size_t at = 0;                   ///< nothing: position of that call
  /// Of the candidate: slots of tensors that are others than when it was recorded (a counter, state of the step before).
  std::vector<std::pair<index_t, at::Tensor>> late;
};

/// Runs `forward` on its own arguments. Calls of operators that a candidate makes too are not run: their results are hollow.
/// Where the calls differ from all candidates, the step is recorded from there on. If that cannot be, the calls until then are
/// run after all, and the rest of the forward runs eagerly. So `forward` runs once in any case, and leaves what an eager one
/// leaves, but for data of the results.
///
/// After a match, and when a step was recorded, parameters, buffers, inputs and the generator are as they were before, versions
/// of tensors included.
/// @param candidates at least one, the most likely one first
/// @param inputs     tensors among the arguments of the forward
/// @throws what the forward throws; its calls until then have run
/// @throws cannot_capture in strict mode, or if weights are elsewhere; nothing has run then
followed follow(const std::vector<candidate>& candidates, const forward_function& forward, const std::vector<at::Tensor>& inputs,
                const step_request& what);

/// Compares a backward, which is only its code and calls of operators, with a recorded one.
/// @param step         that was recorded, with the tensors of this model
/// @param tensors      of this forward, by their numbers
/// @param output_grads per output the stand-in for its gradient, which only `backward` uses then
/// @return how it differs; empty: not at all
/// @throws what the code throws
std::string differing_backward(const candidate& step, const std::vector<at::Tensor>& tensors,
                               std::vector<at::Tensor> output_grads,
                               const std::function<void(std::vector<at::Tensor>)>& backward);

}  // namespace remat::pytorch::detail
