// SPDX-License-Identifier: Apache-2.0
/// @file
/// Calls of MILP libraries that do not keep a time limit by themselves. For authors of backends. Needs Eigen.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <remat/core/beside.hpp>
#include <remat/milp/backend.hpp>

namespace remat::milp {

/// A call of a MILP library on a thread of its own. The caller waits, polls and keeps the time limit.
///
/// Some steps of MILP libraries, such as presolve or a factorization, look at no limit for seconds. A call that has not ended
/// `patience` after the limit, or after `poll` asked to stop, is left alone: it ends when the library next looks, at the latest
/// before the program exits. The answer is then the best that the call had told.
///
/// A backend derives from this class. Its member `solution work()` runs on the other thread, maybe longer than the caller waits.
/// It reads the copies of the model and the options that are here, and nothing of the caller's. Complexity: a thread per call, a
/// look every 50 ms.
class supervised {
 public:
  supervised(const supervised&) = delete;
  supervised& operator=(const supervised&) = delete;

 protected:
  using clock = std::chrono::steady_clock;

  supervised(const model& m, const options& o) : model_(m), options_(o) {
    if (o.start) tell_solution(m.objective(*o.start), *o.start);
  }
  ~supervised() = default;

  /// For the thread that works: is a solution of that objective better than those before?
  bool improves(double objective) {
    const std::lock_guard lock(mutex_);
    return objective < objective_;
  }
  /// For the thread that works: a solution that is better than those before.
  void tell_solution(double objective, Eigen::VectorXd x) {
    const std::lock_guard lock(mutex_);
    objective_ = objective, best_ = std::move(x);
  }
  /// For the thread that works: what is proven. @return true if the library is to stop
  bool tell_bound(double bound) {
    const std::lock_guard lock(mutex_);
    bound_ = std::max(bound_, bound);
    return stop_;
  }
  bool stopping() { return tell_bound(-infinity); }

  const model model_;
  const options options_;

 private:
  template <class Job>
  friend solution supervise(std::shared_ptr<Job> job);
  static constexpr double patience = 0.3;  ///< s; solvers may exceed their limit by 10 % and half a second

  /// Calls that were left alone. Waited for when the program exits.
  class stragglers {
   public:
    static void add(std::future<void> work) {
      static stragglers all;
      const std::lock_guard lock(all.mutex_);
      std::erase_if(all.work_, [](auto& w) { return w.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
      all.work_.push_back(std::move(work));
    }

   private:
    std::mutex mutex_;
    std::vector<std::future<void>> work_;
  };

  static double seconds_since(clock::time_point t) { return std::chrono::duration<double>(clock::now() - t).count(); }
  /// @return false if the call was left alone
  bool wait() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return done_; })) {
      if (!stop_ && (seconds_since(began_) > options_.seconds || poll(lock))) stop_ = true, stopped_ = clock::now();
      if (stop_ && seconds_since(stopped_) > patience) return false;
    }
    return true;
  }
  bool poll(std::unique_lock<std::mutex>& lock) {
    if (!options_.poll) return false;
    const auto [objective, bound] = std::pair(objective_, bound_);
    lock.unlock();
    bool asked = true;
    try {
      asked = options_.poll(objective, bound);
    } catch (...) {
      failure_ = std::current_exception();
    }
    lock.lock();
    return asked;
  }
  void done(solution s, std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(s), work_failure_ = std::move(failure);
    done_ = true;
    changed_.notify_all();
  }
  /// Of a call that was left alone.
  solution so_far() {
    const std::lock_guard lock(mutex_);
    solution s;
    s.status = best_.size() > 0 ? status::feasible : status::limit;
    s.x = best_, s.bound = bound_;
    return s;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const clock::time_point began_ = clock::now();
  clock::time_point stopped_ = {};
  bool stop_ = false, done_ = false;
  std::exception_ptr failure_ = {}, work_failure_ = {};
  solution answer_ = {};
  Eigen::VectorXd best_ = {};
  double objective_ = infinity, bound_ = -infinity;
};

/// Runs `job->work()` on a thread of its own, within the limits of the options that it was made with.
/// @tparam Job derives from `supervised`
/// @return its solution, or the best that it told if it was left alone; `status::failed` if the system has no thread left
/// @throws what `work` or `options.poll` throws
template <class Job>
solution supervise(std::shared_ptr<Job> job) {
  auto worker = beside([job] {
    solution s;
    std::exception_ptr failure;
    try {
      s = job->work();
    } catch (...) {
      failure = std::current_exception();
    }
    job->done(std::move(s), std::move(failure));
  });
  if (!worker.valid()) return {};
  const bool ended = job->wait();
  if (ended)
    worker.wait();
  else
    supervised::stragglers::add(std::move(worker));
  if (job->failure_) std::rethrow_exception(job->failure_);
  if (!ended) return job->so_far();
  if (job->work_failure_) std::rethrow_exception(job->work_failure_);
  return std::move(job->answer_);
}

}  // namespace remat::milp
