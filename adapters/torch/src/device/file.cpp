// SPDX-License-Identifier: Apache-2.0
#include "file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include <remat/pytorch/paged_memory.hpp>

#include "tier.hpp"

namespace remat::pytorch {
namespace {

constexpr bytes_t unit_of_files = 4096;

/// Owner of a file without a name.
class nameless_file {
 public:
  nameless_file(const std::string& folder, bool direct) : number_(open_nameless_file(folder, direct)) {}
  ~nameless_file() { close(number_); }
  nameless_file(const nameless_file&) = delete;
  nameless_file& operator=(const nameless_file&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

class region_of_file final : public region {
 public:
  region_of_file(const std::string& folder, std::string name, bytes_t bytes, bool direct)
      : name_(std::move(name)), bytes_(bytes), file_(folder, direct) {
    if (bytes == 0) return;
    int failed = EINTR;
    while (failed == EINTR) failed = files_of_system().allocate(file_.number(), 0, 0, bytes) == 0 ? 0 : errno;
    if (failed == EOPNOTSUPP) failed = free_bytes() < bytes ? ENOSPC : ftruncate(file_.number(), bytes) == 0 ? 0 : errno;
    if (failed != 0) throw no_room(failed, bytes);
  }

  char* data() const override { return nullptr; }
  bytes_t bytes() const override { return bytes_; }
  int number() const { return file_.number(); }
  /// Reads through another descriptor of the same file.
  void read_by(int number, char* to, bytes_t offset, bytes_t bytes) const {
    transfer("read", offset, bytes,
             [&](bytes_t done, std::size_t left) { return files_of_system().read(number, to + done, left, offset + done); });
  }
  /// The error for `bytes` that cannot be set aside: the disk is full, or the system's reason.
  out_of_memory no_room(int reason, bytes_t bytes) const {
    const bool full = reason == ENOSPC;
    return {name_, bytes, std::min(bytes, full ? free_bytes() : 0), full ? "" : std::strerror(reason)};
  }
  bytes_t free_bytes() const {
    struct statvfs s {};
    return fstatvfs(file_.number(), &s) == 0 ? static_cast<bytes_t>(s.f_bavail) * static_cast<bytes_t>(s.f_frsize) : 0;
  }

  void read(char* to, bytes_t offset, bytes_t bytes) const override { read_by(file_.number(), to, offset, bytes); }
  void write(const char* from, bytes_t offset, bytes_t bytes) override {
    transfer("write", offset, bytes, [&](bytes_t done, std::size_t left) {
      return files_of_system().write(file_.number(), from + done, left, offset + done);
    });
  }

 private:
  /// Repeats `call` until all bytes are transferred; one call may transfer only a part.
  template <class Call>
  void transfer(const char* what, bytes_t offset, bytes_t bytes, const Call& call) const {
    constexpr bytes_t most = 16 << 20;  // bytes per call
    const auto fail = [&](bytes_t done, const std::string& why) {
      throw copy_failed(name_ + ": " + what + " of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                        " stopped after " + std::to_string(done) + ": " + why);
    };
    if (getpid() != process_) fail(0, "the file belongs to the process that this one was forked from");
    for (bytes_t done = 0; done < bytes;) {
      const auto moved = call(done, static_cast<std::size_t>(std::min(most, bytes - done)));
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) fail(done, std::strerror(errno));
      if (moved == 0) fail(done, "the file ends there");
      done += moved;
    }
  }

  std::string name_;
  bytes_t bytes_;
  nameless_file file_;
  pid_t process_ = getpid();
};

class mapped_file final : public mapped_region {
 public:
  mapped_file(const std::string& folder, const std::string& name, bytes_t bytes)
      : name_(name), file_(folder, name, bytes, false) {
    if (bytes == 0) return;
    // Without fallocate, this writes blocks one by one. A page without a block on a full disk would kill its writer.
    if (const int failed = posix_fallocate(file_.number(), 0, bytes)) throw file_.no_room(failed, bytes);
    void* pages = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file_.number(), 0);
    if (pages == MAP_FAILED) throw out_of_memory(name, bytes, 0, std::string("it cannot be mapped: ") + std::strerror(errno));
    pages_ = static_cast<char*>(pages);
    mark_ = paged_memory::add(pages_, bytes);
  }
  ~mapped_file() override {
    if (pages_ == nullptr) return;
    paged_memory::remove(pages_, mark_);
    if (direct_ >= 0) close(direct_);
    munmap(pages_, static_cast<std::size_t>(file_.bytes()));
  }
  mapped_file(const mapped_file&) = delete;
  mapped_file& operator=(const mapped_file&) = delete;

  char* data() const override { return pages_; }
  bytes_t bytes() const override { return file_.bytes(); }
  void read(char* to, bytes_t offset, bytes_t bytes) const override { file_.read(to, offset, bytes); }
  void write(const char* from, bytes_t offset, bytes_t bytes) override { file_.write(from, offset, bytes); }

  void expect(bytes_t offset, bytes_t bytes) override { posix_fadvise(file_.number(), offset, bytes, POSIX_FADV_WILLNEED); }
  void fetch(bytes_t offset, bytes_t bytes) override {
    expect(offset, bytes);
    call("read", bytes, [&] { return files_of_system().populate(pages_ + offset, static_cast<std::size_t>(bytes)); });
  }
  void read_once(char* to, bytes_t offset, bytes_t bytes) override {
    const auto first = offset / unit_of_files * unit_of_files,
               last = (offset + bytes + unit_of_files - 1) / unit_of_files * unit_of_files;
    std::call_once(opened_, [&] { open_past_cache(); });
    const auto whole = direct_ >= 0 && offset == first && reinterpret_cast<std::uintptr_t>(to) % unit_of_files == 0
                           ? bytes / unit_of_files * unit_of_files
                           : 0;
    if (whole > 0) file_.read_by(direct_, to, offset, whole);
    if (whole < bytes) file_.read(to + whole, offset + whole, bytes - whole);
    evict(first, last - first);
  }
  void evict(bytes_t offset, bytes_t bytes) override {
    call("write", bytes, [&] { return files_of_system().write_back(file_.number(), offset, bytes); });
    madvise(pages_ + offset, static_cast<std::size_t>(bytes), MADV_DONTNEED);  // drops them from this process
    posix_fadvise(file_.number(), offset, bytes, POSIX_FADV_DONTNEED);         // and from the page cache
  }

 private:
  /// Opens `direct_`, if the file system supports reads that bypass the page cache.
  void open_past_cache() {
    const std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(unit_of_files, unit_of_files)),
                                                        std::free);
    direct_ = ::open(("/proc/self/fd/" + std::to_string(file_.number())).c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (direct_ < 0 || ::pread(direct_, memory.get(), unit_of_files, 0) == unit_of_files) return;
    close(std::exchange(direct_, -1));
  }

