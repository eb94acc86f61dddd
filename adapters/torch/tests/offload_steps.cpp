// SPDX-License-Identifier: Apache-2.0
// Parameters that step within the backward, and operations that are refused in this mode.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <functional>
#include <optional>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/free_memory.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/paged_memory.hpp>
#include <sstream>

#include "../src/device/file.hpp"
#include "../src/device/free_memory.hpp"
#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"
#include "trained_on_disk.hpp"

using namespace offload_tests;

TEST_CASE("a model whose parameters step within the backward trains like the plain model") {
  std::size_t freed = 0;
  for (std::size_t which = 0; which < models::all().size(); ++which)
    for (const bool wrapped : {false, true}) {
      auto plain = model_of(which), ours = model_of(which);
      INFO(plain.name << (wrapped ? ", wrapped, on a disk" : ""));
      const auto disk = wrapped ? new_disk() : nullptr;
      std::optional<rt::gradients_on_disk> kept;
      auto options = testing::quick("100%");
      options.gradients_leave = true;
      optim::AdamW first(plain.module->parameters(), optim::AdamWOptions(0.01));
      rt::offloaded<optim::AdamW> second(disk, rt::stepping::overlap, ours.module->parameters(), optim::AdamWOptions(0.01));
      if (wrapped) kept.emplace(*ours.module, disk);  // before or after the optimizer
      testing::runner net(ours.module, ours.forward, options);
      for (int step = 0; step < 5; ++step) {
        INFO("step " << step);
        first.zero_grad();
        second.zero_grad();
        ::torch::manual_seed(step);
        const auto a = plain.forward(plain.inputs);
        models::loss_of(a).backward();
        ::torch::manual_seed(step);
        const auto evicted = disk ? disk->evicted() : 0;
        const auto b = wrapped ? net.forward(ours.inputs) : ours.forward(ours.inputs);
        models::loss_of(b).backward();
        REQUIRE(same_bits(a, b));
        const auto before = disk ? disk->reserved() : 0;
        remat::bytes_t states = 0;  // two states for each parameter
        for (const auto& p : ours.module->parameters())
          if (p.grad().defined() && rt::movable(p))
            states += 2 * ((static_cast<remat::bytes_t>(p.nbytes()) + 4095) / 4096 * 4096);
        for (const auto& g : gradients(ours))
          if (g.defined()) {
            CHECK_FALSE(g.has_storage());
            ++freed;
          }
        first.step();
        second.step();
        if (disk && step > 0) CHECK(disk->reserved() == before);
        if (disk && step > 0) CHECK(disk->evicted() - evicted == states);  // and no gradients
        REQUIRE(same_bits(plain.module->parameters(), ours.module->parameters()));
        REQUIRE(same_bits(plain.module->buffers(), ours.module->buffers()));
        for (const auto& g : gradients(ours)) CHECK_FALSE(g.defined());
      }
    }
  CHECK(freed > 300);
}

TEST_CASE("operations on gradients are refused while parameters step within the backward") {
  using optimizer = rt::offloaded<optim::AdamW>;
  const bool on_disk = GENERATE(true, false), later = GENERATE(true, false);
  struct habit {
    const char* name;
    const char* words;
    std::function<void(optimizer&, layers&)> run;
  };
  const std::vector<habit> habits = {
      {"clip", "aten::norm", [](auto& o, auto& l) { ::torch::nn::utils::clip_grad_norm_(l.weights, 1e9), o.step(); }},
      {"clip values", "aten::clamp_", [](auto& o, auto& l) { ::torch::nn::utils::clip_grad_value_(l.weights, 1e9), o.step(); }},
      {"divide", "aten::div", [](auto&, auto& l) { l.weights[0].mutable_grad() = l.weights[0].grad() / 2; }},
      {"copy", "aten::clone", [](auto&, auto& l) { l.weights[0].grad().clone(); }},
      {"accumulate", "aten::add_", [](auto& o, auto&) { give_gradients(o); }},
      {"accumulate by hand", "a second gradient",
       [](auto& o, auto& l) {
         for (auto& w : l.weights) w.mutable_grad().reset();
         give_gradients(o);
       }},
      {"replace", "replaced or removed",
       [](auto& o, auto& l) {
         l.weights[1].mutable_grad() = at::ones_like(l.weights[1].detach());
         o.step();
       }},
      {"remove", "replaced or removed", [](auto& o, auto& l) { l.weights[1].mutable_grad().reset(), o.step(); }},
      {"throw away", "aten::detach_", [](auto& o, auto&) { o.zero_grad(); }},
      {"keep zeros", "aten::detach_", [](auto& o, auto&) { o.zero_grad(false); }},
      {"closure", "step(closure)", [](auto& o, auto&) { o.step([] { return at::zeros({}); }); }},
      {"change the rate", "options of a parameter group",
       [](auto& o, auto&) {
         o.param_groups()[0].options().set_lr(0.2);
         o.step();
       }},
      {"change another option", "options of a parameter group",
       [](auto& o, auto&) {
         static_cast<optim::AdamWOptions&>(o.param_groups()[0].options()).weight_decay(0.3);
         o.step();
       }},
      {"save", "save()",
       [](auto& o, auto&) {
         std::stringstream to;
         ::torch::save(o, to);
       }},
  };
  for (const auto& h : habits) {
    INFO(h.name);
    layers mine;
    const auto disk = on_disk ? new_disk() : nullptr;
    optimizer ours(disk, rt::stepping::overlap, mine.weights, optim::AdamWOptions(0.1));
    if (later)
      for (int step = 0; step < 2; ++step) {
        give_gradients(ours);
        ours.step();
      }
    std::stringstream checkpoint;
    ::torch::save(ours, checkpoint);
    const auto before = copies_of(mine.weights);
    give_gradients(ours);
    CHECK(same_bits(mine.weights, before) == !later);
    CHECK_THROWS_WITH(h.run(ours, mine), Catch::Contains(h.words) && Catch::Contains("stepping::overlap"));
    CHECK(same_bits(mine.weights, before) == !later);

    ::torch::load(ours, checkpoint);  // back to the state before
    if (std::string(h.name) == "throw away") CHECK_THROWS_WITH(ours.step(), Catch::Contains("dropped the gradients"));
    for (auto& group : ours.param_groups()) group.options() = optim::AdamWOptions(0.1);
    layers theirs;
    optim::AdamW plain(theirs.weights, optim::AdamWOptions(0.1));
    if (later)
      for (int step = 0; step < 2; ++step) {
        plain.zero_grad();
        give_gradients(plain);
        plain.step();
      }
    for (std::size_t i = 0; i < before.size(); ++i) mine.weights[i].set_data(before[i].clone());
    for (int step = 0; step < 3; ++step) {
      plain.zero_grad();
      give_gradients(plain);
      give_gradients(ours);
      plain.step();
      ours.step();
    }
    CHECK(same_bits(mine.weights, theirs.weights));
  }
}

