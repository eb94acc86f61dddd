// SPDX-License-Identifier: Apache-2.0
/// Trains a GPT-2-like model. Its weights, gradients, AdamW states and activations go to a disk, and come back before their use.
///
///     offload [FOLDER [BUDGET]]
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <tuple>

#include <remat/io/bytes.hpp>
#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/wrap.hpp>

#include "quickstart/gpt.hpp"

namespace rp = remat::pytorch;

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : "/tmp";
  torch::manual_seed(0);
  Gpt gpt(gpt_options{.layers = 3, .width = 128});
  const auto text = (at::arange(8).unsqueeze(1) * 31 + at::arange(65) * 7).remainder(256);
  const auto ids = text.slice(1, 0, -1).contiguous(), next = text.slice(1, 1).contiguous();

  const auto disk = std::make_shared<rp::disk>(folder);
  rp::move_weights(*gpt, *disk);
  const rp::gradients_on_disk gradients(*gpt, disk);
  const auto net = rp::wrap(gpt, std::tuple(ids, next),
                            {.budget = argc > 2 ? argv[2] : "40%", .gradients_leave = true, .far = rp::on_disk(folder)});
  rp::offloaded<torch::optim::AdamW> optimizer(disk, net->parameters(), torch::optim::AdamWOptions(1e-3));

  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const auto before = disk->evicted();
    const auto loss = net->forward(ids, next);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);  // gradients are ordinary tensors
    optimizer.step();
    if (step % 10 == 0)
      std::printf("step %2d  loss %.3f  written %s\n", step, loss.item<double>(),
                  remat::format_bytes(disk->evicted() - before).c_str());
  }
  std::printf("%s%s on the disk at %s\n", net->report().text().c_str(), remat::format_bytes(disk->reserved()).c_str(),
              folder.c_str());
  return 0;
} catch (const std::exception& why) {
  std::fprintf(stderr, "offload: %s\n", why.what());
  return 1;
}
