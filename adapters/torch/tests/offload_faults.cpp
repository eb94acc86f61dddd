// SPDX-License-Identifier: Apache-2.0
// Limits, threads, forks, and disks that are full or fail.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cerrno>
#include <chrono>
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
#include "trained_on_disk.hpp"

using namespace offload_tests;

TEST_CASE("host_limit and host_free follow the machine and memory cgroups") {
  CHECK(rt::host_free() > 0);
  CHECK(rt::host_free() <= rt::host_limit());
  CHECK(rt::host_limit() <= remat::bytes_t{sysconf(_SC_PAGESIZE)} * sysconf(_SC_PHYS_PAGES));
  const emulated_system system;
  CHECK(rt::host_limit() == remat::max_bytes);  // the system gives no limit
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
  group("sys/fs/cgroup/a", true, std::to_string(20 * mib), 30 * mib, 0);  // more memory is used than the limit allows
  CHECK(rt::host_limit() == 20 * mib);
  CHECK(rt::host_free() == 0);
  system.write("proc/self/cgroup", "0::/nowhere\nwithout a folder\n0::/../..\n");
  CHECK(rt::host_limit() == 1024 * mib);
}

TEST_CASE("while memory is short, weights leave as they step, and sessions free what they keep") {
  const auto when = GENERATE(rt::stepping::after, rt::stepping::overlap);
  const auto large = [] {  // so large that whole pages of the arena are free between gradients that stay in it
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
  const emulated_system system;
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

TEST_CASE("a gradient that is still held keeps its memory, and earlier hooks run first") {
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
    for (int i = 0; i < 20; ++i) {  // nobody holds these gradients
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

TEST_CASE("backwards on two threads can offload gradients to a disk") {
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

TEST_CASE("the error for a full disk comes before any weight changes") {
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
  ours.step();  // there is space again
  CHECK_FALSE(same_bits(mine.weights, before));
}

TEST_CASE("after a disk failure an optimizer refuses steps until a checkpoint is loaded") {
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

TEST_CASE("a backward that cannot write its gradients throws, and the next backward works") {
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

TEST_CASE("a forked process can read tensors on the disk, and cannot reserve space there", "[fork]") {
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

TEST_CASE("a forked process does not wait for the disk traffic of its parent", "[fork]") {
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
    alarm(20);  // ends a child that waits
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
