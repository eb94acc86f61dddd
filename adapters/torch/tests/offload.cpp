// SPDX-License-Identifier: Apache-2.0
// Weights, gradients and optimizer states on a disk: the tensors and the training stay the same.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/free_memory.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/paged_memory.hpp>

#include "../src/device/file.hpp"
#include "../src/device/free_memory.hpp"
#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"
#include "trained_on_disk.hpp"

using namespace offload_tests;

TEST_CASE("tensors on a disk behave like tensors, and free their space") {
  const auto disk = new_disk(1 << 20), other = new_disk();
  auto made = disk->reserve({at::empty({100, 100}), at::empty({3, 5}, at::kHalf).t(), at::empty({0, 2}),
                             at::empty({70, 70}, at::kDouble), at::empty({1, 9}, at::device(at::kMeta))});
  REQUIRE(made.size() == 5);
  CHECK(disk->reserved() == 40960 + 4096 + 40960 + 4096);
  CHECK(made[1].sizes() == at::IntArrayRef{5, 3});
  CHECK(made[1].stride(0) == 1);
  CHECK_FALSE(disk->holds(made[2]));
  for (const auto i : {0, 1, 3, 4}) {
    const auto& t = made[static_cast<std::size_t>(i)];
    CHECK(disk->holds(t));
    CHECK(disk->holds(t.slice(0, 1)));
    CHECK_FALSE(other->holds(t));
    CHECK(rt::paged_memory::holds(t.const_data_ptr()));
    CHECK(same_bits(t, at::zeros_like(t)));
  }
  CHECK_FALSE(disk->holds(at::empty({2000})));
  CHECK_FALSE(disk->holds(Tensor()));
  const auto values = at::randn({100, 100});
  disk->write(made[0], values);
  made[3].fill_(2.5);
  rt::disk::evict(made);
  CHECK(disk->evicted() == disk->reserved());
  rt::disk::expect(made);
  rt::disk::fetch({made[3], made[0], at::randn({2000})});
  CHECK(disk->fetched() == 2 * 40960);
  rt::disk::fetch({made[0], made[0].slice(0, 0, 10)});  // a part of the tensor that is in memory already
  CHECK(disk->fetched() == 3 * 40960);
  CHECK(same_bits(made[0], values));
  CHECK(same_bits(made[3], at::full({70, 70}, 2.5, at::kDouble)));
  CHECK_THROWS_AS(disk->write(made[0], at::randn({100})), remat::broken_contract);
  CHECK_THROWS_AS(disk->reserve({at::empty({4, 4}).select(1, 0)}), remat::broken_contract);

  const auto before = disk->reserved();
  try {
    disk->reserve({at::empty({1 << 18})});
    FAIL("more than the limit");
  } catch (const rt::out_of_memory& e) {
    CHECK(e.asked == 1 << 20);
    CHECK(e.available == (1 << 20) - before);
    CHECK_THAT(e.what(), Catch::Contains(scratch()));
  }
  CHECK(disk->reserved() == before);
  const auto kept = made[0].view({-1});
  made.clear();
  CHECK(disk->reserved() == before);  // one file, which `kept` holds
  CHECK(same_bits(kept, values.view({-1})));
}

TEST_CASE("tensors outlive their disk") {
  Tensor kept;
  {
    rt::disk disk(scratch());
    kept = disk.reserve({at::empty({5000})}).front();
  }
  kept.fill_(3);
  CHECK(rt::on_a_disk(kept));
  CHECK(kept.sum().item<float>() == 15000);
  const auto* address = kept.const_data_ptr();
  kept.reset();
  CHECK_FALSE(rt::paged_memory::holds(address));
  CHECK_THROWS_AS(rt::disk("/nowhere/at/all"), remat::bad_option);
  CHECK_THROWS_AS(rt::disk(scratch(), -1), remat::bad_option);
  CHECK_THROWS_AS(rt::offloaded<optim::SGD>(nullptr, std::vector<Tensor>{at::ones({2}).requires_grad_()}, optim::SGDOptions(1)),
                  remat::bad_option);
}

TEST_CASE("weights move to a disk and back as the same tensors, even tied weights and overlapping views") {
  struct odd : ::torch::nn::Module {
    odd() {
      auto all = at::randn({4000});
      a = register_parameter("a", all.slice(0, 0, 2000).view({40, 50}));
      b = register_parameter("b", all.slice(0, 1000, 3000));  // overlaps a
      register_parameter("tied", a);
      small = register_parameter("small", at::randn({3}));
      buffer = register_buffer("buffer", at::randn({2048}));
    }
    Tensor a, b, small, buffer;
  };
  odd m;
  std::vector<Tensor> before;
  for (const auto& p : m.parameters()) before.push_back(p.detach().clone());
  const auto disk = new_disk();
  rt::move_weights(m, *disk);
  rt::move_weights(m, *disk);  // the second call changes nothing
  CHECK(disk->reserved() == 16384 + 8192);
  CHECK(same_bits(m.parameters(), before));
  for (const auto& t : {m.a, m.b, m.buffer}) CHECK(disk->holds(t));
  CHECK_FALSE(disk->holds(m.small));
  CHECK(m.a.requires_grad());
  CHECK(m.a.is_leaf());
  {
    const at::NoGradGuard no_grad;
    m.a.select(0, 39).fill_(7);
  }
  CHECK(m.b[960].item<float>() == 7);
  rt::bring_back_weights(m);
  CHECK(disk->reserved() == 0);
  for (const auto& t : {m.a, m.b, m.buffer}) CHECK_FALSE(rt::on_a_disk(t));
  CHECK(m.b.is_alias_of(m.a));
  CHECK(m.b[960].item<float>() == 7);
}

