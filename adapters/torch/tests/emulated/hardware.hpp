// SPDX-License-Identifier: Apache-2.0
/// @file
/// The hardware under both emulated devices: memory that the host cannot touch, streams, events, copies, captured graphs, and a
/// detector of races. It knows neither PyTorch nor CUDA.
///
/// The accelerator (`accelerator.cpp`) and the CUDA runtime (`cuda_runtime.cpp`) are two interfaces to the hardware. A process
/// uses one of them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulated {

constexpr int device_count = 2;
constexpr std::size_t allocation_alignment = 512;  ///< alignment of `allocate`, bytes

/// A call that the hardware refuses. The interfaces translate it into their own errors.
struct failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct out_of_memory : failure {
  using failure::failure;
};
/// A call that is not allowed while a stream is captured.
struct capture_error : failure {
  enum class why { forbidden, invalid, unjoined, other_capture, outside, default_stream, captured_event };
  explicit capture_error(const std::string& text, why which = why::forbidden) : failure(text), reason(which) {}
  why reason;
};

/// Options of the hardware. They are read from EMULATED_<NAME> in capitals at the start; `set` changes an option at any time.
///   late              jobs begin up to this many microseconds late, at random, and their results appear when they end
///   fail              the n-th job from now on fails (1: the next job); 0: no job fails
///   hold              the n-th copy between host and device from now on (1: the next copy) and later ones wait until this is 0
///   drop_waits        1: streams ignore waits for events (a mutation that tests must catch)
///   wrong_stream      1: events are recorded on another stream (a mutation)
///   alignment         matrix products have other last bits if the address of an operand is no multiple of this; 0: never
///   workspace         bytes that each thread allocates at its first matrix product, and keeps
///   bytes             memory of each device
///   pace              bytes per second that a kernel can read and write, a lower limit of its time; 0: the time of the host
///   link              bytes per second of copies between host and device, in each direction; 0: copies take no time
///   interference      per mille by which a kernel takes longer while a copy runs
///   clock             factor on the times between events; 0: real times
///   handles           1: the accelerator allocates handles: a tensor begins at a handle, and no other allocator can be put in
///                     front; only at the start
///   lost              1: every call fails, as on a lost device
namespace option {
void set(const std::string& name, long value);
long get(const std::string& name);
}  // namespace option

// --- memory ------------------------------------------------------------------------------------------------------------------

/// Allocates memory of the device. The host crashes when it touches it.
/// @throws out_of_memory
void* allocate(int device, std::size_t bytes);
/// Frees memory, after all jobs of the device have ended.
void release(void* data);
/// Page-locked memory of the host.
void* allocate_pinned(std::size_t bytes);
void release_pinned(void* data);
/// Marks memory of the host as page-locked until `unregister_pinned`.
void register_pinned(void* data, std::size_t bytes);
void unregister_pinned(void* data);

int device_of(const void* p);   ///< -1: not an address of a device
bool is_handle(const void* p);  ///< whether `allocate` returned it as a handle
bool is_pinned(const void* p);
/// The address at which a kernel finds the bytes of an address of a device. Other addresses are returned unchanged.
char* kernel_address(const void* p);
bool is_kernel_address(const void* p);
void* device_address(const void* kernel_address);  ///< the inverse of `kernel_address`
std::size_t used_bytes(int device);                ///< allocated memory, and memory taken by others
std::size_t total_bytes(int device);
/// From now on another process takes `bytes` of the memory of the device.
void take_for_others(int device, std::size_t bytes);

// --- work --------------------------------------------------------------------------------------------------------------------

struct range {
  const void* begin;  ///< an address of a device or of the host
  std::size_t bytes;
};

/// One piece of work of a stream.
struct job {
  std::string name;
  std::vector<range> reads, writes;
  std::function<void()> run;  ///< runs on the thread of the stream; if captured, at each replay
  bool copies = false;        ///< a copy between host and device: takes the time of the link
};

/// A thread with a queue. Jobs of different streams run in any order that the events allow.
class stream;
stream& default_stream(int device);
/// A new stream, which lives until `destroy`.
stream& make_stream(int device);
void destroy(stream& s);
int device_of(const stream& s);

/// Adds a job. Reports a race unless streams, events and waits of the host order the job after all writers of its bytes and after
/// all readers of the bytes that it writes. A captured stream records the job for its graph.
/// @throws failure if an earlier job of the stream has failed
void enqueue(stream& s, job j);
bool idle(const stream& s);   ///< @throws capture_error
void synchronize(stream& s);  ///< @throws failure, capture_error
void synchronize_device(int device);

class event;
std::shared_ptr<event> make_event();
void record(event& e, stream& s);
void wait(stream& s, const event& e);                     ///< later jobs of `s` run after the event
bool reached(const event& e);                             ///< true if the event was never recorded
void synchronize(const event& e);                         ///< @throws failure, capture_error
double milliseconds(const event& from, const event& to);  ///< both events must have been reached

/// Copies in `s`. As in CUDA, the call returns only after pageable memory of the host has been read or written.
void copy(void* to, const void* from, std::size_t bytes, stream& s);
void fill(void* to, int value, std::size_t bytes, stream& s);

// --- graphs ------------------------------------------------------------------------------------------------------------------

/// Jobs that were captured instead of run.
class graph;
/// Begins a capture. Other streams join when they wait for an event of a captured stream.
/// @throws capture_error for a default stream, and for a stream that is captured already
void begin_capture(stream& s);
/// @throws capture_error if a stream was not joined back, or a call made the capture invalid
std::shared_ptr<graph> end_capture(stream& s);
bool capturing(const stream& s);
bool capturing_device(int device);                 ///< whether a stream of the device is captured
unsigned long long capture_id(const stream& s);    ///< 0: not captured
bool capture_valid(const stream& s);               ///< false if a call made the capture invalid
std::shared_ptr<graph> graph_of(const stream& s);  ///< the jobs captured so far; null: not captured
/// Makes all captures invalid that `exempt` does not cover, because the caller does something that captures forbid.
/// @throws capture_error if there was such a capture
void forbid_in_captures(const char* call, const std::function<bool(unsigned long long capture)>& exempt = {});
/// Runs all jobs of the graph, in the order of capture, as one job of `s`.
void launch(const std::shared_ptr<graph>& g, stream& s);
std::size_t size(const graph& g);  ///< the number of jobs

// --- what happened -----------------------------------------------------------------------------------------------------------

struct counts {
  long jobs = 0, copies = 0, races = 0, allocations = 0;
};
counts counted();
void reset_counts();
/// Makes streams with a failed job work again.
void clear_failures();
std::vector<std::string> race_reports();  ///< at most 100 reports: the two jobs, their streams and the bytes

}  // namespace emulated
