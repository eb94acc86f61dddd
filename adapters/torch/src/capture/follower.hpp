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
  std::vector<bool> runs_at_once;      ///< per call: runs at once, because a later call asks for a number that depends on it
                                       ///< (`item`), or because the module fills its result by hand
  std::vector<bool> makes_constant;    ///< per call: makes a constant, and runs if the module reads a constant
  std::vector<bool> filled_by_hand;    ///< per slot: memory that a call makes, and that the module fills without operators
  std::vector<index_t> written_slots;  ///< slots whose memory a call writes, running statistics included
};

/// The numbers in the calls of a recorded forward that may differ in each step.
std::vector<double> numbers_in(const trace& t);
/// How many of the first `count` calls are equal, with the same tensors and geometries.
std::size_t same_calls(const trace& a, const trace& b, std::size_t count);
/// For two forwards with the same calls: true if the tensors from outside are the same, and the constants have equal contents.
bool same_outside(const trace& a, const trace& b);
/// Position of the first call that differs between two forwards.
inline std::size_t common_calls(const trace& a, const trace& b) { return same_calls(a, b, std::min(a.backward, b.backward)); }

/// A recorded forward, with the tensors of this model.
struct candidate {
  std::shared_ptr<const recorded_forward> forward;
  std::shared_ptr<const bindings> tensors;
};

/// How to record a step that differs from all recorded ones.
struct step_request {
  const std::vector<at::Tensor>&parameters, &buffers;  ///< as for `record`
  const std::vector<output_use>& uses;                 ///< of the outputs
  const std::vector<at::Tensor>& origins;              ///< of the inputs, see `origins_of`
  bool strict;                                         ///< a forward that cannot be recorded is an error
  bool runs_again;                                     ///< the forward will run once more, from its beginning
  bool weights_on_host;                                ///< weights are not on the device: a need to run eagerly is an error
  bool vary_numbers;                                   ///< numbers in calls may differ from the recorded ones
  std::function<void()> make_room;                     ///< called before calls run ahead of the plan, with memory of their own
};

/// A step that was recorded while its forward ran.
struct recorded_run {
  step_run step;
  std::shared_ptr<trace> recorded;  ///< null: it cannot be recorded
  std::exception_ptr refusal;       ///< why
};

/// Result of following a forward.
struct followed {
  std::optional<std::size_t> match;         ///< the candidate with the calls of this forward; nothing: none has them
  std::unique_ptr<recorded_run> recording;  ///< without a candidate: the step, recorded from the first different call on; null:
                                            ///< the forward has run eagerly
  std::vector<at::Tensor> returned;  ///< results of the forward; with a candidate hollow, except for tensors that no call made
  std::vector<at::Tensor> outputs;   ///< of the candidate, each tensor once, hollow
  std::vector<at::Tensor> tensors;   ///< of the candidate, by number; undefined: not met
  std::shared_ptr<call_log> log;     ///< calls of the candidate
  std::vector<double> numbers;       ///< of the candidate: numbers of this step that may differ in each step
  std::string why;                   ///< without a candidate: the first different call, and how it differs
  std::size_t differs_at = 0;        ///< without a candidate: position of that call
  /// With a candidate: slots that have other tensors than in the recording (a counter, state of the step before), and these
  /// tensors.
  std::vector<std::pair<index_t, at::Tensor>> changed_slots;
};

/// Runs `forward` on its own arguments. Calls that a candidate makes, too, do not run: their results are hollow. If a call
/// differs from all candidates, the step is recorded from that call on. If recording is impossible, the calls so far run, and the
/// rest of the forward runs eagerly. So `forward` runs exactly once, and has the effects of an eager forward except for the data
/// of its results.
///
/// After a match or a recording, parameters, buffers, inputs, their versions, and the generator are as before.
/// @param candidates at least one, the most likely one first
/// @param inputs     tensors among the arguments of the forward
/// @throws what the forward throws, after its calls have run
/// @throws cannot_capture in strict mode, or if weights are elsewhere; no call has run then
followed follow(const std::vector<candidate>& candidates, const forward_function& forward, const std::vector<at::Tensor>& inputs,
                const step_request& request);

/// Runs the code of a backward on hollow tensors, and compares its calls with a recorded backward.
/// @param step         recorded step, with the tensors of this model
/// @param tensors      of this forward, by number
/// @param output_grads per output a stand-in for its gradient, which only `backward` holds afterwards
/// @return how the backward differs; empty: not at all
/// @throws what the code throws
std::string differing_backward(const candidate& step, const std::vector<at::Tensor>& tensors,
                               std::vector<at::Tensor> output_grads,
                               const std::function<void(std::vector<at::Tensor>)>& backward);

}  // namespace remat::pytorch::detail
