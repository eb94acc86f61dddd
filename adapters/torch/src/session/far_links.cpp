// SPDX-License-Identifier: Apache-2.0
#include "far_links.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace remat::pytorch {

far_memory& far_links::far_of(device& on) {
  const bool pinned = options_.host_budget || options_.steps_on;
  if (options_.far.memory || options_.far.in) require_moves(on);
  if (options_.far.memory || options_.far.in || !pinned || on.which().is_cpu()) return options_.far;
  const auto name = on.which().str();
  if (const auto known = pinned_.find(name); known != pinned_.end()) return known->second;
  return pinned_[name] = on_host(on.which(), options_.host_budget.value_or(max_bytes));
}

std::vector<at::Tensor> far_links::set_problems(captured_step& s, device& on, const std::string& name) {
  auto& far = far_of(on);
  s.far = far;
  auto& rates = far.rates;
  constexpr bytes_t worth_it = 1 << 20;
  if (s.far.memory && !rates && s.far.memory->limit() >= worth_it) {
    bytes_t all = 0;
    for (const auto& v : s.step->values) all += v.bytes;
    const auto sample = std::clamp<bytes_t>(all / 16, 64 << 10, 8 << 20) / 4096 * 4096;
    rates = measure_rates(on, s.far, sample);  // takes 2 samples of device memory, the next line 3
    if (options_.steps_on) interference_ = measure_interference(on, s.far, *rates, sample);
  }
  s.store_all_problem =
      to_problem(*s.step, s.profiles.seconds(), s.profiles.workspace(), name, s.far.memory ? rates : std::nullopt);
  auto [fetched, weights] = fetched_by(s);
  s.problem = weights.empty() ? s.store_all_problem : fetching_problem(s, on, name, fetched, weights);
  if (has_weights_on_host(*s.step)) s.store_all_problem = s.problem;  // these cannot be read in place
  return weights;
}

std::pair<std::vector<bool>, std::vector<at::Tensor>> far_links::fetched_by(const captured_step& s) const {
  std::pair<std::vector<bool>, std::vector<at::Tensor>> found;
  if (!options_.fetched && !options_.steps_on) return found;
  auto& [values, weights] = found;
  values = fetchable(*s.step);
  for (index_t v = 0; v < values.size(); ++v) {
    if (!values[v]) continue;
    const auto k = s.step->values[v].slot;
    const auto& t = s.bound->slots[k];
    values[v] = s.step->slots[k].on_host || (options_.fetched && options_.fetched(t));
    if (values[v]) weights.push_back(t);
  }
  return found;
}

problem far_links::fetching_problem(captured_step& s, device& on, const std::string& name, const std::vector<bool>& fetched,
                                    const std::vector<at::Tensor>& weights) {
  auto& far = far_of(on);
  if (!far.in) far.in = host_link();
  s.far.in = far.in;
  if (!rates_of_weights_) rates_of_weights_ = measure_fetches(on, *s.far.in, weights);
  auto rates = *rates_of_weights_;
  const auto& others = s.store_all_problem.copies();
  if (others) rates = {others->to_host, std::min(others->to_device, rates.to_device), std::max(others->latency, rates.latency)};
  const auto seconds = beside_copies(*s.step, s.profiles.seconds(), rates, fetched);
  auto p = to_problem(*s.step, seconds, s.profiles.workspace(), name, rates, fetched);
  return others ? p : without_sends(p);
}

std::vector<double> far_links::beside_copies(const program& step, std::vector<double> seconds, const copy_rates& rates,
                                             const std::vector<bool>& fetched) const {
  if (!interference_ || interference_->factor <= 1) return seconds;
  bytes_t in = 0, out = 0;
  for (index_t v = 0; v < fetched.size(); ++v) in += fetched[v] ? step.values[v].bytes : 0;
  for (auto k : leaving_gradients(step)) out += step.values[step.views[step.parameter_grads[k]].value].bytes;
  const auto copying = std::max(static_cast<double>(in) / rates.to_device, static_cast<double>(out) / rates.to_host);
  const auto busy = std::min(1.0, copying / std::accumulate(seconds.begin(), seconds.end(), 0.0));
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    bytes_t touched = 0;
    for (const auto* list : {&step.nodes[i].inputs, &step.nodes[i].outputs})
      for (auto v : *list) touched += step.values[v].bytes;
    const auto bound = std::min(seconds[i], static_cast<double>(touched) / interference_->rate);
    seconds[i] += (interference_->factor - 1) * busy * bound;
  }
  return seconds;
}

}  // namespace remat::pytorch
