// SPDX-License-Identifier: Apache-2.0
// Calls of MILP libraries that end in time, end late, or throw.
#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch.hpp>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>

#include <remat/milp/supervised.hpp>

using namespace remat;

namespace {

/// A library that ignores its limits until it is released.
struct deaf : milp::supervised {
  explicit deaf(const milp::options& o, std::shared_ptr<std::atomic<bool>> until)
      : supervised({}, o), released(std::move(until)) {}
  milp::solution work() {
    report_solution(3, Eigen::VectorXd::Constant(1, 3));
    report_bound(1);
    while (!*released) std::this_thread::yield();
    return {.status = milp::status::optimal, .x = Eigen::VectorXd::Constant(1, 2), .objective = 2, .bound = 2};
  }
  std::shared_ptr<std::atomic<bool>> released;
};

/// A library that runs until it is asked to stop.
struct obedient : milp::supervised {
  explicit obedient(const milp::options& o) : supervised({}, o) {}
  milp::solution work() {
    while (!report_bound(++looks)) std::this_thread::yield();
    return {.status = milp::status::limit, .x = {}, .objective = milp::infinity, .bound = looks};
  }
  double looks = 0;
};

struct broken : milp::supervised {
  explicit broken(const milp::options& o) : supervised({}, o) {}
  milp::solution work() { throw std::range_error("work"); }
};

}  // namespace

TEST_CASE("supervise abandons a call that ignores its limit, and returns the best answer reported so far") {
  const auto released = std::make_shared<std::atomic<bool>>(false);
  const auto s = milp::supervise(std::make_shared<deaf>(milp::options{.seconds = 0}, released));
  *released = true;
  CHECK(s.status == milp::status::feasible);
  REQUIRE(s.x.size() == 1);
  CHECK(s.x[0] == 3);
  CHECK(s.bound == 1);
}

TEST_CASE("a forked process neither waits for calls that its parent abandoned, nor lacks calls of its own") {
  const auto released = std::make_shared<std::atomic<bool>>(false);
  milp::supervise(std::make_shared<deaf>(milp::options{.seconds = 0}, released));
  const auto child = fork();
  if (child == 0) {
    alarm(20);
    const auto s = milp::supervise(std::make_shared<deaf>(milp::options{.seconds = 0}, released));
    *released = true;  // in the child only
    std::exit(s.status == milp::status::feasible ? 0 : 1);
  }
  int state = 0;
  REQUIRE(waitpid(child, &state, 0) == child);
  *released = true;
  REQUIRE(WIFEXITED(state));
  CHECK(WEXITSTATUS(state) == 0);
}

TEST_CASE("supervise returns the answer of a call that ends, also after a limit") {
  const auto released = std::make_shared<std::atomic<bool>>(true);
  CHECK(milp::supervise(std::make_shared<deaf>(milp::options{}, released)).status == milp::status::optimal);
  const auto s = milp::supervise(std::make_shared<obedient>(milp::options{.seconds = 0}));
  CHECK(s.status == milp::status::limit);
  CHECK(s.bound > 0);
}

TEST_CASE("supervise calls poll on the thread of the caller with the latest values, until poll asks to stop") {
  int calls = 0;
  bool here = true;
  double best = 0, bound = 0;
  const auto caller = std::this_thread::get_id();
  const milp::options o{.poll = [&](double x, double y) {
    here = here && std::this_thread::get_id() == caller;
    best = x, bound = y;
    return ++calls == 2;
  }};
  const auto s = milp::supervise(std::make_shared<obedient>(o));
  CHECK(s.status == milp::status::limit);
  CHECK(calls == 2);
  CHECK(here);
  CHECK(best == milp::infinity);
  CHECK(bound > 0);
}

TEST_CASE("exceptions of the library and of poll reach the caller") {
  CHECK_THROWS_WITH(milp::supervise(std::make_shared<broken>(milp::options{})), "work");
  const milp::options o{.poll = [](double, double) -> bool { throw std::range_error("poll"); }};
  CHECK_THROWS_WITH(milp::supervise(std::make_shared<obedient>(o)), "poll");
}
