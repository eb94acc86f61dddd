// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a step runs on: a device, memory on it and elsewhere, and the ways between.
///
/// `host_device` is the implementation for the host: kernels run in the calling thread, its memory is the process's, and copies
/// to and from other memory run on a thread of each link. On an accelerator (CUDA, ROCm, XPU, PrivateUse1) kernels run on
/// PyTorch's current stream, and copies to and from pinned memory of the host on a stream of each link.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::pytorch {

/// A tier has no room for what was asked of it.
struct out_of_memory : error {
  /// @param reason the system's, for people
  out_of_memory(const std::string& name, bytes_t wanted, bytes_t left, const std::string& reason = "")
      : error(name + " has no room for " + std::to_string(wanted) + " bytes: " + std::to_string(left) + " are left" +
              (reason.empty() ? "" : "; ") + reason),
        tier(name),
        asked(wanted),
        available(left),
        why(reason) {}
  std::string tier;
  bytes_t asked, available;
  std::string why;
};

/// A copy could not be made; `what()` names the bytes and why.
struct copy_failed : error {
  using error::error;
};

/// A device does not work any more; `what()` says why.
struct device_lost : error {
  using error::error;
};

/// Multiple of every address of an arena on an accelerator, bytes: that of blocks of PyTorch's CUDA allocator. Libraries choose
/// kernels by the alignment of their operands, so another one may give other bits.
inline constexpr bytes_t accelerator_alignment = 512;

/// What the allocator of a device takes for a tensor of so many bytes. The host's takes just these.
inline bytes_t allocated_bytes(c10::Device on, bytes_t bytes) {
  return on.is_cpu() ? bytes : (bytes + accelerator_alignment - 1) / accelerator_alignment * accelerator_alignment;
}

/// Memory reserved in a tier. Whoever holds a tensor in it holds it as well.
class region {
 public:
  virtual ~region() = default;
  /// Its first byte; null if it has no address, as in a file.
  virtual char* data() const = 0;
  /// The address lies in it.
  bool holds(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return data() <= at && at < data() + bytes();
  }
  /// Whose address that is: the host can follow its own only.
  virtual c10::Device on() const { return c10::kCPU; }
  virtual bytes_t bytes() const = 0;
  /// Bytes not given back.
  virtual bytes_t resident() const { return bytes(); }
  /// Gives what is outside of `ranges` ({offset, bytes}) back as far as the tier can; its content is lost, and the region can no
  /// longer hold another step.
  virtual void discard_except(std::vector<std::pair<bytes_t, bytes_t>> /*ranges*/) {}
  /// Copies bytes [offset, offset + bytes) to memory of the process, and from there.
  /// @throws copy_failed
  virtual void read(char* to, bytes_t offset, bytes_t bytes) const;
  virtual void write(const char* from, bytes_t offset, bytes_t bytes);
};

/// Part of a region.
struct block {
  std::shared_ptr<region> in;
  bytes_t offset = 0, bytes = 0;
};

/// Memory of one kind: of a device, of the host, of a file.
class tier {
 public:
  virtual ~tier() = default;
  virtual std::string name() const = 0;
  /// Bytes that may be reserved at a time; `max_bytes`: nobody says.
  virtual bytes_t limit() const = 0;
  /// Addresses, offsets and sizes of copies are multiples of it, bytes; a power of two.
  virtual bytes_t alignment() const { return 64; }
  /// @param bytes >= 0
  /// @throws out_of_memory
  virtual std::shared_ptr<region> reserve(bytes_t bytes) = 0;
};

/// A moment that work given to a queue reaches.
class event {
 public:
  virtual ~event() = default;
  /// The moment has passed.
  virtual bool reached() const = 0;
  /// Holds the calling thread until then.
  /// @throws copy_failed if what comes before has failed
  virtual void wait() const = 0;
};
using ticket = std::shared_ptr<const event>;  ///< null: passed long ago

