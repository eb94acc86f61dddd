// SPDX-License-Identifier: Apache-2.0
// Weights, gradients and states of optimizers on a disk: training gives what it gives in memory, bit by bit, and a disk that is
// full or fails costs nobody his weights.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/free_memory.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/paged_memory.hpp>
#include <sstream>
#include <thread>

#include "../src/device/file.hpp"
#include "../src/device/free_memory.hpp"
#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"

namespace rt = remat::pytorch;
namespace optim = torch::optim;
using at::Tensor;

namespace {

std::string scratch() { return std::filesystem::temp_directory_path().string(); }
std::shared_ptr<rt::disk> new_disk(remat::bytes_t limit = remat::max_bytes) {
  return std::make_shared<rt::disk>(scratch(), limit);
}

/// The system as it was, at the end.
struct system_restored {
  ~system_restored() { rt::files_of_system() = before; }
  rt::file_calls before = rt::files_of_system();
};

/// A system that tells what is written into a folder.
struct told_system {
  told_system() { rt::root_of_system() = folder.string(); }
  ~told_system() {
    rt::root_of_system() = before;
    std::filesystem::remove_all(folder);
  }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((folder / file).parent_path());
    std::ofstream(folder / file) << text;
  }
  /// @param bytes free, of 1 GiB
  void machine(remat::bytes_t bytes) const {
    write("proc/meminfo", "MemTotal:  1048576 kB\nMemFree: 17 kB\nMemAvailable:  " + std::to_string(bytes / 1024) + " kB\n");
  }
  std::string before = rt::root_of_system();
  std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("remat-told-" + std::to_string(static_cast<long>(getpid())));
};

/// A gradient of each parameter that is not one of `but`.
template <class Optimizer>
void give_gradients(Optimizer& of, double scale = 1, std::optional<Tensor> but = {}) {
  Tensor loss = at::zeros({});
  for (const auto& group : of.param_groups())
    for (const auto& p : group.params())
      if (!but || !p.is_same(*but)) loss = loss + (p * p * scale).sin().sum();
  loss.backward();
}

models::sample model_of(std::size_t which) {
  ::torch::manual_seed(17);
  return models::all().at(which);
}

std::vector<Tensor> gradients(const models::sample& of) {
  std::vector<Tensor> all;
  for (const auto& p : of.module->parameters()) all.push_back(p.grad());
  return all;
}

/// A wide layer and small ones, with gradients that a generator gives: bytes on the disk, and in memory.
struct layers {
  layers() {
    ::torch::manual_seed(3);
    for (const auto width : {64, 1, 40}) weights.push_back(at::randn({width, 64}).requires_grad_());
    weights.push_back(at::randn({32, 48}).t().requires_grad_());  // dense, in another order
  }
  void draw_gradients(int step) {
    for (std::size_t i = 0; i < weights.size(); ++i)
      if ((step + static_cast<int>(i)) % 3 != 0 || step == 1)
        weights[i].mutable_grad() = at::randn_like(weights[i].detach());
      else
        weights[i].mutable_grad().reset();
  }
  std::vector<Tensor> part(std::size_t begin, std::size_t end) const {
    return {weights.begin() + static_cast<std::ptrdiff_t>(begin), weights.begin() + static_cast<std::ptrdiff_t>(end)};
  }
  std::vector<Tensor> weights;
};

template <class Optimizer>
std::vector<Tensor> states_of(Optimizer& of, const std::vector<Tensor>& params) {
  std::vector<Tensor> all;
  for (const auto& p : params)
    if (const auto found = of.state().find(p.unsafeGetTensorImpl()); found != of.state().end())
      for (auto& t : rt::tensors_of(*found->second)) all.push_back(t);
  return all;
}

