// SPDX-License-Identifier: Apache-2.0
// Files as far memory: limits, forks, failures, rates.
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/paged_memory.hpp>
#include <vector>

#include "../src/device/file.hpp"

using namespace remat;
using namespace remat::pytorch;

namespace {

/// Lets tests replace system calls while it lives.
struct failing_files {
  ~failing_files() { files_of_system() = before; }
  file_calls before = files_of_system();
};

constexpr bytes_t block_size = 4096;

std::string how_it_fails(remat::pytorch::link& l, const block& to, const block& from) {
  try {
    l.copy(to, from)->wait();
  } catch (const copy_failed& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a forked process cannot use the file of its parent", "[fork]") {
  const auto file = file_memory(std::filesystem::temp_directory_path().string())->reserve(block_size);
  const auto near_by = host_memory("near")->reserve(block_size);
  const auto l = host_link();
  const block here{near_by, 0, block_size}, there{file, 0, block_size};
  l->copy(there, here)->wait();
  const auto child = fork();
  if (child == 0) _exit(how_it_fails(*l, there, here).find("forked") == std::string::npos);
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

TEST_CASE("files keep bytes, respect their limit, and are private") {
  const auto folder = std::filesystem::temp_directory_path() / ("remat-test-" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const auto far = file_memory(folder.string(), 10 * block_size);
  CHECK(far->alignment() == block_size);
  const auto near_by = host_memory("near")->reserve(8 * block_size);
  const auto out = host_link(), in = host_link();
  for (bytes_t k = 0; k < near_by->bytes(); ++k) near_by->data()[k] = static_cast<char>(k * 7 + k / 4096);
  const std::string sent(near_by->data(), static_cast<std::size_t>(near_by->bytes()));
  auto file = far->reserve(8 * block_size);
  CHECK(file->data() == nullptr);
  CHECK_THROWS_AS(far->reserve(3 * block_size), out_of_memory);
  const auto there = out->copy({file, 0, 8 * block_size}, {near_by, 0, 8 * block_size});
  there->wait();
  std::memset(near_by->data(), 0, static_cast<std::size_t>(near_by->bytes()));
  in->copy({near_by, block_size, 3 * block_size}, {file, 2 * block_size, 3 * block_size}, {there})->wait();
  CHECK(std::string(near_by->data() + block_size, 3 * block_size) == sent.substr(2 * block_size, 3 * block_size));
  CHECK(near_by->data()[4 * block_size] == 0);
  CHECK(std::filesystem::is_empty(folder));  // no name by which another process could open the file
  CHECK_THROWS_AS(out->copy({file, 0, block_size}, {file, block_size, block_size}), broken_contract);
  CHECK_THROWS_AS(out->copy({file, 8 * block_size, block_size}, {near_by, 0, block_size}), broken_contract);

  file.reset();
  CHECK(far->reserve(10 * block_size)->bytes() == 10 * block_size);
  CHECK_THROWS_AS(file_memory((folder / "none").string()), bad_option);
  CHECK_THROWS_AS(file_memory(folder.string(), -1), bad_option);
  CHECK_THROWS_AS(far->reserve(-1), bad_option);
  CHECK_THROWS_AS(file_memory(folder.string())->reserve(max_bytes), out_of_memory);
  std::filesystem::remove(folder);
}

TEST_CASE("errors of files give the reason") {
  const auto folder = std::filesystem::temp_directory_path().string();
  const auto far = file_memory(folder);
  const auto near_by = host_memory("near")->reserve(8 * block_size);
  std::memset(near_by->data(), 5, static_cast<std::size_t>(near_by->bytes()));
  auto file = far->reserve(8 * block_size);
  const auto l = host_link();
  const block here{near_by, 0, 8 * block_size}, there{file, 0, 8 * block_size};
  CHECK(how_it_fails(*l, there, here).empty());
  const failing_files restored;
  auto& system = files_of_system();

  system.write = [](int, const void*, std::size_t, off_t) -> ssize_t { return errno = ENOSPC, -1; };
  CHECK(how_it_fails(*l, there, here) == far->name() + ": write of 32768 bytes at 0 stopped after 0: No space left on device");
  system.write = [](int f, const void* from, std::size_t bytes, off_t at) -> ssize_t {  // in parts, and interrupted once
    static int calls = 0;
    if (++calls == 2) return errno = EINTR, -1;
    return ::pwrite(f, from, std::min(bytes, std::size_t{4096}), at);
  };
  CHECK(how_it_fails(*l, there, here).empty());
  system.read = [](int, void*, std::size_t, off_t) -> ssize_t { return errno = EIO, -1; };
  CHECK(how_it_fails(*l, here, there).find("read of 32768 bytes at 0 stopped after 0: Input/output error") != std::string::npos);
  system.read = [](int f, void* to, std::size_t bytes, off_t at) -> ssize_t {  // the file has been truncated
    return at >= 8192 ? 0 : ::pread(f, to, std::min(bytes, std::size_t{4096}), at);
  };
  CHECK(how_it_fails(*l, here, there).find("stopped after 8192: the file ends there") != std::string::npos);
  system.read = ::pread;
  CHECK(how_it_fails(*l, here, there).empty());
  CHECK(near_by->data()[32767] == 5);

  system.allocate = [](int, int, off_t, off_t) { return errno = ENOSPC, -1; };
  CHECK_THROWS_AS(far->reserve(4096), out_of_memory);
  system.allocate = [](int, int, off_t, off_t) { return errno = EOPNOTSUPP, -1; };  // fallback: set the size, check free space
  CHECK(far->reserve(4096)->bytes() == 4096);
  CHECK_THROWS_AS(far->reserve(max_bytes), out_of_memory);
  system.allocate = ::fallocate;
  system.open = [](const char* path, int flags, mode_t mode) {
    return (flags & O_TMPFILE) == O_TMPFILE ? (errno = EOPNOTSUPP, -1) : ::open(path, flags, mode);
  };
  file = file_memory(folder)->reserve(8 * block_size);  // a name that is removed at once
  CHECK(how_it_fails(*l, {file, 0, block_size}, {near_by, 0, block_size}).empty());
  system.open = [](const char*, int, mode_t) { return errno = EACCES, -1; };
  CHECK_THROWS_WITH(file_memory(folder), "no file can be made in " + folder + ": Permission denied");
}

TEST_CASE("measure_rates gives positive rates, and refuses bad arguments") {
  const auto rates = measure_rates(host_device(), {host_memory("far"), host_link(), host_link(), {}}, 1 << 20);
  CHECK(rates.to_host > 0);
  CHECK(rates.to_device > 0);
  CHECK(rates.latency >= 0);
  CHECK_THROWS_AS(measure_rates(host_device(), {}), bad_option);
  CHECK_THROWS_AS(measure_rates(host_device(), {host_memory("far"), host_link(), host_link(), {}}, 0), bad_option);
  CHECK_THROWS_AS(measure_rates(host_device(), {host_memory("far", 100), host_link(), host_link(), {}}), out_of_memory);
}

TEST_CASE("paged_memory recognises registered ranges of memory") {
  namespace paged = remat::pytorch::paged_memory;
  std::vector<char> bytes(100);
  const auto* begin = bytes.data();
  CHECK_FALSE(paged::holds(begin));
  const auto first = paged::add(begin, 50);
  CHECK(paged::holds(begin));
  CHECK(paged::holds(begin + 49));
  CHECK_FALSE(paged::holds(begin + 50));
  CHECK_FALSE(paged::holds(begin - 1));
  CHECK_FALSE(paged::holds(nullptr));
  const auto second = paged::add(begin, 60);  // at the same address, before the first range is removed
  paged::remove(begin, first);
  CHECK(paged::holds(begin + 59));
  paged::remove(begin, second);
  CHECK_FALSE(paged::holds(begin));
}

TEST_CASE("the host as a device: marks are null, and generator states can be restored") {
  auto& d = host_device();
  CHECK(d.which() == c10::kCPU);
  CHECK(d.mark() == nullptr);
  d.wait(d.mark());
  const auto state = d.random();
  const auto first = at::rand({5});
  d.random(*state);
  CHECK(at::equal(at::rand({5}), first));
}
