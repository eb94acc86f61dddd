// SPDX-License-Identifier: Apache-2.0
// Optimizers with states on a disk: the public classes.
#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

#include <remat/pytorch/offload.hpp>

#include "stepper.hpp"

namespace remat::pytorch {

states_on_disk::states_on_disk(std::shared_ptr<disk> to, stepping when, optimizer whose) : when_(when) {
  if (!to && when == stepping::after) throw bad_option("offloaded: there is no disk");
  for (const auto& group : whose.param_groups)
    for (const auto& p : group.params())
      if (auto* const hook = arrival::find(p)) {  // a parameter steps for one optimizer only
        hook->steps.reset();
        arrival::tidy(p);
      }
  stepper_ = std::make_shared<stepper>(std::move(to), std::move(whose));
  if (when == stepping::overlap) stepper_->attach();
}

states_on_disk::~states_on_disk() = default;

at::Tensor states_on_disk::step(const optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (when_ == stepping::overlap) {
    if (closure) throw refusal_to_overlap("step(closure) computes the loss when all parameters are as they were");
    stepper_->finish();
    return loss;
  }
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  stepper_->step_all();
  return loss;
}

void states_on_disk::loaded() { stepper_->loaded(); }

void states_on_disk::check_idle(const std::string& what) const { stepper_->check_idle(what); }

std::vector<at::Tensor> tensors_of(optim::OptimizerParamState& state) {
  const auto* of = &state;
  if (const auto* s = dynamic_cast<const optim::AdamWParamState*>(of))
    return {s->exp_avg(), s->exp_avg_sq(), s->max_exp_avg_sq()};
  if (const auto* s = dynamic_cast<const optim::AdamParamState*>(of)) return {s->exp_avg(), s->exp_avg_sq(), s->max_exp_avg_sq()};
  if (const auto* s = dynamic_cast<const optim::SGDParamState*>(of)) return {s->momentum_buffer()};
  if (const auto* s = dynamic_cast<const optim::RMSpropParamState*>(of))
    return {s->square_avg(), s->momentum_buffer(), s->grad_avg()};
  if (const auto* s = dynamic_cast<const optim::AdagradParamState*>(of)) return {s->sum()};
  throw bad_option(std::string("offloaded: it is not known which tensors are in a ") + typeid(state).name() +
                   "; override `tensors` to tell");
}

}  // namespace remat::pytorch
