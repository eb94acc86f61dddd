// SPDX-License-Identifier: Apache-2.0
// Full, broken and unusual disks in a training step. The error names value, bytes and disk, weights stay unchanged, and steps
// work again once the disk does.
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "../src/device/file.hpp"
#include "compare.hpp"
#include "failing_disks.hpp"
#include "models.hpp"
#include "quick.hpp"

using namespace faults_tests;

TEST_CASE("a failing disk in a step: the error names value, bytes and disk, and the next step is correct") {
  spilling s(folder_of_temporary_files());
  s.check_step();
  auto& system = rt::files_of_system();
  const auto fails = [&](const std::string& what, const std::string& why) {
    const auto said = s.failing_step();
    CHECK_THAT(said, Matches("remat: value .+ of [0-9]+ bytes: the disk at " + folder_of_temporary_files() + ": " + what +
                             " of [0-9]+ bytes at [0-9]+ stopped after [0-9]+: " + why));
  };
  {
    const calls_restored later;
    system.write = [](int, const void*, std::size_t, off_t) -> ssize_t { return errno = ENOSPC, -1; };
    fails("write", "No space left on device");
    fails("write", "No space left on device");
    system.write = [](int, const void*, std::size_t, off_t) -> ssize_t { return errno = EIO, -1; };
    fails("write", "Input/output error");
    system.write = [](int, const void*, std::size_t, off_t) -> ssize_t { return errno = EDQUOT, -1; };
    fails("write", "Disk quota exceeded");
    system.write = [](int, const void*, std::size_t, off_t) -> ssize_t { return 0; };
    fails("write", "the file ends there");
  }
  s.check_step();
  {
    const calls_restored later;
    system.read = [](int, void*, std::size_t, off_t) -> ssize_t { return errno = EIO, -1; };
    fails("read", "Input/output error");
    system.read = [](int, void*, std::size_t, off_t) -> ssize_t { return 0; };
    fails("read", "the file ends there");
    static std::atomic<int> calls;
    calls = 0;
    system.read = [](int file, void* to, std::size_t bytes, off_t at) -> ssize_t {  // fails once
      return ++calls == 2 ? (errno = EIO, -1) : ::pread(file, to, bytes, at);
    };
    fails("read", "Input/output error");
    s.check_step();
  }
  {
    const calls_restored later;
    system.read = [](int file, void* to, std::size_t bytes, off_t at) -> ssize_t {
      return ::pread(file, to, std::min(bytes, std::size_t{4096}), at);
    };
    system.write = [](int file, const void* from, std::size_t bytes, off_t at) -> ssize_t {
      return ::pwrite(file, from, std::min(bytes, std::size_t{8192}), at);
    };
    s.check_step();  // short reads and writes are not failures
  }
  s.check_step();
}

TEST_CASE("memory of the host as far memory: enough, too little, and all taken") {
  for (const auto limit : {remat::max_bytes, bytes_t{1} << 21}) {
    spilling s(rt::on_host(c10::kCPU, limit));
    for (int k = 0; k < 3; ++k) s.check_step(limit == remat::max_bytes);
    CHECK(s.run().report().far <= limit);
  }
  const auto far = rt::on_host(c10::kCPU, bytes_t{8} << 20);
  const auto taken = far.memory->reserve(far.memory->limit());  // by another user
  spilling s(far);
  try {
    s.step();
    FAIL("there is no room");
  } catch (const rt::out_of_memory& e) {
    CHECK(e.tier == far.memory->name());
    CHECK(e.available == 0);
  }
}

TEST_CASE("a truncated spill file fails the step, and the next step writes it anew") {
  const own_disk disk("");
  spilling s(disk.folder());
  s.check_step();
  {
    const calls_restored later;
    rt::files_of_system().read = [](int file, void* to, std::size_t bytes, off_t at) -> ssize_t {
      return ::ftruncate(file, 0) == 0 ? ::pread(file, to, bytes, at) : -1;
    };
    CHECK_THAT(s.failing_step(), Contains("stopped after 0: the file ends there"));
  }
  s.check_step();  // the step writes the file anew
}