/// Two optimizers, one of them on a disk, that start alike; groups with options of their own.
template <class Plain, class Options>
void compare_with_plain(const Options& first, const Options& second, bool stateless = false,
                        rt::stepping when = rt::stepping::after) {
  layers mine, theirs;
  const auto groups = [&](const layers& of) {
    std::vector<optim::OptimizerParamGroup> made;
    made.emplace_back(of.part(0, 2), std::make_unique<Options>(first));
    made.emplace_back(of.part(2, 4), std::make_unique<Options>(second));
    return made;
  };
  const auto disk = new_disk();
  Plain plain(groups(theirs), first);
  rt::offloaded<Plain> ours(disk, when, groups(mine), first);
  const auto exchange = [&] {  // a checkpoint, from one to the other and back
    std::stringstream of_plain, of_ours;
    ::torch::save(plain, of_plain);
    ::torch::save(ours, of_ours);
    ::torch::load(plain, of_ours);
    ::torch::load(ours, of_plain);
  };
  for (int step = 0; step < 7; ++step) {
    INFO("step " << step);
    if (when == rt::stepping::overlap && step % 3 != 2) {
      const auto absent = static_cast<std::size_t>(step % 4);
      plain.zero_grad();
      give_gradients(plain, 1, theirs.weights[absent]);
      give_gradients(ours, 1, mine.weights[absent]);
      for (const auto& w : mine.weights) CHECK((!w.grad().defined() || !w.grad().has_storage()));
    } else {  // set by hand
      for (auto* l : {&mine, &theirs}) {
        ::torch::manual_seed(100 + step);
        l->draw_gradients(step);
      }
    }
    if (step == 4 && when == rt::stepping::after) {  // a schedule
      plain.param_groups()[1].options().set_lr(0.003);
      ours.param_groups()[1].options().set_lr(0.003);
    }
    if (step == 5 && when == rt::stepping::after) exchange();
    plain.step();
    ours.step();
    REQUIRE(same_bits(mine.weights, theirs.weights));
    REQUIRE(same_bits(states_of(ours, mine.weights), states_of(plain, theirs.weights)));
    REQUIRE(ours.param_groups().size() == 2);
    REQUIRE(ours.param_groups()[1].params().size() == 2);
    if (when == rt::stepping::after) continue;
    for (const auto& w : mine.weights) CHECK_FALSE(w.grad().defined());
    for (auto* of : {static_cast<optim::Optimizer*>(&plain), static_cast<optim::Optimizer*>(&ours)})
      of->param_groups()[0].options().set_lr(0.01 / (step + 2));
    if (step == 3) exchange();
  }
  for (const auto& t : states_of(ours, mine.weights)) CHECK(disk->holds(t) == rt::movable(t));
  CHECK((disk->reserved() > 0) == !stateless);
  CHECK((disk->evicted() > 0) == !stateless);
}

}  // namespace