TEST_CASE("a weight that has stepped but that the rest of the backward needs is an error") {
  struct linear : ::torch::nn::Module {
    linear() : w(register_parameter("w", at::ones({64, 64}) / 64)) {}
    Tensor w;
  } m;
  rt::offloaded<optim::SGD> ours(nullptr, rt::stepping::overlap, m.parameters(), optim::SGDOptions(0.1));
  const auto backward = [&] {  // computes the gradient of the outer product first
    const auto x = at::ones({4, 64}).requires_grad_();
    at::linear(at::linear(x, m.w.detach()).sin(), m.w).sum().backward();
  };
  backward();
  ours.step();
  CHECK_THROWS_WITH(backward(), Catch::Contains("modified by an inplace operation"));
}

TEST_CASE("a parameter steps for the optimizer that was made last, and for no other once that one is gone") {
  layers mine, theirs;
  optim::SGD plain(theirs.weights, optim::SGDOptions(0.1));
  std::optional<rt::offloaded<optim::SGD>> old(std::in_place, nullptr, rt::stepping::overlap, mine.weights, optim::SGDOptions(7));
  {
    rt::offloaded<optim::SGD> ours(nullptr, rt::stepping::overlap, mine.weights, optim::SGDOptions(0.1));
    old.reset();
    for (int step = 0; step < 3; ++step) {
      plain.zero_grad();
      give_gradients(plain);
      give_gradients(ours);
      plain.step();
      ours.step();
    }
    REQUIRE(same_bits(mine.weights, theirs.weights));
    rt::offloaded<optim::SGD> at_last(new_disk(), mine.weights, optim::SGDOptions(0.1));
    plain.zero_grad();
    give_gradients(plain);
    give_gradients(at_last);
    ::torch::nn::utils::clip_grad_norm_(theirs.weights, 0.1);
    ::torch::nn::utils::clip_grad_norm_(mine.weights, 0.1);
    plain.step();
    at_last.step();
    REQUIRE(same_bits(mine.weights, theirs.weights));
  }
  for (const auto& w : mine.weights) CHECK(::torch::autograd::impl::post_acc_grad_hooks(w) == nullptr);
}

TEST_CASE("a full disk and a failing disk while parameters step within the backward") {
  layers mine, theirs;
  const system_restored guard;
  const auto disk = new_disk();
  rt::offloaded<optim::AdamW> ours(disk, rt::stepping::overlap, mine.weights, optim::AdamWOptions(0.1));
  optim::AdamW plain(theirs.weights, optim::AdamWOptions(0.1));
  const auto both = [&] {
    plain.zero_grad();
    give_gradients(plain);
    give_gradients(ours);
    plain.step();
    ours.step();
  };
  const auto before = copies_of(mine.weights);
  rt::files_of_system().allocate = [](int, int, off_t, off_t) { return errno = ENOSPC, -1; };
  give_gradients(ours);
  CHECK_THROWS_AS(ours.step(), rt::out_of_memory);
  CHECK(same_bits(mine.weights, before));
  rt::files_of_system() = guard.before;
  give_gradients(plain);
  plain.step();
  ours.step();  // there is space again
  REQUIRE(same_bits(mine.weights, theirs.weights));
  both();
  std::stringstream checkpoint;
  ::torch::save(ours, checkpoint);
  const auto then = copies_of(mine.weights);
  if (GENERATE(true, false)) {
    rt::files_of_system().write_back = [](int, off_t, off_t) { return errno = EIO, -1; };
    give_gradients(ours);
    CHECK_THROWS_WITH(ours.step(), Catch::Contains("all parameters have made the step") && Catch::Contains("Input/output error"));
  } else {
    rt::files_of_system().populate = [](void*, std::size_t) { return errno = EIO, -1; };
    CHECK_THROWS_WITH(give_gradients(ours), Catch::Contains("parameters have made the step. Load a checkpoint"));
  }
  rt::files_of_system() = guard.before;
  ::torch::load(ours, checkpoint);
  for (auto& w : mine.weights) w.mutable_grad().reset();
  for (std::size_t i = 0; i < 4; ++i) mine.weights[i].set_data(then[i]);
  both();
  CHECK(same_bits(mine.weights, theirs.weights));
}
