// SPDX-License-Identifier: Apache-2.0
/// Trains a model that Python exported, inside a budget and without Python, and writes the weights back. `exported.py` exports
/// the model and reads the weights.
///
///     exported PROGRAM.pt2 [BUDGET]
#include <torch/optim/sgd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <ATen/ATen.h>

#include <remat/pytorch/exported_program.hpp>
#include <remat/pytorch/session.hpp>

int main(int argc, char** argv) try {
  if (argc < 2) return std::fprintf(stderr, "exported PROGRAM.pt2 [BUDGET]\n"), 2;
  const std::filesystem::path file = argv[1];
  const auto program = remat::pytorch::exported_program::load(file.string());
  remat::pytorch::session session(program, {.budget = argc > 2 ? argv[2] : "50%"});
  torch::optim::SGD optimizer(remat::pytorch::tensors_of(program->parameters()), 0.1);

  const auto text = at::arange(8).unsqueeze(1) + at::arange(33) * 3;  // the batch of exported.py
  const auto ids = text.slice(1, 0, -1).remainder(40), next = text.slice(1, 1).remainder(40);
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    const auto loss = session.forward(program->call(), {ids, next}).at(0);
    loss.backward();
    optimizer.step();
    if (step % 20 == 0) std::printf("step %2d  loss %.3f\n", step, loss.item<double>());
  }
  std::printf("%s", session.report().text().c_str());

  program->save(file.string());  // for torch.export.load
  remat::pytorch::save_state_dict(std::filesystem::path(file).replace_extension("pt").string(), program->state_dict());
  return 0;
} catch (const std::exception& why) {
  std::fprintf(stderr, "exported: %s\n", why.what());
  return 1;
}
