// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the steps of a session take, and what they may take. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <remat/pytorch/budget.hpp>
#include <remat/pytorch/device.hpp>
#include <remat/pytorch/model.hpp>
#include <remat/pytorch/session.hpp>

#include "../plan/planned.hpp"

namespace remat::pytorch {

/// The executors of a session, and bytes: what is held, what others take, what the budget comes to.
class accounts {
 public:
  /// Both must outlive it.
  accounts(const wrap_options& options, const std::vector<named_tensor>& parameters)
      : options_(options), parameters_(parameters) {}

  /// Bytes that are there whatever the plan, gradients left out.
  pytorch::report held(const setup& s, const std::vector<at::Tensor>& inputs) const;
  /// Gradients that exist, apart from those in an arena that is counted as a whole. With several threads those that may; on a
  /// thread that is new, those that did when this was asked last.
  bytes_t gradients();
  /// Steps may share memory: plans choose addresses, which need not stay, and weights are where they are read.
  bool can_share() const {
    return !options_.graph && !options_.steps_on && !options_.fetched && (device_ == nullptr || device_->can_place());
  }
  /// Steps of this kind begin: relative budgets count what one takes if nothing is recomputed.
  void meets(const setup& s);
  /// Somebody calls the model on this thread, perhaps for a step.
  void called();
  /// Steps begin on several threads by turns. Each may read and replace gradients while another one begins a step.
  bool several_threads() const { return alternating_ > 0; }
  std::size_t in_flight() const;
  /// A step begins. How many are in flight at a time, and of which kinds, is learned from one time to the next that none is.
  void begins(const std::shared_ptr<setup>& kind);
  /// While none is in flight: bytes that those of the last time take at least, of which the plans are known that hold least.
  bytes_t least_of_last_time() const;
  /// The most steps in flight the last time, or now.
  std::size_t at_a_time() const { return std::max({std::size_t{1}, learned(), in_flight()}); }
  /// The same, with one that is about to begin.
  std::size_t expected() const { return std::max(learned(), in_flight() + 1); }
  /// It would not be one more than the last time.
  bool has_learned() const { return in_flight() < learned(); }
  /// What steps in flight hold: each from its forward to its backward, or all that it needs, where it shares nothing.
  bytes_t held_in_flight() const;
  /// Where steps that share memory compute.
  std::shared_ptr<working_memory> working;

  /// Arenas of other steps, and what these handed out.
  /// @param but not counted, nor what shares its arena; null: nor what is idle
  bytes_t others(const runner* but = nullptr) const;
  /// Bytes of arenas that no step needs any more, but in which gradients still lie.
  bytes_t behind() const;
  /// The budget in bytes. Relative ones leave out what is held and the gradients that there are; in percent they are of the
  /// largest plain step so far: the last batch of an epoch, smaller than the others, may take what these take. Those in flight
  /// beside it add what they would take. Shares of an accelerator's memory are of what is there for tensors: free, or taken by
  /// tensors of this process.
  /// @param fixed     what is held; its gradients do not count
  /// @param gradients those that exist; if a step begins, those that stayed behind in an arena are added
  /// @param begins    a step does
  bytes_t budget(const pytorch::report& fixed, bytes_t gradients, bool begins) const;
  /// Notes the device of the steps, and once how many bytes it has for tensors.
  void on(pytorch::device& d);

  /// Moves the gradients of parameters out of the arena of `r`. On the host, those stay whose memory somebody may know.
  void evacuate(const executor& r) const;
  /// Moves out what is held of an arena. @return no step runs there, and nothing is left
  /// @param gradients those, too
  bool vacate(const region& arena, bool gradients = true) const;
  /// An arena where no step runs, for steps of another kind: the executors that share it stay ready. On a device, it spares the
  /// allocator's calls that wait for all kernels, and what is held of it is moved out. On the host, where no graph needs the
  /// addresses, gradients are not moved: pages around them can be given back.
  /// @return null: there is none
  std::shared_ptr<region> idle_arena() const;
  /// What is idle makes room.
  void release();
  /// Lets go of the executors for which `gone` holds; what they have counted stays.
  template <class F>
  void let_go(F gone) {
    std::erase_if(runners, [&](const auto& r) {
      const bool goes = gone(*r);
      if (goes) unplanned += r->run->unplanned(), waited += r->run->waited_seconds();
      return goes;
    });
  }
  /// Forgets arenas that are gone.
  void sweep();

  /// At most one of them is idle, or those that share an arena are.
  std::vector<std::shared_ptr<runner>> runners;
  std::size_t unplanned = 0;                      ///< allocations of those that are gone
  double waited = 0;                              ///< for copies, by these, s
  bool once_more = false;                         ///< a forward runs once more for its backward: no others are expected
  bytes_t outputs_of_before = 0;                  ///< outputs that exist meanwhile
  bytes_t largest_plain = 0;                      ///< bytes of the plain step of the largest kind of inputs so far
  bytes_t largest_held = 0, largest_working = 0;  ///< the same of steps that share memory: each holds, one computes

 private:
  std::size_t learned() const { return once_more ? 0 : in_flight() == 0 ? seen_ : last_; }

  const wrap_options& options_;
  const std::vector<named_tensor>& parameters_;
  std::size_t last_ = 0, seen_ = 0;                      ///< steps in flight at a time: the last time, and this time so far
  std::map<std::shared_ptr<setup>, std::size_t> kinds_;  ///< of those of this time, how many began
  bytes_t gradients_ = 0;                                ///< see `gradients`
  std::vector<std::uint64_t> threads_;                   ///< of calls, the last one last
  int alternating_ = 0;                                  ///< calls on one thread until steps count as those of one
  pytorch::device* device_ = nullptr;                    ///< of the last step
  bytes_t for_tensors_ = 0;                              ///< bytes that an accelerator has; 0 on the host
  std::vector<std::weak_ptr<region>> retired_;           ///< kept alive by gradients only
};

}  // namespace remat::pytorch