TEST_CASE("spill files are private, stay in their process, and vanish with it") {
  const own_disk disk("");
  const auto number = rt::open_nameless_file(disk.folder());
  struct stat about {};
  REQUIRE(::fstat(number, &about) == 0);
  CHECK((about.st_mode & 0777) == 0600);
  CHECK(about.st_nlink == 0);
  CHECK((::fcntl(number, F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(::linkat(AT_FDCWD, ("/proc/self/fd/" + std::to_string(number)).c_str(), AT_FDCWD, (disk.folder() + "/name").c_str(),
                 AT_SYMLINK_FOLLOW) != 0);  // it cannot get a name either
  ::close(number);
  {
    spilling s(disk.folder());
    s.check_step();
    CHECK(nameless_files_in(disk.folder()).size() == 1);
    CHECK(fs::is_empty(disk.folder()));
  }
  CHECK(nameless_files_in(disk.folder()).empty());
  CHECK_THROWS_WITH(rt::on_disk("/proc"), Contains("no file can be made in /proc: "));
  CHECK_THROWS_WITH(rt::open_nameless_file(disk.folder() + "/none"), Contains("/none: No such file or directory"));
}

TEST_CASE("file systems without fallocate, without nameless files, or without direct access") {
  std::vector<std::unique_ptr<own_disk>> disks;
  for (const char* kind : {"", "tmpfs", "ext2"}) disks.push_back(std::make_unique<own_disk>(kind, bytes_t{32} << 20));
  const calls_restored later;
  auto& system = rt::files_of_system();
  for (const auto& disk : disks) {
    if (!disk->there()) continue;  // cannot be mounted here: the first disk alone simulates the missing features
    for (int lacks = 0; lacks < 8; ++lacks) {
      INFO(disk->folder() << " lacks " << lacks);
      system = later.before;
      if (lacks & 1) system.allocate = [](int, int, off_t, off_t) { return errno = EOPNOTSUPP, -1; };
      switch (lacks & 6) {
        case 2:
          system.open = [](const char* path, int flags, mode_t mode) {
            return (flags & O_TMPFILE) == O_TMPFILE ? (errno = EOPNOTSUPP, -1) : ::open(path, flags, mode);
          };
          break;
        case 4:
          system.open = [](const char* path, int flags, mode_t mode) {
            return flags & O_DIRECT ? (errno = EINVAL, -1) : ::open(path, flags, mode);
          };
          break;
        case 6:  // opens the file, and then refuses to write
          system.write = [](int file, const void* from, std::size_t bytes, off_t at) -> ssize_t {
            return ::fcntl(file, F_GETFL) & O_DIRECT ? (errno = EINVAL, -1) : ::pwrite(file, from, bytes, at);
          };
          break;
        default:
          break;
      }
      const auto far = rt::on_disk(disk->folder());
      const auto there = far.memory->reserve(65536), here = rt::host_memory("near")->reserve(65536);
      std::string sent(65536, 0), found = sent;
      for (std::size_t k = 0; k < sent.size(); ++k) sent[k] = static_cast<char>(k * 7 + k / 4096);
      here->write(sent.data(), 0, 65536);
      far.out->copy({there, 0, 65536}, {here, 0, 65536})->wait();
      here->write(found.data(), 0, 65536);
      far.in->copy({here, 0, 65536}, {there, 0, 65536})->wait();
      here->read(found.data(), 0, 65536);
      CHECK(found == sent);
      CHECK((fs::is_empty(disk->folder()) || fs::exists(disk->folder() + "/lost+found")));
      CHECK_THROWS_AS(far.memory->reserve(bytes_t{1} << 50), rt::out_of_memory);
    }
  }
  system = later.before;
  static std::atomic<int> interrupted;
  interrupted = 3;
  system.allocate = [](int file, int mode, off_t offset, off_t bytes) {
    return interrupted-- > 0 ? (errno = EINTR, -1) : ::fallocate(file, mode, offset, bytes);
  };
  CHECK(rt::file_memory(folder_of_temporary_files())->reserve(8192)->bytes() == 8192);
}

TEST_CASE("a disk that is full at the reservation, and a disk that fills up in the middle of a step") {
  own_disk disk("tmpfs", bytes_t{24} << 20);
  const calls_restored later;
  auto& system = rt::files_of_system();
  static std::atomic<bool> full;
  full = false;
  if (!disk.there()) {  // without a mount, the system calls simulate the full disk
    system.write = [](int file, const void* from, std::size_t bytes, off_t at) -> ssize_t {
      return full ? (errno = ENOSPC, -1) : ::pwrite(file, from, bytes, at);
    };
    system.allocate = [](int file, int mode, off_t offset, off_t bytes) {
      return full ? (errno = ENOSPC, -1) : ::fallocate(file, mode, offset, bytes);
    };
  }
  const auto fill = [&](bool now) {
    full = now;
    if (disk.there()) now ? disk.fill() : disk.free();
  };
  {
    spilling s(disk.folder());
    fill(true);
    try {
      s.step();
      FAIL("there is no room");
    } catch (const rt::out_of_memory& e) {
      CHECK(e.tier == "the disk at " + disk.folder());
      CHECK(e.asked > 0);
      if (disk.there()) CHECK(e.available < e.asked);
    }
    fill(false);
    s.check_step();
    if (disk.there()) {
      fill(true);
      s.check_step();  // the space of the step is reserved already
      fill(false);
    }
  }
  system.allocate = [](int, int, off_t, off_t) { return errno = EOPNOTSUPP, -1; };  // no space can be reserved
  spilling s(disk.folder());
  s.check_step();
  s.run().release();  // the next file is sparse
  static std::atomic<int> written;
  written = 0;
  const auto write = system.write;
  static decltype(system.write) then;
  then = write;
  static own_disk* filled;
  filled = disk.there() ? &disk : nullptr;
  system.write = [](int file, const void* from, std::size_t bytes, off_t at) -> ssize_t {
    if (++written == 2) {
      full = true;
      if (filled != nullptr) filled->fill();
    }
    return then(file, from, bytes, at);
  };
  CHECK_THAT(s.failing_step(),
             Matches("remat: value .* of [0-9]+ bytes: the disk at " + disk.folder() + ": write of .*: No space left on device"));
  system.write = write;
  fill(false);
  s.check_step();
}

TEST_CASE("a limit on the size of files counts as a full disk", "[fork]") {
  const auto child = fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{16384, 16384};
    ::setrlimit(RLIMIT_FSIZE, &small);
    try {
      rt::file_memory(folder_of_temporary_files())->reserve(65536);
    } catch (const rt::out_of_memory& e) {
      _exit(e.asked == 65536 ? 0 : 1);
    }
    _exit(2);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

TEST_CASE("two models in one folder, and two steps in flight with too little room for both") {
  const own_disk disk("");
  bytes_t far = 0;
  {
    spilling a(disk.folder()), b(disk.folder());
    for (int k = 0; k < 2; ++k) {
      a.check_step();
      b.check_step();
    }
    far = a.run().report().far;
  }
  spilling s(rt::on_disk(disk.folder(), far));
  const auto first = s.forward();
  CHECK(s.run().report().far > 0);
  s.run().set_budget("130%");  // for both steps
  const auto second = s.forward();
  CHECK(s.run().report().far == 0);  // recomputes the values that cannot move
  models::loss_of(second).backward();
  models::loss_of(first).backward();
  s.run().set_budget("60%");
  s.check_step(false);  // a plan for two steps, as before
  s.check_step();
}
