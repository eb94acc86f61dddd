// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory beyond the device of a session, and the links to it. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/session.hpp>

#include "../device/home.hpp"
#include "../plan/captured_step.hpp"

namespace remat::pytorch {

/// True if a step uses weights whose memory is that of the host.
inline bool has_weights_on_host(const program& step) {
  return std::any_of(step.slots.begin(), step.slots.end(), [](const auto& k) { return k.on_host; });
}

/// Memory beyond the device that steps of a session use, and weights that they fetch from the host. Measures the rates of the
/// links, and makes planning problems with copies.
class far_links {
 public:
  /// @param options of the session; must outlive this. Gets what is measured
  explicit far_links(wrap_options& options) : options_(options), rates_of_weights_(options.far.rates) {}

  /// Sets far memory and planning problems of a measured step.
  /// @param name of the problems
  /// @return the weights that the step fetches
  std::vector<at::Tensor> set_problems(captured_step& s, device& on, const std::string& name);

 private:
  /// The far memory for steps on `on`: that of the options, or pinned memory of `host_budget` bytes.
  far_memory& far_of(device& on);
  /// The values that steps fetch (per value), and their tensors.
  std::pair<std::vector<bool>, std::vector<at::Tensor>> fetched_by(const captured_step& s) const;
  /// Times of operations beside copies, in seconds. Copies slow down the part that waits for memory.
  std::vector<double> beside_copies(const program& step, std::vector<double> seconds, const copy_rates& rates,
                                    const std::vector<bool>& fetched) const;
  /// The planning problem in which weights are fetched.
  problem fetching_problem(captured_step& s, device& on, const std::string& name, const std::vector<bool>& fetched,
                           const std::vector<at::Tensor>& weights);

  wrap_options& options_;
  std::optional<copy_rates> rates_of_weights_;
  std::optional<interference> interference_;
  std::map<std::string, far_memory> pinned_;  ///< by name of the device, for `host_budget`
};

}  // namespace remat::pytorch
