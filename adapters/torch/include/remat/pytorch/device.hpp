// SPDX-License-Identifier: Apache-2.0
/// @file
/// Interfaces for the machine of a step: a device, tiers of memory, and links between them.
///
/// `host_device` is the implementation for the host. Kernels run in the calling thread, and each link copies on its own thread.
/// On an accelerator (CUDA, ROCm, XPU, PrivateUse1) kernels run on PyTorch's current stream. Each link between the accelerator
/// and pinned memory of the host has its own stream.
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

/// A tier has no room for the requested bytes.
struct out_of_memory : error {
  /// @param name   name of the tier
  /// @param wanted requested bytes
  /// @param left   bytes still available
  /// @param reason message of the system, for people
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

/// A copy failed; `what()` names the bytes and the cause.
struct copy_failed : error {
  using error::error;
};

/// A device does not work any more; `what()` names the cause.
struct device_lost : error {
  using error::error;
};

/// Alignment of addresses in an arena on an accelerator, bytes. It is the alignment of PyTorch's CUDA allocator: libraries choose
/// kernels by the alignment of their operands, so another alignment may give other bits.
inline constexpr bytes_t accelerator_alignment = 512;

/// Bytes that the allocator of a device takes for a tensor of `bytes` bytes. The allocator of the host does not round up.
inline bytes_t allocated_bytes(c10::Device on, bytes_t bytes) {
  return on.is_cpu() ? bytes : (bytes + accelerator_alignment - 1) / accelerator_alignment * accelerator_alignment;
}

/// Memory reserved in a tier. A tensor in the region keeps the region alive.
class region {
 public:
  virtual ~region() = default;
  /// Address of the first byte; null if the region has no address, as in a file.
  virtual char* data() const = 0;
  /// True if `address` lies in the region.
  bool holds(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return data() <= at && at < data() + bytes();
  }
  /// Device of the address. The host can dereference addresses of the host only.
  virtual c10::Device on() const { return c10::kCPU; }
  virtual bytes_t bytes() const = 0;
  /// Bytes not given back by `discard_except`.
  virtual bytes_t resident() const { return bytes(); }
  /// Gives the bytes outside of `ranges` ({offset, bytes}) back to the tier, as far as the tier can. Their content is lost, and
  /// the region can no longer hold another step.
  virtual void discard_except(std::vector<std::pair<bytes_t, bytes_t>> /*ranges*/) {}
  /// Copies bytes [offset, offset + bytes) of the region to memory of the process (`read`), or from there (`write`).
  /// @throws copy_failed
  virtual void read(char* to, bytes_t offset, bytes_t bytes) const;
  virtual void write(const char* from, bytes_t offset, bytes_t bytes);
};

/// Part of a region.
struct block {
  std::shared_ptr<region> in;
  bytes_t offset = 0, bytes = 0;
};

/// One kind of memory: of a device, of the host, of a file.
class tier {
 public:
  virtual ~tier() = default;
  virtual std::string name() const = 0;
  /// Largest number of bytes reserved at a time; `max_bytes` if unknown.
  virtual bytes_t limit() const = 0;
  /// Alignment of addresses, offsets and sizes of copies, bytes; a power of two.
  virtual bytes_t alignment() const { return 64; }
  /// Reserves a region.
  /// @param bytes size, >= 0
  /// @throws out_of_memory
  virtual std::shared_ptr<region> reserve(bytes_t bytes) = 0;
};

/// A point in the work of a queue, such as a stream.
class event {
 public:
  virtual ~event() = default;
  /// True if the queue has done all work before the event.
  virtual bool reached() const = 0;
  /// Blocks the calling thread until the event is reached.
  /// @throws copy_failed if a copy before the event has failed
  virtual void wait() const = 0;
};
using ticket = std::shared_ptr<const event>;  ///< null counts as reached

/// A directed channel for copies between two tiers. Copies run in the order in which they were issued.
class link {
 public:
  virtual ~link() = default;
  /// Issues a copy, and returns at once. The copy begins when all of `after` are reached. If one of them fails, the copy fails
  /// with the same error. The link holds the blocks until the copy is done.
  /// @return event at the end of the copy
  /// @throws broken_contract if the blocks differ in size or reach beyond their regions, or neither has an address
  virtual ticket copy(const block& to, const block& from, std::vector<ticket> after = {}) = 0;
  /// True if copies of this link can be captured together with the kernels of this device (`device::capture`).
  virtual bool joins_graphs_of(c10::Device) const { return false; }
};

/// Memory outside a device, with a link in each direction.
struct far_memory {
  std::shared_ptr<tier> memory;          ///< null: no far memory
  std::shared_ptr<link> out, in;         ///< to far memory, from far memory
  std::optional<copy_rates> rates = {};  ///< rates for the planner; nothing: `measure_rates`
};

/// One expected allocation of a plan, and its address.
struct planned_block {
  bytes_t bytes = 0;
  int deaths = 0;         ///< number of blocks of the script, planned or not, that have died before
  char* place = nullptr;  ///< address in a region; null: the ordinary allocator chooses
  bool dies = false;      ///< the block is freed before the plan ends
};

/// While active, serves the allocations of the calling thread from a plan.
///
/// An allocation may differ from the plan: in its size, in the number of deaths before it, or by coming after the last planned
/// one. From there on the ordinary allocator serves all allocations. Results stay correct, but these count as unplanned.
class placement {
 public:
  virtual ~placement() = default;
  /// True if allocations of the process reach this object.
  virtual bool in_front() const = 0;
  /// Sets a plan for the time between `start` and `stop`.
  virtual void plan(std::span<const planned_block> blocks) = 0;
  virtual void start() = 0;
  virtual void stop() = 0;
  /// True once all blocks that die before the plan ends have been freed. Their memory may then be used again.
  virtual bool finished() const = 0;
  virtual std::size_t unplanned_allocations() const = 0;  ///< allocations outside the plan, since construction
  /// Peak of the bytes in allocations outside the plan, since `plan`. Planned blocks without a place that did not come are
  /// deducted.
  virtual bytes_t unplanned_bytes() const = 0;
};

/// A state of a random generator.
struct random_state {
  virtual ~random_state() = default;
};

/// Bytes of tensors and arenas.
struct memory_use {
  bytes_t live = 0;
  bytes_t peak = 0;      ///< peak of `live` since `device::reset_peak`
  bytes_t reserved = 0;  ///< held by PyTorch's caching allocator, unused blocks included; 0 on the host
};

/// A captured graph of kernels and copies.
class replayable {
 public:
  virtual ~replayable() = default;
  /// Launches the graph on the current stream. Random numbers continue from the current state of the generator.
  virtual void replay() = 0;
  /// Bytes that the graph holds beside the arena.
  virtual bytes_t extra_bytes() const = 0;
};

/// The processor of a step: runs its kernels, and has a tier of memory.
class device {
 public:
  virtual ~device() = default;
  virtual c10::Device which() const = 0;
  virtual tier& memory() = 0;
  /// True if a plan can choose addresses in the memory of the device. If false, its allocator chooses them
  /// (`placing::by_allocator`): live bytes are those of the plan, but the allocator may reserve more.
  virtual bool can_place() const { return true; }
  virtual std::unique_ptr<placement> place() = 0;
  /// State of the default generator of the device.
  virtual std::shared_ptr<const random_state> random() const = 0;
  /// Sets the state of the default generator.
  /// @param state of this device
  virtual void random(const random_state& state) = 0;
  /// Event after all kernels launched so far.
  virtual ticket mark() = 0;
  /// Makes all kernels launched from now on wait for `t`.
  virtual void wait(const ticket& t) = 0;
  /// As `mark`, for an event with a time stamp.
  virtual ticket mark_time() = 0;
  /// Time of the kernels between two events of `mark_time`, s; waits for `to`.
  virtual double seconds(const ticket& from, const ticket& to) = 0;
  /// To be called before kernels of a step use `r` on the current stream of this thread. Libraries set up their workspaces for
  /// this thread and stream first, since a workspace must not lie in an arena.
  /// @throws not_available while a graph is captured on that stream
  virtual void enter(region& /*r*/) {}
  /// Why `capture` cannot work; empty: it can.
  virtual std::string cannot_capture() const { return which().str() + " has no graphs"; }
  /// Records the kernels and copies that `work` launches as a graph, instead of running them. `work` runs on a stream of its own.
  /// @throws not_available, what `work` throws, c10::Error
  virtual std::unique_ptr<replayable> capture(const std::function<void()>& work);
  /// True if libraries have set up their workspaces for this thread and for the thread that runs backwards.
  virtual bool warm() const { return true; }
  /// Sets up these workspaces. Waits for the thread that runs backwards, so the caller must hold no lock that a backward takes.
  virtual void warm_up() {}
  /// Bytes of these workspaces so far. They stay allocated.
  virtual bytes_t workspaces() const { return 0; }
  /// Memory in use: on the host, the count of the `meter`; on an accelerator, the statistics of PyTorch's caching allocator,
  /// arenas included.
  virtual memory_use use() const = 0;
  /// Sets the peak to the bytes alive now; on an accelerator in PyTorch's statistics.
  virtual void reset_peak() = 0;
  /// Bytes that can still be allocated, unused blocks of the caching allocator included; `max_bytes` if unknown.
  virtual bytes_t free_bytes() const = 0;
  virtual bytes_t total_bytes() const = 0;  ///< size of its memory; `max_bytes` if unknown
  /// Gives unused blocks of the caching allocator back to the device.
  virtual void empty_cache() {}
  /// Why the device runs no kernels any more; empty: it works. Waits for its kernels.
  virtual std::string lost() const { return ""; }
};

/// The host as a device.
device& host_device();

/// The device for tensors on `which`: the host, or an accelerator.
/// @throws not_available with one sentence that names the cause
device& device_of(c10::Device which);

/// Checks, in a handler of another exception, whether the device was lost.
/// @throws device_lost if `on` runs no kernels any more
void throw_if_lost(c10::Device on);

/// A device of this machine, and whether steps can run on it.
struct device_status {
  c10::Device which = c10::kCPU;
  std::string name;       ///< name of the card
  bytes_t total = 0;      ///< size of its memory
  bytes_t available = 0;  ///< bytes free now, for all processes
  std::string problem;    ///< why steps cannot use it; empty: they can
};

/// The host and all accelerators that PyTorch knows. Initialises the accelerators that are usable.
std::vector<device_status> devices();

/// Memory of the host in which at most `limit` bytes are reserved at a time.
std::shared_ptr<tier> host_memory(std::string name, bytes_t limit = max_bytes);

/// A link between two regions, at least one of which has an address. Copies run on a thread of the link, which starts with the
/// first copy. Copies that involve another device go through 4 MiB of the host.
std::unique_ptr<link> host_link();

/// Memory in files without names. Only this process can read them, and a file goes with its region. `reserve` allocates all
/// space in the file system. Copies bypass the page cache where the file system can do that. A region belongs to the process that
/// reserved it.
/// @param folder a folder on the disk to use
/// @param limit  largest number of bytes reserved at a time
/// @throws bad_option if no file can be made there; out_of_memory if the disk is full
std::shared_ptr<tier> file_memory(const std::string& folder, bytes_t limit = max_bytes);

/// `file_memory` with a link in each direction.
/// @param folder as for `file_memory`
/// @param limit  as for `file_memory`
/// @throws bad_option, out_of_memory as `file_memory`
/// @code
/// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "2GiB", .far = remat::pytorch::on_disk("/scratch")});
/// @endcode
far_memory on_disk(const std::string& folder, bytes_t limit = max_bytes);

/// Memory of the host with a link in each direction, for steps on `which`. For an accelerator the memory is pinned, in one piece
/// of the bytes that a plan asks for, and each direction has a stream.
/// @param which device of the steps
/// @param limit largest number of bytes reserved at a time
/// @throws not_available, bad_option
/// @code
/// auto net = remat::pytorch::wrap(gpt, ids, {.budget = "2GiB", .far = remat::pytorch::on_host(c10::kCUDA, bytes_t{8} << 30)});
/// @endcode
far_memory on_host(c10::Device which = c10::kCPU, bytes_t limit = max_bytes);

/// Measures copy rates for the planner: nine tenths of the rates with copies in both directions at once.
/// @param d      the device
/// @param far    far memory with links
/// @param sample bytes copied in each direction, > 0; less if the limit of `far` is smaller
/// @throws out_of_memory, copy_failed
copy_rates measure_rates(device& d, const far_memory& far, bytes_t sample = 8 << 20);

}  // namespace remat::pytorch