  template <class Call>
  void call(const char* what, bytes_t bytes, const Call& of_system) const {
    while (of_system() < 0)
      if (errno != EINTR && errno != EAGAIN)
        throw copy_failed(name_ + ": " + what + " of " + std::to_string(bytes) + " bytes failed: " + std::strerror(errno));
  }

  std::string name_;
  region_of_file file_;
  char* pages_ = nullptr;
  std::once_flag opened_;
  int direct_ = -1;  ///< descriptor that bypasses the page cache, or -1; opened on demand, as few files need it
  std::uint64_t mark_ = 0;
};

class memory_in_mapped_files final : public limited_tier {
 public:
  memory_in_mapped_files(std::string folder, bytes_t limit)
      : limited_tier("the disk at " + folder, limit), folder_(std::move(folder)) {
    static_cast<void>(mapped_file(folder_, name(), unit_of_files));  // fails now if the disk is full
  }
  bytes_t alignment() const override { return unit_of_files; }

 private:
  std::unique_ptr<region> make(bytes_t bytes) override { return std::make_unique<mapped_file>(folder_, name(), bytes); }
  std::string folder_;
};

class memory_of_files final : public limited_tier {
 public:
  memory_of_files(std::string folder, bytes_t limit)
      : limited_tier("the disk at " + folder, limit), folder_(std::move(folder)), direct_(allows_direct()) {}
  bytes_t alignment() const override { return unit_of_files; }

 private:
  std::unique_ptr<region> make(bytes_t bytes) override {
    return std::make_unique<region_of_file>(folder_, name(), bytes, direct_);
  }
  /// True if the file system supports copies of whole pages that bypass the page cache.
  bool allows_direct() const {
    const std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(unit_of_files, unit_of_files)),
                                                        std::free);
    if (!memory) throw std::bad_alloc();
    std::memset(memory.get(), 0, unit_of_files);
    try {
      region_of_file probe(folder_, name(), unit_of_files, true);
      probe.write(memory.get(), 0, unit_of_files);
      probe.read(memory.get(), 0, unit_of_files);
      return true;
    } catch (const copy_failed&) {
      return false;
    }
  }

  std::string folder_;
  bool direct_;
};

int write_dirty(int file, off_t offset, off_t bytes) {
  const int done =
      sync_file_range(file, offset, bytes, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  return done < 0 && (errno == ENOSYS || errno == EINVAL || errno == ESPIPE) ? fdatasync(file) : done;
}

/// Reports a failing disk as an error, instead of the signal SIGBUS. On a kernel without this call, the access may raise it.
int populate_pages(void* begin, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr int advice = MADV_POPULATE_WRITE;
#else
  constexpr int advice = 23;  // Linux 5.14, also where the headers are older
#endif
  const int done = madvise(begin, bytes, advice);
  if (done == 0 || errno == EINVAL) return 0;
  if (errno == EFAULT) errno = EIO;  // an access would have raised SIGBUS
  return -1;
}

}  // namespace

file_calls& files_of_system() {
  static file_calls calls{::pread,     ::pwrite,
                          ::fallocate, [](const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); },
                          write_dirty, populate_pages};
  return calls;
}

int open_nameless_file(const std::string& folder, bool direct) {
  const auto& system = files_of_system();
  const int flags = O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0);
  auto number = system.open(folder.c_str(), flags | O_TMPFILE | O_EXCL, 0600);
  if (number < 0 && direct && errno == EINVAL)
    number = system.open(folder.c_str(), (flags & ~O_DIRECT) | O_TMPFILE | O_EXCL, 0600);
  if (number < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {  // not supported by this file system
    auto name = folder + "/remat-XXXXXX";
    number = mkostemp(name.data(), flags & (O_CLOEXEC | O_DIRECT));
    if (number < 0 && direct && errno == EINVAL) number = mkostemp(name.data(), O_CLOEXEC);
    if (number >= 0) unlink(name.c_str());
  }
  if (number < 0 && (errno == ENOSPC || errno == EDQUOT)) throw out_of_memory("the disk at " + folder, unit_of_files, 0);
  if (number < 0) throw bad_option("no file can be made in " + folder + ": " + std::strerror(errno));
  return number;
}

std::shared_ptr<tier> mapped_files(const std::string& folder, bytes_t limit) {
  return std::make_shared<memory_in_mapped_files>(folder, limit);
}

std::shared_ptr<tier> file_memory(const std::string& folder, bytes_t limit) {
  return std::make_shared<memory_of_files>(folder, limit);
}

}  // namespace remat::pytorch
