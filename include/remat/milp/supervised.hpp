// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs MILP libraries that do not keep time limits by themselves. For authors of backends. Needs Eigen.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <remat/core/try_async.hpp>
#include <remat/milp/backend.hpp>

namespace remat::milp {

/// A call of a MILP library on a thread of its own. The caller waits, polls and keeps the time limit.
///
/// Some steps of MILP libraries, such as presolve or a factorization, check no limit for seconds. If a call has not ended
/// `patience` seconds after the limit, or after `poll` asked to stop, the caller abandons it and returns the best solution
/// reported so far. The abandoned call ends when the library next checks a limit, at the latest before the program exits.
///
/// A backend derives from this class. Its member `solution work()` runs on the other thread, maybe longer than the caller waits.
/// It reads the copies of model and options in this class, and no data of the caller. Complexity: a thread per call; the caller
/// looks every 50 ms.
class supervised {
 public:
  supervised(const supervised&) = delete;
  supervised& operator=(const supervised&) = delete;

 protected:
  using clock = std::chrono::steady_clock;

  supervised(const model& m, const options& o) : model_(m), options_(o) {
    if (o.start) report_solution(m.objective(*o.start), *o.start);
  }
  ~supervised() = default;

  /// For the working thread: is a solution with this objective better than all before?
  bool improves(double objective) {
    const std::lock_guard lock(mutex_);
    return objective < objective_;
  }
  /// For the working thread: reports a solution that is better than all before.
  void report_solution(double objective, Eigen::VectorXd x) {
    const std::lock_guard lock(mutex_);
    objective_ = objective, best_ = std::move(x);
  }
  /// For the working thread: reports a proven bound. @return true if the library should stop
  bool report_bound(double bound) {
    const std::lock_guard lock(mutex_);
    bound_ = std::max(bound_, bound);
    return stop_requested_;
  }
  bool stopping() { return report_bound(-infinity); }

  const model model_;
  const options options_;

 private:
  template <class Job>
  friend solution supervise(std::shared_ptr<Job> job);
  static constexpr double patience = 0.3;  ///< s; solvers may exceed their limits by 10 % and half a second

  /// Abandoned calls. The process that made them waits for them when it exits.
  class abandoned_calls {
   public:
    static void add(std::future<void> work) {
      static abandoned_calls all;
      const std::lock_guard lock(all.mutex_);
      all.leave_to_parent();
      std::erase_if(all.work_, [](auto& w) { return w.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
      all.work_.push_back(std::move(work));
    }
    ~abandoned_calls() { leave_to_parent(); }

   private:
    /// A forked process has none of the threads of its parent, and would wait for them without end.
    void leave_to_parent() {
      if (process_ == getpid()) return;
      static auto& never_destroyed = *new std::vector<std::future<void>>;
      never_destroyed.insert(never_destroyed.end(), std::move_iterator(work_.begin()), std::move_iterator(work_.end()));
      work_.clear();
      process_ = getpid();
    }

    std::mutex mutex_;
    pid_t process_ = getpid();
    std::vector<std::future<void>> work_;
  };

  static double seconds_since(clock::time_point t) { return std::chrono::duration<double>(clock::now() - t).count(); }
  /// Waits for the call, and polls.
  /// @return false if the call is abandoned
  bool wait() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return is_finished_; })) {
      if (!stop_requested_ && (seconds_since(started_at_) > options_.seconds || poll(lock)))
        stop_requested_ = true, stop_requested_at_ = clock::now();
      if (stop_requested_ && seconds_since(stop_requested_at_) > patience) return false;
    }
    return true;
  }
  bool poll(std::unique_lock<std::mutex>& lock) {
    if (!options_.poll) return false;
    const auto [objective, bound] = std::pair(objective_, bound_);
    lock.unlock();
    bool stop_asked = true;
    try {
      stop_asked = options_.poll(objective, bound);
    } catch (...) {
      poll_failure_ = std::current_exception();
    }
    lock.lock();
    return stop_asked;
  }
  void set_answer(solution s, std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(s), work_failure_ = std::move(failure);
    is_finished_ = true;
    changed_.notify_all();
  }
  /// The answer of an abandoned call.
  solution best_so_far() {
    const std::lock_guard lock(mutex_);
    solution s;
    s.status = best_.size() > 0 ? status::feasible : status::limit;
    s.x = best_, s.bound = bound_;
    return s;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const clock::time_point started_at_ = clock::now();
  clock::time_point stop_requested_at_ = {};
  bool stop_requested_ = false, is_finished_ = false;
  std::exception_ptr poll_failure_ = {}, work_failure_ = {};
  solution answer_ = {};
  Eigen::VectorXd best_ = {};
  double objective_ = infinity, bound_ = -infinity;
};

/// Runs `job->work()` on a thread of its own, within the limits of the options that `job` was made with.
/// @tparam Job derives from `supervised`
/// @return its solution; the best reported so far if the call is abandoned; `status::failed` if the system has no thread left
/// @throws any exception of `work` and of `options.poll`
template <class Job>
solution supervise(std::shared_ptr<Job> job) {
  auto worker = try_async([job] {
    solution s;
    std::exception_ptr failure;
    try {
      s = job->work();
    } catch (...) {
      failure = std::current_exception();
    }
    job->set_answer(std::move(s), std::move(failure));
  });
  if (!worker.valid()) return {};
  const bool is_finished = job->wait();
  if (is_finished)
    worker.wait();
  else
    supervised::abandoned_calls::add(std::move(worker));
  if (job->poll_failure_) std::rethrow_exception(job->poll_failure_);
  if (!is_finished) return job->best_so_far();
  if (job->work_failure_) std::rethrow_exception(job->work_failure_);
  return std::move(job->answer_);
}

}  // namespace remat::milp