/// A way for bytes from one tier to another. Copies are made in the order in which they were given.
class link {
 public:
  virtual ~link() = default;
  /// Copies once all of `after` are reached; returns at once. The blocks are held until it is done; a failure of one of `after`
  /// is passed on.
  /// @return the moment at which it is done
  /// @throws broken_contract if the blocks differ in size or reach beyond their regions, or neither has an address
  virtual ticket copy(const block& to, const block& from, std::vector<ticket> after = {}) = 0;
  /// Its copies can be captured with the kernels of this device (`device::capture`).
  virtual bool joins_graphs_of(c10::Device) const { return false; }
};

/// Memory beyond a device, and the ways there and back.
struct far_memory {
  std::shared_ptr<tier> memory;          ///< null: there is none
  std::shared_ptr<link> out, in;         ///< to it, from it
  std::optional<copy_rates> rates = {};  ///< that plans rely on; nothing: `measure_rates`
};

/// Where the next allocation is expected to go.
struct planned_block {
  bytes_t bytes = 0;
  int deaths = 0;         ///< planned or other blocks of the script that have died before
  char* place = nullptr;  ///< in a region, or null: the ordinary allocator
  bool dies = false;      ///< before the plan ends
};

/// Answers the allocations of the calling thread, while it is active, from a plan.
///
/// An allocation that differs from the plan (in size, in the number of deaths before it, or beyond its end) and all that follow
/// come from the ordinary allocator: never wrong, but counted as unplanned.
class placement {
 public:
  virtual ~placement() = default;
  /// Allocations do come here.
  virtual bool in_front() const = 0;
  /// Begins a plan; it takes effect between `start` and `stop`.
  virtual void plan(std::span<const planned_block> blocks) = 0;
  virtual void start() = 0;
  virtual void stop() = 0;
  /// True once all blocks have been freed that die before the plan ends. Their memory may then be used again.
  virtual bool finished() const = 0;
  virtual std::size_t unplanned() const = 0;  ///< allocations outside the plan, since construction
};

/// A state of a random generator.
struct random_state {
  virtual ~random_state() = default;
};

/// Bytes of tensors and arenas.
struct memory_use {
  bytes_t live = 0;
  bytes_t peak = 0;      ///< the most since `device::reset_peak`
  bytes_t reserved = 0;  ///< held by PyTorch's caching allocator, unused blocks included; 0 on the host
};

/// Kernels and copies that were captured.
class replayable {
 public:
  virtual ~replayable() = default;
  /// Gives them to the current stream. Random numbers go on from where the generator is then.
  virtual void replay() = 0;
  /// Bytes that the graph holds beside the arena.
  virtual bytes_t extra_bytes() const = 0;
};

/// Where the kernels of a step run.
class device {
 public:
  virtual ~device() = default;
  virtual c10::Device which() const = 0;
  virtual tier& memory() = 0;
  /// A plan can choose addresses in its memory. If not, its allocator chooses them (`placing::by_allocator`): the bytes that are
  /// alive are still those of the plan, but what the allocator reserves for them is not.
  virtual bool can_place() const { return true; }
  virtual std::unique_ptr<placement> place() = 0;
  /// The state of its default generator.
  virtual std::shared_ptr<const random_state> random() const = 0;
  /// @param state of this device
  virtual void random(const random_state& state) = 0;
  /// The moment at which all kernels so far are done.
  virtual ticket mark() = 0;
  /// Kernels from now on run after `t`.
  virtual void wait(const ticket& t) = 0;
  /// The same moment, one that `seconds` can tell from others.
  virtual ticket mark_time() = 0;
  /// Time of the kernels between two moments of `mark_time`, s; waits for `to`.
  virtual double seconds(const ticket& from, const ticket& to) = 0;
  /// The kernels of a step are about to use `r`, on the current stream of this thread. Libraries set up their workspaces for
  /// this thread and stream first, since a workspace must not lie in an arena.
  /// @throws not_available while a graph is captured on that stream
  virtual void enter(region& /*r*/) {}
  /// Why `capture` cannot work; empty: it can.
  virtual std::string cannot_capture() const { return which().str() + " has no graphs"; }
  /// Keeps the kernels and copies that `work` gives to the device, instead of running them. `work` runs on a stream of its own.
  /// @throws not_available, what `work` throws, c10::Error
  virtual std::unique_ptr<replayable> capture(const std::function<void()>& work);
  /// Libraries have their workspaces for this thread and for the thread that runs backwards.
  virtual bool warm() const { return true; }
  /// Sets them up. It waits for the thread that runs backwards, so the caller must hold no lock that a backward may ask for.
  virtual void warm_up() {}
  /// Bytes of these workspaces so far. They stay allocated.
  virtual bytes_t workspaces() const { return 0; }
  /// What is taken of its memory: on the host, what the `meter` counts; on an accelerator, the statistics of PyTorch's caching
  /// allocator, arenas included.
  virtual memory_use use() const = 0;
  /// Makes the peak what is alive now; on an accelerator that of PyTorch's statistics.
  virtual void reset_peak() = 0;
  /// Bytes that can still be allocated, with what the caching allocator holds unused; `max_bytes` where nobody says.
  virtual bytes_t free_bytes() const = 0;
  virtual bytes_t total_bytes() const = 0;  ///< of its memory; `max_bytes` where nobody says
  /// Gives unused blocks of the caching allocator back to the device.
  virtual void empty_cache() {}
  /// Why nothing runs on the device any more; empty: it works. Waits for its kernels.
  virtual std::string lost() const { return ""; }
};

