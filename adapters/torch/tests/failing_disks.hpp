// SPDX-License-Identifier: Apache-2.0
/// @file
/// Disks that fail on demand, and a training that uses them.
#pragma once

#include <sys/mount.h>
#include <sys/stat.h>
#include <torch/torch.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "../src/device/file.hpp"
#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"

namespace faults_tests {

namespace rt = remat::pytorch;
namespace fs = std::filesystem;
using remat::bytes_t;

/// Restores the system calls at the end of the scope.
struct calls_restored {
  ~calls_restored() { rt::files_of_system() = before; }
  rt::file_calls before = rt::files_of_system();
};

/// A folder for one test, with a file system of its own if the process may mount one.
class own_disk {
 public:
  /// @param kind "tmpfs", "ext2", or "": the file system of temporary files
  explicit own_disk(const std::string& kind, bytes_t bytes = 0) {
    std::string name = (fs::temp_directory_path() / "remat-faults-XXXXXX").string();
    folder_ = mkdtemp(name.data());
    if (kind == "tmpfs") mounted_ = ::mount("none", folder_.c_str(), "tmpfs", 0, ("size=" + std::to_string(bytes)).c_str()) == 0;
    if (kind == "ext2") {
      image_ = folder_ + ".image";
      std::ofstream(image_).close();
      fs::resize_file(image_, static_cast<std::uintmax_t>(bytes));
      mounted_ = std::system(("mkfs.ext2 -q -m 0 " + image_ + " >/dev/null 2>&1 && mount -o loop " + image_ + " " + folder_ +
                              " >/dev/null 2>&1")
                                 .c_str()) == 0;
    }
    there_ = kind.empty() || mounted_;
  }
  ~own_disk() {
    if (mounted_) ::umount2(folder_.c_str(), MNT_DETACH);
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
    fs::remove(image_, ignored);
  }
  own_disk(const own_disk&) = delete;
  own_disk& operator=(const own_disk&) = delete;

  bool there() const { return there_; }
  const std::string& folder() const { return folder_; }
  /// Fills the disk.
  void fill() {
    std::ofstream filler(folder_ + "/filler");
    const std::string some(4096, 'x');
    while (filler.write(some.data(), 4096).flush()) {
    }
  }
  void free() { fs::remove(folder_ + "/filler"); }

 private:
  std::string folder_, image_;
  bool mounted_ = false, there_ = false;
};

/// A model whose steps use a disk, and a plain twin.
class spilling {
 public:
  explicit spilling(const std::string& folder) : spilling(rt::on_disk(folder)) {}
  explicit spilling(rt::far_memory far) {
    auto o = testing::quick("60%");
    o.solver = rt::default_solver();
    o.far = std::move(far);
    o.far.rates = remat::copy_rates{1e12, 1e12, 0};
    run_ = std::make_unique<testing::runner>(planned_.module, planned_.forward, std::move(o));
  }
  testing::runner& run() { return *run_; }
  std::vector<at::Tensor> forward() {
    planned_.module->zero_grad();
    ::torch::manual_seed(++step_);
    return run_->forward(planned_.inputs);
  }
  void step() { models::loss_of(forward()).backward(); }
  /// Compares a step with the twin, and checks that values move.
  void check_step(bool moves = true) {
    step();
    if (moves) CHECK(run_->report().moved_in > 0);
    plain_.module->zero_grad();
    ::torch::manual_seed(step_);
    models::loss_of(plain_.forward(plain_.inputs)).backward();
    const auto ours = planned_.module->parameters(), theirs = plain_.module->parameters();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CHECK(same_bits(ours[i], theirs[i]));
      CHECK(same_bits(ours[i].grad(), theirs[i].grad()));
    }
  }
  /// @return the message of `copy_failed`
  std::string failing_step() {
    try {
      step();
    } catch (const rt::copy_failed& e) {
      return e.what();
    }
    return "";
  }

 private:
  static models::sample make() {
    ::torch::manual_seed(17);
    return models::gpt(4, 8, 64, 64);
  }
  models::sample plain_ = make(), planned_ = make();
  std::unique_ptr<testing::runner> run_;
  std::uint64_t step_ = 0;
};

using Catch::Matchers::Contains;
using Catch::Matchers::Matches;

inline std::string folder_of_temporary_files() { return fs::temp_directory_path().string(); }

/// The descriptors of the spill files of this process in a folder.
inline std::vector<std::string> nameless_files_in(const std::string& folder) {
  std::vector<std::string> list;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = fs::read_symlink(entry.path(), gone).string();
    if (target.rfind(folder, 0) == 0 && target.find("(deleted)") != std::string::npos) list.push_back(entry.path().string());
  }
  return list;
}

}  // namespace faults_tests