TEST_CASE("tensors on a disk are tensors, and give their space back") {
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
  rt::disk::fetch({made[0], made[0].slice(0, 0, 10)});  // a part of what is there already
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

TEST_CASE("a disk ends before its tensors") {
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

TEST_CASE("weights move and come back as the same tensors, tied and views of each other") {
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
  rt::move_weights(m, *disk);  // they are there
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

TEST_CASE("optimizers with states on a disk step as the plain ones") {
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

TEST_CASE("closures and groups that come later") {
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
    const at::NoGradGuard around;  // a closure differentiates all the same
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
        if (step != 2) {  // or else it accumulates
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

TEST_CASE("weights that go to a disk and come back between steps count where they are") {
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

TEST_CASE("a model whose parameters step within the backward trains as the plain one") {
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
        remat::bytes_t states = 0;  // two of each parameter
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

TEST_CASE("what needs the gradients is refused while parameters step within the backward") {
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

    ::torch::load(ours, checkpoint);  // and back to before
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

TEST_CASE("a weight that the rest of the backward needs is missed") {
  struct linear : ::torch::nn::Module {
    linear() : w(register_parameter("w", at::ones({64, 64}) / 64)) {}
    Tensor w;
  } m;
  rt::offloaded<optim::SGD> ours(nullptr, rt::stepping::overlap, m.parameters(), optim::SGDOptions(0.1));
  const auto backward = [&] {  // of the outer product first
    const auto x = at::ones({4, 64}).requires_grad_();
    at::linear(at::linear(x, m.w.detach()).sin(), m.w).sum().backward();
  };
  backward();
  ours.step();
  CHECK_THROWS_WITH(backward(), Catch::Contains("modified by an inplace operation"));
}

TEST_CASE("a parameter steps for the optimizer that was made last, and for none when that has gone") {
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

TEST_CASE("a full disk and one that fails, while parameters step within the backward") {
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
  ours.step();  // there is room again
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

TEST_CASE("limits of the machine and of memory cgroups") {
  CHECK(rt::host_free() > 0);
  CHECK(rt::host_free() <= rt::host_limit());
  CHECK(rt::host_limit() <= remat::bytes_t{sysconf(_SC_PAGESIZE)} * sysconf(_SC_PHYS_PAGES));
  const told_system system;
  CHECK(rt::host_limit() == remat::max_bytes);  // it does not tell
  constexpr remat::bytes_t mib = 1 << 20;
  system.machine(100 * mib);
  CHECK(rt::host_limit() == 1024 * mib);
  CHECK(rt::host_free() == 100 * mib);
  const auto group = [&](const std::string& folder, bool second, const std::string& most, remat::bytes_t taken,
                         remat::bytes_t idle) {
    system.write(folder + (second ? "/memory.max" : "/memory.limit_in_bytes"), most + "\n");
    system.write(folder + (second ? "/memory.current" : "/memory.usage_in_bytes"), std::to_string(taken) + "\n");
    system.write(folder + "/memory.stat", "anon 5\n" + std::string(second ? "inactive_file " : "total_inactive_file ") +
                                              std::to_string(idle) + "\nfile 7\n");
  };
  group("sys/fs/cgroup/a", true, std::to_string(50 * mib), 30 * mib, 5 * mib);
  group("sys/fs/cgroup/a/b", true, "max", 20 * mib, 0);
  system.write("proc/self/cgroup", "0::/a/b\n");
  CHECK(rt::host_limit() == 50 * mib);
  CHECK(rt::host_free() == 25 * mib);
  group("sys/fs/cgroup/memory/c", false, std::to_string(40 * mib), 39 * mib, 0);
  system.write("proc/self/cgroup", "3:cpu:/x\n2:memory:/c\n1:name=systemd:/\n0::/a/b\n");
  CHECK(rt::host_limit() == 40 * mib);
  CHECK(rt::host_free() == mib);
  group("sys/fs/cgroup/a", true, std::to_string(20 * mib), 30 * mib, 0);  // more is taken than may be
  CHECK(rt::host_limit() == 20 * mib);
  CHECK(rt::host_free() == 0);
  system.write("proc/self/cgroup", "0::/nowhere\nwithout a folder\n0::/../..\n");
  CHECK(rt::host_limit() == 1024 * mib);
}

TEST_CASE("while memory is short, weights leave as they step, and sessions give back what they keep") {
  const auto when = GENERATE(rt::stepping::after, rt::stepping::overlap);
  const auto large = [] {  // so that whole pages of an arena are free between gradients that stay in it
    ::torch::manual_seed(17);
    return models::mlp(64, 128, 6);
  };
  auto plain = large(), ours = large();
  const auto disk = new_disk();
  rt::move_weights(*ours.module, *disk);
  remat::bytes_t weights = 0;
  for (const auto& p : ours.module->parameters())
    if (disk->holds(p)) weights += (static_cast<remat::bytes_t>(p.nbytes()) + 4095) / 4096 * 4096;
  REQUIRE(weights > 0);
  const rt::gradients_on_disk kept(*ours.module, disk);
  testing::runner net(ours.module, ours.forward, testing::quick("100%"));
  optim::AdamW first(plain.module->parameters(), optim::AdamWOptions(0.01));
  rt::offloaded<optim::AdamW> second(disk, when, ours.module->parameters(), optim::AdamWOptions(0.01));
  const told_system system;
  const rt::meter counted;
  remat::bytes_t before = 0;
  for (int step = 0; step < 8; ++step) {
    INFO("step " << step);
    const bool is_short = step / 2 == 2;
    system.machine(is_short ? 0 : 1 << 29);
    const auto evicted = disk->evicted();
    first.zero_grad();
    second.zero_grad();
    ::torch::manual_seed(step);
    models::loss_of(plain.forward(plain.inputs)).backward();
    ::torch::manual_seed(step);
    models::loss_of(net.forward(ours.inputs)).backward();
    const auto live = rt::meter::live();
    first.step();
    second.step();
    if (step > 1)
      CHECK(disk->evicted() - evicted - (is_short ? weights : 0) == before);
    else
      before = disk->evicted() - evicted;
    if (step > 0) CHECK((live - rt::meter::live() > 0) == is_short);
    REQUIRE(same_bits(plain.module->parameters(), ours.module->parameters()));
  }
}

TEST_CASE("a gradient that somebody holds keeps its place, and hooks of before come first") {
  auto w = at::randn({2000}).requires_grad_();
  struct holder : ::torch::nn::Module {
    explicit holder(Tensor t) { register_parameter("w", std::move(t)); }
  } module(w);
  struct doubling final : ::torch::autograd::PostAccumulateGradHook {
    void operator()(const Tensor& p) override { p.mutable_grad().mul_(2); }
  };
  w = module.parameters().front();
  ::torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<doubling>());
  const auto disk = new_disk();
  std::vector<Tensor> held;
  {
    const rt::gradients_on_disk kept(module, disk);
    for (int i = 1; i < 4; ++i) {
      (w * i).sum().backward();
      held.push_back(w.grad());
      w.mutable_grad().reset();
    }
    const auto most = disk->reserved();
    for (int i = 0; i < 20; ++i) {  // nobody holds these
      w.sum().backward();
      w.mutable_grad().reset();
    }
    CHECK(disk->reserved() <= most + 8192);
  }
  for (int i = 1; i < 4; ++i)
    CHECK(same_bits(held[static_cast<std::size_t>(i - 1)], at::full({2000}, 2.F * static_cast<float>(i))));
  w.sum().backward();
  CHECK_FALSE(disk->holds(w.grad()));
  CHECK(same_bits(w.grad(), at::full({2000}, 2.F)));
}

TEST_CASE("backwards on two threads whose gradients go to a disk") {
  struct many : ::torch::nn::Module {
    many() {
      for (int i = 0; i < 6; ++i) register_parameter(std::to_string(i), at::zeros({4096}));
    }
  } module;
  const auto weights = module.parameters();
  const rt::gradients_on_disk kept(module, new_disk());
  const auto work = [&] {
    for (int i = 0; i < 50; ++i) {
      auto loss = at::zeros({});
      for (const auto& w : weights) loss = loss + w.sum();
      loss.backward();
    }
  };
  std::thread other(work);
  work();
  other.join();
  for (const auto& w : weights) CHECK(same_bits(w.grad(), at::full({4096}, 100.F)));
}

TEST_CASE("a full disk is told of before a weight changes") {
  layers mine;
  const system_restored guard;
  const auto disk = new_disk();
  rt::offloaded<optim::AdamW> ours(disk, mine.weights, optim::AdamWOptions(0.1));
  const auto before = copies_of(mine.weights);
  mine.draw_gradients(1);
  rt::files_of_system().allocate = [](int, int, off_t, off_t) { return errno = ENOSPC, -1; };
  CHECK_THROWS_AS(ours.step(), rt::out_of_memory);
  CHECK(same_bits(mine.weights, before));
  CHECK(disk->reserved() == 0);
  rt::files_of_system() = guard.before;
  ours.step();  // there is room again
  CHECK_FALSE(same_bits(mine.weights, before));
}

TEST_CASE("a disk that fails ends the steps until a checkpoint is loaded") {
  layers mine, theirs;
  const system_restored guard;
  rt::offloaded<optim::AdamW> ours(new_disk(), mine.weights, optim::AdamWOptions(0.1));
  optim::AdamW plain(theirs.weights, optim::AdamWOptions(0.1));
  mine.draw_gradients(1);
  for (std::size_t i = 0; i < 4; ++i) theirs.weights[i].mutable_grad() = mine.weights[i].grad().clone();
  ours.step();
  plain.step();
  std::stringstream checkpoint;
  ::torch::save(ours, checkpoint);
  const auto then = copies_of(mine.weights);
  const bool writing = GENERATE(true, false);
  if (writing) {
    rt::files_of_system().write_back = [](int, off_t, off_t) { return errno = EIO, -1; };
    CHECK_THROWS_WITH(ours.step(), Catch::Contains("all parameters have made the step") && Catch::Contains("Input/output error"));
  } else {
    rt::files_of_system().populate = [](void*, std::size_t) { return errno = EIO, -1; };
    CHECK_THROWS_WITH(ours.step(),
                      Catch::Contains("0 of 4 parameters have made the step") && Catch::Contains("Load a checkpoint"));
    CHECK(same_bits(mine.weights, then));
  }
  rt::files_of_system() = guard.before;
  CHECK_THROWS_AS(ours.step(), rt::copy_failed);
  ::torch::load(ours, checkpoint);
  for (std::size_t i = 0; i < 4; ++i) mine.weights[i].set_data(then[i]);
  ours.step();
  plain.step();
  CHECK(same_bits(mine.weights, theirs.weights));
}

TEST_CASE("a backward whose gradients could not be written throws, and the next one may run") {
  auto sample = model_of(0);
  const system_restored guard;
  const auto disk = new_disk();
  const rt::gradients_on_disk kept(*sample.module, disk);
  const auto backward = [&] {
    for (const auto& p : sample.module->parameters()) p.mutable_grad().reset();
    ::torch::manual_seed(1);
    models::loss_of(sample.forward(sample.inputs)).backward();
  };
  rt::files_of_system().write_back = [](int, off_t, off_t) { return errno = ENOSPC, -1; };
  CHECK_THROWS_WITH(backward(), Catch::Contains("No space left"));
  rt::files_of_system() = guard.before;
  backward();
  CHECK(disk->evicted() > 0);
}

TEST_CASE("a forked process reads what is on the disk and takes nothing there", "[fork]") {
  rt::disk disk(scratch());
  const auto made = disk.reserve({at::empty({4096})});
  made[0].fill_(2);
  const auto child = fork();
  if (child == 0) {
    int wrong = made[0][17].item<float>() == 2 ? 0 : 1;
    try {
      disk.reserve({at::empty({4096})});
      wrong += 2;
    } catch (const rt::copy_failed&) {
    }
    _exit(wrong);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("a forked process does not wait for what its parent has under way", "[fork]") {
  const system_restored guard;
  static std::atomic<bool> held;
  held = true;
  rt::files_of_system().write_back = [](int, off_t, off_t) {
    while (held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  };
  const auto disk = new_disk();
  auto traffic = std::make_unique<rt::disk_traffic>();
  traffic->done(disk->reserve({at::empty({4096})}));
  const auto child = fork();
  if (child == 0) {
    alarm(20);  // ends one that waits
    traffic->wait();
    traffic->drain();
    traffic.reset();
    _exit(0);
  }
  held = false;
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