/// The host as a device.
device& host_device();

/// The device that tensors on `which` need: the host, or an accelerator.
/// @throws not_available with one sentence that names the cause
device& device_of(c10::Device which);

/// For use where an exception is handled.
/// @throws device_lost if nothing runs on `on` any more
void throw_if_lost(c10::Device on);

/// A device of this machine, and whether steps can run on it.
struct device_status {
  c10::Device which = c10::kCPU;
  std::string name;       ///< of the card
  bytes_t total = 0;      ///< of its memory
  bytes_t available = 0;  ///< free now, for everybody
  std::string problem;    ///< why it cannot be used; empty: it can
};

/// The host and all accelerators that PyTorch knows. It initialises the accelerators that are usable.
std::vector<device_status> devices();

/// Memory of the host in which at most `limit` bytes are reserved at a time.
std::shared_ptr<tier> host_memory(std::string name, bytes_t limit = max_bytes);

/// A link between regions of which one at least has an address, on a thread of its own that is there from the first copy on.
/// What lies on another device goes through 4 MiB of the host.
std::unique_ptr<link> host_link();

/// Memory in files that have no name, are readable by nobody else, and are gone with their regions. The file system sets all
/// space aside when it is reserved, and copies pass its cache by, where it can do that. A region belongs to the process that
/// reserved it.
/// @param folder on the disk that is meant
/// @param limit  bytes reserved at a time
/// @throws bad_option if no file can be made there; out_of_memory if the disk is full
std::shared_ptr<tier> file_memory(const std::string& folder, bytes_t limit = max_bytes);

/// `file_memory` with a link each way.
/// @code
/// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "2GiB", .far = remat::pytorch::on_disk("/scratch")});
/// @endcode
far_memory on_disk(const std::string& folder, bytes_t limit = max_bytes);

/// Memory of the host with a link each way, for steps on `which`. For an accelerator it is pinned, in one piece of the bytes that
/// a plan asks for, with a stream each way.
/// @param limit bytes reserved at a time
/// @throws not_available, bad_option
/// @code
/// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "2GiB", .far = remat::pytorch::on_host(c10::kCUDA, bytes_t{8} << 30)});
/// @endcode
far_memory on_host(c10::Device which = c10::kCPU, bytes_t limit = max_bytes);

/// What `far` can be relied on for: nine tenths of what copies both ways at once reach.
/// @param d       the device
/// @param far     not empty
/// @param sample  bytes copied each way, > 0; less where the limit of `far` asks for it
/// @throws out_of_memory, copy_failed
copy_rates measure_rates(device& d, const far_memory& far, bytes_t sample = 8 << 20);

}  // namespace remat::pytorch