TEST_CASE("optimizers with states on a disk step like plain optimizers") {
  const auto when = GENERATE(rt::stepping::after, rt::stepping::overlap);
  SECTION("AdamW") {
    compare_with_plain<optim::AdamW>(optim::AdamWOptions(0.01), optim::AdamWOptions(0.02).amsgrad(true).weight_decay(0.1), false,
                                     when);
  }
  SECTION("Adam") {
    compare_with_plain<optim::Adam>(optim::AdamOptions(0.01).amsgrad(true), optim::AdamOptions(0.02), false, when);
  }
  SECTION("SGD") {
    compare_with_plain<optim::SGD>(optim::SGDOptions(0.01).momentum(0.9), optim::SGDOptions(0.1).momentum(0.5).nesterov(true),
                                   false, when);
  }
  SECTION("SGD without states") { compare_with_plain<optim::SGD>(optim::SGDOptions(0.01), optim::SGDOptions(0.1), true, when); }
  SECTION("RMSprop") {
    compare_with_plain<optim::RMSprop>(optim::RMSpropOptions(0.01).momentum(0.9), optim::RMSpropOptions(0.02).centered(true),
                                       false, when);
  }
  SECTION("Adagrad") {
    compare_with_plain<optim::Adagrad>(optim::AdagradOptions(0.01), optim::AdagradOptions(0.02).lr_decay(0.1), false, when);
  }
}

TEST_CASE("offloaded optimizers: closures, and parameter groups that are added later") {
  layers mine, theirs;
  const auto disk = new_disk();
  optim::AdamW plain(theirs.part(0, 2), optim::AdamWOptions(0.1));
  rt::offloaded<optim::AdamW> ours(disk, mine.part(0, 2), optim::AdamWOptions(0.1));
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
      plain.add_param_group(optim::OptimizerParamGroup(theirs.part(2, 4)));
      ours.add_param_group(optim::OptimizerParamGroup(mine.part(2, 4)));
    }
    const auto closure = [](optim::Optimizer& of, const layers& l) {
      return [&of, &l] {
        of.zero_grad();
        Tensor loss = at::zeros({});
        for (const auto& w : l.weights) loss = loss + w.square().sum();
        loss.backward();
        return loss;
      };
    };
    const at::NoGradGuard around;  // a closure differentiates in spite of the guard
    const auto a = plain.step(closure(plain, theirs)), b = ours.step(closure(ours, mine));
    REQUIRE(same_bits(a, b));
    REQUIRE(same_bits(mine.weights, theirs.weights));
  }
}

TEST_CASE("a model with weights, gradients and states on a disk trains as in memory") {
  std::size_t moved = 0;
  for (std::size_t which = 0; which < models::all().size(); ++which)
    for (const bool leave : {false, true}) {
      auto plain = model_of(which), ours = model_of(which);
      INFO(plain.name << (leave ? ", gradients leave" : ""));
      const auto disk = new_disk();
      rt::move_weights(*ours.module, *disk);
      const rt::gradients_on_disk kept(*ours.module, disk);
      auto options = testing::quick("100%");
      options.gradients_leave = leave;
      testing::runner net(ours.module, ours.forward, options);
      optim::AdamW first(plain.module->parameters(), optim::AdamWOptions(0.01));
      rt::offloaded<optim::AdamW> second(disk, ours.module->parameters(), optim::AdamWOptions(0.01));
      for (int step = 0; step < 5; ++step) {
        INFO("step " << step);
        if (step != 2) {  // otherwise gradients accumulate
          first.zero_grad();
          second.zero_grad();
        }
        ::torch::manual_seed(step);
        const auto a = plain.forward(plain.inputs);
        models::loss_of(a).backward();
        ::torch::manual_seed(step);
        const auto b = net.forward(ours.inputs);
        models::loss_of(b).backward();
        REQUIRE(same_bits(a, b));
        REQUIRE(same_bits(gradients(plain), gradients(ours)));
        for (const auto& g : gradients(ours))
          if (g.defined() && rt::movable(g)) {
            CHECK(disk->holds(g));
            ++moved;
          }
        if (step == 3) {
          ::torch::nn::utils::clip_grad_norm_(plain.module->parameters(), 0.1);
          ::torch::nn::utils::clip_grad_norm_(ours.module->parameters(), 0.1);
        }
        first.step();
        second.step();
        REQUIRE(same_bits(plain.module->parameters(), ours.module->parameters()));
        REQUIRE(same_bits(plain.module->buffers(), ours.module->buffers()));
      }
    }
  CHECK(moved > 300);
}

TEST_CASE("the report counts weights where they are after a move to a disk and back") {
  auto s = model_of(0);
  const auto disk = new_disk();
  testing::runner net(s.module, s.forward, testing::quick("100%"));
  const auto parameters = [&] {
    models::loss_of(net.forward(s.inputs)).backward();
    return net.report().parameters;
  };
  const auto all = parameters();
  rt::move_weights(*s.module, *disk);
  const auto rest = parameters();
  CHECK(rest < all);
  CHECK(rest == rt::unpaged_bytes(s.module->parameters()));
  rt::bring_back_weights(*s.module);
  CHECK(parameters() == all);
}
